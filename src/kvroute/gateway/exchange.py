"""One request and its answer: sent to workers in the order of the ranking, relayed, and accounted.

`attempts` has the worker's half; this module has the client's. Every exchange (with an answer, an
error, a disconnect, a shutdown or a defect) ends with one call of `Exchange._end`, which releases everything.
`PredictionAudit` compares the cached tokens that answers report with the predictions.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from kvroute.clock import Clock
from kvroute.errors import (
    GatewayError,
    RedirectedByWorker,
    ShuttingDown,
    UpstreamError,
    WorkerUnreachable,
)
from kvroute.fleet.worker import ASSUMED_BLOCK_TOKENS, Worker
from kvroute.gateway import back_pressure
from kvroute.gateway.attempts import AttemptDeps, Attempts
from kvroute.gateway.downstream import Downstream
from kvroute.gateway.failures import InternalError, error_event, refuse
from kvroute.gateway.headers import header
from kvroute.gateway.journal import Journal, Record, Usage
from kvroute.gateway.planner import RequestPlan, ResponseOwners, response_id_in
from kvroute.gateway.streams import (
    FRAMED_EVENT_ENDS,
    KEEP_ALIVE,
    StreamWaits,
    WholeEvents,
    is_readable,
    moved,
)
from kvroute.gateway.wait_queue import WaitQueue
from kvroute.index.prefix_index import cause_and_fix
from kvroute.metrics import Metrics
from kvroute.openai.bounded import UNREADABLE
from kvroute.openai.preamble import MAX_PREAMBLE_BYTES, Preamble
from kvroute.routing.audit import Audit
from kvroute.routing.registry import STRATEGIES
from kvroute.routing.reports import Reports
from kvroute.routing.strategy import Candidate, ExactPrompt, Needs, RouteDecision, Tokens
from kvroute.tallies import FastHistogram
from kvroute.tokens.estimate import TokenEstimator
from kvroute.upstream.headers import ANSWERED_HERE, HOP_BY_HOP, response_headers
from kvroute.upstream.response import UpstreamResponse, unframed

log = logging.getLogger(__name__)

_AUDIT = "audit"
_NO_TIER, _GPU = Tokens(0).tier(), Tokens(1).tier()


class Feedback(Protocol):
    """The owner of the cache map, which learns from answers."""

    def answered(
        self,
        worker: Worker,
        rank: int,
        model: str,
        prompt: ExactPrompt,
        sent: float,
        cached_tokens: int | None,
    ) -> None:
        """A rank of the worker has computed `prompt` for `model`.

        The request was sent at `sent` (`Clock.now()`). `cached_tokens` of the prompt were cached there; None
        if the worker does not report it.
        """
        ...

    def judged(self, slot: int, tokens: Tokens, cached_tokens: int, has_drafter: bool) -> bool:
        """A whole map predicted `tokens` for this slot; True if the gateway has learned another rule from it.

        `has_drafter`: see `WorkerFacts`.
        """
        ...

    def distrust(self, worker: Worker, rank: int, why: str) -> None:
        """More than half of the predicted hits of this worker's rank failed: do not use its map."""
        ...


class PredictionAudit:
    """Passes the usage of answers to `audit` and to `feedback`. Mutable: the counts of `audit`."""

    def __init__(
        self,
        audit: Audit,
        metrics: Metrics,
        feedback: Feedback | None,
        reports: Reports | None = None,
    ) -> None:
        self.audit = audit
        audit.on_counted = metrics.predicted
        metrics.call_before_collect(audit.settle)
        self._metrics = metrics
        self._feedback = feedback
        self._reports = reports

    def answered(self, plan: RequestPlan, candidate: Candidate, usage: Usage) -> None:
        """A complete answer reported `usage`. Costs a few us; raises nothing for any values in it."""
        feedback, query, worker, held = self._feedback, plan.query, candidate.worker, candidate.held
        prompts, reports, cached_tokens = query.prompts, self._reports, usage.cached_tokens
        keys = prompts[0].keys if len(prompts) == 1 else ()
        if keys and usage.completion_tokens and reports is not None:
            # Several choices are several answers, and no usage tells their lengths apart; the next turn has
            # one of them, so the sum is too much. The audit and the discount notice.
            unit = worker.index if held is None else worker.unit_of(held.rank)
            reports.answers.add(unit, keys[-1], usage.prompt_tokens, usage.completion_tokens)
        if feedback is None and cached_tokens is None:
            return
        facts = worker.facts
        if not query.reads_cache or not facts.caches_prefixes:
            return  # nothing was predicted
        if not query.takes_rank and query.rank is None:
            return  # nobody knows the rank whose cache was read
        rank = 0 if held is None or held.rank is None else held.rank
        if feedback is not None and len(query.exact) == 1:
            feedback.answered(worker, rank, plan.model, query.exact[0], query.now, cached_tokens)
        # Several prompts are several engine requests, of which vLLM 0.32 reports one.
        if cached_tokens is None or len(prompts) != 1:
            return
        strategy, worker_id, tokens = plan.decision.strategy, worker.spec.id, candidate.matched_tokens
        block_tokens = facts.block_size or ASSUMED_BLOCK_TOKENS
        if held is None:
            is_mapped, judged, tier = False, False, _GPU if tokens else _NO_TIER
        else:
            is_mapped, tier = held.mapped, held.tokens.tier()
            judged = is_mapped and not held.why
            if (
                judged
                and feedback is not None
                and held.slot is not None
                and feedback.judged(held.slot, held.tokens, cached_tokens, facts.has_drafter)
            ):
                log.info("worker %s: its reports show another rule for the last unit of hits", worker_id)
                self.audit.forget(worker_id)
        if tokens and reports is not None:
            reports.discounts.reported(worker.index, is_mapped, tokens, cached_tokens, block_tokens)
        self.audit.reported(strategy, worker_id, tier, block_tokens, tokens, cached_tokens)
        if (
            judged
            and self.audit.is_wrong(worker_id, rank, abs(tokens - cached_tokens) >= block_tokens)
            and feedback is not None
        ):
            log.warning(
                "worker %s: too many predicted hits failed; its cache map is not used now%s",
                worker_id,
                cause_and_fix(_AUDIT),
            )
            self._metrics.map_demotions.labels(worker_id, _AUDIT).inc()
            feedback.distrust(worker, rank, _AUDIT)

    def fetched(self, plan: RequestPlan, candidate: Candidate, moved_tokens: int) -> None:
        """A decode worker has answered a prompt of which it got `moved_tokens` from another worker."""
        feedback, query, worker, held = self._feedback, plan.query, candidate.worker, candidate.held
        # It announces the blocks that it got, like those that it computes.
        if feedback is not None and len(query.exact) == 1 and moved_tokens > worker.block_size:
            rank = 0 if held is None or held.rank is None else held.rank
            feedback.answered(worker, rank, plan.model, query.exact[0], query.now, None)


_LINE_FEED = 10
_SHORT_S = 0.05
_LAST_GOOD = 299
_NOT_MODIFIED = 304
_COMMENT = b":"
"""The first byte of a comment in an event stream."""
_WITHOUT_BODY = (204, 304)
_DROPPED = HOP_BY_HOP | ANSWERED_HERE
_DROPPED_WITHOUT_BODY = _DROPPED | {b"content-length"}
CLIENT_LEFT = 499
"""nginx's status for a client that left before its answer started; only in metrics and logs."""


_TAIL_BYTES = 4096
_SMALL_BYTES = 2048
"""Up to this size, to decode an answer costs less than to search it."""
_MAX_TOKENS = 10**9 - 1
"""More tokens than any answer has. A larger figure of a worker is none: sums of it would not be finite."""
# These match only fields of the worker: inside generated text the quotes are escaped.
_first_prompt_tokens = re.compile(
    rb'"usage"\s*:\s*\{\s*"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})(?!\d)'
).match
_prompt_tokens = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})(?!\d)').search
_cached_tokens = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})(?!\d)').search
_completion_tokens = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})(?!\d)').search
_cache_read_tokens = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,9})(?!\d)').search
_cache_creation_tokens = re.compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,9})(?!\d)').search


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]


class _Details(Struct, gc=False):
    cached_tokens: _Count | None = None


class AnswerUsage(Struct, gc=False):
    """The `usage` of an answer, as engines write it. With a count that none can be, it is not decoded."""

    prompt_tokens: _Count | None = None
    input_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    output_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cached_tokens: _Count | None = None
    # Anthropic's API counts cached tokens apart: `input_tokens` has neither those that were read nor those
    # that were stored (vLLM 0.32, entrypoints/anthropic/serving.py, `_build_anthropic_usage`).
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None


class _Answer(Struct, gc=False):
    usage: AnswerUsage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def usage_in(before_last: bytes, last: bytes) -> Usage | None:
    """The usage in the last two chunks of an answer; None if there is none. A few us, once per answer."""
    if not before_last and len(last) <= _SMALL_BYTES and last.startswith(b"{"):
        try:
            whole = _decode_answer(last).usage
        except UNREADABLE:
            whole = None
        if whole is not None and (usage := usage_of(whole)) is not None:
            return usage
    tail = (before_last + last if len(last) < _TAIL_BYTES else last)[-_TAIL_BYTES:]
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None
    # In all engines' usage this field comes first. To search for it costs three times as much.
    prompt = _first_prompt_tokens(tail, start) or _prompt_tokens(tail, start)
    if prompt is None:
        return None
    # Most engines omit it by default, and a search for a literal costs less than a pattern.
    cached = _cached_tokens(tail, start) if tail.find(b'"cached_tokens"', start) >= 0 else None
    completion = _completion_tokens(tail, start)
    tokens, produced = int(prompt[1]), int(completion[1]) if completion else 0
    if cached is None and tail.find(b'"cache_read_input_tokens"', start) >= 0:
        read, stored = _cache_read_tokens(tail, start), _cache_creation_tokens(tail, start)
        if read is not None:
            found = int(read[1])
            return Usage(tokens + found + (int(stored[1]) if stored else 0), found, produced)
    return Usage(tokens, int(cached[1]) if cached else None, produced)


def usage_of_whole(answer: bytes) -> Usage | None:
    """The usage of a whole answer; None if the answer has none or is not JSON."""
    try:
        usage = _decode_answer(answer).usage
    except UNREADABLE:
        return None
    return None if usage is None else usage_of(usage)


def usage_of(usage: AnswerUsage) -> Usage | None:
    """The usage with the names of this gateway; None if it has no count of prompt tokens."""
    tokens, details = usage.prompt_tokens, usage.prompt_tokens_details
    if tokens is None:
        tokens, details = usage.input_tokens, usage.input_tokens_details
    completion = usage.completion_tokens
    if completion is None:
        completion = usage.output_tokens or 0
    if tokens is None:
        return None
    cached = usage.cached_tokens if details is None else details.cached_tokens
    if cached is None and (read := usage.cache_read_input_tokens) is not None:
        cached = read
        tokens += read + (usage.cache_creation_input_tokens or 0)
    return Usage(tokens, cached, completion)


_MAX_CACHED_LINES = 4096
_PREDICTING = frozenset(
    name for name, strategy in STRATEGIES.items() if strategy.needs in (Needs.PROMPT, Needs.TOKENS)
)
"""Strategies that predict cached tokens: those that read the prompt."""


class Attribution:
    """The `x-kvroute-*` header lines of answers. Mutable: caches at most 4096 of them, by their values."""

    def __init__(self) -> None:
        self._cache: dict[tuple[str, str, str, int, Tokens | None], bytes] = {}

    def lines(self, candidate: Candidate, decision: RouteDecision) -> bytes:
        """The header lines for an answer of `candidate`.

        For a strategy that predicts hits they include the predicted cached tokens, in total and by tier.
        """
        held = candidate.held
        key = (
            candidate.worker.spec.id,
            decision.strategy,
            decision.reason,
            candidate.matched_tokens,
            None if held is None else held.tokens,
        )
        lines = self._cache.get(key)
        if lines is None:
            if len(self._cache) >= _MAX_CACHED_LINES:
                self._cache.clear()
            lines = self._cache[key] = _lines(candidate, decision)
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
    """What every exchange uses; the runtime builds it once."""

    attempts: AttemptDeps
    metrics: Metrics
    estimator: TokenEstimator
    owners: ResponseOwners
    journal: Journal
    audit: PredictionAudit
    clock: Clock
    streams: StreamWaits | None = None
    """None: heads of event streams wait for the first token, and there are no keep-alives."""
    attribution: Attribution = field(default_factory=Attribution)
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
