"""Cache events as the rest of kvroute sees them, whatever dialect brought them.

The classes are msgspec structs whose field names are vLLM's (0.32, distributed/kv_events.py), so that
the newest dialect decodes straight into them; older ones are converted (`kvroute.wire.vllm`).
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

ExternalBlockHash: TypeAlias = int | bytes
"""An engine's own name for a block: opaque, meaningful within one worker's stream. Never a `BlockKey`."""

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]


class Medium(Enum):
    """Where a block lies. OTHER is a medium that this version does not know: believe nothing about it."""

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
    """The medium that an event names, without regard to case; none given means GPU memory.

    vLLM 0.10 to 0.32 write GPU, CPU, STORAGE, since 0.26 also FS and OBJ; its LMCache and Mooncake
    connectors write a lower-case "cpu".
    """
    if name is None:
        return Medium.GPU
    return _MEDIA.get(name.lower(), Medium.OTHER)


class BlockStored(Struct, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Blocks that the worker now holds, in order: each is the parent of the next.

    `parent_block_hash` is None at the start of a prompt. `token_ids` has `block_size` tokens per hash,
    but may be longer (sliding-window groups skip blocks) or empty (placeholders of offloading
    connectors). `extra_keys` has one entry per block: LoRA name, multimodal ids, in the first block the
    cache salt. Only `group_idx` 0 (or None) speaks for the whole prefix in hybrid models.
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


class BlockRemoved(Struct, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """One copy of each of these blocks is gone. A hash that was stored twice has to be removed twice."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Struct, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """The worker's prefix cache in GPU memory is empty. Other media stay as they are: what LMCache drops it
    withdraws itself (seen with vLLM 0.32 and LMCache 0.5.6: a hit in its memory right after a reset)."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, gc=False):
    """What one engine step changed, in order.

    `ts` is the engine's wall clock in seconds, `dp_rank` its data-parallel rank if it said so.
    `dialect` names the shape it came in; the counts say what was skipped because it is unknown here.
    """

    ts: float
    events: list[KvEvent]
    dp_rank: int | None = None
    dialect: str = ""
    unknown_events: int = 0
    unknown_fields: int = 0
