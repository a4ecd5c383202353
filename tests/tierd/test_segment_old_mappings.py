"""A client that maps the segment once, as LMCache's in-process connector does, under random restarts.

The property: after every end, loss or growth, an old mapping has the entry's own bytes at the offsets of its
lease, or does not reach them.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.clocks import ManualClock
from tests.tierd.conftest import crash, remove_files, unused_name

from kvroute.tierd.pool import PAGE_BYTES, EntryLease, MemoryPool, ObjectName
from kvroute.tierd.segment import GuardFile, SharedSegment, furthest_mapping, open_segment

FOLDER = Path("/dev/shm")
LEASE_S = 10.0


class Machine(ManualClock):
    """A daemon and its clients. Mutable: the time, which only sleeping moves, and everything else."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__(1000.0)
        self._stored = 0
        self._segment: SharedSegment | None = None
        self._guard: GuardFile | None = None
        self._pool = MemoryPool(0, "x")
        self._bytes: dict[ObjectName, bytes] = {}
        self._mappings: list[mmap.mmap] = []
        self._leased: list[tuple[EntryLease, int]] = []
        """And where the segment started."""

    async def sleep(self, seconds: float) -> None:
        self.check_leases()  # the daemon waits: what is leased may be read now
        self.time += seconds
        self.check_leases()

    async def start(self, pages: int) -> None:
        self._segment, self._guard = await open_segment(
            self._name, pages * PAGE_BYTES, self, longest_lease_s=LEASE_S
        )
        self._pool = MemoryPool(pages * PAGE_BYTES, "x")
        self._bytes = {}

    async def end(self, is_killed: bool) -> None:
        assert self._segment is not None
        assert self._guard is not None
        if is_killed:
            crash(self._segment, self._guard)
        else:
            self._segment.close([lease.entry.extents for lease in self._pool.leases.values()])
            self._guard.close()
        self._segment = self._guard = None

    def remove(self, names: tuple[str, ...]) -> None:
        for name in names:
            (FOLDER / name.format(self._name)).unlink(missing_ok=True)
        if self._segment is not None:
            self._segment.restore_names()

    def map(self) -> None:
        if (FOLDER / self._name).exists():
            with open(FOLDER / self._name, "r+b") as file:
                self._mappings.append(mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size))

    def put(self, pages: int) -> None:
        extents = self._pool.allocate(pages * PAGE_BYTES - 7, self.time)
        if extents is None:
            return
        assert self._segment is not None
        self._stored += 1
        name = ObjectName(b"b", str(self._stored).encode())
        data = self._stored.to_bytes(8, "big") * (pages * PAGE_BYTES // 8)
        position = 0
        for offset, length in extents:
            self._segment.memory[offset : offset + length] = data[position : position + length]
            position += length
        self._bytes[name] = data[:position]
        self._pool.commit(name, extents)

    def lease(self, number: int) -> None:
        names = sorted(self._pool.entries)
        if names:
            assert self._guard is not None
            assert self._segment is not None
            lease = self._pool.lease(names[number % len(names)], LEASE_S, self.time)
            assert lease is not None
            self._guard.record_lease_end(lease.expires)
            self._leased.append((lease, self._segment.start))
            self._data = {**getattr(self, "_data", {}), lease: self._bytes[lease.entry.name]}

    def check_leases(self) -> None:
        """Leases of dead daemons, too, until their time is over."""
        for lease, start in self._leased:
            if self.time < lease.expires:
                self._compare(lease.entry.extents, start, self._data[lease])

    def check(self) -> None:
        self.check_leases()
        if self._segment is not None:
            for name, entry in self._pool.entries.items():
                self._compare(entry.extents, self._segment.start, self._bytes[name])

    def _compare(self, extents: object, start: int, right: bytes) -> None:
        for mapping in self._mappings:
            pieces = [(start + offset, length) for offset, length in extents]  # type: ignore[attr-defined]
            if all(offset + length <= len(mapping) for offset, length in pieces):
                assert b"".join(mapping[offset : offset + length] for offset, length in pieces) == right

    def close(self) -> None:
        for mapping in self._mappings:
            mapping.close()


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Of the segments that the test made."""
    made: list[str] = []
    yield made
    for name in made:
        remove_files(name)


NAME, KEPT, GUARD = "{}", ".{}.kept", ".{}.guard"
STEPS = st.one_of(
    st.tuples(st.just("restart"), st.booleans(), st.integers(1, 12)),
    st.tuples(
        st.just("remove"),
        st.sampled_from([(NAME,), (KEPT,), (GUARD,), (NAME, KEPT), (NAME, KEPT, GUARD)]),
        st.booleans(),
    ),
    st.tuples(st.just("map")),
    st.tuples(st.just("put"), st.integers(1, 4)),
    st.tuples(st.just("lease"), st.integers(0, 99)),
)


@pytest.fixture(autouse=True)
def own_mappings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients are in this process; reading what others have mapped takes long on a busy machine."""

    def own(folder: Path, names: set[str], inode: int) -> int:
        return furthest_mapping(
            Path("/proc/self/maps").read_text().splitlines(), folder.stat().st_dev, names, inode
        )

    monkeypatch.setattr("kvroute.tierd.segment.furthest_foreign_mapping", own)


@pytest.mark.heavy
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 12), st.lists(STEPS, max_size=15))
def test_an_old_mapping_has_the_right_bytes_or_does_not_reach_them(
    names: list[str], pages: int, steps: list[tuple[object, ...]]
) -> None:
    names.append(unused_name())
    asyncio.run(carry_out(Machine(names[-1]), pages, steps))
    remove_files(names[-1])


async def carry_out(machine: Machine, pages: int, steps: list[tuple[object, ...]]) -> None:
    await machine.start(pages)
    try:
        machine.map()
        machine.put(1)
        for step in steps:
            match step:
                case ("restart", bool(is_killed), int(size)):
                    await machine.end(is_killed)
                    await machine.start(size)
                case ("remove", tuple(which), bool(is_dead)):
                    if is_dead:
                        await machine.end(True)
                        machine.remove(which)
                        await machine.start(pages)
                    else:
                        machine.remove(which)
                case ("map",):
                    machine.map()
                case ("put", int(size)):
                    machine.put(size)
                case ("lease", int(number)):
                    machine.lease(number)
            machine.check()
    finally:
        await machine.end(True)
        machine.close()
