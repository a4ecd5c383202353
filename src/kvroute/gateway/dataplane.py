"""The relayed endpoints: what a request passes between its last byte and its exchange, and the same as
raw ASGI objects.

A raw ASGI object costs a sixth of a FastAPI handler and nothing per streamed chunk
(docs/architecture.md); FastAPI's comforts are for the control plane.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator
from itertools import chain, count

from kvroute.blocks.keys import ANCHOR_BYTES
from kvroute.errors import (
    AdapterNotIsolated,
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    OverLimit,
    ShuttingDown,
    TooManyRequests,
)
from kvroute.fleet.worker import WorkerId
from kvroute.gateway.access import KeyCheck
from kvroute.gateway.downstream import (
    AsgiAnswer,
    ClientDisconnected,
    Downstream,
    Headers,
    Receive,
    Scope,
    Send,
    departure_of,
    header,
    read_body,
)
from kvroute.gateway.exchange import CLIENT_LEFT, Exchange, ExchangeDeps
from kvroute.gateway.failures import InternalError, refuse
from kvroute.gateway.journal import InFlightRequest, PendingExchange, Record
from kvroute.gateway.planner import Planner, RequestPlan
from kvroute.gateway.preparation import Prepared, Preparer
from kvroute.gateway.stored import StoredResponses, check_response_id
from kvroute.openai.bounded import STEPWISE_BYTES, Bounded
from kvroute.openai.endpoints import BodyKind, Endpoint, ErrorShape
from kvroute.openai.prefix_cache import SeenBodies, large_request
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.routing.strategy import RouteDecision
from kvroute.upstream.headers import relayed_fields
from kvroute.upstream.writes import Outbox

log = logging.getLogger(__name__)

_MULTIPART = BodyKind.MULTIPART  # a member asked of its class costs 80 ns each time
_LONGEST_MODEL = 4_096
_AUTHORIZATION = frozenset({b"authorization"})
_OWN_KEYS = frozenset({b"authorization", b"x-api-key"})
"""Headers that may hold a key of this gateway: see `KeyCheck`."""
_LOW_DIGITS = tuple(b"%02x" % low for low in range(256))


class DataPlane:
    """Admission, the set of running exchanges, and what each of them needs.

    `worker_authorization` replaces the client's Authorization header towards workers;
    `drops_authorization` takes that header and `x-api-key` out, because they hold a key of this gateway.
    `held_bytes` is how much of an answer is kept for a slow client; `preparer` is for strategies that want a
    prompt's tokens; `announce` hears each decision; `bounded` decodes bodies, within its limits. Mutable:
    `_running`, `_preparing` and `_watchers` hold what is under way; `close_admission` and `cut` end it.
    """

    def __init__(
        self,
        planner: Planner,
        stored: StoredResponses,
        use: ExchangeDeps,
        keys: KeyCheck,
        outbox: Outbox,
        *,
        preparer: Preparer | None = None,
        announce: Callable[[RouteDecision], None] | None = None,
        bounded: Bounded | None = None,
        worker_authorization: bytes | None,
        drops_authorization: bool,
        max_body_bytes: int,
        max_in_flight: int,
        held_bytes: int,
    ) -> None:
        self.planner = planner
        self.stored = stored
        self.preparer = preparer
        self._preparer = preparer if planner.may_need_tokens else None
        self._announce = announce
        self.use = use
        self.journal = use.journal
        self.clock = use.clock
        self.metrics = use.metrics
        self.keys = keys
        self.outbox = outbox
        self.max_body_bytes = max_body_bytes
        self.held_bytes = held_bytes
        self.hidden_fields: frozenset[bytes] = frozenset()
        """Request headers that workers do not see, beside those that nobody relays."""
        if drops_authorization:
            self.hidden_fields = _OWN_KEYS
        elif worker_authorization is not None:
            self.hidden_fields = _AUTHORIZATION
        self.added_fields = (
            b"authorization: %b\r\n" % worker_authorization if worker_authorization is not None else b""
        )
        """Ready header lines that workers see instead."""
        self._max_in_flight = max_in_flight
        self._needs_key = not keys.is_open
        self.reads_headers = self._needs_key or planner.may_need_headers
        """Whether the headers of JSON requests matter here, beside those that are relayed."""
        # Asked for once, not on each request.
        self._time = use.clock.now
        self._request_bytes = use.metrics.request_bytes.later
        self._routing_time = use.metrics.routing_time.later
        self._running: set[InFlightRequest] = set()
        self._ended = self._running.discard
        self._preparing: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Task[None]] = set()
        self._not_isolated_on: set[str] = set()
        """Endpoints on which a request was refused because its adapter could not be isolated."""
        self._is_open = True
        self._is_shutting_down = False
        self._ids = _request_ids()
        self._bounded = bounded or Bounded()
        self._most_messages = self._bounded.limits.max_messages
        self._bodies = SeenBodies(seed=secrets.randbits(64), cut_bytes=ANCHOR_BYTES, bounded=self._bounded)
        use.metrics.call_before_collect(self._show)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def is_shutting_down(self) -> bool:
        """The gateway is not ready any more; requests are served for as long as `is_open`."""
        return self._is_shutting_down

    def announce_shutdown(self) -> None:
        """From now on `/ready` answers 503. Requests are served on."""
        self._is_shutting_down = True

    def close_admission(self) -> None:
        """From now on new requests get 503."""
        self._is_shutting_down = True
        self._is_open = False

    def cut(self) -> int:
        """End every running exchange with an error; how many there were."""
        running = list(self._running)
        for exchange in running:
            exchange.end("shutdown")
        return len(running)

    def admit(self) -> None:
        """Raises ShuttingDown or TooManyRequests when no request may come in."""
        if not self._is_open:
            raise ShuttingDown("The gateway is shutting down.", retry_after_s=1)
        if self._max_in_flight and len(self._running) >= self._max_in_flight:
            raise TooManyRequests(
                f"The gateway is serving {self._max_in_flight} requests already (server.max_in_flight).",
                retry_after_s=1,
            )

    def admitted(self, headers: Headers, sent: bytes, path: str) -> Record | None:
        """The `record` of a request that neither `admit` nor the check of keys would refuse; else None."""
        most = self._max_in_flight
        if (
            not self._is_open
            or (most and len(self._running) >= most)
            or (self._needs_key and not self.keys.matches(headers))
        ):
            return None
        return self.record(sent, path)

    def record(self, sent: bytes, path: str) -> Record:
        """For a request that just came: under the client's own `x-request-id`, `sent`, if that is short and
        printable, else under a new one. Its time counts from here; who waits for its body sets it anew."""
        if sent and len(sent) <= 256 and sent.isascii() and sent.decode("ascii").isprintable():
            return Record(sent, path, self._time())
        return Record(next(self._ids), path, self._time())

    def read(self, endpoint: Endpoint, body: bytes, headers: Headers) -> InferenceRequest:
        """The complete body of at most `STEPWISE_BYTES`, decoded. Raises InvalidRequest and OverLimit."""
        self._request_bytes(len(body))
        try:
            if endpoint.body is _MULTIPART:
                kind = header(headers, b"content-type").decode("latin-1")
                return parse_request(endpoint, body, kind, self._bounded)
            request = self._bodies.read(endpoint, body)
            messages, model = request.read_messages, request.model
            if messages is not None and len(messages) > self._most_messages:
                raise self._bounded.over("max_messages", "messages", "messages")
        except OverLimit as error:
            return self._unread(endpoint, body, error)
        if model is not None and len(model) > _LONGEST_MODEL:
            raise ModelNotFound(model[:64] + "...")  # it would be repeated as a whole
        request.bounded = self._bounded
        return request

    async def read_in_turns(self, endpoint: Endpoint, body: bytes, headers: Headers) -> InferenceRequest:
        """As `read`, of a body of any size: between steps of reading a large one others have a turn."""
        if len(body) <= STEPWISE_BYTES:
            return self.read(endpoint, body, headers)
        self._request_bytes(len(body))
        kind = header(headers, b"content-type").decode("latin-1")
        steps = large_request(endpoint, body, kind, self._bounded, self._bodies)
        try:
            while True:
                next(steps)
                await asyncio.sleep(0)
        except StopIteration as end:
            request: InferenceRequest = end.value
        except OverLimit as error:
            return self._unread(endpoint, body, error)
        await asyncio.sleep(0)
        return request

    def _unread(self, endpoint: Endpoint, body: bytes, error: OverLimit) -> InferenceRequest:
        """The request of a body that is over a limit, where nothing depends on what it says. Raises `error`
        otherwise."""
        why = self.planner.why_read(endpoint)
        outcome = "refused" if why else "forwarded"
        self.metrics.bodies_over_limit.labels(error.limit, outcome).inc()
        log.warning(
            "a body of %d bytes for %s is over the limit %s and %s",
            len(body),
            endpoint.path,
            error.limit,
            f"refused, because {why}" if why else "forwarded unread: nothing depends on its content",
        )
        if why:
            raise error
        return InferenceRequest(endpoint, body, None, over=error.limit)

    def relay(
        self,
        request: InferenceRequest,
        target: bytes,
        headers: Headers,
        fields: bytes,
        record: Record,
        client: Downstream,
        owner: WorkerId | None = None,
        prepared: Prepared | None = None,
    ) -> InFlightRequest:
        """Plan the request and begin its exchange, at once or, where its tokens are wanted first and take
        time, soon: then with `prepared`. Raises what `Planner.plan` raises."""
        preparer = self._preparer
        if preparer is not None and prepared is None:
            model = self.planner.unprepared(request, headers)
            if model is not None:
                prepared = preparer.at_once(request, model)
                if prepared is None:
                    prepare, name = preparer.prepare, model

                    async def begin() -> InFlightRequest:
                        found = await prepare(request, name)
                        return self.relay(request, target, headers, fields, record, client, owner, found)

                    return self._later(request.endpoint.errors, record, client, begin)
        # Time must not fall from one plan to the next: others may have come while this one waited.
        now = started = record.started
        if prepared is not None or request.endpoint.stores_response:
            now = self._time()
        try:
            plan = self.planner.plan(request, target, headers, now, owner, prepared)
        except OverLimit as error:  # of its prompts, which are not looked at before
            request = self._unread(request.endpoint, request.body, error)
            plan = self.planner.plan(request, target, headers, now, owner)
        record.model, record.tokens, record.decision = plan.model, plan.query.tokens, plan.decision
        if plan.is_isolated:
            self.metrics.isolated.labels(plan.model).inc()
        self._routing_time(self._time() - started)
        if self._announce is not None:
            self._announce(plan.decision)
        return self.begin(plan, fields, record, client)

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
        """`read_in_turns` and `relay`, soon."""

        async def begin() -> InFlightRequest:
            request = await self.read_in_turns(endpoint, body, headers)
            return self.relay(request, target, headers, fields, record, client)

        return self._later(endpoint.errors, record, client, begin)

    def _later(
        self,
        shape: ErrorShape,
        record: Record,
        client: Downstream,
        begin: Callable[[], Coroutine[None, None, InFlightRequest]],
    ) -> PendingExchange:
        """What `begin` begins after a while."""

        async def prepare() -> InFlightRequest | None:
            exchange = None
            try:
                exchange = await begin()
            except GatewayError as error:
                self.refuse(record, error, client, shape)
            except Exception:  # noqa: BLE001 - logged by `failed`
                self.failed(record, client, shape)
            self._running.discard(pending)
            return exchange

        def left(pending: PendingExchange, by: str) -> None:
            self._running.discard(pending)
            record.ended_by = by
            self.metrics.streams_aborted.labels(by).inc()
            if by == "client":
                client.cut()
                record.status = CLIENT_LEFT
                self.journal.finished(record, self.clock.now())
            else:
                self.refuse(record, ShuttingDown("The gateway is shutting down."), client, shape)

        pending = PendingExchange(prepare, left)
        self._preparing.add(pending.task)
        pending.task.add_done_callback(self._preparing.discard)
        self._running.add(pending)
        return pending

    def begin(self, plan: RequestPlan, fields: bytes, record: Record, client: Downstream) -> Exchange:
        """Start an exchange; it ends by itself, or by `Exchange.end`."""
        exchange = Exchange(self.use, plan, record, fields, client, self._ended)
        self._running.add(exchange)
        exchange.begin()
        return exchange

    def refuse(self, record: Record, error: GatewayError, client: Downstream, shape: ErrorShape) -> None:
        """Answer a request that has no exchange, and write it down."""
        if isinstance(error, AdapterNotIsolated):
            self._not_isolated(error, record.path)
        refuse(self.metrics, record, error, client, shape)
        self.journal.finished(record, self.clock.now())

    def _not_isolated(self, error: AdapterNotIsolated, path: str) -> None:
        """Once for each endpoint: a client can send any number."""
        if path not in self._not_isolated_on:
            self._not_isolated_on.add(path)
            log.warning("a request for a LoRA adapter was refused: %s", error)

    def failed(self, record: Record, client: Downstream, shape: ErrorShape) -> None:
        """Answer a request on which the gateway itself failed. Called while its exception is handled."""
        log.exception("a request failed")
        self.refuse(record, InternalError("Internal error."), client, shape)

    async def deliver(
        self, exchange: InFlightRequest, answer: AsgiAnswer, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """See an exchange through ASGI, while watching for its client to leave."""
        departure = departure_of(scope)
        if departure is not None:
            departure.tell(exchange.end)
            try:
                await answer.deliver(send, exchange)
            finally:
                departure.tell(None)
                exchange.end("shutdown")  # as below
            return
        watcher = asyncio.create_task(_watch(receive, exchange.end))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        try:
            await answer.deliver(send, exchange)
        finally:
            exchange.end("shutdown")  # cancelled from outside; else it is over
            watcher.cancel()

    async def aclose(self) -> None:
        """End what is left, wait for the watchers, write the last lines."""
        self.cut()
        await asyncio.gather(*self._watchers, *self._preparing, return_exceptions=True)
        self.journal.flush()

    def _show(self) -> None:
        self.metrics.in_flight.value = float(len(self._running))


class InferenceEndpoint:
    """One row of the endpoint table as an ASGI application."""

    def __init__(self, endpoint: Endpoint, plane: DataPlane) -> None:
        self._endpoint = endpoint
        self._path = endpoint.path.encode()
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plane, endpoint = self._plane, self._endpoint
        headers: Headers = scope["headers"]
        record = plane.record(header(headers, b"x-request-id"), endpoint.path)
        answer = AsgiAnswer(plane.held_bytes, takes_fields=departure_of(scope) is not None)
        try:
            plane.admit()
            plane.keys.check(headers)
            body = await read_body(receive, headers, plane.max_body_bytes)
            record.started = plane.clock.now()
            request = await plane.read_in_turns(endpoint, body, headers)
            owner = None
            if endpoint.stores_response and (previous := request.text("previous_response_id")):
                owner = await plane.stored.find(previous)
            fields = _fields(plane, headers)
            target = target_of(scope, self._path)
            exchange = plane.relay(request, target, headers, fields, record, answer, owner)
        except ClientDisconnected:
            left(plane, record)
        except GatewayError as error:
            plane.refuse(record, error, answer, endpoint.errors)
            await answer.deliver(send, None)
        except Exception:  # noqa: BLE001 - logged by `failed`
            plane.failed(record, answer, endpoint.errors)
            await answer.deliver(send, None)
        else:
            await plane.deliver(exchange, answer, scope, receive, send)


class StoredResponseEndpoint:
    """GET, cancel and delete of a stored response: relayed to the worker that holds it."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plane = self._plane
        headers: Headers = scope["headers"]
        record = plane.record(header(headers, b"x-request-id"), "/v1/responses/{id}")
        answer = AsgiAnswer(plane.held_bytes, takes_fields=departure_of(scope) is not None)
        try:
            plane.admit()
            plane.keys.check(headers)
            body = await read_body(receive, headers, plane.max_body_bytes)
            record.started = plane.clock.now()
            response_id = scope["path_params"]["response_id"]
            check_response_id(response_id)
            owner = await plane.stored.find(response_id)
            now = plane.clock.now()
            target = target_of(scope, scope["path"].encode())
            plan = plane.stored.plan(scope["method"].encode(), target, body, owner, now)
            record.decision = plan.decision
            exchange = plane.begin(plan, _fields(plane, headers), record, answer)
        except ClientDisconnected:
            left(plane, record)
        except GatewayError as error:
            plane.refuse(record, error, answer, ErrorShape.RESPONSES)
            await answer.deliver(send, None)
        except Exception:  # noqa: BLE001 - logged by `failed`
            plane.failed(record, answer, ErrorShape.RESPONSES)
            await answer.deliver(send, None)
        else:
            await plane.deliver(exchange, answer, scope, receive, send)


def _request_ids() -> Iterator[bytes]:
    """32 hexadecimal digits each: 16 of chance, and a count. Only the last two are new each time."""
    chance = secrets.token_hex(8).encode()
    starts = (b"%b%014x" % (chance, high) for high in count())
    return chain.from_iterable(map(start.__add__, _LOW_DIGITS) for start in starts)


def left(plane: DataPlane, record: Record) -> None:
    """The client left before its request was complete."""
    record.status = CLIENT_LEFT
    plane.journal.finished(record, plane.clock.now())


def target_of(scope: Scope, path: bytes) -> bytes:
    """What workers are asked for: `path`, and the query as it came over the wire."""
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _fields(plane: DataPlane, headers: Headers) -> bytes:
    try:
        return relayed_fields(headers, without=plane.hidden_fields, added=plane.added_fields)
    except ValueError as error:  # a header that would let one request look like two
        raise InvalidRequest(f"The request cannot be forwarded: {error}.") from error


async def _watch(receive: Receive, end: Callable[[str], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    end("client")
