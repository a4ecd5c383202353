"""The simulated worker's side of a transfer between workers: vLLM's NixlConnector, over HTTP.

A first leg (`do_remote_decode`) keeps its blocks after its end and reports where they are. A second leg
(`do_remote_prefill`) asks the other worker for them before it is queued; then they count as computed. Member
names, defaults and errors are those of vLLM 0.32; the side channel is `POST /sim/kv/{remote_request_id}`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvroute.sim.http import SSE, ApiError, Call, ExchangeEnded

if TYPE_CHECKING:
    from kvroute.sim.driver import Generation
    from kvroute.sim.engine import EngineRequest
    from kvroute.sim.worker import SimWorker

_TIMEOUT_S = 2.0


@dataclass(slots=True)
class TransferState:
    """The blocks that wait for a decode worker, and counters. Mutable: by the functions of this module."""

    engine_id: str = ""
    kept: dict[str, EngineRequest] = field(default_factory=dict)
    """Finished first legs whose blocks no worker has read yet, by request id."""
    reads: int = 0
    """Transfers into this worker."""
    failed: int = 0
    """Transfers into this worker that failed."""
    expired: int = 0
    """First legs whose blocks nobody read within the lease."""
    seconds: float = 0.0
    """Simulated time of the transfers into this worker."""


async def fetched_tokens(call: Call, worker: SimWorker, params: Mapping[str, Any], *, streamed: bool) -> int:
    """The number of prompt tokens that another worker has sent for this request; 0 if it names no worker.

    After a failed read vLLM ends the request with an error (`kv_load_failure_policy: fail`) or computes the
    prompt (`recompute`). A stream then has status 200 and an error event. Raises `ApiError` and
    `ExchangeEnded`.
    """
    if not worker.options.nixl or not params.get("do_remote_prefill"):
        return 0
    state = worker.transfers
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            tokens = await _read(params)
    except (OSError, ValueError, TimeoutError, LookupError):
        state.failed += 1
        if worker.options.kv_load_failure_policy == "recompute":
            return 0
        error = ApiError(500, "InternalServerError", "KV load failure: remote blocks could not be read.")
        if not streamed:
            raise error from None
        await call.start(200, [SSE])
        await call.chunk(b"data: " + msgspec.json.encode(error.body()) + b"\n\ndata: [DONE]\n\n")
        await call.end()
        raise ExchangeEnded from None
    seconds = tokens * worker.options.transfer_token_s * worker.options.time_scale
    state.reads += 1
    state.seconds += seconds
    if seconds:
        await worker.clock.sleep(seconds)
    return tokens


async def _read(params: Mapping[str, Any]) -> int:
    """Ask the prefill worker for the blocks; it frees them. Raises OSError, ValueError and LookupError."""
    host, port, request_id = params["remote_host"], int(params["remote_port"]), params["remote_request_id"]
    reader, writer = await asyncio.open_connection(str(host), port)
    try:
        writer.write(
            f"POST /sim/kv/{request_id}?engine={params['remote_engine_id']} HTTP/1.1\r\nhost: {host}\r\n"
            "content-length: 0\r\nconnection: close\r\n\r\n".encode()
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise LookupError(request_id)
    return int(json.loads(body)["tokens"])


def kept_params(call: Call, worker: SimWorker, generation: Generation) -> dict[str, Any] | None:
    """The `kv_transfer_params` of an answer: where its blocks are; None if it was no first leg."""
    first = generation.requests[0]
    if not first.keeps_blocks:
        return None
    state = worker.transfers
    # vLLM returns the parameters of the last sequence; blocks of the others stay until the lease ends.
    ids = [f"{call.header(b'x-request-id') or 'request'}-{id(each):x}" for each in generation.requests]
    for request_id, request in zip(ids, generation.requests, strict=True):
        state.kept[request_id] = request
        worker.run_in_background(_expire(worker, request_id, request))
    last = generation.requests[-1]
    host, port = worker.place
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[id(block) % 100_000 for block in last.blocks]],
        "remote_engine_id": state.engine_id,
        "remote_request_id": ids[-1],
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": last.prompt_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": last.cached_tokens,
    }


async def _expire(worker: SimWorker, request_id: str, request: EngineRequest) -> None:
    await worker.clock.sleep(worker.options.kv_lease_s)
    if worker.transfers.kept.get(request_id) is request:
        worker.transfers.expired += 1
        _free(worker, request_id)


def _free(worker: SimWorker, request_id: str) -> EngineRequest:
    request = worker.transfers.kept.pop(request_id)
    worker.engine.free_kept(request)
    return request


async def read_blocks(call: Call, worker: SimWorker) -> None:
    """POST /sim/kv/{request id}: another worker reads the blocks of a first leg, which are then free."""
    request_id = call.path.rpartition("/")[2]
    engine = call.scope["query_string"].decode("latin-1").partition("=")[2]
    if request_id not in worker.transfers.kept or engine != worker.transfers.engine_id:
        raise ApiError.not_found("These blocks are not here.")
    await call.respond({"tokens": _free(worker, request_id).prompt_tokens})
