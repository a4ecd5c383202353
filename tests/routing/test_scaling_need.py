"""How many workers the load needs."""

from __future__ import annotations

import math

import pytest

from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Ejection, HealthState, Worker, WorkerId, WorkerSpec
from kvroute.routing.scaling import ScalingOptions, WorkersNeeded, demand_of, pools


def worker(name: str = "a", capacity_tokens: int = 1000) -> Worker:
    spec = WorkerSpec(WorkerId(name), f"http://{name}", models=("m",), capacity_tokens=capacity_tokens)
    return Worker(spec, state=HealthState.HEALTHY)


def fleet_of(*specs: WorkerSpec) -> Fleet:
    fleet = Fleet()
    fleet.apply("config", specs)
    for each in fleet.workers():
        fleet.mark_healthy(each, 0.0)
    return fleet


def spec(name: str, *models: str) -> WorkerSpec:
    return WorkerSpec(WorkerId(name), f"http://{name}", models=models or ("m",), capacity_tokens=1000)


OPTIONS = ScalingOptions(target_utilisation=0.5, queue_s=10.0, smoothing_s=60.0)


def test_an_idle_model_needs_nothing():
    assert demand_of([worker()], 0.0, queue_s=10.0).total == 0.0


def test_queued_prefill_and_memory_count_as_workers():
    one, other = worker(), worker("b", capacity_tokens=2000)
    one.load.reserve(0.0, 6.0, 500)
    other.load.reserve(0.0, 4.0, 500)

    demand = demand_of([one, other], 0.0, queue_s=10.0)

    assert demand.queued == pytest.approx(1.0)  # (6 s + 4 s) / 10 s
    assert demand.memory == pytest.approx(0.5 + 0.25)
    assert demand.prefill == 0.0  # none is completed


def test_completed_prefill_counts_as_utilisation():
    """A worker whose prefills follow one another without a pause is one busy worker."""
    busy = worker()
    for second in range(600):
        busy.load.reserve(float(second), 1.0, 10).first_token(second + 1.0)

    assert demand_of([busy], 600.0, queue_s=10.0).prefill == pytest.approx(1.0, rel=0.05)


def test_a_request_in_the_gateways_queue_counts_as_an_average_prefill():
    busy = worker()
    for start, seconds in ((0.0, 2.0), (3.0, 4.0)):
        busy.load.reserve(start, seconds, 10).first_token(start + seconds)
    seconds, requests = busy.load.recent(7.0)

    demand = demand_of([busy], 7.0, queue_s=10.0, waiting=5.0)

    assert demand.queued == pytest.approx(5 * seconds / requests / 10.0)
    assert demand_of([worker()], 7.0, queue_s=10.0, waiting=5.0).queued == 0.0  # no prefill is known yet


def test_the_figure_is_the_demand_divided_by_the_target():
    fleet = fleet_of(spec("a"), spec("b"))
    for each in fleet.workers():
        each.load.reserve(0.0, 0.0, 600)

    assert WorkersNeeded(OPTIONS).update(fleet.catalog.bases, fleet.view, 0.0, {}) == {
        "m": pytest.approx(1.2 / 0.5)
    }


def test_the_figure_is_an_average_over_time_however_often_it_is_read():
    fleet = fleet_of(spec("a"))
    often, seldom = WorkersNeeded(OPTIONS), WorkersNeeded(OPTIONS)
    for needed in (often, seldom):
        assert needed.update(fleet.catalog.bases, fleet.view, 0.0, {}) == {"m": 0.0}
    fleet.workers()[0].load.reserve(0.0, 0.0, 500)

    for second in range(1, 60):
        often.update(fleet.catalog.bases, fleet.view, float(second), {})

    expected = pytest.approx(1.0 * (1 - math.exp(-1)))
    assert often.update(fleet.catalog.bases, fleet.view, 60.0, {})["m"] == expected
    assert seldom.update(fleet.catalog.bases, fleet.view, 60.0, {})["m"] == expected


def test_without_smoothing_the_figure_is_that_of_the_moment():
    fleet = fleet_of(spec("a"))
    needed = WorkersNeeded(ScalingOptions(smoothing_s=0.0, target_utilisation=1.0))
    needed.update(fleet.catalog.bases, fleet.view, 0.0, {})
    fleet.workers()[0].load.reserve(0.0, 0.0, 500)

    assert needed.update(fleet.catalog.bases, fleet.view, 0.1, {}) == {"m": 0.5}


def test_a_model_whose_workers_all_fail_has_no_figure_instead_of_zero():
    """Zero would make an autoscaler remove the workers, because a network is down."""
    fleet = fleet_of(spec("a"))
    needed = WorkersNeeded(OPTIONS)
    fleet.workers()[0].load.reserve(0.0, 0.0, 500)
    assert needed.update(fleet.catalog.bases, fleet.view, 0.0, {}) == {"m": 1.0}

    fleet.mark_unhealthy(fleet.workers()[0], Ejection.PROBES, "no answer")
    assert needed.update(fleet.catalog.bases, fleet.view, 1.0, {}) == {}

    fleet.mark_healthy(fleet.workers()[0], 0.0)
    assert needed.update(fleet.catalog.bases, fleet.view, 2.0, {}) == {"m": 1.0}


def test_two_names_of_the_same_workers_are_one_pool_and_other_workers_another():
    fleet = fleet_of(spec("a", "m", "alias-of-m"), spec("b", "m", "alias-of-m"), spec("c", "other"))

    found = [
        (view.model, [each.id for each in view.workers])
        for view in pools(("other", "m", "alias-of-m"), fleet.view)
    ]

    assert found == [("alias-of-m", ["a", "b"]), ("other", ["c"])]


def test_queued_requests_count_for_the_pool_that_serves_their_model():
    fleet = fleet_of(spec("a", "m", "adapter"), spec("c", "other"))
    for each in fleet.workers():
        each.load.reserve(0.0, 1.0, 0).first_token(1.0)
    needed = WorkersNeeded(OPTIONS)

    quiet = needed.update(fleet.catalog.bases, fleet.view, 1.0, {})
    waiting = WorkersNeeded(OPTIONS).update(fleet.catalog.bases, fleet.view, 1.0, {"adapter": 10.0})

    assert waiting["other"] == quiet["other"]
    assert waiting["adapter"] == pytest.approx(quiet["adapter"] + 10 * 1.0 / 10.0 / 0.5)
