"""Which answers are plain: so ordinary in their framing that one look at their first bytes decides it.

The test is strict rather than complete: what is not plain goes to the parser, byte for byte as it came.
It saves the parser's callbacks, one Python call per header, on most answers that are not streamed. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvroute.upstream.headers import ANSWERED_HERE, HOP_BY_HOP, RawHeaders

FIELD = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*"
    rb"([\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)"
).fullmatch
"""A header line: a token, then a value without control characters that neither begins nor ends with white
space. Nothing else (folded lines, a blank before the colon, bare CR or LF, NUL) matches as a whole."""

_STATUS = re.compile(rb"HTTP/1\.1 ([2-5][0-9]{2}) ([\x21-\x7e][\x20-\x7e]*)").fullmatch
_LENGTH = re.compile(rb"[1-9][0-9]{0,14}").fullmatch
_WITHOUT_BODY = (204, 304)
_MOST_HEAD_BYTES = 16_384
_MOST_LINES = 1024
_LONGEST_REMEMBERED = 1024


class PlainAnswer(NamedTuple):
    """The head of one. `fields` are the header lines that clients get, names in lower case, each with its
    end; `body_at` is where its body begins."""

    status: int
    reason: bytes
    headers: RawHeaders
    fields: bytes
    body_at: int
    body_bytes: int


class _Status(NamedTuple):
    status: int
    reason: bytes


class _Field(NamedTuple):
    header: tuple[bytes, bytes]
    relayed: bytes
    length: int
    """Of the body, for a Content-Length; else 0."""


class PlainAnswers:
    """Recognises answers with a final status, one Content-Length above 0 and no other framing, that are no
    event streams.

    Mutable: remembers lines it has judged, because a worker sends the same ones again and again: at most
    1024, of 1 KB each at most.
    """

    def __init__(self) -> None:
        self._statuses: dict[bytes, _Status] = {}
        self._known: dict[bytes, _Field] = {}

    def read(self, data: bytes) -> PlainAnswer | None:
        """The head at the start of `data`; None unless it is there as a whole and plain. About 3 us."""
        end = data.find(b"\r\n\r\n", 0, _MOST_HEAD_BYTES)
        if end < 0:
            return None
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
        headers, relayed, lengths = zip(*fields, strict=True)
        if lengths.count(0) != len(lengths) - 1:
            return None
        return PlainAnswer(*status, list(headers), b"".join(relayed), end + 4, sum(lengths))

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
        if name in HOP_BY_HOP and not (name == b"connection" and value.lower() == b"keep-alive"):
            return None
        if name == b"content-type" and value.lower().startswith(b"text/event-stream"):
            return None
        length = 0
        if name == b"content-length":
            if not _LENGTH(value):
                return None
            length = int(value)
        relayed = b"" if name in HOP_BY_HOP or name in ANSWERED_HERE else b"%b: %b\r\n" % (name, value)
        field = _Field((match[1], value), relayed, length)
        if len(line) <= _LONGEST_REMEMBERED:
            if len(self._known) >= _MOST_LINES:
                self._known.clear()
            self._known[line] = field
        return field
