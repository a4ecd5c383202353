"""How many failed attempts may be repeated on another worker."""

from __future__ import annotations

import math

from kvroute.upstream.retry_options import RetryOptions

_WINDOW_S = 10.0
_STEP_S = 0.01
"""The account decays in steps of at least this: a thousandth of what it holds, no exponential a request."""


class RetryBudget:
    """A leaky account of retries against requests (as in Finagle's RetryBudget and Envoy's retry budget).

    Both decay with a time constant of 10 s. Mutable: `request` and `take`; touched from the loop only.
    """

    def __init__(self, options: RetryOptions) -> None:
        self._share = options.budget_percent / 100.0
        self._floor = options.budget_min_per_s * _WINDOW_S
        self._requests = 0.0
        self._retries = 0.0
        self._at = 0.0

    def request(self, now: float) -> None:
        """Count one request of a client."""
        if now - self._at > _STEP_S:
            self._decay(now)
        self._requests += 1.0

    def take(self, now: float) -> bool:
        """Spend one retry; False when none is left."""
        self._decay(now)
        # Half a retry of slack: what decays never quite reaches zero again.
        if self._retries + 0.5 > max(self._floor, self._share * self._requests):
            return False
        self._retries += 1.0
        return True

    def _decay(self, now: float) -> None:
        elapsed = now - self._at
        if elapsed > _STEP_S:
            factor = math.exp(-elapsed / _WINDOW_S)
            self._requests *= factor
            self._retries *= factor
            self._at = now
