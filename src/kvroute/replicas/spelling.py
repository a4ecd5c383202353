"""Prompts' keys told in a few bytes: what was told once is called by one key from then on.

Keys are chained, so one key stands for all before it. A prompt is told in groups of `GROUP` keys, each called
by its last one; a group that was told before needs no more than that. Who tells and who reads forget groups
by the same rule, and links keep the order, so a reader always knows what the teller takes for known; both
begin anew whenever somebody new begins to listen.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvroute.blocks.keys import GROUP_BLOCKS, BlockKeys
from kvroute.errors import WireError
from kvroute.replicas.messages import packed, unpacked

GROUP: Final = GROUP_BLOCKS
MOST_GROUPS: Final = 32_768
"""Remembered by each reader for each teller: a million keys, about 15 MB."""


class Teller:
    """Mutable: remembers the groups that were told."""

    def __init__(self) -> None:
        self._told: OrderedDict[int, None] = OrderedDict()

    def tell(self, keys: Sequence[int]) -> tuple[bytes, bytes]:
        """`keys` as (last keys of the groups, keys of groups not told before and of the rest). Hashes only
        what is not known: about 0.2 us a known group, 1 us another one."""
        if len(keys) < GROUP:
            return b"", packed(keys)
        told, fresh = self._told, array("Q")
        ends: Sequence[int] = keys.group_ends() if isinstance(keys, BlockKeys) else keys[GROUP - 1 :: GROUP]
        place = 0
        for end in ends:
            if end in told:
                told.move_to_end(end)
            else:
                told[end] = None
                if len(told) > MOST_GROUPS:
                    told.popitem(last=False)
                fresh.extend(keys[place : place + GROUP])
            place += GROUP
        fresh.extend(keys[place:])
        return packed(ends), fresh.tobytes()

    def begin_anew(self) -> None:
        """As `Reader.begin_anew`, which every reader must hear of before it reads on."""
        self._told.clear()


class Reader:
    """Of one teller. Mutable: remembers the groups that were read."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, array[int]] = OrderedDict()

    def read(self, ends: bytes, fresh: bytes) -> array[int]:
        """The keys that were told. Raises WireError if something before was not read."""
        if not ends:
            return unpacked(fresh)
        known, spelled, keys, place = self._known, unpacked(fresh), array("Q"), 0
        for end in unpacked(ends):
            group = known.get(end)
            if group is None:
                group = known[end] = spelled[place : place + GROUP]
                if len(group) != GROUP or group[-1] != end:
                    raise WireError("keys that were not told")
                place += GROUP
                if len(known) > MOST_GROUPS:
                    known.popitem(last=False)
            else:
                known.move_to_end(end)
            keys.extend(group)
        keys.extend(spelled[place:])
        return keys

    def begin_anew(self) -> None:
        """Forget all groups."""
        self._known.clear()
