"""The header lines that say which worker answered, and why."""

from __future__ import annotations

from kvroute.routing.caches import Tokens
from kvroute.routing.decision import Candidate, RouteDecision

_MOST_LINES = 4096
_PREDICTING = frozenset({"prefixaware", "kvaware"})


class Attribution:
    """Mutable: remembers the lines it has made, by all that they say, as most requests hit nothing or a known
    beginning; at most 4096, so that no coming and going of workers fills the memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str, int, Tokens | None], bytes] = {}

    def lines(self, candidate: Candidate, decision: RouteDecision) -> bytes:
        """Of an answer by `candidate`; with a strategy that predicts hits also its predicted
        `cached_tokens`, in all and by tier."""
        held = candidate.held
        key = (
            candidate.worker.spec.id,
            decision.strategy,
            decision.reason,
            candidate.matched_tokens,
            None if held is None else held.tokens,
        )
        lines = self._known.get(key)
        if lines is None:
            if len(self._known) >= _MOST_LINES:
                self._known.clear()
            lines = self._known[key] = _lines(candidate, decision)
        return lines


def _lines(candidate: Candidate, decision: RouteDecision) -> bytes:
    own = b"x-kvroute-worker: %b\r\nx-kvroute-strategy: %b\r\nx-kvroute-reason: %b\r\n" % (
        candidate.worker.spec.id.encode(),
        decision.strategy.encode(),
        decision.reason.encode(),
    )
    if decision.strategy not in _PREDICTING:
        return own
    tokens, held = candidate.matched_tokens, candidate.held
    gpu, l1, l2 = (tokens, 0, 0) if held is None else held.tokens
    return b"%bx-kvroute-hit-tokens: %d\r\nx-kvroute-hit-tiers: gpu=%d;l1=%d;l2=%d\r\n" % (
        own,
        tokens,
        gpu,
        l1,
        l2,
    )
