from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import GROUP_BLOCKS, CacheSpace, block_keys


@given(st.binary(max_size=400), st.binary(max_size=400), st.binary(max_size=400))
def test_keys_are_shared_exactly_as_far_as_full_blocks_are(common, one, two):
    first, second = common + one, common + two
    shared_bytes = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )

    a, b = block_keys(first, block_bytes=16), block_keys(second, block_bytes=16)

    agreeing = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert agreeing == shared_bytes // 16


@given(st.integers(0, 40), st.binary(min_size=1, max_size=900))
def test_keys_do_not_depend_on_the_order_of_requests(start, pattern):
    data = pattern * (3000 // len(pattern) + 1)
    whole = list(block_keys(data, block_bytes=16))

    asked = block_keys(data, block_bytes=16)

    assert asked[-1] == whole[-1]
    assert asked[start:70] == whole[start:70]
    assert [asked[place] for place in range(len(asked))] == whole
    assert asked[::-7] == whole[::-7]
    assert asked == whole
    assert asked != whole[:-1]


def test_a_change_far_before_a_block_changes_its_key():
    data = bytes(20_000)

    one, two = block_keys(data), block_keys(b"x" + data[1:])

    assert not set(one) & set(two)


@given(st.binary(max_size=500))
def test_a_trailing_partial_block_has_no_key(data):
    assert len(block_keys(data, block_bytes=16)) == len(data) // 16


def test_spaces_differ_by_model_and_by_salt():
    seeds = {CacheSpace("a").seed, CacheSpace("b").seed, CacheSpace("a", "s").seed, CacheSpace("as").seed}

    assert len(seeds) == 4


@given(st.integers(0, 3000))
def test_a_short_prompt_has_the_keys_that_begin_a_longer_one(size):
    data = bytes(range(256)) * 12

    assert list(block_keys(data[:size], seed=5)) == list(block_keys(data, seed=5))[: size // 64]


def plain_keys(data: bytes, block_bytes: int, seed: int) -> list[int]:
    """The definition, block by block: what lies between the last anchor and a block's end, seeded with it."""
    keys, anchor = [], seed
    for place in range(len(data) // block_bytes):
        begin = place // GROUP_BLOCKS * GROUP_BLOCKS
        keys.append(xxh3_64_intdigest(data[begin * block_bytes : (place + 1) * block_bytes], anchor))
        if (place + 1) % GROUP_BLOCKS == 0:
            anchor = keys[-1]
    return keys


@pytest.mark.parametrize("block_bytes", [16, 64])
@pytest.mark.parametrize("size", [0, 63, 64, 1023, 1024, 1025, 2048, 33_000, 262_144 + 2048, 300_001])
def test_keys_are_as_they_are_defined(size, block_bytes):
    rng = random.Random(size)
    data = rng.randbytes(size)
    plain = plain_keys(data, block_bytes, 11)
    asked = block_keys(data, block_bytes=block_bytes, seed=11)

    for place in rng.choices(range(len(plain)), k=20) if plain else ():
        assert asked[place] == asked[place] == asked[place - len(plain)] == plain[place]
    assert list(asked) == plain


@pytest.mark.parametrize("size", [40, 5000])
def test_there_is_no_key_outside(size):
    keys = block_keys(bytes(size))

    for place in (len(keys), -len(keys) - 1):
        with pytest.raises(IndexError):
            keys[place]
    if keys:
        assert keys[-1] == keys[len(keys) - 1]
        with pytest.raises(IndexError):
            keys[len(keys)]
