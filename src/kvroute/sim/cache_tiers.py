"""The tiers L1 and L2 of simulated workers, in virtual time: their blocks, transfers and reports.

The rules are those of LMCache's servers (0.5.6, multiprocess mode); the docstrings name LMCache's module for
each rule. A block can be loaded only after it was written. Transfers take no GPU time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class TierChange(NamedTuple):
    """A reported change of a tier: first `stored` keys are added, then `removed` keys are evicted."""

    is_shared: bool
    """True: L2, which all workers read. False: this worker's L1."""
    stored: Sequence[int]
    removed: Sequence[int]


@dataclass(slots=True, eq=False)
class LruTier:
    """A set of block keys with LRU eviction; of one prompt's blocks, the last ones are evicted first.

    `capacity` is in blocks. Mutable: `put` and `touch`.
    """

    capacity: int
    _keys: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def run_end(self, keys: Sequence[int], start: int, stop: int) -> int:
        """End of the run of held keys that begins at `start`, at most `stop`."""
        held_keys = self._keys
        while start < stop and keys[start] in held_keys:
            start += 1
        return start

    def put(self, keys: Sequence[int]) -> list[int]:
        """Add the keys of a prompt, in order. Returns the evicted keys."""
        held_keys = self._keys
        if not self.capacity:
            return []
        for key in reversed(keys):
            held_keys[key] = None
            held_keys.move_to_end(key)
        evicted = []
        while len(held_keys) > self.capacity:
            evicted.append(held_keys.popitem(last=False)[0])
        return evicted

    def touch(self, keys: Sequence[int]) -> None:
        """Mark the keys that the tier holds as used; ignore the others."""
        held_keys = self._keys
        for key in reversed(keys):
            if key in held_keys:
                held_keys.move_to_end(key)


@dataclass(slots=True)
class Link:
    """A network or bus that carries one transfer after another. Mutable: `busy_until_s`."""

    bytes_s: float
    busy_until_s: float = 0.0

    def transfer(self, size: float, now: float) -> float:
        """Queue a transfer of `size` bytes at time `now`. Returns its end."""
        self.busy_until_s = max(now, self.busy_until_s) + size / self.bytes_s
        return self.busy_until_s


@dataclass(slots=True, eq=False)
class SharedStore:
    """L2: one store for all workers, and the queue of unfinished writes of all tiers.

    `link` carries reads and `writes` carries writes, because a network carries both directions at the same
    time. Call `apply_due` before a lookup. Mutable.
    """

    tier: LruTier
    link: Link
    latency_s: float
    writes: Link = field(default_factory=lambda: Link(float("inf")))
    _pending: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _order: int = 0

    def schedule(self, at: float, action: Callable[[float], None]) -> None:
        """Let `apply_due` call `action(at)` once the time `at` is reached."""
        self._order += 1
        heapq.heappush(self._pending, (at, self._order, action))

    def apply_due(self, now: float) -> None:
        """Apply all writes that have ended by `now`, in order of time."""
        pending = self._pending
        while pending and pending[0][0] <= now:
            at, _, action = heapq.heappop(pending)
            action(at)


@dataclass(slots=True, eq=False)
class WorkerTiers:
    """One worker's L1, its links, and the shared store. Mutable.

    Writes use `to_l1` and `to_store`, reads use `from_l1` and `from_store`, because PCIe and networks carry
    both directions at the same time. `on_change` is called with each change and its time.
    """

    l1: LruTier
    store: SharedStore
    block_bytes: int
    from_l1: Link
    to_l1: Link
    from_store: Link
    to_store: Link
    keeps_loaded: bool = False
    on_change: Callable[[TierChange, float], None] | None = None

    def lookup(self, keys: Sequence[int], start: int, stop: int) -> tuple[int, int]:
        """Count the blocks from `start` on that L1 or L2 holds, up to the first one in neither.

        Returns (blocks to read from L1, blocks to read from L2); a block in both is read from L1
        (`DefaultPrefetchPolicy.plan_load`).
        """
        l1, shared, position = self.l1, self.store.tier, start
        from_l1_blocks = 0
        while position < stop:
            if keys[position] in l1:
                from_l1_blocks += 1
            elif keys[position] not in shared:
                break
            position += 1
        return from_l1_blocks, position - start - from_l1_blocks

    def load(
        self, keys: Sequence[int], start: int, from_l1_blocks: int, from_l2_blocks: int, now: float
    ) -> float:
        """Start to load the blocks that `lookup` counted. Returns the time at which all are loaded.

        Blocks from L2 stay in L1 only with `keeps_loaded` (`--l2-prefetch-policy retain`;
        `plan_l1_retention`).
        """
        stop, ready = start + from_l1_blocks + from_l2_blocks, now
        self.l1.touch(keys[:stop])
        self.store.tier.touch(keys[:stop])
        if from_l1_blocks:
            ready = self.from_l1.transfer(from_l1_blocks * self.block_bytes, now)
        if from_l2_blocks:
            l2_ready = self._read_from_store(from_l2_blocks, now)
            ready = max(ready, l2_ready)
            if self.keeps_loaded:
                loaded = [key for key in keys[start:stop] if key not in self.l1]
                self.store.schedule(l2_ready, lambda at: self._put_in_l1(loaded, at))
        return ready

    def prefetch(self, keys: Sequence[int], now: float) -> None:
        """Start to load a prompt's blocks from L2 into L1, where they stay.

        As `POST /cache/prefetches` (v1/multiprocess/warm_prefetch.py). A lookup before the end of the
        prefetch does not find these blocks in L1 and loads them a second time (`L1Manager.reserve_write`).
        """
        from_l1_blocks, from_l2_blocks = self.lookup(keys, 0, len(keys))
        if not from_l2_blocks or not self.l1.capacity:
            return
        loaded = [key for key in keys[: from_l1_blocks + from_l2_blocks] if key not in self.l1]
        self.store.tier.touch(keys[: from_l1_blocks + from_l2_blocks])
        self.store.schedule(
            self._read_from_store(from_l2_blocks, now), lambda at: self._put_in_l1(loaded, at)
        )

    def write(self, keys: Sequence[int], now: float) -> None:
        """Start to write computed blocks into L1 and from there into L2 (`StoreController`).

        Blocks that L1 already holds are skipped: LMCache's `reserve_write` refuses them.
        """
        if not self.l1.capacity:
            self._write_to_store(keys, now)
            return
        new_keys = [key for key in keys if key not in self.l1]
        if new_keys:
            written = self.to_l1.transfer(len(new_keys) * self.block_bytes, now)
            self.store.schedule(written, lambda at: self._l1_written(new_keys, at))

    def put(self, keys: Sequence[int], now: float) -> None:
        """Put blocks into L1 and L2 immediately, without transfers (`Filling.ENDED`)."""
        if self.l1.capacity:
            self._put_in_l1(keys, now)
        if self.store.tier.capacity:
            self._put_in_store(keys, now)

    def _read_from_store(self, blocks: int, now: float) -> float:
        size, store = blocks * self.block_bytes, self.store
        return max(self.from_store.transfer(size, now), store.link.transfer(size, now)) + store.latency_s

    def _l1_written(self, keys: Sequence[int], now: float) -> None:
        self._put_in_l1(keys, now)
        self._write_to_store(keys, now)

    def _put_in_l1(self, keys: Sequence[int], now: float) -> None:
        evicted = self.l1.put(keys)
        if self.on_change is not None:
            self.on_change(TierChange(False, keys, evicted), now)

    def _write_to_store(self, keys: Sequence[int], now: float) -> None:
        store, size = self.store, len(keys) * self.block_bytes
        if not store.tier.capacity or not keys:
            return
        written = max(self.to_store.transfer(size, now), store.writes.transfer(size, now))
        store.schedule(written, lambda at: self._put_in_store(keys, at))

    def _put_in_store(self, keys: Sequence[int], now: float) -> None:
        evicted = self.store.tier.put(keys)
        if self.on_change is not None:
            self.on_change(TierChange(True, keys, evicted), now)
