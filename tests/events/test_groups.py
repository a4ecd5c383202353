"""Hits of models with several KV cache groups, as the engines themselves found them."""

from __future__ import annotations

import pytest
from tests import recordings
from tests.recordings import Recording

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import Tier, adapter_space, prompt_keys
from kvroute.caches.tracker import held_tokens
from kvroute.events.groups import placed
from kvroute.events.ledger import Ledger
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.groups import GroupKind, GroupRule, SlotGroups
from kvroute.index.prefix_index import PrefixIndex
from kvroute.index.snapshot import HEAD as SNAPSHOT_HEAD
from kvroute.index.snapshot import StreamHead, decode, encode, encode_end, split
from kvroute.replicas.map_mirror import Mirror
from kvroute.replicas.maps import PublishingPrefixIndex
from kvroute.replicas.messages import Message
from kvroute.routing.reports import LastUnits
from kvroute.routing.strategy import ExactPrompt, Tokens
from kvroute.wire.vllm import BlockRemoved, BlockStored, EventBatch, KvEvent, decode_batch

WHOLE_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}
LEARNING = 3
"""Wrong predictions before an engine's drop of the last unit is known."""


def covers_prefix(recording: Recording) -> bool:
    """Whether a group of the engine covers the whole prompt, in blocks of one size."""
    groups = recording.engine["groups"]
    return any(each["kind"] in WHOLE_KINDS for each in groups) and not recording.engine["partial_hits"]


NAMES = [name for name in recordings.names() if covers_prefix(recordings.read(name))]
OTHERS = [name for name in recordings.names() if name not in NAMES]


def exact(ids: list[int] | tuple[int, ...]) -> ExactPrompt:
    keys = prompt_keys(list(ids), adapter_space(None))
    return ExactPrompt(len(ids), keys, PromptChunks(tuple(ids[:-1])), last_id=ids[-1])


def predicted(index: PrefixIndex, prompt: ExactPrompt) -> Tokens:
    held = held_tokens(index, ChunkIndex(max_chunks=1), lambda slot: False, prompt)
    return held.get(0, Tokens())


def apply(ledger: Ledger, payload: bytes) -> None:
    for _ in ledger.apply(decode_batch(payload)):
        pass


@pytest.mark.parametrize("name", NAMES)
def test_a_hit_is_predicted_as_the_engine_finds_it(name: str) -> None:
    recording = recordings.read(name)
    messages: list[Message] = []
    index, mirror = (
        PublishingPrefixIndex(messages.append, max_blocks=100_000),
        Mirror(max_blocks=100_000, max_chunks=1),
    )
    ledger, drops = Ledger(index, 0), LastUnits(lambda slot: index.unit(slot))
    index.drops = mirror.blocks.drops = drops.slots
    wrong, hits = [], 0
    for step in recording.steps:
        if len(step.requests) == 1:
            (asked,) = step.requests
            prompt = exact(asked.prompt)
            tokens = predicted(index, prompt)
            assert predicted(mirror.blocks, prompt) == tokens
            hits += asked.cached_tokens > 0
            if tokens.gpu != asked.cached_tokens:
                wrong.append((len(asked.prompt), tokens.gpu, asked.cached_tokens))
            drops.reported(0, tokens, asked.cached_tokens)
        for frames in step.messages:
            apply(ledger, frames[2])
            for message in messages:
                assert mirror.apply(message)
            messages.clear()
    learned = any(group["eagle"] for group in recording.engine["groups"])
    assert len(wrong) == (LEARNING if learned else 0), wrong
    assert hits >= 20 or not recording.engine["enable_prefix_caching"]
    assert not ledger.orphan_blocks
    assert not ledger.not_understood


@pytest.mark.parametrize("name", ["gpt_oss_eviction", "qwen3_next"])
def test_a_map_that_was_restored_from_a_snapshot_predicts_the_same(name: str) -> None:
    recording = recordings.read(name)
    index, again = PrefixIndex(), PrefixIndex()
    ledger, restored = Ledger(index, 0), Ledger(again, 0)
    half = len(recording.steps) // 2
    for step in recording.steps[:half]:
        for frames in step.messages:
            apply(ledger, frames[2])
    head = StreamHead("w", "u", 0, 0.0, 1, 1, True, ledger.group, ledger.block_tokens)
    frames_of = [encode(head), *(encode(part) for part in ledger.dump())]
    ((_, parts),) = split(SNAPSHOT_HEAD + b"".join(frames_of) + encode_end(len(frames_of)))
    restored.begin_restore(ledger.group, ledger.block_tokens)
    for part in parts:
        restored.restore(decode(part))
    hits = 0
    for step in recording.steps[half:]:
        for asked in step.requests:
            prompt = exact(asked.prompt)
            hits += predicted(again, prompt).gpu > 0
            assert predicted(again, prompt) == predicted(index, prompt)
        for frames in step.messages:
            apply(ledger, frames[2])
            apply(restored, frames[2])
    assert hits


@pytest.mark.parametrize("name", OTHERS)
def test_a_worker_whose_hits_cannot_be_computed_says_which_kinds_it_has(name: str) -> None:
    recording = recordings.read(name)
    ledger = Ledger(PrefixIndex(), 0)
    for step in recording.steps:
        for frames in step.messages:
            apply(ledger, frames[2])
    named = {"mamba": "state", "sliding_window": "window"}[recording.engine["groups"][0]["kind"]]
    assert named in ledger.not_understood or "within blocks" in ledger.not_understood
    assert not ledger.orphan_blocks


# Single rules

SIZE = 16


class Worker:
    """A worker with a full group 1 and another group 0; blocks of one key. Mutable: stores and removes."""

    def __init__(self, kind: str | None, window: int | None = None) -> None:
        self.index = PrefixIndex()
        self.ledger = Ledger(self.index, 0)
        self.ids = list(range(1000, 1000 + 20 * SIZE))
        self.kind, self.window = kind, window

    def send(self, *events: KvEvent, dialect: str = "map") -> None:
        for _ in self.ledger.apply(EventBatch(0.0, list(events), dialect=dialect)):
            pass

    def stored(self, group: int, start: int, stop: int, kept: range | None = None) -> BlockStored:
        """The event for the blocks from `start` to `stop`, of which the group keeps `kept`."""
        return BlockStored(
            [f"b{block}".encode() for block in (range(start, stop) if kept is None else kept)],
            f"b{start - 1}".encode() if start else None,
            self.ids[start * SIZE : stop * SIZE],
            SIZE,
            group_idx=group,
            kv_cache_spec_kind=None if self.kind is None else "full_attention" if group == 1 else self.kind,
            kv_cache_spec_sliding_window=self.window if group == 0 else None,
        )

    def hit(self, blocks: int) -> int:
        """Matched blocks of a prompt of `blocks` blocks and one token."""
        return predicted(self.index, exact(self.ids[: blocks * SIZE + 1])).gpu // SIZE


def removed(group: int, *blocks: int, left: list[int] | None = None) -> BlockRemoved:
    names = [f"b{block}".encode() for block in blocks]
    return BlockRemoved(names, group_idx=group, remaining_copy_counts=left)


def test_a_window_needs_the_blocks_before_the_end_of_the_hit_only() -> None:
    worker = Worker("sliding_window", 3 * SIZE + 1)
    worker.send(worker.stored(0, 0, 10, range(7, 10)), worker.stored(1, 0, 10))
    assert worker.hit(10) == 10
    assert worker.hit(9) == 0  # the window before block 9 lacks block 6
    worker.send(removed(0, 8))
    assert worker.hit(10) == 0


def test_a_block_is_not_taken_for_one_that_its_event_leaves_out() -> None:
    """The window's event comes before the one that names its block."""
    worker = Worker("sliding_window", 3 * SIZE + 1)
    worker.send(worker.stored(0, 0, 3), worker.stored(1, 0, 3))
    worker.send(worker.stored(0, 3, 6, range(3, 4)), worker.stored(1, 3, 6))
    assert worker.hit(6) == 4
    worker.send(removed(0, 3))
    assert worker.hit(6) == 3


def test_a_state_serves_the_prompts_that_go_on_after_it() -> None:
    worker = Worker("mamba")
    worker.send(worker.stored(0, 0, 10, range(9, 10)), worker.stored(1, 0, 10))
    assert worker.hit(12) == 10
    assert worker.hit(9) == 0
    worker.send(worker.stored(0, 0, 10, range(4, 5)))
    assert worker.hit(9) == 5


def test_blocks_of_a_group_wait_for_the_group_that_names_them() -> None:
    worker = Worker("mamba")
    worker.send(worker.stored(0, 0, 10, range(9, 10)))
    assert worker.ledger.not_understood == "no group covers the whole prompt, only state"
    worker.send(worker.stored(1, 0, 10))
    assert worker.ledger.not_understood == ""
    assert worker.hit(10) == 10


def test_a_report_of_held_blocks_adds_none_to_a_window() -> None:
    worker = Worker("sliding_window", 3 * SIZE + 1)
    worker.send(worker.stored(0, 0, 10, range(7, 10)), worker.stored(1, 0, 10))
    worker.send(worker.stored(0, 0, 10), worker.stored(1, 0, 10))  # kv_cache_report_mode=full
    assert worker.hit(9) == 0
    assert worker.hit(10) == 10
    worker.send(removed(0, 9))
    assert worker.hit(10) == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_what_one_group_has_lost_the_others_hold_twice(is_first: bool) -> None:
    """Without its state the engine computes the whole prompt, and stores the other group's blocks again."""
    worker = Worker("mamba")
    state, whole = worker.stored(0, 0, 4, range(3, 4)), worker.stored(1, 0, 4)
    both = (state, whole) if is_first else (whole, state)
    worker.send(*both)
    worker.send(removed(0, 3))
    worker.send(*both)
    worker.send(removed(1, 0, 1, 2, 3))  # the older copies
    assert worker.hit(4) == 4
    worker.send(removed(1, 3))
    assert worker.hit(4) == 0


def test_a_state_is_held_twice_after_the_whole_prompt_was_lost() -> None:
    worker = Worker("mamba")
    both = worker.stored(1, 0, 4), worker.stored(0, 0, 4, range(3, 4))
    worker.send(*both)
    worker.send(removed(1, 3))
    worker.send(*both)  # by the second event the group that covers the prefix has its block again
    worker.send(removed(0, 3))
    assert worker.hit(4) == 4


def test_after_a_loss_a_report_shows_the_end_of_a_hit_only() -> None:
    worker = Worker("mamba")
    worker.ledger.is_repairing = True
    worker.send(worker.stored(0, 0, 10), worker.stored(1, 0, 10))
    assert (worker.hit(10), worker.hit(9)) == (10, 0)


@pytest.mark.parametrize("group", [0, 1])
def test_a_removal_that_counts_the_remaining_copies_is_believed(group: int) -> None:
    worker = Worker("mamba")
    for _ in range(2):  # the second ones are copies
        worker.send(worker.stored(0, 0, 1), worker.stored(1, 0, 1), dialect="array")
    worker.send(removed(group, 0, left=[1]))
    assert worker.hit(1) == 1
    worker.send(removed(group, 0, left=[0]))
    assert worker.hit(1) == 0


def test_a_last_copy_that_is_removed_alone_takes_all_copies_along() -> None:
    worker = Worker("mamba")
    for _ in range(3):
        worker.send(worker.stored(0, 0, 1), worker.stored(1, 0, 1), dialect="array")
    worker.send(removed(1, 0, left=[0]))
    assert worker.hit(1) == 0
    assert worker.ledger.held_blocks(Tier.GPU) == 0


def test_groups_without_a_kind_are_not_understood() -> None:
    worker = Worker(None)
    worker.send(worker.stored(0, 0, 4))
    assert worker.ledger.not_understood == ""
    worker.send(worker.stored(1, 0, 4))
    assert worker.ledger.not_understood == "several groups without a kind (vLLM 0.20 and 0.21)"


def test_an_unknown_kind_alone_is_named_and_counted() -> None:
    worker = Worker("cross_attention")
    worker.send(worker.stored(0, 0, 4))
    assert worker.ledger.not_understood == "no group covers the whole prompt, only cross_attention"
    assert worker.ledger.counts.passed_over == 4


def test_a_sink_group_covers_the_prefix() -> None:
    worker = Worker("sink_full_attention")
    worker.send(worker.stored(0, 0, 4))
    assert worker.hit(4) == 4


def test_a_chunk_needs_its_own_blocks_only() -> None:
    groups = SlotGroups()
    groups.whole_tokens = SIZE
    groups.define(0, GroupRule(GroupKind.CHUNK, SIZE, 4 * SIZE))
    keys = prompt_keys(list(range(12 * SIZE + 1)), adapter_space(None))
    groups.keys_by_group[0].update(keys[8:10])
    most = 12 * SIZE
    assert groups.usable(keys, 12 * SIZE, most, False) // SIZE == 12  # a new chunk begins
    assert groups.usable(keys, 11 * SIZE, most, False) // SIZE == 10
    assert groups.usable(keys, 7 * SIZE, most, False) // SIZE == 4


def test_the_reset_of_a_cache_empties_all_groups() -> None:
    from kvroute.wire.vllm import AllBlocksCleared

    worker = Worker("mamba")
    worker.send(worker.stored(0, 0, 10, range(9, 10)), worker.stored(1, 0, 10))
    worker.send(AllBlocksCleared())
    worker.send(worker.stored(1, 0, 10))
    assert worker.hit(10) == 0
    assert worker.index.groups.blocks == 0


def test_the_sets_of_all_groups_are_bounded() -> None:
    worker = Worker("mamba")
    worker.index = PrefixIndex(max_blocks=12)
    worker.ledger = Ledger(worker.index, 0)
    worker.send(worker.stored(1, 0, 12), worker.stored(0, 0, 20))
    assert worker.index.groups.blocks == 12
    assert worker.ledger.counts.refused > 0


def test_unnamed_blocks_stand_before_the_next_named_one_or_at_the_end() -> None:
    keys = [10, 20, 30, 40, 50]
    assert placed([None, None, 40], keys) == [20, 30, 40]  # type: ignore[list-item]
    assert placed([None, 40, None], keys) == [30, 40, 50]  # type: ignore[list-item]
    assert placed([None, None], keys) == [40, 50]  # type: ignore[list-item]
    assert placed([None, 10], keys) == [None, 10]  # type: ignore[list-item]
