"""Long-lived work in the background: owned, and when it fails said at once and begun again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping

from kvroute.clock import Clock

log = logging.getLogger(__name__)

_PAUSE_S = 1.0
_STEADY_S = 60.0
"""Work that has gone on for so long is well again; also the longest pause."""


class BackgroundTasks:
    """Runs work that is to end by cancellation only. Mutable: `begin` starts tasks, `aclose` ends them;
    `failures` counts by name of the work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: dict[str, tuple[str, float]] = {}
        self._failures: dict[str, int] = {}

    @property
    def failures(self) -> Mapping[str, int]:
        return self._failures

    def begin(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Call `work` for a coroutine and see it through; after it has failed, again: a second later, and
        where it keeps failing up to a minute."""
        self._failures[name] = 0
        self._tasks.append(asyncio.create_task(self._kept(name, work), name=name))

    def notes(self) -> list[str]:
        """What has failed in the last minute, a line each."""
        now = self._clock.now()
        return [
            f"{name} failed ({kind}) and was begun again"
            for name, (kind, when) in self._failed.items()
            if now - when < _STEADY_S
        ]

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _kept(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        pause_s = _PAUSE_S
        while True:
            begun = self._clock.now()
            try:
                await work()
                kind = "it ended"
                log.error("%s ended by itself; it is begun again", name)
            except Exception as error:
                kind = type(error).__name__
                log.exception("%s failed; it is begun again", name)
            self._failures[name] += 1
            now = self._clock.now()
            self._failed[name] = kind, now
            if now - begun >= _STEADY_S:
                pause_s = _PAUSE_S
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _STEADY_S)
