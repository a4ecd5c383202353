"""What goes into a routing decision and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct

from kvroute.blocks.keys import PromptKeys
from kvroute.fleet.load import WorkerLoad
from kvroute.fleet.worker import Worker
from kvroute.routing.caches import ExactPrompt, Held


class Needs(StrEnum):
    """What a strategy wants prepared before `rank` is called."""

    NOTHING = "nothing"
    PROMPT = "prompt"
    """`RouteQuery.prompts` filled with block keys of the prompt's bytes."""
    SESSION_KEY = "session_key"
    """`RouteQuery.session_key`, where the request carries one."""
    TOKENS = "tokens"
    """`RouteQuery.exact` filled with the prompt's token ids, or `inexact` with why not; `prompts` too."""


class Reason(StrEnum):
    """Why a worker came first: one word per branch of a strategy; bounded, so a metric label."""

    ROUND_ROBIN = "round_robin"
    SESSION = "session"
    SESSION_SPILL = "session_spill"
    """The session's worker is over its load bound; the next on the ring took it."""
    NO_SESSION_KEY = "no_session_key"
    PREFIX_HIT = "prefix_hit"
    PREFIX_SPILL = "prefix_spill"
    """Another worker holds more of the prompt, but waiting for it would cost more."""
    PREFIX_MISS = "prefix_miss"
    KV_HIT = "kv_hit"
    """No worker's caches hold more of the prompt."""
    KV_SPILL = "kv_spill"
    """Another worker's caches hold more of the prompt, but using them would cost more."""
    KV_MISS = "kv_miss"
    KV_APPROXIMATE = "kv_approximate"
    """The prompt's tokens are not known, so what was sent where decided."""
    NO_PROMPT = "no_prompt"
    """The body carries nothing that a KV cache could hold, or could not be read: least load."""
    RESPONSE_OWNER = "response_owner"
    """The request continues a stored response that lives on this worker only."""
    ONLY_WORKER = "only_worker"


class RouteQuery(Struct, frozen=True, gc=False):
    """One request as a strategy sees it. `now` is `Clock.now()`; times are seconds, lengths tokens.

    `prompts` has one entry per listed prompt (completions take several), `tokens` is their sum, or an
    estimate from the body's size where no prompt was read. `fingerprint` is a stable 64-bit hash of the
    prompt: ties break by it, so that explain and the request that follows agree. `exact` has the same
    prompts token by token, for strategies that ask for it; where it is empty, `inexact` says why.
    """

    model: str
    now: float
    prompts: tuple[PromptKeys, ...] = ()
    tokens: int = 0
    session_key: str | None = None
    streamed: bool = True
    fingerprint: int = 0
    exact: tuple[ExactPrompt, ...] = ()
    inexact: str = ""


class CostTerms(NamedTuple):
    """The arithmetic behind one score, all in seconds (docs/routing.md gives the formula).

    `score` is max(wait, load) + prefill + memory + eviction + marginal + decode + ramp.
    """

    wait: float = 0.0
    """Prefill queued in front of the request."""
    load: float = 0.0
    """Until its blocks would have come from slower tiers; passes while it waits."""
    prefill: float = 0.0
    """Its own missing tokens."""
    memory: float = 0.0
    """For KV memory that running requests do not leave free."""
    eviction: float = 0.0
    """To recompute the tracked blocks that it would push out."""
    marginal: float = 0.0
    """Delay that its own work puts on requests to come."""
    decode: float = 0.0
    """What the tokens of running requests add to its answer."""
    ramp: float = 0.0
    """What keeps a worker just back from ejection at its share."""

    @property
    def score(self) -> float:
        return max(self.wait, self.load) + sum(self[2:])


Row: TypeAlias = (
    tuple[float, float, float, float, float]
    | tuple[float, float, float, float, float, float, float, float, float]
)
"""A score and the `CostTerms` behind it: prefill, wait, marginal, decode; then load, memory, eviction and
ramp, where one of them may not be zero."""


_NO_OTHERS = [0.0] * 4


class Candidate(Struct, frozen=True, eq=False, gc=False):
    """One routable worker in a ranking. `matched_tokens` is what of the prompt it is believed to hold;
    `held` says where, for strategies that know. `terms` are made when somebody asks."""

    worker: Worker
    score: float
    matched_tokens: int
    prefill_s: float
    terms_or_row: CostTerms | Row
    held: Held | None = None

    @property
    def terms(self) -> CostTerms:
        """The arithmetic behind the score."""
        terms = self.terms_or_row
        if isinstance(terms, CostTerms):
            return terms
        _, prefill, wait, marginal, decode, *others = terms
        load, memory, eviction, ramp = others or _NO_OTHERS
        return CostTerms(wait, load, prefill, memory, eviction, marginal, decode, ramp)

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if isinstance(other, Candidate) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._fields())

    def _fields(self) -> tuple[object, ...]:
        return self.worker, self.score, self.matched_tokens, self.prefill_s, self.terms, self.held

    @property
    def rank(self) -> int | None:
        """Data-parallel rank to ask for; None where there is no choice."""
        return None if self.held is None else self.held.rank

    @property
    def queue(self) -> WorkerLoad:
        """The load that the request would join: the worker's, or its rank's."""
        return self.worker.load_of(self.rank)


class RouteDecision(Struct, frozen=True, gc=False):
    """Every routable worker, best first. `reason` says why the first one is first."""

    strategy: str
    reason: Reason
    ranking: Sequence[Candidate]

    def describe(self) -> dict[str, Any]:
        """Ready for JSON: the arithmetic of every candidate, in seconds and tokens."""
        return {
            "strategy": self.strategy,
            "reason": self.reason.value,
            "ranking": [
                {
                    "worker": candidate.worker.id,
                    "score_s": candidate.score,
                    "matched_tokens": candidate.matched_tokens,
                    "terms_s": candidate.terms._asdict(),
                    **_where(candidate.held),
                }
                for candidate in self.ranking
            ],
        }


def _where(held: Held | None) -> dict[str, Any]:
    if held is None:
        return {}
    return {
        "tiers": held.tokens._asdict(),
        "data_parallel_rank": held.rank,
        "believed_from": "cache events" if held.mapped else "what was sent there",
        "map": held.why or "whole",
    }
