"""The interface of a route history (which prompts were sent to which worker), and a plain implementation.

A history remembers the prompts sent to each worker as chained block keys. It evicts them in the same order as
the worker's own paged cache (vLLM 0.26, v1/core/block_pool.py and kv_cache_utils.FreeKVCacheBlockQueue):
blocks of unfinished requests stay; the blocks of a finished request join the queue of free blocks last block
first, so the end of the least recently used sequence is evicted first.

Model, LoRA adapter and cache salt seed the key chain, so one history serves all models. A worker is a small
integer (`Worker.index`), because the histories store sets of workers as bitmasks. `TrieHistory` is
slower and simpler than `RadixHistory`: a pygtrie with one trie node per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import pygtrie

from kvroute.blocks.keys import BlockKey


class HistoryShare:
    """The figures of one worker's share of a history, in blocks. Mutable; only its history changes it."""

    __slots__ = ("active_blocks", "blocks", "capacity_blocks", "evicted_blocks", "worker")

    def __init__(self, worker: int, capacity_blocks: int) -> None:
        self.worker = worker
        self.capacity_blocks = capacity_blocks
        self.blocks = 0
        """Tracked blocks, each counted once. Above the capacity only while unfinished requests need them."""
        self.active_blocks = 0
        """Blocks of unfinished requests, each counted once; never evicted."""
        self.evicted_blocks = 0
        """Blocks evicted since the share was created."""

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
    def shares(self) -> Mapping[int, HistoryShare]:
        """The live figures of each worker that was used before; `share` also creates new ones."""
        ...

    def match(self, keys: Sequence[BlockKey]) -> Mapping[int, int]:
        """Worker -> number of leading blocks of `keys` that it holds, for workers with at least one.

        Changes nothing. The result does not change later.
        """
        ...

    def acquire(self, worker: int, keys: Sequence[BlockKey]) -> PinnedBlocks:
        """Record that `keys` were sent to `worker`: most recently used, and pinned until
        `PinnedBlocks.release`.

        Evicts the worker's least recently used unpinned blocks when the share is full; the share grows
        beyond its capacity only as far as pinned blocks need.
        """
        ...

    def touch(self, worker: int, lasts: Sequence[BlockKey]) -> Iterable[int]:
        """As `acquire` and `release` for prompts that the worker holds, by their last keys.

        Returns the positions in `lasts` of prompts that the worker does not hold, or that this history cannot
        find by their last keys. For these nothing changes.
        """
        ...

    def share(self, worker: int) -> HistoryShare:
        """The worker's live figures. A new worker starts empty at the default capacity."""
        ...

    def set_capacity(self, worker: int, blocks: int) -> None:
        """Resize the worker's share, and evict the unpinned blocks that no longer fit."""
        ...

    def forget(self, worker: int) -> None:
        """Drop all blocks of the worker. Its capacity stays; releasing its `PinnedBlocks` does nothing any
        more."""
        ...

    def recent(self, worker: int, most_blocks: int) -> list[Sequence[BlockKey]]:
        """The worker's unpinned prompts, oldest first: acquiring and releasing them copies the share
        approximately.

        Beginnings that prompts share are repeated and counted each time. Prompts beyond `most_blocks` blocks
        are left out, the oldest first.
        """
        ...

    def size(self) -> HistorySize: ...


class _Block:
    """One block: its holders (worker -> pins) and its key in the trie, `path[:depth]`. Mutable: `holders`."""

    __slots__ = ("depth", "holders", "path")

    def __init__(self, path: tuple[BlockKey, ...], depth: int) -> None:
        self.path = path
        self.depth = depth
        self.holders: dict[int, int] = {}


class _TrieShare(HistoryShare):
    __slots__ = ("all", "free", "is_forgotten")

    def __init__(self, worker: int, capacity_blocks: int) -> None:
        super().__init__(worker, capacity_blocks)
        self.all: set[_Block] = set()
        self.free: OrderedDict[_Block, None] = OrderedDict()
        """Unpinned blocks in the order of eviction."""
        self.is_forgotten = False


class TrieHistory:
    """A history on `pygtrie.Trie`; implements `RouteHistory`. Mutable; use it from the event loop only.

    Each step down a path costs about 0.5 us, and each block is an object: a 64K-token prompt takes
    milliseconds.
    """

    def __init__(self, default_capacity_blocks: int) -> None:
        self._default_capacity = default_capacity_blocks
        self._trie: pygtrie.Trie[tuple[BlockKey, ...], _Block, BlockKey] = pygtrie.Trie()
        self.shares: dict[int, _TrieShare] = {}

    def match(self, keys: Sequence[BlockKey]) -> dict[int, int]:
        depths: dict[int, int] = {}
        if not keys:
            return depths
        holders: dict[int, int] = {}
        depth = 0
        # `prefixes` ends with the last stored prefix of the path; only the empty root has no value.
        for step in self._trie.prefixes(tuple(keys)):
            block: _Block = step.value
            if depth and len(block.holders) != len(holders):
                for worker in holders:
                    if worker not in block.holders:
                        depths[worker] = depth
            holders = block.holders
            depth += 1
        for worker in holders:
            depths[worker] = depth
        return depths

    def acquire(self, worker: int, keys: Sequence[BlockKey]) -> PinnedBlocks:
        share = self._share(worker)
        blocks, new_blocks = self._pin(share, keys)
        return _TriePinned(self, share, blocks, new_blocks)

    def touch(self, worker: int, lasts: Sequence[BlockKey]) -> Iterable[int]:
        return range(len(lasts))

    def share(self, worker: int) -> HistoryShare:
        return self._share(worker)

    def set_capacity(self, worker: int, blocks: int) -> None:
        share = self._share(worker)
        share.capacity_blocks = blocks
        self._evict_excess(share)

    def forget(self, worker: int) -> None:
        share = self.shares.pop(worker, None)
        if share is None:
            return
        share.is_forgotten = True
        self.shares[worker] = _TrieShare(worker, share.capacity_blocks)
        self._drop(worker, share.all)

    def recent(self, worker: int, most_blocks: int) -> list[Sequence[BlockKey]]:
        share, prompts = self._share(worker), list[Sequence[BlockKey]]()
        # The prompts that end in a child include this block.
        inner = {block.path[: block.depth - 1] for block in share.all}
        for block in reversed(share.free):
            path = block.path[: block.depth]
            if path not in inner:
                most_blocks -= len(path)
                if most_blocks < 0:
                    break
                prompts.append(path)
        return prompts[::-1]

    def size(self) -> HistorySize:
        blocks = len(self._trie)
        tracked = sum(share.blocks for share in self.shares.values())
        # Measured with sys.getsizeof: trie node, child table, block, holders' dict and queue entry.
        return HistorySize(blocks, tracked, 550 * blocks + 200 * tracked)

    def _share(self, worker: int) -> _TrieShare:
        share = self.shares.get(worker)
        if share is None:
            share = self.shares[worker] = _TrieShare(worker, self._default_capacity)
        return share

    def _pin(self, share: _TrieShare, keys: Sequence[BlockKey]) -> tuple[list[_Block], int]:
        path = tuple(keys)
        pinned: list[_Block] = []
        if not path:
            return pinned, 0
        if path not in self._trie:
            self._trie[path] = _Block(path, len(path))
        new_blocks = 0
        for depth, step in enumerate(islice(self._trie.walk_towards(path), 1, None), 1):
            if not step.is_set:
                step.value = _Block(path, depth)
            block: _Block = step.value
            pins = block.holders.get(share.worker)
            if pins is None:
                share.all.add(block)
                new_blocks += 1
            elif pins == 0:
                del share.free[block]
            if not pins:
                share.active_blocks += 1
            block.holders[share.worker] = (pins or 0) + 1
            pinned.append(block)
        share.blocks += new_blocks
        self._evict_excess(share)
        return pinned, new_blocks

    def _unpin(self, share: _TrieShare, pinned: list[_Block]) -> None:
        if share.is_forgotten:
            return
        for block in reversed(pinned):
            block.holders[share.worker] -= 1
            if not block.holders[share.worker]:
                share.active_blocks -= 1
                share.free[block] = None
        self._evict_excess(share)

    def _evict_excess(self, share: _TrieShare) -> None:
        """Evict unpinned blocks until the share fits its capacity."""
        excess = min(share.blocks - share.capacity_blocks, len(share.free))
        if excess > 0:
            share.blocks -= excess
            evicted = [share.free.popitem(last=False)[0] for _ in range(excess)]
            share.all.difference_update(evicted)
            share.evicted_blocks += len(evicted)
            self._drop(share.worker, evicted)

    def _drop(self, worker: int, blocks: Iterable[_Block]) -> None:
        """Remove `worker` from the holders of `blocks`, and delete the nodes without a holder."""
        dead: dict[BlockKey, _Block] = {}
        for block in blocks:
            del block.holders[worker]
            if not block.holders:
                dead[block.path[block.depth - 1]] = block
        for block in dead.values():
            # All blocks below a dead block are dead too, so deleting the topmost one is enough.
            if block.depth == 1 or block.path[block.depth - 2] not in dead:
                del self._trie[slice(block.path[: block.depth], None)]


class _TriePinned:
    """Implements `PinnedBlocks`. Mutable: `extend` and `release`."""

    __slots__ = ("_blocks", "_history", "_share", "new_blocks")

    def __init__(
        self, history: TrieHistory, share: _TrieShare, blocks: list[_Block], new_blocks: int
    ) -> None:
        self._history = history
        self._share: _TrieShare | None = share
        self._blocks = blocks
        self.new_blocks = new_blocks

    def extend(self, keys: Sequence[BlockKey]) -> None:
        share, replaced = self._share, self._blocks
        if share is None or share.is_forgotten:
            return
        self._blocks, new_blocks = self._history._pin(share, keys)
        self.new_blocks += new_blocks
        self._history._unpin(share, replaced)

    def release(self) -> None:
        share = self._share
        if share is not None:
            self._share = None
            self._history._unpin(share, self._blocks)
