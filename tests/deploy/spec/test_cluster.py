"""Overlays of pod templates, and what a cluster does with a spec."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.manifests import check

from kvroute.deploy.render.kubernetes import kubernetes_objects
from kvroute.deploy.render.reach import findings_for
from kvroute.deploy.spec.cluster import CONTAINERS, MERGE_KEYS, merged, template_problems, with_overlay
from kvroute.deploy.spec.source import FieldVerdict, dotted

SETTINGS = "x-kvroute.kubernetes"
TEMPLATE = f"{SETTINGS}.podTemplate"
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists"}
TIERD = {"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage"}
OVERLAY: dict[str, Any] = {
    "metadata": {"annotations": {"a": "b"}, "labels": {"team": "search"}},
    "spec": {
        "nodeSelector": {"pool": "llm"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "runtimeClassName": "nvidia",
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "inference",
        "securityContext": {"runAsUser": 1000},
        "volumes": [{"name": "more", "emptyDir": {}}],
        "schedulerName": "volcano",
        "containers": [
            {"name": "worker", "securityContext": {"runAsNonRoot": True}},
            {"name": "lmcache", "resources": {"requests": {"cpu": "4"}}},
            {"name": "proxy", "image": "envoy"},
        ],
    },
}


def template(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (each,) = [each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return each["spec"]["template"]


@pytest.fixture
def objects(own, plan):
    """Changed fields -> all objects, which are valid."""

    def make(changes: dict[str, object], document=own) -> list[dict[str, Any]]:
        found = [each for file in kubernetes_objects(plan(document(changes))).values() for each in file]
        for each in found:
            check(each)
        return found

    return make


# --- the merge --------------------------------------------------------------------------------------------


def test_mappings_are_merged_and_plain_values_and_lists_replaced():
    base = {"a": {"b": 1, "c": 2}, "args": ["1", "2"], "d": 3}

    assert merged(base, {"a": {"c": 4}, "args": ["5"], "e": 6}) == {
        "a": {"b": 1, "c": 4},
        "args": ["5"],
        "d": 3,
        "e": 6,
    }
    assert base == {"a": {"b": 1, "c": 2}, "args": ["1", "2"], "d": 3}


@pytest.mark.parametrize("key", sorted(MERGE_KEYS))
def test_items_of_a_merged_list_are_found_by_their_keys(key):
    def item(value: str, **more: str) -> dict[str, str]:
        return dict.fromkeys(MERGE_KEYS[key], value) | more

    base = {key: [item("a", x="1"), item("b")]}

    assert merged(base, {key: [item("a", y="2"), item("c")]}) == {
        key: [item("a", x="1", y="2"), item("b"), item("c")]
    }
    assert merged(base, {key: [{**item("a"), "$patch": "delete"}]}) == {key: [item("b")]}


def test_a_port_without_a_protocol_is_a_tcp_port():
    base = {"ports": [{"containerPort": 80, "name": "http"}]}

    assert merged(base, {"ports": [{"containerPort": 80, "protocol": "TCP", "hostPort": 81}]}) == {
        "ports": [{"containerPort": 80, "name": "http", "protocol": "TCP", "hostPort": 81}]
    }


def test_directives_delete_and_replace_mappings():
    base = {"a": {"b": 1}, "c": {"d": 2}}

    assert merged(base, {"a": {"$patch": "delete"}, "c": {"$patch": "replace", "e": 3}}) == {"c": {"e": 3}}


# --- overlays of rendered pods ----------------------------------------------------------------------------


def test_an_overlay_changes_the_workers_pods(objects):
    pods = template(objects({TEMPLATE: OVERLAY}), "StatefulSet", "demo-worker")
    spec = pods["spec"]

    assert pods["metadata"]["annotations"] == {"a": "b"}
    assert pods["metadata"]["labels"]["team"] == "search"
    assert spec["tolerations"] == [GPU_TAINT, {"key": "team", "operator": "Exists"}]
    assert (spec["runtimeClassName"], spec["schedulerName"]) == ("nvidia", "volcano")
    assert [each["name"] for each in spec["containers"]] == ["worker", "proxy"]
    assert spec["containers"][0]["securityContext"] == {"runAsNonRoot": True}
    assert {"name": "more", "emptyDir": {}} in spec["volumes"]


@pytest.mark.parametrize("name", ["demo-lmcache", "demo-tierd"])
def test_cache_servers_follow_the_workers_to_their_nodes(name, objects):
    found = objects({TEMPLATE: OVERLAY} | TIERD)
    ours = template(found, "DaemonSet", name)
    workers = template(found, "StatefulSet", "demo-worker")

    for key in ("nodeSelector", "tolerations", "runtimeClassName", "imagePullSecrets", "securityContext"):
        assert ours["spec"][key] == workers["spec"][key]
    assert ours["spec"].get("affinity") == workers["spec"].get("affinity")
    assert ours["metadata"]["annotations"] == {"a": "b"}
    # What belongs to the workers alone.
    assert "team" not in ours["metadata"]["labels"]
    assert "schedulerName" not in ours["spec"]
    assert [each["name"] for each in ours["spec"]["containers"]] == [name.removeprefix("demo-")]
    cpus = {"demo-lmcache": "4", "demo-tierd": "500m"}
    assert ours["spec"]["containers"][0]["resources"]["requests"]["cpu"] == cpus[name]


def test_a_workers_own_cache_server_is_changed_by_its_name(objects):
    found = objects({TEMPLATE: OVERLAY, "x-kvroute.lmcache.servers": "per-worker"})
    spec = template(found, "StatefulSet", "demo-worker")["spec"]

    (sidecar,) = spec["initContainers"]
    assert sidecar["resources"]["requests"]["cpu"] == "4"
    assert [each["name"] for each in spec["containers"]] == ["worker", "proxy"]


def test_other_pods_have_their_own_overlay(objects):
    found = objects({f"{SETTINGS}.servicePodTemplate": {"spec": {"priorityClassName": "services"}}})

    for kind, name, has in (
        ("Deployment", "demo-gateway", True),
        ("Deployment", "demo-redis", True),
        ("StatefulSet", "demo-worker", False),
        ("DaemonSet", "demo-lmcache", False),
    ):
        assert (template(found, kind, name)["spec"].get("priorityClassName") == "services") == has


def test_without_an_overlay_a_template_stays_as_it_is():
    base = {"metadata": {}, "spec": {"containers": []}}

    assert with_overlay(base, None, is_main=True) == base


# --- rules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "place"),
    [
        ({"spec": []}, "spec"),
        ({"nodeSelector": {}}, "nodeSelector"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"metadata": {"annotations": {"a": 1}}}, "metadata.annotations"),
        (
            {"metadata": {"labels": {"app.kubernetes.io/component": "x"}}},
            'metadata.labels."app.kubernetes.io/component"',
        ),
        ({"spec": {"toleration": []}}, "spec.toleration"),
        ({"spec": {"tolerations": {"key": "a"}}}, "spec.tolerations"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0]"),
        ({"spec": {"containers": [{"name": "workr"}]}}, "spec.containers[0]"),
        (
            {"spec": {"containers": [{"name": "worker", "env": [{"value": "x"}]}]}},
            "spec.containers[0].env[0]",
        ),
    ],
)
def test_an_overlay_that_no_pod_can_have_is_refused_at_its_place(template, place):
    assert [dotted(path) for path, _ in template_problems(template, CONTAINERS["podTemplate"])] == [place]


def test_an_overlay_with_every_kind_of_change_is_accepted():
    assert list(template_problems(OVERLAY, CONTAINERS["podTemplate"])) == []


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"podTemplate": {"spec": {"nodeselector": {}}}}, "podTemplate.spec.nodeselector"),
        ({"podTemplate": {"spec": "x"}}, "podTemplate.spec"),
        ({"servicePodTemplate": {"spec": {"containers": [{"name": "worker"}]}}}, "servicePodTemplate.spec"),
        ({"maxSurge": 1}, "maxSurge"),
        ({"modelCache": {"claim": "c", "hostPath": "/m"}}, "modelCache.hostPath"),
        ({"metricsFrom": [{"podselector": {}}]}, "metricsFrom[0]"),
    ],
)
def test_wrong_settings_are_named_by_their_field(settings, field, own, read):
    wrong = [dotted(each.path) for each in read(own({SETTINGS: settings})).wrong]

    assert len(wrong) == 1
    assert wrong[0].startswith(f"{SETTINGS}.{field}")


def test_a_part_of_an_overlay_whose_form_is_not_known_here_raises_nothing(own, read):
    assert read(own({f"{TEMPLATE}.spec.affinity": "x"})).document is not None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"modelCache": {"claim": "c"}, "of": {"spec.model": "/data/model"}}, "modelCache.claim"),
        ({"metricsFrom": [{"podSelector": {}}], "of": {"spec.metrics": {"enabled": False}}}, "metricsFrom"),
        ({"gpuNodeLabels": ["gpu"], "of": {"x-kvroute.lmcache.mode": "classic"}}, "gpuNodeLabels"),
        (
            {"gpuNodeLabels": ["gpu"], "podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}, "of": {}},
            "gpuNodeLabels",
        ),
    ],
)
def test_settings_without_an_effect_are_noted(changes, field, own, read):
    others = changes.pop("of")

    findings = read(own(others | {SETTINGS: changes})).findings

    noted = {dotted(each.path) for each in findings if each.verdict is FieldVerdict.NOTED}
    assert f"{SETTINGS}.{field}" in noted


# --- what a cluster does ----------------------------------------------------------------------------------


@pytest.fixture
def notes(read):
    """A document -> what `render --to kubernetes` notes: field -> text."""

    def find(document: dict[str, Any], target: str = "kubernetes") -> dict[str, str]:
        reading = read(document)
        findings = findings_for(target, reading.require("spec.yaml"), reading.findings)
        return {dotted(each.path): each.text for each in findings if each.verdict is FieldVerdict.NOTED}

    return find


@pytest.mark.parametrize(
    ("changes", "has_note"),
    [
        ({}, True),
        (TIERD, True),
        (TIERD | {"x-kvroute.lmcache.mode": "classic"}, True),
        (TIERD | {"x-kvroute.lmcache.mode": "classic", "x-kvroute.platform": "hyperpod"}, False),
        ({"x-kvroute.lmcache.servers": "per-worker"}, False),
        ({"x-kvroute.engine": "sim"}, False),
        ({"spec.kvCacheSpec": None}, False),
    ],
)
def test_hostipc_and_pod_security_are_a_note_exactly_where_pods_have_hostipc(
    changes, has_note, own, notes, objects
):
    pods = template(objects(changes), "StatefulSet", "demo-worker")["spec"]

    assert ("Pod Security" in notes(own(changes)).get("x-kvroute.lmcache.servers", "")) == has_note
    assert pods.get("hostIPC", False) == has_note


def test_the_notes_of_a_cluster_are_for_kubernetes_only(own, notes):
    ours = {"x-kvroute.lmcache.servers", *(f"{SETTINGS}.{key}" for key in ("workload", "modelCache"))}

    assert ours <= notes(own()).keys()
    assert not ours & notes(own(), "compose").keys()


def test_a_statefulset_does_not_surge_and_a_deployment_can(own, notes, objects):
    as_deployment = {f"{SETTINGS}.workload": "Deployment"}
    plain = next(
        each
        for each in objects(as_deployment)
        if each["metadata"]["name"] == "demo-worker" and "strategy" in each["spec"]
    )
    surging = objects(as_deployment | {f"{SETTINGS}.maxSurge": 2, "spec.autoScalingSpec": {}})
    (workers,) = [
        each["spec"]
        for each in surging
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "demo-worker"
    ]
    (scaler,) = [each for each in surging if each["kind"] == "HorizontalPodAutoscaler"]

    assert "cannot surge" in notes(own())[f"{SETTINGS}.workload"]
    assert f"{SETTINGS}.workload" not in notes(own(as_deployment))
    assert plain["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert workers["strategy"]["rollingUpdate"] == {"maxSurge": 2, "maxUnavailable": 0}
    assert scaler["spec"]["scaleTargetRef"]["kind"] == "Deployment"


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        (None, {"emptyDir": {}}),
        ({"claim": "models"}, {"persistentVolumeClaim": {"claimName": "models"}}),
        ({"hostPath": "/mnt/models"}, {"hostPath": {"path": "/mnt/models", "type": "DirectoryOrCreate"}}),
    ],
)
def test_downloaded_models_are_kept_where_the_spec_says(cache, volume, own, notes, objects):
    changes = {f"{SETTINGS}.modelCache": cache} if cache else {}
    volumes = template(objects(changes), "StatefulSet", "demo-worker")["spec"]["volumes"]

    assert {"name": "models", **volume} in volumes
    assert (f"{SETTINGS}.modelCache" in notes(own(changes))) == (cache is None)


@pytest.mark.parametrize("peers", [None, [], [{"ipBlock": {"cidr": "10.0.0.0/8"}}]])
def test_who_may_read_metrics_is_configurable(peers, objects):
    found = objects({f"{SETTINGS}.metricsFrom": peers} if peers is not None else {})
    allowed = [
        peer
        for each in found
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] in ("demo-worker", "demo-lmcache")
        for rule in each["spec"]["ingress"]
        for peer in rule["from"]
    ]

    prometheus = {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
    assert ({"namespaceSelector": {}, "podSelector": prometheus} in allowed) == (peers is None)
    assert all(peer in allowed for peer in peers or [])


def test_a_classic_workers_first_tier_is_divided_among_its_ranks(objects):
    found = objects({"x-kvroute.lmcache.mode": "classic", "x-kvroute.gpusPerWorker": 4})
    (worker,) = template(found, "StatefulSet", "demo-worker")["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in worker["env"]}

    assert values["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "5"


@pytest.mark.parametrize(
    ("changes", "has_note"),
    [
        ({}, True),
        ({"x-kvroute.l2.sizeGb": 20.0}, True),
        ({"x-kvroute.l2.sizeGb": 40.0}, False),
        ({"x-kvroute.l2.storePolicy": "skip_l1"}, False),
        ({"spec.kvCacheSpec.enableL1Cache": False}, False),
        ({"spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": "redis://cache:6379"}, False),
    ],
)
def test_a_second_tier_that_is_not_larger_than_the_first_is_noted(changes, has_note, own, notes):
    text = notes(own(changes), "compose").get("x-kvroute.l2.sizeGb", "")

    assert ("make it larger" in text) == has_note


SCALING = "x-kvroute.scaling"
DEPLOYMENT = {"x-kvroute.kubernetes.workload": "Deployment", f"{SCALING}.deletionCost": True}


@pytest.mark.parametrize(
    ("change", "place", "text"),
    [
        ({f"{SCALING}.by": "workersNeeded"}, f"{SCALING}.by", "needs spec.autoScalingSpec"),
        (
            {
                f"{SCALING}.by": "workersNeeded",
                "spec.autoScalingSpec": {
                    "prometheusTrigger": {"serverAddress": "http://p", "query": "up", "targetValue": 1}
                },
            },
            f"{SCALING}.by",
            "prometheusAddress",
        ),
        (
            {
                f"{SCALING}": {"by": "workersNeeded", "prometheusAddress": "http://p"},
                "spec.autoScalingSpec": {"minReplicaCount": 0},
            },
            "spec.autoScalingSpec.minReplicaCount",
            "nothing would start the first worker",
        ),
        ({f"{SCALING}.prometheusAddress": "http://p"}, f"{SCALING}.prometheusAddress", "by: workersNeeded"),
        ({f"{SCALING}.prometheusAddress": "p:9090"}, f"{SCALING}.prometheusAddress", ""),
        ({f"{SCALING}.deletionCost": True}, f"{SCALING}.deletionCost", "workload: Deployment"),
        (
            DEPLOYMENT | {"spec.intelligentRoutingSpec.routingStrategy": "session"},
            f"{SCALING}.deletionCost",
            "prefixaware or kvaware",
        ),
        (
            DEPLOYMENT | {"spec.intelligentRoutingSpec.enabled": False},
            f"{SCALING}.deletionCost",
            "prefixaware or kvaware",
        ),
        (DEPLOYMENT | {"x-kvroute.gateway.replicas": 2}, f"{SCALING}.deletionCost", "needs one gateway"),
        (
            DEPLOYMENT | {"spec.intelligentRoutingSpec.autoScalingSpec": {}},
            f"{SCALING}.deletionCost",
            "needs one gateway",
        ),
    ],
)
def test_a_wrong_combination_of_scaling_is_refused_with_its_path(change, place, text, own, read):
    reading = read(own(change))

    assert reading.document is None
    assert text in {dotted(each.path): each.text for each in reading.wrong}[place]


def test_needed_workers_without_a_scraped_gateway_are_noted(own, read):
    changes = {f"{SCALING}.by": "workersNeeded", "spec.autoScalingSpec": {}, "spec.metrics.enabled": False}

    reading = read(own(changes))

    (finding,) = [each for each in reading.findings if dotted(each.path) == f"{SCALING}.by"]
    assert finding.verdict is FieldVerdict.NOTED
    assert "let Prometheus read" in finding.text
