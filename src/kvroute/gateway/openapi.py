"""The relayed endpoints in the OpenAPI schema, so that `/docs` shows everything there is."""

from __future__ import annotations

from typing import Any

from kvroute.openai.endpoints import ENDPOINTS, BodyKind, Endpoint

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": "string", "nullable": True},
                "code": {"type": "string", "nullable": True},
            },
        }
    },
}


def relayed_paths() -> dict[str, Any]:
    """OpenAPI path items of every relayed endpoint."""
    paths: dict[str, Any] = {path: {"post": _operation(row)} for path, row in ENDPOINTS.items()}
    held = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
    for path, method, summary in (
        ("/v1/responses/{response_id}", "get", "A stored response, from the worker that holds it"),
        ("/v1/responses/{response_id}", "delete", "Delete a stored response"),
        ("/v1/responses/{response_id}/cancel", "post", "Cancel a background response"),
    ):
        paths.setdefault(path, {})[method] = {
            "tags": ["relayed"],
            "summary": summary,
            "operationId": f"{method}{path.replace('/', '_')}",
            "parameters": [held],
            "responses": _RESPONSES,
        }
    return paths


_RESPONSES = {
    "200": {"description": "The worker's answer, byte for byte"},
    "4XX": {
        "description": "The worker's or the gateway's error",
        "content": {"application/json": {"schema": _ERROR}},
    },
    "502": {"description": "No worker could be reached", "content": {"application/json": {"schema": _ERROR}}},
    "503": {"description": "No routable worker", "content": {"application/json": {"schema": _ERROR}}},
}


def _operation(row: Endpoint) -> dict[str, Any]:
    properties: dict[str, Any] = {"model": {"type": "string"}}
    if row.body is BodyKind.MULTIPART:
        properties["file"] = {"type": "string", "format": "binary"}
    elif row.fills_kv_cache:
        properties["stream"] = {"type": "boolean"}
    return {
        "tags": ["relayed"],
        "summary": row.summary,
        "description": "Forwarded to a worker as it came; the body is vLLM's own.",
        "operationId": "post" + row.path.replace("/", "_"),
        "requestBody": {
            "required": True,
            "content": {
                row.body.value: {
                    "schema": {"type": "object", "properties": properties, "additionalProperties": True}
                }
            },
        },
        "responses": _RESPONSES,
    }
