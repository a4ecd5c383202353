"""Workers that are known from the start."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from kvroute.clock import Clock
from kvroute.fleet.options import FleetOptions
from kvroute.fleet.worker import WorkerSpec


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
