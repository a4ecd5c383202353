"""Requests that a worker got from elsewhere: only its metrics show them."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.support.engines import MODEL, FakeEngine, fake_engine
from tests.support.waiting import until

ADMIN = {"authorization": "Bearer admin-secret-0123"}
FAST = ("--set", "fleet.health.interval_s=0.1", "--set", "fleet.health.metrics_interval_s=0.2")


def prompt(number: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": f"Prompt {number}, of its own. " * 20, "max_tokens": 1}


def gauges(waiting: int, running: int, usage: float) -> str:
    return (
        f'vllm:num_requests_waiting{{engine="0"}} {float(waiting)}\n'
        f'vllm:num_requests_running{{engine="0"}} {float(running)}\n'
        'vllm:request_success_total{engine="0",finished_reason="stop"} 100.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\n'
    )


class Pages:
    """Counts how often an engine's metrics are read. `lines` makes further lines of each."""

    def __init__(self, engine: FakeEngine, lines) -> None:
        self.read = 0
        self._page, self._lines = engine.page, lines
        engine.page = self

    def __call__(self) -> str:
        self.read += 1
        return self._page() + self._lines()

    async def more(self, count: int) -> None:
        wanted = self.read + count

        async def were_read() -> bool:
            return self.read >= wanted

        await until(were_read, within_s=20)


@pytest.fixture
def start(serve, processes):
    async def run(*arguments: str, **settings):
        engines = [await processes.enter_async_context(fake_engine(**settings)) for _ in range(2)]
        workers = [part for engine in engines for part in ("--worker", engine.url)]
        running = await serve(*workers, "--set", "admin.api_key=admin-secret-0123", *FAST, *arguments)
        client = httpx.AsyncClient(base_url=running.url, timeout=30, trust_env=False)
        return await processes.enter_async_context(client), engines

    return run


@pytest.mark.parametrize("strategy", ["prefixaware", "session"])
async def test_fresh_prompts_avoid_the_queue_that_others_have_filled(start, strategy):
    client, (busy, idle) = await start("--strategy", strategy)
    pages = Pages(busy, lambda: gauges(22, 4, 0.9))
    Pages(idle, lambda: gauges(0, 0, 0.0))
    await pages.more(5)

    for number in range(10):
        assert (await client.post("/v1/completions", json=prompt(number))).status_code == 200

    assert len(idle.received) == 10
    assert busy.received == []


async def test_explain_and_the_admin_api_show_it_with_its_age(start):
    client, (busy, idle) = await start()
    pages = Pages(busy, lambda: gauges(22, 4, 0.9))
    Pages(idle, lambda: gauges(0, 0, 0.0))
    await pages.more(5)

    answer = (await client.post("/v1/route/explain", json=prompt(0))).json()
    last = answer["ranking"][-1]
    foreign = last["foreign"]
    assert (foreign["waiting"], foreign["running"]) == (22, 4)
    assert 0.0 <= foreign["age_s"] < 10.0
    assert 0.0 < foreign["wait_s"] <= last["terms_s"]["wait"] + 1e-6
    assert foreign["tokens"] > 0
    assert answer["ranking"][0]["foreign"] is None
    workers = (await client.get("/admin/workers", headers=ADMIN)).json()["workers"]
    assert sorted(w["foreign"]["waiting"] if w["foreign"] else 0 for w in workers) == [0, 22]
    metrics = (await client.get("/metrics")).text
    assert "kvroute_worker_foreign_requests" in metrics


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_own_requests_are_not_counted_twice(start, is_streamed):
    client, engines = await start(seconds=1.5)
    pages = [
        Pages(engine, lambda engine=engine: gauges(sum(engine._running.values()), 0, 0.2))
        for engine in engines
    ]
    await pages[0].more(1)
    bodies = [{**prompt(number), "stream": is_streamed} for number in range(8)]
    waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
    await pages[0].more(2)
    await pages[1].more(2)

    assert sum(sum(engine._running.values()) for engine in engines) == 8
    ranking = (await client.post("/v1/route/explain", json=prompt(99))).json()["ranking"]
    assert [each.get("foreign") for each in ranking] == [None, None]
    await asyncio.gather(*waiting)
    await pages[0].more(1)
    ranking = (await client.post("/v1/route/explain", json=prompt(99))).json()["ranking"]
    assert [each.get("foreign") for each in ranking] == [None, None]
