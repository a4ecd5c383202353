"""Renders the gateway's configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from kvroute.deploy.render.gateway_caches import L2_PASSWORD_OPTION, cache_reports, l2_password
from kvroute.deploy.render.manifest import WORKER, selector
from kvroute.deploy.render.plan import DRAIN_S, GATEWAY_DELAY_S, EndpointPlan
from kvroute.deploy.render.site import DeploymentSite, WorkerSite, local_site
from kvroute.deploy.spec.extension import SecretKey
from kvroute.routing.registry import needs_of
from kvroute.routing.strategy import Needs

SECRETS = "/run/secrets/kvroute"
L2_PASSWORD_FILE = f"{SECRETS}/l2-password"
ADMIN_KEY = "admin-key"


def gateway_config(
    plan: EndpointPlan, site: DeploymentSite, *, secrets: bool = False, names: Sequence[str] = ()
) -> dict[str, Any]:
    """The configuration for `kvroute serve -c`.

    `secrets` is set in Kubernetes: keys are files below SECRETS, and the gateway finds workers by their pods'
    labels. `names` are the gateway's host names.
    """
    gateway, routing = plan.extension.gateway, plan.extension.routing
    server: dict[str, Any] = {"host": site.gateway_bind, "port": gateway.port}
    limits = plan.limits
    config: dict[str, Any] = {
        "server": server,
        "fleet": {"kubernetes": _label_discovery(plan)}
        if secrets
        else {"workers": [_entry(worker) for worker in site.workers]},
        "routing": {"strategy": plan.strategy},
    }
    if plan.threshold_tokens is not None:
        config["routing"]["prefill_decode"] = {"threshold_tokens": plan.threshold_tokens}
    if plan.model.store is not None or plan.model.is_own_volume:
        # A worker without --served-model-name serves the model under the name of its folder.
        config["fleet"]["aliases"] = {plan.model.source: plan.model.served_name}
    if limits is not None and limits.max_concurrent_requests is not None:
        config["upstream"] = {"max_connections": limits.max_concurrent_requests}
        if limits.max_queue_size is not None:
            per_worker = limits.max_concurrent_requests + limits.max_queue_size
            server["max_in_flight"] = per_worker * max(1, len(site.workers))
    if needs_of(plan.strategy) is not Needs.NOTHING and routing.session_keys:
        config["routing"]["session"] = {"keys": list(routing.session_keys)}
    if secrets:
        config["logging"] = {"format": "json"}
        server["shutdown_delay_s"] = GATEWAY_DELAY_S
        server["drain_timeout_s"] = DRAIN_S
        if gateway.api_keys_secret is not None:
            server["api_keys_file"] = f"{SECRETS}/api-keys"
        if admin_key_secret(plan) is not None:
            config["admin"] = {"api_key_file": f"{SECRETS}/{ADMIN_KEY}"}
    if names:
        config["admin"] = {**config.get("admin", {}), "allowed_hosts": list(names)}
    if plan.is_hyperpod_document:
        config["logging"] = {**config.get("logging", {}), "hyperpod_lines": True}
    if secrets and plan.extension.scaling.deletion_cost:
        # Less traffic only for workers that an autoscaler may remove. Groups have an autoscaler each, which
        # compares the costs of its own workers only.
        scaled = None if plan.groups else plan.spec.auto_scaling_spec
        steering: dict[str, float] = {"surplus_share": 1.0}
        if scaled is not None:
            steering = {"min_workers": max(1, scaled.min_replica_count)}
        config["scaling"] = {"deletion_cost": {"enabled": True, **steering}}
    by_file = L2_PASSWORD_FILE if secrets and plan.l2_password is not None else None
    config = merged(config, cache_reports(plan, site, password_file=by_file))
    config = merged(config, {"routing": routing.options or {}})
    return merged(config, gateway.settings or {})


def admin_key_secret(plan: EndpointPlan) -> SecretKey | None:
    """The Secret with the admin key: the user's Secret, or else the rendered one.

    None if the gateway's settings contain a key.
    """
    gateway = plan.extension.gateway
    if gateway.admin_key_secret is not None:
        return gateway.admin_key_secret
    admin = (gateway.settings or {}).get("admin") or {}
    if admin.get("api_key") or admin.get("api_key_file"):
        return None
    return SecretKey(name=f"{plan.name}-gateway-admin", key=ADMIN_KEY)


def _entry(worker: WorkerSite) -> dict[str, Any]:
    entry = {"id": worker.name, "url": worker.url}
    return entry if worker.role is None else entry | {"role": worker.role}


def _label_discovery(plan: EndpointPlan) -> dict[str, Any]:
    """The discovery section for the pods of the StatefulSet. The pods' names are the workers' ids."""
    wanted = ",".join(f"{key}={value}" for key, value in selector(plan, WORKER).items())
    return {"enabled": True, "namespace": plan.namespace, "selector": wanted, "port": plan.port_name}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings key by key, nested mappings too. Values of `above` override those of `below`."""
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


SECRET_OPTIONS: Final = (
    ("server", "api_keys"),
    ("admin", "api_key"),
    ("fleet", "worker_api_key"),
    ("lmcache", "l2", "redis_url"),
    ("lmcache", "l2", "redis_password"),
    ("lmcache", "tierd", "key"),
    ("sharing", "url"),
    ("sharing", "password"),
    ("sharing", "key"),
)
"""Options that a ConfigMap must not contain; each can be read from a file, `NAME_file`. URLs: with a user."""


def without_secrets(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration with files below SECRETS in place of its secrets, and the content of these files."""
    public, secret_files = copy.deepcopy(dict(config)), dict[str, str]()
    for *above, last in SECRET_OPTIONS:
        node: Any = public
        for key in above:
            node = node.get(key) if isinstance(node, dict) else None
        value = node.get(last) if isinstance(node, dict) else None
        if not value or (last.endswith("url") and "@" not in value):
            continue
        file = "-".join([*above, last]).replace("_", "-")
        del node[last]
        node[f"{last}_file"] = f"{SECRETS}/{file}"
        secret_files[file] = "\n".join(value) if isinstance(value, list) else str(value)
    return public, secret_files


def config_text(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=10**6)


def render_config(plan: EndpointPlan) -> dict[str, str]:
    """The configuration for a gateway on the workers' host."""
    site = local_site(plan)
    head = f"# kvroute serve -c kvroute.yaml: the gateway of {plan.name}, its workers on this host.\n"
    if l2_password(plan, site):
        head += f"# The second tier's password is read from the variable {L2_PASSWORD_OPTION}.\n"
    return {"kvroute.yaml": head + config_text(gateway_config(plan, site))}
