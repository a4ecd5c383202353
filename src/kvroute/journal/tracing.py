"""OpenTelemetry spans of finished requests, made from their records and sent by a thread (OTLP over HTTP).

The trace continues the client's `traceparent` (W3C Trace Context, level 1), and the worker gets one that
names our span, so that vLLM's spans lie below it. Spans contain no prompts and no keys.
"""

from __future__ import annotations

import logging
import queue
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvroute import __version__
from kvroute.clock import Clock
from kvroute.errors import ConfigError, GatewayError
from kvroute.options import Options, option
from kvroute.request.record import HandoverRecord, Record, Trace
from kvroute.routing.strategy import Candidate

log = logging.getLogger(__name__)

_traceparent = re.compile(
    rb"(?im)^traceparent:[ \t]*([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})[^\r\n]*\r\n"
).search
_SAMPLED = 1
_MAX_CANDIDATES = 16
_BATCH = 256
_CLOSE_TIMEOUT_S = 2.0


class TracingOptions(Options):
    """Spans of requests for an OpenTelemetry collector; needs `pip install 'kvroute[otel]'`."""

    endpoint: str = option(
        "",
        "URL of the collector's OTLP receiver over HTTP, such as `http://otel:4318/v1/traces`; empty: no "
        "spans. OTEL_EXPORTER_OTLP_HEADERS adds headers.",
        pattern="^(https?://.+)?$",
    )
    sample_ratio: float = option(
        1.0,
        "Share of the requests without a `traceparent` that are traced. A request with one is traced if its "
        "sampled flag is set.",
        ge=0,
        le=1,
        higher="more requests can be looked up",
        lower="less work for gateway and collector",
    )
    service_name: str = option("kvroute", "The spans' `service.name`.", min_length=1)
    max_waiting: int = option(
        8192,
        "Most spans in the queue for the collector. When it is full, new ones are dropped and counted.",
        ge=1,
        higher="bridges longer pauses of the collector",
        lower="less memory",
    )
    timeout_s: float = option(5.0, "Longest wait for the collector's answer. No request waits for it.", gt=0)


class SpanExporter(Protocol):
    """OpenTelemetry's exporter, as far as it is used here. `export` blocks; `.name` SUCCESS means sent."""

    def export(self, spans: Sequence[Any]) -> Any: ...
    def shutdown(self) -> None: ...


class Tracer:
    """Samples requests, and makes and exports the spans of finished ones. `open` starts the thread.

    `count` gets the outcome (exported, dropped, failed) and a number of spans; it is called from the event
    loop only. Mutable: the queue, and counts of the thread that `settle` passes on.
    """

    def __init__(
        self,
        options: TracingOptions,
        exporter: SpanExporter,
        count: Callable[[str, int], None],
        seed: int | None = None,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._options = options
        self._exporter = exporter
        self._count = count
        self._random = random.Random(seed)
        self._limit = round(options.sample_ratio * 2**64)
        self._resource = Resource.create(
            {"service.name": options.service_name, "service.version": __version__}
        )
        self._scope = InstrumentationScope("kvroute", __version__)
        self._queue: queue.Queue[Any] = queue.Queue(options.max_waiting)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace exporter", daemon=True)
        self._done = {"exported": 0, "failed": 0}
        self._settled = {"exported": 0, "failed": 0}

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send what waits, for at most two seconds. Blocks; call it in a thread."""
        self._stop.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        self.settle()

    # Requests

    def begin(self, record: Record, fields: bytes) -> bytes:
        """Start the trace of a request; returns the header lines for the worker. About 3 us.

        Without sampling, the header lines stay as they are.
        """
        record.was_sampled = True
        found = _traceparent(fields)
        if found is not None and found[1] != b"ff" and int(found[2], 16) and int(found[3], 16):
            record.trace_id = found[2].decode().lower()
            if not int(found[4], 16) & _SAMPLED:
                return fields
            trace_id, parent_id = int(found[2], 16), int(found[3], 16)
            fields = fields[: found.start()] + fields[found.end() :]
        else:
            trace_id, parent_id = self._random.getrandbits(128) or 1, 0
            if trace_id & (2**64 - 1) >= self._limit:
                return fields
            record.trace_id = f"{trace_id:032x}"
            if found is not None:
                fields = fields[: found.start()] + fields[found.end() :]
        span_id, worker_span_id = self._random.getrandbits(64) or 1, self._random.getrandbits(64) or 1
        prefill_span_id = self._random.getrandbits(64) or 1
        record.trace = Trace(trace_id, parent_id, span_id, worker_span_id, prefill_span_id)
        return fields + b"traceparent: 00-%032x-%016x-01\r\n" % (trace_id, worker_span_id)

    def refused(self, fields: bytes, error: GatewayError, clock: Clock) -> str:
        """Make the span of a request whose head is refused. Returns its trace id, "" if it is not traced."""
        now = clock.now()
        record = Record(b"", "", now, status=error.status, error=error.error_code or error.type, ended=now)
        self.begin(record, fields)
        self.finished(record, clock.wall() - now)
        return record.trace_id

    def finished(self, record: Record, wall_offset: float) -> None:
        """Put the spans of a finished request into the queue, or drop and count them. Does not wait."""
        spans = self.spans(record, wall_offset)
        for number, span in enumerate(spans):
            try:
                self._queue.put_nowait(span)
            except queue.Full:
                self._count("dropped", len(spans) - number)
                return

    def settle(self) -> None:
        """Pass the thread's counts on."""
        for outcome, total in list(self._done.items()):
            self._count(outcome, total - self._settled[outcome])
            self._settled[outcome] = total

    def spans(self, record: Record, wall_offset: float) -> list[Any]:
        """The spans of a finished request: the whole, and its phases in order of time."""
        trace = record.trace
        if trace is None:
            return []
        spans = [self._span("kvroute request", record.started, record.ended, record, wall_offset)]

        def phase(name: str, start: float, end: float, **more: Any) -> None:
            if end >= start > 0:
                spans.append(self._span(name, start, end, record, wall_offset, **more))

        phase("parse", record.started, trace.received)
        phase("tokenize", trace.received, trace.prepared)
        if record.queued_s:
            phase("queue", trace.planned - record.queued_s, trace.planned)
        if trace.decided:
            phase(
                "decide",
                trace.planned,
                trace.decided,
                attributes=_decision(record),
                events=_candidates(record),
            )
        if record.attempts:
            first_byte = record.ended if record.first_byte is None else record.first_byte
            phase("worker", trace.decided, record.ended, span_id=trace.worker_span_id, is_client=True)
            for each in trace.connects:
                end = min(each.ended or record.ended, record.ended)
                more = {"kvroute.worker": each.worker, **({"error.type": each.error} if each.error else {})}
                phase("connect", each.began, end, parent_id=trace.worker_span_id, attributes=more)
            if record.handover is not None:
                for name, start, end, more in _legs(record, trace, record.handover):
                    phase(name, start, end, parent_id=trace.worker_span_id, **more)
            phase("first byte", trace.decided, first_byte, parent_id=trace.worker_span_id)
            if record.first_byte is not None:
                phase("stream", record.first_byte, record.ended, parent_id=trace.worker_span_id)
        return spans

    def _span(
        self,
        name: str,
        start: float,
        end: float,
        record: Record,
        wall_offset: float,
        *,
        span_id: int = 0,
        parent_id: int = 0,
        is_client: bool = False,
        attributes: dict[str, Any] | None = None,
        events: Sequence[tuple[str, dict[str, Any]]] = (),
    ) -> Any:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        trace = record.trace
        assert trace is not None
        is_root = name == "kvroute request"
        flags = TraceFlags(TraceFlags.SAMPLED)
        parent = trace.parent_id if is_root else parent_id or trace.span_id
        own = trace.span_id if is_root else span_id or self._random.getrandbits(64) or 1
        at = [int((each + wall_offset) * 1e9) for each in (start, end)]
        error = record.error if is_root else (attributes or {}).get("error.type", "")
        has_failed = bool(error) or (is_root and record.status >= 500)
        kind = SpanKind.SERVER if is_root else SpanKind.CLIENT if is_client else SpanKind.INTERNAL
        return ReadableSpan(
            name,
            SpanContext(trace.trace_id, own, is_remote=False, trace_flags=flags),
            SpanContext(trace.trace_id, parent, is_remote=is_root, trace_flags=flags) if parent else None,
            self._resource,
            _request(record) if is_root else attributes or {},
            [Event(event, values, at[1]) for event, values in events],
            kind=kind,
            status=Status(StatusCode.ERROR, error or None) if has_failed else Status(),
            start_time=at[0],
            end_time=at[1],
            instrumentation_scope=self._scope,
        )

    # The thread

    def _run(self) -> None:
        while True:
            batch = self._batch()
            if batch:
                self._export(batch)
            elif self._stop.is_set():
                break
        self._exporter.shutdown()

    def _batch(self) -> list[Any]:
        batch: list[Any] = []
        try:
            batch.append(self._queue.get(timeout=0.2))
            while len(batch) < _BATCH:
                batch.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return batch

    def _export(self, batch: list[Any]) -> None:
        try:
            is_sent = self._exporter.export(batch).name == "SUCCESS"
        except Exception:
            is_sent = False
            log.exception("the exporter of spans failed")
        self._done["exported" if is_sent else "failed"] += len(batch)


def make_tracer(options: TracingOptions, count: Callable[[str, int], None]) -> Tracer:
    """A tracer for the configured collector. Raises ConfigError if OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(
            "tracing.endpoint", "OpenTelemetry is not installed: pip install 'kvroute[otel]'"
        ) from None
    import requests  # the exporter's HTTP client

    class BoundedSession(requests.Session):
        """Reads at most 64 KiB of an answer, as it comes: collectors answer with some bytes."""

        def request(self, *args: Any, **settings: Any) -> requests.Response:
            answer = super().request(*args, **{**settings, "stream": True, "allow_redirects": False})
            try:
                answer._content = answer.raw.read(_MAX_ANSWER_BYTES, decode_content=False)
            finally:
                answer.close()
            return answer

    session = BoundedSession()
    session.headers["accept-encoding"] = "identity"
    exporter = OTLPSpanExporter(endpoint=options.endpoint, timeout=options.timeout_s, session=session)
    return Tracer(options, exporter, count)


_MAX_ANSWER_BYTES = 65_536


def _request(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.route": record.path,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "kvroute.request_id": record.request_id.decode(),
        "kvroute.worker": record.worker,
        "kvroute.attempts": record.attempts,
        "kvroute.matched_tokens": record.matched_tokens,
        "kvroute.prompt_tokens": record.tokens,
        "kvroute.streamed": record.streamed,
    }
    if record.usage is not None and record.usage.cached_tokens is not None:
        found["kvroute.cached_tokens"] = record.usage.cached_tokens
    if (handover := record.handover) is not None:
        found["kvroute.prefill_worker"] = handover.prefill_worker
        found["kvroute.moved_tokens"] = handover.moved_tokens
        for name, seconds in (("prefill", handover.prefill_s), ("transfer", handover.transfer_s)):
            if seconds is not None:
                found[f"kvroute.{name}_s"] = seconds
        if handover.fallback:
            found["kvroute.handover_fallback"] = handover.fallback
    for name, text in (("error.type", record.error), ("kvroute.ended_by", record.ended_by)):
        if text:
            found[name] = text
    return found


def _legs(
    record: Record, trace: Trace, handover: HandoverRecord
) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """The spans of a request whose prompt another worker computed: name, start, end and the rest of each."""
    failed = {"error.type": handover.fallback} if handover.fallback else {}
    has_prefilled = handover.prefill_s is not None
    first = {
        "kvroute.worker": handover.prefill_worker,
        "kvroute.matched_tokens": handover.matched_tokens,
        **({} if handover.cached_tokens is None else {"kvroute.cached_tokens": handover.cached_tokens}),
        **({} if has_prefilled else failed),
    }
    end = handover.prefilled or record.ended
    yield (
        "prefill leg",
        handover.began,
        end,
        {
            "span_id": trace.prefill_span_id,
            "is_client": True,
            "attributes": first,
        },
    )
    if has_prefilled:
        second = {"kvroute.worker": record.worker, "kvroute.moved_tokens": handover.moved_tokens, **failed}
        yield "transfer", handover.prefilled, handover.moved or record.ended, {"attributes": second}


def _decision(record: Record) -> dict[str, Any]:
    decision = record.decision
    if decision is None:
        return {}
    return {
        "kvroute.strategy": decision.strategy,
        "kvroute.reason": decision.reason.value,
        "kvroute.candidates": len(decision.ranking),
    }


def _candidates(record: Record) -> list[tuple[str, dict[str, Any]]]:
    """The arithmetic of the cheapest workers, cheapest first, then that of the prefill worker, if another
    worker answers: every term in seconds."""
    decision = record.decision
    if decision is None:
        return []
    events = [("candidate", _arithmetic(each)) for each in decision.ranking[:_MAX_CANDIDATES]]
    if decision.handover is not None:
        events.append(("prefill candidate", _arithmetic(decision.handover.prefill)))
    return events


def _arithmetic(candidate: Candidate) -> dict[str, Any]:
    return {
        "kvroute.worker": str(candidate.worker.id),
        "kvroute.matched_tokens": candidate.matched_tokens,
        "kvroute.cost_s": float(candidate.score),
        **{f"kvroute.{name}_s": float(value) for name, value in candidate.terms._asdict().items()},
    }
