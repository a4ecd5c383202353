"""Records each finished request: metrics, one log line, and an entry in the list of decisions."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from kvroute.clock import Clock
from kvroute.logs import ACCESS, JsonFormatter, LogHandler, TextFormatter
from kvroute.metrics import Metrics, Series
from kvroute.request.record import HandoverRecord, Record

_BATCH_S = 0.5
_MAX_WAITING = 256
"""To process that number of records holds the event loop for 0.7 ms."""
_MAX_UNSETTLED = 4096
log = logging.getLogger(__name__)

_MILLISECONDS = tuple(f".{number:03d}Z" for number in range(1000))
"""A lookup costs a tenth of formatting the number."""


Entry = tuple[float, float, Record]
"""Seconds since the epoch at the end, duration in seconds, and the record."""


class Journal:
    """Counts and logs finished requests, many at a time, and keeps the last decisions.

    Records wait for half a second, or until metrics or decisions are read. Mutable, on the event loop only:
    the waiting records and the list of decisions.
    """

    # A record among 256 costs 2.5 us, a single one 10 us. Nothing is counted or formatted between the last
    # byte of an answer and the next request.

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        *,
        log_requests: bool,
        kept: int,
        on_traced: Callable[[Record, float], None] | None = None,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lines = RequestLines() if log_requests else None
        self._on_traced = on_traced
        self.observers: tuple[Callable[[Record], object], ...] = ()
        """Called with each finished request; see `parts.part.Observer`."""
        self._waiting: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None
        self._unsettled = 0
        """Records since the last `Metrics.flush`."""
        self._ring: deque[Entry] = deque(maxlen=kept)
        self._kept = 0
        """Records that were ever put into the ring."""
        metrics.call_before_collect(self._process)

    def finished(self, record: Record, now: float) -> None:
        """Add `record`, which ended at `now`; it is counted and logged later.

        As in nginx, status 499 means that the client left before the answer.
        """
        record.ended = now
        if (use := record.use) is not None:
            usage = record.usage
            prompt, completion = (
                (record.tokens, None) if usage is None else (usage.prompt_tokens, usage.completion_tokens)
            )
            use.end(now, prompt, completion, attempts=record.attempts, status=record.status)
        if record.on_end is not None:
            _tell(record.on_end, [record])
        waiting = self._waiting
        waiting.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_BATCH_S, self.flush)
        elif len(waiting) >= _MAX_WAITING:
            self._process()

    def flush(self) -> None:
        """Count and log all waiting records now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._process()

    def decisions(self, limit: int, request_id: str = "") -> list[dict[str, Any]]:
        """The most recent decisions, newest first, with the arithmetic of each candidate.

        With `request_id` only those of requests whose id contains it.
        """
        self._process()
        entries = list(self._ring)
        if request_id:
            wanted = request_id.encode()
            entries = [entry for entry in entries if wanted in entry[2].request_id]
        newest = entries[-limit:][::-1] if limit else []
        return [_described(wall, duration, record) for wall, duration, record in newest]

    def since(self, cursor: int | None) -> tuple[int, list[Entry]]:
        """The kept requests that were finished after `cursor`, oldest first, and the next cursor.

        None: all that are kept.
        """
        self._process()
        new = self._kept if cursor is None else max(0, self._kept - cursor)
        return self._kept, list(self._ring)[-new:] if new else []

    def _process(self) -> None:
        waiting = self._waiting
        if not waiting:
            return
        self._waiting = []
        wall_offset = self._clock.wall() - self._clock.now()
        lines = self._lines if self._lines is not None and self._lines.is_on else None
        is_json = lines is not None and lines.is_json
        entries, written = list[Entry](), list[tuple[float, str | dict[str, Any]]]()
        series_of, touched = self._metrics.series, list[Series]()
        failed, last = 0, None
        on_traced = self._on_traced
        for record in waiting:
            # One record that cannot be counted must not cost the others, nor be in the way again.
            try:
                if on_traced is not None and record.trace is not None:
                    on_traced(record, wall_offset)
                started, first_byte, decision = record.started, record.first_byte, record.decision
                duration, wall = record.ended - started, record.ended + wall_offset
                if decision is None:
                    strategy, reason = "-", record.error or "-"
                else:
                    strategy, reason = decision.strategy, decision.reason
                series = series_of(
                    record.model, record.worker, strategy, reason, record.status, record.streamed
                )
                if first_byte is None and not (record.is_unseen and record.attempts):
                    series.finished(duration, None)
                else:
                    held, usage, counted = record.held, record.usage, series.waiting
                    if not counted:
                        touched.append(series)
                    counted.append(
                        (
                            duration,
                            None if first_byte is None else first_byte - started,
                            record.tokens,
                            record.matched_tokens,
                            None if held is None else held.tokens,
                            None if usage is None else usage.prompt_tokens,
                            None if usage is None else usage.cached_tokens,
                        )
                    )
                if (handover := record.handover) is not None:
                    self._count_handover(record, handover)
                if lines is not None:
                    if is_json:
                        written.append((wall, _fields(record, duration, strategy, reason)))
                    else:
                        text = series.text
                        if not text:
                            series.text = text = (
                                f"{record.status} worker={record.worker} model={record.model}"
                                f" strategy={strategy} reason={reason}"
                            )
                        written.append((wall, _line(record, duration, text)))
                entries.append((wall, duration, record))
            except Exception as error:  # noqa: BLE001 - what it is, is unknown; it is logged below
                failed, last = failed + 1, error
        for series in touched:
            answered, series.waiting = series.waiting, []
            try:
                series.answered(answered)
            except Exception:  # noqa: BLE001 - of one of them; the others are counted one by one
                for each in answered:
                    try:
                        series.answered([each])
                    except Exception as error:  # noqa: BLE001 - it is logged below
                        failed, last = failed + 1, error
        if failed:
            log.error("recording %d requests failed; they are not counted", failed, exc_info=last)
        if self.observers:
            _tell(self.observers, waiting)
        self._ring.extend(entries)
        self._kept += len(entries)
        if lines is not None:
            lines.write(written)
        self._unsettled += len(waiting)
        if self._unsettled >= _MAX_UNSETTLED:
            self._unsettled = 0
            self._metrics.flush()

    def _count_handover(self, record: Record, handover: HandoverRecord) -> None:
        worker, seconds, cached = handover.prefill_worker, handover.prefill_s, handover.cached_tokens
        if seconds is not None:
            computed = record.tokens - (handover.matched_tokens if cached is None else cached)
            self._metrics.prefilled(worker, seconds, max(0, computed))
        if handover.has_moved:
            self._metrics.handed_over(worker, record.worker, handover.moved_tokens, handover.transfer_s)


def _tell(observers: Iterable[Callable[[Record], object]], records: Iterable[Record]) -> None:
    """Call each observer with each record. One that fails costs neither the others nor the request."""
    for observe in observers:
        try:
            for record in records:
                observe(record)
        except Exception:  # the code of another distribution may fail in any way
            log.exception("a part failed when it was told of finished requests")


def _line(record: Record, duration: float, text: str) -> str:
    """The log line of `record`; `text` is the part that is equal for all requests of its series."""
    first_byte, took = record.first_byte, f"{duration:.4f}"
    if first_byte is None:
        waited = "-"
    elif first_byte == record.ended:
        waited = took
    else:
        waited = f"{first_byte - record.started:.4f}"
    line = (
        f"{record.request_id.decode()} {record.path} {text} matched={record.matched_tokens}"
        f" tokens={record.tokens} attempts={record.attempts} ttfb={waited} duration={took}"
    )
    if record.key:
        line += f" key={record.key}"
    if record.head_worker:
        line += f" head_worker={record.head_worker}"
    if record.queued_s:
        line += f" queued={record.queued_s:.4f}"
    if record.queued_head:
        line += " queued_head=true"
    if (handover := record.handover) is not None:
        line += f" prefill_worker={handover.prefill_worker} moved={handover.moved_tokens}"
        if handover.prefill_s is not None:
            line += f" prefill={handover.prefill_s:.4f}"
        if handover.transfer_s is not None:
            line += f" transfer={handover.transfer_s:.4f}"
        if handover.fallback:
            line += f" handover_fallback={handover.fallback}"
    if record.error:
        line += f" error={record.error}"
    if record.ended_by:
        line += f" ended_by={record.ended_by}"
    if record.trace_id:
        line += f" trace_id={record.trace_id}"
    return line


def _fields(record: Record, duration: float, strategy: str, reason: str) -> dict[str, Any]:
    """The fields of the request's line in a JSON log, named as in /admin/decisions."""
    first_byte = record.first_byte
    fields: dict[str, Any] = {
        "message": "request finished",
        "request_id": record.request_id.decode(),
        "path": record.path,
        "status": record.status,
        "worker": record.worker,
        "model": record.model,
        "strategy": strategy,
        "reason": reason,
        "matched_tokens": record.matched_tokens,
        "prompt_tokens": record.tokens,
        "attempts": record.attempts,
        "streamed": record.streamed,
        "time_to_first_byte_s": None if first_byte is None else round(first_byte - record.started, 6),
        "duration_s": round(duration, 6),
    }
    if record.usage is not None:
        fields["reported_prompt_tokens"] = record.usage.prompt_tokens
        fields["reported_cached_tokens"] = record.usage.cached_tokens
    if record.queued_s:
        fields["queue_wait_s"] = round(record.queued_s, 6)
    if record.queued_head:
        fields["queued_head"] = True
    if record.handover is not None:
        fields |= _described_handover(record.handover)
    for name in ("key", "parent_worker", "head_worker", "error", "ended_by", "trace_id"):
        if value := getattr(record, name):
            fields[name] = value
    return fields


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
    if record.key:
        entry["key"] = record.key
    if record.parent_worker:
        entry["parent_worker"] = record.parent_worker
    if record.head_worker:
        entry["head_worker"] = record.head_worker
    if record.queued_s:
        entry["queue_wait_s"] = record.queued_s
    if record.queued_head:
        entry["queued_head"] = True
    if record.handover is not None:
        entry |= _described_handover(record.handover)
    if record.decision is not None:
        entry |= {"prompt_tokens": record.tokens, **record.decision.describe()}
    if record.usage is not None:
        entry |= {
            "reported_prompt_tokens": record.usage.prompt_tokens,
            "cached_tokens": record.usage.cached_tokens,
        }
    return entry


def _described_handover(handover: HandoverRecord) -> dict[str, Any]:
    return {
        "prefill_worker": handover.prefill_worker,
        "moved_tokens": handover.moved_tokens,
        "prefill_matched_tokens": handover.matched_tokens,
        "prefill_s": handover.prefill_s,
        "transfer_s": handover.transfer_s,
        "prefill_cached_tokens": handover.cached_tokens,
        "handover_fallback": handover.fallback or None,
    }


class RequestLines:
    """Writes log lines of requests. With kvroute's own handler, all lines of a batch are one write.

    Other handlers (of a test, or of a program that embeds kvroute) get ordinary log records.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger(ACCESS)

    @property
    def is_on(self) -> bool:
        return self._logger.isEnabledFor(logging.INFO)

    @property
    def is_json(self) -> bool:
        """Whether `write` takes the fields of JSON lines, and not messages."""
        handler = self._own_handler()
        return handler is not None and isinstance(handler.formatter, JsonFormatter)

    def write(self, lines: Sequence[tuple[float, str | dict[str, Any]]]) -> None:
        """Write `lines`: seconds since the epoch with a message or the fields of a JSON line, oldest first.

        Raises nothing.
        """
        handler = self._own_handler()
        if handler is None:
            for _, message in lines:
                self._logger.info("%s", message)
            return
        start, prefix, written = 0, "", list[str]()
        since = until = 0.0
        when = begin = ""
        for created, message in lines:
            if not since <= created < until:  # in a large batch most records share their millisecond
                second = int(created)
                if second != start:
                    start, prefix = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
                millisecond = int((created - second) * 1000)
                since, until = second + millisecond / 1000, second + (millisecond + 1) / 1000
                when = prefix + _MILLISECONDS[millisecond]
                begin = f"{when} INFO    {ACCESS} "
            if isinstance(message, str):
                written.append(begin + message)
            else:
                fields = {"time": when, "level": "info", "logger": ACCESS, **message}
                written.append(json.dumps(fields, ensure_ascii=False))
        written.append("")
        with handler.lock or nullcontext():
            handler.write("\n".join(written), len(lines))

    def _own_handler(self) -> LogHandler | None:
        """The handler that `logs.configure` set, if no other handler gets the records."""
        found: list[logging.Handler] = []
        logger: logging.Logger | None = self._logger
        while logger is not None:
            found += logger.handlers
            logger = logger.parent if logger.propagate else None
        if (
            len(found) == 1
            and type(found[0]) is LogHandler
            and isinstance(found[0].formatter, JsonFormatter | TextFormatter)
        ):
            return found[0]
        return None
