"""Parses the heads of plain requests, quickly if a client has sent heads of the same shape before.

A client sends the same header lines again; only a few values vary, such as the length, an ID or a key. After
16 heads with the same names the gateway knows which lines vary. A head of such a known shape needs one
comparison and one regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from kvroute.http.edge import HOST
from kvroute.openai.endpoints import BodyKind, Endpoint
from kvroute.openai.headers import HeaderPlaces, Headers, KnownHeaders
from kvroute.upstream.headers import HOP_BY_HOP, NOT_RELAYED
from kvroute.upstream.response import FIELD, VALUE

MAX_HEAD_BYTES = 16_384
LENGTH = rb"[1-9][0-9]{0,15}"

_HEADS_TO_LEARN = 16
"""Consecutive heads without a new varying line, after which a shape is known. To compile its pattern costs
about 1 ms."""
_MAX_SHAPES = 256
_MAX_LINES = 64
_MAX_LEARNED_HEAD_BYTES = 2048
_LENGTH_NAME = b"content-length"
_ID_NAME = b"x-request-id"


class Line(NamedTuple):
    """A parsed header line."""

    name: bytes
    """In lower case."""
    value: bytes
    before: bytes
    """The bytes of the line before the value."""
    relayed: bytes
    """The line for workers; b"" if they do not get it."""
    may_vary: bool


class PlainRequest(Struct, eq=False, gc=False):
    """The parsed head of a plain request."""

    endpoint: Endpoint
    target: bytes
    fields: bytes
    """The header lines for workers."""
    request_id: bytes
    """The client's `x-request-id`; b"" if absent."""
    body_at: int
    """Where the body begins in the bytes that were read."""
    body_bytes: int
    headers: Headers
    """All headers except Content-Length."""
    shape: HeadShape | None = None
    """The known shape of the head, if it has one."""


class HeadShape:
    """A set of heads that differ only in the values of some lines. Immutable."""

    __slots__ = (
        "_before",
        "_before_bytes",
        "_endpoint",
        "_fields",
        "_id",
        "_id_place",
        "_length_place",
        "_max_bytes",
        "_places",
        "_rest",
        "_target",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        first: bytes,
        lines: Sequence[Line],
        varying: set[int],
        added: bytes,
        max_bytes: int = MAX_HEAD_BYTES,
    ) -> None:
        """`first` is the request line. `varying` are indexes of `lines`, including that of Content-Length."""
        self._endpoint = endpoint
        self._target = endpoint.path.encode()
        self._max_bytes = max_bytes
        constant: dict[bytes, bytes] = {}
        names: list[bytes | None] = []
        """Of the varying lines; None for Content-Length."""
        self._id, self._id_place = b"", -1
        fixed, fields, text = [first + b"\r\n"], list[bytes](), b""
        for place, line in enumerate(lines):
            if place not in varying:
                fields.append(_escape_percent(line.relayed))
                text += line.before + line.value + b"\r\n"
                constant[line.name] = line.value
                if line.name == _ID_NAME:
                    self._id = line.value
                continue
            fixed[-1] += text + line.before
            text = b"\r\n"
            fixed.append(b"")
            if line.name == _LENGTH_NAME:
                self._length_place = len(names)
                names.append(None)
                fields.append(b"%.0b")  # not relayed: a format that prints nothing
                continue
            if line.name == _ID_NAME:
                self._id_place = len(names)
            names.append(line.name)
            fields.append(_escape_percent(line.name + b": ") + b"%b\r\n" if line.relayed else b"%.0b")
        fixed[-1] += text + b"\r\n"
        before, *between = fixed
        self._before = before
        self._before_bytes = len(before)
        groups = [b"(%b)" % _pattern(name) for name in names]
        pairs = zip(groups, between, strict=True)
        self._rest = re.compile(b"".join([group + re.escape(after) for group, after in pairs])).match
        self._fields = b"".join(fields) + _escape_percent(added)
        self._places = HeaderPlaces(
            (line.name for line in lines if line.name != _LENGTH_NAME), constant, names
        )

    def read(self, data: bytes) -> PlainRequest | None:
        """The head at the start of `data`; None if it has another shape."""
        if not data.startswith(self._before):
            return None
        match = self._rest(data, self._before_bytes, self._max_bytes)
        if match is None:
            return None
        values = match.groups()
        place = self._id_place
        return PlainRequest(
            self._endpoint,
            self._target,
            self._fields % values,
            self._id if place < 0 else values[place],
            match.end(),
            int(values[self._length_place]),
            KnownHeaders(self._places, values),
            self,
        )


class _HeadShapeStats(Struct):
    """What is known of heads with the same request line and names. Mutable: each such head updates it."""

    lines: Sequence[Line]
    varying: set[int]
    seen: int = 0
    shape: HeadShape | None = None
    is_irregular: bool = False
    """A line varies that must not vary: these heads get no shape."""


class HeadShapeCache:
    """Learns the shapes of heads.

    Mutable: `learn` adds shapes, at most 256, of heads of at most 2 KB each.
    """

    def __init__(self, added: bytes, max_bytes: int = MAX_HEAD_BYTES) -> None:
        """`added` are header lines of the gateway for workers. No shape matches heads above `max_bytes`."""
        self._added = added
        self._max_bytes = max_bytes
        self._stats: dict[tuple[bytes, ...], _HeadShapeStats] = {}
        self.latest: HeadShape | None = None
        """The shape that was learned last: the best guess for a new connection."""

    def __len__(self) -> int:
        return len(self._stats)

    def learn(self, endpoint: Endpoint, first: bytes, lines: Sequence[Line], size: int) -> HeadShape | None:
        """Count a plain head of `size` bytes; return its shape, or None while that is unknown."""
        if size > _MAX_LEARNED_HEAD_BYTES or len(lines) > _MAX_LINES:
            return None
        names = (first, *[line.before for line in lines])
        stats = self._stats.get(names)
        if stats is None:
            if len(self._stats) >= _MAX_SHAPES:
                self._stats.clear()
            length = {place for place, line in enumerate(lines) if line.name == _LENGTH_NAME}
            self._stats[names] = _HeadShapeStats(lines, length)
            return None
        if stats.is_irregular:
            return None
        for place, (line, other) in enumerate(zip(lines, stats.lines, strict=True)):
            if line.value != other.value and place not in stats.varying:
                stats.varying.add(place)
                stats.seen, stats.shape = 0, None
                stats.is_irregular = not line.may_vary
        stats.seen += 1
        if stats.shape is None and stats.seen >= _HEADS_TO_LEARN and not stats.is_irregular:
            self.latest = stats.shape = HeadShape(
                endpoint, first, lines, stats.varying, self._added, self._max_bytes
            )
        return stats.shape


def _pattern(name: bytes | None) -> bytes:
    """The pattern for the value of a varying line."""
    if name is None:
        return LENGTH
    return HOST if name == b"host" else VALUE


def _escape_percent(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")


_MAX_CACHED_LINES = 4096
_MAX_CACHED_LINE_BYTES = 1024

_LENGTH = re.compile(LENGTH).fullmatch
_HOST = re.compile(HOST).fullmatch

_UNUSUAL = HOP_BY_HOP | {b"expect", b"content-encoding"}
"""Headers that change framing or the connection. Requests with them are not plain, except with
`connection: keep-alive`."""


class PlainRequests:
    """Recognises plain requests: POSTs of the JSON endpoints without a query and with ordinary framing.

    `hidden_fields` (lower-case) are not relayed. Mutable: caches parsed header lines, at most 4096 of at most
    1 KB each, and shapes of heads.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        *,
        hidden_fields: frozenset[bytes],
        added_fields: bytes,
        max_head_bytes: int = MAX_HEAD_BYTES,
        max_header_lines: int = 128,
    ) -> None:
        self._rows = {
            b"POST %b HTTP/1.1" % row.path.encode(): (row, row.path.encode())
            for row in endpoints
            if row.body is BodyKind.JSON and not row.stores_response
        }
        self._not_relayed = NOT_RELAYED | hidden_fields
        self._added = added_fields
        self._lines: dict[bytes, Line] = {}
        self._max_bytes = min(max_head_bytes, MAX_HEAD_BYTES)
        self._max_lines = max_header_lines
        self._shapes = HeadShapeCache(added_fields, self._max_bytes)

    def read(self, data: bytes) -> PlainRequest | None:
        """The head at the start of `data`; None if it is incomplete or not plain.

        About 9 us; 1.5 us if it has the shape that was learned last. A caller that knows a better shape calls
        `HeadShape.read` of that one first.
        """
        shape = self._shapes.latest
        if shape is not None and (request := shape.read(data)) is not None:
            return request
        end = data.find(b"\r\n\r\n", 0, self._max_bytes)
        if end < 0:
            return None
        first, *rest = data[:end].split(b"\r\n")
        row = self._rows.get(first)
        if row is None or len(rest) > self._max_lines:
            return None
        known = self._lines
        found: dict[bytes, bytes] = {}
        lines = list[Line]()
        for text in rest:
            line = known.get(text) or self._parse_line(text)
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
            list(found.items()),
            self._shapes.learn(row[0], first, lines, end + 4),
        )

    def _parse_line(self, text: bytes) -> Line | None:
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
        relayed = b"" if name in self._not_relayed else b"%b: %b\r\n" % (name, value)
        line = Line(name, value, text[: match.start(2)], relayed, not is_unusual)
        if len(text) <= _MAX_CACHED_LINE_BYTES and not is_length:
            if len(self._lines) >= _MAX_CACHED_LINES:
                self._lines.clear()
            self._lines[text] = line
        return line
