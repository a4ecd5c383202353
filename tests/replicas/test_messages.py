from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import WireError
from kvroute.replicas.mesh import FrameReader, encode_frame
from kvroute.replicas.messages import (
    Dispatched,
    EndedRequests,
    ExactSent,
    Finished,
    PromptSent,
    Stored,
    pack_keys,
    unpack_keys,
)

DISPATCHED = Dispatched(
    7,
    "m",
    "w0",
    "kvaware",
    "kv_hit",
    True,
    0.25,
    100,
    64,
    True,
    [PromptSent(None, pack_keys([1, 2**64 - 1]), 100, 16.0)],
    [ExactSent(2**64 - 1, pack_keys([3]), 16)],
    "session",
    1,
    (48, 16, 0),
)
ENDED = EndedRequests(
    "m", "w0", 1, 0.5, 0.25, 16.0, [2**63, None], [1, 2], pack_keys([7, 8, 9]), pack_keys([5])
)
MESSAGES = [DISPATCHED, Finished(7), ENDED, Stored(1, 16, 2**64 - 1, pack_keys([5, 6]))]


@given(st.lists(st.integers(0, 200), max_size=8))
def test_messages_come_in_order_however_the_bytes_are_cut(cuts):
    data = encode_frame(MESSAGES[:1]) + encode_frame([]) + encode_frame(MESSAGES[1:])
    frames, received = FrameReader(), []

    places = sorted(min(cut, len(data)) for cut in cuts)
    for start, stop in zip([0, *places], [*places, len(data)], strict=True):
        received += frames.feed(data[start:stop])

    assert received == MESSAGES


def test_packed_keys_are_restored():
    assert list(unpack_keys(pack_keys([0, 2**64 - 1]))) == [0, 2**64 - 1]


@pytest.mark.parametrize("data", [b"\x01\0\0\0\xc1", b"\xff\xff\xff\xff"], ids=["no message", "too long"])
def test_a_malformed_frame_is_an_error(data):
    with pytest.raises(WireError):
        FrameReader().feed(data)
