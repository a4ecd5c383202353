"""Writes errors as JSON, in the shape of OpenAI's, Anthropic's or the Responses API. No other module does."""

from __future__ import annotations

import json

from kvroute.errors import GatewayError
from kvroute.gateway.downstream import Downstream, Headers
from kvroute.gateway.journal import Record
from kvroute.metrics import Metrics
from kvroute.openai.endpoints import ErrorShape


class InternalError(GatewayError):
    """A defect of the gateway; the log has its traceback."""


def error_body(error: GatewayError, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`; for Anthropic also `"type": "error"` beside
    `error`."""
    inner = {"message": error.message, "type": error.type, "param": error.param, "code": error.error_code}
    whole: dict[str, object] = {"type": "error"} if shape is ErrorShape.ANTHROPIC else {}
    return json.dumps({**whole, "error": inner}, ensure_ascii=False).encode()


def error_event(error: GatewayError, shape: ErrorShape) -> bytes:
    """The error as a server-sent event, for a stream that breaks off.

    It starts with a blank line, which ends an event that was cut off.
    """
    if shape is ErrorShape.RESPONSES:
        data = {
            "type": "error",
            "code": error.error_code,
            "message": error.message,
            "param": error.param,
            "sequence_number": 0,
        }
        return b"\n\nevent: error\ndata: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
    if shape is ErrorShape.ANTHROPIC:
        return b"\n\nevent: error\ndata: " + error_body(error, shape) + b"\n\n"
    return b"\n\ndata: " + error_body(error) + b"\n\n"


def answer_error(
    client: Downstream,
    error: GatewayError,
    added: Headers | None = None,
    shape: ErrorShape = ErrorShape.OPENAI,
) -> None:
    """Answer a request with `error`; nothing may have been sent for it yet."""
    body = error_body(error, shape)
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *(added or ()),
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    client.start(error.status, headers)
    client.finish(body)


def refuse(
    metrics: Metrics, record: Record, error: GatewayError, client: Downstream, shape: ErrorShape
) -> None:
    """Answer with the gateway's own error and note it in `record`."""
    record.status = error.status
    record.error = record.error or error.error_code or error.type
    metrics.rejected.labels(error.error_code or error.type).inc()
    added: Headers = [(b"x-request-id", record.request_id)]
    answer_error(client, error, added, shape)
