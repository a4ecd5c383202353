from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvroute.blocks.keys import PromptKeys
from kvroute.index.radix_history import RadixHistory
from kvroute.routing.cost import RESIDENCE_S, CostModel, TierLoad
from kvroute.routing.cost_parameters import CostOptions, Costs

A, B, C = 0, 1, 2


@pytest.fixture
def history():
    return RadixHistory(100_000)


@pytest.fixture
def model(history):
    return CostModel(history)


@pytest.fixture
def workers(make_worker):
    return [make_worker(index) for index in range(3)]


def order(ranking) -> list[int]:
    return [candidate.worker.index for candidate in ranking]


def test_prefill_is_tokens_context_and_iterations() -> None:
    costs = Costs.of(CostOptions())

    assert costs.prefill_s(1000, 0) == pytest.approx(0.160 + 0.0015 + 0.020)
    assert costs.prefill_s(1000, 7000) == pytest.approx(0.160 + 1000 * 3e-9 * 7500 + 0.020)
    assert costs.prefill_s(20_000, 0) == pytest.approx(3.2 + 0.6 + 3 * 0.020)


def test_a_prefill_takes_one_iteration_at_least() -> None:
    assert Costs.of(CostOptions()).prefill_s(0, 500) == pytest.approx(0.020)


def test_listed_prompts_have_no_context_of_each_other() -> None:
    costs = Costs.of(CostOptions())

    together = costs.prefill_s(10 * 500, 10 * 300, prompts=10)

    one_by_one = 10 * (costs.prefill_s(500, 300) - 0.020)
    assert together == pytest.approx(one_by_one + 0.020)


def test_an_idle_fleet_costs_the_prefill_alone(model, workers, query) -> None:
    for candidate in model.rank(query(), workers):
        assert candidate.score == candidate.prefill_s == pytest.approx(0.1815)
        assert candidate.terms.score == candidate.score


def test_held_tokens_are_not_charged(model, workers, query) -> None:
    ranking = model.rank(query(), workers, [0, 992, 496])

    assert order(ranking) == [B, C, A]
    assert [candidate.matched_tokens for candidate in ranking] == [992, 496, 0]


def test_queued_prefill_is_waited_for(model, workers, query) -> None:
    workers[A].load.reserve(0.0, prefill_s=2.0, tokens=0)
    workers[B].load.reserve(0.0, prefill_s=1.0, tokens=0)

    ranking = model.rank(query(0.5), workers)

    assert order(ranking) == [C, B, A]
    assert [candidate.terms.wait for candidate in ranking] == [0.0, 0.5, 1.5]


def test_a_hit_is_worth_waiting_for_as_long_as_it_saves(model, workers, query) -> None:
    """1,000 tokens take 0.18 s, the last 8 alone 0.02 s."""
    held = [992, 0, 0]
    workers[A].load.reserve(0.0, prefill_s=0.10, tokens=0)
    assert order(model.rank(query(), workers, held))[0] == A

    workers[A].load.reserve(0.0, prefill_s=0.10, tokens=0)
    assert order(model.rank(query(), workers, held))[0] != A


def test_the_load_from_slower_tiers_passes_while_the_request_waits(model, workers, query) -> None:
    workers[A].load.reserve(0.0, prefill_s=0.5, tokens=0)
    loads = [TierLoad(0.3, 0.1), TierLoad(0.3, 0.1), TierLoad(0.0, 0.0)]

    by_worker = {c.worker.index: c for c in model.rank(query(), workers, [512, 512, 0], loads)}

    assert by_worker[A].score == pytest.approx(0.5 + by_worker[A].prefill_s)
    assert by_worker[B].score == pytest.approx(0.3 + by_worker[B].prefill_s)
    assert by_worker[B].terms.load == 0.3


def keep_busy(workers, utilisation: float, until: float = 100.0) -> None:
    for worker in workers:
        for second in range(int(until)):
            worker.load.reserve(second, prefill_s=utilisation, tokens=0).first_token(second + 0.5)


def test_a_request_is_charged_for_the_delay_of_others_when_the_fleet_is_busy(model, workers, query) -> None:
    keep_busy(workers, 0.5)
    pressure = model.pressure([worker.load for worker in workers], 100.0)
    assert pressure.utilisation == pytest.approx(0.5, rel=0.05)
    assert pressure.mean_prefill_s == pytest.approx(0.5)

    own = model.rank(query(100.0), workers)[0]

    rho = pressure.utilisation
    delay = 0.5 * rho / (1 - rho) * own.prefill_s / pressure.mean_prefill_s
    assert own.terms.marginal == pytest.approx(delay * own.prefill_s)


def test_affinity_rises_with_utilisation(model, workers, query) -> None:
    def waits_for_hit() -> float:
        """How long a queue the holder may have before the request goes elsewhere."""
        miss, hit = (
            model.rank(query(100.0), workers, [0, 0, 992])[1:],
            model.rank(query(100.0), workers, [0, 0, 992])[0],
        )
        return min(candidate.score for candidate in miss) - hit.score

    keep_busy(workers, 0.1)
    relaxed = waits_for_hit()
    keep_busy(workers, 0.9)

    assert waits_for_hit() > 1.1 * relaxed


def test_the_charge_for_others_delay_is_capped(history, workers, query) -> None:
    model = CostModel(history, CostOptions(lambda_cap=2))
    keep_busy(workers, 0.95)
    workers[A].load.reserve(100.0, prefill_s=30.0, tokens=0)

    by_worker = {c.worker.index: c for c in model.rank(query(100.0), workers)}

    assert by_worker[A].terms.marginal == pytest.approx(2 * by_worker[A].prefill_s)


def test_the_charge_stays_positive_under_overload(model, workers, query) -> None:
    keep_busy(workers, 5.0)

    assert model.rank(query(100.0), workers)[0].terms.marginal > 0


def test_memory_that_running_requests_fill_costs_residence(
    model, history, workers, query, keys_of, rng
) -> None:
    history.set_capacity(A, 1000)
    lease = history.acquire(A, keys_of(rng, 900 * 16))
    workers[A].load.reserve(0.0, prefill_s=0.0, tokens=0)

    by_worker = {c.worker.index: c for c in model.rank(query(keys=keys_of(rng, 1600), tokens=1600), workers)}

    assert by_worker[A].terms.memory == pytest.approx(RESIDENCE_S * (900 + 100 + 1 - 950) / 1000)
    assert by_worker[B].terms.memory == 0.0
    lease.release()


def test_residence_is_the_workers_own_once_known(model, history, workers, query, keys_of, rng) -> None:
    history.set_capacity(A, 100)
    reservation = workers[A].load.reserve(0.0, prefill_s=0.1, tokens=0)
    reservation.first_token(0.1)
    reservation.finish(20.0)

    candidate = model.rank(query(20.0, keys=keys_of(rng, 1600), tokens=1600), workers[:1])[0]

    assert candidate.terms.memory == pytest.approx(20.0 * 5 / 100)


def test_a_hot_shared_prefix_does_not_look_like_a_full_worker(
    model, history, workers, query, keys_of, rng
) -> None:
    """Memory is counted in different blocks: summing lengths would send a hot prefix away from its cache."""
    history.set_capacity(A, 1000)
    shared = keys_of(rng, 400 * 16)
    leases = [history.acquire(A, shared) for _ in range(20)]

    candidate = model.rank(query(keys=shared, tokens=6400), workers[:1], [6384])[0]

    assert candidate.terms.memory == 0.0
    assert all(lease.new_blocks == 0 for lease in leases[1:])


def test_pushing_out_tracked_blocks_costs_their_recomputation(
    model, history, workers, query, keys_of, rng
) -> None:
    history.set_capacity(A, 1000)
    history.acquire(A, keys_of(rng, 950 * 16)).release()

    by_worker = {c.worker.index: c for c in model.rank(query(keys=keys_of(rng, 1600), tokens=1600), workers)}

    assert by_worker[A].terms.eviction == pytest.approx(50 * 16 * 160e-6)
    assert by_worker[B].terms.eviction == 0.0


def test_there_is_no_eviction_while_there_is_room(model, history, workers, query, keys_of, rng) -> None:
    history.set_capacity(A, 1050)
    history.acquire(A, keys_of(rng, 950 * 16)).release()

    candidate = model.rank(query(keys=keys_of(rng, 1600), tokens=1600), workers[:1])[0]

    assert candidate.terms.eviction == 0.0


def test_blocks_of_several_prompts_are_averaged(model, history, workers, query, keys_of, rng) -> None:
    history.set_capacity(A, 10)
    history.acquire(A, keys_of(rng, 160)).release()
    short = PromptKeys(keys_of(rng, 16), 20, 10.0)
    long = PromptKeys(keys_of(rng, 48), 64, 18.0)
    several = replace(query(), prompts=(short, long), tokens=84)

    candidate = model.rank(several, workers[:1])[0]

    assert candidate.terms.eviction == pytest.approx(5 * 16.0 * 160e-6)


def test_prompts_too_short_for_a_block_count_no_blocks(model, workers, query) -> None:
    several = replace(query(), prompts=(PromptKeys([], 3, 16.0), PromptKeys([], 4, 16.0)), tokens=7)

    assert model.rank(several, workers)[0].terms.eviction == 0.0


def test_tokens_of_running_requests_slow_an_answer(model, workers, query) -> None:
    workers[A].load.reserve(0.0, prefill_s=0.0, tokens=10_000).first_token(0.0)

    by_worker = {c.worker.index: c for c in model.rank(query(), workers)}

    assert by_worker[A].terms.decode == pytest.approx(10_000 * 0.03 * 160e-6)


def test_a_tie_goes_to_the_fewest_active_tokens(history, workers, query) -> None:
    model = CostModel(history, CostOptions(active_share=0))
    for worker, tokens in zip(workers, (300, 100, 200), strict=True):
        worker.load.reserve(0.0, prefill_s=0.0, tokens=tokens)

    for fingerprint in range(20):
        assert order(model.rank(query(fingerprint=fingerprint), workers))[0] == B


def test_scores_within_two_percent_and_a_millisecond_are_a_tie(history, workers, query) -> None:
    model = CostModel(history, CostOptions(active_share=0))
    workers[A].load.reserve(0.0, prefill_s=0.0, tokens=500)
    workers[B].load.reserve(0.0, prefill_s=0.0045, tokens=1)
    workers[C].load.reserve(0.0, prefill_s=0.0050, tokens=0)

    ranking = model.rank(query(), workers)

    assert order(ranking) == [B, A, C], "0.1815 s: a tie up to 0.1861 s"


def test_among_idle_workers_a_tie_goes_to_the_one_that_has_done_least(history, workers, query) -> None:
    for worker, done_s in zip(workers, (0.03, 0.01, 0.02), strict=True):
        worker.load.reserve(0.0, prefill_s=done_s, tokens=0).first_token(0.0)
        worker.load.residence_s = None

    no_balance = CostModel(history, CostOptions(balance_weight=0))
    for fingerprint in range(20):
        assert order(no_balance.rank(query(90.0, fingerprint=fingerprint), workers))[0] == B


def test_a_worker_busier_than_the_mean_is_charged_for_the_work_it_would_get(history, workers, query) -> None:
    """A hit of 496 of 1,000 tokens is worth 79 ms; where its holder has done all the work so far, half of
    the time, another one takes the request."""
    held = [496, 0, 0]
    keep_busy(workers[:1], 0.5)

    by_weight = {
        weight: CostModel(history, CostOptions(balance_weight=weight)).rank(query(100.0), workers, held)
        for weight in (0, 8)
    }

    assert order(by_weight[0])[0] == A
    assert order(by_weight[8])[0] != A
    holder = next(candidate for candidate in by_weight[8] if candidate.worker is workers[A])
    other = next(candidate for candidate in by_weight[0] if candidate.worker is workers[A])
    mean = CostModel(history).pressure([worker.load for worker in workers], 100.0).utilisation
    charged = holder.terms.marginal - other.terms.marginal
    assert charged == pytest.approx(8 * 2 * mean * holder.prefill_s), "its utilisation is 3 x the mean"


def test_an_even_tie_goes_by_a_hash_of_prompt_and_worker(model, workers, query) -> None:
    firsts = [order(model.rank(query(fingerprint=fingerprint), workers))[0] for fingerprint in range(300)]

    assert firsts == [order(model.rank(query(fingerprint=n), workers))[0] for n in range(300)]
    assert all(70 <= firsts.count(index) <= 130 for index in (A, B, C))


def test_the_hash_does_not_depend_on_the_order_of_the_workers(model, workers, query) -> None:
    for fingerprint in range(20):
        forward = order(model.rank(query(fingerprint=fingerprint), workers))[0]
        assert order(model.rank(query(fingerprint=fingerprint), workers[::-1]))[0] == forward


def test_a_worker_just_back_gets_its_share_only(model, workers, query) -> None:
    workers[A].share = 0.25

    by_worker = {c.worker.index: c for c in model.rank(query(), workers)}

    assert by_worker[A].score == pytest.approx(4 * by_worker[B].score)
    assert by_worker[A].terms.ramp == pytest.approx(3 * by_worker[B].score)
    assert by_worker[A].terms.score == pytest.approx(by_worker[A].score)


def test_costs_are_the_models_own(history, workers, query) -> None:
    model = CostModel(history, CostOptions(token_us=100), {"big": CostOptions(token_us=1000)})

    small, big = model.rank(query(), workers)[0], model.rank(query(model="big"), workers)[0]

    assert small.prefill_s == pytest.approx(0.1215)
    assert big.prefill_s == pytest.approx(1.0215)


def test_ranking_changes_nothing(model, history, workers, query, keys_of, rng) -> None:
    workers[A].load.reserve(0.0, prefill_s=0.2, tokens=10, streamed=False)
    asked = query(0.3, keys=keys_of(rng, 800))

    first = model.rank(asked, workers, [0, 16, 32])

    assert model.rank(asked, workers, [0, 16, 32]) == first
    assert history.size().tracked == 0
