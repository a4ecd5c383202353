"""A deadline that moves often and is rarely reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_NEVER = float("inf")


def _nothing() -> None:
    """What a closed deadline would call."""


class Deadline:
    """Calls `expired` once when the time last `set` has come.

    Moving it later, or clearing it, costs a store: the loop's timer stays and looks again when it
    fires. So a connection keeps one timer over many requests instead of one per wait. Mutable;
    changed by its owner on the loop.
    """

    __slots__ = ("_at", "_expired", "_loop", "_timer", "_timer_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._at = _NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER

    def set(self, after_s: float) -> None:
        """Expire `after_s` seconds from now, in place of what was set before."""
        self._at = at = self._loop.time() + after_s
        if at < self._timer_at:
            self._arm(at)

    def clear(self) -> None:
        """Never expire, until set again."""
        self._at = _NEVER

    def close(self) -> None:
        """Clear it for good and take the timer off the loop."""
        self._at = self._timer_at = _NEVER
        self._expired = _nothing  # the owner's bound method would be a reference cycle
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._fired)

    def _fired(self) -> None:
        self._timer = None
        self._timer_at = at = self._at
        if at == _NEVER:
            return
        if at > self._loop.time():
            self._arm(at)
            return
        self._at = self._timer_at = _NEVER
        self._expired()
