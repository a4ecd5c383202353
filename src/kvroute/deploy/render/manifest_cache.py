"""Kubernetes objects of LMCache servers and second tiers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvroute.deploy.l2.backend import Scope, ServiceSpec
from kvroute.deploy.render.lmcache import PASSWORD, password_name, server_argv, server_environment
from kvroute.deploy.render.manifest import (
    LMCACHE,
    Manifest,
    cache_variables,
    http_get,
    manifest,
    matching,
    placement,
    plain_variables,
    pod_template,
    selector,
    service_port,
)
from kvroute.deploy.render.plan import Cache, EndpointPlan
from kvroute.deploy.render.site import LMCACHE_HTTP_PORT, LMCACHE_PORT, DeploymentSite, peers_name
from kvroute.deploy.spec.cluster import shares_host_memory

OVERHEAD_GB = 4.0
"""Memory of an LMCache server in addition to its first tier."""


def needs_host_ipc(plan: EndpointPlan) -> bool:
    """Whether engine, LMCache and storage daemon share memory across pods."""
    cache = plan.cache
    return cache is not None and shares_host_memory(plan.spec, plan.extension, classic=cache.classic)


def has_sidecar(plan: EndpointPlan) -> bool:
    """Whether each worker's pod has an LMCache server."""
    return plan.cache is not None and plan.cache.has_servers and plan.cache.per_worker


def lmcache_container(plan: EndpointPlan, cache: Cache, site: DeploymentSite) -> dict[str, Any]:
    """The container of an LMCache server, for a worker's pod (as sidecar) or for its own pod."""
    argv = list(server_argv(plan, cache, site.servers[0], site))
    size = plan.extension.l1.size_gb if cache.l1 else plan.extension.l1.staging_gb
    memory = f"{round((size + OVERHEAD_GB) * 1024)}Mi"
    environment = server_environment(plan, site)
    if plan.gpus:
        # The server maps the engines' GPU memory, so it must see their GPUs without reserving them.
        environment["NVIDIA_VISIBLE_DEVICES"] = "all"
    container: dict[str, Any] = {
        "name": LMCACHE,
        "image": plan.extension.images.lmcache or plan.image,
        "command": argv[:2],
        "args": argv[2:],
        "env": [
            *cache_variables(plan, site.tier, password_name(plan, site) or PASSWORD),
            *plain_variables(environment),
        ],
        "ports": [
            {"name": "lmcache", "containerPort": LMCACHE_PORT},
            {"name": "lmcache-http", "containerPort": LMCACHE_HTTP_PORT},
        ],
        "startupProbe": http_get("/healthcheck", "lmcache-http")
        | {"periodSeconds": 2, "failureThreshold": 90},
        "livenessProbe": http_get("/healthcheck", "lmcache-http")
        | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "1", "memory": memory}, "limits": {"memory": memory}},
    }
    mounts = tier_mounts(plan, site)
    if not needs_host_ipc(plan):
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if mounts:
        container["volumeMounts"] = mounts
    return container


def tier_volumes(plan: EndpointPlan, site: DeploymentSite) -> list[dict[str, Any]]:
    """The volumes with the paths of the node, or the claim, that LMCache must see."""
    return [volume for volume, _ in _tier_mounts(plan, site)]


def tier_mounts(plan: EndpointPlan, site: DeploymentSite) -> list[dict[str, Any]]:
    """The container mounts of `tier_volumes`."""
    return [{"name": volume["name"], "mountPath": path} for volume, path in _tier_mounts(plan, site)]


def _tier_mounts(plan: EndpointPlan, site: DeploymentSite) -> Iterator[tuple[dict[str, Any], str]]:
    tier = site.tier
    if tier is None:
        return
    for number, path in enumerate(tier.host_paths):
        name = f"l2-{number}"
        if tier.claim is not None and number == 0:
            yield {"name": name, "persistentVolumeClaim": {"claimName": tier.claim}}, path
        else:
            kind = "File" if path.startswith("/dev/shm/") else "DirectoryOrCreate"
            yield {"name": name, "hostPath": {"path": path, "type": kind}}, path


def cache_manifests(plan: EndpointPlan, site: DeploymentSite) -> Iterator[Manifest]:
    """A DaemonSet and a Service for one LMCache server per node; nothing if each worker has its own."""
    cache = plan.cache
    if cache is None or not cache.has_servers or cache.per_worker:
        return
    name = f"{plan.name}-lmcache"
    volumes = tier_volumes(plan, site)
    pod = {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "hostIPC": True,
        **placement(plan),
        "containers": [lmcache_container(plan, cache, site)],
        **({"volumes": volumes} if volumes else {}),
    }
    yield manifest(
        "apps/v1",
        "DaemonSet",
        plan,
        name,
        LMCACHE,
        spec={
            "selector": matching(plan, LMCACHE),
            "template": pod_template(plan, LMCACHE, pod, on_worker_nodes=True),
        },
    )
    yield manifest(
        "v1",
        "Service",
        plan,
        name,
        LMCACHE,
        spec={
            # A worker must reach the server of its own node, because they share memory.
            "internalTrafficPolicy": "Local",
            "selector": selector(plan, LMCACHE),
            "ports": [
                service_port("lmcache", LMCACHE_PORT),
                service_port("lmcache-http", LMCACHE_HTTP_PORT),
            ],
        },
    )


def tier_manifests(plan: EndpointPlan, site: DeploymentSite) -> Iterator[Manifest]:
    """The workloads and Services of the second tier."""
    for service in site.tier.services if site.tier else ():
        yield _tier_workload(plan, service)
        yield manifest(
            "v1",
            "Service",
            plan,
            f"{plan.name}-{service.name}",
            service.name,
            spec={
                **({"internalTrafficPolicy": "Local"} if service.scope is Scope.PER_NODE else {}),
                "selector": selector(plan, service.name),
                "ports": [service_port("tier", service.port)],
            },
        )
        if service.peers_flag:
            yield manifest(
                "v1",
                "Service",
                plan,
                peers_name(plan, service),
                service.name,
                spec={
                    # Headless: the name resolves to the address of every node's instance.
                    "clusterIP": "None",
                    "selector": selector(plan, service.name),
                    "ports": [service_port("tier", service.port)],
                },
            )


def _tier_workload(plan: EndpointPlan, service: ServiceSpec) -> Manifest:
    command = list(service.command)
    if service.peers_flag:
        command += [service.peers_flag, f"{peers_name(plan, service)}:{service.port}"]
    memory = f"{round(service.memory_gb * 1024 * 1.25 + 256)}Mi"
    per_node = service.scope is Scope.PER_NODE
    container = {
        "name": service.name,
        "image": service.image,
        "command": command[:1],
        "args": command[1:],
        "ports": [{"name": "tier", "containerPort": service.port}],
        "startupProbe": {"tcpSocket": {"port": "tier"}, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {"exec": {"command": list(service.probe)}, "periodSeconds": 5, "timeoutSeconds": 5},
        "resources": {"requests": {"cpu": "500m", "memory": memory}, "limits": {"memory": memory}},
    }
    pod = {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        **({"hostIPC": True} if service.shares_memory else {}),
        **(placement(plan) if per_node else {}),
        "containers": [container],
    }
    template = pod_template(plan, service.name, pod, on_worker_nodes=per_node)
    spec: dict[str, Any] = {"selector": matching(plan, service.name), "template": template}
    if per_node:
        return manifest("apps/v1", "DaemonSet", plan, f"{plan.name}-{service.name}", service.name, spec=spec)
    # Two instances at the same time would be two caches.
    spec |= {"replicas": 1, "strategy": {"type": "Recreate"}}
    return manifest("apps/v1", "Deployment", plan, f"{plan.name}-{service.name}", service.name, spec=spec)
