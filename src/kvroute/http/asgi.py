"""The ASGI path: the relayed endpoints as raw ASGI applications, and an answer that goes through ASGI's
`send`.

A raw ASGI application costs a sixth of a FastAPI handler and nothing per streamed chunk
(docs/architecture.md). FastAPI serves the control plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvroute.errors import BodyTooLarge, GatewayError, InvalidRequest, KvrouteError
from kvroute.openai.endpoints import Endpoint, ErrorShape
from kvroute.openai.headers import HeaderList, header
from kvroute.openai.rewriting import check_response_owner
from kvroute.relay.call import Call
from kvroute.relay.dataplane import DataPlane
from kvroute.relay.stored_responses import check_response_id
from kvroute.request.downstream import Downstream, InFlightRequest, field_pairs
from kvroute.request.plan import RequestPlan
from kvroute.request.record import Record
from kvroute.upstream.headers import relayed_fields

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

DISCONNECT_SIGNAL = "kvroute.disconnect_signal"
"""Key of the `DisconnectSignal` in a scope's `extensions`, where the server offers one."""

FIELDS = "kvroute.fields"
"""Key in the message `http.response.start`: the header lines of the answer, valid and ready, instead of
`headers`. Of the headers that frame a body only Content-Length may be among them; the key `IS_SIZED` says
whether it is. Only for a server that offers a `DisconnectSignal`."""
IS_SIZED = "kvroute.is_sized"


class DisconnectSignal:
    """Reports that a client left before its answer was complete. It replaces a task that awaits `receive`.

    Mutable: by the one subscriber, and by the server, which fires it once.
    """

    __slots__ = ("_subscriber", "has_fired")

    def __init__(self) -> None:
        self._subscriber: Callable[[str], None] | None = None
        self.has_fired = False

    def subscribe(self, subscriber: Callable[[str], None]) -> None:
        """Call `subscriber("client")` when the client leaves; immediately if it has left."""
        self._subscriber = subscriber
        if self.has_fired:
            subscriber("client")

    def unsubscribe(self) -> None:
        self._subscriber = None

    def fire(self) -> None:
        """The client left. Later calls change nothing."""
        if self.has_fired:
            return
        self.has_fired = True
        if self._subscriber is not None:
            self._subscriber("client")


class ClientDisconnected(KvrouteError):
    """The client left before its request was complete. No answer can reach it."""


def disconnect_signal_of(scope: Scope) -> DisconnectSignal | None:
    """None if the server offers no signal."""
    extensions = scope.get("extensions")
    return extensions.get(DISCONNECT_SIGNAL) if extensions else None


async def read_body(receive: Receive, headers: HeaderList, limit_bytes: int) -> bytes:
    """Read the whole request body.

    Raises BodyTooLarge as soon as the body exceeds the limit (a declared Content-Length is checked before any
    byte is read), and ClientDisconnected when the client leaves before the end.
    """
    declared = header(headers, b"content-length")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        if not message.get("more_body", False):
            if not parts:
                return bytes(part)
            parts.append(part)
            return b"".join(parts)
        parts.append(part)


class AsgiAnswer:
    """The `Downstream` of a request that came through ASGI; `deliver` sends what the exchange writes.

    Mutable: the exchange appends, `deliver` takes. Above `limit_bytes` it is paused, so that for a slow
    client the gateway holds at most that and one socket read more. `takes_fields`: the server understands
    `FIELDS`.
    """

    def __init__(self, limit_bytes: int, *, takes_fields: bool = False) -> None:
        self._limit = limit_bytes
        self._takes_fields = takes_fields
        self._head: Message | None = None
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._is_complete = False
        self._is_over = False
        self._changed: asyncio.Future[None] | None = None

    @property
    def is_paused(self) -> bool:
        return self._held_bytes > self._limit

    def start(self, status: int, headers: HeaderList) -> None:
        self._head = {"type": "http.response.start", "status": status, "headers": headers}
        self._wake()

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        if self._takes_fields:
            self._head = {"type": "http.response.start", "status": status, FIELDS: fields, IS_SIZED: is_sized}
            self._wake()
        else:
            self.start(status, field_pairs(fields))

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        self.start_relayed(status, fields, is_sized=is_sized)
        self.finish(body)

    def flush_head(self) -> None:
        pass  # `deliver` passes the head on at once, and the server writes it in the same iteration

    def write(self, chunk: bytes) -> None:
        if not self._is_over:
            self._parts.append(chunk)
            self._held_bytes += len(chunk)
            self._wake()

    def framed_writer(self) -> None:
        return None

    def finish(self, chunk: bytes = b"") -> None:
        if not self._is_over:
            if chunk:
                self._parts.append(chunk)
            self._is_complete = self._is_over = True
            self._wake()

    def cut(self) -> None:
        self._is_over = True
        self._wake()

    async def deliver(self, send: Send, exchange: InFlightRequest | None) -> None:
        """Send what is written until the answer is complete or cut. Resumes `exchange` when there is room."""
        while True:
            head, self._head = self._head, None
            if head is not None:
                await send(head)
            parts, self._parts = self._parts, []
            is_last = self._is_complete
            last = parts.pop() if parts and is_last else b""
            for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                self._held_bytes -= len(part)
            if is_last:
                await send({"type": "http.response.body", "body": last, "more_body": False})
                return
            if exchange is not None and not self.is_paused:
                exchange.resume()  # the exchange may have been paused during `send`
            if not self._parts and not self._is_complete:
                if self._is_over:
                    return
                self._changed = asyncio.get_running_loop().create_future()
                await self._changed

    def _wake(self) -> None:
        changed = self._changed
        if changed is not None and not changed.done():
            changed.set_result(None)


async def relay_body(
    plane: DataPlane,
    endpoint: Endpoint,
    body: bytes,
    target: bytes,
    headers: HeaderList,
    fields: bytes,
    record: Record,
    client: Downstream,
) -> InFlightRequest:
    """Parse the complete body of an admitted request and relay the request. See `DataPlane.relay`."""
    request = await plane.bodies.read_in_steps(endpoint, body, headers)
    owner = None
    if endpoint.stores_response and (previous := request.text("previous_response_id")):
        check_response_owner(plane.tenant(headers), previous, "previous_response_id")
        owner = await plane.stored.find(previous)
    return plane.relay(Call(request, target, headers, fields, record, client, owner))


async def stored_plan(
    plane: DataPlane,
    response_id: str,
    method: bytes,
    body: bytes,
    target: bytes,
    headers: HeaderList,
    record: Record,
) -> RequestPlan:
    """Plan an admitted request for a stored response. Raises GatewayError."""
    client = plane.entry_control.keys.client(headers)
    record.key = "" if client is None else client.key.name
    check_response_id(response_id)
    check_response_owner(plane.tenant(headers), response_id, "id")
    owner = await plane.stored.find(response_id)
    plan = plane.stored.plan(method, target, body, owner, plane.clock.now())
    record.decision = plan.decision
    return plan


class InferenceEndpoint:
    """One row of the endpoint table as an ASGI application."""

    def __init__(self, endpoint: Endpoint, plane: DataPlane) -> None:
        self._endpoint = endpoint
        self._path = endpoint.path.encode()
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plane, endpoint = self._plane, self._endpoint
        headers: HeaderList = scope["headers"]
        record = plane.new_record(header(headers, b"x-request-id"), endpoint.path)
        answer = AsgiAnswer(plane.held_bytes, takes_fields=disconnect_signal_of(scope) is not None)
        try:
            plane.entry_control.check(headers)
            body = await read_body(receive, headers, plane.max_body_bytes)
            record.started = plane.clock.now()
            fields = _relayed_fields(plane, headers)
            target = _target(scope, self._path)
            exchange = await relay_body(plane, endpoint, body, target, headers, fields, record, answer)
        except ClientDisconnected:
            plane.client_left(record)
        except GatewayError as error:
            plane.continue_trace(record, _traceparent(headers))
            plane.refuse(record, error, answer, endpoint.errors)
            await answer.deliver(send, None)
        except Exception:  # noqa: BLE001 - `report_defect` logs it; other requests are not affected
            plane.continue_trace(record, _traceparent(headers))
            plane.report_defect(record, answer, endpoint.errors)
            await answer.deliver(send, None)
        else:
            await _deliver(exchange, answer, scope, receive, send)


class StoredResponseEndpoint:
    """GET, cancel and delete of a stored response: relayed to the worker that holds it."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plane = self._plane
        headers: HeaderList = scope["headers"]
        record = plane.new_record(header(headers, b"x-request-id"), "/v1/responses/{id}")
        answer = AsgiAnswer(plane.held_bytes, takes_fields=disconnect_signal_of(scope) is not None)
        try:
            plane.entry_control.check(headers)
            body = await read_body(receive, headers, plane.max_body_bytes)
            record.started = plane.clock.now()
            target = _target(scope, scope["path"].encode())
            method, response_id = scope["method"].encode(), scope["path_params"]["response_id"]
            plan = await stored_plan(plane, response_id, method, body, target, headers, record)
            exchange = plane.start(plan, _relayed_fields(plane, headers), record, answer)
        except ClientDisconnected:
            plane.client_left(record)
        except GatewayError as error:
            plane.continue_trace(record, _traceparent(headers))
            plane.refuse(record, error, answer, ErrorShape.RESPONSES)
            await answer.deliver(send, None)
        except Exception:  # noqa: BLE001 - `report_defect` logs it; other requests are not affected
            plane.continue_trace(record, _traceparent(headers))
            plane.report_defect(record, answer, ErrorShape.RESPONSES)
            await answer.deliver(send, None)
        else:
            await _deliver(exchange, answer, scope, receive, send)


def _target(scope: Scope, path: bytes) -> bytes:
    """The request target for workers: `path` and the client's query, as it came over the wire."""
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _relayed_fields(plane: DataPlane, headers: HeaderList) -> bytes:
    try:
        return relayed_fields(headers, without=plane.hidden_fields, added=plane.added_fields)
    except ValueError as error:  # a header that would let one request look like two
        raise InvalidRequest(f"The request cannot be forwarded: {error}.") from error


def _traceparent(headers: HeaderList) -> bytes:
    return b"traceparent: %b\r\n" % header(headers, b"traceparent")


async def _deliver(
    exchange: InFlightRequest, answer: AsgiAnswer, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send the exchange's answer; end the exchange if its client leaves."""
    signal = disconnect_signal_of(scope)
    if signal is not None:
        signal.subscribe(exchange.end)
        try:
            await answer.deliver(send, exchange)
        finally:
            signal.unsubscribe()
            exchange.end("shutdown")  # changes nothing unless this task was cancelled
        return
    watcher = asyncio.create_task(_end_on_disconnect(receive, exchange))
    try:
        await answer.deliver(send, exchange)
    finally:
        exchange.end("shutdown")  # changes nothing unless this task was cancelled
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def _end_on_disconnect(receive: Receive, exchange: InFlightRequest) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.end("client")
