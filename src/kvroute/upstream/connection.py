"""One HTTP/1.1 connection to a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from kvroute.errors import ConnectionLost, ProtocolViolation, ResponseTimeout, UpstreamError
from kvroute.upstream.response import CHUNK, LAST_CHUNK, ParsedHead, PlainAnswers, UpstreamResponse
from kvroute.upstream.send_queue import unacknowledged_bytes
from kvroute.upstream.writes import Outbox, write_now

_NEVER = float("inf")


def _do_nothing() -> None:
    """The callback of a closed deadline."""


class Deadline:
    """Calls `expired` once when the time that was last `set` is reached.

    Mutable: its owner sets and clears it on the event loop.
    """

    # To move the time later, or to clear it, only stores a number: the loop's timer stays and checks that
    # number when it fires. So a connection needs one timer for many requests instead of one for each wait.

    __slots__ = ("_at", "_expired", "_loop", "_timer", "_timer_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._at = _NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER

    def set(self, after_s: float) -> None:
        """Expire `after_s` seconds from now. Replaces an earlier time."""
        self._at = at = self._loop.time() + after_s
        if at < self._timer_at:
            self._arm(at)

    def clear(self) -> None:
        """Do not expire until `set` is called again."""
        self._at = _NEVER

    def close(self) -> None:
        """Clear it permanently and cancel the loop's timer."""
        self._at = self._timer_at = _NEVER
        self._expired = _do_nothing  # the owner's bound method would make a reference cycle
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._fired)

    def _fired(self) -> None:
        self._timer = None
        self._timer_at = at = self._at
        if at == _NEVER:
            return
        if at > self._loop.time():
            self._arm(at)
            return
        self._at = self._timer_at = _NEVER
        self._expired()


MAX_HEAD_BYTES = 65_536
"""Limit of an answer's head, including interim (1xx) answers before it and trailers after it."""

_JOIN_BODY_BYTES = 65_536  # for larger bodies, joining head and body costs more than writing two parts


class ConnectionOwner(Protocol):
    """Callbacks of a connection to its pool, on the event loop."""

    def connection_opened(self, connection: UpstreamConnection) -> None:
        """The socket is open. `connection_closed` follows in every case."""
        ...

    def exchange_ended(self, connection: UpstreamConnection) -> None:
        """The exchange has ended; another one may start if `connection.is_open`."""
        ...

    def connection_closed(self, connection: UpstreamConnection) -> None:
        """The socket is closed."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """A socket to a worker, an HTTP parser, and at most one exchange at a time.

    Mutable: the callbacks of socket and parser change it on the event loop, `start`, and the reader through
    the response. `is_open` becomes false, permanently, when the connection must not be used again.
    """

    # TCP_NODELAY is on: asyncio and uvloop both set it.

    __slots__ = (
        "_at_plain_chunk",
        "_body",
        "_chunk_bytes",
        "_coding",
        "_content_length",
        "_done",
        "_exchange",
        "_head_read_bytes",
        "_header_bytes",
        "_headers",
        "_is_head_request",
        "_is_paused",
        "_keeps_alive",
        "_may_be_plain",
        "_missing_bytes",
        "_needs_reset",
        "_origin",
        "_owner",
        "_parser",
        "_plain",
        "_reason",
        "_send",
        "_transport",
        "_unread_limit",
        "_until_eof",
        "deadline",
        "exchanges",
        "idle_since",
        "is_open",
        "loop",
    )

    def __init__(
        self,
        owner: ConnectionOwner,
        loop: asyncio.AbstractEventLoop,
        *,
        origin: str,
        read_buffer_bytes: int,
        plain: PlainAnswers | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        """All connections to one worker may share `plain`, all connections of a loop `outbox`. Without an
        outbox requests are written immediately."""
        self.loop = loop
        self.is_open = False
        self.idle_since = 0.0
        self.exchanges = 0
        """Number of exchanges that were started."""
        self.deadline = Deadline(loop, self._timed_out)
        self._owner = owner
        self._plain = plain or PlainAnswers()
        self._send = write_now if outbox is None else outbox.send
        self._chunk_bytes = self._plain.chunk_bytes
        self._origin = origin
        self._unread_limit = read_buffer_bytes
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._exchange: UpstreamResponse | None = None
        # State of the current exchange:
        self._needs_reset = True
        """`start` must reset the members below. A plain answer with a Content-Length leaves them
        unchanged."""
        self._is_head_request = self._done = self._keeps_alive = self._until_eof = False
        self._body: list[bytes] | None = None
        self._head_read_bytes = self._header_bytes = 0
        self._may_be_plain = True
        """Nothing of the answer has arrived, or it is plain and does not need the parser."""
        self._missing_bytes = 0
        """Bytes of a plain answer's body that have not arrived."""
        self._at_plain_chunk = False
        """The answer is plain and chunked, and the next byte is the first one of a chunk."""
        # State of the message that is being parsed, set by `on_message_begin`:
        self._headers: list[tuple[bytes, bytes]] = []
        self._reason = self._coding = b""
        self._content_length: int | None = None

    def start(
        self,
        head: bytes,
        body: bytes | memoryview,
        response: UpstreamResponse,
        timeout_s: float = 0.0,
        is_head_request: bool = False,
        is_streamed: bool = False,
        tail: bytes = b"",
    ) -> None:
        """Write a request, whose body is `body` and then `tail`; its answer goes to `response`.

        The answer must start within `timeout_s`; 0 sets no limit. `is_streamed`: the request asks for a
        stream and is written immediately. Raises RuntimeError if the connection is closed or has an exchange.
        """
        transport = self._transport
        if transport is None or not self.is_open or self._exchange is not None:
            raise RuntimeError("the connection is closed or in use")
        earlier = self.exchanges
        self.exchanges = earlier + 1
        response.connection = self
        if earlier or self.idle_since > 0.0:
            response.reused = True
        self._exchange = response
        # This also replaces the deadline that the last exchange left.
        if timeout_s > 0:
            self.deadline.set(timeout_s)
        else:
            self.deadline.clear()
        if self._needs_reset or is_head_request:
            self._needs_reset = self._is_head_request = is_head_request
            self._may_be_plain = not is_head_request
            self._at_plain_chunk = self._done = self._keeps_alive = self._until_eof = False
            self._body = None
            self._head_read_bytes = self._header_bytes = 0
        # A client waits for the first byte of a stream, so its request does not wait for other writes.
        send = write_now if is_streamed else self._send
        if tail:
            transport.writelines((head, body, tail))
        elif len(body) <= _JOIN_BODY_BYTES:
            send(transport, head + body)
        else:
            send(transport, head, body)

    def abort_exchange(self) -> None:
        """End the current exchange and close the socket."""
        self._fail(ConnectionLost(f"{self._origin}: the exchange was aborted by the gateway"))

    def close(self) -> None:
        """Close the socket. A current exchange ends with ConnectionLost."""
        if self._exchange is not None:
            self.abort_exchange()
        elif self._transport is not None:
            self.is_open = False
            self.deadline.close()
            self._transport.abort()

    def pause_reading(self) -> None:
        """Stop reading from the socket. Idempotent."""
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again. Idempotent."""
        if self._is_paused:
            self._is_paused = False
            if self._transport is not None:
                self._transport.resume_reading()

    # The socket's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        self.is_open = True
        self._owner.connection_opened(self)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.close()  # bytes without a request, or late bytes of an aborted exchange
            return
        if self._at_plain_chunk:
            # Most tokens arrive as exactly one chunk. It is passed on with its framing.
            on_framed_chunk = exchange.on_framed_chunk
            if on_framed_chunk is not None and (
                (
                    self._chunk_bytes.get(data[: data.find(b"\r\n", 1, 5)]) == len(data)
                    and data.endswith(b"\r\n")
                )
                or self._plain.learn_chunk(data)
            ):
                after_s = exchange.idle_timeout_s
                if after_s > 0:
                    self.deadline.set(after_s)
                on_framed_chunk(data)
            else:
                self._parse_chunks(exchange, data)
            return
        size = len(data)
        if not self._may_be_plain or not self._try_fast_parse(exchange, data, size):
            self._parse(exchange, data, size)

    def _parse(self, exchange: UpstreamResponse, data: bytes, size: int) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._keeps_alive = False
            if not self._done:
                self._fail(self._violation(exc))
                return
        if self._done:
            self._complete(exchange, self._keeps_alive)
        elif not exchange.status:
            self._head_read_bytes += size
            if self._head_read_bytes > MAX_HEAD_BYTES:
                self._fail(self._head_too_large())
        elif exchange.on_read(size) > self._unread_limit:
            self.pause_reading()

    def _try_fast_parse(self, exchange: UpstreamResponse, data: bytes, size: int) -> bool:
        """Process a read of a plain answer without the parser; False if the parser must read this answer."""
        if not exchange.status:
            plain = self._plain.read(data)
            if plain is None:
                self._may_be_plain = False
                self._needs_reset = True
                return False
            exchange.plain = plain
            exchange.status, _, _, _, _, body_at, body_bytes = plain
            data = data[body_at:]
            if body_bytes is None:
                self._may_be_plain = False
                self._at_plain_chunk = self._needs_reset = True
                if data:
                    # The first chunk is never passed on framed, because the head is sent before it.
                    self._parse_chunks(exchange, data)
                else:
                    exchange.on_read(size)
                return True
            missing = body_bytes - len(data)
        else:
            missing = self._missing_bytes - len(data)
        if missing > 0:
            self._missing_bytes = missing
            if data:
                exchange.parts.append(data)
            if exchange.on_read(size) > self._unread_limit:
                self.pause_reading()
            return True
        keeps_alive = True
        if missing:
            self._done = self._needs_reset = True
            try:
                self._parser.feed_data(data[missing:])  # bytes after the answer's end: always an error
            except httptools.HttpParserError:
                keeps_alive = False
            data = data[:missing]
        exchange.parts.append(data)
        self._complete(exchange, keeps_alive)
        return True

    def _parse_chunks(self, exchange: UpstreamResponse, data: bytes) -> None:
        """Process a read of a plain chunked answer.

        Whole chunks do not need the parser. From the first incomplete chunk on, the parser reads the answer.
        """
        at, end = 0, len(data)
        parts = exchange.parts
        while (line := CHUNK(data, at)) is not None:
            begin = line.end()
            after = begin + int(line[1], 16) + 2
            if after > end or data[after - 2 : after] != b"\r\n":
                break
            parts.append(data[begin : after - 2])
            at = after
            if at == end:
                if exchange.on_read(end) > self._unread_limit:
                    self.pause_reading()
                return
        unparsed = data[at:]
        if unparsed == LAST_CHUNK:
            self._complete(exchange, True)
            return
        self._at_plain_chunk = False
        # The parser has not seen the head, so it gets a short one. `on_headers_complete` ignores it.
        self._parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._parse(exchange, unparsed, end)

    def eof_received(self) -> None:
        transport = self._transport
        # The worker has closed the connection: before the request had arrived there, or after it?
        is_unread = (
            self._exchange is not None and transport is not None and unacknowledged_bytes(transport) > 0
        )
        self._closed_by_worker(None, is_unread=is_unread)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closed_by_worker(exc)
        self.deadline.close()
        del self._parser  # it holds bound methods of this object: a reference cycle
        self._owner.connection_closed(self)

    # The parser's callbacks. An exception stops the parser; `feed_data` raises it.

    def on_message_begin(self) -> None:
        if self._done:
            raise ProtocolViolation(f"{self._origin}: bytes after the end of an answer")
        self._headers = []
        self._reason = b""
        self._content_length = None
        self._coding = b""

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name)
        self._header_bytes += size + len(value) + 4
        if self._header_bytes > MAX_HEAD_BYTES:
            raise self._head_too_large()
        self._headers.append((name, value))
        if size == 14 and name.lower() == b"content-length":
            self._content_length = int(value)
        elif size == 17 and name.lower() == b"transfer-encoding":
            self._coding += b"," + value.lower()

    def on_headers_complete(self) -> None:
        parser = self._parser
        status = parser.get_status_code()
        if not 100 <= status < 600:
            raise ProtocolViolation(f"{self._origin}: answered with the status {status}")
        if status < 200:
            if status == 101:
                raise ProtocolViolation(f"{self._origin}: switched protocols without being asked")
            return
        version = parser.get_http_version()
        if version != "1.1" and version != "1.0":
            raise ProtocolViolation(f"{self._origin}: answered in version {version}")
        if self._coding and self._coding.strip(b", \t") != b"chunked":
            # The header is hop-by-hop and not passed on, so the client could not decode another coding.
            raise ProtocolViolation(f"{self._origin}: answered in a transfer coding other than chunked")
        exchange = cast(UpstreamResponse, self._exchange)
        if exchange.status:  # a plain chunked answer that the parser continues
            self._body = exchange.parts
            self._keeps_alive = True
            return
        coding, length = bool(self._coding), self._content_length
        exchange.head_received(
            ParsedHead(status, self._reason, self._headers, length, coding, version == "1.0")
        )
        self._headers = []  # trailers are collected here and dropped
        if self._is_head_request:
            # The parser waits for a body that will not come, so the connection cannot be used again.
            self._done = True
            return
        self._body = exchange.parts
        self._keeps_alive = parser.should_keep_alive()
        self._until_eof = self._content_length is None and not self._coding

    def on_body(self, body: bytes) -> None:
        if self._body is not None:  # None for interim answers and for answers to HEAD
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._body is not None:
            self._done = True

    # The two ways in which an exchange ends. Each exchange ends once.

    def _complete(self, exchange: UpstreamResponse, keeps_alive: bool) -> None:
        transport = self._transport
        self.is_open = is_open = (
            keeps_alive
            and transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() == 0  # else it answered before it had read the request
        )
        self._exchange = self._body = None
        if is_open:
            if self._is_paused:
                self.resume_reading()
        elif transport is not None:
            transport.abort()
        self._owner.exchange_ended(self)
        exchange.end()  # last: a listener may start the next exchange on this connection

    def _fail(self, error: UpstreamError) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        self.is_open = False
        self._exchange = self._body = None
        if self._transport is not None:
            self._transport.abort()
        self._owner.exchange_ended(self)
        exchange.end(error)

    def _closed_by_worker(self, exc: Exception | None, *, is_unread: bool = False) -> None:
        self.is_open = False
        exchange = self._exchange
        if exchange is None:
            return
        if exc is None and exchange.status and self._until_eof:
            self._complete(exchange, False)
            return
        has_begun = exchange.status != 0 or self._head_read_bytes > 0
        lost = ConnectionLost(
            f"{self._origin}: the connection broke {'within' if has_begun else 'before'} the answer",
            reused=exchange.reused and not has_begun and is_unread,
        )
        lost.__cause__ = exc
        self._fail(lost)

    def _timed_out(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            where = "within the answer" if exchange.status else "before the head of the answer"
            self._fail(ResponseTimeout(f"{self._origin}: silent for too long {where}"))

    def _head_too_large(self) -> ProtocolViolation:
        return ProtocolViolation(f"{self._origin}: the answer's head is larger than {MAX_HEAD_BYTES} bytes")

    def _violation(self, exc: httptools.HttpParserError) -> ProtocolViolation:
        """The error for a parser's exception: the one that a callback raised, or the parser's fixed text."""
        if isinstance(exc.__context__, ProtocolViolation):
            return exc.__context__
        violation = ProtocolViolation(f"{self._origin}: not HTTP/1.1: {exc}")
        violation.__cause__ = exc
        return violation
