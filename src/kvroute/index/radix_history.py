"""A route history as a compressed radix tree over chained block keys."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from kvroute.blocks.keys import BlockKey
from kvroute.index.history import HistoryShare, HistorySize


class TreeEdge:
    """An edge of the tree: consecutive keys with no branch between them.

    At least one worker holds the whole edge. `full` is the bitmask of these workers; the other workers in
    `holds` hold its leading keys. A worker that holds any block of a child holds this edge in full. `depths`
    is a cache: for each holder the keys from the root to the last one that it holds. It is replaced, never
    changed, because `match` returns it.
    """

    __slots__ = ("begin", "children", "depths", "full", "holds", "keys", "last", "parent")

    begin: int
    """The number of keys between the root and this edge."""

    def __init__(self, keys: array[int], parent: TreeEdge | None) -> None:
        self.keys = keys
        self.last = keys[-1]
        self.parent = parent
        self.begin = 0 if parent is None else parent.begin + len(parent.keys)
        self.children = 0
        self.full = 0
        self.holds: dict[int, Hold] = {}
        self.depths: Mapping[int, int] | None = None

    def compute_depths(self) -> Mapping[int, int]:
        """Compute and cache `depths`."""
        begin = self.begin
        self.depths = depths = {worker: begin + hold.blocks for worker, hold in self.holds.items()}
        return depths

    def depths_within(self, shared: int) -> dict[int, int]:
        """`depths` for a prompt that has only the first `shared` keys of this edge."""
        begin = self.begin
        return {worker: begin + min(hold.blocks, shared) for worker, hold in self.holds.items()}


class Hold:
    """One worker's leading `blocks` of one edge. Mutable: its `RadixHistory` changes it.

    `parent` is the worker's hold of the parent edge. Unpinned holds form the worker's eviction queue.
    """

    __slots__ = ("blocks", "edge", "newer", "older", "parent", "pins")

    edge: TreeEdge

    def __init__(self) -> None:
        self.parent: Hold | None = None
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


def shared_keys(edge: array[int], keys: Sequence[BlockKey], pos: int) -> int:
    """The number of leading keys of `edge` that equal `keys` from `pos` on; at least 1."""
    low, high = 1, min(len(edge), len(keys) - pos)
    if edge[high - 1] == keys[pos + high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if edge[middle - 1] == keys[pos + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def workers_holding_all(edge: TreeEdge) -> int:
    """The bitmask of the workers that hold the whole edge."""
    size, mask = len(edge.keys), 0
    for worker, hold in edge.holds.items():
        if hold.blocks == size:
            mask |= 1 << worker
    return mask


_PathEnd: TypeAlias = tuple[TreeEdge | None, TreeEdge | None, int, int]


class _RadixShare(HistoryShare):
    __slots__ = ("bit", "edges", "free", "is_forgotten")

    def __init__(self, worker: int, capacity_blocks: int) -> None:
        super().__init__(worker, capacity_blocks)
        self.bit = 1 << worker
        self.edges: set[TreeEdge] = set()
        self.free = Hold()
        """Sentinel of the circular eviction queue: `free.newer` is evicted first, `free.older` last."""
        self.is_forgotten = False


class RadixHistory:
    """The default history; implements `RouteHistory`. Mutable; use it from the event loop only.

    A match costs about 0.3 us for each edge, independent of the prompt's length; `acquire` copies new keys
    only (bench/micro_index.py).
    """

    # Keys are chained, so equal last keys of an edge mean that all keys of the edge and all keys before it
    # are equal. A prompt that was sent before is found by its last key alone. Bisection finds where two
    # prompts branch, and one flat table from first key to edge replaces a table of children per edge. A
    # conversation stays one edge while it grows.

    def __init__(self, default_capacity_blocks: int) -> None:
        self._default_capacity = default_capacity_blocks
        self._heads: dict[int, TreeEdge] = {}
        self._ends: dict[int, TreeEdge] = {}
        """Edges by their last key."""
        self.shares: dict[int, _RadixShare] = {}
        self._matched_keys: Sequence[BlockKey] | None = None
        self._matched: _PathEnd = None, None, 0, 0
        """The path end that the last `match` found. `acquire` for the same keys reuses it until an edge
        changes."""

    def match(self, keys: Sequence[BlockKey]) -> Mapping[int, int]:
        try:
            edge = self._ends.get(keys[-1])
        except IndexError:  # a prompt shorter than a block
            return {}
        self._matched_keys = keys
        depths: Mapping[int, int]
        if edge is not None:
            self._matched = edge, None, 0, 0
            depths = edge.depths or edge.compute_depths()
            edge = edge.parent
        else:
            edge, beyond, shared, _ = self._matched = self._descend(keys)
            depths = {} if beyond is None else beyond.depths_within(shared)
        holders = len(depths)
        # Towards the root: a worker that holds an edge holds all edges before it. A worker that appears first
        # at this edge holds nothing beyond it.
        while edge is not None:
            if len(edge.holds) != holders:
                edge_depths = edge.depths or edge.compute_depths()
                depths = {**edge_depths, **depths} if holders else edge_depths
                holders = len(depths)
            edge = edge.parent
        return depths

    def acquire(self, worker: int, keys: Sequence[BlockKey], extended: Hold | None = None) -> _RadixPinned:
        """See `RouteHistory.acquire`. `extended` is the end of the pinned blocks that the new ones will
        replace."""
        share = self.shares.get(worker)
        if share is None:
            share = self._share(worker)
        last, beyond, shared, end = self._matched if keys is self._matched_keys else self._find_end(keys)
        self._matched_keys = None
        if beyond is not None:
            last = self._split(beyond, shared)
        new_blocks, final = 0, None
        if last is not None:
            if last.full & share.bit:
                final = last.holds[worker]
            else:
                final, new_blocks = self._hold_path(share, last)
            hold: Hold | None = final
            while hold is not None:
                pins = hold.pins
                if not pins:
                    share.active_blocks += hold.blocks
                    # `hold.unlink()`, inlined: every request runs this.
                    older, newer = hold.older, hold.newer
                    older.newer = newer
                    newer.older = older
                hold.pins = pins + 1
                hold = hold.parent
        if end:
            final, added = self._append(share, keys, final, end, extended)
            new_blocks += added
        if new_blocks:
            share.blocks += new_blocks
            if share.blocks > share.capacity_blocks:
                self._evict_excess(share)
        return _RadixPinned(self, share, final, new_blocks)

    def touch(self, worker: int, lasts: Sequence[BlockKey]) -> Iterable[int]:
        share, ends, missing = self.shares.get(worker), self._ends, list[int]()
        if share is None:
            return range(len(lasts))
        bit, queue = share.bit, share.free
        for position, last in enumerate(lasts):
            edge = ends.get(last)
            if edge is None or not edge.full & bit:
                missing.append(position)
                continue
            hold: Hold | None = edge.holds[worker]
            while hold is not None:
                if not hold.pins:
                    # `hold.unlink()` and `hold.link_before(queue)`, inlined.
                    older, newer = hold.older, hold.newer
                    older.newer = newer
                    newer.older = older
                    hold.older = newest = queue.older
                    hold.newer = queue
                    newest.newer = queue.older = hold
                hold = hold.parent
        return missing

    def share(self, worker: int) -> HistoryShare:
        return self.shares.get(worker) or self._share(worker)

    def set_capacity(self, worker: int, blocks: int) -> None:
        share = self._share(worker)
        share.capacity_blocks = blocks
        self._evict_excess(share)

    def forget(self, worker: int) -> None:
        share = self.shares.pop(worker, None)
        if share is None:
            return
        share.is_forgotten = True
        self.shares[worker] = _RadixShare(worker, share.capacity_blocks)
        for edge in share.edges:
            del edge.holds[worker]
            self._shorten(edge, share.bit)

    def recent(self, worker: int, most_blocks: int) -> list[Sequence[BlockKey]]:
        share, prompts = self.shares.get(worker), list[Sequence[BlockKey]]()
        if share is None:
            return prompts
        # The prompts that end in a child include this edge.
        inner = {edge.parent for edge in share.edges}
        hold = share.free.older
        while hold is not share.free:
            if hold.edge not in inner:
                keys = array("Q", hold.edge.keys[: hold.blocks])
                ancestor = hold.edge.parent
                while ancestor is not None:
                    keys = ancestor.keys + keys
                    ancestor = ancestor.parent
                most_blocks -= len(keys)
                if most_blocks < 0:
                    break
                prompts.append(keys)  # type: ignore[arg-type]
            hold = hold.older
        return prompts[::-1]

    def size(self) -> HistorySize:
        edges = self._heads.values()
        blocks = sum(len(edge.keys) for edge in edges)
        holds = sum(len(edge.holds) for edge in edges)
        tracked = sum(share.blocks for share in self.shares.values())
        # Measured with sys.getsizeof, in bytes: 8 a key; an edge with its array and dicts about 650; a hold
        # 150.
        return HistorySize(blocks, tracked, 8 * blocks + 650 * len(self._heads) + 150 * holds)

    def _share(self, worker: int) -> _RadixShare:
        share = self.shares.get(worker)
        if share is None:
            share = self.shares[worker] = _RadixShare(worker, self._default_capacity)
        return share

    def _find_end(self, keys: Sequence[BlockKey]) -> _PathEnd:
        """The end of the path of `keys`: (last full edge, partly shared edge after it, keys shared with that,
        end).

        The last value is `len(keys)`, or 0 if the last full edge ends with the last key.
        """
        try:
            edge = self._ends.get(keys[-1])
        except IndexError:  # a prompt shorter than a block
            return None, None, 0, 0
        return self._descend(keys) if edge is None else (edge, None, 0, 0)

    def _descend(self, keys: Sequence[BlockKey]) -> _PathEnd:
        """As `_find_end`, for keys whose last key is not the end of an edge."""
        heads = self._heads
        whole: TreeEdge | None = None
        end, pos = len(keys), 0
        while pos < end:
            edge = heads.get(keys[pos])
            if edge is None:
                break
            after = pos + len(edge.keys)
            if after > end or keys[after - 1] != edge.last:
                return whole, edge, shared_keys(edge.keys, keys, pos), end
            whole = edge
            pos = after
        return whole, None, 0, end

    def _hold_path(self, share: _RadixShare, edge: TreeEdge) -> tuple[Hold, int]:
        """Hold `edge` and all edges before it in full. Returns the hold of `edge`, and how many blocks are
        new."""
        worker, bit, new_blocks = share.worker, share.bit, 0
        final: Hold | None = None
        child: Hold | None = None
        upwards: TreeEdge | None = edge
        while upwards is not None:
            if upwards.full & bit:
                hold = upwards.holds[worker]
            else:
                hold, size = upwards.holds.get(worker) or self._hold(share, upwards), len(upwards.keys)
                new_blocks += size - hold.blocks
                hold.blocks = size
                upwards.full |= bit
                upwards.depths = None
            if child is None:
                final = hold
            else:
                if child.parent is hold:
                    break
                child.parent = hold
            child, upwards = hold, upwards.parent
        assert final is not None
        return final, new_blocks

    def _append(
        self, share: _RadixShare, keys: Sequence[BlockKey], hold: Hold | None, end: int, extended: Hold | None
    ) -> tuple[Hold | None, int]:
        """Extend the pinned `hold` with the rest of `keys` (`end` is their number) and pin it.

        Returns the last hold and how many keys were added.
        """
        last = None if hold is None else hold.edge
        pos = 0 if last is None else last.begin + len(last.keys)
        if pos == end:
            return hold, 0
        added = end - pos
        fresh = array("Q", keys[pos:])
        expected_pins = 2 if hold is extended else 1
        if hold and last and not last.children and len(last.holds) == 1 and hold.pins == expected_pins:
            # Only this worker holds the edge and only this request pins it: extend the edge, so that a
            # conversation does not become a chain with one edge per turn.
            del self._ends[last.last]
            last.keys.extend(fresh)
            last.last = fresh[-1]
            hold.blocks += added
            last.depths = None
        else:
            if last:
                last.children += 1
            last = self._heads[fresh[0]] = TreeEdge(fresh, last)
            last.full = share.bit
            parent_hold, hold = hold, self._hold(share, last)
            hold.parent = parent_hold
            hold.blocks = added
            hold.pins = 1
        self._ends[last.last] = last
        share.active_blocks += added
        return hold, added

    def _hold(self, share: _RadixShare, edge: TreeEdge) -> Hold:
        hold = edge.holds[share.worker] = Hold()
        hold.edge = edge
        share.edges.add(edge)
        return hold

    def _split(self, edge: TreeEdge, size: int) -> TreeEdge:
        """Split `edge` after `size` keys; returns the new head. The tail stays the same object, which pins
        refer to."""
        head = TreeEdge(edge.keys[:size], edge.parent)
        head.children = 1
        edge.keys = edge.keys[size:]
        edge.parent = head
        edge.begin += size
        edge.depths = None
        self._heads[head.keys[0]] = self._ends[head.last] = head
        self._heads[edge.keys[0]] = edge
        for worker, hold in list(edge.holds.items()):
            share = self.shares[worker]
            if hold.blocks <= size:
                del edge.holds[worker]
                share.edges.remove(edge)
                share.edges.add(head)
                head.holds[worker] = hold
                hold.edge = head
            else:
                front = self._hold(share, head)
                front.blocks = size
                front.pins = hold.pins
                front.parent = hold.parent
                hold.parent = front
                hold.blocks -= size
                if not hold.pins:
                    front.link_before(hold.newer)  # the tail is evicted first
        head.full = workers_holding_all(head)
        return head

    def _evict_excess(self, share: _RadixShare) -> None:
        """Evict unpinned blocks until the share fits its capacity."""
        excess = share.blocks - share.capacity_blocks
        while excess > 0:
            hold = share.free.newer
            if hold is share.free:
                return
            edge = hold.edge
            taken = min(excess, hold.blocks)
            hold.blocks -= taken
            share.blocks -= taken
            share.evicted_blocks += taken
            excess -= taken
            if not hold.blocks:
                hold.unlink()
                del edge.holds[share.worker]
                share.edges.remove(edge)
            self._shorten(edge, share.bit)

    def _shorten(self, edge: TreeEdge, bit: int) -> None:
        """Drop the keys of `edge` that no worker holds, after the hold of worker `bit` was removed or
        shortened."""
        edge.full &= ~bit
        edge.depths = None
        self._matched_keys = None
        if edge.full:
            return
        if not edge.holds:
            del self._heads[edge.keys[0]], self._ends[edge.last]
            if edge.parent:
                edge.parent.children -= 1
            return
        # No worker holds the whole edge, so the edge has no children.
        del edge.keys[max(hold.blocks for hold in edge.holds.values()) :]
        del self._ends[edge.last]
        edge.last = edge.keys[-1]
        self._ends[edge.last] = edge
        edge.full = workers_holding_all(edge)


class _RadixPinned(Struct, eq=False, gc=False):
    """Implements `PinnedBlocks`. Mutable: `extend` and `release`."""

    _history: RadixHistory
    _share: _RadixShare | None
    _end: Hold | None
    new_blocks: int

    def extend(self, keys: Sequence[BlockKey]) -> None:
        share, history = self._share, self._history
        if share is None or share.is_forgotten:
            return
        replaced = _RadixPinned(history, share, self._end, 0)
        extended = history.acquire(share.worker, keys, self._end)
        self._end = extended._end
        self.new_blocks += extended.new_blocks
        replaced.release()

    def release(self) -> None:
        share = self._share
        if share is None:
            return
        self._share = None
        if share.is_forgotten:
            return
        queue, hold = share.free, self._end
        newest = queue.older
        while hold is not None:
            pins = hold.pins = hold.pins - 1
            if not pins:
                share.active_blocks -= hold.blocks
                # `hold.link_before(queue)`, inlined; the queue is closed after the last hold.
                hold.older = newest
                newest.newer = hold
                newest = hold
            hold = hold.parent
        newest.newer = queue
        queue.older = newest
        if share.blocks > share.capacity_blocks:
            self._history._evict_excess(share)
