"""Recorded decisions, made again from their inputs, end to end: simulated workers, real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from kvroute.routing.registry import STRATEGIES
from kvroute.routing.strategy import RouteDecision
from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

DECISIONS = 1000
CLIENTS = 12


@pytest.fixture
def lane() -> str:
    """Both lanes decide in the same place."""
    return "fast lane"


@pytest.fixture
async def urls() -> AsyncIterator[list[str]]:
    """Three workers of different speeds, with little memory: they queue and evict."""
    async with AsyncExitStack() as stack:
        yield [
            (
                await stack.enter_async_context(run_sim(SimOptions(time_scale=scale, capacity_tokens=40_000)))
            ).url
            for scale in (0.01, 0.02, 0.05)
        ]


def arithmetic(decision: RouteDecision) -> dict[str, object]:
    return decision.describe()


async def send(client, number: int, words: random.Random) -> None:
    """One turn of one of 40 conversations."""
    conversation = words.randrange(40)
    text = f"conversation {conversation} " * 20 + f"turn {number} " * words.randrange(200)
    body = {
        "model": "sim-model",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "stream": bool(number % 3),
        "user": f"session {conversation}",
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200


async def send_many(client, count: int) -> None:
    words = random.Random(7)
    numbers = iter(range(count))

    async def run() -> None:
        for number in numbers:
            await send(client, number, words)

    await asyncio.gather(*[run() for _ in range(CLIENTS)])


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_same_strategy_decides_the_same_again(run_gateway, urls, strategy) -> None:
    async with run_gateway(urls, routing={"strategy": strategy}, tokens={"timeout_ms": 5000}) as gateway:
        router = gateway.runtime.router
        if gateway.runtime.cache_tracker is not None:
            await gateway.until(lambda: not gateway.runtime.cache_tracker.notes())
        recorder = router.record()
        await send_many(gateway.client, DECISIONS)

        recorded = [each for each in recorder.find(list(recorder.decisions())) if each is not None]
        redecider = router.redecider(strategy)
        differing = [
            (arithmetic(each.decision), again)
            for each in recorded
            if (again := arithmetic(redecider.redecide(each))) != arithmetic(each.decision)
        ]

        assert len(recorded) == DECISIONS
        assert differing == []
        assert len({each.decision.ranking[0].worker.id for each in recorded}) > 1


async def test_nothing_is_recorded_while_nobody_looks(run_gateway, urls) -> None:
    async with run_gateway(urls) as gateway:
        await send_many(gateway.client, 10)

        assert gateway.runtime.router.recorder is None


async def test_roundrobin_would_have_taken_each_worker_in_turn(run_gateway, urls) -> None:
    async with run_gateway(urls) as gateway:
        recorder = gateway.runtime.router.record()
        await send_many(gateway.client, 30)

        redecider = gateway.runtime.router.redecider("roundrobin")
        chosen = [
            redecider.redecide(each).ranking[0].worker.id
            for each in recorder.find(list(recorder.decisions()))
            if each is not None
        ]

        assert sorted(chosen) == sorted(["w0", "w1", "w2"] * 10)
        assert len(set(chosen[:3])) == 3


async def test_a_strategy_that_needs_more_than_was_read_says_so(run_gateway, urls) -> None:
    async with run_gateway(urls) as gateway:
        recorder = gateway.runtime.router.record()
        await send_many(gateway.client, 1)
        [recorded] = recorder.find(list(recorder.decisions()))

        assert recorded is not None
        assert "reads no token ids" in gateway.runtime.router.redecider("kvaware").why_not(recorded)
        assert gateway.runtime.router.redecider("prefixaware").why_not(recorded) == ""
