"""What was written is read, or an error; never something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.keys import BlockKey, Tier
from kvroute.errors import WireError
from kvroute.index.snapshot import (
    HEAD,
    VERSION,
    Blocks,
    Copies,
    FrameKind,
    Runs,
    StreamHead,
    decode,
    encode,
    encode_end,
    split,
)

KEYS = st.integers(0, 2**64 - 1).map(BlockKey)
NAMES = st.one_of(
    st.lists(st.integers(0, 2**64 - 1), max_size=20),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.lists(st.binary(min_size=32, max_size=32), max_size=20),
)
A = StreamHead("a", "http://a:1", 0, 12.5, 7, 2**64 - 1, True, None, 16)
B = StreamHead("b", "http://b:1", 1, 13.5, 1, 0, False, 2, 32)


def file_of(*frames: bytes) -> bytes:
    return HEAD + b"".join(frames) + encode_end(len(frames))


@given(names=NAMES, keys=st.lists(KEYS, min_size=20, max_size=20), tier=st.sampled_from(Tier))
def test_blocks_come_back(names: list[int | bytes], keys: list[BlockKey], tier: Tier) -> None:
    keys = keys[: len(names)]
    runs = [keys[:3], keys[3:4], keys[4:]]
    data = file_of(
        encode(A),
        encode(Copies(tier, names, [2] * len(names))),
        encode(Blocks(tier, 4, names, keys)),
        encode(Runs(tier, 4, runs)),
        encode(B),
    )

    (first, frames), (second, others) = split(data)

    assert (first, second, others) == (A, B, [])
    assert [frame.kind for frame in frames] == [FrameKind.RUNS, FrameKind.BLOCKS, FrameKind.COPIES]
    head, blocks, copies = map(decode, frames)
    assert isinstance(head, Runs)
    assert [list(run) for run in head.runs] == runs
    assert isinstance(blocks, Blocks)
    assert (list(blocks.hashes), list(blocks.keys), blocks.stride, blocks.tier) == (names, keys, 4, tier)
    assert copies == Copies(tier, names, [2] * len(names))


WHOLE = file_of(
    encode(A),
    encode(Runs(Tier.GPU, 1, [[BlockKey(1), BlockKey(2)]])),
    encode(Blocks(Tier.GPU, 1, [5, 6], [BlockKey(1), BlockKey(2)])),
)


def test_any_damage_is_an_error() -> None:
    for place in range(len(WHOLE)):
        for bit in range(8):
            damaged = bytearray(WHOLE)
            damaged[place] ^= 1 << bit
            with pytest.raises(WireError):
                split(bytes(damaged))


def test_a_snapshot_that_is_cut_off_or_too_long_is_an_error() -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(WireError):
            split(WHOLE[:length])
    for more in (b"x", WHOLE, encode(B)):
        with pytest.raises(WireError):
            split(WHOLE + more)
    with pytest.raises(WireError):
        split(file_of(encode(Runs(Tier.GPU, 1, []))))


def test_other_versions_are_not_read() -> None:
    assert split(file_of()) == []
    with pytest.raises(WireError):
        split(HEAD.replace(bytes([VERSION]), bytes([VERSION + 1]), 1) + WHOLE[len(HEAD) :])
