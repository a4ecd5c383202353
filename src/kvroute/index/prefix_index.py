"""Which worker holds which blocks, from its KV events: per prompt, the tokens in GPU memory, then L1, then
L2.

A *holder* keeps blocks in one tier: a worker's GPU, a worker's host memory, an LMCache server, or a common
store. A *slot* is a target of requests: a worker, or one data-parallel rank of a worker. A slot reads from
its own GPU and from the L1 and L2 holders that are attached to it, which several slots may share. A block is
identified by the exact key at its end (`blocks.keys`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier
from kvroute.index.groups import GroupIndex, GroupRule
from kvroute.index.runs import BlockRun, RunTable


class TierMatch(NamedTuple):
    """The matched tokens of a prompt by tier: from the start in GPU memory, then without a gap in L1 or L2.

    Tokens that both L1 and L2 have count as L1.
    """

    gpu: int = 0
    l1: int = 0
    l2: int = 0

    @property
    def tokens(self) -> int:
        return self.gpu + self.l1 + self.l2


class IndexSize(NamedTuple):
    """Sizes for gauges. `bytes` is an estimate for the index alone: about 110 a block, plus the runs."""

    blocks: int
    """Different blocks."""
    held_blocks: int
    """Blocks summed over holders."""
    runs: int
    dropped: int
    """Blocks since the start that were not stored, because `max_blocks` was reached."""
    bytes: int


@dataclass(slots=True, eq=False)
class Holder:
    """A place that keeps blocks in one tier. Mutable; only the index changes it.

    `blocks` is the number of its different blocks. A `shared` holder outlives the slots that read it (an
    LMCache server, a common store).
    """

    tier: Tier
    shared: bool = False
    blocks: int = 0
    lanes: dict[int, int] = field(default_factory=dict)
    """Stride -> the holder's bit (its lane) in the `RunTable` of that stride."""


@dataclass(slots=True, eq=False)
class _Slot:
    holders: dict[Tier, list[Holder]] = field(default_factory=lambda: {tier: [] for tier in Tier})


_BLOCK_BYTES = 110
_RUN_BYTES = 250
_GROUP_BLOCK_BYTES = 100


class PrefixIndex:
    """The map of blocks. Mutable: the workers' ledgers (`events.ledger`) change it; routing reads it.

    Use it from the event loop only. It keeps at most `max_blocks` different blocks; further ones are only
    counted.
    """

    def __init__(self, *, max_blocks: int = 10_000_000) -> None:
        self._max_blocks = max_blocks
        self._tables: dict[int, RunTable] = {}
        self._slots: dict[int, _Slot] = {}
        self._gpu_lanes: list[_GpuLanes] = []
        self._has_slower_tiers = False
        """Whether any slot has a holder in L1 or L2."""
        self._dropped = 0
        self._held_blocks = 0
        self._least_room = 0
        """A lower bound of the number of blocks that still fit."""
        self.groups = GroupIndex(max_blocks)
        """The further KV cache groups of slots with several. For reading."""
        self.drops: set[int] = set()
        """Slots whose engine computes the last matched unit again (drafters of the EAGLE family). The owner
        may replace the set by its own and change it."""

    # Holders and slots

    def attach(self, slot: int, holder: Holder) -> None:
        """Let `slot` read the blocks of `holder`."""
        holders = self._slots.setdefault(slot, _Slot()).holders[holder.tier]
        if holder not in holders:
            holders.append(holder)
            self._map_gpu_lanes()

    def detach(self, slot: int, holder: Holder) -> None:
        """Undo `attach`."""
        slot_holders = self._slots.get(slot)
        if slot_holders is not None and holder in slot_holders.holders[holder.tier]:
            slot_holders.holders[holder.tier].remove(holder)
            self._map_gpu_lanes()

    def forget(self, slot: int) -> None:
        """Remove the slot and the blocks of its own holders, in constant time; `sweep` returns the memory."""
        slot_holders = self._slots.pop(slot, None)
        if slot_holders is None:
            return
        for holders in slot_holders.holders.values():
            for holder in holders:
                if not holder.shared:
                    self.clear(holder)
        self.groups.forget(slot)
        self._map_gpu_lanes()

    # Blocks

    def store(
        self, holder: Holder, block_tokens: int, parent: BlockKey | None, keys: Sequence[BlockKey]
    ) -> int:
        """`holder` has these blocks of `block_tokens` tokens, each the parent of the next.

        Returns how many were stored, from the first on; fewer only if the index is full. `parent` is the
        block before the first, None at the start of a prompt. About 0.15 us a block.
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
        for other_table in self._tables.values():
            room -= other_table.blocks
        done, new = table.store(bit, parent, keys, room)
        self._least_room = room - done
        holder.blocks += new
        self._held_blocks += new
        self._dropped += len(keys) - done
        return done

    def append_one(self, holder: Holder, stride: int, parent: BlockKey, key: BlockKey) -> bool:
        """As `store` for one block of `stride` x `KEY_TOKENS` tokens after `parent`; False if the index is
        full.

        About a third of the cost of `store` when a sequence grows at its end.
        """
        bit = holder.lanes.get(stride)
        if bit is not None and self._least_room > 0 and self._tables[stride].append(bit, parent, key):
            self._least_room -= 1
            holder.blocks += 1
            self._held_blocks += 1
            return True
        return self.store(holder, stride * KEY_TOKENS, parent, (key,)) == 1

    def has(self, holder: Holder, stride: int, key: BlockKey) -> bool:
        """Does the index have this block of `stride` x `KEY_TOKENS` tokens for `holder`? About 0.3 us."""
        bit = holder.lanes.get(stride)
        return bit is not None and self._tables[stride].has(bit, key)

    def runs_at(self, holder: Holder, stride: int, keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """The holder's runs of consecutive blocks whose first block is one of `keys`."""
        bit = holder.lanes.get(stride)
        runs = () if bit is None else self._tables[stride].runs_at(bit, keys)
        return [list(map(BlockKey, run)) for run in runs]

    def remove(self, holder: Holder, key: BlockKey) -> bool:
        """`holder` no longer has this block; False if the index did not have it for `holder`. About 1 us."""
        for stride, bit in holder.lanes.items():
            if self._tables[stride].remove(bit, key):
                holder.blocks -= 1
                self._held_blocks -= 1
                return True
        return False

    def clear(self, holder: Holder) -> None:
        """`holder` has no blocks any more. Takes constant time; `sweep` returns the memory."""
        for stride, bit in holder.lanes.items():
            self._tables[stride].close_lane(bit)
        self._held_blocks -= holder.blocks
        holder.blocks = 0
        if holder.lanes:
            holder.lanes = {}
            self._map_gpu_lanes()

    def sweep(self, steps: int = 1000) -> bool:
        """Return the memory of about `steps` cleared blocks (0.2 us each); True while there is more."""
        for table in self._tables.values():
            steps = table.sweep(steps)
        return steps <= 0

    def blocks_of(self, holder: Holder) -> Iterator[BlockKey]:
        """Every block of `holder` in the index, in no particular order. Walks the whole index."""
        for stride, bit in holder.lanes.items():
            for run in self._tables[stride].runs.values():
                if run.mask & bit:
                    yield from map(BlockKey, run.keys)

    # Further KV cache groups

    def define_group(self, slot: int, group: int, rule: GroupRule) -> None:
        """The slot has a further group with this rule; hits are limited by its blocks from now on."""
        self.groups.define(slot, group, rule)
        self._map_gpu_lanes()

    def store_group(self, slot: int, group: int, keys: Sequence[BlockKey]) -> bool:
        """The group has these blocks; False if there was no room for one of them."""
        return self.groups.store(slot, group, keys)

    def remove_group(self, slot: int, group: int, keys: Sequence[BlockKey]) -> None:
        """The group no longer has these blocks."""
        self.groups.remove(slot, group, keys)

    def clear_groups(self, slot: int) -> None:
        """The slot's further groups have no blocks any more."""
        self.groups.clear(slot)

    def forget_groups(self, slot: int) -> None:
        """The slot has no further groups."""
        self.groups.forget(slot)

    def unit(self, slot: int) -> int:
        """Tokens in the unit of hits in the slot's GPU memory; 0 while it has none."""
        slot_holders = self._slots.get(slot)
        strides = (
            [max(holder.lanes) for holder in slot_holders.holders[Tier.GPU] if holder.lanes]
            if slot_holders
            else []
        )
        groups = self.groups.slots.get(slot)
        if groups is not None:
            return groups.unit
        return max(strides, default=0) * KEY_TOKENS

    # Reading

    def match(
        self, keys: Sequence[BlockKey], end_key: BlockKey | None = None, others: dict[int, int] | None = None
    ) -> dict[int, TierMatch]:
        """Slot -> matched tokens of a prompt by tier, for slots with at least one. Changes nothing.

        `keys` are the prompt's keys (`blocks.keys.prompt_keys`). Costs a few lookups for each run of blocks
        with the same holders, not for each block: bench/micro_events.py. `end_key` and `others`: see
        `match_gpu`.
        """
        gpu: dict[int, int] = {}
        for lanes in self._gpu_lanes:
            lanes.match(keys, gpu)
        if self.groups.slots or self.drops:
            self._limit(keys, gpu, end_key, others)
        spans = _PromptSpans(self._tables, keys)
        matches: dict[int, TierMatch] = {}
        for slot, slot_holders in self._slots.items():
            start = gpu.get(slot, 0)
            slower = slot_holders.holders[Tier.L1], slot_holders.holders[Tier.L2]
            if slower[0] or slower[1]:
                l1, l2 = _reach(spans, start, *slower)
            else:
                l1 = l2 = 0
            if start or l1 or l2:
                matches[slot] = TierMatch(start, l1, l2)
        return matches

    def match_gpu(
        self, keys: Sequence[BlockKey], end_key: BlockKey | None = None, others: dict[int, int] | None = None
    ) -> dict[int, int] | None:
        """Slot -> matched tokens in GPU memory; faster than `match`. None if any slot has a holder in L1 or
        L2.

        `end_key` is the key at the end of the whole prompt, if it ends with a key's tokens. `others` gets,
        for slots with several groups, the hit if the engine drops the last unit and `drops` says that it does
        not, or the other way round.
        """
        if self._has_slower_tiers:
            return None
        gpu: dict[int, int] = {}
        for lanes in self._gpu_lanes:
            lanes.match(keys, gpu)
        if self.groups.slots or self.drops:
            self._limit(keys, gpu, end_key, others)
        return gpu

    def _limit(
        self,
        keys: Sequence[BlockKey],
        gpu: dict[int, int],
        end_key: BlockKey | None,
        others: dict[int, int] | None,
    ) -> None:
        """Limit what the runs show to what the engines can use of it: `gpu` is slot -> leading tokens."""
        groups, drops, most = self.groups.slots, self.drops, len(keys) * KEY_TOKENS
        for slot in [slot for slot in gpu if slot in groups or slot in drops]:
            whole, further, dropped = gpu[slot], groups.get(slot), slot in drops
            if further is None or not further.rules:
                gpu[slot] = max(0, whole - self.unit(slot))
                continue
            gpu[slot] = self._usable(slot, keys, whole, most, dropped, end_key)
            if others is not None:
                others[slot] = self._usable(slot, keys, whole, most, not dropped, end_key)

    def _usable(
        self,
        slot: int,
        keys: Sequence[BlockKey],
        whole: int,
        most: int,
        drops: bool,
        end_key: BlockKey | None,
    ) -> int:
        groups = self.groups.slots[slot]
        if not drops:
            return groups.usable(keys, whole, most, False)
        if end_key is not None and most + KEY_TOKENS == whole + groups.whole_tokens:
            stride = groups.whole_tokens // KEY_TOKENS
            if any(self.has(holder, stride, end_key) for holder in self._slots[slot].holders[Tier.GPU]):
                whole += groups.whole_tokens
        return groups.usable(keys, whole, most, True, end_key)

    def holds(self, slot: int, keys: Sequence[BlockKey], tokens: int) -> bool:
        """Whether the GPU memory of `slot` has the first `tokens` tokens of a prompt, as `match` counts them.

        `tokens` is at least 1. One lookup if the last block is missing; else as `match`, but of this slot
        only.
        """
        slot_holders = self._slots.get(slot)
        for holder in slot_holders.holders[Tier.GPU] if slot_holders is not None else ():
            for stride, bit in holder.lanes.items():
                end, table = -(-tokens // (stride * KEY_TOKENS)) * stride, self._tables[stride]
                if end <= len(keys) and table.has(bit, keys[end - 1]):
                    matched: dict[int, int] = {}
                    _GpuLanes(table, {bit: (slot,)}).match(keys[:end], matched)
                    if matched.get(slot, 0) >= tokens:
                        return True
        return False

    def has_end(self, slot: int, keys: Sequence[BlockKey]) -> bool:
        """Whether the GPU memory of `slot` has the last whole block of a prompt; True if it has no whole one.

        One lookup for each block size of the slot.
        """
        slot_holders = self._slots.get(slot)
        whole = False
        for holder in slot_holders.holders[Tier.GPU] if slot_holders is not None else ():
            for stride, bit in holder.lanes.items():
                if end := len(keys) // stride * stride:
                    if self._tables[stride].has(bit, keys[end - 1]):
                        return True
                    whole = True
        return not whole

    def size(self) -> IndexSize:
        blocks = self._blocks()
        runs = sum(len(table.runs) for table in self._tables.values())
        size = blocks * _BLOCK_BYTES + runs * _RUN_BYTES + self.groups.blocks * _GROUP_BLOCK_BYTES
        return IndexSize(blocks, self._held_blocks, runs, self._dropped, size)

    def _blocks(self) -> int:
        return sum(table.blocks for table in self._tables.values())

    def _map_gpu_lanes(self) -> None:
        """Rebuild `_gpu_lanes` after a change of holders or lanes."""
        for slot, groups in self.groups.slots.items():
            slot_holders = self._slots.get(slot)
            strides = (
                [max(holder.lanes) for holder in slot_holders.holders[Tier.GPU] if holder.lanes]
                if slot_holders
                else []
            )
            if strides:
                groups.set_whole_tokens(max(strides) * KEY_TOKENS)
        by_stride: dict[int, dict[int, list[int]]] = {}
        has_slower_tiers = False
        for slot, slot_holders in self._slots.items():
            for holder in slot_holders.holders[Tier.GPU]:
                for stride, bit in holder.lanes.items():
                    by_stride.setdefault(stride, {}).setdefault(bit, []).append(slot)
            has_slower_tiers = has_slower_tiers or bool(
                slot_holders.holders[Tier.L1] or slot_holders.holders[Tier.L2]
            )
        self._gpu_lanes = [_GpuLanes(self._tables[stride], slots) for stride, slots in by_stride.items()]
        self._has_slower_tiers = has_slower_tiers


class _GpuLanes:
    """The slots that read each GPU lane of one `RunTable`. Immutable."""

    __slots__ = ("_bits", "_slots_of", "_table")

    def __init__(self, table: RunTable, slots_of: Mapping[int, Sequence[int]]) -> None:
        self._table = table
        self._slots_of = slots_of
        self._bits = 0
        for bit in slots_of:
            self._bits |= bit

    def match(self, keys: Sequence[BlockKey], matched: dict[int, int]) -> None:
        """Raise `matched` (slot -> tokens) to the leading tokens that these lanes hold."""
        table, alive = self._table, self._bits
        stride, find, runs = table.stride, table.find, table.runs
        ends = keys if stride == 1 else keys[stride - 1 :: stride]
        position, total = 0, len(ends)
        run: BlockRun | None = None
        while position < total:
            key = ends[position]
            following = None if run is None else runs.get(run.next)  # cheaper than `find`
            run = following if following is not None and following.keys[0] == key else find(key)
            if run is None:
                break
            still = run.mask & alive
            if still != alive:
                if position:
                    self._end(alive & ~still, position, matched)
                alive = still
                if not alive:
                    return
            run_keys = run.keys
            if run_keys[0] == key:
                size = len(run_keys)
                if size > total - position:
                    size = total - position
                if run_keys[size - 1] == ends[position + size - 1]:
                    position += size
                    continue
            position += run.common(run.offset(key), ends, position)
        if position:
            self._end(alive, position, matched)

    def _end(self, bits: int, blocks: int, matched: dict[int, int]) -> None:
        """Lanes `bits` hold the first `blocks` blocks of the prompt, and no more."""
        tokens = blocks * self._table.stride * KEY_TOKENS
        while bits:
            bit = bits & -bits
            bits ^= bit
            for slot in self._slots_of[bit]:
                if matched.get(slot, 0) < tokens:
                    matched[slot] = tokens


class _PromptSpans:
    """The holders along one prompt in each table. Mutable: looks up spans when they are first needed."""

    def __init__(self, tables: dict[int, RunTable], keys: Sequence[BlockKey]) -> None:
        self._tables = tables
        self._keys = keys
        self._spans_by_stride: dict[int, _TableSpans] = {}

    def of(self, stride: int) -> _TableSpans:
        spans = self._spans_by_stride.get(stride)
        if spans is None:
            ends = self._keys if stride == 1 else self._keys[stride - 1 :: stride]
            spans = self._spans_by_stride[stride] = _TableSpans(self._tables[stride], ends)
        return spans


class _TableSpans:
    """Spans of blocks with the same mask along one prompt. Mutable: caches the spans that were looked up."""

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
        """The end of the blocks from `position` on that have `bit`; with `one_span`, of the first span
        only."""
        starts, stops, masks = self._starts, self._stops, self._masks
        index = bisect_right(starts, position) - 1
        if index < 0 or position >= stops[index]:
            index = self._load(position, index + 1)
        total = len(self._ends)
        while masks[index] & bit:
            position = stops[index]
            if one_span or position >= total:
                break
            index += 1
            if index == len(starts) or starts[index] != position:
                self._load(position, index)
        return position

    def _load(self, position: int, index: int) -> int:
        """Look up the span that starts at `position`, and cache it as number `index`."""
        ends, run = self._ends, self._table.find(self._ends[position])
        if run is None:
            mask, stop = 0, position + 1
        else:
            mask = run.mask & self._table.live
            stop = position + run.common(run.offset(ends[position]), ends, position)
        if index < len(self._starts):
            stop = min(stop, self._starts[index])
        self._starts.insert(index, position)
        self._stops.insert(index, stop)
        self._masks.insert(index, mask)
        return index


def _reach(spans: _PromptSpans, start: int, l1: Sequence[Holder], l2: Sequence[Holder]) -> tuple[int, int]:
    """Tokens in L1 and in L2 that follow the token `start` without a gap.

    Slower tiers are read in whole blocks: of a block that contains `start`, the tokens after `start` count.
    """
    end, matched = start, [0, 0]
    moved = True
    while moved:
        moved = False
        for tier, holders in enumerate((l1, l2)):
            for holder in holders:
                for stride, bit in holder.lanes.items():
                    table = spans.of(stride)
                    tokens = stride * KEY_TOKENS
                    position = end // tokens
                    if position < len(table):
                        stop = table.reach(bit, position, one_span=tier == 1)
                        if stop > position:
                            matched[tier] += stop * tokens - end
                            end, moved = stop * tokens, True
            if moved:
                break
    return matched[0], matched[1]
