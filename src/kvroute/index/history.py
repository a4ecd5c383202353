"""The interface of a route history: which prompts were sent to which worker.

A history remembers the prompts sent to each worker as chained block keys. It evicts them in the same order as
the worker's own paged cache (vLLM 0.26, v1/core/block_pool.py and kv_cache_utils.FreeKVCacheBlockQueue):
blocks of unfinished requests stay; the blocks of a finished request join the queue of free blocks last block
first, so the end of the least recently used sequence is evicted first.

Model, LoRA adapter and cache salt seed the key chain, so one history serves all models. A worker is a small
integer (`Worker.index`), because the histories store sets of workers as bitmasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvroute.blocks.keys import BlockKey


class HistoryShare:
    """The figures of one worker's part of a history, in blocks. Mutable; only its history changes it."""

    __slots__ = ("active_blocks", "blocks", "capacity_blocks", "evicted_blocks", "worker")

    def __init__(self, worker: int, capacity_blocks: int) -> None:
        self.worker = worker
        self.capacity_blocks = capacity_blocks
        self.blocks = 0
        """Tracked blocks, each counted once. Above the capacity only while unfinished requests need them."""
        self.active_blocks = 0
        """Blocks of unfinished requests, each counted once; never evicted."""
        self.evicted_blocks = 0
        """Blocks evicted since the part was created."""

    @property
    def room_blocks(self) -> int:
        """The number of new blocks that fit without an eviction."""
        return max(0, self.capacity_blocks - self.blocks)

    def evicted_by(self, new_blocks: int) -> int:
        """The number of tracked blocks that `new_blocks` more would evict; 0 while there is room."""
        excess = self.blocks + new_blocks - self.capacity_blocks
        if excess <= 0:
            return 0
        return min(excess, self.blocks - self.active_blocks)


class PinnedBlocks(Protocol):
    """The blocks of one unfinished request, which are not evicted before `release`."""

    @property
    def new_blocks(self) -> int:
        """The number of blocks that the worker did not hold before."""
        ...

    def extend(self, keys: Sequence[BlockKey]) -> None:
        """Pin `keys` instead, which continue the pinned ones: the answer has made the sequence longer."""
        ...

    def release(self) -> None:
        """Unpin the blocks. Does nothing the second time, or after the worker was forgotten."""
        ...


class HistorySize(NamedTuple):
    """Sizes for gauges. `bytes` is an estimate with an error of up to a third."""

    blocks: int
    """Different blocks stored."""
    tracked: int
    """Blocks summed over workers: a block that two workers hold counts twice."""
    bytes: int


class RouteHistory(Protocol):
    """Which worker probably holds which leading blocks, because the prompts were sent to it.

    Keys must be chained (`blocks.keys.block_keys`): an implementation may assume that two prompts with an
    equal key *i* have equal keys before it. It may also keep a reference to `keys` from `match` to `acquire`,
    so the caller must not change a sequence that it has passed.
    """

    @property
    def parts(self) -> Mapping[int, HistoryShare]:
        """The live figures of each worker that was used before; `part` also creates new ones."""
        ...

    def match(self, keys: Sequence[BlockKey]) -> Mapping[int, int]:
        """Worker -> number of leading blocks of `keys` that it holds, for workers with at least one.

        Changes nothing. The result does not change later.
        """
        ...

    def acquire(self, worker: int, keys: Sequence[BlockKey]) -> PinnedBlocks:
        """Record that `keys` were sent to `worker`: most recently used, and pinned until
        `PinnedBlocks.release`.

        Evicts the worker's least recently used unpinned blocks when the part is full; the part grows
        beyond its capacity only as far as pinned blocks need.
        """
        ...

    def part(self, worker: int) -> HistoryShare:
        """The worker's live figures. A new worker starts empty at the default capacity."""
        ...

    def set_capacity(self, worker: int, blocks: int) -> None:
        """Resize the worker's part, and evict the unpinned blocks that no longer fit."""
        ...

    def forget(self, worker: int) -> None:
        """Drop all blocks of the worker. Its capacity stays; releasing its `PinnedBlocks` does nothing any
        more."""
        ...

    def recent(self, worker: int, most_blocks: int) -> list[Sequence[BlockKey]]:
        """The worker's unpinned prompts, oldest first: acquiring and releasing them copies the part
        approximately.

        Beginnings that prompts share are repeated and counted each time. Prompts beyond `most_blocks` blocks
        are left out, the oldest first.
        """
        ...

    def size(self) -> HistorySize: ...
