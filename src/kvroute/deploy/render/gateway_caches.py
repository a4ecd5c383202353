"""The gateway's settings for the caches of an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kvroute.deploy.render.plan import Cache, EndpointPlan
from kvroute.deploy.render.site import EVENTS_PORT, REPLAY_PORT, DeploymentSite, peers_name
from kvroute.routing.strategies.kvaware import KvAware

L2_PASSWORD_OPTION = "KVROUTE__LMCACHE__L2__REDIS_PASSWORD"
"""`lmcache.l2.redis_password` as a variable of the gateway's environment."""


def cache_reports(
    plan: EndpointPlan, site: DeploymentSite, *, password_file: str | None = None
) -> dict[str, Any]:
    """The gateway's configuration sections for following the caches; empty if the strategy does not need
    them.

    The second tier's password is not among them. It is in `password_file`, or in the gateway's environment
    (`L2_PASSWORD_OPTION`).
    """
    if not plan.follows_caches:
        return {}
    reports: dict[str, Any] = {"kv_events": _streams(plan, site)}
    cache = plan.cache
    if cache is not None:
        if cache.classic:
            reports["lmcache"] = {"controller": _controller(plan, site)}
            if urls := followed_tiers(plan, site):
                reports["lmcache"]["tierd"] = {"urls": urls}
        elif plan.versions.pair.lmcache.reports_chunks:
            reports["lmcache"] = _servers(plan, cache, site)
        if password_file is not None and queries_l2(plan, site):
            reports["lmcache"]["l2"]["redis_password_file"] = password_file
    folder = model_folder(plan, site)
    if folder:
        reports["tokens"] = {"models": {plan.model.served_name: folder}}
    if plan.token_bytes is not None and cache is not None:
        reports["routing"] = {KvAware.name: {"tiers": {"token_bytes": plan.token_bytes}}}
    return reports


def model_folder(plan: EndpointPlan, site: DeploymentSite) -> str:
    """The folder of the model's files, from which the gateway loads the tokenizer; empty without one."""
    # Without the folder, the gateway lets the workers tokenize.
    model = plan.model
    if not plan.follows_caches or plan.is_simulated or site.is_cluster or model.volume is None:
        return ""
    return model.local_source if site.is_local else model.volume.mount_path


def queries_l2(plan: EndpointPlan, site: DeploymentSite) -> bool:
    """Whether the gateway queries the second tier's store for its keys, because it reports no evictions."""
    cache, tier = plan.cache, site.tier
    if not plan.follows_caches or cache is None or cache.classic or tier is None or not tier.query_url:
        return False
    if not plan.versions.pair.lmcache.reports_chunks:
        return False
    # With these settings the gateway cannot derive the keys' names.
    options: Mapping[str, object] = plan.extension.l2.options or {}
    return not options.get("key_prefix") and not options.get("cluster_mode")


def followed_tiers(plan: EndpointPlan, site: DeploymentSite) -> list[str]:
    """Where the gateway follows what the second tier holds, because LMCache in the engine does not report
    it."""
    cache, tier = plan.cache, site.tier
    if not plan.follows_caches or cache is None or not cache.classic or tier is None:
        return []
    if cache.config_file is not None:  # the user's own settings, which may name another store
        return []
    hosts = {
        service.name: peers_name(plan, service) if site.is_cluster else urlsplit(tier.remote_url).hostname
        for service in tier.services
        if service.lists_changes
    }
    return [
        f"http://{hosts[service.name]}:{service.port}" for service in tier.services if service.name in hosts
    ]


def l2_password(plan: EndpointPlan, site: DeploymentSite) -> bool:
    """Whether the gateway needs a password to query the second tier's store."""
    tier = site.tier
    return queries_l2(plan, site) and tier is not None and bool(plan.l2_password is not None or tier.password)


def _streams(plan: EndpointPlan, site: DeploymentSite) -> dict[str, Any]:
    """The event endpoints for the gateway's configuration; empty on one host."""
    # On one host every engine has its own ports, and the gateway reads them from the engines.
    if site.is_local:
        return {}
    return {
        # Configured, because engines before vLLM 0.32 do not name their endpoints.
        "endpoint": f"tcp://{{host}}:{EVENTS_PORT}",
        "replay_endpoint": f"tcp://{{host}}:{REPLAY_PORT}",
        "ranks": plan.ranks,
    }


def _servers(plan: EndpointPlan, cache: Cache, site: DeploymentSite) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "coordinator": {
            "enabled": True,
            "listen": f"{site.gateway_bind}:{site.reports.coordinator}",
            "chunk_tokens": plan.extension.lmcache.chunk_size,
        }
    }
    if not cache.per_worker:
        # The instance id of a node's server contains the node's name.
        settings["instance"] = f"{plan.name}-{{node}}" if site.is_cluster else site.servers[0].instance_id
    tier = site.tier
    if tier is not None and queries_l2(plan, site):
        settings["l2"] = {"redis_url": tier.query_url, "redis_pool": str(tier.adapter["type"])}
    return settings


def _controller(plan: EndpointPlan, site: DeploymentSite) -> dict[str, Any]:
    bind, ports = site.gateway_bind, site.reports
    settings: dict[str, Any] = {
        "enabled": True,
        "pull": f"{bind}:{ports.pull}",
        "reply": f"{bind}:{ports.reply}",
        "heartbeat": f"{bind}:{ports.heartbeat}",
        "hash_seed": plan.hash_seed,
        "hash_algorithm": plan.versions.pair.lmcache.chunk_hash,
        "chunk_tokens": plan.extension.lmcache.chunk_size,
    }
    if not site.is_local:
        # The gateway's address may change; its name does not.
        settings["advertise"] = site.gateway_host
    return settings
