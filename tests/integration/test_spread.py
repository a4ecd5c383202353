"""Where requests go when many come at once: counted over real sockets, never timed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import pytest

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions


def words(rng: random.Random, tokens: int) -> str:
    """About `tokens` tokens of text that no other prompt has."""
    return " ".join(f"{rng.getrandbits(28):07x}" for _ in range(tokens // 2))


def chat(*contents: str, **fields: object) -> dict[str, object]:
    roles = ("system", *("user", "assistant") * len(contents))
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return {"model": "sim-model", "messages": messages, "max_tokens": 8, "ignore_eos": True, **fields}


@pytest.fixture
def lane():
    """These tests are about what both lanes share."""
    return "fast lane"


@pytest.fixture
def run_fleet(run_gateway):
    """`async with run_fleet(2, options) as (gateway, sims)`: workers w0, w1, ...: ties break by name."""

    @asynccontextmanager
    async def start(size: int, options: SimOptions):
        async with AsyncExitStack() as stack:
            sims = [await stack.enter_async_context(run_sim(options)) for _ in range(size)]
            workers = [{"id": f"w{number}", "url": sim.url} for number, sim in enumerate(sims)]
            yield await stack.enter_async_context(run_gateway(workers)), sims

    return start


async def worker_of(gateway, body: dict[str, object]) -> str:
    """Send a request, read the whole answer, and return the worker's name."""
    answer = await gateway.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvroute-worker"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prefix_tokens", [200, 1000, 8000])
async def test_concurrent_requests_with_one_hot_prefix_are_split(run_fleet, prefix_tokens, stream) -> None:
    rng = random.Random(prefix_tokens)
    system = words(rng, prefix_tokens)
    bodies = [chat(system, words(rng, 40), stream=stream) for _ in range(60)]
    async with run_fleet(2, SimOptions(kv_events=False)) as (gateway, _):
        workers = await asyncio.gather(*(worker_of(gateway, body) for body in bodies))

    assert max(Counter(workers).values()) <= 40


async def test_a_hot_prefix_that_one_worker_holds_already_is_split_too(run_fleet) -> None:
    rng = random.Random(7)
    system = words(rng, 1000)
    bodies = [chat(system, words(rng, 40), stream=True) for _ in range(60)]
    async with run_fleet(2, SimOptions(kv_events=False)) as (gateway, _):
        await worker_of(gateway, bodies[0])
        workers = await asyncio.gather(*(worker_of(gateway, body) for body in bodies))

    assert max(Counter(workers).values()) <= 40


@pytest.mark.parametrize("tokens", [100, 1500])
async def test_cold_prompts_one_after_another_reach_both_workers(run_fleet, tokens) -> None:
    rng = random.Random(tokens)
    async with run_fleet(2, SimOptions(time_scale=0.05, kv_events=False)) as (gateway, _):
        workers = [await worker_of(gateway, chat(words(rng, tokens), "Go on.")) for _ in range(40)]

    assert max(Counter(workers).values()) <= 28


@pytest.mark.parametrize("prompt_tokens", [200, 400, 2000])
async def test_concurrent_chats_return_to_their_workers_and_load_all_alike(run_fleet, prompt_tokens) -> None:
    """Ten iterations of 20 ms: each answer takes 0.2 s, and as it is not streamed, its first token is not
    seen. A turn is sent as soon as the one before is answered."""
    rng = random.Random(prompt_tokens)
    slow = SimOptions(
        fixed_s=0.02, weights_s=0, token_s=0, attention_s=0, kv_s=0, answer_tokens=10, kv_events=False
    )
    async with run_fleet(4, slow) as (gateway, sims):

        async def talk(number: int) -> list[str]:
            texts, workers = [words(rng, prompt_tokens)], []
            for turn in range(6):
                texts.append(f"Question {turn} of chat {number}: {rng.getrandbits(99):x}")
                body = chat(*texts, max_tokens=10)
                answer = await gateway.client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                texts.append(answer.json()["choices"][0]["message"]["content"])
                workers.append(answer.headers["x-kvroute-worker"])
            return workers

        chats = await asyncio.gather(*(talk(number) for number in range(24)))

    sent = Counter(worker for workers in chats for worker in workers)
    returned = [before == after for workers in chats for before, after in pairwise(workers)]
    assert sum(returned) / len(returned) >= 0.85
    assert max(sent.values()) <= 1.4 * sent.total() / 4
    assert [sim.engine.running + sim.engine.waiting for sim in sims] == [0] * 4
