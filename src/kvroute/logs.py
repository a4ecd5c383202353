"""Structured logs: one object or one line per event, to stderr.

Prompts, keys and credentials are never passed to a logger; this module only formats what is.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Literal, TextIO

from kvroute.options import Options, Switch, option

ACCESS = "kvroute.access"
"""Logger of the one line per request, written at its end."""

_THOUSANDTHS = tuple(f".{number:03d}Z" for number in range(1000))
"""To look a number up costs a tenth of formatting it."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class LoggingOptions(Options):
    """How kvroute logs."""

    level: Literal["debug", "info", "warning", "error"] = option(
        "info",
        "Least severe level that is written.",
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
        "Also log, for `kvaware`, the lines that HyperPod's documentation tells people to look for: `Worker "
        "registered: ...`, `Routing request to ... found by kvaware router`, `Matched instance url None`.",
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


def configure(options: LoggingOptions, stream: TextIO | None = None) -> None:
    """Send kvroute's and uvicorn's loggers through one handler. Replaces what an earlier call set."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if options.format == "json" else TextFormatter())
    for name in ("kvroute", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(options.level.upper())
    logging.getLogger("uvicorn.error").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """False for uvicorn's complaint about answers that the relay cut on purpose and has logged itself."""
    return record.msg != "ASGI callable returned without completing response."


class RequestLines:
    """Writes the request lines, many at a time: with our own handler a batch is one write.

    Any other handler (a test's, an embedder's) gets ordinary log records.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger(ACCESS)

    @property
    def is_on(self) -> bool:
        return self._logger.isEnabledFor(logging.INFO)

    def write(self, lines: Sequence[tuple[float, str]]) -> None:
        """`lines` are time since the epoch and message, oldest first. Raises nothing: as any handler,
        it reports a broken stream on stderr."""
        handler = self._own_handler()
        if handler is None:
            for _, message in lines:
                self._logger.info("%s", message)
            return
        is_json = isinstance(handler.formatter, JsonFormatter)
        start, prefix, written = 0, "", list[str]()
        since = until = 0.0
        when = begin = ""
        for created, message in lines:
            if not since <= created < until:  # of many at once most came within one thousandth
                second = int(created)
                if second != start:
                    start, prefix = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
                thousandth = int((created - second) * 1000)
                since, until = second + thousandth / 1000, second + (thousandth + 1) / 1000
                when = prefix + _THOUSANDTHS[thousandth]
                begin = f"{when} INFO    {ACCESS} "
            if is_json:
                fields = {"time": when, "level": "info", "logger": ACCESS, "message": message}
                written.append(json.dumps(fields, ensure_ascii=False))
            else:
                written.append(begin + message)
        written.append("")
        with handler.lock or nullcontext():
            try:
                handler.stream.write("\n".join(written))
                handler.flush()
            except (OSError, ValueError):
                handler.handleError(self._logger.makeRecord(ACCESS, logging.INFO, "", 0, "", (), None))

    def _own_handler(self) -> logging.StreamHandler[TextIO] | None:
        """The handler that `configure` set, if it is the only one that a record would reach."""
        found: list[logging.Handler] = []
        logger: logging.Logger | None = self._logger
        while logger is not None:
            found += logger.handlers
            logger = logger.parent if logger.propagate else None
        if (
            len(found) == 1
            and type(found[0]) is logging.StreamHandler
            and isinstance(found[0].formatter, JsonFormatter | TextFormatter)
        ):
            return found[0]
        return None


def _timestamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
