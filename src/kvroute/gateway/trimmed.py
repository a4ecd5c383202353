"""uvicorn's protocol for the ASGI path, with less work for each message, and the checks of uvicorn's
internals.

Applications see the same ASGI messages as from uvicorn, at lower cost: bodies arrive in large pieces without
intermediate copies, the head of an answer is written together with the first bytes of its body, and an
extension reports a client's disconnect without a waiting task.

This protocol and the fast lane rely on uvicorn's internals. Before a gateway listens, the checks send
requests through the protocols, without sockets or an event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvroute.gateway.asgi import DISCONNECT_SIGNAL, FIELDS, IS_SIZED, DisconnectSignal, disconnect_signal_of
from kvroute.gateway.downstream import field_pairs
from kvroute.gateway.fastlane import PER_CONNECTION
from kvroute.gateway.headers import HeaderList

_MAX_HELD_BYTES = 1_048_576
"""An application that waits for a body gets the whole body, or pieces of at least this size."""
_JOIN_BYTES = 65_536  # for larger chunks, joining head and chunk costs more than two writes
_FRAMING_HEADERS = frozenset({b"content-length", b"transfer-encoding", b"connection"})
_WITHOUT_BODY = (204, 304)
_NOT_COUNTED = -1
"""The expected length of a relayed answer: the relay has checked it already."""
_valid_fields = re.compile(rb"(?:[!#$%&'*+\-./0-9^_`a-z|~]+: [\t\x20-\x7e\x80-\xff]*\r\n)*").fullmatch


class TrimmedCycle(RequestResponseCycle):
    """One request and its answer. Mutable: the parser, the application and a disconnect change it."""

    parts: list[bytes]
    """Parts of the body that the application has not received."""
    held_bytes: int
    is_awaited: bool
    """The application waits for more of the body."""
    head: bytes
    """The answer's head while it is not written."""
    disconnect_signal: DisconnectSignal
    call_soon: Callable[..., object]
    """The loop's `call_soon`."""

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            self.is_awaited = True
            try:
                await self.message_event.wait()
            finally:
                self.is_awaited = False
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        parts, self.parts, self.held_bytes = self.parts, [], 0
        if not self.more_body:
            # A large body may have paused reading. The transport reports a client that leaves only while it
            # reads, and an application with the disconnect signal does not call `receive` again.
            self.flow.resume_reading()
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.transport.is_closing():
            self.disconnected = True  # uvicorn sets it only in the next iteration of the loop
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), message.get("more_body", False))
        elif kind != "http.response.start" or self.response_started or not self._try_write_head(message):
            self._write_head()
            await super().send(message)

    def _try_write_head(self, message: Any) -> bool:
        """Prepare the head for writing; False if uvicorn must write it, because it is unusual."""
        status, fields = message["status"], message.get(FIELDS)
        if (
            self.access_log
            or self.default_headers
            or self.scope["method"] == "HEAD"
            or status in _WITHOUT_BODY
        ):
            if fields is not None:
                message["headers"] = field_pairs(fields)
            return False
        is_chunked, length = False, _NOT_COUNTED
        if fields is not None:
            is_chunked = not message[IS_SIZED]
        else:
            headers: HeaderList = list(message.get("headers", ()))
            fields = b"".join([b"%b: %b\r\n" % pair for pair in headers])
            # A line break within a value would turn one header into two lines.
            if not _valid_fields(fields) or fields.count(b"\r\n") != len(headers):
                return False
            framing = [pair for pair in headers if pair[0] in _FRAMING_HEADERS]
            is_chunked = not framing
            if framing:
                if len(framing) > 1 or framing[0][0] != b"content-length" or not framing[0][1].isdigit():
                    return False
                length = int(framing[0][1])
        self.response_started = True
        self.waiting_for_100_continue = False
        self.chunked_encoding = is_chunked
        self.expected_content_length = 0 if is_chunked else length
        close = b"" if self.keep_alive else b"connection: close\r\n"
        end = b"transfer-encoding: chunked\r\n\r\n" if is_chunked else b"\r\n"
        self.head = b"%b%b%b%b" % (STATUS_LINE[status], fields, close, end)
        self.call_soon(self._write_head)  # in case the application sends no body in this iteration
        return True

    def _write_head(self) -> None:
        head, self.head = self.head, b""
        if head and not self.disconnected and not self.transport.is_closing():
            self.transport.write(head)

    def _send_body(self, body: bytes, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            body = b""
        elif self.chunked_encoding:
            end = b"" if more else b"0\r\n\r\n"
            body = b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end
        elif self.expected_content_length != _NOT_COUNTED:
            if len(body) > self.expected_content_length:
                self._write_head()  # the connection is closed next
                raise RuntimeError("Response content longer than Content-Length")
            self.expected_content_length -= len(body)
        if self.head:
            if len(body) <= _JOIN_BYTES:
                body = self.head + body
                self.head = b""
            else:
                self._write_head()
        if body:
            self.transport.write(body)
        if not more:
            if self.expected_content_length > 0:
                raise RuntimeError("Response content shorter than Content-Length")
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


class TrimmedProtocol(HttpToolsProtocol):
    """One client connection, without WebSockets."""

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return
        self.cycle.__class__ = TrimmedCycle  # the application has not started yet, because it runs in a task
        cycle = cast(TrimmedCycle, self.cycle)
        cycle.parts = []
        cycle.held_bytes = 0
        cycle.is_awaited = False
        cycle.head = b""
        cycle.call_soon = self.loop.call_soon
        cycle.disconnect_signal = DisconnectSignal()
        extensions: dict[str, Any] = cast(Any, cycle.scope).setdefault("extensions", {})
        extensions[DISCONNECT_SIGNAL] = cycle.disconnect_signal

    def on_body(self, body: bytes) -> None:
        cycle = cast(TrimmedCycle, self.cycle)
        if cycle.response_complete:
            return
        cycle.parts.append(body)
        cycle.held_bytes = held = cycle.held_bytes + len(body)
        if (held > HIGH_WATER_LIMIT and not cycle.is_awaited) or held > _MAX_HELD_BYTES:
            self.flow.pause_reading()
            cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.cycle is not None and self.cycle.disconnected:
            cast(TrimmedCycle, self.cycle).disconnect_signal.fire()


_POST = b"POST /x?y=1 HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\nabc"


def trimmed_protocol_problem(protocol_class: type[HttpToolsProtocol] = TrimmedProtocol) -> str:
    """Compare `TrimmedProtocol` with uvicorn's own protocol; "" if both behave alike. About 1 ms.

    The text completes a sentence that begins with "uvicorn".
    """
    expected = _Application()
    trimmed = _Application()
    try:
        _play_uvicorn(HttpToolsProtocol, expected)
        _play_uvicorn(protocol_class, trimmed)
    except Exception as error:  # noqa: BLE001 - every error leads to uvicorn's own protocol and a log line
        return f"failed the self-test of the trimmed protocol ({type(error).__name__}: {error})"
    if trimmed.received != expected.received:
        return "does not hand requests over as expected"
    if trimmed.written != expected.written:
        return "does not write answers as expected"
    return "" if trimmed.disconnects == 1 else "does not report a client's disconnect as expected"


def _play_uvicorn(protocol_class: type[HttpToolsProtocol], application: _Application) -> None:
    loop, transport, state = _UvicornLoop(), _UvicornTransport(application.written), ServerState()
    config = Config(
        application, http=protocol_class, ws="none", lifespan="off", log_config=None, proxy_headers=False
    )
    config.load()
    protocol: Any = protocol_class(config, state, {}, cast(asyncio.AbstractEventLoop, loop))
    protocol.access_log = False  # as in a gateway; these requests must not appear in a log
    protocol.connection_made(transport)
    for _ in range(3):
        protocol.data_received(_POST)
        protocol.data_received(b"def")
        loop.run()
        application.written.append(b"|")
    protocol.data_received(_POST)
    protocol.connection_lost(None)
    loop.run()


class _Application:
    """Answers the first request in chunks, the second with Content-Length, the third with `FIELDS`."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.written: list[bytes] = []
        self.disconnects = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        signal = disconnect_signal_of(scope)
        if signal is not None:
            signal.subscribe(self._on_disconnect)
        message = await receive()
        self.received.append([scope["path"], scope["headers"], message])
        headers = [(b"content-length", b"8")] if len(self.received) == 2 else [(b"content-type", b"x")]
        begin: dict[str, Any] = {"headers": headers}
        if signal is not None and len(self.received) == 3:
            begin = {FIELDS: b"content-type: x\r\n", IS_SIZED: False}
        await send({"type": "http.response.start", "status": 200, **begin})
        await send({"type": "http.response.body", "body": b"1234", "more_body": True})
        await send({"type": "http.response.body", "body": b"5678"})

    def _on_disconnect(self, _by: str) -> None:
        self.disconnects += 1


class _UvicornHandle:
    def cancel(self) -> None:
        pass

    def add_done_callback(self, _callback: Callable[..., object]) -> None:
        pass


class _UvicornLoop:
    """Runs tasks that never wait when `run` is called."""

    def __init__(self) -> None:
        self._tasks: list[Coroutine[Any, Any, Any]] = []

    def create_task(self, coroutine: Coroutine[Any, Any, Any], **_: Any) -> _UvicornHandle:
        self._tasks.append(coroutine)
        return _UvicornHandle()

    def call_later(self, _delay_s: float, _callback: Callable[..., object], *_: Any) -> _UvicornHandle:
        return _UvicornHandle()

    def call_soon(self, _callback: Callable[..., object], *_: Any) -> _UvicornHandle:
        return _UvicornHandle()

    def run(self) -> None:
        tasks, self._tasks = self._tasks, []
        for coroutine in tasks:
            try:
                coroutine.send(None)
            except StopIteration:
                continue
            coroutine.close()
            raise RuntimeError("a request that is complete waits")


class _UvicornTransport(asyncio.Transport):
    """Collects the written bytes of each answer, joined over its writes."""

    def __init__(self, written: list[bytes]) -> None:
        super().__init__()
        self._written = written

    def write(self, data: Any) -> None:
        if not self._written or self._written[-1] == b"|":
            self._written.append(b"")
        self._written[-1] += data

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


_OF_A_CONNECTION = {"transport", "flow", "server", "client", "scheme"}
"""Members that uvicorn's `connection_made` sets. The lane's own `connection_made` sets them instead."""


def fast_lane_problem(protocol_class: type[HttpToolsProtocol] = HttpToolsProtocol) -> str:
    """Check the internals of uvicorn that the fast lane uses; "" if all are as expected. About 1 ms.

    The text completes a sentence whose subject is uvicorn.
    """
    try:
        return _play(protocol_class)
    except Exception as error:  # noqa: BLE001 - every error turns the lane off, with a log line
        return f"failed the self-test of the fast lane ({type(error).__name__}: {error})"


def _play(protocol_class: type[HttpToolsProtocol]) -> str:
    calls: Any = []

    class Probe(protocol_class):  # type: ignore[misc, valid-type]
        def on_message_begin(self) -> None:
            calls.append("begin")
            super().on_message_begin()

        def on_message_complete(self) -> None:
            calls.append("complete")
            super().on_message_complete()

        def timeout_keep_alive_handler(self) -> None:
            calls.append("expired")
            super().timeout_keep_alive_handler()

    async def application(_scope: Any, _receive: Any, _send: Any) -> None:
        """Never run."""

    loop, transport, state = _Loop(), _Transport(), ServerState()
    config = Config(application, http=Probe, ws="none", lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    protocol: Any = Probe(config, state, {}, cast(asyncio.AbstractEventLoop, loop))
    before = dict(vars(protocol))
    another = vars(Probe(config, state, protocol.app_state, cast(asyncio.AbstractEventLoop, loop)))
    differing = {name for name, value in another.items() if before.get(name, another) is not value}
    if another.keys() != before.keys() or not differing <= PER_CONNECTION:
        return "does not create connections as expected"
    protocol.connection_made(transport)
    changed = {name for name, value in vars(protocol).items() if before.get(name, before) is not value}
    if not changed <= _OF_A_CONNECTION:
        return "does not set up a connection as expected"
    if protocol not in state.connections or protocol.transport is not transport or protocol.cycle is not None:
        return "does not register a new connection as expected"
    protocol.data_received(b"GET /x HTTP/1.1\r\n")
    if calls != ["begin"] or protocol.cycle is not None:
        return "does not report the start of a message"
    protocol.data_received(b"host: x\r\n\r\n")
    if calls[1:] != ["complete"] or protocol.parser.should_upgrade():
        return "does not report the end of a message"
    cycle: Any = protocol.__dict__["cycle"]
    if cycle is None or cycle.response_complete is not False or protocol.pipeline:
        return "does not keep the current request as expected"
    if loop.started != 1 or len(state.tasks) != 1:
        return "does not start one task per request"
    protocol.flow.pause_reading()
    protocol.pause_writing()
    if not transport.is_reading_paused or not protocol.flow.write_paused:
        return "does not control the flow as expected"
    protocol.resume_writing()
    cycle.response_complete = True
    answered = state.total_requests
    protocol.on_response_complete()
    if state.total_requests != answered + 1 or transport.is_reading_paused or protocol.flow.write_paused:
        return "does not end a request as expected"
    if protocol.timeout_keep_alive_task is None or loop.delay_s != protocol.timeout_keep_alive:
        return "does not time idle connections as expected"
    protocol._unset_keepalive_if_required()
    if protocol.timeout_keep_alive_task is not None or not isinstance(state.default_headers, list):
        return "does not time idle connections as expected"
    if STATUS_LINE[200] != b"HTTP/1.1 200 OK\r\n" or STATUS_LINE[599] != b"HTTP/1.1 599 \r\n":
        return "does not write status lines as expected"
    protocol.shutdown()
    if not transport.is_closing():
        return "does not close an idle connection at shutdown"
    protocol.connection_lost(None)
    return "" if protocol not in state.connections else "does not forget a closed connection"


class _Handle:
    def cancel(self) -> None:
        pass

    def add_done_callback(self, _callback: Callable[..., object]) -> None:
        pass


class _Loop:
    """Counts the tasks that are to be started, and starts none."""

    def __init__(self) -> None:
        self.started = 0
        self.delay_s = 0.0

    def create_task(self, coroutine: Coroutine[Any, Any, Any], **_: Any) -> _Handle:
        coroutine.close()
        self.started += 1
        return _Handle()

    def call_later(self, delay_s: float, _callback: Callable[..., object], *_: Any) -> _Handle:
        self.delay_s = delay_s
        return _Handle()

    def time(self) -> float:
        return 0.0


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_reading_paused = False
        self._is_closing = False

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def write(self, data: Any) -> None:
        raise AssertionError("nothing is to be written")

    def close(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing
