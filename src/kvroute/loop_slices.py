"""One slice of every turn of the event loop, shared by all who read events.

A slice of its own for each of 64 streams would let them hold the loop for 64 slices before it looks at its
sockets again. So they share one: what is left of a turn's slice goes to whoever comes, and when it is over
the others wait in line, one slice and one of them in each turn.
"""

from __future__ import annotations

import asyncio
from collections import deque

from kvroute.clock import Clock


class TimeSlicer:
    """Mutable; for one event loop at a time. Work comes in small pieces; before each of them:

    if turns.are_over():
        await turns.next()
    """

    def __init__(self, clock: Clock, slice_ms: float) -> None:
        self._clock = clock
        self._slice_s = slice_ms / 1000
        self._began: float | None = None
        """When this turn's first piece of work did; None before it."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._called: asyncio.Future[None] | None = None
        """Who has been told to go on and has not yet: the coming turn is theirs."""

    def are_over(self) -> bool:
        """Has this turn's slice been used up, or is the turn somebody else's? Else it has begun."""
        if self._began is not None:
            return self._clock.now() - self._began >= self._slice_s
        if self._called is not None or self._waiting:
            return True
        self._begin()
        return False

    @property
    def until(self) -> float:
        """When this turn's slice is used up, if it has begun; by the clock."""
        return (self._clock.now() if self._began is None else self._began) + self._slice_s

    async def next(self) -> None:
        """Wait in line for a turn of the loop with a slice of its own; it has begun when this returns."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        if self._called is None:
            self._call()
        try:
            if mine.done():
                await asyncio.sleep(0)  # to wait for what is done would be no wait
            await mine
        except asyncio.CancelledError:
            if self._called is mine:
                self._called = None
                self._call()
            elif mine in self._waiting:
                self._waiting.remove(mine)
            raise
        self._called = None
        self._begin()

    def _begin(self) -> None:
        self._began = self._clock.now()
        # Runs in the next turn, and before what is made ready from now on.
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._began = None
        if self._called is None:
            self._call()

    def _call(self) -> None:
        """Tell the first in line to go on in the coming turn."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                self._called = first
                first.set_result(None)
                return
