"""Histograms that count late, the labels of requests, and families that are declared without samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.app.collectors import DeclaredFamilies
from kvroute.metrics import Metrics
from kvroute.tallies import FastHistogram, Gauges, gauge

BOUNDS = (0.5, 1.0, 2.0)
VALUES = st.lists(st.one_of(st.sampled_from(BOUNDS), st.integers(0, 24).map(lambda n: n / 8)), max_size=12)


@given(st.lists(VALUES, max_size=4))
def test_deferred_values_count_like_others(batches: list[list[float]]) -> None:
    immediate, deferred = FastHistogram(BOUNDS), FastHistogram(BOUNDS)

    for batch in batches:
        for value in batch:
            immediate.observe(value)
            deferred.append(value)
        deferred.flush()

    assert deferred.cumulative() == immediate.cumulative()
    assert deferred.sum == immediate.sum


def test_a_reader_sees_deferred_values() -> None:
    histogram = FastHistogram(BOUNDS)

    histogram.append(0.75)

    assert histogram.sum == 0.75
    assert histogram.cumulative()[1] == ("1.0", 1.0)


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_an_unstreamed_answer_does_not_count_as_a_first_token() -> None:
    metrics = Metrics()

    metrics.series("m", "w", "s", "r", 200, True).answered([(2.0, 0.25, 10, 0, None, None, None)])
    metrics.series("m", "w", "s", "r", 200, False).answered([(100.0, 100.0, 10, 0, None, None, None)])

    found = samples(metrics, "kvroute_time_to_first_byte_seconds_sum")
    assert found == {("m", "w", "s", "true"): 0.25, ("m", "w", "s", "false"): 100.0}
    assert samples(metrics, "kvroute_requests_total") == {("m", "w", "s", "r", "200"): 2.0}


def test_predicted_tokens_count_for_their_worker_and_tier() -> None:
    metrics = Metrics()

    metrics.series("m", "a", "s", "r", 200).answered([(1.0, 1.0, 100, 64, None, None, None)])
    metrics.series("m", "b", "s", "r", 200).answered([(1.0, 1.0, 100, 96, (32, 0, 64), None, None)])

    assert samples(metrics, "kvroute_predicted_hit_tokens_total") == {
        ("m", "a", "s", "gpu"): 64.0,
        ("m", "b", "s", "gpu"): 32.0,
        ("m", "b", "s", "l2"): 64.0,
    }
    assert samples(metrics, "kvroute_prompt_tokens_total") == {("m", "a", "s"): 100.0, ("m", "b", "s"): 100.0}
    assert samples(metrics, "kvroute_matched_tokens_sum") == {("s",): 160.0}


def test_answers_are_counted_together() -> None:
    metrics = Metrics()

    metrics.series("m", "a", "s", "r", 200).answered(
        [
            (1.0, 0.5, 100, 64, None, 110, None),
            (2.0, None, 50, 0, None, None, None),
            (4.0, 0.25, 10, 0, (0, 16, 0), 12, 16),
        ]
    )

    place, pair = ("m", "a", "s"), ("m", "a")
    assert samples(metrics, "kvroute_requests_total") == {(*place, "r", "200"): 3.0}
    assert samples(metrics, "kvroute_request_duration_seconds_sum") == {place: 7.0}
    assert samples(metrics, "kvroute_time_to_first_byte_seconds_count") == {(*place, "false"): 2.0}
    assert samples(metrics, "kvroute_prompt_tokens_total") == {place: 160.0}
    assert samples(metrics, "kvroute_predicted_hit_tokens_total") == {
        (*place, "gpu"): 64.0,
        (*place, "l1"): 16.0,
    }
    assert samples(metrics, "kvroute_reported_prompt_tokens_total") == {pair: 122.0}
    assert samples(metrics, "kvroute_reported_cached_tokens_total") == {pair: 16.0}


def test_a_figure_that_cannot_be_counted_leaves_all_counters_as_they_are() -> None:
    metrics = Metrics()
    good = (1.0, 0.5, 100, 64, None, 110, 64)

    with pytest.raises(OverflowError):
        metrics.series("m", "a", "s", "r", 200).answered([good, (1.0, 0.5, 10**400, 0, None, 1, 0)])

    assert samples(metrics, "kvroute_prompt_tokens_total") == {("m", "a", "s"): 0.0}
    assert samples(metrics, "kvroute_requests_total") == {("m", "a", "s", "r", "200"): 0.0}


def test_a_family_that_no_collector_has_is_declared_without_samples() -> None:
    metrics = Metrics()
    present = gauge("level", "Present.", (), [((), 1.0)])
    metrics.registry.register(Gauges(lambda: [present]))
    metrics.registry.register(
        DeclaredFamilies(
            metrics.registry, lambda: [gauge("level", "Twice.", (), []), gauge("other", "Absent.", (), [])]
        )
    )

    for _ in range(2):
        found = {family.name: family for family in metrics.registry.collect()}
        assert found["level"].documentation == "Present."
        assert (found["other"].documentation, found["other"].samples) == ("Absent.", [])


def test_handovers_are_counted_again_after_a_worker_has_left_and_returned() -> None:
    """The children that a first count has looked up are no longer part of the metrics then."""
    metrics = Metrics()
    for _ in range(2):
        metrics.prefilled("p", 0.5, 640)
        metrics.handed_over("p", "d", 600, 0.01)
        metrics.handed_over("p", "d", 40, None)

        assert samples(metrics, "kvroute_handovers_total") == {("d", "p"): 2}
        assert samples(metrics, "kvroute_handover_tokens_total") == {("d",): 640}
        assert samples(metrics, "kvroute_handover_computed_tokens_total") == {("p",): 640}
        assert samples(metrics, "kvroute_handover_prefill_seconds_count") == {("p",): 1}
        assert samples(metrics, "kvroute_handover_transfer_seconds_count") == {("d",): 1}
        metrics.forget_workers({"p", "d"})
        assert samples(metrics, "kvroute_handovers_total") == {}
