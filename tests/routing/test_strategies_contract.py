"""The contract of a strategy, over every registered one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvroute.index.in_flight import InFlight
from kvroute.index.radix_history import RadixHistory
from kvroute.options import Options
from kvroute.routing.cost import CostModel
from kvroute.routing.registry import STRATEGIES, RoutingOptions
from kvroute.routing.strategy import Needs, NoMap, RouteReason
from kvroute.routing.transfers import CacheViews, Transfers

NO_VIEWS = CacheViews(NoMap(), InFlight(), Transfers())


@pytest.fixture
def history():
    return RadixHistory(1000)


@pytest.fixture(params=STRATEGIES)
def strategy(request, history):
    registered = STRATEGIES[request.param]
    return registered(registered.options(), CostModel(history), history, NO_VIEWS)


@pytest.fixture
def view(make_worker, make_view):
    return make_view(*(make_worker(index) for index in range(4)))


@pytest.fixture(params=["bare", "prompt", "session", "both"])
def asked(request, query, keys_of, rng):
    return query(
        keys=keys_of(rng, 1000) if request.param in ("prompt", "both") else None,
        session_key="alice" if request.param in ("session", "both") else None,
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_every_class_variable(name) -> None:
    demanded = ("name", "needs", "options", "has_affinity", "observes_dispatch")
    missing = [variable for variable in demanded if not hasattr(STRATEGIES[name], variable)]

    assert not missing, f"the class of {name} lacks {', '.join(missing)}"


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_other_strategy_has_the_same_option_class(name) -> None:
    options = STRATEGIES[name].options
    sharing = [other for other, registered in STRATEGIES.items() if registered.options is options]

    assert sharing == [name], f"{' and '.join(sharing)} share {options.__name__}: give each its own class"


def test_docs_routing_has_a_row_for_each_strategy_and_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "routing.md").read_text()
    named = {
        name
        for row in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }

    missing = sorted({*STRATEGIES, *RouteReason} - named)

    assert not missing, f"add a row to the tables of docs/routing.md for: {', '.join(missing)}"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_registered_under_its_name_with_its_options(name, history) -> None:
    registered = STRATEGIES[name]

    assert issubclass(registered.options, Options)
    assert isinstance(getattr(RoutingOptions(), name), registered.options)
    strategy = registered(registered.options(), CostModel(history), history, NO_VIEWS)
    assert strategy.name == name
    assert isinstance(strategy.needs, Needs)


def test_ranks_every_worker_once(strategy, asked, view) -> None:
    decision = strategy.rank(asked, view)

    assert decision.strategy == strategy.name
    assert sorted(candidate.worker.id for candidate in decision.ranking) == [w.id for w in view.workers]


def test_orders_all_but_the_first_by_cost(strategy, asked, view) -> None:
    for worker, queued_s in zip(view.workers, (0.9, 0.3, 0.6, 1.2), strict=True):
        worker.load.reserve(0.0, prefill_s=queued_s, tokens=0)

    scores = [candidate.score for candidate in strategy.rank(asked, view).ranking]

    assert scores[1:] == sorted(scores[1:])


def test_asking_again_gives_the_same_answer_until_something_is_routed(strategy, asked, view) -> None:
    first = strategy.rank(asked, view)

    assert all(strategy.rank(asked, view) == first for _ in range(5))


def test_a_strategy_that_observes_no_dispatch_is_not_changed_by_one(strategy, asked, view) -> None:
    decision = strategy.rank(asked, view)

    strategy.on_dispatch(asked, decision, decision.ranking[0])

    assert strategy.observes_dispatch or strategy.rank(asked, view) == decision


def test_the_arithmetic_adds_up(strategy, asked, view) -> None:
    view.workers[1].load.reserve(0.0, prefill_s=0.4, tokens=300)

    for candidate in strategy.rank(asked, view).ranking:
        assert candidate.terms.score == pytest.approx(candidate.score)


def test_works_with_one_worker(strategy, asked, make_worker, make_view) -> None:
    only = make_worker(7)

    decision = strategy.rank(asked, make_view(only))
    strategy.on_dispatch(asked, decision, decision.ranking[0])

    assert [candidate.worker for candidate in decision.ranking] == [only]


def test_follows_a_fleet_that_changes(strategy, asked, view, make_worker, make_view) -> None:
    for version, members in enumerate(([0, 1, 2, 3], [1, 3], [3], [0, 3, 5]), 2):
        changed = make_view(*(make_worker(index) for index in members), version=version)
        decision = strategy.rank(asked, changed)
        strategy.on_dispatch(asked, decision, decision.ranking[0])
        assert {candidate.worker for candidate in decision.ranking} == set(changed.workers)


def test_forgetting_an_unknown_session_is_nothing(strategy) -> None:
    assert strategy.forget("nobody") is False
