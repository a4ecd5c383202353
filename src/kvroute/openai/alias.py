"""Replacing the `model` field of a body, and nothing else: the one change ever made to a body."""

from __future__ import annotations

import re
from itertools import islice

import msgspec

from kvroute.errors import InvalidRequest
from kvroute.openai.endpoints import BodyKind
from kvroute.openai.json import UNREADABLE
from kvroute.openai.request import InferenceRequest

_MOST_PLACES = 1_000
"""Of fields in a body that are called `model` and have the alias as their value."""


class _Named(msgspec.Struct):
    model: msgspec.Raw


_decode_model = msgspec.json.Decoder(_Named).decode


def with_model(request: InferenceRequest, model: str) -> bytes:
    """`request.body` with its `model` replaced; every other byte stays.

    Raises InvalidRequest for a body that names an alias but could not be read (it would reach the
    worker under a name that the worker does not know).
    """
    if request.endpoint.body is BodyKind.MULTIPART:
        return _in_form(request, model)
    if request.fields is None or "model" not in request.fields:
        raise InvalidRequest("A body that is not plain JSON cannot use a model alias.", param="model")
    body, old = request.body, bytes(request.fields["model"])
    found = list(islice(re.finditer(rb'"model"\s*:\s*(' + re.escape(old) + rb")", body), _MOST_PLACES + 1))
    if len(found) > _MOST_PLACES:
        raise _not_replaced()
    # Other objects in the body may have such a field, too. Each gets a number in its place; the one that is
    # read back is the request's own: of several, the last.
    parts, at = list[bytes | memoryview](), 0
    view = memoryview(body)
    for number, match in enumerate(found):
        parts += (view[at : match.start(1)], b"%d" % number)
        at = match.end(1)
    try:
        chosen = bytes(_decode_model(b"".join([*parts, view[at:]])).model)
    except UNREADABLE:
        raise _not_replaced() from None
    if not chosen.isdigit():  # its name is written with escapes
        raise _not_replaced()
    start, end = found[int(chosen)].span(1)
    return b"".join([view[:start], msgspec.json.encode(model), view[end:]])


def _not_replaced() -> InvalidRequest:
    return InvalidRequest("The `model` field of this body cannot be replaced by its alias.", param="model")


def _in_form(request: InferenceRequest, model: str) -> bytes:
    place = request.model_place
    if place is None:
        raise InvalidRequest("The `model` field of this form cannot be replaced by its alias.", param="model")
    return b"".join([request.body[: place.start], model.encode(), request.body[place.stop :]])
