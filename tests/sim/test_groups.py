"""KV cache groups of the simulated worker: options, and what each kind of group finds."""

from __future__ import annotations

from array import array

import pytest
from pydantic import ValidationError

from kvroute.blocks.keys import CacheSpace, block_keys
from kvroute.sim.cache import Chain
from kvroute.sim.engine import EngineRequest
from kvroute.sim.groups import GroupedCache, GroupedEngine
from kvroute.sim.options import SimOptions
from kvroute.wire.vllm import BlockStored

HYBRID = ("mamba:64", "full_attention:64")


def engine_with(*groups: str, capacity: int = 100_000, **options: object) -> GroupedEngine:
    chosen = SimOptions.model_validate({"kv_groups": groups, **options})
    assert chosen.layout is not None
    cache = GroupedCache(chosen.pool_blocks(capacity), chosen.layout.unit, record=True, layout=chosen.layout)
    return GroupedEngine(cache, chosen.timing)


def request_of(engine: GroupedEngine, prompt: list[int], answer: int) -> EngineRequest:
    layout = engine.cache.layout  # type: ignore[attr-defined]
    tokens = array("I", prompt + [9] * answer)
    keys = block_keys(tokens.tobytes(), block_bytes=4 * layout.hash_size, seed=CacheSpace("", "").seed)
    return EngineRequest(Chain(keys, tokens), len(prompt), answer)


def found(engine: GroupedEngine, prompt: list[int], answer: int = 1) -> int:
    """Cached tokens of one request."""
    request = request_of(engine, prompt, answer)
    engine.add(request)
    while engine.begin() is not None:
        engine.finish()
    return request.cached_tokens


def words(count: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + place * place) % 5003 for place in range(count)]


def test_a_state_is_found_where_a_prompt_ended_and_not_in_its_middle() -> None:
    engine = engine_with(*HYBRID, keeps_junctions=False)
    prompt = words(640)

    assert found(engine, prompt) == 0
    assert found(engine, prompt) == 576
    assert found(engine, prompt + words(100, 2)) == 576
    assert found(engine, prompt[:320] + words(100, 3)) == 0
    assert found(engine, prompt[:320] + words(100, 4)) == 0


def test_where_prompts_parted_a_state_is_kept_for_the_third_one() -> None:
    engine = engine_with(*HYBRID)
    prompt = words(640)

    assert [found(engine, prompt[:320] + words(200, seed)) for seed in (2, 3, 4)] == [0, 0, 320]


def test_a_window_needs_only_the_blocks_before_the_end() -> None:
    groups = ("sliding_window:16:64", "full_attention:16")
    prompt = words(640)

    kept, sparse = engine_with(*groups, prefix_cache_retention=-1), engine_with(*groups)
    for engine in (kept, sparse):
        found(engine, prompt)

    assert found(kept, prompt[:320] + words(50, 2)) == 320
    assert found(sparse, prompt[:320] + words(50, 2)) == 0
    assert found(sparse, prompt[:320] + words(50, 3)) == 320


def test_a_chunk_needs_nothing_of_earlier_chunks() -> None:
    engine = engine_with("chunked_local_attention:16:128", "full_attention:16")
    prompt = words(640)
    found(engine, prompt)

    assert found(engine, prompt[:384] + words(50, 2)) == 384


@pytest.mark.parametrize("groups", [(), ("full_attention:16",), ("mla_attention:16",)])
def test_with_a_drafter_the_last_block_of_a_hit_is_dropped(groups: tuple[str, ...]) -> None:
    engine = engine_with(*groups, drafted_tokens=2)
    prompt = words(160)
    found(engine, prompt)

    assert found(engine, prompt + words(50, 2)) == 144


def test_partial_tails_let_a_hit_end_inside_a_block() -> None:
    engine = engine_with(*HYBRID, prefix_match_unit=16)
    prompt = words(200)
    found(engine, prompt)

    assert found(engine, prompt + words(50, 2)) == 192


def test_a_prompt_that_needs_the_whole_pool_is_admitted_with_its_hit() -> None:
    """The blocks of its hit are some of those that it needs."""
    groups = ("sliding_window:16:64", "full_attention:16")
    engine = engine_with(*groups, capacity=1024, max_batched_tokens=1024)
    prompt = words(1024)
    found(engine, prompt[:640])
    request = request_of(engine, prompt, 1)
    engine.add(request)
    engine.begin()

    assert engine.finish().finished == [request]
    assert request.cached_tokens == 624


def test_each_group_publishes_under_its_number_and_kind() -> None:
    engine = engine_with("sliding_window:16:64", "full_attention:16")
    tokens = array("I", words(160))
    keys = block_keys(tokens.tobytes(), block_bytes=64, seed=CacheSpace("", "").seed)
    engine.add(EngineRequest(Chain(keys, tokens), 160, 1))
    engine.begin()

    stored = [event for event in engine.finish().events if isinstance(event, BlockStored)]

    told = [
        (e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window, len(e.block_hashes))
        for e in stored
    ]
    assert told == [(0, "sliding_window", 64, 4), (1, "full_attention", None, 10)]
    assert all(len(event.token_ids) == 160 for event in stored)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_groups": ("mambo:16",)}, "mambo"),
        ({"kv_groups": ("sliding_window:16",)}, "KIND:BLOCK:SPAN"),
        ({"kv_groups": ("full_attention:0",)}, "positive"),
        ({"kv_groups": ("chunked_local_attention:16:100",)}, "multiple"),
        ({"kv_groups": HYBRID, "prefix_match_unit": 48}, "prefix_match_unit"),
        ({"kv_groups": HYBRID, "prefix_cache_retention": 32}, "prefix_cache_retention"),
        (
            {"kv_groups": HYBRID, "lookahead_tokens": 2, "event_dialect": "map-0.33"},
            "lookahead_tokens",
        ),
    ],
)
def test_groups_that_no_engine_has_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        SimOptions.model_validate(options)
