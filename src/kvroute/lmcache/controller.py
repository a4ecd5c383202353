"""LMCache's controller without its sockets: the in-process connector of each worker reports to it.

Workers register, report the chunks that they store and evict, and ask which peer has a chunk. After a gap, an
unreadable message, or a message from a worker that has not registered (it started before the controller), the
controller drops the location's chunks and answers the next heartbeat with a request for a full
synchronisation: the worker stops storing and sends all chunks that it holds. Their chunks enter the map with
each batch; after the last batch the location counts as complete. bench/controller.py compares this controller
with LMCache's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvroute.blocks.chunks import SHA256_CBOR, ChunkScheme, ChunkSpace, chunk_keys
from kvroute.clock import Clock
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.map_trust import MapTrust
from kvroute.lmcache.controller_instance import (
    BatchAction,
    FullSync,
    HashAgreementState,
    LMCacheInstance,
    Location,
    Rank,
)
from kvroute.lmcache.controller_roster import Roster, SlotIdentity, TrackedInstance, find_peer
from kvroute.lmcache.options import ControllerOptions
from kvroute.wire import lmcache_controller as wire
from kvroute.wire.python_hash import none_hash


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
        admit: Callable[[TrackedInstance, Location, Sequence[wire.ChunkHash]], None],
    ) -> None:
        self._roster = roster
        self._clock = clock
        self._counts = counts
        self._admit = admit

    def start(self, message: wire.FullSyncStart) -> wire.FullSyncStartReply:
        tracked, rank = self._roster.get_or_add(message)
        location = tracked.instance.ensure_location(rank, message.location)
        # This replaces an unfinished synchronisation of the location: the worker has ended that one.
        self._roster.free_later(tracked.instance.clear(location))
        location.is_complete = False
        location.sync = FullSync(message.sync_id, message.batch_count, self._clock.now())
        return wire.FullSyncStartReply(sync_id=message.sync_id, accepted=True)

    def receive_part(self, message: wire.FullSyncBatch | wire.FullSyncEnd) -> None:
        origin = self._roster.get(message)
        location = _syncing(origin, message.sync_id)
        if not origin or not location or not location.sync:
            return
        tracked, rank = origin
        sync, now = location.sync, self._clock.now()
        if isinstance(message, wire.FullSyncBatch):
            sync.batch(message.batch_id, message.keys, now)
            self._admit(tracked, location, message.keys)
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
        origin = self._roster.get(message)
        location = _syncing(origin, message.sync_id)
        sync = location.sync if location else None
        waiting = sync is not None and sync.may_wait()
        if location and not waiting:
            self.fail(location)
        ranks = [rank for _, rank in self._roster.ranks()]
        return wire.FullSyncStatusReply(
            sync_id=message.sync_id,
            is_complete=not waiting and origin is not None and not origin[1].needs_sync,
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


def _syncing(origin: tuple[TrackedInstance, Rank] | None, sync_id: str) -> Location | None:
    """The location with the unfinished synchronisation `sync_id`."""
    for location in origin[1].locations.values() if origin else ():
        if location.sync and location.sync.sync_id == sync_id:
            return location
    return None


log = logging.getLogger(__name__)


class Controller:
    """Writes the chunks that workers report into `index`, and answers the workers' messages.

    `handle` gets each message; call `tick` about once a second and `sweep` while it returns True. Mutable
    throughout; used from the event loop only. `on_registered` is called with an instance's name for each
    registration.
    """

    def __init__(
        self,
        index: ChunkIndex,
        clock: Clock,
        options: ControllerOptions,
        *,
        on_registered: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.counts = ControllerCounts()
        algorithm = options.hash_algorithm
        start = none_hash(options.hash_seed, sha256_cbor=algorithm == SHA256_CBOR)
        self.scheme = ChunkScheme(algorithm, options.chunk_tokens, start)
        """How workers name their chunks, according to the options."""
        self._clock = clock
        self._options = options
        self._on_registered = on_registered
        self._roster = Roster(index, ChunkSpace(self.scheme), clock, options.mismatch_prompts)
        self._syncs = FullSyncs(self._roster, clock, self.counts, self._admit)
        self._handlers: dict[type, Callable[..., wire.Reply | None]] = {
            wire.Register: self._register,
            wire.Heartbeat: self._heartbeat,
            wire.DeRegister: self._deregister,
            wire.KvOperations: self._apply_operations,
            wire.KvAdmit: self._apply_single_operation,
            wire.KvEvict: self._apply_single_operation,
            wire.FullSyncStart: self._syncs.start,
            wire.FullSyncBatch: self._syncs.receive_part,
            wire.FullSyncEnd: self._syncs.receive_part,
            wire.FullSyncStatus: self._syncs.status,
            wire.P2pLookup: self._lookup,
        }

    # Called by routing, metrics and the admin API

    def add_slot(self, slot: int, worker: str, *, rank: int = 0, addresses: Collection[str] = ()) -> None:
        """Add a slot: a worker of the fleet, or one data-parallel rank of a worker.

        The slot reads from the instance with the name `WORKER` or `WORKER-RANK`. Without such an instance it
        reads from the only instance at one of its host's `addresses`.
        """
        self._roster.add_slot(slot, SlotIdentity(worker, rank, frozenset(addresses)))

    def remove_slot(self, slot: int) -> None:
        """Remove a slot."""
        self._roster.remove_slot(slot)

    def trust(self, slot: int) -> MapTrust:
        """How far the index can be trusted for the slot's L1.

        NONE: no instance reports for the slot, or its chunk hashes differ from ours.
        """
        instances = self._roster.instances_of(slot)
        if not instances or any(
            tracked.agreement.state is HashAgreementState.DIFFERS for tracked in instances
        ):
            return MapTrust.NONE
        return (
            MapTrust.WHOLE if all(tracked.instance.is_complete for tracked in instances) else MapTrust.PARTIAL
        )

    def ranks_of(self, slot: int) -> int:
        """The ranks of the instance that the slot reads from; 0 if none reports, or several do."""
        instances = self._roster.instances_of(slot)
        return len(instances[0].instance.ranks) if len(instances) == 1 else 0

    def on_prompt_served(self, slot: int, token_ids: Sequence[int]) -> None:
        """Compare the chunk hashes that a worker reports with those of a prompt that it has served.

        Free once the hashes are known to agree. Before that 3 us, or, while the map of the instance is
        incomplete, the hashing of the whole prompt (5 us for 256 tokens).
        """
        size = self.scheme.chunk_tokens
        for tracked in self._roster.instances_of(slot):
            if tracked.agreement.state is HashAgreementState.AGREES or len(token_ids) < size:
                continue
            # While the map is incomplete, the first chunk may have been stored before the controller started.
            # The last chunk is more likely to be new.
            tokens = token_ids[:size] if tracked.instance.is_complete else token_ids
            chunk = chunk_keys(tokens, self.scheme)[-1]
            is_held = any(rank.has(chunk) for rank in tracked.instance.ranks.values())
            if tracked.agreement.on_prompt_served(chunk, is_held=is_held, now=self._clock.now()):
                self._log_agreement(tracked)

    def gauges(self) -> ControllerGauges:
        """The values of the metrics' gauges."""
        instances = list(self._roster.by_name.values())
        ranks = [rank for _, rank in self._roster.ranks()]
        return ControllerGauges(
            instances=len(instances),
            workers=len(ranks),
            chunks=sum(tracked.instance.chunks for tracked in instances),
            syncing=sum(rank.is_syncing for rank in ranks),
            untrusted=sum(not rank.is_complete for rank in ranks),
            mismatched=sum(tracked.agreement.state is HashAgreementState.DIFFERS for tracked in instances),
        )

    def instance_names(self) -> list[str]:
        """The instances that have registered, in order of registration."""
        return [tracked.instance.name for tracked in self._roster.by_name.values()]

    def uncompared(self) -> list[str]:
        """The instances whose chunk hashes have not been compared with the gateway's so far."""
        instances = self._roster.by_name.values()
        return [
            tracked.instance.name
            for tracked in instances
            if tracked.agreement.state is HashAgreementState.UNKNOWN
        ]

    def problems(self) -> list[str]:
        """Why the map may differ from what the workers hold, one sentence for each problem."""
        problems = [
            f"LMCache instance {name!r} may belong to several workers: set its lmcache_instance_id to the "
            "name of its worker"
            for name in self._roster.unclear
        ]
        for tracked in self._roster.by_name.values():
            if tracked.agreement.state is HashAgreementState.DIFFERS:
                problems.append(self._mismatch(tracked.instance))
        for tracked, rank in self._roster.ranks():
            if rank.needs_sync and rank.last_heartbeat is None:
                problems.append(
                    f"LMCache instance {tracked.instance.name!r}, worker {rank.number}: the map lacks "
                    "some of its chunks, and without heartbeats the controller cannot request them (set its "
                    "lmcache_worker_heartbeat_time)"
                )
        return problems

    # Periodic work

    def tick(self) -> None:
        """Remove workers whose heartbeats ended, and end synchronisations without progress."""
        now = self._clock.now()
        for tracked, rank in self._roster.ranks():
            if rank.last_heartbeat is not None and now - rank.last_heartbeat > self._options.worker_timeout_s:
                self.counts.timeouts += 1
                log.warning(
                    "LMCache instance %r, worker %d was removed: no heartbeat in time",
                    tracked.instance.name,
                    rank.number,
                )
                self._roster.remove(tracked, rank)
                continue
            self._syncs.expire(rank, self._options.sync_timeout_s)

    def sweep(self, steps: int = 1000) -> bool:
        """Process up to about `steps` chunks of deferred work; True while there is more."""
        return self._roster.sweep(steps)

    # Messages

    def handle(self, message: wire.Message, heartbeat_url: str = "") -> wire.Reply | None:
        """Handle one message; returns the reply, or None if this kind of message has none.

        `heartbeat_url` (host:port) is sent to a worker that registers.
        """
        self.counts.messages += 1
        reply = self._handlers[type(message)](message)
        self._resume(message, "")
        if heartbeat_url and isinstance(reply, wire.RegisterReply):
            return wire.RegisterReply(extra_config={"heartbeat_url": heartbeat_url})
        return reply

    def follow(self, message: wire.Message, member: str) -> bool:
        """Handle a message that the member `member` of the fleet has answered and forwarded.

        True if the rank shall send all its chunks again: only `member` can request that.
        """
        is_wanted = False
        if isinstance(message, wire.Heartbeat):
            rank, now = self._note_heartbeat(message), self._clock.now()
            is_wanted = rank.needs_sync and not rank.is_syncing and not self._is_requested(rank, now)
            if is_wanted:
                rank.sync_requested_at = now
        else:
            self._handlers[type(message)](message)
        self._resume(message, member)
        return is_wanted

    def want_sync(self, sender: wire.Sender) -> None:
        """Another member of the fleet lacks chunks of this rank: the next heartbeat requests them all."""
        origin = self._roster.get(sender)
        if origin is not None:
            origin[1].sync_wanted = True

    def member_gone(self, member: str) -> None:
        """A member of the fleet is gone: the chunks of the ranks that reported to it do not count until a
        report comes another way. Then the rank is asked for all its chunks."""
        for _, rank in self._roster.ranks():
            if rank.reports_to == member:
                rank.is_reporting, rank.predates_controller = False, True
                rank.sync_requested_at = None
        self._roster.update_attachments()

    def _resume(self, message: wire.Message, member: str) -> None:
        origin = self._roster.get(message)
        if origin is not None:
            origin[1].reports_to = member
            if not origin[1].is_reporting:
                origin[1].is_reporting = True
                self._roster.update_attachments()

    def on_unreadable(self, payload: bytes) -> None:
        """Count an unreadable message. If a location can be read from it, that location is reset."""
        self.counts.unreadable += 1
        instance, number, name = wire.origin(payload) or ("", 0, "")
        origin = self._roster.get(wire.Sender(instance_id=instance, worker_id=number))
        if origin and name in origin[1].locations:
            self._reset_location(origin[0].instance, origin[1].locations[name])

    def _register(self, message: wire.Register) -> wire.RegisterReply:
        name, number = message.instance_id, message.worker_id
        origin = self._roster.get(message)
        if origin and origin[1].ip and (origin[1].ip, origin[1].port) != (message.ip, message.port):
            log.warning(
                "LMCache instance %r, worker %d was at %s:%d and is now at %s:%d; if both are running, "
                "they need different values of lmcache_instance_id",
                *(name, number, origin[1].ip, origin[1].port, message.ip, message.port),
            )
        _, rank = self._roster.add(message, predates_controller=False)
        self._set_address(rank, message)
        self._roster.remove_replaced(name, rank)
        log.info("LMCache instance %r, worker %d has registered", name, number)
        self._on_registered(name)
        return wire.RegisterReply()

    def _set_address(self, rank: Rank, message: wire.Register | wire.Heartbeat) -> None:
        rank.ip, rank.port, rank.peer_url = message.ip, message.port, message.peer_url
        self._roster.update_attachments()

    def _heartbeat(self, message: wire.Heartbeat) -> wire.HeartbeatReply:
        self.counts.heartbeats += 1
        rank, now = self._note_heartbeat(message), self._clock.now()
        is_needed = rank.needs_sync or rank.sync_wanted
        if not is_needed or rank.is_syncing or self._is_requested(rank, now):
            return wire.HeartbeatReply()
        rank.sync_requested_at, rank.sync_wanted = now, False
        self.counts.syncs_requested += 1
        reason = "controller_restart" if rank.predates_controller else "operations_missing"
        return wire.HeartbeatReply(commands=[wire.FullSyncCommand(reason=reason)])

    def _is_requested(self, rank: Rank, now: float) -> bool:
        """Whether a synchronisation was requested a short time ago, which may not have begun yet."""
        at = rank.sync_requested_at
        return at is not None and now - at < self._options.sync_timeout_s

    def _note_heartbeat(self, message: wire.Heartbeat) -> Rank:
        _, rank = self._roster.get_or_add(message)
        if not rank.ip:
            self._set_address(rank, message)
        rank.last_heartbeat = self._clock.now()
        return rank

    def _deregister(self, message: wire.DeRegister) -> None:
        origin = self._roster.get(message)
        if origin:
            log.info("LMCache instance %r, worker %d has left", message.instance_id, message.worker_id)
            self._roster.remove(*origin)

    def _lookup(self, message: wire.P2pLookup) -> wire.P2pLookupReply:
        self.counts.lookups += 1
        instances = (tracked.instance for tracked in self._roster.by_name.values())
        peer = find_peer(instances, message.instance_id, message.worker_id, message.hashes)
        return wire.P2pLookupReply(layout_info=[peer]) if peer else wire.P2pLookupReply()

    # Operations

    def _apply_operations(self, message: wire.KvOperations) -> None:
        operations = message.operations
        count = len(operations)
        if not count:
            return
        self.counts.operations += count
        tracked, rank = self._roster.get_or_add(message)
        location = tracked.instance.ensure_location(rank, message.location)
        first_operation, last_operation = operations[0], operations[-1]
        action = location.sequence.check(
            first_operation.seq_num, count, first_operation.key, last_operation.key
        )
        if last_operation.seq_num - first_operation.seq_num != count - 1 and action is BatchAction.APPLY:
            action = BatchAction.GAP
        if action is not BatchAction.APPLY and not self._handle_out_of_order(
            tracked.instance, location, action
        ):
            return
        start = 0
        for stop in _run_ends(operations):
            keys = [operation.key for operation in operations[start:stop]]
            if operations[start].op_type == "admit":
                self._admit(tracked, location, keys)
            else:
                tracked.instance.evict(rank, location, keys)
            start = stop

    def _handle_out_of_order(
        self, instance: LMCacheInstance, location: Location, action: BatchAction
    ) -> bool:
        """Handle operations that do not follow the last ones. Returns whether to apply them."""
        if action is BatchAction.SKIP:
            self.counts.duplicates += 1
            return False
        self._reset_location(instance, location)
        if action is BatchAction.RESTART:
            location.is_complete = True
            return True
        self.counts.gaps += action is BatchAction.GAP
        self.counts.unplaced += action is BatchAction.UNPLACED
        log.warning("LMCache instance %r: operations on %s were lost", instance.name, location.name)
        return action is BatchAction.GAP

    def _apply_single_operation(self, message: wire.KvAdmit | wire.KvEvict) -> None:
        """Apply an operation without a sequence number (LMCache 0.3). Its loss cannot be detected."""
        self.counts.operations += 1
        tracked, rank = self._roster.get_or_add(message)
        location = tracked.instance.ensure_location(rank, message.location)
        if isinstance(message, wire.KvAdmit):
            self._admit(tracked, location, [message.key])
        else:
            tracked.instance.evict(rank, location, [message.key])

    def _admit(self, tracked: TrackedInstance, location: Location, keys: Sequence[wire.ChunkHash]) -> None:
        tracked.instance.admit(location, keys)
        if tracked.agreement.on_chunks_reported(keys):
            self._log_agreement(tracked)

    def _reset_location(self, instance: LMCacheInstance, location: Location) -> None:
        """Drop all chunks of a location and chunk it as incomplete.

        A synchronisation in flight fails: its batches are older than the lost operations.
        """
        self._roster.free_later(instance.clear(location))
        location.is_complete = False
        if location.sync:
            self._syncs.fail(location)

    # Hashes

    def _log_agreement(self, tracked: TrackedInstance) -> None:
        if tracked.agreement.state is HashAgreementState.DIFFERS:
            self.counts.mismatches += 1
            log.error("%s", self._mismatch(tracked.instance))
        else:
            log.info("LMCache instance %r: its chunk hashes agree with ours", tracked.instance.name)

    def _mismatch(self, instance: LMCacheInstance) -> str:
        scheme, seed = self.scheme, self._options.hash_seed or "unset"
        return (
            f"LMCache instance {instance.name!r} computes other chunk hashes than the gateway, so no prompt "
            f"matches its chunks: its PYTHONHASHSEED must be {seed}, its pre_caching_hash_algorithm "
            f"{scheme.algorithm}, its chunk_size {scheme.chunk_tokens}; or set lmcache.controller.hash_seed, "
            ".hash_algorithm and .chunk_tokens to the instance's values"
        )


def _run_ends(operations: Sequence[wire.Operation]) -> list[int]:
    """The end index of each run of consecutive operations of one kind."""
    kinds = [operation.op_type for operation in operations]
    if len(set(kinds)) == 1:
        return [len(kinds)]
    return [index for index in range(1, len(kinds)) if kinds[index] != kinds[index - 1]] + [len(kinds)]
