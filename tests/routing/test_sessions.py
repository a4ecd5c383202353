"""A session stays on the worker of its last request where that costs hardly more."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.routing.conftest import MODEL, fleet_of, fresh_keys, new_worker

from kvroute.blocks.keys import PromptKeys
from kvroute.fleet.worker import WorkerId
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Router
from kvroute.routing.sessions import KEEP_SHARE, SessionWorkers, hash_of_session
from kvroute.routing.strategy import RouteQuery, RouteReason

A, B = WorkerId("worker-0"), WorkerId("worker-1")
TOKENS = 16_000


@pytest.fixture(params=["prefixaware", "kvaware"])
def router(request):
    return Router(RoutingOptions(strategy=request.param))


@pytest.fixture
def view(router):
    workers = [new_worker(index) for index in range(4)]
    for worker in workers:
        router.worker_joined(worker)
    return fleet_of(*workers)


@pytest.fixture
def ask(router, rng):
    """`ask(session)`: the query of a request; without `keys` its prompt is new."""

    def make(session: str | None = "s", keys=None, fingerprint: int = 1, parent: str | None = None):
        keys = fresh_keys(rng, TOKENS) if keys is None else keys
        worker = None if session is None else router.sessions.worker(hash_of_session(MODEL, session))
        from_parent = worker is None and parent is not None
        if from_parent:
            worker = router.sessions.worker(hash_of_session(MODEL, parent))
        prompts = (PromptKeys(keys, TOKENS, 16.0),)
        return RouteQuery(
            *(MODEL, 0.0, prompts, TOKENS, session),
            fingerprint=fingerprint,
            session_worker=worker,
            parent_session=parent,
            from_parent=from_parent,
        )

    return make


def send(router, view, query, worker=None):
    """Send the request to `worker`, or to the first of the ranking, and let it end."""
    decision = router.decide(query, view)
    chosen = next(each for each in decision.ranking if worker in (None, each.worker.id))
    router.dispatch(query, decision, chosen, 0.0).finish(0.0)
    return decision


@pytest.mark.parametrize("fingerprint", range(8))
def test_a_session_breaks_the_tie_between_idle_workers(router, view, ask, fingerprint):
    send(router, view, ask(), B)

    decision = router.decide(ask(fingerprint=fingerprint), view)

    assert decision.ranking[0].worker.id == B
    assert decision.ranking[0].matched_tokens == 0


def test_a_compacted_prompt_stays_although_its_worker_has_a_little_more_to_do(router, view, ask):
    send(router, view, ask(), B)
    whole_s = router.costs(MODEL).prefill_s(TOKENS, 0)
    view.workers[1].load.reserve(0.0, prefill_s=0.5 * KEEP_SHARE * whole_s, tokens=10)

    kept = router.decide(ask(), view)
    assert (kept.ranking[0].worker.id, kept.reason) == (B, RouteReason.SESSION_KEPT)
    assert [each.worker.id for each in kept.ranking].count(B) == 1

    assert router.decide(ask(session=None), view).ranking[0].worker.id != B
    assert router.decide(ask(session="another"), view).ranking[0].worker.id != B


def test_a_session_stays_although_its_worker_has_done_all_the_work(router, view, ask):
    """New conversations are spread by what each worker has done; a session is none."""
    for _ in range(3):
        query = ask()
        decision = router.decide(query, view)
        chosen = next(each for each in decision.ranking if each.worker.id == B)
        dispatch = router.dispatch(query, decision, chosen, 0.0)
        dispatch.first_token(1.0)
        dispatch.finish(1.0)
    later = replace(ask(), now=2.0)
    new = replace(ask(session=None), now=2.0)

    assert router.decide(new, view).ranking[0].worker.id != B
    assert max(each.terms.marginal for each in router.decide(new, view).ranking) > 0.0
    assert router.decide(later, view).ranking[0].worker.id == B


def test_a_session_leaves_a_worker_with_more_to_do(router, view, ask):
    send(router, view, ask(), B)
    whole_s = router.costs(MODEL).prefill_s(TOKENS, 0)
    view.workers[1].load.reserve(0.0, prefill_s=2 * KEEP_SHARE * whole_s, tokens=10)

    decision = router.decide(ask(), view)

    assert decision.ranking[0].worker.id != B
    assert decision.reason is not RouteReason.SESSION_KEPT


def test_a_session_leaves_for_a_worker_that_holds_more_of_the_prompt(router, view, ask, rng):
    shared = fresh_keys(rng, TOKENS)
    send(router, view, ask(session="s"), B)
    send(router, view, ask(session=None, keys=shared), A)

    decision = router.decide(ask(keys=shared), view)

    assert decision.ranking[0].worker.id == A
    assert decision.ranking[0].matched_tokens > 0.9 * TOKENS


@pytest.mark.parametrize("fingerprint", range(8))
def test_a_new_session_starts_where_its_parent_session_is(router, view, ask, fingerprint):
    send(router, view, ask(session="main"), B)
    send(router, view, ask(session="other"), A)

    decision = router.decide(ask(session="sub", parent="main", fingerprint=fingerprint), view)

    assert decision.ranking[0].worker.id == B


def test_a_new_session_does_not_wait_for_its_parent_sessions_worker(router, view, ask):
    """A session of its own would stay there at this load: its older blocks are there."""
    send(router, view, ask(session="main"), B)
    whole_s = router.costs(MODEL).prefill_s(TOKENS, 0)
    view.workers[1].load.reserve(0.0, prefill_s=0.5 * KEEP_SHARE * whole_s, tokens=10)

    assert router.decide(ask(session="main"), view).ranking[0].worker.id == B
    assert router.decide(ask(session="sub", parent="main"), view).ranking[0].worker.id != B


def test_a_session_of_its_own_outweighs_the_parent_session(router, view, ask):
    send(router, view, ask(session="main"), B)
    send(router, view, ask(session="sub", parent="main"), A)

    assert router.decide(ask(session="sub", parent="main"), view).ranking[0].worker.id == A


def test_a_session_follows_its_last_request(router, view, ask):
    send(router, view, ask(), B)
    send(router, view, ask(), A)

    assert router.sessions.worker(hash_of_session(MODEL, "s")) == A
    assert router.sessions.worker(hash_of_session("another model", "s")) is None


def test_a_session_whose_worker_has_left_goes_anywhere(router, view, ask):
    send(router, view, ask(), B)
    left = [worker for worker in view.workers if worker.id != B]

    decision = router.decide(ask(), fleet_of(*left, version=2))

    assert len(decision.ranking) == 3


def test_a_forgotten_session_has_no_worker(router, view, ask):
    send(router, view, ask(), B)

    assert router.forget_session("s")
    assert router.sessions.worker(hash_of_session(MODEL, "s")) is None
    assert not router.forget_session("s")


@pytest.mark.parametrize("strategy", ["session", "roundrobin"])
def test_strategies_that_do_not_rank_by_cost_remember_nothing_here(strategy, view, ask):
    router = Router(RoutingOptions(strategy=strategy))

    send(router, view, ask())

    assert not len(router.sessions)


def workers_of(sessions: SessionWorkers, *keys: str):
    return [sessions.worker(hash_of_session(MODEL, key)) for key in keys]


def test_the_most_recently_used_sessions_are_remembered():
    sessions = SessionWorkers(2)
    for session in ("first", "second", "first", "third"):
        sessions.dispatched(MODEL, hash_of_session(MODEL, session), A)

    assert [sessions.worker(hash_of_session(MODEL, each)) for each in ("first", "second", "third")] == [
        A,
        None,
        A,
    ]


def test_a_joining_process_adopts_the_sessions_that_it_has_not_seen():
    source, joined = SessionWorkers(10), SessionWorkers(10)
    for session in ("1", "2", "3"):
        source.dispatched(MODEL, hash_of_session(MODEL, session), A)
    joined.dispatched(MODEL, hash_of_session(MODEL, "3"), B)

    joined.adopt(*source.latest(2))

    assert workers_of(joined, "1", "2", "3") == [None, A, B]
    assert joined.forget("2")
