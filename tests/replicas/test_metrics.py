from __future__ import annotations

import pytest
from prometheus_client.exposition import generate_latest

from kvroute.errors import WireError
from kvroute.metrics import Metrics
from kvroute.replicas.metrics import (
    Page,
    PageCollector,
    ParsedFamily,
    Sample,
    decode,
    encode,
    merge_pages,
    persistent_part,
    read,
)
from kvroute.tallies import Gauges, counter, gauge


def page(kind: str, name: str, *samples: tuple[str, float], label: str = "worker") -> Page:
    return [ParsedFamily(name, "Help.", kind, [Sample(name, ((label, value),), n) for value, n in samples])]


def values(page: Page) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(value for _, value in sample.labels)): sample.value
        for family in page
        for sample in family.samples
    }


def test_counters_are_summed_by_series():
    found = merge_pages([page("counter", "n", ("a", 1), ("b", 2)), page("counter", "n", ("b", 3), ("c", 4))])

    assert values(found) == {("n", "a"): 1, ("n", "b"): 5, ("n", "c"): 4}


def test_requests_that_wait_in_each_process_are_summed():
    waiting = "kvroute_queue_waiting"
    found = merge_pages([page("gauge", waiting, ("a", 0)), page("gauge", waiting, ("a", 3), ("b", 1))])

    assert values(found) == {(waiting, "a"): 3, (waiting, "b"): 1}


def test_histograms_are_summed_bucket_by_bucket():
    pages = []
    for seconds in (0.02, 3.0, 3.0):
        metrics = Metrics()
        metrics.series("m", "w", "s", "r", 200).finished(seconds, None)
        pages.append(read(metrics))

    lines = generate_latest(PageCollector(merge_pages(pages))).decode().splitlines()

    name = "kvroute_request_duration_seconds"
    buckets = {
        line.split('le="')[1].split('"')[0]: line for line in lines if line.startswith(name + "_bucket")
    }
    assert buckets["0.025"].endswith(" 1.0")
    assert buckets["5.0"].endswith(" 3.0")
    assert buckets["+Inf"].endswith(" 3.0")
    assert any(line.startswith(name + "_count") and line.endswith(" 3.0") for line in lines)
    assert any(line.startswith(name + "_sum") and line.endswith(" 6.02") for line in lines)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kvroute_requests_in_flight", 7),
        ("process_resident_memory_bytes", 7),
        ("process_start_time_seconds", 3),
        ("kvroute_worker_capacity_tokens", 4),
    ],
    ids=["own load", "own memory", "the oldest", "the same for all"],
)
def test_a_gauge_is_merged_by_its_meaning(name, expected):
    found = merge_pages([page("gauge", name, ("a", 4)), page("gauge", name, ("a", 3))])

    assert values(found) == {(name, "a"): expected}


def test_a_gauge_that_only_one_process_has_is_shown():
    found = merge_pages(
        [page("gauge", "kvroute_map_trust", ("a", 1)), page("gauge", "kvroute_map_trust", ("b", 1))]
    )

    assert values(found) == {("kvroute_map_trust", "a"): 1, ("kvroute_map_trust", "b"): 1}


def test_counters_outlive_their_process():
    def figures():
        yield gauge("level", "Help.", (), [((), 1.0)])
        yield counter("total", "Help.", (), [((), 2.0)])

    assert [family.name for family in persistent_part(read(Gauges(figures)))] == ["total"]


def test_a_page_comes_back_as_it_was_written():
    written = read(Metrics())

    assert decode(encode(written)) == written


def test_bytes_that_are_no_page_are_an_error():
    with pytest.raises(WireError):
        decode(b"\xc1")


def test_the_exposition_of_one_page_is_that_of_its_registry():
    metrics = Metrics()
    metrics.series("m", "w", "s", "r", 200).finished(0.1, 0.01)

    shown = generate_latest(PageCollector(read(metrics))).decode().splitlines()

    def figures(lines: list[str]) -> list[tuple[str, str]]:
        return sorted((line.split("{")[0], line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#")

    assert figures(shown) == figures(generate_latest(metrics).decode().splitlines())
