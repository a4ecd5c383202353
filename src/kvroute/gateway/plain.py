"""Which requests are plain: so ordinary in their framing that one look at their first bytes decides it.

The test is strict rather than complete. What is not plain is not refused: it goes the complete way,
through uvicorn's parser, byte for byte as it came. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from kvroute.gateway.asgi import Headers
from kvroute.openai.endpoints import BodyKind, Endpoint
from kvroute.upstream.headers import HOP_BY_HOP, NOT_RELAYED

_MOST_HEAD_BYTES = 16_384
_MOST_LINES = 4096
_LONGEST_REMEMBERED = 1024

# A token, then a value without control characters that neither begins nor ends with white space. Anything
# else (folded lines, a blank before the colon, bare CR or LF, NUL) does not match as a whole.
_FIELD = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*"
    rb"([\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)"
).fullmatch
_LENGTH = re.compile(rb"[1-9][0-9]{0,15}").fullmatch

_UNUSUAL = HOP_BY_HOP | {b"expect", b"content-encoding"}
"""Headers that change framing or the connection. Of these only `connection: keep-alive` is plain."""


class _Field(NamedTuple):
    name: bytes
    value: bytes
    relayed: bytes
    """The line as workers get it, b"" when they do not."""


class PlainRequest(NamedTuple):
    """The head of one. `fields` are its headers as workers get them, `body_at` where its body begins."""

    endpoint: Endpoint
    target: bytes
    headers: Headers
    fields: bytes
    body_at: int
    body_bytes: int


class PlainRequests:
    """Recognises plain POSTs of the JSON endpoints, whose path comes without a query.

    `hidden_fields` (lower-case) are not relayed. Mutable: remembers header lines it has judged, because
    clients send the same ones again and again: at most 4096, of 1 KB each at most.
    """

    def __init__(
        self, endpoints: Iterable[Endpoint], *, hidden_fields: frozenset[bytes], added_fields: bytes
    ) -> None:
        self._rows = {
            b"POST %b HTTP/1.1" % row.path.encode(): (row, row.path.encode())
            for row in endpoints
            if row.body is BodyKind.JSON and not row.stores_response
        }
        self._kept_here = NOT_RELAYED | hidden_fields
        self._added = added_fields
        self._known: dict[bytes, _Field] = {}

    def read(self, data: bytes) -> PlainRequest | None:
        """The head at the start of `data`; None unless it is there as a whole and plain. About 2 us."""
        end = data.find(b"\r\n\r\n", 0, _MOST_HEAD_BYTES)
        if end < 0:
            return None
        lines = data[:end].split(b"\r\n")
        row = self._rows.get(lines[0])
        if row is None:
            return None
        del lines[0]
        known = self._known
        found: dict[bytes, bytes] = {}
        relayed = []
        for line in lines:
            field = known.get(line) or self._judged(line)
            if field is None:
                return None
            found[field.name] = field.value
            relayed.append(field.relayed)
        length = found.get(b"content-length")
        if length is None or len(found) != len(lines):
            return None
        relayed.append(self._added)
        return PlainRequest(row[0], row[1], list(found.items()), b"".join(relayed), end + 4, int(length))

    def _judged(self, line: bytes) -> _Field | None:
        match = _FIELD(line)
        if match is None:
            return None
        name, value = match[1].lower(), match[2]
        if name in _UNUSUAL and not (name == b"connection" and value.lower() == b"keep-alive"):
            return None
        if name == b"content-length" and not _LENGTH(value):
            return None
        field = _Field(name, value, b"" if name in self._kept_here else b"%b: %b\r\n" % (name, value))
        if len(line) <= _LONGEST_REMEMBERED:
            if len(self._known) >= _MOST_LINES:
                self._known.clear()
            self._known[line] = field
        return field
