"""What we sent where: the seam of a route history, and what a worker's part of it counts.

A history remembers, per worker, the prompts dispatched to it as chained block keys, and forgets them
in the order in which the worker's own paged cache does (vLLM 0.26, v1/core/block_pool.py and
kv_cache_utils.FreeKVCacheBlockQueue): blocks of unfinished requests stay; a finished request's blocks
join the queue of free blocks tail first, so that the least recently used sequence loses its end first.

Model, LoRA adapter and cache salt are in the keys already (they seed the chain), so one history serves
all of them. Workers are small integers (`Worker.index`), because sets of workers are bitmasks here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvroute.blocks.keys import BlockKey


class HistoryShare:
    """One worker's share of a history, in blocks. Changed by its history only; read by anyone."""

    __slots__ = ("active_blocks", "blocks", "capacity_blocks", "worker")

    def __init__(self, worker: int, capacity_blocks: int) -> None:
        self.worker = worker
        self.capacity_blocks = capacity_blocks
        self.blocks = 0
        """Tracked blocks, each counted once. Above the capacity only while unfinished requests need it."""
        self.active_blocks = 0
        """Blocks of unfinished requests, each counted once; never evicted."""

    @property
    def room_blocks(self) -> int:
        """How many new blocks fit without evicting any."""
        return max(0, self.capacity_blocks - self.blocks)

    def evicted_by(self, new_blocks: int) -> int:
        """How many tracked blocks `new_blocks` more would push out; 0 while there is room."""
        excess = self.blocks + new_blocks - self.capacity_blocks
        if excess <= 0:
            return 0
        return min(excess, self.blocks - self.active_blocks)


class PinnedBlocks(Protocol):
    """Blocks of one unfinished request, pinned until released."""

    @property
    def new_blocks(self) -> int:
        """How many of the blocks the worker did not hold before."""
        ...

    def extend(self, keys: Sequence[BlockKey]) -> None:
        """Cover `keys` instead, which continue the leased ones (an answer that grew the sequence)."""
        ...

    def release(self) -> None:
        """Unpin. Does nothing the second time, or after the worker was forgotten."""
        ...


class HistorySize(NamedTuple):
    """For gauges. `bytes` is an estimate from the structure's own sizes, good to about a third."""

    blocks: int
    """Different blocks stored."""
    tracked: int
    """Blocks summed over workers: a block that two workers hold counts twice."""
    bytes: int


class RouteHistory(Protocol):
    """Which worker holds which leading blocks, judged by what was sent to it.

    Keys must be chained (`blocks.keys.block_keys`): an implementation may take two prompts that agree
    in key *i* to agree in every key before it. It may also remember what it found for a sequence until that
    is acquired: one that was given is not changed any more.
    """

    @property
    def parts(self) -> Mapping[int, HistoryShare]:
        """Each worker's live figures, of those that have been heard of; `part` gives any worker's."""
        ...

    def match(self, keys: Sequence[BlockKey]) -> Mapping[int, int]:
        """Leading blocks of `keys` per worker, for workers that hold at least one. Changes nothing, and
        nothing changes it later."""
        ...

    def acquire(self, worker: int, keys: Sequence[BlockKey]) -> PinnedBlocks:
        """Record that `keys` went to `worker`, most recently used, pinned until the lease is released.

        Evicts the worker's least recently used unpinned blocks when the part is full; the part grows
        beyond its capacity only as far as pinned blocks need.
        """
        ...

    def part(self, worker: int) -> HistoryShare:
        """The worker's live figures. A new worker starts empty at the default capacity."""
        ...

    def set_capacity(self, worker: int, blocks: int) -> None:
        """Resize the worker's part, evicting at once what no longer fits (pinned blocks excepted)."""
        ...

    def forget(self, worker: int) -> None:
        """Drop all of the worker's blocks; its capacity stays, leases still out become void."""
        ...

    def recent(self, worker: int, most_blocks: int) -> list[Sequence[BlockKey]]:
        """The prompts behind what is tracked of the worker and not pinned, so that acquiring and releasing
        them in this order gives another history the same part, as good as. Beginnings that prompts share
        are repeated, and counted each time; what exceeds `most_blocks` is left out, the oldest first."""
        ...

    def size(self) -> HistorySize: ...
