"""Which answers are plain: so ordinary in their framing that one look at their first bytes decides it.

The test is strict rather than complete: what is not plain goes to the parser, byte for byte as it came.
It saves the parser's callbacks, one Python call per header and one per chunk, on most answers. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
