"""What stands before the FastAPI application: the inference endpoints, found by one lookup.

They stay routes of the application too (so `/docs` shows them and embedders can mount it), but FastAPI's
stack of middlewares would cost each of them about 100 us and they use none of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from kvroute.errors import InvalidRequest
from kvroute.gateway.asgi import Application, Receive, Scope, Send
from kvroute.gateway.dataplane import DataPlane, InferenceEndpoint
from kvroute.gateway.failures import error_body
from kvroute.openai.endpoints import ENDPOINTS

_may_mislead = re.compile(
    rb"(?:^|/|\\)(?:\.|%2e){1,2}(?:$|/|\\|%2f|%5c|;)|%2f|%5c|%00|\\", re.IGNORECASE
).search
"""Paths that a proxy before the gateway, the gateway and a worker may take for different ones."""

_MODELS = b"/v1/models/"
_encoded_slash = re.compile(rb"%2f", re.IGNORECASE)


class Front:
    """An ASGI application. `X-Forwarded-For` is read for the control plane only, from `trusted_proxies`:
    audit lines name the client by it. It never gives access."""

    def __init__(self, application: Application, plane: DataPlane, trusted_proxies: Sequence[str]) -> None:
        self._metrics = plane.metrics
        self._endpoints = {path: InferenceEndpoint(row, plane) for path, row in ENDPOINTS.items()}
        self._others: Application = application
        if trusted_proxies:
            self._others = ProxyHeadersMiddleware(application, list(trusted_proxies))  # type: ignore[arg-type, assignment]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: bytes = scope["raw_path"]
            if path.startswith(_MODELS):
                # Models have slashes in their names, which OpenAI's clients encode. No worker sees this path.
                path = _encoded_slash.sub(b"/", path)
            if _may_mislead(path):
                await self._refuse(send)
                return
            if scope["method"] == "POST":
                endpoint = self._endpoints.get(scope["path"])
                if endpoint is not None:
                    await endpoint(scope, receive, send)
                    return
        await self._others(scope, receive, send)

    async def _refuse(self, send: Send) -> None:
        error = InvalidRequest("A path must not have `.` or `..` as a segment, nor an encoded slash or NUL.")
        self._metrics.rejected.labels(error.error_code or error.type).inc()
        body = error_body(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
