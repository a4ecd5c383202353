"""The mirror of another process's cache map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvroute.blocks.chunks import ChunkScheme, ChunkSpace
from kvroute.blocks.keys import BlockKey, Tier
from kvroute.index.chunk_index import ChunkHolder
from kvroute.index.groups import GroupKind, GroupRule
from kvroute.index.prefix_index import Holder, PrefixIndex
from kvroute.index.snapshot import CopyableChunkIndex
from kvroute.replicas.messages import (
    Attached,
    ChunksAttached,
    ChunksCleared,
    ChunksDetached,
    ChunkSlotForgotten,
    ChunksRemoved,
    ChunksSnapshot,
    ChunksStored,
    Cleared,
    Detached,
    KvGroupDefined,
    KvGroupRemoved,
    KvGroupsCleared,
    KvGroupStored,
    Message,
    Removed,
    RunSnapshot,
    SlotForgotten,
    Space,
    Stored,
    unpack_keys,
)


class Mirror:
    """Copies of another process's two indexes. Mutable: by `apply` and `sweep`.

    On each `MapReset` the owner replaces the mirror by a new, empty one.
    """

    def __init__(self, *, max_blocks: int, max_chunks: int) -> None:
        self.blocks = PrefixIndex(max_blocks=max_blocks)
        self.chunks = CopyableChunkIndex(max_chunks=max_chunks)
        self._holders: dict[int, Holder] = {}
        self._chunk_holders: dict[int, ChunkHolder] = {}

    def chunk_holder(self, number: int, tier: int, *, shared: bool) -> ChunkHolder:
        """The holder with this number; created if the number is new."""
        holder = self._chunk_holders.get(number)
        if holder is None:
            holder = self._chunk_holders[number] = ChunkHolder(Tier(tier), shared)
        return holder

    def apply(self, message: Message) -> bool:
        """Apply one change of the map; False if the message is none. Costs the same as the change of the
        index."""
        match message:
            case Stored(number, block_tokens, parent, keys):
                holder = self._holders.get(number)
                if holder is not None:
                    parent_key = None if parent is None else BlockKey(parent)
                    self.blocks.store(holder, block_tokens, parent_key, _keys(keys))
            case Removed(number, keys):
                holder = self._holders.get(number)
                if holder is not None:
                    for key in _keys(keys):
                        self.blocks.remove(holder, key)
            case RunSnapshot(numbers, block_tokens, keys):
                run = _keys(keys)
                for number in numbers:
                    if number in self._holders:
                        self.blocks.store(self._holders[number], block_tokens, None, run)
            case Cleared(number):
                if number in self._holders:
                    self.blocks.clear(self._holders[number])
            case Attached(slot, number, tier, shared):
                holder = self._holders.get(number)
                if holder is None:
                    holder = self._holders[number] = Holder(Tier(tier), shared)
                self.blocks.attach(slot, holder)
            case Detached(slot, number):
                if number in self._holders:
                    self.blocks.detach(slot, self._holders[number])
            case SlotForgotten(slot):
                self.blocks.forget(slot)
            case _:
                return self._apply_groups(message) or self._apply_chunks(message)
        return True

    def _apply_groups(self, message: Message) -> bool:
        blocks = self.blocks
        match message:
            case KvGroupDefined(slot, group, kind, block_tokens, span):
                blocks.define_group(slot, group, GroupRule(GroupKind(kind), block_tokens, span))
            case KvGroupStored(slot, group, keys):
                blocks.store_group(slot, group, _keys(keys))
            case KvGroupRemoved(slot, group, keys):
                blocks.remove_group(slot, group, _keys(keys))
            case KvGroupsCleared(slot, are_known):
                if are_known:
                    blocks.clear_groups(slot)
                else:
                    blocks.forget_groups(slot)
            case _:
                return False
        return True

    def sweep(self) -> bool:
        """Free some memory of cleared holders; True while there is more to free."""
        return self.blocks.sweep() | self.chunks.sweep()

    def _apply_chunks(self, message: Message) -> bool:
        match message:
            case ChunksStored(number, tier, shared, space, keys):
                self.chunks.store(self.chunk_holder(number, tier, shared=shared), _space(space), keys)
            case ChunksRemoved(number, space, keys):
                if number in self._chunk_holders:
                    self.chunks.remove_all(self._chunk_holders[number], _space(space), keys)
            case ChunksSnapshot(holders, entries):
                self.chunks.store_entries(
                    [self.chunk_holder(number, tier, shared=shared) for number, tier, shared in holders],
                    entries,
                )
            case ChunksCleared(number):
                if number in self._chunk_holders:
                    self.chunks.clear(self._chunk_holders[number])
            case ChunksAttached(slot, number, tier, shared, domains):
                chosen = [(ChunkScheme(*scheme), model) for scheme, model in domains]
                self.chunks.attach(slot, self.chunk_holder(number, tier, shared=shared), chosen)
            case ChunksDetached(slot, number):
                if number in self._chunk_holders:
                    self.chunks.detach(slot, self._chunk_holders[number])
            case ChunkSlotForgotten(slot):
                self.chunks.forget(slot)
            case _:
                return False
        return True


def _space(space: Space) -> ChunkSpace:
    scheme, model, salt = space
    return ChunkSpace(ChunkScheme(*scheme), model, salt)


def _keys(data: bytes) -> Sequence[BlockKey]:
    return cast("Sequence[BlockKey]", unpack_keys(data))
