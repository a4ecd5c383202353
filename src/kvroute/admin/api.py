"""The admin API: workers, index, decisions, configuration. `AdminGuard` has checked the requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Protocol

from fastapi import APIRouter, Depends, Query, Request
from fastapi.security import HTTPBearer
from pydantic import ValidationError

from kvroute.admin.engine_control import ACTIONS, EngineControl
from kvroute.admin.guard import ADMIN, KEY_FINGERPRINT
from kvroute.clock import Clock
from kvroute.errors import InvalidRequest
from kvroute.fleet.fleet import DrainProgress, Fleet, progress_of, until_drained
from kvroute.fleet.load import describe_foreign
from kvroute.fleet.options import WorkerEntry
from kvroute.fleet.worker import Worker
from kvroute.http.asgi import read_body
from kvroute.journal.journal import Journal
from kvroute.openai.request import parse_object
from kvroute.relay.poison import LostRequests
from kvroute.routing.audit import Audit
from kvroute.routing.router import Router

audit_log = logging.getLogger("kvroute.admin")
"""One line for each change: what, to which worker, from which address and with which key's fingerprint."""

_MAX_BODY_BYTES = 64 * 1024


class PeerProcesses(Protocol):
    """Adds the data of other gateway processes at the same address to the data of this process, `own`."""

    async def decisions(self, limit: int, request_id: str, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The last decisions of all processes, newest first; see `Journal.decisions`."""
        ...

    async def predictions(self, own: dict[str, Any]) -> dict[str, Any]:
        """The sum of `Audit.describe` over all processes."""
        ...


def admin_routes(
    fleet: Fleet,
    router: Router,
    journal: Journal,
    clock: Clock,
    masked_config: Callable[[], Mapping[str, Any]],
    audit: Audit,
    caches: Callable[[], Mapping[str, Any]],
    peers: PeerProcesses | None = None,
    members: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
    engines: EngineControl | None = None,
    lost: LostRequests | None = None,
) -> APIRouter:
    """The routes under /admin.

    `masked_config` returns the resolved configuration without secrets, `caches` the state of the cache map.
    `peers` are the other processes, if there are any; `members` describes this process and those of other
    gateways. `engines` passes requests to workers. `lost` are the bodies that have lost workers.
    """

    # Only declares the key, for /docs.
    bearer = Depends(HTTPBearer(auto_error=False, scheme_name="admin key"))
    routes = APIRouter(prefix=ADMIN, tags=["admin"], dependencies=[bearer])

    @routes.get("/workers", summary="Every worker with its state, facts and load")
    async def workers() -> dict[str, Any]:
        return {"workers": [_described(worker, router, clock.now()) for worker in fleet.workers()]}

    @routes.post(
        "/workers",
        summary="Add a worker",
        status_code=201,
        openapi_extra={
            "requestBody": {"content": {"application/json": {"schema": WorkerEntry.model_json_schema()}}}
        },
    )
    async def add(request: Request) -> dict[str, Any]:
        body = await read_body(request.receive, request.scope["headers"], _MAX_BODY_BYTES)
        try:
            entry = WorkerEntry.model_validate(parse_object(body))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidRequest(f"{where or 'body'}: {first['msg']}", param=where or None) from None
        added = fleet.add(entry.spec())
        _audit(request, "added", added)
        return _described(added, router, clock.now())

    @routes.get("/workers/{worker_id}", summary="One worker")
    async def worker(worker_id: str) -> dict[str, Any]:
        return _described(fleet.get(worker_id), router, clock.now())

    @routes.delete("/workers/{worker_id}", summary="Remove a worker; its running requests finish")
    async def remove(worker_id: str, request: Request) -> dict[str, Any]:
        removed = fleet.get(worker_id)
        fleet.remove(removed.id)
        _audit(request, "removed", removed)
        return {"removed": removed.id, "running_requests": removed.load.in_flight}

    @routes.post(
        "/workers/{worker_id}/drain",
        summary="Send the worker no new requests, wait for running ones, report progress",
    )
    async def drain(
        worker_id: str, request: Request, wait_s: float = Query(0.0, ge=0, le=3600)
    ) -> dict[str, Any]:
        fleet.drain(worker_id)
        _audit(request, "drained", fleet.get(worker_id))
        return _progress(await until_drained(fleet.get(worker_id), clock, timeout_s=wait_s))

    @routes.get("/workers/{worker_id}/drain", summary="Progress of a drain")
    async def drain_progress(worker_id: str) -> dict[str, Any]:
        return _progress(progress_of(fleet.get(worker_id)))

    @routes.delete("/workers/{worker_id}/drain", summary="Stop a drain: the worker gets requests again")
    async def undrain(worker_id: str, request: Request) -> dict[str, Any]:
        returned = fleet.get(worker_id)
        fleet.undrain(returned.id)
        _audit(request, "undrained", returned)
        return _described(returned, router, clock.now())

    def pass_through(control: EngineControl, action: str) -> None:
        @routes.post(f"/workers/{{worker_id}}/{action}", summary=f"Pass /{action} to a worker", name=action)
        async def to_one(worker_id: str, request: Request) -> dict[str, Any]:
            worker = fleet.get(worker_id)
            answer = await control.send(worker, action, request.url.query)
            _audit(request, f"got /{action}", worker)
            return {"worker": worker.id, "answer": answer}

        @routes.post(f"/{action}", summary=f"Pass /{action} to every worker", name=f"{action} all")
        async def to_all(request: Request) -> dict[str, Any]:
            chosen = fleet.workers()
            answers = await control.send_to_all(chosen, action, request.url.query)
            for worker in chosen:
                _audit(request, f"got /{action}", worker)
            return {"workers": answers}

    if engines is not None:
        for action in ACTIONS:
            pass_through(engines, action)

    @routes.get("/index", summary="What the prefix index holds, per worker")
    async def index() -> dict[str, Any]:
        return router.describe_index(fleet.workers()) | {"caches": caches()}

    @routes.get("/audit", summary="Predicted against reported cached tokens, by strategy, worker and tier")
    async def predictions() -> dict[str, Any]:
        own = audit.describe()
        whole = own if peers is None else await peers.predictions(own)
        fetched = {worker.id: worker.facts.fetched.total for worker in fleet.workers()}
        for row in whole["transfers"]:
            row["fetched_tokens"] = fetched.get(row["worker"])
        return whole

    @routes.get("/decisions", summary="The last routing decisions, newest first, with their arithmetic")
    async def decisions(
        limit: int = Query(100, ge=1, le=1000),
        request_id: str = Query("", description="Only requests whose id contains this text."),
    ) -> dict[str, Any]:
        own = journal.decisions(limit, request_id)
        return {"decisions": own if peers is None else await peers.decisions(limit, request_id, own)}

    if lost is not None:
        lost_routes(routes, lost)

    @routes.get("/members", summary="The gateway processes that share with this one: lag, release, gaps")
    async def all_members() -> dict[str, Any]:
        return {"members": members()}

    @routes.get("/config", summary="The resolved configuration, secrets masked")
    async def config() -> Mapping[str, Any]:
        return masked_config()

    return routes


def lost_routes(routes: APIRouter, lost: LostRequests) -> None:
    """Add the routes below /admin/lost-requests."""

    @routes.get("/lost-requests", summary="Bodies that have lost workers, by hash, the last one first")
    async def listed() -> dict[str, Any]:
        return {"lost_requests": lost.describe()}

    @routes.delete("/lost-requests", summary="Forget all of them; refused bodies are served again")
    async def clear_all(request: Request) -> dict[str, Any]:
        return cleared(request, b"")

    @routes.delete("/lost-requests/{digest}", summary="Forget one of them")
    async def clear(digest: str, request: Request) -> dict[str, Any]:
        try:
            known = bytes.fromhex(digest)
        except ValueError:
            known = b""
        if not known:
            raise InvalidRequest("The hash is not hexadecimal.", param="digest")
        return cleared(request, known)

    def cleared(request: Request, digest: bytes) -> dict[str, Any]:
        count = lost.clear(digest)
        audit_log.info(
            "%d bodies that have lost workers cleared through the admin API",
            count,
            extra={
                "client": _client_address(request),
                "key_fingerprint": request.scope[KEY_FINGERPRINT],
            },
        )
        return {"cleared": count}


def _audit(request: Request, change: str, worker: Worker) -> None:
    audit_log.info(
        "worker %s %s through the admin API",
        worker.id,
        change,
        extra={
            "worker_url": worker.spec.url,
            "client": _client_address(request),
            "key_fingerprint": request.scope[KEY_FINGERPRINT],
        },
    )


def _client_address(request: Request) -> str:
    """The client's address, from a trusted proxy's header if there is one.

    "unknown" if it is not an address, so that a client cannot write other text into an audit line.
    """
    client = request.client
    try:
        return str(ip_address(client.host)) if client is not None else "unknown"
    except ValueError:
        return "unknown"


def _progress(progress: DrainProgress) -> dict[str, Any]:
    return {"worker": progress.worker, "running_requests": progress.in_flight, "drained": progress.is_done}


def _described(worker: Worker, router: Router, now: float) -> dict[str, Any]:
    facts = worker.facts
    return {
        "id": worker.id,
        "url": worker.spec.url,
        "role": worker.role.value,
        "state": worker.state.value,
        "trouble": worker.trouble or worker.asleep or None,
        "models": sorted(worker.models),
        "adapters": dict(facts.adapters),
        "capacity_tokens": worker.capacity_tokens,
        "block_size": worker.block_size,
        "start_time": facts.start_time,
        "running_requests": worker.load.in_flight,
        "active_tokens": worker.load.active_tokens,
        "foreign": describe_foreign(worker.load, now),
        **router.describe_worker(worker),
    }
