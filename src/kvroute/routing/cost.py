"""The cost model of all strategies: the cost of a request on each worker, in seconds.

docs/routing.md has the formula and the sources of its figures. Pure: reads live figures of workers and
history, changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple, overload

from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import BlockKey, PromptKeys
from kvroute.fleet.load import WorkerLoad, measure_loads
from kvroute.fleet.worker import ASSUMED_BLOCK_TOKENS, Worker
from kvroute.index.history import RouteHistory
from kvroute.routing.cost_parameters import CostOptions, Costs
from kvroute.routing.learned_costs import Fit, Learned, LearnedModel
from kvroute.routing.strategy import PREFILL, SCORE, Candidate, CandidateMatch, RouteQuery, Row


def matched_tokens(
    history: RouteHistory,
    query: RouteQuery,
    workers: Sequence[Worker],
    positions: Mapping[int, int] | None = None,
    answers: Mapping[int, Mapping[BlockKey, int]] | None = None,
) -> list[int]:
    """Matched tokens per worker by the route history, summed over the prompts, in the order of `workers`.

    Counts whole blocks of the worker's size and never a prompt's last token, which is always computed.
    Blocks of unfinished requests count: the worker has them, or will have them before this request runs.
    Nothing is matched on a worker that does not cache prefixes, or for a request that does not read the
    cache. `positions` maps units to positions in `workers` (`FleetView.positions`, `RankTargets.positions`);
    it is derived if None. Where several units have one position, the engine chooses the rank: then the mean
    over its ranks counts. `answers` (`reports.Answers.by_unit`): a prompt that continues a whole earlier one
    shows its answer too.
    """
    totals = [0] * len(workers)
    if not query.reads_cache:
        return totals
    for prompt in query.prompts:
        blocks_by_unit = history.match(prompt.keys)
        if not blocks_by_unit:
            continue
        if positions is None:
            positions = {unit: position for position, worker in enumerate(workers) for unit in worker.units}
        length, block_tokens = prompt.tokens, prompt.block_tokens
        whole = len(prompt.keys) if answers is not None else 0
        tokens = previous_blocks = 0
        for unit, blocks in blocks_by_unit.items():
            position = positions.get(unit)
            if position is None:  # the holder is not in `workers`: with roles it is on the other side
                continue
            if blocks != previous_blocks:  # otherwise the same figures as for the previous worker
                previous_blocks, tokens = blocks, int(blocks * block_tokens)
                if tokens >= length:
                    tokens = length - 1
            facts = workers[position].facts
            if not facts.caches_prefixes:
                continue
            count = tokens
            if blocks < whole and answers is not None and (ends := answers.get(unit)):
                answered = ends.get(prompt.keys[blocks - 1], 0)
                if answered > count:
                    count = answered if answered < length else length - 1
            totals[position] += count - count % (facts.block_size or ASSUMED_BLOCK_TOKENS)
    if positions is not None and len(positions) > len(workers):
        unit_counts = Counter(positions.values())
        for position, worker in enumerate(workers):
            if unit_counts[position] > 1:
                mean = totals[position] // len(worker.rank_units)
                totals[position] = mean - mean % worker.block_size
    return totals


def discounted(tokens: Sequence[int], workers: Sequence[Worker], shares: Mapping[int, float]) -> list[int]:
    """The tokens that count, per worker, where reports contradict predictions.

    `shares`: `Discounts.by_map` or `Discounts.by_history`. A worker that is not in it, because it has hardly
    reported yet, has the mean of the others: how much of a prompt an engine can use is a matter of the model,
    and to learn it worker by worker costs a queue on each.
    """
    reported = [shares[worker.index] for worker in workers if worker.index in shares]
    others = sum(reported) / len(reported) if reported else 1.0
    return [
        int(count * shares.get(worker.index, others)) for count, worker in zip(tokens, workers, strict=True)
    ]


_ONE_POSITION = (0,)


class Ranking(Sequence[Candidate]):
    """The result of `CostModel.rank`: candidates, best first; the second and later ones ordered by cost.

    The first `Candidate` is constructed with the ranking, the others at the first access (a retry, explain).
    Each candidate is the same object at every access. Mutable: the strategy may call `put_first`.
    """

    # A request needs the costs of all workers, but usually only one candidate. So each worker gets a tuple
    # of floats, and further objects are constructed when they are needed.

    __slots__ = (
        "_all",
        "_first_candidate",
        "columns",
        "first_position",
        "predicted",
    )

    first_position: int
    """The position of the first candidate's worker in the ranked workers."""
    columns: tuple[
        Sequence[Worker],
        Sequence[Row],
        Sequence[int] | None,
        Sequence[WorkerLoad],
        Sequence[CandidateMatch] | None,
        int,
    ]
    """The ranked workers in the order of the view; in that order their rows, matched tokens, loads and
    matches; the position of the cheapest worker. Never changes.

    For callers that compare the costs of all workers but need few candidates (`candidate`, `positions`)."""
    predicted: Sequence[int] | None
    """The predicted tokens in the order of the view, if the costs count fewer; None: those of `columns`."""
    _first_candidate: Candidate | None
    _all: list[Candidate] | None

    @property
    def workers(self) -> Sequence[Worker]:
        """The ranked workers in the order of the view."""
        workers, *_ = self.columns
        return workers

    def positions(self) -> Sequence[int]:
        """The positions of the ranked workers in `columns`, best first."""
        _, rows, _, _, _, cheapest = self.columns
        if len(rows) == 1:
            return _ONE_POSITION
        order = sorted(range(len(rows)), key=lambda position: rows[position][SCORE])
        for leader in (cheapest, self.first_position):
            order.remove(leader)
            order.insert(0, leader)
        return order

    def candidate(self, position: int) -> Candidate:
        """The candidate whose worker is at this position of `columns`."""
        if position == self.first_position:
            leader = self._first_candidate
            return self[0] if leader is None else leader
        return self._candidate(position) if self._all is None else self._all[self.positions().index(position)]

    def put_first(self, worker: Worker, rank: int | None = None) -> None:
        """Move `worker`, or one rank of it, to the first position; the others keep their order."""
        workers, _, _, _, matches, _ = self.columns
        position = workers.index(worker)
        if rank is not None and matches is not None:
            while workers[position] is not worker or matches[position].rank != rank:
                position += 1
        if position != self.first_position:
            self.first_position = position
            self._first_candidate = None
        self._all = None

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if index == 0:
            leader = self._first_candidate
            if leader is None:
                leader = self._first_candidate = self._candidate(self.first_position)
            return leader
        return self._in_full()[index]

    def __len__(self) -> int:
        _, rows, *_ = self.columns
        return len(rows)

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
            self._all = [self[0], *map(self._candidate, self.positions()[1:])]
        return self._all

    def _candidate(self, position: int) -> Candidate:
        workers, rows, matched, _, matches, _ = self.columns
        row, predicted = rows[position], self.predicted
        counted = matched[position] if matched else 0
        return Candidate(
            workers[position],
            row[SCORE],
            counted if predicted is None else predicted[position],
            row[PREFILL],
            row,
            matches[position] if matches else None,
            None if predicted is None else counted,
        )


class _Listed(Ranking):
    """Candidates that a strategy has ordered itself."""

    __slots__ = ()

    def positions(self) -> Sequence[int]:
        positions = list(range(len(self)))
        positions.insert(0, positions.pop(self.first_position))
        return positions


def ranking_of(candidates: Sequence[Candidate]) -> Ranking:
    """The same candidates, at least one, in the same order, as a `Ranking`."""
    if isinstance(candidates, Ranking):
        return candidates
    rows: list[Row] = []
    for candidate in candidates:
        terms = candidate.terms
        short_row = candidate.score, terms.prefill, terms.wait, terms.marginal, terms.decode
        rows.append((*short_row, terms.load, terms.memory, terms.eviction, terms.ramp))
    matches = [candidate.match for candidate in candidates if candidate.match is not None]
    ranking = _Listed()
    ranking.columns = (
        [candidate.worker for candidate in candidates],
        rows,
        [candidate.counted for candidate in candidates],
        [candidate.queue for candidate in candidates],
        matches if len(matches) == len(rows) else None,
        0,
    )
    ranking.predicted = [candidate.matched_tokens for candidate in candidates]
    ranking.first_position, ranking._first_candidate, ranking._all = 0, candidates[0], list(candidates)
    return ranking


RESIDENCE_S = 5.0
"""Assumed residence of a request on a worker, while no candidate has finished a request yet."""

MAX_UTILISATION = 0.9
"""Largest rho in rho / (1 - rho)."""
# Costs that are configured too high result in a utilisation above the possible one. With a limit of 0.98,
# costs that were four times too high kept agents' hot prefixes on single workers, and the mean time to first
# token was three times that of right costs; with 0.9 it is within 3% (bench/routing.py).


class TierLoad(NamedTuple):
    """The time to load a request's blocks from slower tiers to one worker."""

    ready_s: float = 0.0
    """Seconds from now until the blocks are on the GPU, earlier transfers included."""
    own_s: float = 0.0
    """Transfer time of this request's blocks."""


class Pressure(NamedTuple):
    """How busy a set of workers is with prefill."""

    utilisation: float
    """rho: seconds of prefill per second and worker."""
    mean_prefill_s: float
    """Mean prefill of one request in seconds."""


class _CurrentCosts:
    """One model's costs as of the last fit."""

    __slots__ = ("costs", "figures", "fit")

    def __init__(self, costs: Costs, fit: Fit | None) -> None:
        self.costs = costs
        # A plain tuple unpacks in a third of a named tuple's instructions. The last figure is the share of a
        # worker's part of the history up to which a request costs no memory and no eviction.
        self.figures = *tuple(costs), min(costs.memory_limit, 1.0)
        self.fit = fit


class CostModel:
    """Ranks workers by cost; one instance for all models and strategies.

    Reads the history and the learned figures. Mutable: caches each model's current costs.
    """

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
        self._learned: Mapping[str, LearnedModel] = {} if learned is None else learned.models
        self._current: dict[str, _CurrentCosts] = {}

    def configure(self, default: CostOptions, models: Mapping[str, CostOptions]) -> None:
        """Change the configured costs; learned times stay."""
        self._default = Costs.of(default)
        self._models = {model: Costs.of(options) for model, options in models.items()}
        self._current.clear()

    def configured(self, model: str) -> Costs:
        """The costs of the configuration, without what was learned."""
        return self._models.get(model, self._default)

    def costs(self, model: str) -> Costs:
        """The configured costs, with the learned times in them once there are any."""
        current = self._current.get(model)
        if current is None or self._learned:
            current = self._update(model, self._learned.get(model))
        return current.costs

    def _update(self, model: str, learned: LearnedModel | None) -> _CurrentCosts:
        current, fit = self._current.get(model), None if learned is None else learned.prefills.fit
        if current is None or current.fit is not fit:
            costs = self.configured(model)
            if fit is not None:
                share = costs.active_token_s / costs.token_s
                costs = costs._replace(
                    token_s=fit.token_s,
                    context_token_s=fit.context_token_s,
                    iteration_s=fit.iteration_s,
                    active_token_s=share * fit.token_s,
                )
            current = self._current[model] = _CurrentCosts(costs, fit)
        return current

    def speeds(self, model: str) -> Mapping[int, float]:
        """Factors on the prefill times by worker index; workers that are not in it have 1. Do not change
        it."""
        learned = self._learned.get(model)
        return {} if learned is None else learned.speeds.factors

    @classmethod
    def fixed(cls, history: RouteHistory, model: str, costs: Costs, speeds: Mapping[int, float]) -> CostModel:
        """A cost model with these costs and speeds for `model`, which learns nothing."""
        fixed = cls(history)
        fixed._models[model] = costs
        if speeds:
            learned = LearnedModel()
            learned.speeds.factors = dict(speeds)
            fixed._learned = {model: learned}
        return fixed

    def pressure(self, queues: Sequence[WorkerLoad], now: float) -> Pressure:
        """How busy the workers with these loads are. O(workers)."""
        seconds, requests = measure_loads(queues, now)
        return Pressure(seconds / len(queues), seconds / requests if requests else 0.0)

    def rank(
        self,
        query: RouteQuery,
        workers: Sequence[Worker],
        matched_tokens: Sequence[int] | None = None,
        loads: Sequence[TierLoad] | None = None,
        matches: Sequence[CandidateMatch] | None = None,
        queues: Sequence[WorkerLoad] | None = None,
        units: Sequence[int] | None = None,
        predicted: Sequence[int] | None = None,
    ) -> Ranking:
        """Rank `workers`, cheapest first. O(workers).

        Ties are broken by active tokens, then by recent prefill, then by a hash of prompt and worker.
        `matched_tokens` has per worker the prompt tokens that it need not compute; `loads` the time to load
        them from slower tiers; `matches` is put into the candidates. A worker with several ranks is in
        `workers` once per rank, and `units` has the `Worker.unit_of` each. `queues` has the workers' loads,
        if the caller has them (`FleetView.loads`). `predicted`: the tokens before a discount, if
        `matched_tokens` are those after it.
        """
        # The formula is in docs/routing.md under "Cost". tests/routing/test_cost_formula.py computes it
        # worker by worker and demands the same result to the last bit. Here it is one loop over floats,
        # because it runs for every worker and request: what all have in common is computed once, terms that
        # are zero are skipped, and `Ranking` constructs objects only when they are needed.
        now, tokens, prompts, model = query.now, query.tokens, query.prompts, query.model
        current, factors = self._current.get(model), None
        learned = self._learned.get(model) if self._learned else None
        if learned is not None:
            factors = learned.speeds.factors or None
            if current is None or learned.prefills.fit is not current.fit:
                current = self._update(model, learned)
        elif current is None:
            current = self._update(model, None)
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
        ) = current.figures
        if queues is None:
            queues = _queues(workers, matches)
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
        history_shares = self._history.shares
        # An upper bound of the new blocks on any worker; `int` of a quotient would cost as much as two terms.
        most_blocks = tokens >> 2 if block_tokens >= 4.0 else tokens
        rows: list[Row] = []
        previous_matched = cheapest = -1
        miss = tokens
        mean_s = own_s = prefill_s = ready_s = memory_s = eviction_s = marginal_s = ramp_s = 0.0
        best = second = inf
        assumed_s = 0.0
        is_special = False
        for worker, load, matched in zip(workers, queues, matched_tokens or [0] * len(workers), strict=True):
            if matched != previous_matched:  # otherwise the same figures as for the previous worker
                previous_matched, miss = matched, tokens - matched
                # `Costs.prefill_s` inlined: on average half of the missing tokens precede a token.
                mean_s = miss * (token_s + context_token_s * ((tokens + matched) / twice))
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
                    history_share = history_shares[worker.index if units is None else units[len(rows)]]
                except KeyError:
                    history_share = self._history.share(worker.index if units is None else units[len(rows)])
                # Most requests fit on every worker, even without a match and without an eviction.
                if (
                    history_share.blocks + in_flight + most_blocks
                    > fitting_share * history_share.capacity_blocks
                ):
                    capacity, tracked, new_blocks = (
                        history_share.capacity_blocks,
                        history_share.blocks,
                        int(miss / block_tokens),
                    )
                    active = history_share.active_blocks
                    over = active + new_blocks + in_flight - memory_limit * capacity
                    if over > 0:
                        is_special, residence_s = True, load.residence_s
                        if residence_s is None:
                            residence_s = assumed_s = assumed_s or _assumed_residence_s(queues)
                        memory_s = residence_s * over / capacity
                        score += memory_s
                    # `HistoryShare.evicted_by` inlined.
                    excess = tracked + new_blocks - capacity
                    if excess > 0 and worker.facts.caches_prefixes:
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
            if in_flight or load.foreign_tokens:
                decode_s = active_token_s * (load.active_tokens + load.foreign_tokens)
                score += decode_s
            if worker.share < 1.0:
                is_special = True
                ramp_s = score / worker.share_at(now) - score
                score += ramp_s
            if score < best:
                second, best, cheapest = best, score, len(rows)
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
            cheapest = _tie_winner(workers, rows, limit, query.fingerprint, queues)
        row = rows[cheapest]
        # A constructor in Python would cost more than these assignments.
        ranking = Ranking()
        ranking.columns = workers, rows, matched_tokens, queues, matches, cheapest
        ranking.first_position = cheapest
        ranking.predicted = predicted
        if predicted is not None:
            ranking._first_candidate = ranking._all = None
            return ranking
        ranking._first_candidate = Candidate(
            workers[cheapest],
            row[SCORE],
            matched_tokens[cheapest] if matched_tokens else 0,
            row[PREFILL],
            row,
            matches[cheapest] if matches else None,
        )
        ranking._all = None
        return ranking


def _assumed_residence_s(queues: Sequence[WorkerLoad]) -> float:
    """The residence on a worker that has not finished a request yet: the mean of the others."""
    # A constant made an unused worker dear where memory is short: with pools of 8 blocks one of two workers
    # got all requests.
    measured = [load.residence_s for load in queues if load.residence_s is not None]
    return sum(measured) / len(measured) if measured else RESIDENCE_S


def _queues(workers: Sequence[Worker], matches: Sequence[CandidateMatch] | None) -> Sequence[WorkerLoad]:
    """The loads that the request would be added to."""
    if matches:
        return [worker.load_of(match.rank) for worker, match in zip(workers, matches, strict=True)]
    return [worker.load for worker in workers]


def _block_tokens(prompts: Sequence[PromptKeys]) -> float:
    """Average tokens in one block of the prompts; 0 without prompts."""
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
    """The position of the winner among the rows with a score of at most `limit`.

    The order: active tokens, recent prefill, hash, score, position.
    """
    winner, active, done, score = -1, 0.0, 0.0, 0.0
    tie_hash: int | None = None
    position = -1
    for row in rows:
        position += 1
        its_score = row[SCORE]
        if its_score > limit:
            continue
        load = queues[position]
        its_active, its_done = load.active_tokens + load.foreign_tokens, load.utilisation
        if winner < 0 or its_active < active or (its_active == active and its_done < done):
            winner, active, done, score, tie_hash = position, its_active, its_done, its_score, None
        elif its_active == active and its_done == done:
            if tie_hash is None:
                tie_hash = _tie_hash(workers[winner], fingerprint)
            its_hash = _tie_hash(workers[position], fingerprint)
            if its_hash < tie_hash or (its_hash == tie_hash and its_score < score):
                winner, score, tie_hash = position, its_score, its_hash
    return winner


def _tie_hash(worker: Worker, fingerprint: int) -> int:
    return xxh3_64_intdigest(worker.spec.id.encode(), fingerprint)
