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
"""A header line: a token, then a value without control characters that neither begins nor ends with white
space. Nothing else (folded lines, a blank before the colon, bare CR or LF, NUL) matches as a whole."""

CHUNK = re.compile(rb"([1-9a-f][0-9a-f]{0,6})\r\n").match
"""The line before a chunk, as most workers write it: no zeros in front, small letters, no extensions."""

LAST_CHUNK = b"0\r\n\r\n"

_STATUS = re.compile(rb"HTTP/1\.1 ([2-5][0-9]{2}) ([\x21-\x7e][\x20-\x7e]*)").fullmatch
_LENGTH = re.compile(rb"[1-9][0-9]{0,14}").fullmatch
_LONGEST_LENGTH = 15
_WITHOUT_BODY = (204, 304)
_MOST_HEAD_BYTES = 16_384
_MOST_LINES = 1024
_MOST_HEADS = 1024
_LONGEST_REMEMBERED = 1024
_LARGEST_REMEMBERED = 4096
_CHUNKED = -1
_ZERO = ord("0")
_new = tuple.__new__


def unframed(part: bytes) -> bytes:
    """The body of `part` if it is one chunk of the plain kind with its framing, else `part` itself."""
    line = CHUNK(part)
    if line is None or line.end() + int(line[1], 16) + 2 != len(part):
        return part
    return part[line.end() : -2]


class PlainAnswer(NamedTuple):
    """The head of one. `lines` is all of it but its end, `fields` are the header lines that clients get,
    names in lower case, each with its end; `body_at` is where its body begins, and `body_bytes` its
    length, None when it is chunked."""

    status: int
    reason: bytes
    lines: bytes
    fields: bytes
    is_event_stream: bool
    body_at: int
    body_bytes: int | None

    @property
    def headers(self) -> RawHeaders:
        """As the worker wrote them. Found anew each time: relaying an answer does not take them."""
        matches = [FIELD(line) for line in self.lines.split(b"\r\n")[1:]]
        return [(match[1], match[2]) for match in matches if match is not None]  # all of them: it is plain


class _Status(NamedTuple):
    status: int
    reason: bytes


class _Field(NamedTuple):
    relayed: bytes
    length: int
    """Of the body, for a Content-Length; -1 for `transfer-encoding: chunked`; else 0."""
    is_event_stream: bool


class _Head(NamedTuple):
    """All of a sized `PlainAnswer` but its length: what stands before and behind that as the worker wrote it,
    with the name of the header and the end of the head, where these end at most, and what clients get, with a
    place for the length."""

    before: bytes
    before_bytes: int
    most_bytes: int
    behind: bytes
    behind_bytes: int
    status: int
    reason: bytes
    fields: bytes


def _read_like(head: _Head, data: bytes) -> PlainAnswer | None:
    """The answer in `data`, if that begins with `head`."""
    before, at, most, behind, behind_bytes, status, reason, fields = head
    if not data.startswith(before):
        return None
    after = data.find(behind, at, most)
    digits = data[at:after]
    if after < 0 or not digits.isdigit() or digits[0] == _ZERO:
        return None
    body_at = after + behind_bytes
    # As `PlainAnswer(...)`, without its Python-level constructor.
    return _new(
        PlainAnswer, (status, reason, data[: body_at - 4], fields % digits, False, body_at, int(digits))
    )


class PlainAnswers:
    """Recognises answers with a final status and either one Content-Length above 0, if they are no event
    streams, or `transfer-encoding: chunked`, and no other framing.

    Mutable: remembers lines it has judged, and heads made of nothing else but their Content-Length, because
    a worker sends the same ones again and again: at most 1024 each, of 1 KB and 4 KB at most, and as many
    of chunked ones.
    """

    def __init__(self) -> None:
        self._statuses: dict[bytes, _Status] = {}
        self._known: dict[bytes, _Field] = {}
        self._heads: dict[tuple[bytes, bytes], _Head] = {}
        self._streamed: dict[bytes, PlainAnswer] = {}
        """Chunked ones, by their lines."""
        self._last: _Head | None = None
        """The last one that was known."""
        self.chunk_bytes: dict[bytes, int] = {}
        """Lines before chunks that were seen, without their end, and how long such a chunk is with both; by
        `learn_chunk`."""

    def read(self, data: bytes) -> PlainAnswer | None:
        """The head at the start of `data`; None unless it is there as a whole and plain. About 3 us, 1 for
        a sized one that has come before."""
        # Most answers of one worker within a second are such as the last one.
        last = self._last
        if last is not None and (answer := _read_like(last, data)) is not None:
            return answer
        end = data.find(b"\r\n\r\n", 0, _MOST_HEAD_BYTES)
        if end < 0:
            return None
        # The line of the length as most workers write it; any other spelling is read line by line each time.
        at = data.find(b"\r\ncontent-length: ", 0, end)
        if at < 0:
            at = data.find(b"\r\nContent-Length: ", 0, end)
        if at < 0:
            return self._read_streamed(data, end)
        after = data.find(b"\r\n", at + 2, end + 2)
        around = data[:at], data[after:end]
        head = self._heads.get(around)
        digits = data[at + 18 : after]
        if head is None or not _LENGTH(digits):
            known = len(self._known) + (data[at + 2 : after] not in self._known)
            answer = self._read(data, end)
            if answer is not None and known == len(self._known) and end <= _LARGEST_REMEMBERED:
                # No line was new but, at most, that of the length: such a head may well come again.
                self._remember(around, data[: at + 18], data[after : end + 4], answer)
            return answer
        self._last = head
        return _read_like(head, data)

    def learn_chunk(self, framed: bytes) -> int:
        """Where the body of `framed` begins if that is one chunk of the plain kind, else 0."""
        line = CHUNK(framed)
        if line is None or line.end() + int(line[1], 16) + 2 != len(framed) or framed[-2:] != b"\r\n":
            return 0
        if len(line[1]) <= 3:
            self.chunk_bytes[line[1]] = len(framed)  # at most 4095
        return line.end()

    def _remember(
        self, around: tuple[bytes, bytes], before: bytes, behind: bytes, answer: PlainAnswer
    ) -> None:
        """Keep a sized answer's head."""
        if len(self._heads) >= _MOST_HEADS:
            self._heads.clear()
        fields_before, name, after = (b"\r\n" + answer.fields).partition(b"\r\ncontent-length: ")
        digits, _, _ = after.partition(b"\r\n")
        self._heads[around] = _Head(
            before,
            len(before),
            len(before) + _LONGEST_LENGTH + len(behind),
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

    def _read_streamed(self, data: bytes, end: int) -> PlainAnswer | None:
        answer = self._streamed.get(data[:end])
        if answer is not None:
            return answer
        known = len(self._known)
        answer = self._read(data, end)
        if (
            answer is not None
            and answer.body_bytes is None
            and known == len(self._known)
            and end <= _LARGEST_REMEMBERED
        ):
            if len(self._streamed) >= _MOST_HEADS:
                self._streamed.clear()
            self._streamed[answer.lines] = answer
        return answer

    def _read(self, data: bytes, end: int) -> PlainAnswer | None:
        first, *lines = data[:end].split(b"\r\n")
        status = self._statuses.get(first) or self._judged_status(first)
        if status is None:
            return None
        known = self._known
        try:
            fields = [known[line] for line in lines]
        except KeyError:
            judged = [known.get(line) or self._judged(line) for line in lines]
            fields = [field for field in judged if field is not None]
            if len(fields) < len(judged):
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

    def _judged_status(self, line: bytes) -> _Status | None:
        match = _STATUS(line)
        if match is None or int(match[1]) in _WITHOUT_BODY:
            return None
        status = _Status(int(match[1]), match[2])
        if len(line) <= _LONGEST_REMEMBERED and len(self._statuses) < _MOST_LINES:
            self._statuses[line] = status
        return status

    def _judged(self, line: bytes) -> _Field | None:
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
        if len(line) <= _LONGEST_REMEMBERED:
            if len(self._known) >= _MOST_LINES:
                self._known.clear()
            self._known[line] = field
        return field


class ParsedHead(NamedTuple):
    """The head of an answer that is not plain."""

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
    connection: ResponseConnection | None = None
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
