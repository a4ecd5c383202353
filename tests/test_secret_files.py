"""Files with secrets: what is refused, and what is a warning."""

from __future__ import annotations

import os

import pytest

from kvroute.secret_files import _doubt, writers_problem


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "key"
    file.write_text("secret")
    return file


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o644, 0o444, 0o664])
def test_a_file_that_others_may_only_read_is_used_without_a_word(file, mode, caplog):
    file.chmod(mode)

    assert (writers_problem(file), caplog.messages) == ("", [])


@pytest.mark.parametrize("mode", [0o666, 0o602, 0o777])
def test_a_file_that_every_user_may_write_is_refused(file, mode):
    file.chmod(mode)

    assert writers_problem(file) == (
        f"{file} has mode {mode:04o}: every user may have written it. Check it, then: chmod o-w {file}"
    )


def test_the_file_behind_a_link_counts(file, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(file)
    file.chmod(0o666)

    assert "has mode 0666" in writers_problem(link)


def test_a_pipe_and_an_absent_file_are_not_checked(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o666)
    (tmp_path / "pipe").chmod(0o666)

    assert [writers_problem(tmp_path / name) for name in ("pipe", "absent")] == ["", ""]


def test_a_folder_in_which_every_user_may_replace_the_file_is_a_warning(file, tmp_path, caplog):
    tmp_path.chmod(0o777)
    assert writers_problem(file) == ""
    (line,) = caplog.messages
    assert line.endswith("every user may replace it, because its folder has mode 0777")

    caplog.clear()
    tmp_path.chmod(0o1777)  # as /tmp
    assert (writers_problem(file), caplog.messages) == ("", [])
    tmp_path.chmod(0o700)


def facts(*, uid: int, gid: int) -> os.stat_result:
    return os.stat_result((0o100660, 1, 1, 1, uid, gid, 6, 0, 0, 0))


def test_an_owner_or_a_group_of_others_is_a_warning():
    own, other = os.geteuid(), os.geteuid() + 1

    assert _doubt(facts(uid=other, gid=0), 0o640, 0o700).startswith(f"it belongs to user {other}")
    assert _doubt(facts(uid=own, gid=os.getegid() + 1), 0o660, 0o700).startswith(
        "it has mode 0660, and group"
    )
    assert _doubt(facts(uid=own, gid=os.getegid() + 1), 0o640, 0o700) == ""
    assert _doubt(facts(uid=0, gid=os.getegid()), 0o660, 0o700) == ""
