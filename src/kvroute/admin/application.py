"""The FastAPI application: the relayed endpoints as raw ASGI routes, and the control plane."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from kvroute import __version__
from kvroute.admin.guard import AdminGuard
from kvroute.admin.openapi import complete_schema, docs_page
from kvroute.dual_stack import without_mapping
from kvroute.errors import GatewayError, InvalidRequest, NotFound
from kvroute.http.asgi import (
    Application,
    ClientDisconnected,
    InferenceEndpoint,
    Receive,
    Scope,
    Send,
    StoredResponseEndpoint,
)
from kvroute.http.authority import may_mislead
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.relay.dataplane import DataPlane
from kvroute.request.failures import error_body


class _OtherError(GatewayError):
    """An error of FastAPI's router, such as 405, with the router's status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status  # type: ignore[misc]
        self.type = "invalid_request_error"  # type: ignore[misc]
        self.error_code = {405: "method_not_allowed"}.get(status)


def build_application(plane: DataPlane, guard: AdminGuard, *routers: APIRouter) -> FastAPI:
    """Build the application with all routes; `guard` checks every request first.

    It has no lifespan: the caller starts and stops the collaborators.
    """
    # FastAPI's own pages load scripts from another host.
    app = _Application(
        title="kvroute", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None
    )

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(docs_page(app.openapi()), media_type="text/html")

    app.add_middleware(_Guarded, guard=guard)
    for path, row in ENDPOINTS.items():
        app.router.routes.append(Route(path, InferenceEndpoint(row, plane), methods=["POST"]))
    stored = StoredResponseEndpoint(plane)
    app.router.routes.append(Route("/v1/responses/{response_id}", stored, methods=["GET", "DELETE"]))
    app.router.routes.append(Route("/v1/responses/{response_id}/cancel", stored, methods=["POST"]))
    for router in routers:
        app.include_router(router)
    app.needs_key = not plane.entry_control.keys.is_open
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(ClientDisconnected, _client_left)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    return app


class _Guarded:
    """Middleware that calls `guard` for each request."""

    # A dependency of the routes would not run for paths without a route.

    def __init__(self, app: Application, guard: AdminGuard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._guard.check(scope)
            except GatewayError as error:
                await _answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Application(FastAPI):
    needs_key = False

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = complete_schema(super().openapi(), needs_key=self.needs_key)
        return self.openapi_schema


_NO_BATCHES = (
    "this gateway has no files and no batches. Send the requests of a batch to their own endpoints, such as "
    "/v1/chat/completions, or run them with `vllm run-batch`."
)
_ONE_WORKER = (
    "this is for a single worker. POST /admin/workers/ID/sleep and /admin/workers/ID/wake_up pass it on; "
    "GET /engines lists the workers."
)
_NOT_OFFERED = {
    "files": _NO_BATCHES,
    "batches": _NO_BATCHES,
    "uploads": _NO_BATCHES,
    "sleep": _ONE_WORKER,
    "wake_up": _ONE_WORKER,
    "is_sleeping": _ONE_WORKER,
}
"""First segment of a path of OpenAI's or production-stack's API that is not offered here -> the reason."""
_section = re.compile(r"/(?:v1/)?([^/]+)").match


def _answer(error: GatewayError) -> Response:
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, media_type="application/json")


async def _gateway_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return _answer(error)


async def _client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # the client left, so this is never sent


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        asked = f"{request.method} {request.url.path}"
        section = _section(request.url.path)
        if section is not None and (why := _NOT_OFFERED.get(section[1])):
            return _answer(NotFound(f"{asked}: {why}", code="unsupported_api"))
        return _answer(NotFound(f"There is no {asked} here."))
    answer = _answer(_OtherError(error.status_code, f"{request.method} {request.url.path}: {error.detail}."))
    answer.headers.update(error.headers or {})
    return answer


async def _validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return _answer(InvalidRequest(f"{name}: {first['msg']}", param=name))


def _plain(place: tuple[str, int | None] | None) -> tuple[str, int | None] | None:
    """An address and a port of a connection, without the mapping of a socket for both families."""
    return None if place is None else (without_mapping(place[0]), place[1])


_MODELS = b"/v1/models/"
_encoded_slash = re.compile(rb"%2f", re.IGNORECASE)


class Front:
    """The ASGI application that uvicorn calls: inference requests first, all others to `application`.

    `X-Forwarded-For` of `trusted_proxies` names the client in audit lines. It is read for the control plane
    only and never gives access. A path that begins with `root_path` is served as the rest of it.
    """

    def __init__(
        self,
        application: Application,
        plane: DataPlane,
        trusted_proxies: Sequence[str],
        root_path: str = "",
    ) -> None:
        self._root = root_path
        self._root_bytes = f"{root_path}/".encode()
        self._metrics = plane.metrics
        self._endpoints = {path: InferenceEndpoint(row, plane) for path, row in ENDPOINTS.items()}
        self._others: Application = application
        if trusted_proxies:
            self._others = ProxyHeadersMiddleware(application, list(trusted_proxies))  # type: ignore[arg-type, assignment]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: bytes = scope["raw_path"]
            if self._root and path.startswith(self._root_bytes):
                path = path[len(self._root) :]
                scope = {**scope, "raw_path": path, "path": scope["path"][len(self._root) :]}
            if path.startswith(_MODELS):
                # Names of models contain slashes, which OpenAI's clients encode. Workers do not get this
                # path.
                path = _encoded_slash.sub(b"/", path)
            if may_mislead(path):
                await self._refuse(send)
                return
            if scope["method"] == "POST":
                endpoint = self._endpoints.get(scope["path"])
                if endpoint is not None:
                    await endpoint(scope, receive, send)
                    return
            scope = {**scope, "client": _plain(scope["client"]), "server": _plain(scope["server"])}
        await self._others(scope, receive, send)

    async def _refuse(self, send: Send) -> None:
        error = InvalidRequest("A path must not have `.` or `..` as a segment, nor an encoded slash or NUL.")
        self._metrics.rejected.labels(error.error_code or error.type).inc()
        body = error_body(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
