from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.keys import CacheSpace, block_keys


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
def test_keys_are_the_same_in_whatever_order_they_are_asked_for(start, pattern):
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
