"""Which requests are plain: so ordinary in their framing that one look at their first bytes decides it.

The test is strict rather than complete. What is not plain is not refused: it goes the complete way,
through uvicorn's parser, byte for byte as it came. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from kvroute.gateway.asgi import Headers
from kvroute.openai.endpoints import BodyKind, Endpoint
from kvroute.upstream.headers import HOP_BY_HOP, NOT_RELAYED
from kvroute.upstream.plain_answer import FIELD

_MOST_HEAD_BYTES = 16_384
_MOST_LINES = 4096
_MOST_HEADS = 1024
_LONGEST_REMEMBERED = 1024
_LARGEST_REMEMBERED = 4096
_LONGEST_LENGTH = 16

_LENGTH = re.compile(rb"[1-9][0-9]{0,15}").fullmatch

_UNUSUAL = HOP_BY_HOP | {b"expect", b"content-encoding"}
"""Headers that change framing or the connection. Of these only `connection: keep-alive` is plain."""


class _Field(NamedTuple):
    name: bytes
    value: bytes
    relayed: bytes
    """The line as workers get it, b"" when they do not."""


class PlainRequest(Struct, eq=False, gc=False):
    """The head of one. `headers` are all but Content-Length, shared with requests like it and never changed;
    `fields` are those that workers get, `request_id` is the client's own or b"", `body_at` is where its body
    begins.

    Mutable: `again` takes over the length of the next request of the same client.
    """

    endpoint: Endpoint
    target: bytes
    headers: Headers
    fields: bytes
    request_id: bytes
    body_at: int
    body_bytes: int
    _before: bytes = b""
    """What stood before the digits of the length, b"" where it was not spelt as most clients do."""
    _behind: bytes = b""
    """What stood behind them, with the end of the head."""

    def again(self, data: bytes) -> bool:
        """Whether `data` begins with this head but for its length, as most requests of one connection do.
        About 0.5 us."""
        before, behind = self._before, self._behind
        if not before or not data.startswith(before):
            return False
        at = len(before)
        after = data.find(b"\r\n", at, at + _LONGEST_LENGTH + 2)
        digits = data[at:after]
        if not digits.isdigit() or digits[0] == 0x30 or not data.startswith(behind, after):
            return False
        self.body_at = after + len(behind)
        self.body_bytes = int(digits)
        return True


_Head: TypeAlias = tuple[Endpoint, bytes, Headers, bytes, bytes]
"""The first five of a `PlainRequest`'s fields, which is all but its length."""


class PlainRequests:
    """Recognises plain POSTs of the JSON endpoints, whose path comes without a query.

    `hidden_fields` (lower-case) are not relayed. Mutable: remembers header lines it has judged, and heads
    made of nothing else, because clients send the same ones again and again but for the Content-Length: at
    most 4096 lines of 1 KB each and 1024 heads of 4 KB each.
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
        self._heads: dict[tuple[bytes, bytes], _Head] = {}

    def read(self, data: bytes) -> PlainRequest | None:
        """The head at the start of `data`; None unless it is there as a whole and plain. About 3 us, 2 for
        a head that has come before."""
        end = data.find(b"\r\n\r\n", 0, _MOST_HEAD_BYTES)
        if end < 0:
            return None
        # The line of the length as most clients write it; any other spelling is read line by line each time.
        at = data.find(b"\r\ncontent-length: ", 0, end)
        if at < 0:
            at = data.find(b"\r\nContent-Length: ", 0, end)
        if at < 0:
            return self._read(data, end)
        after = data.find(b"\r\n", at + 2, end + 2)
        digits = data[at + 18 : after]
        around = data[:at], data[after:end]
        head = self._heads.get(around)
        if head is not None and _LENGTH(digits):
            row, target, headers, fields, request_id = head
            before, behind = data[: at + 18], data[after : end + 4]
            return PlainRequest(
                row, target, headers, fields, request_id, end + 4, int(digits), before, behind
            )
        known = self._known
        without_new = len(known) + (data[at + 2 : after] not in known)
        request = self._read(data, end)
        if request is not None and len(known) == without_new and end <= _LARGEST_REMEMBERED:
            # No line was new but, at most, that of the length: such a head may well come again.
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            self._heads[around] = (
                request.endpoint,
                request.target,
                request.headers,
                request.fields,
                request.request_id,
            )
        return request

    def _read(self, data: bytes, end: int) -> PlainRequest | None:
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
        del found[b"content-length"]
        return PlainRequest(
            row[0],
            row[1],
            list(found.items()),
            b"".join(relayed),
            found.get(b"x-request-id", b""),
            end + 4,
            int(length),
        )

    def _judged(self, line: bytes) -> _Field | None:
        match = FIELD(line)
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
