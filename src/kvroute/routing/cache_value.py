"""What each worker's cache is worth to the requests of the last minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from typing import Final

from kvroute.blocks.keys import PromptKeys
from kvroute.index.history import RouteHistory
from kvroute.routing.cost_parameters import Costs

_REBASE: Final = 40.0
"""Time constants after which the weights start from 1 again, so that they stay finite."""


class CacheValue:
    """The prefill seconds that each worker's cache saved lately. Mutable: by its own methods.

    A use that is `window_s` old counts 1/e. `now` must not decrease. Workers are `Worker.units`.
    """

    # A part of a prompt that k workers hold counts 1/k of its prefill for each: the Shapley value of a game
    # in which one holder is enough. So a common system prompt decides nothing, a conversation that one worker
    # holds counts in full, and copies on two workers, of which both may be removed, count half.
    #
    # A part that is new has saved nothing yet. It counts by the chance that it will be used: the share of all
    # blocks lately that were used again.

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._sums: dict[int, float] = {}
        self._blocks = 0.0
        self._used_again = 0.0
        self._origin: float | None = None
        """A use at this time has the weight 1, a later one a larger weight (forward decay)."""

    def dispatched(
        self,
        worker: int,
        prompts: Sequence[PromptKeys],
        history: RouteHistory,
        now: float,
        costs: Costs,
    ) -> None:
        """Prompts are sent to `worker`; `history` does not have them yet."""
        # By the history, also for `kvaware`: a peer's dispatch has no matches of the other workers.
        for prompt in prompts:
            block_s = prompt.block_tokens * costs.token_s
            self.used(worker, len(prompt.keys), history.match(prompt.keys), now, block_s)

    def used(
        self, worker: int, blocks: int, leading_blocks: Mapping[int, int], now: float, block_s: float
    ) -> None:
        """A prompt of `blocks` was sent to `worker`; `leading_blocks` has those that each worker held.

        `block_s` is the prefill time of a block, in seconds. All holders get credit, also those that were too
        busy to get the request; `worker` now holds all blocks that any of them holds. O(holders log holders).
        """
        others = sorted(
            ((length, holder) for holder, length in leading_blocks.items() if holder != worker), reverse=True
        )
        longest = max(leading_blocks.get(worker, 0), others[0][0] if others else 0)
        weight = self._weight(now)
        self._blocks += weight * blocks
        self._used_again += weight * longest
        chance = self._used_again / self._blocks if self._blocks else 0.0
        credit_s, sums = weight * block_s, self._sums
        sums[worker] = sums.get(worker, 0.0) + chance * (blocks - longest) * credit_s
        # From the shortest match to the longest: the blocks between two lengths have one holder less.
        holders = [(longest, worker), *others]
        below, shared_s = 0, 0.0
        for position in range(len(holders) - 1, -1, -1):
            length, holder = holders[position]
            shared_s += (length - below) * credit_s / (position + 1)
            below = length
            sums[holder] = sums.get(holder, 0.0) + shared_s

    def seconds(self, worker: int, now: float) -> float:
        """The saved prefill of a worker as of `now`, in seconds."""
        if self._origin is None:
            return 0.0
        return self._sums.get(worker, 0.0) * exp((self._origin - now) / self._window_s)

    def forget(self, worker: int) -> None:
        """The worker has left, or its cache is empty."""
        self._sums.pop(worker, None)

    def _weight(self, now: float) -> float:
        if self._origin is None:
            self._origin = now
        age = (now - self._origin) / self._window_s
        if age > _REBASE:
            decay = exp(-age)
            self._sums = {worker: value * decay for worker, value in self._sums.items()}
            self._blocks *= decay
            self._used_again *= decay
            self._origin, age = now, 0.0
        return exp(age)
