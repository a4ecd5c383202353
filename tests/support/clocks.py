"""Clocks for tests: each has the methods of `kvroute.clock.Clock`.

ManualClock      shows the time that the test sets; sleeping is an error
JumpingClock     a sleep moves the time and ends in the next iteration of the event loop
AdvancingClock   a sleep ends when the test advances the time past its end
TickingClock     each reading moves the time; a sleep takes real time
QuickClock       the real time; long sleeps are cut short
SteppedClock     the real time; the test sets the wall clock forward and back
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from kvroute.clock import SystemClock

EPOCH = 1.7e9
"""What `wall` of a manual clock shows when `now` shows 0, in seconds since the Unix epoch."""


class ManualClock:
    """Shows `time`, which the test sets."""

    def __init__(self, time: float = 100.0, *, epoch: float = EPOCH) -> None:
        self.time = time
        self.epoch = epoch

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.epoch + self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"a sleep of {seconds} s, which this test does not expect")


class JumpingClock(ManualClock):
    """Time moves in `sleep` only, by the length of the sleep and by `late_s`.

    `slept` lists the sleeps; `on_sleep` is called at the beginning of each. Sleeps of several tasks overlap.
    """

    def __init__(
        self, time: float = 0.0, *, late_s: float = 0.0, on_sleep: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(time)
        self.late_s = late_s
        self.slept: list[float] = []
        self._on_sleep = on_sleep

    async def sleep(self, seconds: float) -> None:
        self._on_sleep()
        self.slept.append(seconds)
        end = self.time + seconds + self.late_s
        await asyncio.sleep(0)
        self.time = max(self.time, end)


class AdvancingClock(ManualClock):
    """Time passes in `advance` only; tasks that sleep wake in the order in which their sleeps end."""

    def __init__(self, time: float = 1000.0) -> None:
        super().__init__(time)
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    async def sleep(self, seconds: float) -> None:
        self._count += 1
        entry = (self.time + seconds, self._count, asyncio.get_running_loop().create_future())
        self._sleepers.append(entry)
        try:
            await entry[2]
        finally:
            self._sleepers.remove(entry)

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass; each task that wakes runs until it sleeps again."""
        end = self.time + seconds
        await self.settle()
        while due := sorted(s for s in self._sleepers if s[0] <= end and not s[2].done()):
            self.time = max(self.time, due[0][0])
            due[0][2].set_result(None)
            await self.settle()
        self.time = end

    async def settle(self) -> None:
        """Run the event loop for 60 iterations: enough for a probe through httpx's mock transport."""
        for _ in range(60):
            await asyncio.sleep(0)


class TickingClock(SystemClock):
    """Each reading of `now` moves the time by `step_s`, as if every step of work took that long."""

    def __init__(self, step_s: float) -> None:
        self.time = 0.0
        self.step_s = step_s

    def now(self) -> float:  # type: ignore[override]
        self.time += self.step_s
        return self.time


class QuickClock(SystemClock):
    """The real time plus `ahead_s`. A sleep takes at most `longest_sleep_s`; `slept` lists all, uncut."""

    def __init__(self, longest_sleep_s: float = math.inf) -> None:
        self.longest_sleep_s = longest_sleep_s
        self.ahead_s = 0.0
        self.slept: list[float] = []

    def now(self) -> float:  # type: ignore[override]
        return SystemClock.now() + self.ahead_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(min(seconds, self.longest_sleep_s))


class SteppedClock(SystemClock):
    """The real time, but the wall clock is `ahead_s` seconds ahead. Mutable: the test sets `ahead_s`."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall(self) -> float:  # type: ignore[override]
        return SystemClock.wall() + self.ahead_s
