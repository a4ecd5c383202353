"""When KV events are read and applied: one time slice per iteration of the event loop, and the socket poller.

A slice per stream would let 64 busy streams hold the event loop for 64 slices in a row. So all streams share
one slice per iteration; when it is used up, the others queue, first come, first served.

While batches arrive often, the event loop does not watch the sockets of the streams: to wake the loop for a
batch costs more than to apply the batch. `SocketPoller` polls the sockets before routing decisions and from a
timer instead.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final

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


PAUSE_S: Final = 0.02
"""The longest that a batch may stay unread while batches come often: with less than that between them."""

OFTEN: Final = 4
"""Batches with less than `PAUSE_S` between them are often. One request has two or three: to stop watching and
to begin again costs as much as being woken for three."""

LOOK_S: Final = 0.01
"""As long ago what a decision is made on may have been read, where nothing says that there is more."""

Read = Callable[[float], bool | None]
"""Reads one socket without waiting, and takes in what came until this time of the clock. True if there may
be more, None if there was nothing."""


class SocketPoller:
    """The sockets of all streams of one event loop. Mutable: `add` and `remove`; whether the loop watches
    them changes with what comes."""

    def __init__(self, clock: Clock, slice_ms: float, turns: TimeSlicer) -> None:
        """`slice_ms` is the longest that a look may take."""
        self.clock = clock
        self._slice_s = slice_ms / 1000
        self._turns = turns
        self._reads: dict[int, Read] = {}
        self._poll = select.poll()
        self._timer: asyncio.TimerHandle | None = None
        """While it runs the loop watches none of them."""
        self._behind: set[int] = set()
        """Those of which something was left: the loop watches them and reads them in its turns."""
        self._looked = self._last = -inf
        """When something came at last."""
        self._short = 0
        """Pauses of less than `PAUSE_S` in a row."""
        self._any = False
        """Something has come since the timer was set."""

    def add(self, descriptor: int, read: Read) -> None:
        self._reads[descriptor] = read
        self._poll.register(descriptor, select.POLLIN)
        if self._timer is None:
            self._watch(descriptor)

    def remove(self, descriptor: int) -> None:
        """To be called before it is closed; nothing happens if it is not there."""
        if self._reads.pop(descriptor, None) is None:
            return
        self._poll.unregister(descriptor)
        self._behind.discard(descriptor)
        if self._timer is None:
            asyncio.get_running_loop().remove_reader(descriptor)
        elif not self._reads:
            self._timer.cancel()
            self._timer = None

    def look(self, at_once: bool = True) -> bool:
        """Take in what has come, unless that would take long; what is not wanted `at_once`, only `LOOK_S`
        after the last look. True if nothing that had come is left. One system call if there is nothing."""
        now = self.clock.now()
        if self._behind or (not at_once and now - self._looked < LOOK_S):
            return False
        self._looked = now
        ready = self._poll.poll(0)
        if not ready:
            return True
        self._last = now
        self._any = True
        until = now + self._slice_s
        for place, (descriptor, _) in enumerate(ready):
            read = self._reads.get(descriptor)
            if read is not None and ((place and self.clock.now() >= until) or read(until)):
                self._behind.add(descriptor)
        if self._behind:
            self._watch_all()
            return False
        return True

    # Who sees that something has come

    def _watch(self, descriptor: int) -> None:
        asyncio.get_running_loop().add_reader(descriptor, self._woken, descriptor)

    def _watch_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            for descriptor in self._reads:
                self._watch(descriptor)

    def _woken(self, descriptor: int) -> None:
        if self._turns.are_over():
            return  # the loop comes back
        more = self._reads[descriptor](self._turns.until)
        if more:
            self._behind.add(descriptor)
            return
        self._behind.discard(descriptor)
        if more is None:
            return
        last, self._last = self._last, self.clock.now()
        self._short = self._short + 1 if self._last - last < PAUSE_S else 0
        if self._short >= OFTEN and not self._behind and self._reads:
            loop = asyncio.get_running_loop()
            for each in self._reads:
                loop.remove_reader(each)
            self._any = False
            self._timer = loop.call_later(PAUSE_S, self._late)

    def _late(self) -> None:
        """Look, as nobody may have; where nothing comes any more, the loop watches again."""
        self.look(at_once=False)
        if self._timer is None:
            return
        if self._any:
            self._any = False
            wait_s = self._looked + PAUSE_S - self.clock.now()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._late)
        else:
            self._watch_all()
