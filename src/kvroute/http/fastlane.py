"""The fast lane: relays plain inference requests inside uvicorn's protocol, without ASGI.

A request on the fast lane needs no ASGI scope, task or message. All other requests, and all requests that are
refused before their body has arrived, go to uvicorn's protocol with unchanged bytes. docs/architecture.md
lists the internals of uvicorn on which the lane relies.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, BaseTransport, Transport
from collections.abc import Callable
from enum import Enum
from operator import is_
from typing import Any, ClassVar, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from kvroute.errors import GatewayError
from kvroute.http.edge import ClientBounds, EdgeProtocol
from kvroute.http.request_heads import PlainRequest, PlainRequests
from kvroute.openai.bounded import STEPWISE_BYTES
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.headers import HeaderList, header
from kvroute.relay.call import Call
from kvroute.relay.dataplane import DataPlane
from kvroute.request.downstream import InFlightRequest
from kvroute.request.record import Record
from kvroute.upstream.connection import Deadline

_JOIN_BYTES = 65_536  # for larger chunks, joining head and chunk costs more than two writes
_WITHOUT_BODY = (204, 304)


class _Lane(Enum):
    FREE = "free"
    """The fast lane has no request; uvicorn may have one."""
    COLLECTING = "collecting"
    """The fast lane has a request's head and waits for its body; `_segments` has the bytes so far."""
    BUSY = "busy"
    """A request of the fast lane is being answered. Bytes that arrive meanwhile wait."""


# To look up an enum member in its class costs 80 ns each time (CPython 3.11).
_FREE, _COLLECTING, _BUSY = _Lane.FREE, _Lane.COLLECTING, _Lane.BUSY


PER_CONNECTION = frozenset({"parser", "pipeline"})
"""Members that uvicorn creates for each connection. All others start as the same objects; the self-test
(`fast_lane_problem`) checks it."""


class ConnectionTemplate:
    """The members of a new connection, without `PER_CONNECTION`.

    Mutable: `learn` sets it from the first connection.
    """

    # To copy the members takes a tenth of the time of uvicorn's constructor.

    def __init__(self) -> None:
        self._arguments: tuple[object, ...] = ()
        self._members: dict[str, Any] = {}

    def members(self, *arguments: object) -> dict[str, Any]:
        """The members of a connection with the same constructor arguments; empty if they are unknown."""
        return self._members if all(map(is_, self._arguments, arguments)) else {}

    def learn(self, members: dict[str, Any], *arguments: object) -> None:
        """Store the members of a connection that was constructed with `arguments`."""
        self._members = {name: value for name, value in members.items() if name not in PER_CONNECTION}
        self._arguments = arguments


def fast_lane(plane: DataPlane, bounds: ClientBounds) -> type[FastLaneProtocol]:
    """The protocol class for uvicorn's `http=`, bound to one data plane."""
    requests = PlainRequests(
        ENDPOINTS.values(),
        hidden_fields=plane.hidden_fields,
        added_fields=plane.added_fields,
        # No line of a head that is not longer than the longest allowed line can be too long.
        max_head_bytes=min(bounds.max_head_bytes, bounds.max_line_bytes),
        max_header_lines=bounds.max_header_lines,
    )
    members = {"plane": plane, "plain_requests": requests, "template": ConnectionTemplate()}
    return type("BoundFastLane", (FastLaneProtocol,), members)


class FastLaneProtocol(EdgeProtocol):
    """One client connection: uvicorn's protocol, and the `Downstream` of the fast lane's exchanges.

    For a slow client it holds at most the transport's high-water mark (64 KiB) and one read from the worker
    (256 KB) of an answer. Mutable: changed on the event loop, by the socket's and the exchange's calls.
    """

    # Either the lane or uvicorn has a request, never both. The lane takes a request only if uvicorn is
    # between two messages and has answered the last one, and passes no bytes to uvicorn while it has a
    # request itself.

    plane: ClassVar[DataPlane]
    plain_requests: ClassVar[PlainRequests]
    template: ClassVar[ConnectionTemplate]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        known = self.template.members(config, server_state, app_state, _loop)
        if known:
            self.__dict__.update(known)
            return
        super().__init__(config, server_state, app_state, _loop)
        self._plane, self._plain_requests = self.plane, self.plain_requests  # class attributes are slower
        self._lane = _FREE
        self._is_uvicorn_set_up = False
        """uvicorn's members of this connection are set up."""
        self._was_used_by_uvicorn = False
        """uvicorn has had a request on this connection."""
        self._was_upgraded = False
        self._idle: Deadline | None = None
        """Closes the idle connection; created after the first answer."""
        self._closes_after_answer = False
        self._flushes_at_answer = -1
        """`Outbox.flushes` when the last answer was passed to the outbox. While it is unchanged, the answer
        is not written yet."""
        self._request: PlainRequest | None = None
        """The current request of the fast lane, or its last one."""
        # State of the current request of the fast lane:
        self._record: Record | None = None
        self._segments: list[bytes] | None = None
        self._missing_bytes = 0
        self._exchange: InFlightRequest | None = None
        self._head = b""
        self._is_chunked = False
        self._early_data = b""
        self.template.learn(vars(self), config, server_state, app_state, _loop)
        self._is_uvicorn_set_up = True

    # The socket's callbacks.

    def connection_made(self, transport: BaseTransport) -> None:
        """Like uvicorn's, but without the scheme and the addresses: see `on_message_begin`."""
        self.connections.add(self)
        self.transport = cast(Transport, transport)
        self.transport_ready()

    def data_received(self, data: bytes) -> None:
        if self._lane is _FREE:
            self._flush_answer()
            if not self._try_take(data):
                if self._idle is not None:
                    self._idle.clear()
                self._leave_to_uvicorn(data)
        elif self._lane is _COLLECTING:
            self._collect(data)
        else:
            self._early_data += data
            self.flow.pause_reading()

    def _leave_to_uvicorn(self, data: bytes) -> None:
        """Pass bytes that are no request of the fast lane to uvicorn's protocol."""
        # Only such connections need the members that uvicorn creates.
        if not self._is_uvicorn_set_up:
            self._is_uvicorn_set_up = True
            opened, flow = self.transport, self.flow
            super().__init__(self.config, self.server_state, self.app_state, self.loop)
            self.transport, self.flow = opened, flow
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        lane, exchange, record = self._lane, self._exchange, self._record
        self._exchange = self._record = self._request = self._segments = None
        super().connection_lost(exc)
        if self._idle is not None:
            self._idle.close()
        if exchange is not None:
            exchange.end("client")
        elif lane is _COLLECTING and record is not None:
            self._plane.client_left(record)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._exchange is not None:
            self._exchange.resume()

    def shutdown(self) -> None:
        """Close the connection, after the answer to its current request."""
        if self._lane is _FREE:
            self._flush_answer()
            super().shutdown()
        else:
            self._closes_after_answer = True

    # The callbacks of uvicorn's parser.

    def on_message_begin(self) -> None:
        # The addresses take seven system calls, and only requests that uvicorn reads need them.
        if not self._was_used_by_uvicorn:
            self.server, self.client = get_local_addr(self.transport), get_remote_addr(self.transport)
            self.scheme = "https" if is_ssl(self.transport) else "http"
        self._was_used_by_uvicorn = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            self._was_upgraded = True  # the following bytes need not be HTTP
        super().on_message_complete()

    # Receiving a request.

    def _try_take(self, data: bytes) -> bool:
        """Start a request of the fast lane with `data`; False if `data` is for uvicorn."""
        if self._was_used_by_uvicorn and self._is_uvicorns_turn():
            return False
        last, plane = self._request, self._plane
        shape = None if last is None else last.shape
        request = None if shape is None else shape.read(data)
        if request is None:
            request = self._plain_requests.read(data)
            if request is None:
                return False
        body_at = request.body_at
        missing = body_at + request.body_bytes - len(data)
        client = None
        if plane.seen_client is not None:
            client = plane.seen_client(header(request.headers, b"authorization"))
        # Pipelined requests go to uvicorn, and requests to refuse as well: the ASGI path writes the errors.
        if missing < 0 or request.body_bytes > plane.max_body_bytes:
            return False
        if not plane.entry_control.admits(request.headers, client):
            return False
        record = plane.new_record(request.request_id, request.endpoint.path)
        if client is not None:
            record.client = client
        self._request = request
        if self._was_used_by_uvicorn:
            self._unset_keepalive_if_required()
        if self._waits_in is not None:
            self._wait_in(None)
        if missing:
            self._lane = _COLLECTING
            self._record = record
            self._segments = [data]
            self._missing_bytes = missing
            self._wait_in(self.bounds.body)
        else:
            self._start_exchange(request, record, data[body_at:])
        return True

    def _is_uvicorns_turn(self) -> bool:
        """Whether uvicorn has a request on this connection, or the client may no longer send HTTP."""
        cycle = self.cycle
        return (
            self._is_within_message
            or self._was_upgraded
            or (cycle is not None and not cycle.response_complete)
            or bool(self.pipeline)
        )

    def _collect(self, data: bytes) -> None:
        segments, request, record = self._segments, self._request, self._record
        assert segments is not None
        segments.append(data)
        self._missing_bytes -= len(data)
        if self._missing_bytes > 0 or request is None or record is None:
            return
        self._segments = self._record = None
        self._wait_in(None)
        if self._missing_bytes < 0:
            self._lane = _FREE
            for segment in segments:
                self._leave_to_uvicorn(segment)
            return
        plane = self._plane
        record.started = plane.clock.now()
        segments[0] = segments[0][request.body_at :]
        body = b"".join(segments)
        segments.clear()  # so that a large body is not in memory twice while it is read
        self._start_exchange(request, record, body)

    def _refuse(self, error: GatewayError, unread: bytes = b"") -> None:
        record, request = self._record, self._request
        self._record = self._segments = None
        self._lane, self._was_used_by_uvicorn = _FREE, True  # the lane takes no further request here
        if record is not None:
            self._plane.client_left(record)
            unread = b"" if request is None else request.fields
        super()._refuse(error, unread)

    def _body_bytes_so_far(self) -> int:
        return -self._missing_bytes if self._lane is _COLLECTING else super()._body_bytes_so_far()

    def _start_exchange(self, request: PlainRequest, record: Record, body: bytes) -> None:
        plane, endpoint, headers = self._plane, request.endpoint, request.headers
        self._lane = _BUSY
        exchange: InFlightRequest
        try:
            if len(body) > STEPWISE_BYTES:
                exchange = plane.relay_large(
                    endpoint, body, request.target, headers, request.fields, record, self
                )
            else:
                parsed = plane.bodies.read(endpoint, body, headers)
                exchange = plane.relay(Call(parsed, request.target, headers, request.fields, record, self))
        except GatewayError as error:
            plane.continue_trace(record, request.fields)
            plane.refuse(record, error, self, endpoint.errors)
        except Exception:  # noqa: BLE001 - `report_defect` logs it; other requests are not affected
            plane.continue_trace(record, request.fields)
            plane.report_defect(record, self, endpoint.errors)
        else:
            if not exchange.is_over:
                self._exchange = exchange

    # Writing an answer: `Downstream`. The bytes are the same as uvicorn would write.

    @property
    def is_paused(self) -> bool:
        return self.flow.write_paused

    def start(self, status: int, headers: HeaderList) -> None:
        is_sized = any(name == b"content-length" for name, _ in headers)
        self.start_relayed(status, b"".join([b"%b: %b\r\n" % pair for pair in headers]), is_sized=is_sized)

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        if self.server_state.default_headers:
            fields = self._with_defaults(fields)
        if self._closes_after_answer:
            fields += b"connection: close\r\n"
        self._is_chunked = is_chunked = not is_sized and status not in _WITHOUT_BODY
        end = b"transfer-encoding: chunked\r\n\r\n" if is_chunked else b"\r\n"
        self._head = STATUS_LINE[status] + fields + end

    def _with_defaults(self, fields: bytes) -> bytes:
        for name, value in self.server_state.default_headers:
            if name == b"connection":  # the server shuts down and closes each connection
                self._closes_after_answer = True
            else:
                fields = b"%b: %b\r\n%b" % (name, value, fields)
        return fields

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        is_short = self._lane is _BUSY and is_sized and len(body) <= _JOIN_BYTES
        if is_short and not self._closes_after_answer and not self.server_state.default_headers:
            outbox = self._plane.outbox
            self._flushes_at_answer = outbox.flushes
            outbox.send(self.transport, b"%b%b\r\n%b" % (STATUS_LINE[status], fields, body))
            self._finished()
        else:
            self.start_relayed(status, fields, is_sized=is_sized)
            self.finish(body)

    def _flush_answer(self) -> None:
        """Write the last answer if it still waits in the outbox, before anything else on this connection."""
        outbox = self._plane.outbox
        if self._flushes_at_answer == outbox.flushes:
            outbox.flush()

    def flush_head(self) -> None:
        if self._lane is _BUSY and self._head:
            self._send(b"")

    def write(self, chunk: bytes) -> None:
        if self._lane is not _BUSY:
            return
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        if self._head:
            self._send(chunk)
        else:
            self.transport.write(chunk)

    def framed_writer(self) -> Callable[[bytes], None] | None:
        is_under_way = self._lane is _BUSY and not self._head
        return self.transport.write if self._is_chunked and is_under_way else None

    def finish(self, chunk: bytes = b"") -> None:
        if self._lane is not _BUSY:
            return
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk) if chunk else b"0\r\n\r\n"
        self._send(chunk)
        self._finished()

    def _finished(self) -> None:
        """The answer is complete: close the connection, read early data, or wait for the next request."""
        self._exchange = None
        self.server_state.total_requests += 1
        if self._closes_after_answer or self.transport.is_closing():
            self._lane = _FREE
            self.transport.close()
        elif self._early_data:
            self.loop.call_soon(self._read_ahead)
        else:
            self._lane = _FREE
            idle = self._idle
            if idle is None:
                self._idle = idle = Deadline(self.loop, self._idle_timed_out)
            idle.set(self.timeout_keep_alive)

    def _idle_timed_out(self) -> None:
        # The deadline is set after each answer and not cleared by the next request, so it may fire during
        # one.
        if self._lane is _FREE:
            self.timeout_keep_alive_handler()

    def cut(self) -> None:
        self._exchange = None
        self._lane = _FREE
        self.transport.close()

    def _send(self, data: bytes) -> None:
        self._plane.outbox.flush()  # so that workers start now, before the work that follows here
        head = self._head
        if head:
            self._head = b""
            if len(data) <= _JOIN_BYTES:
                data = head + data
            else:
                self.transport.write(head)
        if data:
            self.transport.write(data)

    def _read_ahead(self) -> None:
        data, self._early_data = self._early_data, b""
        self._lane = _FREE
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.data_received(data)
