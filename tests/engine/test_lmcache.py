"""Real LMCache and Redis with a real engine: the map equals the contents that they report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.engine.lmcache_stack import (
    CACHED,
    CHUNK,
    FILLERS,
    QUIET_S,
    READY_S,
    RESETS,
    Stack,
    prompt,
    started,
)
from tests.support.waiting import until

from kvroute.blocks.chunks import ChunkScheme, PromptChunks, chunk_names
from kvroute.deploy.engine_install import EngineVenv
from kvroute.index.map_trust import MapTrust
from kvroute.lmcache.l2_redis import RedisL2, object_name, targets_of
from kvroute.lmcache.membership import SINGLE_RANK, Doubt

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(forged_venv: EngineVenv, model_folder: Path, logs: Path) -> AsyncIterator[Stack]:
    async with started(forged_venv, model_folder, logs) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="session")
async def stack(shared: Stack) -> AsyncIterator[Stack]:
    """With empty caches, and left so."""
    yield shared
    assert await shared.reset() == []


@pytest_asyncio.fixture(loop_scope="session")
async def own_stack(forged_venv: EngineVenv, model_folder: Path, logs: Path) -> AsyncIterator[Stack]:
    """For a test that kills a part of it: after a restart of its LMCache server an engine did not answer
    within 60 s (vLLM 0.32, LMCache 0.5.6)."""
    async with started(forged_venv, model_folder, logs) as stack:
        yield stack


@pytest.mark.parametrize("left_out", RESETS)
async def test_the_check_of_the_stack_fails_when_one_reset_is_left_out(stack: Stack, left_out: str) -> None:
    found = await stack.reset(without=left_out)

    assert found, left_out
    assert await stack.reset() == []


async def test_chunks_in_memory_are_predicted_and_found_there(stack: Stack) -> None:
    assert await stack.ask(prompt(0)) == 0
    await stack.quiet()
    assert stack.instance.scheme == ChunkScheme(chunk_tokens=CHUNK)
    assert stack.predicted(prompt(0)) == (CACHED, 0)
    before = await stack.hits()

    await stack.forget_gpu()
    assert await stack.ask(prompt(0)) == CACHED

    l1, l2 = await stack.hits()
    assert (l1 - before[0], l2 - before[1]) == (CACHED, 0)
    assert stack.instance.trust is MapTrust.WHOLE


async def test_chunks_evicted_from_memory_are_predicted_from_redis_and_found_there(stack: Stack) -> None:
    """More prompts than L1 holds. Each is then asked for again: what was predicted, the engine reports, and
    LMCache's own metrics agree on the tier."""
    for seed in range(FILLERS + 1):
        await stack.ask(prompt(seed))
    await stack.quiet()
    predicted = [stack.predicted(prompt(seed)) for seed in range(FILLERS + 1)]
    assert {sum(each) for each in predicted} == {CACHED}
    assert {each[0] for each in predicted} >= {0, CACHED}

    for seed in range(0, FILLERS + 1, 3):
        await stack.forget_gpu()
        await stack.quiet()
        l1, l2 = stack.predicted(prompt(seed))
        before = await stack.hits()

        assert await stack.ask(prompt(seed)) == l1 + l2

        after = await stack.hits()
        assert (after[0] - before[0], after[1] - before[1]) == (l1, l2), f"prompt {seed}"


async def test_redis_has_the_mapped_chunks_under_the_queried_names(stack: Stack) -> None:
    for seed in range(FILLERS + 1):
        await stack.ask(prompt(seed))
    await stack.quiet()
    keys = {key.decode() for key in await stack.store.keys("*")}
    scheme = ChunkScheme(chunk_tokens=CHUNK)
    expected = {
        object_name(stack.model, SINGLE_RANK, 0, name, "")
        for seed in range(FILLERS + 1)
        for name in chunk_names(prompt(seed), scheme)
    }
    assert keys == expected
    (pool,) = stack.coordinator.pools()
    l2 = RedisL2(stack.options.l2, stack.clock)
    targets = targets_of(stack.coordinator, "resp")

    answer = await l2.lookup(PromptChunks(prompt(5)), "", targets)

    assert answer.reason is None
    assert answer.chunks[pool.chunks.holder] == set(PromptChunks(prompt(5)).keys(scheme))
    evicted = chunk_names(prompt(5), scheme)[4:]
    await stack.store.delete(*(object_name(stack.model, SINGLE_RANK, 0, name, "") for name in evicted))
    fresh = RedisL2(stack.options.l2, stack.clock)
    answer = await fresh.lookup(PromptChunks(prompt(5)), "", targets)
    found = stack.index.match(PromptChunks(prompt(5)[:-1]), "", {}, answer.chunks)
    in_memory, _ = stack.predicted(prompt(5))
    assert found == {0: (in_memory, max(0, 4 * CHUNK - in_memory))}
    await stack.clear_l2()  # the coordinator does not know of what was deleted
    await l2.aclose()
    await fresh.aclose()


async def test_salts_are_kept_apart(stack: Stack) -> None:
    await stack.ask(prompt(100), cache_salt="tenant")
    await stack.quiet()

    assert stack.predicted(prompt(100), "tenant") == (CACHED, 0)
    assert stack.predicted(prompt(100)) == (0, 0)


async def test_reports_that_are_lost_leave_nothing_false_and_a_clear_makes_it_whole(stack: Stack) -> None:
    await stack.quiet()
    await stack.leave()
    for seed in range(200, 206):
        await stack.ask(prompt(seed))
    await asyncio.sleep(2.5)  # LMCache drops a report after 2 s; no event marks that moment
    stack.listen()
    await stack.ask(prompt(300))
    # On a busy machine it was forgotten meanwhile, and is known late.
    lost = (Doubt.LOST_EVENTS, Doubt.LATE)
    await until(
        lambda: stack.knows and stack.instance.doubt in lost and stack.instance.last_seq > 0, within_s=QUIET_S
    )

    await until(lambda: stack.predicted(prompt(300))[0] == CACHED, within_s=QUIET_S)
    assert stack.predicted(prompt(200)) == (0, 0)
    assert stack.instance.memory.objects < await stack.l1_objects()

    answer = await stack.http.post(f"{stack.lmcache_url}/cache/clear", json={"tier": "l1", "force": True})
    answer.raise_for_status()
    await until(lambda: stack.instance.trust is MapTrust.WHOLE, within_s=QUIET_S)
    assert stack.instance.memory.objects == await stack.l1_objects() == 0


@pytest.mark.full
async def test_a_server_that_is_killed_loses_its_memory_and_comes_back_whole(own_stack: Stack) -> None:
    stack = own_stack
    await stack.ask(prompt(400))
    await stack.quiet()
    (pool,) = stack.coordinator.pools()
    assert stack.predicted(prompt(400)) == (CACHED, 0)
    before = stack.instance.incarnation

    stack.lmcache.kill()
    await stack.lmcache.wait()
    await until(lambda: not stack.knows, within_s=QUIET_S)
    assert stack.predicted(prompt(400)) == (0, 0)
    assert pool.chunks.objects == await stack.store.dbsize() == CACHED // CHUNK

    await stack.lmcache.start()
    await stack.lmcache.wait_ready(f"{stack.lmcache_url}/healthcheck", timeout_s=READY_S)
    await until(lambda: stack.knows, within_s=QUIET_S)
    await until(
        lambda: stack.instance.incarnation is not None and stack.instance.incarnation != before,
        within_s=QUIET_S,
    )
    assert stack.instance.trust is MapTrust.WHOLE
    await until(lambda: stack.predicted(prompt(400)) == (0, CACHED), within_s=QUIET_S)
