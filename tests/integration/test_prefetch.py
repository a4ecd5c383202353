"""While a request waits in its worker's queue, its blocks in L2 set out for L1: real sockets throughout."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.support.sockets import tcp_server

from kvroute.blocks.chunks import ChunkScheme, chunk_names
from kvroute.sim.publisher import Fault

MODEL = "sim-model"
CHUNK = 16
PROMPT = list(range(1000, 1200))
IN_L2 = len(PROMPT) // CHUNK * CHUNK


class LMCacheServer:
    """A worker's LMCache server with one prompt's chunks in L2. `asked` collects the prefetch requests."""

    def __init__(self, status: int) -> None:
        self.asked: list[dict[str, Any]] = []
        self._status = status

    async def join(self, coordinator: str, port: int) -> None:
        """Register with the coordinator as a server on `port`, and report the prompt's chunks."""
        key = {"model_name": MODEL, "kv_rank": 0x01000100, "object_group_id": 0, "cache_salt": ""}
        entries = [
            {"key": key | {"chunk_hash_hex": name.hex()}, "size_bytes": 1}
            for name in chunk_names(PROMPT, ChunkScheme(chunk_tokens=CHUNK))
        ]
        batch = {
            "instance_id": "w0",
            "incarnation": 1000,
            "seq": 1,
            "event_type": "store",
            "tier": "l2",
            "backend": "resp",
            "entries": entries,
            "shared": True,
        }
        async with httpx.AsyncClient(base_url=f"http://{coordinator}", trust_env=False) as client:
            instance = {"instance_id": "w0", "ip": "127.0.0.1", "http_port": port}
            assert (await client.post("/instances", json=instance)).status_code == 200
            assert (await client.post("/events", json={"batches": [batch]})).json()["applied"] == 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status, body = 404, b"{}"
        if head.startswith(b"POST /cache/prefetches "):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            self.asked.append(json.loads(await reader.readexactly(length)))
            status, body = self._status, b'{"request_id": "r", "chunks": 12, "status": "submitted"}'
        lines = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body))
        writer.write(lines + body)


def sections(*, prefetch: bool) -> dict[str, Any]:
    return {
        # By the gateway's estimate each earlier request delays the next one by minutes.
        "routing": {"strategy": "kvaware", "costs": {"token_us": 1e6}},
        "tokens": {"timeout_ms": 10_000, "computed_samples": False},
        "lmcache": {
            "coordinator": {"enabled": True, "listen": "127.0.0.1:0", "chunk_tokens": CHUNK},
            "prefetch": {"enabled": prefetch, "delay_s": 0, "timeout_s": 20},
        },
    }


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 4})


def counted(running, outcome: str) -> float:
    metrics = running.runtime.metrics.registry
    return metrics.get_sample_value("kvroute_lmcache_prefetches_total", {"outcome": outcome}) or 0.0


@pytest.mark.parametrize(("status", "outcome"), [(202, "submitted"), (503, "refused")])
async def test_a_request_that_waits_has_its_blocks_brought(run_gateway, instant_sim, status, outcome) -> None:
    server = LMCacheServer(status)
    async with (
        tcp_server(server.serve) as port,
        run_gateway([instant_sim.url], **sections(prefetch=True)) as running,
    ):
        await running.until(lambda: not running.runtime.cache_tracker.notes())
        await server.join(running.runtime.cache_tracker.lmcache.coordinator_address, port)
        instant_sim.worker.faults.add(Fault(kind="hang", path="/v1/completions"))
        before = asyncio.create_task(complete(running.client, list(range(5000, 5100))))
        await running.until(lambda: running.runtime.fleet.workers()[0].load.in_flight)

        answer = await complete(running.client, PROMPT)
        await running.until(lambda: counted(running, outcome) == 1)
        before.cancel()

    assert answer.status_code == 200
    assert answer.headers["x-kvroute-hit-tiers"] == f"gpu=0;l1=0;l2={IN_L2}"
    assert server.asked == [
        {
            "model_name": MODEL,
            "world_size": 1,
            "token_ids": PROMPT[:IN_L2],
            "cache_salt": "",
            "source_tier": "l2",
            "target_tier": "l1",
        }
    ]


@pytest.mark.parametrize("prefetch", [False, True])
async def test_without_a_queue_or_without_the_option_nothing_is_prefetched(
    run_gateway, instant_sim, prefetch
) -> None:
    server = LMCacheServer(202)
    async with (
        tcp_server(server.serve) as port,
        run_gateway([instant_sim.url], **sections(prefetch=prefetch)) as running,
    ):
        await running.until(lambda: not running.runtime.cache_tracker.notes())
        await server.join(running.runtime.cache_tracker.lmcache.coordinator_address, port)
        if not prefetch:
            instant_sim.worker.faults.add(Fault(kind="hang", path="/v1/completions"))
            before = asyncio.create_task(complete(running.client, list(range(5000, 5100))))
            await running.until(lambda: running.runtime.fleet.workers()[0].load.in_flight)

        answer = await complete(running.client, PROMPT)
        if not prefetch:
            before.cancel()
        else:
            assert running.metric("kvroute_lmcache_prefetches_total") == 0

    assert answer.headers["x-kvroute-hit-tiers"] == f"gpu=0;l1=0;l2={IN_L2}"
    assert server.asked == []
