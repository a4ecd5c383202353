from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import WireError
from kvroute.replicas.messages import (
    ExactSent,
    Finished,
    Frames,
    PromptSent,
    Sent,
    Stored,
    frame,
    packed,
    unpacked,
)

SENT = Sent(
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
    [PromptSent(b"", packed([1, 2**64 - 1]), 100, 16.0)],
    [ExactSent(packed([2]), packed([3]), 16)],
    "session",
    1,
    4,
    (48, 16, 0),
)
SAID = [SENT, Finished(7), Stored(1, 16, 2**64 - 1, packed([5, 6]))]


@given(st.lists(st.integers(0, 200), max_size=8))
def test_messages_come_in_order_however_the_bytes_are_cut(cuts):
    data = frame(SAID[:1]) + frame([]) + frame(SAID[1:])
    frames, heard = Frames(), []

    places = sorted(min(cut, len(data)) for cut in cuts)
    for start, stop in zip([0, *places], [*places, len(data)], strict=True):
        heard += frames.take(data[start:stop])

    assert heard == SAID


def test_keys_come_back_as_they_were_packed():
    assert list(unpacked(packed([0, 2**64 - 1]))) == [0, 2**64 - 1]


@pytest.mark.parametrize("data", [b"\x01\0\0\0\xc1", b"\xff\xff\xff\xff"], ids=["no message", "too long"])
def test_what_is_no_frame_is_an_error(data):
    with pytest.raises(WireError):
        Frames().take(data)
