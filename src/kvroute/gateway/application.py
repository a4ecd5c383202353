"""The FastAPI application: relayed endpoints as raw ASGI routes beside an ordinary control plane."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from kvroute import __version__
from kvroute.errors import GatewayError, InvalidRequest, NotFound
from kvroute.gateway.admin_guard import AdminGuard
from kvroute.gateway.asgi import Application, ClientDisconnected, Receive, Scope, Send
from kvroute.gateway.dataplane import DataPlane, InferenceEndpoint, StoredResponseEndpoint
from kvroute.gateway.failures import error_body
from kvroute.gateway.openapi import completed
from kvroute.openai.endpoints import ENDPOINTS


class _OtherError(GatewayError):
    """A refusal by the router itself, such as 405. Its status is the framework's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status  # type: ignore[misc]
        self.type = "invalid_request_error"  # type: ignore[misc]
        self.error_code = {405: "method_not_allowed"}.get(status)


def build_application(plane: DataPlane, guard: AdminGuard, *routers: APIRouter) -> FastAPI:
    """Put the routes together; `guard` stands in front of all of them.

    The application has no lifespan: its collaborators are the caller's.
    """
    app = _Application(title="kvroute", version=__version__, redirect_slashes=False)
    app.add_middleware(_Guarded, guard=guard)
    for path, row in ENDPOINTS.items():
        app.router.routes.append(Route(path, InferenceEndpoint(row, plane), methods=["POST"]))
    stored = StoredResponseEndpoint(plane)
    app.router.routes.append(Route("/v1/responses/{response_id}", stored, methods=["GET", "DELETE"]))
    app.router.routes.append(Route("/v1/responses/{response_id}/cancel", stored, methods=["POST"]))
    for router in routers:
        app.include_router(router)
    app.needs_key = not plane.keys.is_open
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(ClientDisconnected, _client_left)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    return app


class _Guarded:
    """Lets `guard` see each request first. Not a dependency of the routes: those have no say about paths that
    no route has."""

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
            self.openapi_schema = completed(super().openapi(), needs_key=self.needs_key)
        return self.openapi_schema


def _answer(error: GatewayError) -> Response:
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, media_type="application/json")


async def _gateway_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return _answer(error)


async def _client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _answer(NotFound(f"There is no {request.method} {request.url.path} here."))
    answer = _answer(_OtherError(error.status_code, f"{request.method} {request.url.path}: {error.detail}."))
    answer.headers.update(error.headers or {})
    return answer


async def _validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return _answer(InvalidRequest(f"{name}: {first['msg']}", param=name))
