"""LMCache's coordinator without the I/O: servers, the chunks that they hold, the workers that read from them.

The rules are those of LMCache 0.5.6 (v1/mp_coordinator). A server registers, sends heartbeats and numbered
batches of cache events. A batch with a higher incarnation means a restart with empty memory, a batch with a
lower one is stale, and a number that was applied before is a duplicate. The protocol has no replay: after a
lost batch the coordinator drops the server's chunks and adds only those that the server reports from then on.

A server reports to one gateway. If the gateway shares with others, it forwards the reports, and the others
follow them here with the same rules (`replicas/cache_reports.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Final

from kvroute.blocks.chunks import BLAKE3, ChunkScheme
from kvroute.blocks.keys import Tier
from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.map_trust import MapTrust
from kvroute.lmcache.membership import (
    Attachments,
    ChangedObjects,
    Doubt,
    HeldChunks,
    L2Pool,
    LMCacheServer,
    ServedWorker,
    StoredModel,
)
from kvroute.lmcache.options import LMCacheOptions
from kvroute.wire.lmcache_server import (
    CacheEvents,
    CacheServerAlive,
    CacheServerState,
    CacheServerStore,
    ServerRegistration,
    ServerStatus,
)

log = logging.getLogger(__name__)

_KINDS: Final = frozenset({"store", "delete", "access", "config"})
_POOL_RETENTION_S: Final = 3600.0
"""How long the content of a server's private L2 stays known after the server has left."""
_MAX_CHANGES: Final = 262_144
"""Objects that may change while a copy of a map arrives: 50 MB, and more than a minute's reports."""


class BatchOutcome(StrEnum):
    """Whether a batch is applied, or why not."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    STALE = "stale"


@dataclass(slots=True)
class CoordinatorCounts:
    """Messages since the start. Mutable: changed by the `Coordinator`."""

    registrations: int = 0
    unknown_heartbeats: int = 0
    expired: int = 0
    """Servers that were removed because their heartbeats ended."""
    batches: dict[BatchOutcome, int] = field(default_factory=lambda: dict.fromkeys(BatchOutcome, 0))
    events: dict[str, int] = field(default_factory=dict)
    """Entries by kind of event."""
    gaps: int = 0
    unknown: int = 0
    """Batches whose event type or tier this version does not know."""


class ServerCopy:
    """Another member's map of a server, while it arrives. Mutable: by `begin`, `restore` and `apply`.

    Chunks of the server's L2 pools are added to the pools at once. They are right even if the copy is not
    adopted: objects that have changed since it was begun are skipped.
    """

    def __init__(self, state: CacheServerState, coordinator: Coordinator, memory: HeldChunks) -> None:
        self.state = state
        self.memory = memory
        self._coordinator = coordinator
        self._scheme = ChunkScheme(BLAKE3, state.chunk_tokens)
        self._seq = state.seq
        self._changed: dict[HeldChunks, ChangedObjects] = {}
        """Of each store: objects of batches that the sender may not have applied."""
        self._changes = 0

    @property
    def sent_position(self) -> tuple[int, int]:
        """Incarnation and number of the last batch that the sender had applied when it began."""
        return self.state.incarnation, self.state.seq

    @property
    def position(self) -> tuple[int, int]:
        """Incarnation and number of the last batch that the copy has."""
        return self.state.incarnation, self._seq

    def begin(self, store: CacheServerStore) -> None:
        """Learn the parts of the chunks in L1, before the first `apply`."""
        for _ in self.memory.restore(self._scheme, store.layouts, b"", []):
            pass

    def restore(self, store: CacheServerStore) -> Iterator[None]:
        """Add what the sender has sent; yields after each step of about 1 ms. Raises ValueError."""
        chunks = self.memory
        if store.backend:
            chunks = self._coordinator.pool_of(self.state, store.backend, shared=store.shared)
        changed = self._changed.setdefault(chunks, ChangedObjects())
        return chunks.restore(self._scheme, store.layouts, store.entries, store.runs, changed)

    def apply(self, batch: CacheEvents) -> str:
        """Apply a batch that was applied to the map here. Returns why the copy cannot be used; "" if it can.

        Batches that the sender had applied when it began change nothing.
        """
        instance = self._coordinator.instance(batch.instance_id)
        is_own, scheme = batch.instance_id == self.state.server, self._scheme
        if is_own:
            if (batch.incarnation, batch.seq) <= self.sent_position:
                return ""
            if batch.incarnation != self.state.incarnation or batch.seq > self._seq + 1:
                return "batches between it and the map here are missing"
            self._seq = batch.seq
        elif instance is not None:
            scheme = instance.scheme
        chunks: HeldChunks | None = self.memory if is_own else None
        if batch.tier == "l2":
            pool = None if instance is None else instance.pools.get(batch.backend)
            chunks = None if pool is None else pool.chunks
        if chunks is None or batch.event_type not in ("store", "delete"):
            return ""
        self._changed.setdefault(chunks, ChangedObjects()).add(scheme, batch.entries)
        self._changes += len(batch.entries)
        if self._changes > _MAX_CHANGES:
            return "too much has changed since it began"
        if chunks is self.memory:
            if batch.event_type == "delete":
                chunks.remove(scheme, batch.entries)
            elif not chunks.store(scheme, batch.entries) or chunks.foreign_hashes:
                return "the chunks of the server have other parts or names"
        return ""


class Coordinator:
    """Writes the chunks that LMCache servers report into `index`, and attaches workers' slots to them.

    Mutable throughout; used from the event loop only. The longest call is `apply` of one piece of a batch
    (`wire.lmcache_server.PIECE_BYTES`).
    """

    def __init__(self, index: ChunkIndex, clock: Clock, options: LMCacheOptions) -> None:
        self.counts = CoordinatorCounts()
        self.changes = 0
        """Rises whenever the results of `instances`, `models_of` or `HeldChunks.object_parts` may have
        changed."""
        self._index = index
        self._clock = clock
        self._options = options
        self._instances: dict[str, LMCacheServer] = {}
        self._pools: dict[tuple[str, str], L2Pool] = {}
        """By (owner, name)."""
        self._attachments = Attachments(index, options)
        self._id_numbers = count(1)

    # Read by the metrics, the L2 lookup and the prefetcher

    def instances(self) -> Sequence[LMCacheServer]:
        return list(self._instances.values())

    def instance(self, instance_id: str) -> LMCacheServer | None:
        return self._instances.get(instance_id)

    def url_of(self, instance: LMCacheServer) -> str:
        """The base URL of a server's HTTP port, without a slash at its end."""
        host = f"[{instance.address}]" if ":" in instance.address else instance.address
        return f"{self._options.coordinator.server_scheme}://{host}:{instance.http_port}"

    def worker_hosts(self) -> Sequence[str]:
        return self._attachments.hosts()

    def host_of(self, worker_id: str) -> str:
        """The host of a worker's URL; "" if the worker is not known."""
        return self._attachments.host_of(worker_id)

    def pools(self) -> Sequence[L2Pool]:
        return list(self._pools.values())

    def instance_of(self, worker_id: str) -> LMCacheServer | None:
        """The live server that a worker reads from, if one is known."""
        return self._attachments.instance_of(worker_id)

    def models_of(self, instance: LMCacheServer, pool: L2Pool) -> list[StoredModel]:
        """Models whose chunks this server's workers read from this pool."""
        return self._attachments.models_of(instance, pool)

    def model_of(self, worker_id: str) -> StoredModel | None:
        """The worker's model under its name in LMCache; None if no store has shown it or several match."""
        return self._attachments.model_of(worker_id)

    # Workers

    def worker_changed(self, worker: ServedWorker) -> None:
        """Add a worker, or replace its slots and models."""
        self._attachments.put(worker)
        self._update_attachments()

    def worker_left(self, worker_id: str) -> None:
        self._attachments.drop(worker_id)
        self.changes += 1

    # The protocol

    def register(self, message: ServerRegistration, sender: str = "") -> tuple[str, bool]:
        """Register a server that sends from the address `sender`. Returns its id (a new one for an empty id)
        and whether it was registered before."""
        self.counts.registrations += 1
        instance_id = message.instance_id.strip() or self._free_id()
        existing = self._instances.get(instance_id)
        again = existing is not None and existing.registered
        instance = existing or self._add(instance_id)
        if again and instance.memory.objects and instance.is_reporting:
            # Either the server was restarted with empty memory, or our answer was lost and its memory is as
            # before. Events before the first registration are no sign of a restart: a server tries to
            # register every 5 s and reports events from its start.
            self._clear_memory(instance, Doubt.REGISTERED_AGAIN)
        instance.registered, instance.reports_to = True, ""
        instance.address, instance.http_port = message.ip.strip(), message.http_port
        instance.sender = sender
        instance.last_message_at = self._clock.now()
        log.info(
            "LMCache server %s registered%s from %s", instance_id, " again" if again else "", instance.address
        )
        self._update_attachments()
        return instance_id, again

    def heartbeat(self, instance_id: str) -> bool:
        """Note a heartbeat. False if the server is not registered: it then registers again."""
        instance = self._instances.get(instance_id)
        # A server that is not reporting registers again, too: then it reports its capacity, in a batch whose
        # number shows whether others were lost (LMCache 0.5.6, `on_registered`).
        if instance is None or not instance.registered or not instance.is_reporting:
            self.counts.unknown_heartbeats += 1
            return False
        instance.last_message_at, instance.reports_to = self._clock.now(), ""
        return True

    def deregister(self, instance_id: str) -> None:
        """Remove a server that shuts down: its memory is lost, its chunks in L2 stay."""
        if instance_id in self._instances:
            self._drop(self._instances[instance_id])
            log.info("LMCache server %s has left", instance_id)

    def expire(self) -> None:
        """Remove servers without a heartbeat for `heartbeat_timeout_s`. Call it about once a second."""
        now = self._clock.now()
        for instance in list(self._instances.values()):
            if now - instance.last_message_at > self._options.coordinator.heartbeat_timeout_s:
                self.counts.expired += 1
                log.warning("LMCache server %s was removed: no heartbeat in time", instance.id)
                self._drop(instance)
        for key, pool in list(self._pools.items()):
            if pool.owner in self._instances:
                pool.last_seen = now
            elif pool.owner and now - pool.last_seen > _POOL_RETENTION_S:
                pool.chunks.clear()
                del self._pools[key]

    def admit(self, batch: CacheEvents, member: str = "", sender: str = "") -> BatchOutcome:
        """Whether to apply this batch. Call it once for each sequence number, before `apply`.

        `member` is the member that has forwarded it; empty: it came from the server, from the address
        `sender`.
        """
        outcome = self._admit(batch)
        if sender:
            self._instances[batch.instance_id].sender = sender
        self.counts.batches[outcome] += 1
        if outcome is BatchOutcome.APPLIED:
            instance = self._instances[batch.instance_id]
            instance.reports_to = member
            self._resume(instance)
        return outcome

    def apply(self, batch: CacheEvents) -> None:
        """Apply an admitted batch or a piece of one. Ignores it if the server has restarted or sent a newer
        batch."""
        instance = self._instances.get(batch.instance_id)
        if instance is None or instance.incarnation != batch.incarnation or instance.last_seq != batch.seq:
            return
        kind, events = batch.event_type, self.counts.events
        if kind not in _KINDS or batch.tier not in ("l1", "l2"):
            self.counts.unknown += 1
            return
        events[kind] = events.get(kind, 0) + len(batch.entries)
        if kind == "access":
            return  # can arrive after the deletion of the same object (observed with LMCache 0.5.6)
        chunks = (
            instance.memory
            if batch.tier == "l1"
            else self._pool(instance, batch.backend, shared=batch.shared).chunks
        )
        layout_changes = chunks.layout_changes
        if kind == "delete":
            chunks.remove(instance.scheme, batch.entries)
        elif batch.entries:
            if not instance.scheme_known:
                self._learn_chunk_size(instance, batch)
            if not chunks.store(instance.scheme, batch.entries) and chunks is instance.memory:
                self._set_doubt(instance, Doubt.PARTS)
            if chunks.foreign_hashes and instance.doubt is not Doubt.FOREIGN_HASHES:
                self._clear_memory(instance, Doubt.FOREIGN_HASHES)
        if chunks.layout_changes != layout_changes:
            self._update_attachments()

    def status(self, instance_id: str, status: ServerStatus) -> None:
        """Apply a server's `/status`: its chunk size, its hash algorithm and its number of objects in L1.

        An incomplete map becomes complete when its number of objects equals the server's in two answers
        without an event between them. This suffices because every object in the map is really there.
        """
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        if status.hash_algorithm != BLAKE3:
            if instance.doubt is not Doubt.FOREIGN_HASHES:
                self._clear_memory(instance, Doubt.FOREIGN_HASHES)
            return
        self._set_chunk_size(instance, status.chunk_size)
        if instance.doubt in (None, Doubt.FOREIGN_HASHES) or instance.incarnation is None:
            return
        if status.l1_objects != instance.memory.objects:
            instance.agreed_seq = -1
        elif instance.agreed_seq != instance.last_seq:
            instance.agreed_seq = instance.last_seq
        else:
            log.info("the map of LMCache server %s is complete again", instance_id)
            instance.doubt = None

    # Reports that other members of the fleet forward

    def follow(self, alive: CacheServerAlive, member: str) -> bool:
        """A server has reported to the member `member` that it is alive.

        True if the map of the server is whole there, and not here.
        """
        instance = self._instances.get(alive.server) or self._add(alive.server)
        if not instance.registered or (instance.address, instance.http_port) != (alive.address, alive.port):
            instance.registered = True
            instance.address, instance.http_port = alive.address, alive.port
            self._update_attachments()
        instance.last_message_at, instance.reports_to = self._clock.now(), member
        self.learn_chunk_size(alive.server, alive.chunk_tokens)
        if alive.incarnation is None:
            return False
        position = (-1 if instance.incarnation is None else instance.incarnation, instance.last_seq)
        if position < (alive.incarnation, alive.seq):
            self.mute(instance.id)
        elif position == (alive.incarnation, alive.seq) and alive.is_whole and instance.doubt is None:
            self._resume(instance)
        return alive.is_whole and instance.trust is not MapTrust.WHOLE

    def learn_chunk_size(self, server: str, tokens: int) -> None:
        """Another member knows a server's chunk size; 0: it does not."""
        instance = self._instances.get(server)
        if instance is not None and tokens and not instance.scheme_known:
            self._set_chunk_size(instance, tokens)

    def mute(self, server: str) -> None:
        """Batches of a server did not arrive: its chunks do not count until its next batch."""
        instance = self._instances.get(server)
        if instance is not None and instance.is_reporting:
            instance.is_reporting = False
            log.warning("reports of LMCache server %s are missing: its chunks do not count", server)
            self._update_attachments()

    def member_gone(self, member: str) -> None:
        """A member of the fleet is gone: the chunks of the servers that reported to it do not count until
        their next batches come through another one."""
        muted = [
            instance
            for instance in self._instances.values()
            if instance.reports_to == member and instance.is_reporting
        ]
        for instance in muted:
            instance.is_reporting = False
        if muted:
            log.warning(
                "the gateway that %d LMCache servers reported to is lost: their chunks do not count",
                len(muted),
            )
            self._update_attachments()

    def distrust(self, server: str) -> None:
        """A part of a batch of a server did not arrive."""
        instance = self._instances.get(server)
        if instance is not None:
            self._lose(instance, Doubt.LOST_EVENTS)

    def begin_copy(self, state: CacheServerState) -> ServerCopy:
        """An empty copy of another member's map of a server, for `adopt`."""
        instance = self._instances.get(state.server) or self._add(state.server)
        previous_incarnation = instance.incarnation
        if previous_incarnation is None or (previous_incarnation, instance.last_seq) < (
            state.incarnation,
            state.seq,
        ):
            # Batches were missed here. The stores are cleared now rather than with the next batch, which
            # would clear what the copy has added to the pools.
            self._lose(instance, Doubt.LATE if previous_incarnation is None else Doubt.LOST_EVENTS)
            instance.incarnation, instance.last_seq = state.incarnation, state.seq
        return ServerCopy(state, self, HeldChunks(self._index, Tier.L1))

    def adopt(self, copy: ServerCopy, member: str) -> None:
        """Replace the map of a server by a copy that has everything until now.

        `member` is the member that the server reports to, by that state.
        """
        state, memory = copy.state, copy.memory
        instance = self._instances.get(state.server) or self._add(state.server)
        is_newer = instance.incarnation == state.incarnation and instance.last_seq > state.seq
        if not is_newer and not (instance.registered and not instance.reports_to):
            instance.reports_to = member
        if not instance.registered and state.address:
            instance.registered = True
            instance.address, instance.http_port = state.address, state.port
        if instance.memory is not memory:
            instance.memory.clear()
            instance.memory = memory
        instance.incarnation = state.incarnation
        instance.last_seq = instance.last_seq if is_newer else state.seq
        instance.scheme = ChunkScheme(BLAKE3, state.chunk_tokens)
        instance.scheme_known = state.scheme_known
        instance.doubt, instance.agreed_seq = None, -1
        instance.last_message_at = self._clock.now()
        instance.is_reporting = state.is_reporting or is_newer
        log.info("the map of LMCache server %s is that of another gateway", state.server)
        self._update_attachments()

    def pool_of(self, state: CacheServerState, backend: str, *, shared: bool) -> HeldChunks:
        """The L2 pool of a server whose state another member sends."""
        instance = self._instances.get(state.server) or self._add(state.server)
        return self._pool(instance, backend, shared=shared).chunks

    def _resume(self, instance: LMCacheServer) -> None:
        if not instance.is_reporting:
            instance.is_reporting = True
            log.info("LMCache server %s reports again", instance.id)
            self._update_attachments()

    def _free_id(self) -> str:
        return next(name for number in self._id_numbers if (name := f"mp-{number}") not in self._instances)

    def _add(self, instance_id: str) -> LMCacheServer:
        scheme = ChunkScheme(BLAKE3, self._options.coordinator.chunk_tokens)
        instance = LMCacheServer(instance_id, HeldChunks(self._index, Tier.L1), scheme)
        instance.last_message_at = self._clock.now()
        instance.pools = {pool.backend: pool for pool in self._pools.values() if pool.owner == instance_id}
        self._instances[instance_id] = instance
        return instance

    def _drop(self, instance: LMCacheServer) -> None:
        instance.memory.clear()
        del self._instances[instance.id]
        self._update_attachments()

    def _clear_memory(self, instance: LMCacheServer, doubt: Doubt) -> None:
        """Remove the server's L1 chunks from the index, and mark the map as incomplete."""
        instance.memory.clear()
        self._set_doubt(instance, doubt)

    def _lose(self, instance: LMCacheServer, doubt: Doubt) -> None:
        """Batches were lost: remove the chunks of all of the server's stores."""
        self._clear_memory(instance, doubt)
        for pool in instance.pools.values():
            pool.chunks.clear()

    def _set_doubt(self, instance: LMCacheServer, doubt: Doubt) -> None:
        instance.doubt = doubt
        instance.agreed_seq = -1
        log.warning("the map of LMCache server %s is incomplete: %s", instance.id, doubt)

    def _admit(self, batch: CacheEvents) -> BatchOutcome:
        instance = self._instances.get(batch.instance_id) or self._add(batch.instance_id)
        previous_incarnation, is_new_incarnation = instance.incarnation, False
        if previous_incarnation is not None:
            if batch.incarnation < previous_incarnation and not self._is_set_back(instance):
                return BatchOutcome.STALE
            if batch.incarnation == previous_incarnation and batch.seq <= instance.last_seq:
                return BatchOutcome.DUPLICATE
        instance.stale_since = None
        if batch.incarnation != previous_incarnation:
            if previous_incarnation is not None:
                log.info("LMCache server %s was restarted", instance.id)
            instance.memory.clear()
            instance.incarnation, instance.last_seq, is_new_incarnation = batch.incarnation, 0, True
            instance.doubt = None
            instance.scheme_known = False
        if batch.seq != instance.last_seq + 1:
            # The lost batches may have contained deletions from any of the server's stores.
            self.counts.gaps += 1
            self._lose(
                instance,
                Doubt.LATE if is_new_incarnation and previous_incarnation is None else Doubt.LOST_EVENTS,
            )
        instance.last_seq = batch.seq
        return BatchOutcome.APPLIED

    def _is_set_back(self, instance: LMCacheServer) -> bool:
        """Whether lower incarnations have come for so long that they are no late batches."""
        # An incarnation is the server's start time: after its clock was set back, a restarted server has a
        # lower one, and without this rule all its batches would be stale.
        now = self._clock.now()
        if instance.stale_since is None:
            instance.stale_since = now
        return now - instance.stale_since > self._options.coordinator.heartbeat_timeout_s

    def _pool(self, instance: LMCacheServer, backend: str, *, shared: bool) -> L2Pool:
        pool = instance.pools.get(backend)
        if pool is None:
            names = self._options.pools
            name = names.get(f"{instance.id}/{backend}") or names.get(backend) or ""
            owner = "" if name or shared else instance.id
            name = name or backend
            pool = self._pools.get((owner, name))
            if pool is None:
                pool = L2Pool(name, backend, HeldChunks(self._index, Tier.L2), owner, self._clock.now())
                self._pools[owner, name] = pool
            instance.pools[backend] = pool
            self._update_attachments()
        return pool

    def _learn_chunk_size(self, instance: LMCacheServer, batch: CacheEvents) -> None:
        try:
            tokens = batch.entries[0].token_count()
        except WireError as error:
            log.warning(
                "LMCache server %s: cannot learn its chunk size from an event: %s", instance.id, error
            )
            return
        if tokens:
            self._set_chunk_size(instance, tokens)

    def _set_chunk_size(self, instance: LMCacheServer, tokens: int) -> None:
        instance.scheme_known = True
        if tokens != instance.scheme.chunk_tokens:
            instance.scheme = ChunkScheme(BLAKE3, tokens)
            self._update_attachments()

    def _update_attachments(self) -> None:
        self.changes += 1
        self._attachments.update(self._instances)
