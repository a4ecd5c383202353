"""Full synchronisations: a worker stops storing and sends the controller all chunks that it holds.

Chunks of each batch enter the map at once; after the last batch the location counts as complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvroute.clock import Clock
from kvroute.lmcache.controller_instance import FullSync, Location, Rank
from kvroute.lmcache.controller_roster import KnownInstance, Roster
from kvroute.wire import lmcache_controller as wire


@dataclass(slots=True)
class ControllerCounts:
    """Messages and events since the start. Mutable: changed by the controller and its sockets."""

    messages: int = 0
    operations: int = 0
    lookups: int = 0
    heartbeats: int = 0
    unreadable: int = 0
    failed: int = 0
    """Messages whose handling failed with an error of ours, and replies that could not be sent."""
    gaps: int = 0
    duplicates: int = 0
    unplaced: int = 0
    """Batches whose place in the sequence was unclear."""
    syncs_requested: int = 0
    syncs_done: int = 0
    syncs_failed: int = 0
    timeouts: int = 0
    mismatches: int = 0
    """Times that an instance's chunk hashes were found to differ from ours."""


class ControllerGauges(NamedTuple):
    """Values of the metrics' gauges."""

    instances: int
    workers: int
    chunks: int
    """Summed over workers and their locations."""
    syncing: int
    untrusted: int
    """Workers whose map is incomplete."""
    mismatched: int
    """Instances whose chunk hashes differ from ours."""


log = logging.getLogger(__name__)


class FullSyncs:
    """Handles the messages of full synchronisations. Their state lies in `Location.sync`.

    Operations that arrive during a synchronisation are applied as usual. They are older than the worker's
    freeze, so the last operation on a chunk agrees with the state that the synchronisation sends.
    """

    def __init__(
        self,
        roster: Roster,
        clock: Clock,
        counts: ControllerCounts,
        admit: Callable[[KnownInstance, Location, Sequence[wire.ChunkHash]], None],
    ) -> None:
        self._roster = roster
        self._clock = clock
        self._counts = counts
        self._admit = admit

    def start(self, message: wire.FullSyncStart) -> wire.FullSyncStartReply:
        known, rank = self._roster.get_or_add(message)
        location = known.instance.ensure_location(rank, message.location)
        # This replaces an unfinished synchronisation of the location: the worker has ended that one.
        self._roster.free_later(known.instance.clear(location))
        location.is_complete = False
        location.sync = FullSync(message.sync_id, message.batch_count, self._clock.now())
        return wire.FullSyncStartReply(sync_id=message.sync_id, accepted=True)

    def receive_part(self, message: wire.FullSyncBatch | wire.FullSyncEnd) -> None:
        found = self._roster.get(message)
        location = _syncing(found, message.sync_id)
        if not found or not location or not location.sync:
            return
        known, rank = found
        sync, now = location.sync, self._clock.now()
        if isinstance(message, wire.FullSyncBatch):
            sync.batch(message.batch_id, message.keys, now)
            self._admit(known, location, message.keys)
        else:
            sync.end(message.actual_total_keys, now)
        if sync.is_finished and not sync.total_matches:
            self.fail(location)
        elif sync.is_finished:
            location.sync = None
            location.is_complete = True
            rank.predates_controller = False
            rank.sync_requested_at = None
            self._counts.syncs_done += 1

    def status(self, message: wire.FullSyncStatus) -> wire.FullSyncStatusReply:
        """Reply whether the frozen worker may continue: it does not have to wait for other workers."""
        found = self._roster.get(message)
        location = _syncing(found, message.sync_id)
        sync = location.sync if location else None
        waiting = sync is not None and sync.may_wait()
        if location and not waiting:
            self.fail(location)
        ranks = [rank for _, rank in self._roster.ranks()]
        return wire.FullSyncStatusReply(
            sync_id=message.sync_id,
            is_complete=not waiting and found is not None and not found[1].needs_sync,
            global_progress=sum(not rank.is_syncing for rank in ranks) / max(1, len(ranks)),
            can_exit_freeze=not waiting,
            missing_batches=sync.missing() if sync and waiting else [],
        )

    def fail(self, location: Location) -> None:
        """End a synchronisation. The chunks received stay in the map; the location counts as incomplete."""
        log.warning("a full synchronisation of LMCache location %s failed", location.name)
        location.sync = None
        location.is_complete = False
        self._counts.syncs_failed += 1

    def expire(self, rank: Rank, timeout_s: float) -> None:
        """Fail synchronisations of the rank without progress for `timeout_s`."""
        now = self._clock.now()
        for location in rank.locations.values():
            if location.sync and now - location.sync.last_progress > timeout_s:
                self.fail(location)


def _syncing(found: tuple[KnownInstance, Rank] | None, sync_id: str) -> Location | None:
    """The location with the unfinished synchronisation `sync_id`."""
    for location in found[1].locations.values() if found else ():
        if location.sync and location.sync.sync_id == sync_id:
            return location
    return None
