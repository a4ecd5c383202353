"""What stands before the FastAPI application: the inference endpoints, found by one lookup.

They stay routes of the application too (so `/docs` shows them and embedders can mount it), but FastAPI's
stack of middlewares would cost each of them about 100 us and they use none of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from kvroute.gateway.asgi import Application, Receive, Scope, Send
from kvroute.gateway.dataplane import DataPlane, InferenceEndpoint
from kvroute.openai.endpoints import ENDPOINTS


class Front:
    """An ASGI application. `X-Forwarded-For` is read for the control plane only, from `trusted_proxies`:
    audit lines name the client by it. It never gives access."""

    def __init__(self, application: Application, plane: DataPlane, trusted_proxies: Sequence[str]) -> None:
        self._endpoints = {path: InferenceEndpoint(row, plane) for path, row in ENDPOINTS.items()}
        self._others: Application = application
        if trusted_proxies:
            self._others = ProxyHeadersMiddleware(application, list(trusted_proxies))  # type: ignore[arg-type, assignment]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await self._others(scope, receive, send)
