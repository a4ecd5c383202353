"""The chunks that one LMCache store holds, assembled from the store's objects.

LMCache stores one object for each rank of a model's tensor-parallel world and, where its servers separate
them, for each group of layers. LMCache can load a chunk only if all its objects are present, so only then
does the chunk count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, NamedTuple

from kvroute.blocks.chunks import ChunkKey, ChunkScheme, ChunkSpace
from kvroute.blocks.keys import Tier
from kvroute.index.chunk_index import ChunkDomain, ChunkHolder, ChunkIndex
from kvroute.wire.lmcache_server import EventEntry, ObjectKey

SINGLE_RANK: Final = 0x01000100
"""`kv_rank` of a model that runs on one device."""


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
    held: dict[tuple[ChunkSpace, ChunkKey], int] = field(default_factory=dict)
    """For models with several parts: a chunk -> its present parts as bits."""


class HeldChunks:
    """One store's chunks, written to the index. Mutable: `store`, `remove` and `clear` change the chunks.

    `objects` counts the objects in the store, `foreign_hashes` the object names that are no BLAKE3 hashes.
    `layout_changes` rises with every new model, rank or group of layers.
    """

    def __init__(self, index: ChunkIndex, tier: Tier) -> None:
        self.holder = ChunkHolder(tier, shared=True)
        self.objects = 0
        self.foreign_hashes = 0
        self.layout_changes = 0
        self._index = index
        self._parts: dict[StoredModel, _Parts] = {}

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
        self.objects = 0
        for parts in self._parts.values():
            parts.held = {}

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
                keys = [each for each in keys if self._add(parts, (space, each), bit) == whole]
                self._index.store(self.holder, space, keys)
            else:
                self.objects += self._index.store(self.holder, space, keys)
        return layout_known

    def remove(self, scheme: ChunkScheme, entries: Iterable[EventEntry]) -> None:
        """Remove objects."""
        for key, keys in self._runs(entries):
            model = _model(key)
            parts = self._parts.get(model)
            if parts is None:
                continue
            space = ChunkSpace(*model.domain(scheme), key.cache_salt)
            removed = self._index.remove_all(self.holder, space, keys)
            if model.world > 1 or len(parts.groups) > 1:
                bit = self._bit(key)
                for each in keys:
                    self._drop(parts, (space, each), bit)
            else:
                self.objects -= removed

    def _runs(self, entries: Iterable[EventEntry]) -> Iterator[tuple[ObjectKey, list[ChunkKey]]]:
        """Consecutive entries that differ only in the chunk: the key of the first one, and all chunk keys."""
        for _, run in groupby(entries, key=_object_kind):
            keys: list[ChunkKey] = []
            first: ObjectKey | None = None
            for entry in run:
                first = first or entry.key
                name = entry.key.chunk_hash_hex
                try:
                    if len(name) != 64:
                        raise ValueError(name)
                    keys.append(int(name[48:], 16))
                except ValueError:
                    self.foreign_hashes += 1
            if first is not None and keys:
                yield first, keys

    def _learn_parts(self, entries: Sequence[EventEntry]) -> bool:
        layout_known = True
        kinds = {(each.key.model_name, each.key.kv_rank, each.key.object_group_id) for each in entries}
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

    def _add(self, parts: _Parts, chunk: tuple[ChunkSpace, ChunkKey], bit: int) -> int:
        bits = parts.held.get(chunk, 0)
        if not bits & bit:
            self.objects += 1
            bits |= bit
            parts.held[chunk] = bits
        return bits

    def _drop(self, parts: _Parts, chunk: tuple[ChunkSpace, ChunkKey], bit: int) -> None:
        bits = parts.held.get(chunk, 0)
        if bits & bit:
            self.objects -= 1
            if bits == bit:
                del parts.held[chunk]
            else:
                parts.held[chunk] = bits ^ bit


def _object_kind(entry: EventEntry) -> tuple[str, int, int, str]:
    key = entry.key
    return key.model_name, key.kv_rank, key.object_group_id, key.cache_salt


def _model(key: ObjectKey) -> StoredModel:
    return StoredModel(key.model_name, max(1, key.world))
