from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.index.in_flight import InFlight
from kvroute.index.radix_history import RadixHistory
from kvroute.routing.cost import CostModel
from kvroute.routing.strategies.roundrobin import RoundRobin, RoundRobinOptions
from kvroute.routing.strategy import NoMap, RouteQuery, RouteReason
from kvroute.routing.transfers import CacheViews, Transfers

NO_VIEWS = CacheViews(NoMap(), InFlight(), Transfers())


def new_strategy() -> RoundRobin:
    history = RadixHistory(10)
    return RoundRobin(RoundRobinOptions(), CostModel(history), history, NO_VIEWS)


@pytest.fixture
def strategy():
    return new_strategy()


@pytest.fixture
def workers(make_worker):
    return [make_worker(index) for index in range(6)]


def route(strategy, view, count: int, model: str = "model") -> list[int]:
    """Indices of the workers that `count` requests go to."""
    chosen = []
    for _ in range(count):
        query = RouteQuery(model, 0.0, tokens=10)
        decision = strategy.rank(query, view)
        assert decision.reason is RouteReason.ROUND_ROBIN
        strategy.on_dispatch(query, decision, decision.ranking[0])
        chosen.append(decision.ranking[0].worker.index)
    return chosen


def test_workers_alternate(strategy, workers, make_view) -> None:
    assert route(strategy, make_view(*workers[:3]), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_load_does_not_matter(strategy, workers, make_view) -> None:
    workers[1].load.reserve(0.0, prefill_s=100.0, tokens=100_000)

    assert Counter(route(strategy, make_view(*workers[:2]), 20)) == {0: 10, 1: 10}


def test_a_new_worker_gets_its_share_and_no_burst(strategy, workers, make_view) -> None:
    route(strategy, make_view(*workers[:3]), 100)

    chosen = route(strategy, make_view(*workers[:4], version=2), 40)

    assert Counter(chosen) == {0: 10, 1: 10, 2: 10, 3: 10}
    assert all(before != after for before, after in pairwise(chosen))


def test_the_rest_share_evenly_after_a_worker_leaves(strategy, workers, make_view) -> None:
    route(strategy, make_view(*workers[:4]), 10)

    assert Counter(route(strategy, make_view(workers[0], workers[2], version=2), 20)) == {0: 10, 2: 10}


def test_a_worker_that_returns_does_not_catch_up(strategy, workers, make_view) -> None:
    both = make_view(*workers[:2])
    route(strategy, both, 10)
    route(strategy, make_view(workers[0], version=2), 500)

    assert Counter(route(strategy, both, 20)) == {0: 10, 1: 10}


def test_each_model_has_its_own_rotation(strategy, workers, make_view) -> None:
    view = make_view(*workers[:2])

    assert route(strategy, view, 3, "model") == [0, 1, 0]
    other = RouteQuery("other", 0.0, tokens=10)
    assert strategy.rank(other, type(view)("other", view.workers, 1)).ranking[0].worker.index == 0


def test_a_worker_just_back_gets_a_smaller_share(strategy, workers, make_view) -> None:
    workers[1].share = 0.25

    assert Counter(route(strategy, make_view(*workers[:2]), 50)) == {0: 40, 1: 10}


def test_a_retry_counts_for_the_worker_that_got_it(strategy, workers, make_view) -> None:
    view = make_view(*workers[:3])
    query = RouteQuery("model", 0.0, tokens=10)
    decision = strategy.rank(query, view)
    for candidate in decision.ranking[:2]:
        strategy.on_dispatch(query, decision, candidate)
    tried = {candidate.worker.index for candidate in decision.ranking[:2]}

    assert set(route(strategy, view, 1)) == {0, 1, 2} - tried


memberships = st.lists(
    st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(1, 30)), min_size=1, max_size=12
)


@given(memberships)
def test_stays_even_whatever_joins_or_leaves(make_view_of, phases) -> None:
    strategy = new_strategy()
    for version, (members, count) in enumerate(phases):
        shares = Counter(route(strategy, make_view_of(members, version), count))
        assert max(shares.values()) - min(shares.get(index, 0) for index in members) <= 2
