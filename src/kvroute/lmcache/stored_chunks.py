"""What one LMCache store holds, put together from objects: a chunk counts once all its parts are there.

LMCache keeps an object for each rank of a model's tensor-parallel world, and for each group of layers where
its servers keep those apart. A chunk of which one is missing cannot be loaded.
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
    """A model in a store: its name there, and how many ranks its KV cache is split over."""

    name: str
    world: int

    def domain(self, scheme: ChunkScheme) -> ChunkDomain:
        """Where chunks of this model are found; those of another world size are of no use to it."""
        return scheme, self.name if self.world == 1 else f"{self.name}\0{self.world}"


@dataclass(slots=True)
class _Parts:
    """What a whole chunk consists of, as far as seen. Mutable."""

    groups: set[int] = field(default_factory=set)
    kv_ranks: set[int] = field(default_factory=set)
    held: dict[tuple[ChunkSpace, ChunkKey], int] = field(default_factory=dict)
    """Chunks of several parts: those that are there, as bits."""


class HeldChunks:
    """One store's chunks. Mutable: follows the events that are handed to it.

    `objects` counts the objects believed to be there, `foreign` those whose names are no BLAKE3 hashes;
    `kinds` rises with every model, rank and group of layers that is new here.
    """

    def __init__(self, index: ChunkIndex, tier: Tier) -> None:
        self.holder = ChunkHolder(tier, shared=True)
        self.objects = 0
        self.foreign = 0
        self.kinds = 0
        self._index = index
        self._parts: dict[StoredModel, _Parts] = {}

    @property
    def models(self) -> Sequence[StoredModel]:
        """Models of which anything was seen here, in the order in which they were."""
        return list(self._parts)

    def object_parts(self, model: StoredModel) -> list[tuple[int, int]]:
        """(`kv_rank`, `object_group_id`) of the objects that a chunk of `model` consists of."""
        parts = self._parts.get(model)
        if parts is None:
            return [(SINGLE_RANK, 0)] if model.world == 1 else []
        return [(rank, group) for rank in sorted(parts.kv_ranks) for group in sorted(parts.groups)]

    def clear(self) -> None:
        """Nothing is believed to be there any more; what kinds of objects there are is remembered."""
        self._index.clear(self.holder)
        self.objects = 0
        for parts in self._parts.values():
            parts.held = {}

    def store(self, scheme: ChunkScheme, entries: Iterable[EventEntry]) -> bool:
        """Objects are there now. False if they show that chunks have more parts than was known: then what
        was believed before is dropped."""
        entries = list(entries)
        as_known = self._learn_parts(entries)
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
        return as_known

    def remove(self, scheme: ChunkScheme, entries: Iterable[EventEntry]) -> None:
        """Objects are gone."""
        for key, keys in self._runs(entries):
            model = _model(key)
            parts = self._parts.get(model)
            if parts is None:
                continue
            space = ChunkSpace(*model.domain(scheme), key.cache_salt)
            gone = self._index.remove_all(self.holder, space, keys)
            if model.world > 1 or len(parts.groups) > 1:
                bit = self._bit(key)
                for each in keys:
                    self._drop(parts, (space, each), bit)
            else:
                self.objects -= gone

    def _runs(self, entries: Iterable[EventEntry]) -> Iterator[tuple[ObjectKey, list[ChunkKey]]]:
        """Entries that differ in nothing but the chunk, as one key of them and all chunks."""
        for _, run in groupby(entries, key=_kind):
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
                    self.foreign += 1
            if first is not None and keys:
                yield first, keys

    def _learn_parts(self, entries: Sequence[EventEntry]) -> bool:
        as_known = True
        kinds = {(each.key.model_name, each.key.kv_rank, each.key.object_group_id) for each in entries}
        seen: dict[StoredModel, set[int]] = {}
        for name, kv_rank, group in kinds:
            model = StoredModel(name, max(1, kv_rank >> 24))
            ranks = self._parts.setdefault(model, _Parts()).kv_ranks
            self.kinds += kv_rank not in ranks
            ranks.add(kv_rank)
            seen.setdefault(model, set()).add(group)
        for model, groups in seen.items():
            parts = self._parts[model]
            if parts.groups and not groups <= parts.groups:
                as_known = False
            self.kinds += len(groups - parts.groups)
            parts.groups |= groups
        if not as_known:
            self.clear()
        return as_known

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


def _kind(entry: EventEntry) -> tuple[str, int, int, str]:
    key = entry.key
    return key.model_name, key.kv_rank, key.object_group_id, key.cache_salt


def _model(key: ObjectKey) -> StoredModel:
    return StoredModel(key.model_name, max(1, key.world))
