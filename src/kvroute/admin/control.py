"""The gateway's own endpoints: health, models, metrics, explain, sessions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvroute import __version__
from kvroute.access.client_keys import check_model, permits_model
from kvroute.errors import NotFound
from kvroute.fleet.fleet import Fleet
from kvroute.http.asgi import read_body
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.rewriting import check_response_owner
from kvroute.relay.dataplane import DataPlane
from kvroute.relay.planner import tenant_session
from kvroute.routing.router import Router

_EXPLAINED = ENDPOINTS["/invocations"]
"""The endpoint that accepts the JSON body of every other endpoint."""


def control_routes(
    plane: DataPlane,
    fleet: Fleet,
    router: Router,
    notes: Callable[[], list[str]] = list,
    scrape: Callable[[], Awaitable[Collector]] | None = None,
) -> APIRouter:
    """All routes except the relayed endpoints and the admin API.

    `notes` returns notes for `/ready`. `scrape` collects the metrics of all gateway processes, if there are
    several.
    """
    routes = APIRouter()

    def with_key(request: Request) -> None:
        plane.entry_control.keys.check(request.scope["headers"])

    keyed = [Depends(with_key)]

    def cards(request: Request) -> list[Mapping[str, object]]:
        """The models that the request's key permits."""
        client = plane.entry_control.keys.client(request.scope["headers"])
        return [
            card
            for card in fleet.models()
            if client is None or permits_model(client, str(card["id"]), fleet.resolve)
        ]

    @routes.get("/health", tags=["gateway"], summary="The gateway's process is alive")
    @routes.get("/ping", tags=["gateway"], summary="The gateway's process is alive", operation_id="ping")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get(
        "/ready", tags=["gateway"], summary="A routable worker exists; 503 with the reasons otherwise"
    )
    async def ready() -> JSONResponse:
        reasons = list(fleet.reasons_not_ready())
        if plane.entry_control.is_shutting_down:
            reasons = ["the gateway is shutting down"]
        workers = {worker.id: worker.state.value for worker in fleet.workers()}
        body: dict[str, Any] = {
            "ready": not reasons,
            "reasons": reasons,
            "workers": workers,
            "notes": notes() if reasons else [*fleet.problems(), *notes()],
        }
        return JSONResponse(body, status_code=503 if reasons else 200)

    @routes.get("/version", tags=["gateway"], summary="Version of the gateway")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/metrics", tags=["gateway"], summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        figures = plane.metrics.registry if scrape is None else await scrape()
        return Response(encode(figures), media_type=content_type)

    @routes.get(
        "/v1/models",
        tags=["gateway"],
        summary="Models, adapters and aliases of the whole fleet",
        dependencies=keyed,
    )
    async def models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": cards(request)}

    @routes.get(
        "/engines",
        tags=["gateway"],
        summary="Workers with their models, as in production-stack's router",
        dependencies=keyed,
    )
    async def engines(request: Request) -> list[dict[str, Any]]:
        client = plane.entry_control.keys.client(request.scope["headers"])
        found = []
        for worker in fleet.workers():
            models = [
                name
                for name in sorted(worker.models)
                if client is None or permits_model(client, name, fleet.resolve)
            ]
            if models and worker.is_routable:
                created = int(worker.facts.start_time or fleet.created)
                found.append({"engine_id": worker.id, "serving_models": models, "created": created})
        return found

    @routes.get("/v1/models/{model_id:path}", tags=["gateway"], summary="One model", dependencies=keyed)
    async def model(model_id: str, request: Request) -> dict[str, Any]:
        for card in cards(request):
            if card["id"] == model_id:
                return dict(card)
        raise NotFound(
            f"The model {model_id!r} does not exist on this gateway.", param="model", code="model_not_found"
        )

    @routes.post(
        "/v1/route/explain",
        tags=["gateway"],
        summary="How an inference body would be routed, without forwarding it",
        dependencies=keyed,
        openapi_extra={
            "requestBody": {
                "content": {"application/json": {"schema": {"type": "object", "additionalProperties": True}}}
            }
        },
    )
    async def explain(request: Request) -> dict[str, Any]:
        headers = request.scope["headers"]
        body = await read_body(request.receive, headers, plane.max_body_bytes)
        parsed = await plane.bodies.read_in_steps(_EXPLAINED, body, headers)
        plane.invocations.named(parsed, headers, is_sent=False)
        client = plane.entry_control.keys.client(headers)
        if client is not None:
            check_model(client, parsed.model, fleet.resolve)
        parsed.tenant = plane.tenant(headers)
        previous = parsed.text("previous_response_id")
        if previous:
            check_response_owner(parsed.tenant, previous, "previous_response_id")
        owner = await plane.stored.find(previous) if previous else plane.invocations.owner(parsed, headers)
        model = plane.planner.model_to_tokenize(parsed, headers)
        prepared = None
        if model is not None and plane.preparer is not None:
            prepared = await plane.preparer.prepare(parsed, model)
        plan = plane.planner.plan(
            parsed,
            b"",
            headers,
            plane.clock.now(),
            owner,
            with_session=True,
            prepared=prepared,
            fields=b"".join(
                b"%b: %b\r\n" % field for field in headers if field[0] not in plane.hidden_fields
            ),
        )
        unroutable = [
            {
                "worker": worker.id,
                "filter": worker.state.value if worker.serves(plan.model) else "other_model",
            }
            for worker in fleet.workers()
            if all(worker is not candidate.worker for candidate in plan.decision.ranking)
        ]
        return {
            "model": plan.model,
            "worker": plan.decision.ranking[0].worker.id,
            "session_key_found": plan.query.session_key is not None,
            "parent_session_found": plan.query.parent_session is not None,
            "session_worker": plan.query.session_worker,
            "session_worker_is_parents": plan.query.from_parent,
            **router.explain(plan.query, plan.decision),
            "filtered": unroutable,
            **({} if plane.queue is None else {"admission": plane.queue.describe(plan.model)}),
        }

    @routes.delete(
        "/sessions/{session_key:path}", tags=["gateway"], summary="Forget a session", dependencies=keyed
    )
    async def forget_session(session_key: str, request: Request) -> dict[str, Any]:
        tenant = plane.tenant(request.scope["headers"])
        stored = tenant_session(tenant, session_key) if tenant else session_key
        return {"session": session_key, "forgotten": router.forget_session(stored)}

    return routes
