"""The coordinator's listener, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvroute.blocks.chunks import ChunkScheme, chunk_names
from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.listeners import CoordinatorApp, CoordinatorServer
from kvroute.lmcache.options import CoordinatorOptions, LMCacheOptions

MODEL = "/models/tiny"
CHUNK = 16


def options_of(**coordinator: Any) -> LMCacheOptions:
    return LMCacheOptions(coordinator={"listen": "127.0.0.1:0", "chunk_tokens": CHUNK, **coordinator})


class Served:
    """A running coordinator with its listener, and an HTTP client like that of LMCache's servers."""

    def __init__(self, **options: Any) -> None:
        self.options = options_of(**options)
        self.index = ChunkIndex()
        clock = SystemClock()
        self.coordinator = Coordinator(self.index, clock, self.options)
        self.app = CoordinatorApp(self.coordinator, clock, self.options.coordinator)
        self.server = CoordinatorServer(self.app, self.coordinator, self.index, self.options.coordinator)
        self.http = httpx.AsyncClient(base_url=f"http://{self.server.bind()}", trust_env=False, timeout=10)
        self.task = asyncio.create_task(self.server.run())

    async def register(self, name: str, ip: str = "127.0.0.1") -> httpx.Response:
        body = {"instance_id": name, "ip": ip, "http_port": 8080, "metadata": {}, "mq_port": 0}
        return await self.http.post("/instances", json=body)

    async def aclose(self) -> None:
        await self.http.aclose()
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    yield served
    await served.aclose()


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


async def test_the_server_closes_idle_connections_not_the_coordinator(served: Served) -> None:
    """A server's client keeps an idle connection for 5 s, the time between two heartbeats, and sends a batch
    only once."""
    host, port = served.server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def heartbeat() -> bytes:
        writer.write(b"PUT /instances/a/heartbeat HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        return await reader.readuntil(b're-register"}')

    await heartbeat()
    loop = asyncio.get_running_loop()
    now = loop.time
    # The clock stays changed, because later timers are set by it; no other test uses this loop.
    loop.time = lambda: now() + 60  # type: ignore[method-assign]
    late = asyncio.Event()
    loop.call_later(0, late.set)  # runs after all timers of this minute
    await late.wait()

    assert (await heartbeat()).startswith(b"HTTP/1.1 404")
    writer.close()


async def test_a_server_registers_sends_heartbeats_and_leaves(served: Served) -> None:
    http = served.http
    answer = await served.register("a")
    assert (answer.status_code, answer.json()) == (200, {"instance_id": "a", "re_registered": False})
    assert (await served.register("a")).json()["re_registered"] is True
    answer = await http.put("/instances/a/heartbeat")
    assert (answer.status_code, answer.json()) == (200, {"instance_id": "a"})
    listed = (await http.get("/instances")).json()["instances"]
    assert [(each["instance_id"], each["ip"], each["http_port"]) for each in listed] == [
        ("a", "127.0.0.1", 8080)
    ]
    assert (await http.get("/healthz")).json() == {"status": "healthy"}
    assert (await http.post("/directory/blend-lookup", json={})).json() == {"matches": []}

    for _ in range(2):
        answer = await http.delete("/instances/a")
        assert (answer.status_code, answer.content) == (204, b"")
    assert (await http.put("/instances/a/heartbeat")).status_code == 404
    assert (await http.get("/quota")).status_code == 404


async def test_reports_are_counted_as_lmcache_expects(served: Served) -> None:
    await served.register("a")
    names = chunk_names(range(64), ChunkScheme(chunk_tokens=CHUNK))
    body = {"batches": [batch(1, names), batch(1, names), batch(2, names[:1], "delete")]}
    stale = {**batch(9, []), "incarnation": 7}

    first = await served.http.post("/events", json=body)
    second = await served.http.post("/events", json={"batches": [batch(2, []), stale]})

    empty = await served.http.post("/events", json={"batches": []})

    assert empty.json() == {"applied": 0, "duplicates": 0, "stale": 0}
    assert first.json() == {"applied": 2, "duplicates": 0, "stale": 0}
    assert second.json() == {"applied": 0, "duplicates": 1, "stale": 1}
    instance = served.coordinator.instance("a")
    assert instance is not None
    assert instance.memory.objects == 3


async def test_an_unreadable_message_is_refused_with_the_reason_and_changes_nothing(served: Served) -> None:
    wrong = {**batch(1, [bytes(32)]), "seq": 0}

    answers = [
        await served.http.post("/events", json={"batches": [wrong]}),
        await served.http.post("/instances", json={"ip": "", "http_port": 1}),
        await served.http.post("/events", content=b"\xff"),
    ]

    assert [answer.status_code for answer in answers] == [422, 422, 422]
    assert "seq" in answers[0].json()["error"]
    assert "ip" in answers[1].json()["error"]
    assert served.app.malformed == 3
    assert not served.coordinator.instances()


async def test_a_report_that_is_too_large_is_refused() -> None:
    served = Served(max_body_bytes=65_536)
    try:
        answer = await served.http.post("/events", content=b" " * 70_000)
        assert answer.status_code == 413
    finally:
        await served.aclose()


async def test_other_work_runs_while_a_large_report_is_applied() -> None:
    """Of two concurrent reports the first is large: they are applied in order, and heartbeats are answered
    meanwhile."""
    served = Served()
    try:
        await served.register("a")
        scheme = ChunkScheme(chunk_tokens=1)
        names = chunk_names(range(20_000), scheme)
        steps = 0

        async def count() -> None:
            nonlocal steps
            while True:
                await asyncio.sleep(0)
                steps += 1

        counting = asyncio.create_task(count())
        large = asyncio.create_task(served.http.post("/events", json={"batches": [batch(1, names)]}))
        # Send the second report when the first one has arrived as a whole, before its answer.
        while not served.app._events_lock.locked():
            await asyncio.sleep(0)
        before = steps
        small = await served.http.post("/events", json={"batches": [batch(2, names[:1], "delete")]})
        counting.cancel()

        assert steps - before > 10
        assert (await large).json()["applied"] == small.json()["applied"] == 1
        instance = served.coordinator.instance("a")
        assert instance is not None
        assert instance.doubt is None
        assert instance.memory.objects == 19_999
    finally:
        await served.aclose()


async def test_the_error_for_a_port_in_use_names_the_option(served: Served) -> None:
    options = CoordinatorOptions(listen=served.server.address)
    other = CoordinatorServer(served.app, served.coordinator, served.index, options)

    with pytest.raises(
        ConfigError, match=r"lmcache\.coordinator\.listen: cannot listen on 127\.0\.0\.1:\d+: "
    ):
        other.bind()


async def test_the_port_is_free_again_after_the_end() -> None:
    served = Served()
    await served.register("a")
    address = served.server.address
    await served.aclose()

    options = CoordinatorOptions(listen=address)
    again = CoordinatorServer(served.app, served.coordinator, served.index, options)
    assert again.bind() == address
    running = asyncio.create_task(again.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
