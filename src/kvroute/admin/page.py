"""The live page: its files under `/ui`, its data under `/admin`, and what `/` answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from kvroute import __version__
from kvroute.admin.guard import ADMIN, PAGE
from kvroute.admin.live import LiveFigures

_TYPES: Final = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "state.js": "text/javascript; charset=utf-8",
    "views.js": "text/javascript; charset=utf-8",
    "words.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""The page's files in the package `kvroute.ui`; there are no others under `/ui`."""
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_PATHS: Final = {
    "inference": ["/v1/chat/completions", "/v1/completions", "/v1/models"],
    "documentation": "/docs",
    "page": PAGE,
    "health": ["/health", "/ready"],
    "metrics": "/metrics",
    "admin": ADMIN,
}


def page_routes(live: LiveFigures) -> APIRouter:
    """The page and its data. `AdminGuard` has checked the admin key of the routes under `/admin`."""
    routes = APIRouter()
    folder = files("kvroute") / "ui"

    @routes.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        # `*/*` is curl, which wants no page.
        if "text/html" in request.headers.get("accept", ""):
            # Relative, because a proxy may publish the gateway below a path that it does not tell.
            return RedirectResponse(PAGE.lstrip("/"), status_code=307, headers={"vary": "accept"})
        body: dict[str, Any] = {"name": "kvroute", "version": __version__, "paths": _PATHS}
        return JSONResponse(body, headers={"vary": "accept"})

    @routes.get(PAGE, include_in_schema=False)
    def page() -> Response:
        return asset("page.html")

    def serve(name: str) -> None:
        # In a thread, as FastAPI runs plain functions: the files are read from the disk.
        @routes.get(f"{PAGE}/{name}", include_in_schema=False, name=name)
        def file() -> Response:
            return asset(name)

    def asset(name: str) -> Response:
        return Response((folder / name).read_bytes(), headers=_HEADERS, media_type=_TYPES[name])

    for name in _TYPES:
        serve(name)

    # Not in the schema: clients made from it would wait for the end of the answer.
    @routes.get(f"{ADMIN}/live", include_in_schema=False)
    async def stream() -> StreamingResponse:
        lines: AsyncIterator[bytes] = live.open()
        return StreamingResponse(
            lines, media_type="application/x-ndjson", headers={"cache-control": "no-store"}
        )

    @routes.get(
        f"{ADMIN}/what-if",
        tags=["admin"],
        summary="What another strategy would have done with the last requests",
    )
    async def what_if(strategy: str, limit: int = Query(1000, ge=1, le=1000)) -> dict[str, Any]:
        return await live.what_if(strategy, limit)

    return routes
