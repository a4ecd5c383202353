"""Injectable time: nothing outside this module reads the process's clocks."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Where a long-lived object gets its time from."""

    def now(self) -> float:
        """Monotonic seconds; the zero point means nothing."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; a fake clock returns when it is advanced past the end."""
        ...


class SystemClock:
    """The real one. Stateless."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
