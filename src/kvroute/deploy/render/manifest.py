"""Common parts of an endpoint's Kubernetes objects, and the objects of the parts around workers and gateways.

The common parts are metadata, labels, variables and ports. The other objects are those of LMCache servers and
second tiers, the Redis of gateways that share, and NetworkPolicies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from kvroute.deploy.l2.backend import L2Tier, Scope, ServiceSpec
from kvroute.deploy.render.gateway_caches import followed_tiers, queries_l2
from kvroute.deploy.render.lmcache import PASSWORD, password_name, server_argv, server_environment
from kvroute.deploy.render.plan import GPU, Cache, EndpointPlan
from kvroute.deploy.render.reach import event_ports, report_ports
from kvroute.deploy.render.site import (
    CLASSIC_WORKER_PORT,
    LMCACHE_HTTP_PORT,
    LMCACHE_PORT,
    DeploymentSite,
    peers_name,
)
from kvroute.deploy.spec.cluster import needs_gpu_label, shares_host_memory, with_overlay
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
    common = {"app.kubernetes.io/name": "kvroute", "app.kubernetes.io/managed-by": "kvroute"}
    if plan.spec.model_version is not None:
        common["app.kubernetes.io/version"] = plan.spec.model_version
    return plan.labels | common | selector(plan, component)


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
    user_affinity = plan.spec.node_affinity
    rules: dict[str, Any] = (
        user_affinity.model_dump(by_alias=True, exclude_none=True) if user_affinity is not None else {}
    )
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
                {**term, "matchExpressions": [*term.get("matchExpressions", []), expression]}
                for term in terms
                for expression in wanted
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
    pod_labels = worker_labels(plan) if component == WORKER else labels(plan, component)
    template = {"metadata": {"labels": pod_labels}, "spec": pod}
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


PROMETHEUS = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}
"""The pods of Prometheus, as its charts and its operator label them."""


def network_manifests(
    plan: EndpointPlan, site: DeploymentSite, ports: Sequence[int], relay: Sequence[Manifest] = ()
) -> Iterator[Manifest]:
    """NetworkPolicies: clients may connect only to the gateway, and each part only to the parts it needs.

    `ports` are the gateway's for everybody. `relay` are the peers that relay requests to workers if the
    gateway does not.
    """
    gateway = {"podSelector": matching(plan, GATEWAY)}
    workers = {"podSelector": matching(plan, WORKER)}
    servers = {"podSelector": matching(plan, LMCACHE)}
    cache, own_scrapers = plan.cache, plan.extension.kubernetes.metrics_from
    scrapers = [PROMETHEUS] if own_scrapers is None else own_scrapers
    is_scraped = plan.metrics.enabled and bool(scrapers)
    worker_rules = [allow([gateway, *relay], plan.port)]
    if plan.has_events:
        worker_rules.append(allow([gateway], *event_ports(plan).values()))
        if cache is not None and cache.classic:
            worker_rules.append(
                allow([gateway], *range(CLASSIC_WORKER_PORT, CLASSIC_WORKER_PORT + max(1, plan.gpus)))
            )
    if is_scraped:
        worker_rules.append(allow(scrapers, plan.port))
        if has_sidecar(plan):
            worker_rules.append(allow(scrapers, LMCACHE_HTTP_PORT))
    if has_sidecar(plan):
        worker_rules.append(allow([gateway], LMCACHE_HTTP_PORT))
    if plan.groups:
        # NIXL's side channel has a fixed port, the transfers themselves have none.
        worker_rules.append({"from": [workers]})
    yield network_policy(plan, WORKER, worker_rules)

    gateway_rules = [allow([], *ports)]
    reports = report_ports(plan, site)
    if reports:
        # LMCache runs in the workers' pods or in its own pods.
        reporters = servers if cache is not None and cache.has_servers and not cache.per_worker else workers
        gateway_rules.append(allow([reporters], *reports.values()))
    yield network_policy(plan, GATEWAY, gateway_rules)

    if cache is not None and cache.has_servers and not cache.per_worker:
        rules = [allow([workers], LMCACHE_PORT), allow([gateway], LMCACHE_HTTP_PORT)]
        if is_scraped:
            rules.append(allow(scrapers, LMCACHE_HTTP_PORT))
        yield network_policy(plan, LMCACHE, rules)
    for service in site.tier.services if site.tier else ():
        # Storage daemons fetch entries from each other.
        peers = [workers, servers, {"podSelector": matching(plan, service.name)}]
        if queries_l2(plan, site) or (service.lists_changes and followed_tiers(plan, site)):
            peers.append(gateway)
        if is_scraped and service.metrics_path is not None:
            peers += scrapers
        yield network_policy(plan, service.name, [allow(peers, service.port)])


def network_policy(plan: EndpointPlan, component: str, ingress: list[dict[str, Any]]) -> Manifest:
    """The only connections that the pods of a component accept."""
    return manifest(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        plan,
        f"{plan.name}-{component}",
        component,
        spec={"podSelector": matching(plan, component), "policyTypes": ["Ingress"], "ingress": ingress},
    )


def allow(peers: list[Manifest], *ports: int) -> dict[str, Any]:
    """A rule that allows `peers` to connect to `ports`. Without peers it allows every address."""
    rule: dict[str, Any] = {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
    return {"from": peers, **rule} if peers else rule


SHARING = "sharing"
"""The component of the Redis through which pickers share what they know."""
SHARING_KEY, SHARING_PASSWORD = "sharing-key", "redis-password"
SHARING_PORT = 6379
_REDIS_USER = 999
"""The user id in Redis' image."""

_SHARING_COMMAND = """\
quoted=$(printf %s "$REDIS_PASSWORD" | sed 's/[\\\\"]/\\\\&/g')
exec redis-server - --save "" --appendonly no <<END
requirepass "$quoted"
END
"""
"""Redis reads the password from a pipe: command lines are seen by every process of a node. In a line of its
configuration the password stands in quotes."""


def sharing_manifests(plan: EndpointPlan) -> Iterator[Manifest]:
    """A Redis for gateways that share what they know: they publish and subscribe, and store nothing."""
    name = f"{plan.name}-{SHARING}"
    password = {"secretKeyRef": {"name": name, "key": SHARING_PASSWORD}}
    container = {
        "name": "redis",
        "image": plan.extension.images.redis,
        "command": ["sh", "-c", _SHARING_COMMAND],
        "env": [{"name": "REDIS_PASSWORD", "valueFrom": password}],
        "ports": [{"name": "redis", "containerPort": SHARING_PORT}],
        "readinessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 2},
        "livenessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 10},
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": LOCKED_DOWN,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": run_as(_REDIS_USER),
        "containers": [container],
        "volumes": [{"name": "data", "emptyDir": {}}],
    }
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": matching(plan, SHARING),
        "template": pod_template(plan, SHARING, pod, on_worker_nodes=False),
    }
    yield manifest("apps/v1", "Deployment", plan, name, SHARING, spec=spec)
    service = {"selector": selector(plan, SHARING), "ports": [service_port("redis", SHARING_PORT)]}
    yield manifest("v1", "Service", plan, name, SHARING, spec=service)
    yield network_policy(plan, SHARING, [allow([{"podSelector": matching(plan, GATEWAY)}], SHARING_PORT)])


def run_as(user: int) -> dict[str, Any]:
    """The security context of a pod that runs as this user."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def with_earlier_keys(text: str, earlier: str) -> str:
    """The new `text` of SECRET_FILE with the keys of the `earlier` text, so that rendering again keeps them.

    Earlier Secrets that `text` lacks stay, for pickers that are rendered again later. Raises ValueError if
    `earlier` is not the text of such a file.
    """
    comments = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#"))
    try:
        earlier_secrets = {secret["metadata"]["name"]: secret for secret in yaml.safe_load_all(earlier)}
        keys = {name: dict(secret["stringData"]) for name, secret in earlier_secrets.items()}
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        earlier_secrets, keys = {}, {}
    if not earlier_secrets:
        raise ValueError("it is not a Secret with stringData")
    made = list(yaml.safe_load_all(text))
    names = {secret["metadata"]["name"] for secret in made}
    merged = [
        secret | {"stringData": secret["stringData"] | keys.get(secret["metadata"]["name"], {})}
        for secret in made
    ]
    return comments + as_yaml(
        merged + [secret for name, secret in earlier_secrets.items() if name not in names]
    )


def as_yaml(objects: list[Manifest]) -> str:
    """One YAML document for each object."""
    text: str = yaml.safe_dump_all(
        objects, sort_keys=False, allow_unicode=True, width=10**6, explicit_start=True
    )
    return text
