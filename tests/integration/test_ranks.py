"""Data-parallel ranks end to end: simulated workers with several engines, real sockets."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from kvroute.routing.registry import STRATEGIES
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions

MODEL = "sim-model"
RANKS = 2
OPTIONS = SimOptions(time_scale=0, data_parallel_size=RANKS)


@pytest.fixture
async def sims() -> AsyncIterator[list[RunningSim]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_sim(OPTIONS)) for _ in range(2)]


COSTS = {"token_us": 1.0, "context_token_ns": 0.02, "iteration_ms": 0.2, "tie_ms": 0.02}
"""Costs of an engine about as fast as these: with those of a slow one the workers seem to be full."""


def sections(strategy: str) -> dict[str, Any]:
    return {
        "routing": {"strategy": strategy, "costs": COSTS},
        "tokens": {"timeout_ms": 10_000, "computed_samples": False},
    }


async def until_ready(running) -> None:
    tracker = running.runtime.cache_tracker
    await running.until(lambda: tracker is None or not tracker.notes())


def text(seed: int, words: int = 300) -> str:
    chooser = random.Random(seed)
    return " ".join(f"{chooser.getrandbits(40):x}" for _ in range(words))


async def send(
    client: httpx.AsyncClient, path: str = "/v1/chat/completions", headers: Any = None, **body: Any
) -> httpx.Response:
    answer = await client.post(path, json={"model": MODEL, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def predicted(answer: httpx.Response) -> int:
    return int(answer.headers["x-kvroute-hit-tokens"])


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_turns_of_a_conversation_hit_with_every_strategy_that_has_affinity(
    strategy, run_gateway, sims
) -> None:
    """Without a rank the engine's balancer loses the hits of the other ranks."""
    async with run_gateway([sim.url for sim in sims], **sections(strategy)) as running:
        await until_ready(running)
        misses = turns = 0
        for chat in range(8):
            messages, before = user(text(chat)), 0
            headers = {"x-session-id": f"chat {chat}"}
            for turn in range(4):
                answer = await send(running.client, headers=headers, messages=messages, max_tokens=2)
                turns += 1
                misses += cached(answer) < before - 16
                before = answer.json()["usage"]["prompt_tokens"]
                said = answer.json()["choices"][0]["message"]["content"]
                messages = [*messages, {"role": "assistant", "content": said}, *user(text(100 * chat + turn))]

    sent = [request for sim in sims for request in sim.worker.received if request.method == "POST"]
    ranks = [
        dict(request.headers).get(b"x-data-parallel-rank")
        for request in sent
        if request.target == "/v1/chat/completions" and b"return_token_ids" not in request.body  # no sample
    ]
    assert set(ranks) == {b"0", b"1"}
    if STRATEGIES[strategy].has_affinity:
        assert misses == 0, f"{misses} of {turns} turns"


async def test_a_clients_rank_is_predicted_as_that_rank_by_the_map(run_gateway, sims) -> None:
    async with run_gateway([sims[0].url], **sections("kvaware")) as running:
        await until_ready(running)
        body = {"messages": user(text(1)), "max_tokens": 2}
        first = await send(running.client, headers={"x-data-parallel-rank": "1"}, **body)
        blocks = first.json()["usage"]["prompt_tokens"] // 16
        await running.until(lambda: running.runtime.cache_tracker.describe()["held_blocks"] >= blocks)

        other = await send(running.client, headers={"x-data-parallel-rank": "0"}, **body)
        same = await send(running.client, headers={"x-data-parallel-rank": "1"}, **body)
        free = await send(running.client, **body)

    assert predicted(other) == cached(other) == 0
    assert predicted(same) == cached(same) > 500
    assert predicted(free) == cached(free) > 500


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
async def test_what_the_engine_balances_itself_is_not_audited(strategy, run_gateway, sims) -> None:
    """vLLM's /v1/responses does not read the header."""
    async with run_gateway([sims[0].url], **sections(strategy)) as running:
        await until_ready(running)
        for _ in range(4):
            answer = await send(running.client, "/v1/responses", input=text(1), max_output_tokens=2)

        assert running.runtime.audit.describe()["predictions"] == []
        assert 0 <= predicted(answer) <= answer.json()["usage"]["input_tokens"]


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
async def test_a_reset_empties_what_is_believed_of_every_rank(strategy, run_gateway, sims) -> None:
    async with run_gateway([sims[0].url], **sections(strategy)) as running:
        await until_ready(running)
        bodies = [{"messages": user(text(number)), "max_tokens": 2} for number in range(4)]
        for body in bodies:
            await send(running.client, **body)
        worker = running.runtime.fleet.workers()[0]

        answer = await running.client.post(f"/admin/workers/{worker.id}/reset_prefix_cache")

        assert answer.json() == {"worker": worker.id, "answer": {"success": True}}
        again = [await send(running.client, **body) for body in bodies]
        assert [predicted(each) for each in again] == [cached(each) for each in again] == [0] * 4


async def test_the_event_that_clears_a_cache_clears_the_history_of_that_rank(run_gateway, sims) -> None:
    async with run_gateway([sims[0].url], **sections("kvaware")) as running:
        await until_ready(running)
        body = {"messages": user(text(1)), "max_tokens": 2}
        await send(running.client, headers={"x-data-parallel-rank": "1"}, **body)
        worker, router = running.runtime.fleet.workers()[0], running.runtime.router
        assert router.describe_worker(worker)["tracked_blocks"] > 0

        async with httpx.AsyncClient(base_url=sims[0].url, trust_env=False) as direct:
            await direct.post("/reset_prefix_cache")
            # The event comes with the next step.
            await send(direct, headers={"x-data-parallel-rank": "1"}, messages=user("hello"), max_tokens=1)

        await running.until(lambda: router.describe_worker(worker)["tracked_blocks"] == 0)
