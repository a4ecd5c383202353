"""Common parts of an endpoint's Kubernetes objects: metadata, labels, variables, ports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvroute.deploy.l2.backend import L2Tier
from kvroute.deploy.render.lmcache import PASSWORD
from kvroute.deploy.render.plan import GPU, EndpointPlan
from kvroute.deploy.spec.cluster import needs_gpu_label, with_overlay
from kvroute.deploy.spec.endpoint import INSTANCE_TYPE_LABEL

Manifest = dict[str, Any]

GATEWAY, WORKER, LMCACHE = "gateway", "worker", "lmcache"
LOCKED_DOWN = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


ROLE_LABEL = "kvroute.dev/role"
"""The default of `fleet.kubernetes.role_label`."""
ZONE_LABEL = "topology.kubernetes.io/zone"


def manifest(api: str, kind: str, plan: EndpointPlan, name: str, component: str, **body: Any) -> Manifest:
    """A Kubernetes object named `name` with the endpoint's labels."""
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": plan.namespace,
            "labels": labels(plan, component),
        },
        **body,
    }


def selector(plan: EndpointPlan, component: str) -> dict[str, str]:
    """The labels that select the pods of one component. They never change while an endpoint exists."""
    return {"app.kubernetes.io/instance": plan.name, "app.kubernetes.io/component": component}


def labels(plan: EndpointPlan, component: str) -> dict[str, str]:
    own = {"app.kubernetes.io/name": "kvroute", "app.kubernetes.io/managed-by": "kvroute"}
    if plan.spec.model_version is not None:
        own["app.kubernetes.io/version"] = plan.spec.model_version
    return plan.labels | own | selector(plan, component)


def worker_labels(plan: EndpointPlan) -> dict[str, str]:
    """The labels of worker pods. They also contain the model, for discovery by label."""
    model = re.sub(r"[^A-Za-z0-9_.-]", "-", plan.model.served_name)[:63].strip("-_.")
    return labels(plan, WORKER) | {"kvroute.dev/model": model} | role_label(plan)


def role_label(plan: EndpointPlan) -> dict[str, str]:
    """The label of worker pods that have a role, by which the gateway finds it."""
    return {} if plan.group is None else {ROLE_LABEL: plan.group.role}


def matching(plan: EndpointPlan, component: str) -> dict[str, Any]:
    """The selector of a component's pods; of worker pods, of those with the plan's role."""
    return {"matchLabels": selector(plan, component) | (role_label(plan) if component == WORKER else {})}


def http_get(path: str, port: str | int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": port}}


def variable(name: str, field: str) -> dict[str, Any]:
    """An environment variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def cache_variables(
    plan: EndpointPlan, tier: L2Tier | None, password_variable: str = PASSWORD
) -> list[dict[str, Any]]:
    """The variables to which LMCache's settings refer. They must come before these settings."""
    variables = [
        variable("POD_NAME", "metadata.name"),
        variable("POD_IP", "status.podIP"),
        variable("NODE_NAME", "spec.nodeName"),
    ]
    if tier is not None and tier.needs_node_ip:
        variables.append(variable("NODE_IP", "status.hostIP"))
    secret = plan.l2_password
    if tier is not None and secret is not None:
        reference = {"secretKeyRef": {"name": secret.name, "key": secret.key}}
        variables.append({"name": password_variable, "valueFrom": reference})
    return variables


def plain_variables(environment: dict[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in environment.items()]


def node_affinity(plan: EndpointPlan) -> dict[str, Any] | None:
    """The rules for the nodes of workers and their cache servers; None without rules.

    They are the user's, a rule for the instance types on HyperPod, and the labels of nodes with GPUs.
    """
    own = plan.spec.node_affinity
    rules: dict[str, Any] = own.model_dump(by_alias=True, exclude_none=True) if own is not None else {}
    wanted: list[dict[str, Any]] = []
    if plan.instance_types:
        key, values = INSTANCE_TYPE_LABEL, list(plan.instance_types)
        wanted = [{"key": key, "operator": "In", "values": values}]
    elif needs_gpu_label(plan.spec, plan.extension, classic=plan.cache is not None and plan.cache.classic):
        labels = plan.extension.kubernetes.gpu_node_labels
        wanted = [{"key": label, "operator": "Exists"} for label in labels]
    if wanted:
        key = "requiredDuringSchedulingIgnoredDuringExecution"
        terms: Sequence[dict[str, Any]] = rules.get(key, {}).get("nodeSelectorTerms") or [{}]
        # Of the terms, one must match.
        rules[key] = {
            "nodeSelectorTerms": [
                {**term, "matchExpressions": [*term.get("matchExpressions", []), each]}
                for term in terms
                for each in wanted
            ]
        }
    return {"nodeAffinity": rules} if rules else None


def placement(plan: EndpointPlan) -> dict[str, Any]:
    """The parts of a pod's spec that put it on the nodes of the workers."""
    parts: dict[str, Any] = {}
    affinity = node_affinity(plan)
    if affinity is not None:
        parts["affinity"] = affinity
    if plan.gpus:
        # The usual taint of nodes with GPUs. Kubernetes adds the toleration only to pods that request GPUs.
        parts["tolerations"] = [{"key": GPU, "operator": "Exists"}]
    topology = plan.topology
    nodes = dict(plan.group.node_selector) if plan.group is not None else {}
    if topology is not None and topology.availability_zone is not None:
        nodes[ZONE_LABEL] = topology.availability_zone
    if nodes:
        parts["nodeSelector"] = nodes
    if plan.group is not None and (topology is None or topology.same_az):
        term = {"labelSelector": {"matchLabels": selector(plan, WORKER)}, "topologyKey": ZONE_LABEL}
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        parts["affinity"] = {**parts.get("affinity", {}), "podAffinity": rule}
    return parts


def pod_template(
    plan: EndpointPlan, component: str, pod: dict[str, Any], *, on_worker_nodes: bool
) -> dict[str, Any]:
    """The template of a component's pods with the user's overlay."""
    own = worker_labels(plan) if component == WORKER else labels(plan, component)
    template = {"metadata": {"labels": own}, "spec": pod}
    settings = plan.extension.kubernetes
    overlay = settings.pod_template if on_worker_nodes else settings.service_pod_template
    return with_overlay(template, overlay, is_main=component in (WORKER, GATEWAY))


def disruption_budget(plan: EndpointPlan, component: str) -> Manifest:
    """A PodDisruptionBudget that allows one unavailable pod at a time."""
    return manifest(
        "policy/v1",
        "PodDisruptionBudget",
        plan,
        f"{plan.name}-{component}",
        component,
        spec={"maxUnavailable": 1, "selector": matching(plan, component)},
    )


def service_port(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": name}
