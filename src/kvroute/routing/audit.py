"""Compares predicted with reported cached tokens, and decides when a cache map is wrong."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

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


# To read an enum member through its class costs 80 ns (CPython 3.11), a module constant almost nothing.
_EXACT, _OVER, _UNDER = PredictionOutcome.EXACT, PredictionOutcome.OVER, PredictionOutcome.UNDER


class Prediction(Struct, frozen=True, gc=False):
    """The cached tokens that were predicted for one request before it was sent."""

    strategy: str
    worker: str
    rank: int
    tier: str
    """The slowest tier with cached tokens."""
    tokens: int
    block_tokens: int
    """Tokens in one block of the worker."""
    judged: bool
    """Whether a whole map made the prediction, so that a failure counts against the map."""


class _Tally:
    __slots__ = ("error_tokens", "outcomes", "predicted", "reported")

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(PredictionOutcome, 0)
        self.predicted = self.reported = self.error_tokens = 0


_MOST_TALLIES: Final = 4096
"""Workers join under new names, so the number of tallies is bounded; the oldest are dropped first."""


class Audit:
    """Counts predictions by strategy, worker and tier, and keeps each place's latest results.

    Mutable: `reported` and `forget` change it. Used from the event loop only; about 2 us a request.
    """

    def __init__(self, options: AuditOptions | None = None) -> None:
        self._options = options or AuditOptions()
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

    def reported(self, prediction: Prediction, cached_tokens: int) -> tuple[PredictionOutcome, bool]:
        """Compare a prediction with the worker's `usage.prompt_tokens_details.cached_tokens`.

        Returns the outcome, and whether the place's map now counts as wrong; its latest results are then
        dropped.
        """
        tokens = prediction.tokens
        error = tokens - cached_tokens
        distance = error if error > 0 else -error
        if distance < prediction.block_tokens:
            outcome = _EXACT
        else:
            outcome = _OVER if error > 0 else _UNDER
        key = prediction.strategy, prediction.worker, prediction.tier
        tally = self._tallies.get(key)
        if tally is None:
            if len(self._tallies) >= _MOST_TALLIES:
                del self._tallies[next(iter(self._tallies))]
            tally = self._tallies[key] = _Tally()
        tally.outcomes[outcome] += 1
        tally.predicted += tokens
        tally.reported += cached_tokens
        tally.error_tokens += distance
        return outcome, prediction.judged and self._is_wrong(prediction, outcome is not _EXACT)

    def _is_wrong(self, prediction: Prediction, failed: bool) -> bool:
        options, place = self._options, (prediction.worker, prediction.rank)
        latest = self._latest.get(place)
        if latest is None:
            latest = self._latest[place] = deque(maxlen=max(options.window, options.least))
        latest.append(failed)
        # A good prediction can only make a map wrong if it completes the least number.
        if not failed and len(latest) != options.least:
            return False
        if len(latest) < options.least or sum(latest) <= options.most_wrong * len(latest):
            return False
        del self._latest[place]
        demotions = self._demotions.pop(prediction.worker, 0) + 1
        if len(self._demotions) >= _MOST_TALLIES:
            del self._demotions[next(iter(self._demotions))]
        self._demotions[prediction.worker] = demotions
        return True

    def forget(self, worker: str) -> None:
        """Drop the latest results of a worker that has left or restarted: its cache is another one."""
        for place in [place for place in self._latest if place[0] == worker]:
            del self._latest[place]

    def describe(self) -> dict[str, Any]:
        """Counts and token sums by strategy, worker and tier, and the latest results, as JSON values."""
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
