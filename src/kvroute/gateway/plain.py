"""Which requests are plain: so ordinary in their framing that one look at their first bytes decides it.

The test is strict rather than complete. What is not plain is not refused: it goes the complete way,
through uvicorn's parser, byte for byte as it came. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvroute.gateway.edge import HOST
from kvroute.gateway.kinds import LENGTH, MOST_HEAD_BYTES, Kinds, Line, PlainRequest
from kvroute.openai.endpoints import BodyKind, Endpoint
from kvroute.upstream.headers import HOP_BY_HOP, NOT_RELAYED
from kvroute.upstream.plain_answer import FIELD

_MOST_LINES = 4096
_LONGEST_REMEMBERED = 1024

_LENGTH = re.compile(LENGTH).fullmatch
_HOST = re.compile(HOST).fullmatch

_UNUSUAL = HOP_BY_HOP | {b"expect", b"content-encoding"}
"""Headers that change framing or the connection. Of these only `connection: keep-alive` is plain."""


class PlainRequests:
    """Recognises plain POSTs of the JSON endpoints, whose path comes without a query.

    `hidden_fields` (lower-case) are not relayed. Mutable: remembers header lines it has judged, because
    clients send the same ones again and again, at most 4096 of 1 KB each; and the kinds of heads.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        *,
        hidden_fields: frozenset[bytes],
        added_fields: bytes,
        max_head_bytes: int = MOST_HEAD_BYTES,
        max_header_lines: int = 128,
    ) -> None:
        self._rows = {
            b"POST %b HTTP/1.1" % row.path.encode(): (row, row.path.encode())
            for row in endpoints
            if row.body is BodyKind.JSON and not row.stores_response
        }
        self._kept_here = NOT_RELAYED | hidden_fields
        self._added = added_fields
        self._known: dict[bytes, Line] = {}
        self._most_bytes = min(max_head_bytes, MOST_HEAD_BYTES)
        self._most_lines = max_header_lines
        self._kinds = Kinds(added_fields, self._most_bytes)

    def read(self, data: bytes) -> PlainRequest | None:
        """The head at the start of `data`; None unless it is there as a whole and plain. About 9 us, 1.5
        where its kind is the latest that became known; who knows a better one asks that first."""
        kind = self._kinds.latest
        if kind is not None and (request := kind.read(data)) is not None:
            return request
        end = data.find(b"\r\n\r\n", 0, self._most_bytes)
        if end < 0:
            return None
        first, *rest = data[:end].split(b"\r\n")
        row = self._rows.get(first)
        if row is None or len(rest) > self._most_lines:
            return None
        known = self._known
        found: dict[bytes, bytes] = {}
        lines = list[Line]()
        for text in rest:
            line = known.get(text) or self._judged(text)
            if line is None:
                return None
            found[line.name] = line.value
            lines.append(line)
        length = found.pop(b"content-length", None)
        if length is None or b"host" not in found or len(found) != len(lines) - 1:
            return None
        return PlainRequest(
            *row,
            b"".join([line.relayed for line in lines]) + self._added,
            found.get(b"x-request-id", b""),
            end + 4,
            int(length),
            self._kinds.learn(row[0], first, lines, end + 4),
            _headers=list(found.items()),
        )

    def _judged(self, text: bytes) -> Line | None:
        match = FIELD(text)
        if match is None:
            return None
        name, value = match[1].lower(), match[2]
        is_unusual = name in _UNUSUAL
        if is_unusual and not (name == b"connection" and value.lower() == b"keep-alive"):
            return None
        is_length = name == b"content-length"
        if is_length and not _LENGTH(value):
            return None
        if name == b"host" and not _HOST(value):
            return None
        relayed = b"" if name in self._kept_here else b"%b: %b\r\n" % (name, value)
        line = Line(name, value, text[: match.start(2)], relayed, not is_unusual)
        if len(text) <= _LONGEST_REMEMBERED and not is_length:
            if len(self._known) >= _MOST_LINES:
                self._known.clear()
            self._known[text] = line
        return line
