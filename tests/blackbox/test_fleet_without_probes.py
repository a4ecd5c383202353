"""Fleets that are empty at first, and servers that have no `/health`."""

from __future__ import annotations

import httpx
import pytest
from tests.support.engines import MODEL, fake_engine
from tests.support.waiting import until

ADMIN = {"authorization": "Bearer admin-secret-0123"}
BODY = {"model": MODEL, "prompt": "A prompt.", "max_tokens": 1}


@pytest.fixture
async def plain_server(processes):
    """A server that knows `/v1/completions` only."""
    engine = await processes.enter_async_context(fake_engine(has_dev_mode=False))
    answer = engine._answer

    async def without_probes(method, target, headers, body):
        return (404, b"{}") if method == "GET" else await answer(method, target, headers, body)

    engine._answer = without_probes
    return engine


async def answers(client: httpx.AsyncClient) -> None:
    async def is_answered() -> bool:
        return (await client.post("/v1/completions", json=BODY)).status_code == 200

    await until(is_answered, within_s=20)


async def test_a_gateway_without_workers_gets_them_through_the_admin_api(serve, processes):
    engine = await processes.enter_async_context(fake_engine())
    running = await serve("--set", "fleet.may_be_empty=true", "--set", "admin.api_key=admin-secret-0123")
    async with httpx.AsyncClient(base_url=running.url, timeout=30, trust_env=False) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503

        added = await client.post("/admin/workers", json={"url": engine.url}, headers=ADMIN)
        assert added.status_code == 201, added.text
        await answers(client)


async def test_a_server_without_health_is_used_if_it_needs_none(serve, plain_server):
    running = await serve("--set", "fleet.may_be_empty=true", "--set", "admin.api_key=admin-secret-0123")
    async with httpx.AsyncClient(base_url=running.url, timeout=30, trust_env=False) as client:
        body = {"url": plain_server.url, "models": [MODEL], "needs_health": False}
        added = await client.post("/admin/workers", json=body, headers=ADMIN)
        assert added.status_code == 201, added.text
        await answers(client)


async def test_static_backends_of_the_other_router_need_no_health(run, plain_server, tmp_path):
    running = await run(
        "vllm-router", "--service-discovery", "static", "--static-backends", plain_server.url,
        "--static-models", MODEL, "--routing-logic", "roundrobin", "--host", "127.0.0.1", "--port", "0",
        env={"XDG_STATE_HOME": str(tmp_path / "state")},
    )  # fmt: skip
    line = await running.logged("listens on")
    url = "http" + line.rsplit(" http", 1)[1].strip().rstrip('"}')
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        await answers(client)
