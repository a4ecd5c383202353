"""What FastAPI does not know of the OpenAPI schema: the relayed endpoints, the errors, and the keys."""

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
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_OWN_ERROR = {
    "description": "What is wrong with the request, in OpenAI's shape",
    "content": {"application/json": {"schema": _ERROR}},
}
_OPEN = ("/health", "/ping", "/ready", "/version", "/metrics")
_METHODS = ("get", "put", "post", "delete")


def completed(schema: dict[str, Any], *, needs_key: bool) -> dict[str, Any]:
    """The schema of the control plane with the relayed endpoints, the errors that are answered, and which
    key each operation takes; those of clients take one if the gateway `needs_key`.

    A validation error is a 400 here, not FastAPI's 422.
    """
    paths: dict[str, Any] = {**relayed_paths(), **schema["paths"]}
    for path, item in paths.items():
        for operation in (item[method] for method in _METHODS if method in item):
            if "relayed" not in operation["tags"]:
                responses = {
                    status: told for status, told in operation["responses"].items() if status != "422"
                }
                operation["responses"] = responses | {"4XX": _OWN_ERROR}
                if path == "/ready":
                    operation["responses"]["503"] = {
                        "description": "No worker is routable, and why",
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    }
            if path.startswith("/admin"):
                operation["security"] = [{"adminKey": []}]
            elif needs_key and path not in _OPEN:
                operation["security"] = [{"clientKey": []}]
    components = schema.setdefault("components", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(unused, None)
    components["securitySchemes"] = {
        "clientKey": {"type": "http", "scheme": "bearer", "description": "One of server.api_keys"},
        "adminKey": {"type": "http", "scheme": "bearer", "description": "admin.api_key"},
    }
    return schema | {"paths": paths}


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
