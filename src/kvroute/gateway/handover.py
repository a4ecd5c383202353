"""A request whose prompt one worker computes and another one answers: the two legs of its exchange.

The first leg goes to the prefill worker. Its answer says where the blocks are, and the second leg, which is
sent immediately, takes that to the decode worker. The client gets the decode worker's answer only. Each leg
may fail; then a worker does the whole request:

- the prefill worker refuses, dies, is too late or reports no blocks: the decode worker;
- the decode worker cannot be reached: the next decode worker, with the same blocks;
- it breaks off before its first byte, or is too late: the next worker, without the blocks;
- its answer says that the transfer failed (status 5xx, or an error as the first event of a stream): the
  decode worker itself, without the blocks, once.

In a fleet with roles, the answers of all requests pass `WithoutParams`: clients never see where a worker
keeps blocks. In other fleets no request comes here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from msgspec import field
from msgspec.structs import replace

from kvroute.errors import (
    ConnectionLost,
    ConnectRefused,
    ConnectTimeout,
    GatewayError,
    NoResources,
    PoolExhausted,
    WorkerTimeout,
)
from kvroute.gateway.attempts import Attempts
from kvroute.gateway.downstream import Downstream, Forwarding
from kvroute.gateway.exchange import Attribution, Exchange, ExchangeDeps, usage_in, usage_of_whole
from kvroute.gateway.failures import InternalError
from kvroute.gateway.journal import HandoverRecord, Record, Usage
from kvroute.gateway.planner import RequestPlan
from kvroute.openai.kv_transfer import CONNECTORS, Connector, ParamsMask, cached_tokens_in, release_leg
from kvroute.openai.request import InferenceRequest
from kvroute.routing.prefill_decode import HandoverDispatch, PrefillDecodeOptions
from kvroute.routing.strategy import Candidate, Handover, RouteDecision
from kvroute.upstream.response import CHUNK, AnswerListener, UpstreamResponse

log = logging.getLogger(__name__)

_NOT_SENT = (ConnectRefused, ConnectTimeout, NoResources, PoolExhausted)
"""Failures of a request that the worker has not seen."""
_GRACE_S = 0.1
"""A second leg is aborted this long after it was sent, at the earliest: vLLM tells the prefill worker to free
the blocks only once the request has reached its handler."""
_accept_encoding = re.compile(rb"(?im)^accept-encoding:[^\r]*\r\n").sub
_RELEASE_S = 10.0
"""Time limit of a request whose only purpose is that the prefill worker frees its blocks."""
_ERROR_EVENTS = (b'data: {"error"', b"event: error", b'data: {"type":"error"')


class _Phase(Enum):
    NEW = "new"
    PREFILL = "prefill"
    """The first leg is in flight."""
    DECODE = "decode"
    """The second leg is in flight, and its answer has not begun."""
    REST = "rest"
    """One worker answers, with or without the blocks."""


class _Listener(AnswerListener, Protocol):
    """The exchange, as its attempts see it."""

    def timed_out(self) -> None: ...


class _Discard:
    """Reads an answer that nobody needs."""

    def answer_arrived(self, response: UpstreamResponse) -> None:
        response.take()


class HandoverAttempts(Attempts):
    """The attempts of a request with `RouteDecision.handover`. Mutable: see `Attempts`.

    `self._plan` changes with each attempt: it has the body of that attempt.
    """

    # Fields of a subclass follow those with defaults.
    _phase: _Phase = _Phase.NEW
    _params: bytes | None = None
    """Where the blocks are, from the first leg until the second one has begun or failed."""
    _accounts: HandoverDispatch | None = None
    _began: float = 0.0
    """When the current leg was sent."""
    _parts: list[bytes] = field(default_factory=list)
    """The answer of the first leg."""
    _timer: asyncio.TimerHandle | None = None
    _bodies: tuple[InferenceRequest, bytes] | None = None
    """The client's request, and the body of a whole request."""
    has_moved: bool = False
    """Whether the answer comes from a worker that has got the blocks."""

    @property
    def is_in_first_leg(self) -> bool:
        return self._phase is _Phase.PREFILL

    @property
    def is_moving(self) -> bool:
        """Whether the answer to the second leg has not begun."""
        return self._phase is _Phase.DECODE

    @property
    def _handover(self) -> Handover:
        handover = self._plan.decision.handover
        assert handover is not None
        return handover

    @property
    def _options(self) -> PrefillDecodeOptions:
        return self._deps.router.pairs.options

    @property
    def _connector(self) -> Connector:
        return CONNECTORS[self._options.connector]

    def _send_to_next(self, listener: AnswerListener) -> None:
        if self._phase is not _Phase.NEW:
            Attempts._send_to_next(self, listener)
            return
        deps, plan, record, handover = self._deps, self._plan, self._record, self._handover
        assert plan.request is not None
        self._bodies = plan.request, plan.body
        answering = plan.decision.ranking[0]
        record.worker, record.attempts = answering.worker.spec.id, 1
        record.matched_tokens, record.held = answering.matched_tokens, answering.held
        self._phase, self._began = _Phase.PREFILL, deps.now()
        record.handover = HandoverRecord(
            handover.prefill.worker.spec.id,
            handover.moved_tokens,
            handover.prefill.matched_tokens,
            self._began,
        )
        self._send(handover.prefill, listener)
        self._accounts = deps.router.dispatch_handover(plan.query, plan.decision, self._began)
        if deps.on_sent is not None:
            deps.on_sent(plan.query, handover.prefill)
        self._start_timer(self._options.prefill_timeout_s, listener)

    def _send(self, candidate: Candidate, listener: AnswerListener, fresh: bool = False) -> None:
        plan = self._plan
        assert self._bodies is not None
        request, body = self._bodies
        if plan.other_bodies is not None:
            body = plan.other_bodies.get(candidate.worker.id, body)
        query, fields, trace = plan.query, self._fields, self._record.trace
        if self._phase is _Phase.PREFILL:
            body, query = self._connector.first_leg(body, request), replace(query, streamed=False)
            if trace is not None:  # `Tracer.begin` has named the other worker's span
                self._fields = fields.replace(
                    b"-%016x-01\r\n" % trace.worker_span_id, b"-%016x-01\r\n" % trace.prefill_span_id
                )
        elif self._params is not None and candidate.worker is not self._handover.prefill.worker:
            body = self._connector.second_leg(body, request, self._params)
            self._began = self._deps.now()
            assert self._record.handover is not None
            self._record.handover.moved_tokens = query.tokens - candidate.matched_tokens
            if query.streamed:  # the first byte of another answer comes with its end
                self._start_timer(self._options.decode_timeout_s, listener)
        self._plan = replace(plan, body=body, other_bodies=None, query=query)
        try:
            Attempts._send(self, candidate, listener, fresh)
        finally:
            self._plan, self._fields = plan, fields

    def first_leg_arrived(self, response: UpstreamResponse, listener: AnswerListener) -> bytes:
        """Part of the first leg's answer has arrived, or its end. Returns the whole answer of a done leg."""
        self._parts.append(response.take())
        if not response.is_over:
            return b""
        deps, prefill = self._deps, self._handover.prefill
        error, status, answer = response.error, response.status, b"".join(self._parts)
        self._parts.clear()
        if error is not None:
            if isinstance(error, ConnectionLost) and error.reused and self._may_retry("stale_connection"):
                # The worker closed an idle connection while the request was sent: no failure of the worker.
                self._send(prefill, listener, fresh=True)
                return b""
            self._report(prefill.worker, error)
            self._fall_back(error.cause, listener)
            return b""
        if status >= 500 or deps.health.suspects:
            deps.health.report_status(prefill.worker, status)
        params = self._connector.params_in(answer) if status == 200 else None
        if params is None:
            self._fall_back("no_blocks" if status == 200 else "status", listener)
            return b""
        self._send_second_leg(params, listener)
        return answer

    def _send_second_leg(self, params: bytes, listener: AnswerListener) -> None:
        deps, plan, record = self._deps, self._plan, self._record
        assert self._accounts is not None
        assert record.handover is not None
        now = deps.now()
        self._stop_timer()
        self._accounts.prefill_done(now)
        self._dispatch = self._accounts.decode
        record.handover.prefilled = now
        record.handover.prefill_s = spent_s = now - self._began
        deps.metrics.handover_prefill.labels(record.handover.prefill_worker).observe(spent_s)
        candidate = self.candidate = plan.decision.ranking[0]
        self._phase, self._params = _Phase.DECODE, params
        self._send(candidate, listener)
        if deps.on_sent is not None:
            deps.on_sent(plan.query, candidate)

    def answer_begins(self, now: float, *, has_moved: bool) -> None:
        """The first byte of the second leg's answer has arrived. `has_moved`: the blocks are there, too."""
        deps, plan, record = self._deps, self._plan, self._record
        assert self.candidate is not None
        assert record.handover is not None
        self._stop_timer()
        self._phase, self._params = _Phase.REST, None
        record.handover.moved, self.has_moved = now, has_moved
        if not has_moved:
            return
        worker, spent_s = self.candidate.worker, now - self._began
        moved = record.handover.moved_tokens
        deps.metrics.handovers.labels(worker.id, record.handover.prefill_worker).inc()
        deps.metrics.handover_tokens.labels(worker.id).inc(moved)
        if plan.query.streamed:
            record.handover.transfer_s = spent_s
            deps.metrics.handover_transfer.labels(worker.id).observe(spent_s)
            if worker.load.queued <= 1:  # otherwise the request has waited for others, too
                # The pair's first candidate has the time of one step; a later one that of the whole prompt.
                step_s = plan.decision.ranking[0].prefill_s
                deps.router.pairs.links.learn(worker.index, moved, spent_s - step_s)

    def retry_after_failure(self, listener: AnswerListener) -> None:
        """See `Attempts`. A second leg that a worker has not seen keeps its blocks for the next worker."""
        if self._phase is _Phase.DECODE:
            assert self.response is not None
            error = self.response.error
            if not (isinstance(error, ConnectionLost) and error.reused):
                assert error is not None
                self._order(whole_first=False)
                self._note(error.cause)
                if not isinstance(error, _NOT_SENT):
                    self._free_blocks()
                    self._phase = _Phase.REST
                elif len(self._others()) == 0:
                    self._deps.metrics.handover_blocks_kept.inc()
                    self._phase, self._params = _Phase.REST, None
        Attempts.retry_after_failure(self, listener)

    def retry_without_blocks(self, listener: AnswerListener) -> bool:
        """The decode worker says that the transfer failed: send the request once more.

        Returns False if that is not possible.
        """
        if not self._may_retry("transfer"):
            return False
        self._fall_back("transfer", listener)
        return True

    def timed_out(self, listener: AnswerListener) -> None:
        """The leg in flight took too long. Raises WorkerTimeout if no retry is possible."""
        self._timer = None
        deps = self._deps
        if self._phase is _Phase.PREFILL:
            deps.health.report_failure(self._handover.prefill.worker, "prefill_timeout")
            self._fall_back("prefill_timeout", listener)
        elif self._phase is _Phase.DECODE:
            assert self.candidate is not None
            worker = self.candidate.worker
            deps.health.report_failure(worker, "decode_timeout")
            if not self._may_retry("decode_timeout"):
                raise WorkerTimeout(f"Worker {worker.id!r} did not answer in time.")
            self._fall_back("decode_timeout", listener, whole_first=False)

    def release(self, now: float) -> None:
        """See `Attempts`. Blocks of a second leg that no worker has seen are freed."""
        self._stop_timer()
        response = self.response
        if self._phase is _Phase.DECODE and response is not None and not response.is_over:
            if response.connection is None:  # it was never sent
                response.abort()
                self._free_blocks(also=self.candidate)
            elif not response.status and now - self._began < _GRACE_S:
                self.response, response.listener = None, _Discard()
                asyncio.get_running_loop().call_later(_GRACE_S, response.abort)
            self._params = None
        Attempts.release(self, now)
        if self._accounts is not None:
            self._accounts.finish(now)

    def _fall_back(self, cause: str, listener: AnswerListener, *, whole_first: bool = True) -> None:
        """Let one worker do the whole request: the decode worker, or the next one."""
        self._note(cause)
        self._order(whole_first=whole_first)
        self.release(self._deps.now())
        self._phase, self._params = _Phase.REST, None
        self._send_to_next(listener)

    def _note(self, cause: str) -> None:
        handover = self._record.handover
        assert handover is not None
        if not handover.fallback:
            handover.fallback = cause
            self._deps.metrics.handover_fallbacks.labels(cause).inc()
        if handover.prefill_s is None:
            handover.prefilled = self._deps.now()
        else:
            handover.moved = self._deps.now()

    def _order(self, *, whole_first: bool) -> None:
        """Add the decode worker to the ranking once more, as a worker that computes the prompt itself."""
        plan = self._plan
        decision = plan.decision
        pair, *others = decision.ranking
        if self._record.attempts > 1:
            return  # the order is known
        whole = self._handover.whole
        ranking = [pair, whole, *others] if whole_first else [pair, *others, whole]
        self._plan = replace(
            plan,
            decision=RouteDecision(decision.strategy, decision.reason, ranking, decision.handover),
        )

    def _others(self) -> Sequence[Candidate]:
        """The workers that could use the blocks, without the one that has the request now."""
        known = self.candidate, self._handover.prefill
        workers = [each.worker for each in known if each is not None]
        return [each for each in self._plan.decision.ranking if each.worker not in workers]

    def _free_blocks(self, also: Candidate | None = None) -> None:
        """Let another worker, or `also`, take the blocks, so that the prefill worker need not keep them.

        NixlConnector has no other way: the blocks are free once they were read, or when their lease ends.
        """
        params, self._params = self._params, None
        connector, deps = self._connector, self._deps
        if not params or not connector.needs_params:
            return
        usable = [each for each in (also, *self._others()) if each is not None and each.worker.is_routable]
        if not usable:
            deps.metrics.handover_blocks_kept.inc()
            return
        assert self._bodies is not None
        request, body = self._bodies
        body = release_leg(connector, body, request, params)
        transport = deps.transports.of(usable[0].worker)
        head = transport.heads.encode(
            self._plan.method, self._plan.target, self._fields, self._record.request_id, len(body)
        )
        response = transport.submit(head, body, _Discard())
        asyncio.get_running_loop().call_later(_RELEASE_S, response.abort)

    def _start_timer(self, seconds: float, listener: AnswerListener) -> None:
        self._stop_timer()
        if seconds > 0:
            exchange: _Listener = listener  # type: ignore[assignment]
            self._timer = asyncio.get_running_loop().call_later(seconds, exchange.timed_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class WithoutParams(Forwarding):
    """Passes an answer on to a client without its `kv_transfer_params`. Mutable: the mask's state."""

    _mask: ParamsMask = field(default_factory=ParamsMask)

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        self._client.answer(status, fields, self._mask.blanked(body), is_sized)

    def write(self, chunk: bytes) -> None:
        self._client.write(self._mask.blanked(chunk))

    def framed_writer(self) -> Callable[[bytes], None] | None:
        write, blanked = self._client.framed_writer(), self._mask.blanked
        if write is None:
            return None

        def masked(framed: bytes) -> None:
            line = CHUNK(framed)
            assert line is not None  # the connection passes whole chunks only
            body = framed[line.end() : -2]
            shown = blanked(body)
            write(framed if shown is body else b"%b%b\r\n" % (framed[: line.end()], shown))

        return masked

    def finish(self, chunk: bytes = b"") -> None:
        self._client.finish(self._mask.blanked(chunk) if chunk else chunk)


def exchange_with_roles(
    deps: ExchangeDeps,
    plan: RequestPlan,
    record: Record,
    fields: bytes,
    client: Downstream,
    on_end: Callable[[Exchange], object],
) -> Exchange:
    """The exchange of a request in a fleet with roles, handed over or not."""
    screened = WithoutParams(client)
    fields = _accept_encoding(b"", fields)  # in a compressed answer they could be neither read nor hidden
    if plan.decision.handover is None:
        return Exchange(deps, plan, record, Attempts(deps.attempts, plan, record, fields), screened, on_end)
    legs = HandoverAttempts(deps.attempts, plan, record, fields)
    return HandoverExchange(deps, plan, record, legs, screened, on_end)


class HandoverExchange(Exchange):
    """The exchange of a request with `RouteDecision.handover`. Mutable: see `Exchange`."""

    def answer_arrived(self, response: UpstreamResponse) -> None:
        attempts = self._attempts
        assert isinstance(attempts, HandoverAttempts)
        if not attempts.is_in_first_leg:
            Exchange.answer_arrived(self, response)
        elif response is attempts.response:
            self._run(lambda: self._first_leg_arrived(attempts, response))

    def timed_out(self) -> None:
        """A leg took too long."""
        attempts = self._attempts
        assert isinstance(attempts, HandoverAttempts)
        self._run(lambda: attempts.timed_out(self))

    def _first_leg_arrived(self, attempts: HandoverAttempts, response: UpstreamResponse) -> None:
        answer = attempts.first_leg_arrived(response, self)
        plan, record = self._plan, self._record.handover
        handover = plan.decision.handover
        if not answer or record is None or handover is None:
            return
        usage = usage_of_whole(answer) or Usage(plan.query.tokens, None)
        if usage.cached_tokens is None:
            usage = usage._replace(cached_tokens=cached_tokens_in(answer))
        record.cached_tokens = cached = usage.cached_tokens
        computed = plan.query.tokens - (record.matched_tokens if cached is None else cached)
        self._deps.metrics.handover_computed.labels(record.prefill_worker).inc(max(0, computed))
        self._deps.audit.answered(plan, handover.prefill, usage)

    def _start_answer(self, response: UpstreamResponse) -> None:
        attempts = self._attempts
        assert isinstance(attempts, HandoverAttempts)
        if attempts.is_moving:
            has_failed = _is_failed_transfer(response)
            if has_failed and attempts.retry_without_blocks(self):
                return
            attempts.answer_begins(self._deps.now(), has_moved=response.status == 200 and not has_failed)
            if attempts.has_moved:
                self._deps.audit.audit.handed_over(self._record.worker, self._moved_tokens)
            self._deps = dataclasses.replace(self._deps, attribution=_BothWorkers(self._record.handover))
        Exchange._start_answer(self, response)

    @property
    def _moved_tokens(self) -> int:
        return 0 if self._record.handover is None else self._record.handover.moved_tokens

    def _report_usage(self, candidate: Candidate, before_last: bytes, last: bytes) -> None:
        """See `Exchange`. The cached tokens of a second leg say nothing about the decode worker's cache."""
        attempts, deps, plan = self._attempts, self._deps, self._plan
        assert isinstance(attempts, HandoverAttempts)
        if not attempts.has_moved:
            Exchange._report_usage(self, candidate, before_last, last)
            return
        usage = usage_in(before_last, last)
        if usage is not None:
            # vLLM 0.32 repeats those of the prefill worker there, older releases count the moved ones.
            self._record.usage = usage._replace(cached_tokens=None)
            deps.estimator.observe(plan.model, plan.prompts, usage.prompt_tokens)
            deps.audit.fetched(plan, candidate, self._moved_tokens)

    def _run(self, step: Callable[[], object]) -> None:
        """Run a step of the attempts; its error ends the exchange."""
        try:
            step()
        except GatewayError as error:
            self._fail(error)
        except Exception:
            # A defect must end this exchange only, and release its reservations.
            log.exception("an exchange failed")
            self._fail(InternalError("Internal error."))


def _is_failed_transfer(response: UpstreamResponse) -> bool:
    if response.status >= 500:
        return True
    return bool(response.parts) and response.parts[0].startswith(_ERROR_EVENTS)


class _BothWorkers(Attribution):
    """The `x-kvroute-*` lines of an answer, with the prefill worker."""

    def __init__(self, handover: HandoverRecord | None) -> None:
        super().__init__()
        self._handover = handover

    def lines(self, candidate: Candidate, decision: RouteDecision) -> bytes:
        own, handover = super().lines(candidate, decision), self._handover
        if handover is None:
            return own
        lines = (
            b"%bx-kvroute-prefill-worker: %b\r\nx-kvroute-prefill-hit-tokens: %d\r\n"
            b"x-kvroute-moved-tokens: %d\r\nx-kvroute-prefill-ms: %d\r\n"
        ) % (
            own,
            handover.prefill_worker.encode(),
            handover.matched_tokens,
            handover.moved_tokens,
            round(1000 * (handover.prefill_s or 0.0)),
        )
        if handover.transfer_s is None:
            return lines
        return b"%bx-kvroute-transfer-ms: %d\r\n" % (lines, round(1000 * handover.transfer_s))
