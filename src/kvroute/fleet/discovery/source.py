"""The seam of a discovery backend, and the loop that carries its findings into the fleet."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from kvroute.clock import Clock
from kvroute.fleet.discovery.shrink import Judged, ShrinkGuard
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerId, WorkerSpec

log = logging.getLogger(__name__)

_RESTART_S = 1.0
_RECHECKS = 6
"""Readings within `confirm_s` that must agree before a far smaller set is believed."""
_LONGEST_RECHECK_S = 5.0


class Discovery(Protocol):
    """A source of workers."""

    errors: int
    """Findings that could not be used, since the start."""

    is_explicit: bool
    """A person writes the set, so a far smaller one is a decision. False: it may be the source's error."""

    recheck_s: float | None
    """Set by the Discoverer before it asks for the next set. A number: the last set is doubted, so wait for
    so long, read everything again and yield the result even if it is the same. None: go on as usual."""

    def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        """Yield the full wanted set: first at once, then after each change. May end when no change can
        come. What cannot be read for the moment is logged, counted and not yielded."""
        ...


@dataclass(frozen=True, slots=True)
class ShrinkLimits:
    """See `fleet.shrink_share` and `fleet.shrink_confirm_s`."""

    share: float = 0.5
    confirm_s: float = 30.0


class Discoverer:
    """Runs every configured source against one fleet, each under its own name.

    `crashes` counts, by source, how often a source ended with an exception; it is then started again,
    and what it had found stays. `shrinks` counts the sets that were held back because they named far fewer
    workers than answer (see `shrink.py`).
    """

    def __init__(
        self,
        fleet: Fleet,
        sources: Mapping[str, Discovery],
        clock: Clock,
        limits: ShrinkLimits | None = None,
    ) -> None:
        self.crashes: Counter[str] = Counter()
        self.shrinks: Counter[str] = Counter()
        self._fleet = fleet
        self._sources = dict(sources)
        self._clock = clock
        self._limits = limits or ShrinkLimits()
        doubted = [name for name, source in self._sources.items() if not source.is_explicit]
        self._guards = {
            name: ShrinkGuard(share=self._limits.share, confirm_s=self._limits.confirm_s) for name in doubted
        }
        self._kept: dict[str, frozenset[WorkerId]] = dict.fromkeys(doubted, frozenset())

    def errors(self) -> dict[str, int]:
        """Sets that could not be read or applied, by source."""
        return {name: source.errors + self.crashes[name] for name, source in self._sources.items()}

    def kept(self) -> dict[str, int]:
        """How many workers stay although a source no longer names them, by source; 0 where nothing is
        doubted. Explicit sources are not in it."""
        return {name: len(kept) for name, kept in self._kept.items()}

    def notes(self) -> list[str]:
        """One sentence for each source whose last set is held back."""
        return [
            f"{name} no longer names {len(kept)} workers that answer: they stay until it has not named them "
            f"for {self._limits.confirm_s:g} s (fleet.shrink_confirm_s)."
            for name, kept in self._kept.items()
            if kept
        ]

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
                        self._fleet.apply(name, self._judged(name, source, specs))
                return
            except Exception:  # a source's trouble must not end the others
                self.crashes[name] += 1
                log.exception("discovery %s failed; starting it again", name)
            await self._clock.sleep(_RESTART_S)

    def _judged(self, name: str, source: Discovery, specs: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
        guard = self._guards.get(name)
        if guard is None:
            return specs
        answering = {worker.id for worker in self._fleet.workers() if worker.is_routable}
        judged = guard.judge(specs, answering, self._clock.now())
        self._note(name, len(specs), judged)
        pause_s = min(_LONGEST_RECHECK_S, self._limits.confirm_s / _RECHECKS)
        source.recheck_s = pause_s if judged.kept else None
        return judged.specs

    def _note(self, name: str, named: int, judged: Judged) -> None:
        """Log what has changed, and keep it for metrics and `/ready`."""
        before, self._kept[name] = self._kept[name], judged.kept
        if judged.kept and not before:
            self.shrinks[name] += 1
            log.warning(
                "discovery %s names %d workers and no longer %d that answer: these stay until it has not"
                " named them for %g s (fleet.shrink_confirm_s), or they stop answering",
                name,
                named,
                len(judged.kept),
                self._limits.confirm_s,
            )
        elif before and not judged.kept:
            if judged.confirmed:
                log.warning(
                    "discovery %s has not named %d workers for %g s: they leave",
                    name,
                    len(judged.confirmed),
                    self._limits.confirm_s,
                )
            else:
                log.info("discovery %s: its set of %d workers is no longer doubted", name, named)
