"""Kubernetes manifests, one file for each part of the endpoint."""

from __future__ import annotations

import yaml

from kvroute.deploy.render.manifest import Manifest
from kvroute.deploy.render.manifest_cache import cache_manifests, tier_manifests
from kvroute.deploy.render.manifest_gateway import gateway_manifests
from kvroute.deploy.render.manifest_policy import monitoring_manifests, network_manifests, scaling_manifests
from kvroute.deploy.render.manifest_workers import worker_manifests
from kvroute.deploy.render.plan import EndpointPlan
from kvroute.deploy.render.site import kubernetes_site


def kubernetes_objects(plan: EndpointPlan) -> dict[str, list[Manifest]]:
    """Every object by the file that it goes to; no file is empty."""
    scaling = plan.spec.auto_scaling_spec
    most = max(plan.replicas, scaling.max_replica_count if scaling is not None else 0, 1)
    site = kubernetes_site(plan, most)
    files = {
        "workers.yaml": list(worker_manifests(plan, site)),
        "lmcache.yaml": list(cache_manifests(plan, site)),
        "l2.yaml": list(tier_manifests(plan, site)),
        "gateway.yaml": list(gateway_manifests(plan, site)),
        "network.yaml": list(network_manifests(plan, site)),
        "scaling.yaml": list(scaling_manifests(plan)),
        "monitoring.yaml": list(monitoring_manifests(plan)),
    }
    return {name: objects for name, objects in files.items() if objects}


def render_kubernetes(plan: EndpointPlan) -> dict[str, str]:
    """The manifests as text."""
    head = f"# {plan.name}, made by `kvroute render --to kubernetes`: change the spec, not this file.\n"
    return {
        name: head
        + yaml.safe_dump_all(objects, sort_keys=False, allow_unicode=True, width=10**6, explicit_start=True)
        for name, objects in kubernetes_objects(plan).items()
    }
