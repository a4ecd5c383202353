"""A worker's answer, as it arrives.

An answer is plain if its framing is so ordinary that its first bytes decide it. The test is strict rather
than complete: every other answer goes to the parser, byte for byte as it came. A plain answer saves the
parser's callbacks, one Python call for each header and each chunk.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

from msgspec import Struct, field

from kvroute.errors import UpstreamError
from kvroute.upstream.headers import ANSWERED_HERE, HOP_BY_HOP, RawHeaders

VALUE = rb"[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?"
FIELD = re.compile(rb"([!#$%%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(%b)" % VALUE).fullmatch
"""A header line: a token, a colon, and a value without control characters or white space at its ends.

Folded lines, a blank before the colon, bare CR or LF, and NUL do not match.
"""

CHUNK = re.compile(rb"([1-9a-f][0-9a-f]{0,6})\r\n").match
"""The size line of a chunk as most workers write it: no leading zeros, lower-case digits, no extensions."""

LAST_CHUNK = b"0\r\n\r\n"

_STATUS = re.compile(rb"HTTP/1\.1 ([2-5][0-9]{2}) ([\x21-\x7e][\x20-\x7e]*)").fullmatch
_LENGTH = re.compile(rb"[1-9][0-9]{0,14}").fullmatch
_MAX_LENGTH_DIGITS = 15
_WITHOUT_BODY = (204, 304)
_MAX_PLAIN_HEAD_BYTES = 16_384
_MAX_CACHED_LINES = 1024
_MAX_CACHED_HEADS = 1024
_MAX_CACHED_LINE_BYTES = 1024
_MAX_CACHED_HEAD_BYTES = 4096
_CHUNKED = -1
_ZERO = ord("0")
_new = tuple.__new__


def unframed(piece: bytes) -> bytes:
    """The body of `piece` if `piece` is exactly one framed chunk (`CHUNK`), otherwise `piece` itself."""
    line = CHUNK(piece)
    if line is None or line.end() + int(line[1], 16) + 2 != len(piece):
        return piece
    return piece[line.end() : -2]


class PlainAnswer(NamedTuple):
    """The head of a plain answer."""

    status: int
    reason: bytes
    lines: bytes
    """The head without its final CR LF CR LF."""
    fields: bytes
    """The header lines for the client: names in lower case, each line with its CR LF."""
    is_event_stream: bool
    body_at: int
    """Where the body begins in the bytes that were read."""
    body_bytes: int | None
    """Length of the body; None if it is chunked."""

    @property
    def headers(self) -> RawHeaders:
        """The headers as the worker wrote them. Parsed at each call; relaying does not need them."""
        matches = [FIELD(line) for line in self.lines.split(b"\r\n")[1:]]
        # Every line matches, because the answer is plain.
        return [(match[1], match[2]) for match in matches if match is not None]


class _Status(NamedTuple):
    status: int
    reason: bytes


class _Field(NamedTuple):
    relayed: bytes
    """The line for the client; b"" if the client does not get it."""
    length: int
    """The value of a Content-Length; -1 for `transfer-encoding: chunked`; 0 for other headers."""
    is_event_stream: bool


class _KnownHead(NamedTuple):
    """A head that a worker has sent before, with a gap where the digits of its Content-Length are."""

    head_start: bytes
    """The head up to the digits."""
    head_start_bytes: int
    max_bytes: int
    """Length of the head with the longest possible number."""
    behind: bytes
    """The head after the digits, with its final CR LF CR LF."""
    behind_bytes: int
    status: int
    reason: bytes
    fields: bytes
    """The header lines for the client, with `%b` where the digits are."""


def _match_known_head(head: _KnownHead, data: bytes) -> PlainAnswer | None:
    """The answer in `data` if `data` begins with `head` and any Content-Length above 0."""
    head_start, at, max_bytes, behind, behind_bytes, status, reason, fields = head
    if not data.startswith(head_start):
        return None
    after = data.find(behind, at, max_bytes)
    digits = data[at:after]
    if after < 0 or not digits.isdigit() or digits[0] == _ZERO:
        return None
    body_at = after + behind_bytes
    # Like `PlainAnswer(...)`, but without its constructor, which is Python code.
    return _new(
        PlainAnswer, (status, reason, data[: body_at - 4], fields % digits, False, body_at, int(digits))
    )


class PlainAnswers:
    """Recognises plain answers of one worker.

    A plain answer has a final status and either `transfer-encoding: chunked`, or one Content-Length above 0
    and no event stream. Mutable: caches parsed lines (at most 1 KB each) and whole heads (at most 4 KB each),
    1024 of each kind, because a worker sends the same ones again.
    """

    def __init__(self) -> None:
        self._statuses: dict[bytes, _Status] = {}
        self._fields: dict[bytes, _Field] = {}
        self._heads: dict[tuple[bytes, bytes], _KnownHead] = {}
        self._chunked_heads: dict[bytes, PlainAnswer] = {}
        """Heads of chunked answers, by their lines."""
        self._last_head: _KnownHead | None = None
        """The known head that matched last."""
        self.chunk_bytes: dict[bytes, int] = {}
        """Hexadecimal size of a chunk -> length of the chunk with its framing. Filled by `learn_chunk`."""

    def read(self, data: bytes) -> PlainAnswer | None:
        """The head at the start of `data`; None if it is incomplete or not plain.

        About 3 us; 1 us for a known head with a Content-Length.
        """
        # Consecutive answers of one worker usually have the same head.
        last = self._last_head
        if last is not None and (answer := _match_known_head(last, data)) is not None:
            return answer
        end = data.find(b"\r\n\r\n", 0, _MAX_PLAIN_HEAD_BYTES)
        if end < 0:
            return None
        # The two usual ways to write the header's name. Other ways are parsed line by line each time.
        at = data.find(b"\r\ncontent-length: ", 0, end)
        if at < 0:
            at = data.find(b"\r\nContent-Length: ", 0, end)
        if at < 0:
            return self._read_chunked(data, end)
        after = data.find(b"\r\n", at + 2, end + 2)
        around = data[:at], data[after:end]
        head = self._heads.get(around)
        digits = data[at + 18 : after]
        if head is None or not _LENGTH(digits):
            known_fields = len(self._fields) + (data[at + 2 : after] not in self._fields)
            answer = self._read(data, end)
            if answer is not None and known_fields == len(self._fields) and end <= _MAX_CACHED_HEAD_BYTES:
                # No line was new, except perhaps the length: this head will probably come again.
                self._cache_head(around, data[: at + 18], data[after : end + 4], answer)
            return answer
        self._last_head = head
        return _match_known_head(head, data)

    def learn_chunk(self, framed: bytes) -> int:
        """Where the body begins if `framed` is exactly one framed chunk (`CHUNK`), otherwise 0.

        Records sizes below 4096 bytes in `chunk_bytes`.
        """
        line = CHUNK(framed)
        if line is None or line.end() + int(line[1], 16) + 2 != len(framed) or framed[-2:] != b"\r\n":
            return 0
        if len(line[1]) <= 3:
            self.chunk_bytes[line[1]] = len(framed)
        return line.end()

    def _cache_head(
        self, around: tuple[bytes, bytes], head_start: bytes, behind: bytes, answer: PlainAnswer
    ) -> None:
        """Cache the head of an answer with a Content-Length."""
        if len(self._heads) >= _MAX_CACHED_HEADS:
            self._heads.clear()
        fields_before, name, after = (b"\r\n" + answer.fields).partition(b"\r\ncontent-length: ")
        digits, _, _ = after.partition(b"\r\n")
        self._heads[around] = _KnownHead(
            head_start,
            len(head_start),
            len(head_start) + _MAX_LENGTH_DIGITS + len(behind),
            behind,
            len(behind),
            answer.status,
            answer.reason,
            b"%b%%b%b"
            % (
                (fields_before + name)[2:].replace(b"%", b"%%"),
                after.removeprefix(digits).replace(b"%", b"%%"),
            ),
        )

    def _read_chunked(self, data: bytes, end: int) -> PlainAnswer | None:
        answer = self._chunked_heads.get(data[:end])
        if answer is not None:
            return answer
        known_fields = len(self._fields)
        answer = self._read(data, end)
        if (
            answer is not None
            and answer.body_bytes is None
            and known_fields == len(self._fields)
            and end <= _MAX_CACHED_HEAD_BYTES
        ):
            if len(self._chunked_heads) >= _MAX_CACHED_HEADS:
                self._chunked_heads.clear()
            self._chunked_heads[answer.lines] = answer
        return answer

    def _read(self, data: bytes, end: int) -> PlainAnswer | None:
        status_line, *lines = data[:end].split(b"\r\n")
        status = self._statuses.get(status_line) or self._parse_status(status_line)
        if status is None:
            return None
        parsed_fields = self._fields
        try:
            fields = [parsed_fields[line] for line in lines]
        except KeyError:
            parsed = [parsed_fields.get(line) or self._parse_field(line) for line in lines]
            fields = [field for field in parsed if field is not None]
            if len(fields) < len(parsed):
                return None
        if not fields:
            return None
        relayed, lengths, streams = zip(*fields, strict=True)
        if lengths.count(0) != len(lengths) - 1:
            return None
        length, is_event_stream = sum(lengths), any(streams)
        if is_event_stream and length != _CHUNKED:
            return None
        return PlainAnswer(
            *status,
            data[:end],
            b"".join(relayed),
            is_event_stream,
            end + 4,
            None if length == _CHUNKED else length,
        )

    def _parse_status(self, line: bytes) -> _Status | None:
        match = _STATUS(line)
        if match is None or int(match[1]) in _WITHOUT_BODY:
            return None
        status = _Status(int(match[1]), match[2])
        if len(line) <= _MAX_CACHED_LINE_BYTES and len(self._statuses) < _MAX_CACHED_LINES:
            self._statuses[line] = status
        return status

    def _parse_field(self, line: bytes) -> _Field | None:
        match = FIELD(line)
        if match is None:
            return None
        name, value = match[1].lower(), match[2]
        length = 0
        if name == b"transfer-encoding" and value.lower() == b"chunked":
            length = _CHUNKED
        elif name in HOP_BY_HOP and not (name == b"connection" and value.lower() == b"keep-alive"):
            return None
        is_event_stream = name == b"content-type" and value.lower().startswith(b"text/event-stream")
        if name == b"content-length":
            if not _LENGTH(value):
                return None
            length = int(value)
        relayed = b"" if name in HOP_BY_HOP or name in ANSWERED_HERE else b"%b: %b\r\n" % (name, value)
        field = _Field(relayed, length, is_event_stream)
        if len(line) <= _MAX_CACHED_LINE_BYTES:
            if len(self._fields) >= _MAX_CACHED_LINES:
                self._fields.clear()
            self._fields[line] = field
        return field


class ParsedHead(NamedTuple):
    """The head of an answer that is not plain, as the parser found it."""

    status: int
    reason: bytes
    headers: RawHeaders
    content_length: int | None
    is_chunked: bool
    is_http_1_0: bool


class _Deadline(Protocol):
    def set(self, after_s: float) -> None: ...

    def clear(self) -> None: ...


class ResponseConnection(Protocol):
    """The connection that an answer arrives on (`UpstreamConnection`)."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def deadline(self) -> _Deadline: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort_exchange(self) -> None: ...


class AnswerListener(Protocol):
    """Receives an answer through a callback instead of awaiting it."""

    def answer_arrived(self, response: UpstreamResponse) -> None:
        """The head, body bytes or the end of the answer arrived, or several of these.

        The listener checks `status`, `is_over` and `error`, and calls `take`. Called on the event loop, once
        for each read from the socket; not after `abort` or after the end. The listener may set
        `response.on_framed_chunk`; chunks that are passed to it are not announced here.
        """
        ...


class UpstreamResponse(Struct, eq=False):
    """A worker's answer to one request: the head, then the body chunk by chunk. It has one reader.

    The reader awaits `head` and `next_chunk`, or is a listener. It must read to the end or call `abort()`.
    Mutable: the connection adds what arrives, on the event loop; the reader removes it.
    """

    # The connection returns to the pool when the whole answer has arrived, even if parts are still unread.

    idle_timeout_s: float
    listener: AnswerListener | None = None
    status: int = 0
    """0 until the final head is complete."""
    plain: PlainAnswer | None = None
    """The head if the answer is plain."""
    on_framed_chunk: Callable[[bytes], None] | None = None
    """Called with each read that is exactly one chunk of a plain answer, framing included. None after the
    end."""
    reused: bool = False
    """Whether the connection had served an exchange before."""
    parts: list[bytes] = field(default_factory=list)
    """Body bytes that have arrived and are unread."""
    is_over: bool = False
    """Nothing more will arrive: the answer is complete, or `error` is set."""
    error: UpstreamError | None = None
    """Why the answer broke off; otherwise None."""
    connection: ResponseConnection | None = None
    """None before the connection is open and after the end."""
    opening: asyncio.Task[None] | None = None
    """The task that opens the connection; None if it is open or could not be opened. Set by the transport."""
    _head: ParsedHead | None = None
    _unread_bytes: int = 0
    _is_paused: bool = False
    _waiter: asyncio.Future[None] | None = None

    @property
    def reason(self) -> bytes:
        """The reason phrase; b"" before the head has arrived."""
        head = self._head or self.plain
        return b"" if head is None else head.reason

    @property
    def headers(self) -> RawHeaders:
        """The headers as sent: with order, case, duplicates and hop-by-hop headers."""
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
        """Whether the answer is complete and read: `next_chunk` would return b"" without waiting."""
        return self.connection is None and self.error is None and not self.parts

    async def head(self, timeout_s: float) -> None:
        """Wait for the head of the final answer; `timeout_s` 0 waits without limit.

        Raises ConnectionLost, ResponseTimeout or ProtocolViolation. Called by the transport.
        """
        while not self.status:
            if self.error is not None:
                raise self.error
            await self._wait(timeout_s)

    async def next_chunk(self) -> bytes:
        """Wait for body bytes and return all that have arrived; b"" at the end.

        Chunked framing and trailers are removed, content codings are kept. Bytes that arrived before a
        failure are returned before the error is raised: ConnectionLost if the answer broke off or was
        aborted, ProtocolViolation on bad framing, ResponseTimeout after a silence of `idle_timeout_s`. A
        cancelled call loses nothing and may be repeated.
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
        """Return all body bytes that have arrived since the last call; b"" if there are none."""
        parts = self.parts
        self._unread_bytes = 0
        if len(parts) == 1:
            return parts.pop()
        chunk = b"".join(parts)
        parts.clear()
        return chunk

    def pause(self) -> None:
        """Stop reading from the worker until `resume`. The idle timeout does not run meanwhile."""
        connection = self.connection
        if connection is not None and not self._is_paused:
            self._is_paused = True
            connection.deadline.clear()
            connection.pause_reading()

    def resume(self) -> None:
        """Read again after `pause`. Idempotent."""
        connection = self.connection
        if connection is not None and self._is_paused:
            self._is_paused = False
            if self.idle_timeout_s > 0:
                connection.deadline.set(self.idle_timeout_s)
            connection.resume_reading()

    def abort(self) -> None:
        """Close the socket if the answer is not complete. Safe in every state, any number of times.

        A waiting reader gets ConnectionLost; a listener is not called again.
        """
        self.listener = self.on_framed_chunk = None
        if self.opening is not None:
            self.opening.cancel()
            self.opening = None
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

    # Called by the transport and the connection, on the event loop.

    def head_received(self, head: ParsedHead) -> None:
        """The parser has read the final head."""
        self._head = head
        self.status = head.status

    def on_read(self, size: int) -> int:
        """Wake the reader: a read of `size` bytes has been parsed. Returns the number of unread bytes.

        Framing counts as well, but only together with body bytes: reading must not pause while the reader
        has nothing to take.
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
        """The answer is complete, or broke off with `error`. The connection belongs to the pool again."""
        # Reading the attribute costs less than setting it, and it is seldom set.
        if self.on_framed_chunk is not None:
            self.on_framed_chunk = None
        if error is not None:
            self.error = error
            self.opening = None
        self.connection = None
        self.is_over = True
        listener = self.listener
        if listener is not None:
            listener.answer_arrived(self)
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
