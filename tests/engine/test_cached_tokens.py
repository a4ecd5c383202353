"""How much of the engines' KV cache a strategy puts to use, by the engines' own account.

Twelve chats run at the same time on two workers. Each worker's pool holds 65% of the blocks of all chats, so
a strategy that scatters a chat over both workers causes evictions. The reference is one worker with both
pools.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace

import pytest
from tests.engine.conftest import PAIR, SEED_SETS
from tests.engine.pool import EngineKind

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

POOL_SHARES = (0.63, 0.67)
COMMON_TOKENS = 4 * 32


WHOLE = EngineKind(blocks=sum(kind.blocks for kind in PAIR))
"""One worker with the pools of both workers."""


@pytest.fixture
def cached_tokens(chats_through):
    """`(strategy, seed)` -> tokens that both workers found in their caches."""

    async def measure(strategy: str, seed: int) -> int:
        return sum(turn.cached_tokens for turn in await chats_through(strategy, seed))

    return measure


def blocks_held(turns) -> int:
    """KV blocks that all chats hold together after their last answers."""
    ends = {turn.chat: turn.prompt_tokens + turn.answer_tokens for turn in turns}
    return sum(-(-tokens // 32) for tokens in ends.values())


@pytest.mark.engines(WHOLE)
@pytest.mark.parametrize("seeds", SEED_SETS)
async def test_prefixaware_hits_nearly_as_many_tokens_as_one_big_worker(
    seeds, leased, engines, cached_tokens, hold_chats, capsys
) -> None:
    (whole,) = leased
    shares, gains = [], []
    for seed in seeds:
        await whole.forget()
        alone = await hold_chats(whole.url, seed=seed)
        together = sum(turn.cached_tokens for turn in alone)
        assert POOL_SHARES[0] <= engines[0].blocks / blocks_held(alone) <= POOL_SHARES[1]
        prefixaware = await cached_tokens("prefixaware", seed)
        roundrobin = await cached_tokens("roundrobin", seed)
        shares.append(prefixaware / together)
        gains.append(prefixaware / roundrobin)
        with capsys.disabled():
            prompts = sum(turn.prompt_tokens for turn in alone)
            print(
                f"\nseed {seed}: of {prompts:,} prompt tokens one worker with both pools finds {together:,}, "
                f"prefixaware {prefixaware:,} ({shares[-1]:.3f} of it), "
                f"roundrobin {roundrobin:,} (prefixaware finds {gains[-1]:.2f} times as many)"
            )

    share, gain = statistics.median(shares), statistics.median(gains)
    with capsys.disabled():
        print(f"median: {share:.3f} of one big worker, {gain:.2f} times roundrobin")
    assert share >= 0.85
    assert gain > 1


@pytest.mark.full
async def test_a_common_system_prompt_does_not_pull_all_chats_to_one_worker(
    engines, chats_through, chat_shape, capsys
) -> None:
    shape = replace(chat_shape, common_tokens=COMMON_TOKENS)
    ratios = []
    for seed in (1, 2, 3):
        turns = await chats_through("prefixaware", seed, shape)
        computed = Counter({engine.name: 0 for engine in engines})
        for turn in turns:
            computed[turn.worker] += turn.computed_tokens
        ratios.append(max(computed.values()) / max(1, min(computed.values())))
        with capsys.disabled():
            print(f"\nseed {seed}, common system prompt: computed {dict(computed)}, ratio {ratios[-1]:.2f}")

    assert max(ratios) <= 1.5


@pytest.mark.parametrize("common_tokens", [0, pytest.param(COMMON_TOKENS, marks=pytest.mark.full)])
@pytest.mark.parametrize("seeds", SEED_SETS)
async def test_kvaware_finds_the_hits_of_prefixaware(
    seeds, common_tokens, chats_through, chat_shape, capsys
) -> None:
    """With and without a common system prompt."""
    shape = replace(chat_shape, common_tokens=common_tokens)
    ratios = []
    for seed in seeds:
        ours, theirs = [
            sum(turn.cached_tokens for turn in await chats_through(strategy, seed, shape))
            for strategy in ("kvaware", "prefixaware")
        ]
        ratios.append(ours / theirs)
        with capsys.disabled():
            print(
                f"\nseed {seed}, {common_tokens} common tokens: kvaware finds {ours:,} cached tokens, "
                f"prefixaware {theirs:,} ({ratios[-1]:.3f})"
            )

    assert statistics.median(ratios) >= 0.97
