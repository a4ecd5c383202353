"""Merges the workers of several discovery sources and of the admin API into one set. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from kvroute.fleet.worker import WorkerId, WorkerSpec

log = logging.getLogger(__name__)

ADMIN = "admin"
"""The source name of workers added through the admin API. It wins over every other source of the same id."""


@dataclass(frozen=True, slots=True)
class AdminOverrides:
    """The admin API's changes of a fleet: workers added, removed and drained by an operator."""

    added: tuple[WorkerSpec, ...] = ()
    removed: frozenset[WorkerId] = frozenset()
    drained: frozenset[WorkerId] = frozenset()


class DesiredWorkers:
    """The full set of workers of each source, and the merged set.

    Mutable: `replace`, `add`, `remove` and `apply_overrides` change it. If two sources name one id, ADMIN
    wins, else the source that named it first. The same rule holds for one URL under two ids.
    """

    def __init__(self) -> None:
        self._sources: dict[str, dict[WorkerId, WorkerSpec]] = {ADMIN: {}}
        self._removed: set[WorkerId] = set()
        """Removed through the admin API while a source still lists them."""
        self._removed_unlisted: set[WorkerId] = set()
        """The members of `_removed` that a peer reported before any source listed them in this process."""
        self._shadowed: set[tuple[str, WorkerId]] = set()
        """Entries ignored because another entry has the same URL or id; kept to log each entry once."""

    def replace(self, source: str, specs: Iterable[WorkerSpec]) -> None:
        """Set the full set of workers of `source`."""
        self._sources[source] = {spec.id: spec for spec in specs}
        listed = {worker_id for each in self._sources.values() for worker_id in each}
        self._removed_unlisted -= listed
        self._removed &= listed | self._removed_unlisted

    def add(self, spec: WorkerSpec) -> None:
        """Add a worker through the admin API; undoes an earlier `remove`."""
        self._removed.discard(spec.id)
        self._sources[ADMIN][spec.id] = spec

    def remove(self, worker_id: WorkerId) -> None:
        """Remove a worker until every source has stopped listing it, or until `add`."""
        self._sources[ADMIN].pop(worker_id, None)
        if any(worker_id in listed for listed in self._sources.values()):
            self._removed.add(worker_id)

    def overrides(self, drained: frozenset[WorkerId]) -> AdminOverrides:
        """The current effect of `add` and `remove`, together with `drained`."""
        return AdminOverrides(tuple(self._sources[ADMIN].values()), frozenset(self._removed), drained)

    def apply_overrides(self, overrides: AdminOverrides) -> None:
        """Replace the additions and removals with those of a peer."""
        self._sources[ADMIN] = {spec.id: spec for spec in overrides.added}
        self._removed = set(overrides.removed)
        self._removed_unlisted = {
            worker_id
            for worker_id in self._removed
            if not any(worker_id in listed for listed in self._sources.values())
        }

    def merged(self) -> dict[WorkerId, WorkerSpec]:
        """The merged set; ids and URLs are unique. O(all entries)."""
        merged: dict[WorkerId, WorkerSpec] = {}
        owners: dict[str, WorkerId] = {}
        shadowed: set[tuple[str, WorkerId]] = set()
        for source, specs in self._sources.items():
            for spec in specs.values():
                if spec.id in self._removed:
                    continue
                named = merged.get(spec.id)
                if named is not None:
                    # An operator's entry replaces the listed one on purpose.
                    if named.url != spec.url and spec.id not in self._sources[ADMIN]:
                        shadowed.add((source, spec.id))
                        if (source, spec.id) not in self._shadowed:
                            log.warning(
                                "worker %s (%s) of %s is ignored: %s has the same id",
                                spec.id,
                                spec.url,
                                source,
                                named.url,
                            )
                    continue
                # One URL under two ids would count the worker's load in two places.
                owner = owners.setdefault(spec.url, spec.id)
                if owner == spec.id:
                    merged[spec.id] = spec
                    continue
                shadowed.add((source, spec.id))
                if (source, spec.id) not in self._shadowed:
                    log.warning("worker %s of %s is ignored: %s has the same URL", spec.id, source, owner)
        self._shadowed = shadowed
        return merged
