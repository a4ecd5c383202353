from __future__ import annotations

import math
import random

import pytest

from kvroute.routing.learned_costs import LEAST_PREFILLS, PrefillFit, Speeds
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Router
from kvroute.sim.fleet import ChatClients, ChatShape

TOKEN_S, CONTEXT_S, ITERATION_S = 40e-6, 0.75e-9, 14e-3


def prefill_s(miss: int, context: float, chunks: int) -> float:
    return miss * (TOKEN_S + CONTEXT_S * context) + ITERATION_S * chunks


def teach(fit: PrefillFit, rng: random.Random, prefills: int, *, believed: float, noise: float = 0.0) -> None:
    for _ in range(prefills):
        miss, held = int(10 ** rng.uniform(2, 4.8)), rng.randrange(60_000)
        context, chunks = held + miss / 2, -(-miss // 8192)
        took = prefill_s(miss, context, chunks)
        fit.record(miss, context, chunks, took * rng.uniform(1 - noise, 1 + noise), believed * took)


@pytest.mark.parametrize("believed", [0.25, 1.0, 4.0])
def test_learns_the_costs_that_were_paid(rng, believed) -> None:
    fit = PrefillFit()

    teach(fit, rng, 100, believed=believed, noise=0.05)

    assert fit.fit is not None
    assert fit.fit.token_s == pytest.approx(TOKEN_S, rel=0.1)
    assert fit.fit.context_token_s == pytest.approx(CONTEXT_S, rel=0.1)
    assert fit.fit.iteration_s == pytest.approx(ITERATION_S, rel=0.5)


def test_fewer_than_fifty_prefills_teach_nothing(rng) -> None:
    fit = PrefillFit()

    teach(fit, rng, LEAST_PREFILLS - 1, believed=1.0)

    assert fit.fit is None


def test_prefills_of_one_size_teach_nothing(rng) -> None:
    fit = PrefillFit()

    for _ in range(500):
        miss = rng.randrange(1000, 7000)
        fit.record(miss, miss / 2, 1, prefill_s(miss, miss / 2, 1), 0.1)

    assert fit.fit is None


def test_constant_answer_times_do_not_teach_a_cost_of_nothing(rng) -> None:
    fit = PrefillFit()

    for _ in range(1000):
        miss = int(10 ** rng.uniform(1, 5))
        fit.record(miss, miss / 2, 1, 0.05 * rng.uniform(0.9, 1.1), 0.1)

    assert fit.explained < 0.5
    assert fit.fit is None


def test_costs_that_change_are_followed_and_unlearned_when_nothing_explains_them(rng) -> None:
    fit = PrefillFit()
    teach(fit, rng, 100, believed=1.0)
    assert fit.fit is not None

    for _ in range(5000):
        fit.record(int(10 ** rng.uniform(1, 5)), 0.0, 1, 0.05 * rng.uniform(0.9, 1.1), 0.1)

    assert fit.fit is None


def test_a_slow_worker_is_detected_by_its_large_prefills_and_weighted_by_half() -> None:
    speeds = Speeds()
    for _ in range(50):
        for worker in range(3):
            speeds.record(worker, 4000, 0.4 if worker == 2 else 0.2, 0.2)
            speeds.record(worker, 100, 9.0, 0.01)

    assert speeds.of(2) == pytest.approx(0.5 + 0.5 * 2 / (4 / 3))
    assert speeds.of(0) == pytest.approx(0.5 + 0.5 * 1 / (4 / 3))
    assert speeds.of(7) == 1.0

    speeds.forget(2)
    assert speeds.of(2) == 1.0


def test_a_router_with_costs_eight_times_too_low_learns_the_right_ones(virtual_fleet) -> None:
    fleet = virtual_fleet(2)
    cheap = {"token_us": 5.0, "context_token_ns": 0.1, "iteration_ms": 1.0}
    fleet.router = Router(RoutingOptions.model_validate({"learning": True, "costs": cheap}))
    ChatClients(fleet.fleet, clients=8, requests=400, shape=ChatShape(context_tokens=4096)).start()

    fleet.fleet.run()

    learned = fleet.router.costs("model")
    assert learned.token_s == pytest.approx(TOKEN_S, rel=0.25)
    assert learned.active_token_s == pytest.approx(0.03 * learned.token_s)
    assert fleet.is_at_rest()


@pytest.mark.parametrize("learning", [False, True])
def test_answers_that_are_not_streamed_teach_nothing(virtual_fleet, learning) -> None:
    fleet = virtual_fleet(2)
    fleet.router = Router(RoutingOptions(learning=learning))
    fleet.streamed = False
    ChatClients(fleet.fleet, clients=8, requests=200).start()

    fleet.fleet.run()

    assert fleet.router.costs("model") == Router().costs("model")


def test_a_worker_that_left_takes_its_speed_with_it(make_worker, make_view, keys_of, query) -> None:
    """Worker 1 takes twice as long for each prefill, so the router expects more time of it."""
    router = Router(RoutingOptions(learning=True))
    workers = [make_worker(0), make_worker(1)]
    view, rng, now = make_view(*workers), random.Random(1), 0.0

    def prefills_s(tokens: int) -> dict[int, float]:
        decision = router.decide(query(now, tokens=tokens, keys=keys_of(rng, tokens // 16)), view)
        return {candidate.worker.index: candidate.terms.prefill for candidate in decision.ranking}

    for number in range(400):
        miss = int(10 ** rng.uniform(2, 4.5))
        asked = query(now, tokens=miss, keys=keys_of(rng, miss // 16))
        decision = router.decide(asked, view)
        (candidate,) = [each for each in decision.ranking if each.worker.index == number % 2]
        attempt = router.dispatch(asked, decision, candidate, now)
        now += prefill_s(miss, miss / 2, 1) * (1 + number % 2)
        attempt.first_token(now)
        attempt.finish(now)
    before = prefills_s(8000)

    router.worker_left(workers[1])
    after = prefills_s(8000)

    assert before[1] > 1.2 * before[0]
    assert after[1] == pytest.approx(sum(before.values()) / 2, rel=0.2)


def test_a_fit_is_taken_over_from_a_process_that_has_seen_more(rng) -> None:
    taught, fresh, knows_more = PrefillFit(), PrefillFit(), PrefillFit()
    teach(taught, rng, 100, believed=1.0)
    teach(knows_more, rng, 101, believed=2.0)
    before = knows_more.fit

    assert fresh.restore(taught.sums())
    assert not knows_more.restore(taught.sums())
    assert not fresh.restore(taught.sums()._replace(prefills=999, targets=(math.nan, 0.0, 0.0)))

    assert fresh.fit == taught.fit
    assert knows_more.fit == before
    teach(fresh, random.Random(3), 10, believed=1.0)
    teach(taught, random.Random(3), 10, believed=1.0)
    assert fresh.fit == taught.fit


def test_the_speeds_of_workers_are_taken_over() -> None:
    measured, fresh = Speeds(), Speeds()
    for _ in range(20):
        measured.record(0, 4096, 1.0, 1.0)
        measured.record(1, 4096, 3.0, 1.0)

    for worker, sums in measured.sums().items():
        fresh.restore(worker, *sums)
    measured.record(0, 4096, 1.0, 1.0)
    fresh.record(0, 4096, 1.0, 1.0)

    assert fresh.factors == measured.factors
    assert fresh.of(1) > fresh.of(0)
