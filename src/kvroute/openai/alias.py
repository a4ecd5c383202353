"""Replacing the `model` field of a body, and nothing else: the one change ever made to a body."""

from __future__ import annotations

import msgspec

from kvroute.errors import InvalidRequest
from kvroute.openai.endpoints import BodyKind
from kvroute.openai.members import Member, with_value
from kvroute.openai.request import InferenceRequest

_MODEL = Member("model")


def with_model(request: InferenceRequest, model: str) -> bytes:
    """`request.body` with its `model` replaced; every other byte stays.

    Raises InvalidRequest for a body that names an alias but could not be read (it would reach the
    worker under a name that the worker does not know).
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
