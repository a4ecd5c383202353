"""The value of caches, and the patches that follow from it."""

from __future__ import annotations

import math
import random

import pytest
from tests.routing.conftest import MODEL, fleet_of, fresh_keys, new_worker

from kvroute.blocks.keys import PromptKeys
from kvroute.fleet.worker import WorkerId
from kvroute.routing.cache_value import CacheValue
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Router
from kvroute.routing.scaling import MAX_COST, WorkerWorth, due_patches, surplus
from kvroute.routing.strategy import RouteQuery

WINDOW_S = 100.0
A, B, C = (WorkerId(name) for name in "abc")


def test_a_cache_that_only_one_worker_has_counts_in_full():
    value = CacheValue(WINDOW_S)

    value.used(0, 10, {0: 10}, 0.0, 0.5)

    assert value.seconds(0, 0.0) == pytest.approx(5.0)
    assert value.seconds(1, 0.0) == 0.0


def test_what_several_workers_hold_is_shared_and_the_longer_match_gets_its_rest():
    value = CacheValue(WINDOW_S)

    value.used(0, 10, {0: 10, 1: 4, 2: 4}, 0.0, 1.0)

    shared = 4 / 3
    assert value.seconds(1, 0.0) == value.seconds(2, 0.0) == pytest.approx(shared)
    assert value.seconds(0, 0.0) == pytest.approx(shared + 6)


def test_a_busy_holder_is_credited_as_much_as_the_worker_that_got_the_request():
    """The chosen worker computes the prompt and holds it, too."""
    value = CacheValue(WINDOW_S)

    value.used(0, 8, {1: 8}, 0.0, 1.0)

    assert value.seconds(0, 0.0) == value.seconds(1, 0.0) == pytest.approx(4.0)


def test_a_new_prompt_counts_by_the_share_of_blocks_that_were_used_again():
    value = CacheValue(WINDOW_S)

    value.used(0, 10, {}, 0.0, 1.0)
    assert value.seconds(0, 0.0) == 0.0  # nothing was used again so far
    value.used(0, 10, {0: 10}, 0.0, 1.0)  # of 20 blocks 10
    value.used(1, 10, {}, 0.0, 1.0)  # of 30 blocks 10

    assert value.seconds(1, 0.0) == pytest.approx(10 * 10 / 30)


def test_a_value_decays_and_stays_finite_over_days():
    value = CacheValue(WINDOW_S)
    value.used(0, 10, {0: 10}, 0.0, 1.0)
    assert value.seconds(0, WINDOW_S) == pytest.approx(10 / math.e)

    now = 0.0
    for _ in range(2000):
        now += WINDOW_S / 2
        value.used(1, 10, {1: 10}, now, 1.0)

    assert value.seconds(0, now) == pytest.approx(0.0, abs=1e-9)
    assert value.seconds(1, now) == pytest.approx(10 / (1 - math.exp(-0.5)))


def test_a_worker_that_left_is_worth_nothing_when_its_number_is_used_again():
    value = CacheValue(WINDOW_S)
    value.used(0, 10, {0: 10}, 0.0, 1.0)

    value.forget(0)

    assert value.seconds(0, 0.0) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_the_credit_is_the_saved_prefill_whatever_the_holders(seed):
    """The Shapley value: the shares of all holders add up to the whole."""
    rng, value = random.Random(seed), CacheValue(WINDOW_S)
    total = 0
    for _ in range(20):
        held = {worker: rng.randint(0, 9) for worker in rng.sample(range(6), rng.randint(1, 6))}
        longest = max(held.values())
        value.used(rng.randrange(6), longest, held, 0.0, 1.0)
        total += longest

    assert sum(value.seconds(worker, 0.0) for worker in range(6)) == pytest.approx(total)


def test_the_router_credits_its_own_requests_and_those_of_peers():
    value, rng = CacheValue(WINDOW_S), random.Random(1)
    router = Router(RoutingOptions(strategy="prefixaware"), cache_value=value)
    workers = [new_worker(index) for index in range(2)]
    for worker in workers:
        router.worker_joined(worker)
    query = RouteQuery(MODEL, 0.0, (PromptKeys(fresh_keys(rng, 1600), 1600, 16.0),), 1600)
    decision = router.decide(query, fleet_of(*workers))
    first = decision.ranking[0]

    router.dispatch(query, decision, first, 0.0)
    new = value.seconds(first.worker.index, 0.0)
    router.dispatch(query, decision, first, 0.0)
    again = value.seconds(first.worker.index, 0.0)
    router.dispatch(query, decision, first, 0.0, is_own=False)

    assert new == 0.0
    assert again == pytest.approx(1600 * router.costs(MODEL).token_s)
    assert value.seconds(first.worker.index, 0.0) == pytest.approx(2 * again)


def worths(**seconds: float) -> list[WorkerWorth]:
    return [WorkerWorth(WorkerId(name), cache_s, 0.0) for name, cache_s in seconds.items()]


def test_a_cost_is_milliseconds_of_cache_and_load_and_fits_the_annotation():
    assert WorkerWorth(A, 1.5, 0.25).cost == 1750
    assert WorkerWorth(A, 1e12, 0.0).cost == MAX_COST


def test_new_pods_come_first_then_the_largest_changes():
    due = due_patches(worths(a=1.0, b=2.0, c=6.0), {A: 900, C: 3000}, min_change=0.25, most=5)

    assert due == [(B, 2000), (C, 6000)]  # a has changed by 100, the mean is 3000


def test_a_round_patches_a_limited_number_of_pods():
    assert due_patches(worths(a=1.0, b=9.0), {A: 0, B: 0}, min_change=0.1, most=1) == [(B, 9000)]


def test_a_fleet_without_load_and_cache_is_written_once():
    idle = worths(a=0.0, b=0.0)

    due = due_patches(idle, {}, min_change=0.25, most=5)

    assert due == [(A, 0), (B, 0)]
    assert due_patches(idle, dict(due), min_change=0.25, most=5) == []


@pytest.mark.parametrize(
    ("needed", "least", "found"),
    [
        (2.0, 1, {A}),
        (1.1, 1, {A}),  # a fraction of a worker is a worker
        (0.4, 1, {A, C}),
        (0.4, 2, {A}),
        (3.0, 1, set()),
        (9.0, 9, set()),
    ],
)
def test_the_workers_that_are_worth_least_are_surplus_beyond_what_the_load_needs(needed, least, found):
    assert surplus({A: 10, B: 30, C: 20}, needed, least) == found


def test_of_equal_workers_the_same_ones_are_surplus_each_time():
    assert surplus({A: 5, B: 5, C: 5}, 1.0, 1) == surplus({C: 5, B: 5, A: 5}, 1.0, 1) == {B, C}
