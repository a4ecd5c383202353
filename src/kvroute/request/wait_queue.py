"""Waits of connections and streams that end by a timeout.

There is one queue for each kind of wait, with one timer: all waits of a queue have the same limit, so the
oldest one expires first. A connection whose request arrives whole never enters the queues for heads and
bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

_BATCH = 64
"""Waits that expire in one iteration of the event loop. To close a connection takes about 30 us, and 10,000
waits may have started together."""


class Waiter(Protocol):
    """A connection in a queue."""

    def wait_expired(self, queue: WaitQueue) -> None:
        """The wait expired, and the connection has left the queue. It may enter a queue again."""
        ...


class WaitQueue:
    """Connections that wait for at most `limit_s`; with 0 there is no limit, and the queue stays empty.

    Mutable, on the event loop: `add` and `discard` (about 0.1 us each), and the timer, which removes expired
    waits.
    """

    __slots__ = ("_limit_s", "_loop", "_since", "_timer", "name")

    def __init__(
        self, name: str, limit_s: float, loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> None:
        """`loop` returns the event loop; by default the running one."""
        self.name = name
        self._limit_s = limit_s
        self._loop = loop or asyncio.get_running_loop
        self._since: dict[Waiter, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._since)

    def add(self, waiter: Waiter) -> None:
        """Start a wait of `waiter`, which must not be in the queue."""
        if self._limit_s <= 0:
            return
        loop = self._loop()
        self._since[waiter] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._limit_s, self._fired)

    def discard(self, waiter: Waiter) -> None:
        """End the wait of `waiter`, if it has one."""
        self._since.pop(waiter, None)

    def _fired(self) -> None:
        self._timer = None
        loop, since = self._loop(), self._since
        now = loop.time()
        expired: list[Waiter] = []
        for waiter, started in since.items():
            if started + self._limit_s > now or len(expired) == _BATCH:
                break
            expired.append(waiter)
        for waiter in expired:
            del since[waiter]
        if since:  # set the timer before the callbacks, which may raise
            oldest = next(iter(since.values()))
            self._timer = loop.call_later(max(0.0, oldest + self._limit_s - now), self._fired)
        for waiter in expired:
            waiter.wait_expired(self)
