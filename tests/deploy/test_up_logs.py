from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.deploy import up as following_module
from kvroute.deploy.up import LogTail, Screen, last_lines, showing_logs


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "redis.log"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_whole_lines_come_once(log: Path) -> None:
    file = LogTail(log)
    assert file.new_lines() == []
    append(log, "one\ntwo\r\nthr")
    assert file.new_lines() == ["one", "two"]
    assert file.new_lines() == []
    append(log, "ee\n")
    assert file.new_lines() == ["three"]


def test_earlier_lines_are_left_out(log: Path) -> None:
    append(log, "old\n")
    file = LogTail.at_end(log)
    append(log, "new\n")

    assert file.new_lines() == ["new"]


def test_a_truncated_file_is_read_from_its_start(log: Path) -> None:
    append(log, "a long line of before\n")
    file = LogTail.at_end(log)
    log.write_text("new\n")

    assert file.new_lines() == ["new"]


def test_a_reader_that_is_far_behind_skips_lines_and_reports_it(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following_module, "MAX_BEHIND_BYTES", 8)
    append(log, "12345\n12345\n12345\n")

    skipped_note, *lines = LogTail(log).new_lines()

    assert skipped_note == f"... 10 more bytes are in {log}"
    assert lines == ["5", "12345"]


def test_a_line_without_an_end_is_not_kept_for_ever(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following_module, "CHUNK_BYTES", 4)
    append(log, "123456")

    assert LogTail(log).new_lines() == ["1234"]


def test_the_last_lines_end_where_the_next_begin(log: Path) -> None:
    append(log, "one\ntwo\nthree\nfo")
    lines, end = last_lines(log, 2)
    assert lines == ["two", "three"]
    append(log, "ur\n")

    assert LogTail(log, offset=end).new_lines() == ["four"]
    assert last_lines(log, 0)[0] == []
    assert last_lines(log.with_name("missing"), 5) == ([], 0)


def test_lines_follow_their_process_name_and_cannot_move_the_cursor() -> None:
    console = Console(file=StringIO(), width=40)

    Screen(console, ["redis", "gateway"]).show("redis", ["\x1b[31mred\x1b[0m [bold]\x1b[2J", "x" * 60])

    assert console.file.getvalue() == f"redis   | red [bold]\nredis   | {'x' * 60}\n"  # type: ignore[attr-defined]


async def test_logs_are_followed_to_their_ends(tmp_path: Path, clock: SystemClock) -> None:
    console = Console(file=StringIO(), width=80)
    logs = {name: tmp_path / f"{name}.log" for name in ("a", "b")}
    append(logs["a"], "before\n")

    async with showing_logs(console, logs, clock=clock):
        append(logs["a"], "during\n")
        await until(lambda: "during" in console.file.getvalue())  # type: ignore[attr-defined]
        append(logs["b"], "at the end\n")

    assert console.file.getvalue() == "a | during\nb | at the end\n"  # type: ignore[attr-defined]
