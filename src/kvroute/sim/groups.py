"""Caches with several KV cache groups: windows, chunks, states of Mamba layers, EAGLE's drop.

A model whose layers keep different things has one or more groups of layers per kind. All groups take blocks
from one pool and store them by the same chained keys, each under its own number. A hit is the longest length
on which all groups agree. The rules are those of vLLM 0.32 (v1/core: kv_cache_coordinator.py,
single_type_kv_cache_manager.py, block_pool.py, and the chunks of sched/scheduler.py).
tests/sim/test_groups_against_vllm.py compares them with recordings of real engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvroute.sim.cache import Block, Chain, PagedCache
from kvroute.sim.engine import EngineRequest, RequestPhase, SimEngine
from kvroute.wire.vllm import BlockRemoved, BlockStored, ExternalBlockHash


class GroupKind(Enum):
    """What a group keeps, under the names of vLLM's events."""

    FULL = "full_attention"
    MLA = "mla_attention"
    SINK = "sink_full_attention"
    WINDOW = "sliding_window"
    CHUNK = "chunked_local_attention"
    STATE = "mamba"


_WHOLE = (GroupKind.FULL, GroupKind.MLA, GroupKind.SINK)


@dataclass(frozen=True, slots=True)
class Group:
    """One group of layers. `span`: tokens of its window or chunk; 0 for the other kinds."""

    kind: GroupKind
    block_size: int
    span: int = 0

    def skipped(self, computed: int) -> int:
        """Tokens at the start that no token after `computed` ones reads."""
        if self.kind is GroupKind.WINDOW:
            return max(0, computed - self.span + 1)
        if self.kind is GroupKind.CHUNK:
            return computed // self.span * self.span
        return max(0, computed - 1) if self.kind is GroupKind.STATE else 0


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The groups of a model and how its engine stores them.

    `retention` (`prefix_cache_retention_interval`): windows and states are kept for the end of each prompt
    and where prompts parted (0, vLLM's default since #52216), also once per so many tokens, or everywhere
    (None, older releases). With `drops_last` the engine drops the last unit of each hit, as with EAGLE-style
    drafters, which take room for `drafted_tokens`. With `checkpoints` a prefill writes a state inside its
    last chunk (`num_prefill_checkpoint_blocks`). Without `junctions` nothing is kept where prompts part, as
    in releases before #52216.
    """

    groups: tuple[Group, ...]
    retention: int | None = 0
    match_unit: int = 0
    """Hits end at multiples of it (`prefix_match_unit`); 0: the greatest common divisor of all blocks."""
    drops_last: bool = False
    drafted_tokens: int = 0
    checkpoints: bool = False
    junctions: bool = True

    @property
    def unit(self) -> int:
        """The least common multiple of all block sizes."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def hash_size(self) -> int:
        """Tokens per chained key."""
        return self.match_unit or math.gcd(*(group.block_size for group in self.groups))

    @property
    def has_states(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @property
    def partial_hits(self) -> bool:
        """Hits may end inside a block."""
        return (
            len(self.groups) > 1
            and any(g.kind is GroupKind.STATE and g.block_size > self.hash_size for g in self.groups)
            and all(
                g.kind in _WHOLE or g.kind is GroupKind.STATE or g.block_size == self.hash_size
                for g in self.groups
            )
        )

    @property
    def alignment(self) -> int:
        """Hits are multiples of so many tokens."""
        return self.hash_size if self.partial_hits else self.unit

    def checkpoint(self, tokens: int, size: int) -> int:
        """Where the last state of `tokens` is reusable, at a multiple of `size`."""
        position = (tokens if self.drops_last else tokens - 1) // size * size
        return max(0, position - size if self.drops_last else position)


class GroupBlock(Block):
    """A block with the number of tokens up to the end of what its key covers, and further keys of it."""

    __slots__ = ("extra", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.extra: list[int] = []


Table = list["GroupBlock | None"]


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """What one sequence holds, per group; None where a block was skipped or freed. Mutable."""

    tables: list[Table]
    cached: list[int]
    """Blocks per group up to which the cache was told."""
    boundary: int = 0
    """Where another prompt's blocks went on after this one's hit had ended; 0 without."""
    started: list[bool] = field(default_factory=list)
    last_state: list[int] = field(default_factory=list)
    retired: list[int] = field(default_factory=list)
    shared_tail: dict[int, int] = field(default_factory=dict)
    """Groups whose hit ends inside a block, or whose state was stored inside one: the place of that block."""
    checkpoints: dict[int, tuple[int, int]] = field(default_factory=dict)


_KEY_BITS = 64
_KEY_MASK = (1 << _KEY_BITS) - 1


@dataclass(slots=True, eq=False)
class GroupedCache(PagedCache):
    """A pool of blocks that all groups share. Mutable: changed by its own methods only.

    `block_size` is the layout's `unit`; `Chain.keys` has one key per `hash_size` tokens. The keys of the base
    class are those of the chain with the group's number above them.
    """

    layout: GroupLayout = field(default_factory=lambda: GroupLayout(()))
    _this_step: set[int] = field(default_factory=set)
    _copied: list[tuple[int, GroupBlock]] = field(default_factory=list)

    @property
    def capacity_tokens(self) -> int:
        return int(self.capacity / sum(1 / group.block_size for group in self.layout.groups))

    def step_starts(self) -> None:
        """A state that one request stores in a step is of use from the next step on."""
        self._this_step.clear()

    def step_scheduled(self) -> None:
        """Release both ends of the copies that this step makes."""
        for _, block in sorted(self._copied, key=lambda copied: copied[0]):
            self._release(block)
        self._copied.clear()
        self._evict_surplus()

    def longest_hit(self, chain: Chain, prompt: int) -> tuple[int, list[Table], int]:
        """Tokens that all groups hold, the blocks per group, and the longest length that any group held."""
        layout = self.layout
        key_count = prompt // layout.hash_size
        hit, longest = prompt - 1, 0
        tables: list[Table] = [[] for _ in layout.groups]
        lengths = [0] * len(layout.groups)
        ordered = sorted(self._same_kind(), key=lambda members: layout.groups[members[0]].kind not in _WHOLE)
        simple = len(ordered) == 2 and layout.groups[ordered[0][0]].kind in _WHOLE
        looked_up: set[int] = set()
        verified: set[int] = set()
        while True:
            current = hit
            for order, members in enumerate(ordered):
                group = layout.groups[members[0]]
                if group.kind in _WHOLE and order in looked_up:
                    current = min(current, lengths[members[0]])
                    continue
                looked_up.add(order)
                drop = layout.drops_last and order not in verified
                limit = current
                if drop and len(layout.groups) > 1 and group.kind is not GroupKind.STATE:
                    fine = layout.partial_hits and group.block_size > layout.hash_size
                    margin = layout.hash_size if fine else group.block_size
                    limit = min(current + margin, key_count * layout.hash_size)
                group_tables, length = self._find(chain, members, limit, key_count, drop)
                if drop:
                    verified.add(order)
                elif length < current:
                    verified.clear()
                current = length
                for member, table in zip(members, group_tables, strict=True):
                    tables[member], lengths[member] = table, length
                longest = max(longest, current)
            if current >= hit:
                break
            hit = current
            if simple or len(ordered) == 1:
                break
        for number, group in enumerate(layout.groups):
            if group.kind in _WHOLE:
                del tables[number][-(-hit // group.block_size) :]
        return hit, tables, longest if len(ordered) > 1 else hit

    def _same_kind(self) -> list[list[int]]:
        alike: dict[Group, list[int]] = {}
        for number, group in enumerate(self.layout.groups):
            alike.setdefault(group, []).append(number)
        return list(alike.values())

    def _held_by(self, chain: Chain, members: Sequence[int], tokens: int) -> list[GroupBlock] | None:
        """The blocks of all `members` for the prefix of `tokens`."""
        key = chain.keys[tokens // self.layout.hash_size - 1]
        blocks = []
        for member in members:
            block = self._by_key.get(key | member << _KEY_BITS)
            if block is None:
                return None
            assert isinstance(block, GroupBlock)
            blocks.append(block)
        return blocks

    def _find(
        self, chain: Chain, members: list[int], limit: int, key_count: int, drop: bool
    ) -> tuple[list[Table], int]:
        group = self.layout.groups[members[0]]
        block_count = min(limit, key_count * self.layout.hash_size) // group.block_size
        if group.kind in _WHOLE:
            return self._find_whole(chain, members, group, limit, key_count, drop)
        if group.kind is GroupKind.WINDOW:
            return self._find_window(chain, members, group, block_count, drop)
        if group.kind is GroupKind.CHUNK:
            return self._find_chunk(chain, members, group, limit, block_count)
        return self._find_state(chain, members, group, limit, key_count)

    def _find_whole(
        self, chain: Chain, members: list[int], group: Group, limit: int, key_count: int, drop: bool
    ) -> tuple[list[Table], int]:
        size, step = group.block_size, self.layout.alignment
        tables: list[Table] = [[] for _ in members]
        limit = min(limit, key_count * self.layout.hash_size)
        for index in range(limit // size):
            blocks = self._held_by(chain, members, (index + 1) * size)
            if blocks is None:
                break
            for table, block in zip(tables, blocks, strict=True):
                table.append(block)
        length = len(tables[0]) * size
        if step < size and size % step == 0:
            last = min(length + size - step, limit // step * step)
            for tokens in range(last, length, -step):
                blocks = self._held_by(chain, members, tokens)
                if blocks is not None:
                    for table, block in zip(tables, blocks, strict=True):
                        table.append(block)
                    length = tokens
                    break
        if drop and length:
            length -= min(step, size)
        length -= length % step
        for table in tables:
            del table[-(-length // size) :]
        return tables, length

    def _find_window(
        self, chain: Chain, members: list[int], group: Group, block_count: int, drop: bool
    ) -> tuple[list[Table], int]:
        size, step = group.block_size, self.layout.alignment
        need = -(-(group.span - 1) // size) + drop
        tables: list[Table] = [[None] * block_count for _ in members]
        run, complete = 0, False
        for index in range(block_count - 1, -1, -1):
            blocks = self._held_by(chain, members, (index + 1) * size)
            if blocks is None:
                run = 0
                continue
            if run == 0 and (index + (0 if drop else 1)) * size % step:
                continue
            for table, block in zip(tables, blocks, strict=True):
                table[index] = block
            run += 1
            if run >= need:
                for table in tables:
                    del table[index + run :]
                complete = True
                break
        if not complete:
            # A window that reaches back to the start of the prompt needs no more.
            while run * size % step:
                run -= 1
            for table in tables:
                del table[run:]
        if drop and tables[0]:
            for table in tables:
                table.pop()
        while len(tables[0]) * size % step:
            for table in tables:
                table.pop()
        return tables, len(tables[0]) * size

    def _find_chunk(
        self, chain: Chain, members: list[int], group: Group, limit: int, block_count: int
    ) -> tuple[list[Table], int]:
        size = group.block_size
        start = max(0, limit) // group.span * group.span // size
        tables: list[Table] = [[None] * start for _ in members]
        for index in range(start, block_count):
            blocks = self._held_by(chain, members, (index + 1) * size)
            if blocks is None:
                break
            for table, block in zip(tables, blocks, strict=True):
                table.append(block)
        return tables, len(tables[0]) * size

    def _find_state(
        self, chain: Chain, members: list[int], group: Group, limit: int, key_count: int
    ) -> tuple[list[Table], int]:
        size = group.block_size
        step = self.layout.alignment if self.layout.partial_hits else size
        limit = min(limit, key_count * self.layout.hash_size)
        for tokens in range(limit // step * step, 0, -step):
            blocks = self._held_by(chain, members, tokens)
            if blocks is None or (step == size and tokens % self.layout.alignment):
                continue
            ahead: Table = [None] * ((tokens - 1) // size)
            return [[*ahead, block] for block in blocks], tokens
        return [[] for _ in members], 0

    def must_wait(self, tables: Sequence[Table]) -> bool:
        """A state of this hit is only being written in this step."""
        return any(
            group.kind is GroupKind.STATE
            and table
            and table[-1] is not None
            and table[-1].key in self._this_step
            for group, table in zip(self.layout.groups, tables, strict=True)
        )

    def idle_in(self, tables: Sequence[Table]) -> int:
        """Number of blocks in `tables` that no sequence uses."""
        return sum(block.refs == 0 for table in tables for block in table if block is not None)

    def begin(self, hit: int, tables: list[Table], boundary: int) -> SequenceBlocks:
        """Start a sequence with the blocks of its hit."""
        groups = self.layout.groups
        sequence = SequenceBlocks(
            tables=[],
            cached=[],
            boundary=boundary,
            started=[False] * len(groups),
            last_state=[-1] * len(groups),
            retired=[0] * len(groups),
        )
        for number, (group, table) in enumerate(zip(groups, tables, strict=True)):
            skipped = group.skipped(hit) // group.block_size
            kept = table[skipped:]
            for block in kept:
                if block is not None:
                    if block.refs == 0:
                        del self._idle[block]
                    block.refs += 1
            sequence_table: Table = [*([None] * skipped), *kept] if hit else []
            sequence.tables.append(sequence_table)
            sequence.cached.append(len(sequence_table))
            if kept and hit % group.block_size:
                sequence.shared_tail[number] = len(sequence_table) - 1
                sequence.cached[number] = len(sequence_table) - 1
        return sequence

    def advance(
        self, sequence: SequenceBlocks, chain: Chain, prompt: int, computed: int, tokens: int, slots: int
    ) -> None:
        """Let a sequence compute from `computed` to `tokens`, with room for `slots`."""
        groups = self.layout.groups
        for number, group in enumerate(groups):
            self._free_skipped(sequence, number, group, computed)
        for number, group in enumerate(groups):
            if group.kind is GroupKind.STATE:
                self._reserve_checkpoint(sequence, number, group, prompt, computed, tokens)
        for number, group in enumerate(groups):
            if group.kind is GroupKind.STATE:
                self._allocate_state(sequence, number, group, tokens)
            else:
                self._allocate_blocks(sequence, number, group, slots)
        for number, group in enumerate(groups):
            self._store_group(sequence, chain, number, group, prompt, computed, tokens)

    def end(self, sequence: SequenceBlocks) -> None:
        """Free a sequence's blocks, group by group; its last blocks are evicted first."""
        for table in sequence.tables:
            # vLLM puts the blocks without a key in front of the free queue, as if they were empty.
            for block in reversed(table):
                if block is not None:
                    self._release(block)
            table.clear()
        self._evict_surplus()

    def external_hash(self, key: int) -> ExternalBlockHash:
        # An explicit base class: a dataclass with slots is another class than the one that `super` remembers.
        return PagedCache.external_hash(self, key & _KEY_MASK)

    def allocate(self, count: int) -> list[Block]:
        return [GroupBlock() for _ in PagedCache.allocate(self, count)]

    @property
    def held_keys(self) -> set[int]:
        """Keys that the first group with full attention holds, or the first group."""
        whole = [n for n, group in enumerate(self.layout.groups) if group.kind in _WHOLE]
        number = whole[0] if whole else 0
        return {key & _KEY_MASK for key in self._by_key if key >> _KEY_BITS == number}

    def _release(self, block: GroupBlock) -> None:
        block.refs -= 1
        if block.refs == 0:
            if block.key is None:
                self._empty += 1
            else:
                self._idle[block] = None

    def _free_skipped(self, sequence: SequenceBlocks, number: int, group: Group, computed: int) -> None:
        table, size = sequence.tables[number], group.block_size
        stop = min(group.skipped(computed) // size, len(table))
        if group.kind is GroupKind.STATE:
            for index in range(stop - 1, sequence.retired[number] - 1, -1):
                self._drop(table, index)
            sequence.retired[number] = max(sequence.retired[number], stop)
            last = sequence.last_state[number]
            if 0 <= last < -(-computed // size) - 1:
                self._drop(table, last)
            return
        for index in range(stop - 1, -1, -1):
            if table[index] is None:
                break
            self._drop(table, index)

    def _drop(self, table: Table, index: int) -> None:
        block = table[index]
        if block is not None:
            self._release(block)
            table[index] = None

    def _new_blocks(self, count: int) -> list[GroupBlock]:
        return [block for block in self.allocate(count) if isinstance(block, GroupBlock)]

    def _allocate_blocks(self, sequence: SequenceBlocks, number: int, group: Group, slots: int) -> None:
        table = sequence.tables[number]
        if number in sequence.shared_tail:
            index = sequence.shared_tail.pop(number)
            source = table[index]
            assert source is not None
            copy = self._new_blocks(1)[0]
            copy.refs += 1
            table[index] = copy
            self._copied += ((number, source), (number, copy))
        table += self._new_blocks(max(0, -(-slots // group.block_size) - len(table)))

    def _reserve_checkpoint(
        self, sequence: SequenceBlocks, number: int, group: Group, prompt: int, computed: int, tokens: int
    ) -> None:
        sequence.checkpoints.pop(number, None)
        position = self.layout.checkpoint(tokens, self.layout.alignment)
        table, index = sequence.tables[number], -(-tokens // group.block_size) - 2
        if (
            self.layout.checkpoints
            and position > 0
            and (self.layout.retention != 0 or tokens >= prompt)
            and self._can_checkpoint(group, computed, tokens, position)
            and index >= 0
            and (index >= len(table) or table[index] is None)
        ):
            sequence.checkpoints[number] = (position, index)

    def _can_checkpoint(self, group: Group, start: int, end: int, position: int) -> bool:
        unit = self.layout.hash_size
        return (
            start % unit == 0
            and -(-end // group.block_size) - 2 > (start - 1) // group.block_size
            and start + unit <= position
            and start < position < end
        )

    def _allocate_state(self, sequence: SequenceBlocks, number: int, group: Group, tokens: int) -> None:
        table = sequence.tables[number]
        required, checkpoint = -(-tokens // group.block_size), number in sequence.checkpoints
        tail = sequence.shared_tail.pop(number, None)
        started, sequence.started[number] = sequence.started[number], True
        if required <= len(table) and tail is None and not checkpoint:
            return
        old_length = len(table)
        if started or old_length:
            sequence.last_state[number] = old_length - 1
        table += [None] * (required - 1 - checkpoint - old_length)
        new_blocks = self._new_blocks(max(0, required - len(table)) + (tail is not None))
        if tail is not None:
            copy, *new_blocks = new_blocks
            source = table[tail]
            assert source is not None
            if started:
                # This sequence goes on in `source`; what others may find is in the copy.
                self._move_keys(source, copy)
                source.refs += 1
                if copy.key is not None:
                    self._this_step.add(copy.key)
            else:
                copy.refs += 1
                table[tail] = copy
            self._copied += ((number, source), (number, copy))
        table += new_blocks

    def _move_keys(self, source: GroupBlock, target: GroupBlock) -> None:
        keys = [key for key in (source.key, *source.extra) if key is not None]
        target.key, target.extra, target.tokens = keys[0] if keys else None, keys[1:], source.tokens
        source.key, source.extra, source.tokens = None, [], 0
        for key in keys:
            if self._by_key.get(key) is source:
                self._by_key[key] = target
            else:
                copies = self._copies[key]
                copies[copies.index(source)] = target

    def _store_group(
        self,
        sequence: SequenceBlocks,
        chain: Chain,
        number: int,
        group: Group,
        prompt: int,
        computed: int,
        tokens: int,
    ) -> None:
        layout, size = self.layout, group.block_size
        end = self._storable(tokens, size)
        start, stop = sequence.cached[number], end // size
        if stop > start:
            wanted = self._wanted(group, sequence, prompt, start, stop)
            self._store_blocks(sequence.tables[number], chain, number, group, start, stop, wanted)
            sequence.cached[number] = stop
        if group.kind in _WHOLE and size != layout.hash_size:
            self._store_tail(sequence, chain, number, group, prompt, end)
        elif group.kind is GroupKind.STATE:
            self._store_state_tail(sequence, chain, number, group, prompt, end)

    def _storable(self, tokens: int, size: int) -> int:
        """Tokens that a later hit could use."""
        layout = self.layout
        if len(layout.groups) == 1 or layout.partial_hits:
            return tokens
        aligned = tokens // layout.unit * layout.unit
        return min(tokens, aligned + size) if layout.drops_last and aligned else aligned

    def _wanted(
        self, group: Group, sequence: SequenceBlocks, prompt: int, start: int, stop: int
    ) -> list[bool] | None:
        """Which blocks of `start` to `stop` are worth keeping; None: all."""
        layout, size, step = self.layout, group.block_size, self.layout.alignment
        is_window = group.kind is GroupKind.WINDOW
        if not (
            (is_window and step % size == 0)
            or (group.kind is GroupKind.STATE and layout.retention is not None)
        ):
            return None
        shift = 1 if is_window and layout.drops_last else 0
        need = -(-(group.span - 1) // size) + shift if is_window else 1
        every = layout.retention
        if every is None:
            every = step
        wanted = [False] * (stop - start)
        if every:
            period = every // size
            if need >= period if is_window else period <= 1:
                return None
            for index in range(start, stop):
                if index >= shift and (index - shift) % period >= period - need:
                    wanted[index - start] = True
        if layout.retention is not None:
            for boundary in self._boundaries(prompt, sequence.boundary):
                end = boundary // step * step // size + shift
                for index in range(max(start, end - need), min(stop, end)):
                    wanted[index - start] = True
        return wanted

    def _boundaries(self, prompt: int, shared: int) -> list[int]:
        unit = self.layout.unit
        boundaries = [prompt - 1]
        if self.layout.drops_last:
            boundaries = [max(0, (prompt - 1) // unit * unit - unit), max(0, prompt // unit * unit - unit)]
        return [*boundaries, shared] if shared else boundaries

    def _store_blocks(
        self,
        table: Table,
        chain: Chain,
        number: int,
        group: Group,
        start: int,
        stop: int,
        wanted: list[bool] | None,
    ) -> None:
        size, indexes = group.block_size, []
        for index in range(start, stop):
            block = table[index]
            if block is None or (wanted is not None and not wanted[index - start]):
                continue
            if block.key is not None:
                self._remove_keys(block)
            self._insert(block, self._key(chain, number, (index + 1) * size), (index + 1) * size)
            if group.kind is GroupKind.STATE and block.key is not None:
                self._this_step.add(block.key)
            indexes.append(index)
        if self.record:
            self._events.append(
                self._stored(
                    chain,
                    number,
                    group,
                    hashes=[self._key(chain, number, (index + 1) * size) for index in indexes],
                    parent=self._key(chain, number, start * size) if start else None,
                    span=(start * size, stop * size),
                    size=size,
                    starts=[index * size for index in indexes],
                )
            )

    def _store_tail(
        self, sequence: SequenceBlocks, chain: Chain, number: int, group: Group, prompt: int, end: int
    ) -> None:
        unit = self.layout.hash_size
        boundary = (prompt if self.layout.drops_last else prompt - 1) // unit * unit
        index, table = boundary // group.block_size, sequence.tables[number]
        if 0 < boundary <= end and boundary % group.block_size and index < len(table):
            block = table[index]
            if block is not None:
                self._store_partial(chain, number, group, block, boundary)

    def _store_state_tail(
        self, sequence: SequenceBlocks, chain: Chain, number: int, group: Group, prompt: int, end: int
    ) -> None:
        layout, size = self.layout, group.block_size
        table = sequence.tables[number]
        if number in sequence.checkpoints:
            position, index = sequence.checkpoints[number]
            block = table[index]
            assert block is not None
            if not self._keeps_checkpoint(sequence, group, prompt, position):
                self._remove_keys(block)
            elif block.tokens != position:
                self._store_partial(chain, number, group, block, position, replaced=True)
            return
        if end <= 0 or end % layout.hash_size or end != layout.checkpoint(prompt, layout.hash_size):
            return
        index = -(-end // size) - 1
        state = table[index] if index < len(table) else None
        if state is None:
            return
        self._store_partial(chain, number, group, state, end)
        self._this_step.add(self._key(chain, number, end))
        if end % size:
            sequence.shared_tail[number] = index
            sequence.cached[number] = index

    def _keeps_checkpoint(self, sequence: SequenceBlocks, group: Group, prompt: int, position: int) -> bool:
        layout = self.layout
        if position in (layout.checkpoint(prompt, layout.alignment), sequence.boundary):
            return True
        if position % group.block_size:
            return False
        every = layout.retention
        return every is None or (bool(every) and position % every == 0)

    def _store_partial(
        self,
        chain: Chain,
        number: int,
        group: Group,
        block: GroupBlock,
        tokens: int,
        *,
        replaced: bool = False,
    ) -> None:
        key, unit = self._key(chain, number, tokens), self.layout.hash_size
        is_stored = key == block.key or key in block.extra
        if replaced:
            self._remove_keys(block)
        elif is_stored:
            return
        elif block.key is not None and block.tokens < tokens:
            self._remove_keys(block)
        self._insert(block, key, tokens)
        if self.record:
            start = tokens - unit
            self._events.append(
                self._stored(
                    chain,
                    number,
                    group,
                    hashes=[key],
                    parent=self._key(chain, number, start) if start else None,
                    span=(start, tokens),
                    size=unit,
                    starts=[start],
                )
            )

    def _key(self, chain: Chain, number: int, tokens: int) -> int:
        return chain.keys[tokens // self.layout.hash_size - 1] | number << _KEY_BITS

    def _insert(self, block: GroupBlock, key: int, tokens: int) -> None:
        if key == block.key or key in block.extra:
            return
        if block.key is None:
            block.key, block.tokens = key, tokens
        else:
            block.extra.append(key)
        if self._by_key.setdefault(key, block) is not block:
            self._copies.setdefault(key, []).append(block)

    def _remove_keys(self, block: GroupBlock) -> None:
        keys = [key for key in (block.key, *block.extra) if key is not None]
        block.key, block.extra, block.tokens = None, [], 0
        for key in keys:
            copies = self._copies.get(key)
            if copies is None:
                del self._by_key[key]
            else:
                if self._by_key[key] is block:
                    self._by_key[key] = copies.pop(0)
                else:
                    copies.remove(block)
                if not copies:
                    del self._copies[key]
            if self.record:
                self._events.append(
                    BlockRemoved([self.external_hash(key)], medium="GPU", group_idx=key >> _KEY_BITS)
                )

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        assert isinstance(block, GroupBlock)
        self._remove_keys(block)

    def announce_hit(self, chain: Chain, tables: Sequence[Table]) -> None:
        """Announce the blocks of a hit again (vLLM 0.32, kv_cache_report_mode "full")."""
        for number, (group, table) in enumerate(zip(self.layout.groups, tables, strict=True)):
            if self.record and table:
                ends = [(index + 1) * group.block_size for index in range(len(table))]
                self._events.append(
                    self._stored(
                        chain,
                        number,
                        group,
                        hashes=[self._key(chain, number, end) for end in ends],
                        parent=None,
                        span=(0, ends[-1]),
                        size=group.block_size,
                        starts=[end - group.block_size for end in ends],
                    )
                )

    def _stored(
        self,
        chain: Chain,
        number: int,
        group: Group,
        *,
        hashes: list[int],
        parent: int | None,
        span: tuple[int, int],
        size: int,
        starts: list[int],
    ) -> BlockStored:
        return BlockStored(
            block_hashes=[self.external_hash(key) for key in hashes],
            parent_block_hash=None if parent is None else self.external_hash(parent),
            token_ids=list(chain.token_ids[span[0] : span[1]]),
            block_size=size,
            lora_id=chain.lora_id,
            medium="GPU",
            lora_name=chain.lora_name,
            extra_keys=[chain.extra_keys(start, start + size) for start in starts],
            group_idx=number,
            kv_cache_spec_kind=group.kind.value,
            kv_cache_spec_sliding_window=group.span if group.kind is GroupKind.WINDOW else None,
            session_id=chain.session_id,
        )


@dataclass(slots=True, eq=False)
class GroupedEngine(SimEngine):
    """An engine whose cache has groups; a decoding sequence costs CPU time in every iteration. Mutable, as
    `SimEngine` is."""

    _sequences: dict[EngineRequest, SequenceBlocks] = field(default_factory=dict)

    @property
    def _grouped(self) -> GroupedCache:
        assert isinstance(self.cache, GroupedCache)
        return self.cache

    def begin(self) -> float | None:
        cache = self._grouped
        cache.step_starts()
        duration = SimEngine.begin(self)
        cache.step_scheduled()
        return duration

    def free_kept(self, request: EngineRequest) -> None:
        sequence = self._sequences.pop(request, None)
        if sequence is not None:
            self._grouped.end(sequence)

    def _admit(self, request: EngineRequest) -> bool:
        cache = self._grouped
        total = self._most_blocks(request.prompt_tokens + max(0, request.output_tokens - 1))
        if total > cache.capacity:
            request.phase = RequestPhase.REFUSED
            self._refused.append(request)
            return True
        hit, longest = 0, 0
        tables: list[Table] = [[] for _ in cache.layout.groups]
        if request.reads_cache:
            hit, tables, longest = cache.longest_hit(request.chain, request.prompt_tokens)
        # A block that the hit ends inside is copied, so it is needed besides the copy.
        total -= sum(
            block is not None
            for group, table in zip(cache.layout.groups, tables, strict=True)
            for block in table[: hit // group.block_size]
        )
        if total + cache.idle_in(tables) > cache.available - self._reserved or cache.must_wait(tables):
            return False
        if request.report_full and hit:
            cache.announce_hit(request.chain, tables)
        self._sequences[request] = cache.begin(
            hit, tables, longest if longest > hit and cache.layout.junctions else 0
        )
        request.reserved = total
        self._reserved += total
        request.computed = request.cached_tokens = hit
        request.phase = RequestPhase.PREFILL
        if request.reads_cache:
            self.counters.cache_queries += request.prompt_tokens
            self.counters.cache_hits += hit
        if request.moved_tokens > hit:
            self._take_in(request)
        self.counters.computed_tokens += request.prompt_tokens - request.computed
        return True

    def _most_blocks(self, tokens: int) -> int:
        """Upper bound of the blocks that a sequence holds at the same time."""
        layout, batch = self._grouped.layout, self.timing.max_batched_tokens
        total = 0
        for group in layout.groups:
            blocks = -(-(tokens + 2 * layout.drafted_tokens) // group.block_size)
            if group.kind is GroupKind.STATE:
                blocks = min(blocks, 3)
            elif group.kind not in _WHOLE:
                blocks = min(blocks, -(-(group.span + batch) // group.block_size) + 1)
            total += blocks
        return total

    def _schedule_chunk(self, request: EngineRequest, budget: int) -> tuple[int, float]:
        already_computed = request.computed
        chunk = min(budget, request.prompt_tokens - already_computed)
        if self._grouped.layout.has_states:
            chunk = self._end_at_state(request, chunk)
        if chunk:
            request.computed = already_computed + chunk
            self._advance(request, already_computed)
        return chunk, chunk * (already_computed + chunk / 2)

    def _end_at_state(self, request: EngineRequest, chunk: int) -> int:
        """Shorten a chunk so that it ends where a state has to be stored."""
        layout, start, prompt = self._grouped.layout, request.computed, request.prompt_tokens
        size, end, unit = layout.unit, request.computed + chunk, layout.hash_size
        partial = layout.partial_hits
        last = layout.checkpoint(prompt, size)
        position = layout.checkpoint(prompt, unit if partial else size)
        state = next(group for group in layout.groups if group.kind is GroupKind.STATE)
        inside = (
            layout.checkpoints
            and end >= prompt
            and self._grouped._can_checkpoint(state, start, end, position)
        )
        if inside:
            last = 0
        if end < prompt:
            aligned = end // size * size
            if aligned > start or size <= self.timing.max_batched_tokens:
                end = aligned
        stops = [last]
        if start % size and not inside:
            stops.append((start // size + 1) * size)
        tail = layout.checkpoint(prompt, unit) if partial and not inside else 0
        if last < tail < prompt:
            stops.append(tail)
        junction = self._sequences[request].boundary
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(0, end - start)

    def _advance(self, request: EngineRequest, already_computed: int) -> None:
        cache, sequence = self._grouped, self._sequences[request]
        drafted = cache.layout.drafted_tokens
        slots = request.computed + drafted * (1 if request.phase is RequestPhase.PREFILL else 2)
        cache.advance(
            sequence, request.chain, request.prompt_tokens, already_computed, request.computed, slots
        )
        allocated = sum(block is not None for table in sequence.tables for block in table)
        total = self._most_blocks(request.prompt_tokens + max(0, request.output_tokens - 1))
        remaining = max(0, total - allocated)
        self._reserved += remaining - request.reserved
        request.reserved = remaining
        if request.phase is RequestPhase.PREFILL:
            request.stored_tokens = (
                request.computed // cache.block_size * cache.block_size - request.cached_tokens
            )

    def _take_in(self, request: EngineRequest) -> None:
        already_computed = request.computed
        SimEngine._take_in(self, request)
        self._advance(request, already_computed)

    def _allocate_up_to(self, request: EngineRequest, tokens: int) -> None:
        """Nothing: `_advance` allocates and stores."""

    def _store(self, request: EngineRequest) -> None:
        """Nothing: `_advance` allocates and stores."""

    def _schedule_fill(self, request: EngineRequest) -> None:
        if request.computed < request.prompt_tokens + request.output_tokens - 1:
            upcoming = request.first_iteration + request.computed + 1 - request.prompt_tokens
            self._fills_at.setdefault(upcoming, []).append(request)

    def _block_filled(self, request: EngineRequest, upcoming: int) -> None:
        already_computed = request.computed
        request.computed = request.prompt_tokens + upcoming - request.first_iteration
        self._advance(request, already_computed)
        self._schedule_fill(request)

    def _release(self, request: EngineRequest) -> None:
        self._reserved -= request.reserved
        request.reserved = 0
        if not (request.keeps_blocks and request.phase is RequestPhase.FINISHED):
            self.free_kept(request)
