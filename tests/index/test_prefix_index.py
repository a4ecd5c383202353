"""The index answers as plain sets of keys per holder would."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier, token_keys
from kvroute.index import runs
from kvroute.index.prefix_index import Holder, PrefixIndex, TierMatch


def chain(path: list[int]) -> list[BlockKey]:
    """Keys of a prompt whose canonical blocks are numbered by `path`."""
    return token_keys([number for number in path for _ in range(KEY_TOKENS)], 0)


PATHS = st.lists(st.integers(0, 1), max_size=24)
SLOTS = (0, 1, 2)
STRIDES = {Tier.GPU: (1, 1, 2), Tier.L1: (4, 4, 4), Tier.L2: (4, 4, 4)}


def plain_match(
    keys: list[BlockKey], gpu: tuple[int, set[int]], l1: tuple[int, set[int]], l2: tuple[int, set[int]]
) -> TierMatch:
    """The rule itself, block by block."""
    place = 0
    stride, held = gpu
    while place + stride <= len(keys) and keys[place + stride - 1] in held:
        place += stride
    found = [place, 0, 0]
    while True:
        for tier, (stride, held) in ((1, l1), (2, l2)):
            stop = (place // stride + 1) * stride
            if stop <= len(keys) and keys[stop - 1] in held:
                found[tier] += stop - place
                place = stop
                break
        else:
            return TierMatch(*(KEY_TOKENS * blocks for blocks in found))


class IndexAgainstSets(RuleBasedStateMachine):
    """Three slots with GPU and L1 of their own, one L2 that the first two share."""

    tiers = tuple(Tier)
    """That slots read."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        pool = Holder(Tier.L2, shared=True)
        self.holders = {
            (slot, tier): pool if tier is Tier.L2 and slot < 2 else Holder(tier)
            for slot in SLOTS
            for tier in Tier
        }
        self.held: dict[int, set[BlockKey]] = {id(holder): set() for holder in self.holders.values()}
        for (slot, tier), holder in self.holders.items():
            if tier in self.tiers:
                self.index.attach(slot, holder)

    @rule(slot=st.sampled_from(SLOTS), tier=st.sampled_from(Tier), path=PATHS, start=st.integers(0, 5))
    def store(self, slot: int, tier: Tier, path: list[int], start: int) -> None:
        stride = STRIDES[tier][slot]
        keys = chain(path)[stride - 1 :: stride]
        parent = keys[start - 1] if 0 < start <= len(keys) else None
        keys = keys[start:] if parent is not None else keys
        holder = self.holders[slot, tier]

        done = self.index.store(holder, stride * KEY_TOKENS, parent, keys)

        assert done == len(keys)
        self.held[id(holder)].update(keys)

    @rule(slot=st.sampled_from(SLOTS), tier=st.sampled_from(Tier), path=PATHS, tail=st.booleans())
    def remove(self, slot: int, tier: Tier, path: list[int], tail: bool) -> None:
        holder = self.holders[slot, tier]
        held = self.held[id(holder)]
        keys = [key for key in chain(path) if key in held]
        for key in keys[-3:][::-1] if tail else keys[:1]:
            assert self.index.remove(holder, key)
            held.discard(key)
            assert not self.index.remove(holder, key)

    @rule(slot=st.sampled_from(SLOTS), tier=st.sampled_from(Tier))
    def clear(self, slot: int, tier: Tier) -> None:
        self.index.clear(self.holders[slot, tier])
        self.held[id(self.holders[slot, tier])].clear()

    @rule(steps=st.integers(1, 20))
    def sweep(self, steps: int) -> None:
        self.index.sweep(steps)

    @rule(path=PATHS)
    def match(self, path: list[int]) -> None:
        keys = chain(path)
        expected = {}
        lengths = range(KEY_TOKENS, (len(keys) + 2) * KEY_TOKENS, KEY_TOKENS)
        for slot in SLOTS:
            parts = [
                (
                    STRIDES[tier][slot],
                    self.held[id(self.holders[slot, tier])] if tier in self.tiers else set(),
                )
                for tier in Tier
            ]
            found = plain_match(keys, *parts)  # type: ignore[arg-type]
            if found.tokens:
                expected[slot] = found
            held = [tokens for tokens in lengths if self.index.holds(slot, keys, tokens)]
            assert held == [tokens for tokens in lengths if tokens <= found.gpu]

        assert self.index.match(keys) == expected
        gpu = {slot: found.gpu for slot, found in expected.items()}
        assert self.index.match_gpu(keys) == (gpu if self.tiers == (Tier.GPU,) else None)

    @invariant()
    def holds_exactly_the_sets(self) -> None:
        for holder in self.holders.values():
            held = list(self.index.blocks_of(holder))
            assert sorted(held) == sorted(self.held[id(holder)])
            assert holder.blocks == len(held)
        assert self.index.size().held_blocks == sum(len(held) for held in self.held.values())

    def teardown(self) -> None:
        while self.index.sweep(1000):
            pass
        kinds: dict[int, set[BlockKey]] = {}
        for (slot, tier), holder in self.holders.items():
            kinds.setdefault(STRIDES[tier][slot], set()).update(self.held[id(holder)])
        assert self.index.size().blocks == sum(len(keys) for keys in kinds.values())


class ShortRuns(IndexAgainstSets):
    """The same with runs of at most three blocks, so that their borders are everywhere."""

    def __init__(self) -> None:
        self.longest = runs.RUN_BLOCKS
        runs.RUN_BLOCKS = 3  # type: ignore[misc]
        super().__init__()

    def teardown(self) -> None:
        runs.RUN_BLOCKS = self.longest  # type: ignore[misc]
        super().teardown()


class OnlyGpus(ShortRuns):
    """No slower tiers."""

    tiers = (Tier.GPU,)


TestIndexAgainstSets = IndexAgainstSets.TestCase
TestIndexAgainstSets.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestShortRuns = ShortRuns.TestCase
TestShortRuns.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestOnlyGpus = OnlyGpus.TestCase
TestOnlyGpus.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def one_gpu(index: PrefixIndex, slot: int = 0) -> Holder:
    holder = Holder(Tier.GPU)
    index.attach(slot, holder)
    return holder


def test_blocks_of_16_and_chunks_of_256_add_up_in_tokens() -> None:
    index, keys = PrefixIndex(), chain(list(range(60)))
    gpu, l1, l2 = one_gpu(index), Holder(Tier.L1), Holder(Tier.L2, shared=True)
    index.attach(0, l1)
    index.attach(0, l2)
    chunks = keys[15::16]

    index.store(gpu, 16, None, keys[:20])
    index.store(l1, 256, None, chunks[:2])
    index.store(l2, 256, None, chunks)

    assert index.match(keys)[0] == TierMatch(320, 512 - 320, 768 - 512)


def test_a_hole_ends_the_match_although_later_blocks_are_held() -> None:
    index, keys = PrefixIndex(), chain(list(range(40)))
    gpu = one_gpu(index)
    index.store(gpu, 16, None, keys)

    index.remove(gpu, keys[7])

    assert index.match(keys)[0].gpu == 7 * 16
    index.store(gpu, 16, keys[6], keys[7:8])
    assert index.match(keys)[0].gpu == 40 * 16


def test_the_place_where_a_prompt_leaves_a_long_run_is_found_wherever_it_is() -> None:
    index, path = PrefixIndex(), list(range(200))
    gpu = one_gpu(index)
    index.store(gpu, 16, None, chain(path))

    for place in range(1, 201):
        for more in (0, 1, 70):
            matched = index.match(chain([*path[:place], *range(1000, 1000 + more)]))
            assert matched[0].gpu == place * 16


def test_the_turns_of_a_conversation_form_one_run() -> None:
    """The worker holds what it generated, the next turn brings something else."""
    index, gpu, path = PrefixIndex(), Holder(Tier.GPU), list[int]()
    index.attach(0, gpu)
    for turn in range(20):
        before, path = path, [*path, *range(1000 * turn, 1000 * turn + 10)]
        keys, generated = chain(path), chain([*path, 900_000 + turn])
        index.store(gpu, 16, keys[len(before) - 1] if before else None, keys[len(before) :])
        index.store(gpu, 16, keys[-1], generated[-1:])
        assert index.match(generated)[0].gpu == len(generated) * 16

    assert index.match(chain(path))[0].gpu == 200 * 16
    assert index.size().blocks == 220
    # All that the turns have in common, and 19 ends.
    assert index.size().runs == 20


def test_a_full_index_refuses_blocks_and_reports_it() -> None:
    index, keys = PrefixIndex(max_blocks=10), chain(list(range(16)))
    gpu, other = one_gpu(index), one_gpu(index, 1)

    assert index.store(gpu, 16, None, keys) == 10
    assert index.store(other, 16, None, keys) == 10
    size = index.size()

    assert (size.blocks, size.held_blocks, size.dropped) == (10, 20, 12)
    assert index.match(keys) == {0: TierMatch(160), 1: TierMatch(160)}


def test_a_worker_that_leaves_is_forgotten_immediately_and_its_memory_is_freed() -> None:
    index, keys = PrefixIndex(), chain(list(range(600)))
    gpu, other = one_gpu(index), one_gpu(index, 1)
    pool = Holder(Tier.L2, shared=True)
    index.attach(0, pool)
    index.store(gpu, 16, None, keys)
    index.store(other, 16, None, keys[:5])
    index.store(pool, 256, None, keys[15::16])

    index.forget(0)
    index.forget(0)

    assert index.match(keys) == {1: TierMatch(80)}
    while index.sweep(50):
        pass
    assert index.size().blocks == 5 + len(keys[15::16])
    assert pool.blocks == len(keys[15::16])


def test_more_than_64_workers_with_prefixes_of_every_length() -> None:
    index, keys = PrefixIndex(), chain([0] * 100)
    holders = [one_gpu(index, slot) for slot in range(100)]
    for slot, holder in enumerate(holders):
        index.store(holder, 16, None, keys[: slot + 1])

    assert index.match(keys) == {slot: TierMatch(16 * (slot + 1)) for slot in range(100)}
    for slot, holder in enumerate(holders):
        index.remove(holder, keys[slot])

    assert index.match(keys) == {slot: TierMatch(16 * slot) for slot in range(1, 100)}


def test_two_slots_may_read_one_memory() -> None:
    index, keys = PrefixIndex(), chain(list(range(8)))
    server = Holder(Tier.L1, shared=True)
    for slot in (0, 1):
        one_gpu(index, slot)
        index.attach(slot, server)
    index.store(server, 64, None, keys[3::4])

    assert index.match(keys) == {0: TierMatch(0, 128), 1: TierMatch(0, 128)}
    index.detach(1, server)
    assert index.match(keys) == {0: TierMatch(0, 128)}


def test_a_second_worker_may_come_and_go_block_by_block_along_a_firsts_runs() -> None:
    index, keys = PrefixIndex(), chain(list(range(600)))
    first, second = one_gpu(index), one_gpu(index, 1)
    index.store(first, 16, None, keys)

    for place, key in enumerate(keys):
        index.store(second, 16, keys[place - 1] if place else None, [key])
        assert index.match(keys[: place + 1]) == {slot: TierMatch(16 * (place + 1)) for slot in (0, 1)}
    assert index.size().runs <= 6
    for place in reversed(range(len(keys))):
        index.remove(second, keys[place])
        assert index.match(keys).get(1, TierMatch()).gpu == 16 * place

    assert index.match(keys) == {0: TierMatch(9600)}
    assert index.size().runs <= 6
    assert list(index.blocks_of(second)) == []
