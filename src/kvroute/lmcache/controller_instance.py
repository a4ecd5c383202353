"""One LMCache instance inside an engine: its ranks, their locations, and the instance's holder in the index.

LMCache loads a chunk only if every rank has its part, in any location. So the holder has the chunks that all
registered ranks have. LMCache reports two locations, `LocalCPUBackend` and `LocalDiskBackend`. Both belong to
the instance and count as L1. LMCache does not report chunks in a remote store.
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

_MAX_STATUS_REQUESTS: Final = 6
"""Status requests of a frozen worker after which an incomplete synchronisation fails, so that the worker can
continue. LMCache asks every 5 s and sends missing batches again three times."""


class FullSync:
    """A full synchronisation of one location: the batches that have arrived so far.

    Batches and end may arrive in any order and more than once. Mutable: changed by `FullSyncs`.
    """

    __slots__ = (
        "_arrived",
        "_batch_count",
        "_keys",
        "_status_requests_left",
        "_total",
        "last_progress",
        "sync_id",
    )

    def __init__(self, sync_id: str, batch_count: int, now: float) -> None:
        self.sync_id = sync_id
        self.last_progress = now
        """When the last batch or the end arrived, in seconds of the controller's clock."""
        self._batch_count = batch_count
        self._arrived: set[int] = set()
        self._keys: set[ChunkHash] = set()
        self._total: int | None = None
        self._status_requests_left = _MAX_STATUS_REQUESTS

    def batch(self, number: int, keys: Collection[ChunkHash], now: float) -> None:
        self.last_progress = now
        self._arrived.add(number)
        self._keys.update(keys)

    def end(self, total_keys: int, now: float) -> None:
        self.last_progress = now
        self._total = total_keys

    def missing(self) -> list[int]:
        """Numbers of the batches that have not arrived, the first 1,000 at most."""
        absent = (number for number in range(self._batch_count) if number not in self._arrived)
        return list(islice(absent, 1000))

    @property
    def is_finished(self) -> bool:
        """Every batch and the end have arrived."""
        return self._total is not None and len(self._arrived) >= self._batch_count and not self.missing()

    @property
    def total_matches(self) -> bool:
        """The number of received chunks equals the worker's total."""
        return self._total == len(self._keys)

    def may_wait(self) -> bool:
        """Count a status request of the frozen worker. False if the worker must not wait any longer."""
        self._status_requests_left -= 1
        return self._status_requests_left > 0


_KEPT_BATCHES: Final = 64
"""Applied batches of a location that are kept to recognise copies."""


class BatchAction(Enum):
    """What to do with a batch of operations."""

    APPLY = auto()
    SKIP = auto()
    """The batch was applied before, or an earlier process of the worker sent it."""
    RESTART = auto()
    """The numbers start at 0 again: drop the location's chunks, then apply."""
    GAP = auto()
    """Operations were lost: drop the location's chunks, then apply."""
    UNPLACED = auto()
    """The batch's place in the sequence is unclear: drop the location's chunks, and do not apply."""


class OperationSequence:
    """The sequence numbers of one location's operations. Mutable: `check` records applied batches.

    `at_start`: the next batch must be the first one. `previous`: the next number of the worker's earlier
    process, whose last messages may still arrive.
    """

    __slots__ = ("_previous", "_recent", "expected")

    def __init__(self, *, at_start: bool, previous: int | None = None) -> None:
        self.expected = 0 if at_start else None
        """Number of the next operation; None: any."""
        self._previous = previous
        self._recent: dict[int, tuple[int, ChunkHash, ChunkHash]] = {}

    def check(self, first_seq: int, count: int, first_key: ChunkHash, last_key: ChunkHash) -> BatchAction:
        """Return the action for `count` operations from `first_seq` on. The keys identify copies."""
        expected, digest = self.expected, (count, first_key, last_key)
        action = BatchAction.APPLY
        if expected is not None and first_seq != expected:
            if first_seq == self._previous:
                self._previous = first_seq + count
                return BatchAction.SKIP
            if first_seq > expected:
                action = BatchAction.GAP
            elif self._recent.get(first_seq) == digest:
                return BatchAction.SKIP
            elif first_seq == 0:
                action = BatchAction.RESTART
                self._recent.clear()
            else:
                self.expected = None
                return BatchAction.UNPLACED
        self.expected = first_seq + count
        recent = self._recent
        recent[first_seq] = digest
        if len(recent) > _KEPT_BATCHES:
            # Batch 0 stays, because a late copy of it must not be taken for a restart.
            oldest = iter(recent)
            del recent[next(oldest) or next(oldest)]
        return action


class Location:
    """A rank's store of chunks, such as `LocalCPUBackend`. Mutable: changed by the controller.

    `keys` are the chunks that the location is known to hold. The location may hold more chunks while
    `is_complete` is False.
    """

    __slots__ = ("is_complete", "keys", "name", "sequence", "sync")

    def __init__(self, name: str, *, at_start: bool, previous: int | None = None) -> None:
        self.name = name
        self.keys: set[ChunkHash] = set()
        self.sequence = OperationSequence(at_start=at_start, previous=previous)
        self.sync: FullSync | None = None
        self.is_complete = at_start
        """`keys` has all chunks of the location, as far as the controller knows."""


SYNCABLE_LOCATION: Final = "LocalCPUBackend"
"""The only location that LMCache includes in a full synchronisation (0.4.3 to 0.5.6)."""


class Rank:
    """One worker process of an instance. Mutable: changed by the controller."""

    __slots__ = (
        "ip",
        "is_reporting",
        "last_heartbeat",
        "locations",
        "number",
        "peer_url",
        "port",
        "predates_controller",
        "previous",
        "registered_at",
        "reports_to",
        "sync_requested_at",
        "sync_wanted",
    )

    def __init__(self, number: int, registered_at: float, *, predates_controller: bool) -> None:
        self.number = number
        self.registered_at = registered_at
        self.ip = ""
        self.port = 0
        self.peer_url: str | None = None
        self.locations: dict[str, Location] = {}
        self.last_heartbeat: float | None = None
        self.sync_requested_at: float | None = None
        """When the controller last requested a full synchronisation, in seconds of its clock."""
        self.sync_wanted = False
        """Another gateway that follows the rank's reports needs a full synchronisation."""
        self.reports_to = ""
        """The member of the fleet that forwards the rank's reports; empty if they arrive here."""
        self.is_reporting = True
        """False after this member is gone, until a report comes another way: the chunks do not count."""
        self.predates_controller = predates_controller
        """The process started before the controller, so it may hold chunks that it never reported here."""
        self.previous: dict[str, int | None] = {}
        """By location: the next sequence number of the worker's earlier process."""

    def has(self, key: ChunkHash) -> bool:
        """Whether any location of the rank holds the chunk."""
        return any(key in location.keys for location in self.locations.values())

    @property
    def is_complete(self) -> bool:
        """All chunks of the rank are known, as far as the controller knows."""
        return not self.predates_controller and all(
            location.is_complete for location in self.locations.values()
        )

    @property
    def needs_sync(self) -> bool:
        """A full synchronisation would make the rank complete."""
        cpu = self.locations.get(SYNCABLE_LOCATION)
        return self.predates_controller or (cpu is not None and not cpu.is_complete)

    @property
    def is_syncing(self) -> bool:
        return any(location.sync is not None for location in self.locations.values())


class LMCacheInstance:
    """An instance's ranks, and the chunks that all ranks have, written to the index under `holder`.

    Mutable: the controller reports what ranks store and evict.
    """

    def __init__(self, name: str, index: ChunkIndex, space: ChunkSpace) -> None:
        self.name = name
        # `shared`, so that the chunks stay when a slot detaches: only the controller knows when an instance
        # ends.
        self.holder = ChunkHolder(Tier.L1, shared=True)
        self.ranks: dict[int, Rank] = {}
        self._index = index
        self._space = space
        self._has_one_location = False
        """One rank with one location: the holder has exactly that location's chunks."""
        self._rebuild: Iterator[ChunkHash] | None = None

    @property
    def chunks(self) -> int:
        """Chunks summed over ranks and locations."""
        return sum(len(location.keys) for rank in self.ranks.values() for location in rank.locations.values())

    @property
    def is_complete(self) -> bool:
        return all(rank.is_complete for rank in self.ranks.values())

    def admit(self, location: Location, keys: Sequence[ChunkHash]) -> None:
        """Add chunks to a location. About 0.5 us each."""
        if not self._has_one_location:
            keys = [key for key in keys if key not in location.keys]
        location.keys.update(keys)
        if not self._has_one_location:
            keys = [key for key in keys if self._every_rank_has(key)]
        self._index.store(self.holder, self._space, keys)

    def evict(self, rank: Rank, location: Location, keys: Sequence[ChunkHash]) -> None:
        """Remove chunks from a location. About 0.5 us each."""
        location.keys.difference_update(keys)
        if not self._has_one_location:
            keys = [key for key in keys if not rank.has(key)]
        self._index.remove_all(self.holder, self._space, keys)

    def clear(self, location: Location) -> set[ChunkHash]:
        """Remove all chunks of a location. Returns them, so that the caller can free the memory in steps."""
        keys, location.keys = location.keys, set()
        if keys:
            self._start_rebuild()
        return keys

    def add(self, rank: Rank) -> None:
        """Add a rank, or replace the rank with the same number."""
        self.ranks[rank.number] = rank
        self._update_has_one_location()
        self._start_rebuild()

    def remove(self, rank: Rank) -> None:
        del self.ranks[rank.number]
        self._update_has_one_location()
        self._start_rebuild()

    def ensure_location(self, rank: Rank, name: str) -> Location:
        """The rank's location of that name; created if it is new."""
        location = rank.locations.get(name)
        if location is None:
            previous = rank.previous.get(name)
            location = rank.locations[name] = Location(
                name, at_start=not rank.predates_controller, previous=previous
            )
            self._update_has_one_location()
        return location

    def _update_has_one_location(self) -> None:
        self._has_one_location = [len(rank.locations) for rank in self.ranks.values()] == [1]

    def sweep(self, steps: int) -> bool:
        """Continue a rebuild of the holder by up to `steps` chunks; True while there is more."""
        if self._rebuild is None:
            return False
        keys = list(islice(self._rebuild, steps))
        if keys:
            everywhere = [key for key in keys if self._every_rank_has(key)]
            self._index.store(self.holder, self._space, everywhere)
            return True
        self._rebuild = None
        return False

    def _start_rebuild(self) -> None:
        """Clear the holder; `sweep` then adds the chunks that every rank still has."""
        self._index.clear(self.holder)
        rank = next(iter(self.ranks.values()), None)
        remaining = (
            [list(location.keys) for location in rank.locations.values() if location.keys] if rank else []
        )
        self._rebuild = chain.from_iterable(remaining) if remaining else None

    def _every_rank_has(self, key: ChunkHash) -> bool:
        return all(rank.has(key) for rank in self.ranks.values())


_REPORT_TIMEOUT_S: Final = 2.0
"""Time for a stored chunk to be reported; LMCache takes about 10 ms."""
_MAX_UNREPORTED: Final = 256
"""Most chunks of served prompts that wait for a report."""


class HashAgreementState(Enum):
    UNKNOWN = auto()
    AGREES = auto()
    """The instance reported a chunk of a prompt that we sent, under the hash that we compute."""
    DIFFERS = auto()
    """The instance served our prompts and reported chunks, but none had a hash that we compute."""


class HashAgreement:
    """Detects whether an instance computes the same chunk hashes as the gateway.

    Mutable: `on_prompt_served` and `on_chunks_reported` change `state`. AGREES is final.
    """

    __slots__ = ("_needed_prompts", "_reported_chunks", "_unreported", "state")

    def __init__(self, needed_prompts: int) -> None:
        self.state = HashAgreementState.UNKNOWN
        self._needed_prompts = needed_prompts
        self._unreported: dict[ChunkHash, float] = {}
        """Chunks of served prompts that the instance has not reported -> when the prompt was first served."""
        self._reported_chunks = 0
        """Number of chunks that the instance reported since the first entry of `_unreported`."""

    def on_prompt_served(self, chunk: ChunkHash, *, is_held: bool, now: float) -> bool:
        """Note a served prompt by one of its chunks. True if the state has changed."""
        if is_held:
            return self._agree()
        if len(self._unreported) < _MAX_UNREPORTED:
            self._unreported.setdefault(chunk, now)
        overdue = sum(now - when >= _REPORT_TIMEOUT_S for when in self._unreported.values())
        if (
            self.state is HashAgreementState.UNKNOWN
            and min(overdue, self._reported_chunks) >= self._needed_prompts
        ):
            self.state = HashAgreementState.DIFFERS
            return True
        return False

    def on_chunks_reported(self, keys: Collection[ChunkHash]) -> bool:
        """Note chunks that the instance has stored. True if the state has changed."""
        if self.state is HashAgreementState.AGREES or not self._unreported:
            return False
        if self._unreported.keys().isdisjoint(keys):
            self._reported_chunks += len(keys)
            return False
        return self._agree()

    def _agree(self) -> bool:
        changed = self.state is not HashAgreementState.AGREES
        self.state = HashAgreementState.AGREES
        self._unreported.clear()
        return changed
