"""Slower cache tiers in virtual time: what they hold, how bytes get there, and who is told of it.

As LMCache's servers do it (0.5.6, multiprocess mode; the module of each rule is named beside it). Nothing
can be loaded before it is written, and nothing here takes GPU time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class TierChange(NamedTuple):
    """What a worker's LMCache server tells of: keys that came into a tier, then keys that left it."""

    is_shared: bool
    """L2, which all workers read; else this worker's L1."""
    stored: Sequence[int]
    removed: Sequence[int]


@dataclass(slots=True, eq=False)
class LruTier:
    """Keys, least recently used first, ends of prompts before their beginnings. Mutable."""

    capacity: int
    _held: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def run(self, keys: Sequence[int], start: int, stop: int) -> int:
        """Where the keys held from `start` on without a hole end, `stop` at most."""
        held = self._held
        while start < stop and keys[start] in held:
            start += 1
        return start

    def put(self, keys: Sequence[int]) -> list[int]:
        """Take these in, in order; returns what had to go for them."""
        held = self._held
        if not self.capacity:
            return []
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        gone = []
        while len(held) > self.capacity:
            gone.append(held.popitem(last=False)[0])
        return gone

    def touch(self, keys: Sequence[int]) -> None:
        """Those of these that are held were used."""
        held = self._held
        for key in reversed(keys):
            if key in held:
                held.move_to_end(key)


@dataclass(slots=True)
class Link:
    """Something that carries one transfer after another. Mutable: `busy_until_s`."""

    bytes_s: float
    busy_until_s: float = 0.0

    def carry(self, size: float, now: float) -> float:
        """When a transfer that is asked for now is through."""
        self.busy_until_s = max(now, self.busy_until_s) + size / self.bytes_s
        return self.busy_until_s


@dataclass(slots=True, eq=False)
class SharedStore:
    """L2: one for all workers. `link` carries what they read, `writes` what they write: networks do both at
    once. Also keeps what all tiers have still to take in, in order of time: call `settle` before looking.
    Mutable."""

    tier: LruTier
    link: Link
    latency_s: float
    writes: Link = field(default_factory=lambda: Link(float("inf")))
    _coming: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _order: int = 0

    def later(self, at: float, take_in: Callable[[float], None]) -> None:
        """Call `take_in` with that time once it has come."""
        self._order += 1
        heapq.heappush(self._coming, (at, self._order, take_in))

    def settle(self, now: float) -> None:
        """Take in all that has been written by now."""
        coming = self._coming
        while coming and coming[0][0] <= now:
            at, _, take_in = heapq.heappop(coming)
            take_in(at)


@dataclass(slots=True, eq=False)
class WorkerTiers:
    """One worker's L1 and its ways to the store. Mutable.

    `in_l1` and `in_store` carry what is written, `from_l1` and `from_store` what is read: PCIe and networks
    carry both directions at once. `told` hears of changes as they happen.
    """

    l1: LruTier
    store: SharedStore
    block_bytes: int
    from_l1: Link
    in_l1: Link
    from_store: Link
    in_store: Link
    keeps_loaded: bool = False
    told: Callable[[TierChange, float], None] | None = None

    def found(self, keys: Sequence[int], start: int, stop: int) -> tuple[int, int]:
        """Blocks in L1 and in L2 that follow `start` without a gap; each is read from L1 if it is there
        (`DefaultPrefetchPolicy.plan_load`)."""
        l1, shared, place = self.l1, self.store.tier, start
        near = 0
        while place < stop:
            if keys[place] in l1:
                near += 1
            elif keys[place] not in shared:
                break
            place += 1
        return near, place - start - near

    def load(self, keys: Sequence[int], start: int, near: int, far: int, now: float) -> float:
        """Begin to load what `found` told of; returns when it is through. What comes from L2 stays in L1 only
        with `keeps_loaded` (`--l2-prefetch-policy retain`; `plan_l1_retention`)."""
        stop, ready = start + near + far, now
        self.l1.touch(keys[:stop])
        self.store.tier.touch(keys[:stop])
        if near:
            ready = self.from_l1.carry(near * self.block_bytes, now)
        if far:
            through = self._from_store(far, now)
            ready = max(ready, through)
            if self.keeps_loaded:
                loaded = [key for key in keys[start:stop] if key not in self.l1]
                self.store.later(through, lambda at: self._into_l1(loaded, at))
        return ready

    def prefetch(self, keys: Sequence[int], now: float) -> None:
        """Begin to load from L2 into L1 what of a prompt is not there, and keep it
        (`POST /cache/prefetches`, v1/multiprocess/warm_prefetch.py). A lookup before it is through sees
        nothing of it, and loads the same again (`L1Manager.reserve_write`)."""
        near, far = self.found(keys, 0, len(keys))
        if not far or not self.l1.capacity:
            return
        loaded = [key for key in keys[: near + far] if key not in self.l1]
        self.store.tier.touch(keys[: near + far])
        self.store.later(self._from_store(far, now), lambda at: self._into_l1(loaded, at))

    def write(self, keys: Sequence[int], now: float) -> None:
        """Begin to store blocks that were computed: into L1, from there into L2 (`StoreController`). Only
        what L1 has not: its `reserve_write` refuses the rest."""
        if not self.l1.capacity:
            self._into_store(keys, now)
            return
        fresh = [key for key in keys if key not in self.l1]
        if fresh:
            written = self.in_l1.carry(len(fresh) * self.block_bytes, now)
            self.store.later(written, lambda at: self._written(fresh, at))

    def put(self, keys: Sequence[int], now: float) -> None:
        """Have blocks in L1 and L2 at once, whatever links and store are doing (`Filling.ENDED`)."""
        if self.l1.capacity:
            self._into_l1(keys, now)
        if self.store.tier.capacity:
            self._stored(keys, now)

    def _from_store(self, blocks: int, now: float) -> float:
        size, store = blocks * self.block_bytes, self.store
        return max(self.from_store.carry(size, now), store.link.carry(size, now)) + store.latency_s

    def _written(self, keys: Sequence[int], now: float) -> None:
        self._into_l1(keys, now)
        self._into_store(keys, now)

    def _into_l1(self, keys: Sequence[int], now: float) -> None:
        gone = self.l1.put(keys)
        if self.told is not None:
            self.told(TierChange(False, keys, gone), now)

    def _into_store(self, keys: Sequence[int], now: float) -> None:
        store, size = self.store, len(keys) * self.block_bytes
        if not store.tier.capacity or not keys:
            return
        written = max(self.in_store.carry(size, now), store.writes.carry(size, now))
        store.later(written, lambda at: self._stored(keys, at))

    def _stored(self, keys: Sequence[int], now: float) -> None:
        gone = self.store.tier.put(keys)
        if self.told is not None:
            self.told(TierChange(True, keys, gone), now)


@dataclass(slots=True, eq=False)
class TierReports:
    """When an LMCache server tells its coordinator of its changes: at once, but not sooner than `interval_s`
    after the time before (`--coordinator-event-flush-interval`, 1 s by default; v1/mp_coordinator/
    cache_events.py). Mutable."""

    interval_s: float
    _next_s: float = 0.0
    _is_due: bool = False

    def told_at(self, now: float) -> float:
        """When a change of now leaves; call it in order of time."""
        if self._is_due and now >= self._next_s:
            self._next_s += self.interval_s
            self._is_due = False
        if now < self._next_s:
            self._is_due = True
            return self._next_s
        self._next_s = now + self.interval_s
        return now
