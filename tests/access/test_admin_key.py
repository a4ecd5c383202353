from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvroute.access.admin_key import key_lines, key_path, read_or_create_key, user_state_folder
from kvroute.errors import ConfigError


def test_keys_are_lines():
    assert key_lines("# new\n one \n\r\ntwo words\n") == ("one", "two words")
    assert key_lines("# only a comment\n") == ()


def test_the_users_state_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = tmp_path / ".local" / "state" / "kvroute"

    assert user_state_folder({"XDG_STATE_HOME": "/var/lib"}) == Path("/var/lib/kvroute")
    assert user_state_folder({}) == at_home
    assert user_state_folder({"XDG_STATE_HOME": "relative"}) == at_home


def test_the_error_for_a_user_without_a_home_names_the_option(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)

    with pytest.raises(ConfigError, match=r"^admin\.api_key_file: is not set"):
        user_state_folder({})


def test_a_key_is_made_once_for_each_port(tmp_path):
    folder = tmp_path / "not" / "there"

    first, second = (read_or_create_key(key_path(folder, port)) for port in (1, 2))

    assert first != second
    assert read_or_create_key(key_path(folder, 1)) == first
    assert len(key_lines(first)[0]) >= 43  # 256 bits
    assert sorted(path.name for path in folder.iterdir()) == ["admin-key-1", "admin-key-2"]


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_only_the_owner_may_read_it_whatever_the_umask(tmp_path, umask):
    path = key_path(tmp_path, 1)
    before = os.umask(umask)
    try:
        read_or_create_key(path)
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_gateways_that_start_together_get_one_key(tmp_path):
    path = key_path(tmp_path / "folder", 1)
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: read_or_create_key(path), range(64)))

    assert len(keys) == 1
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_key_file_made_between_the_check_and_the_creation_wins(tmp_path, monkeypatch):
    path = key_path(tmp_path, 1)
    link = os.link

    def late(source, target):
        path.touch(mode=0o600)
        path.write_text("the-others-0123456\n")
        link(source, target)

    monkeypatch.setattr(os, "link", late)

    assert read_or_create_key(path) == "the-others-0123456\n"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602])
def test_a_file_that_other_users_may_read_or_write_is_refused(tmp_path, mode):
    path = key_path(tmp_path, 1)
    path.write_text("known-key\n")
    path.chmod(mode)

    with pytest.raises(ConfigError, match=f"mode {mode:04o}") as error:
        read_or_create_key(path)

    assert str(path) in str(error.value)
    assert "known-key" not in str(error.value)
    assert path.read_text() == "known-key\n"


def test_links_and_non_files_are_refused(tmp_path):
    target = tmp_path / "target"
    target.touch(mode=0o600)
    target.write_text("key")
    key_path(tmp_path, 1).symlink_to(target)
    key_path(tmp_path, 2).symlink_to(tmp_path / "nothing")
    os.mkfifo(key_path(tmp_path, 3), 0o600)
    key_path(tmp_path, 4).mkdir(mode=0o700)

    for port in (1, 2, 3, 4):
        with pytest.raises(ConfigError, match="symbolic link" if port < 3 else "regular file"):
            read_or_create_key(key_path(tmp_path, port))
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_a_file_without_a_key_is_refused(tmp_path, text):
    path = key_path(tmp_path, 1)
    path.touch(mode=0o600)
    path.write_text(text)

    with pytest.raises(ConfigError, match="holds no key"):
        read_or_create_key(path)


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    path = key_path(tmp_path, 1)
    read_or_create_key(path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(ConfigError, match="belongs to user"):
        read_or_create_key(path)


def test_a_folder_in_which_everybody_may_replace_files_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="every user may replace"):
        read_or_create_key(key_path(tmp_path, 1))

    tmp_path.chmod(0o1777)  # as /tmp
    read_or_create_key(key_path(tmp_path, 1))


def test_a_place_that_cannot_be_written_is_an_error_that_names_the_option(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"^admin.api_key_file: .*File exists; set it, or --state-dir"):
        read_or_create_key(key_path(tmp_path / "file", 1))
