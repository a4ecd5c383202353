"""One location of one worker, as its controller sees it: the chunks, and how far they can be believed.

LMCache numbers the operations of each location from 0 and repeats nothing. What a missing operation was can
only be learnt from a full synchronisation, in which the worker stands still and says all it holds. Until
then everything said before is forgotten and what is said from then on is believed: the map may then lack
chunks, but claims none that is gone.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from kvroute.events.controller_sync import FullSync
from kvroute.wire.lmcache_controller import ChunkHash

_KEPT: Final = 64


class Step(Enum):
    """What to do with a batch of operations."""

    APPLY = auto()
    SKIP = auto()
    """It was applied before, or a process that is gone sent it."""
    RESTART = auto()
    """The location begins anew: forget, then apply."""
    GAP = auto()
    """Operations are missing: forget, then apply."""
    FOREIGN = auto()
    """It cannot be placed: forget, and do not apply."""


class OperationSequence:
    """The numbers of one location's operations. Mutable: `judge` notes what is applied.

    `at_start`: the next batch is known to be the first one. `previous` is where the process before would
    have gone on: what it left in the sockets may arrive late.
    """

    __slots__ = ("_previous", "_recent", "expected")

    def __init__(self, *, at_start: bool, previous: int | None = None) -> None:
        self.expected = 0 if at_start else None
        """Number of the next operation; None: any."""
        self._previous = previous
        self._recent: dict[int, tuple[int, ChunkHash, ChunkHash]] = {}

    def judge(self, first: int, count: int, first_key: ChunkHash, last_key: ChunkHash) -> Step:
        """What to do with operations `first` to `first + count - 1`."""
        expected, mark = self.expected, (count, first_key, last_key)
        step = Step.APPLY
        if expected is not None and first != expected:
            if first == self._previous:
                self._previous = first + count
                return Step.SKIP
            if first > expected:
                step = Step.GAP
            elif self._recent.get(first) == mark:
                return Step.SKIP
            elif first == 0:
                step = Step.RESTART
                self._recent.clear()
            else:
                self.expected = None
                return Step.FOREIGN
        self.expected = first + count
        recent = self._recent
        recent[first] = mark
        if len(recent) > _KEPT:
            # The first batch stays: a copy of it must not look like a new beginning.
            oldest = iter(recent)
            del recent[next(oldest) or next(oldest)]
        return step


class Location:
    """Mutable throughout; changed by its controller. `keys` is what it is believed to hold."""

    __slots__ = ("keys", "name", "sequence", "sync", "whole")

    def __init__(self, name: str, *, at_start: bool, previous: int | None = None) -> None:
        self.name = name
        self.keys: set[ChunkHash] = set()
        self.sequence = OperationSequence(at_start=at_start, previous=previous)
        self.sync: FullSync | None = None
        self.whole = at_start
        """Nothing is known to be missing. False: it holds what `keys` says, and perhaps more."""
