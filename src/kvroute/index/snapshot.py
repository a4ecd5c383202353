"""What the workers held, as bytes that another process can begin with. Pure.

A file is a head and a row of frames, each with its kind, its length and a checksum over all three; the last
one counts them. A stream's frames follow its `StreamHead`. Versioned: what another version wrote, what is
damaged and what is cut off is an error, never a guess. There are hashes in it and no token ids.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from enum import IntEnum
from struct import Struct as Packing
from typing import Final, NamedTuple, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import BlockKey, Tier
from kvroute.errors import WireError
from kvroute.wire.vllm import ExternalBlockHash

VERSION: Final = 2

HEAD: Final = b"kvroute-map\0" + bytes([VERSION, sys.byteorder == "little", 0, 0])
"""How a file begins."""

_FRAME: Final = Packing("<BIQ")
_MAX_FRAME: Final = 1 << 26


class FrameKind(IntEnum):
    """What a frame holds, in the order in which a stream's frames are best taken in."""

    STREAM = 0
    RUNS = 1
    BLOCKS = 2
    COPIES = 3
    END = 4


class Frame(NamedTuple):
    kind: FrameKind
    payload: memoryview


class StreamHead(msgspec.Struct, frozen=True):
    """Whose blocks follow, and where its events went on.

    `incarnation` is the worker's `process_start_time_seconds`; `next_seq` the number of the batch that
    came next and `digest` that of the one before it. `whole`: nothing was missing. `group` and
    `block_tokens` are what the stream had shown of the engine's cache.
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


class Runs(msgspec.Struct, frozen=True):
    """Rows of consecutive blocks of `stride` x `KEY_TOKENS` tokens."""

    tier: Tier
    stride: int
    runs: Sequence[Sequence[BlockKey]]


class Blocks(msgspec.Struct, frozen=True):
    """Held blocks by the engine's names, in no order."""

    tier: Tier
    stride: int
    names: Sequence[ExternalBlockHash]
    keys: Sequence[BlockKey]


class Copies(msgspec.Struct, frozen=True):
    """How many further copies there are of some of the blocks."""

    tier: Tier
    names: list[ExternalBlockHash]
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
    """64-bit names."""
    names: list[ExternalBlockHash]
    """All others."""
    keys: bytes


class _End(msgspec.Struct, frozen=True):
    frames: int


Part: TypeAlias = Runs | Blocks | Copies
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_head: Final = msgspec.msgpack.Decoder(StreamHead).decode
_decode_runs: Final = msgspec.msgpack.Decoder(_Runs).decode
_decode_blocks: Final = msgspec.msgpack.Decoder(_Blocks).decode
_decode_copies: Final = msgspec.msgpack.Decoder(Copies).decode
_decode_end: Final = msgspec.msgpack.Decoder(_End).decode


def encode(part: StreamHead | Part) -> bytes:
    """One frame. About 0.1 us a block."""
    if isinstance(part, Runs):
        keys = array("Q")
        for run in part.runs:
            keys.extend(run)
        lengths = [len(run) for run in part.runs]
        return _framed(FrameKind.RUNS, _Runs(part.tier, part.stride, lengths, keys.tobytes()))
    if isinstance(part, Blocks):
        packed, names = b"", []
        try:
            packed = array("Q", part.names).tobytes()  # type: ignore[type-var]
        except (TypeError, OverflowError):
            names = list(part.names)
        keys = array("Q", part.keys)
        return _framed(FrameKind.BLOCKS, _Blocks(part.tier, part.stride, packed, names, keys.tobytes()))
    return _framed(FrameKind.COPIES if isinstance(part, Copies) else FrameKind.STREAM, part)


def encode_end(frames: int) -> bytes:
    """The last frame; `frames` is how many there are before it."""
    return _framed(FrameKind.END, _End(frames))


def split(data: bytes) -> list[tuple[StreamHead, list[Frame]]]:
    """A whole file as streams with their frames, checked, in the order in which to take them in. Raises
    WireError."""
    if data[: len(HEAD)] != HEAD:
        raise WireError("not a snapshot of this version and byte order")
    streams: list[tuple[StreamHead, list[Frame]]] = []
    place, count, view = len(HEAD), 0, memoryview(data)
    try:
        while place + _FRAME.size <= len(data):
            kind, length, checksum = _FRAME.unpack_from(data, place)
            place += _FRAME.size
            payload = view[place : place + length]
            if length > _MAX_FRAME or len(payload) < length or _checksum(kind, payload) != checksum:
                break
            place += length
            frame = Frame(FrameKind(kind), payload)
            if frame.kind is FrameKind.END:
                if _decode_end(payload).frames != count or place != len(data):
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
    raise WireError("a snapshot that is damaged or cut off")


def decode(frame: Frame) -> Part:
    """One of a stream's frames. Raises WireError."""
    try:
        if frame.kind is FrameKind.RUNS:
            row = _decode_runs(frame.payload)
            keys, runs, start = _keys(row.keys), [], 0
            for length in row.lengths:
                runs.append(keys[start : start + length])
                start += length
            return Runs(row.tier, row.stride, runs)
        if frame.kind is FrameKind.BLOCKS:
            told = _decode_blocks(frame.payload)
            names: Sequence[ExternalBlockHash] = _keys(told.packed) if told.packed else told.names
            blocks = _keys(told.keys)
            if len(names) != len(blocks) or told.stride < 1:
                raise ValueError("as many names as keys")
            return Blocks(told.tier, told.stride, names, blocks)
        if frame.kind is FrameKind.COPIES:
            return _decode_copies(frame.payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("a damaged snapshot") from error
    raise WireError("a damaged snapshot")


def _framed(kind: FrameKind, part: msgspec.Struct) -> bytes:
    payload = _encode(part)
    return _FRAME.pack(kind, len(payload), _checksum(kind, payload)) + payload


def _checksum(kind: int, payload: bytes | memoryview) -> int:
    """Of a frame: a payload that is read as another kind of frame is damaged too."""
    return xxh3_64_intdigest(payload, len(payload) << 8 | kind)


def _keys(packed: bytes) -> Sequence[BlockKey]:
    keys = array("Q")
    keys.frombytes(packed)
    return keys  # type: ignore[return-value]
