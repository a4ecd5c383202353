"""What sending a request to a worker costs, in seconds: the one model behind every strategy.

docs/routing.md has the formula and where its numbers come from. Pure: reads live figures of workers and
history, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple, overload

from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import PromptKeys
from kvroute.fleet.load import WorkerLoad, measure_loads
from kvroute.fleet.worker import Worker
from kvroute.index.history import RouteHistory
from kvroute.routing.cost_parameters import CostOptions, Costs, Fit, Learned, Lessons
from kvroute.routing.strategy import Candidate, CandidateMatch, RouteQuery, Row


class Ranking(Sequence[Candidate]):
    """Candidates, best first; from the second on by cost.

    What is asked of every worker is done once a request, so it is done in as few objects as possible: a row
    of floats each. The first candidate by cost is made with it, and the others, with their order, when one of
    them is asked for: for a retry or for explain. A candidate is the same object each time.

    Made by `CostModel.rank`. Mutable: `put_first`, by the strategy that ranks.
    """

    __slots__ = (
        "_all",
        "_made_first",
        "_ranked",
        "first_place",
    )

    first_place: int
    """Where the first candidate's worker is among those that were ranked."""
    _ranked: tuple[
        Sequence[Worker], Sequence[Row], Sequence[int] | None, Sequence[CandidateMatch] | None, int
    ]
    """The workers; by worker the arithmetic, what it holds of the prompt, and where; the place of the one to
    go to by cost alone. None of them changes any more."""
    _made_first: Candidate | None
    _all: list[Candidate] | None

    def put_first(self, worker: Worker) -> None:
        """Put `worker` first, leaving the others in their order."""
        place = self._ranked[0].index(worker)
        if place != self.first_place:
            self.first_place = place
            self._made_first = None
        self._all = None

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, place: int | slice) -> Candidate | Sequence[Candidate]:
        if place == 0:
            first = self._made_first
            if first is None:
                first = self._made_first = self._candidate(self.first_place)
            return first
        return self._in_full()[place]

    def __len__(self) -> int:
        return len(self._ranked[1])

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._in_full())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ranking({self._in_full()!r})"

    def _in_full(self) -> list[Candidate]:
        if self._all is None:
            rows, cheapest = self._ranked[1], self._ranked[4]
            order = sorted(range(len(rows)), key=lambda place: rows[place][0])
            for leader in (cheapest, self.first_place):
                order.remove(leader)
                order.insert(0, leader)
            self._all = [self[0], *map(self._candidate, order[1:])]
        return self._all

    def _candidate(self, place: int) -> Candidate:
        workers, rows, matched, where, _ = self._ranked
        row = rows[place]
        return Candidate(
            workers[place],
            row[0],
            matched[place] if matched else 0,
            row[1],
            row,
            where[place] if where else None,
        )


RESIDENCE_S = 5.0
"""How long a request is taken to hold its memory on a worker that has not finished one yet."""

MAX_UTILISATION = 0.9
"""Where rho / (1 - rho) stops rising. Costs that are too high show as a utilisation above what is possible:
at 0.98, costs believed four times too high kept agents' hot prefixes on single workers until their mean
time to first token was three times that of right costs; at 0.9 they are within 3% (bench/routing.py)."""


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


class _Settled:
    """One model's costs as of the last fit, and their figures as a plain tuple, which unpacks in a third of
    the instructions that a named one takes; behind them the share of a part that can be filled at no cost."""

    __slots__ = ("costs", "figures", "fit")

    def __init__(self, costs: Costs, fit: Fit | None) -> None:
        self.costs = costs
        self.figures = *tuple(costs), min(costs.memory_limit, 1.0)
        self.fit = fit


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
        self._lessons: Mapping[str, Lessons] = {} if learned is None else learned.lessons
        self._settled: dict[str, _Settled] = {}

    def configured(self, model: str) -> Costs:
        return self._models.get(model, self._default)

    def costs(self, model: str) -> Costs:
        """As configured; what first tokens have taught takes the place of the times, where there is any."""
        return self._settle(model, self._lessons.get(model)).costs

    def _settle(self, model: str, lessons: Lessons | None) -> _Settled:
        settled, fit = self._settled.get(model), None if lessons is None else lessons.prefills.fit
        if settled is None or settled.fit is not fit:
            costs = self.configured(model)
            if fit is not None:
                share = costs.active_token_s / costs.token_s
                costs = costs._replace(
                    token_s=fit.token_s,
                    context_token_s=fit.context_token_s,
                    iteration_s=fit.iteration_s,
                    active_token_s=share * fit.token_s,
                )
            settled = self._settled[model] = _Settled(costs, fit)
        return settled

    def pressure(self, queues: Sequence[WorkerLoad], now: float) -> Pressure:
        seconds, requests = measure_loads(queues, now)
        return Pressure(seconds / len(queues), seconds / requests if requests else 0.0)

    def rank(
        self,
        query: RouteQuery,
        workers: Sequence[Worker],
        matched_tokens: Sequence[int] | None = None,
        loads: Sequence[TierLoad] | None = None,
        held_where: Sequence[CandidateMatch] | None = None,
        queues: Sequence[WorkerLoad] | None = None,
    ) -> Ranking:
        """Every worker, cheapest first; ties by active tokens, then by prefill done lately, then by a hash
        of prompt and worker.

        `matched_tokens` says per worker how much of the prompt need not be computed there, `loads` what
        fetching that from slower tiers takes, `held_where` goes into the candidates as it is. A worker may
        come several times, as its ranks. `queues` may bring the workers' loads, where they are at hand
        (`FleetView.loads`).

        The plain formula stands in docs/routing.md under "Cost", and worker by worker in
        tests/routing/test_cost_formula.py, with which this agrees to the last bit. Here it is one loop over
        floats, because it runs for every worker and request: what several workers have in common is
        computed once, a term that is zero not at all, and objects are left to `Ranking`.
        """
        now, tokens, prompts, model = query.now, query.tokens, query.prompts, query.model
        settled, factors = self._settled.get(model), None
        lessons = self._lessons.get(model) if self._lessons else None
        if lessons is not None:
            factors = lessons.speeds.factors or None
            if settled is None or lessons.prefills.fit is not settled.fit:
                settled = self._settle(model, lessons)
        elif settled is None:
            settled = self._settle(model, None)
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
            fitting_share,
        ) = settled.figures
        if queues is None:
            queues = _queues(workers, held_where)
        seconds, requests = measure_loads(queues, now)
        utilisation, delay_factor = seconds / len(queues), 0.0
        is_busy = utilisation > 0.0
        if is_busy and requests:
            rho = utilisation if utilisation < MAX_UTILISATION else MAX_UTILISATION
            delay_factor = 0.5 * rho / (1.0 - rho) / (seconds / requests)
        if len(prompts) == 1:
            block_tokens, twice = prompts[0].block_tokens, 2
        else:
            block_tokens, twice = _block_tokens(prompts), 2 * len(prompts) or 2
        parts = self._history.parts
        # At most so many blocks are new anywhere; `int` of a quotient would cost as much as two terms.
        most_blocks = tokens >> 2 if block_tokens >= 4.0 else tokens
        rows: list[Row] = []
        known_held = first = -1
        miss = tokens
        mean_s = own_s = prefill_s = ready_s = memory_s = eviction_s = marginal_s = ramp_s = 0.0
        best = second = inf
        is_special = False
        for worker, load, held in zip(workers, queues, matched_tokens or [0] * len(workers), strict=True):
            if held != known_held:  # else as for the worker before
                known_held, miss = held, tokens - held
                # As `Costs.prefill_s`, without its call: half of what is missing goes before a token.
                mean_s = miss * (token_s + context_token_s * ((tokens + held) / twice))
                mean_s += (
                    iteration_s
                    if miss <= max_batched_tokens
                    else iteration_s * -(-miss // max_batched_tokens)
                )
                own_s = prefill_s = mean_s
            if factors is not None:
                own_s = prefill_s = mean_s * factors.get(worker.index, 1.0)
            wait_s, in_flight = load.wait_s, load.in_flight
            score = done_s = wait_s + prefill_s
            if loads:
                is_special = True
                ready_s, transfer_s = loads[len(rows)]
                if ready_s > wait_s:
                    score = ready_s + prefill_s
                own_s = prefill_s + transfer_s
                done_s = wait_s + own_s
            if block_tokens:
                try:
                    part = parts[worker.index]
                except KeyError:
                    part = self._history.part(worker.index)
                # Most requests fit wherever they go, even if nothing of them is held and nothing is evicted.
                if part.blocks + in_flight + most_blocks > fitting_share * part.capacity_blocks:
                    capacity, tracked, new_blocks = (
                        part.capacity_blocks,
                        part.blocks,
                        int(miss / block_tokens),
                    )
                    active = part.active_blocks
                    over = active + new_blocks + in_flight - memory_limit * capacity
                    if over > 0:
                        is_special, residence_s = True, load.residence_s
                        memory_s = (RESIDENCE_S if residence_s is None else residence_s) * over / capacity
                        score += memory_s
                    # As `Part.evicted_by`.
                    excess = tracked + new_blocks - capacity
                    if excess > 0:
                        is_special = True
                        evicted = excess if excess < tracked - active else tracked - active
                        eviction_s = eviction_weight * evicted * block_tokens * token_s
                        score += eviction_s
            if is_busy:
                delay = delay_factor * done_s
                marginal_s = (delay if delay < lambda_cap else lambda_cap) * own_s
                ahead = load.utilisation - utilisation
                if ahead > 0.0:
                    marginal_s += balance * ahead * own_s
                score += marginal_s
            decode_s = 0.0
            if in_flight:
                decode_s = active_token_s * load.active_tokens
                score += decode_s
            if worker.ramp < 1.0:
                is_special = True
                ramp_s = score / worker.ramp_at(now) - score
                score += ramp_s
            if score < best:
                second, best, first = best, score, len(rows)
            elif score < second:
                second = score
            if is_special:
                rows.append(
                    (score, prefill_s, wait_s, marginal_s, decode_s, ready_s, memory_s, eviction_s, ramp_s)
                )
                is_special, ready_s, memory_s, eviction_s, ramp_s = False, 0.0, 0.0, 0.0, 0.0
            else:
                rows.append((score, prefill_s, wait_s, marginal_s, decode_s))
        limit = best + best * tie_share + tie_s
        if second <= limit:
            first = _tie_winner(workers, rows, limit, query.fingerprint, queues)
        row = rows[first]
        # A constructor in Python would cost more than its fields.
        ranking = Ranking()
        ranking._ranked = workers, rows, matched_tokens, held_where, first
        ranking.first_place = first
        ranking._made_first = Candidate(
            workers[first],
            row[0],
            matched_tokens[first] if matched_tokens else 0,
            row[1],
            row,
            held_where[first] if held_where else None,
        )
        ranking._all = None
        return ranking


def _queues(workers: Sequence[Worker], held_where: Sequence[CandidateMatch] | None) -> Sequence[WorkerLoad]:
    """The loads that the request would join."""
    if held_where:
        return [worker.load_of(held.rank) for worker, held in zip(workers, held_where, strict=True)]
    return [worker.load for worker in workers]


def _block_tokens(prompts: Sequence[PromptKeys]) -> float:
    """Tokens in one block of the prompts, on average; 0 when there are none."""
    blocks = sum(len(prompt.keys) for prompt in prompts)
    if not blocks:
        return prompts[0].block_tokens if prompts else 0.0
    return sum(len(prompt.keys) * prompt.block_tokens for prompt in prompts) / blocks


def _tie_winner(
    workers: Sequence[Worker],
    rows: Sequence[Row],
    limit: float,
    fingerprint: int,
    queues: Sequence[WorkerLoad],
) -> int:
    """The place that wins among those whose scores are at most `limit`; if all else is even, the least
    score, then the first."""
    winner, active, done, score = -1, 0, 0.0, 0.0
    lot: int | None = None
    place = -1
    for row in rows:
        place += 1
        if row[0] > limit:
            continue
        load = queues[place]
        its_active, its_done = load.active_tokens, load.utilisation
        if winner < 0 or its_active < active or (its_active == active and its_done < done):
            winner, active, done, score, lot = place, its_active, its_done, row[0], None
        elif its_active == active and its_done == done:
            if lot is None:
                lot = _lot(workers[winner], fingerprint)
            its_lot = _lot(workers[place], fingerprint)
            if its_lot < lot or (its_lot == lot and row[0] < score):
                winner, score, lot = place, row[0], its_lot
    return winner


def _lot(worker: Worker, fingerprint: int) -> int:
    return xxh3_64_intdigest(worker.spec.id.encode(), fingerprint)
