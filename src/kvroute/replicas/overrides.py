"""The admin API's changes of the fleet, as every process of every gateway sees them. Pure.

Each worker has one entry with a stamp, and of two entries the later one is valid. So processes that were
separated agree again once they have exchanged their entries, in any order, and no change of one is lost
because of another worker's change elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvroute.fleet.fleet import AdminOverrides
from kvroute.fleet.worker import WorkerId, WorkerSpec
from kvroute.replicas.messages import AdminWorkerSpec, OverrideEntry, OverridesChanged


class OverrideLog:
    """The latest entry of each worker that was ever changed by hand.

    Mutable: `changed` adds this process's changes, `merge` those of others. An entry without an effect stays:
    it is the end of a drain that another process may still have.
    """

    def __init__(self, author: str) -> None:
        """`author` names this process; it is unique among all processes that exchange entries."""
        self._author = author
        self._time = 0
        self._entries: dict[str, OverrideEntry] = {}

    def changed(self, overrides: AdminOverrides) -> OverridesChanged:
        """Stamp what has changed since the last call or `merge`; returns the entries for other processes."""
        self._time += 1
        stamp = self._time, self._author
        fresh = [
            entry
            for entry in _entries_of(overrides, self._entries, stamp)
            if _effect(entry) != _effect(self._entries.get(entry.worker))
        ]
        self._entries.update((entry.worker, entry) for entry in fresh)
        return OverridesChanged(fresh)

    def merge(self, message: OverridesChanged, current: AdminOverrides) -> AdminOverrides | None:
        """Take over later entries; `current` are the fleet's overrides.

        Returns all overrides that are valid now, None if nothing has changed.
        """
        is_changed = False
        for name, entry in self._entries.items():
            if entry.removed and name not in current.removed:
                # Its source has stopped to list the worker, which ends the removal in every process.
                self._entries[name] = msgspec.structs.replace(entry, removed=False)
        for entry in message.entries:
            self._time = max(self._time, entry.stamp[0])
            known = self._entries.get(entry.worker)
            if known is None or known.stamp < entry.stamp:
                is_changed = is_changed or _effect(known) != _effect(entry)
                self._entries[entry.worker] = entry
        return self._overrides() if is_changed else None

    def snapshot(self) -> OverridesChanged:
        """All entries, for a process that joins or was cut off."""
        return OverridesChanged(list(self._entries.values()))

    def _overrides(self) -> AdminOverrides:
        entries = self._entries.values()
        return AdminOverrides(
            tuple(_spec_of(entry.added) for entry in entries if entry.added is not None),
            frozenset(WorkerId(entry.worker) for entry in entries if entry.removed),
            frozenset(WorkerId(entry.worker) for entry in entries if entry.drained),
        )


def _effect(entry: OverrideEntry | None) -> tuple[AdminWorkerSpec | None, bool, bool]:
    return (None, False, False) if entry is None else (entry.added, entry.removed, entry.drained)


def _entries_of(
    overrides: AdminOverrides, known: Iterable[str], stamp: tuple[int, str]
) -> Iterable[OverrideEntry]:
    """An entry for each worker that is changed now or has an entry already."""
    added = {spec.id: spec for spec in overrides.added}
    for worker in sorted({*added, *overrides.removed, *overrides.drained, *map(WorkerId, known)}):
        spec = added.get(worker)
        yield OverrideEntry(
            worker,
            stamp,
            None if spec is None else _message_of(spec),
            worker in overrides.removed,
            worker in overrides.drained,
        )


def _message_of(spec: WorkerSpec) -> AdminWorkerSpec:
    return AdminWorkerSpec(
        spec.id, spec.url, spec.models, spec.capacity_tokens, spec.role, spec.draining, spec.node
    )


def _spec_of(sent: AdminWorkerSpec) -> WorkerSpec:
    return WorkerSpec(
        WorkerId(sent.id), sent.url, sent.models, sent.capacity_tokens, sent.role, sent.draining, sent.node
    )
