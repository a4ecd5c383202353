"""The routing benchmark in virtual time (bench/routing*.py), on little of its traffic."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from statistics import fmean

import pytest

from kvroute.sim.fleet import FleetRequest
from kvroute.sim.tiers import Filling, TieredFleet, TierOptions, make_tiered_engines
from routing import LOADS, Setting, judge, report, report_json, tasks_of
from routing_baselines import BASELINES, BLOCK, Policy
from routing_goals import GOALS, Bound, Capacity
from routing_kvroute import Kvroute, KvrouteAware, SimulatedCaches
from routing_runs import Case, Figures, figures, routing_options
from routing_workloads import l2post, tool

REQUESTS = 300


def run(policy: Policy, *, workers: int = 3, tokens: int = 200_000, requests: int = REQUESTS) -> TieredFleet:
    """Run calls of agents whose prompts need more memory than the GPUs have."""
    tiers = TierOptions(l1_tokens=100_000)
    engines = make_tiered_engines(
        workers, capacity_tokens=tokens, tiers=tiers, record_events=policy.wants_events
    )
    policy.attach(engines, tiers)
    fleet = TieredFleet(engines, policy, on_tiers=policy.tier_changed if policy.wants_tiers else None)
    tool(10.0, requests)(fleet, 0)
    fleet.run()
    return fleet


def test_smg_sends_one_prompt_to_one_of_its_holders_however_many_there_are() -> None:
    policy = BASELINES["smg-tree"](0)
    policy.attach(make_tiered_engines(3), TierOptions())
    prompts = [list(range(first, first + 8)) for first in range(0, 800, 8)]
    for keys in prompts:
        for worker in range(3):
            policy.where.add(worker, keys)  # type: ignore[attr-defined]

    places = [[policy.place(FleetRequest(keys, 8 * BLOCK, 1), 0.0) for keys in prompts] for _ in range(2)]

    assert places[0] == places[1]
    assert set(places[0]) == {0, 1, 2}


class Listed:
    """A fleet that only records the submitted requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[float, FleetRequest]] = []

    def submit(self, request: FleetRequest, at: float) -> None:
        self.requests.append((at, request))


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_answers_all_requests(name) -> None:
    fleet = run(BASELINES[name](0), requests=100)

    assert len(fleet.done) == 100
    assert {request.worker for request in fleet.done} <= set(range(3))


def test_agents_come_at_the_requested_rate_and_share_their_prompts() -> None:
    listed = Listed()

    tool(29.0)(listed, 3)  # type: ignore[arg-type]

    times = sorted(at for at, _ in listed.requests)
    steady = [at for at in times if at > 40]
    assert len(listed.requests) == 6000
    assert len(steady) / (steady[-1] - steady[0]) == pytest.approx(29.0, rel=0.1)
    calls = [request for _, request in listed.requests]
    assert len({call.keys[0] for call in calls}) == 1
    assert len({tuple(call.keys[:5]) for call in calls}) == 24
    assert fmean(len(call.keys) for call in calls) == pytest.approx(20, rel=0.2)


def test_the_conversations_of_the_second_tier_alternate_and_grow() -> None:
    listed = Listed()

    l2post(8.0, 60.0)(listed, 0)  # type: ignore[arg-type]

    calls = [request for _, request in listed.requests]
    assert [call.conversation for call in calls[:101]] == [*range(100), 0]
    first, second = calls[0], calls[100]
    assert (first.prompt_tokens, second.prompt_tokens) == (12_338, 12_588)
    assert second.keys[: len(first.keys)] == first.keys


def test_the_kvaware_map_equals_every_tiers_contents() -> None:
    policy = KvrouteAware(0)
    fleet = run(policy)
    fleet.now += 60.0
    fleet._deliver()
    fleet.now += 60.0
    fleet._deliver()

    for request in fleet.done[-50:]:
        found = policy.caches.match(policy.caches.exact_prompt(request))
        limit = (request.prompt_tokens - 1) // BLOCK
        for worker, engine in enumerate(policy.engines):
            gpu = engine.cache.match(request.keys, limit)
            near, far = engine.tiers.lookup(request.keys, gpu, limit)
            assert found[worker] == (gpu * BLOCK, near * BLOCK, far * BLOCK)


def test_a_turn_finds_the_blocks_of_the_answer_before_it() -> None:
    """The blocks that decoding filled are on the map as well as those of the prompt."""
    engines = make_tiered_engines(1, tiers=TierOptions(), record_events=True)
    caches = SimulatedCaches(engines)
    policy = KvrouteAware(0)
    policy.attach(engines, TierOptions())
    fleet = TieredFleet(engines, policy)
    keys = list(range(1, 13))
    fleet.submit(FleetRequest(keys, 4 * BLOCK, 8 * BLOCK), 0.0)
    fleet.run()
    fleet._deliver()
    fleet.now += 1.0
    fleet._deliver()

    found = policy.caches.match(policy.caches.exact_prompt(FleetRequest(keys, 12 * BLOCK, 1)))

    assert found[0].gpu == 11 * BLOCK
    assert not caches.match(caches.exact_prompt(FleetRequest(keys, 12 * BLOCK, 1))), "it has received nothing"


def test_kvaware_maps_answers_that_no_prompt_has_contained_yet() -> None:
    tiers = TierOptions(filling=Filling.ENDED)
    engines = make_tiered_engines(2, tiers=tiers, record_events=True)
    policy = KvrouteAware(0)
    policy.attach(engines, tiers)
    fleet = TieredFleet(engines, policy, on_tiers=policy.tier_changed)
    keys = list(range(1, 13))
    fleet.submit(FleetRequest(keys, 4 * BLOCK, 8 * BLOCK), 0.0)
    fleet.run()
    fleet.now += 2.0
    fleet._deliver()

    found = policy.caches.match(policy.caches.exact_prompt(FleetRequest(keys, 12 * BLOCK, 1)))

    assert sorted(sum(held) for held in found.values()) == [11 * BLOCK, 11 * BLOCK]


def test_a_setting_changes_filling_and_rates_and_nothing_else() -> None:
    case = Case("conv", 10.5, "kvaware", workers=3)
    chats = Case("chat8k", 32, "kvaware")

    usual, other = Setting(), Setting(Filling.ENDED, LOADS["equal"])

    assert usual.seeded(case, 2) == replace(case, seed=2)
    assert other.seeded(case, 2) == replace(case, seed=2, rate=9.6, filling=Filling.ENDED)
    assert other.seeded(Capacity(chats), 1) == Capacity(replace(chats, seed=1, filling=Filling.ENDED))


def test_with_prefetching_blocks_of_requests_that_wait_set_out_from_the_store() -> None:
    asking, silent = KvrouteAware(0, prefetch=True), KvrouteAware(0)
    asked, unasked = run(asking, workers=2), run(silent, workers=2)

    assert (len(asked.done), len(unasked.done)) == (REQUESTS, REQUESTS)
    assert asking.prefetches > 0
    assert silent.prefetches == 0


@pytest.mark.parametrize("made", [Kvroute, KvrouteAware])
def test_replicas_exchange_decisions_and_end_without_load(made) -> None:
    policy = made(0, replicas=3, sync_s=0.05)

    fleet = run(policy)
    policy._deliver(fleet.now + 1.0)

    assert len(fleet.done) == REQUESTS
    for gateway in policy.gateways:
        loads = [worker.load for worker in gateway.workers]
        assert {(load.in_flight, load.active_tokens, load.queued) for load in loads} == {(0, 0, 0)}
        assert sum(load.recent(fleet.now + 1.0)[1] for load in loads) > 0, (
            "it has heard of the others' requests"
        )


def test_replicas_without_delay_do_as_well_as_one_gateway_and_isolated_ones_worse() -> None:
    def mean(**replicas: float) -> float:
        done = run(Kvroute(0, **replicas), tokens=1_200_000, requests=600).done  # type: ignore[arg-type]
        return fmean(request.ttft_s for request in done)

    one, connected, blind = mean(), mean(replicas=4, sync_s=0.0), mean(replicas=4, sync_s=inf)

    assert connected <= 1.1 * one
    assert blind > 1.1 * connected


def test_goals_do_not_depend_on_the_figures() -> None:
    numbers = list(GOALS)
    wanted = tasks_of(numbers)
    asked = []

    def ask(task: object) -> Figures:
        asked.append(task)
        return Figures(*[float(len(asked))] * 9)

    judge(numbers, ask)

    assert set(asked) == set(wanted)


def test_a_goal_is_printed_with_its_figure_and_its_verdict(capsys) -> None:
    judged = {
        3: {"prefixaware": [Bound("conv p50", 0.7, 0.75)], "kvaware": [Bound("conv p50", 0.76, most=0.75)]},
        14: {"prefixaware": [], "kvaware": [Bound("conv mean", 0.99)]},
    }

    report(judged)
    lines = capsys.readouterr().out.splitlines()
    report_json(judged)

    assert "of llm-d's TTFT" in lines[0]
    assert lines[1].split() == ["prefixaware", "met", "conv", "p50", "0.7", "(<=", "0.75)"]
    assert "MISSED" in lines[2]
    assert lines[4].split() == ["kvaware", "shown", "conv", "mean", "0.99"]
    assert '"met": false' in capsys.readouterr().out


def test_figures_leave_the_first_arrivals_out() -> None:
    done = []
    for number in range(100):
        request = FleetRequest([], 100, 11, arrival_s=float(number))
        request.first_token_s = number + (50.0 if number < 15 else 2.0)
        request.finished_s = request.first_token_s + 1.0
        done.append(request)

    found = figures(done, [300, 100])

    assert (found.p50, found.mean, found.itl50) == (2.0, 2.0, pytest.approx(0.1))
    assert found.imbalance == 1.5


def test_options_of_a_case_are_paths() -> None:
    case = Case("conv", 10.5, "kvaware", options=(("costs.token_us", 80.0), ("learning", False)))

    options = routing_options(case.options)

    assert (options.costs.token_us, options.learning) == (80.0, False)
