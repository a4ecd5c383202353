"""Kubernetes objects for network policies, autoscaling and monitoring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvroute.deploy.render.manifest import (
    GATEWAY,
    LMCACHE,
    WORKER,
    Manifest,
    manifest,
    matching,
)
from kvroute.deploy.render.manifest_cache import has_sidecar
from kvroute.deploy.render.manifest_workers import workload_name
from kvroute.deploy.render.monitoring import ALL, alert_rules, dashboard_json
from kvroute.deploy.render.plan import EndpointPlan
from kvroute.deploy.render.reach import event_ports, followed_tiers, queries_l2, report_ports
from kvroute.deploy.render.site import (
    CLASSIC_WORKER_PORT,
    LMCACHE_HTTP_PORT,
    LMCACHE_PORT,
    DeploymentSite,
)
from kvroute.deploy.spec.worker import AutoScaling, CloudWatchTrigger, PrometheusTrigger

CPU_USE_PERCENT = 70
PROMETHEUS = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}
"""The pods of Prometheus, as its charts and its operator label them."""


# --- network ----------------------------------------------------------------------------------------------


def network_manifests(plan: EndpointPlan, site: DeploymentSite) -> Iterator[Manifest]:
    """NetworkPolicies: clients may connect only to the gateway, and each part only to the parts it needs."""
    gateway = {"podSelector": matching(plan, GATEWAY)}
    workers = {"podSelector": matching(plan, WORKER)}
    servers = {"podSelector": matching(plan, LMCACHE)}
    cache, own_scrapers = plan.cache, plan.extension.kubernetes.metrics_from
    scrapers = [PROMETHEUS] if own_scrapers is None else own_scrapers
    is_scraped = plan.metrics.enabled and bool(scrapers)
    worker_rules = [_allow([gateway], plan.port)]
    if plan.has_events:
        worker_rules.append(_allow([gateway], *event_ports(plan).values()))
        if cache is not None and cache.classic:
            worker_rules.append(
                _allow([gateway], *range(CLASSIC_WORKER_PORT, CLASSIC_WORKER_PORT + max(1, plan.gpus)))
            )
    if is_scraped:
        worker_rules.append(_allow(scrapers, plan.port))
        if has_sidecar(plan):
            worker_rules.append(_allow(scrapers, LMCACHE_HTTP_PORT))
    if has_sidecar(plan):
        worker_rules.append(_allow([gateway], LMCACHE_HTTP_PORT))
    if plan.groups:
        # NIXL's side channel has a fixed port, the transfers themselves have none.
        worker_rules.append({"from": [workers]})
    yield _policy(plan, WORKER, worker_rules)

    gateway_rules = [_allow([], plan.extension.gateway.port)]
    reports = report_ports(plan, site)
    if reports:
        # LMCache runs in the workers' pods or in its own pods.
        reporters = servers if cache is not None and cache.has_servers and not cache.per_worker else workers
        gateway_rules.append(_allow([reporters], *reports.values()))
    yield _policy(plan, GATEWAY, gateway_rules)

    if cache is not None and cache.has_servers and not cache.per_worker:
        rules = [_allow([workers], LMCACHE_PORT), _allow([gateway], LMCACHE_HTTP_PORT)]
        if is_scraped:
            rules.append(_allow(scrapers, LMCACHE_HTTP_PORT))
        yield _policy(plan, LMCACHE, rules)
    for service in site.tier.services if site.tier else ():
        # Storage daemons fetch entries from each other.
        peers = [workers, servers, {"podSelector": matching(plan, service.name)}]
        if queries_l2(plan, site) or (service.lists_changes and followed_tiers(plan, site)):
            peers.append(gateway)
        if is_scraped and service.metrics_path is not None:
            peers += scrapers
        yield _policy(plan, service.name, [_allow(peers, service.port)])


def _policy(plan: EndpointPlan, component: str, ingress: list[dict[str, Any]]) -> Manifest:
    return manifest(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        plan,
        f"{plan.name}-{component}",
        component,
        spec={"podSelector": matching(plan, component), "policyTypes": ["Ingress"], "ingress": ingress},
    )


def _allow(peers: list[dict[str, Any]], *ports: int) -> dict[str, Any]:
    """A rule that allows `peers` to connect to `ports`. Without peers it allows every address."""
    rule: dict[str, Any] = {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
    return {"from": peers, **rule} if peers else rule


# --- scaling ----------------------------------------------------------------------------------------------


def scaling_manifests(plan: EndpointPlan) -> Iterator[Manifest]:
    """Autoscalers of workers and gateway: KEDA's if there are triggers, else an HPA.

    The workers' can follow `kvroute_workers_needed`: as one of KEDA's triggers, or as an external metric.
    """
    routing = plan.spec.intelligent_routing_spec
    workload = plan.extension.kubernetes.workload
    scaled = [
        (
            WORKER,
            workload,
            workload_name(own),
            plan.spec.auto_scaling_spec if own.group is None else own.group.scaling,
        )
        for own in plan.by_role
    ]
    scaled.append(
        (GATEWAY, "Deployment", f"{plan.name}-gateway", routing.auto_scaling_spec if routing else None)
    )
    for component, kind, target, scaling in scaled:
        if scaling is None:
            continue
        name, reference = target, {"apiVersion": "apps/v1", "kind": kind, "name": target}
        triggers = [_prometheus(each) for each in scaling.prometheus()]
        triggers += [_cloud_watch(each, plan.region or "") for each in scaling.cloud_watch()]
        own = plan.extension.scaling if component == WORKER else None
        by_need = own is not None and own.by == "workersNeeded"
        if own is not None and own.prometheus_address is not None:
            triggers.append(_needed_trigger(plan, own.prometheus_address))
        if triggers:
            spec = _scaled_object(scaling, reference, triggers)
            yield manifest("keda.sh/v1alpha1", "ScaledObject", plan, name, component, spec=spec)
        else:
            spec = _autoscaler(scaling, reference, _needed_metric(plan) if by_need else _CPU_METRIC)
            yield manifest("autoscaling/v2", "HorizontalPodAutoscaler", plan, name, component, spec=spec)


def _behavior(scaling: AutoScaling) -> dict[str, Any]:
    return {
        "scaleDown": {"stabilizationWindowSeconds": scaling.scale_down_stabilization_time},
        "scaleUp": {"stabilizationWindowSeconds": scaling.scale_up_stabilization_time},
    }


NEEDED = "kvroute_workers_needed"
_CPU_METRIC = {
    "type": "Resource",
    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": CPU_USE_PERCENT}},
}


def _needed_metric(plan: EndpointPlan) -> dict[str, Any]:
    """The external metric, as prometheus-adapter names it (docs/kubernetes.md)."""
    # By Service, not by model: a model's name may have characters that no label of Kubernetes can have.
    labels = {"service": f"{plan.name}-gateway"}
    return {
        "type": "External",
        "external": {
            "metric": {"name": NEEDED, "selector": {"matchLabels": labels}},
            "target": {"type": "AverageValue", "averageValue": "1"},
        },
    }


def _needed_trigger(plan: EndpointPlan, prometheus_address: str) -> dict[str, Any]:
    labels = f'namespace="{plan.namespace}",service="{plan.name}-gateway"'
    metadata = {
        "serverAddress": prometheus_address,
        "query": f"sum({NEEDED}{{{labels}}})",
        "threshold": "1",
        # By default KEDA reads no data as 0, and would remove workers whenever the gateway is not scraped.
        "ignoreNullValues": "false",
    }
    return {
        "type": "prometheus",
        "name": "workers-needed",
        "metricType": "AverageValue",
        "metadata": metadata,
    }


def _autoscaler(scaling: AutoScaling, reference: dict[str, str], metric: dict[str, Any]) -> dict[str, Any]:
    return {
        "scaleTargetRef": reference,
        "minReplicas": scaling.min_replica_count,
        "maxReplicas": scaling.max_replica_count,
        "metrics": [metric],
        "behavior": _behavior(scaling),
    }


def _scaled_object(
    scaling: AutoScaling, reference: dict[str, str], triggers: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "scaleTargetRef": reference,
        "minReplicaCount": scaling.min_replica_count,
        "maxReplicaCount": scaling.max_replica_count,
        "pollingInterval": scaling.polling_interval,
        "cooldownPeriod": scaling.cooldown_period,
        "initialCooldownPeriod": scaling.initial_cooldown_period,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(scaling)}},
        "triggers": triggers,
    }


METRIC_TYPES = {"Average": "AverageValue", "Value": "Value"}


def _prometheus(trigger: PrometheusTrigger) -> dict[str, Any]:
    metadata = {
        "serverAddress": trigger.server_address,
        "query": trigger.query,
        "threshold": _number(trigger.target_value),
        "activationThreshold": _number(trigger.activation_target_value),
        "namespace": trigger.namespace,
        "customHeaders": trigger.custom_headers,
    }
    return _trigger("prometheus", trigger, metadata)


def _cloud_watch(trigger: CloudWatchTrigger, region: str) -> dict[str, Any]:
    dimensions = trigger.dimensions or []
    metadata = {
        "namespace": trigger.namespace,
        "metricName": trigger.metric_name,
        "dimensionName": ";".join(each.name for each in dimensions),
        "dimensionValue": ";".join(each.value for each in dimensions),
        "metricStat": trigger.metric_stat,
        "metricStatPeriod": str(trigger.metric_collection_period),
        "metricCollectionTime": str(trigger.metric_collection_start_time),
        "targetMetricValue": _number(trigger.target_value),
        "activationTargetMetricValue": _number(trigger.activation_target_value),
        "minMetricValue": _number(trigger.min_value),
        "awsRegion": region,
        "identityOwner": "operator",
    }
    return _trigger("aws-cloudwatch", trigger, metadata)


def _trigger(
    kind: str, trigger: CloudWatchTrigger | PrometheusTrigger, metadata: dict[str, str | None]
) -> dict[str, Any]:
    return {
        "type": kind,
        **({"name": trigger.name} if trigger.name is not None else {}),
        "metricType": METRIC_TYPES[trigger.metric_type],
        "useCachedMetrics": trigger.use_cached_metrics,
        "metadata": {key: value for key, value in metadata.items() if value is not None},
    }


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


# --- metrics ----------------------------------------------------------------------------------------------


def monitoring_manifests(plan: EndpointPlan) -> Iterator[Manifest]:
    """ServiceMonitors of the Prometheus operator, and ConfigMaps with the dashboards and the alert rules.

    Grafana's chart loads the dashboards by their label `grafana_dashboard`. Mount the rules in Prometheus.
    """
    if not plan.metrics.enabled:
        return
    for dashboard in ALL:
        name = dashboard.uid.removeprefix("kvroute-")
        data = {f"{plan.name}-{name}.json": dashboard_json(dashboard, indent=None)}
        board = manifest("v1", "ConfigMap", plan, f"{plan.name}-dashboard-{name}", GATEWAY, data=data)
        board["metadata"]["labels"]["grafana_dashboard"] = "1"
        yield board
    rules = {"kvroute-alerts.yaml": alert_rules()}
    yield manifest("v1", "ConfigMap", plan, f"{plan.name}-alerts", GATEWAY, data=rules)
    yield _monitor(plan, GATEWAY, {"http": "/metrics"})
    sidecar = {"lmcache-http": "/metrics"} if has_sidecar(plan) else {}
    yield _monitor(plan, WORKER, {plan.port_name: plan.scrape_path, **sidecar})
    if plan.cache is not None and plan.cache.has_servers and not plan.cache.per_worker:
        yield _monitor(plan, LMCACHE, {"lmcache-http": "/metrics"})


def _monitor(plan: EndpointPlan, component: str, paths: dict[str, str]) -> Manifest:
    interval = f"{plan.metrics.metrics_scrape_interval_seconds}s"
    return manifest(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        plan,
        f"{plan.name}-{component}",
        component,
        spec={
            "selector": matching(plan, component),
            "endpoints": [{"port": port, "path": path, "interval": interval} for port, path in paths.items()],
        },
    )
