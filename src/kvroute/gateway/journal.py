"""What is written down about each finished request: metrics, one log line, the ring of decisions."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from kvroute.clock import Clock
from kvroute.logs import ACCESS
from kvroute.metrics import Metrics, Outcome
from kvroute.routing.decision import RouteDecision


@dataclass(slots=True)
class Record:
    """One request as it went, without its body. Mutable: its exchange fills it in until
    `Journal.finished` takes it. `decision` is None where none was reached."""

    request_id: str
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


class Journal:
    """Writes records. Mutable: the ring of the last decisions; touched from the loop only."""

    def __init__(self, metrics: Metrics, clock: Clock, *, log_requests: bool, kept: int) -> None:
        self._metrics = metrics
        self._clock = clock
        self._log = logging.getLogger(ACCESS) if log_requests else None
        self._ring: deque[tuple[float, float, Record]] = deque(maxlen=kept)

    def finished(self, record: Record) -> None:
        """Count and log `record`. 499 stands for a client that left before an answer, as in nginx."""
        now = self._clock.now()
        decision = record.decision
        duration = now - record.started
        first_byte = None if record.first_byte is None else record.first_byte - record.started
        strategy, reason = (
            (decision.strategy, decision.reason.value) if decision else ("-", record.error or "-")
        )
        self._metrics.finished(
            Outcome(record.model, record.worker, strategy, reason, str(record.status)), duration, first_byte
        )
        self._ring.append((self._clock.wall(), duration, record))
        if self._log is not None and self._log.isEnabledFor(logging.INFO):
            self._log.info(
                "%s %s %d worker=%s model=%s strategy=%s reason=%s matched=%d tokens=%d"
                " attempts=%d ttfb=%s duration=%.4f%s%s",
                record.request_id,
                record.path,
                record.status,
                record.worker,
                record.model,
                strategy,
                reason,
                record.matched_tokens,
                record.tokens,
                record.attempts,
                "-" if first_byte is None else f"{first_byte:.4f}",
                duration,
                f" error={record.error}" if record.error else "",
                f" ended_by={record.ended_by}" if record.ended_by else "",
            )

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The most recent decisions, newest first, with the arithmetic of each candidate."""
        newest = list(self._ring)[-limit:][::-1] if limit else []
        return [_described(wall, duration, record) for wall, duration, record in newest]


def _described(wall: float, duration: float, record: Record) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "time": wall,
        "request_id": record.request_id,
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

