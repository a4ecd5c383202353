"""Which chunks LMCache holds: per prompt and slot, the tokens in L1 and L2 after the blocks in GPU memory.

A *holder* is the memory of one LMCache instance (L1) or a pool that instances share (L2). A *slot* is a
target of requests (see `index.prefix_index`), which may read from several holders. LMCache's events have
hashes without their parents, so the index is a plain map from chunk to the bitmask of its holders. There are
few chunks: one for 256 tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kvroute.blocks.chunks import ChunkKey, ChunkKeys, ChunkScheme, ChunkSpace, PromptChunks
from kvroute.blocks.keys import Tier

SHARDS: Final = 256
"""Hash tables of the map. One table of a million entries would block the process while it grows."""
SHARD_MASK: Final = SHARDS - 1

ChunkDomain = tuple[ChunkScheme, str]
"""How a slot's prompts are divided into chunks, and the model for their lookup. The salt comes with the
prompt."""
ChunkStep = tuple[ChunkDomain, tuple[int, ...]]
"""A lookup of one slot: the domain, and the bits of the holders."""


class LookupSegment(NamedTuple):
    """Consecutive chunks of a prompt that were looked up together."""

    start: int
    stop: int
    runs: dict[int, list[int]]
    """Bit of a holder -> start and end of each of its runs of chunks, in ascending order."""


class ChunkLine:
    """The holders of one prompt's chunks in one space. Mutable: caches the segments that were looked up.

    A segment goes from the first requested chunk to the first chunk that no holder has. `tail` is the chunk
    with the prompt's last token, which need not be full (`PromptChunks.tail`).
    """

    __slots__ = (
        "_keys",
        "_last",
        "_live",
        "_probed",
        "_seed",
        "_segments",
        "_shards",
        "_starts",
        "_tail",
        "_tail_of",
        "tokens",
        "total",
    )

    def __init__(
        self,
        keys: ChunkKeys,
        chunk_tokens: int,
        seed: int,
        shards: Sequence[dict[int, int]],
        live: int,
        probed: Sequence[tuple[int, Collection[ChunkKey]]],
        tail: Callable[[], tuple[int, ChunkKey] | None],
    ) -> None:
        self._keys = keys
        self._tail_of = tail
        self._tail: tuple[int, int] | None = None
        self._seed = seed
        self._shards = shards
        self._live = live
        self._probed = probed
        self._starts: list[int] = []
        self._segments: list[LookupSegment] = []
        self._last = LookupSegment(0, 0, {})
        self.tokens = chunk_tokens
        self.total = len(keys)

    def reach(self, bits: tuple[int, ...], position: int) -> int:
        """The end of the longest run of chunks from `position` on that one holder of `bits` has."""
        if position >= self.total:
            return position
        runs, best = self._segment(position).runs, position
        for bit in bits:
            run = runs.get(bit)
            if run is not None:
                index = bisect_right(run, position)
                if index & 1 and run[index] > best:
                    best = run[index]
        return best

    def tail(self) -> tuple[int, int]:
        """The tail's tokens without the prompt's last one, and the mask of its holders. Hashed once."""
        if self._tail is None:
            tokens, key = self._tail_of() or (0, 0)
            entry = key ^ self._seed
            mask = self._shards[entry & SHARD_MASK].get(entry, 0) & self._live if tokens else 0
            self._tail = tokens, mask
        return self._tail

    def follow(self, start: int, l1: tuple[int, ...], l2: tuple[int, ...]) -> tuple[int, int] | None:
        """Tokens in L1 and in L2 that follow the token `start` without a gap; None if there are none."""
        tokens, total = self.tokens, self.total
        position = start // tokens
        offset = start - position * tokens
        in_l1 = in_l2 = 0
        while position < total:
            segment = self._last
            if not segment.start <= position < segment.stop:
                segment = self._segment(position)
            runs = segment.runs
            if not runs:
                break
            stop, ahead = position, total
            for bit in l1:
                run = runs.get(bit)
                if run is not None:
                    index = bisect_right(run, position)
                    if index & 1:
                        if run[index] > stop:
                            stop = run[index]
                    elif index < len(run) and run[index] < ahead:
                        ahead = run[index]
            if stop > position:
                in_l1 += (stop - position) * tokens - offset
            else:
                for bit in l2:
                    run = runs.get(bit)
                    if run is not None:
                        index = bisect_right(run, position)
                        if index & 1 and run[index] > stop:
                            stop = run[index]
                if stop == position:
                    break
                if stop > ahead:  # L1 has the chunks from `ahead` on
                    stop = ahead
                in_l2 += (stop - position) * tokens - offset
            position, offset = stop, 0
        if position >= total:
            tail, mask = self.tail()
            if mask and tail > offset:
                if any(bit & mask for bit in l1):
                    in_l1 += tail - offset
                elif any(bit & mask for bit in l2):
                    in_l2 += tail - offset
        return (in_l1, in_l2) if in_l1 or in_l2 else None

    def _segment(self, position: int) -> LookupSegment:
        segment = self._last
        if segment.start <= position < segment.stop:
            return segment
        index = bisect_right(self._starts, position) - 1
        if index >= 0:
            segment = self._last = self._segments[index]
            if position < segment.stop:
                return segment
        index += 1
        limit = self._starts[index] if index < len(self._starts) else self.total
        segment = self._last = self._lookup(position, limit)
        self._starts.insert(index, position)
        self._segments.insert(index, segment)
        return segment

    def _lookup(self, start: int, limit: int) -> LookupSegment:
        keys, computed, seed, shards, live = (
            self._keys,
            self._keys.computed,
            self._seed,
            self._shards,
            self._live,
        )
        runs: dict[int, list[int]] = {}
        last_mask, held_bits, at = -1, 0, start
        while at < limit and (held_bits or at == start):
            keys.compute(at + 1)
            for key in computed[at:limit]:
                entry = key ^ seed
                mask = shards[entry & SHARD_MASK].get(entry, 0)
                if self._probed:
                    mask = self._as_probed(key, mask)
                at += 1
                if mask != last_mask:
                    last_mask = mask
                    mask &= live
                    changed, held_bits = mask ^ held_bits, mask
                    while changed:
                        bit = changed & -changed
                        changed ^= bit
                        runs.setdefault(bit, []).append(at - 1)
                    if not held_bits:
                        break
        while held_bits:
            bit = held_bits & -held_bits
            held_bits ^= bit
            runs[bit].append(at)
        return LookupSegment(start, at, runs)

    def _as_probed(self, key: ChunkKey, mask: int) -> int:
        for bit, there in self._probed:
            mask = mask | bit if key in there else mask & ~bit
        return mask


def follow_several(
    line_of: Callable[[ChunkDomain], ChunkLine], start: int, l1: Sequence[ChunkStep], l2: Sequence[ChunkStep]
) -> tuple[int, int]:
    """As `ChunkLine.follow`, for a slot with several domains. L2 is read chunk by chunk: L1 may have the next
    one."""
    end, matched = start, [0, 0]
    moved = True
    while moved:
        moved = False
        for tier, steps in enumerate((l1, l2)):
            for domain, bits in steps:
                line = line_of(domain)
                position = end // line.tokens
                stop = line.reach(bits, position)
                if stop > position:
                    stop = stop if tier == 0 else position + 1
                    matched[tier] += stop * line.tokens - end
                    end, moved = stop * line.tokens, True
                    break
            if moved:
                break
    for tier, steps in enumerate((l1, l2)):
        for domain, bits in steps:
            line = line_of(domain)
            tail, mask = line.tail() if end >= line.total * line.tokens else (0, 0)
            behind = line.total * line.tokens + tail - end
            if behind > 0 and any(bit & mask for bit in bits):
                matched[tier] += behind
                end += behind
    return matched[0], matched[1]


_KEPT_MASKS: Final = 65_536
_CHUNK_BYTES: Final = 115
"""Memory of one chunk, including its share of the tables (bench/micro_chunks.py)."""


class ChunkIndexSize(NamedTuple):
    """Sizes for gauges. `bytes` is an estimate."""

    chunks: int
    """Different chunks, including those of cleared holders until they are swept."""
    held_chunks: int
    """Chunks summed over holders."""
    dropped: int
    """Chunks since the start that were not stored, because `max_chunks` was reached."""
    bytes: int


@dataclass(slots=True, eq=False)
class ChunkHolder:
    """A place that keeps chunks in one tier. Mutable; only the index changes it.

    `chunks` is the number of its different chunks. A `shared` holder outlives the slots that read it.
    """

    tier: Tier
    shared: bool = False
    chunks: int = 0
    bit: int = 0
    """The holder's bit in the masks; 0 before the first chunk and after `clear`."""


@dataclass(slots=True, eq=False)
class _Slot:
    domains: dict[ChunkHolder, tuple[ChunkDomain, ...]] = field(default_factory=dict)


class ChunkIndex:
    """The map of LMCache's chunks. Mutable: the `lmcache` room changes it; routing reads it.

    Use it from the event loop only. It keeps at most `max_chunks` different chunks; further ones are only
    counted.
    """

    def __init__(self, *, max_chunks: int = 2_000_000) -> None:
        self._max_chunks = max_chunks
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._slots: dict[int, _Slot] = {}
        self._plans: _Plans | None = None
        """None after a change of holders or slots."""
        self._masks: dict[int, int] = {}
        """Equal masks share one object: a mask takes as much memory as an entry of the map."""
        self._chunks = self._held_chunks = self._dropped = 0
        self._live = self._closed = 0
        self._tables_to_free: list[dict[Any, Any]] = []
        self._sweeping: tuple[int, Iterator[dict[int, int]]] | None = None

    # Holders and slots

    def attach(self, slot: int, holder: ChunkHolder, domains: Iterable[ChunkDomain]) -> None:
        """Let `slot` read the chunks of `holder`, with a lookup in each of `domains`.

        Attaching the same holder again replaces its domains.
        """
        chosen = tuple(dict.fromkeys(domains))
        domains_by_holder = self._slots.setdefault(slot, _Slot()).domains
        if domains_by_holder.get(holder) != chosen:
            domains_by_holder[holder] = chosen
            self._plans = None

    def detach(self, slot: int, holder: ChunkHolder) -> None:
        """Undo `attach`."""
        slot_domains = self._slots.get(slot)
        if slot_domains is not None and slot_domains.domains.pop(holder, None) is not None:
            self._plans = None
            if not slot_domains.domains:
                del self._slots[slot]

    def forget(self, slot: int) -> None:
        """Remove the slot and the chunks of its own holders; `sweep` returns the memory."""
        slot_domains = self._slots.pop(slot, None)
        if slot_domains is not None:
            self._plans = None
            for holder in slot_domains.domains:
                if not holder.shared:
                    self.clear(holder)

    # Chunks

    def store(self, holder: ChunkHolder, space: ChunkSpace, keys: Iterable[ChunkKey]) -> int:
        """`holder` has these chunks; returns how many were stored that it was not known to have.

        About 0.3 us a chunk.
        """
        bit = holder.bit or self._open(holder)
        seed, shards, live, masks = entry_seed(space), self._shards, self._live, self._masks
        if len(masks) > _KEPT_MASKS:
            masks.clear()
        room, new, added = self._max_chunks - self._chunks, 0, 0
        for key in keys:
            entry = key ^ seed
            shard = shards[entry & SHARD_MASK]
            mask = shard.get(entry)
            if mask is None:
                if added >= room:
                    self._dropped += 1
                    continue
                added += 1
                shard[entry] = bit
            elif mask & bit:
                continue
            else:
                mask = mask & live | bit
                shard[entry] = masks.setdefault(mask, mask)
            new += 1
        self._chunks += added
        self._held_chunks += new
        holder.chunks += new
        return new

    def remove(self, holder: ChunkHolder, space: ChunkSpace, key: ChunkKey) -> bool:
        """`holder` no longer has this chunk; False if the index did not have it for `holder`."""
        return bool(self.remove_all(holder, space, (key,)))

    def remove_all(self, holder: ChunkHolder, space: ChunkSpace, keys: Iterable[ChunkKey]) -> int:
        """`holder` no longer has these chunks; returns how many the index had for `holder`."""
        seed, shards, bit, remaining = entry_seed(space), self._shards, holder.bit, self._live & ~holder.bit
        removed = 0
        for key in keys:
            entry = key ^ seed
            shard = shards[entry & SHARD_MASK]
            mask = shard.get(entry, 0)
            if mask & bit:
                removed += 1
                mask &= remaining
                if mask:
                    shard[entry] = self._masks.setdefault(mask, mask)
                else:
                    del shard[entry]
                    self._chunks -= 1
        holder.chunks -= removed
        self._held_chunks -= removed
        return removed

    def clear(self, holder: ChunkHolder) -> None:
        """`holder` has no chunks any more. Takes constant time; `sweep` returns the memory."""
        self._held_chunks -= holder.chunks
        holder.chunks = 0
        if holder.bit:
            self._live &= ~holder.bit
            self._closed |= holder.bit
            holder.bit = 0
            self._plans = None

    def free_later(self, tables: Iterable[dict[Any, Any]]) -> None:
        """Let `sweep` free tables of an owner of chunks, to which nothing else refers."""
        self._tables_to_free += filter(None, tables)

    def sweep(self, steps: int = 1000) -> bool:
        """Return the memory of about `steps` cleared chunks (0.1 us each); True while there is more.

        The smallest step is one of the 256 tables of the index, or a table of `free_later`.
        """
        while self._tables_to_free and steps > 0:
            steps -= len(self._tables_to_free.pop())
        while self._closed and steps > 0:
            if self._sweeping is None:
                self._sweeping = self._closed, iter(self._shards)
            closed, shards = self._sweeping
            for shard in shards:
                steps -= max(1, len(shard))
                live = self._live
                for entry in [entry for entry, mask in shard.items() if mask & closed]:
                    mask = shard[entry] & live
                    if mask:
                        shard[entry] = self._masks.setdefault(mask, mask)
                    else:
                        del shard[entry]
                        self._chunks -= 1
                if steps <= 0:
                    break
            else:
                self._closed &= ~closed
                self._sweeping = None
        return bool(self._closed or self._tables_to_free)

    def holds(self, holder: ChunkHolder, space: ChunkSpace, key: ChunkKey) -> bool:
        """Does the index have this chunk for `holder`?"""
        entry = key ^ entry_seed(space)
        return bool(self._shards[entry & SHARD_MASK].get(entry, 0) & holder.bit)

    # Reading

    @property
    def is_read(self) -> bool:
        """Whether `match` can find a chunk for any slot without `probed`."""
        plans = self._plans
        if plans is None:
            plans = self._plans = self._plan()
        return bool(plans.simple or plans.several)

    def match(
        self,
        chunks: PromptChunks,
        salt: str,
        starts: Mapping[int, int],
        probed: Mapping[ChunkHolder, Collection[ChunkKey]] | None = None,
    ) -> dict[int, tuple[int, int]]:
        """Slot -> (tokens in L1, tokens in L2) that follow `starts.get(slot, 0)` without a gap. Changes
        nothing.

        The start is the number of tokens found in GPU memory. L1 goes before L2 at each chunk. Of a chunk
        that contains the start, the tokens after the start count, because a chunk is read whole. A last chunk
        that is not full counts if the prompt's last token is known. Slots without tokens are left out.
        `probed` overrides the index for a holder and this prompt: a set of the keys of the prompt's chunks
        that the holder has, in the space of the probe. The cost depends on the chunks found, not on the
        prompt's length: bench/micro_chunks.py.
        """
        overrides = (
            [(holder.bit or self._open(holder), keys) for holder, keys in probed.items()] if probed else []
        )
        plans = self._plans
        if plans is None:
            plans = self._plans = self._plan()
        if not (plans.simple or plans.several):
            return {}
        lines: dict[ChunkDomain, ChunkLine] = {}
        matches: dict[int, tuple[int, int]] = {}

        def line_of(domain: ChunkDomain) -> ChunkLine:
            line = lines.get(domain)
            if line is None:
                scheme, model = domain
                seed = entry_seed(ChunkSpace(scheme, model, salt))
                line = lines[domain] = ChunkLine(
                    chunks.keys(scheme),
                    scheme.chunk_tokens,
                    seed,
                    self._shards,
                    self._live,
                    overrides,
                    partial(chunks.tail, scheme),
                )
            return line

        for domain, members in plans.simple.items():
            line = line_of(domain)
            for slot, l1, l2 in members:
                reached = line.follow(starts.get(slot, 0), l1, l2)
                if reached is not None:
                    matches[slot] = reached
        for slot, l1_steps, l2_steps in plans.several:
            reached = follow_several(line_of, starts.get(slot, 0), l1_steps, l2_steps)
            if reached != (0, 0):
                matches[slot] = reached
        return matches

    def held_by_tier(self) -> dict[Tier, int]:
        """Chunks by tier, summed over the holders. O(holders), for gauges."""
        chunks_by_tier: dict[Tier, int] = {}
        for holder in {holder for slot in self._slots.values() for holder in slot.domains}:
            chunks_by_tier[holder.tier] = chunks_by_tier.get(holder.tier, 0) + holder.chunks
        return chunks_by_tier

    def size(self) -> ChunkIndexSize:
        return ChunkIndexSize(self._chunks, self._held_chunks, self._dropped, self._chunks * _CHUNK_BYTES)

    def _open(self, holder: ChunkHolder) -> int:
        """Give `holder` a bit that no chunk has."""
        taken = self._live | self._closed
        holder.bit = ~taken & (taken + 1)
        self._live |= holder.bit
        self._plans = None
        return holder.bit

    def _plan(self) -> _Plans:
        plans = _Plans({}, [])
        for slot, slot_domains in self._slots.items():
            tiers: dict[Tier, dict[ChunkDomain, tuple[int, ...]]] = {Tier.L1: {}, Tier.L2: {}}
            for holder, domains in slot_domains.domains.items():
                steps = tiers[holder.tier]
                for domain in domains if holder.bit else ():
                    steps[domain] = (*steps.get(domain, ()), holder.bit)
            l1, l2 = tiers[Tier.L1], tiers[Tier.L2]
            both = l1.keys() | l2.keys()
            if len(both) == 1:
                (only,) = both
                plans.simple.setdefault(only, []).append((slot, l1.get(only, ()), l2.get(only, ())))
            elif both:
                plans.several.append((slot, list(l1.items()), list(l2.items())))
        return plans


class _Plans(NamedTuple):
    """The lookups of each slot: the bits of its holders in L1 and in L2."""

    simple: dict[ChunkDomain, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]
    """Slots with one domain."""
    several: list[tuple[int, list[ChunkStep], list[ChunkStep]]]


def entry_seed(space: ChunkSpace) -> int:
    """A number that separates equal hashes of different spaces: an entry of the map is a chunk key XOR
    this."""
    # Chunks of different sizes never have equal hashes, so the size is no part of the seed.
    (algorithm, _, seed), model, salt = space
    return xxh3_64_intdigest(f"{algorithm}\0{seed}\0{model}\0{salt}".encode())
