"""Prompts that one worker computes and another one answers, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.support.waiting import until

from kvroute.fleet.worker import WorkerId
from kvroute.sim import completions, other_apis
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault
from kvroute.sim.worker import kept_params

LONG, SHORT = "long " * 400, "hi"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"model": "sim-model", "messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    COMPLETIONS: {"model": "sim-model", "prompt": LONG, "max_tokens": 4},
    "/v1/responses": {"model": "sim-model", "input": LONG, "max_output_tokens": 4},
    "/v1/messages": {
        "model": "sim-model",
        "messages": [{"role": "user", "content": LONG}],
        "max_tokens": 4,
    },
}
ROLES = {"p": "prefill", "d": "decode", "b": "both"}


@pytest.fixture
def lane() -> str:
    return "fast lane"


@pytest.fixture
def run_fleet(run_gateway):
    """A gateway in front of simulated workers with these roles: "pd" is a prefill and a decode worker."""

    @asynccontextmanager
    async def start(roles: str, *, sim: dict[str, Any] | None = None, **sections: Any) -> AsyncIterator[Any]:
        async with Sims() as sims:
            options = SimOptions(**{"nixl": True, "time_scale": 0, **(sim or {})})
            workers = [await sims.start(options) for _ in roles]
            entries = [
                {"id": f"w{place}", "url": worker.url, "role": ROLES[role]}
                for place, (worker, role) in enumerate(zip(workers, roles, strict=True))
            ]
            routing = {"prefill_decode": {"threshold_tokens": 256}, **sections.pop("routing", {})}
            async with run_gateway(entries, routing=routing, **sections) as gateway:
                yield gateway, workers

    return start


class Sims:
    """Simulated workers that stop together."""

    def __init__(self) -> None:
        self._running: list[Any] = []

    async def start(self, options: SimOptions) -> RunningSim:
        context = run_sim(options)
        self._running.append(context)
        return await context.__aenter__()

    async def __aenter__(self) -> Sims:
        return self

    async def __aexit__(self, *error: Any) -> None:
        for context in reversed(self._running):
            await context.__aexit__(*error)


async def ask(gateway: Any, path: str = CHAT, body: Any = None, **more: Any) -> httpx.Response:
    answer: httpx.Response = await gateway.client.post(path, json={**(body or BODIES[path]), **more})
    return answer


def texts(answer: httpx.Response) -> list[str]:
    """The generated texts, without ids and times."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [str(json.loads(event).get("choices")) for event in events if event != "[DONE]"]
    return [str(answer.json().get(name)) for name in ("choices", "content")]


def all_quiet(gateway: Any) -> bool:
    loads = [worker.load for worker in gateway.runtime.fleet.workers()]
    return gateway.runtime.plane.entry_control.in_flight == 0 and all(
        load.in_flight == load.active_tokens == load.queued == 0 for load in loads
    )


def usage_of(worker: RunningSim) -> float:
    """The share of the cache that requests hold, blocks for other workers included."""
    return worker.engine.cache.usage


def received(worker: RunningSim, path: str = CHAT) -> list[dict[str, Any]]:
    return [json.loads(each.body) for each in worker.worker.received if each.target == path]


@pytest.mark.parametrize("lane", ["fast lane", "ASGI path"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_long_prompt_is_computed_by_one_worker_and_answered_by_another(run_fleet, path, streamed):
    async with run_fleet("pd") as (gateway, (prefill, decode)):
        answer = await ask(gateway, path, stream=streamed)
        alone = await gateway.client.post(decode.url + path, json={**BODIES[path], "stream": streamed})

        assert answer.status_code == 200
        assert answer.headers["x-kvroute-worker"] == "w1"
        assert answer.headers["x-kvroute-prefill-worker"] == "w0"
        assert answer.headers["x-kvroute-reason"] == "over_threshold"
        assert int(answer.headers["x-kvroute-moved-tokens"]) > 256
        assert texts(answer) == texts(alone)
        assert "remote_" not in answer.text
        assert decode.engine.counters.external_hits > 256
        assert usage_of(prefill) == 0
        assert gateway.metric("kvroute_handovers_total", worker="w1", prefill_worker="w0") == 1
        assert gateway.metric("kvroute_handover_fallbacks_total") == 0
        assert all_quiet(gateway)


async def test_both_legs_have_one_request_id_and_the_clients_body(run_fleet):
    async with run_fleet("pd") as (gateway, (prefill, decode)):
        body = {**BODIES[CHAT], "stream": True, "stream_options": {"include_usage": True}, "seed": 7}
        answer = await gateway.client.post(CHAT, json=body, headers={"x-request-id": "mine"})

        assert answer.headers["x-request-id"] == "mine"
        (first,), (second,) = received(prefill), received(decode)
        ids = [
            dict(each.headers)[b"x-request-id"]
            for worker in (prefill, decode)
            for each in worker.worker.received
            if each.target == CHAT
        ]
        assert ids == [b"mine", b"mine"]
        assert (first["stream"], first["max_tokens"], first["max_completion_tokens"]) == (False, 1, 1)
        assert first["stream_options"] is None
        assert first["seed"] == second["seed"] == 7
        params = second.pop("kv_transfer_params")
        assert params["do_remote_prefill"] is True
        assert second == body


async def test_a_short_prompt_and_a_follow_up_go_straight_to_the_decode_worker(run_fleet):
    async with run_fleet("pd") as (gateway, (prefill, decode)):
        short = await ask(gateway, COMPLETIONS, prompt=SHORT)
        await ask(gateway, COMPLETIONS)
        follow_up = await ask(gateway, COMPLETIONS, prompt=LONG + "and more")

        assert [each.headers["x-kvroute-worker"] for each in (short, follow_up)] == ["w1", "w1"]
        assert "x-kvroute-prefill-worker" not in {**short.headers, **follow_up.headers}
        assert len(received(prefill, COMPLETIONS)) == 1
        assert len(received(decode, COMPLETIONS)) == 3


@pytest.mark.parametrize("strategy", ["roundrobin", "session", "prefixaware", "kvaware"])
async def test_every_strategy_hands_over(run_fleet, strategy):
    async with run_fleet("pdd", routing={"strategy": strategy}) as (gateway, _):
        answers = [
            await ask(gateway, COMPLETIONS, prompt=f"{number} {LONG}", user=f"u{number}")
            for number in range(4)
        ]

        assert {answer.headers["x-kvroute-prefill-worker"] for answer in answers} == {"w0"}
        assert {answer.headers["x-kvroute-worker"] for answer in answers} <= {"w1", "w2"}
        assert gateway.metric("kvroute_handovers_total") == 4
        assert all_quiet(gateway)


async def test_explain_decisions_and_metrics_name_both_workers(run_fleet):
    async with run_fleet("pd") as (gateway, _):
        explained = (await gateway.client.post("/v1/route/explain", json=BODIES[COMPLETIONS])).json()
        await ask(gateway, COMPLETIONS, stream=True)
        decisions = (await gateway.client.get("/admin/decisions")).json()["decisions"]

        assert explained["handover"]["prefill_worker"] == "w0"
        (decision,) = decisions
        assert decision["worker"] == "w1"
        assert decision["prefill_worker"] == "w0"
        assert decision["moved_tokens"] == explained["handover"]["moved_tokens"]
        assert decision["prefill_s"] >= 0
        assert decision["transfer_s"] >= 0
        assert decision["handover_fallback"] is None
        assert gateway.metric("kvroute_handover_prefill_seconds_count", worker="w0") == 1
        assert gateway.metric("kvroute_handover_transfer_seconds_count", worker="w1") == 1
        workers = (await gateway.client.get("/admin/workers")).json()["workers"]
        assert [worker["role"] for worker in workers] == ["prefill", "decode"]


KVAWARE: dict[str, Any] = {
    "routing": {"strategy": "kvaware", "prefill_decode": {"threshold_tokens": 256}},
    "tokens": {"timeout_ms": 10_000, "computed_samples": False},
    "fleet": {"health": {"metrics_interval_s": 0.05, "interval_s": 0.05}},
}


async def until_held(gateway: Any, blocks: int) -> None:
    """Wait until the map has as many blocks of all workers together."""
    tracker = gateway.runtime.cache_tracker
    await gateway.until(lambda: tracker.describe()["held_blocks"] >= blocks)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_audit_checks_what_each_worker_held(run_fleet, path, streamed):
    """The prefill worker holds the first half of a prompt, the decode worker nothing."""
    name = next(name for name in ("messages", "prompt", "input") if name in BODIES[path])
    half = LONG if name != "messages" else BODIES[path]["messages"]
    whole = LONG * 2 if name != "messages" else [{"role": "user", "content": LONG * 2}]
    async with run_fleet("pd", **KVAWARE) as (gateway, (prefill, decode)):
        await gateway.until(lambda: not gateway.runtime.cache_tracker.notes())
        await gateway.client.post(prefill.url + path, json={**BODIES[path], name: half})
        known = len(prefill.engine.cache.held_keys)
        await until_held(gateway, known)

        answer = await ask(gateway, path, stream=streamed, **{name: whole})

        held = int(answer.headers["x-kvroute-prefill-hit-tokens"])
        moved = int(answer.headers["x-kvroute-moved-tokens"])
        (decision,) = (await gateway.client.get("/admin/decisions")).json()["decisions"]
        assert held == decision["prefill_matched_tokens"] == decision["prefill_cached_tokens"] > 256
        assert decision["handover"]["computed_tokens"] == moved - held
        assert moved == decision["moved_tokens"] == decode.engine.counters.external_hits
        assert decision.get("cached_tokens") is None, "the answer repeats those of the prefill worker"
        assert ("x-kvroute-transfer-ms" in answer.headers) == streamed
        assert gateway.metric("kvroute_handover_computed_tokens_total", worker="w0") == moved - held
        assert gateway.metric("kvroute_handover_tokens_total", worker="w1") == moved
        assert gateway.metric("kvroute_predictions_total", worker="w0", outcome="exact") == 1
        assert gateway.metric("kvroute_predictions_total", worker="w1") == 0
        fetched = gateway.runtime.fleet.get(WorkerId("w1"))
        await gateway.until(lambda: fetched.facts.fetched.total == moved)
        audit = (await gateway.client.get("/admin/audit")).json()
        assert audit["transfers"] == [{"worker": "w1", "predicted_tokens": moved, "fetched_tokens": moved}]
        assert gateway.metric("kvroute_worker_fetched_tokens_total", worker="w1") == moved


async def test_the_cached_tokens_are_known_without_prompt_tokens_details(run_fleet):
    async with run_fleet("pd", sim={"report_cached_tokens": False}, **KVAWARE) as (gateway, _):
        await gateway.until(lambda: not gateway.runtime.cache_tracker.notes())
        await ask(gateway)

        (decision,) = (await gateway.client.get("/admin/decisions")).json()["decisions"]
        assert decision["prefill_cached_tokens"] == 0
        assert gateway.metric("kvroute_predictions_total", worker="w0", outcome="exact") == 1


async def live(gateway):
    """The first message of the live page."""
    async with gateway.client.stream("GET", "/admin/live") as lines:
        return json.loads(await anext(lines.aiter_lines()))


async def test_the_live_page_names_both_workers(run_fleet):
    async with run_fleet("pd") as (gateway, _):
        answer = await ask(gateway, stream=True)
        first = await live(gateway)

        assert [worker["role"] for worker in first["workers"].values()] == ["prefill", "decode"]
        (row,) = first["requests"]
        assert (row["prefill_worker"], row["worker"]) == ("w0", "w1")
        assert row["handover_fallback"] is None
        assert row["moved"] == int(answer.headers["x-kvroute-moved-tokens"])


async def test_a_clients_transfer_parameters_are_refused_in_a_fleet_with_roles(run_fleet):
    async with run_fleet("pd") as (gateway, workers):
        params = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}
        refused = await ask(gateway, kv_transfer_params=params)
        passed = await ask(gateway, kv_transfer_params={"lmcache.tag.user": "u"})
        unread = await gateway.client.post(CHAT, content=b'{"kv_transfer_params":{"a":1},"n":NaN}')

        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "kv_transfer_params.do_remote_prefill"
        assert passed.status_code == 200
        assert unread.status_code == 400
        for worker in workers:
            assert all("lmcache.tag.user" in str(body) for body in received(worker))


async def test_without_roles_a_trusted_clients_transfer_parameters_pass(run_fleet):
    async with run_fleet("bb", server={"trust_clients": True}) as (gateway, workers):
        answer = await ask(gateway, kv_transfer_params={"other": 1})

        assert answer.status_code == 200
        assert sum("other" in str(received(worker)) for worker in workers) == 1


@pytest.fixture
def telling_workers(monkeypatch):
    """Each answer of a simulated worker says where its blocks are, as with vLLM's `bidirectional_kv_xfer`."""

    def told(call, worker, generation):
        return kept_params(call, worker, generation) or {"remote_host": "10.9.9.9", "remote_port": 5}

    for module in (completions, other_apis):
        monkeypatch.setattr(module, "kept_params", told)


@pytest.mark.parametrize("lane", ["fast lane", "ASGI path"])
@pytest.mark.parametrize("path", BODIES)
async def test_no_client_sees_where_a_decode_worker_keeps_its_blocks(run_fleet, telling_workers, path):
    name = next(name for name in ("messages", "prompt", "input") if name in BODIES[path])
    short = SHORT if name != "messages" else [{"role": "user", "content": SHORT}]
    async with run_fleet("pd") as (gateway, (_, decode)):
        moved, own = await ask(gateway, path), await ask(gateway, path, **{name: short})
        alone = await gateway.client.post(decode.url + path, json=BODIES[path])

        assert "10.9.9.9" in alone.text
        assert moved.headers["x-kvroute-prefill-worker"] == "w0"
        assert "x-kvroute-prefill-worker" not in own.headers
        for answer in (moved, own):
            assert answer.json()["kv_transfer_params"] == {}
            assert "remote_" not in answer.text
            assert texts(answer)


async def test_no_client_sees_the_parameters_in_a_stream_or_in_a_stored_response(run_fleet, telling_workers):
    path = "/v1/responses"
    async with run_fleet("pd") as (gateway, _):
        streamed = await ask(gateway, path, stream=True)
        stored = await ask(gateway, path)
        again = await gateway.client.get(f"{path}/{stored.json()['id']}")

        assert '"kv_transfer_params":{  ' in streamed.text.rpartition("event: response.incomplete")[2]
        assert again.json()["kv_transfer_params"] == {}
        for answer in (streamed, stored, again):
            assert answer.status_code == 200
            assert "remote_" not in answer.text


async def test_without_roles_the_workers_parameters_pass(run_fleet, telling_workers):
    async with run_fleet("bb") as (gateway, _):
        answer = await ask(gateway)

        assert answer.json()["kv_transfer_params"]["remote_host"] == "10.9.9.9"


# The prefill worker fails


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"kind": "status", "status": 500}, "status"),
        ({"kind": "status", "status": 400}, "status"),
        ({"kind": "reset"}, "connection_lost"),
    ],
)
async def test_when_the_prefill_worker_fails_the_decode_worker_does_the_whole_request(
    run_fleet, fault, cause, streamed
):
    async with run_fleet("pd") as (gateway, (prefill, decode)):
        for _ in range(4):  # more than a stale connection can explain
            prefill.worker.faults.add(Fault(path=CHAT, **fault))
        answer = await ask(gateway, stream=streamed)

        assert answer.status_code == 200
        assert answer.headers["x-kvroute-worker"] == "w1"
        assert "x-kvroute-prefill-worker" not in answer.headers
        assert decode.engine.counters.external_hits == 0
        assert gateway.metric("kvroute_handover_fallbacks_total", cause=cause) == 1
        decision = (await gateway.client.get("/admin/decisions")).json()["decisions"][0]
        assert decision["handover_fallback"] == cause
        (row,) = (await live(gateway))["requests"]
        assert (row["prefill_worker"], row["worker"], row["moved"]) == ("w0", "w1", None)
        assert row["handover_fallback"] == cause
        assert all_quiet(gateway)


async def test_a_dead_prefill_worker_costs_no_request(run_fleet):
    health = {"interval_s": 60}
    async with run_fleet("pd", fleet={"health": health}) as (gateway, (prefill, _)):
        await prefill.kill()
        answers = [await ask(gateway, COMPLETIONS, prompt=f"{number} {LONG}") for number in range(3)]

        assert [answer.status_code for answer in answers] == [200] * 3
        assert gateway.metric("kvroute_handover_fallbacks_total", cause="refused") == 1
        assert answers[-1].headers["x-kvroute-reason"] == "no_prefill_worker"
        assert all_quiet(gateway)


async def test_a_prefill_worker_without_the_connector_is_noticed(run_fleet):
    async with run_fleet("pd", sim={"nixl": False}) as (gateway, _):
        answer = await ask(gateway)

        assert answer.status_code == 200
        assert gateway.metric("kvroute_handover_fallbacks_total", cause="no_blocks") == 1


@pytest.mark.parametrize("after_chunks", [None, 0])
async def test_a_late_prefill_worker_is_not_awaited(after_chunks, run_fleet):
    limits = {"threshold_tokens": 256, "prefill_timeout_s": 0.05}
    async with run_fleet("pd", routing={"prefill_decode": limits}) as (gateway, (prefill, _)):
        prefill.worker.faults.add(Fault(kind="hang", path=CHAT, after_chunks=after_chunks))
        answer = await ask(gateway)

        assert answer.status_code == 200
        assert gateway.metric("kvroute_handover_fallbacks_total", cause="prefill_timeout") == 1
        assert all_quiet(gateway)


async def test_a_client_that_leaves_during_the_first_leg_ends_it(run_fleet):
    async with run_fleet("pd") as (gateway, (prefill, decode)):
        prefill.worker.faults.add(Fault(kind="hang", path=CHAT))
        asked = asyncio.create_task(ask(gateway))
        await until(lambda: bool(received(prefill)))
        asked.cancel()
        await until(lambda: all_quiet(gateway))

        assert received(decode) == []
        assert usage_of(prefill) == 0


# The transfer fails


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_failed_transfer_is_resent_once_without_the_blocks(run_fleet, streamed):
    async with run_fleet("pd") as (gateway, (prefill, decode)):
        lost = prefill.worker.transfers.kept

        async def lose() -> None:  # the blocks vanish between the legs
            while True:
                lost.clear()
                await asyncio.sleep(0)

        losing = asyncio.create_task(lose())
        answer = await ask(gateway, stream=streamed)
        losing.cancel()

        assert answer.status_code == 200
        assert "error" not in answer.text
        assert answer.headers["x-kvroute-worker"] == "w1"
        assert decode.worker.transfers.failed == 1
        assert [("kv_transfer_params" in body) for body in received(decode)] == [True, False]
        assert gateway.metric("kvroute_handover_fallbacks_total", cause="transfer") == 1
        assert gateway.metric("kvroute_retries_total", cause="transfer") == 1
        assert all_quiet(gateway)


# The decode worker fails


async def test_a_decode_worker_that_refuses_leaves_the_blocks_to_the_next_one(run_fleet):
    health = {"interval_s": 60}
    async with run_fleet("pdd", fleet={"health": health}) as (gateway, (prefill, one, two)):
        chosen = (await gateway.client.post("/v1/route/explain", json=BODIES[CHAT])).json()
        dead, other = (one, two) if chosen["ranking"][0]["worker"] == "w1" else (two, one)
        await dead.kill()
        answer = await ask(gateway)

        assert answer.status_code == 200
        assert answer.headers["x-kvroute-worker"] == ("w2" if other is two else "w1")
        assert other.engine.counters.external_hits > 256
        assert int(answer.headers["x-kvroute-moved-tokens"]) > 256
        await until(lambda: usage_of(prefill) == 0)
        assert all_quiet(gateway)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_decode_worker_that_breaks_off_is_replaced_and_the_blocks_are_freed(run_fleet, streamed):
    async with run_fleet("pdd") as (gateway, (prefill, one, two)):
        chosen = (await gateway.client.post("/v1/route/explain", json=BODIES[CHAT])).json()
        failing = one if chosen["ranking"][0]["worker"] == "w1" else two
        failing.worker.faults.add(Fault(kind="reset", path=CHAT))
        answer = await ask(gateway, stream=streamed)

        assert answer.status_code == 200
        await until(lambda: usage_of(prefill) == 0)
        await until(lambda: all_quiet(gateway))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("roles", ["pd", "pdd"])
async def test_blocks_that_nobody_takes_are_counted(run_fleet, roles, streamed):
    async with run_fleet(roles) as (gateway, (prefill, *others)):
        for worker in others:
            worker.worker.faults.add(Fault(kind="reset", path=CHAT, count=None))
        answer = await ask(gateway, stream=streamed)

        # Two workers have begun to compute it and failed: the prefill worker is no third one.
        assert answer.status_code == (200 if roles == "pd" else 502)
        if roles == "pd":
            assert answer.headers["x-kvroute-worker"] == "w0"
        await until(lambda: gateway.metric("kvroute_handover_blocks_kept_total") == 1)
        assert usage_of(prefill) > 0
        await until(lambda: all_quiet(gateway))


async def test_blocks_that_a_full_decode_worker_does_not_take_go_to_the_next_one(run_fleet):
    async with run_fleet("pdd") as (gateway, (prefill, one, two)):
        chosen = (await gateway.client.post("/v1/route/explain", json=BODIES[CHAT])).json()
        full, other = (one, two) if chosen["ranking"][0]["worker"] == "w1" else (two, one)
        full.worker.faults.add(Fault(kind="status", status=429, path=CHAT))
        answer = await ask(gateway)

        assert answer.status_code == 200
        assert other.worker.transfers.reads == 1
        await until(lambda: usage_of(prefill) == 0)
        await until(lambda: all_quiet(gateway))


async def test_blocks_that_a_decode_worker_refuses_are_freed(run_fleet):
    async with run_fleet("pdd") as (gateway, (prefill, one, two)):
        chosen = (await gateway.client.post("/v1/route/explain", json=BODIES[CHAT])).json()
        refusing = one if chosen["ranking"][0]["worker"] == "w1" else two
        refusing.worker.faults.add(Fault(kind="status", status=400, path=CHAT))
        answer = await ask(gateway)

        assert answer.status_code == 400
        await until(lambda: usage_of(prefill) == 0)
        await until(lambda: all_quiet(gateway))


async def test_without_another_decode_worker_the_prefill_worker_answers(run_fleet):
    async with run_fleet("pd", fleet={"health": {"interval_s": 60}}) as (gateway, (_, decode)):
        await decode.kill()
        answer = await ask(gateway)
        later = await ask(gateway, COMPLETIONS)

        assert answer.status_code == 200
        assert answer.headers["x-kvroute-worker"] == "w0"
        assert gateway.metric("kvroute_handover_blocks_kept_total") == 1
        assert later.headers["x-kvroute-reason"] == "no_decode_worker"
        assert all_quiet(gateway)


async def test_a_late_transfer_is_not_awaited(run_fleet):
    limits = {"threshold_tokens": 256, "decode_timeout_s": 0.05}
    async with run_fleet("pd", routing={"prefill_decode": limits}) as (gateway, (_, decode)):
        decode.worker.faults.add(Fault(kind="hang", path=CHAT))
        answer = await ask(gateway, stream=True)

        assert answer.status_code == 200
        assert gateway.metric("kvroute_handover_fallbacks_total", cause="decode_timeout") == 1
        assert all_quiet(gateway)


async def test_a_client_that_leaves_during_the_second_leg_leaves_no_blocks(run_fleet):
    async with run_fleet("pd", sim={"time_scale": 1}) as (gateway, (prefill, decode)):
        asked = asyncio.create_task(ask(gateway, stream=True, max_tokens=4000))
        await until(lambda: bool(received(decode)))
        asked.cancel()
        await until(lambda: all_quiet(gateway))
        await until(lambda: usage_of(prefill) == 0 and usage_of(decode) == 0)


async def test_a_decode_worker_that_dies_in_mid_stream_ends_the_stream_with_an_error(run_fleet):
    async with run_fleet("pd") as (gateway, (_, decode)):
        decode.worker.faults.add(Fault(kind="reset", after_chunks=2, path=CHAT))
        answer = await ask(gateway, stream=True)

        assert "worker_unreachable" in answer.text
        assert all_quiet(gateway)


async def test_a_permit_is_taken_on_both_workers(run_fleet):
    admission = {"max_concurrent": 4}
    async with run_fleet("pd", admission=admission) as (gateway, _):
        answers = await asyncio.gather(
            *(ask(gateway, COMPLETIONS, prompt=f"{number} {LONG}") for number in range(12))
        )

        assert [answer.status_code for answer in answers] == [200] * 12
        assert all_quiet(gateway)


async def test_workers_that_share_a_cache_need_no_parameters(run_fleet):
    options = {"threshold_tokens": 256, "connector": "shared_cache"}
    async with run_fleet("pd", routing={"prefill_decode": options}) as (gateway, (prefill, decode)):
        answer = await ask(gateway, stream=True)

        assert answer.headers["x-kvroute-prefill-worker"] == "w0"
        assert [body["max_tokens"] for body in received(prefill)] == [1]
        assert received(decode) == [{**BODIES[CHAT], "stream": True}]
