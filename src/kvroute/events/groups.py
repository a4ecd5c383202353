"""The blocks of a worker's further KV cache groups: those that do not cover the whole prefix.

vLLM announces each block once per group, under the same engine hash. The ledger knows the hashes of the group
that covers the prefix, so it can name the others' blocks; an event of these groups often has fewer hashes
than blocks of tokens, because most blocks are not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvroute.blocks.keys import KEY_TOKENS, BlockKey
from kvroute.events.holdings import LedgerCounts, keys_of, root_seed
from kvroute.index.groups import GroupKind, GroupRule
from kvroute.index.prefix_index import PrefixIndex
from kvroute.index.snapshot import GroupBlocks
from kvroute.wire.vllm import BlockStored, ExternalBlockHash

WHOLE_PREFIX: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV cache whose blocks cover every token (vLLM 0.32, v1/kv_cache_interface.py)."""
_WINDOWS: Final = frozenset({"sliding_window", "sliding_window_mla"})
_STATES: Final = frozenset({"mamba", "linear_attention"})
_CHUNK_TOKENS: Final = 8192
"""The chunk of Llama 4, the only model with `chunked_local_attention`. No event has it."""

NameOf = Callable[[ExternalBlockHash], BlockKey | None]
"""Engine hash -> block key, if the group that covers the prefix has or had the block."""


def rule_of(event: BlockStored) -> GroupRule | None:
    """The rule of the event's group; None if its kind is not understood."""
    kind, size, window = event.kv_cache_spec_kind, event.block_size, event.kv_cache_spec_sliding_window
    if kind is None or size <= 0 or size % KEY_TOKENS:
        return None
    if kind in WHOLE_PREFIX:
        return GroupRule(GroupKind.WHOLE, size)
    if kind in _WINDOWS:
        return GroupRule(GroupKind.WINDOW, size, window) if window else None
    if kind in _STATES:
        return GroupRule(GroupKind.STATE, size)
    return GroupRule(GroupKind.CHUNK, size, _CHUNK_TOKENS) if kind == "chunked_local_attention" else None


class _Group:
    """One group's blocks in GPU memory."""

    __slots__ = ("keys_by_hash", "more", "rule", "unnamed")

    def __init__(self, rule: GroupRule) -> None:
        self.rule = rule
        self.keys_by_hash: dict[ExternalBlockHash, BlockKey] = {}
        self.more: dict[ExternalBlockHash, int] = {}
        """Copies of held blocks beyond the first."""
        self.unnamed: dict[ExternalBlockHash, int] = {}
        """Copies of blocks whose keys are not known yet."""


class OtherGroups:
    """The further groups of one stream, mirrored in the index. Mutable: all methods but `dump`.

    Counts into `counts`: blocks of groups that are not understood.
    """

    def __init__(self, index: PrefixIndex, slot: int, counts: LedgerCounts, name_of: NameOf) -> None:
        self.unnamed = 0
        """Blocks whose keys are not known yet. For reading."""
        self.kinds: dict[int, str] = {}
        """The kinds of all groups that are not understood, by group."""
        self.has_parts = False
        """Whether events name parts of blocks (`--prefix-match-unit`)."""
        self.whole_tokens = 0
        """Tokens in a block of the group that covers the prefix; 0 before its first one. Set by the owner."""
        self._index = index
        self._slot = slot
        self._counts = counts
        self._name_of = name_of
        self._groups: dict[int, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def unit(self) -> int:
        """Tokens in the largest block of these groups; 0 without groups."""
        return max((group.rule.block_tokens for group in self._groups.values()), default=0)

    @property
    def named(self) -> list[str]:
        """The kinds of the groups that are understood, without repetitions."""
        return sorted({group.rule.kind.value for group in self._groups.values()})

    def usable(self, keys: Sequence[BlockKey], tokens: int) -> int:
        """The longest hit in the first `tokens` tokens if the group that covers the prefix has them all."""
        groups = self._index.groups.slots.get(self._slot)
        return tokens if groups is None else groups.usable(keys, tokens, tokens, False)

    def stored(self, event: BlockStored, repeats: bool, is_repairing: bool) -> None:
        """One of these groups stored blocks in GPU memory.

        `repeats`: the event may announce held blocks again. Such an event also has blocks that the group does
        not have (vLLM 0.32, `emit_cached_block_events`), so it counts only while `is_repairing`, and then
        only for the end of the hit.
        """
        number, hashes = event.group_idx or 0, event.block_hashes
        rule = rule_of(event)
        if rule is None:
            self.kinds[number] = event.kv_cache_spec_kind or "no kind"
            self._counts.passed_over += len(hashes)
            return
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = _Group(rule)
            self._index.define_group(self._slot, number, rule)
        elif group.rule != rule:
            self.has_parts = True
            if rule.block_tokens < group.rule.block_tokens:
                self._counts.passed_over += len(hashes)
                return
            group.rule = rule
            self._index.define_group(self._slot, number, rule)
        if not hashes:
            return
        names = self._names(event)
        if repeats and (hashes[-1] in group.keys_by_hash or hashes[-1] in group.unnamed):
            self._counts.repeated += len(hashes)
            return
        if repeats and is_repairing:
            needed = 1 if rule.kind is GroupKind.STATE else -(-(rule.span - 1) // rule.block_tokens)
            hashes, names = hashes[-needed:], names[-needed:]
        new: list[BlockKey] = []
        for block_hash, key in zip(hashes, names, strict=True):
            if block_hash in group.keys_by_hash:
                group.more[block_hash] = group.more.get(block_hash, 0) + 1
            elif key is None:
                group.unnamed[block_hash] = group.unnamed.get(block_hash, 0) + 1
                self.unnamed += 1
            else:
                group.keys_by_hash[block_hash] = key
                new.append(key)
        if new and not self._index.store_group(self._slot, number, new):
            self._counts.refused += len(new)

    def _names(self, event: BlockStored) -> Sequence[BlockKey | None]:
        """The keys of the event's blocks, as far as they are known.

        If the event leaves out blocks (vLLM 0.32, `block_mask`), nothing in it says which ones it has. Blocks
        of the size of the group that covers the prefix are named by that group's event of the same step. Of
        larger ones, one whose hash no other group has stands just before the next one that has a known place,
        or just after the one before; without such blocks, they are the last ones of the event's tokens.
        """
        names = [self._name_of(block_hash) for block_hash in event.block_hashes]
        if None not in names:
            return names
        size, parent = event.block_size, event.parent_block_hash
        seed = None if parent is None else self._name_of(parent)
        if seed is None and parent is not None:
            return names
        blocks = len(event.token_ids) // size
        if blocks < len(names) or blocks * size != len(event.token_ids):
            return names
        if blocks > len(names) and self.whole_tokens in (0, size):
            return names
        extra = event.extra_keys or ()
        if any(entry and (blocks != len(names) or len(entry) > 1) for entry in extra):
            return names  # the keys would lack a tenant's salt or an image
        keys = keys_of(
            msgspec.structs.replace(event, block_hashes=[0] * blocks),
            root_seed(event) if seed is None else seed,
        )
        if seed is None and blocks != len(names) and not set(names).intersection(keys):
            return names  # perhaps a tenant's salt is in the first block, which the event has not
        return placed(names, keys)

    def named_now(self, hashes: Sequence[ExternalBlockHash], keys: Sequence[BlockKey]) -> None:
        """The group that covers the prefix has these blocks: name the same blocks of the others."""
        for number, group in self._groups.items():
            if not group.unnamed:
                continue
            new: list[BlockKey] = []
            for block_hash, key in zip(hashes, keys, strict=False):
                copies = group.unnamed.pop(block_hash, 0)
                if copies:
                    self.unnamed -= copies
                    group.keys_by_hash[block_hash] = key
                    new.append(key)
                    if copies > 1:
                        group.more[block_hash] = copies - 1
            if new and not self._index.store_group(self._slot, number, new):
                self._counts.refused += len(new)

    def removed(
        self, number: int, hashes: Sequence[ExternalBlockHash], remaining_copies: Sequence[int] | None
    ) -> None:
        """The group removed a copy of each block; `remaining_copies` is None if the event lacks them."""
        group = self._groups.get(number)
        if group is None:
            self._counts.passed_over += len(hashes)
            return
        removed_keys: list[BlockKey] = []
        for position, block_hash in enumerate(hashes):
            if block_hash in group.keys_by_hash:
                copies = (
                    group.more.pop(block_hash, 0) if remaining_copies is None else remaining_copies[position]
                )
                if copies > 1:
                    group.more[block_hash] = copies - 1
                elif not copies:
                    removed_keys.append(group.keys_by_hash.pop(block_hash))
            elif block_hash in group.unnamed:
                copies = group.unnamed.pop(block_hash)
                after = copies - 1 if remaining_copies is None else remaining_copies[position]
                self.unnamed += after - copies
                if after:
                    group.unnamed[block_hash] = after
            else:
                self._counts.unknown_removed += 1
        if removed_keys:
            self._index.remove_group(self._slot, number, removed_keys)

    def clear(self) -> None:
        """The groups have no blocks any more."""
        for group in self._groups.values():
            group.keys_by_hash, group.more, group.unnamed = {}, {}, {}
        self.unnamed = 0
        if self._groups:
            self._index.clear_groups(self._slot)

    def forget(self) -> None:
        """Nothing is known about the groups."""
        if self._groups:
            self._index.forget_groups(self._slot)
        self._groups, self.kinds, self.unnamed, self.has_parts = {}, {}, 0, False

    # Snapshots

    def dump(self) -> Sequence[GroupBlocks]:
        """All blocks with known keys; one part per group."""
        return [
            GroupBlocks(
                number,
                group.rule.kind,
                group.rule.block_tokens,
                group.rule.span,
                list(group.keys_by_hash),
                list(group.keys_by_hash.values()),
                [group.more.get(block_hash, 0) for block_hash in group.keys_by_hash],
            )
            for number, group in self._groups.items()
        ]

    def restore(self, piece: GroupBlocks) -> None:
        """Restore one part of a snapshot."""
        rule = GroupRule(GroupKind(piece.kind), piece.block_tokens, piece.span)
        group = self._groups[piece.group] = _Group(rule)
        group.keys_by_hash = dict(zip(piece.hashes, piece.keys, strict=True))
        group.more = {name: n for name, n in zip(piece.hashes, piece.more, strict=True) if n}
        self._index.define_group(self._slot, piece.group, rule)
        if not self._index.store_group(self._slot, piece.group, piece.keys):
            self._counts.refused += len(piece.keys)


def placed(names: Sequence[BlockKey | None], keys: Sequence[BlockKey]) -> list[BlockKey | None]:
    """Give every name that is None its place among `keys`: see `OtherGroups._names`."""
    positions: list[int | None] = [
        None if name is None or name not in keys else keys.index(name) for name in names
    ]
    following: int | None = None
    for number in range(len(positions) - 1, -1, -1):
        position = positions[number]
        if position is None and following is not None:
            position = positions[number] = following - 1
        following = position
    preceding: int | None = None
    if None in positions and all(position is None for position in positions):
        preceding = len(keys) - len(positions) - 1
    for number, position in enumerate(positions):
        if position is None and preceding is not None:
            position = positions[number] = preceding + 1
        preceding = position
    return [
        name
        if name is not None
        else keys[position]
        if position is not None and 0 <= position < len(keys)
        else None
        for name, position in zip(names, positions, strict=True)
    ]
