"""Full synchronisations under way: what comes of them is believed at once, and when they are over, as all."""

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
    """What has happened since the start. Mutable; counted by the controller and its sockets."""

    messages: int = 0
    operations: int = 0
    lookups: int = 0
    heartbeats: int = 0
    unreadable: int = 0
    failed: int = 0
    """Messages that could be read and led to an error of ours, and answers that could not be sent."""
    gaps: int = 0
    duplicates: int = 0
    strays: int = 0
    """Batches out of order that could not be placed."""
    syncs_asked: int = 0
    syncs_done: int = 0
    syncs_failed: int = 0
    timeouts: int = 0
    mismatches: int = 0
    """Times that an instance's chunk hashes were found not to be ours."""


class ControllerFigures(NamedTuple):
    """For gauges."""

    instances: int
    workers: int
    chunks: int
    """Summed over workers and their locations."""
    syncing: int
    untrusted: int
    """Workers of which something is known to be missing."""
    mismatched: int
    """Instances whose chunk hashes are not ours."""


log = logging.getLogger(__name__)


class FullSyncs:
    """Answers the messages of full synchronisations. Stateless: each is kept at its location.

    Operations that come meanwhile are applied like all others. They are older than the standstill, and what
    the last of them says of a chunk is what the worker says of it now.
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
        known, rank = self._roster.known_rank(message)
        location = known.instance.location(rank, message.location)
        # If another one was under way there, the worker has given it up.
        self._roster.discard(known.instance.forget(location))
        location.whole = False
        location.sync = FullSync(message.sync_id, message.batch_count, self._clock.now())
        return wire.FullSyncStartReply(sync_id=message.sync_id, accepted=True)

    def part(self, message: wire.FullSyncBatch | wire.FullSyncEnd) -> None:
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
        if sync.is_over and not sync.agrees:
            self.fail(location)
        elif sync.is_over:
            location.sync = None
            location.whole = True
            rank.unsynced = False
            rank.asked_at = None
            self._counts.syncs_done += 1

    def status(self, message: wire.FullSyncStatus) -> wire.FullSyncStatusReply:
        """A worker stands still until it may go on: it waits for nobody but itself."""
        found = self._roster.get(message)
        location = _syncing(found, message.sync_id)
        sync = location.sync if location else None
        waiting = sync is not None and sync.ask()
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
        """What it brought is believed, but may not be all."""
        log.warning("a full synchronisation of %s has failed", location.name)
        location.sync = None
        location.whole = False
        self._counts.syncs_failed += 1

    def expire(self, rank: Rank, timeout_s: float) -> None:
        """Give up what has made no progress for so long."""
        now = self._clock.now()
        for location in rank.locations.values():
            if location.sync and now - location.sync.touched > timeout_s:
                self.fail(location)


def _syncing(found: tuple[KnownInstance, Rank] | None, sync_id: str) -> Location | None:
    """The location of which that synchronisation is under way."""
    for location in found[1].locations.values() if found else ():
        if location.sync and location.sync.sync_id == sync_id:
            return location
    return None
