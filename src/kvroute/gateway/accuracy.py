"""Whether predictions were right: what the workers report is compared with what the strategy predicted."""

from __future__ import annotations

import logging
from typing import Protocol

from kvroute.fleet.worker import Worker
from kvroute.gateway.journal import Usage
from kvroute.gateway.planner import RequestPlan
from kvroute.metrics import Metrics
from kvroute.routing.audit import Audit, Prediction
from kvroute.routing.strategy import Candidate, ExactPrompt

log = logging.getLogger(__name__)

_AUDIT = "audit"


class Feedback(Protocol):
    """Who keeps the map, and learns from answers."""

    def answered(
        self,
        worker: Worker,
        rank: int,
        model: str,
        prompt: ExactPrompt,
        sent: float,
        cached_tokens: int | None,
    ) -> None:
        """The worker's rank has computed this prompt of `model`, sent at `sent` (`Clock.now()`), of which it
        had `cached_tokens`, if it tells."""
        ...

    def distrust(self, worker: Worker, rank: int, why: str) -> None:
        """The map of this place is wrong more often than not."""
        ...


class PredictionAudit:
    """One for all exchanges. Mutable: `audit`'s counts."""

    def __init__(self, audit: Audit, metrics: Metrics, feedback: Feedback | None) -> None:
        self.hears_all = feedback is not None
        """Whether `answered` has something to do even where a worker does not tell its cached tokens."""
        self.audit = audit
        self._metrics = metrics
        self._feedback = feedback

    def answered(self, plan: RequestPlan, candidate: Candidate, usage: Usage) -> None:
        """An answer is complete, and told what it used. Costs a few us; never raises for what it says."""
        feedback = self._feedback
        if feedback is None and usage.cached_tokens is None:
            return
        query, worker, held = plan.query, candidate.worker, candidate.held
        rank = 0 if held is None or held.rank is None else held.rank
        if feedback is not None and len(query.exact) == 1:
            feedback.answered(worker, rank, plan.model, query.exact[0], query.now, usage.cached_tokens)
        # Several prompts are several engine requests, of which vLLM 0.32 reports one.
        cached_tokens = usage.cached_tokens
        if cached_tokens is None or len(query.prompts) != 1:
            return
        strategy, worker_id, tokens = plan.decision.strategy, worker.spec.id, candidate.matched_tokens
        if held is None:
            tier, judged = "gpu" if tokens else "none", False  # as `Tokens.tier`
        else:
            tier, judged = held.tokens.tier(), held.mapped and not held.why
        outcome, is_wrong = self.audit.reported(
            Prediction(strategy, worker_id, rank, tier, tokens, worker.block_size, judged), cached_tokens
        )
        self._metrics.predicted(strategy, worker_id, tier, outcome, abs(tokens - cached_tokens))
        if is_wrong and feedback is not None:
            log.warning(
                "worker %s: its predicted hits fail too often; its map is not believed now", worker_id
            )
            self._metrics.map_demotions.labels(worker_id, _AUDIT).inc()
            feedback.distrust(worker, rank, _AUDIT)
