"""`kvaware` on real engines: what is predicted is what they report, and it finds what others cannot."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import httpx
import openai
import pytest
from tests.engine.conftest import SEED_SETS
from tests.engine.endpoints import drained
from tests.engine.event_tap import EventTap

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

MODEL = "tiny"
BLOCK = 32
PHASES = ((1, 300), (3, 240))
"""Concurrent clients, and the total number of requests."""
THINKS_S = (0.12, 0.2)
PATIENT = ("--set", "tokens.timeout_ms=5000")
"""The engines keep this machine's cores busy. A prompt that is not tokenized in time is predicted by what was
sent before, and not by the map (`kv_approximate`)."""
MORE_SEEDS = (1, 2, 3, 4, 5)
"""For tests that depend on the worker that prefixaware chooses for an unknown prompt."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"look_up_{name}",
            "description": f"Looks up {name}.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
    for name in ("words", "names", "places")
]


@dataclass
class Asked:
    """One request: predicted and reported tokens, its start and end (`time.time()`), and the most blocks
    that it added to its worker's cache, which may have evicted as many. Mutable: `settle`."""

    worker: str
    predicted: int
    reported: int
    sent: float
    done: float
    blocks: int
    reason: str
    settled: float = 0.0
    """When the last of its events had come; not before `done`."""

    @property
    def error(self) -> int:
        return abs(self.predicted - self.reported)

    def settle(self, tap: EventTap) -> None:
        """Set `settled` from the events. A worker publishes a step's events before the step's tokens, so
        events that were published while the request ran may belong to the request."""
        its = (each.arrived for each in tap.batches if self.sent <= each.made <= self.done)
        self.settled = max((self.done, *its))

    def races(self, other: Asked) -> bool:
        """Whether `other`, or its events, were in flight on the same worker at the same time."""
        return other.worker == self.worker and other.sent < self.done and self.sent < other.settled


class Mixture:
    """Chats, chats with tools, questions about shared documents, and completions, one after another for one
    client. Mutable: the open conversation."""

    def __init__(self, client: openai.AsyncOpenAI, words: list[str], name: str, log: list[Asked]) -> None:
        self.client = client
        self.words = words
        self.random = random.Random(f"mixture {name}")
        self.log = log
        # The same for all clients.
        documents = random.Random("documents")
        self.documents = ["".join(documents.choices(words, k=420)) for _ in range(4)]

    def text(self, count: int) -> str:
        return "".join(self.random.choices(self.words, k=count))

    async def run(self, requests: int) -> None:
        while requests > 0:
            kind = self.random.choice((self.chat, self.tools, self.document, self.completion))
            requests -= await kind()

    async def chat(self, tools: list[Any] | None = None) -> int:
        messages: list[Any] = [{"role": "system", "content": self.text(self.random.randint(20, 160))}]
        turns = self.random.randint(2, 6)
        for _ in range(turns):
            messages.append({"role": "user", "content": self.text(self.random.randint(10, 90))})
            raw = await self.timed(
                self.client.chat.completions.with_raw_response.create(
                    model=MODEL,
                    messages=messages,
                    tools=tools or openai.NOT_GIVEN,
                    tool_choice="none" if tools else openai.NOT_GIVEN,
                    max_tokens=self.random.randint(4, 40),
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
            )
            messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content})
        return turns

    async def tools(self) -> int:
        return await self.chat(TOOLS)

    async def document(self) -> int:
        messages: list[Any] = [
            {"role": "system", "content": self.random.choice(self.documents)},
            {"role": "user", "content": self.text(20)},
        ]
        await self.timed(
            self.client.chat.completions.with_raw_response.create(
                model=MODEL, messages=messages, max_tokens=4, temperature=0
            )
        )
        return 1

    async def completion(self) -> int:
        await self.timed(
            self.client.completions.with_raw_response.create(
                model=MODEL,
                prompt=self.random.choice(self.documents)[:600] + self.text(30),
                max_tokens=8,
                temperature=0,
            )
        )
        return 1

    async def timed(self, request: Any) -> Any:
        sent = time.time()
        raw = await request
        done = time.time()
        usage = raw.parse().usage
        headers = raw.headers
        reported = usage.prompt_tokens_details.cached_tokens or 0
        worker, predicted = headers["x-kvroute-worker"], int(headers["x-kvroute-hit-tokens"])
        blocks = -(-(usage.total_tokens - reported) // BLOCK)
        self.log.append(Asked(worker, predicted, reported, sent, done, blocks, headers["x-kvroute-reason"]))
        await asyncio.sleep(self.random.uniform(*THINKS_S))  # the reader thinks
        return raw


async def test_predictions_are_the_engines_own_figures(engines, start_gateway, words, capsys) -> None:
    """Over mixed traffic with evictions; requests that overlap others on their worker may race them."""
    log: list[Asked] = []
    with ExitStack() as stack:
        taps = {engine.name: stack.enter_context(EventTap(await engine.events())) for engine in engines}
        for engine in engines:
            await emptied(engine, taps[engine.name], words)
        async with start_gateway("kvaware", *PATIENT) as gateway, gateway.openai() as client:
            for phase, (clients, requests) in enumerate(PHASES):
                async with asyncio.TaskGroup() as group:
                    for number in range(clients):
                        mixture = Mixture(client, words, f"{phase} {number}", log)
                        group.create_task(mixture.run(requests // clients))
            evictions = await removed_blocks(gateway.url)
        for engine in engines:
            await emptied(engine, taps[engine.name], words)  # no request is in flight any more
        for name, tap in taps.items():
            numbers = [batch.seq for batch in tap.batches]
            assert numbers == list(range(numbers[0], numbers[-1] + 1)), f"{name}: events were lost"
    for asked in log:
        asked.settle(taps[asked.worker])
    assert "kv_approximate" not in {asked.reason for asked in log}

    alone, racing = [], []
    for asked in log:
        others = [each for each in log if each is not asked and asked.races(each)]
        if others:
            racing.append(asked)
            assert asked.error <= BLOCK * sum(each.blocks for each in others)
        else:
            alone.append(asked)
    exact = [sum(asked.error < BLOCK for asked in some) / len(some) for some in (alone, racing)]
    cached = sum(asked.reported for asked in log)
    late = max(asked.settled - asked.done for asked in log)
    with capsys.disabled():
        print(
            f"\n{len(log)} requests, {cached:,} cached tokens, {evictions:,.0f} blocks evicted: exact in "
            f"{exact[0]:.4f} of {len(alone)} that raced no other, {exact[1]:.4f} of {len(racing)} that did; "
            f"largest differences {max(each.error for each in alone)} and "
            f"{max(each.error for each in racing)} tokens; events came at most {1e3 * late:.0f} ms after the "
            f"answer; wrong: {[(each.predicted, each.reported) for each in log if each.error >= BLOCK]}"
        )
    assert len(log) >= 500
    assert evictions > 100
    assert len(alone) >= 200
    assert exact[0] >= 0.99


async def test_blocks_of_requests_that_bypassed_the_gateway_are_found(
    engines, start_gateway, words, capsys
) -> None:
    """Questions about shared documents; half go to the workers directly. Only those through the gateway
    count."""
    ratios = []
    for seed in MORE_SEEDS:
        ours, theirs = [
            await asked_with_others(strategy, seed, engines, start_gateway, words)
            for strategy in ("kvaware", "prefixaware")
        ]
        ratios.append(ours / theirs)
        with capsys.disabled():
            print(
                f"\nseed {seed}, half of the traffic past the gateway: kvaware finds {ours:,} cached tokens, "
                f"prefixaware {theirs:,} ({ratios[-1]:.3f})"
            )

    assert statistics.median(ratios) >= 1.2


async def asked_with_others(strategy: str, seed: int, engines, start_gateway, words) -> int:
    """Cached tokens of two questions about each of 14 documents, each after one asked at a worker."""
    chooser = random.Random(f"past {seed}")
    documents = ["".join(chooser.choices(words, k=480)) for _ in range(14)]
    asked = chooser.sample(documents * 2, k=2 * len(documents))
    for engine in engines:
        await engine.forget()
    async with start_gateway(strategy) as gateway, gateway.openai() as client:

        async def reader(mine: list[str]) -> int:
            total = 0
            for document in mine:
                engine = chooser.choice(engines)
                question = document + "".join(chooser.choices(words, k=20))
                body = {"model": MODEL, "prompt": question, "max_tokens": 1}
                assert (await engine.http.post(f"{engine.url}/v1/completions", json=body)).status_code == 200
                question = document + "".join(chooser.choices(words, k=20))
                raw = await client.completions.with_raw_response.create(
                    model=MODEL, prompt=question, max_tokens=1
                )
                total += raw.parse().usage.prompt_tokens_details.cached_tokens or 0
            return total

        return sum(await asyncio.gather(reader(asked[::2]), reader(asked[1::2])))


@pytest.mark.parametrize("seeds", SEED_SETS)
async def test_knows_of_a_reset(seeds, engines, start_gateway, words, capsys) -> None:
    """Both workers hold the same documents; then one worker's cache is reset, each worker once. A strategy
    that knows about the reset uses the other worker, so that each question finds its whole document.
    `prefixaware` learns from the answers that its predictions fail, after three of them."""
    ratios = []
    for seed in seeds:
        ours, theirs = [
            sum(
                [
                    await asked_after_a_reset(strategy, f"{seed} {each}", engines, each, start_gateway, words)
                    for each in range(len(engines))
                ]
            )
            for strategy in ("kvaware", "prefixaware")
        ]
        ratios.append(ours / theirs)
        assert ours == len(engines) * 12 * (500 // BLOCK * BLOCK)
        with capsys.disabled():
            print(
                f"\nseed {seed}, one cache reset: kvaware finds {ours:,} cached tokens, "
                f"prefixaware {theirs:,} ({ratios[-1]:.3f})"
            )

    assert statistics.median(ratios) >= 1.1


async def asked_after_a_reset(strategy: str, seed: str, engines, reset: int, start_gateway, words) -> int:
    """Cached tokens of one question about each of 12 documents that were asked about on both workers."""
    chooser = random.Random(f"reset {seed}")
    documents = ["".join(chooser.choices(words, k=500)) for _ in range(12)]
    for engine in engines:
        await engine.forget()
    async with start_gateway(strategy) as gateway, gateway.openai() as client:

        async def ask(document: str) -> tuple[str, int]:
            raw = await client.completions.with_raw_response.create(
                model=MODEL, prompt=document + "".join(chooser.choices(words, k=20)), max_tokens=1
            )
            cached = raw.parse().usage.prompt_tokens_details.cached_tokens or 0
            return raw.headers["x-kvroute-worker"], cached

        for engine, other in permutations(engines):
            async with drained(engine.http, gateway.url, other.name):
                assert [await ask(each) for each in documents] == [(engine.name, 0)] * len(documents)
        await engines[reset].forget()
        await past_gateway(engines[reset], words)
        answers = [await ask(document) for document in documents]
    return sum(cached for _, cached in answers)


async def past_gateway(engine, words) -> None:
    """Make the engine run a step: it publishes a reset with the next step."""
    body = {"model": MODEL, "prompt": "".join(words[:40]), "max_tokens": 1}
    answer = await engine.http.post(f"{engine.url}/v1/completions", json=body)
    assert answer.status_code == 200


async def emptied(engine, tap: EventTap, words) -> None:
    """Empty the engine's cache, and wait until the tap has received the event."""
    before = tap.times_cleared
    async with asyncio.timeout(30):
        while tap.times_cleared == before:
            await engine.forget()
            await past_gateway(engine, words)
            await asyncio.sleep(0.05)


async def removed_blocks(url: str) -> float:
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"{url}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("kvroute_map_removed_blocks_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
