"""The memory pool: allocation, leases and eviction; and the counters of the daemon that uses it.

Pure: no I/O, no clock, no access to the bytes. While an entry is leased or pinned, its bytes neither move nor
change. Of the other entries, the least recently used one is evicted first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

PAGE_BYTES = 4096


class Extent(NamedTuple):
    """A piece of the pool, in bytes."""

    offset: int
    length: int


Extents = tuple[Extent, ...]


def joined(head: Extents, tail: Extents) -> Extents:
    """Concatenate the extents of one object. Adjacent extents are merged."""
    if head and tail and head[-1].offset + head[-1].length == tail[0].offset:
        middle = Extent(head[-1].offset, head[-1].length + tail[0].length)
        return (*head[:-1], middle, *tail[1:])
    return (*head, *tail)


class FreeSpace:
    """The free gaps of a range of `size_bytes`. Adjacent gaps are merged.

    Mutable: the pool allocates and frees. A call takes some microseconds with thousands of gaps.
    """

    def __init__(self, size_bytes: int, *, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.size_bytes = size_bytes // page_bytes * page_bytes
        self.free_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        if self.size_bytes:
            self._add(0, self.size_bytes)

    def footprint(self, size_bytes: int) -> int:
        """The bytes that an object of that size occupies: whole pages."""
        return -(-size_bytes // self.page_bytes) * self.page_bytes

    def allocate(self, size_bytes: int, *, after: int | None = None) -> Extents | None:
        """Allocate extents of `size_bytes` in total, each page-aligned; None if less is free.

        Uses the gap at the offset `after` if the whole object fits there, else the smallest gap in which it
        fits. If it fits in no gap, it is split over the largest gaps, the largest first.
        """
        wanted = self.footprint(size_bytes)
        if wanted > self.free_bytes or size_bytes <= 0:
            return None
        if after is not None and self._length_at.get(after, 0) >= wanted:
            self._shrink_gap(after, wanted)
            return (Extent(after, size_bytes),)
        index = bisect_left(self._by_size, (wanted, -1))
        if index < len(self._by_size):
            _, start = self._by_size[index]
            self._shrink_gap(start, wanted)
            return (Extent(start, size_bytes),)
        pieces = []
        while size_bytes > 0:
            length, start = self._by_size[-1]
            taken = min(length, self.footprint(size_bytes))
            self._shrink_gap(start, taken)
            pieces.append(Extent(start, min(taken, size_bytes)))
            size_bytes -= taken
        return tuple(sorted(pieces))

    def free(self, extents: Extents) -> None:
        """Free extents that `allocate` returned."""
        for offset, length in extents:
            self._merge(offset, self.footprint(length))

    def _shrink_gap(self, start: int, length: int) -> None:
        """Remove the first `length` bytes of the gap at `start`."""
        gap = self._length_at[start]
        self._remove(start, gap)
        if gap > length:
            self._add(start + length, gap - length)

    def _merge(self, start: int, length: int) -> None:
        behind = self._length_at.get(start + length)
        if behind is not None:
            self._remove(start + length, behind)
            length += behind
        previous_start = self._start_of.get(start)
        if previous_start is not None:
            gap = self._length_at[previous_start]
            self._remove(previous_start, gap)
            start, length = previous_start, length + gap
        self._add(start, length)

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_of[start + length] = start
        insort(self._by_size, (length, start))
        self.free_bytes += length

    def _remove(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_of[start + length]
        del self._by_size[bisect_left(self._by_size, (length, start))]
        self.free_bytes -= length


class ObjectName(NamedTuple):
    """An object's name: bucket and key, without URL quoting."""

    bucket: bytes
    key: bytes


class Entry:
    """An object in memory. Mutable: the pool counts its holders and numbers its uses."""

    __slots__ = ("disk_is_done", "disk_refused", "extents", "holders", "name", "size_bytes", "used")

    def __init__(self, name: ObjectName, extents: Extents, size_bytes: int) -> None:
        self.name = name
        self.extents = extents
        self.size_bytes = size_bytes
        self.holders = 0
        self.used = 0
        self.disk_is_done = False
        """The disk has the entry's bytes, or has refused them: a disk write would change nothing."""
        self.disk_refused = False
        """The disk has refused the bytes, so the entry is lost when it is evicted."""


class EntryLease(NamedTuple):
    """A promise that the bytes of `entry` stay in place until `expires`, in the clock's seconds."""

    id: str
    entry: Entry
    expires: float


class MemoryPool:
    """The entries and leases of `size_bytes` of memory. Mutable, used from one event loop only.

    `now` is the caller's clock; a lease that ended before `now` holds nothing. `incarnation` makes this
    pool's lease ids different from those of an earlier process. `on_change` is called with the name of each
    entry that comes or goes.
    """

    def __init__(
        self,
        size_bytes: int,
        incarnation: str,
        *,
        page_bytes: int = PAGE_BYTES,
        on_change: Callable[[ObjectName], None] = lambda _: None,
    ) -> None:
        self.space = FreeSpace(size_bytes, page_bytes=page_bytes)
        self.leases: dict[str, EntryLease] = {}
        self.entries: dict[ObjectName, Entry] = {}
        self.evicted_entries = 0
        self.evicted_bytes = 0
        self.lost_entries = 0
        """Evicted entries that the disk did not have."""
        self.expired_leases = 0
        self.evictable_bytes = 0
        """Bytes of entries without holders, in whole pages."""
        self.lossless_evictable_bytes = 0
        """The part of `evictable_bytes` for which `disk_is_done`."""
        self._incarnation = incarnation
        self._on_change = on_change
        self._expiries: list[tuple[float, str]] = []
        self._disk_done: OrderedDict[ObjectName, Entry] = OrderedDict()
        self._disk_pending: OrderedDict[ObjectName, Entry] = OrderedDict()
        self._uses = 0
        self._lease_number = 0

    def can_allocate(self, size_bytes: int, now: float) -> bool:
        """Whether that amount is free, or would be after evicting entries without holders."""
        self.expire(now)
        return self.space.footprint(size_bytes) <= self.space.free_bytes + self.evictable_bytes

    def allocate(
        self, size_bytes: int, now: float, *, may_lose: bool = True, after: int | None = None
    ) -> Extents | None:
        """Allocate memory for an object or its next part, evicting the least recently used entries for it.

        Returns None, and evicts nothing, when even evicting every entry without holders would not be enough.
        Without `may_lose`, returns None also when the disk is not done with the next entry to evict. Memory
        at the offset `after` is preferred.
        """
        self.expire(now)
        wanted = self.space.footprint(size_bytes)
        if wanted > self.space.free_bytes + self.evictable_bytes:
            return None
        while wanted > self.space.free_bytes:
            victim = self._next_victim()
            if not victim.disk_is_done and not may_lose:
                return None
            self._evict(victim)
        return self.space.allocate(size_bytes, after=after)

    def free(self, extents: Extents) -> None:
        """Free extents that `allocate` returned and that were not committed."""
        self.space.free(extents)

    def commit(self, name: ObjectName, extents: Extents, *, disk_is_done: bool = False) -> Entry:
        """Make an entry of `extents`, which now hold the object's bytes. `name` must not be in `entries`."""
        entry = Entry(name, extents, sum(length for _, length in extents))
        entry.disk_is_done = disk_is_done
        self.entries[name] = entry
        self._make_evictable(entry)
        self._on_change(name)
        return entry

    def lease(self, name: ObjectName, ttl_s: float, now: float) -> EntryLease | None:
        """Lease the object for `ttl_s` seconds; None if it is not in memory."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        self._lease_number += 1
        lease = EntryLease(f"{self._incarnation}-{self._lease_number}", entry, now + ttl_s)
        self.leases[lease.id] = lease
        heapq.heappush(self._expiries, (lease.expires, lease.id))
        self.pin(entry)
        return lease

    def release(self, lease_id: str) -> bool:
        """End a lease. Returns False if no lease with that id runs."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        self.unpin(lease.entry)
        if len(self._expiries) > 64 and len(self._expiries) > 4 * len(self.leases):
            self._expiries = [(running.expires, running.id) for running in self.leases.values()]
            heapq.heapify(self._expiries)
        return True

    def expire(self, now: float) -> None:
        """End the leases that have expired."""
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            if lease_id in self.leases:
                self.expired_leases += 1
                self.release(lease_id)

    def pin(self, entry: Entry) -> None:
        """Hold an entry without a time limit, until `unpin`."""
        entry.holders += 1
        if entry.holders == 1:
            self._make_unevictable(entry)

    def unpin(self, entry: Entry, *, was_used: bool = True) -> None:
        """Undo a `pin`. With `was_used` the entry counts as just used, else it keeps its place in the
        order."""
        entry.holders -= 1
        if entry.holders == 0:
            self._make_evictable(entry, was_used=was_used)

    def set_disk_is_done(self, entry: Entry, is_kept: bool) -> None:
        """Set whether the disk is done with the entry. An entry that leaves the disk is evicted next."""
        if entry.disk_is_done != is_kept:
            if entry.holders == 0:
                self._make_unevictable(entry)
            entry.disk_is_done = is_kept
            entry.disk_refused = False
            if entry.holders == 0:
                self._make_evictable(entry, was_used=False)

    def next_to_write(self) -> Entry | None:
        """The entry that the disk should write next: of the pending ones, the least recently used."""
        return next(iter(self._disk_pending.values()), None)

    def _make_evictable(self, entry: Entry, *, was_used: bool = True) -> None:
        if was_used:
            self._uses += 1
            entry.used = self._uses
        order = self._disk_done if entry.disk_is_done else self._disk_pending
        order[entry.name] = entry
        if not was_used and not entry.disk_is_done:
            # Pinned entries are the oldest ones: the disk writes the oldest entry first. So it goes to the
            # front here, and to the end of the entries that the disk has.
            order.move_to_end(entry.name, last=False)
        self._count_evictable(entry, self.space.footprint(entry.size_bytes))

    def _make_unevictable(self, entry: Entry) -> None:
        (self._disk_done if entry.disk_is_done else self._disk_pending).pop(entry.name)
        self._count_evictable(entry, -self.space.footprint(entry.size_bytes))

    def _count_evictable(self, entry: Entry, change_bytes: int) -> None:
        self.evictable_bytes += change_bytes
        if entry.disk_is_done:
            self.lossless_evictable_bytes += change_bytes

    def _next_victim(self) -> Entry:
        heads = [next(iter(order.values())) for order in (self._disk_done, self._disk_pending) if order]
        return min(heads, key=lambda entry: entry.used)

    def _evict(self, entry: Entry) -> None:
        self._make_unevictable(entry)
        del self.entries[entry.name]
        self._on_change(entry.name)
        self.space.free(entry.extents)
        self.evicted_entries += 1
        self.evicted_bytes += entry.size_bytes
        self.lost_entries += not entry.disk_is_done or entry.disk_refused


@dataclass(slots=True)
class Counts:
    """Counters since the daemon's start. Mutable: the parts of the daemon add to them."""

    puts: Counter[str] = field(default_factory=Counter)
    """By outcome: stored, exists, no_room, too_large, broken_off."""
    put_bytes: int = 0
    leases: Counter[str] = field(default_factory=Counter)
    """By outcome: memory, waited (the object came while the client waited), miss."""
    releases: Counter[str] = field(default_factory=Counter)
    """By outcome: released, ended (the lease had ended already)."""
    refused: Counter[int] = field(default_factory=Counter)
    """Requests that the protocol does not allow, by status."""
    served_bytes: int = 0
    """Bytes sent to peers."""
    disk: Counter[str] = field(default_factory=Counter)
    """Files by event: written, read, evicted, write_failed, read_failed, skipped."""
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    peer_questions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By peer and answer: yes, no, failed."""
    peer_fetches: Counter[str] = field(default_factory=Counter)
    """By outcome: fetched, failed, no_room."""
    fetched_bytes: int = 0
    names_restored: int = 0
