"""Which workers should be in the fleet, when several sources have a say. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from kvroute.fleet.worker import WorkerId, WorkerSpec

log = logging.getLogger(__name__)

ADMIN = "admin"
"""The source of workers added by hand; it wins over what any other source says of the same id."""


@dataclass(frozen=True, slots=True)
class AdminOverrides:
    """What the admin API has changed about a fleet: workers added and removed by hand, and draining ones."""

    added: tuple[WorkerSpec, ...] = ()
    removed: frozenset[WorkerId] = frozenset()
    drained: frozenset[WorkerId] = frozenset()


class DesiredWorkers:
    """Every source's own full set, and the one that comes out of them.

    Mutable: `replace`, `add` and `remove` change it. Where two sources name one id, ADMIN wins, else
    the one that spoke first; where they name one URL under two ids, likewise: its load must not be
    counted in two places.
    """

    def __init__(self) -> None:
        self._sources: dict[str, dict[WorkerId, WorkerSpec]] = {ADMIN: {}}
        self._removed: set[WorkerId] = set()
        """Removed by hand while a source still lists them."""
        self._awaited: set[WorkerId] = set()
        """Of those, the ones that were removed elsewhere and are not listed here yet."""
        self._shadowed: set[tuple[str, WorkerId]] = set()
        """Entries left out for another one of the same URL: remembered to log each once."""

    def replace(self, source: str, specs: Iterable[WorkerSpec]) -> None:
        """All that `source` wants."""
        self._sources[source] = {spec.id: spec for spec in specs}
        listed = {worker_id for each in self._sources.values() for worker_id in each}
        self._awaited -= listed
        self._removed &= listed | self._awaited

    def add(self, spec: WorkerSpec) -> None:
        """Wanted by hand, whatever was removed before."""
        self._removed.discard(spec.id)
        self._sources[ADMIN][spec.id] = spec

    def remove(self, worker_id: WorkerId) -> None:
        """Not wanted, until all sources have stopped listing it or it is added by hand."""
        self._sources[ADMIN].pop(worker_id, None)
        if any(worker_id in listed for listed in self._sources.values()):
            self._removed.add(worker_id)

    def by_hand(self, drained: frozenset[WorkerId]) -> AdminOverrides:
        """What `add` and `remove` have left standing, with what the fleet adds to it."""
        return AdminOverrides(tuple(self._sources[ADMIN].values()), frozenset(self._removed), drained)

    def follow_hand(self, done: AdminOverrides) -> None:
        """Make what another process has been told by hand stand here."""
        self._sources[ADMIN] = {spec.id: spec for spec in done.added}
        self._removed = set(done.removed)
        self._awaited = {
            worker_id
            for worker_id in self._removed
            if not any(worker_id in listed for listed in self._sources.values())
        }

    def merged(self) -> dict[WorkerId, WorkerSpec]:
        """The outcome; ids and URLs are unique. O(all entries)."""
        merged: dict[WorkerId, WorkerSpec] = {}
        owners: dict[str, WorkerId] = {}
        shadowed: set[tuple[str, WorkerId]] = set()
        for source, specs in self._sources.items():
            for spec in specs.values():
                if spec.id in merged or spec.id in self._removed:
                    continue
                owner = owners.setdefault(spec.url, spec.id)
                if owner == spec.id:
                    merged[spec.id] = spec
                    continue
                shadowed.add((source, spec.id))
                if (source, spec.id) not in self._shadowed:
                    log.warning("worker %s of %s left out: %s has the same URL", spec.id, source, owner)
        self._shadowed = shadowed
        return merged
