"""ZMQ multipart framing of vLLM's event stream and of its replay socket (0.10 to 0.32).

Live (PUB): `[topic, seq, payload]`. Replay: a DEALER sends `["", start]`; the ROUTER answers one message
per buffered batch from `start` on and then an end marker: `["", seq, payload]`, `["", -1, ""]` up to
0.25, `["", topic, seq, payload]`, `["", "", -1, ""]` from 0.26. Sequence numbers are 8 bytes big-endian
from 0, the end marker is -1 as a signed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvroute.errors import WireError

_END: Final = b"\xff" * 8


class EventMessage(NamedTuple):
    """One batch before decoding. `topic` is empty where a replay of an old release does not say it."""

    topic: bytes
    seq: int
    payload: bytes


def pack_live(message: EventMessage) -> list[bytes]:
    """Frames for the PUB socket."""
    return [message.topic, message.seq.to_bytes(8, "big"), message.payload]


def unpack_live(frames: Sequence[bytes]) -> EventMessage:
    """A message as a SUB socket receives it. Raises `WireError`."""
    if len(frames) != 3:
        raise WireError(f"a live event message has 3 frames, not {len(frames)}")
    topic, seq, payload = frames
    return EventMessage(topic, _sequence(seq), payload)


def pack_replay_request(start_seq: int) -> list[bytes]:
    """Frames for a DEALER socket: everything buffered from `start_seq` on, please."""
    return [b"", start_seq.to_bytes(8, "big")]


def unpack_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """(client identity, start sequence) as the ROUTER socket receives them. Raises `WireError`."""
    if len(frames) != 3:
        raise WireError(f"a replay request has 3 frames at the ROUTER, not {len(frames)}")
    return frames[0], _sequence(frames[2])


def pack_replay(message: EventMessage, *, with_topic: bool) -> list[bytes]:
    """Frames of one replayed batch, without the ROUTER's client identity."""
    head = [b"", message.topic] if with_topic else [b""]
    return [*head, message.seq.to_bytes(8, "big"), message.payload]


def pack_replay_end(*, with_topic: bool) -> list[bytes]:
    """Frames that end a replay, without the ROUTER's client identity."""
    return [b"", b"", _END, b""] if with_topic else [b"", _END, b""]


def unpack_replay(frames: Sequence[bytes]) -> EventMessage | None:
    """A replayed batch as a DEALER receives it, None for the end marker. Raises `WireError`."""
    if len(frames) not in (3, 4):
        raise WireError(f"a replay answer has 3 or 4 frames, not {len(frames)}")
    topic = frames[1] if len(frames) == 4 else b""
    seq, payload = frames[-2:]
    if seq == _END:
        return None
    return EventMessage(topic, _sequence(seq), payload)


def _sequence(frame: bytes) -> int:
    if len(frame) != 8:
        raise WireError(f"a sequence number has 8 bytes, not {len(frame)}")
    return int.from_bytes(frame, "big")
