"""Place the pods of rendered manifests on the nodes of a described cluster, as Kubernetes' scheduler would.

    kvroute render -f SPEC --to kubernetes -o MANIFESTS
    python scripts/place_pods.py MANIFESTS tests/data/cluster.yaml

Prints one line per pod: its node, or why no node takes it. Exit code 1: a pod has no node. The rules are
those of the filters of kube-scheduler and of the DaemonSet controller (Kubernetes 1.37): node name, node
selector, required node affinity, taints, requested resources, required pod affinity and anti-affinity,
topology spread. Scores are not: of the nodes left, the preferred and then the emptiest one takes the pod.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

Object = Mapping[str, Any]
RUN_PODS = ("StatefulSet", "Deployment", "DaemonSet")
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
SUFFIXES = {"m": Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SUFFIXES |= {f"{letter}i": 1024 ** (power + 1) for power, letter in enumerate("KMGT")}
OF_DAEMONS = (
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/unreachable",
)
"""Taints that the DaemonSet controller lets its pods tolerate."""


@dataclass
class Node:
    """A node. Mutable: `pods` grows."""

    name: str
    labels: dict[str, str]
    taints: list[dict[str, str]]
    allocatable: dict[str, Any]
    pods: list[Pod] = field(default_factory=list)

    def free(self, resource: str) -> Fraction:
        used = sum((pod.requests.get(resource, Fraction()) for pod in self.pods), Fraction())
        return amount(self.allocatable.get(resource, 0)) - used


@dataclass(frozen=True)
class Pod:
    """A pod of a workload."""

    name: str
    kind: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def requests(self) -> dict[str, Fraction]:
        """What the pod requests: the larger of its init containers one by one and its containers together."""
        running: Counter[str] = Counter()
        largest: dict[str, Fraction] = {}
        for container in self.spec.get("initContainers", []):
            own = requests_of(container)
            is_sidecar = container.get("restartPolicy") == "Always"
            for resource, value in own.items():
                largest[resource] = max(largest.get(resource, Fraction()), running[resource] + value)
            if is_sidecar:
                running.update(own)
        for container in self.spec["containers"]:
            running.update(requests_of(container))
        names = running.keys() | largest.keys()
        return {name: max(Fraction(running[name]), largest.get(name, Fraction())) for name in names}


@dataclass(frozen=True)
class Placement:
    """The result for one pod. `node` is None if no node takes the pod; `reasons` counts the nodes."""

    pod: Pod
    node: str | None
    reasons: dict[str, int]

    def __str__(self) -> str:
        if self.node is not None:
            return f"{self.pod.name}: {self.node}"
        return f"{self.pod.name}: none; " + ", ".join(f"{n} {text}" for text, n in self.reasons.items())


def amount(quantity: object) -> Fraction:
    """A Kubernetes quantity as a number: 500m is 1/2, 1Ki is 1024."""
    text = str(quantity)
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if text.endswith(suffix):
            return Fraction(text.removesuffix(suffix)) * SUFFIXES[suffix]
    return Fraction(text)


def requests_of(container: Object) -> dict[str, Fraction]:
    """The requests of a container; a limit without a request is one."""
    resources = container.get("resources", {})
    both = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: amount(value) for name, value in both.items()}


def place(objects: Iterable[Object], nodes: Sequence[Node]) -> list[Placement]:
    """Place the pods of `objects` on `nodes`, DaemonSets first, in the order of the manifests.

    A DaemonSet has a pod on each node whose labels and taints allow it; other workloads have `replicas` pods,
    with an autoscaler its largest number.
    """
    objects = list(objects)
    most = {
        each["spec"]["scaleTargetRef"]["name"]: each["spec"].get("maxReplicas")
        or each["spec"].get("maxReplicaCount")
        for each in objects
        if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    }
    workloads = [each for each in objects if each["kind"] in RUN_PODS]
    placed: list[Placement] = []
    for each in sorted(workloads, key=lambda one: one["kind"] != "DaemonSet"):
        name, template = each["metadata"]["name"], each["spec"]["template"]

        def pod(suffix: object, each: Object = each, name: str = name, template: Object = template) -> Pod:
            return Pod(
                f"{name}-{suffix}", each["kind"], template["metadata"].get("labels", {}), template["spec"]
            )

        if each["kind"] == "DaemonSet":
            wanted = [node for node in nodes if not why_not(pod(node.name), node, nodes, daemon=True)]
            placed += [settle(pod(node.name), [node], nodes) for node in wanted]
        else:
            count = most.get(name) or each["spec"].get("replicas", 1)
            placed += [settle(pod(number), nodes, nodes) for number in range(count)]
    return placed


def settle(pod: Pod, candidates: Sequence[Node], nodes: Sequence[Node]) -> Placement:
    """Put one pod on the best of `candidates`."""
    reasons = {node.name: why_not(pod, node, nodes) for node in candidates}
    able = [node for node in candidates if not reasons[node.name]]
    if not able:
        return Placement(pod, None, dict(Counter(reasons.values())))
    best = max(able, key=lambda node: (preference(pod, node), -len(node.pods)))
    best.pods.append(pod)
    return Placement(pod, best.name, {})


def why_not(pod: Pod, node: Node, nodes: Sequence[Node], *, daemon: bool = False) -> str:
    """Why `node` cannot take `pod`; empty if it can. `daemon`: only what the DaemonSet controller checks."""
    spec = pod.spec
    if spec.get("nodeName") not in (None, node.name):
        return "node(s) with another name"
    if not spec.get("nodeSelector", {}).items() <= node.labels.items():
        return "node(s) didn't match the node selector"
    terms = spec.get("affinity", {}).get("nodeAffinity", {}).get(REQUIRED, {}).get("nodeSelectorTerms")
    if terms is not None and not any(matches_term(term, node) for term in terms):
        return "node(s) didn't match the node affinity"
    for taint in node.taints:
        if taint["effect"] != "PreferNoSchedule" and not tolerates(pod, taint):
            return f"node(s) had the untolerated taint {taint['key']}"
    if daemon:
        return ""
    for resource, wanted in pod.requests.items():
        if wanted > node.free(resource):
            return f"insufficient {resource}"
    return next(topology_problems(pod, node, nodes), "")


def tolerates(pod: Pod, taint: Object) -> bool:
    if pod.kind == "DaemonSet" and taint["key"] in OF_DAEMONS:
        return True
    for each in pod.spec.get("tolerations", []):
        if each.get("effect") not in (None, "", taint["effect"]):
            continue
        if each.get("operator", "Equal") == "Exists":
            if each.get("key") in (None, "", taint["key"]):
                return True
        elif each.get("key") == taint["key"] and each.get("value", "") == taint.get("value", ""):
            return True
    return False


def matches_term(term: Object, node: Node) -> bool:
    """Whether a node selector term matches: all its expressions do. An empty term matches nothing."""
    labels, fields = term.get("matchExpressions", []), term.get("matchFields", [])
    return bool(labels or fields) and (
        all(matches(each, node.labels) for each in labels)
        and all(matches(each, {"metadata.name": node.name}) for each in fields)
    )


def matches(expression: Object, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values", [])
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case "Gt":
            return key in labels and int(labels[key]) > int(values[0])
        case "Lt":
            return key in labels and int(labels[key]) < int(values[0])
    raise ValueError(f"unknown operator {expression['operator']!r}")


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    if selector is None:
        return False
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items() and all(
        matches(each, labels) for each in selector.get("matchExpressions", [])
    )


def topology_problems(pod: Pod, node: Node, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield the rules about other pods that `node` breaks."""
    affinity = pod.spec.get("affinity", {})
    for rule in affinity.get("podAffinity", {}).get(REQUIRED, []):
        near = sum(selects(rule.get("labelSelector"), each.labels) for each in neighbours(rule, node, nodes))
        anywhere = any(selects(rule.get("labelSelector"), each.labels) for one in nodes for each in one.pods)
        # The first pod of a group that wants to be together may go anywhere.
        if not near and (anywhere or not selects(rule.get("labelSelector"), pod.labels)):
            yield "node(s) didn't match pod affinity rules"
    for rule in affinity.get("podAntiAffinity", {}).get(REQUIRED, []):
        if any(selects(rule.get("labelSelector"), each.labels) for each in neighbours(rule, node, nodes)):
            yield "node(s) didn't match pod anti-affinity rules"
    for rule in pod.spec.get("topologySpreadConstraints", []):
        if rule.get("whenUnsatisfiable", "DoNotSchedule") != "DoNotSchedule":
            continue
        counts: Counter[str] = Counter()
        for each in nodes:
            if rule["topologyKey"] in each.labels and not why_not_labels(pod, each):
                here = sum(selects(rule.get("labelSelector"), one.labels) for one in each.pods)
                counts[each.labels[rule["topologyKey"]]] += here
        domain = node.labels.get(rule["topologyKey"])
        if domain is None or counts[domain] + 1 - min(counts.values()) > rule["maxSkew"]:
            yield "node(s) didn't match pod topology spread constraints"


def why_not_labels(pod: Pod, node: Node) -> bool:
    """Whether labels exclude `node`: topology spread counts only nodes that they do not exclude."""
    bare = Node(node.name, node.labels, [], {})
    spec = {key: value for key, value in pod.spec.items() if key != "topologySpreadConstraints"}
    return bool(why_not(Pod(pod.name, pod.kind, pod.labels, spec), bare, [], daemon=True))


def neighbours(rule: Object, node: Node, nodes: Sequence[Node]) -> list[Pod]:
    """The pods in the same part of the cluster."""
    domain = node.labels.get(rule["topologyKey"])
    same = [each for each in nodes if domain is not None and each.labels.get(rule["topologyKey"]) == domain]
    return [pod for each in same for pod in each.pods]


def preference(pod: Pod, node: Node) -> int:
    preferred = pod.spec.get("affinity", {}).get("nodeAffinity", {}).get(PREFERRED, [])
    return sum(each["weight"] for each in preferred if matches_term(each["preference"], node))


def read_cluster(text: str) -> list[Node]:
    """The nodes of a YAML file with `nodes`, each with name, labels, taints and allocatable resources."""
    return [
        Node(
            each["name"],
            {"kubernetes.io/hostname": each["name"], **each.get("labels", {})},
            each.get("taints", []),
            each["allocatable"],
        )
        for each in yaml.safe_load(text)["nodes"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "manifests", type=Path, help="a folder that `kvroute render --to kubernetes -o` wrote"
    )
    parser.add_argument("cluster", type=Path, help="the nodes")
    options = parser.parse_args()
    objects = [
        each
        for file in sorted(options.manifests.glob("*.yaml"))
        for each in yaml.safe_load_all(file.read_text(encoding="utf-8"))
        if each
    ]
    placements = place(objects, read_cluster(options.cluster.read_text(encoding="utf-8")))
    for each in placements:
        print(each)
    return int(any(each.node is None for each in placements))


if __name__ == "__main__":
    sys.exit(main())
