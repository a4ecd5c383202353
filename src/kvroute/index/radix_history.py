"""A route history as a compressed radix tree over chained block keys."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from kvroute.blocks.keys import BlockKey
from kvroute.index.history import HistoryShare, HistorySize


class TreeEdge:
    """An edge of the tree: consecutive keys with no branch between them.

    At least one worker holds all of it. `full` is the bitmask of those workers; others in `holds` hold
    a leading part. Whoever holds any block of a child holds this run in full. `depths` says how many keys
    each of them holds, from the first run on, where somebody has looked since that changed; it is given to
    who matches, so it is replaced and never changed.
    """

    __slots__ = ("begin", "children", "depths", "full", "holds", "keys", "last", "parent")

    begin: int
    """How many keys stand before it."""

    def __init__(self, keys: array[int], parent: TreeEdge | None) -> None:
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

    run: TreeEdge

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


def full_holders(run: TreeEdge) -> int:
    size, mask = len(run.keys), 0
    for worker, hold in run.holds.items():
        if hold.blocks == size:
            mask |= 1 << worker
    return mask


_Found: TypeAlias = tuple[TreeEdge | None, TreeEdge | None, int, int]


class _RadixPart(HistoryShare):
    __slots__ = ("bit", "free", "is_forgotten", "runs")

    def __init__(self, worker: int, capacity_blocks: int) -> None:
        super().__init__(worker, capacity_blocks)
        self.bit = 1 << worker
        self.runs: set[TreeEdge] = set()
        self.free = Hold()
        """Ends of the circular queue: `free.newer` is evicted first, `free.older` last."""
        self.is_forgotten = False


class RadixHistory:
    """The default history. Mutable, touched from the event loop only; implements `RouteHistory`.

    Because keys are chained, one comparison of a run's last key stands for all of its keys and all before
    them, so a prompt that was sent before is found by its own last key. The place where two prompts part is
    found by bisection, and a flat table from first key to run replaces child tables. A match costs about
    0.3 us a run, whatever the prompt's length; acquiring copies new keys only (bench/micro_index.py). A
    conversation stays one run as it grows.
    """

    def __init__(self, default_capacity_blocks: int) -> None:
        self._default_capacity = default_capacity_blocks
        self._heads: dict[int, TreeEdge] = {}
        self._ends: dict[int, TreeEdge] = {}
        """By last key."""
        self.parts: dict[int, _RadixPart] = {}
        self._walked: Sequence[BlockKey] | None = None
        self._found: _Found = None, None, 0, 0
        """What the last match came by, until something changes: the request that asked goes the same way when
        it is sent."""

    def match(self, keys: Sequence[BlockKey]) -> Mapping[int, int]:
        try:
            run = self._ends.get(keys[-1])
        except IndexError:  # a prompt shorter than a block
            return {}
        self._walked = keys
        held: Mapping[int, int]
        if run is not None:
            self._found = run, None, 0, 0
            held = run.depths or run.look()
            run = run.parent
        else:
            run, beyond, shared, _ = self._found = self._descend(keys)
            held = {} if beyond is None else beyond.at_most(shared)
        known = len(held)
        # Upwards: each holder of a run holds all before it, so what is new has ended here.
        while run is not None:
            if len(run.holds) != known:
                depths = run.depths or run.look()
                held = {**depths, **held} if known else depths
                known = len(held)
            run = run.parent
        return held

    def acquire(self, worker: int, keys: Sequence[BlockKey], extended: Hold | None = None) -> _RadixLease:
        """`extended` is where the lease ends that the new one will take the place of."""
        part = self.parts.get(worker)
        if part is None:
            part = self._own_part(worker)
        last, beyond, shared, end = self._found if keys is self._walked else self._walk(keys)
        self._walked = None
        if beyond is not None:
            last = self._split(beyond, shared)
        new_blocks, final = 0, None
        if last is not None:
            if last.full & part.bit:
                final = last.holds[worker]
            else:
                final, new_blocks = self._fill(part, last)
            hold: Hold | None = final
            while hold is not None:
                pins = hold.pins
                if not pins:
                    part.active_blocks += hold.blocks
                    # As `hold.unlink()`, which every request would call.
                    older, newer = hold.older, hold.newer
                    older.newer = newer
                    newer.older = older
                hold.pins = pins + 1
                hold = hold.before
        if end:
            final, added = self._grow(part, keys, final, end, extended)
            new_blocks += added
        if new_blocks:
            part.blocks += new_blocks
            if part.blocks > part.capacity_blocks:
                self._trim(part)
        return _RadixLease(self, part, final, new_blocks)

    def part(self, worker: int) -> HistoryShare:
        return self.parts.get(worker) or self._own_part(worker)

    def set_capacity(self, worker: int, blocks: int) -> None:
        part = self._own_part(worker)
        part.capacity_blocks = blocks
        self._trim(part)

    def forget(self, worker: int) -> None:
        part = self.parts.pop(worker, None)
        if part is None:
            return
        part.is_forgotten = True
        self.parts[worker] = _RadixPart(worker, part.capacity_blocks)
        for run in part.runs:
            del run.holds[worker]
            self._shrink(run, part.bit)

    def recent(self, worker: int, most_blocks: int) -> list[Sequence[BlockKey]]:
        part, found = self.parts.get(worker), list[Sequence[BlockKey]]()
        if part is None:
            return found
        # A run that goes on is told by what comes behind it.
        inner = {run.parent for run in part.runs}
        hold = part.free.older
        while hold is not part.free:
            if hold.run not in inner:
                keys = array("Q", hold.run.keys[: hold.blocks])
                before = hold.run.parent
                while before is not None:
                    keys = before.keys + keys
                    before = before.parent
                most_blocks -= len(keys)
                if most_blocks < 0:
                    break
                found.append(keys)  # type: ignore[arg-type]
            hold = hold.older
        return found[::-1]

    def size(self) -> HistorySize:
        runs = self._heads.values()
        blocks = sum(len(run.keys) for run in runs)
        holds = sum(len(run.holds) for run in runs)
        tracked = sum(part.blocks for part in self.parts.values())
        # Seen with sys.getsizeof: 8 a key; a run with its array and dicts about 650; a hold about 150.
        return HistorySize(blocks, tracked, 8 * blocks + 650 * len(self._heads) + 150 * holds)

    def _own_part(self, worker: int) -> _RadixPart:
        part = self.parts.get(worker)
        if part is None:
            part = self.parts[worker] = _RadixPart(worker, self._default_capacity)
        return part

    def _walk(self, keys: Sequence[BlockKey]) -> _Found:
        """The last run that `keys` have in full; one behind it that they share the first so many keys with;
        how many keys there are, or 0 where the last run ends with them."""
        try:
            run = self._ends.get(keys[-1])
        except IndexError:  # a prompt shorter than a block
            return None, None, 0, 0
        return self._descend(keys) if run is None else (run, None, 0, 0)

    def _descend(self, keys: Sequence[BlockKey]) -> _Found:
        """As `_walk`, of keys that no run ends with."""
        heads = self._heads
        whole: TreeEdge | None = None
        end, pos = len(keys), 0
        while pos < end:
            run = heads.get(keys[pos])
            if run is None:
                break
            behind = pos + len(run.keys)
            if behind > end or keys[behind - 1] != run.last:
                return whole, run, shared_keys(run.keys, keys, pos), end
            whole = run
            pos = behind
        return whole, None, 0, end

    def _fill(self, part: _RadixPart, run: TreeEdge) -> tuple[Hold, int]:
        """Hold `run` in full, and all before it; the hold, and how many blocks are new."""
        worker, bit, new_blocks = part.worker, part.bit, 0
        final: Hold | None = None
        behind: Hold | None = None
        upwards: TreeEdge | None = run
        while upwards is not None:
            if upwards.full & bit:
                hold = upwards.holds[worker]
            else:
                hold, size = upwards.holds.get(worker) or self._hold(part, upwards), len(upwards.keys)
                new_blocks += size - hold.blocks
                hold.blocks = size
                upwards.full |= bit
                upwards.depths = None
            if behind is None:
                final = hold
            else:
                if behind.before is hold:
                    break
                behind.before = hold
            behind, upwards = hold, upwards.parent
        assert final is not None
        return final, new_blocks

    def _grow(
        self, part: _RadixPart, keys: Sequence[BlockKey], hold: Hold | None, end: int, extended: Hold | None
    ) -> tuple[Hold | None, int]:
        """Hold and pin what `keys`, `end` of them, have behind the run of `hold`, which is pinned; the hold
        of their end, and how many those are."""
        last = None if hold is None else hold.run
        pos = 0 if last is None else last.begin + len(last.keys)
        if pos == end:
            return hold, 0
        added = end - pos
        fresh = array("Q", keys[pos:] if pos else keys)
        own_pins = 2 if hold is extended else 1
        if hold and last and not last.children and len(last.holds) == 1 and hold.pins == own_pins:
            # Nobody else holds this run and only this request pins it: let it grow, so that a
            # conversation does not become a chain of one run a turn.
            del self._ends[last.last]
            last.keys.extend(fresh)
            last.last = fresh[-1]
            hold.blocks += added
            last.depths = None
        else:
            if last:
                last.children += 1
            last = self._heads[fresh[0]] = TreeEdge(fresh, last)
            last.full = part.bit
            before, hold = hold, self._hold(part, last)
            hold.before = before
            hold.blocks = added
            hold.pins = 1
        self._ends[last.last] = last
        part.active_blocks += added
        return hold, added

    def _hold(self, part: _RadixPart, run: TreeEdge) -> Hold:
        hold = run.holds[part.worker] = Hold()
        hold.run = run
        part.runs.add(run)
        return hold

    def _split(self, run: TreeEdge, size: int) -> TreeEdge:
        """Cut `run` after `size` keys; the new head. The tail keeps its identity: leases end there."""
        head = TreeEdge(run.keys[:size], run.parent)
        head.children = 1
        run.keys = run.keys[size:]
        run.parent = head
        run.begin += size
        run.depths = None
        self._heads[head.keys[0]] = self._ends[head.last] = head
        self._heads[run.keys[0]] = run
        for worker, hold in list(run.holds.items()):
            part = self.parts[worker]
            if hold.blocks <= size:
                del run.holds[worker]
                part.runs.remove(run)
                part.runs.add(head)
                head.holds[worker] = hold
                hold.run = head
            else:
                front = self._hold(part, head)
                front.blocks = size
                front.pins = hold.pins
                front.before = hold.before
                hold.before = front
                hold.blocks -= size
                if not hold.pins:
                    front.link_before(hold.newer)  # the tail is evicted first
        head.full = full_holders(head)
        return head

    def _trim(self, part: _RadixPart) -> None:
        """Evict down to the capacity, as far as unpinned blocks go."""
        excess = part.blocks - part.capacity_blocks
        while excess > 0:
            hold = part.free.newer
            if hold is part.free:
                return
            run = hold.run
            taken = min(excess, hold.blocks)
            hold.blocks -= taken
            part.blocks -= taken
            excess -= taken
            if not hold.blocks:
                hold.unlink()
                del run.holds[part.worker]
                part.runs.remove(run)
            self._shrink(run, part.bit)

    def _shrink(self, run: TreeEdge, bit: int) -> None:
        """Drop what of `run` no worker holds any more, after the hold behind `bit` went or became shorter."""
        run.full &= ~bit
        run.depths = None
        self._walked = None
        if run.full:
            return
        if not run.holds:
            del self._heads[run.keys[0]], self._ends[run.last]
            if run.parent:
                run.parent.children -= 1
            return
        # No full holder, so no children either.
        del run.keys[max(hold.blocks for hold in run.holds.values()) :]
        del self._ends[run.last]
        run.last = run.keys[-1]
        self._ends[run.last] = run
        run.full = full_holders(run)


class _RadixLease(Struct, eq=False, gc=False):
    _history: RadixHistory
    _part: _RadixPart | None
    _end: Hold | None
    new_blocks: int

    def extend(self, keys: Sequence[BlockKey]) -> None:
        part, history = self._part, self._history
        if part is None or part.is_forgotten:
            return
        before = _RadixLease(history, part, self._end, 0)
        after = history.acquire(part.worker, keys, self._end)
        self._end = after._end
        self.new_blocks += after.new_blocks
        before.release()

    def release(self) -> None:
        part = self._part
        if part is None:
            return
        self._part = None
        if part.is_forgotten:
            return
        queue, hold = part.free, self._end
        newest = queue.older
        while hold is not None:
            pins = hold.pins = hold.pins - 1
            if not pins:
                part.active_blocks -= hold.blocks
                # As `hold.link_before(queue)`; the queue itself is closed behind the last one.
                hold.older = newest
                newest.newer = hold
                newest = hold
            hold = hold.before
        newest.newer = queue
        queue.older = newest
        if part.blocks > part.capacity_blocks:
            self._history._trim(part)
