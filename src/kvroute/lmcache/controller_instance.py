"""One LMCache instance in an engine: its ranks, their locations, and the one holder in the index for it.

A chunk is of use to a prompt when every rank has its part of it, in whatever location: LMCache asks all of
its ranks and takes what all of them have. So the holder has what all registered ranks have. Both locations
that LMCache reports, `LocalCPUBackend` and `LocalDiskBackend`, are the instance's own and count as L1; what
lies in a remote store is never reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import Enum, auto
from itertools import chain, islice
from typing import Final

from kvroute.blocks.chunks import ChunkSpace
from kvroute.blocks.keys import Tier
from kvroute.index.chunk_index import ChunkHolder, ChunkIndex
from kvroute.wire.lmcache_controller import ChunkHash

_PATIENCE: Final = 6
"""Questions of a frozen worker for a synchronisation that lacks batches, before it may go on without. LMCache
asks every 5 s and sends missing batches again three times."""


class FullSync:
    """Mutable. Whole when every batch and the end have come, in whatever order and however often."""

    __slots__ = ("_batch_count", "_keys", "_patience", "_seen", "_total", "sync_id", "touched")

    def __init__(self, sync_id: str, batch_count: int, now: float) -> None:
        self.sync_id = sync_id
        self.touched = now
        """When something of it last arrived."""
        self._batch_count = batch_count
        self._seen: set[int] = set()
        self._keys: set[ChunkHash] = set()
        self._total: int | None = None
        self._patience = _PATIENCE

    def batch(self, number: int, keys: Collection[ChunkHash], now: float) -> None:
        self.touched = now
        self._seen.add(number)
        self._keys.update(keys)

    def end(self, total_keys: int, now: float) -> None:
        self.touched = now
        self._total = total_keys

    def missing(self) -> list[int]:
        """Numbers of batches that have not come, the first thousand of them."""
        absent = (number for number in range(self._batch_count) if number not in self._seen)
        return list(islice(absent, 1000))

    @property
    def is_over(self) -> bool:
        return self._total is not None and len(self._seen) >= self._batch_count and not self.missing()

    @property
    def agrees(self) -> bool:
        """As many chunks came as the worker says it has sent."""
        return self._total == len(self._keys)

    def ask(self) -> bool:
        """The worker asks whether it may go on; False when it has waited in vain for long enough."""
        self._patience -= 1
        return self._patience > 0


_KEPT_SEQUENCES: Final = 64


class Step(Enum):
    """What to do with a batch of operations."""

    APPLY = auto()
    SKIP = auto()
    """It was applied before, or a process that is gone sent it."""
    RESTART = auto()
    """The location begins anew: forget, then apply."""
    GAP = auto()
    """Operations are missing: forget, then apply."""
    FOREIGN = auto()
    """It cannot be placed: forget, and do not apply."""


class OperationSequence:
    """The numbers of one location's operations. Mutable: `judge` notes what is applied.

    `at_start`: the next batch is known to be the first one. `previous` is where the process before would
    have gone on: what it left in the sockets may arrive late.
    """

    __slots__ = ("_previous", "_recent", "expected")

    def __init__(self, *, at_start: bool, previous: int | None = None) -> None:
        self.expected = 0 if at_start else None
        """Number of the next operation; None: any."""
        self._previous = previous
        self._recent: dict[int, tuple[int, ChunkHash, ChunkHash]] = {}

    def judge(self, first: int, count: int, first_key: ChunkHash, last_key: ChunkHash) -> Step:
        """What to do with operations `first` to `first + count - 1`."""
        expected, mark = self.expected, (count, first_key, last_key)
        step = Step.APPLY
        if expected is not None and first != expected:
            if first == self._previous:
                self._previous = first + count
                return Step.SKIP
            if first > expected:
                step = Step.GAP
            elif self._recent.get(first) == mark:
                return Step.SKIP
            elif first == 0:
                step = Step.RESTART
                self._recent.clear()
            else:
                self.expected = None
                return Step.FOREIGN
        self.expected = first + count
        recent = self._recent
        recent[first] = mark
        if len(recent) > _KEPT_SEQUENCES:
            # The first batch stays: a copy of it must not look like a new beginning.
            oldest = iter(recent)
            del recent[next(oldest) or next(oldest)]
        return step


class Location:
    """Mutable throughout; changed by its controller. `keys` is what it is believed to hold."""

    __slots__ = ("keys", "name", "sequence", "sync", "whole")

    def __init__(self, name: str, *, at_start: bool, previous: int | None = None) -> None:
        self.name = name
        self.keys: set[ChunkHash] = set()
        self.sequence = OperationSequence(at_start=at_start, previous=previous)
        self.sync: FullSync | None = None
        self.whole = at_start
        """Nothing is known to be missing. False: it holds what `keys` says, and perhaps more."""


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


class ControlledInstance:
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


_GRACE_S: Final = 2.0
"""Time for a stored chunk to be reported; LMCache takes about 10 ms."""
_KEPT: Final = 256


class HashAgreementState(Enum):
    UNKNOWN = auto()
    AGREES = auto()
    """A chunk of a prompt of ours was reported under the hash that we compute."""
    DIFFERS = auto()
    """Prompts of ours were served, chunks were reported, and none was one of theirs."""


class HashAgreement:
    """Mutable. Once it agrees, nothing more is looked at."""

    __slots__ = ("_needed", "_reported", "_waiting", "state")

    def __init__(self, needed_prompts: int) -> None:
        self.state = HashAgreementState.UNKNOWN
        self._needed = needed_prompts
        self._waiting: dict[ChunkHash, float] = {}
        """Chunks of prompts that were not reported so far, with when they were sent."""
        self._reported = 0
        """Chunks that were reported since the first of them."""

    def sent(self, chunk: ChunkHash, *, held: bool, now: float) -> bool:
        """A prompt was served by the instance; True if that has changed the state."""
        if held:
            return self._agree()
        if len(self._waiting) < _KEPT:
            self._waiting.setdefault(chunk, now)
        overdue = sum(now - when >= _GRACE_S for when in self._waiting.values())
        if self.state is HashAgreementState.UNKNOWN and min(overdue, self._reported) >= self._needed:
            self.state = HashAgreementState.DIFFERS
            return True
        return False

    def reported(self, keys: Collection[ChunkHash]) -> bool:
        """The instance has stored these; True if that has changed the state."""
        if self.state is HashAgreementState.AGREES or not self._waiting:
            return False
        if self._waiting.keys().isdisjoint(keys):
            self._reported += len(keys)
            return False
        return self._agree()

    def _agree(self) -> bool:
        changed = self.state is not HashAgreementState.AGREES
        self.state = HashAgreementState.AGREES
        self._waiting.clear()
        return changed
