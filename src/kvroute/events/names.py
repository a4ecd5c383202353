"""The engine's names of held blocks, in a map that never stops the process to grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvroute.blocks.keys import BlockKey
from kvroute.wire.events import ExternalBlockHash

_SHARDS: Final = 64
SHARD_MASK: Final = _SHARDS - 1


class Names:
    """External hash -> our key. Mutable. Split into many small dicts: one of 100,000 entries takes several
    milliseconds whenever it grows."""

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[ExternalBlockHash, BlockKey]] = [{} for _ in range(_SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __contains__(self, name: ExternalBlockHash) -> bool:
        return name in self._shards[hash(name) & SHARD_MASK]

    def shards(self) -> Sequence[dict[ExternalBlockHash, BlockKey]]:
        """A name is, or would be, in that of number `hash(name) & SHARD_MASK`."""
        return self._shards

    def get(self, name: ExternalBlockHash) -> BlockKey | None:
        return self._shards[hash(name) & SHARD_MASK].get(name)

    def pop(self, name: ExternalBlockHash) -> BlockKey | None:
        return self._shards[hash(name) & SHARD_MASK].pop(name, None)

    def put(self, names: Sequence[ExternalBlockHash], keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Each name has this key from now on. Returns the other keys that some of them had before: none,
        unless an engine contradicts itself: its names are hashes of what our keys are hashes of."""
        shards, replaced = self._shards, list[BlockKey]()
        for name, key in zip(names, keys, strict=True):
            shard = shards[hash(name) & SHARD_MASK]
            known = shard.setdefault(name, key)
            if known is not key and known != key:
                replaced.append(known)
                shard[name] = key
        return replaced

    def among(self, names: Sequence[ExternalBlockHash]) -> list[ExternalBlockHash]:
        """Those of `names` that are known."""
        shards = self._shards
        return [name for name in names if name in shards[hash(name) & SHARD_MASK]]

    def keys(self) -> Iterator[BlockKey]:
        """Our keys of all of them. Walks them."""
        for shard in self._shards:
            yield from shard.values()

    def shrink(self, steps: int) -> int:
        """Let go of up to `steps` entries; returns how many of the steps are left."""
        for shard in self._shards:
            for _ in range(min(steps, len(shard))):
                shard.popitem()
                steps -= 1
            if not steps:
                break
        return steps
