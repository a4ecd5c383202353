"""One picker behind a real Envoy: where requests go, what clients get, and what the picker accounts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import openai
import pytest
from tests.epp.conftest import SERVED, Proxy, RunProxy, one_filter, port_of
from tests.support.waiting import until

from kvroute.index.map_trust import MapTrust
from kvroute.sim.options import SimOptions

CHAT = "/v1/chat/completions"


def chat(text: str, **fields: object) -> dict[str, Any]:
    return {"model": "sim-model", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


def two_filters(config: dict[str, Any]) -> dict[str, Any]:
    return config


Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(params=[two_filters, one_filter])
def change(request: pytest.FixtureRequest) -> Change:
    """Both ways in which Envoy can be set up."""
    found: Change = request.param
    return found


def worker_of(proxy: Proxy, answer: httpx.Response) -> int:
    """The place of the worker that has served the answer, as Envoy says."""
    return [("{}:{}".format(*port_of(sim.url))) for sim in proxy.sims].index(answer.headers[SERVED])


async def test_a_request_reaches_the_worker_that_the_picker_chose(run_proxy: RunProxy, change: Change):
    async with run_proxy(2, change=change) as proxy:
        answer = await proxy.client.post(CHAT, json=chat("x" * 300_000))

        assert answer.status_code == 200, answer.text
        await proxy.until_idle()
        (decision,) = proxy.picker.runtime.plane.journal.decisions(5)
        assert decision["worker"] == f"w{worker_of(proxy, answer)}"
        assert decision["status"] == 200
        assert answer.headers["x-kvroute-strategy"] == "prefixaware"
        assert answer.headers["x-kvroute-reason"] == decision["reason"]
        assert proxy.sims[worker_of(proxy, answer)].worker.counters.by_path[CHAT] == 1


async def test_an_answer_is_accounted_until_its_real_end(run_proxy: RunProxy, change: Change):
    async with run_proxy(1, SimOptions(kv_events=False), change=change) as proxy:
        async with proxy.client.stream("POST", CHAT, json=chat("hi", stream=True, max_tokens=400)) as answer:
            chunks = answer.aiter_bytes()
            await anext(chunks)

            assert [load[0] for load in proxy.loads()] == [1]
        await proxy.until_idle()  # the client has left


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_during_the_prefill_returns_the_load(
    run_proxy: RunProxy, change: Change, stream
):
    async with run_proxy(1, SimOptions(token_s=1.0, kv_events=False), change=change) as proxy:
        request = asyncio.create_task(proxy.client.post(CHAT, json=chat("a" * 4000, stream=stream)))
        await until(lambda: proxy.loads()[0][0] == 1)
        await until(lambda: proxy.sims[0].worker.counters.requests and proxy.loads()[0][0] == 1)
        request.cancel()

        await proxy.until_idle()

        if not stream:  # a stream's head comes before the prefill
            (decision,) = proxy.picker.runtime.plane.journal.decisions(5)
            assert (decision["status"], decision["ended_by"]) == (499, "client")


async def test_a_worker_that_breaks_off_returns_the_load(run_proxy: RunProxy, change: Change):
    async with run_proxy(1, SimOptions(kv_events=False), change=change) as proxy:
        async with proxy.client.stream("POST", CHAT, json=chat("hi", stream=True, max_tokens=400)) as answer:
            chunks = answer.aiter_bytes()
            await anext(chunks)
            assert [load[0] for load in proxy.loads()] == [1]
            await proxy.sims[0].kill()
            with pytest.raises(httpx.TransportError):
                async for _ in chunks:
                    pass
        await proxy.until_idle()


async def test_errors_have_the_gateways_own_bodies(run_proxy: RunProxy, change: Change):
    async with run_proxy(1, change=change, server={"max_body_bytes": 100_000}) as proxy:
        unknown = await proxy.client.post(CHAT, json={**chat("x"), "model": "nobody"})
        malformed = await proxy.client.post(CHAT, content=b"{")
        large = await proxy.client.post(CHAT, json=chat("x" * 200_000))
        nowhere = await proxy.client.post("/v1/nothing", json={})
        anthropic = await proxy.client.post("/v1/messages", json={**chat("x"), "model": "nobody"})
        metrics = await proxy.client.get("/metrics")
        await proxy.sims[0].kill()
        await proxy.picker.until(lambda: bool(proxy.picker.runtime.fleet.reasons_not_ready()))
        away = await proxy.client.post(CHAT, json=chat("x"))

        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert unknown.headers["content-type"] == "application/json"
        assert (malformed.status_code, malformed.json()["error"]["type"]) == (400, "invalid_request_error")
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
        assert anthropic.json()["type"] == "error"
        assert metrics.status_code == 404  # the picker's own pages are not for clients
        assert (away.status_code, away.json()["error"]["code"]) == (503, "no_routable_worker")
        assert away.headers["retry-after"] == "1"
        await until(
            lambda: proxy.picker.metric("kvroute_requests_rejected_total", code="no_routable_worker") == 1
        )
        await proxy.until_idle()


async def test_the_second_address_serves_when_the_first_worker_is_dead(run_proxy: RunProxy, change: Change):
    """The picker does not know yet that the worker is dead; Envoy tries the next address of the list."""
    async with run_proxy(2, change=change, fleet={"health": {"interval_s": 600}}) as proxy:
        before = await proxy.client.post(CHAT, json=chat("y" * 50_000))
        first = worker_of(proxy, before)
        await proxy.until_idle()
        await proxy.sims[first].kill()

        after = await proxy.client.post(CHAT, json=chat("y" * 50_000))

        assert after.status_code == 200, after.text
        assert worker_of(proxy, after) == 1 - first
        await proxy.until_idle()
        decision = proxy.picker.runtime.plane.journal.decisions(1)[0]
        assert (decision["worker"], decision["attempts"]) == (f"w{1 - first}", 2)
        await until(lambda: proxy.picker.metric("kvroute_epp_not_served_total", worker=f"w{first}") == 1)
        again = await proxy.client.post(CHAT, json=chat("y" * 50_000))
        assert again.status_code == 200


def with_route_timeout(config: dict[str, Any]) -> dict[str, Any]:
    """Envoy gives up a request after 0.2 s."""
    route_of(config)["route"]["timeout"] = "0.2s"
    return config


def without_workers(config: dict[str, Any]) -> dict[str, Any]:
    """Envoy knows no worker."""
    config["static_resources"]["clusters"][0]["load_assignment"]["endpoints"] = []
    return config


def route_of(config: dict[str, Any]) -> dict[str, Any]:
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    found: dict[str, Any] = manager["route_config"]["virtual_hosts"][0]["routes"][0]
    return found


@pytest.mark.parametrize(
    ("break_off", "status", "error"),
    [
        (with_route_timeout, 504, "response_timeout"),
        (without_workers, 503, "no_healthy_upstream"),
    ],
)
async def test_answers_of_envoy_itself_are_no_failures_of_workers(
    run_proxy: RunProxy, change: Change, break_off: Change, status, error
):
    """They must not eject workers that do nothing wrong."""
    options = SimOptions(token_s=0.01, kv_events=False)
    async with run_proxy(2, options, change=lambda config: break_off(change(config))) as proxy:
        answers = [await proxy.client.post(CHAT, json=chat("a" * 4000, max_tokens=1)) for _ in range(6)]

        assert [answer.status_code for answer in answers] == [status] * 6
        await proxy.until_idle()
        decisions = proxy.picker.runtime.plane.journal.decisions(6)
        assert {decision["error"] for decision in decisions} == {error}
        assert proxy.picker.metric("kvroute_epp_not_served_total") == 0
        assert all(worker.is_routable for worker in proxy.picker.runtime.fleet.workers())


async def test_workers_that_refuse_connections_have_failed(run_proxy: RunProxy, change: Change):
    async with run_proxy(2, change=change, fleet={"health": {"interval_s": 600}}) as proxy:
        for sim in proxy.sims:
            await sim.kill()

        answer = await proxy.client.post(CHAT, json=chat("hello"))

        assert answer.status_code == 503
        await proxy.until_idle()
        for worker in ("w0", "w1"):
            assert proxy.picker.metric("kvroute_epp_not_served_total", worker=worker) == 1


async def test_one_address_is_sent_without_fallbacks(run_proxy: RunProxy):
    async with run_proxy(2, epp={"fallbacks": 0}, change=one_filter) as proxy:
        answer = await proxy.client.post(CHAT, json=chat("hello"))

        received = proxy.sims[worker_of(proxy, answer)].worker.received
        (asked,) = [each for each in received if each.target == CHAT]  # the others are probes
        sent = dict(asked.headers)[b"x-gateway-destination-endpoint"].decode()
        assert sent == answer.headers[SERVED]


async def test_a_client_cannot_choose_the_worker(run_proxy: RunProxy):
    async with run_proxy(2) as proxy:
        workers = set()
        for sim in proxy.sims:
            headers = {"x-gateway-destination-endpoint": "{}:{}".format(*port_of(sim.url))}
            answer = await proxy.client.post(CHAT, json=chat("z" * 20_000), headers=headers)
            workers.add(worker_of(proxy, answer))
            await proxy.until_idle()  # a client may have the answer before the picker knows its end

        assert len(workers) == 1


async def test_keys_are_checked_and_workers_get_their_own(run_proxy: RunProxy):
    options = SimOptions(time_scale=0, kv_events=False, api_key="worker-key")
    sections = {"server": {"api_keys": ["client-key"]}, "fleet": {"worker_api_key": "worker-key"}}
    async with run_proxy(1, options, **sections) as proxy:
        without = await proxy.client.post(CHAT, json=chat("x"))
        with_key = await proxy.client.post(CHAT, json=chat("x"), headers={"x-api-key": "client-key"})
        models = await proxy.client.get("/v1/models")

        assert (without.status_code, without.headers["www-authenticate"]) == (401, "Bearer")
        assert with_key.status_code == 200, with_key.text
        received = [each for each in proxy.sims[0].worker.received if each.target == CHAT]  # also probes
        headers = dict(received[-1].headers)
        assert headers[b"authorization"] == b"Bearer worker-key"
        assert b"x-api-key" not in headers
        assert models.status_code == 401


async def test_an_alias_is_replaced_in_the_body(run_proxy: RunProxy):
    async with run_proxy(1, fleet={"aliases": {"nick": "sim-model"}}) as proxy:
        answer = await proxy.client.post(CHAT, json={**chat("x" * 100_000), "model": "nick"})

        assert answer.json()["model"] == "sim-model"


async def test_requests_wait_for_a_permit_and_a_full_queue_refuses(run_proxy: RunProxy, change: Change):
    options = SimOptions(kv_events=False)
    admission = {"max_concurrent": 1, "max_waiting": 1}
    async with run_proxy(1, options, change=change, admission=admission) as proxy:
        async with proxy.client.stream("POST", CHAT, json=chat("a", stream=True, max_tokens=2000)) as first:
            chunks = first.aiter_bytes()  # without the variable httpx would close the answer
            await anext(chunks)
            second = asyncio.create_task(proxy.client.post(CHAT, json=chat("b")))
            await until(lambda: proxy.picker.metric("kvroute_queue_waiting") == 1)

            third = await proxy.client.post(CHAT, json=chat("c"))
            assert (third.status_code, third.json()["error"]["code"]) == (429, "queue_full")
            second.cancel()
            await until(lambda: proxy.picker.metric("kvroute_queue_waiting") == 0)
            fourth = asyncio.create_task(proxy.client.post(CHAT, json=chat("d")))
            await until(lambda: proxy.picker.metric("kvroute_queue_waiting") == 1)
        assert (await fourth).status_code == 200
        await proxy.until_idle()


async def test_the_openai_client_works_unchanged(run_proxy: RunProxy, change: Change):
    async with run_proxy(2, change=change) as proxy:
        async with openai.AsyncOpenAI(base_url=f"{proxy.envoy.url}/v1", api_key="none") as client:
            models = [model.id async for model in client.models.list()]
            one = await client.models.retrieve("sim-model")
            messages: Any = [{"role": "user", "content": "hi"}]
            whole = await client.chat.completions.create(model="sim-model", messages=messages, max_tokens=5)
            stream = await client.chat.completions.create(
                model="sim-model", messages=messages, max_tokens=5, stream=True
            )
            chunks = [chunk async for chunk in stream]
            kept = await client.responses.create(model="sim-model", input="hi", max_output_tokens=5)
            again = await client.responses.retrieve(kept.id)
            next_one = await client.responses.create(
                model="sim-model", input="more", previous_response_id=kept.id, max_output_tokens=5
            )
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="nobody", messages=messages)

        assert models == ["sim-model"]
        assert one.id == "sim-model"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 5
        assert len(chunks) > 5
        assert again.id == kept.id
        assert next_one.previous_response_id == kept.id
        await proxy.until_idle()


async def test_answers_may_pass_the_picker(run_proxy: RunProxy):
    """Data planes that send answers through the picker get each piece back; the metric shows that they do."""

    def whole(config: dict[str, Any]) -> dict[str, Any]:
        return one_filter(config, response_body_mode="FULL_DUPLEX_STREAMED")

    async with run_proxy(1, change=whole) as proxy:
        answer = await proxy.client.post(CHAT, json=chat("x", stream=True, max_tokens=50))

        assert answer.text.rstrip().endswith("data: [DONE]")
        assert proxy.picker.metric("kvroute_epp_response_bodies_total") > 0
        await proxy.until_idle()


async def test_another_body_mode_is_refused_with_the_reason(run_proxy: RunProxy, caplog):
    def buffered(config: dict[str, Any]) -> dict[str, Any]:
        return one_filter(config, request_body_mode="BUFFERED", request_trailer_mode="SKIP")

    async with run_proxy(1, change=buffered) as proxy:
        answer = await proxy.client.post(CHAT, json=chat("x"))

        assert answer.status_code == 400
        assert "FULL_DUPLEX_STREAMED" in answer.json()["error"]["message"]
        assert [record for record in caplog.records if "FULL_DUPLEX_STREAMED" in record.message]


async def test_events_of_the_worker_show_the_first_token(run_proxy: RunProxy, change: Change):
    """Envoy shows the head of a stream before the prefill, which by the costs here would take no time."""
    routing = {"strategy": "kvaware", "costs": {"token_us": 0.001, "iteration_ms": 0, "context_token_ns": 0}}
    options = SimOptions(token_s=5e-4)
    sections = {"routing": routing, "tokens": {"timeout_ms": 10_000}}
    async with run_proxy(1, options, change=change, **sections) as proxy:
        (worker,), caches = proxy.picker.runtime.fleet.workers(), proxy.picker.runtime.router.caches
        await until(lambda: [place.trust for place in caches.places(worker)] == [MapTrust.WHOLE])
        await until(lambda: not proxy.picker.runtime.cache_tracker.notes())  # the tokens are known
        body = chat("word " * 2000, stream=True, max_tokens=1000, ignore_eos=True)
        async with proxy.client.stream("POST", CHAT, json=body) as answer:
            chunks = answer.aiter_bytes()
            await anext(chunks)
            await until(lambda: proxy.loads()[0][2] == 0)
            assert proxy.loads()[0][0] == 1  # the answer goes on
        await proxy.until_idle()

        (decision,) = proxy.picker.runtime.plane.journal.decisions(1)
        assert decision["reason"].startswith("kv_") or decision["reason"] == "only_worker"
        assert decision["time_to_first_byte_s"] > 1  # the worker computes 3,343 tokens of 0.5 ms


async def test_the_engines_queue_ends_prefills_that_are_assumed_to_last(run_proxy: RunProxy, change: Change):
    """By the costs here a prefill takes hours."""
    fleet = {"health": {"interval_s": 0.2, "recheck_s": 0.05, "metrics_interval_s": 0.2}}
    routing = {"strategy": "prefixaware", "costs": {"token_us": 1e9}}
    async with run_proxy(
        1, SimOptions(kv_events=False), change=change, fleet=fleet, routing=routing
    ) as proxy:
        async with AsyncExitStack() as stack:
            for word in "abc":
                body = chat(word, stream=True, max_tokens=3000, ignore_eos=True)
                answer = await stack.enter_async_context(proxy.client.stream("POST", CHAT, json=body))
                assert answer.status_code == 200

            # All are computed, but one of those that do not wait could be computed in part.
            await until(lambda: proxy.loads()[0][2] == 1)
            assert proxy.loads()[0][0] == 3
        await proxy.until_idle()
