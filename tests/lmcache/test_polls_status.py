"""Polls of servers' `/status`, with registrations and events over the coordinator's HTTP application."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from tests.support.certificates import Authority
from tests.support.clocks import ManualClock
from tests.support.sockets import tcp_server

from kvroute.blocks.chunks import ChunkScheme, PromptChunks, chunk_names
from kvroute.caches.tracker import lmcache_client
from kvroute.clock import SystemClock
from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.listeners import CoordinatorApp
from kvroute.lmcache.membership import Doubt, ServedWorker
from kvroute.lmcache.options import LMCacheOptions
from kvroute.lmcache.polls import StatusPoller
from kvroute.wire.lmcache_server import ServerRegistration

MODEL = "/models/tiny"
CHUNK = 16


def options_of(**coordinator: Any) -> LMCacheOptions:
    return LMCacheOptions(coordinator={"listen": "127.0.0.1:0", "chunk_tokens": CHUNK, **coordinator})


def batch(seq: int, chunks: list[bytes], event_type: str = "store") -> dict[str, Any]:
    return {
        "instance_id": "a",
        "incarnation": 1795173206,
        "seq": seq,
        "event_type": event_type,
        "tier": "l1",
        "backend": "dram",
        "entries": [
            {
                "key": {
                    "chunk_hash_hex": chunk.hex(),
                    "model_name": MODEL,
                    "kv_rank": 16777472,
                    "object_group_id": 0,
                    "cache_salt": "",
                },
                "size_bytes": 131072,
                "token_ids": [],
                "token_offset": -1,
            }
            for chunk in chunks
        ],
        "shared": False,
        "ts": 1795173206.5,
        "capacity_bytes": 0,
        "capacity_revision": 0,
    }


async def test_a_server_is_polled_for_its_chunk_size_and_its_object_count() -> None:
    """The answers are an error, then the right chunk size, then as many objects as the map has."""
    index, options, clock = ChunkIndex(), options_of(), SystemClock()
    coordinator = Coordinator(index, clock, options)
    app = CoordinatorApp(coordinator, clock, options.coordinator)
    coordinator.worker_changed(ServedWorker("a", "127.0.0.1", (0,), frozenset({MODEL})))
    tokens = list(range(64))
    names = chunk_names(tokens, ChunkScheme(chunk_tokens=8))
    polls: list[str] = []

    def status(request: httpx.Request) -> httpx.Response:
        polls.append(str(request.url))
        if len(polls) == 1:
            return httpx.Response(503)
        manager = {"total_object_count": len(names), "staging_object_count": 0}
        return httpx.Response(
            200, json={"chunk_size": 8, "storage_manager": {"l1_managers": {"_default": manager}}}
        )

    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://here") as lmcache,
        httpx.AsyncClient(transport=httpx.MockTransport(status)) as client,
    ):
        poller = StatusPoller(coordinator, client, clock, options.coordinator)
        await lmcache.post("/instances", json={"instance_id": "a", "ip": "127.0.0.1", "http_port": 8080})
        assert app.registered.is_set()
        await lmcache.post("/events", json={"batches": [batch(7, names)]})
        instance = coordinator.instance("a")
        assert instance is not None

        await poller.poll()
        assert (poller.failures, instance.doubt, index.match(PromptChunks(tokens), "", {})) == (
            1,
            Doubt.LATE,
            {},
        )
        await poller.poll()
        assert index.match(PromptChunks(tokens), "", {}) == {0: (64, 0)}
        await poller.poll()
        await poller.poll()

    assert instance.doubt is None
    assert polls == ["http://127.0.0.1:8080/status"] * 3


async def test_the_poller_polls_when_a_server_registers() -> None:
    options, clock = options_of(status_interval_s=3600), SystemClock()
    coordinator = Coordinator(ChunkIndex(), clock, options)
    app = CoordinatorApp(coordinator, clock, options.coordinator)
    polled = asyncio.Event()

    def status(request: httpx.Request) -> httpx.Response:
        polled.set()
        return httpx.Response(200, content=json.dumps({"chunk_size": 512}))

    async with httpx.AsyncClient(transport=httpx.MockTransport(status)) as client:
        poller = StatusPoller(coordinator, client, clock, options.coordinator)
        running = asyncio.create_task(poller.run(app.registered))
        await asyncio.sleep(0)
        lmcache = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")  # type: ignore[arg-type]
        async with lmcache, asyncio.timeout(10):
            await lmcache.post("/instances", json={"instance_id": "a", "ip": "::1", "http_port": 8080})
            await polled.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_server_whose_count_differs_is_polled_less_and_less_often() -> None:
    clock, options = ManualClock(0.0), options_of(status_interval_s=1)
    coordinator = Coordinator(ChunkIndex(), clock, options)
    app = CoordinatorApp(coordinator, clock, options.coordinator)
    polls: list[float] = []

    def status(request: httpx.Request) -> httpx.Response:
        polls.append(clock.time)
        managers = {"_default": {"total_object_count": 99}}
        return httpx.Response(200, json={"chunk_size": 16, "storage_manager": {"l1_managers": managers}})

    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://here") as lmcache,
        httpx.AsyncClient(transport=httpx.MockTransport(status)) as client,
    ):
        poller = StatusPoller(coordinator, client, clock, options.coordinator)
        await lmcache.post("/instances", json={"instance_id": "a", "ip": "127.0.0.1", "http_port": 8080})
        await lmcache.post("/events", json={"batches": [batch(7, [bytes(32)])]})
        for _ in range(60):
            await poller.poll(due_only=True)
            clock.time += 1

    assert polls == [0, 1, 3, 7, 15, 27, 39, 51]


async def test_a_server_behind_tls_is_polled_with_the_files(tmp_path: Path) -> None:
    """From the registration to the answer of a server that asks for a client certificate."""
    authority = Authority(tmp_path)
    own = authority.issue("own")
    files = {"ca_file": authority.file, "cert_file": own.cert, "key_file": own.key}
    options, clock = options_of(server_scheme="https", server_tls=files), SystemClock()
    coordinator = Coordinator(ChunkIndex(), clock, options)
    polls: list[bytes] = []
    refused: list[str] = []

    async def status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        polls.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    tls = authority.server(authority.issue("lmcache"), asks=True)
    own_client = lmcache_client(options.coordinator, refused.append)
    async with tcp_server(status, tls=tls) as port, own_client as client:
        coordinator.register(ServerRegistration("127.0.0.1", port, "a"))
        await StatusPoller(coordinator, client, clock, options.coordinator).poll()

    assert [poll.split(b" ")[1] for poll in polls] == [b"/status"]
    assert refused == []


def test_files_for_servers_without_tls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="server_scheme is https"):
        options_of(server_tls={"ca_file": tmp_path / "ca.pem"})
