"""A route history as a compressed radix tree over chained block keys."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from kvroute.blocks.keys import BlockKey
from kvroute.index.history import HistorySize, Lease, Part

_MOST_MASKS: Final = 1024


class _Run:
    """An edge of the tree: consecutive keys with no branch between them.

    At least one worker holds all of it. `full` is the bitmask of those workers; others in `holds` hold
    a leading part. Whoever holds any block of a child holds this run in full.
    """

    __slots__ = ("children", "full", "holds", "keys", "last", "parent")

    def __init__(self, keys: array[int], parent: _Run | None) -> None:
        self.keys = keys
        self.last = keys[-1]
        self.parent = parent
        self.children = 0
        self.full = 0
        self.holds: dict[int, _Hold] = {}


class _Hold:
    """One worker's leading `blocks` of one run. Unpinned holds form the part's free queue."""

    __slots__ = ("blocks", "newer", "older", "pins", "run")

    run: _Run

    def __init__(self) -> None:
        self.blocks = 0
        self.pins = 0
        self.older = self
        self.newer = self

    def unlink(self) -> None:
        self.older.newer = self.newer
        self.newer.older = self.older

    def link_before(self, other: _Hold) -> None:
        self.older = other.older
        self.newer = other
        other.older.newer = self
        other.older = self


_Found: TypeAlias = tuple[list[_Run], _Run | None, int, int]


class _RadixPart(Part):
    __slots__ = ("bit", "free", "is_forgotten", "runs")

    def __init__(self, worker: int, capacity_blocks: int) -> None:
        super().__init__(worker, capacity_blocks)
        self.bit = 1 << worker
        self.runs: set[_Run] = set()
        self.free = _Hold()
        """Ends of the circular queue: `free.newer` is evicted first, `free.older` last."""
        self.is_forgotten = False


class RadixHistory:
    """The default history. Mutable, touched from the event loop only; implements `RouteHistory`.

    Because keys are chained, one comparison of a run's last key stands for all of its keys, the place
    where two prompts part is found by bisection, and a flat table from first key to run replaces child
    tables. A match costs about 0.3 us a run plus 0.15 us a worker, whatever the prompt's length;
    acquiring copies new keys only (bench/micro_index.py). A conversation stays one run as it grows.
    """

    def __init__(self, default_capacity_blocks: int) -> None:
        self._default_capacity = default_capacity_blocks
        self._heads: dict[int, _Run] = {}
        self.parts: dict[int, _RadixPart] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        """What is in bitmasks that were seen."""
        self._walked: Sequence[BlockKey] | None = None
        self._found: _Found = [], None, 0, 0
        """What the last match came by, until something changes: the request that asked goes the same way when
        it is sent."""

    def match(self, keys: Sequence[BlockKey]) -> dict[int, int]:
        whole, beyond, shared, _ = self._found = self._walk(keys)
        self._walked = keys
        held: dict[int, int] = {}
        pos, alive = 0, -1
        for run in whole:
            size, full = len(run.keys), run.full
            if alive != full:
                holds = run.holds
                if full.bit_count() != len(holds):
                    for worker, hold in holds.items():
                        if hold.blocks < size:
                            held[worker] = pos + hold.blocks
                if pos:
                    self._add(held, alive & ~_mask(holds), pos)
                alive = full
            pos += size
        if beyond is not None:
            for worker, hold in beyond.holds.items():
                blocks = hold.blocks
                held[worker] = pos + (blocks if blocks < shared else shared)
            if pos:
                self._add(held, alive & ~_mask(beyond.holds), pos)
        elif pos:
            members = self._members.get(alive)
            if members is None:
                self._add(held, alive, pos)
            else:
                for worker in members:
                    held[worker] = pos
        return held

    def acquire(self, worker: int, keys: Sequence[BlockKey]) -> Lease:
        part = self.parts.get(worker)
        if part is None:
            part = self._own_part(worker)
        end, new_blocks = self._pin(part, keys, None)
        return _RadixLease(self, part, end, new_blocks)

    def part(self, worker: int) -> Part:
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
        # Seen with sys.getsizeof: 8 a key; a run with its array and dict about 550; a hold about 150.
        return HistorySize(blocks, tracked, 8 * blocks + 550 * len(self._heads) + 150 * holds)

    def _own_part(self, worker: int) -> _RadixPart:
        part = self.parts.get(worker)
        if part is None:
            part = self.parts[worker] = _RadixPart(worker, self._default_capacity)
        return part

    def _walk(self, keys: Sequence[BlockKey]) -> _Found:
        """The runs that `keys` begin with, each in full; one that they share the first so many keys with; how
        many keys there are."""
        heads = self._heads
        whole: list[_Run] = []
        end, pos = len(keys), 0
        while pos < end:
            run = heads.get(keys[pos])
            if run is None:
                break
            behind = pos + len(run.keys)
            if behind > end or keys[behind - 1] != run.last:
                return whole, run, _shared(run.keys, keys, pos), end
            whole.append(run)
            pos = behind
        return whole, None, 0, end

    def _add(self, held: dict[int, int], workers: int, blocks: int) -> None:
        """Put `blocks` for every worker in the bitmask."""
        members = self._members.get(workers)
        if members is None:
            if len(self._members) >= _MOST_MASKS:
                self._members.clear()
            members = self._members[workers] = tuple(_members(workers))
        for worker in members:
            held[worker] = blocks

    def _pin(
        self, part: _RadixPart, keys: Sequence[BlockKey], leased: _Run | None
    ) -> tuple[_Run | None, int]:
        """Hold and pin all of `keys`; the last run and how many blocks are new.

        `leased` is where the lease being extended ends, whose pin is about to go.
        """
        if keys is self._walked:
            whole, beyond, shared, end = self._found
        else:
            whole, beyond, shared, end = self._walk(keys)
        self._walked = None
        worker, bit = part.worker, part.bit
        pos = new_blocks = 0
        last: _Run | None = None
        if beyond is not None:
            whole.append(self._split(beyond, shared))
        for run in whole:
            size = len(run.keys)
            hold = run.holds.get(worker)
            if hold is None:
                hold = self._hold(part, run)
            elif not hold.pins:  # as `hold.unlink()`, which every request would call
                older, newer = hold.older, hold.newer
                older.newer = newer
                newer.older = older
            if hold.blocks < size:
                new_blocks += size - hold.blocks
                hold.blocks = size
                run.full |= bit
            if not hold.pins:
                part.active_blocks += size
            hold.pins += 1
            last = run
            pos += size
        if pos < end:
            added = end - pos
            fresh = array("Q", keys[pos:] if pos else keys)
            own_pins = 2 if last is leased else 1
            if last and not last.children and len(last.holds) == 1 and last.holds[worker].pins == own_pins:
                # Nobody else holds this run and only this request pins it: let it grow, so that a
                # conversation does not become a chain of one run a turn.
                last.keys.extend(fresh)
                last.last = fresh[-1]
                last.holds[worker].blocks += added
            else:
                if last:
                    last.children += 1
                last = self._heads[fresh[0]] = _Run(fresh, last)
                last.full = bit
                hold = self._hold(part, last)
                hold.blocks = added
                hold.pins = 1
            new_blocks += added
            part.active_blocks += added
        if new_blocks:
            part.blocks += new_blocks
            if part.blocks > part.capacity_blocks:
                self._trim(part)
        return last, new_blocks

    def _unpin(self, part: _RadixPart, run: _Run | None) -> None:
        if part.is_forgotten:
            return
        worker, queue = part.worker, part.free
        while run is not None:
            hold = run.holds[worker]
            pins = hold.pins = hold.pins - 1
            if not pins:
                part.active_blocks -= hold.blocks
                # As `hold.link_before(queue)`.
                hold.older = older = queue.older
                hold.newer = queue
                older.newer = queue.older = hold
            run = run.parent
        if part.blocks > part.capacity_blocks:
            self._trim(part)

    def _hold(self, part: _RadixPart, run: _Run) -> _Hold:
        hold = run.holds[part.worker] = _Hold()
        hold.run = run
        part.runs.add(run)
        return hold

    def _split(self, run: _Run, size: int) -> _Run:
        """Cut `run` after `size` keys; the new head. The tail keeps its identity: leases end there."""
        head = _Run(run.keys[:size], run.parent)
        head.children = 1
        run.keys = run.keys[size:]
        run.parent = head
        self._heads[head.keys[0]] = head
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
                hold.blocks -= size
                if not hold.pins:
                    front.link_before(hold.newer)  # the tail is evicted first
        head.full = _full(head)
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

    def _shrink(self, run: _Run, bit: int) -> None:
        """Drop what of `run` no worker holds any more, after the hold behind `bit` went or became shorter."""
        run.full &= ~bit
        self._walked = None
        if run.full:
            return
        if not run.holds:
            del self._heads[run.keys[0]]
            if run.parent:
                run.parent.children -= 1
            return
        # No full holder, so no children either.
        del run.keys[max(hold.blocks for hold in run.holds.values()) :]
        run.last = run.keys[-1]
        run.full = _full(run)


class _RadixLease(Struct, eq=False):
    _history: RadixHistory
    _part: _RadixPart | None
    _end: _Run | None
    new_blocks: int

    def extend(self, keys: Sequence[BlockKey]) -> None:
        part, before = self._part, self._end
        if part is None or part.is_forgotten:
            return
        self._end, new_blocks = self._history._pin(part, keys, before)
        self.new_blocks += new_blocks
        self._history._unpin(part, before)

    def release(self) -> None:
        part = self._part
        if part is not None:
            self._part = None
            self._history._unpin(part, self._end)


def _shared(run: array[int], keys: Sequence[BlockKey], pos: int) -> int:
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


def _full(run: _Run) -> int:
    size, mask = len(run.keys), 0
    for worker, hold in run.holds.items():
        if hold.blocks == size:
            mask |= 1 << worker
    return mask


def _mask(holds: dict[int, _Hold]) -> int:
    mask = 0
    for worker in holds:
        mask |= 1 << worker
    return mask


def _members(workers: int) -> Iterator[int]:
    """The numbers in a bitmask."""
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest
