"""One HTTP/1.1 connection to a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from kvroute.errors import ConnectionLost, ProtocolViolation, ResponseTimeout, UpstreamError
from kvroute.upstream.response import CHUNK, LAST_CHUNK, ParsedHead, PlainAnswers, UpstreamResponse
from kvroute.upstream.writes import Outbox, send_at_once

_NEVER = float("inf")


def _nothing() -> None:
    """What a closed deadline would call."""


class Deadline:
    """Calls `expired` once when the time last `set` has come.

    Moving it later, or clearing it, costs a store: the loop's timer stays and looks again when it
    fires. So a connection keeps one timer over many requests instead of one per wait. Mutable;
    changed by its owner on the loop.
    """

    __slots__ = ("_at", "_expired", "_loop", "_timer", "_timer_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._at = _NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER

    def set(self, after_s: float) -> None:
        """Expire `after_s` seconds from now, in place of what was set before."""
        self._at = at = self._loop.time() + after_s
        if at < self._timer_at:
            self._arm(at)

    def clear(self) -> None:
        """Never expire, until set again."""
        self._at = _NEVER

    def close(self) -> None:
        """Clear it for good and take the timer off the loop."""
        self._at = self._timer_at = _NEVER
        self._expired = _nothing  # the owner's bound method would be a reference cycle
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
"""Limit of an answer's head, interim (1xx) answers before it and trailers after it included."""

_JOIN_BODY_BYTES = 65_536  # above it joining head and body costs more than a write of two parts


class ConnectionOwner(Protocol):
    """What a connection tells its pool, on the loop."""

    def connection_opened(self, connection: UpstreamConnection) -> None:
        """The socket is open; `connection_closed` will follow, however it ends."""
        ...

    def exchange_ended(self, connection: UpstreamConnection) -> None:
        """The exchange is over; `connection.is_open` says whether another may follow."""
        ...

    def connection_closed(self, connection: UpstreamConnection) -> None:
        """The socket is closed."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """A socket, a parser, and at most one exchange at a time.

    The loop turns TCP_NODELAY on (asyncio and uvloop both do). Mutable; changed on the loop by the
    socket's and the parser's callbacks, by `start`, and through the response by its reader.
    `is_open` falls once and for ever, as soon as the connection must not be used again.
    """

    __slots__ = (
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
        "_is_plain_stream",
        "_is_touched",
        "_keeps_alive",
        "_may_be_plain",
        "_missing_bytes",
        "_origin",
        "_owner",
        "_parser",
        "_plain",
        "_reason",
        "_send",
        "_send_soon",
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
        """`plain` may be shared by all connections to one worker, `outbox` by all of the loop; without one
        requests are written at once."""
        self.loop = loop
        self.is_open = False
        self.idle_since = 0.0
        self.exchanges = 0
        """Exchanges begun so far."""
        self.deadline = Deadline(loop, self._timed_out)
        self._owner = owner
        self._plain = plain or PlainAnswers()
        self._send = send_at_once if outbox is None else outbox.send
        self._send_soon = send_at_once if outbox is None else outbox.send_soon
        self._chunk_bytes = self._plain.chunk_bytes
        self._origin = origin
        self._unread_limit = read_buffer_bytes
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._exchange: UpstreamResponse | None = None
        # Of the exchange:
        self._is_touched = True
        """Something below is not as an exchange begins with it; a plain answer that is not chunked leaves it
        so. For `start`."""
        self._is_head_request = self._done = self._keeps_alive = self._until_eof = False
        self._body: list[bytes] | None = None
        self._head_read_bytes = self._header_bytes = 0
        self._may_be_plain = True
        """Nothing of the answer has come, or it is plain and passes the parser by."""
        self._missing_bytes = 0
        """Of the body of a plain answer."""
        self._is_plain_stream = False
        """The answer is plain and chunked, and what comes next is the beginning of a chunk."""
        # Of the message being parsed, set by `on_message_begin`:
        self._headers: list[tuple[bytes, bytes]] = []
        self._reason = self._coding = b""
        self._content_length: int | None = None

    def start(
        self,
        head: bytes,
        body: bytes,
        response: UpstreamResponse,
        timeout_s: float = 0.0,
        is_head_request: bool = False,
        is_streamed: bool = False,
    ) -> None:
        """Write a request; its answer fills `response`, and begins within `timeout_s`, 0 for ever. Needs an
        open connection without an exchange. `is_streamed` as in `Outbox.send_soon`."""
        transport = self._transport
        if transport is None or not self.is_open or self._exchange is not None:
            raise RuntimeError("the connection is closed or in use")
        begun = self.exchanges
        self.exchanges = begun + 1
        response.connection = self
        if begun or self.idle_since > 0.0:
            response.reused = True
        self._exchange = response
        # What the last exchange has left of its deadline finds nobody, or is put off here.
        if timeout_s > 0:
            self.deadline.set(timeout_s)
        else:
            self.deadline.clear()
        if self._is_touched or is_head_request:
            self._is_touched = self._is_head_request = is_head_request
            self._may_be_plain = not is_head_request
            self._is_plain_stream = self._done = self._keeps_alive = self._until_eof = False
            self._body = None
            self._head_read_bytes = self._header_bytes = 0
        send = self._send_soon if is_streamed else self._send
        if len(body) <= _JOIN_BODY_BYTES:
            send(transport, head + body)
        else:
            send(transport, head, body)

    def abort_exchange(self) -> None:
        """Give the answer under way up and close the socket."""
        self._fail(ConnectionLost(f"{self._origin}: the exchange was aborted by the gateway"))

    def close(self) -> None:
        """Close the socket at once. An answer under way breaks off with ConnectionLost."""
        if self._exchange is not None:
            self.abort_exchange()
        elif self._transport is not None:
            self.is_open = False
            self.deadline.close()
            self._transport.abort()

    def pause_reading(self) -> None:
        """Stop reading, if the socket is open and read from."""
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, if reading was paused because too much was unread."""
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
            self.close()  # bytes nobody asked for, or late ones of an aborted exchange
            return
        if self._is_plain_stream:
            # A chunk that comes alone and whole, as most tokens do, goes to whom takes it as it is.
            take = exchange.take_framed
            if take is not None and (
                (
                    self._chunk_bytes.get(data[: data.find(b"\r\n", 1, 5)]) == len(data)
                    and data.endswith(b"\r\n")
                )
                or self._plain.learn_chunk(data)
            ):
                after_s = exchange.idle_timeout_s
                if after_s > 0:
                    self.deadline.set(after_s)
                take(data)
            else:
                self._stream(exchange, data)
            return
        size = len(data)
        if not self._may_be_plain or not self._passes_by(exchange, data, size):
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
        elif exchange.received(size) > self._unread_limit:
            self.pause_reading()

    def _passes_by(self, exchange: UpstreamResponse, data: bytes, size: int) -> bool:
        """Take a read that belongs to a plain answer; False, once and for all, where it is for the parser."""
        if not exchange.status:
            plain = self._plain.read(data)
            if plain is None:
                self._may_be_plain = False
                self._is_touched = True
                return False
            exchange.plain = plain
            exchange.status, _, _, _, _, body_at, body_bytes = plain
            data = data[body_at:]
            if body_bytes is None:
                self._may_be_plain = False
                self._is_plain_stream = self._is_touched = True
                if data:
                    self._stream(exchange, data)  # nobody takes a first chunk as it is: the head is to come
                else:
                    exchange.received(size)
                return True
            missing = body_bytes - len(data)
        else:
            missing = self._missing_bytes - len(data)
        if missing > 0:
            self._missing_bytes = missing
            if data:
                exchange.parts.append(data)
            if exchange.received(size) > self._unread_limit:
                self.pause_reading()
            return True
        keeps_alive = True
        if missing:
            self._done = self._is_touched = True
            try:
                self._parser.feed_data(data[missing:])  # whatever it is, it was not asked for
            except httptools.HttpParserError:
                keeps_alive = False
            data = data[:missing]
        exchange.parts.append(data)
        self._complete(exchange, keeps_alive)
        return True

    def _stream(self, exchange: UpstreamResponse, data: bytes) -> None:
        """Take a read of a plain stream. Chunks that come whole pass the parser by; it gets the rest of the
        answer from the first one that does not."""
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
                if exchange.received(end) > self._unread_limit:
                    self.pause_reading()
                return
        rest = data[at:]
        if rest == LAST_CHUNK:
            self._complete(exchange, True)
            return
        self._is_plain_stream = False
        # In the parser's eyes this is all of the head; what it says of it is not listened to.
        self._parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._parse(exchange, rest, end)

    def eof_received(self) -> None:
        self._closed_by_worker(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closed_by_worker(exc)
        self.deadline.close()
        del self._parser  # it holds our bound methods; without it no cycle is left behind
        self._owner.connection_closed(self)

    # The parser's callbacks. What they raise stops the parser and comes out of `feed_data`.

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
            # The header is hop-by-hop: passed on without it, any other coding would be unreadable.
            raise ProtocolViolation(f"{self._origin}: answered in a transfer coding other than chunked")
        exchange = cast(UpstreamResponse, self._exchange)
        if exchange.status:  # of a plain stream that is plain no more
            self._body = exchange.parts
            self._keeps_alive = True
            return
        coding, length = bool(self._coding), self._content_length
        exchange.begin(ParsedHead(status, self._reason, self._headers, length, coding, version == "1.0"))
        self._headers = []  # trailers go here, and nowhere
        if self._is_head_request:
            # The parser expects a body that will not come, so the connection cannot go on either.
            self._done = True
            return
        self._body = exchange.parts
        self._keeps_alive = parser.should_keep_alive()
        self._until_eof = self._content_length is None and not self._coding

    def on_body(self, body: bytes) -> None:
        if self._body is not None:  # None in an interim answer and in one to HEAD
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._body is not None:
            self._done = True

    # How an exchange ends: exactly one of these, once.

    def _complete(self, exchange: UpstreamResponse, keeps_alive: bool) -> None:
        transport = self._transport
        self.is_open = is_open = (
            keeps_alive
            and transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() == 0  # answered before it had read the whole request
        )
        self._exchange = self._body = None
        if is_open:
            if self._is_paused:
                self.resume_reading()
        elif transport is not None:
            transport.abort()
        self._owner.exchange_ended(self)
        exchange.end()  # last: a listener may start the next exchange on this very connection

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

    def _closed_by_worker(self, exc: Exception | None) -> None:
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
            reused=exchange.reused and not has_begun,
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
        """What to tell of a parser's error: one of ours from a callback, or its own (fixed) text."""
        if isinstance(exc.__context__, ProtocolViolation):
            return exc.__context__
        violation = ProtocolViolation(f"{self._origin}: not HTTP/1.1: {exc}")
        violation.__cause__ = exc
        return violation
