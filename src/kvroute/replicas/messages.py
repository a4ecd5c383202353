"""What gateway processes of one machine tell each other, and how it is written. Pure.

A frame is a length and a MessagePack list of messages, in the order in which things happened. Both ends run
the same release: there are no versions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct as Packing
from typing import Final, TypeAlias

import msgspec

from kvroute.errors import WireError
from kvroute.replicas.map_messages import (
    Attached,
    ChunksAttached,
    ChunksCleared,
    ChunksDetached,
    ChunksHeld,
    ChunkSlotForgotten,
    ChunksRemoved,
    ChunksStored,
    Cleared,
    Detached,
    Distrusted,
    MapBegins,
    Places,
    PromptAnswered,
    Rate,
    Removed,
    RunHeld,
    Said,
    SlotForgotten,
    Stored,
    Targets,
)


class Hello(Said, frozen=True):
    """The first message on a link, either way. `level`: the sender knows what there is to know."""

    number: int
    level: bool


class Leaving(Said, frozen=True):
    """The sender ends in good order: nothing is wrong."""


class PromptSent(msgspec.Struct, frozen=True, array_like=True):
    """`PromptKeys`, its keys as `replicas.spelling` tells them."""

    ends: bytes
    fresh: bytes
    tokens: int
    block_tokens: float


class ExactSent(msgspec.Struct, frozen=True, array_like=True):
    """Of an `ExactPrompt` what a dispatch needs; keys as in `PromptSent`."""

    ends: bytes
    fresh: bytes
    key_tokens: int


class Sent(Said, frozen=True):
    """A request went to a worker. `id` is the sender's own number for it; `first` says that the worker was
    the first of the ranking; `tiers` are the tokens believed to lie in GPU memory, L1 and L2."""

    id: int
    model: str
    worker: str
    strategy: str
    reason: str
    first: bool
    prefill_s: float
    tokens: int
    matched_tokens: int
    streamed: bool
    prompts: list[PromptSent]
    exact: list[ExactSent]
    session_key: str | None
    rank: int | None
    slot: int | None
    tiers: tuple[int, int, int] | None


class ToldAnew(Said, frozen=True):
    """From here on the sender takes no keys for known."""


class FirstToken(Said, frozen=True):
    id: int


class Finished(Said, frozen=True):
    id: int


class Owner(Said, frozen=True):
    """A stored response lives on this worker."""

    response_id: str
    worker: str


class SessionForgotten(Said, frozen=True):
    session_key: str


class HandSpec(msgspec.Struct, frozen=True, array_like=True):
    """A `WorkerSpec` of a worker that was added by hand."""

    id: str
    url: str
    models: tuple[str, ...]
    capacity_tokens: int | None
    role: str | None
    draining: bool
    node: str | None


class ByHand(Said, frozen=True):
    """All that the admin API has changed about the fleet so far."""

    added: list[HandSpec]
    removed: list[str]
    drained: list[str]


class Ejected(Said, frozen=True):
    """The sender took a healthy worker out of routing."""

    worker: str
    cause: str


class Wanted(Said, frozen=True):
    """Tell me what was sent before I came."""


class Recent(Said, frozen=True):
    """Prompts that a worker was sent, the least recently used first, each as packed keys."""

    worker: str
    prompts: list[bytes]


class Level(Said, frozen=True):
    """That was all."""


class Ask(Said, frozen=True):
    id: int
    what: str
    how: bytes


class Answer(Said, frozen=True):
    id: int
    told: bytes


Message: TypeAlias = (
    Hello
    | Leaving
    | Sent
    | ToldAnew
    | FirstToken
    | Finished
    | Owner
    | SessionForgotten
    | ByHand
    | Ejected
    | Wanted
    | Recent
    | Level
    | Ask
    | Answer
    | MapBegins
    | Attached
    | Detached
    | Stored
    | RunHeld
    | Removed
    | Cleared
    | SlotForgotten
    | ChunksAttached
    | ChunksDetached
    | ChunksStored
    | ChunksRemoved
    | ChunksHeld
    | ChunksCleared
    | ChunkSlotForgotten
    | Places
    | Rate
    | Targets
    | PromptAnswered
    | Distrusted
)

_LENGTH: Final = Packing("<I")
MAX_FRAME_BYTES: Final = 1 << 30
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Message]).decode


def frame(messages: Sequence[Message]) -> bytes:
    """`messages` as one frame. Costs about 1 us a message and what copying its keys takes."""
    payload = _encode(messages)
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts a stream of bytes into frames. Mutable: what has come of the next one."""

    def __init__(self) -> None:
        self._held = bytearray()

    def take(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`, in order. Raises WireError for what is no frame."""
        held = self._held
        held += data
        messages: list[Message] = []
        place = 0
        while len(held) - place >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, place)
            if length > MAX_FRAME_BYTES:
                raise WireError("a message between processes is too long")
            end = place + _LENGTH.size + length
            if end > len(held):
                break
            try:
                messages += _decode(memoryview(held)[place + _LENGTH.size : end])
            except msgspec.MsgspecError as error:
                raise WireError("a message between processes cannot be read") from error
            place = end
        if place:
            del held[:place]
        return messages


def packed(keys: Sequence[int]) -> bytes:
    """Unsigned 64-bit numbers."""
    return (keys if isinstance(keys, array) and keys.typecode == "Q" else array("Q", keys)).tobytes()


def unpacked(keys: bytes) -> array[int]:
    """What `packed` packed."""
    numbers = array("Q")
    numbers.frombytes(keys)
    return numbers


def unpacked_ids(ids: bytes) -> array[int]:
    """Token ids, 32 bits each."""
    numbers = array("I")
    numbers.frombytes(ids)
    return numbers
