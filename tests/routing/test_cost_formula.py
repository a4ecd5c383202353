"""The cost formula of docs/routing.md, worker by worker and as plainly as it can be written, against the
loop that the gateway runs: they must agree to the last bit, and so must every tie."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import PromptKeys
from kvroute.fleet.worker import WorkerFacts
from kvroute.index.radix_history import RadixHistory
from kvroute.routing.cost import MAX_UTILISATION, RESIDENCE_S, CostModel, TierLoad, matched_tokens
from kvroute.routing.cost_parameters import CostOptions
from kvroute.routing.learned_costs import Learned
from kvroute.routing.strategy import Candidate, CandidateMatch, CostTerms, Tokens


def block_tokens(query) -> float:
    blocks = sum(len(prompt.keys) for prompt in query.prompts)
    if len(query.prompts) < 2 or not blocks:
        return query.prompts[0].block_tokens if query.prompts else 0.0
    return sum(len(prompt.keys) * prompt.block_tokens for prompt in query.prompts) / blocks


def utilisation_of(queues, now) -> tuple[float, float]:
    """Mean prefill seconds per second, and of one prefill."""
    seconds = requests = 0.0
    for queue in queues:
        own_s, arrivals = queue.recent(now)
        seconds += own_s
        requests += arrivals
    return seconds / len(queues), seconds / requests if requests else 0.0


def candidate_of(
    costs, history, query, worker, queue, held, load, where, speeds, pressure, assumed
) -> Candidate:
    """One worker's score and its terms."""
    rho, mean_prefill_s = pressure
    miss = query.tokens - held
    prefill = costs.prefill_s(miss, held, len(query.prompts) or 1)
    if speeds is not None:
        prefill *= speeds.of(worker.index)
    wait, own = queue.wait(query.now), prefill + load.own_s
    bounded = min(rho, MAX_UTILISATION)
    delay_factor = 0.5 * bounded / (1 - bounded) / mean_prefill_s if bounded else 0.0
    marginal = min(delay_factor * (wait + own), costs.lambda_cap) * own
    marginal += costs.balance_weight * max(0.0, queue.recent(query.now)[0] - rho) * own
    eviction = memory = 0.0
    if each := block_tokens(query):
        part, new_blocks = history.share(worker.index), int(miss / each)
        eviction = costs.eviction_weight * part.evicted_by(new_blocks) * each * costs.token_s
        over = part.active_blocks + new_blocks + queue.in_flight - costs.memory_limit * part.capacity_blocks
        residence = assumed if queue.residence_s is None else queue.residence_s
        memory = residence * max(0.0, over) / part.capacity_blocks
    decode = costs.active_token_s * queue.active_tokens
    score = max(wait, load.ready_s) + prefill + memory + eviction + marginal + decode
    ramp = score / worker.share_at(query.now) - score if worker.share < 1.0 else 0.0
    terms = CostTerms(wait, load.ready_s, prefill, memory, eviction, marginal, decode, ramp)
    return Candidate(worker, score + ramp, held, prefill, terms, where)


def plain_ranking(model, costs, history, query, workers, matched, loads, where, speeds) -> list[Candidate]:
    """Every worker by score; first the one that wins the tie among those near the best."""
    queues = [
        worker.load_of(held.rank) if held else worker.load
        for worker, held in zip(workers, where, strict=True)
    ]
    pressure = utilisation_of(queues, query.now)
    known = [queue.residence_s for queue in queues if queue.residence_s is not None]
    assumed = sum(known) / len(known) if known else RESIDENCE_S
    ranking = [
        candidate_of(costs, history, query, worker, queue, held, load, each, speeds, pressure, assumed)
        for worker, queue, held, load, each in zip(workers, queues, matched, loads, where, strict=True)
    ]
    ranking.sort(key=lambda candidate: candidate.score)
    limit = ranking[0].score + ranking[0].score * costs.tie_share + costs.tie_s

    def even(candidate: Candidate) -> tuple[float, float, int]:
        queue = candidate.queue
        lot = xxh3_64_intdigest(candidate.worker.id.encode(), query.fingerprint)
        return queue.active_tokens, queue.recent(query.now)[0], lot

    winner = min((candidate for candidate in ranking if candidate.score <= limit), key=even)
    ranking.remove(winner)
    return [winner, *ranking]


def live(rng, workers, ranks: int, seconds: float) -> None:
    """Requests come and go, of all kinds; some stay."""
    now, running = 0.0, []
    while now < seconds:
        now += rng.expovariate(4.0)
        worker = rng.choice(workers)
        rank = rng.randrange(ranks) if ranks > 1 else None
        streamed, tokens = rng.random() < 0.5, rng.randrange(4000)
        prefill_s = rng.choice((0.0, 0.02, 0.02, rng.random()))
        for load in {worker.load, worker.load_of(rank)}:
            running.append(load.reserve(now, prefill_s, tokens, streamed))
        if rng.random() < 0.6:
            rng.choice(running).first_token(now)
        if len(running) > 2 * len(workers):
            running.pop(rng.randrange(len(running))).finish(now)


class Scene:
    """A fleet in some state, a request for it, and what is known besides. Shapes come from the seed."""

    def __init__(self, seed: int, make_worker, query, keys_of) -> None:
        rng = random.Random(seed)
        size, self.ranks = rng.choice((1, 2, 3, 8)), rng.choice((1, 1, 2))
        self.workers = [make_worker(index, block_size=rng.choice((16, 32))) for index in range(size)]
        if rng.random() < 0.2:
            self.workers[0].facts = WorkerFacts()
        for worker in self.workers:
            if rng.random() < 0.2:
                worker.share, worker.ramp_since, worker.ramp_until = 0.3, 0.0, rng.choice((None, 30.0, 90.0))
        seconds = rng.choice((0.0, 0.3, 20.0))
        live(rng, self.workers[: rng.randint(1, size)], self.ranks, seconds)
        self.history = RadixHistory(rng.choice((40, 100_000)))
        prompts = [keys_of(rng, 16 * rng.randrange(1, 60)) for _ in range(6)]
        for _ in range(rng.randrange(12)):
            lease = self.history.acquire(rng.randrange(size), rng.choice(prompts))
            if rng.random() < 0.5:
                lease.release()
        options = CostOptions()
        if rng.random() < 0.5:
            options = CostOptions(lambda_cap=rng.choice((0, 2)), max_batched_tokens=512, active_share=0)
        if rng.random() < 0.2:
            options = CostOptions(
                balance_weight=0, eviction_weight=0, context_token_ns=0, tie_ms=rng.choice((0, 50))
            )
        learned = Learned() if rng.random() < 0.5 else None
        if learned is not None and rng.random() < 0.8:
            for number in range(60 + rng.randrange(20)):
                miss = 64 << (number % 7)
                learned.record(
                    "model", number % size, miss, miss / 2, 1, miss * 1e-4 * (1 + number % 2), miss * 2e-4
                )
        self.learned = learned
        self.model = CostModel(self.history, options, None, learned)
        asked = [
            PromptKeys(keys, 16 * len(keys) + rng.randrange(16), rng.choice((16.0, 15.3)))
            for keys in rng.sample(prompts, rng.choice((0, 1, 1, 1, 2)))
        ]
        tokens = sum(prompt.tokens for prompt in asked) or rng.randrange(1, 3000)
        now = seconds + rng.choice((0.0, 0.01, 5.0, 2000.0, 100_000.0))
        made = query(now, tokens=tokens, fingerprint=rng.getrandbits(64))
        self.query = replace(made, prompts=tuple(asked))
        self.matched = matched_tokens(self.history, self.query, self.workers)
        self.rng = rng

    def by_tiers(self):
        """Places, as a strategy that knows of ranks and slower tiers names them."""
        rng, targets, where, loads, matched = self.rng, [], [], [], []
        for worker, held in zip(self.workers, self.matched, strict=True):
            for rank in range(self.ranks):
                targets.append(worker)
                matched.append(held)
                where.append(CandidateMatch(Tokens(held), worker.index, rank if self.ranks > 1 else None))
                loads.append(
                    TierLoad(rng.random() / 10, rng.random() / 10) if rng.random() < 0.5 else TierLoad()
                )
        return targets, matched, loads, where

    def plain(self, workers, matched, loads, where) -> list[Candidate]:
        costs = self.model.costs("model")
        speeds = self.learned.speeds("model") if self.learned else None
        return plain_ranking(
            self.model, costs, self.history, self.query, workers, matched, loads, where, speeds
        )


@pytest.mark.parametrize("seed", range(300))
def test_the_loop_agrees_with_the_plain_formula(seed, make_worker, make_view, query, keys_of) -> None:
    scene = Scene(seed, make_worker, query, keys_of)
    size, view = len(scene.workers), make_view(*scene.workers)
    nothing, no_loads = [None] * size, [TierLoad()] * size

    ranking = scene.model.rank(scene.query, scene.workers, scene.matched)
    in_view = scene.model.rank(scene.query, view.workers, scene.matched, queues=view.loads)
    unmatched = scene.model.rank(scene.query, scene.workers)

    assert list(ranking) == scene.plain(scene.workers, scene.matched, no_loads, nothing)
    assert list(in_view) == list(ranking)
    assert list(unmatched) == scene.plain(scene.workers, [0] * size, no_loads, nothing)
    for candidate in ranking:
        assert candidate.terms.score == pytest.approx(candidate.score)


@pytest.mark.parametrize("seed", range(300))
def test_it_agrees_with_ranks_and_slower_tiers(seed, make_worker, query, keys_of) -> None:
    scene = Scene(seed, make_worker, query, keys_of)
    targets, matched, loads, where = scene.by_tiers()

    ranking = scene.model.rank(scene.query, targets, matched, loads, where)

    assert list(ranking) == scene.plain(targets, matched, loads, where)


@pytest.mark.parametrize("seed", range(40))
def test_moving_a_worker_to_the_front_keeps_the_order_of_the_others(
    seed, make_worker, query, keys_of
) -> None:
    scene = Scene(seed, make_worker, query, keys_of)
    plain = list(scene.model.rank(scene.query, scene.workers))

    for worker in scene.workers:
        ranking = scene.model.rank(scene.query, scene.workers)
        ranking.put_first(worker)
        chosen = next(candidate for candidate in plain if candidate.worker is worker)
        assert list(ranking) == [chosen, *(candidate for candidate in plain if candidate is not chosen)]


def test_a_candidate_is_the_same_object_each_time(make_worker, query) -> None:
    workers = [make_worker(index) for index in range(3)]
    ranking = CostModel(RadixHistory(100)).rank(query(), workers)

    first = ranking[0]

    assert ranking[0] is first
    assert next(iter(ranking)) is first
    assert ranking[:2][0] is first
    assert ranking[-1] is ranking[2] is list(ranking)[2]
    assert len(ranking) == 3


def test_a_ranking_keeps_the_figures_of_its_moment(make_worker, query) -> None:
    """Figures that are read later are those of the moment of the decision."""
    workers = [make_worker(index) for index in range(3)]
    model = CostModel(RadixHistory(100))
    before, later = model.rank(query(), workers), model.rank(query(), workers)
    copied = list(before)

    for worker in workers:
        worker.load.reserve(0.0, 1.0, 1000)

    assert list(later) == copied
    assert list(model.rank(query(), workers)) != copied
