"""Client connections that wait for bytes, and until when.

One queue per kind of wait, and one timer per queue: all of a queue's waits take equally long, so the oldest
one ends first. A connection whose request arrives whole never enters a queue for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

_BATCH = 64
"""Waits that end in one round of the loop: to close a connection takes some 30 us, and 10,000 of them may
have begun together."""


class Waiter(Protocol):
    """A connection in a queue."""

    def wait_ended(self, queue: WaitQueue) -> None:
        """The wait is over and the connection is in the queue no more. May enter a queue again."""
        ...


class WaitQueue:
    """Connections that wait for at most `limit_s`; 0 waits for ever, and keeps nobody.

    Mutable: `add` and `discard`, each about 0.1 us, on the loop; the timer takes out what is over.
    """

    __slots__ = ("_limit_s", "_loop", "_since", "_timer", "name")

    def __init__(
        self, name: str, limit_s: float, loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> None:
        """`loop` finds the event loop at the first wait; by default the running one."""
        self.name = name
        self._limit_s = limit_s
        self._loop = loop or asyncio.get_running_loop
        self._since: dict[Waiter, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._since)

    def add(self, waiter: Waiter) -> None:
        """Its wait begins now. It must not be in the queue."""
        if self._limit_s <= 0:
            return
        loop = self._loop()
        self._since[waiter] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._limit_s, self._fired)

    def discard(self, waiter: Waiter) -> None:
        """It waits no more, if it did."""
        self._since.pop(waiter, None)

    def _fired(self) -> None:
        self._timer = None
        loop, since = self._loop(), self._since
        now = loop.time()
        over: list[Waiter] = []
        for waiter, began in since.items():
            if began + self._limit_s > now or len(over) == _BATCH:
                break
            over.append(waiter)
        for waiter in over:
            del since[waiter]
        if since:  # before anything is called that could fail
            oldest = next(iter(since.values()))
            self._timer = loop.call_later(max(0.0, oldest + self._limit_s - now), self._fired)
        for waiter in over:
            waiter.wait_ended(self)
