"""What an answer's last bytes say: `usage`, without parsing the stream."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Struct

from kvroute.fleet.worker import Worker
from kvroute.gateway.planner import RequestPlan
from kvroute.metrics import Metrics
from kvroute.openai.request import UNREADABLE
from kvroute.routing.audit import Audit, Prediction
from kvroute.routing.registry import STRATEGIES
from kvroute.routing.strategy import Candidate, ExactPrompt, Needs, RouteDecision, Tokens

_TAIL_BYTES = 4096
_SMALL_BYTES = 2048
"""Up to here it costs less to decode an answer than to search it."""
# Inside generated text the quotes would be escaped, so these match only the worker's own fields.
_first_prompt_tokens = re.compile(rb'"usage"\s*:\s*\{\s*"(?:prompt|input)_tokens"\s*:\s*(\d+)').match
_prompt_tokens = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)').search
_cached_tokens = re.compile(rb'"cached_tokens"\s*:\s*(\d+)').search


class _Details(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cached_tokens: int | None = None


class _Answer(Struct, gc=False):
    usage: _Usage | None = None


_new = tuple.__new__
_decode_answer = msgspec.json.Decoder(_Answer).decode


class Usage(NamedTuple):
    """`cached_tokens` is None when the worker does not tell (vLLM without --enable-prompt-tokens-details)."""

    prompt_tokens: int
    cached_tokens: int | None


def usage_in(before_last: bytes, last: bytes) -> Usage | None:
    """The usage in an answer's last two chunks, None where it has none. A few us, once an answer."""
    if not before_last and len(last) <= _SMALL_BYTES and last.startswith(b"{"):
        usage = _decoded(last)
        if usage is not None:
            return usage
    tail = (before_last + last if len(last) < _TAIL_BYTES else last)[-_TAIL_BYTES:]
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None
    # It is the first field of all engines' usage; to search for it costs three times as much.
    prompt = _first_prompt_tokens(tail, start) or _prompt_tokens(tail, start)
    if prompt is None:
        return None
    # Most engines do not tell by default, and to find a literal absent costs less than a pattern.
    cached = _cached_tokens(tail, start) if tail.find(b'"cached_tokens"', start) >= 0 else None
    return _new(Usage, (int(prompt[1]), int(cached[1]) if cached else None))


def _decoded(answer: bytes) -> Usage | None:
    """Of a whole answer; None where it is not to be had in this way."""
    try:
        usage = _decode_answer(answer).usage
    except UNREADABLE:
        return None
    if usage is None:
        return None
    tokens, details = usage.prompt_tokens, usage.prompt_tokens_details
    if tokens is None:
        tokens, details = usage.input_tokens, usage.input_tokens_details
    if tokens is None or tokens < 0:
        return None
    cached = usage.cached_tokens if details is None else details.cached_tokens
    if cached is not None and cached < 0:
        cached = None
    # As `Usage(...)`, without its Python-level constructor.
    return _new(Usage, (tokens, cached))


_MOST_LINES = 4096
_PREDICTING = frozenset(
    name for name, strategy in STRATEGIES.items() if strategy.needs in (Needs.PROMPT, Needs.TOKENS)
)
"""Strategies that predict cached tokens: those that read the prompt."""


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
