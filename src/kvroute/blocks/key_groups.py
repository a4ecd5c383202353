"""Block keys of several prompts together: each shared beginning is sent once."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, cast, overload

from msgspec import Struct

from kvroute.blocks.keys import GROUP_BLOCKS, BlockKey, BlockKeys

MAX_GROUPS: Final = 32_768
"""Bound of the groups that one process remembers."""


class _Group(Struct, eq=False, gc=False):
    """`GROUP_BLOCKS` consecutive keys of a prompt, or the fewer ones at its end. Mutable: `children`."""

    keys: array[int]
    predecessor: _Group | None
    size: int
    """Keys from the beginning of the prompt to the end of the group."""
    children: int = 0
    """Groups that follow this one."""


class GroupedKeys(Sequence[BlockKey]):
    """The keys of a prompt from the beginning to the end of a group. Most readers need a few of them only."""

    __slots__ = ("_last", "_parts")

    def __init__(self, last: _Group) -> None:
        self._last = last
        self._parts: list[array[int]] | None = None

    def __len__(self) -> int:
        return self._last.size

    @overload
    def __getitem__(self, index: int) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockKey]: ...
    def __getitem__(self, index: int | slice) -> BlockKey | Sequence[BlockKey]:
        if index == -1:
            return cast("BlockKey", self._last.keys[-1])
        pieces = self._parts or self._collect()
        if not isinstance(index, slice):
            if index < 0:
                index += self._last.size
            if index < 0:
                raise IndexError(index)
            return cast("BlockKey", pieces[index // GROUP_BLOCKS][index % GROUP_BLOCKS])
        start, stop, step = index.indices(self._last.size)
        keys, skipped = array("Q"), start - start % GROUP_BLOCKS
        for piece in pieces[start // GROUP_BLOCKS : -(-stop // GROUP_BLOCKS)]:
            keys.extend(piece)
        return cast("Sequence[BlockKey]", keys[start - skipped : max(0, stop - skipped) : step])

    def __iter__(self) -> Iterator[BlockKey]:
        return cast("Iterator[BlockKey]", chain.from_iterable(self._parts or self._collect()))

    def _collect(self) -> list[array[int]]:
        parts, group = [self._last.keys], self._last.predecessor
        while group is not None:
            parts.append(group.keys)
            group = group.predecessor
        parts.reverse()
        self._parts = parts
        return parts


class KeyGroups:
    """The prompts that this process has sent to others or received, in groups of keys.

    The key of a block depends on all tokens before it, so a key that was sent before stands for all keys up
    to it. Mutable: `encode`, `decode` and `learn` add groups.

    The group that was used least recently and that no other one follows is forgotten first. So all groups
    before a known one are known, and processes that receive the same messages forget about the same groups.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        """By their last keys."""
        self._ends: OrderedDict[int, _Group] = OrderedDict()
        """The groups that no other one follows, least recently used first."""

    def encode(self, keys: Sequence[int]) -> tuple[int | None, Sequence[int]]:
        """`keys` as (the last one that was sent before, the keys after it). O(new groups)."""
        if len(keys) < GROUP_BLOCKS:
            return None, keys
        groups, last = self._groups, keys[-1]
        if self.use(last):
            return last, ()
        ends: Sequence[int] = (
            keys.group_ends() if isinstance(keys, BlockKeys) else keys[GROUP_BLOCKS - 1 :: GROUP_BLOCKS]
        )
        whole_groups = len(ends)
        while whole_groups and ends[whole_groups - 1] not in groups:
            whole_groups -= 1
        last_known = ends[whole_groups - 1] if whole_groups else None
        fresh = array("Q", keys[whole_groups * GROUP_BLOCKS :])
        self._add(None if last_known is None else groups[last_known], fresh)
        return last_known, fresh

    def decode(self, last_known: int | None, keys: array[int]) -> Sequence[BlockKey] | None:
        """The keys that another process encoded; None if `last_known` is not known here. O(new groups)."""
        predecessor = None
        if last_known is not None:
            predecessor = self._groups.get(last_known)
            # Only the last group of a prompt may be shorter than others.
            if predecessor is None or (keys and predecessor.size % GROUP_BLOCKS):
                return None
            self.use(last_known)
            if not keys:
                return GroupedKeys(predecessor)
        elif len(keys) < GROUP_BLOCKS:
            return cast("Sequence[BlockKey]", keys)
        last = self._add(predecessor, keys)
        return [] if last is None else GroupedKeys(last)

    def use(self, end_key: int) -> bool:
        """Whether the keys up to `end_key` are known here; then they count as used."""
        if end_key in self._ends:
            self._ends.move_to_end(end_key)
            return True
        return end_key in self._groups

    def use_all(self, end_keys: Iterable[int]) -> None:
        """`use` of each one."""
        ends = self._ends
        renew = ends.move_to_end
        for key in end_keys:
            if key in ends:
                renew(key)

    def keys_to(self, end_key: int) -> Sequence[BlockKey]:
        """All keys up to `end_key`, for a process that asks for them; none if it is not known."""
        last = self._groups.get(end_key)
        return () if last is None else GroupedKeys(last)

    def learn(self, keys: array[int]) -> None:
        """Remember the keys of a prompt."""
        if len(keys) >= GROUP_BLOCKS:
            self._add(None, keys)

    def _add(self, last: _Group | None, keys: array[int]) -> _Group | None:
        """Add the groups of these keys, which follow the group `last`. Returns the last group."""
        groups, ends, size = self._groups, self._ends, 0 if last is None else last.size
        for start in range(0, len(keys), GROUP_BLOCKS):
            group_keys = keys[start : start + GROUP_BLOCKS]
            size += len(group_keys)
            group = groups.get(group_keys[-1])
            if group is None:  # else it is new to the sender only
                group = groups[group_keys[-1]] = ends[group_keys[-1]] = _Group(group_keys, last, size)
                if last is not None:
                    if not last.children:
                        del ends[last.keys[-1]]
                    last.children += 1
            last = group
        while len(groups) > MAX_GROUPS:
            end, oldest = ends.popitem(last=False)
            del groups[end]
            predecessor = oldest.predecessor
            if predecessor is not None:
                predecessor.children -= 1
                if not predecessor.children:  # it is older than its followers
                    ends[predecessor.keys[-1]] = predecessor
                    ends.move_to_end(predecessor.keys[-1], last=False)
        return last
