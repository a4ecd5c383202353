from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.blocks.keys import Tier, adapter_space, prompt_keys, token_keys
from kvroute.events.ledger import PIECE_BLOCKS, Ledger
from kvroute.index.prefix_index import PrefixIndex, TierMatch
from kvroute.sim.cache import Chain, PagedCache
from kvroute.wire.vllm import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent

Run = Callable[[Ledger, Iterable[EventBatch]], None]
IDS = list(range(1, 200))


def batch(*events: KvEvent, dialect: str = "map") -> EventBatch:
    return EventBatch(0.0, list(events), 0, dialect)


def store(
    names: list[int | bytes], start: int = 0, parent: int | bytes | None = None, **extra: Any
) -> BlockStored:
    """Blocks of 16 of `IDS`, from block `start` on."""
    size = extra.pop("block_size", 16)
    tokens = IDS[start * size : (start + len(names)) * size]
    return BlockStored(names, parent, extra.pop("token_ids", tokens), size, **extra)


def matched(index: PrefixIndex, salt: str = "", adapter: str | None = None) -> TierMatch:
    return index.match(prompt_keys(IDS, adapter_space(adapter, salt))).get(0, TierMatch())


def test_placeholders_of_offloading_are_known_by_the_gpus_names(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    moved = BlockStored([1], None, [], 0, medium="Cpu")
    run_ledger(ledger, [batch(store([1, 2]), moved, BlockRemoved([2]), BlockRemoved([1]))])

    assert matched(index) == TierMatch(0, 16)
    run_ledger(
        ledger, [batch(BlockStored([2], None, [], 0, medium="STORAGE"), BlockStored([9], None, [], 0))]
    )
    assert matched(index) == TierMatch(0, 16, 16)
    assert ledger.counts.unusable == 1


def test_other_groups_of_a_hybrid_model_are_passed_over(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    run_ledger(
        ledger, [batch(store([1, 2], **window), store([1, 2], **full), BlockRemoved([1], group_idx=0))]
    )

    assert matched(index) == TierMatch(32)
    assert (ledger.counts.copies, ledger.counts.passed_over) == (0, 3)
    run_ledger(ledger, [batch(BlockRemoved([2], group_idx=1))])
    assert matched(index) == TierMatch(16)


def test_before_groups_had_kinds_the_first_one_counts(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(
        ledger, [batch(store([1], group_idx=1), store([1], group_idx=0), store([2], 1, 1, group_idx=2))]
    )

    assert matched(index) == TierMatch(16)


def test_blocks_of_unknown_places_and_odd_sizes_are_not_believed(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(
        ledger,
        [
            batch(
                store([1], medium="TAPE"),
                store([2], block_size=24),
                store([3], token_ids=IDS[:20]),
                BlockRemoved([4], medium="TAPE"),
                BlockRemoved([5]),
            )
        ],
    )

    assert index.size().blocks == 0
    assert (ledger.counts.unusable, ledger.counts.unknown_removed) == (4, 1)


def test_images_keep_equal_placeholder_tokens_apart(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(store([1, 2, 3], extra_keys=[["salt"], [["image-7", 3]], None]))])

    assert matched(index, "salt") == TierMatch(16)
    assert matched(index) == TierMatch()
    assert ledger.held_blocks(Tier.GPU) == 3


def test_adapters_are_known_by_name_and_never_by_number(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(
        ledger,
        [
            batch(
                store([1], lora_name="ada", lora_id=1, extra_keys=[["ada", "s"]]),
                store([2, 3], lora_id=1),
            )
        ],
    )

    assert matched(index, "s", "ada") == TierMatch(16)
    assert matched(index) == TierMatch()


def test_an_unknown_parent_that_becomes_known_places_all_that_waited(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(store([5, 6], 4, 4), store([3, 4], 2, 2), store([8], 7, 7), BlockRemoved([6]))])
    assert matched(index) == TierMatch()
    assert ledger.orphan_blocks == 4

    run_ledger(ledger, [batch(store([1, 2]))])

    assert matched(index) == TierMatch(5 * 16)
    assert ledger.orphan_blocks == 1
    run_ledger(ledger, [batch(AllBlocksCleared())])
    assert ledger.orphan_blocks == 0


def lost_head(run_ledger: Run, **extra: Any) -> tuple[PrefixIndex, Ledger]:
    """The worker holds blocks 0 to 5 of `IDS`; the events of the first three were lost. A request has just
    continued them with block 6."""
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(store([3, 4, 5], 3, 2, **extra), store([6], 6, 5, **extra))])
    return index, ledger


def confirm(ledger: Ledger, cached_tokens: int, ids: list[int] = IDS, **extra: Any) -> int:
    return ledger.confirm(prompt_keys(ids, adapter_space(None)), ids, cached_tokens, **extra)


def test_a_request_that_continues_orphans_and_reports_its_hits_places_them(run_ledger: Run) -> None:
    index, ledger = lost_head(run_ledger)
    assert (matched(index), ledger.orphan_blocks) == (TierMatch(), 4)

    assert confirm(ledger, 6 * 16) == 7

    assert matched(index) == TierMatch(7 * 16)
    assert (ledger.orphan_blocks, ledger.held_blocks(Tier.GPU)) == (0, 7)
    assert sorted(ledger.held_keys(Tier.GPU)) == sorted(ledger.indexed(Tier.GPU))
    run_ledger(ledger, [batch(BlockRemoved([6]), BlockRemoved([5]))])
    assert matched(index) == TierMatch(5 * 16)
    assert confirm(ledger, 5 * 16) == 0


def test_the_map_is_doubted_after_the_first_removal_of_an_unknown_block(run_ledger: Run) -> None:
    index, ledger = lost_head(run_ledger)
    confirm(ledger, 6 * 16)

    run_ledger(ledger, [batch(BlockRemoved([99], medium="CPU"))])
    assert matched(index) == TierMatch(7 * 16)
    run_ledger(ledger, [batch(BlockRemoved([1]))])

    assert matched(index) == TierMatch()
    # The orphans and their parent have names.
    assert ledger.held_blocks(Tier.GPU) == 5
    run_ledger(ledger, [batch(store([0, 1]))])
    assert matched(index) == TierMatch(7 * 16)
    run_ledger(ledger, [batch(BlockRemoved([1]))])
    assert matched(index) == TierMatch(16)


@pytest.mark.parametrize("others", [0, 15])
def test_an_answer_may_come_before_its_events(run_ledger: Run, others: int) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(store([3, 4, 5], 3, 2))])
    assert confirm(ledger, 6 * 16) == 0
    # Before it, events of other prompts; one of the unknown blocks was evicted by then.
    run_ledger(ledger, [batch(BlockRemoved([100 + number])) for number in range(others)])
    assert matched(index) == TierMatch()

    run_ledger(ledger, [batch(store([6], 6, 5))])

    assert matched(index) == TierMatch(7 * 16)
    assert (ledger.orphan_blocks, ledger.held_blocks(Tier.GPU)) == (0, 7)
    assert ledger.counts.confirmed == 7
    run_ledger(ledger, [batch(BlockRemoved([1]))])
    assert matched(index) == TierMatch()
    run_ledger(ledger, [batch(store([0, 1, 2]))])
    assert matched(index) == TierMatch(7 * 16)


def test_the_requests_block_may_be_the_first_orphan(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(store([90]))])
    assert confirm(ledger, 6 * 16) == 0

    run_ledger(ledger, [batch(store([6], 6, 5))])

    assert matched(index) == TierMatch(7 * 16)


def test_an_early_answer_is_not_waited_for_for_ever(run_ledger: Run) -> None:
    for between in (
        [batch(BlockRemoved([100 + number])) for number in range(16)],
        [batch(AllBlocksCleared())],
        # A block of another prompt with these tokens: the match becomes ambiguous.
        [batch(store([66], 6, 50, extra_keys=[["image"]]))],
    ):
        index = PrefixIndex()
        ledger = Ledger(index, 0)
        run_ledger(ledger, [batch(store([3, 4, 5], 3, 2))])
        confirm(ledger, 6 * 16)

        run_ledger(ledger, [*between, batch(store([6], 6, 5))])

        assert matched(index) == TierMatch()


def test_orphans_without_proof_stay_orphans(run_ledger: Run) -> None:
    other = [*IDS[:100], 7777, *IDS[101:]]
    index, ledger = lost_head(run_ledger)
    moment = ledger.forgotten
    # It computed no block behind its hits; its tokens are others; its hits end elsewhere.
    assert confirm(ledger, 6 * 16, IDS[: 7 * 16 - 1]) == 0
    assert confirm(ledger, 6 * 16, other) == 0
    assert confirm(ledger, 8 * 16) == 0
    assert confirm(ledger, 6 * 16, adapter="ada") == 0
    # Something went away since the answer began.
    run_ledger(ledger, [batch(BlockRemoved([98]))])
    assert confirm(ledger, 6 * 16, since=moment) == 0
    # The same tokens after another prefix: the match is ambiguous.
    run_ledger(ledger, [batch(store([66], 6, 50))])
    assert confirm(ledger, 6 * 16) == 0
    assert matched(index) == TierMatch()

    _, images = lost_head(run_ledger, extra_keys=[["image"]] * 3)
    assert confirm(images, 6 * 16) == 0


def test_orphans_that_are_evicted_are_not_placed(run_ledger: Run) -> None:
    index, ledger = lost_head(run_ledger)
    run_ledger(ledger, [batch(BlockRemoved([6]), BlockRemoved([4]))])

    assert confirm(ledger, 6 * 16) == 0
    run_ledger(ledger, [batch(store([6], 6, 5))])
    assert ledger.counts.confirmed == 6
    assert matched(index) == TierMatch(4 * 16)


class CountingIndex(PrefixIndex):
    """Counts blocks that were touched."""

    touched = 0

    def store(self, holder: Any, block_tokens: int, parent: Any, keys: Any) -> int:
        self.touched += len(keys)
        return super().store(holder, block_tokens, parent, keys)

    def append_one(self, holder: Any, stride: int, parent: Any, key: Any) -> bool:
        before = self.touched
        done = super().append_one(holder, stride, parent, key)
        self.touched = before + 1
        return done

    def remove(self, holder: Any, key: Any) -> bool:
        self.touched += 4
        return super().remove(holder, key)


def test_never_more_than_two_pieces_of_work_between_two_pauses(run_ledger: Run) -> None:
    names: list[int | bytes] = list(range(1, 5001))
    tokens = list(range(5000 * 16))
    chain: list[KvEvent] = [BlockStored(names, None, tokens, 16)]
    singles: list[KvEvent] = [
        BlockStored([name], name - 1 if name > 1 else None, tokens[(name - 1) * 16 : name * 16], 16)
        for name in range(1, 5001)
    ]
    for events in (
        chain,
        singles,
        [*chain, *[BlockRemoved([name]) for name in names]],
        [*chain, BlockRemoved(names)],
    ):
        index = CountingIndex()
        ledger = Ledger(index, 0)
        most = before = 0
        for _ in ledger.apply(batch(*events)):
            most, before = max(most, index.touched - before), index.touched
        assert 0 < most <= 2 * PIECE_BLOCKS
        assert index.touched - before <= PIECE_BLOCKS
        steps = 0
        ledger.drop()
        while ledger.sweep(100):
            steps += 1
        assert index.size().blocks == 0


def test_an_announcement_that_may_be_a_repetition_is_no_copy(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(store([1, 2])), batch(store([1, 2])), batch(BlockRemoved([2]))])
    assert matched(index) == TierMatch(16)

    # Releases before 0.24 have no repetitions.
    old = Ledger(PrefixIndex(), 0)
    run_ledger(old, [batch(store([1, 2])), batch(store([1, 2]), dialect="array"), batch(BlockRemoved([2]))])
    assert old.held_blocks(Tier.GPU) == 2


def test_a_prompt_that_cannot_have_been_a_hit_is_stored_again(run_ledger: Run) -> None:
    """Its first block was gone, so the engine computed all of it: the second block is there twice."""
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(store([1, 2])), batch(BlockRemoved([1])), batch(store([1, 2]))])
    assert (ledger.counts.repeated, ledger.counts.copies) == (0, 1)

    run_ledger(ledger, [batch(BlockRemoved([2]))])
    assert matched(index) == TierMatch(32)


def test_while_blocks_are_unknown_no_announcement_is_believed_to_be_a_copy(run_ledger: Run) -> None:
    """The worker may hold the block that the ledger lacks."""
    ledger = Ledger(PrefixIndex(), 0)
    ledger.is_repairing = True
    run_ledger(ledger, [batch(store([1, 2])), batch(BlockRemoved([1])), batch(store([1, 2]))])
    assert (ledger.counts.repeated, ledger.counts.copies) == (1, 0)


def test_a_full_index_is_not_believed_to_hold_the_rest(run_ledger: Run) -> None:
    index = PrefixIndex(max_blocks=2)
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(store([1, 2, 3])), batch(store([4], 3, 3))])

    assert matched(index) == TierMatch(32)
    assert (ledger.held_blocks(Tier.GPU), ledger.counts.refused, ledger.orphan_blocks) == (2, 1, 1)


def test_too_many_orphans_are_refused(run_ledger: Run) -> None:
    ledger = Ledger(PrefixIndex(), 0, max_orphans=3)
    run_ledger(ledger, [batch(store([5, 6], 4, 4), store([8, 9], 7, 7))])

    assert (ledger.orphan_blocks, ledger.counts.refused) == (2, 2)


def test_hashes_of_removed_blocks_are_remembered_up_to_a_bound(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0, max_remembered=1)
    run_ledger(ledger, [batch(store([1, 2, 3]), BlockRemoved([3]), BlockRemoved([2]))])
    run_ledger(ledger, [batch(store([4], 3, 3)), batch(store([5], 2, 2))])

    assert ledger.orphan_blocks == 1
    run_ledger(ledger, [batch(store([2], 1, 1))])
    assert matched(index) == TierMatch(48)


def test_a_long_announcement_comes_in_pieces_and_is_no_copy_when_repeated() -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    names: list[int | bytes] = list(range(PIECE_BLOCKS * 2 + 5))
    long = BlockStored(names, None, list(range(len(names) * 16)), 16, extra_keys=[None] * len(names))

    pauses = sum(1 for _ in ledger.apply(batch(long)))
    repeated = sum(1 for _ in ledger.apply(batch(long)))

    assert pauses >= 3
    assert repeated >= 3
    assert ledger.held_blocks(Tier.GPU) == len(names)
    assert (ledger.counts.copies, ledger.counts.repeated) == (0, len(names))


def test_dropping_empties_the_map_immediately_and_frees_memory_in_steps(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(store([1, 2, 3]))])

    ledger.drop()

    assert matched(index) == TierMatch()
    steps = 1
    while ledger.sweep(1):
        steps += 1
    assert steps > 3
    assert index.size().blocks == 0
    ledger.close()
    run_ledger(ledger, [batch(store([1]))])
    assert matched(index) == TierMatch()


@pytest.mark.parametrize("removal", [False, True])
def test_a_stream_that_ends_in_the_middle_of_a_large_event_leaves_nothing(removal: bool) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    names, ids = list(range(1000)), list(range(1, 16_001))
    stored = BlockStored(names, None, ids, 16)
    if removal:
        for _ in ledger.apply(EventBatch(0.0, [stored], 0, "map")):
            pass
        steps = ledger.apply(EventBatch(0.0, [BlockRemoved(names), stored], 0, "map"))
    else:
        steps = ledger.apply(EventBatch(0.0, [stored], 0, "map"))
    next(steps)

    ledger.close()
    for _ in steps:
        pass

    assert list(ledger.held_keys(Tier.GPU)) == list(ledger.indexed(Tier.GPU)) == []
    assert index.match(prompt_keys(ids, adapter_space(None))) == {}


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 60), st.booleans(), st.booleans()),
        max_size=40,
    ),
    size=st.sampled_from([16, 32]),
)
def test_after_any_traffic_the_index_equals_the_engines_cache(
    requests: list[tuple[int, int, int, bool, bool]], size: int
) -> None:
    """Shared prefixes, evictions, and copies from requests that run at once."""
    index, cache = PrefixIndex(), PagedCache(8, size, record=True)
    ledger = Ledger(index, 0)
    running: list[Any] = []
    seed = adapter_space(None).seed
    for head, shared, tail, overlaps, ends in requests:
        tokens = [head + 1] * (shared * 16) + [head * 100 + tail] * tail
        keys = token_keys(tokens, seed)[size // 16 - 1 :: size // 16]
        hits = cache.match(keys, (len(tokens) - 1) // size)
        need = len(keys) - hits + cache.idle_among(keys, hits)
        if need > cache.available or len(keys) == 1:
            continue  # a copy of a lone first block looks like a repetition
        blocks = cache.take(keys, hits) + cache.allocate(len(keys) - hits)
        # What runs at once cannot see this one's blocks yet: it computes copies.
        running.append((blocks, Chain(keys, tokens), hits))
        if not overlaps:
            for done, chain, start in running:
                cache.store(done, chain, start, len(chain.keys))
                cache.free(done)
            running = []
            if ends:
                cache.clear()
            for _ in ledger.apply(batch(*cache.take_events())):
                pass
            held = set(ledger.held_keys(Tier.GPU))
            assert held <= cache.held_keys
            if not ledger.counts.repeated:
                assert held == cache.held_keys


def test_a_later_part_of_a_repeated_prompt_is_no_copy(run_ledger: Run) -> None:
    ledger = Ledger(PrefixIndex(), 0)
    run_ledger(ledger, [batch(store([1, 2, 3, 4])), batch(store([1, 2]))])
    for from_root in (True, False):
        for _ in ledger.apply(batch(store([3, 4], 2, 2)), from_root=from_root):
            pass
    assert (ledger.counts.repeated, ledger.counts.copies) == (4, 2)


def test_a_long_announcement_that_does_not_match_its_hashes_is_ignored(run_ledger: Run) -> None:
    """Its parts would fit, were they cut off from the front."""
    blocks = 3 * PIECE_BLOCKS
    tokens = [7] * (16 * blocks + 16)
    ledger = Ledger(PrefixIndex(), 0)
    run_ledger(ledger, [batch(BlockStored(list(range(blocks)), None, tokens, 16))])
    assert ledger.held_blocks(Tier.GPU) == 0
    assert ledger.counts.unusable == blocks


@pytest.mark.parametrize(
    "second",
    [
        pytest.param([store([1, 2, 3], start=5)], id="in a later event"),
        pytest.param([store([7, 7, 8], start=5)], id="twice in one event"),
        pytest.param([store([4], start=5), store([4, 6], start=8)], id="beside a new one"),
    ],
)
def test_an_engine_that_contradicts_itself_leaves_nothing_in_the_index(
    run_ledger: Run, second: list[KvEvent]
) -> None:
    """Each engine hash means one content. A block whose hash means another content now could never be
    removed, and would be believed for ever."""
    index = PrefixIndex()
    ledger = Ledger(index, 0)

    run_ledger(ledger, [batch(store([1, 2])), batch(*second)])

    assert set(ledger.indexed(Tier.GPU)) <= set(ledger.held_keys(Tier.GPU))
    run_ledger(ledger, [batch(BlockRemoved([name])) for name in range(1, 9) for _ in range(2)])
    assert list(ledger.indexed(Tier.GPU)) == []


def test_many_clears_in_one_batch_leave_pauses_and_no_garbage() -> None:
    ledger = Ledger(PrefixIndex(), 0)
    ledger.store([store([1, 2])])

    pauses = sum(1 for _ in ledger.apply(batch(*[AllBlocksCleared()] * 2000)))

    assert pauses > 200
    assert ledger.counts.cleared == 2000
    assert not ledger.sweep(16)
