"""A gateway that runs out of descriptors or memory refuses new work, keeps the old, and recovers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import shlex

import httpx
import pytest
from tests.blackbox.conftest import EXECUTABLE, command

CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
STREAM = {**CHAT, "max_tokens": 200, "ignore_eos": True, "stream": True}
DEADLINE_S = 60.0


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url, timeout=DEADLINE_S, trust_env=False, limits=httpx.Limits(max_connections=None)
    )


async def value(url: str, series: str) -> float:
    async with client_of(url) as client:
        for line in (await client.get("/metrics")).text.splitlines():
            if line.startswith(series + " "):
                return float(line.rsplit(" ", 1)[1])
    return 0.0


def limit_descriptors(pid: int, count: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, hard))


async def connect_many(address, count: int):
    """Connections that send nothing: each takes a descriptor of the gateway, unless it refuses."""
    return [await asyncio.open_connection(*address) for _ in range(count)]


async def closed(connections) -> None:
    for _, writer in connections:
        writer.close()
    for _, writer in connections:
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize("lane", ["on", "off"])
async def test_without_descriptors_old_streams_finish_and_the_gateway_recovers(run, sim, lane):
    worker = await sim("--time-scale", "1")
    gateway = await run(
        "serve", "--port", "0", "--worker", worker, "--set", f"server.fast_lane={lane}",
        "--set", "upstream.spare_connections=0",
    )  # fmt: skip
    gateway.url = (await gateway.logged("listens on")).split("listens on ")[1].split()[0]
    await gateway.logged("is healthy")
    first, events = asyncio.Event(), []

    async def read_stream(client) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line)
                    first.set()

    async with client_of(gateway.url) as client, asyncio.timeout(DEADLINE_S):
        stream = asyncio.create_task(read_stream(client))
        await first.wait()
        limit_descriptors(gateway.pid, 40)  # below the descriptors that are open with what follows
        waiting = await connect_many(gateway.address, 60)
        with pytest.raises(httpx.TransportError):
            async with client_of(gateway.url) as fresh:
                await fresh.post("/v1/chat/completions", json=CHAT)
        await closed(waiting)
        await stream
        limit_descriptors(gateway.pid, 4096)
        answer = None
        while answer is None or answer.status_code != 200:
            with contextlib.suppress(httpx.TransportError):
                async with client_of(gateway.url) as fresh:
                    answer = await fresh.post("/v1/chat/completions", json=CHAT)

    assert events[-1] == "data: [DONE]"
    assert "not healthy" not in gateway.log
    assert "Traceback" not in gateway.log
    assert await gateway.stop() == 0


async def test_memory_above_the_watermark_sheds_new_requests_with_503(serve, sim):
    gateway = await serve(
        "--worker", await sim("--time-scale", "0"),
        "--set", "server.memory_watermark=0.5", "--set", "server.memory_limit_bytes=1000000",
        "--set", "server.memory_interval_s=0.05",
    )  # fmt: skip
    await gateway.logged("server.memory_watermark")
    async with client_of(gateway.url) as client:
        refused = await client.post("/v1/chat/completions", json=CHAT)
        alive = await client.get("/health")

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "low_memory"
    assert refused.headers["retry-after"] == "1"
    assert alive.status_code == 200
    assert await value(gateway.url, "kvroute_memory_used_ratio") > 1.0


async def test_new_clients_are_refused_while_the_last_descriptors_serve_old_ones(
    run, sim, tmp_path, monkeypatch
):
    worker = await sim("--time-scale", "0")
    limited = tmp_path / "kvroute"
    limited.write_text(f'#!/bin/sh\nulimit -n 128\nexec {shlex.join(command())} "$@"\n')
    limited.chmod(0o755)
    monkeypatch.setenv(EXECUTABLE, str(limited))
    gateway = await run("serve", "--port", "0", "--worker", worker)
    gateway.url = (await gateway.logged("listens on")).split("listens on ")[1].split()[0]
    await gateway.logged("is healthy")

    async with client_of(gateway.url) as kept, asyncio.timeout(DEADLINE_S):
        assert (await kept.get("/health")).status_code == 200
        waiting = await connect_many(gateway.address, 110)
        await gateway.logged("new clients are refused from descriptor 112 on")
        answers = []
        while not any(b'"out_of_descriptors"' in answer for answer in answers):
            reader, writer = await asyncio.open_connection(*gateway.address)
            with contextlib.suppress(OSError):
                answers.append(await reader.read())
            writer.close()
        served = await kept.post("/v1/chat/completions", json=CHAT)
        metrics = (await kept.get("/metrics")).text
        await closed(waiting)
        status = 0
        while status != 200:
            with contextlib.suppress(httpx.TransportError):
                async with client_of(gateway.url) as fresh:
                    status = (await fresh.post("/v1/chat/completions", json=CHAT)).status_code

    assert next(answer for answer in answers if answer).startswith(b"HTTP/1.1 503")
    assert served.status_code == 200
    assert 'kvroute_out_of_descriptors_total{side="client"} ' in metrics
    assert 'kvroute_out_of_descriptors_total{side="client"} 0.0' not in metrics
    assert await gateway.stop() == 0
