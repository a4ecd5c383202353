"""Predicted against reported cached tokens: how good each view of the caches is, and when to trust none."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from kvroute.options import Options, option


class AuditOptions(Options):
    """When a worker's map is no longer believed because its predictions fail. It is believed again once its
    events were replayed, announced anew, or its cache was cleared."""

    window: int = option(
        50,
        "Predictions of a worker that are looked at, the latest ones.",
        ge=1,
        higher="bad luck is forgiven",
        lower="a wrong map is noticed sooner",
    )
    least: int = option(
        20,
        "Fewest predictions before a map can be called wrong.",
        ge=1,
        higher="a worker that just began is given time",
        lower="a wrong map is noticed sooner",
    )
    most_wrong: float = option(
        0.5,
        "Share of them that may be off by a block or more.",
        ge=0,
        le=1,
        higher="tolerates requests that race each other",
        lower="demands a better map",
    )


class PredictionOutcome(StrEnum):
    """A prediction, once the worker has reported: bounded, so a metric label."""

    EXACT = "exact"
    """Within the block."""
    OVER = "over"
    UNDER = "under"


# A member asked of its class costs 80 ns each time (CPython 3.11), these almost nothing.
_EXACT, _OVER, _UNDER = PredictionOutcome.EXACT, PredictionOutcome.OVER, PredictionOutcome.UNDER


class Prediction(Struct, frozen=True, gc=False):
    """What was said of one request before it was sent. `tier` is the slowest one that had a part;
    `judged`: the worker's map said it, and was taken to be whole."""

    strategy: str
    worker: str
    rank: int
    tier: str
    tokens: int
    block_tokens: int
    judged: bool


class _Tally:
    __slots__ = ("error_tokens", "outcomes", "predicted", "reported")

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(PredictionOutcome, 0)
        self.predicted = self.reported = self.error_tokens = 0


_MOST_TALLIES: Final = 4096
"""Workers come and go under new names; the tallies begun first are given up first."""


class Audit:
    """Counts by strategy, worker and tier, and keeps each place's latest verdicts.

    Mutable: by `reported` and `forget`. Touched from the event loop only; about 2 us a request.
    """

    def __init__(self, options: AuditOptions | None = None) -> None:
        self._options = options or AuditOptions()
        self._tallies: dict[tuple[str, str, str], _Tally] = {}
        self._latest: dict[tuple[str, int], deque[bool]] = {}
        self._demotions: dict[str, int] = {}

    def reported(self, prediction: Prediction, cached_tokens: int) -> tuple[PredictionOutcome, bool]:
        """A worker has told `usage.prompt_tokens_details.cached_tokens`: how the prediction did, and whether
        that place's map should not be believed any more. Its verdicts begin anew then."""
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
        # What did not fail makes none wrong, unless it is what there have to be enough of.
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
        """The worker left or restarted: what was said of its caches says nothing about the next ones."""
        for place in [place for place in self._latest if place[0] == worker]:
            del self._latest[place]

    def describe(self) -> dict[str, Any]:
        """Ready for JSON: counts and token sums by strategy, worker and tier, and the latest verdicts."""
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
        }
