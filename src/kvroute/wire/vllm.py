"""vLLM's KV-event payloads, in all the shapes that releases have had (msgpack).

An *event* is an array (tag first, fields by position; 0.10 to 0.23) or a map (`"type"` and fields by
name; from 0.24). A *batch* is an array `[ts, events, dp_rank]` in every release read so far; a
development snapshot had it as a map. Decoding goes by shape alone; a release only matters for
encoding, where it decides which fields exist. Field lists were read from the wheels of 0.10.2, 0.11.1,
0.19.1, 0.20.0 to 0.23.0, 0.24.0, 0.25.1, 0.26.0 to 0.28.0, 0.30.0, 0.32.0 and 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from kvroute.errors import WireError

ExternalBlockHash: TypeAlias = int | bytes
"""An engine hash: opaque, and meaningful within one worker's stream only. Never a `BlockKey`."""

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]


class Medium(Enum):
    """The medium that has a block. OTHER is a medium unknown to this version: such blocks are ignored."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"
    OTHER = "other"


_MEDIA = {
    "gpu": Medium.GPU,
    "cpu": Medium.CPU,
    "storage": Medium.DISK,
    "disk": Medium.DISK,
    "fs": Medium.DISK,
    "obj": Medium.REMOTE,
    "remote": Medium.REMOTE,
}


def medium_of(name: str | None) -> Medium:
    """The medium that an event names, in any case; without a name, GPU memory.

    vLLM 0.10 to 0.32 write GPU, CPU, STORAGE, since 0.26 also FS and OBJ; its LMCache and Mooncake
    connectors write a lower-case "cpu".
    """
    if name is None:
        return Medium.GPU
    return _MEDIA.get(name.lower(), Medium.OTHER)


class BlockStored(Struct, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Blocks that the worker now holds, in order: each is the parent of the next.

    `parent_block_hash` is None at the start of a prompt. `token_ids` has `block_size` tokens per hash,
    but may be longer (windows and states skip blocks) or empty (placeholders of offloading
    connectors). `extra_keys` has one entry per block: LoRA name, multimodal ids, in the first block the
    cache salt. In hybrid models only `group_idx` 0 (or None) covers the whole prefix. `lookahead_token_ids`
    has, for each block, the tokens after the block that its hash covers too (EAGLE-style speculation).
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[TokenId]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[TokenId]] | None = None


class BlockRemoved(Struct, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """One copy of each of these blocks was removed. A hash that was stored twice has to be removed twice.

    `remaining_copy_counts` has, for each hash, the copies that the worker still has; None: unknown.
    """

    block_hashes: list[ExternalBlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    remaining_copy_counts: list[int] | None = None


class AllBlocksCleared(Struct, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """The worker's prefix cache in GPU memory is empty. Other media keep their blocks.

    LMCache announces its removals itself (seen with vLLM 0.32 and LMCache 0.5.6: a hit in LMCache's memory
    right after a reset).
    """


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, gc=False):
    """The changes of one engine step, in order.

    `ts` is the engine's wall clock in seconds, `dp_rank` its data-parallel rank if it sent one. `dialect` is
    the shape of the payload. The counts are those of skipped events and fields, which are unknown here.
    """

    ts: float
    events: list[KvEvent]
    dp_rank: int | None = None
    dialect: str = ""
    unknown_events: int = 0
    unknown_fields: int = 0


_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
)
_REMOVED: Final = (
    "block_hashes",
    "medium",
    "group_idx",
    "locality",
    "ownership",
    "remaining_copy_counts",
)
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": _STORED,
    "BlockRemoved": _REMOVED,
    "AllBlocksCleared": (),
}
"""The fields of an event in the order of its array form, after the type."""
_TYPES: Final[Mapping[str, type[KvEvent]]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
# The leading fields without a default in vLLM's own classes, which are written even when None.
_STORED_ALWAYS: Final = 7
_REMOVED_ALWAYS: Final = 2


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one range of releases writes events.

    These releases know the first `stored_fields` and `removed_fields` fields of `FIELDS`. `replay_topic`:
    replies of the replay socket have the topic (0.26 and later).
    """

    name: str
    releases: str
    event_maps: bool
    batch_map: bool
    stored_fields: int
    removed_fields: int
    replay_topic: bool

    def encode(self, ts: float, events: Sequence[KvEvent], dp_rank: int | None = None) -> bytes:
        """Encode one batch as these releases do. Fields that they do not know are left out."""
        packed = [self._event(event) for event in events]
        if self.batch_map:
            batch: dict[str, Any] = {"ts": ts, "events": packed}
            if dp_rank is not None:
                batch["data_parallel_rank"] = dp_rank
            return msgspec.msgpack.encode(batch)
        return msgspec.msgpack.encode([ts, packed] if dp_rank is None else [ts, packed, dp_rank])

    def _event(self, event: KvEvent) -> Any:
        tag = type(event).__name__
        if isinstance(event, BlockStored):
            names, always = _STORED[: self.stored_fields], min(_STORED_ALWAYS, self.stored_fields)
        elif isinstance(event, BlockRemoved):
            names, always = _REMOVED[: self.removed_fields], _REMOVED_ALWAYS
        else:
            names, always = (), 0
        if self.event_maps:
            fields: dict[str, Any] = {"type": tag}
            for position, name in enumerate(names):
                value = getattr(event, name)
                if value is not None or position < always:
                    fields[name] = value
            return fields
        row = [getattr(event, name) for name in names]
        while len(row) > always and row[-1] is None:
            row.pop()
        return [tag, *row]


DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.name: dialect
    for dialect in (
        Dialect("array-0.10", "0.10.2 to 0.11.1", False, False, 6, 2, False),
        Dialect("array-0.19", "0.19.1", False, False, 8, 2, False),
        Dialect("array-0.20", "0.20.0 to 0.21.0", False, False, 9, 3, False),
        Dialect("array-0.22", "0.22.1 to 0.23.0", False, False, 11, 3, False),
        Dialect("map-0.24", "0.24.0 to 0.25.1", True, False, 11, 3, False),
        Dialect("map-0.26", "0.26.0 to 0.28.0", True, False, 12, 4, True),
        Dialect("map-0.30", "0.30.0 to 0.32.0", True, False, 14, 5, True),
        Dialect("map-0.33", "0.33.0", True, False, 15, 5, True),
        Dialect("batch-map", "a development snapshot", True, True, 14, 5, True),
    )
}
"""All shapes that a worker may write; the contract tests run over them. Decoding detects the shape itself."""


class _MapBatch(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The newest shape, decoded in C. It fails on unknown fields or events, which `_decode_generic` then
    counts."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


_decode_maps = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_any = msgspec.msgpack.Decoder().decode
_FAILURES: Final = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, KeyError, OverflowError)


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one batch of any release.

    Unknown event types, fields and trailing array elements are skipped and counted. Any other mismatch raises
    `WireError`, and then the whole batch counts as lost. The newest shape costs about 0.2 us a removal and
    3.4 us a store of eight 16-token blocks; older shapes cost 2.5 to 13 times that.
    """
    try:
        fast = _decode_maps(payload)
    except _FAILURES:
        pass
    else:
        return EventBatch(fast.ts, fast.events, fast.data_parallel_rank, "map")
    try:
        return _decode_generic(_decode_any(payload))
    except _FAILURES as exc:
        raise WireError(f"not a vLLM event batch: {type(exc).__name__}") from exc


def decode_newest(payload: bytes) -> list[KvEvent] | None:
    """The events of a batch in the newest shape without unknown parts; None for every other batch.

    `decode_batch` decodes the others and counts the unknown parts.
    """
    try:
        return _decode_maps(payload).events
    except _FAILURES:
        return None


def _decode_generic(message: Any) -> EventBatch:
    """Build a batch from decoded msgpack of any shape, and count unknown parts."""
    unknown_fields = unknown_events = 0
    if isinstance(message, Mapping):
        shape = "batch-map"
        ts, rows, dp_rank = message["ts"], message["events"], message.get("data_parallel_rank")
        unknown_fields += len(message.keys() - {"ts", "events", "data_parallel_rank"})
    elif isinstance(message, list) and len(message) >= 2:
        shape = "map"
        ts, rows = message[:2]
        dp_rank = message[2] if len(message) > 2 else None
        unknown_fields += max(0, len(message) - 3)
    else:
        raise ValueError("a batch is an array or a map")
    events: list[KvEvent] = []
    for row in _typed(rows, list[Any]):
        if isinstance(row, dict):
            tag = row["type"]
            kind = _TYPES.get(tag)
            if kind is not None:
                names = FIELDS[tag]
                fields = {name: row[name] for name in names if name in row}
                unknown_fields += len(row) - 1 - len(fields)
        else:
            tag, *values = _typed(row, list[Any])
            shape = "array" if shape == "map" else shape
            kind = _TYPES.get(tag)
            if kind is not None:
                names = FIELDS[tag]
                fields = dict(zip(names, values, strict=False))
                unknown_fields += max(0, len(values) - len(names))
        if kind is None:
            if not isinstance(tag, str):
                raise ValueError("an event's type is text")
            unknown_events += 1
            continue
        events.append(msgspec.convert(fields, kind))
    return EventBatch(
        ts=_typed(ts, float),
        events=events,
        dp_rank=_typed(dp_rank, int | None),
        dialect=shape,
        unknown_events=unknown_events,
        unknown_fields=unknown_fields,
    )


def _typed(value: Any, kind: Any) -> Any:
    return msgspec.convert(value, kind)
