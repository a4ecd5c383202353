"""Workers whose engines sleep or are paused: their `/health` stays 200, and requests hang there."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from tests.support.engines import MODEL, FakeEngine, fake_engine
from tests.support.waiting import until

ADMIN = {"authorization": "Bearer admin-secret-0123"}
FAST = ("--set", "fleet.health.interval_s=0.1")


def prompt(number: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": f"Prompt {number}, of its own. " * 20, "max_tokens": 1}


@pytest.fixture
def start(serve, processes):
    """`await start(count, *arguments)` runs engines and a gateway before them: (client, engines)."""

    async def run(count: int, *arguments: str, **settings):
        engines = [await processes.enter_async_context(fake_engine(**settings)) for _ in range(count)]
        workers = [part for engine in engines for part in ("--worker", engine.url)]
        running = await serve(*workers, "--set", "admin.api_key=admin-secret-0123", *FAST, *arguments)
        client = httpx.AsyncClient(base_url=running.url, timeout=10, trust_env=False)
        return await processes.enter_async_context(client), engines

    return run


async def states(client: httpx.AsyncClient) -> list[str]:
    workers = (await client.get("/admin/workers", headers=ADMIN)).json()["workers"]
    return [worker["state"] for worker in workers]


async def shows(client: httpx.AsyncClient, state: str, count: int = 1) -> None:
    async def are_there() -> bool:
        return (await states(client)).count(state) == count

    await until(are_there, within_s=20)


def computed(engine: FakeEngine) -> int:
    return len(engine.received)


@pytest.mark.parametrize("stopped", ["asleep", "paused"])
async def test_a_worker_that_sleeps_or_is_paused_gets_no_requests_until_it_is_awake(start, stopped):
    client, (first, second) = await start(2)
    setattr(first, stopped, True)
    await shows(client, "asleep")

    for number in range(8):
        assert (await client.post("/v1/completions", json=prompt(number))).status_code == 200
    assert computed(first) == 0
    assert computed(second) == 8

    setattr(first, stopped, False)
    await shows(client, "healthy", 2)
    for number in range(8, 24):
        assert (await client.post("/v1/completions", json=prompt(number))).status_code == 200
    assert computed(first) > 0


@pytest.mark.parametrize("stopped", ["asleep", "paused"])
async def test_a_request_at_a_worker_that_falls_asleep_goes_to_another_one(start, stopped):
    client, engines = await start(2)
    for engine in engines:
        engine.seconds = 0.2
    waiting = [asyncio.create_task(client.post("/v1/completions", json=prompt(n))) for n in range(8)]

    async def all_arrived() -> bool:
        return sum(map(computed, engines)) == 8

    await until(all_arrived, within_s=10)
    setattr(engines[0], stopped, True)

    answers = await asyncio.gather(*waiting)
    assert [answer.status_code for answer in answers] == [200] * 8
    metrics = (await client.get("/metrics")).text
    assert 'kvroute_retries_total{cause="asleep"}' in metrics
    assert "kvroute_worker_ejections_total{" not in metrics
    assert sorted(await states(client)) == ["asleep", "healthy"]


async def test_without_an_awake_worker_the_answer_says_that_they_are_asleep(start):
    client, (first, second) = await start(2)
    first.asleep = second.paused = True
    await shows(client, "asleep", 2)

    answer = await client.post("/v1/completions", json=prompt(0))
    assert answer.status_code == 503
    assert "asleep" in answer.json()["error"]["message"]
    assert "paused" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"
    ready = await client.get("/ready")
    assert ready.status_code == 503
    assert "asleep" in ready.text
    metrics = (await client.get("/metrics")).text
    assert len(re.findall(r'kvroute_worker_state\{[^}]*state="asleep"[^}]*\} 1', metrics)) == 2


async def test_the_requests_of_a_fleet_that_is_paused_as_a_whole_wait_for_its_end(start):
    client, engines = await start(2)
    for engine in engines:
        engine.seconds = 0.2
    waiting = [asyncio.create_task(client.post("/v1/completions", json=prompt(n))) for n in range(4)]

    async def all_arrived() -> bool:
        return sum(map(computed, engines)) == 4

    await until(all_arrived, within_s=10)
    await client.post("/admin/pause?mode=keep", headers=ADMIN)
    await shows(client, "asleep", 2)
    await client.post("/admin/resume", headers=ADMIN)

    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 4
    assert sum(map(computed, engines)) == 4
    await shows(client, "healthy", 2)


@pytest.mark.parametrize(("action", "end"), [("sleep?level=2", "wake_up"), ("pause", "resume")])
async def test_the_admin_api_takes_the_worker_out_before_its_engine_stops(start, action, end):
    client, engines = await start(2)
    worker = (await client.get("/admin/workers", headers=ADMIN)).json()["workers"][0]
    engine = next(each for each in engines if each.url == worker["url"])

    await client.post(f"/admin/workers/{worker['id']}/{action}", headers=ADMIN)
    assert await states(client) == ["asleep", "healthy"]
    for number in range(6):
        assert (await client.post("/v1/completions", json=prompt(number))).status_code == 200
    assert computed(engine) == 0

    await client.post(f"/admin/workers/{worker['id']}/{end}", headers=ADMIN)
    await shows(client, "healthy", 2)


async def test_an_engine_that_refuses_to_sleep_stays_in_routing(start):
    client, _ = await start(1, has_dev_mode=False)

    answer = await client.post("/admin/sleep", headers=ADMIN)

    assert [each["ok"] for each in answer.json()["workers"].values()] == [False]
    assert (await client.post("/v1/completions", json=prompt(0))).status_code == 200


async def test_a_worker_without_these_questions_is_asked_seldom(start):
    client, (engine,) = await start(1, has_dev_mode=False)
    asked: list[str] = []
    answer = engine._answer

    async def counted(method, target, headers, body):
        asked.append(target)
        return await answer(method, target, headers, body)

    engine._answer = counted

    async def was_probed() -> bool:
        return asked.count("/health") >= 8

    await until(was_probed, within_s=20)
    assert asked.count("/is_paused") + asked.count("/is_sleeping") <= 2
    assert (await client.get("/ready")).status_code == 200
