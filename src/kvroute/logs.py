"""Structured logs: one JSON object or one text line per event, on stderr.

Callers never pass prompts, keys or credentials to a logger; this module only formats.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import select
import signal
import stat
import sys
import threading
import time
from contextlib import nullcontext
from typing import Annotated, Literal, TextIO

from kvroute.options import Options, Switch, option

ACCESS = "kvroute.access"
"""Logger of the one line that is written at the end of each request."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class LoggingOptions(Options):
    """Options of kvroute's log."""

    level: Literal["debug", "info", "warning", "error"] = option(
        "info",
        "Lowest level that is logged.",
        higher="fewer lines",
        lower="more lines; `debug` costs time on every request",
        reload=True,
    )
    format: Literal["text", "json"] = option("text", "One readable line, or one JSON object, per event.")
    requests: bool = option(
        True,
        "Write one info line per finished request.",
        higher="each request is traceable",
        lower="saves a little time on every request",
    )
    hyperpod_lines: Annotated[bool, Switch] = option(
        False,
        "Also log, for `kvaware`, the lines that HyperPod's documentation asks users to look for: `Worker "
        "registered: ...`, `Routing request to ... found by kvaware router`, `Matched instance url None`.",
        higher="on: one more line per request",
    )
    routing_lines: Annotated[bool, Switch] = option(
        False,
        "Also log each decision, before the request is sent, as production-stack's router does: `Routing "
        "request ID with session id S to URL at T, process time = D`, for each leg of a request that two "
        "workers compute. `kvroute vllm-router` sets it.",
        higher="on: one or two more lines per request",
    )


_CONTROLS = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")
_OTHER_CONTROLS = re.compile(_CONTROLS.pattern.replace("\\x00-\\x1f", "\\x00-\\x08\\x0b-\\x1f"))


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", ...extra}`, one line each."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields.update(_extra(record))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _CONTROLS.sub(_escaped, json.dumps(fields, default=str, ensure_ascii=False))


class TextFormatter(logging.Formatter):
    """`time LEVEL logger message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {key}={value}" for key, value in _extra(record).items())
        line = (
            f"{_timestamp(record.created)} {record.levelname:<7} {record.name} {record.getMessage()}{extra}"
        )
        # Names and errors come from workers, files and clients, too: none of them makes a second line, or
        # reaches a terminal as a command.
        if not line.isprintable():
            line = _CONTROLS.sub(_escaped, line)
        if record.exc_info:
            return f"{line}\n{_OTHER_CONTROLS.sub(_escaped, self.formatException(record.exc_info))}"
        return line


_MOST_WAITING_BYTES = 4 << 20
"""About 10,000 lines."""
_LAST_WRITE_S = 1.0
"""Longest wait for the reader of the log when the process ends."""


class QueuedWriter:
    """Writes to a pipe, socket or terminal, whose reader may be slow, from a thread of its own.

    `write` never waits: while 4 MiB wait, it raises OSError. Mutable, under a lock: the queue and the counts.
    After a fork the child begins with an empty queue, because the parent writes what waits.
    """

    # A blocking write of the event loop's thread would stop every request, until somebody reads the log. A
    # non-blocking descriptor is no solution: it is the same one in other processes.

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: list[bytes] = []
        self._bytes = 0
        """Bytes in the queue, and those that are being written."""
        self._lost = 0
        self._cause = ""

    def write(self, text: str) -> None:
        """Queue whole lines. Raises OSError if too many wait."""
        self._check_process()
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._bytes and self._bytes + len(data) > _MOST_WAITING_BYTES:
                raise BlockingIOError(errno.EAGAIN, "nobody reads the log")
            self._waiting.append(data)
            self._bytes += len(data)
            if self._thread is None:
                self._thread = self._start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Does nothing: `drain` waits."""

    def drain(self, within_s: float) -> None:
        """Wait until all lines are written, but not for longer than `within_s`."""
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, within_s)

    def take_lost(self) -> tuple[int, str]:
        """Lines that were queued but could not be written since the last call, and why."""
        self._check_process()
        with self._changed:
            lost, self._lost = self._lost, 0
            return lost, self._cause

    def _check_process(self) -> None:
        if (
            self._pid != os.getpid()
        ):  # after a fork: the thread, and perhaps the lock's owner, is the parent's
            self._begin()

    def _start(self) -> threading.Thread:
        # A daemon: the end of the process must not wait for the reader. It gets no signals: the parent of
        # several processes waits for them in its main thread.
        thread = threading.Thread(target=self._run, name="log", daemon=True)
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data = b"".join(self._waiting)
                self._waiting.clear()
            problem = self._write_all(data)
            with self._changed:
                if problem:
                    self._lost += data.count(b"\n")
                    self._cause = problem
                self._bytes -= len(data)
                self._changed.notify_all()

    def _write_all(self, data: bytes) -> str:
        """Write, for as long as it takes. Returns the problem, "" if there was none."""
        unwritten = memoryview(data)
        while unwritten:
            try:
                unwritten = unwritten[os.write(self.descriptor, unwritten) :]
            except BlockingIOError:  # another process has made the descriptor non-blocking
                select.select([], [self.descriptor], [])
            except OSError as error:
                return error.strerror or str(error)
        return ""


class LogHandler(logging.StreamHandler["TextIO | QueuedWriter"]):
    """Writes lines to a stream. Lines that cannot be written delay nothing else: the disk is full, or nobody
    reads the pipe.

    The next line that can be written is followed by one that says how many were lost, and why. Mutable: the
    counts.
    """

    def __init__(self, stream: TextIO | QueuedWriter, failed_lines: int = 0) -> None:
        super().__init__(stream)
        self.failed_lines = failed_lines
        self._unreported = 0
        self._cause = ""

    def close(self) -> None:
        """Called at the end of the process: wait a second for the reader of the log."""
        if isinstance(self.stream, QueuedWriter):
            self.stream.drain(_LAST_WRITE_S)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 - as every handler of the standard library does
            self.handleError(record)
            return
        self.write(line + self.terminator, 1)

    def write(self, text: str, lines: int) -> None:
        """Write whole lines in one call. Raises nothing. The caller holds the lock."""
        self.count_lost()
        try:
            self.stream.write(text)
            self.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            # The standard handler would print a traceback, to the same full disk.
            self._count(lines, getattr(error, "strerror", None) or str(error))
            return
        if self._unreported:
            count, self._unreported = self._unreported, 0
            text = f"{count} lines of the log could not be written when they came: {self._cause}"
            self.emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))
            if self._unreported:  # this line could not be written either
                self._unreported += count

    def count_lost(self) -> None:
        """Count the lines that were queued and could not be written."""
        if isinstance(self.stream, QueuedWriter):
            lost, cause = self.stream.take_lost()
            if lost:
                self._count(lost, cause)

    def _count(self, lines: int, cause: str) -> None:
        self.failed_lines += lines
        self._unreported += lines
        self._cause = cause


def failed_lines() -> int:
    """Lines of the log that could not be written since the start of this process."""
    total = 0
    for handler in _handlers():
        with handler.lock or nullcontext():
            handler.count_lost()
            total += handler.failed_lines
    return total


def drain() -> None:
    """Wait until the log is written, for at most a second. Needed before an end by `os._exit`."""
    for handler in _handlers():
        if isinstance(handler.stream, QueuedWriter):
            handler.stream.drain(_LAST_WRITE_S)


def _handlers() -> list[LogHandler]:
    return [handler for handler in logging.getLogger("kvroute").handlers if isinstance(handler, LogHandler)]


def _standard_error() -> TextIO | QueuedWriter:
    """Standard error, with a queue if its reader could delay a write; the queue of the last handler stays."""
    stream = sys.stderr
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
        may_block = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
    except (AttributeError, OSError, ValueError):  # no stream, none with a descriptor, or it is closed
        return stream
    if not may_block:
        return stream
    queues = [handler.stream for handler in _handlers() if isinstance(handler.stream, QueuedWriter)]
    return next((queue for queue in queues if queue.descriptor == descriptor), QueuedWriter(descriptor))


def configure(options: LoggingOptions, stream: TextIO | QueuedWriter | None = None) -> None:
    """Give kvroute's and uvicorn's loggers one handler, for standard error by default. A later call replaces
    it."""
    handler = LogHandler(stream or _standard_error(), failed_lines())
    handler.setFormatter(JsonFormatter() if options.format == "json" else TextFormatter())
    for name in ("kvroute", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(options.level.upper())
    logging.getLogger("uvicorn.error").addFilter(_is_not_logged_already)


def _is_not_logged_already(record: logging.LogRecord) -> bool:
    """False for uvicorn's errors that the gateway logs itself: an answer that it has cut on purpose, and an
    address that cannot be bound (a bare OSError)."""
    return record.msg != "ASGI callable returned without completing response." and not isinstance(
        record.msg, OSError
    )


def _timestamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
