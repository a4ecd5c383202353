"""A toy discovery source: the workers' URLs, one per line of a text file that is read once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

from kvroute.clock import Clock
from kvroute.fleet.options import FleetOptions, WorkerEntry
from kvroute.fleet.worker import WorkerSpec


class UrlListDiscovery:
    """Yields its set once. Stateless; implements `Discovery`."""

    errors = 0
    is_explicit = True
    recheck_s: float | None = None

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def configured(cls, options: FleetOptions, clock: Clock) -> UrlListDiscovery | None:
        """None if no list is named."""
        return cls(options.url_list) if options.url_list is not None else None

    async def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        yield tuple(WorkerEntry(url=line).spec() for line in self._path.read_text().split())
