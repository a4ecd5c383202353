"""The daemon's store: memory, the disk as the level below it, and peers; and the list of changed objects.

Calls that memory can answer are synchronous; calls that may use the disk or peers are coroutines. A gateway
follows with the list what a daemon holds.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeVar

import msgspec

from kvroute.clock import Clock
from kvroute.tierd.disk import DiskLevel
from kvroute.tierd.options import TierdOptions
from kvroute.tierd.peers import Peers
from kvroute.tierd.pool import Counts, Entry, EntryLease, Extents, MemoryPool, ObjectName, joined
from kvroute.tierd.segment import GuardFile

_KEPT: Final = 16_384
"""Changes in the list: about 2.5 MB. A client that is further behind gets all names again."""
LONGEST_WAIT_S: Final = 30.0


class Position(NamedTuple):
    """How far a client has read: the daemon's incarnation, and the number of changes."""

    incarnation: str
    number: int


class ChangeList:
    """The newest changes. Mutable, used from one event loop only; `note` is O(1)."""

    def __init__(self, *, kept: int = _KEPT) -> None:
        self.number = 0
        """Changes since the start."""
        self._names: deque[ObjectName] = deque(maxlen=kept)
        self._waiting: set[asyncio.Future[None]] = set()

    def note(self, name: ObjectName) -> None:
        """An object came or went."""
        self.number += 1
        self._names.append(name)
        if self._waiting:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiting.clear()

    def since(self, number: int) -> Iterable[ObjectName] | None:
        """The names of the changes after the first `number` ones; None if some are no longer in the list."""
        oldest = self.number - len(self._names)
        if not oldest <= number <= self.number:
            return None
        return islice(self._names, number - oldest, None)

    async def wait(self, number: int, timeout_s: float) -> None:
        """Return when there are other changes than the first `number` ones, or after `timeout_s`."""
        if number != self.number:
            return
        changed = asyncio.get_running_loop().create_future()
        self._waiting.add(changed)
        try:
            await asyncio.wait([changed], timeout=timeout_s)
        finally:
            self._waiting.discard(changed)


class _Changes(msgspec.Struct):
    """The answer. `stored` and `removed` are keys of one bucket; `whole`: `stored` are all its objects."""

    incarnation: str
    number: int
    whole: bool
    stored: list[str]
    removed: list[str]


def changes_body(
    changes: ChangeList,
    incarnation: str,
    bucket: bytes,
    after: Position,
    all_objects: Callable[[], Iterable[ObjectName]],
    holds: Callable[[ObjectName], bool],
) -> bytes:
    """The JSON of the changes of `bucket` after a position. `holds` asks for one object.

    O(names). Keys that are not UTF-8 are left out: LMCache's keys always are.
    """
    names = changes.since(after.number) if after.incarnation == incarnation else None
    answer = _Changes(incarnation, changes.number, names is None, [], [])
    for name in dict.fromkeys(all_objects() if names is None else names):
        if name.bucket == bucket and (key := _text(name.key)) is not None:
            (answer.stored if names is None or holds(name) else answer.removed).append(key)
    return msgspec.json.encode(answer)


def _text(key: bytes) -> str | None:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None


log = logging.getLogger("kvroute.tierd")


_Reserved = TypeVar("_Reserved")


class Refusal(enum.Enum):
    """Why an object is not accepted."""

    EXISTS = "exists"
    TOO_LARGE = "too_large"
    NO_ROOM = "no_room"


class IncomingObject:
    """An object that is being received into memory. Only its receiver uses its extents; it cannot be leased.

    Mutable: `extents` grow to `size_bytes`. `Store.commit` or `Store.discard` ends it and resolves `done`.
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
    """The objects of one daemon, at all levels. Mutable, used from one event loop only.

    `run` does the background work; `close` ends the searches.
    """

    def __init__(
        self,
        options: TierdOptions,
        pool: MemoryPool,
        memory: memoryview,
        guard: GuardFile,
        counts: Counts,
        clock: Clock,
        *,
        changes: ChangeList,
        peers: Peers | None = None,
    ) -> None:
        """`changes` is the list that `pool` writes to; the store adds the evictions of the disk."""
        self.pool = pool
        self.changes = changes
        self.counts = counts
        self.peers = peers
        self.disk: DiskLevel | None = None
        if options.disk_dir is not None:
            size_bytes = int(options.disk_gb * (1 << 30))
            self.disk = DiskLevel(options.disk_dir, size_bytes, counts, self._on_disk_eviction)
        self._options = options
        self._memory = memory
        self._guard = guard
        self._clock = clock
        self._step_bytes = options.put_step_bytes
        self._spare_bytes = int(options.spare_share * pool.space.size_bytes)
        self._incoming: dict[ObjectName, IncomingObject] = {}
        self._commit_waiters: dict[ObjectName, list[asyncio.Future[None]]] = {}
        self._searches: dict[ObjectName, asyncio.Task[None]] = {}
        self._memory_is_short = asyncio.Event()
        self._memory_freed = asyncio.Event()
        self._waiting_for_memory = 0
        self._writing_bytes = 0

    @property
    def incoming_count(self) -> int:
        """Number of objects that are being received, read from the disk or fetched from peers."""
        return len(self._incoming)

    # --- new objects ------------------------------------------------------------------------------------

    def reserve(
        self, name: ObjectName, size_bytes: int, *, may_lose: bool = False, in_steps: bool = False
    ) -> IncomingObject | Refusal:
        """Reserve memory for a new object. After NO_ROOM, `wait_to_reserve` may succeed.

        With `in_steps` only the first part is reserved, and `grow` reserves the next ones.
        """
        # In steps, a sender that stops holds little memory.
        if name in self.pool.entries or name in self._incoming:
            return Refusal.EXISTS
        if self.pool.space.footprint(size_bytes) > self.pool.space.size_bytes:
            return Refusal.TOO_LARGE
        first_bytes = min(size_bytes, self._step_bytes) if in_steps else size_bytes
        extents = None
        if self.pool.can_allocate(size_bytes, self._clock.now()):
            extents = self._allocate(first_bytes, may_lose)
        if extents is None:
            return Refusal.NO_ROOM
        incoming = IncomingObject(name, size_bytes, extents, asyncio.get_running_loop().create_future())
        self._incoming[name] = incoming
        return incoming

    def grow(self, incoming: IncomingObject, *, may_lose: bool = False) -> Extents | None:
        """Reserve the next part of an object, as large as all parts so far; None when memory is short."""
        remaining = incoming.size_bytes - incoming.reserved_bytes
        last = incoming.extents[-1]
        step = min(remaining, max(self._step_bytes, incoming.reserved_bytes))
        extents = self._allocate(step, may_lose, after=last.offset + last.length)
        if extents is not None:
            incoming.extents = joined(incoming.extents, extents)
            incoming.reserved_bytes += step
        return extents

    def _allocate(self, size_bytes: int, may_lose: bool, *, after: int | None = None) -> Extents | None:
        is_allowed = may_lose or self.disk is None
        extents = self.pool.allocate(size_bytes, self._clock.now(), may_lose=is_allowed, after=after)
        if self._needs_disk_writes:
            self._memory_is_short.set()
        return extents

    @property
    def can_wait_for_memory(self) -> bool:
        """Whether memory may become free after NO_ROOM, because the disk writes entries."""
        return self.disk is not None

    async def wait_to_reserve(
        self, name: ObjectName, size_bytes: int, *, in_steps: bool = False
    ) -> IncomingObject | Refusal:
        """`reserve` after the disk has written the entries to evict, or after `room_timeout_s` without
        that."""

        def attempt(may_lose: bool) -> IncomingObject | Refusal | None:
            answer = self.reserve(name, size_bytes, may_lose=may_lose, in_steps=in_steps)
            return None if answer is Refusal.NO_ROOM else answer

        return await self._retry_until_reserved(size_bytes, attempt) or Refusal.NO_ROOM

    async def wait_to_grow(self, incoming: IncomingObject) -> Extents | None:
        """`grow` after the disk has written the entries to evict, or after `room_timeout_s` without that."""
        return await self._retry_until_reserved(
            self._step_bytes, lambda may_lose: self.grow(incoming, may_lose=may_lose)
        )

    async def _retry_until_reserved(
        self, size_bytes: int, attempt: Callable[[bool], _Reserved | None]
    ) -> _Reserved | None:
        """Call `attempt(may_lose=False)` each time memory becomes free, until it succeeds or cannot succeed.

        After `room_timeout_s`, call it once with `may_lose=True`.
        """
        self._waiting_for_memory += 1
        try:
            async with asyncio.timeout(self._options.room_timeout_s):
                while (answer := attempt(False)) is None:
                    if not self._can_free_enough(size_bytes):
                        return None
                    self._memory_freed.clear()
                    self._memory_is_short.set()
                    await self._memory_freed.wait()
                return answer
        except TimeoutError:
            return attempt(True)
        finally:
            self._waiting_for_memory -= 1

    def _can_free_enough(self, size_bytes: int) -> bool:
        """Whether `size_bytes` would fit once the disk has written every entry that is not leased."""
        space = self.pool.space
        ours = space.free_bytes + self.pool.evictable_bytes + self._writing_bytes
        return space.footprint(size_bytes) <= ours

    def pieces(self, extents: Extents) -> list[memoryview]:
        """The memory of `extents`, in the order of the object's bytes."""
        return [self._memory[offset : offset + length] for offset, length in extents]

    def commit(self, incoming: IncomingObject, *, disk_is_done: bool = False) -> None:
        """The object is complete: from now on it can be leased."""
        del self._incoming[incoming.name]
        self.pool.commit(incoming.name, incoming.extents, disk_is_done=disk_is_done)
        self._end(incoming)

    def discard(self, incoming: IncomingObject) -> None:
        """The object did not arrive completely: free its memory."""
        del self._incoming[incoming.name]
        self.pool.free(incoming.extents)
        self._end(incoming)

    def _end(self, incoming: IncomingObject) -> None:
        if not incoming.done.done():
            incoming.done.set_result(None)
        for awaited in self._commit_waiters.get(incoming.name, ()):
            if not awaited.done():
                awaited.set_result(None)

    # --- leases -----------------------------------------------------------------------------------------

    def lease(self, name: ObjectName, ttl_s: float) -> EntryLease | None:
        """Lease an object in memory for `ttl_s` seconds; None if it is not in memory."""
        lease = self.pool.lease(name, ttl_s, self._clock.now())
        if lease is not None:
            self._guard.record_lease_end(lease.expires)
        return lease

    def release(self, lease_id: str) -> bool:
        """End a lease. Returns False if it has ended already."""
        was_held = self.pool.release(lease_id)
        if not self.pool.leases:
            self._guard.clear_lease_end()
        return was_held

    def is_worth_waiting_for(self, name: ObjectName) -> bool:
        """Whether an object that is not in memory may come into memory."""
        return (
            name in self._incoming
            or (self.disk is not None and name in self.disk)
            or (self.peers is not None and bool(self.peers.urls))
            or self._options.holds_misses
        )

    async def wait_for_lease(self, name: ObjectName, ttl_s: float, wait_s: float) -> EntryLease | None:
        """Wait up to `wait_s` seconds for the object, then lease it; None if it does not come in time.

        The object may be incoming, on the disk or with a peer.
        """
        is_searched = False
        try:
            async with asyncio.timeout(wait_s):
                while (lease := self.lease(name, ttl_s)) is None:
                    incoming = self._incoming.get(name)
                    if incoming is not None:
                        await asyncio.wait([incoming.done])
                    elif not is_searched:
                        is_searched = True
                        await asyncio.wait([self._search(name)])
                    elif self._options.holds_misses:
                        await self._wait_for_commit(name)
                    else:
                        break
        except TimeoutError:
            return None
        return lease

    async def _wait_for_commit(self, name: ObjectName) -> None:
        """Return when an object of that name is committed or discarded."""
        committed = asyncio.get_running_loop().create_future()
        waiting = self._commit_waiters.setdefault(name, [])
        waiting.append(committed)
        try:
            await committed
        finally:
            waiting.remove(committed)
            if not waiting:
                self._commit_waiters.pop(name, None)

    def _search(self, name: ObjectName) -> asyncio.Task[None]:
        search = self._searches.get(name)
        if search is None:
            search = self._searches[name] = asyncio.create_task(self._load(name))
            search.add_done_callback(lambda _: self._searches.pop(name, None))
        return search

    async def _load(self, name: ObjectName) -> None:
        """Load the object into memory, from the disk or else from a peer."""
        if self.disk is not None and name in self.disk:
            incoming = await self._reserve_or_wait(name, self.disk.size_of(name))
            if not isinstance(incoming, IncomingObject):
                return
            is_complete = False
            try:
                is_complete = await self.disk.read(name, self.pieces(incoming.extents))
            finally:
                # The disk may have evicted the object while it was read.
                self._finish(incoming, is_complete, disk_is_done=name in self.disk)
            if is_complete:
                return
        found_object = await self.peers.find(name) if self.peers is not None else None
        if found_object is None or self.peers is None:
            return
        incoming = await self._reserve_or_wait(name, found_object.size_bytes)
        if not isinstance(incoming, IncomingObject):
            if incoming is not Refusal.EXISTS:
                self.counts.peer_fetches["no_room"] += 1
            return
        is_complete = False
        try:
            is_complete = await self.peers.fetch(found_object, self.pieces(incoming.extents))
        finally:
            self._finish(incoming, is_complete)
        self.counts.peer_fetches["fetched" if is_complete else "failed"] += 1

    def _finish(self, incoming: IncomingObject, is_complete: bool, *, disk_is_done: bool = False) -> None:
        if is_complete:
            self.commit(incoming, disk_is_done=disk_is_done)
        else:
            self.discard(incoming)

    async def _reserve_or_wait(self, name: ObjectName, size_bytes: int) -> IncomingObject | Refusal:
        answer = self.reserve(name, size_bytes)
        if answer is Refusal.NO_ROOM and self.can_wait_for_memory:
            answer = await self.wait_to_reserve(name, size_bytes)
        return answer

    # --- for gateways -----------------------------------------------------------------------------------

    def holds(self, name: ObjectName) -> bool:
        """Whether memory or the disk has the object."""
        return name in self.pool.entries or (self.disk is not None and name in self.disk)

    def names(self) -> Iterator[ObjectName]:
        """The objects in memory and on the disk, some of them twice."""
        yield from self.pool.entries
        if self.disk is not None:
            yield from self.disk.names()

    # --- for peers --------------------------------------------------------------------------------------

    def size_of(self, name: ObjectName) -> int | None:
        """The object's size in bytes if memory or the disk has it, else None."""
        entry = self.pool.entries.get(name)
        if entry is not None:
            return entry.size_bytes
        return self.disk.size_of(name) if self.disk is not None and name in self.disk else None

    def pin_in_memory(self, name: ObjectName) -> Entry | None:
        """Pin the object if it is in memory. The caller must `pool.unpin` it."""
        entry = self.pool.entries.get(name)
        if entry is not None:
            self.pool.pin(entry)
        return entry

    async def pin_or_read(self, name: ObjectName) -> Entry | None:
        """Pin the object, after reading it from the disk if necessary. The caller must `pool.unpin` it."""
        entry = self.pin_in_memory(name)
        if entry is None and self.disk is not None and name in self.disk:
            await asyncio.wait([self._search(name)])
            entry = self.pin_in_memory(name)
        return entry

    # --- in the background ------------------------------------------------------------------------------

    @property
    def _needs_disk_writes(self) -> bool:
        """Whether more entries should be written to the disk."""
        if self.disk is None:
            return False
        spare_bytes = self.pool.space.free_bytes + self.pool.lossless_evictable_bytes
        return self._waiting_for_memory > 0 or spare_bytes < self._spare_bytes

    async def run(self) -> None:
        """When memory is short, write the entries to the disk that will be evicted next. Runs until
        cancelled."""
        while self.disk is not None:
            await self._memory_is_short.wait()
            self._memory_is_short.clear()
            while self._needs_disk_writes and (entry := self.pool.next_to_write()) is not None:
                await self._write(self.disk, entry)
                self._memory_freed.set()
            self._memory_freed.set()

    async def _write(self, disk: DiskLevel, entry: Entry) -> None:
        self.pool.pin(entry)
        self._writing_bytes = self.pool.space.footprint(entry.size_bytes)
        try:
            is_kept = entry.name in disk or await disk.write(entry.name, self.pieces(entry.extents))
            # An entry that the disk refuses must not block the others.
            self.pool.set_disk_is_done(entry, True)
            entry.disk_refused = not is_kept
        finally:
            self._writing_bytes = 0
            self.pool.unpin(entry, was_used=False)

    def _on_disk_eviction(self, name: ObjectName) -> None:
        entry = self.pool.entries.get(name)
        if entry is not None:
            self.pool.set_disk_is_done(entry, False)
        self.changes.note(name)

    def expire_leases(self) -> None:
        """End the leases that have expired. Called once a second, because requests may be rare."""
        self.pool.expire(self._clock.now())
        if not self.pool.leases:
            self._guard.clear_lease_end()

    async def close(self) -> None:
        """End the searches. Entries and leases stay as they are."""
        searches: Sequence[asyncio.Task[None]] = list(self._searches.values())
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        if self.disk is not None:
            await self.disk.close()
