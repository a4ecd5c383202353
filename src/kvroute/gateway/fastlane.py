"""The fast lane: plain inference requests are relayed inside uvicorn's protocol, beside ASGI.

Between a request's bytes and its exchange there is no scope, no task and no message. Everything else,
including every request that is refused before its body has come, goes to uvicorn's own protocol, which
sees the same bytes as if the lane were not there. docs/architecture.md says what it relies on.
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
from kvroute.gateway.dataplane import DataPlane
from kvroute.gateway.downstream import Headers
from kvroute.gateway.edge import ClientBounds, EdgeProtocol
from kvroute.gateway.journal import InFlightRequest, Record
from kvroute.gateway.request_heads import PlainRequest, PlainRequests
from kvroute.openai.bounded import STEPWISE_BYTES
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.upstream.connection import Deadline

_JOIN_BYTES = 65_536  # a head and a chunk go out in one write below it; above, copying costs more
_WITHOUT_BODY = (204, 304)
_UNREAD: Headers = []
"""In place of headers that nobody looks at."""


class _Lane(Enum):
    FREE = "free"
    """No request is under way on the fast lane; uvicorn may have one."""
    COLLECTING = "collecting"
    """A head has been taken, its body is not complete; `_segments` has all that came."""
    BUSY = "busy"
    """A request is being answered. What its client sends meanwhile waits."""


# A member asked of its class costs 80 ns each time (CPython 3.11), these almost nothing.
_FREE, _COLLECTING, _BUSY = _Lane.FREE, _Lane.COLLECTING, _Lane.BUSY


ITS_OWN = frozenset({"parser", "pipeline"})
"""Members that uvicorn makes anew for each connection. All others begin as the same objects, which
`fastlane_check` makes sure of."""


class ConnectionTemplate:
    """The members of a connection as its making leaves them, but for `ITS_OWN`.

    Clients come together, and to make a connection step by step takes as long as a good part of a request;
    copying takes a tenth of that. Mutable: learnt from the first connection.
    """

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._members: dict[str, Any] = {}

    def members(self, *of: object) -> dict[str, Any]:
        """Of connections that are made of these very objects; empty while nothing is known of them."""
        return self._members if all(map(is_, self._of, of)) else {}

    def learn(self, members: dict[str, Any], *of: object) -> None:
        """A connection was made of these objects, and has these members."""
        self._members = {name: value for name, value in members.items() if name not in ITS_OWN}
        self._of = of


def fast_lane(plane: DataPlane, bounds: ClientBounds) -> type[FastLaneProtocol]:
    """The protocol class for uvicorn's `http=`, bound to one data plane."""
    requests = PlainRequests(
        ENDPOINTS.values(),
        hidden_fields=plane.hidden_fields,
        added_fields=plane.added_fields,
        # A whole head that is no longer than a line may be has no line that is too long.
        max_head_bytes=min(bounds.max_head_bytes, bounds.max_line_bytes),
        max_header_lines=bounds.max_header_lines,
    )
    members = {"plane": plane, "plain": requests, "beginning": ConnectionTemplate()}
    return type("BoundFastLane", (FastLaneProtocol,), members)


class FastLaneProtocol(EdgeProtocol):
    """One client connection: uvicorn's protocol, and the `Downstream` of the exchanges that it skips.

    Both never work at a time: the lane takes a request only while uvicorn is between two messages and
    has answered the last one, and hands nothing to uvicorn while its own request is under way.

    A slow client makes it hold at most the transport's mark (64 KiB) and one read from the worker (256 KB)
    of an answer.
    """

    plane: ClassVar[DataPlane]
    plain: ClassVar[PlainRequests]
    beginning: ClassVar[ConnectionTemplate]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        known = self.beginning.members(config, server_state, app_state, _loop)
        if known:
            self.__dict__.update(known)
            return
        super().__init__(config, server_state, app_state, _loop)
        self._plane, self._plain = self.plane, self.plain  # a class's own are found slowly
        self._lane = _FREE
        self._is_set_up = False
        """uvicorn has what it needs to read from this connection."""
        self._is_shared = False
        """uvicorn had a request on this connection."""
        self._was_upgraded = False
        self._idle: Deadline | None = None
        """From the first answer on."""
        self._closes_after = False
        self._answered_round = -1
        """Of the outbox, when the last answer was given to it: while it lasts, the answer is not written."""
        self._request: PlainRequest | None = None
        """The last plain one that was taken, or the one that is under way."""
        # Of the request that is under way here:
        self._record: Record | None = None
        self._segments: list[bytes] | None = None
        self._missing_bytes = 0
        self._exchange: InFlightRequest | None = None
        self._head = b""
        self._is_chunked = False
        self._ahead = b""
        self.beginning.learn(vars(self), config, server_state, app_state, _loop)
        self._is_set_up = True

    # What the socket tells.

    def connection_made(self, transport: BaseTransport) -> None:
        """As uvicorn does, but for the scheme and the addresses: these take seven system calls, and only
        requests that the lane leaves to uvicorn ask for them."""
        self.connections.add(self)
        self.transport = cast(Transport, transport)
        self.opened()

    def data_received(self, data: bytes) -> None:
        if self._lane is _FREE:
            self._write_answer()
            if not self._take(data):
                if self._idle is not None:
                    self._idle.clear()
                self._leave_to_uvicorn(data)
        elif self._lane is _COLLECTING:
            self._collect(data)
        else:
            self._ahead += data
            self.flow.pause_reading()

    def _leave_to_uvicorn(self, data: bytes) -> None:
        """What comes is no request of the lane's. Only from here on uvicorn needs what it makes for each
        connection."""
        if not self._is_set_up:
            self._is_set_up = True
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
        """No further request on this connection; the one under way is finished."""
        if self._lane is _FREE:
            self._write_answer()
            super().shutdown()
        else:
            self._closes_after = True

    # What uvicorn's parser tells.

    def on_message_begin(self) -> None:
        if not self._is_shared:
            self.server, self.client = get_local_addr(self.transport), get_remote_addr(self.transport)
            self.scheme = "https" if is_ssl(self.transport) else "http"
        self._is_shared = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            self._was_upgraded = True  # what follows need not be HTTP
        super().on_message_complete()

    # A request on its way in.

    def _take(self, data: bytes) -> bool:
        """Whether `data` begins a request that is the lane's."""
        if self._is_shared and self._is_others():
            return False
        last, plane = self._request, self._plane
        kind = None if last is None else last.kind
        request = None if kind is None else kind.read(data)
        if request is None:
            request = self._plain.read(data)
            if request is None:
                return False
        body_at = request.body_at
        missing = body_at + request.body_bytes - len(data)
        headers = request.headers if plane.reads_headers else _UNREAD
        # More may follow at once; uvicorn looks at it before this one is answered. Of what is refused the
        # complete way says why, with what belongs to it.
        if missing < 0 or request.body_bytes > plane.max_body_bytes:
            return False
        if not plane.admission.admits(headers):
            return False
        record = plane.new_record(request.request_id, request.endpoint.path)
        self._request = request
        if self._is_shared:
            self._unset_keepalive_if_required()
        if self._waiting is not None:
            self._wait(None)
        if missing:
            self._lane = _COLLECTING
            self._record = record
            self._segments = [data]
            self._missing_bytes = missing
            self._wait(self.bounds.body)
        else:
            self._begin(request, headers, record, data[body_at:])
        return True

    def _is_others(self) -> bool:
        """Whether uvicorn is at work on this connection, or its client speaks no HTTP any more."""
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
        self._wait(None)
        if self._missing_bytes < 0:
            self._lane = _FREE
            for segment in segments:
                self._leave_to_uvicorn(segment)
            return
        plane = self._plane
        record.started = plane.clock.now()
        segments[0] = segments[0][request.body_at :]
        body = b"".join(segments)
        segments.clear()  # else a large body would be held twice while it is read
        headers = request.headers if plane.reads_headers else _UNREAD
        self._begin(request, headers, record, body)

    def _refuse(self, error: GatewayError) -> None:
        record = self._record
        self._record = self._segments = None
        self._lane, self._is_shared = _FREE, True  # nothing more is taken here
        if record is not None:
            self._plane.client_left(record)
        super()._refuse(error)

    def _arrived(self) -> int:
        return -self._missing_bytes if self._lane is _COLLECTING else super()._arrived()

    def _begin(self, request: PlainRequest, headers: Headers, record: Record, body: bytes) -> None:
        plane, endpoint = self._plane, request.endpoint
        self._lane = _BUSY
        exchange: InFlightRequest
        try:
            if len(body) > STEPWISE_BYTES:
                exchange = plane.relay_large(
                    endpoint, body, request.target, headers, request.fields, record, self
                )
            else:
                parsed = plane.bodies.read(endpoint, body, headers)
                exchange = plane.relay(parsed, request.target, headers, request.fields, record, self)
        except GatewayError as error:
            plane.refuse(record, error, self, endpoint.errors)
        except Exception:  # noqa: BLE001 - `report_defect` logs it; other requests are not affected
            plane.report_defect(record, self, endpoint.errors)
        else:
            if not exchange.is_over:
                self._exchange = exchange

    # An answer on its way out, as `Downstream`. Bytes are those that uvicorn's cycle would write.

    @property
    def is_paused(self) -> bool:
        return self.flow.write_paused

    def start(self, status: int, headers: Headers) -> None:
        is_sized = any(name == b"content-length" for name, _ in headers)
        self.start_relayed(status, b"".join([b"%b: %b\r\n" % pair for pair in headers]), is_sized=is_sized)

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        if self.server_state.default_headers:
            fields = self._with_defaults(fields)
        if self._closes_after:
            fields += b"connection: close\r\n"
        self._is_chunked = is_chunked = not is_sized and status not in _WITHOUT_BODY
        end = b"transfer-encoding: chunked\r\n\r\n" if is_chunked else b"\r\n"
        self._head = STATUS_LINE[status] + fields + end

    def _with_defaults(self, fields: bytes) -> bytes:
        for name, value in self.server_state.default_headers:
            if name == b"connection":  # the server shuts down, and asks for each connection to be closed
                self._closes_after = True
            else:
                fields = b"%b: %b\r\n%b" % (name, value, fields)
        return fields

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        is_short = self._lane is _BUSY and is_sized and len(body) <= _JOIN_BYTES
        if is_short and not self._closes_after and not self.server_state.default_headers:
            outbox = self._plane.outbox
            self._answered_round = outbox.rounds
            outbox.send(self.transport, b"%b%b\r\n%b" % (STATUS_LINE[status], fields, body))
            self._finished()
        else:
            self.start_relayed(status, fields, is_sized=is_sized)
            self.finish(body)

    def _write_answer(self) -> None:
        """What was answered goes before anything else that happens to this connection."""
        outbox = self._plane.outbox
        if self._answered_round == outbox.rounds:
            outbox.flush()

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
        """The whole answer is written: what is next on this connection."""
        self._exchange = None
        self.server_state.total_requests += 1
        if self._closes_after or self.transport.is_closing():
            self._lane = _FREE
            self.transport.close()
        elif self._ahead:
            self.loop.call_soon(self._next_in_line)
        else:
            self._lane = _FREE
            idle = self._idle
            if idle is None:
                self._idle = idle = Deadline(self.loop, self._idle_for_long)
            idle.set(self.timeout_keep_alive)

    def _idle_for_long(self) -> None:
        # Set at the end of each request, not cleared by the next: it may come while that is under way.
        if self._lane is _FREE:
            self.timeout_keep_alive_handler()

    def cut(self) -> None:
        self._exchange = None
        self._lane = _FREE
        self.transport.close()

    def _send(self, data: bytes) -> None:
        self._plane.outbox.flush()  # whoever reads it is woken now, and what is left to do here takes time
        head = self._head
        if head:
            self._head = b""
            if len(data) <= _JOIN_BYTES:
                data = head + data
            else:
                self.transport.write(head)
        if data:
            self.transport.write(data)

    def _next_in_line(self) -> None:
        data, self._ahead = self._ahead, b""
        self._lane = _FREE
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.data_received(data)
