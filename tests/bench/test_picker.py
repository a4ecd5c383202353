"""The parts of the picker's benchmark that need no processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from picker import LoadError, Watched, compared, load_lines, steady
from picker_door import commands


def test_two_series_are_compared_sample_by_sample() -> None:
    own, relay = Watched([0.0, 2.0, 4.0, 9.0], 100.0, 0.5), Watched([1.0, 1.0, 4.0], 200.0, 0.4)

    error = compared("picker", own, relay)

    assert (error.mean_s, error.relay_mean_s) == (2.0, 2.0)
    assert (error.bias_s, error.error_s) == (0.0, pytest.approx(2 / 3))
    assert (error.prefill_tokens_s, error.relay_prefill_tokens_s) == (100.0, 200.0)


def test_requests_come_at_the_wanted_load() -> None:
    planned = steady(0.5, 400.0, 1)

    # 1,750 tokens of 40 us, 5 ms, and the attention: 0.076 s a prompt.
    assert pytest.approx(len(planned), rel=0.1) == 400 * 0.5 / 0.076
    assert planned == sorted(planned, key=lambda each: each.at_s)
    assert len({each.body for each in planned}) == len(planned)


def test_lines_have_medians_over_the_seeds() -> None:
    errors = [
        LoadError("picker, kvaware, costs x 1", mean, 2.0, 0.1, 0.2, 20_000.0, 25_000.0)
        for mean in (1.0, 2.0, 6.0)
    ]

    head, line = load_lines(errors)

    assert "bias" in head
    assert line.split() == [
        "picker,",
        "kvaware,",
        "costs",
        "x",
        "1",
        "2.000",
        "2.000",
        "0.100",
        "0.200",
        "20000",
    ]


def test_envoy_and_picker_get_the_same_workers(tmp_path: Path) -> None:
    workers = ["--worker", "http://127.0.0.1:1", "--worker", "http://127.0.0.1:2"]

    picker, envoy = commands(3, 4, workers, tmp_path)

    assert picker[-4:] == workers
    config = yaml.safe_load(Path(envoy[envoy.index("-c") + 1]).read_text())
    served, pickers = config["static_resources"]["clusters"]
    assert [port_of(each) for each in served["load_assignment"]["endpoints"][0]["lb_endpoints"]] == [1, 2]
    (endpoint,) = pickers["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert str(port_of(endpoint)) == picker[picker.index("--port") + 1]


def port_of(endpoint: dict[str, dict[str, dict[str, dict[str, int]]]]) -> int:
    return endpoint["endpoint"]["address"]["socket_address"]["port_value"]
