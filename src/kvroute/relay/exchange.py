"""One request and its answer: sent to workers in the order of the ranking, relayed, and accounted.

`attempts` has the worker's half; this module has the client's. Every exchange (with an answer, an
error, a disconnect, a shutdown or a defect) ends with one call of `Exchange._end`, which releases everything.
`PredictionAudit` compares the cached tokens that answers report with the predictions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from kvroute.clock import Clock
from kvroute.errors import (
    GatewayError,
    RedirectedByWorker,
    ShuttingDown,
    UpstreamError,
    WorkerUnreachable,
)
from kvroute.fleet.worker import Worker
from kvroute.journal.journal import Journal
from kvroute.metrics import Metrics
from kvroute.openai.headers import header
from kvroute.openai.preamble import MAX_PREAMBLE_BYTES, Preamble
from kvroute.relay import back_pressure
from kvroute.relay.attempts import AttemptDeps, Attempts
from kvroute.relay.attribution import Attribution
from kvroute.relay.feedback import PredictionAudit
from kvroute.relay.stored_responses import ResponseOwners, response_id_in
from kvroute.relay.usage import (
    usage_in,
)
from kvroute.request.downstream import Downstream
from kvroute.request.failures import InternalError, error_event, refuse
from kvroute.request.plan import RequestPlan
from kvroute.request.record import CLIENT_LEFT, Record
from kvroute.request.streams import (
    FRAMED_EVENT_ENDS,
    KEEP_ALIVE,
    StreamWaits,
    WholeEvents,
    is_readable,
    moved,
)
from kvroute.request.wait_queue import WaitQueue
from kvroute.routing.strategy import Candidate
from kvroute.tallies import FastHistogram
from kvroute.tokens.estimate import TokenEstimator
from kvroute.upstream.headers import ANSWERED_HERE, HOP_BY_HOP, response_headers
from kvroute.upstream.response import UpstreamResponse, unframed

log = logging.getLogger(__name__)


_LINE_FEED = 10
_SHORT_S = 0.05
_LAST_GOOD = 299
_NOT_MODIFIED = 304
_COMMENT = b":"
"""The first byte of a comment in an event stream."""
_WITHOUT_BODY = (204, 304)
_DROPPED = HOP_BY_HOP | ANSWERED_HERE
_DROPPED_WITHOUT_BODY = _DROPPED | {b"content-length"}


@dataclass(frozen=True, slots=True)
class ExchangeDeps:
    """What every exchange uses; the runtime builds it once."""

    attempts: AttemptDeps
    metrics: Metrics
    estimator: TokenEstimator
    owners: ResponseOwners
    journal: Journal
    audit: PredictionAudit
    clock: Clock
    attribution: Attribution
    streams: StreamWaits | None = None
    """None: heads of event streams wait for the first token, and there are no keep-alives."""
    now: Callable[[], float] = field(init=False)
    """`clock.now`. To look it up costs more than to call it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "now", self.clock.now)


class Exchange(Struct, eq=False):
    """One request and its answer, from the routing decision to the last byte.

    A state machine without tasks and futures: the worker's connection calls `answer_arrived`, the client's
    side calls `pause`, `resume` and `end`. Mutable: by these calls, on one event loop; no call waits.
    """

    _deps: ExchangeDeps
    _plan: RequestPlan
    _record: Record
    _attempts: Attempts
    _client: Downstream
    _on_end: Callable[[Exchange], object]
    """Called once, at the end."""
    _is_started: bool = False
    """The first event, or the start of the body, went to the client: no other worker can answer any more."""
    _head_worker: str | None = None
    """The worker whose head was sent before any event of it; None if none was."""
    _is_head_due: bool = False
    """The client has waited for `streams.head_wait_s`."""
    _waits_in: WaitQueue | None = None
    _timer: asyncio.TimerHandle | None = None
    """Like `_waits_in`, for a shorter time."""
    _is_event_stream: bool = False
    _events: WholeEvents | None = None
    """Of an event stream that can be added to: neither compressed nor of a length that is announced."""
    _preamble: Preamble | None = None
    """What the current response has sent before its first token; None if that is nothing."""
    _read_parts: int = 0
    """Parts of the response that `_preamble` has read."""
    _awaits_token: bool = False
    """The preamble was passed on, and the first token has not arrived."""
    _gaps: FastHistogram | None = None
    """For an event stream: the histogram of the times between its chunks."""
    _write_framed: Callable[[bytes], None] | None = None
    """Writes chunks of an event stream that already have their framing."""
    _last_chunk_at: float = 0.0
    _before_last: bytes = b""
    _last: bytes = b""
    is_over: bool = False

    def start(self) -> None:
        """Send the request to the first worker of the ranking."""
        plan, waits = self._plan, self._deps.streams
        if plan.query.streamed and waits is not None and waits.head_wait_s:
            self._wait_for_head(waits, plan.query.now - self._record.started)
        try:
            self._attempts.start(self)
        except GatewayError as error:
            self._fail(error)
        except Exception:
            # A defect must end this exchange only, and release its reservations.
            log.exception("an exchange failed")
            self._fail(InternalError("Internal error."))

    def end(self, by: str) -> None:
        """Stop now: the client left ("client") or the gateway stops ("shutdown"). Later calls change
        nothing."""
        if self.is_over:
            return
        self._record.ended_by = by
        self._deps.metrics.streams_aborted.labels(by).inc()
        if by == "client":
            self._record.status = self._record.status or CLIENT_LEFT
            self._client.cut()
            self._end()
        else:
            self._fail(ShuttingDown("The gateway is shutting down."))

    def pause(self) -> None:
        """The client reads slowly: stop reading from the worker until `resume`."""
        if self._attempts.response is not None:
            self._attempts.response.pause()

    def resume(self) -> None:
        """The client has read the written bytes: read from the worker again."""
        if self._attempts.response is not None:
            self._attempts.response.resume()

    def leave(self, worker: Worker) -> None:
        """`worker` was found asleep: unless it has begun to answer, another worker gets the request."""
        if self.is_over or self._is_started:
            return
        try:
            if self._attempts.leave(worker, self):
                self._preamble = None
        except GatewayError as error:
            self._fail(error)
        except Exception:
            # A defect must end this exchange only, and release its reservations.
            log.exception("an exchange failed")
            self._fail(InternalError("Internal error."))

    def answer_arrived(self, response: UpstreamResponse) -> None:
        """Called by the worker's connection: see `upstream.response.AnswerListener`."""
        if response is not self._attempts.response:
            return
        try:
            parts = response.parts
            if self._is_started:
                self._relay(response)
            elif response.status > _LAST_GOOD and self._leaves_worker(response):
                pass
            elif (response.is_over and response.error is None) or (
                parts
                and not (
                    (self._plan.preamble or parts[0].startswith(_COMMENT)) and self._holds_back(response)
                )
            ):
                self._start_answer(response)
            elif response.error is not None:
                self._preamble = None
                self._attempts.retry_after_failure(self)
            elif self._is_head_due and response.status and self._head_worker is None:
                self._send_head(response)
        except GatewayError as error:
            self._fail(error)
        except Exception:
            # A defect must end this exchange only, and release its reservations.
            log.exception("an exchange failed")
            self._fail(InternalError("Internal error."))

    def _leaves_worker(self, response: UpstreamResponse) -> bool:
        """Whether the request goes to another worker because of the answer's status, or may yet do so."""
        status = response.status
        if response.error is not None:
            return False
        if status < 400 and status != _NOT_MODIFIED:
            # Its Location is behind the gateway, and no engine redirects: the worker's URL is wrong.
            response.abort()
            response.error = RedirectedByWorker(f"answered with the status {status}")
            self._preamble = None
            self._attempts.retry_after_failure(self)
            return True
        if status not in back_pressure.STATUSES:
            return False
        retry_after_s = back_pressure.retry_after_of(
            status, response.headers, b"".join(response.parts), is_over=response.is_over
        )
        if retry_after_s is None:
            return False
        if retry_after_s != back_pressure.PENDING:
            self._preamble = None
            self._attempts.leave_busy_worker(self, retry_after_s)
        return True

    def _holds_back(self, response: UpstreamResponse) -> bool:
        """Whether only a preamble has arrived, and the answer goes on."""
        if response.is_over and response.error is None:
            return False
        preamble = self._preamble
        if preamble is None:
            if response.status != 200 or not _answer_fields(response)[2]:
                return False
            self._preamble = preamble = Preamble(self._plan.preamble)
            self._read_parts = 0
        parts = response.parts
        new, self._read_parts = parts[self._read_parts :], len(parts)
        if not preamble.lasts(new[0] if len(new) == 1 else b"".join(new)):
            return False
        if self._is_head_due and self._head_worker is None:
            self._send_head(response)
        is_due = self._head_worker is not None and preamble.events > 0
        return not is_due and preamble.size <= MAX_PREAMBLE_BYTES

    def _wait_for_head(self, waits: StreamWaits, waited_s: float) -> None:
        if waited_s < _SHORT_S:
            self._waits_in = waits.head
            waits.head.add(self)
        else:  # it has been in the queue, or its tokens took long
            left_s = max(0.0, waits.head_wait_s - waited_s)
            self._timer = asyncio.get_running_loop().call_later(left_s, self._wait_ended)

    def wait_expired(self, queue: WaitQueue) -> None:
        """See `own_limits.Waiter`."""
        self._waits_in = None
        self._wait_ended()

    def _wait_ended(self) -> None:
        """The head is due, or the stream has been silent."""
        self._timer = None
        if self.is_over:
            return
        try:
            if self._is_started or self._head_worker is not None:
                self._keep_alive()
                return
            self._is_head_due = True
            response = self._attempts.response
            if response is not None and response.status:
                self.answer_arrived(response)
        except Exception:
            # A defect must end this exchange only, and release its reservations.
            log.exception("an exchange failed")
            self._fail(InternalError("Internal error."))

    def _send_head(self, response: UpstreamResponse) -> None:
        """Pass on the head of an event stream before any of its events, if the stream can be added to."""
        candidate = self._attempts.candidate
        assert candidate is not None
        fields, is_sized, is_event_stream = _answer_fields(response)
        if response.status != 200 or not is_event_stream or is_sized or not is_readable(fields):
            return
        client, record = self._client, self._record
        record.status, record.streamed = 200, True
        self._head_worker, self._is_event_stream = candidate.worker.spec.id, True
        self._events = WholeEvents()
        client.start_relayed(200, self._own_fields(fields, candidate), is_sized=False)
        client.flush_head()
        self._last_chunk_at = self._deps.now()
        self._stop_waiting()
        self._listen_for_silence()

    def _own_fields(self, fields: bytes, candidate: Candidate) -> bytes:
        own = self._deps.attribution.lines(candidate, self._plan.decision)
        return b"%bx-request-id: %b\r\n%b" % (fields, self._record.request_id, own)

    def _stop_waiting(self) -> None:
        if self._waits_in is not None:
            self._waits_in.discard(self)
            self._waits_in = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _listen_for_silence(self) -> None:
        """From now on send comments while nothing comes."""
        waits = self._deps.streams
        if waits is not None and waits.keep_alive_s:
            self._waits_in = waits.silence
            waits.silence.add(self)

    def _keep_alive(self) -> None:
        """Send a comment if nothing has come for long enough, and look again when that may be so."""
        waits = self._deps.streams
        assert waits is not None
        keep_alive_s = waits.keep_alive_s
        if not keep_alive_s:
            return
        left_s = self._last_chunk_at + keep_alive_s - self._deps.now()
        if left_s <= _SHORT_S:
            left_s, client, events = keep_alive_s, self._client, self._events
            if not client.is_paused and events is not None and not events.is_inside:
                client.write(KEEP_ALIVE)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._wait_ended)

    def _start_answer(self, response: UpstreamResponse) -> None:
        """Relay the head and the first bytes, or the whole of an answer that is complete."""
        deps, plan, record, candidate = self._deps, self._plan, self._record, self._attempts.candidate
        assert candidate is not None
        status = response.status
        health = deps.attempts.health
        if status >= 500 or health.suspects:  # `report_status` would do nothing otherwise
            health.report_status(candidate.worker, status)
        if status in deps.attempts.retry_statuses and self._attempts.retry_after_status(self):
            return
        record.status = status
        if record.error:
            record.error = ""  # the retry counters have the errors of earlier attempts
        now = deps.now()
        fields, is_sized, is_event_stream = _answer_fields(response)
        if self._head_worker is not None and not self._may_continue(response, fields, is_event_stream):
            return
        if plan.stores_response and (response_id := response_id_in(b"".join(response.parts))):
            deps.owners.remember(response_id, candidate.worker.id)
        self._is_started = True
        self._is_event_stream = record.streamed = is_event_stream
        client, preamble = self._client, self._preamble
        if response.is_over and response.error is None:
            record.first_byte = now
            parts = response.parts
            whole = parts[0] if len(parts) == 1 else b"".join(parts)
            if self._head_worker is None:
                # `_own_fields` inlined: most answers come here.
                own = deps.attribution.lines(candidate, plan.decision)
                fields = b"%bx-request-id: %b\r\n%b" % (fields, record.request_id, own)
                client.answer(status, fields, whole, is_sized)
            else:
                client.finish(whole)
            if is_event_stream:
                self._first_token_arrived(now)
            if status == 200:
                self._report_usage(candidate, b"", unframed(whole) if is_event_stream else whole)
            self._end(now)
        else:
            if self._head_worker is None:
                if self._waits_in is not None or self._timer is not None:
                    self._stop_waiting()
                client.start_relayed(status, self._own_fields(fields, candidate), is_sized=is_sized)
            if self._events is None and is_event_stream and not is_sized and is_readable(fields):
                self._events = WholeEvents()
            self._last = chunk = response.take()
            if not self._write(chunk) and self._head_worker is None:
                client.flush_head()
            if preamble is not None and not preamble.is_over:
                self._awaits_token = True
            else:
                record.first_byte = now
                if is_event_stream:
                    self._first_token_arrived(now)
            if response.error is not None:
                self._worker_failed(response.error)
                return
            if client.is_paused:
                response.pause()
            if is_event_stream:
                self._last_chunk_at = now
                if self._head_worker is None and self._events is not None:
                    self._listen_for_silence()
                if not self._awaits_token:
                    self._pass_frames(response)

    def _may_continue(self, response: UpstreamResponse, fields: bytes, is_event_stream: bool) -> bool:
        """Whether this answer may follow the head that the client has got; otherwise the exchange ends."""
        candidate, record = self._attempts.candidate, self._record
        assert candidate is not None
        assert self._head_worker is not None
        worker = candidate.worker.spec.id
        if response.status != 200 or not is_event_stream or not is_readable(fields):
            record.error = "status"
            self._fail(
                WorkerUnreachable(
                    f"Worker {self._head_worker!r} broke off its answer, and worker {worker!r} answered with "
                    f"the status {response.status}."
                )
            )
            return False
        if worker != self._head_worker:
            record.head_worker = self._head_worker
            self._deps.metrics.streams_moved.inc()
            self._client.write(moved(self._head_worker, worker))
        return True

    def _pass_frames(self, response: UpstreamResponse) -> None:
        """From now on pass on whole chunks as they come."""
        self._write_framed = write = self._client.framed_writer()
        if write is not None:
            self._listen_for_chunks(response)

    def _listen_for_chunks(self, response: UpstreamResponse) -> None:
        events = self._events
        is_between = events is not None and not events.held and not events.is_inside
        response.on_framed_chunk = self._on_framed_chunk if is_between else self._on_framed_part

    def _first_token_arrived(self, now: float) -> None:
        """The first event of a stream that is no preamble counts as the first token."""
        self._attempts.first_token_arrived(now)
        plan = self._plan
        self._gaps = self._deps.metrics.gaps(plan.model, self._record.worker, plan.decision.strategy)
        self._last_chunk_at = now

    def _on_framed_chunk(self, framed: bytes) -> None:
        """Pass on one chunk of an event stream: see `UpstreamResponse.on_framed_chunk`."""
        write, gaps = self._write_framed, self._gaps
        assert write is not None
        assert gaps is not None
        # `endswith` with several ends costs 450 instructions more, and most engines end events in this way.
        if (framed[-4] == _LINE_FEED and framed[-3] == _LINE_FEED) or framed.endswith(FRAMED_EVENT_ENDS):
            write(framed)
        else:
            self._write_part(framed)
        self._before_last = self._last
        self._last = framed
        now = self._deps.now()
        gaps.observe(now - self._last_chunk_at)
        self._last_chunk_at = now

    def _on_framed_part(self, framed: bytes) -> None:
        """Like `_on_framed_chunk`, for a chunk that does not begin with an event."""
        assert self._gaps is not None
        self._write_part(framed)
        self._before_last, self._last = self._last, framed
        now = self._deps.now()
        self._gaps.observe(now - self._last_chunk_at)
        self._last_chunk_at = now

    def _write_part(self, framed: bytes) -> None:
        self._write(unframed(framed))
        response = self._attempts.response
        if response is not None:
            self._listen_for_chunks(response)

    def _write(self, chunk: bytes) -> bool:
        """Pass on the whole events of `chunk`; all of it, if it is no event stream that can be added to.

        Returns whether there was anything to pass on.
        """
        if self._events is not None:
            chunk = self._events.take(chunk)
        if chunk:
            self._client.write(chunk)
        return bool(chunk)

    def _relay(self, response: UpstreamResponse) -> None:
        """Pass on the bytes that have arrived since the first ones."""
        client, chunk = self._client, response.take()
        if chunk:
            self._before_last, self._last = self._last, chunk
            if self._gaps is not None:
                now = self._deps.now()
                self._gaps.observe(now - self._last_chunk_at)
                self._last_chunk_at = now
        if self._awaits_token:
            self._last_chunk_at = self._deps.now()
            self._await_token(response, chunk)
        if response.is_over:
            if response.error is None:
                client.finish(chunk if self._events is None else self._events.held + chunk)
                self._report_last_usage()
                self._end()
            else:
                if chunk:
                    self._write(chunk)
                self._worker_failed(response.error)
            return
        if chunk:
            self._write(chunk)
        if client.is_paused:
            response.pause()

    def _await_token(self, response: UpstreamResponse, chunk: bytes) -> None:
        """Look for the first token in `chunk`; the end of a complete answer counts as one."""
        preamble = self._preamble
        assert preamble is not None
        if preamble.lasts(chunk) and (not response.is_over or response.error is not None):
            return
        self._awaits_token = False
        self._record.first_byte = now = self._deps.now()
        self._first_token_arrived(now)
        if not response.is_over:
            self._pass_frames(response)

    def _report_last_usage(self) -> None:
        candidate = self._attempts.candidate
        if self._record.status == 200 and candidate is not None:
            before_last, last = self._before_last, self._last
            if self._is_event_stream:
                before_last, last = unframed(before_last), unframed(last)
            self._report_usage(candidate, before_last, last)

    def _report_usage(self, candidate: Candidate, before_last: bytes, last: bytes) -> None:
        """Pass the worker's usage figures to the token estimator and to the audit of predictions."""
        usage = usage_in(before_last, last)
        if usage is not None:
            deps, plan = self._deps, self._plan
            self._record.usage = usage
            deps.estimator.observe(plan.canonical, plan.prompts, usage.prompt_tokens)
            deps.audit.answered(plan, candidate, usage)

    def _worker_failed(self, error: UpstreamError) -> None:
        """The worker ended its answer before it was complete."""
        deps, record, candidate = self._deps, self._record, self._attempts.candidate
        assert candidate is not None
        record.ended_by, record.error = "worker", error.cause
        deps.metrics.streams_aborted.labels("worker").inc()
        deps.attempts.health.report_failure(candidate.worker, error.cause)
        self._attempts.report_lost(candidate.worker, error)
        self._fail(WorkerUnreachable(f"Worker {candidate.worker.id!r} broke off its answer."))

    def _fail(self, error: GatewayError) -> None:
        """End the exchange with an error, in the way that the protocol still allows.

        If nothing was sent, the client gets an error answer; in an event stream an error event, behind whole
        events only; otherwise the connection is closed.
        """
        if self.is_over:
            return
        client = self._client
        if self._head_worker is not None and not self._is_started:
            record, metrics = self._record, self._deps.metrics
            record.error = record.error or error.error_code or error.type
            if not record.ended_by:
                record.ended_by = "worker"
                metrics.streams_aborted.labels("worker").inc()
        if not self._is_started and self._head_worker is None:
            refuse(self._deps.metrics, self._record, error, client, self._plan.errors)
        elif self._events is not None and not self._events.is_inside:
            client.finish(error_event(error, self._plan.errors))
        else:
            client.cut()
        self._end()

    def _end(self, now: float | None = None) -> None:
        """Release everything. Called once for each exchange. `now`: the time, if it was just read."""
        self.is_over = True
        if self._waits_in is not None or self._timer is not None:
            self._stop_waiting()
        deps, on_end = self._deps, self._on_end
        if now is None:
            now = deps.now()
        # Each step must run whatever the ones before it raise: nothing else releases what they hold.
        try:
            self._attempts.release(now)
        finally:
            try:
                deps.journal.finished(self._record, now)
            finally:
                on_end(self)


def _answer_fields(response: UpstreamResponse) -> tuple[bytes, bool, bool]:
    """The header lines for the client, whether one is Content-Length, and whether an event stream follows."""
    plain = response.plain
    if plain is not None:
        _, _, _, fields, is_event_stream, _, body_bytes = plain
        return fields, body_bytes is not None, is_event_stream
    dropped = _DROPPED_WITHOUT_BODY if response.status in _WITHOUT_BODY else _DROPPED
    headers = response_headers(response.headers, dropped)
    return (
        b"".join([b"%b: %b\r\n" % pair for pair in headers]),
        any(name == b"content-length" for name, _ in headers),
        header(headers, b"content-type").startswith(b"text/event-stream"),
    )
