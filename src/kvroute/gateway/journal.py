"""What is written down about each finished request: metrics, one log line, the ring of decisions."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from msgspec import Struct

from kvroute.clock import Clock
from kvroute.logs import RequestLines
from kvroute.metrics import Metrics, Series
from kvroute.routing.decision import RouteDecision

_GATHER_S = 0.1
_MOST_WAITING = 1000


class Record(Struct, eq=False):
    """One request as it went, without its body. Mutable: its exchange fills it in until
    `Journal.finished` takes it. `request_id` is printable ASCII; `decision` is None where none was
    reached."""

    request_id: bytes
    path: str
    started: float
    model: str = "-"
    tokens: int = 0
    decision: RouteDecision | None = None
    worker: str = "-"
    matched_tokens: int = 0
    attempts: int = 0
    status: int = 0
    first_byte: float | None = None
    ended_by: str = ""
    error: str = ""
    series: Series | None = None
    """Where it counts, once that is settled: from the beginning of its answer."""


_Entry = tuple[float, float, Record]
"""Time since the epoch, duration in seconds, what happened."""


class Journal:
    """Writes records. Mutable: the ring of the last decisions and the lines that wait to be written;
    touched from the loop only.

    Lines are gathered for a tenth of a second: one write for many requests, and no formatting between
    an answer's last byte and the next request.
    """

    def __init__(self, metrics: Metrics, clock: Clock, *, log_requests: bool, kept: int) -> None:
        self._metrics = metrics
        self._wall = clock.wall
        self._lines = RequestLines() if log_requests else None
        self._waiting: list[_Entry] = []
        self._timer: asyncio.TimerHandle | None = None
        self._ring: deque[_Entry] = deque(maxlen=kept)

    def finished(self, record: Record, now: float) -> None:
        """Count `record`, which ended at `now`, and log it soon. 499 stands for a client that left before an
        answer, as in nginx."""
        started, first_byte, series = record.started, record.first_byte, record.series
        duration = now - started
        if series is None:
            series = record.series = self.series(record)
        series.finished(duration, None if first_byte is None else first_byte - started)
        entry = (self._wall(), duration, record)
        self._ring.append(entry)
        if self._lines is not None:
            self._waiting.append(entry)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self.flush)
            elif len(self._waiting) >= _MOST_WAITING:
                self.flush()

    def series(self, record: Record) -> Series:
        """Where `record` counts, as it stands now."""
        decision = record.decision
        if decision is None:
            strategy, reason = "-", record.error or "-"
        else:
            strategy, reason = decision.strategy, decision.reason
        return self._metrics.series(record.model, record.worker, strategy, reason, record.status)

    def flush(self) -> None:
        """Write the lines that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        if waiting and self._lines is not None and self._lines.is_on:
            self._lines.write([(wall, _line(duration, record)) for wall, duration, record in waiting])

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The most recent decisions, newest first, with the arithmetic of each candidate."""
        newest = list(self._ring)[-limit:][::-1] if limit else []
        return [_described(wall, duration, record) for wall, duration, record in newest]


def _line(duration: float, record: Record) -> str:
    first_byte, series = record.first_byte, record.series
    assert series is not None  # it is finished
    if not series.text:
        series.text = _text(record)
    took = f"{duration:.4f}"
    if first_byte is None:
        waited = "-"
    else:
        first_s = first_byte - record.started
        waited = took if first_s == duration else f"{first_s:.4f}"
    line = (
        f"{record.request_id.decode()} {record.path} {series.text} matched={record.matched_tokens}"
        f" tokens={record.tokens} attempts={record.attempts} ttfb={waited} duration={took}"
    )
    if record.error:
        line += f" error={record.error}"
    if record.ended_by:
        line += f" ended_by={record.ended_by}"
    return line


def _text(record: Record) -> str:
    """What the lines of one series have in common."""
    decision = record.decision
    strategy = "-" if decision is None else decision.strategy
    reason = record.error or "-" if decision is None else decision.reason
    return f"{record.status} worker={record.worker} model={record.model} strategy={strategy} reason={reason}"


def _described(wall: float, duration: float, record: Record) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "time": wall,
        "request_id": record.request_id.decode(),
        "path": record.path,
        "model": record.model,
        "worker": record.worker,
        "status": record.status,
        "attempts": record.attempts,
        "time_to_first_byte_s": None if record.first_byte is None else record.first_byte - record.started,
        "duration_s": duration,
        "ended_by": record.ended_by or None,
        "error": record.error or None,
    }
    if record.decision is not None:
        entry |= {"prompt_tokens": record.tokens, **record.decision.describe()}
    return entry
