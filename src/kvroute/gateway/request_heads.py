"""Kinds of plain heads: clients send the same lines again and again, but for a length, an id, a key.

Once many heads with the same names have come, what is the same in all of them is known, and what varies. A
head of a known kind is read by one comparison and one match, whatever stands in the lines that vary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from kvroute.gateway.downstream import Headers
from kvroute.gateway.edge import HOST
from kvroute.openai.endpoints import BodyKind, Endpoint
from kvroute.upstream.headers import HOP_BY_HOP, NOT_RELAYED
from kvroute.upstream.response import FIELD, VALUE

MOST_HEAD_BYTES = 16_384
LENGTH = rb"[1-9][0-9]{0,15}"

_ENOUGH = 16
"""Heads without a line that varies for the first time, after which a kind is taken for known: to compile its
pattern costs about a millisecond."""
_MOST_KINDS = 256
_MOST_LINES = 64
_LARGEST_HEAD = 2048
_LENGTH_NAME = b"content-length"
_ID_NAME = b"x-request-id"


class Line(NamedTuple):
    """A header line that was judged. `before` is what stands before the value, `relayed` the line as workers
    get it, b"" when they do not."""

    name: bytes
    value: bytes
    before: bytes
    relayed: bytes
    may_vary: bool


class PlainRequest(Struct, eq=False, gc=False):
    """The head of one. `fields` are the header lines that workers get, `request_id` is the client's own or
    b"", `body_at` is where its body begins, `kind` what it was recognised by, if it was."""

    endpoint: Endpoint
    target: bytes
    fields: bytes
    request_id: bytes
    body_at: int
    body_bytes: int
    kind: HeadShape | None = None
    _values: tuple[bytes, ...] = ()
    _headers: Headers | None = None

    @property
    def headers(self) -> Headers:
        """All but Content-Length."""
        if self._headers is None:
            assert self.kind is not None
            self._headers = self.kind.headers(self._values)
        return self._headers


class HeadShape:
    """Heads that differ in the values of `varying` lines only. Not changed once made."""

    __slots__ = (
        "_before",
        "_before_bytes",
        "_endpoint",
        "_fields",
        "_headers",
        "_id",
        "_id_place",
        "_length_place",
        "_most_bytes",
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
        most_bytes: int = MOST_HEAD_BYTES,
    ) -> None:
        """`first` is the request line; `varying` are places in `lines`, that of Content-Length among them."""
        self._endpoint = endpoint
        self._target = endpoint.path.encode()
        self._most_bytes = most_bytes
        self._headers: Headers = []
        self._places: list[tuple[int, bytes] | None] = []
        """For each line that varies where it belongs among the headers, and its name."""
        self._id, self._id_place = b"", -1
        fixed, fields, text = [first + b"\r\n"], list[bytes](), b""
        for place, line in enumerate(lines):
            if place not in varying:
                fields.append(_verbatim(line.relayed))
                text += line.before + line.value + b"\r\n"
                self._headers.append((line.name, line.value))
                if line.name == _ID_NAME:
                    self._id = line.value
                continue
            fixed[-1] += text + line.before
            text = b"\r\n"
            fixed.append(b"")
            if line.name == _LENGTH_NAME:
                self._length_place = len(self._places)
                self._places.append(None)
                fields.append(b"%.0b")  # is told, and not relayed
                continue
            if line.name == _ID_NAME:
                self._id_place = len(self._places)
            self._places.append((len(self._headers), line.name))
            self._headers.append((line.name, b""))
            fields.append(_verbatim(line.name + b": ") + b"%b\r\n" if line.relayed else b"%.0b")
        fixed[-1] += text + b"\r\n"
        before, *between = fixed
        self._before = before
        self._before_bytes = len(before)
        groups = [b"(%b)" % _pattern(place) for place in self._places]
        pairs = zip(groups, between, strict=True)
        self._rest = re.compile(b"".join([group + re.escape(after) for group, after in pairs])).match
        self._fields = b"".join(fields) + _verbatim(added)

    def read(self, data: bytes) -> PlainRequest | None:
        """The head at the start of `data`, if it is one of these."""
        if not data.startswith(self._before):
            return None
        match = self._rest(data, self._before_bytes, self._most_bytes)
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
            self,
            values,
        )

    def headers(self, values: tuple[bytes, ...]) -> Headers:
        """All but Content-Length, with what varies."""
        headers = self._headers.copy()
        for place, value in zip(self._places, values, strict=True):
            if place is not None:
                at, name = place
                headers[at] = (name, value)
        return headers


class _HeadShapeStats(Struct):
    """Heads with the same names, while it shows what varies in them. Mutable: by each of them."""

    lines: Sequence[Line]
    varying: set[int]
    seen: int = 0
    kind: HeadShape | None = None
    is_odd: bool = False
    """A line varies that must not."""


class HeadShapeCache:
    """Learns the kinds of the heads that it is told. Mutable: remembers at most 256, of heads of at most 2 KB
    each. `added` are the header lines that workers get from the gateway."""

    def __init__(self, added: bytes, most_bytes: int = MOST_HEAD_BYTES) -> None:
        """Heads of more than `most_bytes` are of no kind."""
        self._added = added
        self._most_bytes = most_bytes
        self._kindred: dict[tuple[bytes, ...], _HeadShapeStats] = {}
        self.latest: HeadShape | None = None
        """The last one that became known, for who knows no better."""

    def __len__(self) -> int:
        return len(self._kindred)

    def learn(self, endpoint: Endpoint, first: bytes, lines: Sequence[Line], size: int) -> HeadShape | None:
        """A plain head came, of so many bytes; its kind, once that is known."""
        if size > _LARGEST_HEAD or len(lines) > _MOST_LINES:
            return None
        names = (first, *[line.before for line in lines])
        kindred = self._kindred.get(names)
        if kindred is None:
            if len(self._kindred) >= _MOST_KINDS:
                self._kindred.clear()
            length = {place for place, line in enumerate(lines) if line.name == _LENGTH_NAME}
            self._kindred[names] = _HeadShapeStats(lines, length)
            return None
        if kindred.is_odd:
            return None
        for place, (line, other) in enumerate(zip(lines, kindred.lines, strict=True)):
            if line.value != other.value and place not in kindred.varying:
                kindred.varying.add(place)
                kindred.seen, kindred.kind = 0, None
                kindred.is_odd = not line.may_vary
        kindred.seen += 1
        if kindred.kind is None and kindred.seen >= _ENOUGH and not kindred.is_odd:
            self.latest = kindred.kind = HeadShape(
                endpoint, first, lines, kindred.varying, self._added, self._most_bytes
            )
        return kindred.kind


def _pattern(place: tuple[int, bytes] | None) -> bytes:
    """What the value of a line that varies must match."""
    if place is None:
        return LENGTH
    return HOST if place[1] == b"host" else VALUE


def _verbatim(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")


_MOST_KNOWN_LINES = 4096
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
        self._kinds = HeadShapeCache(added_fields, self._most_bytes)

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
            if len(self._known) >= _MOST_KNOWN_LINES:
                self._known.clear()
            self._known[text] = line
        return line
