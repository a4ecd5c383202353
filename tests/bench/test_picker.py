"""The parts of the picker's benchmark that need no processes."""

from __future__ import annotations

from pathlib import Path

import yaml

from picker import Blind, blind_run, unseen_lines
from picker_door import commands


def test_a_relay_that_knows_every_first_token_has_no_error() -> None:
    relay, assumed, events = (blind_run(0, "twice", sees, 60) for sees in ("relay", "assumed", "events"))

    assert relay.error_s == 0.0
    assert relay.queued_s == relay.relay_queued_s > 0.0
    assert assumed.error_s > events.error_s > 0.0


def test_lines_have_ratios_to_the_relay_of_the_same_seed() -> None:
    runs = [
        Blind(seed, "right", sees, ttft_s, 1.0, 2.0, 0.5, 0.25)
        for seed, sees, ttft_s in (
            (0, "relay", 1.0),
            (1, "relay", 2.0),
            (0, "events", 2.0),
            (1, "events", 4.0),
        )
    ]

    head, relay, events = unseen_lines(runs)

    assert "over relay" in head
    assert relay.split() == ["right", "relay", "1.50", "1.00", "1.00", "2.00", "0.50", "0.25"]
    assert events.split() == ["right", "events", "3.00", "2.00", "1.00", "2.00", "0.50", "0.25"]


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
