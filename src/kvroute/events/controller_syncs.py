"""Full synchronisations under way: what comes of them is believed at once, and when they are over, as all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvroute.clock import Clock
from kvroute.events.controller_figures import ControllerCounts
from kvroute.events.controller_instance import Rank
from kvroute.events.controller_location import Location
from kvroute.events.controller_roster import Known, Roster
from kvroute.events.controller_sync import FullSync
from kvroute.wire import lmcache_controller as wire

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
        admit: Callable[[Known, Location, Sequence[wire.ChunkHash]], None],
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


def _syncing(found: tuple[Known, Rank] | None, sync_id: str) -> Location | None:
    """The location of which that synchronisation is under way."""
    for location in found[1].locations.values() if found else ():
        if location.sync and location.sync.sync_id == sync_id:
            return location
    return None
