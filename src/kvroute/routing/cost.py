"""What sending a request to a worker costs, in seconds: the one model behind every strategy.

docs/routing.md has the formula and where its numbers come from. Pure: reads live figures of workers and
history, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvroute.fleet.load import WorkerLoad
from kvroute.fleet.worker import Worker
from kvroute.index.history import RouteHistory
from kvroute.options import Options, option
from kvroute.routing.caches import Held
from kvroute.routing.decision import Candidate, CostTerms, RouteQuery
from kvroute.routing.learning import Fit, Learned

RESIDENCE_S = 5.0
"""How long a request is taken to hold its memory on a worker that has not finished one yet."""

MAX_UTILISATION = 0.9
"""Where rho / (1 - rho) stops rising. Costs that are too high show as a utilisation above what is possible:
at 0.98, costs believed four times too high kept agents' hot prefixes on single workers until their mean
time to first token was three times that of right costs; at 0.9 they are within 3% (bench/routing.py)."""


class CostOptions(Options):
    """What a model's work costs on one worker. The defaults are meant to be too high for most models: work
    that is taken for cheaper than it is leaves its cache too easily, which costs more than the opposite."""

    token_us: float = option(
        160.0,
        "Prefill time of one token.",
        unit="us",
        higher="keeps conversations where their cache is",
        lower="spreads requests sooner",
        gt=0,
    )
    context_token_ns: float = option(
        3.0,
        "Prefill time of one token per token of context before it (attention).",
        unit="ns",
        higher="long prompts count for more",
        lower="long prompts count like many short ones",
        ge=0,
    )
    iteration_ms: float = option(
        20.0,
        "Fixed time of one engine iteration; a prefill takes at least one.",
        unit="ms",
        higher="counts requests rather than tokens",
        lower="counts tokens rather than requests",
        ge=0,
    )
    max_batched_tokens: int = option(
        8192,
        "Tokens that the engine computes in one iteration (vLLM's --max-num-batched-tokens).",
        unit="tokens",
        higher="fewer iterations in a long prefill",
        lower="more iterations in a long prefill",
        ge=1,
    )
    lambda_cap: float = option(
        64.0,
        "Most seconds of other requests' delay that one second of own work is charged.",
        higher="more affinity near saturation",
        lower="more spreading near saturation; 0 looks at the request's own wait only",
        ge=0,
    )
    memory_limit: float = option(
        0.95,
        "Share of a worker's KV capacity that running requests may fill before sending more costs extra.",
        higher="packs workers tighter, at the risk of preemption",
        lower="spreads memory sooner",
        gt=0,
    )
    eviction_weight: float = option(
        1.0,
        "How much of the time to recompute the tracked blocks that a request pushes out it is charged.",
        higher="protects what a full worker holds",
        lower="0 lets any request push out anything",
        ge=0,
    )
    active_share: float = option(
        0.03,
        "What each prompt token of the requests in flight costs, as a share of `token_us`: about what "
        "reading it in every iteration adds to an answer. A prefix in use is computed again elsewhere "
        "once its worker has about 1 / `active_share` more requests of its size in flight.",
        higher="evens out running requests, copies hot prefixes sooner",
        lower="looks at the time to first token only; 0.001 merely breaks ties",
        ge=0,
    )
    balance_weight: float = option(
        8.0,
        "Seconds charged per second of own work, for each unit by which the worker's utilisation by prefill "
        "is above the fleet's mean: what a conversation begins on a worker, it goes on with there.",
        higher="new conversations leave a common prefix sooner for a worker that has done less",
        lower="0: a common prefix is followed as long as its holder looks idle",
        ge=0,
    )
    tie_share: float = option(
        0.02,
        "Scores within this share of the best, plus `tie_ms`, are equal: fewest active tokens goes first, "
        "then least prefill done lately.",
        higher="evens out load where costs differ little",
        lower="follows small differences in cost",
        ge=0,
    )
    tie_ms: float = option(
        1.0,
        "See `tie_share`.",
        unit="ms",
        higher="evens out load where costs differ little",
        lower="follows small differences in cost",
        ge=0,
    )


class Costs(NamedTuple):
    """`CostOptions` in seconds and tokens."""

    token_s: float
    context_token_s: float
    iteration_s: float
    max_batched_tokens: int
    lambda_cap: float
    memory_limit: float
    eviction_weight: float
    active_token_s: float
    balance_weight: float
    tie_share: float
    tie_s: float

    @classmethod
    def of(cls, options: CostOptions) -> Costs:
        return cls(
            options.token_us * 1e-6,
            options.context_token_ns * 1e-9,
            options.iteration_ms * 1e-3,
            options.max_batched_tokens,
            options.lambda_cap,
            options.memory_limit,
            options.eviction_weight,
            options.active_share * options.token_us * 1e-6,
            options.balance_weight,
            options.tie_share,
            options.tie_ms * 1e-3,
        )

    def prefill_s(self, miss: int, held: int, prompts: int = 1) -> float:
        """Seconds to compute `miss` tokens after `held` ones, both summed over `prompts` equal prompts."""
        chunks = max(1, -(-miss // self.max_batched_tokens))
        context = (held + miss / 2) / prompts
        return miss * (self.token_s + self.context_token_s * context) + self.iteration_s * chunks


class TierLoad(NamedTuple):
    """Fetching blocks from slower tiers instead of computing them, for one worker."""

    ready_s: float = 0.0
    """When they would be on the GPU, from now, other transfers before it included."""
    own_s: float = 0.0
    """Transfer time that this request adds."""


class Pressure(NamedTuple):
    """How busy a set of workers is with prefill, from what was dispatched to them."""

    utilisation: float
    """rho: seconds of prefill dispatched per second and worker."""
    mean_own_s: float
    """Mean prefill of one request."""
    busy: Sequence[float]
    """Each worker's own utilisation, in order."""


class CostModel:
    """Ranks workers by cost. Stateless but for the history it reads and what it remembers of fits; one for
    all models and strategies."""

    def __init__(
        self,
        history: RouteHistory,
        default: CostOptions | None = None,
        models: Mapping[str, CostOptions] | None = None,
        learned: Learned | None = None,
    ) -> None:
        self._history = history
        self._default = Costs.of(default or CostOptions())
        self._models = {model: Costs.of(options) for model, options in (models or {}).items()}
        self._learned = learned
        self._derived: dict[str, tuple[Fit, Costs]] = {}
        """What `costs` made of each model's last fit."""

    def configured(self, model: str) -> Costs:
        return self._models.get(model, self._default)

    def costs(self, model: str) -> Costs:
        """As configured; what first tokens have taught takes the place of the times, where there is any."""
        costs = self._models.get(model, self._default)
        if self._learned is None or (fit := self._learned.fit(model)) is None:
            return costs
        derived = self._derived.get(model)
        if derived is None or derived[0] is not fit:
            share = costs.active_token_s / costs.token_s
            learned = costs._replace(
                token_s=fit.token_s,
                context_token_s=fit.context_token_s,
                iteration_s=fit.iteration_s,
                active_token_s=share * fit.token_s,
            )
            derived = self._derived[model] = fit, learned
        return derived[1]

    def pressure(self, queues: Sequence[WorkerLoad], now: float) -> Pressure:
        busy: list[float] = []
        seconds = requests = 0.0
        for queue in queues:
            own_s, arrivals = queue.recent(now)
            busy.append(own_s)
            seconds += own_s
            requests += arrivals
        return Pressure(seconds / len(busy), seconds / requests if requests else 0.0, busy)

    def rank(
        self,
        query: RouteQuery,
        workers: Sequence[Worker],
        matched_tokens: Sequence[int] | None = None,
        loads: Sequence[TierLoad] | None = None,
        held_where: Sequence[Held] | None = None,
    ) -> list[Candidate]:
        """Every worker, cheapest first; ties by active tokens, then by prefill done lately, then by a hash
        of prompt and worker.

        `matched_tokens` says per worker how much of the prompt need not be computed there, `loads` what
        fetching that from slower tiers takes, `held_where` goes into the candidates as it is. A worker may
        come several times, as its ranks. About 2 us a worker.
        """
        now, tokens = query.now, query.tokens
        costs = self.costs(query.model)
        # Names instead of a named tuple's fields: those cost 15 to 30 ns each time.
        (
            token_s,
            context_token_s,
            iteration_s,
            max_batched_tokens,
            lambda_cap,
            memory_limit,
            eviction_weight,
            active_token_s,
            balance,
            tie_share,
            tie_s,
        ) = costs
        if held_where:
            queues = [worker.load_of(held.rank) for worker, held in zip(workers, held_where, strict=True)]
        else:
            queues = [worker.load for worker in workers]
        utilisation, mean_own_s, busy = self.pressure(queues, now)
        rho = utilisation if utilisation < MAX_UTILISATION else MAX_UTILISATION
        delay_factor = 0.5 * rho / (1 - rho) / mean_own_s if rho else 0.0
        prompts = len(query.prompts) or 1
        block_tokens = _block_tokens(query)
        part_of, new = self._history.part, tuple.__new__
        speeds = self._learned.speeds(query.model) if self._learned is not None else None
        ranking: list[Candidate] = []
        for worker, load, busy_s, held, (ready_s, transfer_s), where in zip(
            workers,
            queues,
            busy,
            matched_tokens or repeat(0),
            loads or repeat(_NO_LOAD),
            held_where or repeat(None),
            strict=False,
        ):
            miss = tokens - held
            # As `Costs.prefill_s`, without its call.
            chunks = -(-miss // max_batched_tokens)
            context = (held + miss / 2) / prompts
            prefill_s = miss * (token_s + context_token_s * context) + iteration_s * (
                chunks if chunks > 1 else 1
            )
            if speeds is not None:
                prefill_s *= speeds.of(worker.index)
            wait_s = load.wait(now)
            own_s = prefill_s + transfer_s
            delay = delay_factor * (wait_s + own_s)
            marginal_s = (delay if delay < lambda_cap else lambda_cap) * own_s
            excess = busy_s - utilisation
            if excess > 0.0:
                marginal_s += balance * excess * own_s
            memory_s = eviction_s = 0.0
            if block_tokens:
                part = part_of(worker.index)
                new_blocks = int(miss / block_tokens)
                capacity = part.capacity_blocks
                if part.blocks + new_blocks > capacity:
                    evicted = part.evicted_by(new_blocks)
                    eviction_s = eviction_weight * evicted * block_tokens * token_s
                over = part.active_blocks + new_blocks + load.in_flight - memory_limit * capacity
                if over > 0:
                    residence_s = load.residence_s
                    memory_s = (RESIDENCE_S if residence_s is None else residence_s) * over / capacity
            decode_s = active_token_s * load.active_tokens
            score = (
                (wait_s if wait_s > ready_s else ready_s)
                + prefill_s
                + memory_s
                + eviction_s
                + marginal_s
                + decode_s
            )
            ramp_s = 0.0
            if worker.ramp < 1.0:
                ramp_s = score / worker.ramp_at(now) - score
                score += ramp_s
            # As `CostTerms(...)`, without its Python-level constructor: half a microsecond a worker.
            terms = new(
                CostTerms, (wait_s, ready_s, prefill_s, memory_s, eviction_s, marginal_s, decode_s, ramp_s)
            )
            ranking.append(new(Candidate, (worker, score, held, prefill_s, terms, where)))
        ranking.sort(key=_score)
        best = ranking[0].score
        limit = best + best * tie_share + tie_s
        if len(ranking) > 1 and ranking[1].score <= limit:
            _break_tie(ranking, limit, query.fingerprint, dict(zip(queues, busy, strict=True)))
        return ranking


_NO_LOAD = TierLoad()


_score = attrgetter("score")


def bring_forward(ranking: list[Candidate], chosen: Worker) -> None:
    """Put the candidate of `chosen` first, leaving the others in their order."""
    for place, candidate in enumerate(ranking):
        if candidate.worker is chosen:
            ranking.insert(0, ranking.pop(place))
            return


def _block_tokens(query: RouteQuery) -> float:
    """Tokens in one block of the query's prompts, on average; 0 when it has none."""
    if len(query.prompts) == 1:
        return query.prompts[0].block_tokens
    blocks = sum(len(prompt.keys) for prompt in query.prompts)
    if not blocks:
        return query.prompts[0].block_tokens if query.prompts else 0.0
    return sum(len(prompt.keys) * prompt.block_tokens for prompt in query.prompts) / blocks


def _break_tie(
    ranking: list[Candidate], limit: float, fingerprint: int, busy: Mapping[WorkerLoad, float]
) -> None:
    """Bring the candidate to the front that wins among those up to `limit`, which come first."""
    winner, least = 0, (0, 0.0)
    for place, candidate in enumerate(ranking):
        if candidate.score > limit:
            break
        load = candidate.worker.load if candidate.held is None else candidate.queue
        figures = (load.active_tokens, busy[load])
        if not place or figures < least:
            winner, least = place, figures
        elif figures == least and _lot(candidate, fingerprint) < _lot(ranking[winner], fingerprint):
            winner = place
    if winner:
        ranking.insert(0, ranking.pop(winner))


def _lot(candidate: Candidate, fingerprint: int) -> int:
    return xxh3_64_intdigest(candidate.worker.id.encode(), fingerprint)
