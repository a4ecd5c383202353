"""ZMTP frames in pieces of any size. tests/events/test_inbox_connected.py shows that libzmq agrees."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import WireError
from kvroute.wire.zmq import (
    GREETING,
    MAX_MESSAGE_BYTES,
    MessageReader,
    check_greeting,
    command,
    ready,
    split_command,
    subscription,
)

ANY = st.lists(st.binary(max_size=600), min_size=1, max_size=4)
EVENTS = st.tuples(
    st.sampled_from([b"", b"kv", b"k" * 255]), st.binary(min_size=8, max_size=8), st.binary(max_size=600)
).map(list)
MESSAGES = st.lists(ANY | EVENTS, max_size=8)


def packed(frames: list[bytes], *, always_long: bool) -> bytes:
    out = b""
    for place, frame in enumerate(frames):
        flags = int(place < len(frames) - 1)
        if always_long or len(frame) > 255:
            out += bytes((flags | 2,)) + len(frame).to_bytes(8) + frame
        else:
            out += bytes((flags, len(frame))) + frame
    return out


@given(MESSAGES, st.booleans(), st.lists(st.integers(0, 3000)), st.booleans())
def test_messages_are_put_together_from_any_pieces(
    messages: list[list[bytes]], always_long: bool, cuts: list[int], with_commands: bool
) -> None:
    stream = b""
    for frames in messages:
        if with_commands:
            stream += command(b"PING", b"\0\0x")
        stream += packed(frames, always_long=always_long)
    places = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    reader = MessageReader()

    found = [frames for begin, end in itertools.pairwise(places) for frames in reader.feed(stream[begin:end])]

    assert found == messages
    assert [split_command(body) for body in reader.commands] == [(b"PING", b"\0\0x")] * (
        len(messages) * with_commands
    )


def test_a_long_message_is_not_parsed_again_with_every_piece() -> None:
    """Reading takes time in proportion to what came, not to its square."""
    reader = MessageReader()
    reader.feed(b"\x02" + (100_000).to_bytes(8))

    for _ in range(99):
        assert reader.feed(bytes(1000)) == ()
        assert reader._needed == 100_009  # private: otherwise only the time would show it
    assert reader.feed(bytes(1000)) == [[bytes(100_000)]]


@pytest.mark.parametrize(
    "stream",
    [
        b"\x08\x00",
        b"\xff\x00",
        b"HTTP/1.1 400 Bad Request",
        b"\x02" + (MAX_MESSAGE_BYTES + 1).to_bytes(8),
        b"\x01\x00" * 65,
    ],
)
def test_bytes_that_are_no_zmtp_or_do_not_end_are_refused(stream: bytes) -> None:
    with pytest.raises(WireError):
        MessageReader().feed(stream)


def test_frames_of_one_message_are_bounded_together() -> None:
    reader = MessageReader()
    frame = b"\x03" + (MAX_MESSAGE_BYTES // 3 + 1).to_bytes(8)
    body = bytes(MAX_MESSAGE_BYTES // 3 + 1)
    for _ in range(2):
        reader.feed(frame)
        reader.feed(body)

    with pytest.raises(WireError, match="does not end"):
        reader.feed(frame + body)


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (bytes(64), "no ZMTP greeting"),
        (b"HTTP/1.1 400 Bad Request".ljust(64), "no ZMTP greeting"),
        (GREETING[:10] + b"\x01" + GREETING[11:], "is not supported"),
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:], "CURVE"),
    ],
)
def test_a_bad_greeting_gives_a_reason(greeting: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        check_greeting(greeting)


def test_a_subscribers_bytes_match_the_specification() -> None:
    """rfc.zeromq.org/spec/23, by hand."""
    check_greeting(GREETING)
    assert b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31) == GREETING
    assert ready() == b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB"
    assert subscription(b"kv") == b"\x00\x03\x01kv"
    assert command(b"PONG", b"x" * 300)[:9] == b"\x06" + (305).to_bytes(8)


@pytest.mark.parametrize("body", [b"", b"\x05PIN"])
def test_a_command_without_a_whole_name_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        split_command(body)
