"""Renders Kubernetes manifests: one file for each part of the endpoint, and the gateway's objects."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, Final

import yaml

from kvroute.deploy.render.config import (
    ADMIN_KEY,
    L2_PASSWORD_FILE,
    SECRETS,
    admin_key_secret,
    config_text,
    gateway_config,
)
from kvroute.deploy.render.manifest import (
    GATEWAY,
    LOCKED_DOWN,
    Manifest,
    disruption_budget,
    http_get,
    manifest,
    matching,
    pod_template,
    selector,
    service_port,
)
from kvroute.deploy.render.manifest_cache import cache_manifests, tier_manifests
from kvroute.deploy.render.manifest_policy import monitoring_manifests, network_manifests, scaling_manifests
from kvroute.deploy.render.manifest_workers import worker_manifests
from kvroute.deploy.render.plan import EndpointPlan
from kvroute.deploy.render.reach import L2_PASSWORD_OPTION, l2_password, report_ports
from kvroute.deploy.render.site import DeploymentSite, kubernetes_site
from kvroute.deploy.shutdown import gateway_stop_s

USER = 10001
"""The user id in the gateway's image."""


def gateway_manifests(plan: EndpointPlan, site: DeploymentSite) -> Iterator[Manifest]:
    """The gateway's Deployment, Services, configuration and access rights."""
    name = f"{plan.name}-gateway"
    service = f"{name}.{plan.namespace}"
    names = [name, service, f"{service}.svc", f"{service}.svc.cluster.local"]
    config = gateway_config(plan, site, secrets=True, names=names)
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
    yield manifest("v1", "ConfigMap", plan, name, GATEWAY, data={"kvroute.yaml": config_text(config)})
    yield manifest("apps/v1", "Deployment", plan, name, GATEWAY, spec=_deployment(plan, site, name, config))
    yield manifest(
        "v1",
        "Service",
        plan,
        name,
        GATEWAY,
        spec={"selector": selector(plan, GATEWAY), "ports": [service_port("http", _port(config))]},
    )
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
    # `key` is a new random key; `with_earlier_key` replaces it when a rendered file exists.
    secret = admin_key_secret(plan)
    if secret is None or secret is plan.extension.gateway.admin_key_secret:
        return None
    return manifest("v1", "Secret", plan, secret.name, GATEWAY, type="Opaque", stringData={secret.key: key})


def _port(config: dict[str, Any]) -> int:
    return int(config["server"]["port"])


def _probe(config: dict[str, Any], path: str) -> dict[str, Any]:
    """The gateway's probe of `path`: HTTP, HTTPS, or only a connection if clients need a certificate."""
    tls = config["server"].get("tls") or {}
    if tls.get("client_ca_file"):
        return {"tcpSocket": {"port": "http"}}  # kubelet has no client certificate
    probe = http_get(path, "http")
    if tls.get("cert_file"):
        probe["httpGet"]["scheme"] = "HTTPS"  # kubelet does not verify the certificate
    return probe


def _deployment(
    plan: EndpointPlan, site: DeploymentSite, name: str, config: dict[str, Any]
) -> dict[str, Any]:
    gateway = plan.extension.gateway
    mounts = [{"name": "config", "mountPath": "/etc/kvroute", "readOnly": True}]
    mounts.append({"name": "tmp", "mountPath": "/tmp"})
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "tmp", "emptyDir": {}},
    ]
    l2_secret = plan.l2_password if l2_password(plan, site) else None
    secrets = [
        {"secret": {"name": secret.name, "items": [{"key": secret.key, "path": path}]}}
        for secret, path in (
            (gateway.api_keys_secret, "api-keys"),
            (admin_key_secret(plan), ADMIN_KEY),
            (l2_secret, L2_PASSWORD_FILE.rpartition("/")[2]),
        )
        if secret is not None
    ]
    if secrets:
        volumes.append({"name": "keys", "projected": {"sources": secrets}})
        mounts.append({"name": "keys", "mountPath": SECRETS, "readOnly": True})
    ports = [("http", _port(config)), *report_ports(plan, site).items()]
    container = {
        "name": "kvroute",
        "image": plan.extension.images.gateway,
        "args": ["serve", "-c", "/etc/kvroute/kvroute.yaml"],
        "ports": [{"name": port, "containerPort": number} for port, number in ports],
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
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    return {
        # With an autoscaler, `replicas` would undo its decision at each `kubectl apply`.
        **({} if is_autoscaled else {"replicas": gateway.replicas}),
        # A gateway ends when its successor is ready.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": matching(plan, GATEWAY),
        "template": pod_template(plan, GATEWAY, pod, on_worker_nodes=False),
    }


SECRET_FILE: Final = "gateway-secret.yaml"
"""The manifest that contains the admin key."""


def kubernetes_objects(plan: EndpointPlan) -> dict[str, list[Manifest]]:
    """All objects except the Secret with the admin key: file name -> objects. No file is empty."""
    scaling = plan.spec.auto_scaling_spec
    largest_count = max(plan.replicas, scaling.max_replica_count if scaling is not None else 0, 1)
    site = kubernetes_site(plan, largest_count)
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
    """The manifests: file name -> text. SECRET_FILE has a new admin key each time; see `with_earlier_key`."""
    head = f"# {plan.name}, generated by `kvroute render --to kubernetes`: change the spec, not this file.\n"
    files = {name: head + _text(objects) for name, objects in kubernetes_objects(plan).items()}
    secret = admin_secret(plan, secrets.token_urlsafe(32))
    if secret is not None:
        files[SECRET_FILE] = head + _SECRET_NOTE + _text([secret])
    return files


_SECRET_NOTE: Final = (
    "# The admin key is random; a later `render -o` into this folder keeps it. Keep this file out of\n"
    "# version control, or name your own Secret in x-kvroute.gateway.adminKeySecret.\n"
)


def with_earlier_key(text: str, earlier: str) -> str:
    """The new `text` of SECRET_FILE with the key of the `earlier` text, so that rendering again keeps the
    key.

    Raises ValueError if `earlier` is not the text of a SECRET_FILE.
    """
    comments = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#"))
    try:
        earlier_data = yaml.safe_load(earlier)["stringData"]
    except (yaml.YAMLError, KeyError, TypeError) as exc:
        raise ValueError("it is not a Secret with stringData") from exc
    return comments + _text([yaml.safe_load(text) | {"stringData": earlier_data}])


def _text(objects: list[Manifest]) -> str:
    text: str = yaml.safe_dump_all(
        objects, sort_keys=False, allow_unicode=True, width=10**6, explicit_start=True
    )
    return text
