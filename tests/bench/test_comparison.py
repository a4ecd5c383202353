"""What the comparisons of routers measure and how they judge (bench/comparison.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from comparison import (
    Answered,
    Figures,
    commands,
    figures,
    medians,
    read_events,
    request_streamed,
    serves_all,
    verdicts,
)
from gateway_routers import Launch
from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault

ONE = Figures(
    requests=10, failed=0, mean=1.0, p50=1.0, p90=2.0, p99=3.0, hit=0.5, cached_tokens=50, prompt_tokens=100
)


def body(**changes: object) -> bytes:
    asked = {"model": "sim-model", "prompt": "ab " * 64, "max_tokens": 4, "stream": True}
    return json.dumps(asked | {"stream_options": {"include_usage": True}} | changes).encode()


@pytest.fixture
def http() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False)


async def test_a_streamed_answer_is_timed_and_its_tokens_are_counted(http: httpx.AsyncClient) -> None:
    async with http, run_sim(SimOptions(time_scale=0.01)) as worker:
        first = await request_streamed(http, f"{worker.url}/v1/completions", body())
        again = await request_streamed(http, f"{worker.url}/v1/completions", body())

    assert not first.error
    assert 0.0 < first.ttft_s <= first.total_s
    assert (first.prompt_tokens, first.cached_tokens, len(first.text)) == (64, 0, 12)
    assert again.cached_tokens == 48
    assert again.text == first.text


async def test_refused_and_broken_answers_are_failures_not_fast_ones(http: httpx.AsyncClient) -> None:
    async with http, run_sim(SimOptions(time_scale=0.01)) as worker:
        worker.worker.faults.add(Fault(kind="status", status=503))
        refused = await request_streamed(http, f"{worker.url}/v1/completions", body())
        worker.worker.faults.add(Fault(kind="reset", after_chunks=1))
        broken = await request_streamed(http, f"{worker.url}/v1/completions", body())
    unreachable = await request_streamed(
        httpx.AsyncClient(trust_env=False), f"{worker.url}/v1/completions", body()
    )

    assert refused.error.startswith("status 503")
    assert broken.error
    assert unreachable.error
    counted = figures([Answered(0.0, ttft_s=2.0, prompt_tokens=10, cached_tokens=4), refused, broken])
    assert (counted.requests, counted.failed, counted.mean, counted.hit) == (3, 2, 2.0, 0.4)
    with pytest.raises(ValueError, match="status 503"):
        figures([refused])


def test_chats_and_completions_are_read_alike() -> None:
    chat = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a "}}]},
        {"choices": [{"delta": {"content": "word"}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}},
    ]
    plain = [{"choices": [{"text": "a word"}]}, {"choices": [], "usage": {"prompt_tokens": 7}}]

    assert read_events(map(json.dumps, chat)) == ("a word", 7, 3)
    assert read_events(map(json.dumps, plain)) == ("a word", 7, 0)


def test_quantiles_and_medians() -> None:
    answers = [Answered(0.0, ttft_s=float(number), prompt_tokens=1) for number in range(1, 101)]

    counted = figures(answers)

    assert (counted.mean, counted.p50, counted.p90, counted.p99) == (50.5, 51.0, 91.0, 100.0)
    runs = [replace(ONE, mean=mean) for mean in (9.0, 1.0, 2.0)]
    assert medians(runs) == replace(ONE, mean=2.0)


def test_a_router_is_ready_when_it_uses_every_worker() -> None:
    assert serves_all({"healthy_workers": 7}, 7)
    assert not serves_all({"healthy_workers": 6}, 7)
    ours = {"workers": {"a": "healthy", "b": "healthy"}, "notes": []}
    assert serves_all(ours, 2)
    assert not serves_all({**ours, "notes": ["a: its map is partial"]}, 2)
    assert not serves_all({**ours, "workers": {"a": "healthy", "b": "starting"}}, 2)


def test_ours_must_be_below_each_peer_that_answered_everything() -> None:
    of = {
        "prefixaware": ONE,
        "sglang-router": replace(ONE, mean=1.5),
        "vllm-router": replace(ONE, mean=0.1, failed=1),
        "roundrobin": ONE,
    }

    judged = {(one.peer, one.figure): one.is_met for one in verdicts(of)}

    assert judged == {("sglang-router", "mean"): True, ("sglang-router", "p90"): False}


def test_failed_requests_of_ours_miss_everything() -> None:
    judged = verdicts({"kvaware": replace(ONE, mean=0.1, p90=0.1, failed=1), "vllm-router": ONE})

    assert [one.is_met for one in judged] == [False, False]


async def test_vllm_routers_event_policy_gets_each_workers_event_endpoint(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with http, run_sim(SimOptions(block_size=32)) as worker:
        made = await commands(http, [worker.url], "sim-model")
        publisher = worker.worker.publisher
    assert publisher is not None

    line = made["vllm-router kv_aware"](Launch(tmp_path, tmp_path, [worker.url], 1, 2, tmp_path))

    assert line[line.index("--policy") + 1] == "kv_aware"
    assert line[line.index("--kv-event-block-size") + 1] == "32"
    assert line[line.index("--kv-event-source") + 1] == f"{worker.url}={publisher.endpoint}"
    assert line[line.index("--kv-event-replay-source") + 1] == f"{worker.url}={publisher.replay_endpoint}"
