"""Compares predicted with reported cached tokens, and decides when a cache map is wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from operator import sub
from typing import Any, Final, TypeAlias

from kvroute.options import Options, option


class AuditOptions(Options):
    """When a worker's cache map is no longer used because its predictions fail.

    The map is used again once the worker's events were replayed or published again, or its cache was cleared.
    """

    window: int = option(
        50,
        "Number of a worker's latest predictions that count.",
        ge=1,
        higher="chance has less influence",
        lower="a wrong map is noticed sooner",
    )
    least: int = option(
        20,
        "Fewest predictions before a map counts as wrong.",
        ge=1,
        higher="a new worker has more time",
        lower="a wrong map is noticed sooner",
    )
    most_wrong: float = option(
        0.5,
        "Share of these predictions that may be off by a block or more.",
        ge=0,
        le=1,
        higher="tolerates requests that race each other",
        lower="demands a better map",
    )


class PredictionOutcome(StrEnum):
    """The result of a prediction. A metric label, so the set of values is fixed."""

    EXACT = "exact"
    """Off by less than a block."""
    OVER = "over"
    UNDER = "under"


class _Tally:
    __slots__ = ("error_tokens", "outcomes", "predicted", "reported")

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(PredictionOutcome, 0)
        self.predicted = self.reported = self.error_tokens = 0


_MOST_TALLIES: Final = 4096
"""Workers join under new names, so the number of tallies is bounded; the oldest are dropped first."""
_MOST_WAITING: Final = 256
"""Predictions of one rank that wait to be counted, and ranks with some."""


OnCounted: TypeAlias = Callable[[str, str, str, Iterable[tuple[str, int]], Sequence[int]], None]
"""Gets predictions of one strategy for one worker and tier: their number by outcome, and the tokens by which
each of them was wrong."""


class Audit:
    """Counts predictions by strategy, worker and tier, and keeps each rank's latest results.

    A prediction is counted later, together with others, which costs less. Mutable: `reported`, `is_wrong`
    and `forget` change it. Used from the event loop only.
    """

    def __init__(self, options: AuditOptions | None = None) -> None:
        self._options = options or AuditOptions()
        self.on_counted: OnCounted | None = None
        """Gets the predictions that `settle` counts, such as `Metrics.predicted`."""
        self._waiting: dict[tuple[str, str, str, int], list[tuple[int, int]]] = {}
        """Strategy, worker, tier and tokens of a block -> predicted and reported tokens, not yet counted."""
        self._tallies: dict[tuple[str, str, str], _Tally] = {}
        self._latest: dict[tuple[str, int], deque[bool]] = {}
        self._demotions: dict[str, int] = {}
        self._moved: dict[str, int] = {}

    def handed_over(self, worker: str, tokens: int) -> None:
        """A decode worker has got a prompt of which it was predicted to lack `tokens`.

        No answer reports the fetched tokens; the worker's metrics have their sum (`Worker.facts.fetched`).
        """
        if worker not in self._moved and len(self._moved) >= _MOST_TALLIES:
            del self._moved[next(iter(self._moved))]
        self._moved[worker] = self._moved.get(worker, 0) + tokens

    def reported(
        self, strategy: str, worker: str, tier: str, block_tokens: int, tokens: int, cached_tokens: int
    ) -> None:
        """A prediction of `tokens`, and the worker's `usage.prompt_tokens_details.cached_tokens`.

        `tier` is the slowest tier with predicted tokens, `block_tokens` the size of the worker's blocks.
        """
        key = strategy, worker, tier, block_tokens
        waiting = self._waiting.get(key)
        if waiting is None:
            if len(self._waiting) >= _MOST_WAITING:
                self.settle()
            waiting = self._waiting[key] = []
        waiting.append((tokens, cached_tokens))
        if len(waiting) >= _MOST_WAITING:
            self.settle()

    def settle(self) -> None:
        """Count what `reported` has kept."""
        settled, self._waiting = self._waiting, {}
        for (strategy, worker, tier, block_tokens), rows in settled.items():
            predicted, cached = zip(*rows, strict=True)
            errors = list(map(sub, predicted, cached))
            distances = list(map(abs, errors))
            exact, over = sum(map(block_tokens.__gt__, distances)), sum(map(block_tokens.__le__, errors))
            outcomes = {
                PredictionOutcome.EXACT: exact,
                PredictionOutcome.OVER: over,
                PredictionOutcome.UNDER: len(rows) - exact - over,
            }
            tally = self._tallies.get((strategy, worker, tier))
            if tally is None:
                if len(self._tallies) >= _MOST_TALLIES:
                    del self._tallies[next(iter(self._tallies))]
                tally = self._tallies[strategy, worker, tier] = _Tally()
            for outcome, number in outcomes.items():
                tally.outcomes[outcome] += number
            tally.predicted += sum(predicted)
            tally.reported += sum(cached)
            tally.error_tokens += sum(distances)
            if self.on_counted is not None:
                self.on_counted(strategy, worker, tier, tuple(outcomes.items()), distances)

    def is_wrong(self, worker: str, rank: int, failed: bool) -> bool:
        """Whether the map of a rank counts as wrong, now that a prediction of it has `failed`, or not.

        `failed`: off by a block or more. If it is wrong, its latest results are dropped.
        """
        options, cache = self._options, (worker, rank)
        latest = self._latest.get(cache)
        if latest is None:
            latest = self._latest[cache] = deque(maxlen=max(options.window, options.least))
        latest.append(failed)
        # A good prediction can only make a map wrong if it completes the least number.
        if not failed and len(latest) != options.least:
            return False
        if len(latest) < options.least or sum(latest) <= options.most_wrong * len(latest):
            return False
        del self._latest[cache]
        demotions = self._demotions.pop(worker, 0) + 1
        if len(self._demotions) >= _MOST_TALLIES:
            del self._demotions[next(iter(self._demotions))]
        self._demotions[worker] = demotions
        return True

    def forget(self, worker: str) -> None:
        """Drop the latest results of a worker that has left or restarted: its cache is another one."""
        self.settle()
        for cache in [cache for cache in self._latest if cache[0] == worker]:
            del self._latest[cache]

    def describe(self) -> dict[str, Any]:
        """Counts and token sums by strategy, worker and tier, and the latest results, as JSON values."""
        self.settle()
        return {
            "predictions": [
                {
                    "strategy": strategy,
                    "worker": worker,
                    "slowest_tier": tier,
                    **{outcome.value: count for outcome, count in tally.outcomes.items()},
                    "predicted_tokens": tally.predicted,
                    "reported_tokens": tally.reported,
                    "absolute_error_tokens": tally.error_tokens,
                }
                for (strategy, worker, tier), tally in sorted(self._tallies.items())
            ],
            "latest": [
                {"worker": worker, "rank": rank, "judged": len(latest), "wrong": sum(latest)}
                for (worker, rank), latest in sorted(self._latest.items())
            ],
            "demotions": dict(self._demotions),
            "transfers": [
                {"worker": worker, "predicted_tokens": tokens}
                for worker, tokens in sorted(self._moved.items())
            ],
        }
