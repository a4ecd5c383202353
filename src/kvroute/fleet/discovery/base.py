"""The interface of a discovery source, and the task that applies its sets of workers to the fleet."""

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
class GuardedSet:
    """The result of `ShrinkGuard.check` for one set of workers from a source."""

    specs: tuple[WorkerSpec, ...]
    """The set to apply: the workers that the source names, and the kept ones."""
    kept: frozenset[WorkerId] = frozenset()
    """Workers that answer although the source no longer names them; empty if the set is accepted."""
    confirmed: frozenset[WorkerId] = frozenset()
    """Workers that leave now because the source has not named them for `confirm_s`."""


class ShrinkGuard:
    """Keeps workers that answer while a source suddenly names far fewer workers.

    A set is suspect if it lacks workers that answer, and is empty or smaller than `1 - share` of those that
    answer. `confirm_s` 0 accepts every set. Mutable: each `check` replaces the accepted set.
    """

    def __init__(self, *, share: float, confirm_s: float) -> None:
        self._share = share
        self._confirm_s = confirm_s
        self._accepted: dict[WorkerId, WorkerSpec] = {}
        self._missing_since: dict[WorkerId, float] = {}
        """When a set first lacked each kept worker; removed when a set names the worker again."""

    def check(self, specs: Iterable[WorkerSpec], answering: Container[WorkerId], now: float) -> GuardedSet:
        """Check the source's current set. `answering`: workers whose last probe passed. O(workers)."""
        named = {spec.id: spec for spec in specs}
        serving = [spec for spec in self._accepted.values() if not spec.draining and spec.id in answering]
        missing = [spec for spec in serving if spec.id not in named]
        usable = sum(not spec.draining for spec in named.values())
        is_far_smaller = not usable or usable < (1.0 - self._share) * len(serving)
        if not missing or not is_far_smaller or not self._confirm_s:
            self._missing_since.clear()
            self._accepted = named
            return GuardedSet(tuple(named.values()))
        since = {spec.id: self._missing_since.get(spec.id, now) for spec in missing}
        kept = [spec for spec in missing if now - since[spec.id] < self._confirm_s]
        self._missing_since = {spec.id: since[spec.id] for spec in kept}
        self._accepted = named | {spec.id: spec for spec in kept}
        return GuardedSet(
            tuple(self._accepted.values()),
            frozenset(spec.id for spec in kept),
            frozenset(since) - self._missing_since.keys(),
        )


log = logging.getLogger(__name__)

_RESTART_S = 1.0
_RECHECKS = 6
"""A suspect set is read at least this number of times within `confirm_s`."""
_LONGEST_RECHECK_S = 5.0


class Discovery(Protocol):
    """A source of workers."""

    errors: int
    """Failed reads and unusable entries since the start."""

    is_explicit: bool
    """True if a person writes the set, so that a far smaller set is intended; False if it may be an error."""

    recheck_s: float | None
    """Set by the Discoverer before it requests the next set. None: normal operation. A number: the last set
    is suspect; wait for that number of seconds, read everything again, and yield even an unchanged set."""

    def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        """Yield the full set of workers, immediately and after each change; may end if it cannot change.

        A failed read is logged and counted; it yields nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class ShrinkLimits:
    """See `fleet.shrink_share` and `fleet.shrink_confirm_s`."""

    share: float = 0.5
    confirm_s: float = 30.0


class Discoverer:
    """Runs every configured source and applies its sets to the fleet.

    `crashes` counts by source how often a source raised an exception; the source is then restarted, and its
    workers stay. `shrinks` counts by source the suspect sets (see `ShrinkGuard`).
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
        guarded = [name for name, source in self._sources.items() if not source.is_explicit]
        self._guards = {
            name: ShrinkGuard(share=self._limits.share, confirm_s=self._limits.confirm_s) for name in guarded
        }
        self._kept: dict[str, frozenset[WorkerId]] = dict.fromkeys(guarded, frozenset())

    def errors(self) -> dict[str, int]:
        """Number of failed reads, unusable entries and crashes, by source."""
        return {name: source.errors + self.crashes[name] for name, source in self._sources.items()}

    def describe(self) -> dict[str, dict[str, int]]:
        """These numbers as JSON values."""
        return {"errors": self.errors(), "kept": self.kept(), "shrinks": dict(self.shrinks)}

    def kept(self) -> dict[str, int]:
        """Number of workers that stay although their source no longer names them, by source.

        Explicit sources are not included.
        """
        return {name: len(kept) for name, kept in self._kept.items()}

    def notes(self) -> list[str]:
        """One sentence for each source whose last set is suspect."""
        return [
            f"{name} no longer names {len(kept)} workers that answer: they leave if it does not name them "
            f"for {self._limits.confirm_s:g} s (fleet.shrink_confirm_s)."
            for name, kept in self._kept.items()
            if kept
        ]

    async def run(self) -> None:
        """Run all sources until every `watch` has ended. A source that can change never ends."""
        async with asyncio.TaskGroup() as group:
            for name, source in self._sources.items():
                group.create_task(self._run_source(name, source), name=f"discovery {name}")

    async def _run_source(self, name: str, source: Discovery) -> None:
        while True:
            try:
                async with aclosing(source.watch()) as spec_sets:
                    async for specs in spec_sets:
                        self._fleet.apply(name, self._guarded(name, source, specs))
                return
            except Exception:  # an error in one source must not end the others
                self.crashes[name] += 1
                log.exception("discovery %s failed; restarting it", name)
            await self._clock.sleep(_RESTART_S)

    def _guarded(self, name: str, source: Discovery, specs: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
        guard = self._guards.get(name)
        if guard is None:
            return specs
        answering = {worker.id for worker in self._fleet.workers() if worker.is_routable}
        result = guard.check(specs, answering, self._clock.now())
        self._record(name, len(specs), result)
        pause_s = min(_LONGEST_RECHECK_S, self._limits.confirm_s / _RECHECKS)
        source.recheck_s = pause_s if result.kept else None
        return result.specs

    def _record(self, name: str, named: int, result: GuardedSet) -> None:
        """Log a change of the kept workers, and store them for metrics and `/ready`."""
        previously_kept, self._kept[name] = self._kept[name], result.kept
        if result.kept and not previously_kept:
            self.shrinks[name] += 1
            log.warning(
                "discovery %s names %d workers and omits %d that answer: these stay until it has omitted them"
                " for %g s (fleet.shrink_confirm_s) or they stop answering",
                name,
                named,
                len(result.kept),
                self._limits.confirm_s,
            )
        elif previously_kept and not result.kept:
            if result.confirmed:
                log.warning(
                    "discovery %s has not named %d workers for %g s: they leave",
                    name,
                    len(result.confirmed),
                    self._limits.confirm_s,
                )
            else:
                log.info("discovery %s: its set of %d workers is accepted again", name, named)


class StaticDiscovery:
    """The workers in the option `fleet.workers`: yields one set. Stateless."""

    errors = 0
    is_explicit = True
    recheck_s: float | None = None

    def __init__(self, specs: tuple[WorkerSpec, ...]) -> None:
        self._specs = specs

    @classmethod
    def configured(cls, options: FleetOptions, clock: Clock) -> StaticDiscovery | None:
        """None if `options` list no worker."""
        return cls(tuple(entry.spec() for entry in options.workers)) if options.workers else None

    async def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        yield self._specs
