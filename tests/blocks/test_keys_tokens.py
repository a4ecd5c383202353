from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.keys import KEY_TOKENS, CacheSpace, adapter_space, mixed_seed, prompt_keys, token_keys

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=100)


@given(IDS, IDS)
def test_a_chain_may_be_continued_at_any_full_block(head: list[int], tail: list[int]) -> None:
    head = head[: len(head) - len(head) % KEY_TOKENS]

    first = token_keys(head, 7)

    assert first + token_keys(tail, first[-1] if first else 7) == token_keys(head + tail, 7)


@given(IDS, IDS, IDS)
def test_prompts_share_keys_exactly_as_far_as_full_blocks_of_tokens(
    common: list[int], one: list[int], two: list[int]
) -> None:
    first, second = common + one, common + two
    shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    shared = min(len(first), len(second)) if shared is None else shared

    a, b = token_keys(first, 0), token_keys(second, 0)

    agreeing = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert agreeing == shared // KEY_TOKENS


@given(IDS)
def test_lists_and_arrays_of_ids_have_the_same_keys(ids: list[int]) -> None:
    assert token_keys(ids, 3) == token_keys(array("I", ids), 3)


@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_last_token_of_a_prompt_is_never_served_from_a_cache(tokens: int, keys: int) -> None:
    assert len(prompt_keys([5] * tokens, adapter_space(None))) == keys


def test_adapters_salts_and_mixed_content_part_equal_tokens() -> None:
    ids = [1] * 32
    chains = [
        token_keys(ids, seed)
        for seed in (
            adapter_space(None).seed,
            adapter_space("ada").seed,
            adapter_space(None, "ada").seed,
            adapter_space("ada", "salt").seed,
            mixed_seed(adapter_space(None).seed, b"image"),
        )
    ]

    assert len({key for chain in chains for key in chain}) == 10
    assert adapter_space("ada", "s") == CacheSpace("ada", "s")


def test_an_id_beyond_32_bits_is_an_error() -> None:
    with pytest.raises(OverflowError):
        token_keys([2**32] * 16, 0)
