"""The header lines that say which worker answered, and why."""

from __future__ import annotations

from kvroute.routing.decision import Candidate, RouteDecision

_MOST_LINES = 4096
_PREDICTING = frozenset({"prefixaware", "kvaware"})


class Attribution:
    """Mutable: remembers the lines it has made, of which there is one for each worker, strategy and reason;
    at most 4096, so that no coming and going of workers fills the memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], tuple[bytes, bool]] = {}

    def lines(self, candidate: Candidate, decision: RouteDecision) -> bytes:
        """Of an answer by `candidate`; with a strategy that predicts hits also its predicted
        `cached_tokens`, in all and by tier."""
        strategy, reason = decision.strategy, decision.reason
        worker_id = candidate.worker.spec.id
        known = self._known.get((worker_id, strategy, reason))
        if known is None:
            if len(self._known) >= _MOST_LINES:
                self._known.clear()
            lines = b"x-kvroute-worker: %b\r\nx-kvroute-strategy: %b\r\nx-kvroute-reason: %b\r\n" % (
                worker_id.encode(),
                strategy.encode(),
                reason.encode(),
            )
            known = self._known[worker_id, strategy, reason] = lines, strategy in _PREDICTING
        lines, is_predicting = known
        if not is_predicting:
            return lines
        tokens, held = candidate.matched_tokens, candidate.held
        gpu, l1, l2 = (tokens, 0, 0) if held is None else held.tokens
        return b"%bx-kvroute-hit-tokens: %d\r\nx-kvroute-hit-tiers: gpu=%d;l1=%d;l2=%d\r\n" % (
            lines,
            tokens,
            gpu,
            l1,
            l2,
        )
