"""Puts, leases, releases, expiry and eviction at once, over real memory, against plain dictionaries."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvroute.tierd.pool import EntryLease, Extents, MemoryPool, ObjectName

PAGE = 16
PAGES = 12


def name(number: int) -> ObjectName:
    return ObjectName(b"b", str(number).encode())


def admitted(pool: MemoryPool, number: int, pages: int = 1, now: float = 0.0) -> None:
    extents = pool.allocate(pages * PAGE, now)
    assert extents is not None
    pool.commit(name(number), extents)


def pool_of(pages: int) -> MemoryPool:
    return MemoryPool(pages * PAGE, "i", page_bytes=PAGE)


def held(pool: MemoryPool) -> list[int]:
    return sorted(int(each.key) for each in pool.entries)


def test_the_least_recently_used_entry_makes_room() -> None:
    pool = pool_of(3)
    for number in range(3):
        admitted(pool, number)
    lease = pool.lease(name(0), 1.0, 0.0)
    assert lease is not None
    pool.release(lease.id)

    admitted(pool, 3)

    assert held(pool) == [0, 2, 3]


def test_a_leased_entry_is_not_evicted_before_its_lease_ends() -> None:
    pool = pool_of(2)
    admitted(pool, 0)
    admitted(pool, 1)
    assert pool.lease(name(0), 5.0, 0.0)

    admitted(pool, 2, now=4.9)
    assert held(pool) == [0, 2]
    assert pool.allocate(2 * PAGE, 4.9) is None
    assert held(pool) == [0, 2]

    admitted(pool, 3, pages=2, now=5.0)
    assert held(pool) == [3]
    assert pool.expired_leases == 1


def test_each_of_two_leases_holds_the_entry() -> None:
    pool = pool_of(1)
    admitted(pool, 0)
    first, second = pool.lease(name(0), 5.0, 0.0), pool.lease(name(0), 5.0, 0.0)
    assert first is not None
    assert second is not None

    assert pool.release(first.id)
    assert not pool.release(first.id)
    assert pool.allocate(PAGE, 0.0) is None

    assert pool.release(second.id)
    assert pool.allocate(PAGE, 0.0) is not None


def test_nothing_is_evicted_for_an_object_that_can_never_fit() -> None:
    pool = pool_of(3)
    for number in range(3):
        admitted(pool, number)
    pool.lease(name(2), 5.0, 0.0)

    assert pool.allocate(3 * PAGE, 0.0) is None
    assert held(pool) == [0, 1, 2]


def test_without_permission_to_lose_data_only_entries_on_the_disk_are_evicted() -> None:
    pool = pool_of(2)
    admitted(pool, 0)
    admitted(pool, 1)
    assert pool.allocate(PAGE, 0.0, may_lose=False) is None

    oldest = pool.next_to_write()
    assert oldest is not None
    assert oldest.name == name(0)
    pool.pin(oldest)
    pool.set_disk_is_done(oldest, True)
    pool.unpin(oldest, was_used=False)

    assert pool.lossless_evictable_bytes == PAGE
    assert pool.allocate(PAGE, 0.0, may_lose=False) is not None
    assert held(pool) == [1]
    assert pool.lost_entries == 0


def test_an_entry_that_the_disk_loses_is_written_again_before_its_eviction() -> None:
    pool = pool_of(2)
    admitted(pool, 0)
    admitted(pool, 1)
    for number in (0, 1):
        pool.set_disk_is_done(pool.entries[name(number)], True)
    pool.set_disk_is_done(pool.entries[name(1)], False)

    again = pool.next_to_write()

    assert again is not None
    assert again.name == name(1)
    assert pool.lossless_evictable_bytes == PAGE


@dataclass
class Granted:
    """A lease and what its reader must see until it ends."""

    lease: EntryLease
    content: bytes


class PoolAgainstDictionaries(RuleBasedStateMachine):
    """No byte is wrong, memory stays within its bound, and leased bytes stay what and where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = memoryview(mmap.mmap(-1, PAGES * PAGE))
        self.pool = MemoryPool(PAGES * PAGE, "i", page_bytes=PAGE)
        self.contents: dict[ObjectName, bytes] = {}
        self.granted: list[Granted] = []
        self.incoming: list[tuple[ObjectName, Extents]] = []
        self.now = 0.0
        self.writes = 0

    def content(self, extents: Extents) -> bytes:
        return b"".join(bytes(self.memory[offset : offset + length]) for offset, length in extents)

    @rule(number=st.integers(0, 12), size=st.integers(1, 6 * PAGE), may_lose=st.booleans())
    def begin_put(self, number: int, size: int, may_lose: bool) -> None:
        if name(number) in self.pool.entries or name(number) in [each for each, _ in self.incoming]:
            return
        leased = sum(
            self.pool.space.footprint(each.entry.size_bytes)
            for each in {each.lease.entry.name: each.lease for each in self.running()}.values()
        )
        coming = sum(self.pool.space.footprint(sum(part for _, part in each)) for _, each in self.incoming)
        fits = self.pool.space.footprint(size) <= PAGES * PAGE - leased - coming
        extents = self.pool.allocate(size, self.now, may_lose=may_lose)
        assert (extents is not None) == fits or not may_lose
        if extents is not None:
            self.incoming.append((name(number), extents))

    @precondition(lambda self: self.incoming)
    @rule(place=st.integers(0, 9), breaks_off=st.booleans())
    def end_put(self, place: int, breaks_off: bool) -> None:
        """Bytes may lie in the extents in either case."""
        what, extents = self.incoming.pop(place % len(self.incoming))
        self.writes += 1
        for offset, length in extents:
            self.memory[offset : offset + length] = bytes([self.writes % 256]) * length
        if breaks_off:
            self.pool.free(extents)
        else:
            self.contents[what] = self.content(extents)
            self.pool.commit(what, extents)

    @rule(number=st.integers(0, 12), ttl=st.integers(1, 20))
    def allocate(self, number: int, ttl: int) -> None:
        lease = self.pool.lease(name(number), float(ttl), self.now)
        assert (lease is None) == (name(number) not in self.pool.entries)
        if lease is not None:
            assert self.content(lease.entry.extents) == self.contents[name(number)]
            self.granted.append(Granted(lease, self.contents[name(number)]))

    @precondition(lambda self: self.granted)
    @rule(place=st.integers(0, 99))
    def free(self, place: int) -> None:
        granted = self.granted.pop(place % len(self.granted))
        was_held = self.pool.release(granted.lease.id)
        assert was_held or granted.lease.expires <= self.now

    @rule(number=st.integers(0, 12), is_kept=st.booleans())
    def disk(self, number: int, is_kept: bool) -> None:
        entry = self.pool.entries.get(name(number))
        if entry is not None:
            self.pool.set_disk_is_done(entry, is_kept)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.pool.expire(self.now)

    def running(self) -> list[Granted]:
        return [each for each in self.granted if each.lease.expires > self.now]

    @invariant()
    def leased_bytes_are_unchanged(self) -> None:
        for granted in self.running():
            assert self.pool.entries[granted.lease.entry.name] is granted.lease.entry
            assert self.content(granted.lease.entry.extents) == granted.content

    @invariant()
    def every_entry_has_its_bytes(self) -> None:
        for entry in self.pool.entries.values():
            assert self.content(entry.extents) == self.contents[entry.name]

    @invariant()
    def memory_is_within_its_bound_and_all_of_it_is_accounted(self) -> None:
        used = [entry.extents for entry in self.pool.entries.values()] + [each for _, each in self.incoming]
        pages = [
            page
            for extents in used
            for offset, length in extents
            for page in range(offset // PAGE, -(-(offset + length) // PAGE))
        ]
        assert len(pages) == len(set(pages))
        assert all(0 <= page < PAGES for page in pages)
        assert self.pool.space.free_bytes == (PAGES - len(pages)) * PAGE
        idle = [entry for entry in self.pool.entries.values() if not entry.holders]
        assert self.pool.evictable_bytes == sum(self.pool.space.footprint(each.size_bytes) for each in idle)
        kept = [each for each in idle if each.disk_is_done]
        assert self.pool.lossless_evictable_bytes == sum(
            self.pool.space.footprint(each.size_bytes) for each in kept
        )


TestPoolAgainstDictionaries = PoolAgainstDictionaries.TestCase
TestPoolAgainstDictionaries.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
