"""The seam of a discovery backend, and the loop that carries its findings into the fleet."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Container, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.options import FleetOptions
from kvroute.fleet.worker import WorkerId, WorkerSpec


@dataclass(frozen=True, slots=True)
class Judged:
    """What the fleet should take from one reading of a source."""

    specs: tuple[WorkerSpec, ...]
    """The set to apply: what the source names, and the workers that are kept."""
    kept: frozenset[WorkerId] = frozenset()
    """Workers that answer and that the source no longer names; empty: the reading is believed as it is."""
    confirmed: frozenset[WorkerId] = frozenset()
    """Workers that leave now because the source has not named them for `confirm_s`."""


class ShrinkGuard:
    """The readings of one source. Mutable: each `judge` replaces what was believed.

    A reading is doubted if it drops workers that answer and names none, or less than `1 - share` of those
    that answered. `confirm_s` 0 believes every reading.
    """

    def __init__(self, *, share: float, confirm_s: float) -> None:
        self._share = share
        self._confirm_s = confirm_s
        self._believed: dict[WorkerId, WorkerSpec] = {}
        self._missing_since: dict[WorkerId, float] = {}
        """When a reading first lacked each kept worker; a worker that is named again starts anew."""

    def judge(self, specs: Iterable[WorkerSpec], answering: Container[WorkerId], now: float) -> Judged:
        """Take one reading. `answering`: the workers whose last probe passed. O(workers)."""
        named = {spec.id: spec for spec in specs}
        standing = [spec for spec in self._believed.values() if not spec.draining and spec.id in answering]
        missing = [spec for spec in standing if spec.id not in named]
        usable = sum(not spec.draining for spec in named.values())
        is_far_smaller = not usable or usable < (1.0 - self._share) * len(standing)
        if not missing or not is_far_smaller or not self._confirm_s:
            self._missing_since.clear()
            self._believed = named
            return Judged(tuple(named.values()))
        since = {spec.id: self._missing_since.get(spec.id, now) for spec in missing}
        kept = [spec for spec in missing if now - since[spec.id] < self._confirm_s]
        self._missing_since = {spec.id: since[spec.id] for spec in kept}
        self._believed = named | {spec.id: spec for spec in kept}
        return Judged(
            tuple(self._believed.values()),
            frozenset(spec.id for spec in kept),
            frozenset(since) - self._missing_since.keys(),
        )


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


class StaticDiscovery:
    """Yields its set once. Stateless."""

    errors = 0
    is_explicit = True
    recheck_s: float | None = None

    def __init__(self, specs: tuple[WorkerSpec, ...]) -> None:
        self._specs = specs

    @classmethod
    def configured(cls, options: FleetOptions, clock: Clock) -> StaticDiscovery | None:
        """None if no worker is listed."""
        return cls(tuple(entry.spec() for entry in options.workers)) if options.workers else None

    async def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        yield self._specs
