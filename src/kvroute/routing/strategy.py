"""The interface of a routing strategy, with its input (`RouteQuery`) and its result (`RouteDecision`)."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from kvroute.blocks.chunks import ChunkKey, PromptChunks
from kvroute.blocks.keys import (
    KEY_TOKENS,
    BlockKey,
    PromptKeys,
    adapter_space,
    lookahead_keys,
    token_keys,
)
from kvroute.fleet.load import WorkerLoad
from kvroute.fleet.worker import FleetView, Worker, WorkerId
from kvroute.index.chunk_index import ChunkHolder
from kvroute.index.map_trust import MapTrust
from kvroute.options import Options
from kvroute.routing.cost_parameters import Costs

Probed: TypeAlias = Mapping[ChunkHolder, Collection[ChunkKey]] | None
"""The chunks of a prompt that a shared store has reported to hold, by holder; None without a query."""


class ExactPrompt(NamedTuple):
    """One prompt, token by token, as the engine will see it."""

    tokens: int
    """Number of token ids."""
    keys: Sequence[BlockKey]
    """Block keys of the token ids (`blocks.keys.prompt_keys`), one per `key_tokens` tokens."""
    chunks: PromptChunks
    """The same tokens as LMCache's chunks; hashed on demand."""
    salt: str = ""
    """The request's cache salt."""
    adapter: str | None = None
    """The request's LoRA adapter."""
    probed: Probed = None
    key_tokens: int = KEY_TOKENS
    last_id: int | None = None
    """The last token id, which `chunks` and `keys` lack because it is always computed; None if unknown."""

    @property
    def end_key(self) -> BlockKey | None:
        """The key at the very end of the prompt; None if no key ends there, or the last id is unknown."""
        ids, last = self.chunks.token_ids, self.last_id
        if last is None or self.tokens % self.key_tokens or len(ids) + 1 != self.tokens:
            return None
        seed = self.keys[-1] if self.keys else adapter_space(self.adapter, self.salt).seed
        return token_keys([*ids[len(ids) + 1 - self.key_tokens :], last], seed)[-1]

    def keys_ahead(self, ahead: int) -> list[BlockKey]:
        """The keys for workers whose block hashes cover `ahead` more tokens: `blocks.keys.lookahead_keys`."""
        ids = array("I", self.chunks.token_ids)
        if self.last_id is not None:
            ids.append(self.last_id)
        return lookahead_keys(ids, adapter_space(self.adapter, self.salt).seed, ahead)


class CachePlace(NamedTuple):
    """A worker, or one data-parallel rank of a worker, with its own cache.

    `slot` is its number in the cache map, unique among all places; `distrust_reason` says
    why `trust` is not WHOLE. `ahead` is the number of tokens that its block hashes cover after each block.
    `unit` is the number of tokens in the unit of hits if the worker's block is not that unit, else 0.
    `has_groups`: it has several
    KV cache groups; `drops`: the engine computes the last matched unit again. `note` explains the reason
    further.
    """

    slot: int
    rank: int
    trust: MapTrust
    distrust_reason: str = ""
    ahead: int = 0
    unit: int = 0
    has_groups: bool = False
    drops: bool = False
    note: str = ""


class Tokens(NamedTuple):
    """Number of a prompt's tokens by tier. A tier counts only the tokens that faster tiers lack."""

    gpu: int = 0
    l1: int = 0
    l2: int = 0

    @property
    def total(self) -> int:
        return self.gpu + self.l1 + self.l2

    def tier(self) -> str:
        """The slowest tier that is used, as a metric label."""
        return "l2" if self.l2 else "l1" if self.l1 else "gpu" if self.gpu else "none"

    @property
    def otherwise(self) -> int | None:
        """The GPU tokens by the other assumption about the engine's last unit (`PrefixIndex.drops`).

        None: one unit more or less.
        """
        return None


class GroupTokens(Tokens):
    """The tokens of a worker with several KV cache groups. Mutable only at its construction."""

    _otherwise: int

    @classmethod
    def of(cls, gpu: int, l1: int, l2: int, otherwise: int) -> GroupTokens:
        tokens = cls(gpu, l1, l2)
        tokens._otherwise = otherwise
        return tokens

    @property
    def otherwise(self) -> int:
        return self._otherwise


class CandidateMatch(NamedTuple):
    """The matched tokens of one candidate, and their source."""

    tokens: Tokens
    slot: int | None = None
    """The candidate's slot in the cache map; None if it has no map."""
    rank: int | None = None
    """The data-parallel rank to send the request to; None if the worker has one rank only."""
    mapped: bool = False
    """Whether `tokens` come from the cache map; False if they come from the route history."""
    distrust_reason: str = ""
    """Why the map is not used, or is not whole; empty otherwise."""


class CacheMap(Protocol):
    """The live map of which worker holds which blocks. Read it synchronously, never across an await."""

    def refresh(self, force: bool) -> bool:
        """Apply the events that have arrived; return True if the map then has all of their changes.

        Without `force`, nothing happens if the last refresh was a few milliseconds ago.
        """
        ...

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        """The worker's places by rank; empty while none is known."""
        ...

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        """Slot -> matched leading tokens, for slots that hold any. Changes nothing."""
        ...

    def holds(self, slot: int, keys: Sequence[BlockKey], tokens: int) -> bool:
        """Whether the slot has the first `tokens` tokens of a prompt in GPU memory: `PrefixIndex.holds`.

        Further KV cache groups do not count: a prompt is computed when this one has its blocks.
        """
        ...

    def has_end(self, slot: int, keys: Sequence[BlockKey]) -> bool:
        """Whether the slot has the last whole block of a prompt: `PrefixIndex.has_end`."""
        ...

    def keys_of(self, slot: int, prompt: ExactPrompt) -> Sequence[BlockKey]:
        """The keys under which the slot's blocks of the prompt come into the map."""
        ...


class NoMap:
    """The empty cache map of a gateway that does not follow caches."""

    def refresh(self, force: bool) -> bool:
        return True

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        return ()

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        return {}

    def holds(self, slot: int, keys: Sequence[BlockKey], tokens: int) -> bool:
        return False

    def has_end(self, slot: int, keys: Sequence[BlockKey]) -> bool:
        return False

    def keys_of(self, slot: int, prompt: ExactPrompt) -> Sequence[BlockKey]:
        return prompt.keys


class Needs(StrEnum):
    """The parts of a `RouteQuery` that a strategy needs before `rank` is called.

    With any of them but NOTHING the query also has the request's `session_key`, if it has one.
    """

    NOTHING = "nothing"
    PROMPT = "prompt"
    """`RouteQuery.prompts`: block keys of the prompt's bytes."""
    SESSION_KEY = "session_key"
    """`RouteQuery.session_key` alone."""
    TOKENS = "tokens"
    """`RouteQuery.exact`: the prompt's token ids, or the reason in `inexact`; and `RouteQuery.prompts`."""


class RouteReason(StrEnum):
    """Why a worker came first: one word per branch of a strategy. A metric label, so the set is fixed."""

    ROUND_ROBIN = "round_robin"
    SESSION = "session"
    SESSION_SPILL = "session_spill"
    """The session's worker is over its load bound; the next worker on the ring got the request."""
    NO_SESSION_KEY = "no_session_key"
    PREFIX_HIT = "prefix_hit"
    PREFIX_SPILL = "prefix_spill"
    """Another worker holds more of the prompt, but waiting for that worker would cost more."""
    PREFIX_MISS = "prefix_miss"
    KV_HIT = "kv_hit"
    """No other worker's caches hold more of the prompt."""
    KV_SPILL = "kv_spill"
    """Another worker's caches hold more of the prompt, but using them would cost more."""
    KV_MISS = "kv_miss"
    SESSION_KEPT = "session_kept"
    """The session's last request went to this worker, or, if the session is new, that of its parent session,
    and no other one costs noticeably less."""
    KV_APPROXIMATE = "kv_approximate"
    """The prompt's token ids are unknown, so the route history decided."""
    NO_PROMPT = "no_prompt"
    """The body has no prompt that a KV cache could hold, or is unreadable: the least cost decided."""
    NOT_CACHED = "not_cached"
    """No cached block can be a hit: the request, or every worker, does not read a prefix cache."""
    RESPONSE_OWNER = "response_owner"
    """The request continues a stored response that only this worker has."""
    ONLY_WORKER = "only_worker"
    AT_LIMIT = "at_limit"
    """The workers that rank higher have as many requests as `admission` allows."""
    HANDED_OVER = "handed_over"
    """Another worker computes the prompt, because that costs less."""
    OVER_THRESHOLD = "over_threshold"
    """Another worker computes the prompt, because it has more uncached tokens than `threshold_tokens`."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    """No prefill worker serves, so the worker computes the prompt itself."""
    NO_DECODE_WORKER = "no_decode_worker"
    """No decode worker serves, so a prefill worker does the whole request."""
    DECODE_SIDE_FULL = "decode_side_full"
    """The decode workers lack KV memory, so a prefill worker does the whole request."""


class RouteQuery(Struct, frozen=True, gc=False):
    """The input of a routing decision: one request. Times are seconds, lengths are tokens."""

    model: str
    now: float
    """`Clock.now()`."""
    prompts: tuple[PromptKeys, ...] = ()
    """One entry per prompt; a completion may have several."""
    tokens: int = 0
    """Length of all prompts together, or an estimate from the body's size if no prompt was read."""
    session_key: str | None = None
    streamed: bool = True
    fingerprint: int = 0
    """A stable 64-bit hash of the prompt that breaks ties, so that explain and the request itself agree."""
    exact: tuple[ExactPrompt, ...] = ()
    """The same prompts token by token, for strategies with `Needs.TOKENS`."""
    inexact: str = ""
    """Why `exact` is empty although the strategy needs it."""
    hands_over: bool = False
    """Whether one worker may compute the prompt and another one the answer. Read if workers have roles."""
    session_worker: WorkerId | None = None
    """The worker of the session's last request (`routing.sessions`); None if it is not known."""
    parent_session: str | None = None
    """The key of the session that began this one, if the client names it."""
    reads_cache: bool = True
    """Whether an engine that caches prefixes reads its cache for this request (`openai.cache_reads`)."""
    takes_rank: bool = True
    """Whether the gateway may choose the data-parallel rank; False if the engine's own balancer does."""
    rank: int | None = None
    """The data-parallel rank that the client has chosen, as in the header (`Worker.sent_rank`)."""
    from_parent: bool = False
    """Whether the session is new, and `session_worker` is the worker of `parent_session`."""
    session_hash: int = 0
    """Of `session_key` and the model (`sessions.hash_of_session`); 0 if nobody has computed it."""


class CostTerms(NamedTuple):
    """The terms of one score, all in seconds (docs/routing.md has the formula).

    `score` is max(wait, load) + prefill + memory + eviction + marginal + decode + ramp.
    """

    wait: float = 0.0
    """Prefill queued before the request."""
    load: float = 0.0
    """Until the request's blocks are loaded from slower tiers; runs in parallel with `wait`."""
    prefill: float = 0.0
    """Prefill of the request's own missing tokens."""
    memory: float = 0.0
    """Waiting for KV memory that running requests use."""
    eviction: float = 0.0
    """Recomputing the tracked blocks that the request would evict."""
    marginal: float = 0.0
    """The delay of later requests by the work of this one."""
    decode: float = 0.0
    """The delay of the answer by the tokens of running requests."""
    ramp: float = 0.0
    """A surcharge that keeps a worker at its traffic share (`Worker.share`)."""

    @property
    def score(self) -> float:
        return max(self.wait, self.load) + sum(self[2:])


Row: TypeAlias = (
    tuple[float, float, float, float, float]
    | tuple[float, float, float, float, float, float, float, float, float]
)
"""A score and its `CostTerms`: prefill, wait, marginal, decode; then load, memory, eviction and ramp, unless
all four are zero. The names of the positions:"""
SCORE: Final = 0
PREFILL: Final = 1
WAIT: Final = 2
MARGINAL: Final = 3
DECODE: Final = 4
LOAD: Final = 5
MEMORY: Final = 6
SHORT_ROW: Final = 5
# A loop over all workers unpacks the rows: a position by name costs a look-up more than a constant.


_NO_OTHERS = [0.0] * 4


class Candidate(Struct, frozen=True, eq=False, gc=False):
    """One routable worker in a ranking.

    `matched_tokens` is the number of prompt tokens whose KV the worker is expected to hold; `match` has them
    by tier, if the strategy reads a cache map.
    """

    worker: Worker
    score: float
    matched_tokens: int
    prefill_s: float
    terms_or_row: CostTerms | Row
    """Read `terms` instead."""
    match: CandidateMatch | None = None
    counted_tokens: int | None = None
    """What the score counts of `matched_tokens` where the worker's reports contradict its predictions; None:
    all."""

    @property
    def terms(self) -> CostTerms:
        """The terms of the score; constructed at each call."""
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
        return (
            self.worker,
            self.score,
            self.matched_tokens,
            self.prefill_s,
            self.terms,
            self.match,
            self.counted,
        )

    @property
    def counted(self) -> int:
        """The matched tokens that the score counts."""
        return self.matched_tokens if self.counted_tokens is None else self.counted_tokens

    @property
    def rank(self) -> int | None:
        """The data-parallel rank to send the request to; None if the worker has one rank only."""
        return None if self.match is None else self.match.rank

    @property
    def queue(self) -> WorkerLoad:
        """The load that the request would be added to: the rank's if there is one, else the worker's."""
        return self.worker.load_of(self.rank)


class Handover(Struct, frozen=True, gc=False):
    """How the first worker of a ranking gets a prompt's KV from another worker (`routing.prefill_decode`)."""

    prefill: Candidate
    """The worker that computes the prompt."""
    decode_of_pair: Candidate
    """The first worker of the ranking as the decode worker of the pair: `ranking[0]`."""
    decode_only: Candidate
    """The first worker of the ranking as a candidate that computes the prompt itself."""
    moved_tokens: int
    """Prompt tokens that the first worker of the ranking lacks."""
    transfer_s: float
    """Estimated time to move them."""
    prefill_cost_s: float
    """Cost of the prompt on the prefill worker."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the prefill worker lacks, and therefore computes."""
        return self.decode_only.matched_tokens + self.moved_tokens - self.prefill.matched_tokens


class RouteDecision(Struct, frozen=True, gc=False):
    """All routable workers, best first. `reason` says why the first one is first."""

    strategy: str
    reason: RouteReason
    ranking: Sequence[Candidate]
    handover: Handover | None = None
    """None if the first worker computes the prompt itself; always None in fleets without roles."""

    def describe(self) -> dict[str, Any]:
        """The decision as JSON values: the terms of every candidate, in seconds and tokens."""
        return {
            "strategy": self.strategy,
            "reason": self.reason.value,
            "ranking": [
                {
                    "worker": candidate.worker.id,
                    "score_s": candidate.score,
                    "matched_tokens": candidate.matched_tokens,
                    "counted_tokens": candidate.counted,
                    "terms_s": candidate.terms._asdict(),
                    **_match_source(candidate.match),
                }
                for candidate in self.ranking
            ],
            **({} if self.handover is None else {"handover": _described(self.handover)}),
        }


def _described(handover: Handover) -> dict[str, Any]:
    prefill = handover.prefill
    return {
        "prefill_worker": prefill.worker.id,
        "prefill_cost_s": handover.prefill_cost_s,
        "matched_tokens": prefill.matched_tokens,
        "terms_s": prefill.terms._asdict(),
        **_match_source(prefill.match),
        "computed_tokens": handover.computed_tokens,
        "moved_tokens": handover.moved_tokens,
        "transfer_s": handover.transfer_s,
        "score_without_s": handover.decode_only.score,
    }


def _match_source(match: CandidateMatch | None) -> dict[str, Any]:
    if match is None:
        return {}
    if not match.mapped and not match.distrust_reason:  # a strategy without a cache map
        return {"data_parallel_rank": match.rank}
    return {
        "tiers": match.tokens._asdict(),
        "data_parallel_rank": match.rank,
        "believed_from": "cache events" if match.mapped else "what was sent there",
        "map": match.distrust_reason or "whole",
    }


class Strategy(Protocol):
    """Orders the routable workers for one request.

    `rank` does no I/O, reads no clock (the query has `now`) and changes no later result, so explain may call
    it at any time. All changes of state happen in `on_dispatch`.
    """

    name: ClassVar[str]
    """Its key in `routing/registry.py`, and the name of its section under `routing`."""
    needs: ClassVar[Needs]
    options: ClassVar[type[Options]]
    """The option class of this strategy only; the constructor gets an instance."""
    observes_dispatch: ClassVar[bool]
    """Whether `on_dispatch` changes anything. If False, the router does not call it."""
    has_affinity: ClassVar[bool]
    """Whether the turns of one conversation usually go to the same worker."""

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        """Order `view.workers` (never empty), best first. The second and later ones are ordered by cost."""
        ...

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        """Update the strategy's state for an attempt on `candidate`. O(1).

        Called once per attempt; after a failed attempt, again with the next candidate.
        """
        ...

    def forget(self, session_key: str) -> bool:
        """Drop the state of one session; False if there was none."""
        ...


class StatefulStrategy(Protocol):
    """A strategy whose `rank` reads state that its own `on_dispatch` writes.

    With these two methods a recorded decision can be made again (`routing/recording.py`).
    """

    def state_for(self, query: RouteQuery, view: FleetView) -> Any:
        """A copy of the state that `rank` would read now."""
        ...

    def restore(self, query: RouteQuery, view: FleetView, state: Any) -> None:
        """Set the state that `state_for` has returned for the same query and an equal view."""
        ...


class Prefetch(NamedTuple):
    """A prefetch into L1 that is worth its cost."""

    tokens: int
    """The number of leading tokens to have in L1."""
    spare_s: float
    """Latest time for the prefetch request, in seconds after the decision."""


def prefetch_of(candidate: Candidate, *, server_known: bool, delay_s: float) -> Prefetch | None:
    """The prefetch for a request that is sent to `candidate`; None if a prefetch gains nothing.

    `server_known`: whether the worker's LMCache server is known. The caller starts the prefetch at least
    `delay_s` after it has sent the request, and the chunks arrive at least `delay_s` before the prefill.
    """
    # An engine queries LMCache when the prefill of a request starts (an engine with free capacity
    # immediately), and loads then. A prefetch pays if the wait in the queue is longer than the load. If it is
    # shorter, the engine finds an unfinished prefetch and loads the same chunks a second time (LMCache 0.5.6,
    # `L1Manager.reserve_write`). Worse, chunks that arrive during the engine's lookup are not found: the
    # lookup has passed L1 already, and must not load chunks that are in L1 by then (`_reserve_l1_cells`,
    # `l1_contended`).
    match, terms = candidate.match, candidate.terms
    if match is None or not match.tokens.l2 or not server_known:
        return None
    last_s = terms.wait - terms.load - delay_s
    return Prefetch(match.tokens.total, last_s) if last_s > delay_s else None


class TokenWaitLimits(NamedTuple):
    """The limits of `token_timeout_s`, from the options `tokens.*`."""

    least_s: float
    most_s: float
    loss_share: float
    """Average cost of routing a prompt without its token ids, as a share of its prefill time: how often the
    approximate choice misses a cache, times the share of the prompt that this cache holds."""


def token_timeout_s(tokens: int, workers: int, costs: Costs, limits: TokenWaitLimits) -> float:
    """Longest wait for the token ids of a prompt of about `tokens` tokens, in seconds.

    `workers` is the number of workers that can serve the request.
    """
    least, most, loss_share = limits
    if workers < 2:  # the choice cannot be wrong
        return least
    # A second of waiting delays the first token by a second. So waiting is worth at most the expected loss
    # without token ids: a share of the prefill.
    loss_s = loss_share * costs.prefill_s(tokens, 0)
    return max(least, min(loss_s, most))
