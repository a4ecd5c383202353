"""The seam of a routing strategy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from kvroute.blocks.chunks import ChunkKey, PromptChunks
from kvroute.blocks.keys import KEY_TOKENS, BlockKey, PromptKeys
from kvroute.fleet.load import WorkerLoad
from kvroute.fleet.worker import ASSUMED_BLOCK_TOKENS, FleetView, Worker
from kvroute.index.chunk_index import ChunkHolder
from kvroute.index.history import RouteHistory
from kvroute.options import Options
from kvroute.routing.cost_parameters import Costs

Probed: TypeAlias = Mapping[ChunkHolder, Collection[ChunkKey]] | None
"""What a shared store said it has of a prompt; None where none was asked."""


class ExactPrompt(NamedTuple):
    """One prompt as the engine will see it.

    `keys` are `blocks.tokens.prompt_keys` of its `tokens` ids, one for `key_tokens` of them; `chunks` names
    the same tokens as LMCache does, as far as asked; `salt` is the request's cache salt, `adapter` its LoRA
    adapter, `probed` what a shared store says it has of it.
    """

    tokens: int
    keys: Sequence[BlockKey]
    chunks: PromptChunks
    salt: str = ""
    adapter: str | None = None
    probed: Probed = None
    key_tokens: int = KEY_TOKENS


class Standing(StrEnum):
    """How far a place's map is to be believed."""

    WHOLE = "whole"
    """It is what the worker holds."""
    PARTIAL = "partial"
    """What it says is true; the worker may hold more."""
    NONE = "none"
    """It says nothing; what was sent there is believed instead."""


class CachePlace(NamedTuple):
    """Where a request can go: a worker, or one data-parallel rank of it, with a cache of its own.

    `slot` is its number in the map, unique among all places; `why` says what is wrong while `standing` is
    not WHOLE.
    """

    slot: int
    rank: int
    standing: Standing
    why: str = ""


class Tokens(NamedTuple):
    """Tokens of a prompt by where they lie; a tier counts what the ones before it lack."""

    gpu: int = 0
    l1: int = 0
    l2: int = 0

    @property
    def total(self) -> int:
        return self.gpu + self.l1 + self.l2

    def tier(self) -> str:
        """The slowest tier that has a part, as a metric label."""
        return "l2" if self.l2 else "l1" if self.l1 else "gpu" if self.gpu else "none"


class CandidateMatch(NamedTuple):
    """What one candidate is believed to hold of a query's prompts, and where it lies.

    `rank` is the data-parallel rank to ask for, None where the worker has only one; `slot` is None where
    the worker has no map. `mapped` is False where `tokens` are judged by what was sent there.
    """

    tokens: Tokens
    slot: int | None = None
    rank: int | None = None
    mapped: bool = False
    why: str = ""


class CacheMap(Protocol):
    """The live map of which blocks lie where. Read synchronously, never across an await."""

    def refresh(self, force: bool) -> bool:
        """Apply the events that have arrived. Without `force`, a map that was refreshed some milliseconds ago
        is left as it is. True if every event that has arrived is in the map."""
        ...

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        """The worker's places by rank; empty as long as none is known."""
        ...

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        """Per slot that holds any: its leading tokens of the prompt. Changes nothing."""
        ...


class NoMap:
    """For a gateway that follows no caches."""

    def refresh(self, force: bool) -> bool:
        return True

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        return ()

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        return {}


class Needs(StrEnum):
    """What a strategy wants prepared before `rank` is called."""

    NOTHING = "nothing"
    PROMPT = "prompt"
    """`RouteQuery.prompts` filled with block keys of the prompt's bytes."""
    SESSION_KEY = "session_key"
    """`RouteQuery.session_key`, where the request carries one."""
    TOKENS = "tokens"
    """`RouteQuery.exact` filled with the prompt's token ids, or `inexact` with why not; `prompts` too."""


class RouteReason(StrEnum):
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
    held: CandidateMatch | None = None

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
    reason: RouteReason
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


def _where(held: CandidateMatch | None) -> dict[str, Any]:
    if held is None:
        return {}
    return {
        "tiers": held.tokens._asdict(),
        "data_parallel_rank": held.rank,
        "believed_from": "cache events" if held.mapped else "what was sent there",
        "map": held.why or "whole",
    }


class Strategy(Protocol):
    """A way to order the routable workers for one request.

    `rank` is pure towards the outside: no I/O, no clock (the query brings `now`), and calling it any
    number of times changes no later answer, so that explain can call it freely. What a dispatch
    changes, it changes in `on_dispatch`.
    """

    name: ClassVar[str]
    """Its key in `routing/registry.py`, and the name of its section under `routing`."""
    needs: ClassVar[Needs]
    options: ClassVar[type[Options]]
    """Its own option class; the constructor gets an instance."""
    observes_dispatch: ClassVar[bool]
    """Whether `on_dispatch` changes anything. If False, the router does not call it."""
    has_affinity: ClassVar[bool]
    """Whether the turns of one conversation usually go to the same worker."""

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        """Order `view.workers` (never empty), best first; from the second on by cost."""
        ...

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        """The request is on its way to `candidate`: advance counters such as round robin's. Costs O(1).

        Called once per attempt, so after a failed one again with the next candidate.
        """
        ...

    def forget(self, session_key: str) -> bool:
        """Drop what is remembered about one session; False when nothing was."""
        ...


def matched_tokens(
    history: RouteHistory,
    query: RouteQuery,
    workers: Sequence[Worker],
    places: Mapping[int, int] | None = None,
) -> list[int]:
    """Tokens of the query's prompts per worker, summed over the prompts, in the order of `workers`.

    Per prompt at most all but its last token, which is always computed, in whole blocks of the worker's
    own size. Blocks of unfinished requests count: they are there, or will be before this request runs.
    `places` says where in `workers` the one of an index is, where that is at hand (`FleetView.places`):
    then only workers that hold something are looked at.
    """
    totals = [0] * len(workers)
    for prompt in query.prompts:
        held = history.match(prompt.keys)
        if not held:
            continue
        if places is None:
            places = {worker.index: place for place, worker in enumerate(workers)}
        length, block_tokens = prompt.tokens, prompt.block_tokens
        tokens = known = 0
        for index, blocks in held.items():
            try:
                place = places[index]
            except KeyError:  # a holder that is not asked about
                continue
            if blocks != known:  # else as for the worker before
                known, tokens = blocks, int(blocks * block_tokens)
                if tokens >= length:
                    tokens = length - 1
            totals[place] += tokens - tokens % (workers[place].facts.block_size or ASSUMED_BLOCK_TOKENS)
    return totals


class Prefetch(NamedTuple):
    """What is worth it: the leading tokens to have in L1, and how many seconds from the decision on is the
    last time to ask for them."""

    tokens: int
    spare_s: float


def prefetch_of(candidate: Candidate, *, server_known: bool, delay_s: float) -> Prefetch | None:
    """A prefetch for a request that is sent to `candidate`; None where there is nothing to gain.

    Engines look into LMCache when a request's turn comes, and load then. That can be done before if the wait
    in the queue is longer than the load. Where it is not, the engine would find the load half done, and would
    load the same again beside it (LMCache 0.5.6, `L1Manager.reserve_write`). Worse, chunks that arrive while
    the engine's lookup is under way are found nowhere: it has looked into L1 already, and may not load what
    is there by then (`_reserve_l1_cells`, `l1_contended`). An engine with room looks at once, any other at
    the request's turn; so the chunks shall be asked for `delay_s` after the request is sent, and be there as
    long before its turn. `server_known` says whether the worker's LMCache server is known.
    """
    held, terms = candidate.held, candidate.terms
    if held is None or not held.tokens.l2 or not server_known:
        return None
    last_s = terms.wait - terms.load - delay_s
    return Prefetch(held.tokens.total, last_s) if last_s > delay_s else None


class TokenPatience(NamedTuple):
    """`loss_share` is the part of a prompt's prefill time that routing it without its tokens costs on
    average: how often the approximate choice misses a cache, times how much of the prompt that cache has."""

    least_s: float
    most_s: float
    loss_share: float


def token_deadline_s(tokens: int, workers: int, costs: Costs, patience: TokenPatience) -> float:
    """Seconds that a prompt of about `tokens` tokens waits at most, when `workers` could take it.

    A second of waiting delays the first token by a second, so waiting is worth at most the expected loss of
    not waiting: a share of the prefill. A choice among fewer than two workers loses nothing.
    """
    least, most, loss_share = patience
    if workers < 2:
        return least
    loss_s = loss_share * costs.prefill_s(tokens, 0)
    return max(least, min(loss_s, most))
