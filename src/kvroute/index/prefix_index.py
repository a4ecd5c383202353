"""What the workers say they hold: per prompt, how far each reaches in GPU, then L1, then L2.

A *holder* is whatever keeps blocks in one tier: a worker's GPU, its host memory, an LMCache server, a
store that belongs to nobody. A *slot* is what a request can be sent to, one worker or one data-parallel
rank of it; it reads from its own GPU and from any holders of L1 and L2 attached to it, which several slots
may share. Blocks are known by exact keys (`blocks.tokens`), each under the key at its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier
from kvroute.index.runs import BlockRun, RunTable


class TierMatch(NamedTuple):
    """Tokens of a prompt that need not be computed, by where they are: in GPU memory from the start, then
    without a gap in L1, or where that lacks them in L2."""

    gpu: int = 0
    l1: int = 0
    l2: int = 0

    @property
    def tokens(self) -> int:
        return self.gpu + self.l1 + self.l2


class IndexSize(NamedTuple):
    """For gauges. `bytes` is an estimate for the index alone: about 110 a block, plus its runs."""

    blocks: int
    """Different blocks."""
    held: int
    """Blocks summed over holders."""
    runs: int
    dropped: int
    """Blocks that were not taken in since the start, because `max_blocks` was reached."""
    bytes: int


@dataclass(slots=True, eq=False)
class Holder:
    """Whose blocks they are. Mutable; only the index changes it. `blocks` counts each of them once.
    `shared`: it outlives the slots that read it (an LMCache server, a common store)."""

    tier: Tier
    shared: bool = False
    blocks: int = 0
    lanes: dict[int, int] = field(default_factory=dict)
    """Stride -> its bit in that table."""


@dataclass(slots=True, eq=False)
class _Slot:
    holders: dict[Tier, list[Holder]] = field(default_factory=lambda: {tier: [] for tier in Tier})


_BLOCK_BYTES = 110
_RUN_BYTES = 250


class PrefixIndex:
    """Mutable: changed by whoever reads the workers' events (`events.ledger`), read by routing. Touched
    from the event loop only. `max_blocks` bounds the different blocks kept; further ones are counted and
    not believed to be held.
    """

    def __init__(self, *, max_blocks: int = 10_000_000) -> None:
        self._max_blocks = max_blocks
        self._tables: dict[int, RunTable] = {}
        self._slots: dict[int, _Slot] = {}
        self._gpu_lanes: list[_GpuLanes] = []
        self._has_slower = False
        """Somebody reads a slower tier."""
        self._dropped = 0
        self._held = 0
        self._spare = 0
        """At least as many blocks fit in."""

    # Holders and slots

    def attach(self, slot: int, holder: Holder) -> None:
        """Let `slot` use what `holder` has."""
        holders = self._slots.setdefault(slot, _Slot()).holders[holder.tier]
        if holder not in holders:
            holders.append(holder)
            self._map_gpu_lanes()

    def detach(self, slot: int, holder: Holder) -> None:
        """Undo `attach`."""
        known = self._slots.get(slot)
        if known is not None and holder in known.holders[holder.tier]:
            known.holders[holder.tier].remove(holder)
            self._map_gpu_lanes()

    def forget(self, slot: int) -> None:
        """The slot is gone, at once, and what its own holders had; memory comes back with `sweep`."""
        known = self._slots.pop(slot, None)
        if known is None:
            return
        for holders in known.holders.values():
            for holder in holders:
                if not holder.shared:
                    self.clear(holder)
        self._map_gpu_lanes()

    # Blocks

    def store(
        self, holder: Holder, block_tokens: int, parent: BlockKey | None, keys: Sequence[BlockKey]
    ) -> int:
        """`holder` has these blocks of `block_tokens`, each the parent of the next; returns how many of
        them were taken in, from the first on.

        `parent` is the block before the first, None at the start of a prompt. About 0.15 us a block.
        """
        stride = block_tokens // KEY_TOKENS
        table = self._tables.get(stride)
        if table is None:
            table = self._tables[stride] = RunTable(stride)
        bit = holder.lanes.get(stride)
        if bit is None:
            bit = holder.lanes[stride] = table.open_lane()
            self._map_gpu_lanes()
        room = self._max_blocks
        for each in self._tables.values():
            room -= each.blocks
        done, fresh = table.store(bit, parent, keys, room)
        self._spare = room - done
        holder.blocks += fresh
        self._held += fresh
        self._dropped += len(keys) - done
        return done

    def append_one(self, holder: Holder, stride: int, parent: BlockKey, key: BlockKey) -> bool:
        """As `store` for one block of `stride` x `KEY_TOKENS` tokens behind `parent`; False if it was not
        taken in. About a third of what `store` costs where a sequence grows at its end."""
        bit = holder.lanes.get(stride)
        if bit is not None and self._spare > 0 and self._tables[stride].append(bit, parent, key):
            self._spare -= 1
            holder.blocks += 1
            self._held += 1
            return True
        return self.store(holder, stride * KEY_TOKENS, parent, (key,)) == 1

    def has(self, holder: Holder, stride: int, key: BlockKey) -> bool:
        """Is `holder` believed to have this block of `stride` x `KEY_TOKENS` tokens? About 0.3 us."""
        bit = holder.lanes.get(stride)
        return bit is not None and self._tables[stride].has(bit, key)

    def runs_at(self, holder: Holder, stride: int, keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """The holder's runs of consecutive blocks that begin with one of `keys`."""
        bit = holder.lanes.get(stride)
        runs = () if bit is None else self._tables[stride].runs_at(bit, keys)
        return [list(map(BlockKey, run)) for run in runs]

    def remove(self, holder: Holder, key: BlockKey) -> bool:
        """`holder` no longer has this block; False if it was not believed to. About 1 us."""
        for stride, bit in holder.lanes.items():
            if self._tables[stride].remove(bit, key):
                holder.blocks -= 1
                self._held -= 1
                return True
        return False

    def clear(self, holder: Holder) -> None:
        """`holder` has nothing any more. Takes a moment whatever it had; memory comes back with `sweep`."""
        for stride, bit in holder.lanes.items():
            self._tables[stride].close_lane(bit)
        self._held -= holder.blocks
        holder.blocks = 0
        if holder.lanes:
            holder.lanes = {}
            self._map_gpu_lanes()

    def sweep(self, steps: int = 1000) -> bool:
        """Return memory of what was cleared, about `steps` blocks (0.2 us each); True while there is more."""
        for table in self._tables.values():
            steps = table.sweep(steps)
        return steps <= 0

    def blocks_of(self, holder: Holder) -> Iterator[BlockKey]:
        """Every block that `holder` is believed to have, in no order. Walks the whole index."""
        for stride, bit in holder.lanes.items():
            for run in self._tables[stride].runs.values():
                if run.mask & bit:
                    yield from map(BlockKey, run.keys)

    # Reading

    def match(self, keys: Sequence[BlockKey]) -> dict[int, TierMatch]:
        """How much of a prompt each slot that has any of it could use; changes nothing.

        `keys` are the prompt's (`blocks.tokens.prompt_keys`). Costs a few lookups for each run of blocks
        with the same holders, not for each block: bench/micro_events.py.
        """
        gpu: dict[int, int] = {}
        for lanes in self._gpu_lanes:
            lanes.match(keys, gpu)
        spans = _Spans(self._tables, keys)
        matches: dict[int, TierMatch] = {}
        for slot, known in self._slots.items():
            start = gpu.get(slot, 0)
            slower = known.holders[Tier.L1], known.holders[Tier.L2]
            if slower[0] or slower[1]:
                l1, l2 = _reach(spans, start, *slower)
            else:
                l1 = l2 = 0
            if start or l1 or l2:
                matches[slot] = TierMatch(start, l1, l2)
        return matches

    def match_gpu(self, keys: Sequence[BlockKey]) -> dict[int, int] | None:
        """The same in less time as long as no slot reads slower tiers: tokens in GPU memory of each slot that
        has any. None where one does."""
        if self._has_slower:
            return None
        gpu: dict[int, int] = {}
        for lanes in self._gpu_lanes:
            lanes.match(keys, gpu)
        return gpu

    def size(self) -> IndexSize:
        blocks = self._blocks()
        runs = sum(len(table.runs) for table in self._tables.values())
        return IndexSize(blocks, self._held, runs, self._dropped, blocks * _BLOCK_BYTES + runs * _RUN_BYTES)

    def _blocks(self) -> int:
        return sum(table.blocks for table in self._tables.values())

    def _map_gpu_lanes(self) -> None:
        """Holders or lanes have changed."""
        by_stride: dict[int, dict[int, list[int]]] = {}
        has_slower = False
        for slot, known in self._slots.items():
            for holder in known.holders[Tier.GPU]:
                for stride, bit in holder.lanes.items():
                    by_stride.setdefault(stride, {}).setdefault(bit, []).append(slot)
            has_slower = has_slower or bool(known.holders[Tier.L1] or known.holders[Tier.L2])
        self._gpu_lanes = [_GpuLanes(self._tables[stride], slots) for stride, slots in by_stride.items()]
        self._has_slower = has_slower


class _GpuLanes:
    """Who reads which GPU's blocks of one size. Not changed once made."""

    __slots__ = ("_bits", "_slots_of", "_table")

    def __init__(self, table: RunTable, slots_of: Mapping[int, Sequence[int]]) -> None:
        self._table = table
        self._slots_of = slots_of
        self._bits = 0
        for bit in slots_of:
            self._bits |= bit

    def match(self, keys: Sequence[BlockKey], matched: dict[int, int]) -> None:
        """Raise `matched` (tokens by slot) to what these lanes hold from the start on."""
        table, alive = self._table, self._bits
        stride, find, runs = table.stride, table.find, table.runs
        ends = keys if stride == 1 else keys[stride - 1 :: stride]
        position, total = 0, len(ends)
        run: BlockRun | None = None
        while position < total:
            key = ends[position]
            behind = None if run is None else runs.get(run.next)  # found sooner than by the key
            run = behind if behind is not None and behind.keys[0] == key else find(key)
            if run is None:
                break
            still = run.mask & alive
            if still != alive:
                if position:
                    self._end(alive & ~still, position, matched)
                alive = still
                if not alive:
                    return
            known = run.keys
            if known[0] == key:
                size = len(known)
                if size > total - position:
                    size = total - position
                if known[size - 1] == ends[position + size - 1]:
                    position += size
                    continue
            position += run.common(run.offset(key), ends, position)
        if position:
            self._end(alive, position, matched)

    def _end(self, bits: int, blocks: int, matched: dict[int, int]) -> None:
        """These lanes hold so many blocks."""
        tokens = blocks * self._table.stride * KEY_TOKENS
        while bits:
            bit = bits & -bits
            bits ^= bit
            for slot in self._slots_of[bit]:
                if matched.get(slot, 0) < tokens:
                    matched[slot] = tokens


class _Spans:
    """The holders along one prompt, table by table, looked up once and only as far as asked."""

    def __init__(self, tables: dict[int, RunTable], keys: Sequence[BlockKey]) -> None:
        self._tables = tables
        self._keys = keys
        self._found: dict[int, _TableSpans] = {}

    def of(self, stride: int) -> _TableSpans:
        found = self._found.get(stride)
        if found is None:
            ends = self._keys if stride == 1 else self._keys[stride - 1 :: stride]
            found = self._found[stride] = _TableSpans(self._tables[stride], ends)
        return found


class _TableSpans:
    """Spans of blocks with one mask. Mutable: remembers those that were asked for."""

    __slots__ = ("_ends", "_masks", "_starts", "_stops", "_table")

    def __init__(self, table: RunTable, ends: Sequence[BlockKey]) -> None:
        self._table = table
        self._ends = ends
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._masks: list[int] = []

    def __len__(self) -> int:
        return len(self._ends)

    def reach(self, bit: int, position: int, *, one_span: bool = False) -> int:
        """Where the blocks from `position` on end that have `bit`, or the span of them around it."""
        starts, stops, masks = self._starts, self._stops, self._masks
        place = bisect_right(starts, position) - 1
        if place < 0 or position >= stops[place]:
            place = self._look(position, place + 1)
        total = len(self._ends)
        while masks[place] & bit:
            position = stops[place]
            if one_span or position >= total:
                break
            place += 1
            if place == len(starts) or starts[place] != position:
                self._look(position, place)
        return position

    def _look(self, position: int, place: int) -> int:
        """Look up the span that begins at `position` and remember it as number `place`."""
        ends, run = self._ends, self._table.find(self._ends[position])
        if run is None:
            mask, stop = 0, position + 1
        else:
            mask = run.mask & self._table.live
            stop = position + run.common(run.offset(ends[position]), ends, position)
        if place < len(self._starts):
            stop = min(stop, self._starts[place])
        self._starts.insert(place, position)
        self._stops.insert(place, stop)
        self._masks.insert(place, mask)
        return place


def _reach(spans: _Spans, start: int, l1: Sequence[Holder], l2: Sequence[Holder]) -> tuple[int, int]:
    """Tokens in L1 and in L2 that follow `start` without a gap. A larger block that `start` lies in
    counts with what of it lies behind `start`: slower tiers are read in whole blocks."""
    place, found = start, [0, 0]
    moved = True
    while moved:
        moved = False
        for tier, holders in enumerate((l1, l2)):
            for holder in holders:
                for stride, bit in holder.lanes.items():
                    table = spans.of(stride)
                    tokens = stride * KEY_TOKENS
                    position = place // tokens
                    if position < len(table):
                        stop = table.reach(bit, position, one_span=tier == 1)
                        if stop > position:
                            found[tier] += stop * tokens - place
                            place, moved = stop * tokens, True
            if moved:
                break
    return found[0], found[1]
