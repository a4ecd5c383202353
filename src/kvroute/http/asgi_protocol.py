"""uvicorn's protocol for the ASGI path, with less work for each message, and the checks of uvicorn's
internals.

Applications see the same ASGI messages as from uvicorn, at lower cost: bodies arrive in large pieces without
intermediate copies, the head of an answer is written together with the first bytes of its body, and an
extension reports a client's disconnect without a waiting task.

This protocol and the fast lane rely on uvicorn's internals. Before a gateway listens, the checks send
requests through the protocols, without sockets or an event loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvroute.http.asgi import DISCONNECT_SIGNAL, FIELDS, IS_SIZED, DisconnectSignal
from kvroute.openai.headers import HeaderList
from kvroute.request.downstream import field_pairs

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
