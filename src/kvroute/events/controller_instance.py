"""One LMCache instance in an engine: its ranks, their locations, and the one holder in the index for it.

A chunk is of use to a prompt when every rank has its part of it, in whatever location: LMCache asks all of
its ranks and takes what all of them have. So the holder has what all registered ranks have. Both locations
that LMCache reports, `LocalCPUBackend` and `LocalDiskBackend`, are the instance's own and count as L1; what
lies in a remote store is never reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final

from kvroute.blocks.chunks import ChunkSpace
from kvroute.blocks.tokens import Tier
from kvroute.events.controller_location import Location
from kvroute.index.chunk_index import ChunkHolder, ChunkIndex
from kvroute.wire.lmcache_controller import ChunkHash

SYNCABLE: Final = "LocalCPUBackend"
"""The only location that LMCache's full synchronisation speaks of (0.4.3 to 0.5.6)."""


class Rank:
    """One worker process of an instance. Mutable; changed by its controller."""

    __slots__ = (
        "asked_at",
        "ip",
        "last_heartbeat",
        "locations",
        "number",
        "peer_url",
        "port",
        "previous",
        "registered_at",
        "unsynced",
    )

    def __init__(self, number: int, registered_at: float, *, unsynced: bool) -> None:
        self.number = number
        self.registered_at = registered_at
        self.ip = ""
        self.port = 0
        self.peer_url: str | None = None
        self.locations: dict[str, Location] = {}
        self.last_heartbeat: float | None = None
        self.asked_at: float | None = None
        """When it was last asked for a full synchronisation."""
        self.unsynced = unsynced
        """It held chunks before we listened."""
        self.previous: dict[str, int | None] = {}
        """Where the process before it would have gone on, by location."""

    def has(self, key: ChunkHash) -> bool:
        return any(key in location.keys for location in self.locations.values())

    @property
    def whole(self) -> bool:
        """Nothing that it holds is known to be missing."""
        return not self.unsynced and all(location.whole for location in self.locations.values())

    @property
    def needs_sync(self) -> bool:
        """A full synchronisation would help."""
        cpu = self.locations.get(SYNCABLE)
        return self.unsynced or (cpu is not None and not cpu.whole)

    @property
    def is_syncing(self) -> bool:
        return any(location.sync is not None for location in self.locations.values())


class Instance:
    """Mutable: its controller says what ranks store and drop; `holder` follows."""

    def __init__(self, name: str, index: ChunkIndex, space: ChunkSpace) -> None:
        self.name = name
        # Shared: it is the controller that knows when an instance is gone, not the slots that read it.
        self.holder = ChunkHolder(Tier.L1, shared=True)
        self.ranks: dict[int, Rank] = {}
        self._index = index
        self._space = space
        self._is_plain = False
        """One rank with one location: what it has is what the holder has."""
        self._rebuild: Iterator[ChunkHash] | None = None

    @property
    def chunks(self) -> int:
        """Chunks summed over ranks and locations."""
        return sum(len(place.keys) for rank in self.ranks.values() for place in rank.locations.values())

    @property
    def whole(self) -> bool:
        return all(rank.whole for rank in self.ranks.values())

    def admit(self, location: Location, keys: Sequence[ChunkHash]) -> None:
        """The location has these chunks. About 0.5 us each."""
        if not self._is_plain:
            keys = [key for key in keys if key not in location.keys]
        location.keys.update(keys)
        if not self._is_plain:
            keys = [key for key in keys if self._is_everywhere(key)]
        self._index.store(self.holder, self._space, keys)

    def evict(self, rank: Rank, location: Location, keys: Sequence[ChunkHash]) -> None:
        """The location no longer has these chunks. About 0.5 us each."""
        location.keys.difference_update(keys)
        if not self._is_plain:
            keys = [key for key in keys if not rank.has(key)]
        self._index.remove_all(self.holder, self._space, keys)

    def forget(self, location: Location) -> set[ChunkHash]:
        """The location has nothing; returns what it had, for whoever gives the memory back."""
        old, location.keys = location.keys, set()
        if old:
            self._begin_rebuild()
        return old

    def add(self, rank: Rank) -> None:
        """A rank in place of the one of its number, if there was one."""
        self.ranks[rank.number] = rank
        self._see_whether_plain()
        self._begin_rebuild()

    def remove(self, rank: Rank) -> None:
        del self.ranks[rank.number]
        self._see_whether_plain()
        self._begin_rebuild()

    def location(self, rank: Rank, name: str) -> Location:
        """The rank's location of that name."""
        location = rank.locations.get(name)
        if location is None:
            previous = rank.previous.get(name)
            location = rank.locations[name] = Location(name, at_start=not rank.unsynced, previous=previous)
            self._see_whether_plain()
        return location

    def _see_whether_plain(self) -> None:
        self._is_plain = [len(rank.locations) for rank in self.ranks.values()] == [1]

    def sweep(self, steps: int) -> bool:
        """Take up to `steps` chunks into the holder again after something was forgotten; True while there
        is more."""
        if self._rebuild is None:
            return False
        some = list(islice(self._rebuild, steps))
        if some:
            everywhere = [key for key in some if self._is_everywhere(key)]
            self._index.store(self.holder, self._space, everywhere)
            return True
        self._rebuild = None
        return False

    def _begin_rebuild(self) -> None:
        """The holder is emptied at once, and filled with what is left little by little."""
        self._index.clear(self.holder)
        rank = next(iter(self.ranks.values()), None)
        kept = [list(place.keys) for place in rank.locations.values() if place.keys] if rank else []
        self._rebuild = chain.from_iterable(kept) if kept else None

    def _is_everywhere(self, key: ChunkHash) -> bool:
        return all(rank.has(key) for rank in self.ranks.values())
