"""Every alert fires for its cause and is silent in a healthy gateway: `promtool test rules`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvroute.deploy.render.monitoring import ALERTS, ALERTS_FILE, RUNBOOK, monitoring_files

ROOT = Path(__file__).parents[2]
BUCKET = 'kvroute_time_to_first_byte_seconds_bucket{job="kvroute",worker="w",streamed="true",le='

HEALTHY = {
    'up{job="kvroute"}': "1x40",
    'kvroute_worker_state{job="kvroute",worker="w",state="healthy"}': "1x40",
    'kvroute_worker_state{job="kvroute",worker="w",state="unhealthy"}': "0x40",
    'kvroute_requests_total{job="kvroute",status="200"}': "0+600x40",
    'kvroute_requests_total{job="kvroute",status="503"}': "0+6x40",
    f'{BUCKET}"1.0"}}': "0+590x40",
    f'{BUCKET}"30.0"}}': "0+600x40",
    f'{BUCKET}"+Inf"}}': "0+600x40",
    'kvroute_retries_denied_total{job="kvroute"}': "0x40",
    'kvroute_load_imbalance_ratio{job="kvroute",model="m"}': "1.5x40",
    'kvroute_predictions_total{worker="w",outcome="over"}': "0+10x40",
    'kvroute_predictions_total{worker="w",outcome="exact"}': "0+590x40",
    'kvroute_map_trust{worker="w",rank="0",trust="whole",cause=""}': "1x40",
    'kvroute_kv_events_losses_total{worker="w",rank="0"}': "0x40",
    'kvroute_map_dropped_blocks_total{job="kvroute"}': "0x40",
    'kvroute_process_restarts_total{job="kvroute",process="0"}': "0x40",
}
BROKEN: dict[str, dict[str, str]] = {
    "KvrouteDown": {'up{job="kvroute"}': "0x40"},
    "KvrouteNoHealthyWorker": {
        'kvroute_worker_state{job="kvroute",worker="w",state="healthy"}': "0x40",
    },
    "KvrouteWorkerUnhealthy": {
        'kvroute_worker_state{job="kvroute",worker="w",state="unhealthy"}': "1x40",
    },
    "KvrouteErrors": {'kvroute_requests_total{job="kvroute",status="503"}': "0+60x40"},
    "KvrouteSlowFirstToken": {f'{BUCKET}"1.0"}}': "0+300x40"},
    "KvrouteRetryBudgetSpent": {'kvroute_retries_denied_total{job="kvroute"}': "0+1x40"},
    "KvrouteImbalance": {'kvroute_load_imbalance_ratio{job="kvroute",model="m"}': "3.5x40"},
    "KvroutePredictionsWrong": {'kvroute_predictions_total{worker="w",outcome="over"}': "0+300x40"},
    "KvrouteMapNotTrusted": {
        'kvroute_map_trust{worker="w",rank="0",trust="none",cause="gap"}': "1x40",
    },
    "KvrouteEventsLost": {'kvroute_kv_events_losses_total{worker="w",rank="0"}': "0x20 1x20"},
    "KvrouteMapFull": {'kvroute_map_dropped_blocks_total{job="kvroute"}': "0+5x40"},
    "KvrouteProcessRestarts": {'kvroute_process_restarts_total{job="kvroute",process="0"}': "0x20 1x20"},
}
"""Alert -> the series that differ from a healthy gateway's, one value a minute."""


def firing(promtool: str, folder: Path, series: dict[str, str], expected: set[str]) -> str:
    """Promtool's complaints about the alerts that fire after half an hour; empty if they are `expected`."""
    # `exp_alerts` compares all labels and annotations; the names are enough.
    firing_alerts = 'count by (alertname) (ALERTS{alertstate="firing"})'
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": firing_alerts,
                "eval_time": "30m",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)
                ],
            }
        ],
    }
    document = {"rule_files": [str(ROOT / ALERTS_FILE)], "evaluation_interval": "1m", "tests": [test]}
    (folder / "test.yaml").write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_a_healthy_gateway_raises_no_alert(system_program: Callable[[str], str], tmp_path: Path) -> None:
    assert firing(system_program("promtool"), tmp_path, HEALTHY, set()) == ""


@pytest.mark.parametrize("name", [alert.name for alert in ALERTS])
def test_an_alert_fires_for_its_cause_alone(
    system_program: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    promtool = system_program("promtool")

    assert firing(promtool, tmp_path, HEALTHY | BROKEN[name], {name}) == ""
    assert "FAILED" in firing(promtool, tmp_path, HEALTHY | BROKEN[name], set())


def test_promtool_accepts_the_rules(system_program: Callable[[str], str]) -> None:
    subprocess.run([system_program("promtool"), "check", "rules", ROOT / ALERTS_FILE], check=True)


def test_every_alert_has_a_section_in_the_runbook() -> None:
    headings = [line[4:] for line in (ROOT / RUNBOOK).read_text().splitlines() if line.startswith("### ")]

    assert {alert.name for alert in ALERTS} <= set(headings)


def test_only_names_of_metrics_begin_with_the_prefix() -> None:
    from kvroute.app.reference import families

    known = {family.name for family in families()}
    for text in monitoring_files().values():
        for word in re.findall(r"kvroute_\w+", text):
            assert re.sub(r"_(?:total|bucket|sum|count)$", "", word) in known, word
