"""The benchmark of scaling in virtual time (bench/scaling.py), on little of its traffic."""

from __future__ import annotations

import pytest

from kvroute.deploy.render.plan import DRAIN_S
from kvroute.sim.fleet import FleetRequest
from routing_workloads import BLOCK
from scaling import (
    ARRIVALS,
    EACH_S,
    KEPT,
    PEAK_S,
    REMOVAL_S,
    STEADY,
    USERS,
    WORKERS,
    Down,
    DownResult,
    Fleet,
    after_removal,
    arrivals,
    gains,
    trace_rows,
    update,
)


def ask(fleet: Fleet, at: float, number: int, blocks: int = 8, answer: int = 10) -> FleetRequest:
    keys = [number << 32 | place for place in range(blocks)]
    request = FleetRequest(keys, blocks * BLOCK, answer, conversation=number)
    fleet.run.submit(request, at)
    return request


def test_an_update_restarts_every_worker_with_an_empty_cache_and_loses_nothing() -> None:
    fleet = Fleet(0)
    before = list(fleet.run.engines)
    requests = [ask(fleet, second / 2, second % 40) for second in range(int(2 * WORKERS * EACH_S))]

    lost, longest = update(fleet, 0.0)
    fleet.run.run()

    assert lost == 0
    assert len(fleet.run.done) == len(requests)
    assert longest < EACH_S
    assert not set(map(id, before)) & set(map(id, fleet.run.engines))
    assert len(fleet.gateways[0].view.workers) == WORKERS


def test_an_answer_that_outlasts_the_drain_is_lost_and_counted() -> None:
    fleet = Fleet(0)
    endless = int(4 * DRAIN_S / fleet.engines[0].timing.iteration_s(1, 0, 1))
    ask(fleet, 0.0, 1, answer=endless)
    fleet.until(1.0)
    (worker,) = {request.worker for request in fleet.open}

    lost, longest = update(fleet, 1.0 - EACH_S * worker)

    assert lost == 1
    assert longest == DRAIN_S
    assert not fleet.run.done


def test_the_worker_without_returning_conversations_is_removed_first() -> None:
    fleet = Fleet(0)
    for turn in range(3):
        for number in range(4 * WORKERS):
            ask(fleet, 20.0 * turn + number / 10, number)
    fleet.until(60.0)
    idle = fleet.run.done[0].worker
    for turn in range(3):
        for number in {request.conversation for request in fleet.run.done if request.worker != idle}:
            ask(fleet, 60.0 + 20.0 * turn + number / 10, number)
    fleet.until(400.0)

    fleet.write_costs()

    assert fleet.cheapest(1) == [idle]


def test_removed_workers_get_no_request_and_hits_are_counted_by_window() -> None:
    fleet = Fleet(0)
    for number in range(2 * WORKERS):
        ask(fleet, number / 10, number)
    fleet.until(REMOVAL_S)
    kept = fleet.run.done[0].worker
    for request in list(fleet.run.done):
        ask(fleet, REMOVAL_S + 90.0, request.conversation)

    hits = after_removal(fleet, [worker for worker in range(WORKERS) if worker != kept])

    late = [request for request in fleet.run.done if request.arrival_s > REMOVAL_S]
    assert {request.worker for request in late} == {kept}
    assert hits[0] == 0  # none arrives in the first 60 s
    assert hits[1] == hits[2] == sum(request.cached_tokens for request in late) > 0


def test_after_the_peak_a_third_of_the_new_conversations_remains_and_begun_ones_go_on() -> None:
    begun = {row.session for row in trace_rows() if row.quantum_s < PEAK_S}
    rows = [row for _, row in arrivals(Down(1.0, 3, ARRIVALS, 0))]
    all_rows = [row for _, row in arrivals(Down(1.0, 3, STEADY, 0))]

    assert [row for row in rows if row.session in begun] == [row for row in all_rows if row.session in begun]
    new = {row.session for row in rows} - begun
    all_new = {row.session for row in all_rows} - begun
    assert len(new) / len(all_new) == pytest.approx(KEPT, abs=0.05)


def test_when_users_leave_a_third_of_all_conversations_remains_and_none_has_left_before() -> None:
    rows = [row for _, row in arrivals(Down(1.0, 3, USERS, 0))]
    all_rows = [row for _, row in arrivals(Down(1.0, 3, STEADY, 0))]
    late = {row.session for row in rows if row.quantum_s >= PEAK_S}
    all_late = {row.session for row in all_rows if row.quantum_s >= PEAK_S}

    assert [r for r in rows if r.quantum_s < PEAK_S] == [r for r in all_rows if r.quantum_s < PEAK_S]
    assert len(late) / len(all_late) == pytest.approx(KEPT, abs=0.05)


def test_gains_compare_sums_over_seeds_with_the_mean_of_random_removals() -> None:
    of_one_seed = DownResult([20, 0, 0], [5, 0, 0], [[10, 1, 1], [30, 1, 1]], (1.0, 1.0))
    of_another = DownResult([40, 2, 0], [15, 0, 2], [[20, 0, 1], [20, 2, 1]], (1.0, 1.0))
    results = [of_one_seed, of_another]

    assert gains(results, lambda result: result.by_cost) == pytest.approx([60 / 40 - 1, 2 / 2 - 1, -1.0])
    assert gains(results, lambda result: result.with_steering) == pytest.approx([20 / 40 - 1, -1.0, 0.0])


def test_steering_leaves_new_conversations_to_the_workers_that_would_stay() -> None:
    fleet = Fleet(0, steers=True)
    for number in range(40):
        ask(fleet, number / 2, number)
    fleet.until(60.0)
    fleet.write_costs()
    rest = {worker.index for worker in fleet.gateways[0].view.workers if worker.share < 1.0}
    costs = {worker.index: fleet.written[worker.id] for worker in fleet.gateways[0].view.workers}

    new = [ask(fleet, 60.0 + number, 100 + number) for number in range(20)]
    fleet.run.run()

    assert len(rest) == WORKERS // 2
    assert max(costs[each] for each in rest) <= min(costs[each] for each in costs if each not in rest)
    assert not rest & {request.worker for request in new}
