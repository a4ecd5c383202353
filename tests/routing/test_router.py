from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.blocks.keys import PromptKeys
from kvroute.fleet.worker import WorkerFacts
from kvroute.routing.registry import STRATEGIES, RoutingOptions
from kvroute.routing.router import Router
from kvroute.routing.strategy import Candidate, CostTerms, RouteDecision, RouteQuery, RouteReason

A, B = 0, 1


@pytest.fixture
def router():
    return Router()


@pytest.fixture
def workers(make_worker):
    return [make_worker(A), make_worker(B)]


@pytest.fixture
def view(workers, make_view):
    return make_view(*workers)


def in_flight(router, worker) -> tuple[int, int, int, int]:
    described = router.describe_worker(worker)
    load = worker.load
    return load.in_flight, load.active_tokens, load.queued, described["active_blocks"]


AT_REST = (0, 0, 0, 0)


def test_a_dispatch_is_accounted_until_it_finishes(router, view, workers, query, send, keys_of, rng) -> None:
    dispatch = send(router, query(keys=keys_of(rng, 1600), tokens=1600), view)

    worker = dispatch.worker
    assert in_flight(router, worker) == (1, 1600, 1, 100)
    assert worker.load.wait(0.0) > 0.2

    dispatch.first_token(0.3)
    assert in_flight(router, worker) == (1, 1600, 0, 100)

    dispatch.finish(1.0)
    dispatch.finish(2.0)
    dispatch.first_token(3.0)
    assert in_flight(router, worker) == AT_REST
    assert router.describe_worker(worker)["tracked_blocks"] == 100


def test_the_next_request_of_a_conversation_follows_it(router, view, query, send, keys_of, rng) -> None:
    keys = keys_of(rng, 3200)
    send(router, query(keys=keys[:100], tokens=1600), view).finish(1.0)

    decision = router.decide(query(2.0, keys=keys, tokens=3200, fingerprint=77), view)

    assert decision.reason is RouteReason.PREFIX_HIT
    assert decision.ranking[0].matched_tokens == 1584 + 16


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_explain_gives_the_decision_of_the_next_identical_request(
    strategy, view, query, send, keys_of, rng
) -> None:
    router = Router(RoutingOptions(strategy=strategy))
    for number in range(40):
        keys = keys_of(rng, 800)
        asked = query(
            number * 0.05,
            keys=keys if number % 3 else None,
            session_key=f"s{number % 4}" if number % 5 else None,
            fingerprint=number,
        )
        explained = router.explain(asked, router.decide(asked, view))
        assert router.explain(asked, router.decide(asked, view)) == explained

        decision = router.decide(asked, view)
        assert [entry["worker"] for entry in explained["ranking"]] == [c.worker.id for c in decision.ranking]
        assert explained["reason"] == decision.reason.value
        dispatch = send(router, asked, view)
        if number % 2:
            dispatch.finish(number * 0.05 + 0.01)


def test_explain_shows_the_arithmetic(router, view, query, send, keys_of, rng) -> None:
    keys = keys_of(rng, 1600)
    send(router, query(keys=keys, tokens=1600), view)

    asked = query(0.1, keys=keys, tokens=1600)
    explained = router.explain(asked, router.decide(asked, view))

    assert explained["prompt_tokens"] == 1600
    holder = next(entry for entry in explained["ranking"] if entry["matched_tokens"])
    assert holder["matched_tokens"] == 1584
    assert holder["terms_s"]["wait"] > 0
    assert holder["requests_in_flight"] == 1
    assert holder["active_blocks"] == 100
    terms = dict(holder["terms_s"])
    waiting = max(terms.pop("wait"), terms.pop("load"))
    assert holder["score_s"] == pytest.approx(waiting + sum(terms.values()))


def test_strategies_are_chosen_per_request_then_per_model_then_by_default() -> None:
    router = Router(RoutingOptions.model_validate({"models": {"m": {"strategy": "session"}, "n": {}}}))

    assert router.strategy("m", "roundrobin").name == "roundrobin"
    assert router.strategy("m").name == "session"
    assert router.strategy("n").name == "prefixaware"
    assert router.strategy("other").name == "prefixaware"
    assert router.knows("session")
    assert not router.knows("random")
    assert router.strategies == tuple(STRATEGIES)


def test_a_strategy_given_by_the_caller_counts(router, view, query) -> None:
    decision = router.decide(query(), view, router.strategy("model", "roundrobin"))

    assert (decision.strategy, decision.reason) == ("roundrobin", RouteReason.ROUND_ROBIN)


def test_the_reason_shows_that_there_was_no_choice(router, workers, make_view, query) -> None:
    assert router.decide(query(), make_view(workers[0])).reason is RouteReason.ONLY_WORKER


def test_a_request_that_continues_a_stored_response_goes_only_to_its_owner(
    router, view, workers, query, send, keys_of, rng
) -> None:
    keys = keys_of(rng, 1600)
    first = send(router, query(keys=keys, tokens=1600), view)
    first.finish(1.0)

    decision = router.pinned(query(2.0, keys=keys, tokens=1600), view, first.worker.id)

    assert decision is not None
    assert decision.reason is RouteReason.RESPONSE_OWNER
    assert [(c.worker, c.matched_tokens) for c in decision.ranking] == [(first.worker, 1584)]
    assert router.pinned(query(), view, "worker-9") is None


def test_a_decision_made_elsewhere_can_be_dispatched(router, workers) -> None:
    """The gateway sends reads of a stored response where they must go, without asking a strategy."""
    candidate = Candidate(workers[A], 0.0, 0, 0.0, CostTerms())
    decision = RouteDecision("-", RouteReason.RESPONSE_OWNER, (candidate,))

    dispatch = router.dispatch(RouteQuery("-", 0.0, streamed=False), decision, candidate, 0.0)

    assert workers[A].load.in_flight == 1
    dispatch.finish(1.0)
    assert in_flight(router, workers[A]) == AT_REST


def test_a_retry_is_accounted_where_it_goes(router, view, query, keys_of, rng) -> None:
    asked = query(keys=keys_of(rng, 1600), tokens=1600)
    decision = router.decide(asked, view)
    first = router.dispatch(asked, decision, decision.ranking[0], 0.0)
    first.finish(0.1)

    second = router.dispatch(asked, decision, decision.ranking[1], 0.1)

    assert in_flight(router, first.worker) == AT_REST
    assert in_flight(router, second.worker) == (1, 1600, 1, 100)
    second.finish(1.0)


def test_a_restarted_worker_has_an_empty_part_of_the_same_size(
    router, view, workers, query, send, keys_of, rng
) -> None:
    for worker in workers:
        router.worker_joined(worker)
    keys = keys_of(rng, 1600)
    dispatch = send(router, query(keys=keys, tokens=1600), view)

    router.worker_restarted(dispatch.worker)

    assert router.decide(query(keys=keys, tokens=1600), view).reason is RouteReason.PREFIX_MISS
    described = router.describe_worker(dispatch.worker)
    assert (described["tracked_blocks"], described["capacity_blocks"]) == (0, 75_000)
    dispatch.finish(1.0)
    assert in_flight(router, dispatch.worker) == AT_REST


def test_a_worker_under_a_reused_index_inherits_nothing(
    router, view, make_worker, make_view, query, send, keys_of, rng
) -> None:
    keys = keys_of(rng, 1600)
    dispatch = send(router, query(keys=keys, tokens=1600), view)
    old = dispatch.worker
    router.worker_left(old)
    new = make_worker(old.index, capacity_tokens=3200)
    router.worker_joined(new)
    other = send(router, query(keys=keys, tokens=1600), make_view(new))

    dispatch.finish(1.0)

    assert in_flight(router, new) == (1, 1600, 1, 100)
    assert old.load.in_flight == 0
    assert router.describe_worker(new)["capacity_blocks"] == 200
    other.finish(2.0)
    assert in_flight(router, new) == AT_REST


def test_a_part_follows_the_workers_capacity(router, workers) -> None:
    router.worker_joined(workers[A])
    workers[A].facts = WorkerFacts(capacity_tokens=16_000)

    router.capacity_changed(workers[A])

    assert router.describe_worker(workers[A])["capacity_blocks"] == 1000


def test_describes_the_index(router, view, workers, query, send, keys_of, rng) -> None:
    send(router, query(keys=keys_of(rng, 1600), tokens=1600), view).finish(1.0)

    described = router.describe_index(workers)

    assert described["index"] == "radix"
    assert described["blocks"] == described["tracked_blocks"] == 100
    assert described["bytes"] == router.index_size().bytes > 0
    assert set(described["workers"]) == {"worker-0", "worker-1"}


def test_keeps_its_history_in_the_index_that_was_configured(view, query, send, keys_of, rng) -> None:
    router = Router(RoutingOptions.model_validate({"prefixaware": {"index": "pygtrie"}}))
    keys = keys_of(rng, 1600)
    send(router, query(keys=keys, tokens=1600), view).finish(1.0)

    assert router.decide(query(2.0, keys=keys, tokens=1600), view).reason is RouteReason.PREFIX_HIT


def test_forgetting_a_session_frees_its_strategys_state(view, query, send) -> None:
    router = Router(RoutingOptions(strategy="session"))
    send(router, query(session_key="alice"), view)

    assert router.forget_session("alice") is True
    assert router.forget_session("alice") is False


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["dispatch", "dispatch", "retry", "first_token", "finish", "leave", "restart", "resize"]
        ),
        st.integers(0, 20),
        st.booleans(),
    ),
    max_size=60,
)


@given(steps=steps, strategy=st.sampled_from(sorted(STRATEGIES)))
@settings(deadline=None)
def test_any_mix_of_requests_and_workers_returns_to_zero(steps, strategy, make_view_of) -> None:
    """Dispatches that retry, fail, are abandoned or outlive their worker's place in the fleet."""
    router = Router(RoutingOptions(strategy=strategy))
    members, version, now = {0, 1, 2, 3}, 0, 0.0
    view = make_view_of(members, version)
    everyone = view.workers
    for worker in everyone:
        router.worker_joined(worker)
    running = []
    for action, number, streamed in steps:
        now += 0.05 * number
        worker = everyone[number % 4]
        if action in ("dispatch", "retry"):
            keys = range(1, 2 + number * 3) if streamed else range(1000 * number + 1, 1000 * number + 40)
            prompts = (PromptKeys(list(keys), 16 * len(keys) + 3, 16.0),) * (1 + number % 2)
            tokens = sum(prompt.tokens for prompt in prompts)
            query = RouteQuery("model", now, prompts, tokens, f"s{number}", streamed, number)
            decision = router.decide(query, view)
            for candidate in decision.ranking[: 2 if action == "retry" else 1]:
                running.append(router.dispatch(query, decision, candidate, now))
        elif action in ("first_token", "finish") and running:
            getattr(running[number % len(running)], action)(now)
        elif action == "restart":
            router.worker_restarted(worker)
        elif action == "resize":
            router.capacity_changed(worker)
        elif action == "leave":
            if worker.index in members and len(members) > 1:
                members.remove(worker.index)
                router.worker_left(worker)
            elif worker.index not in members:
                members.add(worker.index)
                router.worker_joined(worker)
            version += 1
            view = make_view_of(members, version)

    for dispatch in running:
        dispatch.finish(now)

    for worker in everyone:
        assert in_flight(router, worker) == AT_REST
        assert worker.load.wait(now) == 0.0
