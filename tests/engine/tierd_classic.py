"""Runs in the engine's environment: LMCache's in-process connector, which carries out commands from stdin.

    python tierd_classic.py URL SHARED_MEMORY_NAME

Commands are JSON lines: {"do": "put" | "get", "keys": n, "fill": n}. Each is answered by a JSON line after
"answer". A "get" says which keys were found, and which of those have every byte of their own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.sagemaker_hyperpod_connector import SageMakerHyperPodConnector

CHUNK = 64
SHAPE = torch.Size([2, 4, CHUNK, 128])


class Backend:
    """What the connector uses of LMCache's local CPU backend."""

    def __init__(self) -> None:
        self.config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK)
        self.metadata = LMCacheMetadata(
            model_name="tiny",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(4, 2, CHUNK, 4, 32),
            chunk_size=CHUNK,
        )
        self._allocator = AdHocMemoryAllocator(device="cpu")

    def allocate(self, shape, dtype, fmt=MemoryFormat.KV_2LTD, **_):
        return self._allocator.allocate(shape, dtype, fmt)


def key(number: int, fill: int) -> CacheEngineKey:
    return CacheEngineKey("tiny", 1, 0, fill * 1000 + number, torch.bfloat16)


async def carry_out(connector, backend, command) -> object:
    count, fill = command["keys"], command["fill"]
    keys = [key(number, fill) for number in range(count)]
    if command["do"] == "put":
        objects = []
        for number in range(count):
            memory = backend.allocate(SHAPE, torch.bfloat16)
            memory.tensor.fill_(fill * count + number)
            objects.append(memory)
        await connector.batched_put(keys, objects)
        return connector.stats["put_failure"]
    found = await connector.batched_get(keys)
    hits = [number for number, memory in enumerate(found) if memory is not None]
    right = [number for number in hits if bool((found[number].tensor == fill * count + number).all())]
    return {"found": hits, "right": right}


def main() -> None:
    url, name = sys.argv[1:]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    backend = Backend()

    async def connect() -> SageMakerHyperPodConnector:
        return SageMakerHyperPodConnector(
            url, loop, backend, "lmcache", name, max_concurrent_requests=100, max_connections=256,
            max_connections_per_host=128, timeout_ms=5000, lease_ttl_s=30.0,
        )  # fmt: skip

    connector = asyncio.run_coroutine_threadsafe(connect(), loop).result(60)
    print("answer", json.dumps("ready"), flush=True)
    for line in sys.stdin:
        done = asyncio.run_coroutine_threadsafe(carry_out(connector, backend, json.loads(line)), loop)
        print("answer", json.dumps(done.result(60)), flush=True)
    asyncio.run_coroutine_threadsafe(connector.close(), loop).result(60)


if __name__ == "__main__":
    main()
