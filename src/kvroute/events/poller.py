"""When the sockets of the workers' streams are read.

To wake the event loop for a batch costs more than to read it and take it in: a process that sleeps between
requests starts cold each time. So while batches come often the loop does not watch their sockets. They are
looked at before decisions: every few milliseconds, because to read some batches together costs much less than
to read each alone, and at once where what came last matters. Without decisions they are looked at a little
later.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from math import inf
from typing import Final

from kvroute.clock import Clock
from kvroute.loop_slices import TimeSlicer

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
