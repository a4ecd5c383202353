"""A request whose prompt one worker computes and another one answers: the two legs of its exchange.

The first leg goes to the prefill worker. Its answer says where the blocks are, and the second leg, which is
sent immediately, takes that to the decode worker. The client gets the decode worker's answer only. Each leg
may fail; then a worker does the whole request:

- the prefill worker refuses, dies, is too late or reports no blocks: the decode worker;
- the decode worker cannot be reached, or is full: the next decode worker, with the same blocks;
- it breaks off before its first byte, or is too late: the next worker, without the blocks;
- its answer says that the transfer failed (status 5xx, or an error as the first event of a stream): the
  decode worker itself, without the blocks, once.

In a fleet with roles, the answers of all requests pass `WithoutParams`: clients never see where a worker
keeps blocks. In other fleets no request comes here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from msgspec import field
from msgspec.structs import replace

from kvroute.errors import (
    ConnectionLost,
    ConnectRefused,
    ConnectTimeout,
    GatewayError,
    NoResources,
    PoolExhausted,
    ResponseTimeout,
    WorkerTimeout,
)
from kvroute.fleet.worker import HealthState, Worker
from kvroute.journal.compat_log_lines import Announce
from kvroute.openai.bounded import UNREADABLE
from kvroute.openai.kv_transfer import (
    CONNECTORS,
    PARAMS_KEY,
    Connector,
    ParamsMask,
    cached_tokens_in,
    release_leg,
    split_params,
)
from kvroute.openai.request import InferenceRequest
from kvroute.relay import back_pressure
from kvroute.relay.attempts import Attempts
from kvroute.relay.exchange import Exchange, ExchangeDeps
from kvroute.relay.usage import usage_in, usage_of_whole
from kvroute.request.downstream import Downstream, Forwarding
from kvroute.request.failures import InternalError
from kvroute.request.plan import RequestPlan
from kvroute.request.record import HandoverRecord, Record, Usage
from kvroute.routing.prefill_decode import HandoverDispatch, PrefillDecodeOptions
from kvroute.routing.strategy import Candidate, Handover, RouteDecision
from kvroute.upstream.response import CHUNK, AnswerListener, UpstreamResponse

log = logging.getLogger(__name__)

_NOT_SENT = (ConnectRefused, ConnectTimeout, NoResources, PoolExhausted)
"""Failures of a request that the worker has not seen."""
_GRACE_S = 0.1
"""A second leg is aborted this long after it was sent, at the earliest: vLLM tells the prefill worker to free
the blocks only once the request has reached its handler."""
_RELEASE_S = 10.0
"""Time limit of a request whose only purpose is that the prefill worker frees its blocks."""
_ENCODINGS = b"accept-encoding:"
_ERROR_EVENTS = (b'data: {"error"', b"event: error", b'data: {"type":"error"')


class _Phase(Enum):
    NEW = "new"
    PREFILL = "prefill"
    """The first leg is in flight."""
    DECODE = "decode"
    """The second leg is in flight, and its answer has not begun."""
    REST = "rest"
    """One worker answers, with or without the blocks."""


_NEW, _PREFILL, _DECODE, _REST = _Phase  # to look up an enum member in its class costs 80 ns each time


class _Discard:
    """Reads an answer that nobody needs."""

    def answer_arrived(self, response: UpstreamResponse) -> None:
        response.take()


class _Release:
    """Reads the answer of a request that takes the blocks. Mutable: `is_over`."""

    def __init__(self, on_failure: Callable[[], object]) -> None:
        """`on_failure` is called once if the blocks were not taken."""
        self._on_failure = on_failure
        self.is_over = False

    def answer_arrived(self, response: UpstreamResponse) -> None:
        response.take()
        if response.is_over and not self.is_over:
            self.is_over = True
            if response.error is not None or response.status != 200:
                self._on_failure()

    def stop(self, response: UpstreamResponse) -> None:
        """The time is over."""
        if not self.is_over:
            self.is_over = True
            response.abort()
            self._on_failure()


class HandoverAttempts(Attempts, kw_only=True):
    """The attempts of a request with `RouteDecision.handover`. Mutable: see `Attempts`."""

    _request: InferenceRequest
    handover: Handover
    _options: PrefillDecodeOptions
    _connector: Connector
    progress: HandoverRecord
    """The same object as `Record.handover`."""
    phase: _Phase = _NEW
    announce: Announce | None = None
    """Called before the worker that answers gets the request; None afterwards."""
    _params: bytes | None = None
    """Where the blocks are, from the first leg until the second one has begun or failed."""
    _accounts: HandoverDispatch | None = None
    """Set while the first leg is in flight. `_dispatch` is that of the decode worker."""
    _began: float = 0.0
    """When the current leg was sent."""

    def _send_to_next(self, listener: AnswerListener) -> None:
        if self.phase is not _NEW:
            Attempts._send_to_next(self, listener)
            return
        deps, plan, record, handover = self._deps, self._plan, self._record, self.handover
        answering, query = handover.decode_of_pair, plan.query
        record.worker, record.attempts = answering.worker.spec.id, 1
        record.matched_tokens, record.held = answering.matched_tokens, answering.match
        self.phase, now = _PREFILL, deps.now()
        self._began = self.progress.began = now
        self._send_first_leg(listener)
        self._accounts = accounts = deps.router.dispatch_handover(query, plan.decision, now)
        self._dispatch = accounts.decode
        if deps.on_sent is not None:
            deps.on_sent(query, handover.prefill)

    def _send(
        self,
        candidate: Candidate,
        listener: AnswerListener,
        fresh: bool = False,
        body: bytes | memoryview | None = None,
        tail: bytes = b"",
        *,
        is_leg: bool = False,
        limit_s: float = 0.0,
    ) -> None:
        if self.phase is _PREFILL:
            self._send_first_leg(listener, fresh)
            return
        self._say_who_answers(candidate)
        if self._params is not None and candidate.worker is not self.handover.prefill.worker:
            self._send_second_leg(candidate, self._params, listener, fresh)
        else:
            Attempts._send(self, candidate, listener, fresh, body, tail, is_leg=is_leg, limit_s=limit_s)

    def _say_who_answers(self, candidate: Candidate) -> None:
        announce, self.announce = self.announce, None
        if announce is not None:
            announce(self._plan, self._record, candidate.worker)

    def _send_first_leg(self, listener: AnswerListener, fresh: bool = False) -> None:
        plan, prefill, fields, trace = self._plan, self.handover.prefill, self._fields, self._record.trace
        body = plan.body if plan.other_bodies is None else plan.body_for(prefill.worker.id)
        leg = self._connector.first_leg(body, self._request)
        if trace is not None:  # `Tracer.begin` has named the other worker's span
            self._fields = fields.replace(
                b"-%016x-01\r\n" % trace.worker_span_id, b"-%016x-01\r\n" % trace.prefill_span_id
            )
        limit_s = self._options.prefill_timeout_s
        try:
            Attempts._send(self, prefill, listener, fresh, leg.start, leg.tail, is_leg=True, limit_s=limit_s)
        finally:
            self._fields = fields
        response = self.response
        assert response is not None
        if limit_s and not 0.0 < response.idle_timeout_s < limit_s:
            response.idle_timeout_s = limit_s  # for a worker that hangs within its answer

    def _send_second_leg(
        self, candidate: Candidate, params: bytes, listener: AnswerListener, fresh: bool = False
    ) -> None:
        plan = self._plan
        body = plan.body if plan.other_bodies is None else plan.body_for(candidate.worker.id)
        leg = self._connector.second_leg(body, self._request, params)
        self._began, query = self._deps.now(), plan.query
        self.progress.moved_tokens = query.tokens - candidate.matched_tokens
        # An answer that is not streamed sends its first byte only when it is complete.
        limit_s = self._options.decode_timeout_s if query.streamed else 0.0
        Attempts._send(self, candidate, listener, fresh, leg.start, leg.tail, limit_s=limit_s)

    def first_leg_arrived(self, response: UpstreamResponse, listener: AnswerListener) -> Usage | None:
        """The first leg's answer is complete, or broke off. Returns what a done leg reports."""
        deps, plan, connector = self._deps, self._plan, self._connector
        prefill, error, status = self.handover.prefill, response.error, response.status
        if error is not None:
            if isinstance(error, ConnectionLost) and error.reused and self._may_retry("stale_connection"):
                # The worker closed an idle connection while the request was sent: no failure of the worker.
                self._send_first_leg(listener, fresh=True)
                return None
            self._report(prefill.worker, error)
            is_late = isinstance(error, ResponseTimeout)
            if not self.may_begin_after(prefill.worker, error):
                raise self._client_error(error, prefill.worker.id, False) from error
            self._fall_back("prefill_timeout" if is_late else error.cause, listener)
            return None
        if status in back_pressure.STATUSES:
            body, seen = b"".join(response.parts), response.headers
            if back_pressure.retry_after_of(status, seen, body, is_over=True) is not None:
                deps.metrics.busy_answers.labels(prefill.worker.id).inc()
                if self._accounts is not None:
                    self._accounts.prefill.abandon(deps.now())
                self._fall_back("busy", listener)
                return None
        if status >= 500 or deps.health.suspects:
            deps.health.report_status(prefill.worker, status)
        if status != 200:
            self._fall_back("status", listener)
            return None
        try:
            answer, params = split_params(response.take())
        except UNREADABLE:
            answer, params = b"", b""
        needed = connector.params_in(params)
        if needed is None:
            self._fall_back("no_blocks", listener)
            return None
        self._start_second_leg(needed, listener)
        usage = usage_of_whole(answer)
        if usage is None:
            usage = Usage(plan.query.tokens, None)
        if usage.cached_tokens is None and params:
            usage = Usage(usage.prompt_tokens, cached_tokens_in(params), usage.completion_tokens)
        self.progress.cached_tokens = usage.cached_tokens
        return usage

    def _start_second_leg(self, params: bytes, listener: AnswerListener) -> None:
        deps, progress, accounts = self._deps, self.progress, self._accounts
        candidate = self.handover.decode_of_pair
        assert accounts is not None
        now = deps.now()
        accounts.prefill_done(now)
        self._accounts = None
        progress.prefilled, progress.prefill_s = now, now - self._began
        self.candidate, self.phase, self._params = candidate, _DECODE, params
        self._say_who_answers(candidate)
        self._send_second_leg(candidate, params, listener)
        if deps.on_sent is not None:
            deps.on_sent(self._plan.query, candidate)

    def answer_begins(self, now: float, *, has_moved: bool) -> None:
        """The first byte of the second leg's answer has arrived. `has_moved`: the blocks are there, too."""
        progress, candidate = self.progress, self.candidate
        assert candidate is not None
        progress.moved, progress.has_moved, self.phase = now, has_moved, _REST
        if not has_moved:
            self._free_blocks()  # the worker has refused the request, so it has not taken the blocks
            return
        self._params = None
        if self._plan.query.streamed:
            progress.transfer_s = spent_s = now - self._began
            worker = candidate.worker
            if worker.load.queued <= 1:  # otherwise the request has waited for others, too
                # The pair's first candidate has the time of one step; a later one that of the whole prompt.
                step_s = self.handover.decode_of_pair.prefill_s
                self._deps.router.pairs.links.learn(worker.index, progress.moved_tokens, spent_s - step_s)

    def retry_after_failure(self, listener: AnswerListener) -> None:
        """See `Attempts`. A second leg that a worker has not seen keeps its blocks for the next worker."""
        if self.phase is _DECODE:
            assert self.response is not None
            error = self.response.error
            if isinstance(error, ResponseTimeout) and self._plan.query.streamed:
                self._decode_timed_out(error, listener)
                return
            if not (isinstance(error, ConnectionLost) and error.reused):
                assert error is not None
                self._order(whole_first=False)
                self._note(error.cause)
                if not isinstance(error, _NOT_SENT):
                    self._free_blocks()
                    self.phase = _REST
                elif len(self._others()) == 0:
                    self._deps.metrics.handover_blocks_kept.inc()
                    self.phase, self._params = _REST, None
        try:
            Attempts.retry_after_failure(self, listener)
        except GatewayError:
            if self.phase is _DECODE:  # a kept connection broke off, and there is no retry left
                self._free_blocks()
            raise

    def leave_busy_worker(self, listener: AnswerListener, retry_after_s: int) -> None:
        """See `Attempts`. A full decode worker has not taken the blocks, so the next one gets them."""
        if self.phase is _DECODE:
            self._order(whole_first=False)
            self._note("busy")
            if not self._others():
                self._free_blocks()
                self.phase = _REST
        Attempts.leave_busy_worker(self, listener, retry_after_s)

    def retry_without_blocks(self, listener: AnswerListener) -> bool:
        """The decode worker says that the transfer failed: send the request once more.

        Returns False if that is not possible.
        """
        if not self._may_retry("transfer"):
            return False
        self._fall_back("transfer", listener)
        return True

    def leave(self, worker: Worker, listener: AnswerListener) -> bool:
        """See `Attempts`. Another worker, if possible the decode worker, then does the whole request."""
        if self.phase is _REST or self.phase is _NEW:
            return Attempts.leave(self, worker, listener)
        at = self.handover.prefill if self.phase is _PREFILL else self.candidate
        if at is None or at.worker is not worker or not self._may_leave():
            return False
        self._fall_back("asleep", listener)
        return True

    def _may_leave(self) -> bool:
        if self.phase is _PREFILL and self.handover.decode_only.worker.state is not HealthState.ASLEEP:
            self._order(whole_first=True)
        return Attempts._may_leave(self)

    def _decode_timed_out(self, error: ResponseTimeout, listener: AnswerListener) -> None:
        assert self.candidate is not None
        worker = self.candidate.worker
        self._report(worker, error)
        if not self.may_begin_after(worker, error) or not self._may_retry("decode_timeout"):
            raise WorkerTimeout(f"Worker {worker.id!r} did not answer in time.")
        self._fall_back("decode_timeout", listener, whole_first=False)

    def release(self, now: float) -> None:
        """See `Attempts`. Blocks of a second leg that no worker has seen are freed."""
        response = self.response
        if self.phase is _DECODE and response is not None and not response.is_over:
            if response.connection is None:  # it was never sent
                response.abort()
                self._free_blocks(also=self.candidate)
            elif not response.status and now - self._began < _GRACE_S:
                self.response, response.listener = None, _Discard()
                asyncio.get_running_loop().call_later(_GRACE_S, response.abort)
            self._params = None
        Attempts.release(self, now)
        if self._accounts is not None:
            self._accounts.prefill.finish(now)

    def _fall_back(self, cause: str, listener: AnswerListener, *, whole_first: bool = True) -> None:
        """Let one worker do the whole request: the decode worker, or the next one."""
        self._note(cause)
        self._order(whole_first=whole_first)
        self.release(self._deps.now())
        self.phase, self._params = _REST, None
        self._send_to_next(listener)

    def _note(self, cause: str) -> None:
        progress = self.progress
        if not progress.fallback:
            progress.fallback = cause
            self._deps.metrics.handover_fallbacks.labels(cause).inc()
        if progress.prefill_s is None:
            progress.prefilled = self._deps.now()
        else:
            progress.moved = self._deps.now()

    def _order(self, *, whole_first: bool) -> None:
        """Add the decode worker to the ranking once more, as a worker that computes the prompt itself."""
        plan = self._plan
        decision = plan.decision
        pair, *others = decision.ranking
        if self._record.attempts > 1:
            return  # the order is known
        whole = self.handover.decode_only
        ranking = [pair, whole, *others] if whole_first else [pair, *others, whole]
        self._plan = replace(
            plan,
            decision=RouteDecision(decision.strategy, decision.reason, ranking, decision.handover),
        )

    def _others(self) -> Sequence[Candidate]:
        """The workers that could use the blocks, without the one that has the request now."""
        known = self.candidate, self.handover.prefill
        workers = [each.worker for each in known if each is not None]
        return [each for each in self._plan.decision.ranking if each.worker not in workers]

    def _free_blocks(self, also: Candidate | None = None) -> None:
        """Let another worker, or `also`, take the blocks, so that the prefill worker need not keep them.

        NixlConnector has no other way: the blocks are free once they were read, or when their lease ends.
        """
        params, self._params = self._params, None
        if not params or not self._connector.needs_params:
            return
        usable = [each for each in (also, *self._others()) if each is not None and each.worker.is_routable]
        self._let_take(params, [each.worker for each in usable])

    def _let_take(self, params: bytes, workers: Sequence[Worker]) -> None:
        """Let the first of `workers` take the blocks; if it fails, the next one. Counts blocks that stay.

        Nobody is asked to take the blocks of a prefill worker that has failed: an engine that waits for KV
        of a dead one keeps blocks of its own for that (vLLM 0.32, NixlConnector).
        """
        deps, plan, connector = self._deps, self._plan, self._connector
        source = self.handover.prefill.worker
        if not workers or not source.is_routable:
            deps.metrics.handover_blocks_kept.inc()
            return
        worker, *others = workers
        body = release_leg(connector, plan.body_for(worker.id), self._request, params)
        transport = deps.transports.of(worker)
        head = transport.heads.encode(
            plan.method, plan.target, self._fields, self._record.request_id, len(body)
        )
        rest = () if worker is source else others
        listener = _Release(partial(self._let_take, params, rest))
        response = transport.submit(head, body, listener)
        asyncio.get_running_loop().call_later(_RELEASE_S, listener.stop, response)


class WithoutParams(Forwarding):
    """Passes an answer on to a client without its `kv_transfer_params`. Mutable: the mask's state."""

    _mask: ParamsMask = field(default_factory=ParamsMask)
    lines: bytes = b""
    """Further header lines."""

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        self._client.start_relayed(status, fields + self.lines, is_sized=is_sized)

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        if body.find(PARAMS_KEY) >= 0:
            body = self._mask.blanked(body)
        self._client.answer(status, fields + self.lines, body, is_sized)

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
    announce: Announce | None = None,
) -> Exchange:
    """The exchange of a request in a fleet with roles, handed over or not.

    `announce` is called before the second leg of a request that is handed over.
    """
    screened = WithoutParams(client)
    fields = without_encodings(fields)  # in a compressed answer they could be neither read nor hidden
    handover = plan.decision.handover
    if handover is None or plan.request is None:
        return Exchange(deps, plan, record, Attempts(deps.attempts, plan, record, fields), screened, on_end)
    options = deps.attempts.router.pairs.options
    prefill = handover.prefill
    record.handover = progress = HandoverRecord(
        prefill.worker.spec.id, handover.moved_tokens, prefill.matched_tokens
    )
    legs = HandoverAttempts(
        deps.attempts,
        plan,
        record,
        fields,
        _request=plan.request,
        handover=handover,
        _options=options,
        _connector=CONNECTORS[options.connector],
        progress=progress,
        announce=announce,
    )
    return HandoverExchange(deps, plan, record, legs, screened, on_end, _legs=legs, _screen=screened)


def without_encodings(fields: bytes) -> bytes:
    """The header lines `fields`, except those of Accept-Encoding."""
    lower, at = fields.lower(), -1
    while (at := lower.find(_ENCODINGS, at + 1)) >= 0:
        if not at or lower[at - 1 : at] == b"\n":
            end = lower.index(b"\r\n", at) + 2
            fields, lower = fields[:at] + fields[end:], lower[:at] + lower[end:]
            at -= 1
    return fields


class HandoverExchange(Exchange, kw_only=True):
    """The exchange of a request with `RouteDecision.handover`. Mutable: see `Exchange`."""

    _legs: HandoverAttempts
    """The same object as `_attempts`."""
    _screen: WithoutParams
    """The same object as `_client`."""

    def answer_arrived(self, response: UpstreamResponse) -> None:
        legs = self._legs
        if legs.phase is not _PREFILL:
            Exchange.answer_arrived(self, response)
        elif response is legs.response and response.is_over:
            try:
                usage = legs.first_leg_arrived(response, self)
                if usage is not None:
                    self._deps.audit.answered(self._plan, legs.handover.prefill, usage)
            except GatewayError as error:
                self._fail(error)
            except Exception:
                # A defect must end this exchange only, and release its reservations.
                log.exception("an exchange failed")
                self._fail(InternalError("Internal error."))

    def _start_answer(self, response: UpstreamResponse) -> None:
        legs = self._legs
        if legs.phase is _DECODE:
            status, parts, progress = response.status, response.parts, legs.progress
            has_failed = status >= 500 or (
                self._plan.query.streamed and bool(parts) and self._begins_with_an_error(parts)
            )
            if has_failed and legs.retry_without_blocks(self):
                self._preamble = None
                return
            legs.answer_begins(self._deps.now(), has_moved=status == 200 and not has_failed)
            if progress.has_moved:
                self._deps.audit.audit.handed_over(self._record.worker, progress.moved_tokens)
            self._screen.lines = _lines(progress)
        Exchange._start_answer(self, response)

    def _send_head(self, response: UpstreamResponse) -> None:
        legs = self._legs
        if legs.phase is _PREFILL:
            return
        self._screen.lines = _lines(legs.progress)
        Exchange._send_head(self, response)

    def _begins_with_an_error(self, parts: list[bytes]) -> bool:
        """Whether the first event behind the preamble is an error."""
        preamble = self._preamble
        if preamble is None:
            return parts[0].startswith(_ERROR_EVENTS)
        return b"".join(parts)[preamble.token_at :].startswith(_ERROR_EVENTS)

    def _report_usage(self, candidate: Candidate, before_last: bytes, last: bytes) -> None:
        """See `Exchange`. The cached tokens of a second leg say nothing about the decode worker's cache."""
        progress = self._legs.progress
        if not progress.has_moved:
            Exchange._report_usage(self, candidate, before_last, last)
            return
        usage = usage_in(before_last, last)
        if usage is not None:
            deps, plan = self._deps, self._plan
            # vLLM 0.32 repeats those of the prefill worker there, older releases count the moved ones.
            self._record.usage = Usage(usage.prompt_tokens, None, usage.completion_tokens)
            deps.estimator.observe(plan.canonical, plan.prompts, usage.prompt_tokens)
            deps.audit.fetched(plan, candidate, progress.moved_tokens)


def _lines(handover: HandoverRecord) -> bytes:
    """The `x-kvroute-*` header lines about the first leg."""
    lines = (
        b"x-kvroute-prefill-worker: %b\r\nx-kvroute-prefill-hit-tokens: %d\r\n"
        b"x-kvroute-moved-tokens: %d\r\nx-kvroute-prefill-ms: %d\r\n"
    ) % (
        handover.prefill_worker.encode(),
        handover.matched_tokens,
        handover.moved_tokens,
        round(1000 * (handover.prefill_s or 0.0)),
    )
    if handover.transfer_s is None:
        return lines
    return b"%bx-kvroute-transfer-ms: %d\r\n" % (lines, round(1000 * handover.transfer_s))
