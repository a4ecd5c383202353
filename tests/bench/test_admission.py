"""The goals of the gateway's queue (bench/admission.py) in virtual time, on less traffic."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from admission import VIRTUAL, cases, judge
from admission_virtual import AdmissionFleet, Traffic, run
from kvroute.admission.fair_queue import AdmissionOptions

pytestmark = pytest.mark.heavy

SETTING = replace(VIRTUAL, seconds=150.0)


def test_the_queue_meets_each_goal() -> None:
    runs = {
        name: run(
            traffics,
            SETTING.admission,
            workers=SETTING.workers,
            seconds=SETTING.seconds,
            warm_up=SETTING.warm_up,
        )
        for name, traffics in cases(SETTING).items()
    }

    goals = judge(SETTING, runs, {})

    assert [str(goal) for goal in goals if not goal.is_met] == []
    for start in (
        "p90 TTFT of the light key",
        "tokens of weight 3",
        "tokens at capacity",
        "longest wait",
        "requests refused after they had waited",
        "p99 of the time to a refusal",
        "p90 TTFT of the high class",
    ):
        assert [goal.name for goal in goals if goal.name.startswith(start)], start


def test_without_the_queue_a_flood_delays_the_other_key() -> None:
    """The engines' own queue is first come, first served: this is what the queue is for."""
    light = Traffic("light", 0.5, 256, 64)
    flood = Traffic("flood", 60.0, 4096, 64)

    def p90(options: AdmissionOptions, *traffics: Traffic) -> float:
        return run(traffics, options, workers=2, seconds=60.0, warm_up=20.0)["light"].p90_ttft_s

    assert p90(AdmissionOptions(), light, flood) > 10 * p90(AdmissionOptions(), light)
    assert p90(AdmissionOptions(max_concurrent=4), light, flood) < 0.1 * p90(AdmissionOptions(), light, flood)


def test_the_fleet_gives_back_every_permit() -> None:
    fleet = AdmissionFleet(2, AdmissionOptions(max_concurrent=2, max_wait_s=1.0))
    fleet.offer(Traffic("a", 20.0, 256, 32), 20.0, Random(1))
    fleet.run()

    assert [fleet.permits.in_flight(worker) for worker in fleet.workers] == [0, 0]
    assert not len(fleet.queue)
    assert all(one.is_done or one.outcome != "start" for one in fleet.sent.values())
