"""Replacing the `model` field of a body, and nothing else: the one change ever made to a body."""

from __future__ import annotations

import re

import msgspec

from kvroute.errors import InvalidRequest
from kvroute.openai.endpoints import BodyKind
from kvroute.openai.json import UNREADABLE
from kvroute.openai.request import InferenceRequest

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def with_model(request: InferenceRequest, model: str) -> bytes:
    """`request.body` with its `model` replaced; every other byte stays.

    Raises InvalidRequest for a body that names an alias but could not be read (it would reach the
    worker under a name that the worker does not know).
    """
    if request.endpoint.body is BodyKind.MULTIPART:
        return _in_form(request, model)
    if request.fields is None or "model" not in request.fields:
        raise InvalidRequest("A body that is not plain JSON cannot use a model alias.", param="model")
    old = bytes(request.fields["model"])
    wanted = {name: bytes(raw) for name, raw in request.fields.items()}
    new = wanted["model"] = msgspec.json.encode(model)
    # The same bytes may also stand inside a message: the splice that changes exactly this field is right.
    for found in re.finditer(rb'"model"\s*:\s*(' + re.escape(old) + rb")", request.body):
        body = request.body[: found.start(1)] + new + request.body[found.end(1) :]
        try:
            if {name: bytes(raw) for name, raw in _decode_fields(body).items()} == wanted:
                return body
        except UNREADABLE:
            continue
    raise InvalidRequest("The `model` field of this body cannot be replaced by its alias.", param="model")


def _in_form(request: InferenceRequest, model: str) -> bytes:
    pattern = (
        rb'(name="?model"?[ \t]*\r\n(?:[^\r\n]+\r\n)*\r\n)'
        + re.escape((request.model or "").encode())
        + rb"(?=\r\n--)"
    )
    body, count = re.subn(pattern, lambda found: found.group(1) + model.encode(), request.body, count=1)
    if not count:
        raise InvalidRequest("The `model` field of this form cannot be replaced by its alias.", param="model")
    return body
