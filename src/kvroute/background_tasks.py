"""Long-lived background tasks: owned, and restarted with a log line when they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping

from kvroute.clock import Clock

log = logging.getLogger(__name__)

_PAUSE_S = 1.0
_STABLE_S = 60.0
"""After this long without a failure the pause is `_PAUSE_S` again; also the longest pause."""


class BackgroundTasks:
    """Runs work that should end only by cancellation, and restarts it after a failure.

    Mutable: `start` adds tasks, `aclose` cancels them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: dict[str, tuple[str, float]] = {}
        self._failures: dict[str, int] = {}

    @property
    def failures(self) -> Mapping[str, int]:
        """Failures since the start, by the name of the work."""
        return self._failures

    def start(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run the coroutine that `work` returns; after a failure call `work` again.

        The pause before a restart is one second, and doubles up to a minute while the work keeps failing.
        """
        self._failures[name] = 0
        self._tasks.append(asyncio.create_task(self._run_forever(name, work), name=name))

    def notes(self) -> list[str]:
        """Notes for `/ready`: one line for each work that failed in the last minute."""
        now = self._clock.now()
        return [
            f"{name} failed ({kind}) and was restarted"
            for name, (kind, when) in self._failed.items()
            if now - when < _STABLE_S
        ]

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _run_forever(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        pause_s = _PAUSE_S
        while True:
            started = self._clock.now()
            try:
                await work()
                kind = "it ended"
                log.error("%s ended unexpectedly; it is restarted", name)
            except Exception as error:
                kind = type(error).__name__
                log.exception("%s failed; it is restarted", name)
            self._failures[name] += 1
            now = self._clock.now()
            self._failed[name] = kind, now
            if now - started >= _STABLE_S:
                pause_s = _PAUSE_S
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _STABLE_S)
