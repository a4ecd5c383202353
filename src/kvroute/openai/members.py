"""Finds, replaces and adds top-level members of a JSON object without serialising the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

import msgspec
from msgspec import Raw

from kvroute.errors import InvalidRequest
from kvroute.openai.bounded import UNREADABLE
from kvroute.openai.endpoints import BodyKind
from kvroute.openai.request import InferenceRequest

_MAX_CANDIDATES = 1_000
"""Most members with the same name and value, including nested ones, among which the top-level one is
found."""
_LARGE_BYTES = 1 << 20
"""`with_members` does not search a larger body: decoding it would hold the event loop for too long."""
_BLANK = b" \t\r\n"


class TopLevelMember:
    """A top-level member of a JSON object. Its name must need no escaping."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._key = b'"%b"' % name.encode()
        only: Any = msgspec.defstruct("Only", [("value", Raw)], rename={"value": name})
        self._decode = msgspec.json.Decoder(only).decode

    def place(self, body: bytes, value: bytes) -> slice | None:
        """Where `value`, the member's value, is in the object `body`; None if that cannot be decided.

        Of several members with this name it is the last one, as for Python's json and msgspec. Costs one
        decoding of the body.
        """
        pattern = re.escape(self._key) + rb"\s*:\s*(" + re.escape(value) + rb")"
        found = list(islice(re.finditer(pattern, body), _MAX_CANDIDATES + 1))
        if len(found) > _MAX_CANDIDATES:
            return None
        # Nested objects may have equal members. So each value is replaced by a number, and the decoder
        # returns the number of the top-level member.
        parts: list[bytes | memoryview] = []
        view, at = memoryview(body), 0
        for number, match in enumerate(found):
            parts += (view[at : match.start(1)], b"%d" % number)
            at = match.end(1)
        try:
            read = bytes(self._decode(b"".join([*parts, view[at:]])).value)
        except UNREADABLE:
            return None
        if not read.isdigit() or int(read) >= len(found):  # the member's name is written with escapes
            return None
        return slice(*found[int(read)].span(1))


def with_value(body: bytes, place: slice, value: bytes) -> bytes:
    """`body` with other bytes at `place`. Copies the body once."""
    view = memoryview(body)
    return b"".join([view[: place.start], value, view[place.stop :]])


def with_members(
    body: bytes, there: Mapping[TopLevelMember, Raw | None], members: Mapping[TopLevelMember, bytes]
) -> bytes:
    """`body` with each of `members` (to JSON text) set; all other bytes stay.

    `body` is a JSON object and not empty; `there` has the present values of `members`, None for an absent
    one. A present member gets its value replaced. An absent one, or one without a known place, is
    appended: of members with one name the last one counts, for Python's json (and so for vLLM) and msgspec.
    """
    added = []
    for member, value in members.items():
        old = there.get(member)
        place = member.place(body, bytes(old)) if old is not None and len(body) <= _LARGE_BYTES else None
        if place is None:
            added.append(b'"%b":%b' % (member.name.encode(), value))
        else:
            body = with_value(body, place, value)
    if not added:
        return body
    end = len(body.rstrip(_BLANK)) - 1
    view = memoryview(body)
    return b"".join([view[:end], b",", b",".join(added), view[end:]])


_MODEL = TopLevelMember("model")


def with_model(request: InferenceRequest, model: str) -> bytes:
    """`request.body` with another `model`; all other bytes stay.

    Raises InvalidRequest if the body names an alias but could not be read: workers do not know the alias.
    """
    if request.endpoint.body is BodyKind.MULTIPART:
        return _in_form(request, model)
    if request.fields is None or "model" not in request.fields:
        raise InvalidRequest("A body that is not plain JSON cannot use a model alias.", param="model")
    place = _MODEL.place(request.body, bytes(request.fields["model"]))
    if place is None:
        raise InvalidRequest("The `model` field of this body cannot be replaced by its alias.", param="model")
    return with_value(request.body, place, msgspec.json.encode(model))


def _in_form(request: InferenceRequest, model: str) -> bytes:
    place = request.model_place
    if place is None:
        raise InvalidRequest("The `model` field of this form cannot be replaced by its alias.", param="model")
    return with_value(request.body, place, model.encode())
