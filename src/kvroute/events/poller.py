"""When KV events are read and applied: a shared time slice per event-loop iteration, and the socket poller.

A slice for each stream would let 64 busy streams hold the event loop for 64 slices in a row. So all streams
share one slice per iteration; when it is used up, the tasks queue, first come, first served.

While batches arrive often, the event loop does not watch the sockets of the streams: waking the loop for a
batch costs more than applying the batch, because a process that sleeps between requests runs with cold
caches. `SocketPoller` polls the sockets before routing decisions and from a timer instead.
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
    """One time slice per iteration of one event loop. Mutable: `exhausted` and `yield_to_loop` start slices.

    Work comes in small steps; before each step:

        if slicer.exhausted():
            await slicer.yield_to_loop()
    """

    def __init__(self, clock: Clock, slice_ms: float) -> None:
        self._clock = clock
        self._slice_s = slice_ms / 1000
        self._started: float | None = None
        """When the slice of this iteration started; None before the iteration's first step."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._resumed: asyncio.Future[None] | None = None
        """The future of the task that gets the next slice; None once that task runs."""

    def exhausted(self) -> bool:
        """Is the slice of this iteration used up, or do other tasks wait for one? If not, a slice runs
        now."""
        if self._started is not None:
            return self._clock.now() - self._started >= self._slice_s
        if self._resumed is not None or self._waiting:
            return True
        self._start()
        return False

    @property
    def deadline(self) -> float:
        """When the slice ends, by the clock; a full slice from now if none has started."""
        return (self._clock.now() if self._started is None else self._started) + self._slice_s

    async def yield_to_loop(self) -> None:
        """Wait for a slice in a later iteration, behind the tasks that wait already. A slice runs on
        return."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        if self._resumed is None:
            self._resume_next()
        try:
            if mine.done():
                await asyncio.sleep(0)  # awaiting a future that is done does not yield to the loop
            await mine
        except asyncio.CancelledError:
            if self._resumed is mine:
                self._resumed = None
                self._resume_next()
            elif mine in self._waiting:
                self._waiting.remove(mine)
            raise
        self._resumed = None
        self._start()

    def _start(self) -> None:
        self._started = self._clock.now()
        # Runs in the next iteration, before every callback that is scheduled from now on.
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._started = None
        if self._resumed is None:
            self._resume_next()

    def _resume_next(self) -> None:
        """Give the next slice to the task that has waited longest."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                self._resumed = future
                future.set_result(None)
                return


TIMER_S: Final = 0.02
"""The longest time that a batch stays unread while the loop does not watch the sockets."""

FREQUENT_BATCHES: Final = 4
"""After this many batches less than `TIMER_S` apart, the loop stops watching the sockets. A single request
causes two or three batches, and to stop watching and start again costs as much as three wake-ups."""

MAX_STALENESS_S: Final = 0.01
"""Routing may use a map up to 10 ms old unless a socket is known to have more data. Reading several batches
together costs much less than reading each alone."""

MOST_BEHIND_S: Final = 1.0
"""A stream that holds messages for longer is being repaired, and its map is not used meanwhile."""

ReadSocket = Callable[[float], bool | None]
"""Reads one socket without waiting, and applies what arrived until this time of the clock. True if there may
be more data, None if there was none."""


class SocketPoller:
    """Decides when the sockets of all streams of one event loop are read.

    Mutable: `add` and `remove` change the sockets. Whether the loop watches them depends on how often batches
    arrive.
    """

    def __init__(self, clock: Clock, slice_ms: float, slicer: TimeSlicer) -> None:
        """`slice_ms` is the longest time that one `poll` may take."""
        self.clock = clock
        self._slice_s = slice_ms / 1000
        self._slicer = slicer
        self._readers: dict[int, ReadSocket] = {}
        self._poll = select.poll()
        self._timer: asyncio.TimerHandle | None = None
        """While the timer runs, the loop watches none of the sockets."""
        self._unfinished: set[int] = set()
        """Sockets with unread data: the loop watches them and reads them within its time slices."""
        self._polled_at = self._last_batch_at = -inf
        self._short_pauses = 0
        """Consecutive pauses between batches of less than `TIMER_S`."""
        self._got_data = False
        """Whether data arrived since the timer was set."""
        self._behind: dict[object, float] = {}
        """Readers that hold messages that are not applied yet, and since when."""

    def add(self, descriptor: int, read: ReadSocket) -> None:
        """Read this socket with `read` from now on."""
        self._readers[descriptor] = read
        self._poll.register(descriptor, select.POLLIN)
        if self._timer is None:
            self._watch(descriptor)

    def remove(self, descriptor: int) -> None:
        """Stop reading this socket; call this before closing it. Does nothing for an unknown descriptor."""
        if self._readers.pop(descriptor, None) is None:
            return
        self._poll.unregister(descriptor)
        self._unfinished.discard(descriptor)
        if self._timer is None:
            asyncio.get_running_loop().remove_reader(descriptor)
        elif not self._readers:
            self._timer.cancel()
            self._timer = None

    def set_behind(self, reader: object, is_behind: bool) -> None:
        """Whether `reader` holds messages that have arrived but are not applied yet."""
        if is_behind:
            self._behind.setdefault(reader, self.clock.now())
        else:
            self._behind.pop(reader, None)

    def _is_level(self, now: float) -> bool:
        """Is everything applied that has arrived? A reader that is behind for long is being repaired."""
        return not self._behind or now - max(self._behind.values()) > MOST_BEHIND_S

    def poll(self, force: bool = True) -> bool:
        """Read and apply what has arrived, for at most `slice_ms`. True if nothing that has arrived is left.

        Without `force`, does nothing within `MAX_STALENESS_S` of the last poll. One system call if there is
        no data.
        """
        now = self.clock.now()
        if self._unfinished or (not force and now - self._polled_at < MAX_STALENESS_S):
            return False
        self._polled_at = now
        ready = self._poll.poll(0)
        if not ready:
            return self._is_level(now)
        self._last_batch_at = now
        self._got_data = True
        deadline = now + self._slice_s
        for index, (descriptor, _) in enumerate(ready):
            read = self._readers.get(descriptor)
            if read is not None and ((index and self.clock.now() >= deadline) or read(deadline)):
                self._unfinished.add(descriptor)
        if self._unfinished:
            self._watch_all()
            return False
        return self._is_level(now)

    # Watching by the loop, or by a timer

    def _watch(self, descriptor: int) -> None:
        asyncio.get_running_loop().add_reader(descriptor, self._on_readable, descriptor)

    def _watch_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            for descriptor in self._readers:
                self._watch(descriptor)

    def _on_readable(self, descriptor: int) -> None:
        if self._slicer.exhausted():
            return  # the loop calls again in its next iteration
        more = self._readers[descriptor](self._slicer.deadline)
        if more:
            self._unfinished.add(descriptor)
            return
        self._unfinished.discard(descriptor)
        if more is None:
            return
        last, self._last_batch_at = self._last_batch_at, self.clock.now()
        self._short_pauses = self._short_pauses + 1 if self._last_batch_at - last < TIMER_S else 0
        if self._short_pauses >= FREQUENT_BATCHES and not self._unfinished and self._readers:
            loop = asyncio.get_running_loop()
            for reader in self._readers:
                loop.remove_reader(reader)
            self._got_data = False
            self._timer = loop.call_later(TIMER_S, self._on_timer)

    def _on_timer(self) -> None:
        """Poll, in case no routing decision has; let the loop watch again when no data arrives any more."""
        self.poll(force=False)
        if self._timer is None:
            return
        if self._got_data:
            self._got_data = False
            wait_s = self._polled_at + TIMER_S - self.clock.now()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)
        else:
            self._watch_all()
