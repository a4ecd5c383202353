"""Which LMCache server a worker reads from, and under which names its prompts are looked up there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from kvroute.blocks.chunks import ChunkScheme
from kvroute.fleet.worker import Worker
from kvroute.index.chunk_index import ChunkDomain, ChunkHolder, ChunkIndex
from kvroute.index.trust import MapTrust
from kvroute.lmcache.options import LMCacheOptions
from kvroute.lmcache.stored_chunks import HeldChunks, StoredModel


class Doubt(StrEnum):
    """Why a server's memory may hold more than is known; bounded, so a metric label."""

    LOST_EVENTS = "lost_events"
    LATE = "late"
    """Its first batch here was not its first: it ran before, or while we did not."""
    REGISTERED_AGAIN = "registered_again"
    PARTS = "parts"
    """Chunks turned out to have more parts than was known."""
    FOREIGN_HASHES = "foreign_hashes"
    """It does not name chunks by BLAKE3: nothing of it is known."""


@dataclass(slots=True, eq=False)
class L2Pool:
    """An L2 store. Mutable: changed by the coordinator. `backend` is the adapter's type."""

    name: str
    backend: str
    held: HeldChunks
    owner: str = ""
    """Instance whose own it is; empty for one that several share."""
    last_seen: float = 0.0


@dataclass(slots=True, eq=False)
class LMCacheServer:
    """An LMCache server. Mutable: changed by the coordinator.

    `incarnation` is None until its first batch. `scheme` is how it names chunks, `scheme_known` whether it
    has said so itself.
    """

    id: str
    memory: HeldChunks
    scheme: ChunkScheme
    address: str = ""
    http_port: int = 0
    registered: bool = False
    last_heard: float = 0.0
    incarnation: int | None = None
    last_seq: int = 0
    scheme_known: bool = False
    doubt: Doubt | None = Doubt.LATE
    pools: dict[str, L2Pool] = field(default_factory=dict)
    """By backend."""
    quiet_seq: int = -1
    """`last_seq` when its status last agreed with what is believed."""

    @property
    def trust(self) -> MapTrust:
        """WHOLE if all it holds is known; else PARTIAL: it holds what is believed, and perhaps more."""
        return MapTrust.WHOLE if self.doubt is None else MapTrust.PARTIAL


_HERE: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class ServedWorker:
    """A worker as LMCache's map needs it. `models` are the names that vLLM itself knows its model by
    (`--model`; empty: not known), `slots` its places in the index."""

    id: str
    host: str
    slots: tuple[int, ...]
    models: frozenset[str] = frozenset()
    node: str = ""


def served_worker(worker: Worker, slots: Sequence[int]) -> ServedWorker:
    """Read off what `/v1/models` of the worker said: `root` is `--model` there (vLLM 0.32), and for adapters
    another path."""
    adapters = {name for name, _ in worker.facts.adapters}
    roots = {card.get("root") for card in worker.facts.model_cards if card["id"] not in adapters}
    names = frozenset(root for root in roots if isinstance(root, str) and root)
    host = urlsplit(worker.spec.url).hostname or ""
    return ServedWorker(str(worker.id), host, tuple(slots), names, worker.spec.node or "")


class Joins:
    """Attaches the slots of each worker to what its server and that one's pools hold. Mutable: `put` and
    `drop` change workers, `join` attachments."""

    def __init__(self, index: ChunkIndex, options: LMCacheOptions) -> None:
        self._index = index
        self._options = options
        self._workers: dict[str, ServedWorker] = {}
        self._joined: dict[str, LMCacheServer] = {}
        self._readers: dict[LMCacheServer, list[str]] = {}
        """The same the other way round."""
        self._attached: dict[int, dict[ChunkHolder, list[ChunkDomain]]] = {}

    def put(self, worker: ServedWorker) -> None:
        before = self._workers.get(worker.id)
        if before is not None:
            self._detach(set(before.slots) - set(worker.slots))
        self._workers[worker.id] = worker

    def drop(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        joined = self._joined.pop(worker_id, None)
        if joined is not None:
            self._readers[joined].remove(worker_id)
        if worker is not None:
            self._detach(set(worker.slots))

    def instance_of(self, worker_id: str) -> LMCacheServer | None:
        return self._joined.get(worker_id)

    def models_of(self, instance: LMCacheServer, pool: L2Pool) -> list[StoredModel]:
        """Models that workers of `instance` look for in `pool`; those whose name is known count even before
        anything of them was seen there."""
        found: dict[StoredModel, None] = {}
        for worker_id in self._readers.get(instance, ()):
            worker = self._workers[worker_id]
            models = self._models(worker, instance, pool.held)
            found.update(dict.fromkeys(models or [StoredModel(name, 1) for name in sorted(worker.models)]))
        return list(found)

    def model_of(self, worker_id: str) -> StoredModel | None:
        """A worker's model as its server's stores know it; None where nothing of it was seen there yet."""
        worker, instance = self._workers.get(worker_id), self._joined.get(worker_id)
        if worker is None or instance is None:
            return None
        for held in (instance.memory, *(pool.held for pool in instance.pools.values())):
            if models := self._models(worker, instance, held):
                return models[0]
        return None

    def join(self, instances: Mapping[str, LMCacheServer]) -> None:
        """Make attachments what they should be now. Costs a few microseconds a worker."""
        at: dict[str, list[LMCacheServer]] = {}
        for instance in instances.values():
            if instance.registered:
                at.setdefault(_canonical(instance.address), []).append(instance)
        self._joined, self._readers = {}, {}
        for worker in self._workers.values():
            found = self._instance_for(worker, instances, at)
            if found is not None:
                self._joined[worker.id] = found
                self._readers.setdefault(found, []).append(worker.id)
        for worker in self._workers.values():
            wanted = self._wanted(worker)
            for slot in worker.slots:
                self._attach(slot, wanted)

    def _instance_for(
        self,
        worker: ServedWorker,
        instances: Mapping[str, LMCacheServer],
        at: Mapping[str, Sequence[LMCacheServer]],
    ) -> LMCacheServer | None:
        options = self._options
        name = options.instances.get(worker.id) or options.instance.format(
            id=worker.id, host=worker.host, node=worker.node
        )
        found = instances.get(name or worker.id)
        if found is None and not name:
            near = at.get(_canonical(worker.host), ())
            found = near[0] if len(near) == 1 else None
        return found if found is not None and found.registered else None

    def _wanted(self, worker: ServedWorker) -> dict[ChunkHolder, list[ChunkDomain]]:
        instance = self._joined.get(worker.id)
        if instance is None:
            return {}
        wanted = {}
        for held in (instance.memory, *(pool.held for pool in instance.pools.values())):
            models = self._models(worker, instance, held)
            domains = [model.domain(instance.scheme) for model in models]
            if held is not instance.memory and not models:
                domains = [StoredModel(name, 1).domain(instance.scheme) for name in sorted(worker.models)]
            if domains:
                wanted[held.holder] = domains
        return wanted

    def _models(self, worker: ServedWorker, instance: LMCacheServer, held: HeldChunks) -> list[StoredModel]:
        """The worker's model as this store knows it: by name, else the only one there if nobody else could
        have put it there. One that is there in several world sizes is the one in the server's memory."""
        seen = held.models
        chosen = [model for model in seen if model.name in worker.models]
        if not chosen and len({model.name for model in seen}) == 1:
            alone = len(self._readers.get(instance, ())) == 1
            if alone or not worker.models:
                chosen = list(seen)
        if len(chosen) > 1:
            chosen = [model for model in chosen if model in instance.memory.models]
        return chosen if len(chosen) == 1 else []

    def _attach(self, slot: int, wanted: Mapping[ChunkHolder, list[ChunkDomain]]) -> None:
        attached = self._attached.setdefault(slot, {})
        for holder in [holder for holder in attached if holder not in wanted]:
            self._index.detach(slot, holder)
            del attached[holder]
        for holder, domains in wanted.items():
            if attached.get(holder) != domains:
                self._index.attach(slot, holder, domains)
                attached[holder] = domains

    def _detach(self, slots: set[int]) -> None:
        for slot in slots:
            for holder in self._attached.pop(slot, {}):
                self._index.detach(slot, holder)


def _canonical(host: str) -> str:
    """Equal for hosts that are surely the same one; names are not resolved."""
    host = host.strip("[]").lower()
    if host in _HERE:
        return "127.0.0.1"
    try:
        return ip_address(host).compressed
    except ValueError:
        return host
