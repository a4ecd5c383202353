"""The OpenAPI schema of all endpoints, and its page."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any, Final

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


def complete_schema(schema: dict[str, Any], *, needs_key: bool) -> dict[str, Any]:
    """Add the relayed endpoints, the errors and the required keys to the schema of the control plane.

    Clients' operations need a key if the gateway `needs_key`. A validation error is a 400, not FastAPI's 422.
    """
    paths: dict[str, Any] = {**relayed_paths(), **schema["paths"]}
    for path, item in paths.items():
        for operation in (item[method] for method in _METHODS if method in item):
            if "relayed" not in operation["tags"]:
                responses = {
                    status: response for status, response in operation["responses"].items() if status != "422"
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


def docs_page(schema: Mapping[str, Any]) -> str:
    """The operations of an OpenAPI document as one HTML page, without scripts and without other files."""
    rows = [
        "<tr>"
        + "".join(
            f"<td>{html.escape(cell)}</td>"
            for cell in (method.upper(), path, ", ".join(operation["tags"]), operation.get("summary", ""))
        )
        + "</tr>"
        for path, item in schema["paths"].items()
        for method, operation in item.items()
        if method in _METHODS
    ]
    title = html.escape(f"{schema['info']['title']} {schema['info']['version']}")
    return _DOCS_PAGE.format(title=title, rows="\n".join(rows))


_DOCS_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font: 15px/1.4 sans-serif; margin: 2em }}
td, th {{ text-align: left; padding: 0.2em 1em 0.2em 0 }}
td:nth-child(-n + 2) {{ font-family: monospace }}</style></head>
<body><h1>{title}</h1>
<p>Schemas, errors and required keys: <a href="openapi.json">openapi.json</a> (OpenAPI 3.1).</p>
<table><tr><th>Method</th><th>Path</th><th>Tag</th><th>What it does</th></tr>
{rows}
</table></body></html>
"""


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
