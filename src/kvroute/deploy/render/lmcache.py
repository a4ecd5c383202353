"""Renders LMCache's settings for the planned release: flags of its server, or environment and file of the
classic connector."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

import yaml

from kvroute.deploy.render.plan import SEED, Cache, EndpointPlan
from kvroute.deploy.render.site import DeploymentSite, ServerSite, WorkerSite, local_site

PASSWORD = "L2_PASSWORD"
PASSWORD_REFERENCE = f"$({PASSWORD})"
"""Placeholder for the second tier's password, in Kubernetes' syntax. Other targets replace it."""
HEARTBEAT_S = 2
"""Interval of an engine's pings to its LMCache server, and the timeout of one ping."""
# An engine registers its KV cache again only after a failed ping. If its server was restarted between two
# pings, the server refuses the engine's blocks permanently (LMCache 0.5.6, whose default interval is 10 s).
UNNOTICED_RESTART_S = 2 * HEARTBEAT_S
"""Every engine notices when its server is down for longer than this."""
CLASSIC_HEARTBEAT_S = 10
"""Heartbeat of a classic worker. Within this time it also learns that the gateway requests all its keys
again."""


def compact(value: object) -> str:
    """`value` as JSON on one line without spaces."""
    return json.dumps(value, separators=(",", ":"))


def server_argv(
    plan: EndpointPlan, cache: Cache, server: ServerSite, site: DeploymentSite
) -> tuple[str, ...]:
    """The command line of one LMCache server."""
    extension, release = plan.extension, plan.versions.pair.lmcache
    argv = ["lmcache", "server"]
    argv += ["--instance-id", server.instance_id] if release.names_instances else []
    argv += ["--host", server.bind, "--port", str(server.port)]
    argv += ["--http-host", server.bind, "--http-port", str(server.http_port)]
    argv += ["--chunk-size", str(extension.lmcache.chunk_size)]
    # Without a first tier, LMCache still copies entries through a buffer.
    size = extension.l1.size_gb if cache.l1 else extension.l1.staging_gb
    argv += ["--l1-size-gb", f"{size:g}"]
    argv += ["--eviction-policy", extension.l1.eviction_policy if cache.l1 else "LRU"]
    if release.reports_chunks:
        # LMCache reports events of the first tier only in this mode.
        argv += ["--supported-transfer-mode", "lmcache_driven"]
    if site.tier is not None:
        argv += ["--l2-adapter", compact(adapter(plan, site))]
        store = extension.l2.store_policy or ("default" if cache.l1 else "skip_l1")
        argv += ["--l2-store-policy", store]
        prefetch = extension.l2.prefetch_policy if cache.l1 else "default"
        argv += ["--l2-prefetch-policy", prefetch if prefetch in release.prefetch_policies else "default"]
    if plan.follows_caches and release.reports_chunks:
        argv += ["--coordinator-url", f"http://{site.gateway_host}:{site.reports.coordinator}"]
        argv += ["--coordinator-event-reporting"]
        if server.advertise is not None:
            argv += ["--coordinator-advertise-ip", server.advertise]
    return tuple(argv)


def adapter(plan: EndpointPlan, site: DeploymentSite) -> dict[str, object]:
    """The settings of LMCache's adapter for the second tier. The user's settings override them."""
    if site.tier is None:
        return {}
    settings = {**site.tier.adapter, **(plan.extension.l2.options or {})}
    if plan.l2_password is not None and not site.tier.password_variable:
        settings["password"] = PASSWORD_REFERENCE
    return settings


def server_environment(plan: EndpointPlan, site: DeploymentSite) -> dict[str, str]:
    """The environment of an LMCache server, without the variable `password_name`."""
    return {SEED: plan.hash_seed, **(site.tier.environment if site.tier is not None else {})}


def password_name(plan: EndpointPlan, site: DeploymentSite) -> str:
    """The variable with the second tier's password for an LMCache server; empty without a password."""
    if site.tier is None or plan.l2_password is None:
        return ""
    return site.tier.password_variable or PASSWORD


def connector(plan: EndpointPlan, worker: WorkerSite) -> dict[str, object] | None:
    """vLLM's `--kv-transfer-config`; None without LMCache."""
    cache = plan.cache
    if cache is None:
        return None
    if cache.classic:
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    settings: dict[str, object] = {
        "lmcache.mp.host": f"tcp://{worker.lmcache_host}",
        "lmcache.mp.port": worker.lmcache_port,
    }
    if plan.versions.pair.lmcache.reports_chunks:
        settings["lmcache.mp.mp_transfer_mode"] = "lmcache_driven"
    settings["lmcache.mp.heartbeat_interval"] = HEARTBEAT_S
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


def worker_environment(plan: EndpointPlan, worker: WorkerSite, site: DeploymentSite) -> dict[str, str]:
    """The variables that vLLM's environment needs for LMCache."""
    cache = plan.cache
    if cache is None:
        return {SEED: plan.hash_seed} if plan.follows_caches else {}
    env = {SEED: plan.hash_seed}
    if not cache.classic:
        return env
    if cache.config_file is not None:
        return env | {"LMCACHE_CONFIG_FILE": cache.config_file}
    settings = classic_settings(plan, cache, site) | _controller(plan, worker, site)
    return env | {f"LMCACHE_{name.upper()}": _as_text(value) for name, value in settings.items()}


def classic_settings(plan: EndpointPlan, cache: Cache, site: DeploymentSite) -> dict[str, object]:
    """The classic connector's settings that all workers share, with the keys of its YAML file."""
    extension = plan.extension
    # Each rank of a worker (one per GPU) has its own memory of this size.
    size = (extension.l1.size_gb if cache.l1 else extension.l1.staging_gb) / max(1, plan.gpus)
    settings: dict[str, object] = {
        "chunk_size": extension.lmcache.chunk_size,
        "local_cpu": cache.l1,
        "max_local_cpu_size": round(size, 3),
        "cache_policy": "LRU",
    }
    if site.tier is not None:
        settings |= {"remote_url": site.tier.remote_url, "remote_serde": "naive", "save_unfull_chunk": True}
        if site.tier.extra_config:
            settings["extra_config"] = dict(site.tier.extra_config)
    if plan.follows_caches:
        settings |= {"enable_kv_events": True} if plan.versions.pair.lmcache.has_kv_events else {}
        settings["pre_caching_hash_algorithm"] = "builtin"
    return settings


def _controller(plan: EndpointPlan, worker: WorkerSite, site: DeploymentSite) -> dict[str, object]:
    if not plan.follows_caches:
        return {}
    return {
        "enable_controller": True,
        "lmcache_instance_id": worker.name,
        "controller_pull_url": f"{site.gateway_host}:{site.reports.pull}",
        "controller_reply_url": f"{site.gateway_host}:{site.reports.reply}",
        "lmcache_worker_heartbeat_time": CLASSIC_HEARTBEAT_S,
        "lmcache_worker_ports": [worker.classic_port + rank for rank in range(max(1, plan.gpus))],
    }


def _as_text(value: object) -> str:
    if isinstance(value, dict):
        return compact(value)
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def render_lmcache(plan: EndpointPlan) -> dict[str, str]:
    """Files for starting LMCache manually on one host."""
    cache, site = plan.cache, local_site(plan)
    if cache is None:
        reason = "the workers are simulated" if plan.is_simulated else "no cache tier is on"
        return {"lmcache.yaml": f"# LMCache does not run: {reason}.\n{{}}\n"}
    environment = worker_environment(plan, site.workers[0], site) if site.workers else {}
    files = {"lmcache.env": _lines(environment)}
    if cache.classic:
        head = "# LMCACHE_CONFIG_FILE of the workers; lmcache.env has the same settings as variables.\n"
        main = head + _yaml(classic_settings(plan, cache, site))
    else:
        commands = {server.instance_id: server_argv(plan, cache, server, site) for server in site.servers}
        main = "# One entry for each LMCache server on this host.\n" + _yaml(
            {
                "servers": [
                    {
                        "instance_id": name,
                        "command": _without_password(argv),
                        "environment": server_environment(plan, site),
                    }
                    for name, argv in commands.items()
                ],
                "workers": [
                    {
                        "name": worker.name,
                        "kv_transfer_config": connector(plan, worker),
                        "environment": environment,
                    }
                    for worker in site.workers
                ],
            }
        )
        words = [f"{key}={shlex.quote(value)}" for key, value in server_environment(plan, site).items()]
        if password_name(plan, site) not in ("", PASSWORD):
            words.append(f'{password_name(plan, site)}="${PASSWORD}"')
        env = " ".join(words)
        files["lmcache-servers.sh"] = "".join(f"{env} {_shell(argv)}\n" for argv in commands.values())
    for service in site.tier.services if site.tier is not None else ():
        if service.shares_memory:
            # LMCache does not start without this shared memory, so this script must run first.
            files[f"{service.name}.sh"] = f"{shlex.join(service.command)}\n"
    return {"lmcache.yaml": main, **files}


def _shell(argv: tuple[str, ...]) -> str:
    """A shell command that reads the password from the environment when it runs."""
    return shlex.join(argv).replace(PASSWORD_REFERENCE, f"'\"${PASSWORD}\"'")


def _without_password(argv: tuple[str, ...]) -> list[str]:
    """The command without the password, for files in which no shell replaces variables."""
    return [word.replace(f',"password":"{PASSWORD_REFERENCE}"', "") for word in argv]


def _lines(environment: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in environment.items())


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10**6)
