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


@given(st.binary(max_size=500))
def test_a_trailing_partial_block_has_no_key(data):
    assert len(block_keys(data, block_bytes=16)) == len(data) // 16


def test_spaces_differ_by_model_and_by_salt():
    seeds = {CacheSpace("a").seed, CacheSpace("b").seed, CacheSpace("a", "s").seed, CacheSpace("as").seed}

    assert len(seeds) == 4
