"""What the strategies learn from answers: how right their predictions were."""

from __future__ import annotations

import logging
from typing import Protocol

from kvroute.fleet.worker import ASSUMED_BLOCK_TOKENS, Worker
from kvroute.index.map_trust import cause_and_fix
from kvroute.metrics import Metrics
from kvroute.request.plan import RequestPlan
from kvroute.request.record import Usage
from kvroute.routing.audit import Audit
from kvroute.routing.reports import Reports
from kvroute.routing.strategy import Candidate, ExactPrompt, Tokens

log = logging.getLogger(__name__)

_AUDIT = "audit"
_NO_TIER, _GPU = Tokens(0).tier(), Tokens(1).tier()


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

    def judged(self, slot: int, tokens: Tokens, cached_tokens: int, has_drafter: bool) -> bool:
        """A whole map predicted `tokens` for this slot; True if the gateway has learned another rule from it.

        `has_drafter`: see `WorkerFacts`.
        """
        ...

    def distrust(self, worker: Worker, rank: int, why: str) -> None:
        """More than half of the predicted hits of this worker's rank failed: do not use its map."""
        ...


class PredictionAudit:
    """Passes the usage of answers to `audit` and to `feedback`. Mutable: the counts of `audit`."""

    def __init__(
        self,
        audit: Audit,
        metrics: Metrics,
        feedback: Feedback | None,
        reports: Reports | None = None,
    ) -> None:
        self.audit = audit
        audit.on_counted = metrics.predicted
        metrics.call_before_collect(audit.settle)
        self._metrics = metrics
        self._feedback = feedback
        self._reports = reports

    def answered(self, plan: RequestPlan, candidate: Candidate, usage: Usage) -> None:
        """A complete answer reported `usage`. Costs a few us; raises nothing for any values in it."""
        feedback, query, worker, held = self._feedback, plan.query, candidate.worker, candidate.match
        prompts, reports, cached_tokens = query.prompts, self._reports, usage.cached_tokens
        keys = prompts[0].keys if len(prompts) == 1 else ()
        if keys and usage.completion_tokens and reports is not None:
            # Several choices are several answers, and no usage tells their lengths apart; the next turn has
            # one of them, so the sum is too much. The audit and the discount notice.
            unit = worker.index if held is None else worker.unit_of(held.rank)
            reports.answers.add(unit, keys[-1], usage.prompt_tokens, usage.completion_tokens)
        if feedback is None and cached_tokens is None:
            return
        facts = worker.facts
        if not query.reads_cache or not facts.caches_prefixes:
            return  # nothing was predicted
        if not query.takes_rank and query.rank is None:
            return  # nobody knows the rank whose cache was read
        rank = 0 if held is None or held.rank is None else held.rank
        if feedback is not None and len(query.exact) == 1:
            feedback.answered(worker, rank, plan.model, query.exact[0], query.now, cached_tokens)
        # Several prompts are several engine requests, of which vLLM 0.32 reports one.
        if cached_tokens is None or len(prompts) != 1:
            return
        strategy, worker_id, tokens = plan.decision.strategy, worker.spec.id, candidate.matched_tokens
        block_tokens = facts.block_size or ASSUMED_BLOCK_TOKENS
        if held is None:
            is_mapped, judged, tier = False, False, _GPU if tokens else _NO_TIER
        else:
            is_mapped, tier = held.mapped, held.tokens.tier()
            judged = is_mapped and not held.distrust_reason
            if (
                judged
                and feedback is not None
                and held.slot is not None
                and feedback.judged(held.slot, held.tokens, cached_tokens, facts.has_drafter)
            ):
                log.info("worker %s: its reports show another rule for the last unit of hits", worker_id)
                self.audit.forget(worker_id)
        if tokens and reports is not None:
            reports.discounts.reported(worker.index, is_mapped, tokens, cached_tokens, block_tokens)
        self.audit.reported(strategy, worker_id, tier, block_tokens, tokens, cached_tokens)
        if (
            judged
            and self.audit.is_wrong(worker_id, rank, abs(tokens - cached_tokens) >= block_tokens)
            and feedback is not None
        ):
            log.warning(
                "worker %s: too many predicted hits failed; its cache map is not used now%s",
                worker_id,
                cause_and_fix(_AUDIT),
            )
            self._metrics.map_demotions.labels(worker_id, _AUDIT).inc()
            feedback.distrust(worker, rank, _AUDIT)

    def fetched(self, plan: RequestPlan, candidate: Candidate, moved_tokens: int) -> None:
        """A decode worker has answered a prompt of which it got `moved_tokens` from another worker."""
        feedback, query, worker, held = self._feedback, plan.query, candidate.worker, candidate.match
        # It announces the blocks that it got, like those that it computes.
        if feedback is not None and len(query.exact) == 1 and moved_tokens > worker.block_size:
            rank = 0 if held is None or held.rank is None else held.rank
            feedback.answered(worker, rank, plan.model, query.exact[0], query.now, None)
