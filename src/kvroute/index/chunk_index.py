"""What LMCache says it holds: per prompt, how far each slot gets behind its GPU's blocks, in L1 and in L2.

A *holder* is one LMCache instance's memory (L1) or one pool that instances share (L2); a *slot* is what a
request can be sent to (see `index.prefix_index`), which may read from several holders. LMCache's events bring
hashes without their parents, so chunks lie in a plain map from chunk to the bitmask of its holders: they are
few, one for 256 tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kvroute.blocks.chunks import ChunkKey, ChunkKeys, ChunkScheme, ChunkSpace, PromptChunks
from kvroute.blocks.keys import Tier

SHARDS: Final = 256
"""Hash tables of the map: one of a million entries would stop the process for as long as it grows."""
SHARD_MASK: Final = SHARDS - 1

ChunkDomain = tuple[ChunkScheme, str]
"""How a slot's prompts are cut and under which model they are looked up; the salt comes with the prompt."""
ChunkStep = tuple[ChunkDomain, tuple[int, ...]]
"""Where to look, and for whom: the bits of the holders."""


class LookupSegment(NamedTuple):
    """Chunks of a prompt that were looked up in one go."""

    start: int
    stop: int
    runs: dict[int, list[int]]
    """Bit of a holder -> where its runs of chunks begin and end, in turn."""


class ChunkLine:
    """Who has the chunks of one prompt in one space. Mutable: remembers what was looked up, from where it was
    asked for to where nobody has any more."""

    __slots__ = (
        "_keys",
        "_last",
        "_probed",
        "_seed",
        "_segments",
        "_shards",
        "_starts",
        "_wanted",
        "tokens",
        "total",
    )

    def __init__(
        self,
        keys: ChunkKeys,
        chunk_tokens: int,
        seed: int,
        shards: Sequence[dict[int, int]],
        wanted: int,
        probed: Sequence[tuple[int, Collection[ChunkKey]]],
    ) -> None:
        self._keys = keys
        self._seed = seed
        self._shards = shards
        self._wanted = wanted
        self._probed = probed
        self._starts: list[int] = []
        self._segments: list[LookupSegment] = []
        self._last = LookupSegment(0, 0, {})
        self.tokens = chunk_tokens
        self.total = len(keys)

    def reach(self, bits: tuple[int, ...], position: int) -> int:
        """Where the chunks from `position` on end that one of `bits` has."""
        if position >= self.total:
            return position
        runs, best = self._segment(position).runs, position
        for bit in bits:
            run = runs.get(bit)
            if run is not None:
                place = bisect_right(run, position)
                if place & 1 and run[place] > best:
                    best = run[place]
        return best

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
                    place = bisect_right(run, position)
                    if place & 1:
                        if run[place] > stop:
                            stop = run[place]
                    elif place < len(run) and run[place] < ahead:
                        ahead = run[place]
            if stop > position:
                in_l1 += (stop - position) * tokens - offset
            else:
                for bit in l2:
                    run = runs.get(bit)
                    if run is not None:
                        place = bisect_right(run, position)
                        if place & 1 and run[place] > stop:
                            stop = run[place]
                if stop == position:
                    break
                if stop > ahead:  # L1 has it from there on
                    stop = ahead
                in_l2 += (stop - position) * tokens - offset
            position, offset = stop, 0
        return (in_l1, in_l2) if in_l1 or in_l2 else None

    def _segment(self, position: int) -> LookupSegment:
        segment = self._last
        if segment.start <= position < segment.stop:
            return segment
        place = bisect_right(self._starts, position) - 1
        if place >= 0:
            segment = self._last = self._segments[place]
            if position < segment.stop:
                return segment
        place += 1
        limit = self._starts[place] if place < len(self._starts) else self.total
        segment = self._last = self._look(position, limit)
        self._starts.insert(place, position)
        self._segments.insert(place, segment)
        return segment

    def _look(self, start: int, limit: int) -> LookupSegment:
        keys, computed, seed, shards, wanted = (
            self._keys,
            self._keys.computed,
            self._seed,
            self._shards,
            self._wanted,
        )
        runs: dict[int, list[int]] = {}
        last, held, at = -1, 0, start
        while at < limit and (held or at == start):
            keys.compute(at + 1)
            for key in computed[at:limit]:
                name = key ^ seed
                mask = shards[name & SHARD_MASK].get(name, 0)
                if self._probed:
                    mask = self._as_probed(key, mask)
                at += 1
                if mask != last:
                    last = mask
                    mask &= wanted
                    changed, held = mask ^ held, mask
                    while changed:
                        bit = changed & -changed
                        changed ^= bit
                        runs.setdefault(bit, []).append(at - 1)
                    if not held:
                        break
        while held:
            bit = held & -held
            held ^= bit
            runs[bit].append(at)
        return LookupSegment(start, at, runs)

    def _as_probed(self, key: ChunkKey, mask: int) -> int:
        for bit, there in self._probed:
            mask = mask | bit if key in there else mask & ~bit
        return mask


def reach_in_several(
    line_of: Callable[[ChunkDomain], ChunkLine], start: int, l1: Sequence[ChunkStep], l2: Sequence[ChunkStep]
) -> tuple[int, int]:
    """What `ChunkLine.follow` gives, for slots whose prompts are cut or looked up in several ways: L2 chunk
    by chunk, as L1 may have the next one."""
    place, found = start, [0, 0]
    moved = True
    while moved:
        moved = False
        for tier, steps in enumerate((l1, l2)):
            for domain, bits in steps:
                line = line_of(domain)
                position = place // line.tokens
                stop = line.reach(bits, position)
                if stop > position:
                    stop = stop if tier == 0 else position + 1
                    found[tier] += stop * line.tokens - place
                    place, moved = stop * line.tokens, True
                    break
            if moved:
                break
    return found[0], found[1]


_KEPT_MASKS: Final = 65_536
_CHUNK_BYTES: Final = 115
"""Memory of one chunk, its share of the tables included (bench/micro_chunks.py)."""


class ChunkIndexSize(NamedTuple):
    """For gauges. `bytes` is an estimate."""

    chunks: int
    """Different chunks, those of cleared holders included until they are swept."""
    held: int
    """Chunks summed over holders."""
    dropped: int
    """Chunks that were not taken in since the start, because `max_chunks` was reached."""
    bytes: int


@dataclass(slots=True, eq=False)
class ChunkHolder:
    """Whose chunks they are. Mutable; only the index changes it. `chunks` counts each of them once.
    `shared`: it outlives the slots that read it."""

    tier: Tier
    shared: bool = False
    chunks: int = 0
    bit: int = 0
    """Its bit in the masks; 0 before the first chunk and after `clear`."""


@dataclass(slots=True, eq=False)
class _Slot:
    domains: dict[ChunkHolder, tuple[ChunkDomain, ...]] = field(default_factory=dict)


class ChunkIndex:
    """Mutable: changed by whoever speaks LMCache's protocols, read by routing. Touched from the event loop
    only. `max_chunks` bounds the different chunks kept; further ones are counted and not believed.
    """

    def __init__(self, *, max_chunks: int = 2_000_000) -> None:
        self._max_chunks = max_chunks
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._slots: dict[int, _Slot] = {}
        self._plans: _Plans | None = None
        """None after a change of holders or slots."""
        self._masks: dict[int, int] = {}
        """Equal masks are one object: they weigh as much as an entry of the map."""
        self._chunks = self._held = self._dropped = 0
        self._live = self._closed = 0
        self._sweeping: tuple[int, Iterator[dict[int, int]]] | None = None

    # Holders and slots

    def attach(self, slot: int, holder: ChunkHolder, domains: Iterable[ChunkDomain]) -> None:
        """Let `slot` use what `holder` has, its prompts cut and looked up in each of `domains`. Attaching
        again replaces them."""
        chosen = tuple(dict.fromkeys(domains))
        known = self._slots.setdefault(slot, _Slot()).domains
        if known.get(holder) != chosen:
            known[holder] = chosen
            self._plans = None

    def detach(self, slot: int, holder: ChunkHolder) -> None:
        """Undo `attach`."""
        known = self._slots.get(slot)
        if known is not None and known.domains.pop(holder, None) is not None:
            self._plans = None
            if not known.domains:
                del self._slots[slot]

    def forget(self, slot: int) -> None:
        """The slot is gone, and what its own holders had; memory comes back with `sweep`."""
        known = self._slots.pop(slot, None)
        if known is not None:
            self._plans = None
            for holder in known.domains:
                if not holder.shared:
                    self.clear(holder)

    # Chunks

    def store(self, holder: ChunkHolder, space: ChunkSpace, keys: Iterable[ChunkKey]) -> int:
        """`holder` has these chunks; returns how many of them it was not known to have and were taken in.
        About 0.3 us a chunk."""
        bit = holder.bit or self._open(holder)
        seed, shards, live, masks = _seed(space), self._shards, self._live, self._masks
        if len(masks) > _KEPT_MASKS:
            masks.clear()
        room, fresh, added = self._max_chunks - self._chunks, 0, 0
        for key in keys:
            name = key ^ seed
            shard = shards[name & SHARD_MASK]
            mask = shard.get(name)
            if mask is None:
                if added >= room:
                    self._dropped += 1
                    continue
                added += 1
                shard[name] = bit
            elif mask & bit:
                continue
            else:
                mask = mask & live | bit
                shard[name] = masks.setdefault(mask, mask)
            fresh += 1
        self._chunks += added
        self._held += fresh
        holder.chunks += fresh
        return fresh

    def remove(self, holder: ChunkHolder, space: ChunkSpace, key: ChunkKey) -> bool:
        """`holder` no longer has this chunk; False if it was not believed to."""
        return bool(self.remove_all(holder, space, (key,)))

    def remove_all(self, holder: ChunkHolder, space: ChunkSpace, keys: Iterable[ChunkKey]) -> int:
        """`holder` no longer has these chunks; returns how many of them it was believed to have."""
        seed, shards, bit, left = _seed(space), self._shards, holder.bit, self._live & ~holder.bit
        gone = 0
        for key in keys:
            name = key ^ seed
            shard = shards[name & SHARD_MASK]
            mask = shard.get(name, 0)
            if mask & bit:
                gone += 1
                mask &= left
                if mask:
                    shard[name] = self._masks.setdefault(mask, mask)
                else:
                    del shard[name]
                    self._chunks -= 1
        holder.chunks -= gone
        self._held -= gone
        return gone

    def clear(self, holder: ChunkHolder) -> None:
        """`holder` has nothing any more. Takes a moment whatever it had; memory comes back with `sweep`."""
        self._held -= holder.chunks
        holder.chunks = 0
        if holder.bit:
            self._live &= ~holder.bit
            self._closed |= holder.bit
            holder.bit = 0
            self._plans = None

    def sweep(self, steps: int = 1000) -> bool:
        """Return memory of what was cleared, about `steps` chunks (0.1 us each, and never less than one of
        256 parts of the index); True while there is more."""
        while self._closed and steps > 0:
            if self._sweeping is None:
                self._sweeping = self._closed, iter(self._shards)
            closed, shards = self._sweeping
            for shard in shards:
                steps -= max(1, len(shard))
                live = self._live
                for name in [name for name, mask in shard.items() if mask & closed]:
                    mask = shard[name] & live
                    if mask:
                        shard[name] = self._masks.setdefault(mask, mask)
                    else:
                        del shard[name]
                        self._chunks -= 1
                if steps <= 0:
                    break
            else:
                self._closed &= ~closed
                self._sweeping = None
        return bool(self._closed)

    def holds(self, holder: ChunkHolder, space: ChunkSpace, key: ChunkKey) -> bool:
        """Whether `holder` is believed to have this chunk."""
        name = key ^ _seed(space)
        return bool(self._shards[name & SHARD_MASK].get(name, 0) & holder.bit)

    # Reading

    @property
    def is_read(self) -> bool:
        """Whether `match` may find anything for any slot, as long as nothing is `probed`."""
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
        """Slot -> tokens in L1 and in L2 that follow `starts.get(slot, 0)` (tokens found in GPU memory)
        without a gap, L1 before L2 at each chunk; changes nothing.

        A chunk that the start lies in counts with what of it lies behind the start: it is read whole. Slots
        with nothing are left out. `probed` overrides what is known of a holder, for this prompt: the keys of
        the prompt's chunks that it has (in whatever space they were asked for; pass a set). Costs what is
        found, not the prompt: bench/micro_chunks.py.
        """
        asked = (
            [(holder.bit or self._open(holder), keys) for holder, keys in probed.items()] if probed else []
        )
        plans = self._plans
        if plans is None:
            plans = self._plans = self._plan()
        if not (plans.simple or plans.several):
            return {}
        lines: dict[ChunkDomain, ChunkLine] = {}
        found: dict[int, tuple[int, int]] = {}

        def line_of(domain: ChunkDomain) -> ChunkLine:
            line = lines.get(domain)
            if line is None:
                scheme, model = domain
                seed = _seed(ChunkSpace(scheme, model, salt))
                line = lines[domain] = ChunkLine(
                    chunks.keys(scheme), scheme.chunk_tokens, seed, self._shards, self._live, asked
                )
            return line

        for domain, members in plans.simple.items():
            line = line_of(domain)
            for slot, l1, l2 in members:
                reached = line.follow(starts.get(slot, 0), l1, l2)
                if reached is not None:
                    found[slot] = reached
        for slot, l1_steps, l2_steps in plans.several:
            reached = reach_in_several(line_of, starts.get(slot, 0), l1_steps, l2_steps)
            if reached != (0, 0):
                found[slot] = reached
        return found

    def size(self) -> ChunkIndexSize:
        return ChunkIndexSize(self._chunks, self._held, self._dropped, self._chunks * _CHUNK_BYTES)

    def _open(self, holder: ChunkHolder) -> int:
        """A bit that no chunk has."""
        taken = self._live | self._closed
        holder.bit = ~taken & (taken + 1)
        self._live |= holder.bit
        self._plans = None
        return holder.bit

    def _plan(self) -> _Plans:
        plans = _Plans({}, [])
        for slot, known in self._slots.items():
            tiers: dict[Tier, dict[ChunkDomain, tuple[int, ...]]] = {Tier.L1: {}, Tier.L2: {}}
            for holder, domains in known.domains.items():
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
    """What to look at for each slot: the bits of its holders of L1 and of L2."""

    simple: dict[ChunkDomain, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]
    """Slots that look in one domain."""
    several: list[tuple[int, list[ChunkStep], list[ChunkStep]]]


def _seed(space: ChunkSpace) -> int:
    """Keeps equal hashes of different spaces apart: chunks are known by their key XOR this. Chunks of
    different sizes never have equal hashes, so the size need not be known to store them."""
    (algorithm, _, seed), model, salt = space
    return xxh3_64_intdigest(f"{algorithm}\0{seed}\0{model}\0{salt}".encode())
