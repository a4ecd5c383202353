"""What the process that follows the workers' caches tells the others of them, and they it. Pure data."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


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


class Places(Said, frozen=True):
    """Where a worker's requests can go now; none: nothing is known of its cache."""

    worker: str
    places: list[Place]


class Rate(Said, frozen=True):
    """The bandwidth to reckon with, from a slower tier (`blocks.tokens.Tier`) to a place."""

    slot: int
    tier: int
    gb_s: float


class Target(msgspec.Struct, frozen=True, array_like=True):
    """An `L2Target`."""

    holder: int
    scheme: tuple[str, int, int]
    model: str
    parts: list[tuple[int, int]]


class Targets(Said, frozen=True):
    """Where to look for chunks in the shared store now."""

    targets: list[Target]


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
