"""What a radix history is made of: runs of keys, and how much of each which worker holds."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from kvroute.blocks.keys import BlockKey


class Run:
    """An edge of the tree: consecutive keys with no branch between them.

    At least one worker holds all of it. `full` is the bitmask of those workers; others in `holds` hold
    a leading part. Whoever holds any block of a child holds this run in full. `depths` says how many keys
    each of them holds, from the first run on, where somebody has looked since that changed; it is given to
    who matches, so it is replaced and never changed.
    """

    __slots__ = ("begin", "children", "depths", "full", "holds", "keys", "last", "parent")

    begin: int
    """How many keys stand before it."""

    def __init__(self, keys: array[int], parent: Run | None) -> None:
        self.keys = keys
        self.last = keys[-1]
        self.parent = parent
        self.begin = 0 if parent is None else parent.begin + len(parent.keys)
        self.children = 0
        self.full = 0
        self.holds: dict[int, Hold] = {}
        self.depths: Mapping[int, int] | None = None

    def look(self) -> Mapping[int, int]:
        """`depths`, made anew."""
        begin = self.begin
        self.depths = depths = {worker: begin + hold.blocks for worker, hold in self.holds.items()}
        return depths

    def at_most(self, shared: int) -> dict[int, int]:
        """`depths` of a prompt that shares only the first so many keys."""
        begin = self.begin
        return {worker: begin + min(hold.blocks, shared) for worker, hold in self.holds.items()}


class Hold:
    """One worker's leading `blocks` of one run; `before` is its hold of the run's parent. Unpinned holds form
    the part's free queue."""

    __slots__ = ("before", "blocks", "newer", "older", "pins", "run")

    run: Run

    def __init__(self) -> None:
        self.before: Hold | None = None
        self.blocks = 0
        self.pins = 0
        self.older = self
        self.newer = self

    def unlink(self) -> None:
        self.older.newer = self.newer
        self.newer.older = self.older

    def link_before(self, other: Hold) -> None:
        self.older = other.older
        self.newer = other
        other.older.newer = self
        other.older = self


def shared_keys(run: array[int], keys: Sequence[BlockKey], pos: int) -> int:
    """How many leading keys of `run` equal `keys` from `pos` on; the first does."""
    low, high = 1, min(len(run), len(keys) - pos)
    if run[high - 1] == keys[pos + high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == keys[pos + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def full_holders(run: Run) -> int:
    size, mask = len(run.keys), 0
    for worker, hold in run.holds.items():
        if hold.blocks == size:
            mask |= 1 << worker
    return mask
