"""Which LMCache server each worker reads from, and under which model names the index looks up its prompts."""

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
from kvroute.index.prefix_index import MapTrust
from kvroute.lmcache.options import LMCacheOptions
from kvroute.lmcache.stored_chunks import HeldChunks, StoredModel


class Doubt(StrEnum):
    """Why the map of a server's L1 may be incomplete. A closed set, so it can be a metric label."""

    LOST_EVENTS = "lost_events"
    LATE = "late"
    """The first batch received was not the server's first one: the server had started earlier."""
    REGISTERED_AGAIN = "registered_again"
    PARTS = "parts"
    """Events showed that a chunk has more parts than was known."""
    FOREIGN_HASHES = "foreign_hashes"
    """The server names chunks by another hash than BLAKE3, so none of its chunks can be matched."""


@dataclass(slots=True, eq=False)
class L2Pool:
    """An L2 store. `backend` is the type of LMCache's adapter. Mutable: changed by the coordinator."""

    name: str
    backend: str
    held: HeldChunks
    owner: str = ""
    """Id of the only server that uses this store; empty for a store that several servers share."""
    last_seen: float = 0.0
    """When the owner was last known, in seconds of the coordinator's clock."""


@dataclass(slots=True, eq=False)
class LMCacheServer:
    """An LMCache server (0.5, multiprocess). Mutable: changed by the coordinator.

    `memory` is its L1. `incarnation` is None until the first batch. `scheme` says how the server names
    chunks; `scheme_known` is False while that is only the configured default.
    """

    id: str
    memory: HeldChunks
    scheme: ChunkScheme
    address: str = ""
    http_port: int = 0
    registered: bool = False
    last_message_at: float = 0.0
    incarnation: int | None = None
    last_seq: int = 0
    stale_since: float | None = None
    """When the first batch with a lower incarnation came, if none with the current one has come since."""
    scheme_known: bool = False
    doubt: Doubt | None = Doubt.LATE
    pools: dict[str, L2Pool] = field(default_factory=dict)
    """By backend."""
    agreed_seq: int = -1
    """`last_seq` when the server's `/status` last reported as many objects as the map has; -1: it did not."""

    @property
    def trust(self) -> MapTrust:
        """WHOLE, or PARTIAL while the server may hold more chunks than the map has."""
        return MapTrust.WHOLE if self.doubt is None else MapTrust.PARTIAL


_LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class ServedWorker:
    """The facts about a worker that its attachment to LMCache servers depends on.

    `models` are vLLM's own names of its model (`--model`; empty: unknown). `slots` are the worker's slots in
    the index.
    """

    id: str
    host: str
    slots: tuple[int, ...]
    models: frozenset[str] = frozenset()
    node: str = ""


def served_worker(worker: Worker, slots: Sequence[int]) -> ServedWorker:
    """Build a `ServedWorker` from the worker's `/v1/models` answer.

    There `root` is the value of `--model`, except for adapters, where it is the adapter's path (vLLM 0.32).
    """
    adapters = {name for name, _ in worker.facts.adapters}
    roots = {card.get("root") for card in worker.facts.model_cards if card["id"] not in adapters}
    names = frozenset(root for root in roots if isinstance(root, str) and root)
    host = urlsplit(worker.spec.url).hostname or ""
    return ServedWorker(str(worker.id), host, tuple(slots), names, worker.spec.node or "")


class Attachments:
    """Attaches each worker's slots to the L1 of its server and to the L2 pools of that server.

    Mutable: `put` and `drop` change the workers, `update` changes the attachments in the index.
    """

    def __init__(self, index: ChunkIndex, options: LMCacheOptions) -> None:
        self._index = index
        self._options = options
        self._workers: dict[str, ServedWorker] = {}
        self._server_of: dict[str, LMCacheServer] = {}
        self._readers: dict[LMCacheServer, list[str]] = {}
        """Server -> ids of its workers: `_server_of` reversed."""
        self._attached: dict[int, dict[ChunkHolder, list[ChunkDomain]]] = {}

    def put(self, worker: ServedWorker) -> None:
        """Add or replace a worker. Takes effect with the next `update`."""
        previous = self._workers.get(worker.id)
        if previous is not None:
            self._detach(set(previous.slots) - set(worker.slots))
        self._workers[worker.id] = worker

    def drop(self, worker_id: str) -> None:
        """Remove a worker, and detach its slots."""
        worker = self._workers.pop(worker_id, None)
        server = self._server_of.pop(worker_id, None)
        if server is not None:
            self._readers[server].remove(worker_id)
        if worker is not None:
            self._detach(set(worker.slots))

    def instance_of(self, worker_id: str) -> LMCacheServer | None:
        return self._server_of.get(worker_id)

    def models_of(self, instance: LMCacheServer, pool: L2Pool) -> list[StoredModel]:
        """Models whose chunks the workers of `instance` may read from `pool`.

        A model whose name is known counts even if the pool has not shown a chunk of the model yet.
        """
        found: dict[StoredModel, None] = {}
        for worker_id in self._readers.get(instance, ()):
            worker = self._workers[worker_id]
            models = self._models(worker, instance, pool.held)
            found.update(dict.fromkeys(models or [StoredModel(name, 1) for name in sorted(worker.models)]))
        return list(found)

    def model_of(self, worker_id: str) -> StoredModel | None:
        """The worker's model under its name in the server's stores; None if the stores have not shown it."""
        worker, instance = self._workers.get(worker_id), self._server_of.get(worker_id)
        if worker is None or instance is None:
            return None
        for held in (instance.memory, *(pool.held for pool in instance.pools.values())):
            if models := self._models(worker, instance, held):
                return models[0]
        return None

    def update(self, instances: Mapping[str, LMCacheServer]) -> None:
        """Find each worker's server again, and attach and detach slots accordingly. A few us per worker."""
        at: dict[str, list[LMCacheServer]] = {}
        for instance in instances.values():
            if instance.registered:
                at.setdefault(_normalized_host(instance.address), []).append(instance)
        self._server_of, self._readers = {}, {}
        for worker in self._workers.values():
            found = self._find_server(worker, instances, at)
            if found is not None:
                self._server_of[worker.id] = found
                self._readers.setdefault(found, []).append(worker.id)
        for worker in self._workers.values():
            domains_by_holder = self._domains_of(worker)
            for slot in worker.slots:
                self._attach(slot, domains_by_holder)

    def _find_server(
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
            there = at.get(_normalized_host(worker.host), ())
            found = there[0] if len(there) == 1 else None
        return found if found is not None and found.registered else None

    def _domains_of(self, worker: ServedWorker) -> dict[ChunkHolder, list[ChunkDomain]]:
        instance = self._server_of.get(worker.id)
        if instance is None:
            return {}
        domains_by_holder = {}
        for held in (instance.memory, *(pool.held for pool in instance.pools.values())):
            models = self._models(worker, instance, held)
            domains = [model.domain(instance.scheme) for model in models]
            if held is not instance.memory and not models:
                domains = [StoredModel(name, 1).domain(instance.scheme) for name in sorted(worker.models)]
            if domains:
                domains_by_holder[held.holder] = domains
        return domains_by_holder

    def _models(self, worker: ServedWorker, instance: LMCacheServer, held: HeldChunks) -> list[StoredModel]:
        """The worker's model in this store: a list with one model, or an empty list if it is not clear.

        The model is found by name. Otherwise it is the only model in the store, if no other worker can have
        stored it. If the store has the model in several world sizes, the one in the server's L1 counts.
        """
        seen = held.models
        chosen = [model for model in seen if model.name in worker.models]
        if not chosen and len({model.name for model in seen}) == 1:
            only_worker = len(self._readers.get(instance, ())) == 1
            if only_worker or not worker.models:
                chosen = list(seen)
        if len(chosen) > 1:
            chosen = [model for model in chosen if model in instance.memory.models]
        return chosen if len(chosen) == 1 else []

    def _attach(self, slot: int, domains_by_holder: Mapping[ChunkHolder, list[ChunkDomain]]) -> None:
        attached = self._attached.setdefault(slot, {})
        for holder in [holder for holder in attached if holder not in domains_by_holder]:
            self._index.detach(slot, holder)
            del attached[holder]
        for holder, domains in domains_by_holder.items():
            if attached.get(holder) != domains:
                self._index.attach(slot, holder, domains)
                attached[holder] = domains

    def _detach(self, slots: set[int]) -> None:
        for slot in slots:
            for holder in self._attached.pop(slot, {}):
                self._index.detach(slot, holder)


def _normalized_host(host: str) -> str:
    """The host in one form, so that equal hosts compare equal. Names are not resolved."""
    host = host.strip("[]").lower()
    if host in _LOOPBACK_HOSTS:
        return "127.0.0.1"
    try:
        return ip_address(host).compressed
    except ValueError:
        return host
