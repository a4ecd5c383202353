from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvroute.sim.cache import Block, Chain, PagedCache
from kvroute.wire.vllm import AllBlocksCleared, BlockRemoved, BlockStored


def held(cache: PagedCache, keys: list[int]) -> list[Block]:
    """Compute and store all of `keys` in new blocks."""
    blocks = cache.allocate(len(keys))
    cache.store(blocks, Chain(keys, list(range(len(keys) * cache.block_size))), 0, len(keys))
    return blocks


def removed(cache: PagedCache) -> list[int | bytes]:
    return [
        key for event in cache.take_events() if isinstance(event, BlockRemoved) for key in event.block_hashes
    ]


def test_the_last_blocks_of_a_finished_sequence_are_evicted_first() -> None:
    cache = PagedCache(4, 16, record=True)
    cache.free(held(cache, [1, 2, 3]))

    cache.allocate(3)

    assert removed(cache) == [3, 2]
    assert cache.held_keys == {1}


def test_the_sequence_that_ended_first_is_evicted_first() -> None:
    cache = PagedCache(4, 16, record=True)
    older, newer = held(cache, [1, 2]), held(cache, [11, 12])
    cache.free(newer)
    cache.free(older)

    cache.allocate(3)

    assert removed(cache) == [12, 11, 2]


def test_a_hit_protects_blocks_and_makes_them_recent_again() -> None:
    cache = PagedCache(4, 16, record=True)
    cache.free(held(cache, [1, 2]))
    cache.free(held(cache, [11, 12]))

    again = cache.take([1, 2], 2)
    assert cache.available == 2
    cache.free(again)
    cache.allocate(2)

    assert removed(cache) == [12, 11]


def test_empty_blocks_are_used_before_anything_is_evicted() -> None:
    cache = PagedCache(3, 16, record=True)
    cache.free(held(cache, [1]))
    cache.free(cache.allocate(2))

    cache.allocate(2)

    assert removed(cache) == []
    assert cache.held_keys == {1}


def test_a_match_stops_at_the_first_hole_and_at_its_limit() -> None:
    cache = PagedCache(8, 16)
    held(cache, [1, 2, 4])

    assert cache.match([1, 2, 3, 4], 4) == 2
    assert cache.match([1, 2], 1) == 1
    assert cache.match([1, 2], 9) == 2
    assert cache.match([9], 1) == 0


def test_copies_are_announced_and_removed_one_by_one() -> None:
    cache = PagedCache(2, 16, record=True)
    first, second = held(cache, [7]), held(cache, [7])
    cache.free(first)
    cache.free(second)
    assert sum(isinstance(e, BlockStored) for e in cache.take_events()) == 2

    cache.allocate(1)
    assert removed(cache) == [7]
    assert cache.held_keys == {7}

    cache.allocate(1)
    assert removed(cache) == [7]
    assert cache.held_keys == set()


def test_the_copy_that_is_found_may_be_the_one_in_use() -> None:
    cache = PagedCache(2, 16)
    held(cache, [7])
    second = held(cache, [7])
    cache.free(second)

    assert cache.idle_among([7], 1) == 0
    cache.allocate(1)

    assert cache.match([7], 1) == 1


def test_an_event_carries_parent_tokens_adapter_and_salt() -> None:
    cache = PagedCache(8, 2, record=True)
    chain = Chain([5, 6, 7], [1, 2, 3, 4, 5, 6], lora_id=1, lora_name="ada", cache_salt="s", session_id="x")
    blocks = cache.allocate(3)

    cache.store(blocks, chain, 0, 2)
    cache.store(blocks, chain, 2, 3)

    first, second = cache.take_events()
    assert first == BlockStored(
        block_hashes=[5, 6],
        parent_block_hash=None,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        lora_id=1,
        medium="GPU",
        lora_name="ada",
        extra_keys=[["ada", "s"], ["ada"]],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="x",
    )
    assert isinstance(second, BlockStored)
    assert (second.parent_block_hash, second.token_ids) == (6, [5, 6])


def test_byte_hashes_end_in_the_number() -> None:
    cache = PagedCache(2, 16, record=True, byte_hashes=True)
    held(cache, [7])

    (event,) = cache.take_events()

    assert isinstance(event, BlockStored)
    assert event.block_hashes == [bytes(31) + b"\x07"]


def test_clearing_is_refused_while_blocks_are_in_use() -> None:
    cache = PagedCache(4, 16, record=True)
    blocks = held(cache, [1])
    assert not cache.clear()

    cache.free(blocks)
    cache.take_events()

    assert cache.clear()
    assert cache.take_events() == [AllBlocksCleared()]
    assert (cache.held_keys, cache.available) == (set(), 4)


def test_shrinking_evicts_idle_blocks_now_and_others_when_they_are_freed() -> None:
    cache = PagedCache(4, 16, record=True)
    idle, used = held(cache, [1, 2]), held(cache, [3, 4])
    cache.free(idle)
    cache.take_events()

    cache.resize(1)
    assert removed(cache) == [2, 1]
    assert cache.available == -1

    cache.free(used)
    assert removed(cache) == [4]
    assert (cache.available, cache.held_keys) == (1, {3})

    cache.resize(3)
    assert cache.available == 3


class CacheAgainstCounts(RuleBasedStateMachine):
    """Events and free room agree with plain counts, for any order of starts and ends."""

    CAPACITY = 6

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(self.CAPACITY, 16, record=True)
        self.running: list[list[Block]] = []
        self.counts: dict[int | bytes, int] = {}

    def room(self) -> int:
        return self.CAPACITY - len({id(b) for run in self.running for b in run})

    @rule(keys=st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
    def run(self, keys: list[int]) -> None:
        hits = self.cache.match(keys, len(keys))
        need = len(keys) - hits + self.cache.idle_among(keys, hits)
        if need > self.cache.available:
            return
        blocks = self.cache.take(keys, hits)
        blocks += self.cache.allocate(len(keys) - hits)
        self.cache.store(blocks, Chain(keys), hits, len(keys))
        self.running.append(blocks)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 10))
    def end(self, which: int) -> None:
        self.cache.free(self.running.pop(which % len(self.running)))

    @rule()
    def clear(self) -> None:
        assert self.cache.clear() == (not self.running)

    @invariant()
    def events_tell_what_is_held(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, AllBlocksCleared):
                self.counts.clear()
            else:
                change = 1 if isinstance(event, BlockStored) else -1
                for key in event.block_hashes:
                    self.counts[key] = self.counts.get(key, 0) + change
        assert {key for key, count in self.counts.items() if count > 0} == self.cache.held_keys
        assert min(self.counts.values(), default=0) >= 0

    @invariant()
    def used_blocks_are_not_available(self) -> None:
        assert self.cache.available == self.room()

    @invariant()
    def what_runs_is_held(self) -> None:
        assert {block.key for run in self.running for block in run} <= self.cache.held_keys


CacheAgainstCounts.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCacheAgainstCounts = CacheAgainstCounts.TestCase
