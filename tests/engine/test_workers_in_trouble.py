"""Real engines that are full, paused, killed by a request, or busy with the requests of others."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest
from tests.engine.conftest import routable_gateway
from tests.engine.endpoints import ADMIN_KEY
from tests.engine.pool import EngineKind

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
RUNNING, QUEUED = 2, 3
NARROW = EngineKind(args=("--max-num-seqs", str(RUNNING), "--max-num-queued-reqs", str(QUEUED)))
"""It refuses what it cannot queue (vLLM 0.32, `--max-num-queued-reqs`)."""
TWO_AT_ONCE = EngineKind(args=("--max-num-seqs", "2"))
"""Further requests wait in it: with the default it would take all of them at once."""
FAST = ("--set", "fleet.health.interval_s=0.2", "--set", "fleet.health.metrics_interval_s=0.2")


@pytest.fixture
def prompt(words):
    """`prompt(name)` -> 150 tokens of its own."""
    return lambda name: "".join(random.Random(str(name)).choices(words, k=150))


@pytest.fixture
def before(run_gateway):
    """`before(engines, *options)` -> an async context manager: a client of a gateway in front of them."""

    @asynccontextmanager
    async def run(engines, *options):
        async with (
            routable_gateway(run_gateway, engines, "prefixaware", *FAST, *options) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=120, trust_env=False) as http,
        ):
            yield http

    return run


async def ask(http: httpx.AsyncClient, prompt: str, tokens: int = 1) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return await http.post("/v1/completions", json=body)


async def states(http: httpx.AsyncClient) -> dict[str, str]:
    found: dict[str, str] = (await http.get("/ready")).json()["workers"]
    return found


async def until_states(http: httpx.AsyncClient, **wanted: str) -> None:
    async with asyncio.timeout(60):
        while await states(http) != wanted:
            await asyncio.sleep(0.05)


@pytest.mark.engines(NARROW, replace(NARROW, number=1, core=1))
async def test_full_engines_stay_in_routing_and_serve_what_they_can(leased, before, prompt, report) -> None:
    for engine, name in zip(leased, "ab", strict=True):
        engine.name = name
    async with before(leased) as http:
        answers = await asyncio.gather(*(ask(http, prompt(number), 40) for number in range(40)))

        outcomes = Counter(answer.status_code for answer in answers)
        served = Counter(
            answer.headers["x-kvroute-worker"] for answer in answers if answer.status_code == 200
        )
        refused = sum([await engine.metric("vllm:admission_rejections_total") for engine in leased])
        report(
            f"40 requests at once: {dict(outcomes)}, served by {dict(served)}; "
            f"the engines refused {refused:.0f}"
        )
        assert outcomes.keys() == {200, 503}
        # Of a burst each takes what it can queue; the first of them are not running yet.
        assert all(served[engine.name] >= QUEUED for engine in leased)
        for answer in answers:
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] == "workers_busy"
                assert int(answer.headers["retry-after"]) >= 1
        assert await states(http) == {"a": "healthy", "b": "healthy"}
        assert (await ask(http, prompt("later"))).status_code == 200


@pytest.mark.engines(TWO_AT_ONCE, replace(TWO_AT_ONCE, number=1, core=1))
async def test_fresh_prompts_avoid_the_engine_that_is_busy_for_others(leased, before, prompt, report) -> None:
    busy, idle = leased
    busy.name, idle.name = "a", "b"
    async with before(leased) as http, asyncio.TaskGroup() as group:
        body = {"model": "tiny", "max_tokens": 400, "ignore_eos": True, "stream": True}
        for number in range(24):
            group.create_task(
                busy.http.post(f"{busy.url}/v1/completions", json={**body, "prompt": prompt(f"own {number}")})
            )
        async with asyncio.timeout(60):
            while (await explained(http, prompt("explained")))[busy.name] <= 0:
                await asyncio.sleep(0.05)

        workers = Counter(
            [(await ask(http, prompt(number))).headers["x-kvroute-worker"] for number in range(10)]
        )

        left = await busy.metric("vllm:num_requests_running") + await busy.metric("vllm:num_requests_waiting")
        report(
            f"10 fresh prompts went to {dict(workers)}; {left:.0f} requests of others were left at "
            f"{busy.name}"
        )
        assert workers[idle.name] >= 9


async def explained(http: httpx.AsyncClient, prompt: str) -> dict[str, float]:
    """Seconds of load from elsewhere, by worker."""
    answer = await http.post("/v1/route/explain", json={"model": "tiny", "prompt": prompt})
    return {
        each["worker"]: each["foreign"]["wait_s"] if each["foreign"] else 0.0
        for each in answer.json()["ranking"]
    }


async def test_a_paused_engine_gets_no_requests_until_it_is_resumed(engines, before, prompt, report) -> None:
    paused, awake = engines
    async with before(engines) as http:
        try:
            (await paused.http.post(f"{paused.url}/pause", params={"mode": "keep"})).raise_for_status()
            # Some of these come before the gateway has asked whether it is paused. They must not hang either.
            first = await asyncio.gather(*(ask(http, prompt(f"early {number}")) for number in range(8)))
            await until_states(http, **{paused.name: "asleep", awake.name: "healthy"})
            later = await asyncio.gather(*(ask(http, prompt(number)) for number in range(8)))
        finally:
            await paused.http.post(f"{paused.url}/resume")
        assert {answer.status_code for answer in [*first, *later]} == {200}
        assert {answer.headers["x-kvroute-worker"] for answer in later} == {awake.name}

        await until_states(http, **{paused.name: "healthy", awake.name: "healthy"})
        again = await asyncio.gather(*(ask(http, prompt(f"again {number}")) for number in range(16)))
        assert {answer.headers["x-kvroute-worker"] for answer in again} == {paused.name, awake.name}
        early = Counter(answer.headers["x-kvroute-worker"] for answer in first)
        report(
            f"8 requests to an engine that had just been paused and another one: answered by {dict(early)}"
        )


async def test_a_request_that_kills_two_engines_is_refused_when_it_comes_again(
    own_engines, before, prompt, report
) -> None:
    async with before(own_engines) as http:
        poison = asyncio.create_task(ask(http, prompt("poison"), 2000))
        asked = []
        for _ in own_engines:
            async with asyncio.timeout(60):
                running = []
                while not running:
                    running = [
                        engine
                        for engine in own_engines
                        if engine.process.running and await engine.metric("vllm:num_requests_running")
                    ]
            (killed,) = running
            killed.process.kill()
            await killed.process.wait()
            asked.append(killed.name)
        lost = await poison
        await asyncio.gather(*(engine.restart() for engine in own_engines))
        await until_states(http, **{engine.name: "healthy" for engine in own_engines})

        again = await ask(http, prompt("poison"), 2000)
        innocent = await ask(http, prompt("innocent"))

        report(f"the request was at {asked}: {lost.status_code}; again: {again.status_code}")
        assert sorted(asked) == ["a", "b"]
        assert lost.status_code == 502
        assert (again.status_code, again.json()["error"]["code"]) == (502, "request_lost_workers")
        assert "x-kvroute-worker" not in again.headers
        assert innocent.status_code == 200
        shown = (await http.get("/admin/lost-requests", headers=ADMIN)).json()
        assert len(shown["lost_requests"]) == 1
