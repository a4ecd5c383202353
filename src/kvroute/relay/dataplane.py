"""The data plane: the bodies of requests, their plans, and the start of their exchanges.

Both ways into the gateway, the fast lane and the ASGI path, use it between a request's last byte and its
exchange.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import chain, count
from typing import Protocol

from msgspec.structs import replace

from kvroute.access.client_keys import KnownClient, check_model, tenant_of
from kvroute.access.keys import KeyCheck
from kvroute.admission.fair_queue import QueueEntry, Target
from kvroute.admission.queued_head import QueuedHead, may_have_queued_head
from kvroute.admission.request_queue import RequestQueue, WaitingRequest, requested_priority
from kvroute.blocks.keys import ANCHOR_BYTES
from kvroute.errors import (
    GatewayError,
    ModelNotFound,
    NotIsolated,
    OverLimit,
    ShuttingDown,
    WorkerUnreachable,
)
from kvroute.journal.compat_log_lines import Announce
from kvroute.journal.tracing import Tracer
from kvroute.metrics import Metrics
from kvroute.openai.bounded import MEMBERS_LIMIT, STEPWISE_BYTES, UNREADABLE, Bounded
from kvroute.openai.endpoints import BodyKind, Endpoint, ErrorShape
from kvroute.openai.headers import Headers, header
from kvroute.openai.kv_transfer import is_address
from kvroute.openai.prefix_cache import SeenBodies, large_request
from kvroute.openai.request import InferenceRequest, model_alone, parse_request
from kvroute.relay.attempts import Attempts
from kvroute.relay.call import Call
from kvroute.relay.entry_control import EntryControl
from kvroute.relay.exchange import Exchange, ExchangeDeps
from kvroute.relay.handover import exchange_with_roles, without_encodings
from kvroute.relay.planner import STRATEGY_HEADER, Planner
from kvroute.relay.poison import LostRequests
from kvroute.relay.preparation import Prepared, Preparer
from kvroute.relay.sagemaker import PATH as INVOCATIONS
from kvroute.relay.sagemaker import Invocations, with_adapter
from kvroute.relay.session_keys import SessionKeys
from kvroute.relay.stored_responses import StoredResponses
from kvroute.request.downstream import Downstream, InFlightRequest
from kvroute.request.failures import InternalError, refuse
from kvroute.request.metering import Meter, Pace
from kvroute.request.pending import PendingExchange
from kvroute.request.plan import RequestPlan
from kvroute.request.record import CLIENT_LEFT, Record
from kvroute.upstream.options import RetryOptions
from kvroute.upstream.writes import Outbox

log = logging.getLogger(__name__)

_MULTIPART = BodyKind.MULTIPART  # an enum member that is looked up in its class costs 80 ns (CPython 3.11)
_LONGEST_MODEL = 4_096
_AUTHORIZATION = frozenset({b"authorization"})
_RANK = frozenset({b"x-data-parallel-rank"})
_OWN_KEYS = frozenset({b"authorization", b"x-api-key"})
"""Headers that may hold a key of this gateway: see `KeyCheck`."""
_LOW_DIGITS = tuple(b"%02x" % low for low in range(256))


class Stage(Protocol):
    """What a part does with each request before it is planned. It does not wait."""

    def enter(self, call: Call) -> None:
        """Let the request pass, or raise a GatewayError. What it holds it releases by `Record.on_end`."""
        ...


class BodyReader:
    """Parses request bodies, within limits.

    Mutable: caches the prefixes of recent bodies (`SeenBodies`), because the turns of a conversation share
    most bytes.
    """

    def __init__(self, planner: Planner, metrics: Metrics, bounded: Bounded) -> None:
        self._planner = planner
        self._metrics = metrics
        self._observe_bytes = metrics.request_bytes.append  # looked up once, not for each request
        self._bounded = bounded
        self._max_messages = bounded.limits.max_messages
        self._seen = SeenBodies(seed=secrets.randbits(64), cut_bytes=ANCHOR_BYTES, bounded=bounded)

    def read(self, endpoint: Endpoint, body: bytes, headers: Headers) -> InferenceRequest:
        """Parse a complete body of at most `STEPWISE_BYTES`. Raises InvalidRequest and OverLimit."""
        self._observe_bytes(len(body))
        try:
            if endpoint.body is _MULTIPART:
                kind = header(headers, b"content-type").decode("latin-1")
                return parse_request(endpoint, body, kind, self._bounded)
            if len(body) < self._seen.min_bytes:
                request = parse_request(endpoint, body)
            else:
                request = self._seen.read(endpoint, body)
            messages, model = request.read_messages, request.model
            if messages is not None and len(messages) > self._max_messages:
                raise self._bounded.over("max_messages", "messages", "messages")
        except OverLimit as error:
            return self.forward_unread(endpoint, body, error)
        if model is not None and len(model) > _LONGEST_MODEL:
            raise ModelNotFound(model[:64] + "...")  # the error repeats the name
        request.bounded = self._bounded
        return request

    async def read_in_steps(self, endpoint: Endpoint, body: bytes, headers: Headers) -> InferenceRequest:
        """Like `read`, for a body of any size. Other tasks run between the steps of reading a large one."""
        if len(body) <= STEPWISE_BYTES:
            return self.read(endpoint, body, headers)
        self._observe_bytes(len(body))
        kind = header(headers, b"content-type").decode("latin-1")
        steps = large_request(endpoint, body, kind, self._bounded, self._seen)
        try:
            while True:
                next(steps)
                await asyncio.sleep(0)
        except StopIteration as end:
            request: InferenceRequest = end.value
        except OverLimit as error:
            return self.forward_unread(endpoint, body, error)
        await asyncio.sleep(0)
        return request

    def forward_unread(self, endpoint: Endpoint, body: bytes, error: OverLimit) -> InferenceRequest:
        """The request of a body that exceeds a limit, if at most its model matters. Raises `error` otherwise.

        Raises InvalidRequest and ModelNotFound, if the model's name cannot be one.
        """
        model = None
        is_decodable = error.limit != MEMBERS_LIMIT
        why = self._planner.why_body_is_read(endpoint) or self._planner.why_not_unread(
            body, is_decodable=is_decodable
        )
        if not why and self._planner.goes_by_model:
            why = "its model decides which workers serve it"
            if is_decodable:
                model, why = self._model_alone(endpoint, body)
        outcome = "refused" if why else "forwarded"
        self._metrics.bodies_over_limit.labels(error.limit, outcome).inc()
        log.warning(
            "a body of %d bytes for %s is over the limit %s and %s",
            len(body),
            endpoint.path,
            error.limit,
            f"refused, because {why}"
            if why
            else "forwarded unread: nothing depends on its content"
            if model is None
            else "forwarded by the name of its model: nothing depends on the rest",
        )
        if why:
            raise error
        return InferenceRequest(endpoint, body, model, over=error.limit)

    def _model_alone(self, endpoint: Endpoint, body: bytes) -> tuple[str | None, str]:
        """The model that the body names, and why the rest of it must be read; "" if it need not be."""
        try:
            model = model_alone(endpoint, body)
        except UNREADABLE:
            return None, "its model decides which workers serve it"
        return model, "its model is an alias" if self._planner.is_alias(model) else ""


class DataPlane:
    """Plans admitted requests and starts their exchanges.

    `worker_authorization` replaces the client's Authorization header towards workers. `drops_authorization`
    removes that header and `x-api-key`, because they hold a key of this gateway. Clients with named keys
    choose their data-parallel rank only with `trusts_clients`. `held_bytes` is the part of
    an answer that is kept for a slow client. `preparer` is for strategies that need a prompt's tokens.
    Without a `queue` workers have no limits. `announce` is called with each plan. Mutable: `_preparing`
    holds the tasks of requests whose plan needs time; `aclose` ends them.
    """

    def __init__(
        self,
        planner: Planner,
        stored: StoredResponses,
        deps: ExchangeDeps,
        keys: KeyCheck,
        outbox: Outbox,
        invocations: Invocations,
        *,
        preparer: Preparer | None = None,
        queue: RequestQueue | None = None,
        announce: Announce | None = None,
        bounded: Bounded | None = None,
        worker_authorization: bytes | None,
        drops_authorization: bool,
        trusts_clients: bool = False,
        max_body_bytes: int,
        max_in_flight: int,
        held_bytes: int,
        tracer: Tracer | None = None,
        stages: Sequence[Stage] = (),
    ) -> None:
        self.stages = tuple(stages)
        """What parts check of a request before it is planned, in their order."""
        self.planner = planner
        self._tracer = tracer
        self.stored = stored
        self.invocations = invocations
        self.preparer = preparer
        self._preparer = preparer if planner.may_need_tokens else None
        self.queue = queue
        self._announce = announce
        self.deps = deps
        self.lost = deps.attempts.lost or LostRequests(RetryOptions(), deps.clock, deps.metrics)
        self.journal = deps.journal
        self.clock = deps.clock
        self.metrics = deps.metrics
        self.entry_control = EntryControl(keys, deps.metrics, max_in_flight=max_in_flight)
        self.bodies = BodyReader(planner, deps.metrics, bounded or Bounded())
        self.outbox = outbox
        self.max_body_bytes = max_body_bytes
        self.held_bytes = held_bytes
        self.hidden_fields: frozenset[bytes] = frozenset()
        """Request headers that are hidden from workers, in addition to those that are never relayed."""
        if drops_authorization:
            self.hidden_fields = _OWN_KEYS
        elif worker_authorization is not None:
            self.hidden_fields = _AUTHORIZATION
        if keys.ring is not None and not trusts_clients:
            self.hidden_fields |= _RANK
        self.added_fields = (
            b"authorization: %b\r\n" % worker_authorization if worker_authorization is not None else b""
        )
        """Header lines for workers that replace hidden ones."""
        self.has_keys = not keys.is_open
        self.seen_client = None if keys.ring is None else keys.ring.seen
        """Finds the client of a value of Authorization without reading other headers."""
        self._keys = keys if keys.ring is not None else None
        """Only with named keys."""
        self._isolates_tenants = planner.isolates_tenants
        # Looked up once, not for each request.
        self._now = deps.clock.now
        self._observe_routing_time = deps.metrics.routing_time.append
        self._preparing: set[asyncio.Task[None]] = set()
        self._not_isolated_paths: set[str] = set()
        """Endpoints for which the warning of `_warn_not_isolated` was logged."""
        self._request_ids = _new_request_ids()
        self._pace = Pace()

    def configure(
        self, *, max_body_bytes: int, max_in_flight: int, held_bytes: int, retries: RetryOptions
    ) -> None:
        """Change these limits for further requests. Each model's strategy is looked up again."""
        self.planner.forget_strategies()
        self.max_body_bytes = max_body_bytes
        self.held_bytes = held_bytes
        self.entry_control.set_max_in_flight(max_in_flight)
        attempts = dataclasses.replace(
            self.deps.attempts,
            retry_statuses=frozenset(retries.statuses),
            lost_workers=retries.lost_workers,
            busy_workers=retries.busy_workers,
        )
        self.lost.refuse_s = retries.refuse_s
        self.deps = dataclasses.replace(self.deps, attempts=attempts)

    def read_sessions(
        self,
        session_keys: SessionKeys,
        bounded: Bounded,
        announce: Announce | None,
    ) -> None:
        """Read the session keys of further requests from these sources. `bounded` reads their fields."""
        self.planner.set_session_keys(session_keys)
        self.bodies = BodyReader(self.planner, self.metrics, bounded)  # forgets the prefixes of recent bodies
        self._announce = announce

    def new_record(self, sent_id: bytes, path: str) -> Record:
        """The record of a request that has just arrived; its time starts now.

        The request ID is the client's own `x-request-id`, `sent_id`, if that is short, printable and no
        address for engines; otherwise a new one. A caller that waits for the body sets `started` again.
        """
        if (
            sent_id
            and len(sent_id) <= 256
            and sent_id.isascii()
            and sent_id.decode("ascii").isprintable()
            and not is_address(sent_id)
        ):
            return Record(sent_id, path, self._now())
        return Record(next(self._request_ids), path, self._now())

    def relay(self, call: Call) -> InFlightRequest:
        """Let the request pass its stages in order, plan it and start its exchange.

        The stages: trace, keys and tenant, `stages`, exact tokens, queue, plan, start. A request that waits
        for its tokens or for a permit is continued by a task or by the queue. Raises the errors of
        `Planner.plan`, `admit_key`, `Stage.enter` and `RequestQueue.may_start`.
        """
        request, record = call.request, call.record
        if self._tracer is not None:
            call.fields = self._tracer.begin(record, call.fields)
            if record.trace is not None:
                record.trace.received = self._now()
        is_sagemaker = request.endpoint.is_sagemaker
        if is_sagemaker:
            self.invocations.named(request, call.headers)
        if self._keys is not None and record.use is None:
            self.admit_key(request, call.headers, record)
        if is_sagemaker:
            call.owner = self.invocations.owner(request, call.headers)
        for stage in self.stages:
            stage.enter(call)
        preparer = self._preparer
        if preparer is not None:
            if self.lost.sizes:
                # A worker computes something of the prompt for its tokens, too.
                self._check_lost(call)
            model = self.planner.model_to_tokenize(request, call.headers)
            if model is not None:
                call.prepared = preparer.try_cached(request, model)
                if call.prepared is None:
                    if self.queue is not None and request.endpoint.fills_kv_cache:
                        # A request that will be refused must not wait for its tokens first.
                        self.queue.check_room(self._entry(self.queue, call))
                    # `partial` instead of nested functions: those would make a cell of each variable at
                    # every request.
                    start = partial(self._relay_prepared, call, partial(preparer.prepare, request, model))
                    return self._start_later(request.endpoint.errors, record, call.client, start)
        return self._start_or_wait(call)

    async def _relay_prepared(
        self, call: Call, prepare: Callable[[], Awaitable[Prepared]]
    ) -> InFlightRequest:
        call.prepared = await prepare()
        return self._start_or_wait(call)

    def _start_or_wait(self, call: Call) -> InFlightRequest:
        """Start the exchange if a worker has a permit; otherwise the request waits in the queue."""
        request, record = call.request, call.record
        # Plans must be made in the order of their time, and others may have been planned while this one
        # waited.
        now = record.started
        if call.prepared is not None or request.endpoint.stores_response:
            now = self._now()
        queue = self.queue
        if queue is not None and request.endpoint.fills_kv_cache:
            call.entry = self._entry(queue, call)
            if not queue.may_start(call.entry):
                head = self._queued_head(request, record, call.client)
                if head is not None:  # its stream must not be compressed
                    call.client, call.fields = head, without_encodings(call.fields)
                return self._wait(queue, call, call.entry, head)
        return self._plan_and_start(call, now, record.started)

    def _start_waited(self, call: Call, entry: QueueEntry) -> InFlightRequest:
        """Continue a request to which the queue has given a permit."""
        now = self._now()
        call.record.queued_s = now - entry.entered
        return self._plan_and_start(call, now, now)

    def _plan_and_start(self, call: Call, now: float, started: float) -> InFlightRequest:
        """Plan at the time `now`. `started`: since when the time of routing counts."""
        request, record, prepared, entry = call.request, call.record, call.prepared, call.entry
        target, headers, fields = call.target, call.headers, call.fields
        trace = record.trace
        if trace is not None:
            trace.planned = self._now()
            if prepared is not None:
                trace.prepared = trace.planned - record.queued_s
        try:
            plan = self.planner.plan(request, target, headers, now, call.owner, prepared, fields=fields)
        except OverLimit as error:  # a limit on prompts, which are first read here
            request = self.bodies.forward_unread(request.endpoint, request.body, error)  # never a tenant's
            if record.use is not None:
                self._check_may_be_unread(request, record.use.client)
            plan = self.planner.plan(request, target, headers, now, call.owner, fields=fields)
        if prepared is not None and prepared.lost is not None and not record.begun:
            record.begun = 1
            self.lost.lost(prepared.lost, record.key, plan.target, plan.body, plan.model)
            if self.deps.attempts.lost_workers == 1:
                raise WorkerUnreachable(f"Worker {prepared.lost.id!r} failed while it tokenized the prompt.")
        if self.lost.sizes and len(plan.body) in self.lost.sizes:
            self.lost.check(record.key, plan.target, plan.body)
        record.model, record.tokens, record.decision = plan.model, plan.query.tokens, plan.decision
        if plan.query.from_parent:
            record.parent_worker = plan.query.session_worker or ""
        if trace is not None:
            trace.decided = self._now()
        if record.use is not None:
            known = record.use.client
            known.ring.check_prompt(known, plan.query.tokens)
        if plan.is_isolated:
            self.metrics.isolated.labels(plan.model).inc()
        self._observe_routing_time(self._now() - started)
        if entry is not None and self.queue is not None:
            decision = self.queue.placed(plan.decision)
            if decision is not plan.decision:
                plan, record.decision = replace(plan, decision=decision), decision
        if self._announce is not None:
            self._announce(plan, record, None)
        if request.endpoint.is_sagemaker:
            fields = with_adapter(fields, headers, plan.model)
        return self.start(plan, fields, record, call.client, entry)

    def _check_lost(self, call: Call) -> None:
        """Raise RequestLostWorkers if the request's body, as it would be sent, is refused."""
        record = call.record
        try:
            plan = self.planner.plan(
                call.request, call.target, call.headers, record.started, call.owner, fields=call.fields
            )
        except OverLimit:  # it is sent unread, if at all, and checked then
            return
        if len(plan.body) in self.lost.sizes:
            self.lost.check(record.key, plan.target, plan.body)

    def admit_key(self, request: InferenceRequest, headers: Headers, record: Record) -> None:
        """Check what the request's named key permits, and account for the request until it is recorded.

        Raises Unauthorized, Forbidden, BodyTooLarge, KeyLimitReached, and what `Fleet.resolve` raises.
        """
        keys, client = self._keys, record.client
        if client is None and keys is not None:
            client = keys.client(headers)
        if self._isolates_tenants:
            request.tenant = tenant_of(client)
        if client is None:
            return
        key = client.key
        record.key = key.name
        if key.models is not None:
            check_model(client, request.model, self.planner.resolve)
            if request.also_named is not None:
                check_model(client, request.also_named, self.planner.resolve)
        strategy = b""
        if key.strategies is not None and self.planner.allows_strategy_header:
            strategy = header(headers, STRATEGY_HEADER)
        self._check_may_be_unread(request, client)
        record.use = client.ring.admit(client, request, strategy, record.started)

    def _check_may_be_unread(self, request: InferenceRequest, client: KnownClient) -> None:
        """Raise OverLimit for a body that was not read, if the key limits the tokens of its prompts."""
        if request.over and client.account.max_prompt_tokens:
            self.metrics.bodies_over_limit.labels(request.over, "refused").inc()
            raise OverLimit(
                request.over,
                f"The request body is over the limit {request.over}. It must be read, because the key "
                f"{client.key.name!r} has a limit of prompt tokens.",
            )

    def tenant(self, headers: Headers) -> str:
        """The request's tenant; "" without isolation. Raises Unauthorized."""
        return tenant_of(self.entry_control.keys.client(headers)) if self._isolates_tenants else ""

    def relay_large(
        self,
        endpoint: Endpoint,
        body: bytes,
        target: bytes,
        headers: Headers,
        fields: bytes,
        record: Record,
        client: Downstream,
    ) -> InFlightRequest:
        """Read a large body in steps, then `relay` it, in a task."""

        async def start() -> InFlightRequest:
            try:
                request = await self.bodies.read_in_steps(endpoint, body, headers)
            except GatewayError:
                self.continue_trace(record, fields)
                raise
            return self.relay(Call(request, target, headers, fields, record, client))

        return self._start_later(endpoint.errors, record, client, start)

    def _start_later(
        self,
        shape: ErrorShape,
        record: Record,
        client: Downstream,
        start: Callable[[], Coroutine[None, None, InFlightRequest]],
    ) -> PendingExchange:
        """An exchange that `start` starts in a task."""

        async def prepare() -> InFlightRequest | None:
            exchange = None
            try:
                exchange = await start()
            except GatewayError as error:
                self.refuse(record, error, client, shape)
            except Exception:  # noqa: BLE001 - `report_defect` logs it; other requests are not affected
                self.report_defect(record, client, shape)
            self.entry_control.discard(pending)
            return exchange

        def on_end(pending: PendingExchange, by: str) -> None:
            self.entry_control.discard(pending)
            self._ended_early(by, record, client, shape)

        pending = PendingExchange(prepare, on_end)
        self._preparing.add(pending.task)
        pending.task.add_done_callback(self._preparing.discard)
        self.entry_control.add(pending)
        return pending

    def _ended_early(self, by: str, record: Record, client: Downstream, shape: ErrorShape) -> None:
        """A request without an exchange ends because its client left, or because the gateway stops."""
        record.ended_by = by
        self.metrics.streams_aborted.labels(by).inc()
        if by == "client":
            client.cut()
            self.client_left(record)
        else:
            self.refuse(record, ShuttingDown("The gateway is shutting down."), client, shape)

    def _entry(self, queue: RequestQueue, call: Call) -> QueueEntry:
        """The queue's entry for a request. A named key's client may lower its priority, not raise it."""
        request, record, headers = call.request, call.record, call.headers
        priority, weight = requested_priority(request, headers), 1.0
        if record.use is not None:
            key = record.use.client.key
            priority, weight = max(priority, key.priority), key.weight
        target = Target(self.planner.resolve(request.model), call.owner)
        return queue.entry(target, record.key, weight, priority, self.planner.session_of(request, headers))

    def _queued_head(
        self, request: InferenceRequest, record: Record, client: Downstream
    ) -> QueuedHead | None:
        """The client of a request that waits, if it may get its head meanwhile."""
        waits = self.deps.streams
        if waits is None or not waits.sends_queued_heads or not may_have_queued_head(request):
            return None
        return QueuedHead(client, request.endpoint.errors, record, waits, self.metrics)

    def _wait(
        self, queue: RequestQueue, call: Call, entry: QueueEntry, head: QueuedHead | None
    ) -> WaitingRequest:
        """A request that waits until the queue starts it. `head`: its client, if that sends heads."""
        record, client, shape = call.record, call.client, call.request.endpoint.errors

        def started() -> InFlightRequest:
            if head is not None:
                head.left_queue()
            exchange = self._start_waited(call, entry)
            self.entry_control.discard(waiting)
            return exchange

        def on_refused(waiting: WaitingRequest, error: Exception) -> None:
            self.entry_control.discard(waiting)
            record.queued_s = self._now() - entry.entered
            if isinstance(error, GatewayError):
                self.refuse(record, error, client, shape)
            else:
                log.error("a request failed", exc_info=error)
                self.refuse(record, InternalError("Internal error."), client, shape)

        def on_ended(waiting: WaitingRequest, by: str) -> None:
            self.entry_control.discard(waiting)
            record.queued_s = self._now() - entry.entered
            self._ended_early(by, record, client, shape)

        waiting = WaitingRequest(queue, entry, started, on_refused, on_ended)
        record.model = entry.target.model
        self.entry_control.add(waiting)
        if head is not None:
            head.wait(self._now() - record.started)
        queue.wait(entry, waiting)
        return waiting

    def start(
        self,
        plan: RequestPlan,
        fields: bytes,
        record: Record,
        client: Downstream,
        entry: QueueEntry | None = None,
    ) -> InFlightRequest:
        """Start an exchange. It ends by itself, or by `Exchange.end`. `entry`: its entry in the queue."""
        deps, entry_control = self.deps, self.entry_control
        if record.path == INVOCATIONS:
            known = None if record.use is None else record.use.client
            client = self.invocations.watched(
                client, record, tenant_of(known) if self._isolates_tenants else ""
            )
        if record.use is not None and record.use.is_metered:
            client = meter = Meter.of(client, plan, record.path, self._pace, self._now())
            record.use.metered(meter)
        on_end: Callable[[Exchange], object] = entry_control.discard
        if entry is not None and self.queue is not None:
            client, on_end = self._accounted(self.queue, entry, plan, record, client)
        if plan.has_roles:
            exchange = exchange_with_roles(deps, plan, record, fields, client, on_end, self._announce)
        else:
            attempts = Attempts(deps.attempts, plan, record, fields)
            exchange = Exchange(deps, plan, record, attempts, client, on_end)
        entry_control.add(exchange)
        exchange.start()
        return exchange

    def _accounted(
        self, queue: RequestQueue, entry: QueueEntry, plan: RequestPlan, record: Record, client: Downstream
    ) -> tuple[Downstream, Callable[[Exchange], object]]:
        """Charge the request's key. Returns the client with its meter, and what to call at the end."""
        meter = client
        if not isinstance(meter, Meter):
            meter = Meter.of(client, plan, record.path, self._pace, self._now())
        assumed = queue.started(entry, plan.model, plan.query.tokens)

        def on_end(exchange: Exchange) -> None:
            self.entry_control.discard(exchange)
            is_answer, usage = record.status < 400 or record.status == CLIENT_LEFT, record.usage
            if not is_answer:
                tokens = 0
            elif usage is None:
                tokens = meter.estimate(record.ended)
            else:
                tokens = usage.completion_tokens
                if record.use is None or not record.use.is_metered:
                    meter.reported(tokens, record.ended)
            queue.finished(entry, assumed, tokens)

        return meter, on_end

    def refuse(self, record: Record, error: GatewayError, client: Downstream, shape: ErrorShape) -> None:
        """Answer a request that has no exchange, and record the answer."""
        if isinstance(error, NotIsolated):
            self._warn_not_isolated(error, record.path)
        refuse(self.metrics, record, error, client, shape)
        self.journal.finished(record, self._now())

    def continue_trace(self, record: Record, fields: bytes) -> None:
        """Let an error before `relay` carry a trace id; `fields` are the client's header lines."""
        if self._tracer is not None and not record.was_sampled:
            self._tracer.begin(record, fields)

    def trace_refused(self, fields: bytes, error: GatewayError) -> str:
        """Trace a request whose head or framing is refused. Returns the trace id, "" without one."""
        return "" if self._tracer is None else self._tracer.refused(fields, error, self.clock)

    def _warn_not_isolated(self, error: NotIsolated, path: str) -> None:
        # Once for each endpoint: a client can send any number of such requests.
        if path not in self._not_isolated_paths:
            self._not_isolated_paths.add(path)
            log.warning("a request that cannot get a key space of its own was refused: %s", error)

    def report_defect(self, record: Record, client: Downstream, shape: ErrorShape) -> None:
        """Log the exception that is being handled, a defect of the gateway, and answer 500."""
        log.exception("a request failed")
        self.refuse(record, InternalError("Internal error."), client, shape)

    def client_left(self, record: Record) -> None:
        """Record a request whose client left before it had an exchange."""
        record.status = CLIENT_LEFT
        self.journal.finished(record, self._now())

    async def aclose(self) -> None:
        """End all requests in flight, wait for their tasks, and write the last log lines."""
        self.entry_control.cut()
        await asyncio.gather(*self._preparing, return_exceptions=True)
        self.journal.flush()


def _new_request_ids() -> Iterator[bytes]:
    """32 hexadecimal digits each: 16 random ones and a counter. Only the last two are formatted for each
    request."""
    random = secrets.token_hex(8).encode()
    starts = (b"%b%014x" % (random, high) for high in count())
    return chain.from_iterable(map(start.__add__, _LOW_DIGITS) for start in starts)
