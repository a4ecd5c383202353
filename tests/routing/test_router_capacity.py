from __future__ import annotations

import random

import pytest

from kvroute.fleet.worker import WorkerFacts
from kvroute.index.radix_history import RadixHistory
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import HistoryCapacity, Router
from kvroute.routing.strategy import Candidate, RouteDecision, RouteReason


@pytest.fixture
def history():
    return RadixHistory(7)


@pytest.fixture
def sizes(history):
    return HistoryCapacity(history)


@pytest.fixture
def worker(make_worker):
    return make_worker(2, capacity_tokens=16_000)


def test_a_part_is_as_large_as_the_workers_cache(sizes, history, worker) -> None:
    sizes.resize(worker)

    assert history.share(2).capacity_blocks == 1000


def test_a_worker_that_was_never_announced_is_sized_by_its_first_prompt(
    sizes, history, worker, query, keys_of, rng
) -> None:
    sizes.observe(worker, 10, 32.0)

    assert history.share(2).capacity_blocks == 500


def test_a_changed_capacity_resizes_the_part(sizes, history, worker) -> None:
    sizes.resize(worker)
    worker.facts = WorkerFacts(capacity_tokens=8_000)

    sizes.resize(worker)

    assert history.share(2).capacity_blocks == 500


def test_a_part_follows_a_better_estimate_of_its_blocks(sizes, history, worker, query, keys_of, rng) -> None:
    """An empty part at once, a full one by the share of what comes in."""
    sizes.resize(worker)
    sizes.observe(worker, 1000, 32.0)
    assert 500 <= history.share(2).capacity_blocks <= 502

    history.acquire(2, keys_of(rng, 16 * 400)).release()
    sizes.observe(worker, 10, 16.0)
    assert 520 <= history.share(2).capacity_blocks <= 540


def test_an_estimate_that_hardly_moves_changes_nothing(sizes, history, worker, query, keys_of, rng) -> None:
    sizes.resize(worker)

    sizes.observe(worker, 1000, 16.2)

    assert history.share(2).capacity_blocks == 1000


def test_another_worker_under_a_reused_index_starts_afresh(
    sizes, history, worker, make_worker, query, keys_of, rng
) -> None:
    sizes.observe(worker, 10, 32.0)
    sizes.forget(worker)

    sizes.resize(make_worker(2, capacity_tokens=16_000))

    assert history.share(2).capacity_blocks == 1000


def test_no_part_is_smaller_than_a_block(sizes, history, make_worker) -> None:
    sizes.resize(make_worker(3, capacity_tokens=5))

    assert history.share(3).capacity_blocks == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_router_resizes_a_part_as_after_every_prompt(
    seed, sizes, history, worker, query, keys_of
) -> None:
    """It leaves out what would change nothing. And its dispatches load a worker as plain reservations do."""
    rng, own = random.Random(seed), RadixHistory(7)
    router, other = Router(RoutingOptions(), own), type(worker.load)()
    for call in (sizes.resize, router.worker_joined):
        call(worker)
    now, running = 0.0, []
    for _ in range(60):
        now += rng.choice((0.0, 0.01, 0.3))
        streamed = rng.random() < 0.5
        block_tokens = rng.choice((16.0, 16.0, 16.32, 16.3201, 15.6, rng.uniform(8, 40)))
        asked = query(now, keys=keys_of(rng, 160), block_tokens=block_tokens, streamed=streamed)
        sizes.observe(worker, len(asked.prompts[0].keys), block_tokens)
        lease = history.acquire(worker.index, asked.prompts[0].keys)
        candidate = Candidate(worker, 0.1, 0, 0.1 * rng.random(), (0.0,) * 9)
        decision = RouteDecision("prefixaware", RouteReason.PREFIX_MISS, [candidate])
        plain = other.reserve(now, candidate.prefill_s, asked.tokens, streamed)
        running.append((router.dispatch(asked, decision, candidate, now), plain, lease))
        if rng.random() < 0.7:
            dispatch, plain, lease = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.5:
                dispatch.first_token(now)
                plain.first_token(now)
            dispatch.finish(now)
            plain.finish(now)
            lease.release()

        assert own.share(worker.index).capacity_blocks == history.share(worker.index).capacity_blocks
        assert own.share(worker.index).active_blocks == history.share(worker.index).active_blocks
        assert worker.load.recent(now) == other.recent(now)
        assert worker.load.wait(now) == other.wait(now)
        assert (worker.load.in_flight, worker.load.active_tokens, worker.load.residence_s) == (
            other.in_flight,
            other.active_tokens,
            other.residence_s,
        )
