"""Ids that prompts share are what they would be apart; so are their keys, of which only new ones are made."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvroute.blocks.known_prompts as module
from kvroute.blocks.chunks import ChunkScheme, PromptChunks, chunk_keys
from kvroute.blocks.keys import token_keys
from kvroute.blocks.known_prompts import SHARED_TOKENS, KeyCache, PrefixIds, PromptIds, id_array

lengths = st.one_of(st.integers(0, 40), st.sampled_from([SHARED_TOKENS - 1, SHARED_TOKENS, 9000]))
turns = st.lists(st.tuples(st.integers(0, 9), lengths, lengths, st.sampled_from([7, 8])), max_size=8)


def some(count: int, seed: int = 0) -> array[int]:
    chooser = random.Random(seed)
    return array("I", (chooser.randrange(2**32) for _ in range(count)))


def keys_of(prompt: PromptIds, seed: int) -> list[int]:
    """As the gateway has them made: of all ids but the last one."""
    steps = KeyCache().steps(prompt[: max(0, len(prompt) - 1)], seed)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


@settings(deadline=None, max_examples=60)
@given(turns=turns)
def test_prompts_that_continue_others_have_the_same_ids_and_keys_as_alone(turns: Any) -> None:
    """Each turn continues an earlier one, which other turns may continue too, in one of two key spaces."""
    known = [(PrefixIds(), array("I"))]
    for number, (place, added, behind, seed) in enumerate(turns):
        before, ids = known[place % len(known)]
        new, rest = some(added, number), some(behind, -number - 1)
        after = before.extended(new)
        prompt, whole = PromptIds(after, rest, before), ids + new + rest
        assert list(prompt) == list(whole)
        assert prompt == whole
        assert len(prompt) == len(whole)
        assert keys_of(prompt, seed) == token_keys(whole[: max(0, len(whole) - 1)], seed)
        known.append((after, ids + new))
    for held, ids in known:
        assert PromptIds(held, array("I")) == ids


@pytest.fixture
def prompt() -> PromptIds:
    return PromptIds(PrefixIds().extended(some(2 * SHARED_TOKENS + 5)), some(20, 1))


@given(
    start=st.none() | st.integers(-9000, 9000),
    stop=st.none() | st.integers(-9000, 9000),
    step=st.sampled_from([None, 1, 2, -1]),
)
def test_slices_are_those_of_the_whole(start: Any, stop: Any, step: Any) -> None:
    ids = some(2 * SHARED_TOKENS + 25)
    shared = PromptIds(PrefixIds().extended(ids[:-20]), ids[-20:])

    assert shared[start:stop:step] == ids[start:stop:step]


def test_single_ids_are_those_of_the_whole(prompt: PromptIds) -> None:
    whole = prompt.flat()
    for place in (0, SHARED_TOKENS, 2 * SHARED_TOKENS + 4, 2 * SHARED_TOKENS + 5, len(prompt) - 1, -1):
        assert prompt[place] == whole[place]
    for place in (len(prompt), -len(prompt) - 1):
        with pytest.raises(IndexError):
            prompt[place]


def test_a_turn_shares_whole_pieces_with_the_one_before() -> None:
    first = PrefixIds().extended(some(3 * SHARED_TOKENS + 10))

    second = first.extended(some(SHARED_TOKENS))

    assert [id(part) for part in list(second.parts())[:3]] == [id(part) for part in list(first.parts())[:3]]
    assert second.size == 4 * SHARED_TOKENS + 10


def test_only_keys_of_new_tokens_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(ids: Any, seed: int) -> Any:
        hashed.append(len(ids))
        return token_keys(ids, seed)

    first = PrefixIds().extended(some(60_000))
    keys_of(PromptIds(first, some(100)), 7)
    monkeypatch.setattr(module, "token_keys", counted)
    second = first.extended(some(500, 2))

    keys_of(PromptIds(second, some(100), first), 7)

    assert sum(hashed) <= 600
    assert PromptIds(second, some(100), first).keys(8) is None, "in another space nothing is known"


def test_long_hashing_is_not_done_synchronously() -> None:
    first = PrefixIds().extended(some(100))
    keys_of(PromptIds(first, some(1)), 7)

    assert PromptIds(first.extended(some(40_000)), some(1), first).keys(7) is None


def test_chunks_of_shared_ids_have_the_same_names(prompt: PromptIds) -> None:
    scheme = ChunkScheme()

    assert PromptChunks(prompt).keys(scheme) == chunk_keys(prompt.flat(), scheme)


def test_ids_become_an_array_whatever_they_came_in(prompt: PromptIds) -> None:
    whole = prompt.flat()

    assert id_array(prompt) == whole == id_array(list(whole))
    assert id_array(whole) is whole
    with pytest.raises(OverflowError):
        id_array([2**32])
