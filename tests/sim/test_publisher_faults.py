"""Faults added through POST /sim/faults, as a client sees them over a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.support.clocks import QuickClock
from tests.support.waiting import until

from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault, Faults

ASK = {"prompt": "hello", "max_tokens": 6}


async def switch_on(http: httpx.AsyncClient, *faults: dict[str, Any]) -> None:
    assert (await http.post("/sim/faults", json=list(faults))).status_code == 200


async def events(stream: httpx.Response) -> AsyncIterator[str]:
    async for line in stream.aiter_lines():
        if line.startswith("data: "):
            yield line


async def test_a_status_fault_hits_the_given_number_of_requests(http: httpx.AsyncClient) -> None:
    await switch_on(http, {"kind": "status", "status": 429, "retry_after_s": 7, "count": 2})
    answers = [await http.post("/v1/completions", json=ASK) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [429, 429, 200]
    assert answers[0].headers["retry-after"] == "7"
    assert answers[0].json()["error"]["code"] == 429


async def test_the_control_plane_has_no_faults_unless_its_path_is_named(http: httpx.AsyncClient) -> None:
    await switch_on(http, {"kind": "status", "status": 500, "count": None})
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/v1/models")).status_code == 200
    assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 500

    await http.delete("/sim/faults")
    assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 200

    await switch_on(http, {"kind": "status", "path": "/health"})
    assert (await http.get("/health")).status_code == 503
    assert (await http.get("/health")).status_code == 200


async def test_a_bomb_is_a_small_answer_with_a_large_content(http: httpx.AsyncClient) -> None:
    await switch_on(http, {"kind": "bomb", "path": "/metrics"})
    async with http.stream("GET", "/metrics") as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert int(answer.headers["content-length"]) < 4 << 20
        received = 0
        async for chunk in answer.aiter_bytes():
            received += len(chunk)
            if received > 16 << 20:
                break

    assert received > 16 << 20


async def test_an_endless_answer_ends_with_its_client(http: httpx.AsyncClient) -> None:
    await switch_on(http, {"kind": "endless", "path": "/metrics"})
    async with http.stream("GET", "/metrics") as answer:
        received = 0
        async for chunk in answer.aiter_bytes():
            received += len(chunk)
            if received > 4 << 20:
                break

    assert (await http.get("/metrics")).status_code == 200


async def test_limits_of_the_queue_change_at_once(http: httpx.AsyncClient) -> None:
    await switch_on(http, {"max_queued_tokens": 1, "max_queued_requests": 1})
    refused = [await http.post("/v1/completions", json={**ASK, "n": 2}) for _ in range(2)]
    await switch_on(http, {"max_queued_tokens": 0, "max_queued_requests": 0})
    answered = await http.post("/v1/completions", json={**ASK, "n": 2})

    assert [answer.status_code for answer in (*refused, answered)] == [503, 503, 200]
    assert "cannot accept new requests" in refused[0].json()["error"]["message"]


async def test_faults_are_listed_with_their_remaining_counts(http: httpx.AsyncClient) -> None:
    await switch_on(http, {"kind": "status", "count": 2}, {"kind": "slow", "delay_s": 0, "count": 2})
    await http.post("/v1/completions", json=ASK)

    listing = (await http.get("/sim/faults")).json()["faults"]

    assert [(fault["kind"], fault["count"]) for fault in listing] == [("status", 1), ("slow", 1)]


@pytest.mark.parametrize("body", [{"kind": "meteor"}, {"kind": "status", "planet": 1}, 7, [7]])
async def test_faults_that_do_not_exist_are_refused(http: httpx.AsyncClient, body: Any) -> None:
    assert (await http.post("/sim/faults", json=body)).status_code == 400


async def test_a_reset_before_the_head_breaks_the_connection(http: httpx.AsyncClient) -> None:
    await switch_on(http, {"kind": "reset"})

    with pytest.raises(httpx.ReadError):
        await http.post("/v1/completions", json=ASK)
    assert (await http.post("/v1/completions", json=ASK)).status_code == 200


@pytest.mark.parametrize("chunks", [0, 3])
async def test_a_reset_in_the_stream_lets_that_many_chunks_pass(
    http: httpx.AsyncClient, sim: RunningSim, chunks: int
) -> None:
    await switch_on(http, {"kind": "reset", "after_chunks": chunks})
    received: list[str] = []

    async def read(stream: httpx.Response) -> None:
        async for event in events(stream):
            received.append(event)

    async with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as stream:
        assert stream.status_code == 200
        with pytest.raises(httpx.TransportError):
            await read(stream)

    assert len(received) == chunks
    await until(lambda: not sim.engine.has_work)


async def test_a_reset_of_a_plain_answer_comes_after_its_head(http: httpx.AsyncClient) -> None:
    await switch_on(http, {"kind": "reset", "after_chunks": 0})

    async with http.stream("POST", "/v1/completions", json=ASK) as answer:
        assert int(answer.headers["content-length"]) > 0
        with pytest.raises(httpx.TransportError):
            await answer.aread()


async def test_a_hang_sends_nothing_until_the_client_leaves(http: httpx.AsyncClient, sim: RunningSim) -> None:
    await switch_on(http, {"kind": "hang"})

    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json=ASK, timeout=0.1)
    assert sim.worker.driver.finished.total() == 0


async def test_a_hang_in_the_stream_is_aborted_when_the_client_leaves(
    http: httpx.AsyncClient, sim: RunningSim
) -> None:
    await switch_on(http, {"kind": "hang", "after_chunks": 2})
    received = []

    async with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as stream:
        async for event in events(stream):
            received.append(event)
            if len(received) == 2:
                break

    await until(lambda: not sim.engine.has_work and sim.worker.driver.finished.total() == 1)
    assert json.loads(received[0][6:])["object"] == "text_completion"


async def test_a_slow_worker_waits_before_the_engine_sees_the_request() -> None:
    clock = QuickClock(0)
    async with (
        run_sim(SimOptions(time_scale=0), clock=clock) as sim,
        httpx.AsyncClient(base_url=sim.url) as http,
    ):
        sim.worker.faults.add(Fault(kind="slow", delay_s=30))

        assert (await http.post("/v1/completions", json=ASK)).status_code == 200

    assert clock.slept[0] == 30
    assert clock.slept.count(30) == 1


async def test_a_restart_resets_streams_and_clears_all_state(
    http: httpx.AsyncClient, sim: RunningSim
) -> None:
    await http.post("/v1/completions", json={"prompt": "hello " * 40})
    before = sim.worker.start_time
    async with http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 100_000, "stream": True}
    ) as stream:
        lines = events(stream)
        await anext(lines)
        await switch_on(http, {"restart": True})
        with pytest.raises(httpx.TransportError):
            async for _ in lines:
                pass

    assert sim.worker.start_time > before
    assert sim.engine.cache.held_keys == set()
    again = (await http.post("/v1/completions", json={"prompt": "hello " * 40})).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_shrunk_cache_evicts_and_a_grown_one_takes_more(
    http: httpx.AsyncClient, sim: RunningSim
) -> None:
    await http.post("/v1/completions", json={"prompt": "hello " * 40})
    assert len(sim.engine.cache.held_keys) == 5

    await switch_on(http, {"capacity_tokens": 32})
    assert len(sim.engine.cache.held_keys) == 2
    assert 'num_gpu_blocks="2"' in (await http.get("/metrics")).text

    refused = await http.post("/v1/completions", json={"prompt": "hello " * 40})
    assert refused.status_code == 500
    streamed = await http.post("/v1/completions", json={"prompt": "hello " * 40, "stream": True})
    assert streamed.status_code == 500

    await switch_on(http, {"capacity_tokens": 1600})
    assert (await http.post("/v1/completions", json={"prompt": "hello " * 40})).status_code == 200


def test_one_fault_of_each_kind_hits_a_request_and_the_oldest_goes_first() -> None:
    faults = Faults()
    for status in (500, 503):
        faults.add(Fault(kind="status", status=status))
    faults.add(Fault(kind="slow"))
    faults.add(Fault(kind="drop_events"))

    assert [(f.kind, f.status) for f in faults.for_request("/v1/completions")] == [
        ("status", 500),
        ("slow", 503),
    ]
    assert [f.kind for f in faults.for_batch()] == ["drop_events"]
    assert [f.status for f in faults.for_request("/v1/completions")] == [503]
    assert faults.for_request("/v1/completions") == faults.for_batch() == []


async def test_faults_affect_one_worker_only() -> None:
    options = SimOptions(time_scale=0)
    async with run_sim(options) as one, run_sim(options) as two, httpx.AsyncClient() as http:
        one.worker.faults.add(Fault(kind="status", count=None))

        assert (await http.post(f"{one.url}/v1/completions", json=ASK)).status_code == 503
        assert (await http.post(f"{two.url}/v1/completions", json=ASK)).status_code == 200


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
async def test_a_kill_fault_ends_the_worker_on_a_body_with_the_marker(
    sim: RunningSim, http: httpx.AsyncClient, delay_s: float
) -> None:
    await switch_on(http, {"kind": "kill", "marker": "poison", "delay_s": delay_s, "count": None})
    assert (await http.post("/v1/completions", json=ASK)).status_code == 200

    with pytest.raises(httpx.TransportError):
        await http.post("/v1/completions", json={**ASK, "prompt": "poison"})
    with pytest.raises(httpx.ConnectError):
        await http.get("/health")

    await sim.start()
    assert (await http.post("/v1/completions", json=ASK)).status_code == 200
