"""What is written down about each finished request: metrics, one log line, the ring of decisions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, sub
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from kvroute.clock import Clock
from kvroute.gateway.usage import Usage
from kvroute.logs import RequestLines
from kvroute.metrics import Metrics, Outcome
from kvroute.routing.decision import RouteDecision

_GATHER_S = 0.1
_MOST_WAITING = 256
"""To take them down holds the loop up for 0.7 ms."""
_MOST_UNCOUNTED = 4096
_SECONDS = "%.4f".__mod__
_strategy_and_reason: Callable[[Any], tuple[str, str]] = attrgetter("strategy", "reason")


class Record(Struct, eq=False, gc=False):
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
    usage: Usage | None = None
    """What the worker said of its whole answer."""
    ended: float = 0.0


_Entry = tuple[float, Record]
"""What to add to a record's times for seconds since the epoch, what happened."""


class Journal:
    """Writes records. Mutable: those that wait to be counted and written, and the ring of the last decisions;
    touched from the loop only.

    Records are gathered for a tenth of a second, unless somebody asks for figures or decisions before: one
    write for many requests, and neither counting nor formatting between an answer's last byte and the next
    request. One of 256 costs 2.4 us, one by itself 25.
    """

    def __init__(self, metrics: Metrics, clock: Clock, *, log_requests: bool, kept: int) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lines = RequestLines() if log_requests else None
        self._waiting: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None
        self._uncounted = 0
        """Records since the metrics were settled."""
        self._ring: deque[_Entry] = deque(maxlen=kept)
        metrics.before_collect.append(self._take_down)

    def finished(self, record: Record, now: float) -> None:
        """Count `record`, which ended at `now`, and log it, soon. 499 stands for a client that left before an
        answer, as in nginx."""
        record.ended = now
        waiting = self._waiting
        waiting.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self.flush)
        elif len(waiting) >= _MOST_WAITING:
            self._take_down()

    def flush(self) -> None:
        """Count and write what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._take_down()

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The most recent decisions, newest first, with the arithmetic of each candidate."""
        self._take_down()
        newest = list(self._ring)[-limit:][::-1] if limit else []
        return [_described(ahead, record) for ahead, record in newest]

    def _take_down(self) -> None:
        waiting = self._waiting
        if not waiting:
            return
        self._waiting = []
        ahead = self._clock.wall() - self._clock.now()
        # By columns: what is looped over here is looped over in C, but for what is said of each series.
        (
            ids,
            paths,
            starts,
            models,
            tokens,
            decisions,
            workers,
            matched,
            attempts,
            statuses,
            first_bytes,
            ended_by,
            errors,
            usages,
            ends,
        ) = zip(*map(astuple, waiting), strict=True)
        durations = list(map(sub, ends, starts))
        if first_bytes == ends:  # answers in one piece
            waits = durations
        else:
            pairs = zip(first_bytes, starts, strict=True)
            waits = [None if first_byte is None else first_byte - start for first_byte, start in pairs]
        outcomes = zip(models, workers, *_named(decisions, errors), statuses, strict=True)
        found = self._metrics.series_of(list(outcomes))
        for series, told in zip(
            found, zip(durations, waits, tokens, matched, usages, strict=True), strict=True
        ):
            if told[1] is None:
                series.finished(told[0], None)
            else:
                series.answered(told)
        for series in dict.fromkeys(found):
            series.count()
            if not series.text:
                series.text = _text(series.outcome)
        self._ring.extend(zip(repeat(ahead), waiting))
        if self._lines is not None and self._lines.is_on:
            took = list(map(_SECONDS, durations))
            waited = (
                took if waits is durations else ["-" if wait is None else _SECONDS(wait) for wait in waits]
            )
            said = zip(ids, paths, found, matched, tokens, attempts, waited, took, strict=True)
            messages = [  # of many fields, this is cheaper than a template that C fills in
                f"{sent.decode()} {path} {series.text} matched={held} tokens={prompt} attempts={tries}"
                f" ttfb={wait} duration={duration}"
                for sent, path, series, held, prompt, tries, wait, duration in said
            ]
            if any(errors) or any(ended_by):
                messages = list(map(_with_end, messages, errors, ended_by))
            self._lines.write(list(map(ahead.__add__, ends)), messages)
        self._uncounted += len(waiting)
        if self._uncounted >= _MOST_UNCOUNTED:
            self._uncounted = 0
            self._metrics.settle()


def _named(decisions: Sequence[RouteDecision | None], errors: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """The strategies, and the reasons."""
    if None in decisions:
        pairs = [
            ("-", error or "-") if decision is None else (decision.strategy, decision.reason)
            for decision, error in zip(decisions, errors, strict=True)
        ]
    else:
        pairs = list(map(_strategy_and_reason, decisions))
    return zip(*pairs, strict=True)


def _text(outcome: Outcome) -> str:
    """What the lines of a series have in common."""
    model, worker, strategy, reason, status = outcome
    return f"{status} worker={worker} model={model} strategy={strategy} reason={reason}"


def _with_end(message: str, error: str, ended_by: str) -> str:
    if error:
        message += f" error={error}"
    if ended_by:
        message += f" ended_by={ended_by}"
    return message


def _described(ahead: float, record: Record) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "time": record.ended + ahead,
        "request_id": record.request_id.decode(),
        "path": record.path,
        "model": record.model,
        "worker": record.worker,
        "status": record.status,
        "attempts": record.attempts,
        "time_to_first_byte_s": None if record.first_byte is None else record.first_byte - record.started,
        "duration_s": record.ended - record.started,
        "ended_by": record.ended_by or None,
        "error": record.error or None,
    }
    if record.decision is not None:
        entry |= {"prompt_tokens": record.tokens, **record.decision.describe()}
    return entry
