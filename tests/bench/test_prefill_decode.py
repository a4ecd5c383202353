"""The benchmark of handing prompts over (bench/prefill_decode*.py), on little of its traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvroute.fleet.worker import WorkerRole
from prefill_decode import GRID, Result, Row, best_by_cost, judge
from prefill_decode_chosen import CHOSEN
from prefill_decode_runs import WORKERS, WORKLOADS, Case, Cold, Setting, run
from prefill_decode_table import capacity, cases, cell

BOTH = Result(1.0, 0.050)


def row(workload: str = "conv", **results: Result) -> Row:
    return Row(workload, 0.7, 1.0, dict.fromkeys(results, ""), results)


def test_a_setting_gives_the_first_workers_to_prefill_and_the_last_ones_to_decode() -> None:
    setting = Setting("cost", 2, 3)

    roles = [setting.role(worker) for worker in range(WORKERS)]

    assert roles == [WorkerRole.PREFILL] * 2 + [WorkerRole.BOTH] * 3 + [WorkerRole.DECODE] * 3
    assert str(setting) == "2 prefill + 3 both + 3 decode"
    assert {Setting("both").role(worker) for worker in range(WORKERS)} == {WorkerRole.BOTH}


def test_each_row_has_a_setting_of_each_rule() -> None:
    assert {workload for workload, _ in CHOSEN} == set(WORKLOADS)
    for _, settings in CHOSEN.values():
        assert [setting.rule for setting in settings] == list(GRID)


@pytest.mark.parametrize(("tpot", "is_met"), [(0.0515, True), (0.052, False)])
def test_by_cost_must_not_be_worse_in_either_figure(tpot: float, is_met: bool) -> None:
    rules = {"both": BOTH, "length": BOTH, "uncached": BOTH, "always": BOTH}

    found = judge([row(**rules, cost=Result(0.5, tpot))])

    assert found["never more than 3% worse than the best baseline"] is is_met


def test_a_setting_by_cost_is_chosen_by_its_worse_figure() -> None:
    even, uneven = Setting("cost", 1), Setting("cost", 2)
    found = {even: Result(0.95, 0.049), uneven: Result(0.5, 0.052)}

    assert best_by_cost(found, BOTH) == even


def test_handing_over_pays_for_long_prompts_over_a_fast_link_only() -> None:
    """One cell of the table in docs/prefill-decode.md."""
    prompt, answer = 16_384, 64
    some = {key: each for key, each in cases(prompt, answer).items() if key[0] == 0.8}
    both, fast, slow = (
        run(some[0.8, gbit_s, setting])
        for gbit_s, setting in ((400, Setting("both")), (400, Setting("cost", 4)), (25, Setting("cost", 4)))
    )

    assert fast.itl90 < slow.itl90
    assert cell(both, [(Setting("cost", 4), both)]) == ""
    assert cell(both, [(Setting("cost", 4), replace(both, itl90=both.itl90 / 2))]) == "1.00 x 0.50 (4)"


def test_the_capacity_falls_with_longer_prompts_and_answers() -> None:
    assert capacity(1024, 64) > capacity(4096, 64) > capacity(4096, 256)


def test_requests_that_share_nothing_are_computed_whole() -> None:
    figures = run(Case(Cold(1024, 8), 20.0, Setting("cost", 1)))

    assert figures.hit == 0.0
