from __future__ import annotations

import pytest

from kvroute.deploy.render.reach import REASONS, TARGETS_OF_FIELDS, findings_for
from kvroute.deploy.render.registry import TARGETS
from kvroute.deploy.spec.endpoint import KINDS, shape_of_kind
from kvroute.deploy.spec.source import FieldVerdict, dotted, walk

SECRET = {"name": "redis", "key": "password"}
URL = {"spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": "redis://cache:6379"}
BACKEND = "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend"


@pytest.fixture
def findings_of(read):
    """`(document, target)` -> verdict and text by field."""

    def find(document, target):
        reading = read(document)
        findings = findings_for(target, reading.document, reading.findings)
        return {dotted(each.path): (each.verdict, each.text) for each in findings}

    return find


def test_every_field_of_the_table_is_one_of_the_spec():
    fields = {
        dotted(tuple(key for key in path if isinstance(key, str)))
        for kind in KINDS
        for path, _ in walk(shape_of_kind(kind))
    }

    assert set(TARGETS_OF_FIELDS) | set(REASONS) <= fields
    assert {name for names in REASONS.values() for name in names} <= set(TARGETS)
    assert set().union(*TARGETS_OF_FIELDS.values()) == set(TARGETS)


@pytest.mark.parametrize("target", ["compose", "worker-args"])
def test_an_environment_by_reference_is_noted_outside_of_kubernetes(target, hyperpod, findings_of):
    variables = [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    findings = findings_of(hyperpod({"spec.worker.environmentVariables": variables}), target)
    place = "spec.worker.environmentVariables"

    assert findings[f"{place}[0].value"][0] is FieldVerdict.APPLIED
    assert findings[f"{place}[1].valueFrom.secretKeyRef.key"] == (
        FieldVerdict.NOTED,
        f"has no effect in {target} because it refers to an object of Kubernetes",
    )


def test_the_second_tiers_password_is_a_variable_outside_kubernetes(own, findings_of):
    document = own(URL | {"x-kvroute.l2.passwordSecret": SECRET})
    by_target = {
        target: findings_of(document, target)["x-kvroute.l2.passwordSecret.name"] for target in TARGETS
    }

    assert [target for target, (verdict, _) in by_target.items() if verdict is FieldVerdict.APPLIED] == [
        "kubernetes"
    ]
    assert "variable L2_PASSWORD" in by_target["compose"][1]
    assert "lmcache-servers.sh reads the password from L2_PASSWORD" in by_target["lmcache"][1]


def test_a_field_applied_with_a_warning_is_noted_where_it_has_no_effect(own, findings_of):
    document = own({"x-kvroute.gateway.replicas": 2})

    assert findings_of(document, "kubernetes")["x-kvroute.gateway.replicas"][1].startswith("applied, but")
    assert findings_of(document, "compose")["x-kvroute.gateway.replicas"][1].startswith(
        "has no effect in compose"
    )


def test_cache_settings_reach_the_workers_command_lines_in_classic_mode_alone(own, findings_of):
    changes = {"x-kvroute.l1.sizeGb": 3.0}
    classic = own(changes | {"x-kvroute.lmcache.mode": "classic"})

    assert findings_of(own(changes), "worker-args")["x-kvroute.l1.sizeGb"][0] is FieldVerdict.NOTED
    assert findings_of(classic, "worker-args")["x-kvroute.l1.sizeGb"][0] is FieldVerdict.APPLIED


@pytest.mark.parametrize("target", ["compose", "lmcache"])
def test_the_daemon_of_hyperpods_nodes_is_nowhere_else(target, own, findings_of):
    document = own({BACKEND: "tieredstorage", "x-kvroute.platform": "hyperpod"})

    assert findings_of(document, "kubernetes")[BACKEND][0] is FieldVerdict.APPLIED
    verdict, message = findings_of(document, target)[BACKEND]
    assert verdict is FieldVerdict.APPLIED
    assert message.startswith("`kvroute tierd`")


def test_the_size_of_our_daemon_reaches_its_command_line(own, findings_of):
    changes = {"x-kvroute.l1.sizeGb": 1.0, "x-kvroute.l2.sizeGb": 3.0}

    assert findings_of(own(changes), "lmcache")["x-kvroute.l2.sizeGb"][0] is FieldVerdict.NOTED
    ours = findings_of(own(changes | {BACKEND: "tieredstorage"}), "lmcache")
    assert ours["x-kvroute.l2.sizeGb"][0] is FieldVerdict.APPLIED


def test_a_strategy_that_needs_events_is_everyones(own, findings_of):
    path = "spec.intelligentRoutingSpec.routingStrategy"
    document = own({path: "kvaware"})

    assert {findings_of(document, target)[path][0] for target in TARGETS} == {FieldVerdict.APPLIED}
    assert findings_of(own(), "lmcache")[path][0] is FieldVerdict.NOTED
