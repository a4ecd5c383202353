"""ZMTP 3.0 for a SUB socket (rfc.zeromq.org/spec/23), and the messages of vLLM's event and replay sockets.
Pure.

The module has the parts of ZMTP that reading a PUB or XPUB socket without security needs. A *frame* has
flags, a length and a body. A *message* is a sequence of frames; every frame but the last has the MORE flag.
Commands arrive between messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvroute.errors import WireError

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
GREETING: Final = _SIGNATURE + b"\x03\x00" + _MECHANISM + bytes(32)
"""The first bytes that each side sends."""

_MORE, _LONG, _COMMAND, _ALL = 1, 2, 4, 7
_EIGHT: Final = 8
_SHORT_BYTES: Final = 255
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Longest message: 20 million token ids."""
_MAX_FRAMES: Final = 64


def command(name: bytes, body: bytes = b"") -> bytes:
    """Encode a command as a frame."""
    return _frame(_COMMAND, bytes((len(name),)) + name + body)


def ready() -> bytes:
    """The READY command of a SUB socket, which follows the greetings."""
    return command(b"READY", _property(b"Socket-Type", b"SUB"))


def subscription(topic: bytes) -> bytes:
    """The message that subscribes to messages whose first frame starts with `topic`."""
    return _frame(0, b"\x01" + topic)


def check_greeting(greeting: bytes) -> None:
    """Raises WireError if the publisher's protocol is not supported."""
    if greeting[0] != _SIGNATURE[0] or greeting[9] != _SIGNATURE[9]:
        raise WireError("no ZMTP greeting")
    if greeting[10] < 3:
        raise WireError(f"ZMTP {greeting[10]} is not supported: 3 is needed")
    if greeting[12:32] != _MECHANISM:
        mechanism = greeting[12:32].rstrip(b"\0")
        raise WireError(f"the publisher requires the security mechanism {mechanism!r}: NULL is supported")


def split_command(body: bytes) -> tuple[bytes, bytes]:
    """Split a command into (name, body). Raises WireError."""
    if not body or len(body) < 1 + body[0]:
        raise WireError("a ZMTP command without a name")
    end = 1 + body[0]
    return body[1:end], body[end:]


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4) + value


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) > _SHORT_BYTES:
        return bytes((flags | _LONG,)) + len(body).to_bytes(8) + body
    return bytes((flags, len(body))) + body


class MessageReader:
    """Splits the bytes of a connection, after the greeting, into messages.

    Mutable: `feed` keeps incomplete messages, and adds to `commands`, which the caller clears.
    """

    def __init__(self) -> None:
        self.commands: list[bytes] = []
        """Bodies of the commands that arrived, oldest first."""
        self._incomplete = bytearray()
        self._needed = 0
        """The length of `_incomplete` from which the next frame is complete."""
        self._frames: list[bytes] = []
        """The frames of the incomplete message."""
        self._prefix = b""
        """The first bytes of the last event message: its topic frame, and the head of its number frame.

        A publisher of events starts all its messages with the same bytes. Empty before the first such
        message.
        """

    def feed(self, data: bytes) -> Sequence[Sequence[bytes]]:
        """Add received bytes; returns the messages that are complete now.

        Raises WireError for bytes that are not ZMTP and for a message above `MAX_MESSAGE_BYTES`; the reader
        must not be used after that.
        """
        incomplete = self._incomplete
        if incomplete:
            incomplete += data
            if len(incomplete) < self._needed:
                return ()
            data = bytes(incomplete)
            incomplete.clear()
        messages: list[Sequence[bytes]] = []
        frames, position, size = self._frames, 0, len(data)
        needed, prefix = 2, self._prefix
        prefix_bytes = len(prefix)
        while (body := position + 2) <= size:
            if prefix and not frames and data.startswith(prefix, position):  # one step instead of three
                second = position + prefix_bytes
                third = second + _EIGHT
                if third + 1 < size and not data[third]:
                    body, end = third + 2, third + 2 + data[third + 1]
                elif third + 8 < size and data[third] == _LONG:
                    body = third + 9
                    end = body + int.from_bytes(data[third + 1 : body])
                else:
                    end = size + 1
                if end <= size:
                    messages.append([prefix[2:-2], data[second:third], data[body:end]])
                    position = end
                    continue
                body = position + 2
            flags, length = data[position], data[position + 1]
            if flags > _ALL:
                raise WireError("not a ZMTP frame")
            if flags & _LONG:
                body = position + 9
                if body > size:
                    needed = 9
                    break
                length = int.from_bytes(data[position + 1 : body])
                if length > MAX_MESSAGE_BYTES:
                    raise WireError(f"a ZMTP frame of {length} bytes")
            end = body + length
            if end > size:
                needed = end - position
                break
            frame = data[body:end]
            position = end
            if flags & _COMMAND:
                self.commands.append(frame)
                continue
            frames.append(frame)
            if flags & _MORE:
                if len(frames) > 2:
                    self._check(frames)
                continue
            messages.append(frames)
            if len(frames) == 3 and len(frames[1]) == _EIGHT and len(frames[0]) <= _SHORT_BYTES:
                head = bytes((_MORE, len(frames[0])))
                prefix = self._prefix = head + frames[0] + bytes((_MORE, _EIGHT))
                prefix_bytes = len(prefix)
            frames = []
        self._frames = frames
        if position < size:
            incomplete += data[position:]
            self._needed = needed
        return messages

    @property
    def held_bytes(self) -> int:
        """Bytes of the incomplete message."""
        return len(self._incomplete) + sum(map(len, self._frames))

    def _check(self, frames: Sequence[bytes]) -> None:
        if len(frames) > _MAX_FRAMES or sum(map(len, frames)) > MAX_MESSAGE_BYTES:
            raise WireError("a ZMTP message that does not end")


_END: Final = b"\xff" * 8


class EventMessage(NamedTuple):
    """One batch before decoding. `topic` is empty in replays of old releases, which do not send it."""

    topic: bytes
    seq: int
    payload: bytes


def pack_live(message: EventMessage) -> list[bytes]:
    """The frames of a live message, for the PUB socket."""
    return [message.topic, message.seq.to_bytes(8, "big"), message.payload]


def unpack_live(frames: Sequence[bytes]) -> EventMessage:
    """Parse a live message from the frames of a SUB socket. Raises `WireError`."""
    if len(frames) != 3:
        raise WireError(f"a live event message has 3 frames, not {len(frames)}")
    topic, seq, payload = frames
    return EventMessage(topic, _sequence(seq), payload)


def pack_replay_request(start_seq: int) -> list[bytes]:
    """The frames of a replay request, for a DEALER socket: all buffered batches from `start_seq` on."""
    return [b"", start_seq.to_bytes(8, "big")]


def unpack_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """Parse (client identity, start number) from the frames of a ROUTER socket. Raises `WireError`."""
    if len(frames) != 3:
        raise WireError(f"a replay request has 3 frames at the ROUTER, not {len(frames)}")
    return frames[0], _sequence(frames[2])


def pack_replay(message: EventMessage, *, with_topic: bool) -> list[bytes]:
    """The frames of a replayed batch, without the ROUTER's client identity."""
    head = [b"", message.topic] if with_topic else [b""]
    return [*head, message.seq.to_bytes(8, "big"), message.payload]


def pack_replay_end(*, with_topic: bool) -> list[bytes]:
    """The frames that end a replay, without the ROUTER's client identity."""
    return [b"", b"", _END, b""] if with_topic else [b"", _END, b""]


def unpack_replay(frames: Sequence[bytes]) -> EventMessage | None:
    """Parse a replayed batch from the frames of a DEALER; None for the end marker. Raises `WireError`."""
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
