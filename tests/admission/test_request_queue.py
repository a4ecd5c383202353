import pytest
from tests.support.clocks import ManualClock

from kvroute.admission.fair_queue import AdmissionOptions
from kvroute.admission.request_queue import Permits
from kvroute.fleet.worker import LearnedConcurrency, Worker, WorkerFacts, WorkerId, WorkerSpec
from kvroute.routing.strategy import Candidate, CostTerms, RouteDecision, RouteQuery, RouteReason

QUERY = RouteQuery("m", 0.0)


def worker(name: str = "w", **fields) -> Worker:
    return Worker(WorkerSpec(WorkerId(name), f"http://{name}", models=("m",)), **fields)


def permits(clock=None, processes: int = 1, number: int = 0, **options) -> Permits:
    return Permits(AdmissionOptions(**options), clock or ManualClock(), processes=processes, number=number)


def decision(*workers: Worker) -> RouteDecision:
    ranking = tuple(Candidate(each, 0.0, 0, 0.0, CostTerms()) for each in workers)
    return RouteDecision("prefixaware", RouteReason.PREFIX_HIT, ranking)


def dispatch(held: Permits, to: Worker):
    routed = decision(to)
    return held.dispatched(QUERY, routed, routed.ranking[0], 0.0)


def test_the_workers_own_limit_counts_before_the_models_and_that_before_the_general_one():
    held = permits(
        max_concurrent=1, max_concurrent_by_model={"m": 2}, max_concurrent_by_worker={"special": 3}
    )
    other = Worker(WorkerSpec(WorkerId("o"), "http://o", models=("other",)))

    assert [held.limit(one) for one in (other, worker(), worker("special"))] == [1, 2, 3]


def test_without_a_limit_a_worker_always_has_a_permit():
    held = permits(max_concurrent_by_worker={"another": 1})
    one = worker()
    for _ in range(100):
        dispatch(held, one)

    assert held.limit(one) is None
    assert held.has_free(one)


def test_a_learned_limit_counts_only_with_learn():
    one = worker(facts=WorkerFacts(concurrency=LearnedConcurrency(7)))

    assert permits(learn=True).limit(one) == 7
    assert permits(learn=True).limit(worker()) is None
    assert permits(learn=True, max_concurrent=3).limit(one) == 3
    assert permits(max_concurrent_by_worker={"x": 1}).limit(one) is None


def test_a_permit_is_returned_when_the_attempt_ends():
    held, one, freed = permits(max_concurrent=1), worker(), []
    held.on_free = lambda: freed.append(1)
    attempt = dispatch(held, one)

    assert not held.has_free(one)
    attempt.first_token(0.0, True)
    assert not held.has_free(one)
    attempt.finish(0.0)
    assert held.has_free(one)
    assert freed == [1]
    assert not held._in_flight


@pytest.mark.parametrize(("limit", "shares"), [(64, (22, 21, 21)), (3, (1, 1, 1)), (1, (1, 1, 1))])
def test_the_processes_share_a_limit(limit, shares):
    one = worker()
    for number, share in enumerate(shares):
        held = permits(processes=3, number=number, max_concurrent=limit)
        for _ in range(share):
            assert held.has_free(one)
            dispatch(held, one)
        assert not held.has_free(one)


def test_a_worker_that_ramps_has_a_part_of_its_limit():
    clock = ManualClock(100.0)
    held = permits(clock, max_concurrent=10)
    one = worker(share=0.1, ramp_since=100.0, ramp_until=110.0)
    dispatch(held, one)

    assert not held.has_free(one)
    clock.time = 105.0
    assert held.has_free(one)


def test_the_best_worker_with_a_permit_comes_first_and_the_others_keep_their_order():
    held = permits(max_concurrent=1)
    a, b, c = worker("a"), worker("b"), worker("c")
    dispatch(held, a)

    placed = held.placed(decision(a, b, c))

    assert [candidate.worker.id for candidate in placed.ranking] == ["b", "a", "c"]
    assert placed.reason is RouteReason.AT_LIMIT


def test_a_decision_stays_as_it_is_if_the_first_worker_or_none_has_a_permit():
    held = permits(max_concurrent=1)
    a, b = worker("a"), worker("b")
    free = decision(a, b)

    assert held.placed(free) is free
    dispatch(held, a)
    dispatch(held, b)
    assert held.placed(free) is free


def test_the_routers_other_observer_is_called_too():
    events = []

    class Observer:
        def dispatched(self, query, decision, candidate, now):
            events.append("dispatched")
            return self

        def first_token(self, now, is_first):
            events.append("first token")

        def finish(self, now):
            events.append("finished")

        def session_forgotten(self, session_key):
            events.append(session_key)

    held = Permits(AdmissionOptions(max_concurrent=1), ManualClock(), Observer())
    attempt = dispatch(held, worker())
    attempt.first_token(0.0, True)
    attempt.finish(0.0)
    held.session_forgotten("s")

    assert events == ["dispatched", "first token", "finished", "s"]


def test_changed_limits_count_for_requests_in_flight():
    held, one = permits(max_concurrent=1), worker()
    first = dispatch(held, one)
    held.configure(AdmissionOptions(max_concurrent=3))
    assert held.has_free(one)
    second = dispatch(held, one)
    held.configure(AdmissionOptions(max_concurrent=1))
    first.finish(0.0)
    assert not held.has_free(one)
    second.finish(0.0)

    assert held.has_free(one)
