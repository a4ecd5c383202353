"""The share of requests that may be sent a second time."""

from __future__ import annotations

import math

from kvroute.upstream.options import RetryOptions

_WINDOW_S = 10.0
_STEP_S = 0.01
"""The budget decays in steps of at least this, a thousandth of its window, so that most requests pay for no
exponential."""


class RetryBudget:
    """Limits retries to a share of recent requests (as Finagle's RetryBudget and Envoy's retry budget).

    Both counts decay with a time constant of 10 s. Mutable: `count_request` and `take`, on the event loop
    only.
    """

    def __init__(self, options: RetryOptions) -> None:
        self.configure(options)
        self._requests = 0.0
        self._retries = 0.0
        self._decayed_at = 0.0

    def configure(self, options: RetryOptions) -> None:
        """Change the limits; the recent requests and retries still count."""
        self._share = options.budget_percent / 100.0
        self._floor = options.budget_min_per_s * _WINDOW_S

    def count_request(self, now: float) -> None:
        """Count one request of a client."""
        if now - self._decayed_at > _STEP_S:
            self._decay(now)
        self._requests += 1.0

    def take(self, now: float) -> bool:
        """Spend one retry; False when none is left."""
        self._decay(now)
        # Half a retry of slack: a count that decays never reaches zero again.
        if self._retries + 0.5 > max(self._floor, self._share * self._requests):
            return False
        self._retries += 1.0
        return True

    def _decay(self, now: float) -> None:
        elapsed = now - self._decayed_at
        if elapsed > _STEP_S:
            factor = math.exp(-elapsed / _WINDOW_S)
            self._requests *= factor
            self._retries *= factor
            self._decayed_at = now
