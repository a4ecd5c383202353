"""Decides whether a far smaller set of workers is believed. Pure: time and health are arguments.

A Kubernetes API server that has just restarted can answer with an empty list, and a DNS server with a part of
the addresses. Workers that still answer then stay in the fleet until the source has not named them for
`confirm_s`, in one reading after another. What a source adds or changes applies at once, and so does the
departure of workers that drain or do not answer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

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
