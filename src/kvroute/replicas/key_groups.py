"""Dictionary compression of block keys: a group of keys that was sent before is sent as its last key only.

Pure. The key of a block depends on all tokens before it, so the last key of a group identifies the whole
group, in every process. One dictionary therefore serves a process for everything that it sends and receives:
a group that one gateway has sent is known to all. A receiver that does not know a group asks for it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvroute.blocks.keys import GROUP_BLOCKS, BlockKeys
from kvroute.replicas.messages import pack_keys, unpack_keys

MAX_GROUPS: Final = 32_768
"""Bound of the groups that one process remembers: a million keys, about 16 MB."""


class KeyGroups:
    """The groups that this process has sent or received. Mutable: `encode`, `decode` and `learn` add to it.

    The group that was used least recently is forgotten first. Processes that receive the same messages forget
    about the same groups.
    """

    def __init__(self) -> None:
        self._groups: OrderedDict[int, Sequence[int]] = OrderedDict()

    def encode(self, keys: Sequence[int]) -> tuple[bytes, bytes]:
        """`keys` as (last keys of all groups; the keys of new groups, and those after the last whole group).

        Only new groups are hashed. Costs about 0.2 us per known group and 1 us per new one.
        """
        if len(keys) < GROUP_BLOCKS:
            return b"", pack_keys(keys)
        groups, fresh = self._groups, array("Q")
        ends: Sequence[int] = (
            keys.group_ends() if isinstance(keys, BlockKeys) else keys[GROUP_BLOCKS - 1 :: GROUP_BLOCKS]
        )
        start = 0
        for end in ends:
            if end in groups:
                groups.move_to_end(end)
            else:
                group = array("Q", keys[start : start + GROUP_BLOCKS])
                self._add(end, group)
                fresh.extend(group)
            start += GROUP_BLOCKS
        fresh.extend(keys[start:])
        return pack_keys(ends), fresh.tobytes()

    def decode(self, ends: bytes, fresh: bytes) -> array[int] | None:
        """The keys that another process encoded; None if a group is not known here (see `unknown`).

        Costs about 0.3 us per group.
        """
        if not ends:
            return unpack_keys(fresh)
        groups, new_keys, keys, start, is_whole = self._groups, unpack_keys(fresh), array("Q"), 0, True
        for end in unpack_keys(ends):
            group = groups.get(end)
            # A group that this process knows may still be new to the sender. Keys are hashes: a new group is
            # recognised by its last key.
            last = start + GROUP_BLOCKS - 1
            if last < len(new_keys) and new_keys[last] == end:
                if group is None:
                    group = new_keys[start : last + 1]
                    self._add(end, group)
                start = last + 1
            if group is None:
                is_whole = False
                continue
            groups.move_to_end(end)
            keys.extend(group)
        keys.extend(new_keys[start:])
        return keys if is_whole else None

    def unknown(self, ends: bytes) -> bytes:
        """Those of these groups that are not known here, by their packed last keys."""
        return pack_keys([end for end in unpack_keys(ends) if end not in self._groups])

    def packed(self, ends: bytes) -> bytes:
        """The keys of these groups, for a process that asks for them; groups that are not known are left
        out."""
        found = array("Q")
        for end in unpack_keys(ends):
            found.extend(self._groups.get(end, ()))
        return found.tobytes()

    def learn(self, keys: Sequence[int]) -> None:
        """Remember the whole groups of these keys, which start at the beginning of a group."""
        for start in range(0, len(keys) - GROUP_BLOCKS + 1, GROUP_BLOCKS):
            end = keys[start + GROUP_BLOCKS - 1]
            if end not in self._groups:
                self._add(end, array("Q", keys[start : start + GROUP_BLOCKS]))

    def _add(self, end: int, group: Sequence[int]) -> None:
        self._groups[end] = group
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
