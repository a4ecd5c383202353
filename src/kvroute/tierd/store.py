"""The daemon's levels as one store: memory, what is on its way into it, the disk below and the peers beside.

What is answered from memory is answered at once; the rest are coroutines.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvroute.clock import Clock
from kvroute.tierd.counts import Counts
from kvroute.tierd.disk import DiskLevel
from kvroute.tierd.options import TierdOptions
from kvroute.tierd.peers import Peers
from kvroute.tierd.pool import Entry, EntryLease, Extents, MemoryPool, ObjectName, joined
from kvroute.tierd.segment import Guard

log = logging.getLogger("kvroute.tierd")


_Room = TypeVar("_Room")


class Refusal(enum.Enum):
    """Why an object is not taken."""

    EXISTS = "exists"
    TOO_LARGE = "too_large"
    NO_ROOM = "no_room"


class Arrival:
    """An object on its way into memory: nobody else uses its extents, and nobody can lease it yet.

    Mutable: `extents` grow to `size_bytes`. Ends by `Store.admit` or `Store.give_up`, which resolve `done`.
    """

    __slots__ = ("done", "extents", "name", "reserved_bytes", "size_bytes")

    def __init__(
        self, name: ObjectName, size_bytes: int, extents: Extents, done: asyncio.Future[None]
    ) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.extents = extents
        self.reserved_bytes = sum(length for _, length in extents)
        self.done = done


class Store:
    """Mutable, touched from one event loop only. `run` does the background work; `close` ends searches."""

    def __init__(
        self,
        options: TierdOptions,
        pool: MemoryPool,
        memory: memoryview,
        guard: Guard,
        counts: Counts,
        clock: Clock,
        *,
        peers: Peers | None = None,
    ) -> None:
        self.pool = pool
        self.counts = counts
        self.peers = peers
        self.disk: DiskLevel | None = None
        if options.disk_dir is not None:
            size_bytes = int(options.disk_gb * (1 << 30))
            self.disk = DiskLevel(options.disk_dir, size_bytes, counts, self._forgotten_below)
        self._options = options
        self._memory = memory
        self._guard = guard
        self._clock = clock
        self._step_bytes = options.put_step_bytes
        self._spare_bytes = int(options.spare_share * pool.space.size_bytes)
        self._arriving: dict[ObjectName, Arrival] = {}
        self._awaited: dict[ObjectName, list[asyncio.Future[None]]] = {}
        self._searches: dict[ObjectName, asyncio.Task[None]] = {}
        self._short_of_room = asyncio.Event()
        self._room_made = asyncio.Event()
        self._waiting_for_room = 0
        self._writing_bytes = 0

    @property
    def arriving(self) -> int:
        """Objects that are being received, read or fetched."""
        return len(self._arriving)

    # --- new objects ------------------------------------------------------------------------------------

    def begin(
        self, name: ObjectName, size_bytes: int, *, may_lose: bool = False, in_steps: bool = False
    ) -> Arrival | Refusal:
        """Room for a new object. NO_ROOM may change: see `wait_for_room`.

        With `in_steps` only the first part is reserved, and `grow` reserves the next ones: a sender that
        stops holds little memory.
        """
        if name in self.pool.entries or name in self._arriving:
            return Refusal.EXISTS
        if self.pool.space.footprint(size_bytes) > self.pool.space.size_bytes:
            return Refusal.TOO_LARGE
        first_bytes = min(size_bytes, self._step_bytes) if in_steps else size_bytes
        extents = None
        if self.pool.could_allocate(size_bytes, self._clock.now()):
            extents = self._allocate(first_bytes, may_lose)
        if extents is None:
            return Refusal.NO_ROOM
        arrival = Arrival(name, size_bytes, extents, asyncio.get_running_loop().create_future())
        self._arriving[name] = arrival
        return arrival

    def grow(self, arrival: Arrival, *, may_lose: bool = False) -> Extents | None:
        """Room for the next part of an object, as much as it has already; None when there is none."""
        left = arrival.size_bytes - arrival.reserved_bytes
        last = arrival.extents[-1]
        step = min(left, max(self._step_bytes, arrival.reserved_bytes))
        extents = self._allocate(step, may_lose, after=last.offset + last.length)
        if extents is not None:
            arrival.extents = joined(arrival.extents, extents)
            arrival.reserved_bytes += step
        return extents

    def _allocate(self, size_bytes: int, may_lose: bool, *, after: int | None = None) -> Extents | None:
        is_allowed = may_lose or self.disk is None
        extents = self.pool.allocate(size_bytes, self._clock.now(), may_lose=is_allowed, after=after)
        if self._is_short:
            self._short_of_room.set()
        return extents

    @property
    def can_wait_for_room(self) -> bool:
        """Whether NO_ROOM may only mean that the disk is slow."""
        return self.disk is not None

    async def wait_for_room(
        self, name: ObjectName, size_bytes: int, *, in_steps: bool = False
    ) -> Arrival | Refusal:
        """`begin`, once the disk has what must make room, or without it when that takes too long."""

        def attempt(may_lose: bool) -> Arrival | Refusal | None:
            answer = self.begin(name, size_bytes, may_lose=may_lose, in_steps=in_steps)
            return None if answer is Refusal.NO_ROOM else answer

        return await self._once_there_is_room(size_bytes, attempt) or Refusal.NO_ROOM

    async def wait_to_grow(self, arrival: Arrival) -> Extents | None:
        """`grow`, once the disk has what must make room, or without it when that takes too long."""
        return await self._once_there_is_room(
            self._step_bytes, lambda may_lose: self.grow(arrival, may_lose=may_lose)
        )

    async def _once_there_is_room(
        self, size_bytes: int, attempt: Callable[[bool], _Room | None]
    ) -> _Room | None:
        """`attempt(may_lose)`, again and again until it succeeds, or cannot."""
        self._waiting_for_room += 1
        try:
            async with asyncio.timeout(self._options.room_timeout_s):
                while (answer := attempt(False)) is None:
                    if not self._can_make_room(size_bytes):
                        return None
                    self._room_made.clear()
                    self._short_of_room.set()
                    await self._room_made.wait()
                return answer
        except TimeoutError:
            return attempt(True)
        finally:
            self._waiting_for_room -= 1

    def _can_make_room(self, size_bytes: int) -> bool:
        """Whether the disk could; what is leased stays in any case."""
        space = self.pool.space
        ours = space.free_bytes + self.pool.evictable_bytes + self._writing_bytes
        return space.footprint(size_bytes) <= ours

    def pieces(self, extents: Extents) -> list[memoryview]:
        """The bytes of `extents`, in the order of the object."""
        return [self._memory[offset : offset + length] for offset, length in extents]

    def admit(self, arrival: Arrival, *, is_kept_below: bool = False) -> None:
        """The object is complete: it can be leased from now on."""
        del self._arriving[arrival.name]
        self.pool.admit(arrival.name, arrival.extents, is_kept_below=is_kept_below)
        self._end(arrival)

    def give_up(self, arrival: Arrival) -> None:
        """The object did not come; its room is free again."""
        del self._arriving[arrival.name]
        self.pool.free(arrival.extents)
        self._end(arrival)

    def _end(self, arrival: Arrival) -> None:
        if not arrival.done.done():
            arrival.done.set_result(None)
        for awaited in self._awaited.get(arrival.name, ()):
            if not awaited.done():
                awaited.set_result(None)

    # --- leases -----------------------------------------------------------------------------------------

    def lease(self, name: ObjectName, ttl_s: float) -> EntryLease | None:
        """Lease what is in memory."""
        lease = self.pool.lease(name, ttl_s, self._clock.now())
        if lease is not None:
            self._guard.hold_until(lease.expires)
        return lease

    def release(self, lease_id: str) -> bool:
        """End a lease; False if it has ended already."""
        was_held = self.pool.release(lease_id)
        if not self.pool.leases:
            self._guard.lift()
        return was_held

    def may_come(self, name: ObjectName) -> bool:
        """Whether it makes sense to wait for an object that is not in memory."""
        return (
            name in self._arriving
            or (self.disk is not None and name in self.disk)
            or (self.peers is not None and bool(self.peers.urls))
            or self._options.holds_misses
        )

    async def await_lease(self, name: ObjectName, ttl_s: float, wait_s: float) -> EntryLease | None:
        """Lease it once it is in memory, within `wait_s`: it may be arriving, on the disk or with a peer."""
        is_searched = False
        try:
            async with asyncio.timeout(wait_s):
                while (lease := self.lease(name, ttl_s)) is None:
                    arrival = self._arriving.get(name)
                    if arrival is not None:
                        await asyncio.wait([arrival.done])
                    elif not is_searched:
                        is_searched = True
                        await asyncio.wait([self._search(name)])
                    elif self._options.holds_misses:
                        await self._announcement(name)
                    else:
                        break
        except TimeoutError:
            return None
        return lease

    async def _announcement(self, name: ObjectName) -> None:
        """Return when an object of that name has come."""
        came = asyncio.get_running_loop().create_future()
        waiting = self._awaited.setdefault(name, [])
        waiting.append(came)
        try:
            await came
        finally:
            waiting.remove(came)
            if not waiting:
                self._awaited.pop(name, None)

    def _search(self, name: ObjectName) -> asyncio.Task[None]:
        search = self._searches.get(name)
        if search is None:
            search = self._searches[name] = asyncio.create_task(self._bring(name))
            search.add_done_callback(lambda _: self._searches.pop(name, None))
        return search

    async def _bring(self, name: ObjectName) -> None:
        """Into memory from the disk, or else from a peer."""
        if self.disk is not None and name in self.disk:
            arrival = await self._room(name, self.disk.size_of(name))
            if not isinstance(arrival, Arrival):
                return
            is_here = False
            try:
                is_here = await self.disk.read(name, self.pieces(arrival.extents))
            finally:
                # It may have been evicted there while it was read.
                self._arrived(arrival, is_here, is_kept_below=name in self.disk)
            if is_here:
                return
        found = await self.peers.find(name) if self.peers is not None else None
        if found is None or self.peers is None:
            return
        arrival = await self._room(name, found.size_bytes)
        if not isinstance(arrival, Arrival):
            if arrival is not Refusal.EXISTS:
                self.counts.peer_fetches["no_room"] += 1
            return
        is_here = False
        try:
            is_here = await self.peers.fetch(found, self.pieces(arrival.extents))
        finally:
            self._arrived(arrival, is_here)
        self.counts.peer_fetches["fetched" if is_here else "failed"] += 1

    def _arrived(self, arrival: Arrival, is_here: bool, *, is_kept_below: bool = False) -> None:
        if is_here:
            self.admit(arrival, is_kept_below=is_kept_below)
        else:
            self.give_up(arrival)

    async def _room(self, name: ObjectName, size_bytes: int) -> Arrival | Refusal:
        answer = self.begin(name, size_bytes)
        if answer is Refusal.NO_ROOM and self.can_wait_for_room:
            answer = await self.wait_for_room(name, size_bytes)
        return answer

    # --- for peers --------------------------------------------------------------------------------------

    def size_of(self, name: ObjectName) -> int | None:
        """Bytes of what memory or the disk has; None when neither has it."""
        entry = self.pool.entries.get(name)
        if entry is not None:
            return entry.size_bytes
        return self.disk.size_of(name) if self.disk is not None and name in self.disk else None

    def local(self, name: ObjectName) -> Entry | None:
        """What is in memory, pinned: `pool.unpin` it."""
        entry = self.pool.entries.get(name)
        if entry is not None:
            self.pool.pin(entry)
        return entry

    async def local_or_disk(self, name: ObjectName) -> Entry | None:
        """The same, after reading it from the disk."""
        entry = self.local(name)
        if entry is None and self.disk is not None and name in self.disk:
            await asyncio.wait([self._search(name)])
            entry = self.local(name)
        return entry

    # --- in the background ------------------------------------------------------------------------------

    @property
    def _is_short(self) -> bool:
        """Whether the disk should have more of what memory holds."""
        if self.disk is None:
            return False
        spare_bytes = self.pool.space.free_bytes + self.pool.expendable_bytes
        return self._waiting_for_room > 0 or spare_bytes < self._spare_bytes

    async def run(self) -> None:
        """Write to the disk what will be evicted next, when memory is short; forever."""
        while self.disk is not None:
            await self._short_of_room.wait()
            self._short_of_room.clear()
            while self._is_short and (entry := self.pool.oldest_unkept()) is not None:
                await self._write(self.disk, entry)
                self._room_made.set()
            self._room_made.set()

    async def _write(self, disk: DiskLevel, entry: Entry) -> None:
        self.pool.pin(entry)
        self._writing_bytes = self.pool.space.footprint(entry.size_bytes)
        try:
            is_kept = entry.name in disk or await disk.write(entry.name, self.pieces(entry.extents))
            # One that the disk refuses counts as kept, too: it could only block the others.
            self.pool.keep_below(entry, True)
            entry.is_refused_below = not is_kept
        finally:
            self._writing_bytes = 0
            self.pool.unpin(entry, was_used=False)

    def _forgotten_below(self, name: ObjectName) -> None:
        entry = self.pool.entries.get(name)
        if entry is not None:
            self.pool.keep_below(entry, False)

    def tick(self) -> None:
        """Once a second: leases end also when nobody asks for anything."""
        self.pool.expire(self._clock.now())
        if not self.pool.leases:
            self._guard.lift()

    async def close(self) -> None:
        """End the searches. Entries and leases stay as they are."""
        searches: Sequence[asyncio.Task[None]] = list(self._searches.values())
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        if self.disk is not None:
            await self.disk.close()
