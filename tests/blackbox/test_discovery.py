"""A discovery source that names far fewer workers than before, and workers that answer all the while."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from tests.support.sockets import tcp_server
from tests.support.waiting import until

CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
DEADLINE_S = 30.0


def pod(name: str, port: int) -> dict[str, Any]:
    """A ready pod whose container listens on `port` of 127.0.0.1."""
    return {
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "vllm"}},
        "spec": {"containers": [{"name": "worker", "ports": [{"name": "http", "containerPort": port}]}]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class PodApi:
    """Answers lists with `pods`. Watches bring no events; `relist` ends them with 410 Gone."""

    def __init__(self, pods: list[dict[str, Any]]) -> None:
        self.pods = pods
        self.url = ""
        self.lists = 0
        self.watches = 0
        self._ended = asyncio.Event()

    def relist(self) -> None:
        """The server has restarted: every client has to list again."""
        self._ended.set()
        self._ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if "watch" in parse_qs(urlsplit(head.split(" ")[1]).query):
            await self._watch(writer)
            return
        self.lists += 1
        body = {"kind": "List", "metadata": {"resourceVersion": "7"}, "items": self.pods}
        text = json.dumps(body).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)
        )
        await writer.drain()

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        self.watches += 1
        ended = self._ended
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
            await writer.drain()
            await ended.wait()
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
            writer.write(json.dumps(gone).encode() + b"\n")
            await writer.drain()
        finally:
            self.watches -= 1


@asynccontextmanager
async def pod_api(pods: list[dict[str, Any]]) -> AsyncIterator[PodApi]:
    """The server on a free port, while the block runs."""
    api = PodApi(pods)
    async with tcp_server(api.serve) as port:
        api.url = f"http://127.0.0.1:{port}"
        yield api


@pytest.fixture
async def cluster(serve, sim):
    """Three workers that a gateway finds through a Kubernetes API: the API, the gateway, an HTTP client."""
    ports = [httpx.URL(await sim("--time-scale", "0")).port for _ in range(3)]
    async with pod_api([pod(f"worker-{number}", port) for number, port in enumerate(ports)]) as api:
        gateway = await serve(
            "--set", "fleet.kubernetes.enabled=true", "--set", f"fleet.kubernetes.api_url={api.url}",
            "--set", "fleet.kubernetes.namespace=llm",
            workers=3,
        )  # fmt: skip
        async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as client:
            await until(lambda: api.watches > 0, within_s=DEADLINE_S)
            yield api, gateway, client
            await gateway.stop()


@asynccontextmanager
async def traffic(client: httpx.AsyncClient):
    """Chats one after another while the block runs; yields the count of answers by status."""
    seen: Counter[int] = Counter()
    is_over = False

    async def ask() -> None:
        while not is_over:
            seen[(await client.post("/v1/chat/completions", json=CHAT)).status_code] += 1

    task = asyncio.create_task(ask())
    try:
        yield seen
    finally:
        is_over = True
        await task


async def test_empty_lists_from_the_kubernetes_api_cost_no_request(cluster):
    api, _gateway, client = cluster
    pods = api.pods

    async with traffic(client) as seen:
        before = api.lists
        api.pods = []
        api.relist()
        # The first list is the empty one. Whether more are asked for is not this test's business.
        await until(lambda: api.lists > before, within_s=DEADLINE_S)
        asked = seen.total()
        await until(lambda: seen.total() > asked + 50, within_s=DEADLINE_S)
        kept = (await client.get("/ready")).json()
        metrics = (await client.get("/metrics")).text
        api.pods = pods
        api.relist()
        after = api.lists
        await until(lambda: api.lists > after, within_s=DEADLINE_S)
        asked = seen.total()
        await until(lambda: seen.total() > asked + 50, within_s=DEADLINE_S)

    assert set(seen) == {200}
    assert len(kept["workers"]) == 3
    assert any("kubernetes" in note and "3 workers" in note for note in kept["notes"])
    assert 'kvroute_discovery_kept_workers{source="kubernetes"} 3.0' in metrics
    assert 'kvroute_discovery_shrinks_held_back_total{source="kubernetes"} 1.0' in metrics


async def test_a_set_that_was_held_back_is_forgotten_when_the_full_one_is_back(cluster):
    api, gateway, client = cluster
    pods = api.pods
    api.pods = pods[:1]
    api.relist()
    await gateway.logged("omits 2 that answer")

    api.pods = pods
    await gateway.logged("accepted again")

    ready = (await client.get("/ready")).json()
    assert ready["notes"] == []
    assert len(ready["workers"]) == 3


async def test_workers_that_do_not_answer_leave_the_fleet_after_an_empty_list(processes, serve, sim):
    """A list is believed for workers that do not answer either."""
    url = await sim("--time-scale", "0")
    port = httpx.URL(url).port
    absent = pod("worker-1", 1)
    absent["spec"]["containers"][0]["ports"][0]["containerPort"] = 1
    async with pod_api([pod("worker-0", port), absent]) as api:
        gateway = await serve(
            "--set", "fleet.kubernetes.enabled=true", "--set", f"fleet.kubernetes.api_url={api.url}",
            "--set", "fleet.kubernetes.namespace=llm",
            workers=1,
        )  # fmt: skip
        await gateway.logged("worker-1 is unhealthy")
        await until(lambda: api.watches > 0, within_s=DEADLINE_S)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as client:
            api.pods = []
            api.relist()
            await gateway.logged("omits 1 that answer")

            assert list((await client.get("/ready")).json()["workers"]) == ["worker-0"]
        await gateway.stop()


async def test_an_emptied_workers_file_empties_the_fleet(serve, sim, tmp_path):
    """A watched file is written by an operator: what stands there is a decision."""
    path = tmp_path / "workers.yaml"
    path.write_text(json.dumps({"workers": [await sim("--time-scale", "0"), await sim("--time-scale", "0")]}))
    gateway = await serve("--set", f"fleet.file={path}", "--set", "fleet.file_poll_s=0.05", workers=2)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as client:
        fresh = path.with_suffix(".new")
        fresh.write_text("workers: []")
        fresh.replace(path)

        async def has_no_workers() -> bool:
            return not (await client.get("/ready")).json()["workers"]

        await until(has_no_workers, within_s=DEADLINE_S, every_s=0.05)
