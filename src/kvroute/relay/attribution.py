"""The `x-kvroute-*` header lines that say how a request was routed."""

from __future__ import annotations

from kvroute.routing.strategy import Candidate, RouteDecision, Tokens

_MAX_CACHED_LINES = 4096


class Attribution:
    """The `x-kvroute-*` header lines of answers. Mutable: caches at most 4096 of them, by their values."""

    def __init__(self, predicting: frozenset[str]) -> None:
        """`predicting`: the strategies whose answers say how many tokens they expected to be cached."""
        self._predicting = predicting
        self._cache: dict[tuple[str, str, str, int, Tokens | None], bytes] = {}

    def lines(self, candidate: Candidate, decision: RouteDecision) -> bytes:
        """The header lines for an answer of `candidate`.

        For a strategy that predicts hits they include the predicted cached tokens, in total and by tier.
        """
        held = candidate.match
        key = (
            candidate.worker.spec.id,
            decision.strategy,
            decision.reason,
            candidate.matched_tokens,
            None if held is None else held.tokens,
        )
        lines = self._cache.get(key)
        if lines is None:
            if len(self._cache) >= _MAX_CACHED_LINES:
                self._cache.clear()
            lines = self._cache[key] = _lines(candidate, decision, decision.strategy in self._predicting)
        return lines


def _lines(candidate: Candidate, decision: RouteDecision, predicts: bool) -> bytes:
    own = b"x-kvroute-worker: %b\r\nx-kvroute-strategy: %b\r\nx-kvroute-reason: %b\r\n" % (
        candidate.worker.spec.id.encode(),
        decision.strategy.encode(),
        decision.reason.encode(),
    )
    if not predicts:
        return own
    tokens, held = candidate.matched_tokens, candidate.match
    gpu, l1, l2 = (tokens, 0, 0) if held is None else held.tokens
    return b"%bx-kvroute-hit-tokens: %d\r\nx-kvroute-hit-tiers: gpu=%d;l1=%d;l2=%d\r\n" % (
        own,
        tokens,
        gpu,
        l1,
        l2,
    )
