"""Large bodies: read in steps, so that whoever reads one can give others a turn in between.

What a body says is what `openai.seen` and `openai.request` would say of it, but that fields which nobody asks
for are not kept, and what only Python's json reads is not read at this size.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from kvroute.openai.bounded import Bounded, not_plain_json
from kvroute.openai.endpoints import BodyKind, Endpoint
from kvroute.openai.json import UNREADABLE
from kvroute.openai.prompt import prompt_steps
from kvroute.openai.request import InferenceRequest, loose_request, parse_request
from kvroute.openai.seen import SeenBodies

_REMEMBERED_BYTES: Final = 4_194_304
"""Of a larger body no beginning is looked for: that reads most of it twice."""


def large_request(
    endpoint: Endpoint, body: bytes, content_type: str, bounded: Bounded, bodies: SeenBodies | None = None
) -> Generator[None, None, InferenceRequest]:
    """The request with its prompts. Raises InvalidRequest and OverLimit."""
    if endpoint.body is BodyKind.MULTIPART:
        return parse_request(endpoint, body, content_type, bounded)
    yield from bounded.values(body)
    request = None
    if bodies is not None and endpoint.fills_kv_cache and len(body) <= _REMEMBERED_BYTES:
        request = bodies.continued(endpoint, body)
        yield
    if request is None:
        fields = bounded.fields(body)
        yield
        try:
            request = loose_request(endpoint, body, fields)
        except UNREADABLE:
            raise not_plain_json() from None
        request.bounded = bounded
        messages = fields.get("messages")
        if messages is not None:
            try:
                request.read_messages = bounded.messages(messages)
            except UNREADABLE:
                pass  # no list of objects, which is the worker's to report
            yield
    request.bounded = bounded
    request.prompts = yield from prompt_steps(request)
    return request
