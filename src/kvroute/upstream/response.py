"""A worker's answer, as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct, field

from kvroute.errors import UpstreamError
from kvroute.upstream.headers import RawHeaders
from kvroute.upstream.plain_answer import PlainAnswer

if TYPE_CHECKING:
    from kvroute.upstream.connection import UpstreamConnection


class ParsedHead(NamedTuple):
    """The head of an answer that is not plain."""

    status: int
    reason: bytes
    headers: RawHeaders
    content_length: int | None
    is_chunked: bool
    is_http_1_0: bool


class AnswerListener(Protocol):
    """Hears of an answer as it arrives, instead of awaiting it."""

    def answer_arrived(self, response: UpstreamResponse) -> None:
        """The head is here, or body bytes, or the end, or several of them: look and `take`.

        Called on the loop, once for each read from the socket; never after `abort`, nor after the end.
        May set `response.take_framed`, and then not hear of what goes there.
        """
        ...


class UpstreamResponse(Struct, eq=False):
    """One exchange on a connection: head, then body chunk by chunk. For one reader at a time.

    It is read by awaiting `head` and `next_chunk`, or pushed to a listener. Whoever holds it reads it to
    the end or calls `abort()`. The connection goes back to the pool by
    itself once the whole answer has arrived, even if it has not been read yet; from then on this
    object only holds what is unread.

    Mutable: the connection fills it on the loop (`status`, `plain`, `parts`, `begin`, `received`, `end`), the
    reader takes out.
    """

    idle_timeout_s: float
    listener: AnswerListener | None = None
    status: int = 0
    """0 until the final head is complete."""
    plain: PlainAnswer | None = None
    """That head, if it is plain."""
    take_framed: Callable[[bytes], None] | None = None
    """Of a plain chunked answer, where each read goes that is exactly one chunk, framing and all. None
    from the end on."""
    reused: bool = False
    """Whether the connection had served an exchange before."""
    parts: list[bytes] = field(default_factory=list)
    """Body bytes that have arrived and are not read yet; the connection appends."""
    is_over: bool = False
    """Nothing more will arrive: it is complete, or `error` says why not."""
    error: UpstreamError | None = None
    """Why the answer broke off; None while it has not."""
    connection: UpstreamConnection | None = None
    """Until the end."""
    _head: ParsedHead | None = None
    _unread_bytes: int = 0
    _opening: asyncio.Task[None] | None = None
    _is_held: bool = False
    _waiter: asyncio.Future[None] | None = None

    @property
    def reason(self) -> bytes:
        """b"" before the head has come."""
        head = self._head or self.plain
        return b"" if head is None else head.reason

    @property
    def headers(self) -> RawHeaders:
        """As sent: order, case and duplicates kept, hop-by-hop ones included."""
        head = self._head or self.plain
        return [] if head is None else head.headers

    @property
    def content_length(self) -> int | None:
        if self.plain is not None:
            return self.plain.body_bytes
        return None if self._head is None else self._head.content_length

    @property
    def is_chunked(self) -> bool:
        if self.plain is not None:
            return self.plain.body_bytes is None
        return self._head is not None and self._head.is_chunked

    @property
    def http_version(self) -> bytes:
        return b"HTTP/1.0" if self._head is not None and self._head.is_http_1_0 else b"HTTP/1.1"

    @property
    def at_end(self) -> bool:
        """True when the answer is complete and read: `next_chunk` would give b"" at once."""
        return self.connection is None and self.error is None and not self.parts

    async def head(self, timeout_s: float) -> None:
        """Return once the head of the final answer is here; `timeout_s` 0 waits for ever.

        Raises ConnectionLost, ResponseTimeout or ProtocolViolation. Called by the transport.
        """
        while not self.status:
            if self.error is not None:
                raise self.error
            await self._wait(timeout_s)

    async def next_chunk(self) -> bytes:
        """All body bytes that have arrived since the last call, as soon as there are any; b"" at the end.

        Chunked framing and trailers are taken off, content codings are left on. Bytes that came before a
        failure are given first. Raises ConnectionLost when the answer broke off or was aborted,
        ProtocolViolation on bad framing, ResponseTimeout after a silence of `idle_timeout_s`. Cancelling
        it loses nothing: it may be called again.
        """
        parts = self.parts
        while not parts:
            if self.connection is None:
                if self.error is not None:
                    raise self.error
                return b""
            await self._wait(self.idle_timeout_s)
        chunk = self.take()
        if self.connection is not None:
            self.connection.resume_reading()
        return chunk

    def take(self) -> bytes:
        """All body bytes that have arrived since the last call, b"" if none have."""
        parts = self.parts
        self._unread_bytes = 0
        if len(parts) == 1:
            return parts.pop()
        chunk = b"".join(parts)
        parts.clear()
        return chunk

    def hold(self) -> None:
        """Read no more from the worker until `go_on`; its silence does not count meanwhile."""
        connection = self.connection
        if connection is not None and not self._is_held:
            self._is_held = True
            connection.deadline.clear()
            connection.pause_reading()

    def go_on(self) -> None:
        """Read on after `hold`; else nothing."""
        connection = self.connection
        if connection is not None and self._is_held:
            self._is_held = False
            if self.idle_timeout_s > 0:
                connection.deadline.set(self.idle_timeout_s)
            connection.resume_reading()

    def abort(self) -> None:
        """Close the socket at once, if the answer is still under way; else nothing.

        A reader that waits gets ConnectionLost, a listener hears nothing more. Safe in every state, any
        number of times.
        """
        self.listener = self.take_framed = None
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
            self.is_over = True
        if self.connection is not None:
            self.connection.abort_exchange()

    async def _wait(self, timeout_s: float) -> None:
        connection = self.connection
        if connection is None or self._waiter is not None:
            raise RuntimeError("a response has one reader at a time")
        self._waiter = waiter = connection.loop.create_future()
        if timeout_s > 0:
            connection.deadline.set(timeout_s)
        try:
            await waiter
        finally:
            self._waiter = None
            if self.connection is not None:
                # Once detached, the deadline may already be another exchange's.
                connection.deadline.clear()

    # What the transport and the connection call, on the loop.

    def opens(self, opening: asyncio.Task[None] | None) -> None:
        """A connection for it is being opened, or not any more."""
        self._opening = opening

    def begin(self, head: ParsedHead) -> None:
        """The final head is complete."""
        self._head = head
        self.status = head.status

    def received(self, size: int) -> int:
        """A read of `size` bytes has been parsed: wake the reader. Returns the bytes held unread.

        Framing counts too, but only beside body bytes: reading must not pause when nothing can be taken.
        """
        listener = self.listener
        if listener is not None:
            if self.idle_timeout_s > 0 and self.connection is not None:
                self.connection.deadline.set(self.idle_timeout_s)
            listener.answer_arrived(self)
            return 0
        waiter = self._waiter
        if waiter is not None and self.status and not waiter.done():
            waiter.set_result(None)
        if self.parts:
            self._unread_bytes += size
        return self._unread_bytes

    def end(self, error: UpstreamError | None = None) -> None:
        """The exchange is over, whole or (with `error`) not; the connection is no longer ours."""
        # To look costs less than to store, and there is seldom anything.
        if self.take_framed is not None:
            self.take_framed = None
        if error is not None:
            self.error = error
            self._opening = None
        self.connection = None
        self.is_over = True
        listener = self.listener
        if listener is not None:
            listener.answer_arrived(self)
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


_BODY_EXPECTED = frozenset({b"POST", b"PUT", b"PATCH"})
_ORDINARY = frozenset({b"GET", b"POST", b"DELETE"})
_MOST_STARTS = 256
_LONGEST_REMEMBERED = 1024
_not_a_target = re.compile(rb"[^\x21-\xff]|\x7f").search
_not_a_method = re.compile(rb"[^A-Za-z!#$%&'*+.^_`|~0-9-]").search


def encode_head(
    method: bytes,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    *,
    host: bytes,
    body_bytes: int,
) -> bytes:
    """`method target HTTP/1.1` and `headers` as given; Host and Content-Length added when absent.

    Raises ValueError for what would let one request look like two: a line break or NUL anywhere, white
    space in method or target, a Content-Length that is not `body_bytes`, any Transfer-Encoding. Header
    names are taken as tokens, as a server's parser has left them. About 2 us for ten headers.
    """
    if not method or _not_a_method(method) or not target or _not_a_target(target):
        raise ValueError("method or target is not valid in an HTTP/1.1 request line")
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    hosts = lengths = 0
    for name, value in headers:
        size = len(name)
        if size == 4:
            hosts += name.lower() == b"host"
        elif size == 14 and name.lower() == b"content-length":
            lengths += 1
            if value != b"%d" % body_bytes:
                raise ValueError("content-length is not the length of the body")
        elif size == 17 and name.lower() == b"transfer-encoding":
            raise ValueError("a request body is sent with content-length, never transfer-encoding")
        lines.append(b"%b: %b" % (name, value))
    if hosts > 1 or lengths > 1:
        raise ValueError("host or content-length is given twice")
    if not hosts:
        lines.insert(1, b"Host: %b" % host)
    if not lengths and (body_bytes or method in _BODY_EXPECTED):
        lines.append(b"Content-Length: %d" % body_bytes)
    breaks = len(lines) + 1
    lines.append(b"\r\n")
    head = b"\r\n".join(lines)
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
        raise ValueError("a header holds a line break or NUL")
    return head


class RelayedHeads:
    """Heads of the requests that are relayed to one worker, whose Host is `host`.

    Mutable: remembers the first two lines of POSTs by their target, as the endpoints are few; at most 256 of
    at most 1 KB.
    """

    def __init__(self, host: bytes) -> None:
        self._host = host
        self._posts: dict[bytes, bytes] = {}

    def head(self, method: bytes, target: bytes, fields: bytes, request_id: bytes, body_bytes: int) -> bytes:
        """From `headers.relayed_fields`; about 0.3 us.

        Raises ValueError for a method or target that does not fit into a request line.
        """
        start = self._posts.get(target) if method == b"POST" else None
        if start is None:
            start = self._start(method, target)
        if body_bytes or method in _BODY_EXPECTED:
            return b"%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
                start,
                fields,
                request_id,
                body_bytes,
            )
        return b"%b%bx-request-id: %b\r\n\r\n" % (start, fields, request_id)

    def _start(self, method: bytes, target: bytes) -> bytes:
        if _not_a_target(target) or (method not in _ORDINARY and _not_a_method(method)):
            raise ValueError("method or target is not valid in an HTTP/1.1 request line")
        start = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target, self._host)
        if method == b"POST" and len(start) <= _LONGEST_REMEMBERED:
            if len(self._posts) >= _MOST_STARTS:
                self._posts.clear()
            self._posts[target] = start
        return start
