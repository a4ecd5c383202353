from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import WireError
from kvroute.wire.vllm import decode_batch
from kvroute.wire.zmq import (
    EventMessage,
    pack_live,
    pack_replay,
    pack_replay_end,
    pack_replay_request,
    unpack_live,
    unpack_replay,
    unpack_replay_request,
)

Capture = Callable[[str], list[list[bytes]]]
MESSAGES = st.builds(EventMessage, st.binary(max_size=8), st.integers(0, 2**63 - 1), st.binary(max_size=8))


@given(MESSAGES)
def test_live_messages_come_back(message: EventMessage) -> None:
    assert unpack_live(pack_live(message)) == message


@given(MESSAGES)
def test_replayed_messages_come_back_in_both_shapes(message: EventMessage) -> None:
    assert unpack_replay(pack_replay(message, with_topic=True)) == message
    without = unpack_replay(pack_replay(message, with_topic=False))
    assert without == EventMessage(b"", message.seq, message.payload)


@pytest.mark.parametrize("with_topic", [True, False])
def test_the_end_of_a_replay_is_known_in_both_shapes(with_topic: bool) -> None:
    assert unpack_replay(pack_replay_end(with_topic=with_topic)) is None


def test_a_replay_request_passes_the_router_socket() -> None:
    assert unpack_replay_request([b"client", *pack_replay_request(20)]) == (b"client", 20)


def test_a_captured_replay_runs_from_20_to_its_end_marker(capture: Capture) -> None:
    frames = capture("vllm-0.32-replay-from-20")

    *messages, end = [unpack_replay(item) for item in frames]

    assert end is None
    assert [message.seq for message in messages if message] == list(range(20, 29))
    assert all(decode_batch(message.payload).events for message in messages if message)
    assert frames[-1] == pack_replay_end(with_topic=True)


def test_captured_live_sequences_are_counted_from_0_and_start_again_after_a_restart(capture: Capture) -> None:
    assert [unpack_live(frames).seq for frames in capture("vllm-0.32-stores")] == list(range(13))
    assert [unpack_live(frames).seq for frames in capture("vllm-0.32-restart")] == [29, 30, 0, 1]


@pytest.mark.parametrize("frames", [[], [b"kv"], [b"kv", b"short", b""], [b"a", b"b", b"c", b"d"]])
def test_other_frames_are_not_live_messages(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        unpack_live(frames)


@pytest.mark.parametrize("frames", [[], [b"", b"kv"], [b"", b"kv", b"1", b""], [b""] * 5])
def test_other_frames_are_not_replayed_messages(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        unpack_replay(frames)


@pytest.mark.parametrize("frames", [[b"c"], [b"c", b"", b"1"], [b"c", b"", b"", b""]])
def test_other_frames_are_not_replay_requests(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        unpack_replay_request(frames)
