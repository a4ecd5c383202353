"""What lies in memory, who leases it, and what makes room: decisions only, no bytes and no clock.

An entry's bytes stay where they are and as they are while it is leased or pinned. Among the others the
least recently used one is evicted first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from typing import NamedTuple

PAGE_BYTES = 4096


class Extent(NamedTuple):
    """A piece of the pool, in bytes."""

    offset: int
    length: int


Extents = tuple[Extent, ...]


def joined(first: Extents, second: Extents) -> Extents:
    """The extents of an object whose bytes go on in `second`; pieces that touch become one."""
    if first and second and first[-1].offset + first[-1].length == second[0].offset:
        middle = Extent(first[-1].offset, first[-1].length + second[0].length)
        return (*first[:-1], middle, *second[1:])
    return (*first, *second)


class FreeSpace:
    """The gaps of a range of `size_bytes`, merged with their neighbours when they touch.

    Mutable: the pool takes and gives back. A call costs some microseconds with thousands of gaps.
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
        """What an object of that size takes: whole pages."""
        return -(-size_bytes // self.page_bytes) * self.page_bytes

    def take(self, size_bytes: int, *, after: int | None = None) -> Extents | None:
        """Extents of together exactly `size_bytes`, each from the start of a page; None if there is less.

        The gap that begins at `after` if it holds all of it, else the smallest gap that does; if none does,
        the largest gaps, the largest first.
        """
        wanted = self.footprint(size_bytes)
        if wanted > self.free_bytes or size_bytes <= 0:
            return None
        if after is not None and self._length_at.get(after, 0) >= wanted:
            self._cut(after, wanted)
            return (Extent(after, size_bytes),)
        place = bisect_left(self._by_size, (wanted, -1))
        if place < len(self._by_size):
            _, start = self._by_size[place]
            self._cut(start, wanted)
            return (Extent(start, size_bytes),)
        pieces = []
        while size_bytes > 0:
            length, start = self._by_size[-1]
            taken = min(length, self.footprint(size_bytes))
            self._cut(start, taken)
            pieces.append(Extent(start, min(taken, size_bytes)))
            size_bytes -= taken
        return tuple(sorted(pieces))

    def give_back(self, extents: Extents) -> None:
        """Free what `take` gave."""
        for offset, length in extents:
            self._merge(offset, self.footprint(length))

    def _cut(self, start: int, length: int) -> None:
        """Take the first `length` bytes of the gap at `start`."""
        gap = self._length_at[start]
        self._remove(start, gap)
        if gap > length:
            self._add(start + length, gap - length)

    def _merge(self, start: int, length: int) -> None:
        behind = self._length_at.get(start + length)
        if behind is not None:
            self._remove(start + length, behind)
            length += behind
        before = self._start_of.get(start)
        if before is not None:
            gap = self._length_at[before]
            self._remove(before, gap)
            start, length = before, length + gap
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
    """What an object is called: both parts as the client means them, not as a URL quotes them."""

    bucket: bytes
    key: bytes


class Entry:
    """An object in memory. Mutable: the pool counts holders and stamps uses."""

    __slots__ = ("extents", "holders", "is_kept_below", "is_refused_below", "name", "size_bytes", "used")

    def __init__(self, name: ObjectName, extents: Extents, size_bytes: int) -> None:
        self.name = name
        self.extents = extents
        self.size_bytes = size_bytes
        self.holders = 0
        self.used = 0
        self.is_kept_below = False
        """A level below has the same bytes, or has refused them: waiting for it would change nothing."""
        self.is_refused_below = False
        """It has refused them, so evicting this one loses it."""


class EntryLease(NamedTuple):
    """A promise that `entry` stays where it is until `expires`, in the clock's seconds."""

    id: str
    entry: Entry
    expires: float


class MemoryPool:
    """The entries of `size_bytes` of memory. Mutable, touched from one event loop only.

    `now` is the caller's clock; leases that ended before it do not hold anything any more. `incarnation`
    tells this pool's leases from those of an earlier process.
    """

    def __init__(self, size_bytes: int, incarnation: str, *, page_bytes: int = PAGE_BYTES) -> None:
        self.space = FreeSpace(size_bytes, page_bytes=page_bytes)
        self.leases: dict[str, EntryLease] = {}
        self.entries: dict[ObjectName, Entry] = {}
        self.evicted_entries = 0
        self.evicted_bytes = 0
        self.lost_entries = 0
        """Evicted entries that no level below had."""
        self.expired_leases = 0
        self.evictable_bytes = 0
        """In pages: what nobody holds."""
        self.expendable_bytes = 0
        """The part of it that a level below keeps."""
        self._incarnation = incarnation
        self._expiries: list[tuple[float, str]] = []
        self._kept: OrderedDict[ObjectName, Entry] = OrderedDict()
        self._unkept: OrderedDict[ObjectName, Entry] = OrderedDict()
        self._uses = 0
        self._lease_number = 0

    def could_allocate(self, size_bytes: int, now: float) -> bool:
        """Whether evicting what nobody holds would make room for that much."""
        self.expire(now)
        return self.space.footprint(size_bytes) <= self.space.free_bytes + self.evictable_bytes

    def allocate(
        self, size_bytes: int, now: float, *, may_lose: bool = True, after: int | None = None
    ) -> Extents | None:
        """Room for an object or the next part of one, evicting for it what is used least recently; None when
        too much is held.

        Nothing is evicted if that would not be enough. Without `may_lose`, None also when the next entry
        to evict is not kept by a level below. Room at the offset `after` is preferred.
        """
        self.expire(now)
        wanted = self.space.footprint(size_bytes)
        if wanted > self.space.free_bytes + self.evictable_bytes:
            return None
        while wanted > self.space.free_bytes:
            victim = self._next_victim()
            if not victim.is_kept_below and not may_lose:
                return None
            self._evict(victim)
        return self.space.take(size_bytes, after=after)

    def free(self, extents: Extents) -> None:
        """Give back what `allocate` gave and nothing was admitted into."""
        self.space.give_back(extents)

    def admit(self, name: ObjectName, extents: Extents, *, is_kept_below: bool = False) -> Entry:
        """Make an object of `extents`, which now hold its bytes. `name` must not be in `entries`."""
        entry = Entry(name, extents, sum(length for _, length in extents))
        entry.is_kept_below = is_kept_below
        self.entries[name] = entry
        self._let_go(entry)
        return entry

    def lease(self, name: ObjectName, ttl_s: float, now: float) -> EntryLease | None:
        """Hold the object for `ttl_s`; None if it is not here."""
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
        """End a lease; False if there is none of that id (any more)."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        self.unpin(lease.entry)
        if len(self._expiries) > 64 and len(self._expiries) > 4 * len(self.leases):
            self._expiries = [(each.expires, each.id) for each in self.leases.values()]
            heapq.heapify(self._expiries)
        return True

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            if lease_id in self.leases:
                self.expired_leases += 1
                self.release(lease_id)

    def pin(self, entry: Entry) -> None:
        """Hold an entry without a time limit, until `unpin`."""
        entry.holders += 1
        if entry.holders == 1:
            self._take_out(entry)

    def unpin(self, entry: Entry, *, was_used: bool = True) -> None:
        """Undo a `pin`. With `was_used` the entry counts as just used, else it keeps its place."""
        entry.holders -= 1
        if entry.holders == 0:
            self._let_go(entry, was_used=was_used)

    def keep_below(self, entry: Entry, is_kept: bool) -> None:
        """Note whether a level below has the entry's bytes. One that is not kept any more is evicted next."""
        if entry.is_kept_below != is_kept:
            if entry.holders == 0:
                self._take_out(entry)
            entry.is_kept_below = is_kept
            entry.is_refused_below = False
            if entry.holders == 0:
                self._let_go(entry, was_used=False)

    def oldest_unkept(self) -> Entry | None:
        """The entry that would be lost first, if it were evicted now."""
        return next(iter(self._unkept.values()), None)

    def _let_go(self, entry: Entry, *, was_used: bool = True) -> None:
        if was_used:
            self._uses += 1
            entry.used = self._uses
        order = self._kept if entry.is_kept_below else self._unkept
        order[entry.name] = entry
        if not was_used and not entry.is_kept_below:
            # It was the oldest one; those below are written oldest first, so there the end is its place.
            order.move_to_end(entry.name, last=False)
        self._count(entry, self.space.footprint(entry.size_bytes))

    def _take_out(self, entry: Entry) -> None:
        (self._kept if entry.is_kept_below else self._unkept).pop(entry.name)
        self._count(entry, -self.space.footprint(entry.size_bytes))

    def _count(self, entry: Entry, change_bytes: int) -> None:
        self.evictable_bytes += change_bytes
        if entry.is_kept_below:
            self.expendable_bytes += change_bytes

    def _next_victim(self) -> Entry:
        heads = [next(iter(order.values())) for order in (self._kept, self._unkept) if order]
        return min(heads, key=lambda entry: entry.used)

    def _evict(self, entry: Entry) -> None:
        self._take_out(entry)
        del self.entries[entry.name]
        self.space.give_back(entry.extents)
        self.evicted_entries += 1
        self.evicted_bytes += entry.size_bytes
        self.lost_entries += not entry.is_kept_below or entry.is_refused_below
