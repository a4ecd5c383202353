"""Manifests of 20 specs: valid in nine releases of Kubernetes, and every pod on a node where it must be."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.manifests import RELEASES, check

from kvroute.deploy.render.kubernetes import kubernetes_objects

ROOT = Path(__file__).parents[3]
L2 = "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend"
TEMPLATE = "x-kvroute.kubernetes.podTemplate"
GPU_NODES = {"gpu-a", "gpu-b", "gpu-c", "gpu-d"}
POOL = GPU_NODES - {"gpu-d"}
CPU_NODES = {"cpu-a", "cpu-b", "cpu-c"}
PRIVATE = {"tolerations": [{"key": "team", "value": "research", "effect": "NoSchedule"}]}
SPREAD = [
    {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "worker"}},
    }
]
ONE_PER_NODE = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "worker"}},
            }
        ]
    }
}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def zone(name: str) -> dict[str, Any]:
    one = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": [name]}
    return {"nodeSelectorTerms": [{"matchExpressions": [one]}]}


SPECS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    # name: (kind, changes, the nodes where workers and their cache servers may be)
    "redis": ("own", {}, GPU_NODES),
    "valkey": ("own", {L2: "valkey"}, GPU_NODES),
    "tierd": ("own", {L2: "tieredstorage"}, GPU_NODES),
    "files": ("own", {L2: "fs", "x-kvroute.l2.fs": {"claim": "cache"}}, GPU_NODES),
    "mooncake": ("own", {L2: "mooncake"}, GPU_NODES),
    "a server per worker": ("own", {"x-kvroute.lmcache.servers": "per-worker"}, GPU_NODES),
    "classic": ("own", {"x-kvroute.lmcache.mode": "classic"}, GPU_NODES),
    "no cache": ("own", {"spec.kvCacheSpec": None}, GPU_NODES),
    "kvaware": ("own", {"spec.intelligentRoutingSpec.routingStrategy": "kvaware"}, GPU_NODES),
    "whole nodes": ("own", {"x-kvroute.gpusPerWorker": 8, "spec.replicas": 4}, GPU_NODES),
    "simulated": ("own", {"x-kvroute.engine": "sim"}, CPU_NODES),
    "engines on CPUs": ("own", {"x-kvroute.device": "cpu", "spec.model": "small"}, CPU_NODES),
    "a pool": ("own", {TEMPLATE: {"spec": {"nodeSelector": {"pool": "llm"}}}}, POOL),
    "a pool of tainted nodes": (
        "own",
        {TEMPLATE: {"spec": {"nodeSelector": {"pool": "llm"}, **PRIVATE}}},
        POOL | {"gpu-research"},
    ),
    "a zone": (
        "own",
        {"spec.nodeAffinity": {REQUIRED: zone("b")}, L2: "tieredstorage"},
        {"gpu-c", "gpu-d"},
    ),
    "a zone by overlay": (
        "own",
        {TEMPLATE: {"spec": {"affinity": {"nodeAffinity": {REQUIRED: zone("b")}}}}, L2: "tieredstorage"},
        {"gpu-c", "gpu-d"},
    ),
    "one per node": (
        "own",
        {TEMPLATE: {"spec": {"affinity": ONE_PER_NODE}}, "spec.replicas": 4},
        GPU_NODES,
    ),
    "spread": (
        "own",
        {
            TEMPLATE: {"spec": {"topologySpreadConstraints": SPREAD}},
            "spec.replicas": 6,
            "x-kvroute.kubernetes.workload": "Deployment",
            "x-kvroute.kubernetes.maxSurge": 1,
            "x-kvroute.kubernetes.modelCache.hostPath": "/mnt/models",
        },
        GPU_NODES,
    ),
    "HyperPod": (
        "hyperpod",
        {"spec.instanceType": "ml.p5.48xlarge", "x-kvroute.platform": "hyperpod", "spec.replicas": 3},
        GPU_NODES,
    ),
    "HyperPod with all of an overlay": (
        "hyperpod",
        {
            "spec.kvCacheSpec": {"enableL1Cache": True, "enableL2Cache": True},
            L2: "tieredstorage",
            "spec.autoScalingSpec": {"maxReplicaCount": 5},
            TEMPLATE: {
                "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},
                "spec": {
                    "nodeSelector": {"pool": "llm"},
                    "runtimeClassName": "nvidia",
                    "priorityClassName": "inference",
                    "imagePullSecrets": [{"name": "registry"}],
                    "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
                    "containers": [{"name": "worker", "securityContext": {"privileged": False}}],
                },
            },
            "x-kvroute.kubernetes.servicePodTemplate": {"spec": {"priorityClassName": "services"}},
            "x-kvroute.kubernetes.metricsFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        },
        POOL,
    ),
}
BESIDE_WORKERS = ("worker", "lmcache", "tierd")


@pytest.fixture(scope="module")
def place_pods() -> ModuleType:
    spec = importlib.util.spec_from_file_location("place_pods", ROOT / "scripts" / "place_pods.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look the module up by its name.
    sys.modules["place_pods"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rendered(own, hyperpod, plan):
    def render(name: str) -> list[dict[str, Any]]:
        kind, changes, _ = SPECS[name]
        made = plan({"own": own, "hyperpod": hyperpod}[kind](changes))
        return [each for file in kubernetes_objects(made).values() for each in file]

    return render


@pytest.fixture(scope="module")
def checked() -> set[str]:
    """The objects that are known to be valid. Most specs have some in common."""
    return set()


@pytest.mark.parametrize("name", SPECS)
def test_manifests_are_valid_from_kubernetes_1_29_to_1_37(name, rendered, checked):
    objects = {json.dumps(each, sort_keys=True): each for each in rendered(name)}

    for text in objects.keys() - checked:
        for release in RELEASES:
            check(objects[text], release)
        checked.add(text)


@pytest.mark.parametrize("name", SPECS)
def test_every_pod_is_where_it_must_be_and_none_where_it_must_not(name, rendered, place_pods):
    objects = rendered(name)
    cluster = place_pods.read_cluster((ROOT / "tests" / "data" / "cluster.yaml").read_text())
    nodes = SPECS[name][2]

    placements = place_pods.place(objects, cluster)

    assert [str(each) for each in placements if each.node is None] == []
    found: dict[str, list[str]] = {}
    for each in placements:
        found.setdefault(each.pod.labels["app.kubernetes.io/component"], []).append(each.node)
    for component, used in found.items():
        assert set(used) <= (nodes if component in BESIDE_WORKERS else CPU_NODES), component
    # A cache server runs on every node that a worker can get, once.
    daemons = {each["metadata"]["name"].split("-")[1] for each in objects if each["kind"] == "DaemonSet"}
    for component in daemons:
        assert sorted(found[component]) == sorted(nodes)
    if name == "one per node":
        assert sorted(found["worker"]) == sorted(nodes)
    if name == "spread":
        zones = [node in ("gpu-c", "gpu-d") for node in found["worker"]]
        assert zones.count(True) == 3


def test_there_are_20_specs_and_9_releases():
    assert (len(SPECS), len(RELEASES)) == (20, 9)


def test_a_pod_that_fits_nowhere_has_the_reason_of_each_node(own, plan, place_pods):
    made = plan(own({"x-kvroute.gpusPerWorker": 16, "spec.replicas": 1}))
    cluster = place_pods.read_cluster((ROOT / "tests" / "data" / "cluster.yaml").read_text())

    placements = place_pods.place(kubernetes_objects(made)["workers.yaml"], cluster)

    (worker,) = placements
    assert worker.node is None
    assert worker.reasons == {
        "insufficient nvidia.com/gpu": 4,
        "node(s) had the untolerated taint team": 1,
        "node(s) didn't match the node affinity": 5,
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        # Without the rules that the renderer adds, the script shows what was wrong.
        (("tolerations",), "lmcache is on no node with GPUs"),
        (("affinity",), "lmcache is on a node without GPUs"),
    ],
)
def test_the_script_notices_cache_servers_on_wrong_nodes(change, problem, own, plan, place_pods):
    objects = kubernetes_objects(plan(own()))["lmcache.yaml"]
    cluster = place_pods.read_cluster((ROOT / "tests" / "data" / "cluster.yaml").read_text())
    for key in change:
        del objects[0]["spec"]["template"]["spec"][key]

    used = {each.node for each in place_pods.place(objects, cluster)}

    assert (not used) if "no node with" in problem else bool(used & CPU_NODES)


def test_the_command_prints_each_pods_node(own, plan, place_pods, tmp_path, monkeypatch, capsys):
    (tmp_path / "all.json.yaml").write_text(
        "".join(f"---\n{json.dumps(each)}\n" for each in kubernetes_objects(plan(own()))["gateway.yaml"])
    )
    monkeypatch.setattr(sys, "argv", ["place", str(tmp_path), str(ROOT / "tests/data/cluster.yaml")])

    assert place_pods.main() == 0
    assert capsys.readouterr().out == "demo-gateway-0: cpu-a\n"
