"""The messages between the gateway processes of one machine, and their encoding. Pure.

A frame is a length and a MessagePack list of messages, in the order of the events that they report. Both ends
run the same release, so messages have no version.
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


class PeerMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of every message between two processes."""


class MapReset(PeerMessage, frozen=True):
    """The receiver empties its mirror of the cache map; the sender's whole map follows."""


class Attached(PeerMessage, frozen=True):
    """A slot reads from a holder of vLLM blocks. `holder` is a number, unique among the block holders."""

    slot: int
    holder: int
    tier: int
    shared: bool


class Detached(PeerMessage, frozen=True):
    """A slot no longer reads from a holder."""

    slot: int
    holder: int


class Stored(PeerMessage, frozen=True):
    """A holder stored blocks after the block `parent` (None: at the beginning). `keys` are packed block
    keys."""

    holder: int
    block_tokens: int
    parent: int | None
    keys: bytes


class RunSnapshot(PeerMessage, frozen=True):
    """Part of a snapshot: consecutive blocks that all `holders` have. `keys` are packed block keys."""

    holders: list[int]
    block_tokens: int
    keys: bytes


class Removed(PeerMessage, frozen=True):
    holder: int
    keys: bytes


class Cleared(PeerMessage, frozen=True):
    holder: int


class SlotForgotten(PeerMessage, frozen=True):
    slot: int


Domain: TypeAlias = tuple[tuple[str, int, int], str]
"""A `ChunkDomain`: scheme and model."""


class ChunksAttached(PeerMessage, frozen=True):
    """A slot reads from a holder of LMCache chunks; its prompts are looked up in each of `domains`."""

    slot: int
    holder: int
    tier: int
    shared: bool
    domains: list[Domain]


class ChunksDetached(PeerMessage, frozen=True):
    slot: int
    holder: int


Space: TypeAlias = tuple[tuple[str, int, int], str, str]
"""A `ChunkSpace`: scheme, model and salt."""


class ChunksStored(PeerMessage, frozen=True):
    holder: int
    tier: int
    shared: bool
    space: Space
    keys: list[int]


class ChunksRemoved(PeerMessage, frozen=True):
    holder: int
    space: Space
    keys: list[int]


class ChunksSnapshot(PeerMessage, frozen=True):
    """Part of a snapshot: chunks of any space that all `holders` have."""

    holders: list[tuple[int, int, bool]]
    """Number, tier, shared."""
    entries: bytes
    """The keys of `ChunkIndex`'s hash tables, 9 bytes each."""


class ChunksCleared(PeerMessage, frozen=True):
    holder: int


class ChunkSlotForgotten(PeerMessage, frozen=True):
    slot: int


class CachePlaceMessage(msgspec.Struct, frozen=True, array_like=True):
    """A `CachePlace`. `by_lmcache` is True where LMCache itself reports the content of its L1."""

    slot: int
    rank: int
    trust: str
    why: str
    by_lmcache: bool
    ahead: int = 0


class WorkerPlaces(PeerMessage, frozen=True):
    """The slots that a worker's requests can go to now. Empty when the worker's cache is unknown."""

    worker: str
    places: list[CachePlaceMessage]


class TierBandwidth(PeerMessage, frozen=True):
    """The measured bandwidth in GB/s from a slower tier (`blocks.keys.Tier`) to a slot's GPU memory."""

    slot: int
    tier: int
    gb_s: float


class L2TargetMessage(msgspec.Struct, frozen=True, array_like=True):
    """An `L2Target`."""

    holder: int
    scheme: tuple[str, int, int]
    model: str
    parts: list[tuple[int, int]]


class L2Targets(PeerMessage, frozen=True):
    """All places in the shared L2 store where chunks are looked up now."""

    targets: list[L2TargetMessage]


class PromptAnswered(PeerMessage, frozen=True):
    """A worker computed a prompt; only the process that follows the caches receives this.

    `ids` are packed 32-bit token ids, `keys` packed block keys; `sent` is the time of the dispatch in
    seconds.
    """

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


class Distrusted(PeerMessage, frozen=True):
    """The predictions from one place's map are wrong too often."""

    worker: str
    rank: int
    why: str


class Hello(PeerMessage, frozen=True):
    """The first message in each direction of a link. `is_synced`: the sender can answer `SnapshotRequest`."""

    number: int
    is_synced: bool


class Leaving(PeerMessage, frozen=True):
    """The sender shuts down as planned; the closed link is not a failure."""


class PromptSent(msgspec.Struct, frozen=True, array_like=True):
    """A `PromptKeys` whose keys were encoded by `KeyGroupEncoder`."""

    ends: bytes
    fresh: bytes
    tokens: int
    block_tokens: float


class ExactSent(msgspec.Struct, frozen=True, array_like=True):
    """The part of an `ExactPrompt` that a dispatch needs; keys as in `PromptSent`."""

    ends: bytes
    fresh: bytes
    key_tokens: int


class Dispatched(PeerMessage, frozen=True):
    """The sender dispatched a request to a worker.

    `id` is the sender's own number for the request; `first` is True where the worker is the first of the
    ranking; `tiers` are the tokens that the map places in GPU memory, L1 and L2.
    """

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


class EncoderReset(PeerMessage, frozen=True):
    """The sender's `KeyGroupEncoder` was reset; the receiver resets its decoder for this sender."""


class FirstToken(PeerMessage, frozen=True):
    id: int


class Finished(PeerMessage, frozen=True):
    id: int


class Owner(PeerMessage, frozen=True):
    """This worker keeps a stored response."""

    response_id: str
    worker: str


class SessionForgotten(PeerMessage, frozen=True):
    session_key: str


class AdminWorkerSpec(msgspec.Struct, frozen=True, array_like=True):
    """The `WorkerSpec` of a worker that the admin API added."""

    id: str
    url: str
    models: tuple[str, ...]
    capacity_tokens: int | None
    role: str | None
    draining: bool
    node: str | None


class OverridesChanged(PeerMessage, frozen=True):
    """All changes of the fleet that the admin API has made until now."""

    added: list[AdminWorkerSpec]
    removed: list[str]
    drained: list[str]


class Ejected(PeerMessage, frozen=True):
    """The sender ejected a healthy worker from routing."""

    worker: str
    cause: str


class SnapshotRequest(PeerMessage, frozen=True):
    """The sender has just started and asks for `RecentPrompts`, then `InSync`."""


class RecentPrompts(PeerMessage, frozen=True):
    """Prompts that were sent to a worker, the least recently used first, each as packed keys."""

    worker: str
    prompts: list[bytes]


class InSync(PeerMessage, frozen=True):
    """The answer to `SnapshotRequest` is complete."""


class PeerRequest(PeerMessage, frozen=True):
    """A request that the receiver answers with `PeerAnswer`; `topic` selects the handler."""

    id: int
    topic: str
    argument: bytes


class PeerAnswer(PeerMessage, frozen=True):
    id: int
    payload: bytes


Message: TypeAlias = (
    Hello
    | Leaving
    | Dispatched
    | EncoderReset
    | FirstToken
    | Finished
    | Owner
    | SessionForgotten
    | OverridesChanged
    | Ejected
    | SnapshotRequest
    | RecentPrompts
    | InSync
    | PeerRequest
    | PeerAnswer
    | MapReset
    | Attached
    | Detached
    | Stored
    | RunSnapshot
    | Removed
    | Cleared
    | SlotForgotten
    | ChunksAttached
    | ChunksDetached
    | ChunksStored
    | ChunksRemoved
    | ChunksSnapshot
    | ChunksCleared
    | ChunkSlotForgotten
    | WorkerPlaces
    | TierBandwidth
    | L2Targets
    | PromptAnswered
    | Distrusted
)

_LENGTH: Final = Packing("<I")
MAX_FRAME_BYTES: Final = 1 << 30
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Message]).decode


def encode_frame(messages: Sequence[Message]) -> bytes:
    """`messages` as one frame. Costs about 1 us per message, and the copy of its keys."""
    payload = _encode(messages)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits a byte stream into frames. Mutable: buffers the incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages of all frames that `data` completes, in order. Raises WireError for a malformed
        frame."""
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise WireError("a frame from another process is too long")
            end = start + _LENGTH.size + length
            if end > len(buffer):
                break
            try:
                messages += _decode(memoryview(buffer)[start + _LENGTH.size : end])
            except msgspec.MsgspecError as error:
                raise WireError("a frame from another process cannot be decoded") from error
            start = end
        if start:
            del buffer[:start]
        return messages


def pack_keys(keys: Sequence[int]) -> bytes:
    """Keys as unsigned 64-bit numbers, in the machine's byte order."""
    return (keys if isinstance(keys, array) and keys.typecode == "Q" else array("Q", keys)).tobytes()


def unpack_keys(keys: bytes) -> array[int]:
    """The keys that `pack_keys` packed."""
    numbers = array("Q")
    numbers.frombytes(keys)
    return numbers


def unpack_ids(ids: bytes) -> array[int]:
    """Token ids that were packed as 32-bit numbers."""
    numbers = array("I")
    numbers.frombytes(ids)
    return numbers


MAX_GROUPS: Final = 32_768
"""Bound of the groups that one process remembers for one sender: a million keys, about 15 MB."""


class KeyGroupEncoder:
    """Dictionary compression of block keys: a group that was sent before is sent as its last key only.

    Mutable: remembers the groups that were sent, least recently used first.
    """

    # The key of a block depends on all tokens before it, so the last key of a group identifies the whole
    # group.

    def __init__(self) -> None:
        self._sent: OrderedDict[int, None] = OrderedDict()

    def encode(self, keys: Sequence[int]) -> tuple[bytes, bytes]:
        """`keys` as (last keys of all groups; the keys of new groups, and those after the last whole group).

        Only new groups are hashed. Costs about 0.2 us per known group and 1 us per new one.
        """
        if len(keys) < GROUP_BLOCKS:
            return b"", pack_keys(keys)
        sent, fresh = self._sent, array("Q")
        ends: Sequence[int] = (
            keys.group_ends() if isinstance(keys, BlockKeys) else keys[GROUP_BLOCKS - 1 :: GROUP_BLOCKS]
        )
        start = 0
        for end in ends:
            if end in sent:
                sent.move_to_end(end)
            else:
                sent[end] = None
                if len(sent) > MAX_GROUPS:
                    sent.popitem(last=False)
                fresh.extend(keys[start : start + GROUP_BLOCKS])
            start += GROUP_BLOCKS
        fresh.extend(keys[start:])
        return pack_keys(ends), fresh.tobytes()

    def reset(self) -> None:
        """Forget all groups. Every receiver must reset its decoder before it decodes the next keys."""
        self._sent.clear()


class KeyGroupDecoder:
    """Decodes the keys of one sender. Mutable: remembers the same groups as the sender's encoder."""

    def __init__(self) -> None:
        self._groups: OrderedDict[int, array[int]] = OrderedDict()

    def decode(self, ends: bytes, fresh: bytes) -> array[int]:
        """The keys that were encoded. Raises WireError if a group is missing here."""
        if not ends:
            return unpack_keys(fresh)
        groups, new_keys, keys, start = self._groups, unpack_keys(fresh), array("Q"), 0
        for end in unpack_keys(ends):
            group = groups.get(end)
            if group is None:
                group = groups[end] = new_keys[start : start + GROUP_BLOCKS]
                if len(group) != GROUP_BLOCKS or group[-1] != end:
                    raise WireError("a group of keys is used that was not sent")
                start += GROUP_BLOCKS
                if len(groups) > MAX_GROUPS:
                    groups.popitem(last=False)
            else:
                groups.move_to_end(end)
            keys.extend(group)
        keys.extend(new_keys[start:])
        return keys

    def reset(self) -> None:
        """Forget all groups."""
        self._groups.clear()
