from __future__ import annotations

from collections import Counter

import pytest

from kvroute.index.in_flight import InFlight
from kvroute.index.radix_history import RadixHistory
from kvroute.routing.cost import CostModel
from kvroute.routing.strategies.session import Ring, Session, SessionOptions
from kvroute.routing.strategy import NoMap, RouteReason
from kvroute.routing.transfers import CacheViews, Transfers

NO_VIEWS = CacheViews(NoMap(), InFlight(), Transfers())


@pytest.fixture
def make_strategy():
    def make(**options) -> Session:
        history = RadixHistory(10)
        return Session(SessionOptions(**options), CostModel(history), history, NO_VIEWS)

    return make


@pytest.fixture
def strategy(make_strategy):
    return make_strategy()


@pytest.fixture
def workers(make_worker):
    return [make_worker(index) for index in range(5)]


@pytest.fixture
def view(workers, make_view):
    return make_view(*workers)


@pytest.fixture
def route(query):
    """Route one request of a session; its worker and the reason."""

    def route(strategy, view, session: str, parent: str | None = None):
        asked = query(session_key=session, parent_session=parent)
        decision = strategy.rank(asked, view)
        strategy.on_dispatch(asked, decision, decision.ranking[0])
        return decision.ranking[0].worker, decision.reason

    return route


def fill(worker, requests: int) -> list:
    return [worker.load.reserve(0.0, prefill_s=0.0, tokens=1) for _ in range(requests)]


SESSIONS = [f"session-{number}" for number in range(200)]


def test_a_session_stays_on_its_worker(strategy, view, route) -> None:
    for session in SESSIONS[:20]:
        assert len({route(strategy, view, session) for _ in range(5)}) == 1


def test_sessions_spread_over_the_workers(strategy, view, route) -> None:
    shares = Counter(route(strategy, view, f"user-{number}")[0].id for number in range(2000))

    assert len(shares) == 5
    assert max(shares.values()) <= 1.3 * 400


def test_when_a_worker_leaves_only_its_sessions_move(strategy, workers, view, make_view, route) -> None:
    before = {session: route(strategy, view, session)[0] for session in SESSIONS}
    removed = workers[2]

    rest = make_view(*(worker for worker in workers if worker is not removed), version=2)
    after = {session: route(strategy, rest, session)[0] for session in SESSIONS}

    moved = {session for session in SESSIONS if before[session] is not after[session]}
    assert moved == {session for session in SESSIONS if before[session] is removed}
    assert len({after[session].id for session in moved}) > 1, "they share the load of the lost worker"


def test_when_it_returns_they_come_back(strategy, workers, view, make_view, route) -> None:
    before = {session: route(strategy, view, session)[0] for session in SESSIONS}
    rest = make_view(*workers[1:], version=2)
    for session in SESSIONS:
        route(strategy, rest, session)

    again = make_view(*workers, version=3)

    assert {session: route(strategy, again, session)[0] for session in SESSIONS} == before


def test_a_worker_over_its_bound_passes_a_session_on(strategy, view, route) -> None:
    home, reason = route(strategy, view, "alice")
    assert reason is RouteReason.SESSION
    fill(home, 20)

    spilled, reason = route(strategy, view, "alice")

    assert spilled is not home
    assert reason is RouteReason.SESSION_SPILL


def test_a_session_that_was_passed_on_stays_there(strategy, view, route) -> None:
    home, _ = route(strategy, view, "alice")
    running = fill(home, 20)
    spilled, _ = route(strategy, view, "alice")
    for reservation in running:
        reservation.finish(1.0)

    assert route(strategy, view, "alice") == (spilled, RouteReason.SESSION)


def test_a_session_that_was_passed_on_stays_when_its_home_leaves_and_returns(
    strategy, workers, view, make_view, route
) -> None:
    home, _ = route(strategy, view, "alice")
    running = fill(home, 20)
    spilled, _ = route(strategy, view, "alice")
    for reservation in running:
        reservation.finish(1.0)

    without = make_view(*(worker for worker in workers if worker is not home), version=2)
    assert route(strategy, without, "alice")[0] is spilled
    assert route(strategy, make_view(*workers, version=3), "alice")[0] is spilled


def test_a_passed_on_session_goes_home_when_its_place_leaves(
    strategy, workers, view, make_view, route
) -> None:
    home, _ = route(strategy, view, "alice")
    running = fill(home, 20)
    spilled, _ = route(strategy, view, "alice")
    for reservation in running:
        reservation.finish(1.0)

    without = make_view(*(worker for worker in workers if worker is not spilled), version=2)

    assert route(strategy, without, "alice")[0] is home


def test_a_forgotten_session_goes_home(strategy, view, route) -> None:
    home, _ = route(strategy, view, "alice")
    running = fill(home, 20)
    route(strategy, view, "alice")
    for reservation in running:
        reservation.finish(1.0)

    assert strategy.forget("alice") is True
    assert route(strategy, view, "alice")[0] is home
    strategy.forget("alice")
    assert strategy.forget("alice") is False


def test_the_bound_holds_for_one_session_that_floods(strategy, view, query) -> None:
    for _ in range(100):
        asked = query(session_key="flood")
        decision = strategy.rank(asked, view)
        strategy.on_dispatch(asked, decision, decision.ranking[0])
        decision.ranking[0].worker.load.reserve(0.0, prefill_s=0.0, tokens=1)

    assert max(worker.load.in_flight for worker in view.workers) <= 25


def test_few_requests_are_no_reason_to_move(strategy, view, route) -> None:
    home, _ = route(strategy, view, "alice")
    fill(home, 3)

    assert route(strategy, view, "alice") == (home, RouteReason.SESSION)


def test_a_session_stays_at_a_load_at_which_its_worker_takes_no_new_one(strategy, view, route) -> None:
    home, _ = route(strategy, view, "alice")
    fill(home, 8)

    assert route(strategy, view, "alice") == (home, RouteReason.SESSION)
    new = [route(strategy, view, f"new {number}") for number in range(30)]
    assert all(worker is not home for worker, _ in new)
    assert RouteReason.SESSION_SPILL in [reason for _, reason in new]

    fill(home, 1)
    assert route(strategy, view, "alice")[1] is RouteReason.SESSION_SPILL


def test_without_slack_the_bound_alone_decides(make_strategy, view, route) -> None:
    strategy = make_strategy(free_requests=1)
    home, _ = route(strategy, view, "alice")
    fill(home, 1)

    assert route(strategy, view, "alice")[1] is RouteReason.SESSION_SPILL


def test_no_key_means_least_load(strategy, workers, view, query) -> None:
    for worker in workers:
        if worker.index != 3:
            worker.load.reserve(0.0, prefill_s=1.0, tokens=1)

    asked = query()
    decision = strategy.rank(asked, view)
    strategy.on_dispatch(asked, decision, decision.ranking[0])

    assert decision.ranking[0].worker.index == 3
    assert decision.reason is RouteReason.NO_SESSION_KEY


def test_a_retry_does_not_move_the_session(strategy, view, query, route) -> None:
    asked = query(session_key="alice")
    decision = strategy.rank(asked, view)
    for candidate in decision.ranking[:2]:
        strategy.on_dispatch(asked, decision, candidate)

    assert route(strategy, view, "alice")[0] is decision.ranking[0].worker


def test_the_table_keeps_the_most_recent_sessions(make_strategy, view, route) -> None:
    strategy = make_strategy(remembered=2)
    for session in ("a", "b", "a", "c"):
        route(strategy, view, session)

    assert [strategy.forget(session) for session in ("a", "b", "c")] == [True, False, True]


def test_models_have_rings_of_their_own(strategy, workers, view, query) -> None:
    other = type(view)("other", (workers[0],), 1)
    for model, its_view in (("model", view), ("other", other), ("model", view)):
        asked = query(session_key="alice", model=model)
        decision = strategy.rank(asked, its_view)
        strategy.on_dispatch(asked, decision, decision.ranking[0])
        assert decision.ranking[0].worker in its_view.workers


def test_any_text_is_a_key(strategy, view, route) -> None:
    for key in ("", "\udcff", "ключ", "x" * 10_000):
        route(strategy, view, key)


def test_a_decision_without_the_ring_is_not_remembered(strategy, view, query) -> None:
    """A decision of the router's own, such as for a stored response, for a model not yet seen."""
    asked = query(session_key="alice")
    decision = strategy.rank(query(), view)

    strategy.on_dispatch(asked, decision, decision.ranking[0])

    assert strategy.forget("alice") is False


def test_a_ring_walks_past_every_worker_once_from_home_on() -> None:
    ring = Ring(("a", "b", "c"), 50)
    for place in (0, 1 << 62, (1 << 64) - 1):
        walk = list(ring.walk(place))
        assert walk[0] == ring.home(place)
        assert sorted(walk) == ["a", "b", "c"]


def test_placements_are_taken_over_but_not_those_of_sessions_placed_here(make_strategy, view, workers, route):
    one, joins = make_strategy(free_requests=1), make_strategy(free_requests=1)
    home, _ = route(one, view, "s")
    lease = home.load.reserve(0.0, 1.0, 10)
    moved, reason = route(one, view, "s")
    route(one, view, "another")
    lease.finish(1.0)
    assert (moved is home, reason) == (False, RouteReason.SESSION_SPILL)
    other = next(each for each in workers if each not in (home, moved))

    for placement in one.placements():
        joins.adopt(*placement)
        joins.adopt(*placement[:3], other.id)

    assert route(joins, view, "s") == (moved, RouteReason.SESSION)


def test_a_placement_that_was_taken_over_is_forgotten_before_the_first_request(make_strategy, view, route):
    one, joins = make_strategy(), make_strategy()
    home, _ = route(one, view, "s")
    lease = fill(home, 20)
    moved, _ = route(one, view, "s")
    for reservation in lease:
        reservation.finish(1.0)
    assert moved is not home
    for placement in one.placements():
        joins.adopt(*placement)

    assert joins.forget("s") is True
    assert joins.placements() == []
    assert route(joins, view, "s")[0] is home


def test_the_first_request_of_a_session_does_not_wait_at_its_home(strategy, view, route, workers, query):
    asked = query(session_key="long", tokens=6000)
    home = strategy.rank(asked, view).ranking[0].worker
    home.load.reserve(0.0, prefill_s=1.0, tokens=6000)
    decision = strategy.rank(asked, view)
    assert decision.reason is RouteReason.SESSION_SPILL
    assert decision.ranking[0].worker is not home
    strategy.on_dispatch(asked, decision, decision.ranking[0])
    assert strategy.rank(asked, view).ranking[0].worker is decision.ranking[0].worker


def test_a_session_that_is_at_its_home_stays_there_although_it_waits(strategy, view, query):
    asked = query(session_key="long", tokens=6000)
    decision = strategy.rank(asked, view)
    strategy.on_dispatch(asked, decision, decision.ranking[0])
    home = decision.ranking[0].worker
    home.load.reserve(0.0, prefill_s=1.0, tokens=6000)
    assert strategy.rank(asked, view).ranking[0].worker is home


def test_a_new_session_starts_at_its_parent_sessions_worker_and_stays(strategy, view, route) -> None:
    worker, _ = route(strategy, view, "main")
    others = [f"sub-{number}" for number in range(20)]

    assert {route(strategy, view, each, "main") for each in others} == {(worker, RouteReason.SESSION)}
    assert {route(strategy, view, each) for each in others} == {(worker, RouteReason.SESSION)}
    assert len({route(strategy, view, f"{each} alone")[0] for each in others}) > 1


def test_a_new_session_follows_a_parent_session_that_has_moved(strategy, view, route) -> None:
    home, _ = route(strategy, view, "main")
    assert strategy.forget("main")
    requests = fill(home, 20)
    moved, _ = route(strategy, view, "main")
    assert moved is not home
    for request in requests:
        request.finish(0.0)

    assert route(strategy, view, "sub", "main") == (moved, RouteReason.SESSION)


def test_a_new_session_is_passed_on_if_its_parent_sessions_worker_is_at_its_bound(
    strategy, view, route
) -> None:
    worker, _ = route(strategy, view, "main")
    fill(worker, 20)

    other, reason = route(strategy, view, "sub", "main")

    assert other is not worker
    assert reason is RouteReason.SESSION_SPILL


def test_what_a_decision_read_of_both_sessions_can_be_restored(make_strategy, strategy, view, query) -> None:
    sub = query(session_key="sub", parent_session="main")
    main = query(session_key="main")
    decision = strategy.rank(main, view)
    strategy.on_dispatch(main, decision, decision.ranking[0])
    found, again = strategy.rank(sub, view), make_strategy()

    again.restore(sub, view, strategy.state_for(sub, view))

    assert again.state_for(sub, view) == strategy.state_for(sub, view)
    assert again.rank(sub, view).ranking[0].worker is found.ranking[0].worker
