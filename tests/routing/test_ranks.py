"""Data-parallel ranks in routing: targets, a history for each, and the state of strategies."""

from __future__ import annotations

import random
from itertools import count

import pytest

from kvroute.blocks.keys import BlockKey, PromptKeys
from kvroute.fleet.worker import FleetView, Worker
from kvroute.routing.registry import STRATEGIES, RoutingOptions
from kvroute.routing.router import Router
from kvroute.routing.strategy import RouteQuery, RouteReason

TOKENS = 4096


def keys_of(seed: int, blocks: int = TOKENS // 16) -> list[BlockKey]:
    rng = random.Random(seed)
    return [BlockKey(rng.getrandbits(64)) for _ in range(blocks)]


class Fleet:
    """Workers with ranks behind a router."""

    def __init__(self, make_worker, strategy: str, ranks: int = 2, workers: int = 2) -> None:
        self.router = Router(RoutingOptions(strategy=strategy))
        self.workers: list[Worker] = [make_worker(index, 64_000) for index in range(workers)]
        free = count(workers)
        for worker in self.workers:
            self.router.worker_joined(worker)
            worker.rank_units = {rank: next(free) for rank in range(ranks)}
            self.router.capacity_changed(worker)
        self.view = FleetView("model", tuple(self.workers), 1)
        self.now = 0.0

    def query(self, seed: int, **fields) -> RouteQuery:
        prompts = (PromptKeys(keys_of(seed), TOKENS, 16.0),)
        return RouteQuery("model", self.now, prompts, TOKENS, fingerprint=seed, **fields)

    def send(self, seed: int, **fields):
        self.now += 0.001
        query = self.query(seed, **fields)
        decision = self.router.decide(query, self.view)
        chosen = decision.ranking[0]
        return decision, chosen, self.router.dispatch(query, decision, chosen, self.now)

    def done(self, seed: int, **fields):
        decision, chosen, dispatch = self.send(seed, **fields)
        dispatch.first_token(self.now)
        dispatch.finish(self.now)
        return decision, chosen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_worker_is_ranked_once_with_one_of_its_ranks(strategy, make_worker):
    fleet = Fleet(make_worker, strategy)

    for seed in range(8):
        decision, _ = fleet.done(seed, session_key=str(seed))
        assert sorted(each.worker.index for each in decision.ranking) == [0, 1]
        assert all(each.rank in (0, 1) for each in decision.ranking)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_clients_rank_is_that_of_every_candidate(strategy, make_worker):
    fleet = Fleet(make_worker, strategy)

    decision, _ = fleet.done(1, rank=1, session_key="s")

    assert [each.rank for each in decision.ranking] == [1, 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_workers_are_ranked_as_a_whole_if_the_engine_chooses(strategy, make_worker):
    fleet = Fleet(make_worker, strategy)

    decision, _ = fleet.done(1, takes_rank=False, session_key="s")

    assert [each.rank for each in decision.ranking] == [None, None]


def test_each_rank_has_a_history_of_its_own(make_worker):
    fleet = Fleet(make_worker, "prefixaware", ranks=4, workers=1)
    _, first = fleet.done(1, rank=2)

    _, same = fleet.done(1, rank=2)
    _, other = fleet.done(1, rank=3)
    decision, free = fleet.done(1)

    assert first.matched_tokens == other.matched_tokens == 0
    assert same.matched_tokens == free.matched_tokens == TOKENS - 16
    assert free.rank in (2, 3)
    assert decision.reason is RouteReason.ONLY_WORKER


def test_the_mean_over_the_ranks_is_expected_where_the_engine_chooses(make_worker):
    fleet = Fleet(make_worker, "prefixaware", ranks=2, workers=1)
    fleet.done(1, rank=0)

    _, chosen = fleet.done(1, takes_rank=False)

    assert chosen.matched_tokens == (TOKENS - 16) // 2 // 16 * 16


def test_the_histories_of_all_ranks_are_as_large_as_the_workers_cache(make_worker):
    fleet = Fleet(make_worker, "prefixaware", ranks=4, workers=1)
    for seed in range(40):
        fleet.done(seed)

    tracked = fleet.router.describe_worker(fleet.workers[0])
    assert tracked["tracked_blocks"] <= tracked["capacity_blocks"] == 64_000 // 16
    assert fleet.router.evicted_blocks(fleet.workers[0]) > 0


def test_load_of_a_rank_and_of_its_worker_return_to_zero(make_worker):
    fleet = Fleet(make_worker, "prefixaware", workers=1)
    open_ = [fleet.send(seed)[2] for seed in range(4)]
    worker = fleet.workers[0]

    assert worker.load.in_flight == 4
    assert sorted(load.in_flight for load in worker.rank_loads.values()) == [2, 2]
    for dispatch in open_:
        dispatch.finish(fleet.now)
    assert [load.in_flight for load in (worker.load, *worker.rank_loads.values())] == [0, 0, 0]


def test_a_cleared_cache_forgets_every_rank(make_worker):
    fleet = Fleet(make_worker, "prefixaware", workers=1)
    fleet.done(1, rank=0)
    fleet.done(1, rank=1)
    worker = fleet.workers[0]

    fleet.router.history_cleared(worker, 0)
    assert fleet.send(1, rank=0)[1].matched_tokens == 0
    assert fleet.send(1, rank=1)[1].matched_tokens > 0
    fleet.router.worker_restarted(worker)
    assert fleet.send(1, rank=1)[1].matched_tokens == 0


def test_ranks_that_are_gone_leave_nothing_behind(make_worker):
    fleet = Fleet(make_worker, "prefixaware", workers=1)
    fleet.done(1, rank=1)
    worker = fleet.workers[0]
    worker.rank_units = {}

    fleet.router.capacity_changed(worker)

    assert fleet.router.index_size().tracked == 0


def test_roundrobin_takes_the_ranks_of_a_worker_in_turn(make_worker):
    fleet = Fleet(make_worker, "roundrobin", ranks=3, workers=2)

    chosen = [(each.worker.index, each.rank) for _, each in (fleet.done(seed) for seed in range(12))]

    assert {place: chosen.count(place) for place in chosen} == {
        (worker, rank): 2 for worker in range(2) for rank in range(3)
    }


def test_a_session_keeps_its_rank_and_sessions_use_all_of_them(make_worker):
    fleet = Fleet(make_worker, "session", ranks=3, workers=2)

    places = [
        {
            (each.worker.index, each.rank)
            for _, each in (fleet.done(session, session_key=f"s{session}") for _ in range(3))
        }
        for session in range(40)
    ]

    assert all(len(place) == 1 for place in places)
    assert len(set.union(*places)) == 6


def test_a_session_that_load_has_moved_stays_on_its_new_rank(make_worker):
    fleet = Fleet(make_worker, "session", ranks=2, workers=1)
    _, home = fleet.done(1, session_key="s")
    held = [fleet.send(seed, session_key="s") for seed in range(12)]
    _, moved = fleet.done(1, session_key="s")
    for _, _, dispatch in held:
        dispatch.finish(fleet.now)

    _, after = fleet.done(1, session_key="s")

    strategy = fleet.router.strategy("model", "session")
    ranks = {each.rank for _, each, _ in held}
    assert ranks == {0, 1}, "the bound of a rank holds"
    assert after.rank == moved.rank
    placed = strategy.placements()
    assert [entry[4] for entry in placed] == ([] if after.rank == home.rank else [after.rank])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recorded_decisions_with_ranks_are_made_again_alike(strategy, make_worker):
    fleet = Fleet(make_worker, strategy)
    recorder = fleet.router.record()
    open_ = []
    for seed in (1, 2, 1, 3, 2, 1, 4, 1):
        open_.append(fleet.send(seed, session_key=str(seed)))

    decisions = recorder.decisions()
    redecider = fleet.router.redecider(strategy)
    for decision, recorded in zip(decisions, recorder.find(decisions), strict=True):
        again = redecider.redecide(recorded)
        assert [(each.worker.id, each.rank, each.score) for each in again.ranking] == [
            (each.worker.id, each.rank, each.score) for each in decision.ranking
        ]


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
def test_requests_that_do_not_read_the_cache_are_spread_by_load(strategy, make_worker):
    fleet = Fleet(make_worker, strategy, ranks=2, workers=2)
    for _ in range(3):
        fleet.done(1)

    sent = [fleet.send(1, reads_cache=False) for _ in range(16)]

    assert {decision.reason for decision, _, _ in sent} == {RouteReason.NOT_CACHED}
    assert {each.matched_tokens for _, each, _ in sent} == {0}
    places = [(each.worker.index, each.rank) for _, each, _ in sent]
    assert len(set(places)) == 4
    assert max(places.count(place) for place in places) <= 5
