from __future__ import annotations

import pytest

from gateway_goals import (
    DIRECT,
    GOALS,
    KV_AWARE,
    KV_PREFIX,
    OURS,
    THEIRS,
    Goal,
    Measurement,
    Results,
    judge,
    median,
)


def runs(router: str, scenario: str, figure: str, *values: float, errors: int = 0) -> list[Measurement]:
    return [
        Measurement(router, scenario, repeat, {figure: value}, errors) for repeat, value in enumerate(values)
    ]


def verdicts(*measurements: list[Measurement]) -> dict[str, tuple[float | None, str]]:
    results = Results(one for some in measurements for one in some)
    return {one.name: (one.value, one.verdict) for one in judge(results)}


def test_the_median_of_nothing_is_none() -> None:
    assert median([]) is None
    assert median([3.0, 1.0, 2.0]) == 2.0


def test_a_ratio_is_the_median_over_pairs_of_runs_not_of_medians() -> None:
    """The second repeat was slow for both: only pairs see that nothing changed."""
    results = Results(
        runs(OURS, "a", "cpu_us_request", 10, 40, 13) + runs(THEIRS, "a", "cpu_us_request", 20, 80, 20)
    )

    assert results.ratio(OURS, THEIRS, "a", "cpu_us_request") == 0.5


def test_runs_without_a_partner_count_in_no_ratio() -> None:
    results = Results(runs(OURS, "a", "cpu_us_request", 10, 900) + runs(THEIRS, "a", "cpu_us_request", 20))

    assert results.ratio(OURS, THEIRS, "a", "cpu_us_request") == 0.5


def test_runs_with_errors_are_not_counted() -> None:
    results = Results(
        runs(OURS, "a", "cpu_us_request", 1, errors=3) + runs(THEIRS, "a", "cpu_us_request", 20)
    )

    assert results.ratio(OURS, THEIRS, "a", "cpu_us_request") is None
    assert results.median(OURS, "a", "cpu_us_request") is None


@pytest.mark.parametrize(
    ("ours", "verdict"), [(0.5, "stretch"), (0.58, "stretch"), (0.7, "met"), (0.73, "met"), (0.74, "MISSED")]
)
def test_a_goal_with_an_upper_bound(ours: float, verdict: str) -> None:
    found = verdicts(runs(OURS, "a", "cpu_us_request", ours), runs(THEIRS, "a", "cpu_us_request", 1.0))

    assert found["a: CPU per request"] == (ours, verdict)


@pytest.mark.parametrize(("ours", "verdict"), [(1.8, "stretch"), (1.4, "met"), (1.2, "MISSED")])
def test_a_goal_with_a_lower_bound(ours: float, verdict: str) -> None:
    found = verdicts(runs(OURS, "a", "requests_s", ours), runs(THEIRS, "a", "requests_s", 1.0))

    assert found["a: requests/s on one core"] == (ours, verdict)


def test_a_figure_that_was_not_measured_is_reported_without_a_verdict() -> None:
    assert set(verdicts().values()) == {(None, "not measured")}
    assert len(verdicts()) == len(GOALS)


def test_added_latency_is_over_none_at_all() -> None:
    found = verdicts(
        runs(DIRECT, "l", "a_p50_us", 20, 20),
        runs(THEIRS, "l", "a_p50_us", 120, 220),
        runs(OURS, "l", "a_p50_us", 80, 120),
    )

    value, verdict = found["added p50, one connection, a"]
    assert (value, verdict) == (pytest.approx(0.55), "stretch")


def test_first_byte_is_the_best_of_all_repeats_over_the_best_without_a_router() -> None:
    found = verdicts(
        runs(DIRECT, "l", "first_byte_p99_us", 10_500, 10_400, 30_000),
        runs(OURS, "l", "first_byte_p99_us", 48_000, 11_000, 12_000),
    )

    value, verdict = found["first byte p99 over direct"]
    assert (value, verdict) == (pytest.approx(0.6), "met")


def test_a_turn_of_64k_tokens_is_judged_in_milliseconds() -> None:
    found = verdicts(runs(KV_AWARE, "t", "cpu_us_request", 1900, 1100, 1500))

    assert found["64K-token turn, exact tokens"] == (1.5, "met")


def test_a_goal_without_a_tolerance_is_met_or_missed() -> None:
    [one] = judge(Results([]), [Goal("only", lambda results: 1.0, 1.5, 1.5)])

    assert one.verdict == "met"


def test_kvaware_is_judged_without_token_work_and_nothing_but_that() -> None:
    found = verdicts(
        [
            Measurement(router, "ka", 0, {"main_us_request": whole, "untokenized_us_request": rest})
            for router, whole, rest in ((KV_PREFIX, 100.0, 100.0), (KV_AWARE, 300.0, 140.0))
        ]
    )

    assert found["a: kvaware / prefixaware"] == (1.4, "met")
