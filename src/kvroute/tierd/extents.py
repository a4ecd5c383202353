"""Which bytes of the pool are free: an allocator over one range, in whole pages.

An object is one extent when there is a gap that is large enough, else as few pieces as the largest gaps
allow. So what is free can always be used, and nothing ever has to move.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

PAGE_BYTES = 4096


class Extent(NamedTuple):
    """A piece of the pool, in bytes."""

    offset: int
    length: int


Extents = tuple[Extent, ...]


def joined(first: Extents, second: Extents) -> Extents:
    """The extents of an object whose bytes go on in `second`; pieces that touch become one."""
    if first and second and first[-1].offset + first[-1].length == second[0].offset:
        middle = Extent(first[-1].offset, first[-1].length + second[0].length)
        return (*first[:-1], middle, *second[1:])
    return (*first, *second)


class FreeSpace:
    """The gaps of a range of `size_bytes`, merged with their neighbours when they touch.

    Mutable: the pool takes and gives back. A call costs some microseconds with thousands of gaps.
    """

    def __init__(self, size_bytes: int, *, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.size_bytes = size_bytes // page_bytes * page_bytes
        self.free_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        if self.size_bytes:
            self._add(0, self.size_bytes)

    def footprint(self, size_bytes: int) -> int:
        """What an object of that size takes: whole pages."""
        return -(-size_bytes // self.page_bytes) * self.page_bytes

    def take(self, size_bytes: int, *, after: int | None = None) -> Extents | None:
        """Extents of together exactly `size_bytes`, each from the start of a page; None if there is less.

        The gap that begins at `after` if it holds all of it, else the smallest gap that does; if none does,
        the largest gaps, the largest first.
        """
        wanted = self.footprint(size_bytes)
        if wanted > self.free_bytes or size_bytes <= 0:
            return None
        if after is not None and self._length_at.get(after, 0) >= wanted:
            self._cut(after, wanted)
            return (Extent(after, size_bytes),)
        place = bisect_left(self._by_size, (wanted, -1))
        if place < len(self._by_size):
            _, start = self._by_size[place]
            self._cut(start, wanted)
            return (Extent(start, size_bytes),)
        pieces = []
        while size_bytes > 0:
            length, start = self._by_size[-1]
            taken = min(length, self.footprint(size_bytes))
            self._cut(start, taken)
            pieces.append(Extent(start, min(taken, size_bytes)))
            size_bytes -= taken
        return tuple(sorted(pieces))

    def give_back(self, extents: Extents) -> None:
        """Free what `take` gave."""
        for offset, length in extents:
            self._merge(offset, self.footprint(length))

    def _cut(self, start: int, length: int) -> None:
        """Take the first `length` bytes of the gap at `start`."""
        gap = self._length_at[start]
        self._remove(start, gap)
        if gap > length:
            self._add(start + length, gap - length)

    def _merge(self, start: int, length: int) -> None:
        behind = self._length_at.get(start + length)
        if behind is not None:
            self._remove(start + length, behind)
            length += behind
        before = self._start_of.get(start)
        if before is not None:
            gap = self._length_at[before]
            self._remove(before, gap)
            start, length = before, length + gap
        self._add(start, length)

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_of[start + length] = start
        insort(self._by_size, (length, start))
        self.free_bytes += length

    def _remove(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_of[start + length]
        del self._by_size[bisect_left(self._by_size, (length, start))]
        self.free_bytes -= length
