"""Workers that fail before, during and after their answers."""

import asyncio

import pytest

from kvroute.fleet.worker import HealthState
from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault

CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
STREAM = {**CHAT, "stream": True}


@pytest.fixture
async def two_sims():
    async with run_sim(SimOptions(time_scale=0)) as one, run_sim(SimOptions(time_scale=0)) as two:
        yield one, two


def all_quiet(gateway) -> bool:
    loads = [worker.load for worker in gateway.runtime.fleet.workers()]
    return (
        gateway.runtime.plane.entry_control.in_flight == 0
        and gateway.metric("kvroute_requests_in_flight") == 0
        and all(load.in_flight == load.active_tokens == load.queued == 0 for load in loads)
    )


async def asked(gateway, body=CHAT):
    return await gateway.client.post("/v1/chat/completions", json=body)


async def test_a_refused_connection_goes_to_the_next_worker_and_ejects(run_gateway, two_sims):
    one, two = two_sims
    async with run_gateway([one.url, two.url], fleet={"health": {"interval_s": 60}}) as gateway:
        await one.kill()
        answers = [
            await asked(gateway, {**CHAT, "messages": [{"role": "user", "content": f"{n}"}]})
            for n in range(6)
        ]

        assert [answer.status_code for answer in answers] == [200] * 6
        assert {answer.headers["x-kvroute-worker"] for answer in answers} == {"w1"}
        assert gateway.metric("kvroute_worker_ejections_total", cause="refused") == 1
        assert all_quiet(gateway)

        await one.start()
        await gateway.until_healthy(2)


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_reset_before_the_first_body_byte_goes_to_the_next_worker(run_gateway, two_sims, body):
    one, two = two_sims
    async with run_gateway([one.url, two.url]) as gateway:
        for sim in two_sims:
            sim.worker.faults.add(Fault(kind="reset", path="/v1/chat"))
        answer = await asked(gateway, body)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "worker_unreachable"

        one.worker.faults.add(Fault(kind="reset", path="/v1/chat"))
        other = {**body, "max_tokens": 5}  # the body that has lost two workers is refused
        answers = [await asked(gateway, other) for _ in range(2)]

        assert [answer.status_code for answer in answers] == [200, 200]
        assert all_quiet(gateway)


async def test_the_head_alone_is_not_an_answer_yet(run_gateway, two_sims):
    one, two = two_sims
    async with run_gateway([one.url, two.url]) as gateway:
        for sim in two_sims:
            sim.worker.faults.add(Fault(kind="reset", after_chunks=0, path="/v1/chat"))
        first = await asked(gateway, STREAM)
        second = await asked(gateway, {**STREAM, "max_tokens": 5})

        assert (first.status_code, second.status_code) == (502, 200)


async def test_configured_statuses_are_retried_on_another_worker_and_others_are_passed_on(
    run_gateway, two_sims
):
    one, two = two_sims
    async with run_gateway([one.url, two.url], retries={"statuses": [501]}) as gateway:
        for sim in two_sims:
            sim.worker.faults.add(Fault(kind="status", status=501, path="/v1/chat"))
        assert (await asked(gateway)).status_code == 501
        one.worker.faults.add(Fault(kind="status", status=501, path="/v1/chat"))
        assert [(await asked(gateway)).status_code for _ in range(2)] == [200, 200]

        for sim in two_sims:
            sim.worker.faults.add(Fault(kind="status", status=500))
        assert [(await asked(gateway)).status_code for _ in range(2)].count(500) >= 1
        assert gateway.metric("kvroute_retries_total", cause="status") >= 1


async def test_the_budget_bounds_retries(run_gateway, two_sims):
    one, two = two_sims
    budget = {"statuses": [503], "budget_percent": 0, "budget_min_per_s": 0}
    async with run_gateway([one.url, two.url], retries=budget) as gateway:
        for sim in two_sims:
            sim.worker.faults.add(Fault(kind="status", status=503, count=None))

        assert (await asked(gateway)).status_code == 503
        assert gateway.metric("kvroute_retries_denied_total") == 1
        assert gateway.metric("kvroute_retries_total") == 0


async def test_a_kept_connection_that_the_worker_closed_is_replaced(run_gateway, raw_worker):
    raw_worker.closes_after_answer = True
    async with run_gateway([raw_worker.url]) as gateway:
        answers = [await gateway.client.post("/v1/completions", json={"prompt": "x"}) for _ in range(20)]

    assert [answer.status_code for answer in answers] == [200] * 20


async def test_a_worker_that_is_silent_is_a_timeout(run_gateway, two_sims):
    one, two = two_sims
    async with run_gateway([one.url, two.url], upstream={"first_byte_timeout_s": 0.05}) as gateway:
        for sim in two_sims:
            sim.worker.faults.add(Fault(kind="hang", count=None))
        answer = await asked(gateway)

        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "worker_timeout"
        assert all_quiet(gateway)


async def test_a_full_pool_is_the_gateways_limit_and_no_mark_against_the_worker(run_gateway):
    async with (
        run_sim(SimOptions(fixed_s=30)) as sim,
        run_gateway([sim.url], upstream={"max_connections": 1, "connect_timeout_s": 0.05}) as gateway,
    ):
        running = asyncio.create_task(asked(gateway))
        await gateway.until(lambda: gateway.runtime.plane.entry_control.in_flight == 1)
        refused = [await asked(gateway) for _ in range(12)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        assert {answer.status_code for answer in refused} == {502}
        assert "pool_exhausted" in refused[0].json()["error"]["message"]
        assert gateway.metric("kvroute_worker_ejections_total") == 0
        assert gateway.runtime.fleet.states()[HealthState.HEALTHY] == 1


async def test_a_request_that_another_worker_answered_is_written_down_without_an_error(run_gateway, two_sims):
    one, two = two_sims
    async with run_gateway([one.url, two.url], fleet={"health": {"interval_s": 60}}) as gateway:
        await one.kill()
        bodies = [{**CHAT, "messages": [{"role": "user", "content": f"{n}"}]} for n in range(8)]
        for body in bodies:
            await asked(gateway, body)
        decisions = (await gateway.client.get("/admin/decisions")).json()["decisions"]

    assert max(decision["attempts"] for decision in decisions) == 2
    assert {decision["error"] for decision in decisions} == {None}


async def test_without_a_routable_worker_requests_and_readiness_get_503(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        assert (await gateway.client.get("/ready")).status_code == 200
        await instant_sim.kill()
        await gateway.until(lambda: gateway.runtime.fleet.states()[HealthState.UNHEALTHY] == 1)

        ready = await gateway.client.get("/ready")
        answer = await asked(gateway)

        assert ready.status_code == 503
        assert "connection refused" in ready.json()["reasons"][0]
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_routable_worker"
        assert (await gateway.client.get("/health")).status_code == 200
        assert [m["id"] for m in (await gateway.client.get("/v1/models")).json()["data"]] == ["sim-model"]


async def test_killing_a_worker_under_load_loses_nothing_that_had_not_begun(run_gateway):
    slow = SimOptions(time_scale=1, fixed_s=0.02)
    async with run_sim(slow) as one, run_sim(slow) as two, run_gateway([one.url, two.url]) as gateway:
        bodies = [{**STREAM, "messages": [{"role": "user", "content": f"Question {n}"}]} for n in range(60)]
        calls = [asyncio.create_task(asked(gateway, body)) for body in bodies]
        await gateway.until(lambda: one.engine.running > 5)
        await one.kill()
        answers = await asyncio.gather(*calls)
        await one.start()
        await gateway.until_healthy(2)

        assert {answer.status_code for answer in answers} == {200}
        whole = [answer for answer in answers if answer.text.endswith("data: [DONE]\n\n")]
        cut = [answer for answer in answers if "worker_unreachable" in answer.text]
        assert len(whole) + len(cut) == 60
        assert all_quiet(gateway)


async def test_any_mixture_of_faults_and_disconnects_leaves_nothing_in_flight(run_gateway):
    quick = SimOptions(time_scale=0.05)
    async with run_sim(quick) as one, run_sim(quick) as two, run_gateway([one.url, two.url]) as gateway:
        for sim in (one, two):
            for kind in (
                Fault(kind="reset", count=8),
                Fault(kind="reset", after_chunks=1, count=8),
                Fault(kind="status", status=500, count=4),
                Fault(kind="slow", delay_s=0.05, count=10),
            ):
                sim.worker.faults.add(kind)

        async def ask(n: int) -> None:
            body = {
                **CHAT,
                "stream": n % 2 == 0,
                "max_tokens": 20,
                "messages": [{"role": "user", "content": f"{n}"}],
            }
            call = asyncio.create_task(asked(gateway, body))
            if n % 3 == 0:
                await gateway.until(lambda: gateway.runtime.plane.entry_control.in_flight > 0 or call.done())
                call.cancel()
            await asyncio.gather(call, return_exceptions=True)

        await asyncio.gather(*(ask(n) for n in range(90)))
        await gateway.until(lambda: all_quiet(gateway))
        await gateway.until(lambda: one.engine.running + two.engine.running == 0)
