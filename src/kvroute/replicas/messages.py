"""What gateway processes of one machine tell each other, and how it is written. Pure.

A frame is a length and a MessagePack list of messages, in the order in which things happened. Both ends run
the same release: there are no versions.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from struct import Struct as Packing
from typing import Final, TypeAlias

import msgspec

from kvroute.blocks.keys import GROUP_BLOCKS, BlockKeys
from kvroute.errors import WireError


class Said(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One thing that a process tells another: base of every message."""


class MapBegins(Said, frozen=True):
    """The map of the workers' caches follows from nothing."""


class Attached(Said, frozen=True):
    """A slot reads from a holder of vLLM's blocks; `holder` is its number, unique among holders."""

    slot: int
    holder: int
    tier: int
    shared: bool


class Detached(Said, frozen=True):
    slot: int
    holder: int


class Stored(Said, frozen=True):
    holder: int
    block_tokens: int
    parent: int | None
    keys: bytes


class RunHeld(Said, frozen=True):
    """For who comes late: consecutive blocks that all of these holders have."""

    holders: list[int]
    block_tokens: int
    keys: bytes


class Removed(Said, frozen=True):
    holder: int
    keys: bytes


class Cleared(Said, frozen=True):
    holder: int


class SlotForgotten(Said, frozen=True):
    slot: int


Domain: TypeAlias = tuple[tuple[str, int, int], str]
"""A `ChunkDomain`: scheme and model."""


class ChunksAttached(Said, frozen=True):
    """A slot reads from a holder of LMCache's chunks, looked up in each of `domains`."""

    slot: int
    holder: int
    tier: int
    shared: bool
    domains: list[Domain]


class ChunksDetached(Said, frozen=True):
    slot: int
    holder: int


Space: TypeAlias = tuple[tuple[str, int, int], str, str]
"""A `ChunkSpace`: scheme, model and salt."""


class ChunksStored(Said, frozen=True):
    holder: int
    tier: int
    shared: bool
    space: Space
    keys: list[int]


class ChunksRemoved(Said, frozen=True):
    holder: int
    space: Space
    keys: list[int]


class ChunksHeld(Said, frozen=True):
    """For who comes late: `names` are chunks that all of these holders have, whatever their spaces, 9 bytes
    each."""

    holders: list[tuple[int, int, bool]]
    """Number, tier, shared."""
    names: bytes


class ChunksCleared(Said, frozen=True):
    holder: int


class ChunkSlotForgotten(Said, frozen=True):
    slot: int


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A `CachePlace`. `by_lmcache`: LMCache itself tells of its L1."""

    slot: int
    rank: int
    standing: str
    why: str
    by_lmcache: bool


class WorkerPlaces(Said, frozen=True):
    """Where a worker's requests can go now; none: nothing is known of its cache."""

    worker: str
    places: list[Place]


class Rate(Said, frozen=True):
    """The bandwidth to reckon with, from a slower tier (`blocks.tokens.Tier`) to a place."""

    slot: int
    tier: int
    gb_s: float


class L2TargetMessage(msgspec.Struct, frozen=True, array_like=True):
    """An `L2Target`."""

    holder: int
    scheme: tuple[str, int, int]
    model: str
    parts: list[tuple[int, int]]


class Targets(Said, frozen=True):
    """Where to look for chunks in the shared store now."""

    targets: list[L2TargetMessage]


class PromptAnswered(Said, frozen=True):
    """A prompt was computed: for whoever follows the worker's cache. `ids` are packed 32-bit token ids."""

    worker: str
    rank: int
    model: str
    tokens: int
    ids: bytes
    keys: bytes
    salt: str
    adapter: str | None
    sent: float
    cached_tokens: int | None


class Distrusted(Said, frozen=True):
    """Predictions from a place's map do not come true."""

    worker: str
    rank: int
    why: str


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


class SnapshotFollows(Said, frozen=True):
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


class OverridesChanged(Said, frozen=True):
    """All that the admin API has changed about the fleet so far."""

    added: list[HandSpec]
    removed: list[str]
    drained: list[str]


class Ejected(Said, frozen=True):
    """The sender took a healthy worker out of routing."""

    worker: str
    cause: str


class SnapshotRequest(Said, frozen=True):
    """Tell me what was sent before I came."""


class Recent(Said, frozen=True):
    """Prompts that a worker was sent, the least recently used first, each as packed keys."""

    worker: str
    prompts: list[bytes]


class InSync(Said, frozen=True):
    """That was all."""


class Ask(Said, frozen=True):
    id: int
    what: str
    how: bytes


class PeerAnswer(Said, frozen=True):
    id: int
    told: bytes


Message: TypeAlias = (
    Hello
    | Leaving
    | Sent
    | SnapshotFollows
    | FirstToken
    | Finished
    | Owner
    | SessionForgotten
    | OverridesChanged
    | Ejected
    | SnapshotRequest
    | Recent
    | InSync
    | Ask
    | PeerAnswer
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
    | WorkerPlaces
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


GROUP: Final = GROUP_BLOCKS
MOST_GROUPS: Final = 32_768
"""Remembered by each reader for each teller: a million keys, about 15 MB."""


class KeyGroupEncoder:
    """Mutable: remembers the groups that were told."""

    def __init__(self) -> None:
        self._told: OrderedDict[int, None] = OrderedDict()

    def tell(self, keys: Sequence[int]) -> tuple[bytes, bytes]:
        """`keys` as (last keys of the groups, keys of groups not told before and of the rest). Hashes only
        what is not known: about 0.2 us a known group, 1 us another one."""
        if len(keys) < GROUP:
            return b"", packed(keys)
        told, fresh = self._told, array("Q")
        ends: Sequence[int] = keys.group_ends() if isinstance(keys, BlockKeys) else keys[GROUP - 1 :: GROUP]
        place = 0
        for end in ends:
            if end in told:
                told.move_to_end(end)
            else:
                told[end] = None
                if len(told) > MOST_GROUPS:
                    told.popitem(last=False)
                fresh.extend(keys[place : place + GROUP])
            place += GROUP
        fresh.extend(keys[place:])
        return packed(ends), fresh.tobytes()

    def begin_anew(self) -> None:
        """As `KeyGroupDecoder.begin_anew`, which every reader must hear of before it reads on."""
        self._told.clear()


class KeyGroupDecoder:
    """Of one teller. Mutable: remembers the groups that were read."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, array[int]] = OrderedDict()

    def read(self, ends: bytes, fresh: bytes) -> array[int]:
        """The keys that were told. Raises WireError if something before was not read."""
        if not ends:
            return unpacked(fresh)
        known, spelled, keys, place = self._known, unpacked(fresh), array("Q"), 0
        for end in unpacked(ends):
            group = known.get(end)
            if group is None:
                group = known[end] = spelled[place : place + GROUP]
                if len(group) != GROUP or group[-1] != end:
                    raise WireError("keys that were not told")
                place += GROUP
                if len(known) > MOST_GROUPS:
                    known.popitem(last=False)
            else:
                known.move_to_end(end)
            keys.extend(group)
        keys.extend(spelled[place:])
        return keys

    def begin_anew(self) -> None:
        """Forget all groups."""
        self._known.clear()
