from __future__ import annotations

from array import array

import pytest

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import PromptKeys, prompt_keys, token_keys
from kvroute.index.in_flight import InFlight
from kvroute.index.map_trust import MapTrust
from kvroute.index.radix_history import RadixHistory
from kvroute.routing.cost import CostModel
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Router
from kvroute.routing.strategies.kvaware import KvAware, KvAwareOptions
from kvroute.routing.strategy import CachePlace, ExactPrompt, RouteQuery, RouteReason, Tokens
from kvroute.routing.transfers import CacheViews, TransferOptions, Transfers

A, B, C = range(3)
LENGTH = 1000


class FakeMap:
    """The same tokens held for every prompt, by slot; slots are worker indices unless `ranks` is set."""

    def __init__(self) -> None:
        self.held: dict[int, Tokens] = {}
        self.trusts: dict[int, MapTrust] = {}
        self.slots: dict[int, list[int]] = {}
        self.refreshes: list[bool] = []
        self.is_read = True
        self.has_prompts = False

    def refresh(self, force):
        self.refreshes.append(force)
        return force or self.is_read

    def places(self, worker):
        slots = self.slots.get(worker.index, [worker.index])
        return [
            CachePlace(slot, rank, trust, "" if trust is MapTrust.WHOLE else "gap")
            for rank, slot in enumerate(slots)
            for trust in [self.trusts.get(slot, MapTrust.WHOLE)]
        ]

    def match(self, prompt):
        return self.held

    def holds(self, slot, keys, tokens):
        return self.held.get(slot, Tokens()).gpu >= tokens

    def has_end(self, slot, keys):
        return self.has_prompts

    def keys_of(self, slot, prompt):
        return prompt.keys


@pytest.fixture
def caches() -> FakeMap:
    return FakeMap()


@pytest.fixture
def history():
    return RadixHistory(10_000)


@pytest.fixture
def in_flight(caches):
    return InFlight(caches.has_end)


@pytest.fixture
def strategy(caches, history, in_flight) -> KvAware:
    tiers = Transfers(TransferOptions(token_bytes=100_000, l1_gb_s=10, l2_gb_s=1, l2_latency_ms=2))
    return KvAware(KvAwareOptions(), CostModel(history), history, CacheViews(caches, in_flight, tiers))


@pytest.fixture
def workers(make_worker):
    return [make_worker(index) for index in (A, B, C)]


@pytest.fixture
def view(workers, make_view):
    return make_view(*workers)


def exact(ids: list[int]) -> ExactPrompt:
    usable = array("I", ids[:-1])
    return ExactPrompt(len(ids), token_keys(usable, 0), PromptChunks(usable))


def asked(*, tokens: int = LENGTH, inexact: str = "", now: float = 0.0) -> RouteQuery:
    ids = list(range(tokens))
    approximate = PromptKeys(token_keys(array("I", ids), 1), tokens, 16.0)
    prompts = () if inexact else (exact(ids),)
    return RouteQuery("model", now, (approximate,), tokens, exact=prompts, inexact=inexact)


def order(decision) -> list[int]:
    return [candidate.worker.index for candidate in decision.ranking]


def candidate_of(decision, index: int):
    return next(candidate for candidate in decision.ranking if candidate.worker.index == index)


def test_goes_where_the_map_has_most(strategy, caches, view) -> None:
    caches.held = {B: Tokens(gpu=800), C: Tokens(gpu=400)}

    decision = strategy.rank(asked(), view)

    assert order(decision) == [B, C, A]
    assert decision.reason is RouteReason.KV_HIT
    assert [candidate.matched_tokens for candidate in decision.ranking] == [800, 400, 0]


def test_blocks_in_slower_tiers_count_with_the_time_they_take(strategy, caches, view) -> None:
    """800 tokens are 80 MB: 8 ms from L1, 80 + 2 ms from L2; computing them takes 128 ms and attention."""
    caches.held = {A: Tokens(l2=800), B: Tokens(l1=800), C: Tokens(gpu=800)}

    decision = strategy.rank(asked(), view)

    assert order(decision) == [C, B, A]
    loads = {candidate.worker.index: candidate.terms.load for candidate in decision.ranking}
    assert loads == {C: 0.0, B: pytest.approx(0.008), A: pytest.approx(0.082)}


def test_transfers_under_way_are_waited_for(strategy, caches, view) -> None:
    """The shared store serves all workers from one queue."""
    caches.held = {A: Tokens(l2=800), B: Tokens(l2=800)}
    first = strategy.rank(asked(), view)
    chosen = first.ranking[0]
    strategy.on_dispatch(asked(), first, chosen)

    loads = {c.worker.index: c.terms.load for c in strategy.rank(asked(), view).ranking}

    other = B if chosen.worker.index == A else A
    assert loads[chosen.worker.index] == pytest.approx(0.162)
    assert loads[other] == pytest.approx(0.082 + 0.01), "80 MB at the store's own 8 GB/s"


def test_a_busy_holder_loses_the_request(strategy, caches, view, workers) -> None:
    caches.held = {A: Tokens(gpu=800)}
    workers[A].load.reserve(0.0, prefill_s=1.0, tokens=0)

    decision = strategy.rank(asked(), view)

    assert order(decision)[-1] == A
    assert decision.reason is RouteReason.KV_SPILL


def test_blocks_of_unfinished_requests_are_held_before_their_events_come(strategy, in_flight, view) -> None:
    query = asked()
    lease = in_flight.acquire(B, query.exact[0].keys)

    decision = strategy.rank(query, view)

    assert order(decision)[0] == B
    assert decision.ranking[0].matched_tokens == 992
    lease.finish(0.0)  # before its first token
    assert strategy.rank(query, view).reason is RouteReason.KV_MISS


def test_in_flight_blocks_take_the_place_of_slower_tiers(strategy, caches, in_flight, view) -> None:
    caches.held = {B: Tokens(gpu=160, l1=320, l2=256)}
    query = asked()
    in_flight.acquire(B, query.exact[0].keys[:20])

    held = candidate_of(strategy.rank(query, view), B).match

    assert held.tokens == Tokens(gpu=320, l1=160, l2=256)


def test_waiting_events_are_applied_before_a_decision(strategy, caches, view) -> None:
    strategy.rank(asked(), view)
    strategy.rank(asked(inexact="late"), view)

    assert caches.refreshes == [False]


def test_a_finished_prompt_counts_until_events_have_been_read(strategy, caches, in_flight, view) -> None:
    query = asked()
    in_flight.acquire(B, query.exact[0].keys, streamed=False).finish(0.0)
    caches.is_read = False
    assert candidate_of(strategy.rank(query, view), B).match.tokens.gpu == 992

    caches.is_read = True  # but the events of this prompt are still on their way
    assert candidate_of(strategy.rank(query, view), B).match.tokens.gpu == 992

    caches.has_prompts = True
    assert candidate_of(strategy.rank(query, view), B).match.tokens.gpu == 0


def test_the_next_turn_is_decided_with_all_events_of_the_last(strategy, caches, in_flight, view) -> None:
    """The blocks of its answer are not in the prompt that was in flight."""
    query = asked()
    keys = query.exact[0].keys
    in_flight.acquire(B, keys[: len(keys) // 2], streamed=False).finish(0.0)
    caches.is_read = False
    caches.match = lambda prompt: {B: Tokens(gpu=800)} if caches.refreshes[-1] else {}

    decision = strategy.rank(query, view)

    assert caches.refreshes == [False, True]
    assert candidate_of(decision, B).match.tokens.gpu == 800


def test_in_flight_tokens_are_whole_blocks_of_the_worker(
    caches, history, in_flight, make_worker, make_view
) -> None:
    strategy = KvAware(
        KvAwareOptions(), CostModel(history), history, CacheViews(caches, in_flight, Transfers())
    )
    coarse = make_worker(A, block_size=128)
    query = asked()
    in_flight.acquire(A, query.exact[0].keys)

    assert strategy.rank(query, make_view(coarse)).ranking[0].matched_tokens == 896


def test_without_tokens_the_route_history_decides(strategy, caches, history, view) -> None:
    caches.held = {A: Tokens(gpu=800)}
    query = asked(inexact="late")
    history.acquire(C, query.prompts[0].keys).release()

    decision = strategy.rank(query, view)

    assert order(decision)[0] == C
    assert decision.reason is RouteReason.KV_APPROXIMATE
    assert (decision.ranking[0].match.mapped, decision.ranking[0].match.distrust_reason) == (False, "late")


def test_a_worker_whose_map_is_not_trusted_is_ranked_by_the_route_history(
    strategy, caches, history, view
) -> None:
    caches.held = {A: Tokens(gpu=800), B: Tokens(gpu=320)}
    caches.trusts = {A: MapTrust.NONE}
    query = asked()

    decision = strategy.rank(query, view)
    assert order(decision)[0] == B, "nothing was sent to A"

    history.acquire(A, query.prompts[0].keys).release()
    decision = strategy.rank(query, view)
    assert order(decision)[0] == A
    assert decision.ranking[0].match == (Tokens(992), A, None, False, "gap")


def test_the_longer_match_of_a_partial_map_and_the_route_history_counts(
    strategy, caches, history, view
) -> None:
    caches.held = {A: Tokens(gpu=800)}
    caches.trusts = {A: MapTrust.PARTIAL}
    query = asked()

    assert candidate_of(strategy.rank(query, view), A).match.mapped

    history.acquire(A, query.prompts[0].keys).release()
    assert candidate_of(strategy.rank(query, view), A).matched_tokens == 992


def test_a_worker_is_ranked_by_its_best_rank(strategy, caches, view) -> None:
    caches.slots = {B: [10, 11, 12]}
    caches.held = {11: Tokens(gpu=800), 12: Tokens(gpu=160)}

    decision = strategy.rank(asked(), view)

    assert order(decision)[0] == B
    assert sorted(order(decision)) == [A, B, C]
    assert (decision.ranking[0].rank, decision.ranking[0].match.slot) == (1, 11)


@pytest.mark.parametrize("inexact", ["", "late"])
def test_load_is_counted_by_rank(caches, make_worker, make_view, inexact) -> None:
    """Also when the prompt's tokens are unknown: the requests spread over all ranks."""
    router = Router(RoutingOptions(strategy="kvaware"), caches=caches)
    worker = make_worker(A)
    caches.slots = {A: [10, 11]}
    view = make_view(worker)
    query = asked(inexact=inexact)
    first = router.decide(query, view)
    dispatched = [router.dispatch(query, first, first.ranking[0], 0.0)]

    second = router.decide(asked(tokens=500, inexact=inexact), view)

    assert {first.ranking[0].rank, second.ranking[0].rank} == {0, 1}
    dispatched.append(router.dispatch(query, second, second.ranking[0], 0.0))
    assert worker.load.in_flight == 2
    assert [worker.load_of(rank).in_flight for rank in (0, 1)] == [1, 1]
    for dispatch in dispatched:
        dispatch.first_token(0.1)
        dispatch.finish(0.2)
    assert [load.in_flight for load in (worker.load, *worker.rank_loads.values())] == [0, 0, 0]


def test_a_slot_that_left_holds_nothing_in_flight(caches, make_worker, make_view) -> None:
    router = Router(RoutingOptions(strategy="kvaware"), caches=caches)
    view = make_view(make_worker(A), make_worker(B))
    query = asked()
    decision = router.decide(query, view)
    router.dispatch(query, decision, decision.ranking[0], 0.0)
    slot = decision.ranking[0].worker.index

    router.slot_left(slot)

    assert all(c.matched_tokens == 0 for c in router.decide(query, view).ranking)


def test_a_prompts_last_token_is_never_held() -> None:
    ids = array("I", range(64))

    assert len(exact(list(ids)).keys) == 3 == len(prompt_keys(ids, _Space()))


class _Space:
    seed = 0
