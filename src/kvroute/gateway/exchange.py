"""One request's life behind the gateway: tried on workers in order, relayed, accounted.

A state machine that the loop drives: the worker's connection tells what arrived, the client's side takes
it, and nothing in between is a task or a future. Whatever ends it (an answer, errors, a client that
leaves, a shutdown, a defect), it passes `_end` once, where everything that was accounted is given back.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from kvroute.clock import Clock
from kvroute.errors import (
    ConnectionLost,
    ConnectRefused,
    ConnectTimeout,
    GatewayError,
    InvalidRequest,
    PoolExhausted,
    ResponseTimeout,
    ShuttingDown,
    UpstreamError,
    WorkerTimeout,
    WorkerUnreachable,
)
from kvroute.fleet.health import HealthMonitor
from kvroute.gateway.accuracy import PredictionAudit
from kvroute.gateway.downstream import Downstream, header
from kvroute.gateway.failures import InternalError, error_event, refuse
from kvroute.gateway.journal import Journal, Record, Usage
from kvroute.gateway.planner import RequestPlan
from kvroute.gateway.stored import ResponseOwners, response_id_in
from kvroute.metrics import Metrics, Spread
from kvroute.openai.request import UNREADABLE
from kvroute.routing.registry import STRATEGIES
from kvroute.routing.router import Dispatch, Router
from kvroute.routing.strategy import Candidate, Needs, RouteDecision, RouteQuery, Tokens
from kvroute.tokens.estimate import TokenEstimator
from kvroute.upstream.headers import ANSWERED_HERE, HOP_BY_HOP, response_headers
from kvroute.upstream.options import RetryBudget
from kvroute.upstream.plain_answer import unframed
from kvroute.upstream.response import UpstreamResponse
from kvroute.upstream.transport import Transports

log = logging.getLogger(__name__)

_RETRYABLE = (ConnectRefused, ConnectTimeout, ConnectionLost, PoolExhausted)
_WITHOUT_BODY = (204, 304)
_DROPPED = HOP_BY_HOP | ANSWERED_HERE
_RANK_FIELD = b"x-data-parallel-rank:"
_DROPPED_WITHOUT_BODY = _DROPPED | {b"content-length"}
CLIENT_LEFT = 499
"""nginx's status for a request whose client left before its answer began; only metrics and logs see it."""


_TAIL_BYTES = 4096
_SMALL_BYTES = 2048
"""Up to here it costs less to decode an answer than to search it."""
# Inside generated text the quotes would be escaped, so these match only the worker's own fields.
_first_prompt_tokens = re.compile(rb'"usage"\s*:\s*\{\s*"(?:prompt|input)_tokens"\s*:\s*(\d+)').match
_prompt_tokens = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)').search
_cached_tokens = re.compile(rb'"cached_tokens"\s*:\s*(\d+)').search


class _Details(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cached_tokens: int | None = None


class _Answer(Struct, gc=False):
    usage: _Usage | None = None


_new = tuple.__new__
_decode_answer = msgspec.json.Decoder(_Answer).decode


def usage_in(before_last: bytes, last: bytes) -> Usage | None:
    """The usage in an answer's last two chunks, None where it has none. A few us, once an answer."""
    if not before_last and len(last) <= _SMALL_BYTES and last.startswith(b"{"):
        usage = _decoded(last)
        if usage is not None:
            return usage
    tail = (before_last + last if len(last) < _TAIL_BYTES else last)[-_TAIL_BYTES:]
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None
    # It is the first field of all engines' usage; to search for it costs three times as much.
    prompt = _first_prompt_tokens(tail, start) or _prompt_tokens(tail, start)
    if prompt is None:
        return None
    # Most engines do not tell by default, and to find a literal absent costs less than a pattern.
    cached = _cached_tokens(tail, start) if tail.find(b'"cached_tokens"', start) >= 0 else None
    return _new(Usage, (int(prompt[1]), int(cached[1]) if cached else None))


def _decoded(answer: bytes) -> Usage | None:
    """Of a whole answer; None where it is not to be had in this way."""
    try:
        usage = _decode_answer(answer).usage
    except UNREADABLE:
        return None
    if usage is None:
        return None
    tokens, details = usage.prompt_tokens, usage.prompt_tokens_details
    if tokens is None:
        tokens, details = usage.input_tokens, usage.input_tokens_details
    if tokens is None or tokens < 0:
        return None
    cached = usage.cached_tokens if details is None else details.cached_tokens
    if cached is not None and cached < 0:
        cached = None
    # As `Usage(...)`, without its Python-level constructor.
    return _new(Usage, (tokens, cached))


_MOST_LINES = 4096
_PREDICTING = frozenset(
    name for name, strategy in STRATEGIES.items() if strategy.needs in (Needs.PROMPT, Needs.TOKENS)
)
"""Strategies that predict cached tokens: those that read the prompt."""


class Attribution:
    """Mutable: remembers the lines it has made, by all that they say, as most requests hit nothing or a known
    beginning; at most 4096, so that no coming and going of workers fills the memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str, int, Tokens | None], bytes] = {}

    def lines(self, candidate: Candidate, decision: RouteDecision) -> bytes:
        """Of an answer by `candidate`; with a strategy that predicts hits also its predicted
        `cached_tokens`, in all and by tier."""
        held = candidate.held
        key = (
            candidate.worker.spec.id,
            decision.strategy,
            decision.reason,
            candidate.matched_tokens,
            None if held is None else held.tokens,
        )
        lines = self._known.get(key)
        if lines is None:
            if len(self._known) >= _MOST_LINES:
                self._known.clear()
            lines = self._known[key] = _lines(candidate, decision)
        return lines


def _lines(candidate: Candidate, decision: RouteDecision) -> bytes:
    own = b"x-kvroute-worker: %b\r\nx-kvroute-strategy: %b\r\nx-kvroute-reason: %b\r\n" % (
        candidate.worker.spec.id.encode(),
        decision.strategy.encode(),
        decision.reason.encode(),
    )
    if decision.strategy not in _PREDICTING:
        return own
    tokens, held = candidate.matched_tokens, candidate.held
    gpu, l1, l2 = (tokens, 0, 0) if held is None else held.tokens
    return b"%bx-kvroute-hit-tokens: %d\r\nx-kvroute-hit-tiers: gpu=%d;l1=%d;l2=%d\r\n" % (
        own,
        tokens,
        gpu,
        l1,
        l2,
    )


@dataclass(frozen=True, slots=True)
class ExchangeDeps:
    """What every exchange uses; built once by the runtime."""

    router: Router
    transports: Transports
    health: HealthMonitor
    budget: RetryBudget
    metrics: Metrics
    estimator: TokenEstimator
    owners: ResponseOwners
    journal: Journal
    audit: PredictionAudit
    clock: Clock
    retry_statuses: frozenset[int]
    attribution: Attribution = field(default_factory=Attribution)
    sent: Callable[[RouteQuery, Candidate], None] | None = None
    """Hears of every attempt, once it is on its way; returns at once."""
    now: Callable[[], float] = field(init=False)
    """`clock.now`, asked for once: to find it costs more than to call it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "now", self.clock.now)


class Exchange(Struct, eq=False):
    """Mutable: by what it is told. Belongs to one event loop; every method returns at once.

    `_fields` are the client's headers as `upstream.headers.relayed_fields` gives them; `_ended` is called
    once, at the end.
    """

    _use: ExchangeDeps
    _plan: RequestPlan
    _record: Record
    _fields: bytes
    _client: Downstream
    _ended: Callable[[Exchange], object]
    _candidate: Candidate | None = None
    _dispatch: Dispatch | None = None
    _response: UpstreamResponse | None = None
    _is_started: bool = False
    _is_event_stream: bool = False
    _gaps: Spread | None = None
    """Of an event stream, where the times between its chunks are counted."""
    _write_framed: Callable[[bytes], None] | None = None
    """Where the chunks of an event stream go that come one by one."""
    _last_chunk_at: float = 0.0
    _before_last: bytes = b""
    _last: bytes = b""
    is_over: bool = False

    def begin(self) -> None:
        """Send the request to the first worker of the ranking."""
        try:
            self._use.budget.request(self._plan.query.now)
            self._next()
        except GatewayError as error:
            self._give_up(error)
        except Exception:
            log.exception("an exchange failed")
            self._give_up(InternalError("Internal error."))

    def end(self, by: str) -> None:
        """Stop now: the client left ("client") or the gateway must stop ("shutdown"). Later calls change
        nothing."""
        if self.is_over:
            return
        self._record.ended_by = by
        self._use.metrics.streams_aborted.labels(by).inc()
        if by == "client":
            self._record.status = self._record.status or CLIENT_LEFT
            self._client.cut()
            self._end()
        else:
            self._give_up(ShuttingDown("The gateway is shutting down."))

    def hold(self) -> None:
        """The client takes what was written too slowly: read no more until `go_on`."""
        if self._response is not None:
            self._response.hold()

    def go_on(self) -> None:
        """The client has taken what was written."""
        if self._response is not None:
            self._response.go_on()

    def answer_arrived(self, response: UpstreamResponse) -> None:
        """As `upstream.response.AnswerListener`."""
        if response is not self._response:
            return
        try:
            if self._is_started:
                self._relay()
            # The head waits for the first body byte: until then another worker can still answer.
            elif response.parts or (response.is_over and response.error is None):
                self._start(response)
            elif response.is_over:
                self._failed()
        except GatewayError as error:
            self._give_up(error)
        except Exception:
            log.exception("an exchange failed")
            self._give_up(InternalError("Internal error."))

    def _take_framed(self, framed: bytes) -> None:
        """As `UpstreamResponse.take_framed`: one chunk of an event stream, passed on as it is."""
        write, gaps = self._write_framed, self._gaps
        assert write is not None
        assert gaps is not None
        write(framed)
        self._before_last = self._last
        self._last = framed
        now = self._use.now()
        gaps.observe(now - self._last_chunk_at)
        self._last_chunk_at = now

    # Towards the worker.

    def _next(self) -> None:
        """Dispatch to the next worker of the ranking."""
        use, plan, record = self._use, self._plan, self._record
        query, decision, tried = plan.query, plan.decision, record.attempts
        candidate = self._candidate = decision.ranking[tried]
        # The first attempt is dispatched at the moment for which it was planned.
        now = use.now() if tried else query.now
        record.worker = candidate.worker.spec.id
        record.matched_tokens = candidate.matched_tokens
        record.attempts = tried + 1
        # The worker reads while it is accounted here; the next decision comes after both.
        self._submit(candidate)
        self._dispatch = use.router.dispatch(query, decision, candidate, now)
        if use.sent is not None:
            use.sent(query, candidate)

    def _submit(self, candidate: Candidate, fresh: bool = False) -> None:
        plan, fields, held = self._plan, self._fields, candidate.held
        if held is not None and held.rank is not None and _RANK_FIELD not in fields.lower():
            fields += b"%b %d\r\n" % (_RANK_FIELD, held.rank)
        body = plan.body if plan.other_bodies is None else plan.body_for(candidate.worker.id)
        transport = self._use.transports.of(candidate.worker)
        try:
            head = transport.heads.head(plan.method, plan.target, fields, self._record.request_id, len(body))
        except ValueError as error:
            raise InvalidRequest(f"The request cannot be forwarded: {error}.") from error
        self._response = transport.submit(head, body, self, fresh, plan.query.streamed)

    def _give_back(self, now: float) -> None:
        """The attempt is over."""
        response, dispatch = self._response, self._dispatch
        if response is not None:
            self._response = None
            if not response.is_over:
                response.abort()
        if dispatch is not None:
            dispatch.finish(now)  # a second time does nothing

    def _failed(self) -> None:
        """No byte of an answer came. Tell health; the next worker, or what the client sees."""
        candidate, response = self._candidate, self._response
        assert candidate is not None
        assert response is not None
        assert response.error is not None
        use, worker, error = self._use, candidate.worker, response.error
        if isinstance(error, ConnectionLost) and error.reused and self._spend("stale_connection"):
            # The worker closed a kept connection as the request came: that says nothing about it.
            self._submit(candidate, fresh=True)
            return
        self._record.error = error.cause
        if isinstance(error, ConnectRefused):
            use.health.report_refused(worker)
        elif not isinstance(error, PoolExhausted):  # that is our own limit, not the worker's failure
            use.health.report_failure(worker, error.cause)
        can_retry = self._record.attempts < len(self._plan.decision.ranking)
        if isinstance(error, _RETRYABLE) and can_retry and self._spend(error.cause):
            self._give_back(use.now())
            self._next()
            return
        raise self._visible(error, worker.id, can_retry) from error

    def _visible(self, error: UpstreamError, worker: str, can_retry: bool) -> GatewayError:
        if isinstance(error, ResponseTimeout):
            return WorkerTimeout(f"Worker {worker!r} did not answer in time.")
        if not can_retry and isinstance(error, _RETRYABLE):
            tried = self._record.attempts
            return WorkerUnreachable(f"No worker could be reached ({tried} attempts, last: {error.cause}).")
        return WorkerUnreachable(f"Worker {worker!r} failed before it answered ({error.cause}).")

    def _spend(self, cause: str) -> bool:
        """Whether an attempt may be repeated; refused connections cost nothing of the budget."""
        use = self._use
        if cause != ConnectRefused.cause and not use.budget.take(use.now()):
            use.metrics.retries_denied.inc()
            return False
        use.metrics.retries.labels(cause).inc()
        return True

    # Towards the client.

    def _start(self, response: UpstreamResponse) -> None:
        """The first body byte is here, or the whole of an answer without a body."""
        use, plan, record, candidate = self._use, self._plan, self._record, self._candidate
        assert candidate is not None
        decision, status = plan.decision, response.status
        use.health.report_status(candidate.worker, status)
        if status in use.retry_statuses and record.attempts < len(decision.ranking) and self._spend("status"):
            self._give_back(use.now())
            self._next()
            return
        record.status = status
        if record.error:
            record.error = ""  # what earlier attempts met is in the retry counters
        record.first_byte = now = use.now()
        plain = response.plain
        if plain is not None:
            _, _, _, fields, is_event_stream, _, body_bytes = plain
            is_sized = body_bytes is not None
        else:
            headers = response_headers(
                response.headers, _DROPPED if status not in _WITHOUT_BODY else _DROPPED_WITHOUT_BODY
            )
            fields = b"".join([b"%b: %b\r\n" % pair for pair in headers])
            is_sized = any(name == b"content-length" for name, _ in headers)
            is_event_stream = header(headers, b"content-type").startswith(b"text/event-stream")
        if plan.stores_response and (response_id := response_id_in(b"".join(response.parts))):
            use.owners.remember(response_id, candidate.worker.id)
        own = use.attribution.lines(candidate, decision)
        fields = b"%bx-request-id: %b\r\n%b" % (fields, record.request_id, own)
        self._is_started = True
        self._is_event_stream = is_event_stream
        client = self._client
        if response.is_over and response.error is None:
            parts = response.parts
            whole = parts[0] if len(parts) == 1 else b"".join(parts)
            client.answer(status, fields, whole, is_sized)
            if is_event_stream:
                self._first_token(now)
            if status == 200:
                self._learn(candidate, b"", unframed(whole) if is_event_stream else whole)
            self._end(now)
        else:
            client.start_relayed(status, fields, is_sized=is_sized)
            self._last = chunk = response.take()
            client.write(chunk)
            if is_event_stream:
                self._first_token(now)
            if response.error is not None:
                self._broken(response.error)
                return
            if client.is_paused:
                response.hold()
            if is_event_stream:
                self._write_framed = write = client.framed_writer()
                if write is not None:
                    response.take_framed = self._take_framed

    def _first_token(self, now: float) -> None:
        """The first event was the first token."""
        if self._dispatch is not None:
            self._dispatch.first_token(now)
        plan = self._plan
        self._gaps = self._use.metrics.gaps(plan.model, self._record.worker, plan.decision.strategy)
        self._last_chunk_at = now

    def _relay(self) -> None:
        """Pass on what has arrived since the first bytes."""
        response = self._response
        assert response is not None
        client, chunk = self._client, response.take()
        if chunk:
            self._before_last, self._last = self._last, chunk
            if self._gaps is not None:
                now = self._use.now()
                self._gaps.observe(now - self._last_chunk_at)
                self._last_chunk_at = now
        if response.is_over:
            if response.error is None:
                client.finish(chunk)
                self._learn_from_last()
                self._end()
            else:
                if chunk:
                    client.write(chunk)
                self._broken(response.error)
            return
        if chunk:
            client.write(chunk)
        if client.is_paused:
            response.hold()

    def _learn_from_last(self) -> None:
        if self._record.status == 200 and self._candidate is not None:
            before_last, last = self._before_last, self._last
            if self._is_event_stream:
                before_last, last = unframed(before_last), unframed(last)
            self._learn(self._candidate, before_last, last)

    def _learn(self, candidate: Candidate, before_last: bytes, last: bytes) -> None:
        usage = usage_in(before_last, last)
        if usage is not None:
            use, plan = self._use, self._plan
            self._record.usage = usage
            prompt_tokens, cached_tokens = usage
            use.estimator.observe(plan.model, plan.prompts, prompt_tokens)
            if cached_tokens is not None or use.audit.hears_all:
                use.audit.answered(plan, candidate, usage)

    def _broken(self, error: UpstreamError) -> None:
        """The worker broke off its answer."""
        use, record, candidate = self._use, self._record, self._candidate
        assert candidate is not None
        record.ended_by, record.error = "worker", error.cause
        use.metrics.streams_aborted.labels("worker").inc()
        use.health.report_failure(candidate.worker, error.cause)
        self._give_up(WorkerUnreachable(f"Worker {candidate.worker.id!r} broke off its answer."))

    def _give_up(self, error: GatewayError) -> None:
        """End as the protocol allows: an error answer while nothing has been sent, an error event in an
        event stream, else by breaking off."""
        if self.is_over:
            return
        client = self._client
        if not self._is_started:
            refuse(self._use.metrics, self._record, error, client, self._plan.errors)
        elif self._is_event_stream:
            client.finish(error_event(error, self._plan.errors))
        else:
            client.cut()
        self._end()

    def _end(self, now: float | None = None) -> None:
        """`now` where it has just been asked for."""
        self.is_over = True
        use, ended = self._use, self._ended
        if now is None:
            now = use.now()
        self._give_back(now)
        use.journal.finished(self._record, now)
        ended(self)
