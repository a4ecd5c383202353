"""One prompt against the chunk map: how far each holder's chunks go, looked up once for all slots."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from kvroute.blocks.chunks import ChunkKey, ChunkKeys, ChunkScheme

SHARDS: Final = 256
"""Hash tables of the map: one of a million entries would stop the process for as long as it grows."""
SHARD_MASK: Final = SHARDS - 1

ChunkDomain = tuple[ChunkScheme, str]
"""How a slot's prompts are cut and under which model they are looked up; the salt comes with the prompt."""
ChunkStep = tuple[ChunkDomain, tuple[int, ...]]
"""Where to look, and for whom: the bits of the holders."""


class Segment(NamedTuple):
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
        self._segments: list[Segment] = []
        self._last = Segment(0, 0, {})
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

    def _segment(self, position: int) -> Segment:
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

    def _look(self, start: int, limit: int) -> Segment:
        keys, made, seed, shards, wanted = self._keys, self._keys.made, self._seed, self._shards, self._wanted
        runs: dict[int, list[int]] = {}
        last, held, at = -1, 0, start
        while at < limit and (held or at == start):
            keys.reach(at + 1)
            for key in made[at:limit]:
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
        return Segment(start, at, runs)

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
