"""Bytes through the gateway, both ways."""

import asyncio
import gzip
import json

import pytest

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault

CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "Hello there."}], "max_tokens": 8}


def last_post(sim):
    """What the worker was asked, probes apart."""
    return [request for request in sim.worker.received if request.method == "POST"][-1]


async def test_an_answer_names_its_worker_and_reason(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        answer = await gateway.client.post(
            "/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"}
        )

        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-kvroute-worker"] == "w0"
        assert answer.headers["x-kvroute-strategy"] == "prefixaware"
        assert answer.headers["x-kvroute-reason"] == "only_worker"
        assert answer.json()["usage"]["prompt_tokens"] > 0


async def test_a_request_id_is_made_where_none_was_sent(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        answer = await gateway.client.post("/v1/chat/completions", json=CHAT)

    forwarded = dict(last_post(instant_sim).headers)
    assert forwarded[b"x-request-id"].decode() == answer.headers["x-request-id"]


async def test_the_very_bytes_go_upstream(run_gateway, instant_sim):
    body = (
        b'{ "messages" : [{"role":"user","content":"\\u00e9 caf\xc3\xa9"}],\n\t'
        b'"model":"sim-model", "max_tokens": 2e0 }'
    )
    async with run_gateway([instant_sim.url]) as gateway:
        await gateway.client.post("/v1/chat/completions?x=%20y", content=body, headers={"X-Odd": "a, b"})

    request = last_post(instant_sim)
    assert request.body == body
    assert request.target == "/v1/chat/completions?x=%20y"
    assert (b"x-odd", b"a, b") in [(key.lower(), value) for key, value in request.headers]


async def test_the_times_between_chunks_and_the_last_usage_of_a_stream_are_counted(run_gateway):
    body = {**CHAT, "stream": True, "max_tokens": 6, "ignore_eos": True}
    async with (
        run_sim(SimOptions(fixed_s=0.02)) as sim,
        run_gateway([sim.url]) as gateway,
    ):
        answer = await gateway.client.post(
            "/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}}
        )
        prompt_tokens = json.loads(answer.text.split("data: ")[-2])["usage"]["prompt_tokens"]

        await gateway.until(lambda: gateway.metric("kvroute_requests_total") == 1)
        name = "kvroute_inter_token_seconds"
        pool = {"model": "sim-model", "worker": "w0", "strategy": "prefixaware"}
        assert gateway.metric(f"{name}_count", **pool) >= 4
        assert gateway.metric(f"{name}_sum", **pool) >= 0.06
        assert gateway.metric("kvroute_reported_prompt_tokens_total") == prompt_tokens


async def test_hop_by_hop_headers_stay_here(run_gateway, instant_sim):
    hop = {
        "connection": "keep-alive, x-private",
        "x-private": "1",
        "te": "trailers",
        "proxy-authorization": "x",
    }
    async with run_gateway([instant_sim.url]) as gateway:
        await gateway.client.post("/v1/chat/completions", json=CHAT, headers=hop)

    names = {key.lower() for key, _ in last_post(instant_sim).headers}
    assert not names & {b"x-private", b"te", b"proxy-authorization", b"connection"}


async def test_a_stream_is_passed_on_event_by_event(run_gateway, instant_sim):
    async with (
        run_gateway([instant_sim.url]) as gateway,
        gateway.client.stream(
            "POST",
            "/v1/chat/completions",
            json={**CHAT, "stream": True, "stream_options": {"include_usage": True}},
        ) as answer,
    ):
        text = "".join([part async for part in answer.aiter_text()])

    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 8


async def test_a_compressed_answer_stays_compressed(run_gateway, raw_worker):
    packed = gzip.compress(b'{"id": "x"}')
    raw_worker.answer = (
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(packed), packed)
    )
    async with (
        run_gateway([raw_worker.url]) as gateway,
        gateway.client.stream("POST", "/v1/completions", json={"prompt": "x"}) as answer,
    ):
        assert b"".join([part async for part in answer.aiter_raw()]) == packed
        assert answer.headers["content-encoding"] == "gzip"


async def test_duplicate_and_unusual_response_headers_come_back_as_they_are(run_gateway, raw_worker):
    raw_worker.answer = (
        b"HTTP/1.1 418 Short And Stout\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Weird: \xe9\r\n"
        b"Connection: keep-alive\r\nTransfer-Encoding: chunked\r\nTrailer: x-t\r\n\r\n"
        b"5\r\nhello\r\n0\r\nx-t: 1\r\n\r\n"
    )
    async with run_gateway([raw_worker.url]) as gateway:
        answer = await gateway.client.post("/v1/completions", json={"prompt": "x"})

    assert answer.status_code == 418
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert (b"x-weird", b"\xe9") in answer.headers.raw
    assert "trailer" not in answer.headers
    assert answer.content == b"hello"


async def test_early_hints_and_processing_do_no_harm(run_gateway, raw_worker):
    raw_worker.answer = (
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    )
    async with run_gateway([raw_worker.url]) as gateway:
        answer = await gateway.client.post("/v1/completions", json={"prompt": "x"})

    assert (answer.status_code, answer.content) == (200, b"{}")


async def test_the_client_leaving_aborts_the_workers_request(run_gateway):
    async with run_sim(SimOptions(time_scale=1, fixed_s=0.05)) as sim, run_gateway([sim.url]) as gateway:
        async with gateway.client.stream(
            "POST",
            "/v1/chat/completions",
            json={**CHAT, "stream": True, "max_tokens": 2000, "ignore_eos": True},
        ) as answer:
            await anext(answer.aiter_raw())
            assert sim.engine.running == 1
        await gateway.until(lambda: sim.engine.running == 0)
        await gateway.until(lambda: gateway.metric("kvroute_streams_aborted_total", by="client") == 1)

        assert sim.worker.driver.finished["abort"] == 1
        assert gateway.runtime.plane.entry_control.in_flight == 0


@pytest.mark.parametrize("padding", [0, 1_200_000], ids=["small body", "large body"])
async def test_the_client_leaving_during_prefill_aborts_the_workers_request(run_gateway, padding):
    async with run_sim(SimOptions(fixed_s=30)) as sim, run_gateway([sim.url]) as gateway:
        chat = {**CHAT, "padding": "x" * padding}
        call = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=chat))
        await gateway.until(lambda: sim.engine.running + sim.engine.waiting == 1)
        call.cancel()
        await gateway.until(lambda: sim.engine.running + sim.engine.waiting == 0)
        await gateway.until(lambda: gateway.runtime.plane.entry_control.in_flight == 0)

        assert [w.load.in_flight for w in gateway.runtime.fleet.workers()] == [0]
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_worker_dying_mid_stream_gives_an_error_event_and_an_end(run_gateway):
    async with run_sim(SimOptions(time_scale=0)) as sim, run_gateway([sim.url]) as gateway:
        sim.worker.faults.add(Fault(kind="reset", after_chunks=3))
        answer = await gateway.client.post("/v1/chat/completions", json={**CHAT, "stream": True})

        assert answer.status_code == 200
        last = [event for event in answer.text.split("\n\n") if event][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "worker_unreachable"
        assert gateway.metric("kvroute_streams_aborted_total", by="worker") == 1
