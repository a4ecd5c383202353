"""Roles of workers: which requests are handed over, and to whom."""

from __future__ import annotations

import dataclasses
import random

import pytest
from msgspec.structs import replace

from kvroute.errors import NoRoutableWorker
from kvroute.fleet.worker import WorkerRole
from kvroute.routing.cost import ranking_of
from kvroute.routing.cost_parameters import CostOptions, Costs
from kvroute.routing.prefill_decode import HandoverLinks, PrefillDecodeOptions, choose
from kvroute.routing.registry import STRATEGIES, RoutingOptions
from kvroute.routing.router import Router
from kvroute.routing.strategy import Candidate, RouteDecision, RouteReason

LONG, SHORT = 8000, 200


@pytest.fixture
def fleet(make_worker, make_view):
    """A view of workers with these roles, by index; "p", "d" and "b"."""

    def fleet(roles: str):
        names = {"p": "prefill", "d": "decode", "b": "both"}
        workers = [make_worker(index) for index in range(len(roles))]
        for worker, letter in zip(workers, roles, strict=True):
            worker.spec = dataclasses.replace(worker.spec, role=names[letter])
        return make_view(*workers)

    return fleet


@pytest.fixture
def ask(query, keys_of, rng):
    """A request whose prompt may be moved."""

    def ask(tokens: int, now: float = 0.0, keys=None, **fields):
        keys = keys_of(rng, tokens) if keys is None else keys
        return replace(query(now, tokens=tokens, keys=keys, **fields), hands_over=True)

    return ask


def router_with(strategy: str = "prefixaware", **options) -> Router:
    return Router(RoutingOptions(strategy=strategy, prefill_decode=PrefillDecodeOptions(**options)))


def run(router, query, view, prefill_s: float = 1.0, end_s: float = 3.0):
    """Decide, and account the whole request. Returns the decision."""
    decision = router.decide(query, view)
    if decision.handover is None:
        dispatch = router.dispatch(query, decision, decision.ranking[0], query.now)
    else:
        dispatch = router.dispatch_handover(query, decision, query.now)
        dispatch.prefill_done(query.now + prefill_s)
    dispatch.first_token(query.now + prefill_s + 0.1)
    dispatch.finish(query.now + end_s)
    return decision


def test_without_roles_a_view_has_no_sides(fleet) -> None:
    assert fleet("bb").sides is None
    assert [worker.role for worker in fleet("pdb").workers] == [
        WorkerRole.PREFILL,
        WorkerRole.DECODE,
        WorkerRole.BOTH,
    ]


def test_a_worker_for_both_is_on_both_sides(fleet) -> None:
    sides = fleet("pdb").sides

    assert [worker.index for worker in sides.prefill.workers] == [0, 2]
    assert [worker.index for worker in sides.decode.workers] == [1, 2]


def test_an_unknown_role_label_is_no_role(make_worker) -> None:
    worker = make_worker(0)
    worker.spec = dataclasses.replace(worker.spec, role="engine")

    assert worker.role is WorkerRole.BOTH


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_long_cold_prompt_over_the_threshold_is_handed_over(strategy, fleet, ask) -> None:
    router, view = router_with(strategy, threshold_tokens=512), fleet("pd")

    decision = router.decide(ask(600, session_key="s"), view)

    assert decision.reason is RouteReason.OVER_THRESHOLD
    assert decision.handover.prefill.worker is view.workers[0]
    assert decision.handover.moved_tokens == 600
    assert [candidate.worker for candidate in decision.ranking] == [view.workers[1], view.workers[0]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_follow_up_goes_straight_to_the_decode_worker_that_holds_its_prefix(strategy, fleet, ask) -> None:
    router, view = router_with(strategy, threshold_tokens=512), fleet("pddd")
    first = ask(LONG, session_key="s")
    answered = run(router, first, view).ranking[0].worker

    follow_up = ask(LONG + 160, 4.0, [*first.prompts[0].keys, *range(10)], session_key="s")
    decision = router.decide(follow_up, view)

    if strategy == "roundrobin":  # the next worker's turn, which holds nothing
        assert decision.handover.moved_tokens == LONG + 160
    else:
        assert decision.handover is None
        assert decision.ranking[0].worker is answered


def test_by_cost_a_short_prompt_stays_and_a_long_one_is_handed_over_while_streams_run(fleet, ask) -> None:
    router, view = router_with(), fleet("pd")
    assert router.decide(ask(LONG), view).handover is None  # nobody is delayed

    for _ in range(2):  # streams on the decode worker
        stream = replace(ask(SHORT), hands_over=False)
        decision = router.decide(stream, view)
        router.dispatch(stream, decision, decision.ranking[0], 0.0).first_token(0.1)

    assert router.decide(ask(SHORT, 40.0), view).handover is None
    decision = router.decide(ask(LONG, 40.0), view)
    assert decision.reason is RouteReason.HANDED_OVER
    assert decision.handover.decode_only.score < decision.ranking[0].score  # but it would delay the streams


def stream_on(router, query, view, index: int, now: float = 0.0):
    """Let the worker with this index answer `query`; returns the dispatch of the running stream."""
    decision = router.decide(replace(query, hands_over=False), view)
    candidate = next(each for each in decision.ranking if each.worker.index == index)
    dispatch = router.dispatch(query, decision, candidate, now)
    dispatch.first_token(now)
    return dispatch


def test_a_prompt_of_few_tokens_delays_no_stream(fleet, ask) -> None:
    """Each iteration gives every stream a token, so only a prefill's tokens cost the streams time."""
    router, view = router_with(stall_share=0.05, latency_ms=0.0, link_gb_s=1e6), fleet("pd")
    for _ in range(100):
        stream_on(router, ask(16), view, 1)

    assert router.decide(ask(2), view).handover is None
    assert router.decide(ask(LONG), view).handover is not None


def test_a_busy_prefill_side_computes_the_long_prompts(fleet, ask) -> None:
    """The delay of later requests, which grows with the square of a prompt's length, ranks one side only."""
    router, view = router_with(), fleet("pd")
    for number in range(40):  # the prefill side is busy, and nothing waits there
        stream_on(router, ask(LONG), view, 0, float(number)).finish(float(number))
    for _ in range(20):
        stream_on(router, ask(SHORT), view, 1, 40.0)

    decision = router.decide(ask(4 * LONG, 40.0), view)

    assert decision.handover is not None
    assert decision.handover.prefill.terms.marginal > 4 * decision.handover.prefill.prefill_s


def test_a_prompt_of_which_the_decode_worker_lacks_one_token_stays_there(fleet, ask) -> None:
    """The decode worker computes the last token of each prompt itself."""
    router, view = router_with(threshold_tokens=0), fleet("pd")
    first = ask(LONG)
    run(router, first, view)

    decision = router.decide(ask(LONG + 1, 4.0, first.prompts[0].keys), view)

    assert decision.handover is None
    assert decision.ranking[0].worker is view.workers[1]


def test_by_cost_a_slow_link_keeps_a_prompt_on_the_decode_worker(fleet, ask) -> None:
    slow, view = router_with(link_gb_s=0.01), fleet("pd")

    assert slow.decide(ask(LONG), view).handover is None


def test_a_request_whose_kv_cannot_be_moved_is_not_handed_over(fleet, ask) -> None:
    decision = router_with(threshold_tokens=0).decide(replace(ask(LONG), hands_over=False), fleet("pd"))

    assert decision.handover is None
    assert decision.ranking[0].worker.role is WorkerRole.DECODE


def test_a_worker_for_both_is_no_pair_with_itself(fleet, ask) -> None:
    router, view = router_with(threshold_tokens=100), fleet("bd")

    decision = router.decide(ask(LONG), view)

    assert decision.handover.prefill.worker is view.workers[0]
    assert decision.ranking[0].worker is view.workers[1]


def test_two_ranks_of_a_worker_for_both_are_no_pair(make_worker) -> None:
    worker, links = make_worker(0), HandoverLinks(PrefillDecodeOptions(), 1)
    rows = [(score, *[0.0] * 8) for score in (1.0, 2.0)]
    ranks = ranking_of([Candidate(worker, row[0], 0, 0.0, row) for row in rows])

    choice = choose(
        LONG, ranks, ranks, links, Costs.of(CostOptions()), PrefillDecodeOptions(threshold_tokens=100), 0.0
    )

    assert choice.handover is None
    assert choice.ranking[0].worker is worker


def test_the_prefill_worker_that_holds_the_prefix_computes_the_rest(fleet, ask) -> None:
    router, view = router_with(threshold_tokens=100), fleet("ppd")
    first = ask(LONG)
    computed_by = run(router, first, view).handover.prefill.worker

    # The decode worker has lost the prompt, as after an eviction.
    router.worker_restarted(view.workers[2])
    decision = router.decide(ask(LONG + 1600, 4.0, [*first.prompts[0].keys, *range(100)]), view)

    assert decision.handover.prefill.worker is computed_by
    assert decision.handover.prefill.matched_tokens == LONG
    assert decision.handover.moved_tokens == LONG + 1600


def test_the_waiting_prompts_of_a_prefill_worker_send_the_next_one_elsewhere(fleet, ask) -> None:
    router, view = router_with(threshold_tokens=100), fleet("ppd")
    first = ask(LONG)
    decision = router.decide(first, view)
    router.dispatch_handover(first, decision, 0.0)

    assert router.decide(ask(LONG), view).handover.prefill.worker is not decision.handover.prefill.worker


def test_the_decode_worker_is_charged_while_the_prompt_is_computed_elsewhere(fleet, ask) -> None:
    router, view = router_with(threshold_tokens=100), fleet("pdd")
    first = ask(LONG)
    decision = router.decide(first, view)
    dispatch = router.dispatch_handover(first, decision, 0.0)

    other = router.decide(ask(LONG), view).ranking[0].worker
    assert other is not decision.ranking[0].worker

    dispatch.finish(1.0)
    for worker in view.workers:
        assert (worker.load.in_flight, worker.load.active_tokens, worker.load.queued) == (0, 0, 0)


def test_without_prefill_workers_decode_workers_do_whole_requests(fleet, ask) -> None:
    decision = router_with(threshold_tokens=100).decide(ask(LONG), fleet("dd"))

    assert decision.reason is RouteReason.NO_PREFILL_WORKER
    assert decision.handover is None


def test_without_decode_workers_prefill_workers_do_whole_requests(fleet, ask) -> None:
    decision = router_with(threshold_tokens=100).decide(ask(LONG), fleet("pp"))

    assert decision.reason is RouteReason.NO_DECODE_WORKER
    assert decision.handover is None
    assert len(decision.ranking) == 2


@pytest.mark.parametrize(("roles", "tokens"), [("pp", SHORT), ("dd", LONG)])
def test_strict_roles_refuse_what_only_the_other_side_could_do(roles, tokens, fleet, ask) -> None:
    router = router_with(threshold_tokens=1000, strict=True)

    with pytest.raises(NoRoutableWorker, match="strict"):
        router.decide(ask(tokens), fleet(roles))


def test_with_strict_roles_a_worker_for_both_does_whole_requests(fleet, ask) -> None:
    decision = router_with(threshold_tokens=1000, strict=True).decide(ask(LONG), fleet("b"))

    assert decision.handover is None
    assert [candidate.worker.role for candidate in decision.ranking] == [WorkerRole.BOTH]


def test_strict_roles_keep_prefill_workers_out_of_the_ranking(fleet, ask) -> None:
    decision = router_with(strict=True).decide(ask(SHORT), fleet("pd"))

    assert [candidate.worker.role for candidate in decision.ranking] == [WorkerRole.DECODE]


def test_a_prefill_worker_helps_when_the_decode_side_has_no_memory(make_worker, fleet, ask) -> None:
    router, view = router_with(), fleet("pd")
    small = view.workers[1]
    small.facts = dataclasses.replace(small.facts, capacity_tokens=4096)
    router.capacity_changed(small)

    decision = router.decide(ask(4000), view)

    assert decision.reason is RouteReason.DECODE_SIDE_FULL
    assert decision.ranking[0].worker is view.workers[0]


def test_explain_describes_both_workers(fleet, ask) -> None:
    router, view = router_with(threshold_tokens=100), fleet("pd")
    asked = ask(LONG)

    described = router.explain(asked, router.decide(asked, view))

    assert described["handover"]["prefill_worker"] == "worker-0"
    assert described["handover"]["moved_tokens"] == LONG
    assert described["ranking"][0]["worker"] == "worker-1"
    terms = described["ranking"][0]["terms_s"]
    assert described["ranking"][0]["score_s"] == pytest.approx(
        max(terms["wait"], terms["load"]) + sum(terms.values()) - terms["wait"] - terms["load"]
    )


def test_links_learn_the_rate_of_each_decode_worker() -> None:
    links = HandoverLinks(PrefillDecodeOptions(link_gb_s=1.0, latency_ms=10), token_bytes=100_000)
    assert links.move_s(1, 1000) == pytest.approx(0.11)
    assert links.move_s(1, 0) == 0.0

    for _ in range(200):
        links.learn(1, 1000, 0.21)
    links.learn(1, 100, 9.0)  # too short to show a rate

    assert links.gb_s(1) == pytest.approx(0.5, rel=0.1)
    links.forget(1)
    assert links.gb_s(1) == pytest.approx(1.0)


def test_the_decision_changes_nothing(fleet, ask) -> None:
    router, view, rng = router_with(), fleet("ppdb"), random.Random(3)
    for number in range(50):
        asked = ask(rng.choice((SHORT, LONG)), number * 0.1)
        first, again = router.decide(asked, view), router.decide(asked, view)
        assert (first.reason, list(first.ranking)) == (again.reason, list(again.ranking))
        run(router, asked, view)


class Listed:
    """A strategy whose rankings are plain lists."""

    def __init__(self, strategy) -> None:
        self.name, self.needs = strategy.name, strategy.needs
        self._strategy = strategy

    def rank(self, query, view):
        decision = self._strategy.rank(query, view)
        return RouteDecision(decision.strategy, decision.reason, list(decision.ranking))


@pytest.mark.parametrize("roles", ["pd", "ppdd", "pbd", "bb", "pp"])
@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_a_strategy_may_return_any_sequence_of_candidates(roles, tokens, fleet, ask) -> None:
    router, view = router_with(threshold_tokens=512), fleet(roles)
    first = ask(LONG)
    run(router, first, view)
    query = ask(tokens, 4.0, first.prompts[0].keys[: tokens // 32])
    plain = router.strategy("model")

    expected = router.decide(query, view, plain)
    decision = router.decide(query, view, Listed(plain))

    assert decision.describe() == expected.describe()
    assert len(decision.ranking) == len(expected.ranking)
    assert decision.ranking == expected.ranking
