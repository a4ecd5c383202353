"""Structured logs: one JSON object or one text line per event, on stderr.

Callers never pass prompts, keys or credentials to a logger; this module only formats.
"""

from __future__ import annotations

import json
import logging
import sys
import time
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
        "request ID with session id S to URL at T, process time = D`. `kvroute vllm-router` sets it.",
        higher="on: one more line per request",
    )


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
        return json.dumps(fields, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`time LEVEL logger message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {key}={value}" for key, value in _extra(record).items())
        line = (
            f"{_timestamp(record.created)} {record.levelname:<7} {record.name} {record.getMessage()}{extra}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream. Lines that cannot be written, because the disk is full, delay nothing else.

    The next line that can be written is followed by one that says how many were lost, and why. Mutable: the
    counts.
    """

    def __init__(self, stream: TextIO, failed_lines: int = 0) -> None:
        super().__init__(stream)
        self.failed_lines = failed_lines
        self._unreported = 0
        self._cause = ""

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
        try:
            self.stream.write(text)
            self.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            # The standard handler would print a traceback, to the same full disk.
            self.failed_lines += lines
            self._unreported += lines
            self._cause = getattr(error, "strerror", None) or str(error)
            return
        if self._unreported:
            count, self._unreported = self._unreported, 0
            text = f"{count} lines of the log could not be written when they came: {self._cause}"
            self.emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))
            if self._unreported:  # this line could not be written either
                self._unreported += count


def failed_lines() -> int:
    """Lines of the log that could not be written since the start of this process."""
    handlers = logging.getLogger("kvroute").handlers
    return sum(handler.failed_lines for handler in handlers if isinstance(handler, LogHandler))


def configure(options: LoggingOptions, stream: TextIO | None = None) -> None:
    """Give kvroute's and uvicorn's loggers one handler. A later call replaces it."""
    handler = LogHandler(stream or sys.stderr, failed_lines())
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
