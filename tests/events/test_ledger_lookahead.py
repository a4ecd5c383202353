"""Hashes that cover tokens after their block (vLLM 0.33 with EAGLE-style speculation)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from kvroute.blocks.keys import adapter_space, lookahead_keys, token_keys
from kvroute.events.ledger import PIECE_BLOCKS, Ledger
from kvroute.index.prefix_index import PrefixIndex, TierMatch
from kvroute.wire.vllm import BlockRemoved, BlockStored, EventBatch, KvEvent

Run = Callable[[Ledger, Iterable[EventBatch]], None]
SIZE = 16
A = list(range(1000, 1000 + 40 * SIZE))
# The same first 32 tokens, then another prompt.
B = A[:32] + list(range(5000, 5100))


def batch(*events: KvEvent) -> EventBatch:
    return EventBatch(0.0, list(events), 0, "map")


def stored(
    names: list[int | bytes], ids: Sequence[int], start: int = 0, parent: int | None = None, ahead: int = 1
) -> BlockStored:
    """Blocks from block `start` of the prompt `ids` on, as vLLM announces them."""
    ends = [(start + number + 1) * SIZE for number in range(len(names))]
    rows = [list(ids[end : end + ahead]) for end in ends]
    tokens = list(ids[start * SIZE : ends[-1]])
    return BlockStored(names, parent, tokens, SIZE, lookahead_token_ids=rows)


def matched(index: PrefixIndex, ids: Sequence[int], ahead: int = 1) -> int:
    keys = lookahead_keys(ids, adapter_space(None).seed, ahead)
    return index.match(keys).get(0, TierMatch()).gpu


@pytest.mark.parametrize("ahead", [1, 3, 16, 20])
def test_the_last_block_before_a_fork_is_of_one_prompt_only(run_ledger: Run, ahead: int) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(stored([1, 2, 3], A, ahead=ahead))])

    assert ledger.lookahead == ahead
    assert matched(index, A[: 48 + ahead], ahead) == 48
    assert matched(index, A[: 48 + ahead - 1], ahead) == 32
    assert matched(index, B, ahead) == (32 - ahead) // SIZE * SIZE
    # Keys of tokens alone would say 32.
    assert index.match(token_keys(B, adapter_space(None).seed)) == {}


def test_both_sides_of_a_fork_have_blocks_of_their_own(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(stored([1, 2, 3], A), stored([22, 23], B, start=1, parent=1))])

    assert (matched(index, A[:49]), matched(index, B[:49])) == (48, 48)
    run_ledger(ledger, [batch(BlockRemoved([3]), BlockRemoved([2]))])
    assert (matched(index, A[:49]), matched(index, B[:49])) == (16, 48)


def test_a_long_event_gives_the_same_keys_as_short_ones(run_ledger: Run) -> None:
    ids = list(range((PIECE_BLOCKS + 9) * SIZE + 2))
    names: list[int | bytes] = list(range(1, PIECE_BLOCKS + 10))
    index = PrefixIndex()
    run_ledger(Ledger(index, 0), [batch(stored(names, ids, ahead=2))])

    assert matched(index, ids, 2) == len(names) * SIZE


def test_a_block_after_another_and_an_orphan_find_their_places(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(stored([3], A, start=2, parent=2))])
    assert (ledger.orphan_blocks, matched(index, A)) == (1, 0)

    assert ledger.store([stored([1, 2], A), stored([4], A, start=3, parent=3)])
    assert (ledger.orphan_blocks, matched(index, A)) == (0, 64)


def test_an_answer_confirms_orphans_by_the_same_keys(run_ledger: Run) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(stored([3, 4], A, start=2, parent=2))])
    prompt = A[: 4 * SIZE + 1]
    keys = lookahead_keys(prompt, adapter_space(None).seed, 1)

    assert ledger.confirm(keys, prompt[1:], 2 * SIZE) == 4
    assert matched(index, prompt) == 64


@pytest.mark.parametrize(
    "rows",
    [[], [[1]], [[1], [1, 2]], [[], []], [[1], [1], [1]]],
    ids=["none", "one", "uneven", "empty", "three"],
)
def test_rows_that_do_not_fit_the_blocks_store_nothing(run_ledger: Run, rows: list[list[int]]) -> None:
    index = PrefixIndex()
    ledger = Ledger(index, 0)
    run_ledger(ledger, [batch(BlockStored([1, 2], None, A[:32], SIZE, lookahead_token_ids=rows))])

    assert (ledger.counts.unusable, ledger.lookahead, index.size().blocks) == (2, 0, 0)
