"""Protects the gateway at its edge: limits on request heads and on time, and strict HTTP/1.1.

A layer over uvicorn's protocol, with or without the fast lane above it and the trimmed protocol below it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, ClassVar, cast

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvroute.errors import (
    GatewayError,
    HeadTooLarge,
    InvalidRequest,
    NotImplementedHere,
    RequestTimeout,
    VersionNotSupported,
)
from kvroute.http.asgi import disconnect_signal_of
from kvroute.http.client_timers import TimedFlow, unacknowledged_bytes
from kvroute.http.descriptors import DescriptorLimit
from kvroute.http.options import ServerOptions
from kvroute.metrics import Metrics
from kvroute.request.failures import error_body
from kvroute.request.wait_queue import WaitQueue

log = logging.getLogger(__name__)

HOST = rb"(?:\[[0-9A-Fa-f:.]{2,45}\]|(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}){0,255})(?::[0-9]{0,5})?"
"""The value of a Host header (RFC 9110 section 7.2)."""

_host = re.compile(HOST).fullmatch
_LINGER_S = 1.0
_LINGER_BYTES = 262_144
"""After a refusal the connection stays open for this long, and this many further bytes are read and dropped.
Closing a socket with unread bytes resets the connection, and a client that is still sending might then never
see the answer."""
_TOLERANCE_S = 0.001
"""The timers of a busy loop may be this much too early."""
_WRITE_CHECKS = 4
"""How often within `server.client_write_timeout_s` it is checked whether a client has accepted bytes."""
_FREE_CHUNKS = 8_192
_LEAST_CHUNK_BYTES = 16
"""Above `_FREE_CHUNKS` chunks, the mean size of a body's chunks must be at least `_LEAST_CHUNK_BYTES`. Each
chunk costs about 1 us and an object, and no ordinary client sends that many tiny chunks."""
_VERSIONS = ("1.1", "1.0")


class ClientBounds:
    """Limits on the heads and times of all client connections of a server. Mutable: the queues."""

    __slots__ = (
        "body",
        "body_bytes_per_s",
        "body_window_s",
        "closing",
        "head",
        "idle",
        "max_head_bytes",
        "max_header_lines",
        "max_line_bytes",
        "metrics",
        "own_limits",
        "trace_refused",
        "uses_tls",
        "write",
        "write_timeout_s",
    )

    def __init__(
        self,
        options: ServerOptions,
        metrics: Metrics,
        own: DescriptorLimit | None = None,
        trace_refused: Callable[[bytes, GatewayError], str] | None = None,
    ) -> None:
        """`trace_refused` gets the readable header lines of a refused request, and returns its trace id."""
        self.own_limits = own
        self.trace_refused = trace_refused
        self.max_head_bytes = options.max_head_bytes
        self.max_line_bytes = options.max_head_line_bytes
        self.max_header_lines = options.max_header_lines
        self.body_window_s = options.body_timeout_s
        self.body_bytes_per_s = options.body_bytes_per_s
        self.idle = WaitQueue("idle", options.keep_alive_s)
        self.head = WaitQueue("head", options.head_timeout_s)
        self.body = WaitQueue("body", options.body_timeout_s)
        self.closing = WaitQueue("closing", _LINGER_S)
        self.write_timeout_s = options.client_write_timeout_s
        self.write = WaitQueue("write", options.client_write_timeout_s / _WRITE_CHECKS)
        self.metrics = metrics
        self.uses_tls = options.tls.is_on


class EdgeProtocol(HttpToolsProtocol):
    """One client connection. Mutable: changed on the event loop by the callbacks of socket, parser and
    queues."""

    # Defaults are class attributes, so that a connection with only plain requests never sets them.

    bounds: ClassVar[ClientBounds]

    _waits_in: WaitQueue | None = None
    """The queue that the connection is in."""
    _unwritten_bytes = 0
    """Bytes of answers that the client had not accepted at the last check; 0 before it."""
    _stalled_since = 0.0
    """Time of the last check that found that the client had accepted some."""
    _is_within_message = False
    _is_within_body = False
    _is_refused = False
    """Further bytes are dropped."""
    _refusal: GatewayError | None = None
    """The error to answer with when all earlier requests are answered."""
    _trace_id = ""
    """The trace of the refused request."""
    _answering: RequestResponseCycle | None = None
    """The last request whose application was started."""
    # State of the head that is being read:
    _head_bytes = 0
    _line_bytes = 0
    """Bytes of the head's last, incomplete line."""
    _request_line: bytearray | None = None
    """The beginning of a request line that has not arrived whole."""
    _unparsed: list[bytes] | None = None
    """Bytes of that line which the parser has not got."""
    # State of the body that is being read:
    _trailers = 0
    _body_bytes = 0
    _framing_bytes = 0
    """Bytes read since the last byte of the body itself."""
    _chunks = 0
    _chunk_bytes = 0
    """Bytes of this body so far, and the number of pieces in which the parser delivered them."""
    _window_bytes = 0
    """`_body_bytes_so_far` at the start of the window over which the body's rate is measured."""
    _window_paused_s = 0.0
    _window_started = 0.0

    # The socket's callbacks.

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.transport_ready()

    def transport_ready(self) -> None:
        """`transport` is set."""
        self.flow = TimedFlow(self.transport, self.loop.time)
        if self.bounds.uses_tls:
            # The default above TLS is 512 KiB (uvloop 0.23, CPython 3.11).
            self.transport.set_write_buffer_limits(high=HIGH_WATER_LIMIT)
        self._wait_in(self.bounds.idle)
        limit = self.bounds.own_limits
        if limit is not None and (refusal := limit.refusal(self.transport, self.loop)) is not None:
            self._refuse(refusal)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.bounds.write.discard(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_in(None)
        self.bounds.write.discard(self)
        self._unparsed = None
        self._drop_unanswered()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._framing_bytes += len(data)
            if self._framing_bytes > _LINGER_BYTES:
                self._block_reading(True)
            return
        self._unset_keepalive_if_required()
        if (not self._is_within_message or self._request_line is not None) and self._has_spaces(data):
            text = "The request line has more than one space between two parts."
            self._refuse(InvalidRequest(text), data if self.cycle is None else b"")
            return
        if self._is_within_body:
            self._body_bytes += len(data)
            self._framing_bytes += len(data)
        elif self._is_within_message and b"\n" not in data:
            # An incomplete line waits here: the parser would copy it again with each further part.
            self._line_bytes += len(data)
            if self._unparsed is None:
                self._unparsed = []
            self._unparsed.append(data)
            self._check_head()
            return
        elif self._unparsed is not None:
            self._unparsed.append(data)
            data, self._unparsed = b"".join(self._unparsed), None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            # Before its first whole head a connection has no other request to which these bytes could belong.
            self._refuse(_error_of(error), data if self.cycle is None else b"")
            return
        except httptools.HttpParserUpgrade:
            pass  # the upgrade is refused by continuing in HTTP/1.1: see `on_headers_complete`
        if self._is_within_message and not self._is_within_body:
            line_at = data.rfind(b"\n") + 1
            self._line_bytes = len(data) - line_at if line_at else self._line_bytes + len(data)
            if not self._check_head():
                return
        elif self._framing_bytes > self.bounds.max_head_bytes:
            self._refuse(HeadTooLarge("The framing or the trailers of the request's body are too large."))
            return
        if self.pipeline:
            self._block_reading(True)  # pipelined requests are answered before more is read
        self._wait_in(self._next_wait())

    def _has_spaces(self, data: bytes) -> bool:
        """Whether two spaces follow each other in the request line, which the parser does not see.

        Called with all bytes of the line, in order. A line behind a pipelined request in the same read is not
        checked.
        """
        if self._request_line is not None:
            self._request_line += data
            if b"\n" not in data:
                return False
            data, self._request_line = bytes(self._request_line), None
        data = data.lstrip(b"\r\n")
        end = data.find(b"\n")
        if end < 0:
            self._request_line = bytearray(data)
            return False
        return data.find(b"  ", 0, end) >= 0

    def _block_reading(self, is_blocked: bool) -> None:
        flow = cast(TimedFlow, self.flow)
        if is_blocked:
            flow.pause_reading()
        flow.is_blocked = is_blocked

    def _check_head(self) -> bool:
        """Whether the head so far is within its limits; otherwise it is refused."""
        bounds = self.bounds
        if self._line_bytes > bounds.max_line_bytes:
            self._refuse(_long_line(bounds))
        elif self._head_bytes + self._line_bytes > bounds.max_head_bytes:
            self._refuse(_long_head(bounds))
        else:
            return True
        return False

    # The parser's callbacks. An exception stops the parser; `feed_data` raises it.

    def on_message_begin(self) -> None:
        self._is_within_message = True
        self._head_bytes = self._line_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        bounds = self.bounds
        if self._head_bytes > bounds.max_line_bytes:
            raise _long_line(bounds)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Does not call uvicorn's method: one call per header is a large part of a request's cost.
        size = len(name) + len(value) + 4
        self._head_bytes = head_bytes = self._head_bytes + size
        if self._is_within_body:  # a trailer: only counted, because the headers were already checked
            self._trailers = lines = self._trailers + 1
        else:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            headers = self.headers
            headers.append((name, value))
            lines = len(headers)
        bounds = self.bounds
        if (
            size > bounds.max_line_bytes
            or head_bytes > bounds.max_head_bytes
            or lines > bounds.max_header_lines
        ):
            if lines > bounds.max_header_lines:
                raise _many_lines(bounds)
            raise _long_line(bounds) if size > bounds.max_line_bytes else _long_head(bounds)

    def on_headers_complete(self) -> None:
        self._check_request()
        super().on_headers_complete()
        # Trailers have the limits of a head.
        self._head_bytes = self._trailers = self._framing_bytes = self._chunks = self._chunk_bytes = 0
        self._is_within_body = True
        if self.parser.should_upgrade():  # the parser reads no further request
            self.cycle.keep_alive = False

    def _check_request(self) -> None:
        """Check what RFC 9112 requires and the parser does not check.

        Raises VersionNotSupported, InvalidRequest or NotImplementedHere.
        """
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            raise VersionNotSupported(f"HTTP/{version} is not supported; use HTTP/1.1.")
        hosts: list[bytes] = []
        codings: list[bytes] = []
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding":
                codings.append(value)
        if len(hosts) != 1 and (hosts or version == "1.1"):
            count = "more than one" if hosts else "no"
            raise InvalidRequest(f"The request has {count} Host header.")
        if hosts and _host(hosts[0]) is None:
            raise InvalidRequest("The request's Host header is not valid.")
        if codings:
            _check_codings(codings, version)
        url = self.url
        if url[:1] != b"/":
            self.url = url = _with_path(url)
        if not url.isascii():
            raise InvalidRequest("The request's target is not valid.")

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        self._chunks = chunks = self._chunks + 1
        self._chunk_bytes += len(body)
        if chunks > _FREE_CHUNKS and self._chunk_bytes < chunks * _LEAST_CHUNK_BYTES:
            raise InvalidRequest(
                f"The request's body comes in too many chunks of less than {_LEAST_CHUNK_BYTES} bytes."
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_within_message = self._is_within_body = False
        self._framing_bytes = 0
        super().on_message_complete()

    # Requests and their answers, as uvicorn calls them.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._block_reading(False)
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._block_reading(True)  # otherwise each answer would let one more segment in
        elif self._refusal is None:
            awaited = self._next_wait()
            if awaited is not self.bounds.idle:  # uvicorn's own timer covers idle connections
                self._wait_in(awaited)
        elif self._unanswered() is None:
            self._write_refusal(self._refusal)

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self.bounds.metrics.client_timeouts.labels("idle").inc()
        super().timeout_keep_alive_handler()
        self._limit_closing()

    def shutdown(self) -> None:
        was_closing = self.transport.is_closing()
        super().shutdown()
        if not was_closing:
            self._limit_closing()

    def _limit_closing(self) -> None:
        """Abort a closed connection whose client does not end it soon (TLS) or accepts no more bytes."""
        # `close` of a TLS transport waits for the client's own end. A client with a pool of idle connections
        # sends it only when it uses the connection again.
        if not self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            self._watch_writes()
        elif self.bounds.uses_tls:
            self._wait_in(self.bounds.closing)

    def _unanswered(self) -> RequestResponseCycle | None:
        """The request that is being answered; None if there is none."""
        cycle = self._answering
        return None if cycle is None or cycle.response_complete or cycle.disconnected else cycle

    # Time limits of the client.

    def _next_wait(self) -> WaitQueue | None:
        """The queue for the bytes that the client must send next; None while the gateway must answer."""
        bounds, unanswered = self.bounds, self._unanswered()
        if unanswered is not None:
            is_its_body = self._is_within_body and unanswered is self.cycle
            return bounds.body if is_its_body and not unanswered.response_started else None
        if self._is_within_body:
            return bounds.body
        return bounds.head if self._is_within_message else bounds.idle

    def _wait_in(self, queue: WaitQueue | None) -> None:
        """Move the connection to `queue`. The time continues if it is already there."""
        before = self._waits_in
        if before is queue:
            return
        if before is not None:
            before.discard(self)
        self._waits_in = queue
        if queue is not None:
            if queue is self.bounds.body:
                self._start_window()
            queue.add(self)

    def _start_window(self) -> None:
        self._window_bytes = self._body_bytes_so_far()
        self._window_started = self.loop.time()
        self._window_paused_s = cast(TimedFlow, self.flow).paused_s

    def _body_bytes_so_far(self) -> int:
        """Bytes of all bodies so far; only differences are used."""
        return self._body_bytes

    def wait_expired(self, queue: WaitQueue) -> None:
        """See `Waiter`."""
        if queue is self.bounds.write:
            self._check_writes()
            return
        self._waits_in = None
        bounds, transport = self.bounds, self.transport
        if transport.is_closing():
            if queue is bounds.closing:
                transport.abort()  # the client reads the end of its last answer too slowly
            return
        if queue is bounds.body and self._is_fast_enough():
            self._waits_in = queue
            queue.add(self)
        elif queue is bounds.closing:
            transport.abort()
        else:
            bounds.metrics.client_timeouts.labels(queue.name).inc()
            if queue is bounds.idle:
                transport.close()
                self._limit_closing()
            else:
                self._refuse(_too_late(queue, bounds))

    def _watch_writes(self) -> None:
        """From now on check whether the client accepts what was written."""
        self._unwritten_bytes, self._stalled_since = 0, self.loop.time()
        self.bounds.write.discard(self)
        self.bounds.write.add(self)

    def _check_writes(self) -> None:
        # Nothing more is written for a client while writing is paused, so each change is an accepted byte.
        # The kernel takes bytes from the gateway in large steps only, so its own queue counts, too.
        bounds, transport = self.bounds, self.transport
        before, now = self._unwritten_bytes, self.loop.time()
        self._unwritten_bytes = unwritten = transport.get_write_buffer_size() + unacknowledged_bytes(
            transport
        )
        if not unwritten:
            return
        if before != unwritten and before:
            self._stalled_since = now
        if now - self._stalled_since < bounds.write_timeout_s - _TOLERANCE_S:
            bounds.write.add(self)
            return
        bounds.metrics.client_timeouts.labels(bounds.write.name).inc()
        log.info(
            "a client's connection is closed: it accepted no byte for %g s (server.client_write_timeout_s)",
            bounds.write_timeout_s,
        )
        transport.abort()

    def _is_fast_enough(self) -> bool:
        """Whether the body may take longer.

        Only time during which the gateway reads counts. If that is too little, the decision waits for the
        next window.
        """
        bounds = self.bounds
        paused_s = cast(TimedFlow, self.flow).paused_s - self._window_paused_s
        counted_s = self.loop.time() - self._window_started - paused_s
        if counted_s * 2 < bounds.body_window_s:
            return True
        if self._body_bytes_so_far() - self._window_bytes < counted_s * bounds.body_bytes_per_s:
            return False
        self._start_window()
        return True

    # Refusing a request, which closes the connection.

    def _refuse(self, error: GatewayError, unread: bytes = b"") -> None:
        """Read no more requests; answer earlier ones, then answer with `error`.

        `unread` may have header lines of the refused request that the parser has not reached.
        """
        self._is_refused = True
        if self.bounds.trace_refused is not None and (unread or self._is_within_message):
            fields = self.headers if self._is_within_message else []
            read = b"".join([b"%b: %b\r\n" % field for field in fields])
            self._trace_id = self.bounds.trace_refused(read + unread, error)
        self._is_within_message = True  # this message never ends
        self._request_line = None
        self._unparsed = None
        self._framing_bytes = 0
        self.bounds.metrics.rejected.labels(error.error_code or error.type).inc()
        log.debug("a client's connection is closed: %s", error.message)
        unanswered = self._unanswered()
        if self._is_within_body:
            broken = self.cycle
            if broken in (queued := [cycle for cycle, _ in self.pipeline]):
                del self.pipeline[queued.index(broken)]
                broken.disconnected = True
            elif unanswered is not broken or broken.response_started:
                self._wait_in(None)
                self._drop_unanswered()
                self.transport.close()  # the client has got this answer already, at least partly
                return
            else:
                unanswered = None
        if unanswered is not None:
            self._wait_in(None)
            self._refusal = error
        else:
            self._write_refusal(error)

    def _write_refusal(self, error: GatewayError) -> None:
        self._refusal = None
        self._drop_unanswered()
        body = error_body(error, trace_id=self._trace_id)
        fields = [*self.server_state.default_headers, (b"content-type", b"application/json")]
        fields += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        if self._trace_id:
            fields.append((b"x-kvroute-trace-id", self._trace_id.encode()))
        head = STATUS_LINE[error.status] + b"".join([b"%b: %b\r\n" % field for field in fields])
        transport = self.transport
        transport.write(head + b"\r\n" + body)
        self._block_reading(False)
        self.flow.resume_reading()
        try:
            transport.write_eof()
        except OSError:  # the client has reset the connection
            self._wait_in(None)
            transport.close()
            return
        except NotImplementedError:  # TLS: `close` reads and drops further bytes
            transport.close()
        self._wait_in(self.bounds.closing)

    def _drop_unanswered(self) -> None:
        """Drop all unanswered requests: report a disconnect to their applications."""
        if self._answering is None:
            return  # no request was started; a connection of the fast lane may have no pipeline yet
        for cycle in (self._answering, *[cycle for cycle, _ in self.pipeline]):
            if cycle.response_complete or cycle.disconnected:
                continue
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # else an application that starts now writes to the socket
            cycle.message_event.set()
            signal = disconnect_signal_of(cast(Any, cycle.scope))
            if signal is not None:
                signal.fire()
        self.pipeline.clear()


def _error_of(error: httptools.HttpParserError) -> GatewayError:
    """The error for bytes that the parser or one of its callbacks rejects."""
    cause = error.__context__
    if isinstance(cause, GatewayError):
        return cause
    if isinstance(error, httptools.HttpParserInvalidURLError) or isinstance(
        cause, httptools.HttpParserInvalidURLError
    ):
        return InvalidRequest("The request's target is not valid.")
    if isinstance(error, httptools.HttpParserCallbackError):
        log.error("reading a request failed", exc_info=error)
        return InvalidRequest("The request could not be read.")
    text = str(error)
    if "HTTP version" in text:
        return VersionNotSupported("Only HTTP/1.1 is supported.")
    return InvalidRequest(f"The request is not valid HTTP/1.1: {text}.")  # a fixed text of the parser


def _check_codings(values: list[bytes], version: str) -> None:
    if version == "1.0":
        raise InvalidRequest("HTTP/1.0 has no Transfer-Encoding.")
    named = [coding.strip(b" \t").lower() for coding in b",".join(values).split(b",")]
    if any(coding not in (b"chunked", b"") for coding in named):
        raise NotImplementedHere("The only supported transfer coding is `chunked`.")
    if len(named) > 1:
        raise InvalidRequest("The request's Transfer-Encoding is not valid.")


def _with_path(url: bytes) -> bytes:
    """A target that is an absolute URL, with the path `/` if it has none (RFC 9112 3.2.2).

    Raises HttpParserInvalidURLError or InvalidRequest.
    """
    parsed = httptools.parse_url(url)
    if parsed.path:
        return url
    if not parsed.schema or not parsed.host:
        raise InvalidRequest("The request's target is not valid.")
    place, mark, query = url.partition(b"?")
    return place + b"/" + mark + query


def _long_line(bounds: ClientBounds) -> HeadTooLarge:
    limit = bounds.max_line_bytes
    return HeadTooLarge(
        f"A line of the request's head is longer than {limit} bytes (server.max_head_line_bytes)."
    )


def _many_lines(bounds: ClientBounds) -> HeadTooLarge:
    return HeadTooLarge(
        f"The request has more than {bounds.max_header_lines} header lines (server.max_header_lines)."
    )


def _long_head(bounds: ClientBounds) -> HeadTooLarge:
    return HeadTooLarge(
        f"The request's head is larger than {bounds.max_head_bytes} bytes (server.max_head_bytes)."
    )


def _too_late(queue: WaitQueue, bounds: ClientBounds) -> RequestTimeout:
    if queue is bounds.head:
        return RequestTimeout("The request's head did not arrive in time (server.head_timeout_s).")
    return RequestTimeout("The request's body arrived too slowly (server.body_timeout_s, body_bytes_per_s).")
