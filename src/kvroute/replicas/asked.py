"""Answers of several processes to one admin request, put together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def merged_decisions(of_each: Sequence[Sequence[Mapping[str, Any]]], limit: int) -> list[dict[str, Any]]:
    """The newest `limit` of all, newest first; each has its `time`, in seconds since the epoch."""
    together = [dict(entry) for entries in of_each for entry in entries]
    together.sort(key=lambda entry: entry["time"], reverse=True)
    return together[:limit]


def merged_predictions(of_each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `routing.audit.Audit.describe` gives, summed."""
    demotions: dict[str, int] = {}
    for each in of_each:
        for worker, times in each["demotions"].items():
            demotions[worker] = demotions.get(worker, 0) + times
    return {
        "predictions": _summed(
            [row for each in of_each for row in each["predictions"]], ("strategy", "worker", "slowest_tier")
        ),
        "latest": _summed([row for each in of_each for row in each["latest"]], ("worker", "rank")),
        "demotions": demotions,
    }


def _summed(rows: Sequence[Mapping[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row for each combination of `names`, in their order; everything else is added up."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        known = sums.get(key)
        if known is None:
            sums[key] = dict(row)
            continue
        for name, value in row.items():
            if name not in names:
                known[name] += value
    return [sums[key] for key in sorted(sums)]
