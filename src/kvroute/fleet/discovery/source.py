"""The seam of a discovery backend, and the loop that carries its findings into the fleet."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Protocol

from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerSpec

log = logging.getLogger(__name__)

_RESTART_S = 1.0


class Discovery(Protocol):
    """A source of workers."""

    errors: int
    """Findings that could not be used, since the start."""

    def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        """Yield the full wanted set: first at once, then after each change. May end when no change can
        come. What cannot be read for the moment is logged, counted and not yielded."""
        ...


class Discoverer:
    """Runs every configured source against one fleet, each under its own name.

    `crashes` counts, by source, how often a source ended with an exception; it is then started again,
    and what it had found stays.
    """

    def __init__(self, fleet: Fleet, sources: Mapping[str, Discovery], clock: Clock) -> None:
        self.crashes: Counter[str] = Counter()
        self._fleet = fleet
        self._sources = dict(sources)
        self._clock = clock

    def errors(self) -> dict[str, int]:
        """Sets that could not be read or applied, by source."""
        return {name: source.errors + self.crashes[name] for name, source in self._sources.items()}

    async def run(self) -> None:
        """Follow all sources; returns when each has ended, which those that can change never do."""
        async with asyncio.TaskGroup() as group:
            for name, source in self._sources.items():
                group.create_task(self._follow(name, source), name=f"discovery {name}")

    async def _follow(self, name: str, source: Discovery) -> None:
        while True:
            try:
                async with aclosing(source.watch()) as found:
                    async for specs in found:
                        self._fleet.apply(name, specs)
                return
            except Exception:  # a source's trouble must not end the others
                self.crashes[name] += 1
                log.exception("discovery %s failed; starting it again", name)
            await self._clock.sleep(_RESTART_S)
