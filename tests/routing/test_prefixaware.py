from __future__ import annotations

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from kvroute.blocks.keys import PromptKeys
from kvroute.index.in_flight import InFlight
from kvroute.index.radix_history import RadixHistory
from kvroute.routing.cost import CostModel, matched_tokens
from kvroute.routing.strategies.prefixaware import PrefixAware, PrefixAwareOptions
from kvroute.routing.strategy import NoMap, RouteReason
from kvroute.routing.transfers import CacheViews, Transfers

A, B = 0, 1

NO_VIEWS = CacheViews(NoMap(), InFlight(), Transfers())


@pytest.fixture
def history():
    return RadixHistory(10_000)


@pytest.fixture
def strategy(history):
    return PrefixAware(PrefixAwareOptions(), CostModel(history), history, NO_VIEWS)


@pytest.fixture
def view(make_worker, make_view):
    return make_view(make_worker(A), make_worker(B))


def matched(decision) -> dict[int, int]:
    return {candidate.worker.index: candidate.matched_tokens for candidate in decision.ranking}


def test_goes_where_the_prefix_was_sent(strategy, history, view, query, keys_of, rng) -> None:
    keys = keys_of(rng, 1600)
    history.acquire(B, keys[:60]).release()

    decision = strategy.rank(query(keys=keys, tokens=1600), view)

    assert decision.reason is RouteReason.PREFIX_HIT
    assert decision.ranking[0].worker.index == B
    assert matched(decision) == {A: 0, B: 960}


def test_a_prefix_in_flight_is_a_hit(strategy, history, view, query, keys_of, rng) -> None:
    keys = keys_of(rng, 1600)
    lease = history.acquire(B, keys)

    assert strategy.rank(query(keys=keys, tokens=1600), view).reason is RouteReason.PREFIX_HIT
    lease.release()


def test_leaves_a_holder_that_is_too_busy(strategy, history, view, query, keys_of, rng) -> None:
    keys = keys_of(rng, 1600)
    history.acquire(B, keys).release()
    view.workers[B].load.reserve(0.0, prefill_s=5.0, tokens=10)

    decision = strategy.rank(query(keys=keys, tokens=1600), view)

    assert decision.reason is RouteReason.PREFIX_SPILL
    assert decision.ranking[0].worker.index == A


def test_an_unknown_prompt_goes_to_the_least_load(strategy, view, query, keys_of, rng) -> None:
    view.workers[A].load.reserve(0.0, prefill_s=0.5, tokens=10)

    decision = strategy.rank(query(keys=keys_of(rng, 1600), tokens=1600), view)

    assert decision.reason is RouteReason.PREFIX_MISS
    assert decision.ranking[0].worker.index == B


def test_without_a_prompt_it_is_least_load(strategy, view, query) -> None:
    view.workers[B].load.reserve(0.0, prefill_s=0.5, tokens=10)

    decision = strategy.rank(query(), view)

    assert decision.reason is RouteReason.NO_PROMPT
    assert decision.ranking[0].worker.index == A


def test_the_last_token_is_always_computed(history, view, query, keys_of, rng) -> None:
    keys = keys_of(rng, 160)
    history.acquire(A, keys).release()

    assert matched_tokens(history, query(keys=keys, tokens=160), view.workers) == [144, 0]
    assert matched_tokens(history, query(keys=keys, tokens=161), view.workers) == [160, 0]


def test_matches_whole_blocks_of_the_worker(history, make_worker, query, keys_of, rng) -> None:
    keys = keys_of(rng, 1600)
    workers = [make_worker(A, block_size=128), make_worker(B)]
    for worker in workers:
        history.acquire(worker.index, keys[:50]).release()

    assert matched_tokens(history, query(keys=keys, tokens=1600), workers) == [768, 800]


def test_estimated_blocks_count_their_estimated_tokens(history, view, query, keys_of, rng) -> None:
    keys = keys_of(rng, 1600)
    history.acquire(A, keys[:50]).release()

    asked = query(keys=keys, tokens=1250, block_tokens=12.5)

    assert matched_tokens(history, asked, view.workers) == [624, 0]


def test_listed_prompts_are_matched_one_by_one(history, view, query, keys_of, rng) -> None:
    first, second, third = keys_of(rng, 160), keys_of(rng, 320), keys_of(rng, 480)
    history.acquire(A, first).release()
    history.acquire(A, second[:10]).release()
    history.acquire(B, second).release()
    prompts = tuple(PromptKeys(keys, len(keys) * 16 + 1, 16.0) for keys in (first, second, third))

    asked = replace(query(), prompts=prompts, tokens=963)

    assert matched_tokens(history, asked, view.workers) == [320, 320]


def test_a_prompt_of_no_tokens_matches_nothing(history, view, query) -> None:
    assert matched_tokens(history, query(keys=[], tokens=0), view.workers) == [0, 0]


def test_options_name_a_known_index() -> None:
    assert PrefixAwareOptions(index="pygtrie").index == "pygtrie"
    with pytest.raises(ValidationError, match="none of radix, pygtrie"):
        PrefixAwareOptions(index="hash")
