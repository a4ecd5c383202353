"""Every spec in configs/ can be planned on one host, and the gateway accepts its configuration. Fields
without effect are reported. test_endpoint_command.py starts two specs; tests/engine starts those with
engines."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

import pytest

from kvroute.config.loading import load
from kvroute.deploy.endpoint import EndpointHost, plan_local_endpoint, with_simulated_workers
from kvroute.deploy.plan import local_findings
from kvroute.deploy.render.config import config_text
from kvroute.deploy.render.plan import plan_endpoint
from kvroute.deploy.spec.loading import Finding, SpecReading, read_spec
from kvroute.deploy.spec.source import FieldVerdict, dotted
from kvroute.routing.registry import STRATEGIES

CONFIGS = Path(__file__).parents[2] / "configs"
SPECS = sorted(file.name for file in CONFIGS.glob("*.yaml") if re.search(r"^kind:", file.read_text(), re.M))


def reading(file: str) -> SpecReading:
    return read_spec((CONFIGS / file).read_text(), strategies=frozenset(STRATEGIES))


def noted(file: str) -> dict[str, str]:
    """Fields that have no effect, and why."""
    read = reading(file)
    assert read.document is not None
    findings = local_findings(read.document, read.findings)
    return {dotted(each.path): each.text for each in findings if each.verdict is FieldVerdict.NOTED}


@pytest.mark.parametrize("as_simulated", [False, True])
@pytest.mark.parametrize("file", SPECS)
def test_every_spec_runs_on_a_host_with_its_hardware(file, as_simulated, tmp_path) -> None:
    endpoint = plan_endpoint(reading(file).require(file))
    if as_simulated:
        endpoint = with_simulated_workers(endpoint)
    ports = count(20000, 20)
    host = EndpointHost({}, {}, (0, 1), tuple(map(str, range(64))), {}, tmp_path)

    local = plan_local_endpoint(endpoint, host, lambda _: next(ports))

    written = tmp_path / "gateway.yaml"
    written.write_text(config_text(local.config))
    config = load(file=written, environ={}, assignments=(), flags=[]).config
    assert [worker.id for worker in config.fleet.workers] == [each.child.name for each in local.plan.workers]
    assert config.routing.strategy == endpoint.strategy
    names = [each.child.name for stage in local.plan.stages for each in stage]
    assert len(set(names)) == len(names)


def test_all_of_a_local_spec_has_an_effect() -> None:
    assert noted("redis-l2.yaml") == {}
    assert noted("tieredstorage.yaml") == {}


def test_fields_that_only_clusters_use_are_reported() -> None:
    notes = noted("kubernetes.yaml")

    assert notes["spec.autoScalingSpec.minReplicaCount"].startswith("has no effect in up because")
    assert "x-kvroute.gateway.apiKeysSecret.name" in notes
    assert "x-kvroute.l2.sizeGb" not in notes
    assert "spec.replicas" not in notes


def test_errors_and_warnings_stay() -> None:
    document = reading("redis-l2.yaml").document
    assert document is not None
    path = ("spec", "replicas")
    given = [
        Finding(path, 1, FieldVerdict.WRONG, "is wrong"),
        Finding(path, 1, FieldVerdict.NOTED, "has no effect here because"),
        Finding(path, 1, FieldVerdict.NOTED, "applied, but slowly"),
    ]

    assert list(local_findings(document, given)) == given
