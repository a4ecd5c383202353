"""Being LMCache's coordinator, without the I/O: which servers there are, what they hold, who may use it.

The rules are those of LMCache 0.5.6 (v1/mp_coordinator): a server registers, sends heartbeats and numbered
batches of events; a higher incarnation voids what its memory held, a lower one is stale, a number seen before
is a duplicate. Lost batches cannot be had again: from then on only what is announced anew is believed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Final

from kvroute.blocks.chunks import BLAKE3, ChunkScheme
from kvroute.blocks.keys import Tier
from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.membership import Doubt, Joins, L2Pool, LMCacheServer, ServedWorker
from kvroute.lmcache.options import LMCacheOptions
from kvroute.lmcache.stored_chunks import HeldChunks, StoredModel
from kvroute.wire.lmcache_server import CacheEvents, ServerRegistration, ServerStatus

log = logging.getLogger(__name__)

_KINDS: Final = frozenset({"store", "delete", "access", "config"})
_POOL_KEPT_S: Final = 3600.0
"""What a server's own L2 held is remembered this long after it was last heard of."""


class BatchOutcome(StrEnum):
    """What becomes of a batch."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    STALE = "stale"


@dataclass(slots=True)
class CoordinatorCounts:
    """What came since the start. Mutable; counted by its coordinator."""

    registrations: int = 0
    unknown_heartbeats: int = 0
    expired: int = 0
    """Servers that were silent for too long."""
    batches: dict[BatchOutcome, int] = field(default_factory=lambda: dict.fromkeys(BatchOutcome, 0))
    events: dict[str, int] = field(default_factory=dict)
    """Entries by kind of event."""
    gaps: int = 0
    unknown: int = 0
    """Batches of a kind or tier that this version does not know."""


class Coordinator:
    """Feeds `index` with what LMCache servers report, and attaches the slots of workers to it.

    Mutable throughout; touched from the event loop only. No call takes longer than a piece of a batch
    (`wire.lmcache_mp.PIECE_BYTES`).
    """

    def __init__(self, index: ChunkIndex, clock: Clock, options: LMCacheOptions) -> None:
        self.counts = CoordinatorCounts()
        self.changes = 0
        """Rises whenever `instances`, `models_of` or the parts of a pool's objects may be others."""
        self._index = index
        self._clock = clock
        self._options = options
        self._instances: dict[str, LMCacheServer] = {}
        self._pools: dict[tuple[str, str], L2Pool] = {}
        """By owner and name."""
        self._joins = Joins(index, options)
        self._numbers = count(1)

    # What others read

    def instances(self) -> Sequence[LMCacheServer]:
        return list(self._instances.values())

    def instance(self, instance_id: str) -> LMCacheServer | None:
        return self._instances.get(instance_id)

    def pools(self) -> Sequence[L2Pool]:
        return list(self._pools.values())

    def instance_of(self, worker_id: str) -> LMCacheServer | None:
        """The live server that a worker reads from, if one is known."""
        return self._joins.instance_of(worker_id)

    def models_of(self, instance: LMCacheServer, pool: L2Pool) -> list[StoredModel]:
        """Models whose chunks workers of this server read from this pool."""
        return self._joins.models_of(instance, pool)

    def model_of(self, worker_id: str) -> StoredModel | None:
        """A worker's model as its server's stores know it; None where that is not clear."""
        return self._joins.model_of(worker_id)

    # Workers

    def worker_changed(self, worker: ServedWorker) -> None:
        """A worker joined, or its slots or models are others now."""
        self._joins.put(worker)
        self._join()

    def worker_left(self, worker_id: str) -> None:
        self._joins.drop(worker_id)
        self.changes += 1

    # The protocol

    def register(self, message: ServerRegistration) -> tuple[str, bool]:
        """(id, whether it was registered before); an empty id is replaced."""
        self.counts.registrations += 1
        instance_id = message.instance_id.strip() or self._free_id()
        known = self._instances.get(instance_id)
        again = known is not None and known.registered
        instance = known or self._add(instance_id)
        if again and instance.memory.objects:
            # It was restarted, and then its memory is empty; or our answer was lost, and then it is not.
            # Events that come before the first registration say nothing of the sort: a server tries to
            # register every 5 s, and reports meanwhile.
            self._void(instance, Doubt.REGISTERED_AGAIN)
        instance.registered = True
        instance.address, instance.http_port = message.ip.strip(), message.http_port
        instance.last_heard = self._clock.now()
        log.info(
            "LMCache server %s registered%s from %s", instance_id, " again" if again else "", instance.address
        )
        self._join()
        return instance_id, again

    def heartbeat(self, instance_id: str) -> bool:
        """False if it is not known: it then registers again."""
        instance = self._instances.get(instance_id)
        if instance is None or not instance.registered:
            self.counts.unknown_heartbeats += 1
            return False
        instance.last_heard = self._clock.now()
        return True

    def deregister(self, instance_id: str) -> None:
        """It has shut down: its memory is gone, what lies in L2 is not."""
        if instance_id in self._instances:
            self._drop(self._instances[instance_id])
            log.info("LMCache server %s has left", instance_id)

    def expire(self) -> None:
        """Forget servers that were silent for `heartbeat_timeout_s`. Call it every second or so."""
        now = self._clock.now()
        for instance in list(self._instances.values()):
            if now - instance.last_heard > self._options.coordinator.heartbeat_timeout_s:
                self.counts.expired += 1
                log.warning("LMCache server %s has not been heard of: forgotten", instance.id)
                self._drop(instance)
        for place, pool in list(self._pools.items()):
            if pool.owner in self._instances:
                pool.last_seen = now
            elif pool.owner and now - pool.last_seen > _POOL_KEPT_S:
                pool.held.clear()
                del self._pools[place]

    def admit(self, batch: CacheEvents) -> BatchOutcome:
        """Whether the events of this batch count; call it once for each number, then `apply`."""
        outcome = self._admit(batch)
        self.counts.batches[outcome] += 1
        return outcome

    def apply(self, batch: CacheEvents) -> None:
        """Take in an admitted batch, or a piece of one; nothing of a server that has changed since."""
        instance = self._instances.get(batch.instance_id)
        if instance is None or instance.incarnation != batch.incarnation or instance.last_seq != batch.seq:
            return
        kind, events = batch.event_type, self.counts.events
        if kind not in _KINDS or batch.tier not in ("l1", "l2"):
            self.counts.unknown += 1
            return
        events[kind] = events.get(kind, 0) + len(batch.entries)
        if kind == "access":
            return  # may come after the deletion of what it names (seen, LMCache 0.5.6)
        held = instance.memory if batch.tier == "l1" else self._pool(instance, batch).held
        kinds = held.kinds
        if kind == "delete":
            held.remove(instance.scheme, batch.entries)
        elif batch.entries:
            if not instance.scheme_known:
                self._learn_chunk_size(instance, batch)
            if not held.store(instance.scheme, batch.entries) and held is instance.memory:
                self._doubted(instance, Doubt.PARTS)
            if held.foreign and instance.doubt is not Doubt.FOREIGN_HASHES:
                self._void(instance, Doubt.FOREIGN_HASHES)
        if held.kinds != kinds:
            self._join()

    def status(self, instance_id: str, status: ServerStatus) -> None:
        """What a server says about itself. A map that lacked something is whole again when it has as many
        objects as the server has, twice without an event in between: all that it has is right."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        if status.hash_algorithm != BLAKE3:
            if instance.doubt is not Doubt.FOREIGN_HASHES:
                self._void(instance, Doubt.FOREIGN_HASHES)
            return
        self._set_chunk_size(instance, status.chunk_size)
        if instance.doubt in (None, Doubt.FOREIGN_HASHES) or instance.incarnation is None:
            return
        if status.l1_objects != instance.memory.objects:
            instance.quiet_seq = -1
        elif instance.quiet_seq != instance.last_seq:
            instance.quiet_seq = instance.last_seq
        else:
            log.info("all that LMCache server %s holds is known again", instance_id)
            instance.doubt = None

    # How it is done

    def _free_id(self) -> str:
        return next(name for number in self._numbers if (name := f"mp-{number}") not in self._instances)

    def _add(self, instance_id: str) -> LMCacheServer:
        scheme = ChunkScheme(BLAKE3, self._options.coordinator.chunk_tokens)
        instance = LMCacheServer(instance_id, HeldChunks(self._index, Tier.L1), scheme)
        instance.last_heard = self._clock.now()
        instance.pools = {pool.backend: pool for pool in self._pools.values() if pool.owner == instance_id}
        self._instances[instance_id] = instance
        return instance

    def _drop(self, instance: LMCacheServer) -> None:
        instance.memory.clear()
        del self._instances[instance.id]
        self._join()

    def _void(self, instance: LMCacheServer, doubt: Doubt) -> None:
        """Nothing that its memory was believed to hold counts any more."""
        instance.memory.clear()
        self._doubted(instance, doubt)

    def _doubted(self, instance: LMCacheServer, doubt: Doubt) -> None:
        instance.doubt = doubt
        instance.quiet_seq = -1
        log.warning("what LMCache server %s holds is not all known: %s", instance.id, doubt)

    def _admit(self, batch: CacheEvents) -> BatchOutcome:
        instance = self._instances.get(batch.instance_id) or self._add(batch.instance_id)
        before, first = instance.incarnation, False
        if before is not None:
            if batch.incarnation < before:
                return BatchOutcome.STALE
            if batch.incarnation == before and batch.seq <= instance.last_seq:
                return BatchOutcome.DUPLICATE
        if batch.incarnation != before:
            if before is not None:
                log.info("LMCache server %s was restarted", instance.id)
            instance.memory.clear()
            instance.incarnation, instance.last_seq, first = batch.incarnation, 0, True
            instance.doubt = None
            instance.scheme_known = False
        if batch.seq != instance.last_seq + 1:
            # What was lost may have been deletions, in any of its stores.
            self.counts.gaps += 1
            self._void(instance, Doubt.LATE if first and before is None else Doubt.LOST_EVENTS)
            for pool in instance.pools.values():
                pool.held.clear()
        instance.last_seq = batch.seq
        return BatchOutcome.APPLIED

    def _pool(self, instance: LMCacheServer, batch: CacheEvents) -> L2Pool:
        pool = instance.pools.get(batch.backend)
        if pool is None:
            backend, names = batch.backend, self._options.pools
            name = names.get(f"{instance.id}/{backend}") or names.get(backend) or ""
            owner = "" if name or batch.shared else instance.id
            name = name or backend
            pool = self._pools.get((owner, name))
            if pool is None:
                pool = L2Pool(name, backend, HeldChunks(self._index, Tier.L2), owner, self._clock.now())
                self._pools[owner, name] = pool
            instance.pools[backend] = pool
            self._join()
        return pool

    def _learn_chunk_size(self, instance: LMCacheServer, batch: CacheEvents) -> None:
        try:
            tokens = batch.entries[0].token_count()
        except WireError as error:
            log.warning("LMCache server %s: %s", instance.id, error)
            return
        if tokens:
            self._set_chunk_size(instance, tokens)

    def _set_chunk_size(self, instance: LMCacheServer, tokens: int) -> None:
        instance.scheme_known = True
        if tokens != instance.scheme.chunk_tokens:
            instance.scheme = ChunkScheme(BLAKE3, tokens)
            self._join()

    def _join(self) -> None:
        self.changes += 1
        self._joins.join(self._instances)
