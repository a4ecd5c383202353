"""A memory of keys gives the keys that hashing gives, and remembers no more than it may."""

from __future__ import annotations

import random
from array import array
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from kvroute.blocks import known_prompts
from kvroute.blocks.keys import token_keys
from kvroute.blocks.known_prompts import PIECE_TOKENS, KeyCache


def run(steps: Generator[None, None, Any]) -> tuple[list[int], int]:
    """What it returns, and how often it was interrupted."""
    turns = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value), turns
        turns += 1


def ids(seed: int, length: int) -> array[int]:
    chooser = random.Random(seed)
    return array("I", (chooser.randrange(2**32) for _ in range(length)))


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: ids])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 4095, 4096, 4097, 4112, 3 * 4096 + 40])
def test_cached_and_fresh_keys_equal_hashed_ones(kind: Any, length: int) -> None:
    memory, prompt = KeyCache(), ids(1, length)
    expected = token_keys(prompt, 7)

    for _ in range(2):
        assert run(memory.steps(kind(prompt), 7))[0] == expected
    assert len(memory) == length // PIECE_TOKENS


def test_equal_tokens_after_other_tokens_or_in_another_space_have_other_keys() -> None:
    memory, same = KeyCache(), ids(1, PIECE_TOKENS)
    run(memory.steps(same, 7))
    prompts: list[tuple[Sequence[int], int]] = [
        (same, 8),
        (same + same, 7),
        (ids(2, PIECE_TOKENS) + same, 7),
        (same + ids(3, 100), 7),
        (same[:-1] + ids(4, 1), 7),
    ]
    for prompt, seed in prompts:
        assert run(memory.steps(prompt, seed))[0] == token_keys(prompt, seed)


def test_it_keeps_the_most_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KeyCache(max_pieces=3)
    first = ids(0, PIECE_TOKENS)
    for number in range(10):
        run(memory.steps(ids(number, PIECE_TOKENS), 7))
        run(memory.steps(first, 7))
        assert len(memory) <= 3
    assert len(memory) == 3
    monkeypatch.setattr(known_prompts, "token_keys", lambda *_: pytest.fail("hashed again"))
    assert run(memory.steps(first, 7))[0] == token_keys(first, 7), "it was used in between"


def test_a_long_unknown_prompt_is_interrupted_and_a_known_one_is_not() -> None:
    memory, prompt = KeyCache(), ids(5, 40 * PIECE_TOKENS)

    assert run(memory.steps(prompt, 7))[1] == 5
    assert run(memory.steps(prompt, 7))[1] == 0


def test_ids_that_are_none_are_refused() -> None:
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            run(KeyCache().steps([wrong] * 16, 7))
