"""Compares the cached tokens that workers report with the strategy's predictions."""

from __future__ import annotations

import logging
from typing import Protocol

from kvroute.fleet.worker import Worker
from kvroute.gateway.journal import Usage
from kvroute.gateway.planner import RequestPlan
from kvroute.metrics import Metrics
from kvroute.routing.audit import Audit, Prediction
from kvroute.routing.strategy import Candidate, ExactPrompt, Tokens

log = logging.getLogger(__name__)

_AUDIT = "audit"


class Feedback(Protocol):
    """The owner of the cache map, which learns from answers."""

    def answered(
        self,
        worker: Worker,
        rank: int,
        model: str,
        prompt: ExactPrompt,
        sent: float,
        cached_tokens: int | None,
    ) -> None:
        """A rank of the worker has computed `prompt` for `model`.

        The request was sent at `sent` (`Clock.now()`). `cached_tokens` of the prompt were cached there; None
        if the worker does not report it.
        """
        ...

    def distrust(self, worker: Worker, rank: int, why: str) -> None:
        """More than half of the predicted hits of this worker's rank failed: do not use its map."""
        ...


class PredictionAudit:
    """Passes the usage of answers to `audit` and to `feedback`. Mutable: the counts of `audit`."""

    def __init__(self, audit: Audit, metrics: Metrics, feedback: Feedback | None) -> None:
        self.wants_all_answers = feedback is not None
        """Whether `answered` must be called even for answers without cached tokens."""
        self.audit = audit
        self._metrics = metrics
        self._feedback = feedback

    def answered(self, plan: RequestPlan, candidate: Candidate, usage: Usage) -> None:
        """A complete answer reported `usage`. Costs a few us; raises nothing for any values in it."""
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
        judged = held is not None and held.mapped and not held.why
        tier = (Tokens(tokens) if held is None else held.tokens).tier()
        outcome, is_wrong = self.audit.reported(
            Prediction(strategy, worker_id, rank, tier, tokens, worker.block_size, judged), cached_tokens
        )
        self._metrics.predicted(strategy, worker_id, tier, outcome, abs(tokens - cached_tokens))
        if is_wrong and feedback is not None:
            log.warning("worker %s: too many predicted hits failed; its cache map is not used now", worker_id)
            self._metrics.map_demotions.labels(worker_id, _AUDIT).inc()
            feedback.distrust(worker, rank, _AUDIT)
