"""A request's body, decoded once and only as deep as routing needs.

The body is forwarded as the bytes that came; nothing here is ever serialised again, but for an
alias's `model` field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from kvroute.errors import InvalidRequest
from kvroute.openai.endpoints import BodyKind, Endpoint
from kvroute.openai.multipart import form_fields

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_string = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request to an inference endpoint.

    `fields` maps each top-level field to its raw JSON; it is None where the body was not understood
    (Python's json takes it, our parser does not) and then travels unread, or is not JSON at all.
    `model` is None when the body names none.
    """

    endpoint: Endpoint
    body: bytes
    model: str | None
    stream: bool = False
    fields: Mapping[str, msgspec.Raw] | None = None
    form: Mapping[str, str] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        """The string at a dotted path of the body (`metadata.session_id`), None where there is none."""
        if self.fields is None:
            return self.form.get(path)
        head, _, rest = path.partition(".")
        raw = self.fields.get(head)
        if raw is None:
            return None
        try:
            value = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return None
        for key in rest.split(".") if rest else ():
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value if isinstance(value, str) and value else None


def parse_request(endpoint: Endpoint, body: bytes, content_type: str = "") -> InferenceRequest:
    """Read `body` as far as routing needs it.

    Raises InvalidRequest when the body is not a JSON object or its `model` is not a string; every
    other mistake is the worker's to report. About 1 us for small bodies, 45 us for 256 KB.
    """
    if endpoint.body is BodyKind.MULTIPART:
        form = form_fields(body, content_type)
        return InferenceRequest(
            endpoint, body, form.get("model") or None, form.get("stream") == "true", form=form
        )
    try:
        fields = _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _unread(endpoint, body)
    raw_model = fields.get("model")
    model: str | None = None
    if raw_model is not None and bytes(raw_model) != b"null":
        try:
            model = _decode_string(raw_model)
        except msgspec.DecodeError:
            raise InvalidRequest("`model` must be a string.", param="model") from None
    raw_stream = fields.get("stream")
    return InferenceRequest(
        endpoint, body, model, raw_stream is not None and bytes(raw_stream) == b"true", fields
    )


def _unread(endpoint: Endpoint, body: bytes) -> InferenceRequest:
    """What msgspec refuses but Python's json takes: NaN, lone surrogates, UTF-16. Only the model is read."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("The request body is not valid JSON.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    model = value.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("`model` must be a string.", param="model")
    return InferenceRequest(endpoint, body, model, value.get("stream") is True)
