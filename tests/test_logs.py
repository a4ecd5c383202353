"""The log's handler, and what happens to lines that cannot be written."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator

import pytest

from kvroute.logs import (
    ACCESS,
    LoggingOptions,
    LogHandler,
    QueuedWriter,
    configure,
    drain,
    failed_lines,
)


class Stream(io.StringIO):
    """A text stream; while `error` is set, writing raises it. `space`: characters that it still takes."""

    error: Exception | None = None
    space: int | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        if self.space is not None:
            if len(text) > self.space:
                raise OSError(28, "No space left on device")
            self.space -= len(text)
        return super().write(text)


@pytest.fixture
def stream() -> Iterator[Stream]:
    """The stream of kvroute's log."""
    loggers = [logging.getLogger(name) for name in ("kvroute", "uvicorn")]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    stream = Stream()
    loggers[0].handlers = []  # the count of an earlier handler is kept
    configure(LoggingOptions(), stream)
    yield stream
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_lines_that_cannot_be_written_are_counted_and_reported_with_the_next_one(
    stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("kvroute.test")
    log.info("first")
    stream.error = OSError(28, "No space left on device")
    log.info("second")
    log.info("third")
    stream.error = None
    log.info("fourth")
    log.info("fifth")

    assert [line.split(" kvroute.")[1] for line in stream.getvalue().splitlines()] == [
        "test first",
        "test fourth",
        "logs 2 lines of the log could not be written when they came: No space left on device",
        "test fifth",
    ]
    assert failed_lines() == 2
    assert capsys.readouterr().err == ""


def test_a_report_that_cannot_be_written_either_is_part_of_the_next_report(stream: Stream) -> None:
    log = logging.getLogger("kvroute.test")
    stream.error = OSError(28, "No space left on device")
    log.info("first")
    log.info("second")
    stream.error, stream.space = None, len("2026-01-01T00:00:00.000Z INFO    kvroute.test third\n") + 10
    log.info("third")
    stream.space = None
    log.info("fourth")

    assert "logs 3 lines of the log could not be written" in stream.getvalue()


def test_a_new_configuration_of_the_log_keeps_the_count(stream: Stream) -> None:
    stream.error = OSError(28, "No space left on device")
    logging.getLogger("kvroute.test").info("lost")

    configure(LoggingOptions(format="json"), io.StringIO())

    assert failed_lines() == 1


def test_a_stream_that_is_closed_raises_nothing(stream: Stream) -> None:
    stream.close()

    logging.getLogger(ACCESS).info("after the end")

    assert failed_lines() == 1


@pytest.fixture
def pipe(stream: Stream) -> Iterator[tuple[int, QueuedWriter]]:
    """The reading end of a pipe, and the log's stream that writes to it."""
    reading, writing = os.pipe()
    queued = QueuedWriter(writing)
    configure(LoggingOptions(), queued)
    yield reading, queued
    with contextlib.suppress(OSError):
        os.close(reading)  # ends a write that waits
    queued.drain(60.0)
    os.close(writing)


def lines_of(reading: int, last: str) -> list[str]:
    """Read a pipe up to the line that ends with `last`. The first line may be the end of one."""
    text = ""
    while not text.endswith(last + "\n"):
        text += os.read(reading, 1 << 20).decode()
    return [line.split(" kvroute.")[-1] for line in text.splitlines()]


def test_lines_for_a_pipe_that_nobody_reads_wait_and_later_ones_are_lost_and_counted(
    pipe: tuple[int, QueuedWriter],
) -> None:
    reading, _ = pipe
    log = logging.getLogger("kvroute.test")
    line = "x" * 10_000
    for _ in range(1_000):
        log.info(line)
    lost = failed_lines()
    assert 1_000 - 500 < lost < 1_000

    read = [os.read(reading, 1 << 16)]
    while sum(map(len, read)) < (1_000 - lost) * (10_000 + 30):
        read.append(os.read(reading, 1 << 16))
    log.info("last")

    shown = lines_of(reading, "nobody reads the log")
    assert shown[-2:] == [
        "test last",
        f"logs {lost} lines of the log could not be written when they came: nobody reads the log",
    ]
    assert failed_lines() == lost


def test_lines_are_lost_and_counted_if_the_reader_of_a_pipe_has_ended(pipe: tuple[int, QueuedWriter]) -> None:
    reading, queued = pipe
    os.close(reading)
    logging.getLogger("kvroute.test").info("lost")
    queued.drain(60.0)

    assert failed_lines() == 1


def test_another_configuration_of_the_log_uses_the_same_queue(
    pipe: tuple[int, QueuedWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, queued = pipe
    with os.fdopen(os.dup(queued.descriptor), "w") as error:
        monkeypatch.setattr("sys.stderr", error)
        configure(LoggingOptions())
        [first] = logging.getLogger("kvroute").handlers
        configure(LoggingOptions(format="json"))
        [second] = logging.getLogger("kvroute").handlers

        assert isinstance(first, LogHandler)
        assert isinstance(second, LogHandler)
        assert isinstance(first.stream, QueuedWriter)
        assert second.stream is first.stream
        logging.getLogger("kvroute.test").info("shown")
        assert b'"shown"' in os.read(reading, 1 << 16)


def test_a_child_process_writes_its_own_lines_and_not_those_that_wait_in_the_parent(
    pipe: tuple[int, QueuedWriter],
) -> None:
    reading, queued = pipe
    log = logging.getLogger("kvroute.test")
    log.info("parent")
    queued.drain(60.0)
    child = os.fork()
    if not child:
        log.info("child")
        drain()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    log.info("end")

    assert lines_of(reading, "end") == ["test parent", "test child", "test end"]


def test_a_line_that_cannot_be_made_is_a_defect_that_is_shown(
    stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = logging.getLogger("kvroute").handlers
    [handler] = [each for each in handlers if isinstance(each, LogHandler)]

    handler.handle(logging.LogRecord("kvroute", logging.INFO, "", 0, "%d", ("text",), None))

    assert "TypeError" in capsys.readouterr().err
    assert failed_lines() == 0


@pytest.mark.parametrize("style", ["text", "json"])
def test_names_from_outside_make_no_line_and_no_command_of_a_terminal(style):
    stream = io.StringIO()
    configure(LoggingOptions(format=style), stream)
    logging.getLogger("kvroute.test").warning("model %s", "a\nb\x1b[2J\x9b\u2028\u202ec", extra={"x": "1\n2"})

    line = stream.getvalue()

    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert line[:-1].isprintable()
