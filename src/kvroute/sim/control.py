"""The endpoints of the simulated worker that compute nothing: models, health, sleep mode, event sources,
faults, received requests.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any, Final
from urllib.parse import parse_qs

from pydantic import ValidationError

from kvroute.sim.http import ApiError, Call
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault
from kvroute.sim.worker import SimWorker


async def models(call: Call, worker: SimWorker) -> None:
    """GET /v1/models: the served names, then the adapters with their parents."""
    created = int(worker.start_time)

    def card(name: str, parent: str | None) -> dict[str, Any]:
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            # All names of the model have the same root; an adapter has its own root (vLLM 0.32).
            "root": (worker.options.root or worker.options.models[0]) if parent is None else name,
            "parent": parent,
            "max_model_len": worker.max_model_len if parent is None else None,
            "permission": [permission],
        }

    cards = [card(name, None) for name in worker.options.models]
    cards += [card(name, parent) for name, parent in worker.options.loras.items()]
    await call.respond({"object": "list", "data": cards})


async def health(call: Call, worker: SimWorker) -> None:
    """GET /health and /ping: an empty 200."""
    await call.respond_raw(b"", 200, [])


async def version(call: Call, worker: SimWorker) -> None:
    await call.respond({"version": worker.options.version})


async def kv_event_sources(call: Call, worker: SimWorker) -> None:
    """GET /kv_event_sources: the bound addresses by data-parallel rank."""
    sources: dict[str, Any] = {}
    for publisher in worker.publishers:
        sources |= publisher.sources()
    await call.respond(sources)


async def reset_prefix_cache(call: Call, worker: SimWorker) -> None:
    """POST /reset_prefix_cache: as in vLLM, refused while requests run; the event follows in the next
    iteration."""
    done = [engine.reset_prefix_cache() for engine in worker.engines]
    await call.respond({"success": all(done)})


async def sleep(call: Call, worker: SimWorker) -> None:
    """POST /sleep: ends what runs, pauses the engine and, from level 1 on, clears its cache."""
    level = _parameter(call, "level") or "1"
    if level not in ("0", "1", "2"):
        raise ApiError.validation("int_parsing", "query.level", "Input should be 0, 1 or 2")
    _pause(worker, clears=level != "0")
    worker.sleep_level = int(level)
    worker.sleeps += 1
    await call.respond({"status": "sleeping", "level": worker.sleep_level})


async def wake_up(call: Call, worker: SimWorker) -> None:
    """POST /wake_up."""
    worker.sleep_level = None
    for driver in worker.drivers:
        driver.resume()
    await call.respond({"status": "awake", "tags": None})


async def is_sleeping(call: Call, worker: SimWorker) -> None:
    """GET /is_sleeping: true while the engine is paused, too (vLLM 0.32)."""
    await call.respond({"is_sleeping": worker.sleep_level is not None or worker.driver.is_paused})


async def pause(call: Call, worker: SimWorker) -> None:
    """POST /pause: ends what runs, pauses the engine and clears its cache unless `clear_cache=false`."""
    _pause(worker, clears=_parameter(call, "clear_cache") not in ("false", "0"))
    await call.respond({"status": "paused"})


async def resume(call: Call, worker: SimWorker) -> None:
    """POST /resume."""
    for driver in worker.drivers:
        driver.resume()
    await call.respond({"status": "resumed"})


async def is_paused(call: Call, worker: SimWorker) -> None:
    """GET /is_paused."""
    await call.respond({"is_paused": worker.driver.is_paused})


def _pause(worker: SimWorker, *, clears: bool) -> None:
    for driver in worker.drivers:
        driver.abort_all()
        driver.pause()
        if clears:
            driver.engine.reset_prefix_cache()


def _parameter(call: Call, name: str) -> str | None:
    values = parse_qs(call.scope["query_string"].decode("latin-1")).get(name)
    return values[-1] if values else None


async def faults(call: Call, worker: SimWorker) -> None:
    """/sim/faults: POST adds a fault or a list of faults, GET lists the faults, DELETE clears them.

    POST with `{"restart": true}`, `{"capacity_tokens": n}`, `{"max_queued_requests": n}` or
    `{"max_queued_tokens": n}` takes effect immediately and is no fault: DELETE does not undo it.
    """
    if call.method == "DELETE":
        worker.faults.clear()
    elif call.method == "POST":
        given = call.json_value()
        for item in given if isinstance(given, list) else [given]:
            _apply(worker, item)
    await call.respond({"faults": worker.faults.listing()})


_LIMITS: Final = frozenset({"max_queued_requests", "max_queued_tokens"})


def _apply(worker: SimWorker, item: Any) -> None:
    if isinstance(item, dict) and item.get("restart") is True:
        worker.restart()
    elif isinstance(item, dict) and isinstance(item.get("capacity_tokens"), int):
        for engine in worker.engines:
            engine.cache.resize(worker.options.pool_blocks(item["capacity_tokens"]))
    elif isinstance(item, dict) and item.keys() <= _LIMITS and item:
        try:
            options = {**worker.options.model_dump(), **item}
            worker.options = SimOptions.model_validate(options)
        except ValidationError as exc:
            raise ApiError(400, "BadRequestError", str(exc)) from exc
    else:
        try:
            worker.faults.add(Fault.model_validate(item))
        except ValidationError as exc:
            raise ApiError(400, "BadRequestError", str(exc)) from exc


async def requests(call: Call, worker: SimWorker) -> None:
    """GET /sim/requests: counts and the last requests as received, oldest first, without those to /sim/."""
    await call.respond(
        {
            "requests": [
                {
                    "method": request.method,
                    "target": request.target,
                    "headers": [
                        [key.decode("latin-1"), value.decode("latin-1")] for key, value in request.headers
                    ],
                    "body": base64.b64encode(request.body).decode(),
                }
                for request in worker.received
            ],
            "received": worker.counters.requests,
            "by_path": dict(worker.counters.by_path),
            "finished": dict(sum((driver.finished for driver in worker.drivers), Counter())),
            "chunks": worker.counters.chunks,
            "running": sum(engine.running for engine in worker.engines),
            "waiting": sum(engine.waiting for engine in worker.engines),
            "computed_tokens": sum(engine.counters.computed_tokens for engine in worker.engines),
            "cached_tokens": sum(engine.counters.cache_hits for engine in worker.engines),
        }
    )


async def cache(call: Call, worker: SimWorker) -> None:
    """GET /sim/cache: the keys of all full blocks (`blocks.keys.block_keys` of token ids) of all ranks, and
    the block size in tokens."""
    keys = {key for engine in worker.engines for key in engine.cache.held_keys}
    await call.respond({"block_size": worker.options.key_tokens, "keys": sorted(keys)})


async def clear_requests(call: Call, worker: SimWorker) -> None:
    """DELETE /sim/requests: clear the recorded requests."""
    worker.received.clear()
    await call.respond({"requests": []})
