"""Lost blocks are known again after the worker was asked for prompts that it has had."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.support.waiting import until

from kvroute.blocks.keys import Tier, adapter_space, prompt_keys
from kvroute.clock import SystemClock
from kvroute.events.ingest import EventIngest
from kvroute.events.options import KvEventsOptions, ProbeOptions
from kvroute.events.probes import KnownPrompt, PromptMemory
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import HealthState, Worker, WorkerId, WorkerSpec
from kvroute.index.map_trust import MapTrust, TrustReason
from kvroute.index.prefix_index import PrefixIndex
from kvroute.openai.rewriting import TAG, key_space

QUICK = KvEventsOptions(
    idle_check_s=0.05,
    replay_timeout_s=0.5,
    replay_attempts=1,
    retry_s=0.02,
    probe=ProbeOptions(interval_s=0.05),
)

Make = Callable[..., Any]
Tokens = Callable[[int, int], list[int]]


def known(tokens: list[int], salt: str = "") -> KnownPrompt:
    return KnownPrompt("m", tokens, prompt_keys(tokens, adapter_space(None, salt)), salt)


class Repaired:
    """One worker that is followed, whose completions run in its engine."""

    def __init__(self, engine: Any, options: KvEventsOptions, reports: bool) -> None:
        self.engine = engine
        self.reports = reports
        self.asked: list[dict[str, Any]] = []
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.ingest = EventIngest(PrefixIndex(), self.client, SystemClock(), options)
        self.fleet = Fleet()
        self.fleet.subscribe(self.ingest.fleet_changed)
        self.fleet.apply("test", [WorkerSpec(WorkerId("a"), "http://a.example")])
        self.worker: Worker = self.fleet.get("a")
        self.worker.state = HealthState.HEALTHY

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=self.engine.publisher.sources())
        body = json.loads(request.content)
        self.asked.append(body)
        ids, salt = body["prompt"], body.get("cache_salt", "")
        cached = self.engine.hits(ids, salt=salt)
        report = self.reports and body["vllm_xargs"] == {"kv_cache_report_mode": "full"}
        self.engine.serve(ids, salt=salt, report=report)
        return httpx.Response(200, json={"usage": {"prompt_tokens_details": {"cached_tokens": cached}}})

    @property
    def stream(self) -> Any:
        return self.ingest.streams(self.worker)[0]

    @property
    def believed(self) -> set[int]:
        return set(self.stream.ledger.indexed(Tier.GPU))


@asynccontextmanager
async def repaired(
    engine: Any, options: KvEventsOptions = QUICK, *, reports: bool = True
) -> AsyncIterator[Repaired]:
    setup = Repaired(engine, options, reports)
    task = asyncio.create_task(setup.ingest.run())
    try:
        yield setup
    finally:
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        await setup.client.aclose()
    if isinstance(outcome, Exception):
        raise outcome


async def lose_history(
    setup: Repaired,
    prompts: list[list[int]],
    last: list[int],
    past: Sequence[list[int]] = (),
) -> None:
    """All of `prompts` are in the cache and noted, those of `past` went past us, none of their events can
    be had, `last` is known."""
    engine = setup.engine
    engine.serve([1] * 17)
    await until(lambda: setup.ingest.trust(setup.worker) is MapTrust.WHOLE and len(setup.believed) == 1)
    for prompt in prompts:
        setup.stream.note_prompt(known(prompt))
        engine.serve(prompt, hold_back=True)
    for prompt in past:
        engine.serve(prompt, hold_back=True)
    for filler in range(3):
        engine.serve([100 + filler] * 17, hold_back=True)
    engine.serve(last)
    await until(lambda: setup.ingest.reason(setup.worker) is TrustReason.GAP)


async def test_after_a_gap_beyond_the_replay_buffer_reannouncements_complete_the_map(
    engine_of: Make, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=2000, event_buffer_steps=4)
    async with repaired(engine) as setup:
        prompts = [tokens_of(number, 100) for number in range(1, 4)]
        setup.worker.state = HealthState.DRAINING
        await lose_history(setup, prompts, tokens_of(9, 50))
        assert len(setup.believed) == 6
        setup.worker.state = HealthState.HEALTHY
        await until(lambda: setup.ingest.trust(setup.worker) is MapTrust.WHOLE)

        # The very first block was never sent through here.
        assert setup.believed < engine.truth
        assert len(engine.truth - setup.believed) == 1
        assert [body["prompt"][0] for body in setup.asked] == [prompt[0] for prompt in prompts[::-1]]
        assert all(len(body["prompt"]) == 97 and body["max_tokens"] == 1 for body in setup.asked)
        asked = len(setup.asked)
        engine.serve(tokens_of(1, 100) + tokens_of(20, 100))
        await until(lambda: len(engine.truth - setup.believed) == 1)
        assert setup.stream.ledger.orphan_blocks == 0
    assert len(setup.asked) == asked


async def test_an_adapters_prompt_is_reannounced_in_its_key_space_for_both_modes_of_lmcache(
    engine_of: Make, tokens_of: Tokens
) -> None:
    """Without the tag, LMCache inside the engine would serve what the base model computed."""
    engine = engine_of(capacity_tokens=2000, event_buffer_steps=4)
    space = key_space("", "ada", "/a")
    async with repaired(engine) as setup:
        engine.serve([1] * 17)
        await until(lambda: setup.ingest.trust(setup.worker) is MapTrust.WHOLE and len(setup.believed) == 1)
        setup.worker.state = HealthState.DRAINING
        prompt = tokens_of(1, 100)
        setup.stream.note_prompt(known(prompt, space))
        engine.serve(prompt, salt=space, hold_back=True)
        for filler in range(3):
            engine.serve([100 + filler] * 17, hold_back=True)
        engine.serve(tokens_of(9, 50))
        await until(lambda: setup.ingest.reason(setup.worker) is TrustReason.GAP)
        setup.worker.state = HealthState.HEALTHY
        await until(lambda: len(setup.asked) > 0)

    asked = setup.asked[0]
    assert (asked["cache_salt"], asked["kv_transfer_params"]) == (space, {TAG: space})


async def test_orphans_of_a_known_prompt_are_placed_and_of_unknown_ones_are_not(
    engine_of: Make, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=4000, event_buffer_steps=4)
    ours, others = tokens_of(1, 100), tokens_of(2, 100)
    async with repaired(engine) as setup:
        setup.worker.state = HealthState.DRAINING
        await lose_history(setup, [ours], [2] * 17, past=[others])
        engine.serve(ours + tokens_of(3, 60))
        engine.serve(others + tokens_of(4, 60))
        await until(lambda: setup.stream.ledger.orphan_blocks == 8)
        setup.worker.state = HealthState.HEALTHY

        await until(lambda: setup.stream.ledger.orphan_blocks == 4)

        # The parents of the other blocks are unknown: the map stays partial.
        assert setup.ingest.trust(setup.worker) is MapTrust.PARTIAL
        assert setup.believed < engine.truth


async def test_a_release_that_does_not_announce_again_is_left_alone(
    engine_of: Make, tokens_of: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(capacity_tokens=4000, event_buffer_steps=4)
    async with repaired(engine, reports=False) as setup:
        prompts = [tokens_of(number, 100) for number in range(1, 9)]
        await lose_history(setup, prompts, [2] * 17)
        await until(lambda: any("announce its blocks again" in r.getMessage() for r in caplog.records))

        assert len(setup.asked) == 3
        assert setup.ingest.trust(setup.worker) is MapTrust.PARTIAL


async def test_evicted_blocks_end_the_reannouncement_requests(engine_of: Make, tokens_of: Tokens) -> None:
    engine = engine_of(capacity_tokens=1000, event_buffer_steps=4)
    async with repaired(engine) as setup:
        setup.worker.state = HealthState.DRAINING
        prompts = [tokens_of(number, 300) for number in range(1, 12)]
        await lose_history(setup, prompts, [2] * 17)
        setup.worker.state = HealthState.HEALTHY
        await until(lambda: setup.ingest.trust(setup.worker) is MapTrust.WHOLE)

        assert setup.believed <= engine.truth
    # Those that were still held, and two that were not.
    assert len(setup.asked) <= 5


@pytest.mark.parametrize("off", [{"enabled": False}, {"memory_tokens": 0}])
async def test_probes_can_be_turned_off(engine_of: Make, tokens_of: Tokens, off: dict[str, Any]) -> None:
    engine = engine_of(capacity_tokens=4000, event_buffer_steps=4)
    options = QUICK.model_copy(update={"probe": QUICK.probe.model_copy(update=off)})
    async with repaired(engine, options) as setup:
        await lose_history(setup, [tokens_of(1, 100)], [2] * 17)
        replays = setup.stream.subscriber.counts.replays
        await until(lambda: setup.stream.subscriber.counts.replays > replays + 3)

        assert setup.asked == []


def test_memory_keeps_the_newest_prompts_and_one_of_each_conversation() -> None:
    memory = PromptMemory(300)
    conversation = list(range(200))
    for length in (50, 100, 150):
        memory.note(known(conversation[:length]))
    assert [len(prompt.token_ids) for prompt in memory.newest()] == [150]
    assert memory.is_complete

    memory.note(known([7] * 100))
    memory.note(known([8] * 100))

    assert [prompt.token_ids[0] for prompt in memory.newest()] == [7, 8]
    assert [prompt.token_ids[0] for prompt in memory.newest(1)] == [8]
    assert (memory.noted, memory.is_complete) == (5, False)
