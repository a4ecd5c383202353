"""The map as bytes: blocks for a later process to start from, and chunks for another process. Pure.

A file is a head and a sequence of frames. Each frame has its kind, its length and a checksum over kind,
length and payload; the last frame has the number of the others. The frames of a stream follow its
`StreamHead`. A file of another version, a damaged file and a truncated file are errors. The file contains
hashes and no token ids.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from enum import IntEnum
from struct import Struct as Packing
from typing import Final, NamedTuple, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from kvroute.blocks.chunks import ChunkKey, ChunkSpace
from kvroute.blocks.keys import BlockKey, Tier
from kvroute.errors import WireError
from kvroute.index.chunk_index import SHARD_MASK, ChunkHolder, ChunkIndex, entry_seed
from kvroute.wire.vllm import ExternalBlockHash

VERSION: Final = 3

HEAD: Final = b"kvroute-map\0" + bytes([VERSION, sys.byteorder == "little", 0, 0])
"""The first bytes of a file."""

_FRAME: Final = Packing("<BIQ")
_MAX_FRAME: Final = 1 << 26


class FrameKind(IntEnum):
    """The kind of a frame's content, in the order in which a stream's frames are best restored."""

    STREAM = 0
    RUNS = 1
    BLOCKS = 2
    COPIES = 3
    GROUP = 4
    END = 5


class Frame(NamedTuple):
    kind: FrameKind
    payload: memoryview


class StreamHead(msgspec.Struct, frozen=True):
    """The stream whose blocks follow, and its position.

    `incarnation` is the worker's `process_start_time_seconds`, `next_seq` the number of the next batch and
    `digest` the digest of the batch before it. `whole`: no event was missing. `group`, `block_tokens` and
    `lookahead` describe the engine's cache: see these properties of `Ledger`.
    """

    worker: str
    url: str
    rank: int
    incarnation: float
    next_seq: int
    digest: int
    whole: bool
    group: int | None
    block_tokens: int
    lookahead: int = 0


class Runs(msgspec.Struct, frozen=True):
    """Runs of consecutive blocks of `stride` x `KEY_TOKENS` tokens."""

    tier: Tier
    stride: int
    runs: Sequence[Sequence[BlockKey]]


class Blocks(msgspec.Struct, frozen=True):
    """Held blocks by engine hash, in no particular order."""

    tier: Tier
    stride: int
    hashes: Sequence[ExternalBlockHash]
    keys: Sequence[BlockKey]


class Copies(msgspec.Struct, frozen=True):
    """Blocks of which the worker holds several copies, with the number of copies beyond the first."""

    tier: Tier
    hashes: list[ExternalBlockHash] = msgspec.field(name="names")  # as files have it
    more: list[int]


class GroupBlocks(msgspec.Struct, frozen=True):
    """The blocks of a further KV cache group, and its rule (`index.groups.GroupRule`).

    `more` has the number of copies beyond the first, for each hash.
    """

    group: int
    kind: str
    block_tokens: int
    span: int
    hashes: list[ExternalBlockHash]
    keys: list[BlockKey]
    more: list[int]


class _Runs(msgspec.Struct, frozen=True):
    tier: Tier
    stride: int
    lengths: list[int]
    keys: bytes


class _Blocks(msgspec.Struct, frozen=True):
    tier: Tier
    stride: int
    packed: bytes
    """Hashes of 64 bits; empty if one of the hashes is longer."""
    hashes: list[ExternalBlockHash] = msgspec.field(name="names")  # as files have it
    """The hashes, if `packed` is empty."""
    keys: bytes


class _End(msgspec.Struct, frozen=True):
    frames: int


SnapshotPiece: TypeAlias = Runs | Blocks | Copies | GroupBlocks
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_head: Final = msgspec.msgpack.Decoder(StreamHead).decode
_decode_runs: Final = msgspec.msgpack.Decoder(_Runs).decode
_decode_blocks: Final = msgspec.msgpack.Decoder(_Blocks).decode
_decode_copies: Final = msgspec.msgpack.Decoder(Copies).decode
_decode_group: Final = msgspec.msgpack.Decoder(GroupBlocks).decode
_decode_end: Final = msgspec.msgpack.Decoder(_End).decode


def encode(message: StreamHead | SnapshotPiece) -> bytes:
    """Encode one frame. About 0.1 us a block."""
    if isinstance(message, Runs):
        keys = array("Q")
        for run in message.runs:
            keys.extend(run)
        lengths = [len(run) for run in message.runs]
        return _framed(FrameKind.RUNS, _Runs(message.tier, message.stride, lengths, keys.tobytes()))
    if isinstance(message, Blocks):
        packed, hashes = b"", []
        try:
            packed = array("Q", message.hashes).tobytes()  # type: ignore[type-var]
        except (TypeError, OverflowError):
            hashes = list(message.hashes)
        keys = array("Q", message.keys)
        return _framed(
            FrameKind.BLOCKS, _Blocks(message.tier, message.stride, packed, hashes, keys.tobytes())
        )
    if isinstance(message, GroupBlocks):
        return _framed(FrameKind.GROUP, message)
    return _framed(FrameKind.COPIES if isinstance(message, Copies) else FrameKind.STREAM, message)


def encode_end(frames: int) -> bytes:
    """Encode the last frame; `frames` is the number of frames before it."""
    return _framed(FrameKind.END, _End(frames))


def split(data: bytes) -> list[tuple[StreamHead, list[Frame]]]:
    """Check a whole file and split it into streams with their frames, in the order to restore them.

    Raises WireError.
    """
    if data[: len(HEAD)] != HEAD:
        raise WireError("not a snapshot of this version and byte order")
    streams: list[tuple[StreamHead, list[Frame]]] = []
    at, count, view = len(HEAD), 0, memoryview(data)
    try:
        while at + _FRAME.size <= len(data):
            kind, length, checksum = _FRAME.unpack_from(data, at)
            at += _FRAME.size
            payload = view[at : at + length]
            if length > _MAX_FRAME or len(payload) < length or _checksum(kind, payload) != checksum:
                break
            at += length
            frame = Frame(FrameKind(kind), payload)
            if frame.kind is FrameKind.END:
                if _decode_end(payload).frames != count or at != len(data):
                    break
                for _, frames in streams:
                    frames.sort(key=lambda frame: frame.kind)
                return streams
            if frame.kind is FrameKind.STREAM:
                streams.append((_decode_head(payload), []))
            else:
                streams[-1][1].append(frame)
            count += 1
    except (msgspec.MsgspecError, ValueError, IndexError, RecursionError) as error:
        raise WireError("a damaged snapshot") from error
    raise WireError("a damaged or truncated snapshot")


def decode(frame: Frame) -> SnapshotPiece:
    """Decode a frame of a stream. Raises WireError."""
    try:
        if frame.kind is FrameKind.RUNS:
            row = _decode_runs(frame.payload)
            keys, runs, start = _keys(row.keys), [], 0
            for length in row.lengths:
                runs.append(keys[start : start + length])
                start += length
            return Runs(row.tier, row.stride, runs)
        if frame.kind is FrameKind.BLOCKS:
            stored = _decode_blocks(frame.payload)
            hashes: Sequence[ExternalBlockHash] = _keys(stored.packed) if stored.packed else stored.hashes
            blocks = _keys(stored.keys)
            if len(hashes) != len(blocks) or stored.stride < 1:
                raise ValueError("the numbers of hashes and keys differ")
            return Blocks(stored.tier, stored.stride, hashes, blocks)
        if frame.kind is FrameKind.COPIES:
            return _decode_copies(frame.payload)
        if frame.kind is FrameKind.GROUP:
            return _decode_group(frame.payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("a damaged snapshot") from error
    raise WireError("a damaged snapshot")


def _framed(kind: FrameKind, message: msgspec.Struct) -> bytes:
    payload = _encode(message)
    return _FRAME.pack(kind, len(payload), _checksum(kind, payload)) + payload


def _checksum(kind: int, payload: bytes | memoryview) -> int:
    """The checksum includes the kind and the length, so a payload of another kind counts as damaged."""
    return xxh3_64_intdigest(payload, len(payload) << 8 | kind)


def _keys(packed: bytes) -> Sequence[BlockKey]:
    keys = array("Q")
    keys.frombytes(packed)
    return keys  # type: ignore[return-value]


ENTRY_BYTES: Final = 9
"""A key of `ChunkIndex`'s hash tables: a 64-bit chunk key, signed or unsigned, XOR a 64-bit number."""


def pack_entries(entries: Iterable[int]) -> bytes:
    """Keys of `ChunkIndex`'s hash tables as bytes, for `CopyableChunkIndex.store_entries`."""
    return b"".join([entry.to_bytes(ENTRY_BYTES, "little", signed=True) for entry in entries])


def unpack_entries(packed: bytes) -> Iterator[int]:
    """The keys that `pack_entries` packed."""
    for start in range(0, len(packed), ENTRY_BYTES):
        yield int.from_bytes(packed[start : start + ENTRY_BYTES], "little", signed=True)


class CopyableChunkIndex(ChunkIndex):
    """A `ChunkIndex` whose chunks can be copied to another process. Mutable, as `ChunkIndex`."""

    def entries_of(self, holder: ChunkHolder) -> Iterator[bytes]:
        """The chunks of `holder`, packed; each element has those of one of the 256 tables.

        A chunk that is stored or removed between two elements may be in them or not.
        """
        bit = holder.bit
        for shard in self._shards:
            if not bit or holder.bit != bit:
                return
            yield pack_entries([entry for entry, mask in shard.items() if mask & bit])

    @staticmethod
    def entries(space: ChunkSpace, keys: Iterable[ChunkKey]) -> Iterator[int]:
        """The keys of these chunks in the hash tables, as `pack_entries` gets them."""
        seed = entry_seed(space)
        return (key ^ seed for key in keys)

    def store_entries(
        self, holders: Sequence[ChunkHolder], packed: bytes, skipped: Container[int] = frozenset()
    ) -> None:
        """All `holders` have the packed chunks, except the `skipped` entries. About 0.5 us a chunk."""
        bits = 0
        for holder in holders:
            bits |= holder.bit or self._open(holder)
        shards, masks, live = self._shards, self._masks, self._live
        for start in range(0, len(packed), ENTRY_BYTES):
            entry = int.from_bytes(packed[start : start + ENTRY_BYTES], "little", signed=True)
            if entry in skipped:
                continue
            shard = shards[entry & SHARD_MASK]
            old_mask = shard.get(entry)
            if old_mask is None:
                if self._chunks >= self._max_chunks:
                    self._dropped += 1
                    continue
                self._chunks += 1
            live_mask = (old_mask or 0) & live
            mask = live_mask | bits
            if mask != old_mask:
                shard[entry] = masks.setdefault(mask, mask)
            if mask != live_mask:
                for holder in holders:
                    if not live_mask & holder.bit:
                        holder.chunks += 1
                        self._held_chunks += 1
