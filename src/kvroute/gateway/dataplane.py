"""The relayed endpoints as raw ASGI objects.

A raw ASGI object on FastAPI's router costs a sixth of a FastAPI handler and nothing per streamed chunk
(docs/architecture.md); FastAPI's comforts are for the control plane.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from kvroute.clock import Clock
from kvroute.errors import GatewayError, ShuttingDown, TooManyRequests
from kvroute.gateway.access import KeyCheck
from kvroute.gateway.asgi import ClientDisconnected, Headers, Receive, Scope, Send, header, read_body
from kvroute.gateway.exchange import Collaborators, Exchange
from kvroute.gateway.failures import send_error
from kvroute.gateway.journal import Journal, Record
from kvroute.gateway.planner import Plan, Planner
from kvroute.gateway.stored import StoredResponses
from kvroute.metrics import Metrics
from kvroute.openai.endpoints import Endpoint, ErrorShape
from kvroute.openai.request import parse_request

_CLIENT_LEFT = 499
"""nginx's status for a request whose client left before its answer began; only metrics and logs see it."""


class DataPlane:
    """Admission, the set of running exchanges, and what each of them needs.

    Mutable: `_running` and `_watchers` hold what is under way; `close_admission` and `cut` end it.
    """

    def __init__(
        self,
        planner: Planner,
        stored: StoredResponses,
        use: Collaborators,
        journal: Journal,
        keys: KeyCheck,
        *,
        max_body_bytes: int,
        max_in_flight: int,
    ) -> None:
        self.planner = planner
        self.stored = stored
        self.use = use
        self.journal = journal
        self.keys = keys
        self.max_body_bytes = max_body_bytes
        self._max_in_flight = max_in_flight
        self._running: set[Exchange] = set()
        self._watchers: set[asyncio.Task[None]] = set()
        self._is_open = True

    @property
    def clock(self) -> Clock:
        return self.use.clock

    @property
    def metrics(self) -> Metrics:
        return self.use.metrics

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def is_open(self) -> bool:
        return self._is_open

    def close_admission(self) -> None:
        """From now on new requests get 503."""
        self._is_open = False

    def cut(self) -> int:
        """End every running exchange with an error; how many there were."""
        for exchange in self._running:
            exchange.end("shutdown")
        return len(self._running)

    def admit(self) -> None:
        """Raises ShuttingDown or TooManyRequests when no request may come in."""
        if not self._is_open:
            raise ShuttingDown("The gateway is shutting down.", retry_after_s=1)
        if self._max_in_flight and len(self._running) >= self._max_in_flight:
            raise TooManyRequests(
                f"The gateway is serving {self._max_in_flight} requests already (server.max_in_flight).",
                retry_after_s=1,
            )

    async def run(self, plan: Plan, record: Record, headers: Headers, receive: Receive, send: Send) -> None:
        """Serve one planned request while watching for its client to leave. Errors as `Exchange.run`."""
        exchange = Exchange(self.use, plan, record, headers)
        watcher = asyncio.create_task(_watch(receive, exchange.end))
        self._running.add(exchange)
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        self.metrics.in_flight.inc()
        try:
            await exchange.run(send)
        finally:
            self.metrics.in_flight.dec()
            self._running.discard(exchange)
            watcher.cancel()

    async def aclose(self) -> None:
        """Wait for the watchers of ended exchanges; the exchanges themselves belong to the server's tasks."""
        await asyncio.gather(*self._watchers, return_exceptions=True)


class InferenceEndpoint:
    """One row of the endpoint table as an ASGI application."""

    def __init__(self, endpoint: Endpoint, plane: DataPlane) -> None:
        self._endpoint = endpoint
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plane, endpoint = self._plane, self._endpoint
        clock = plane.clock
        headers: Headers = scope["headers"]
        record = Record(request_id(headers), endpoint.path, clock.now())
        try:
            plane.admit()
            plane.keys.check(headers)
            body = await read_body(receive, headers, plane.max_body_bytes)
            plane.metrics.request_bytes.observe(len(body))
            record.started = routing_started = clock.now()
            request = parse_request(endpoint, body, header(headers, b"content-type").decode("latin-1"))
            owner = None
            if endpoint.stores_response and (previous := request.text("previous_response_id")):
                owner = await plane.stored.find(previous)
            plan = plane.planner.plan(request, target_of(scope), headers, clock.now(), owner)
            record.model, record.tokens, record.decision = plan.model, plan.query.tokens, plan.decision
            plane.metrics.routing_time.observe(clock.now() - routing_started)
            await plane.run(plan, record, headers, receive, send)
        except ClientDisconnected:
            record.status = record.status or _CLIENT_LEFT
        except GatewayError as error:
            await refuse(plane, record, error, send, endpoint.errors)
        finally:
            plane.journal.finished(record)


class StoredResponseEndpoint:
    """GET, cancel and delete of a stored response: relayed to the worker that holds it."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plane = self._plane
        headers: Headers = scope["headers"]
        record = Record(request_id(headers), "/v1/responses/{id}", plane.clock.now())
        try:
            plane.admit()
            plane.keys.check(headers)
            body = await read_body(receive, headers, plane.max_body_bytes)
            record.started = now = plane.clock.now()
            owner = await plane.stored.find(scope["path_params"]["response_id"])
            plan = plane.stored.plan(scope["method"].encode(), target_of(scope), body, owner, now)
            record.decision = plan.decision
            await plane.run(plan, record, headers, receive, send)
        except ClientDisconnected:
            record.status = record.status or _CLIENT_LEFT
        except GatewayError as error:
            await refuse(plane, record, error, send, ErrorShape.RESPONSES)
        finally:
            plane.journal.finished(record)


async def refuse(
    plane: DataPlane, record: Record, error: GatewayError, send: Send, shape: ErrorShape
) -> None:
    """Answer with the gateway's own error and note it."""
    record.status = error.status
    record.error = record.error or error.error_code or error.type
    plane.metrics.rejected.labels(error.error_code or error.type).inc()
    await send_error(send, error, [(b"x-request-id", record.request_id.encode("latin-1"))], shape)


def request_id(headers: Headers) -> str:
    """The client's own `x-request-id` if it is short and printable, else a new one."""
    sent = header(headers, b"x-request-id")
    if 0 < len(sent) <= 256 and sent.isascii() and sent.decode("ascii").isprintable():
        return sent.decode("ascii")
    return secrets.token_hex(16)


def target_of(scope: Scope) -> bytes:
    """Path and query as they came over the wire."""
    path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


async def _watch(receive: Receive, end: Callable[[str], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    end("client")
