"""What LMCache says it holds: per prompt, how far each slot gets behind its GPU's blocks, in L1 and in L2.

A *holder* is one LMCache instance's memory (L1) or one pool that instances share (L2); a *slot* is what a
request can be sent to (see `index.prefix_index`), which may read from several holders. LMCache's events bring
hashes without their parents, so chunks lie in a plain map from chunk to the bitmask of its holders: they are
few, one for 256 tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kvroute.blocks.chunks import ChunkKey, ChunkSpace, PromptChunks
from kvroute.blocks.tokens import Tier
from kvroute.index.chunk_lines import (
    SHARD_MASK,
    SHARDS,
    ChunkDomain,
    ChunkLine,
    ChunkStep,
    reach_in_several,
)

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
