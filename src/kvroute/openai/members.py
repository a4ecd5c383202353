"""Top-level members of a JSON object, replaced or added without serialising the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice

import msgspec
from msgspec import Raw

from kvroute.openai.json import UNREADABLE

_TRIES = 4
"""Each one decodes the whole body, and a client can put any number of them into a string."""
_LARGE_BYTES = 1 << 20
"""In a larger body no member is searched for: to decode it twice would hold the event loop for too long."""
_BLANK = b" \t\r\n"
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def with_members(body: bytes, there: Mapping[str, Raw | None], members: Mapping[str, bytes]) -> bytes:
    """`body` with each of `members` (name to JSON text) set; every other byte stays.

    `body` is a JSON object and not empty, `there` has the values of those `members` that are in it (None as a
    value says that one is not). A member that is there gets its value replaced. One that is not, or whose
    place is not found, is appended: of members with one name the last one counts, for Python's json (so for
    vLLM) and for msgspec alike. Names need no escaping.
    """
    added = []
    for name, value in members.items():
        old = there.get(name)
        replaced = None
        if old is not None and len(body) <= _LARGE_BYTES:
            replaced = replaced_member(body, name, old, value)
        if replaced is None:
            added.append(b'"%b":%b' % (name.encode(), value))
        else:
            body = replaced
    if not added:
        return body
    end = len(body.rstrip(_BLANK)) - 1
    view = memoryview(body)
    return b"".join([view[:end], b",", b",".join(added), view[end:]])


def replaced_member(body: bytes, name: str, old: Raw, new: bytes) -> bytes | None:
    """`body` with the value of its member `name`, which is `old`, replaced; None where its place is not
    found.

    The same bytes may also stand inside a string or a nested object: the change that is right changes
    exactly this member.
    """
    wanted: dict[str, bytes] | None = None
    pattern = re.escape(b'"%b"' % name.encode()) + rb"\s*:\s*(" + re.escape(bytes(old)) + rb")"
    for found in islice(re.finditer(pattern, body), _TRIES):
        changed = body[: found.start(1)] + new + body[found.end(1) :]
        try:
            if wanted is None:
                wanted = _values(body)
                wanted[name] = new
            if _values(changed) == wanted:
                return changed
        except UNREADABLE:
            continue
    return None


def _values(body: bytes) -> dict[str, bytes]:
    return {name: bytes(raw) for name, raw in _decode_fields(body).items()}
