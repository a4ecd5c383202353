"""Injectable time: only this module reads the system's clocks."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The source of time of long-lived objects; tests replace it by a fake."""

    def now(self) -> float:
        """Monotonic seconds since an arbitrary point."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; with a fake clock, until a test has advanced it by `seconds`."""
        ...


class SystemClock:
    """The system's clocks. Stateless."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
