"""Renders Kubernetes manifests: one file for each part of the endpoint.

Here are the gateway's objects, or those of the endpoint pickers, and those for autoscaling and monitoring.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvroute.deploy.render.config import (
    ADMIN_KEY,
    L2_PASSWORD_FILE,
    SECRETS,
    admin_key_secret,
    config_text,
    gateway_config,
    without_secrets,
)
from kvroute.deploy.render.envoy import (
    INFERENCE_API,
    LEAST_PICKERS,
    GatewayRef,
    data_plane,
    pickers_config,
    route_manifests,
    shares_own_redis,
)
from kvroute.deploy.render.gateway_caches import L2_PASSWORD_OPTION, l2_password
from kvroute.deploy.render.manifest import (
    GATEWAY,
    LMCACHE,
    LOCKED_DOWN,
    SHARING,
    SHARING_KEY,
    SHARING_PASSWORD,
    WORKER,
    Manifest,
    as_yaml,
    cache_manifests,
    disruption_budget,
    has_sidecar,
    http_get,
    manifest,
    matching,
    network_manifests,
    pod_template,
    run_as,
    selector,
    service_port,
    sharing_manifests,
    tier_manifests,
)
from kvroute.deploy.render.manifest_workers import worker_manifests, workload_name
from kvroute.deploy.render.monitoring import ALL, alert_rules, dashboard_json
from kvroute.deploy.render.plan import EndpointPlan, gateway_stop_s
from kvroute.deploy.render.reach import report_ports
from kvroute.deploy.render.site import DeploymentSite, kubernetes_site
from kvroute.deploy.spec.worker import AutoScaling, CloudWatchTrigger, PrometheusTrigger

CPU_USE_PERCENT = 70


# --- scaling ----------------------------------------------------------------------------------------------


def scaling_manifests(plan: EndpointPlan, *, is_picker: bool = False) -> Iterator[Manifest]:
    """Autoscalers of workers and gateway: KEDA's if there are triggers, else an HPA.

    The workers' can follow `kvroute_workers_needed`: as one of KEDA's triggers, or as an external metric. Of
    pickers there are `LEAST_PICKERS` at least.
    """
    routing = plan.spec.intelligent_routing_spec
    workload = plan.extension.kubernetes.workload
    scaled = [
        (
            WORKER,
            workload,
            workload_name(role_plan),
            plan.spec.auto_scaling_spec if role_plan.group is None else role_plan.group.scaling,
        )
        for role_plan in plan.by_role
    ]
    scaled.append(
        (GATEWAY, "Deployment", f"{plan.name}-gateway", routing.auto_scaling_spec if routing else None)
    )
    for component, kind, target, scaling in scaled:
        if scaling is None:
            continue
        name, reference = target, {"apiVersion": "apps/v1", "kind": kind, "name": target}
        triggers = [_prometheus(trigger) for trigger in scaling.prometheus()]
        triggers += [_cloud_watch(trigger, plan.region or "") for trigger in scaling.cloud_watch()]
        least = LEAST_PICKERS if is_picker and component == GATEWAY else 0
        worker_scaling = plan.extension.scaling if component == WORKER else None
        by_need = worker_scaling is not None and worker_scaling.by == "workersNeeded"
        if worker_scaling is not None and worker_scaling.prometheus_address is not None:
            triggers.append(_needed_trigger(plan, worker_scaling.prometheus_address))
        if triggers:
            spec = _scaled_object(scaling, reference, triggers, least)
            yield manifest("keda.sh/v1alpha1", "ScaledObject", plan, name, component, spec=spec)
        else:
            metric = _needed_metric(plan) if by_need else _CPU_METRIC
            spec = _autoscaler(scaling, reference, metric, least)
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


def _autoscaler(
    scaling: AutoScaling, reference: dict[str, str], metric: dict[str, Any], least: int
) -> dict[str, Any]:
    return {
        "scaleTargetRef": reference,
        "minReplicas": max(scaling.min_replica_count, least),
        "maxReplicas": max(scaling.max_replica_count, least),
        "metrics": [metric],
        "behavior": _behavior(scaling),
    }


def _scaled_object(
    scaling: AutoScaling, reference: dict[str, str], triggers: list[dict[str, Any]], least: int
) -> dict[str, Any]:
    return {
        "scaleTargetRef": reference,
        "minReplicaCount": max(scaling.min_replica_count, least),
        "maxReplicaCount": max(scaling.max_replica_count, least),
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
        "dimensionName": ";".join(dimension.name for dimension in dimensions),
        "dimensionValue": ";".join(dimension.value for dimension in dimensions),
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
    rules = {"kvroute-alerts.yaml": alert_rules(f"{plan.name}-{GATEWAY}")}
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


USER = 10001
"""The user id in the gateway's image."""


def deployed_config(plan: EndpointPlan, site: DeploymentSite, *, is_picker: bool) -> dict[str, Any]:
    """The configuration of the gateway, or of the endpoint pickers."""
    name = f"{plan.name}-gateway"
    service = f"{name}.{plan.namespace}"
    names = [name, service, f"{service}.svc", f"{service}.svc.cluster.local"]
    config = gateway_config(plan, site, secrets=True, names=names)
    return pickers_config(plan, config) if is_picker else config


def gateway_manifests(
    plan: EndpointPlan, site: DeploymentSite, config: dict[str, Any], *, is_picker: bool
) -> Iterator[Manifest]:
    """The Deployment, Services, configuration and access rights of the gateway, or of the pickers."""
    name = f"{plan.name}-gateway"
    yield manifest("v1", "ServiceAccount", plan, name, GATEWAY, automountServiceAccountToken=True)
    yield manifest(
        "rbac.authorization.k8s.io/v1",
        "Role",
        plan,
        name,
        GATEWAY,
        rules=[
            # For discovery of workers by label.
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
            {
                "apiGroups": ["discovery.k8s.io"],
                "resources": ["endpointslices"],
                "verbs": ["get", "list", "watch"],
            },
            *(
                [
                    {
                        "apiGroups": [INFERENCE_API],
                        "resources": ["inferencepools"],
                        "verbs": ["get", "list", "watch"],
                    }
                ]
                if is_picker
                else []
            ),
            *(
                # For the annotation pod-deletion-cost.
                [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
                if plan.extension.scaling.deletion_cost
                else []
            ),
        ],
    )
    yield manifest(
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        plan,
        name,
        GATEWAY,
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        subjects=[{"kind": "ServiceAccount", "name": name, "namespace": plan.namespace}],
    )
    public, _ = without_secrets(config)
    yield manifest("v1", "ConfigMap", plan, name, GATEWAY, data={"kvroute.yaml": config_text(public)})
    spec = _deployment(plan, site, name, config, is_picker=is_picker)
    yield manifest("apps/v1", "Deployment", plan, name, GATEWAY, spec=spec)
    ports = [service_port(port, number) for port, number in _ports(config, is_picker=is_picker).items()]
    if is_picker and not _is_encrypted(config):
        ports[0]["appProtocol"] = "kubernetes.io/h2c"
    service = {"selector": selector(plan, GATEWAY), "ports": ports}
    yield manifest("v1", "Service", plan, name, GATEWAY, spec=service)
    reports = report_ports(plan, site)
    if reports:
        yield manifest(
            "v1",
            "Service",
            plan,
            site.gateway_host,
            GATEWAY,
            spec={
                "selector": selector(plan, GATEWAY),
                "ports": [service_port(port, number) for port, number in reports.items()],
                # With several gateways, all reports of one server must reach the same gateway.
                "sessionAffinity": "ClientIP",
                # Servers must also reach a gateway that is not ready yet.
                "publishNotReadyAddresses": True,
            },
        )
    yield disruption_budget(plan, GATEWAY)


def admin_secret(plan: EndpointPlan, key: str) -> Manifest | None:
    """The Secret with the admin key; None if the user names a Secret or the gateway's settings have a key."""
    # `key` is a new random key; `with_earlier_keys` replaces it when a rendered file exists.
    secret = admin_key_secret(plan)
    if secret is None or secret is plan.extension.gateway.admin_key_secret:
        return None
    return manifest("v1", "Secret", plan, secret.name, GATEWAY, type="Opaque", stringData={secret.key: key})


def _settings_secret(plan: EndpointPlan) -> str:
    return f"{plan.name}-gateway-settings"


def settings_secrets(plan: EndpointPlan, config: Mapping[str, Any]) -> Iterator[Manifest]:
    """The Secret with the keys and passwords of `x-kvroute.gateway.settings`, if there are any."""
    _, keys = without_secrets(config)
    if keys:
        name = _settings_secret(plan)
        yield manifest("v1", "Secret", plan, name, GATEWAY, type="Opaque", stringData=keys)


def sharing_secret(plan: EndpointPlan) -> Manifest:
    """The Secret with the keys of pickers that share through the rendered Redis. New keys each time."""
    keys = {name: secrets.token_urlsafe(32) for name in (SHARING_KEY, SHARING_PASSWORD)}
    name = f"{plan.name}-{SHARING}"
    return manifest("v1", "Secret", plan, name, SHARING, type="Opaque", stringData=keys)


def _ports(config: dict[str, Any], *, is_picker: bool) -> dict[str, int]:
    """Name -> port of the gateway for everybody."""
    port = int(config["server"]["port"])
    return {"grpc": port, "http": int(config["epp"]["http_port"])} if is_picker else {"http": port}


def _is_encrypted(config: dict[str, Any]) -> bool:
    return bool((config["server"].get("tls") or {}).get("cert_file"))


def _probe(config: dict[str, Any], path: str) -> dict[str, Any]:
    """The gateway's probe of `path`: HTTP, HTTPS, or only a connection if clients need a certificate."""
    tls = config["server"].get("tls") or {}
    if tls.get("client_ca_file"):
        return {"tcpSocket": {"port": "http"}}  # kubelet has no client certificate
    probe = http_get(path, "http")
    if _is_encrypted(config):
        probe["httpGet"]["scheme"] = "HTTPS"  # kubelet does not verify the certificate
    return probe


def _deployment(
    plan: EndpointPlan, site: DeploymentSite, name: str, config: dict[str, Any], *, is_picker: bool
) -> dict[str, Any]:
    gateway = plan.extension.gateway
    mounts = [{"name": "config", "mountPath": "/etc/kvroute", "readOnly": True}]
    mounts.append({"name": "tmp", "mountPath": "/tmp"})
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "tmp", "emptyDir": {}},
    ]
    l2_secret = plan.l2_password if l2_password(plan, site) else None
    secret_files: list[dict[str, Any]] = [
        {"secret": {"name": secret.name, "items": [{"key": secret.key, "path": path}]}}
        for secret, path in (
            (gateway.api_keys_secret, "api-keys"),
            (admin_key_secret(plan), ADMIN_KEY),
            (l2_secret, L2_PASSWORD_FILE.rpartition("/")[2]),
        )
        if secret is not None
    ]
    if own_keys := without_secrets(config)[1]:
        items = [{"key": key, "path": key} for key in own_keys]
        secret_files.append({"secret": {"name": _settings_secret(plan), "items": items}})
    if is_picker and shares_own_redis(plan):
        items = [{"key": key, "path": key} for key in (SHARING_KEY, SHARING_PASSWORD)]
        secret_files.append({"secret": {"name": f"{plan.name}-{SHARING}", "items": items}})
    if secret_files:
        volumes.append({"name": "keys", "projected": {"sources": secret_files}})
        mounts.append({"name": "keys", "mountPath": SECRETS, "readOnly": True})
    ports = _ports(config, is_picker=is_picker) | report_ports(plan, site)
    container = {
        "name": "kvroute",
        "image": plan.extension.images.gateway,
        "args": ["epp" if is_picker else "serve", "-c", "/etc/kvroute/kvroute.yaml"],
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        # /health, not /ready: a gateway without a routable worker must not be restarted.
        "startupProbe": _probe(config, "/health") | {"periodSeconds": 1, "failureThreshold": 60},
        "livenessProbe": _probe(config, "/health") | {"periodSeconds": 10, "timeoutSeconds": 3},
        "readinessProbe": _probe(config, "/ready") | {"periodSeconds": 2, "timeoutSeconds": 2},
        "resources": gateway.resources
        or {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": LOCKED_DOWN,
        "volumeMounts": mounts,
    }
    password = site.tier.password if site.tier is not None and l2_password(plan, site) else ""
    if password:
        # The spec contains the password, so LMCache's servers have it in their settings, too.
        container["env"] = [{"name": L2_PASSWORD_OPTION, "value": password}]
    routing = plan.spec.intelligent_routing_spec
    is_autoscaled = routing is not None and routing.auto_scaling_spec is not None
    pod = {
        "serviceAccountName": name,
        # Otherwise a Service named kvroute would set KVROUTE_PORT and other variables in every pod.
        "enableServiceLinks": False,
        # Covers server.shutdown_delay_s, server.drain_timeout_s and closing the remaining connections.
        "terminationGracePeriodSeconds": gateway_stop_s(config["server"]),
        "securityContext": run_as(USER),
        "containers": [container],
        "volumes": volumes,
    }
    return {
        # With an autoscaler, `replicas` would undo its decision at each `kubectl apply`.
        **({} if is_autoscaled else {"replicas": max(gateway.replicas, LEAST_PICKERS if is_picker else 1)}),
        # A gateway ends when its successor is ready.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": matching(plan, GATEWAY),
        "template": pod_template(plan, GATEWAY, pod, on_worker_nodes=False),
    }


SECRET_FILE: Final = "gateway-secret.yaml"
"""The manifest that contains the generated keys."""
SETTINGS_SECRET_FILE: Final = "gateway-settings-secret.yaml"
"""The manifest that contains keys and passwords of the spec."""


def kubernetes_objects(plan: EndpointPlan, door: GatewayRef | None = None) -> dict[str, list[Manifest]]:
    """All objects except the Secrets with generated keys: file name -> objects. No file is empty.

    With `door`, endpoint pickers take the place of the gateway, and the Gateway relays the requests.
    """
    scaling = plan.spec.auto_scaling_spec
    largest_count = max(plan.replicas, scaling.max_replica_count if scaling is not None else 0, 1)
    site, is_picker = kubernetes_site(plan, largest_count), door is not None
    config = deployed_config(plan, site, is_picker=is_picker)
    ports = _ports(config, is_picker=is_picker)
    relay = data_plane(door) if door is not None else []
    files = {
        "workers.yaml": list(worker_manifests(plan, site)),
        "lmcache.yaml": list(cache_manifests(plan, site)),
        "l2.yaml": list(tier_manifests(plan, site)),
        "gateway.yaml": list(gateway_manifests(plan, site, config, is_picker=is_picker)),
        SETTINGS_SECRET_FILE: list(settings_secrets(plan, config)),
        "route.yaml": list(route_manifests(plan, config, door)) if door is not None else [],
        "sharing.yaml": list(sharing_manifests(plan)) if is_picker and shares_own_redis(plan) else [],
        "network.yaml": list(network_manifests(plan, site, list(ports.values()), relay)),
        "scaling.yaml": list(scaling_manifests(plan, is_picker=is_picker)),
        "monitoring.yaml": list(monitoring_manifests(plan)),
    }
    return {name: objects for name, objects in files.items() if objects}


def render_kubernetes(plan: EndpointPlan, door: GatewayRef | None = None) -> dict[str, str]:
    """The manifests: file name -> text. SECRET_FILE has new keys each time; see `with_earlier_keys`."""
    head = f"# {plan.name}, generated by `kvroute render --to kubernetes`: change the spec, not this file.\n"
    files = {name: head + as_yaml(objects) for name, objects in kubernetes_objects(plan, door).items()}
    generated = [admin_secret(plan, secrets.token_urlsafe(32))]
    if door is not None and shares_own_redis(plan):
        generated.append(sharing_secret(plan))
    made = [secret for secret in generated if secret is not None]
    if made:
        files[SECRET_FILE] = head + _SECRET_NOTE + as_yaml(made)
    return files


_SECRET_NOTE: Final = (
    "# The keys are random; a later `render -o` into this folder keeps them. Keep this file out of version\n"
    "# control, or name your own Secret for the admin key in x-kvroute.gateway.adminKeySecret.\n"
)
