from __future__ import annotations

import argparse
import json

from gateway import report, run_orders
from gateway_goals import DIRECT, OURS, THEIRS, Measurement, Results, judge
from gateway_report import COLUMNS, document, from_document, table
from gateway_scenarios import SCENARIOS


def saved() -> dict[str, object]:
    measurements = [
        Measurement(router, "a", repeat, {"cpu_us_request": cost * 1.00049, "requests_s": 1e6 / cost})
        for router, cost in ((THEIRS, 60.0), (OURS, 30.0))
        for repeat in range(3)
    ]
    measurements.append(Measurement(OURS, "a", 3, {"cpu_us_request": 1.0}, errors=2))
    return document(
        measurements,
        judge(Results(measurements)),
        machine={"cpu": "one"},
        versions={"kvroute": "1"},
        missing={"nginx": "not installed"},
        settings={"quick": True},
        began="2026-01-01T00:00:00Z",
    )


def test_a_run_is_the_same_after_it_was_written_and_read() -> None:
    document = json.loads(json.dumps(saved()))

    again = from_document(document)

    assert again.median(OURS, "a", "cpu_us_request") == 30.015
    assert document["verdicts"][0]["verdict"] == "stretch"
    assert document["machine"] == {"cpu": "one"}


def test_the_report_names_what_is_missing_and_which_runs_failed() -> None:
    text = "\n".join(report(saved()))

    assert "MISSING nginx: not installed" in text
    assert "1 runs with errors, not counted" in text
    assert "0.50 x" in text


def test_a_router_without_a_single_good_run_shows_dashes() -> None:
    failed = Results([Measurement(THEIRS, "a", 0, {}, errors=1)])

    *_, row = table(failed, "a", "t", "closed")

    assert row.split()[:3] == [THEIRS, "0", "-"]


def test_every_scenario_can_be_reported() -> None:
    assert {scenario.kind for scenario in SCENARIOS.values()} == COLUMNS.keys()


def test_no_router_is_always_measured_after_the_same_one() -> None:
    options = argparse.Namespace(quick=False, repeats=2, pairs=4)
    routers = ["nginx", THEIRS, OURS]

    found = run_orders(SCENARIOS["d"], routers, options)

    assert found == [
        (0, ["nginx", THEIRS, OURS]),
        (1, [THEIRS, OURS, "nginx"]),
        (2, [THEIRS, OURS]),
        (3, [OURS, THEIRS]),
    ]
    assert run_orders(SCENARIOS["l"], [DIRECT], options) == [(repeat, [DIRECT]) for repeat in range(5)]
