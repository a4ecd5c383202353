"""Coalesces the writes of one iteration of the event loop."""

from __future__ import annotations

import asyncio

_MAX_WAITING = 16
"""Writes that wait for the end of an iteration. One more flushes them, so that the first does not wait for
more than about 1 ms of work for other requests."""

_SAMPLE_EVERY = 16
"""Number of immediate writes after which the writes of one iteration are counted again."""

_MAX_SINGLE_WRITES = 4
"""Consecutive iterations with one write each, after which writes go out immediately."""


class Outbox:
    """Holds writes until the event loop has processed all sockets of its current iteration.

    Each write wakes the process at the other end, which sleeps again before the next write. Several writes
    directly after each other wake it once. A caller that writes to a transport itself, or closes it, after
    `send` in the same iteration calls `flush` first; `flushes` shows whether that is still necessary.
    Mutable, on one event loop only.
    """

    # To wait for the end of an iteration makes the loop ask the kernel once more. So writes wait only while
    # iterations have several writes; one iteration in some is sampled to notice a change. Writes to a
    # transport that is closed meanwhile are dropped, as the transport itself does.

    __slots__ = ("_coalesces", "_count", "_is_scheduled", "_single_writes", "_waiting", "flushes")

    def __init__(self) -> None:
        self.flushes = 0
        """How many times waiting writes were written."""
        self._waiting: list[tuple[asyncio.Transport, bytes, bytes | memoryview]] = []
        self._coalesces = False
        self._is_scheduled = False
        """`_end_iteration` is scheduled."""
        self._count = 0
        """Writes of the iteration whose end is scheduled; otherwise immediate writes since the last
        sample."""
        self._single_writes = 0
        """Consecutive iterations with one write."""

    def send(self, transport: asyncio.Transport, data: bytes, body: bytes | memoryview = b"") -> None:
        """Write `data` and then `body`, without joining them, by the end of this iteration.

        Needs a running event loop.
        """
        self._count += 1
        if self._coalesces:
            waiting = self._waiting
            waiting.append((transport, data, body))
            if not self._is_scheduled:
                self._schedule()
            elif len(waiting) > _MAX_WAITING:
                self.flush()
            return
        write_now(transport, data, body)
        if self._count > _SAMPLE_EVERY and not self._is_scheduled:
            self._schedule()

    def flush(self) -> None:
        """Write everything that waits."""
        waiting = self._waiting
        if not waiting:
            return
        self._waiting = []
        self.flushes += 1
        for transport, data, body in waiting:
            if not transport.is_closing():
                write_now(transport, data, body)

    def _schedule(self) -> None:
        self._is_scheduled, self._count = True, 1
        asyncio.get_running_loop().call_soon(self._end_iteration)

    def _end_iteration(self) -> None:
        self._is_scheduled = False
        if self._count > 1:
            self._coalesces, self._single_writes = True, 0
        else:
            self._single_writes += 1
            self._coalesces = self._coalesces and self._single_writes < _MAX_SINGLE_WRITES
        self._count = 0
        self.flush()


def write_now(transport: asyncio.Transport, data: bytes, body: bytes | memoryview = b"") -> None:
    """Write `data` and then `body`, without joining them."""
    if body:
        transport.writelines((data, body))
    else:
        transport.write(data)
