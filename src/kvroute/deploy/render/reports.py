"""How the gateway hears what workers and LMCache hold: the other side of what these are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvroute.deploy.render.plan import Cache, EndpointPlan
from kvroute.deploy.render.site import EVENTS_PORT, REPLAY_PORT, Site

L2_PASSWORD_OPTION = "KVROUTE__LMCACHE__L2__REDIS_PASSWORD"
"""`lmcache.l2.redis_password` as a variable of the gateway's environment."""


def cache_reports(plan: EndpointPlan, site: Site, *, password_file: str | None = None) -> dict[str, Any]:
    """Sections of the gateway's configuration; nothing unless the strategy is kvaware.

    The second tier's password is not among them: it is in `password_file`, or the gateway's environment has
    it (`L2_PASSWORD_OPTION`).
    """
    if not plan.is_kvaware:
        return {}
    reports: dict[str, Any] = {"kv_events": _streams(plan, site)}
    cache = plan.cache
    if cache is not None:
        reports["lmcache"] = (
            {"controller": _controller(plan, site)} if cache.classic else _servers(plan, cache, site)
        )
        if password_file is not None and asks_l2(plan, site):
            reports["lmcache"]["l2"]["redis_password_file"] = password_file
    folder = model_folder(plan, site)
    if folder:
        reports["tokens"] = {"models": {plan.model.served_name: folder}}
    if plan.token_bytes is not None and cache is not None:
        reports["routing"] = {"kvaware": {"tiers": {"token_bytes": plan.token_bytes}}}
    return reports


def model_folder(plan: EndpointPlan, site: Site) -> str:
    """Where the gateway finds the model's files, to tokenize as the workers do; empty: it asks them."""
    model = plan.model
    if not plan.is_kvaware or plan.is_simulated or site.is_cluster or model.volume is None:
        return ""
    return model.local_source if site.is_local else model.volume.mount_path


def asks_l2(plan: EndpointPlan, site: Site) -> bool:
    """Whether the gateway asks the second tier's store itself what it has: it evicts without a word."""
    cache, tier = plan.cache, site.tier
    if not plan.is_kvaware or cache is None or cache.classic or tier is None or not tier.asked_at:
        return False
    # Names that its settings change are not ours to guess.
    options: Mapping[str, object] = plan.extension.l2.options or {}
    return not options.get("key_prefix") and not options.get("cluster_mode")


def l2_password(plan: EndpointPlan, site: Site) -> bool:
    """Whether that needs a password."""
    tier = site.tier
    return asks_l2(plan, site) and tier is not None and bool(plan.l2_password is not None or tier.password)


def report_ports(plan: EndpointPlan, site: Site) -> dict[str, int]:
    """Ports of the gateway that LMCache reaches, by their names."""
    if not plan.is_kvaware or plan.cache is None:
        return {}
    ports = site.reports
    if not plan.cache.classic:
        return {"coordinator": ports.coordinator}
    return {"lmcache-pull": ports.pull, "lmcache-reply": ports.reply, "lmcache-beat": ports.heartbeat}


def event_ports(plan: EndpointPlan) -> dict[str, int]:
    """Ports of a worker's container that the gateway reads events from: a pair for each rank."""
    if not plan.has_events:
        return {}
    ranks = range(plan.ranks)
    first = {"kv-events": EVENTS_PORT, "kv-replay": REPLAY_PORT}
    more = {f"{name}-{rank}": port + rank for name, port in first.items() for rank in ranks if rank}
    return first | more


def _streams(plan: EndpointPlan, site: Site) -> dict[str, Any]:
    """Where the engines publish. On one host each has ports of its own, and the engines are asked."""
    if site.is_local:
        return {}
    return {
        # Said, not asked for: engines before vLLM 0.27 do not tell.
        "endpoint": f"tcp://{{host}}:{EVENTS_PORT}",
        "replay_endpoint": f"tcp://{{host}}:{REPLAY_PORT}",
        "ranks": plan.ranks,
    }


def _servers(plan: EndpointPlan, cache: Cache, site: Site) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "coordinator": {
            "enabled": True,
            "listen": f"{site.gateway_bind}:{site.reports.coordinator}",
            "chunk_tokens": plan.extension.lmcache.chunk_size,
        }
    }
    if not cache.per_worker:
        # Each node's server is called after its node.
        settings["instance"] = f"{plan.name}-{{node}}" if site.is_cluster else site.servers[0].instance_id
    tier = site.tier
    if tier is not None and asks_l2(plan, site):
        settings["l2"] = {"redis_url": tier.asked_at, "redis_pool": str(tier.adapter["type"])}
    return settings


def _controller(plan: EndpointPlan, site: Site) -> dict[str, Any]:
    bind, ports = site.gateway_bind, site.reports
    settings: dict[str, Any] = {
        "enabled": True,
        "pull": f"{bind}:{ports.pull}",
        "reply": f"{bind}:{ports.reply}",
        "heartbeat": f"{bind}:{ports.heartbeat}",
        "hash_seed": plan.hash_seed,
        "hash_algorithm": "builtin",
        "chunk_tokens": plan.extension.lmcache.chunk_size,
    }
    if not site.is_local:
        # A name outlives the gateway's address.
        settings["advertise"] = site.gateway_host
    return settings
