"""Writes errors as JSON, in the shape of OpenAI's, Anthropic's or the Responses API. No other module does."""

from __future__ import annotations

import json
from typing import Final

from kvroute.errors import GatewayError, ModelNotFound
from kvroute.metrics import OTHER, Metrics
from kvroute.openai.endpoints import ErrorShape
from kvroute.openai.headers import HeaderList
from kvroute.request.downstream import Downstream
from kvroute.request.record import Record


class InternalError(GatewayError):
    """A defect of the gateway; the log has its traceback."""


_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types of Anthropic's API by HTTP status (its documentation, "Errors"); its own overload is 529."""


_TYPES: Final = ("invalid_request_error", "server_error")


def error_body(error: GatewayError, shape: ErrorShape = ErrorShape.OPENAI, trace_id: str = "") -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`; for Anthropic also `"type": "error"` beside
    `error`, and `error.type` is one of Anthropic's types."""
    inner = _members(error)
    if trace_id:
        inner["trace_id"] = trace_id
    return _body(inner, error.status, shape)


def _members(error: GatewayError) -> dict[str, object]:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.error_code}


def _body(members: dict[str, object], status: int, shape: ErrorShape) -> bytes:
    whole: dict[str, object] = {"error": members}
    if shape is ErrorShape.ANTHROPIC:
        default = "invalid_request_error" if status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(status, default)
        whole = {"type": "error", "error": {**members, "type": kind}}
    return json.dumps(whole, ensure_ascii=False).encode()


def error_event(error: GatewayError, shape: ErrorShape) -> bytes:
    """The error as a server-sent event, for a stream that breaks off.

    It starts with a blank line, which ends an event that was cut off.
    """
    return _event(_members(error), error.status, shape)


def late_error_event(status: int, body: bytes, shape: ErrorShape) -> bytes:
    """Like `error_event`, for an error answer with this body, of this gateway or of a worker.

    Its message, type and code are kept if the body has them as JSON.
    """
    members: dict[str, object] = {
        "message": f"The worker answered with the status {status} and no event stream.",
        "type": _TYPES[status >= 500],
        "param": None,
        "code": status,
    }
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        inner = found.get("error", found)
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            for name in (*members, "trace_id"):
                value = inner.get(name)
                if isinstance(value, str):  # which a worker may have written with half a surrogate pair
                    value = value.encode("utf-8", "replace").decode()
                if name in inner and isinstance(value, str | int | None):
                    members[name] = value
    return _event(members, status, shape)


def _event(members: dict[str, object], status: int, shape: ErrorShape) -> bytes:
    if shape is ErrorShape.RESPONSES:
        code = members["code"]
        data = {
            "type": "error",
            "code": str(code) if isinstance(code, int) else code,  # vLLM's codes are numbers, OpenAI's texts
            "message": members["message"],
            "param": members["param"],
            "sequence_number": 0,
        }
        return b"\n\nevent: error\ndata: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
    start = b"\n\nevent: error\ndata: " if shape is ErrorShape.ANTHROPIC else b"\n\ndata: "
    return start + _body(members, status, shape) + b"\n\n"


def answer_error(
    client: Downstream,
    error: GatewayError,
    added: HeaderList | None = None,
    shape: ErrorShape = ErrorShape.OPENAI,
    trace_id: str = "",
) -> None:
    """Answer a request with `error`; nothing may have been sent for it yet."""
    body = error_body(error, shape, trace_id)
    headers: HeaderList = [
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
    if isinstance(error, ModelNotFound):
        record.model = OTHER  # the name is the client's: as a label, each name would be a new series
    record.status = error.status
    record.error = record.error or error.error_code or error.type
    metrics.rejected.labels(error.error_code or error.type).inc()
    added: HeaderList = [(b"x-request-id", record.request_id)]
    if record.trace_id:
        added.append((b"x-kvroute-trace-id", record.trace_id.encode()))
    answer_error(client, error, added, shape, record.trace_id)
