"""Requests of Envoy: planned by the gateway's data plane, answered with addresses of workers.

The picker never sees a token. `PickedRequest` takes the place of an exchange: it holds the load that is
reserved for a request until Envoy reports the request's end.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvroute.admission.fair_queue import QueueEntry
from kvroute.blocks.keys import BlockKey
from kvroute.epp.endpoints import Endpoints
from kvroute.epp.messages import AnswerHead, attempts_of
from kvroute.errors import NoRoutableWorker
from kvroute.fleet.worker import Worker
from kvroute.http.asgi import relay_body, stored_plan
from kvroute.index.map_trust import MapTrust
from kvroute.openai.endpoints import Endpoint
from kvroute.openai.headers import HeaderList
from kvroute.relay.dataplane import DataPlane
from kvroute.relay.planner import has_rank
from kvroute.relay.sagemaker import ADAPTER
from kvroute.request.downstream import Downstream, InFlightRequest, field_pairs
from kvroute.request.plan import RequestPlan
from kvroute.request.record import CLIENT_LEFT, Record, trace_id_in
from kvroute.routing.router import Dispatch
from kvroute.routing.strategy import CacheMap, Candidate, RouteDecision, RouteQuery

log = logging.getLogger(__name__)

_RANK = b"x-data-parallel-rank"


class PickTarget(NamedTuple):
    """A worker that may serve a request, and its address."""

    address: str
    candidate: Candidate


class Pick(NamedTuple):
    """The answer for a request that goes to a worker."""

    destination: str
    """`ip:port`, and the fallbacks behind commas."""
    headers: HeaderList
    """HeaderList that the worker gets; they replace the client's."""
    body: bytes
    request: PickedRequest


class OwnAnswer(NamedTuple):
    """The answer of the picker itself."""

    status: int
    headers: HeaderList
    body: bytes


class PickAnswer:
    """The `Downstream` of one request of Envoy: it takes the pick, or the picker's own answer.

    Mutable: `outcome` is set once, to None if no answer can be given; `on_cut` is called when a picked
    request is ended by a shutdown.
    """

    is_paused = False

    def __init__(self, endpoints: Endpoints, subset: frozenset[str] | None, fallbacks: int) -> None:
        self._endpoints = endpoints
        self._subset = subset
        self._fallbacks = fallbacks
        self._head: tuple[int, HeaderList] = (500, [])
        self._parts: list[bytes] = []
        self.outcome: asyncio.Future[Pick | OwnAnswer | None] = asyncio.get_running_loop().create_future()
        self.on_cut: Callable[[], object] | None = None

    def targets(self, plan: RequestPlan) -> list[PickTarget]:
        """The workers that may serve the request, best first: at most one and the fallbacks.

        Raises NoRoutableWorker.
        """
        targets: list[PickTarget] = []
        body: bytes | None = None
        for candidate in plan.decision.ranking:
            address = self._endpoints.of(candidate.worker)
            if address is None or (self._subset is not None and address not in self._subset):
                continue
            worker_body = plan.body_for(candidate.worker.id)
            if body is not None and worker_body is not body:
                continue  # Envoy sends one body: a worker with another revision of the adapter is no fallback
            if targets and candidate.rank != targets[0].candidate.rank:
                continue  # nor one with another rank, which is a header of the request
            body = worker_body
            targets.append(PickTarget(address, candidate))
            if len(targets) > self._fallbacks:
                break
        if not targets:
            subset = "" if self._subset is None else " within the subset that the proxy has set"
            raise NoRoutableWorker(
                f"No routable worker serves the model {plan.model!r}{subset} at the moment.", retry_after_s=1
            )
        return targets

    def picked(self, pick: Pick) -> None:
        """The request goes to a worker."""
        self._set(pick)

    def start(self, status: int, headers: HeaderList) -> None:
        self._head = status, headers

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        self.start(status, field_pairs(fields))

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        self.start_relayed(status, fields, is_sized=is_sized)
        self.finish(body)

    def flush_head(self) -> None:
        pass

    def write(self, chunk: bytes) -> None:
        self._parts.append(chunk)

    def framed_writer(self) -> None:
        return None

    def finish(self, chunk: bytes = b"") -> None:
        self._set(OwnAnswer(*self._head, b"".join([*self._parts, chunk])))

    def cut(self) -> None:
        self._set(None)
        if self.on_cut is not None:
            self.on_cut()

    def _set(self, outcome: Pick | OwnAnswer | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class Expected(NamedTuple):
    """A prompt that a worker computes, and how the cache map shows that it is done."""

    slot: int
    keys: Sequence[BlockKey]
    """Its block keys, as this worker's blocks have them."""
    tokens: int
    """Tokens in its full blocks, at least one block."""


_NEXT_PROMPTS = 8
"""Prompts behind the first one without events that are looked up, too, because single events may be lost."""


class _Watch(ABC):
    """Reads something each `interval_s` while dispatches wait for it. Mutable: by its timer."""

    def __init__(self, now: Callable[[], float], interval_s: float) -> None:
        self._now = now
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no dispatch waits for its first token. Then the timer is off."""
        return self._timer is None

    def _start(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._fired)

    def _fired(self) -> None:
        self._timer = None
        if self._look(self._now()):
            self._start()

    @abstractmethod
    def _look(self, now: float) -> bool:
        """Read the source once. Returns whether any dispatch still waits for its first token."""


class FirstTokens(_Watch):
    """Finds in the cache map which prompts are computed, because the picker sees no first token.

    A worker publishes the last block of a prompt in the step that makes the first token, and computes prompts
    in their order. Mutable: `expect` adds dispatches; a timer reads the map while there are any.
    """

    def __init__(self, caches: CacheMap, interval_s: float, now: Callable[[], float]) -> None:
        super().__init__(now, interval_s)
        self._caches = caches
        self._waiting: dict[int, list[tuple[Expected, PickedDispatch]]] = {}
        """Slot -> the dispatches without a first token, in their order."""

    def of(self, query: RouteQuery, candidate: Candidate) -> Expected | None:
        """What the events of this worker will show; None if they show nothing about this prompt."""
        match, worker = candidate.match, candidate.worker
        if match is None or len(query.exact) != 1 or not query.reads_cache:
            return None
        cache_places = self._caches.places(worker)
        cache_place = next((seen for seen in cache_places if seen.slot == match.slot), None)
        if cache_place is None or cache_place.trust is not MapTrust.WHOLE:
            return None
        (prompt,), size, ahead = query.exact, worker.block_size, cache_place.ahead
        tokens = max(0, prompt.tokens - 1 - ahead) // size * size
        # A prompt that the worker holds already, or will hold by an earlier request, has no event of its own.
        if match.tokens.gpu >= tokens:
            return None
        return Expected(cache_place.slot, prompt.keys_ahead(ahead) if ahead else prompt.keys, tokens)

    def expect(self, expected: Expected, dispatch: PickedDispatch) -> None:
        """Report the first token of `dispatch` when the events show it."""
        self._waiting.setdefault(expected.slot, []).append((expected, dispatch))
        self._start()

    def _look(self, now: float) -> bool:
        self._caches.refresh(True)
        for slot, waiting in list(self._waiting.items()):
            waiting = [(expected, dispatch) for expected, dispatch in waiting if dispatch.waits]
            done = self._computed(waiting)
            for _, dispatch in waiting[:done]:
                dispatch.first_token(now)
            self._waiting[slot] = waiting[done:]
            if not waiting[done:]:
                del self._waiting[slot]
        return bool(self._waiting)

    def _computed(self, waiting: Sequence[tuple[Expected, PickedDispatch]]) -> int:
        """How many of a worker's prompts, from the first one, are computed. O(log prompts) lookups."""
        # Those before a computed one are computed, too, even if their events or blocks are lost.
        if not waiting or self._is_computed(waiting[-1][0]):
            return len(waiting)
        low, high = 0, len(waiting) - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_computed(waiting[middle][0]):
                low = middle + 1
            else:
                high = middle
        # If the events of `waiting[low]` are lost, the search has missed the computed prompts behind it.
        for number in range(min(low + _NEXT_PROMPTS, len(waiting) - 2), low, -1):
            if self._is_computed(waiting[number][0]):
                return number + 1
        return low

    def _is_computed(self, expected: Expected) -> bool:
        return self._caches.holds(*expected)


_READ_GAUGES_S = 1.0
"""Time between two reads of the figures that the health monitor keeps."""
ON_THE_WAY_S = 1.0
"""A request may need this long through Envoy and the worker's tokenizer until the engine has it."""


class AssumedPrefills(_Watch):
    """Ends assumed prefills that are over by the engines' own figures.

    An engine begins prompts in the order in which it gets them. So when n requests wait there, all but the
    newest n + 1 of those that it has are computed; one may be computed in part. Requests of others only make
    n larger. Mutable: `expect` adds dispatches; a timer reads the figures while there are any.
    """

    def __init__(self, now: Callable[[], float], interval_s: float = _READ_GAUGES_S) -> None:
        super().__init__(now, interval_s)
        self._waiting: dict[Worker, list[tuple[float, Dispatch]]] = {}
        """The dispatches whose prefill is assumed to last, in their order, and when they were sent."""

    def expect(self, dispatch: Dispatch, now: float) -> None:
        """End the prefill of `dispatch`, sent `now`, when the engine's figures show that it is over."""
        self._waiting.setdefault(dispatch.worker, []).append((now, dispatch))
        self._start()

    def _look(self, now: float) -> bool:
        for worker, dispatches in list(self._waiting.items()):
            worker.load.wait(now)  # assumed prefills end with the time
            waiting = [
                (sent_at, dispatch)
                for sent_at, dispatch in dispatches
                if dispatch.is_queued and not dispatch.is_finished
            ]
            queue = worker.engine_queue
            if queue is not None:
                arrived = [dispatch for sent_at, dispatch in waiting if sent_at + ON_THE_WAY_S <= queue.at]
                kept = queue.waiting + max(1, len(worker.rank_loads))
                for dispatch in arrived[: max(0, len(arrived) - kept)]:
                    dispatch.first_token(now)
                waiting = [(sent_at, dispatch) for sent_at, dispatch in waiting if dispatch.is_queued]
            if waiting:
                self._waiting[worker] = waiting
            else:
                del self._waiting[worker]
        return bool(self._waiting)


class PickedDispatch(NamedTuple):
    """The load of a picked request on one worker."""

    dispatch: Dispatch
    record: Record

    @property
    def waits(self) -> bool:
        """Whether its prompt may still be computed."""
        return self.dispatch.is_queued and not self.dispatch.is_finished

    def first_token(self, now: float) -> None:
        """The worker has computed the prompt."""
        self.dispatch.first_token(now)
        if self.record.streamed and self.record.first_byte is None:
            self.record.first_byte = now


class PickedRequest:
    """A request that a worker has got from Envoy, until its end.

    `targets` are the workers in the order in which Envoy tries them. Mutable: by the calls below, which are
    idempotent and never wait.
    """

    def __init__(
        self,
        plane: PickerPlane,
        plan: RequestPlan,
        targets: Sequence[PickTarget],
        record: Record,
        client: Downstream,
        on_end: Callable[[PickedRequest], object],
    ) -> None:
        self._first_tokens = plane.first_tokens
        self._assumed_prefills = plane.assumed_prefills
        self._deps = plane.deps.attempts
        self._attribution = plane.deps.attribution
        self._journal = plane.journal
        self._plan = plan
        self._targets = targets
        self._record = record
        self._client = client
        self._on_end = on_end
        self._dispatch: Dispatch | None = None
        self._awaits_events = False
        """Events of the worker show the first token."""
        self.is_over = False
        self.has_answer = False
        """Envoy has reported the head of the answer."""

    def start(self) -> None:
        """Reserve the load on the first worker."""
        self._send_to(0, self._plan.query.now)

    def _send_to(self, index: int, now: float) -> None:
        deps, plan, record = self._deps, self._plan, self._record
        candidate = self._targets[index].candidate
        record.worker = candidate.worker.spec.id
        record.matched_tokens = candidate.matched_tokens
        record.held = candidate.match
        record.attempts = index + 1
        # Where no event will show the first token, the prefill is assumed to take its estimated time, like
        # that of an answer in one piece, at most until the engine's figures show its end. No cost is learned.
        expected = self._first_tokens.of(plan.query, candidate)
        self._awaits_events = expected is not None
        query = replace(plan.query, streamed=self._awaits_events)
        self._dispatch = deps.router.dispatch(query, plan.decision, candidate, now)
        if expected is not None:
            self._first_tokens.expect(expected, PickedDispatch(self._dispatch, record))
        elif self._dispatch.is_queued:
            self._assumed_prefills.expect(self._dispatch, now)
        if deps.on_sent is not None:
            deps.on_sent(plan.query, candidate)

    def described(self) -> Mapping[str, str]:
        """The decision in words, for metadata."""
        decision, best = self._plan.decision, self._targets[0].candidate
        return {
            "strategy": decision.strategy,
            "reason": decision.reason.value,
            "hit-tokens": str(best.matched_tokens),
        }

    def answered(self, head: AnswerHead) -> HeaderList:
        """Envoy has the head of the answer. Returns the headers that the answer gets."""
        if self.is_over or self.has_answer:
            return []
        deps, record = self._deps, self._record
        status, is_event_stream = head.status, head.is_event_stream
        self.has_answer = True
        record.status, record.streamed = status, is_event_stream
        now = deps.now()
        tried, failed, answered_index = attempts_of(head, [target.address for target in self._targets])
        if head.trouble:
            record.error, record.attempts = head.trouble, tried
        elif answered_index:
            self._release(now)
            self._send_to(answered_index, now)
        for target in self._targets[:failed]:
            deps.metrics.epp_not_served.labels(target.candidate.worker.id).inc()
            deps.health.report_failure(target.candidate.worker, "not_served")
        if answered_index is None:
            if head.trouble:
                return []
            # A worker that Envoy has chosen answers: this request is no load of those that were picked.
            self._release(now)
            record.worker, record.attempts = "-", tried
            return [(b"x-request-id", record.request_id)]
        candidate = self._targets[answered_index].candidate
        if status >= 500 or deps.health.suspects:
            deps.health.report_status(candidate.worker, status)
        # The head of a whole answer comes with the body; that of a stream before prefill, unless it is late.
        is_computed = self._awaits_events and self._dispatch is not None and not self._dispatch.is_queued
        if not is_event_stream or is_computed:
            record.first_byte = now
        lines = self._attribution.lines(candidate, self._plan.decision)
        return [*field_pairs(lines), (b"x-request-id", record.request_id)]

    def end(self, by: str) -> None:
        """Stop now: the client left before a worker answered ("client"), or the picker stops ("shutdown")."""
        if self.is_over:
            return
        self._record.ended_by = by
        self._deps.metrics.streams_aborted.labels(by).inc()
        if not self._record.status:
            self._record.status = CLIENT_LEFT
        self._end()
        if by == "shutdown":
            self._client.cut()

    def finished(self) -> None:
        """Envoy has reported the end. Who ended an answer that had begun is not known."""
        if self.is_over:
            return
        if not self.has_answer:
            self.end("client")
            return
        self._end()

    def pause(self) -> None:
        """The picker relays nothing."""

    def resume(self) -> None:
        """The picker relays nothing."""

    def _release(self, now: float) -> None:
        if self._dispatch is not None:
            self._dispatch.finish(now)

    def _end(self) -> None:
        self.is_over = True
        now = self._deps.now()
        self._release(now)
        self._journal.finished(self._record, now)
        self._on_end(self)


class PickerPlane(DataPlane):
    """The data plane of a picker: a plan for a `PickAnswer` becomes a pick, every other plan an exchange."""

    first_tokens: FirstTokens
    assumed_prefills: AssumedPrefills
    """Both are set by `follow_prefills`."""

    def follow_prefills(self, interval_s: float) -> None:
        """To be called before the first request. `interval_s`: time between two reads of the cache map."""
        self.first_tokens = FirstTokens(self.deps.attempts.router.caches, interval_s, self.clock.now)
        self.assumed_prefills = AssumedPrefills(self.clock.now)

    def start(
        self,
        plan: RequestPlan,
        fields: bytes,
        record: Record,
        client: Downstream,
        entry: QueueEntry | None = None,
    ) -> InFlightRequest:
        """See `DataPlane.start`. Raises NoRoutableWorker."""
        if not isinstance(client, PickAnswer):
            return super().start(plan, fields, record, client, entry)
        targets = client.targets(plan)
        decision = plan.decision
        if targets[0].candidate is not decision.ranking[0]:
            ranking = [target.candidate for target in targets]
            decision = RouteDecision(decision.strategy, decision.reason, ranking)
            record.decision = decision
        plan = replace(plan, decision=decision)
        record.is_unseen = True
        if self.deps.attempts.log_traces and not record.trace_id:
            record.trace_id = trace_id_in(fields)
        on_end: Callable[[PickedRequest], object] = self.entry_control.discard
        if entry is not None and self.queue is not None:
            queue, waited = self.queue, entry
            assumed = queue.started(waited, plan.model, plan.query.tokens)

            def on_end(request: PickedRequest) -> None:
                self.entry_control.discard(request)
                queue.finished(waited, assumed, round(assumed))  # the real number is not known

        request = PickedRequest(self, plan, targets, record, client, on_end)
        self.entry_control.add(request)
        request.start()
        body = plan.body_for(targets[0].candidate.worker.id)
        client.picked(
            Pick(
                ",".join(target.address for target in targets),
                self._headers(plan, targets, record, fields),
                body,
                request,
            )
        )
        return request

    def _headers(
        self, plan: RequestPlan, targets: Sequence[PickTarget], record: Record, fields: bytes
    ) -> HeaderList:
        """The headers that the worker gets instead of the client's."""
        headers = field_pairs(self.added_fields)
        if record.trace is not None:
            headers += [pair for pair in field_pairs(fields) if pair[0].lower() == b"traceparent"]
        headers += [pair for pair in field_pairs(fields) if pair[0].lower() == ADAPTER]
        rank = targets[0].candidate.rank
        if rank is not None and not has_rank(fields):
            headers.append((_RANK, b"%d" % targets[0].candidate.worker.sent_rank(rank)))
        return headers

    async def pick(
        self,
        endpoint: Endpoint,
        body: bytes,
        target: bytes,
        headers: HeaderList,
        record: Record,
        client: PickAnswer,
    ) -> InFlightRequest:
        """Plan a request for one of the relayed endpoints. Raises GatewayError."""
        self.entry_control.check(headers)
        fields = self._read_fields(headers)
        return await relay_body(self, endpoint, body, target, headers, fields, record, client)

    async def pick_stored(
        self,
        response_id: str,
        method: bytes,
        body: bytes,
        target: bytes,
        headers: HeaderList,
        record: Record,
        client: PickAnswer,
    ) -> InFlightRequest:
        """Plan a request for a stored response. Raises GatewayError."""
        self.entry_control.check(headers)
        plan = await stored_plan(self, response_id, method, body, target, headers, record)
        return self.start(plan, self._read_fields(headers), record, client)

    def _read_fields(self, headers: HeaderList) -> bytes:
        """The header lines that the picker itself reads; Envoy relays all of them."""
        names = {b"traceparent", _RANK} - self.hidden_fields
        lines = [b"%b: %b\r\n" % pair for pair in headers if pair[0] in names]
        return b"".join(line for line in lines if line.count(b"\n") == line.count(b"\r") == 1)
