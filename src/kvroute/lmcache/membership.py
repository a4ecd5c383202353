"""Which LMCache server each worker reads from, and which chunks each store holds.

The index looks up a worker's prompts under the model names of its stores. LMCache stores one object for each
rank of a model's tensor-parallel world and, where its servers separate them, for each group of layers.
LMCache can load a chunk only if all its objects are present, so only then does the chunk count.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvroute.blocks.chunks import ChunkKey, ChunkScheme, ChunkSpace
from kvroute.blocks.keys import Tier
from kvroute.fleet.worker import Worker
from kvroute.index.chunk_index import ChunkDomain, ChunkHolder, ChunkIndex
from kvroute.index.map_trust import MapTrust
from kvroute.index.snapshot import ENTRY_BYTES, CopyableChunkIndex
from kvroute.lmcache.options import LMCacheOptions
from kvroute.lmcache.registration import normalized_host
from kvroute.wire.lmcache_server import (
    ChunkRun,
    EventEntry,
    ObjectKey,
    StoreLayout,
    entries_of,
    object_kind,
    runs_of,
)

SINGLE_RANK: Final = 0x01000100
"""`kv_rank` of a model that runs on one device."""
_KEYS_PER_STEP: Final = 512
"""Chunks that are copied in one step: 0.5 ms, and 2 ms of CPU for chunks with several parts."""
_TABLES: Final = 256
"""Hash tables of the chunks with several parts: a step of a copy reads one, a step of a sweep frees one."""


class StoredModel(NamedTuple):
    """A model in a store: its name there, and the number of ranks that its KV cache is split over."""

    name: str
    world: int

    def domain(self, scheme: ChunkScheme) -> ChunkDomain:
        """The index domain of this model's chunks. Chunks of different world sizes are not compatible."""
        return scheme, self.name if self.world == 1 else f"{self.name}\0{self.world}"


@dataclass(slots=True)
class _Parts:
    """The parts of a model's chunks, as far as events have shown them. Mutable: changed by `HeldChunks`."""

    groups: set[int] = field(default_factory=set)
    kv_ranks: set[int] = field(default_factory=set)
    tables: list[dict[tuple[ChunkSpace, ChunkKey], int]] = field(
        default_factory=lambda: [{} for _ in range(_TABLES)]
    )
    """For models with several parts: a chunk -> its present parts as bits."""
    objects: int = 0
    """Present parts of all chunks in `tables`."""
    whole: int = 0
    """Chunks in `tables` with all parts."""


class ChangedObjects:
    """Objects of a store that have changed since a copy of it was begun. Mutable: by `add`."""

    def __init__(self) -> None:
        self.entries: set[int] = set()
        """The entries of their chunks in the index."""
        self.keys: dict[tuple[str, int, int, str], set[ChunkKey]] = {}
        """By model, `kv_rank`, group of layers and salt."""

    def add(self, scheme: ChunkScheme, entries: Iterable[EventEntry]) -> None:
        """Add the objects of a batch; names that are no BLAKE3 hashes are left out."""
        for run in runs_of(entries):
            keys = array("Q", run.keys)
            self.keys.setdefault((run.model, run.kv_rank, run.group, run.salt), set()).update(keys)
            model = StoredModel(run.model, max(1, run.kv_rank >> 24))
            space = ChunkSpace(*model.domain(scheme), run.salt)
            self.entries.update(CopyableChunkIndex.entries(space, keys))


class HeldChunks:
    """One store's chunks, written to the index. Mutable: `store`, `remove` and `clear` change them.

    `foreign_hashes` counts names that are no BLAKE3 hashes, `layout_changes` new models, ranks and groups.
    """

    def __init__(self, index: ChunkIndex, tier: Tier) -> None:
        self.holder = ChunkHolder(tier, shared=True)
        self.foreign_hashes = 0
        self.layout_changes = 0
        self._index = index
        self._parts: dict[StoredModel, _Parts] = {}

    @property
    def objects(self) -> int:
        """Number of objects in the store."""
        # A chunk with several parts counts as one chunk of the holder while it is whole.
        return self.holder.chunks + sum(parts.objects - parts.whole for parts in self._parts.values())

    @property
    def models(self) -> Sequence[StoredModel]:
        """Models that events have named, in order of first appearance."""
        return list(self._parts)

    def object_parts(self, model: StoredModel) -> list[tuple[int, int]]:
        """(`kv_rank`, `object_group_id`) of each object of a chunk of `model`."""
        parts = self._parts.get(model)
        if parts is None:
            return [(SINGLE_RANK, 0)] if model.world == 1 else []
        return [(rank, group) for rank in sorted(parts.kv_ranks) for group in sorted(parts.groups)]

    def clear(self) -> None:
        """Remove all chunks. The models and the parts of their chunks stay known."""
        self._index.clear(self.holder)
        for parts in self._parts.values():
            self._index.free_later(parts.tables)
            parts.tables, parts.objects, parts.whole = [{} for _ in range(_TABLES)], 0, 0

    def store(self, scheme: ChunkScheme, entries: Iterable[EventEntry]) -> bool:
        """Add objects. False if they show that chunks have more parts than was known.

        In this case all earlier chunks are removed first, because those chunks may lack a part.
        """
        entries = list(entries)
        layout_known = self._learn_parts(entries)
        for key, keys in self._runs(entries):
            model = _model(key)
            parts = self._parts[model]
            space = ChunkSpace(*model.domain(scheme), key.cache_salt)
            if model.world > 1 or len(parts.groups) > 1:
                bit, whole = self._bit(key), self._whole(model, parts)
                keys = [
                    chunk_key for chunk_key in keys if self._add(parts, space, chunk_key, bit, whole) == whole
                ]
            self._index.store(self.holder, space, keys)
        return layout_known

    def remove(self, scheme: ChunkScheme, entries: Iterable[EventEntry]) -> None:
        """Remove objects."""
        for key, keys in self._runs(entries):
            model = _model(key)
            parts = self._parts.get(model)
            if parts is None:
                continue
            space = ChunkSpace(*model.domain(scheme), key.cache_salt)
            self._index.remove_all(self.holder, space, keys)
            if model.world > 1 or len(parts.groups) > 1:
                bit, whole = self._bit(key), self._whole(model, parts)
                for chunk_key in keys:
                    self._drop(parts, space, chunk_key, bit, whole)

    # Another gateway's copy

    def layouts(self) -> list[StoreLayout]:
        """The models and the parts of their chunks."""
        return [
            StoreLayout(model.name, model.world, sorted(parts.kv_ranks), sorted(parts.groups))
            for model, parts in self._parts.items()
        ]

    def contents(self) -> Iterator[tuple[bytes, list[ChunkRun]]]:
        """All chunks, for `restore`, in steps of about 1 ms: entries of the index, and objects of chunks
        with several parts. Changes between two steps may be in it or not."""
        assert isinstance(self._index, CopyableChunkIndex)
        for entries in self._index.entries_of(self.holder):
            yield entries, []
        for model, parts in list(self._parts.items()):
            if model.world == 1 and len(parts.groups) == 1:
                continue
            for table in parts.tables:
                chunks = list(table.items())
                for start in range(0, len(chunks), _KEYS_PER_STEP):
                    for kv_rank, group in self.object_parts(model):
                        some = chunks[start : start + _KEYS_PER_STEP]
                        yield b"", _runs_of_part(model, kv_rank, group, some)

    def restore(
        self,
        scheme: ChunkScheme,
        layouts: Iterable[StoreLayout],
        entries: bytes,
        runs: Iterable[ChunkRun],
        changed: ChangedObjects | None = None,
    ) -> Iterator[None]:
        """Add one part of another gateway's `contents`, and its `layouts`; yields after each step of about
        1 ms. Raises ValueError.

        `changed` objects are skipped: what the store has of them is newer. It may grow between two steps.
        """
        changed = ChangedObjects() if changed is None else changed
        for layout in layouts:
            parts = self._parts.setdefault(StoredModel(layout.model, layout.world), _Parts())
            if parts.groups and not parts.groups.issuperset(layout.groups):
                self.clear()  # as in `store`
            self.layout_changes += 1
            parts.kv_ranks.update(layout.kv_ranks)
            parts.groups.update(layout.groups)
        assert isinstance(self._index, CopyableChunkIndex)
        size = ENTRY_BYTES * _KEYS_PER_STEP
        for start in range(0, len(entries), size):
            self._index.store_entries((self.holder,), entries[start : start + size], changed.entries)
            yield
        for run in runs:
            keys = array("Q", run.keys)
            for start in range(0, len(keys), _KEYS_PER_STEP):
                newer = changed.keys.get((run.model, run.kv_rank, run.group, run.salt), ())
                step = array("Q", [key for key in keys[start : start + _KEYS_PER_STEP] if key not in newer])
                self.store(scheme, entries_of([msgspec.structs.replace(run, keys=step.tobytes())]))
                yield

    def _runs(self, entries: Iterable[EventEntry]) -> Iterator[tuple[ObjectKey, list[ChunkKey]]]:
        """Consecutive entries that differ only in the chunk: the key of the first one, and all chunk keys."""
        for _, run in groupby(entries, key=object_kind):
            keys: list[ChunkKey] = []
            first_key: ObjectKey | None = None
            for entry in run:
                first_key = first_key or entry.key
                name = entry.key.chunk_hash_hex
                try:
                    if len(name) != 64:
                        raise ValueError(name)
                    keys.append(int(name[48:], 16))
                except ValueError:
                    self.foreign_hashes += 1
            if first_key is not None and keys:
                yield first_key, keys

    def _learn_parts(self, entries: Sequence[EventEntry]) -> bool:
        layout_known = True
        kinds = {(event.key.model_name, event.key.kv_rank, event.key.object_group_id) for event in entries}
        seen: dict[StoredModel, set[int]] = {}
        for name, kv_rank, group in kinds:
            model = StoredModel(name, max(1, kv_rank >> 24))
            ranks = self._parts.setdefault(model, _Parts()).kv_ranks
            self.layout_changes += kv_rank not in ranks
            ranks.add(kv_rank)
            seen.setdefault(model, set()).add(group)
        for model, groups in seen.items():
            parts = self._parts[model]
            if parts.groups and not groups <= parts.groups:
                layout_known = False
            self.layout_changes += len(groups - parts.groups)
            parts.groups |= groups
        if not layout_known:
            self.clear()
        return layout_known

    @staticmethod
    def _bit(key: ObjectKey) -> int:
        return 1 << key.object_group_id * _model(key).world + key.rank

    @staticmethod
    def _whole(model: StoredModel, parts: _Parts) -> int:
        ranks = (1 << model.world) - 1
        return sum(ranks << group * model.world for group in parts.groups)

    @staticmethod
    def _add(parts: _Parts, space: ChunkSpace, key: ChunkKey, bit: int, whole: int) -> int:
        """A part of a chunk is present. Returns all present ones."""
        table, chunk = parts.tables[key % _TABLES], (space, key)
        bits = table.get(chunk, 0)
        if not bits & bit:
            bits |= bit
            table[chunk] = bits
            parts.objects += 1
            parts.whole += bits == whole
        return bits

    @staticmethod
    def _drop(parts: _Parts, space: ChunkSpace, key: ChunkKey, bit: int, whole: int) -> None:
        table, chunk = parts.tables[key % _TABLES], (space, key)
        bits = table.get(chunk, 0)
        if bits & bit:
            parts.objects -= 1
            parts.whole -= bits == whole
            if bits == bit:
                del table[chunk]
            else:
                table[chunk] = bits ^ bit


def _runs_of_part(
    model: StoredModel, kv_rank: int, group: int, chunks: Iterable[tuple[tuple[ChunkSpace, ChunkKey], int]]
) -> list[ChunkRun]:
    """The objects of one part of `chunks`, one run for each salt."""
    bit = 1 << group * model.world + (kv_rank >> 16 & 0xFF)
    by_salt: dict[str, array[int]] = {}
    for (space, key), bits in chunks:
        if bits & bit:
            by_salt.setdefault(space.salt, array("Q")).append(key)
    return [ChunkRun(model.name, kv_rank, group, salt, keys.tobytes()) for salt, keys in by_salt.items()]


def _model(key: ObjectKey) -> StoredModel:
    return StoredModel(key.model_name, max(1, key.world))


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
    chunks: HeldChunks
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
    sender: str = ""
    """The address that its messages come from; empty if only another gateway hears it."""
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
    reports_to: str = ""
    """The member of the fleet that forwards the server's reports; empty if they arrive here."""
    is_reporting: bool = True
    """False after this member is gone, or its batches were lost: the server's chunks do not count until the
    next batch comes."""

    @property
    def trouble(self) -> str:
        """`doubt`, or that no reports arrive; empty if the map is complete."""
        return self.doubt.value if self.doubt is not None else "" if self.is_reporting else "not_reporting"

    @property
    def trust(self) -> MapTrust:
        """NONE while no reports arrive; PARTIAL while it may hold more chunks than the map has."""
        if not self.is_reporting:
            return MapTrust.NONE
        return MapTrust.WHOLE if self.doubt is None else MapTrust.PARTIAL


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

    def hosts(self) -> list[str]:
        """The hosts of all workers."""
        return [worker.host for worker in self._workers.values()]

    def host_of(self, worker_id: str) -> str:
        worker = self._workers.get(worker_id)
        return "" if worker is None else worker.host

    def instance_of(self, worker_id: str) -> LMCacheServer | None:
        return self._server_of.get(worker_id)

    def models_of(self, instance: LMCacheServer, pool: L2Pool) -> list[StoredModel]:
        """Models whose chunks the workers of `instance` may read from `pool`.

        A model whose name is known counts even if the pool has not shown a chunk of the model yet.
        """
        readable: dict[StoredModel, None] = {}
        for worker_id in self._readers.get(instance, ()):
            worker = self._workers[worker_id]
            models = self._models(worker, instance, pool.chunks)
            readable.update(dict.fromkeys(models or [StoredModel(name, 1) for name in sorted(worker.models)]))
        return list(readable)

    def model_of(self, worker_id: str) -> StoredModel | None:
        """The worker's model under its name in the server's stores; None if the stores have not shown it."""
        worker, instance = self._workers.get(worker_id), self._server_of.get(worker_id)
        if worker is None or instance is None:
            return None
        for chunks in (instance.memory, *(pool.chunks for pool in instance.pools.values())):
            if models := self._models(worker, instance, chunks):
                return models[0]
        return None

    def update(self, instances: Mapping[str, LMCacheServer]) -> None:
        """Find each worker's server again, and attach and detach slots accordingly. A few us per worker."""
        at: dict[str, list[LMCacheServer]] = {}
        for instance in instances.values():
            if instance.registered:
                at.setdefault(normalized_host(instance.address), []).append(instance)
        self._server_of, self._readers = {}, {}
        for worker in self._workers.values():
            server = self._find_server(worker, instances, at)
            if server is not None:
                self._server_of[worker.id] = server
                self._readers.setdefault(server, []).append(worker.id)
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
        server = instances.get(name or worker.id)
        if server is None and not name:
            there = at.get(normalized_host(worker.host), ())
            server = there[0] if len(there) == 1 else None
        return server if server is not None and server.registered and server.is_reporting else None

    def _domains_of(self, worker: ServedWorker) -> dict[ChunkHolder, list[ChunkDomain]]:
        instance = self._server_of.get(worker.id)
        if instance is None:
            return {}
        domains_by_holder = {}
        for chunks in (instance.memory, *(pool.chunks for pool in instance.pools.values())):
            models = self._models(worker, instance, chunks)
            domains = [model.domain(instance.scheme) for model in models]
            if chunks is not instance.memory and not models:
                domains = [StoredModel(name, 1).domain(instance.scheme) for name in sorted(worker.models)]
            if domains:
                domains_by_holder[chunks.holder] = domains
        return domains_by_holder

    def _models(self, worker: ServedWorker, instance: LMCacheServer, chunks: HeldChunks) -> list[StoredModel]:
        """The worker's model in this store: a list with one model, or an empty list if it is not clear.

        The model is found by name. Otherwise it is the only model in the store, if no other worker can have
        stored it. If the store has the model in several world sizes, the one in the server's L1 counts.
        """
        seen = chunks.models
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
