"""Plans the processes of a spec's endpoint on this host: the rendered commands, on free ports. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvroute.deploy.l2.backend import L2Location, ServiceSpec
from kvroute.deploy.plan import (
    CPU_ENGINE_READY_S,
    ENGINE_STOP_S,
    GATEWAY,
    SIM_READY_S,
    AdminKeyLocation,
    PlannedProcess,
    ProcessPlan,
    cpu_kv_cache_gib,
    gateway_process,
)
from kvroute.deploy.processes import ChildSpec
from kvroute.deploy.render.config import gateway_config, merged
from kvroute.deploy.render.gateway_caches import L2_PASSWORD_OPTION, l2_password
from kvroute.deploy.render.lmcache import (
    PASSWORD,
    PASSWORD_REFERENCE,
    UNNOTICED_RESTART_S,
    password_name,
    server_argv,
    server_environment,
)
from kvroute.deploy.render.plan import Cache, EndpointPlan, gateway_stop_s
from kvroute.deploy.render.site import (
    LOOPBACK,
    DeploymentSite,
    ReportPorts,
    ServerSite,
    WorkerSite,
    local_site,
)
from kvroute.deploy.render.worker_args import vllm_spec, worker_argv
from kvroute.deploy.up_state import LOGS
from kvroute.deploy.vllm_command import (
    KV_CACHE_SPACE,
    assign_gpus,
    vllm_environment,
)
from kvroute.errors import ConfigError

GATEWAY_CONFIG = "gateway.yaml"
SERVICE_READY_S = 60.0
LMCACHE_READY_S = 180.0
LMCACHE_STOP_S = 10.0
SIM_STOP_S = 10.0
LMCACHE_ENVIRONMENT = {"DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1"}
FindPort = Callable[[int], int]
"""Find that number of neighbouring free ports and return the first one."""


@dataclass(frozen=True, slots=True)
class EndpointHost:
    """This host's resources, as input of an endpoint's plan."""

    environ: Mapping[str, str]
    engine_environ: Mapping[str, str]
    """The environment of engines and LMCache, which may run in another virtual environment."""
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    programs: Mapping[str, tuple[str, ...]]
    """A command's first word -> the words to use instead on this host."""
    state_dir: Path
    admin_key: AdminKeyLocation = field(default_factory=AdminKeyLocation)


@dataclass(frozen=True, slots=True)
class LocalEndpoint:
    """The processes to run, and the gateway's configuration, which the gateway reads from `config_path`."""

    plan: ProcessPlan
    config: Mapping[str, Any]
    config_path: Path
    folders: tuple[Path, ...]
    """Folders of the second tier, which must exist before the start."""


def with_simulated_workers(endpoint: EndpointPlan) -> EndpointPlan:
    """Copy of `endpoint` with simulated workers, which need neither GPUs nor the model nor caches."""
    extension = endpoint.extension.model_copy(update={"engine": "sim"})
    return replace(endpoint, extension=extension, cache=None, gpus=0)


def local_config(
    endpoint: EndpointPlan, site: DeploymentSite, *, host: str | None = None, port: int | None = None
) -> dict[str, Any]:
    """The gateway's configuration on this host. `host` and `port` override the spec's values."""
    address = {"host": host, "port": port}
    config = gateway_config(endpoint, site)
    models = config.get("tokens", {}).get("models", {})
    if models:
        # A relative path in the configuration file would be relative to that file.
        absolute = {name: str(Path(folder).absolute()) for name, folder in models.items()}
        config = merged(config, {"tokens": {"models": absolute}})
    return merged(config, {"server": {key: value for key, value in address.items() if value is not None}})


def site_on_free_ports(endpoint: EndpointPlan, find_port: FindPort, gpus: tuple[str, ...]) -> DeploymentSite:
    """`local_site` with free ports and this host's GPUs. Raises `ConfigError` when there are too few GPUs."""
    defaults = local_site(endpoint)
    shares = _gpu_shares(endpoint, gpus)
    ranks = endpoint.ranks
    servers = tuple(replace(server, port=find_port(1), http_port=find_port(1)) for server in defaults.servers)
    workers = []
    for number, worker in enumerate(defaults.workers):
        port = find_port(1)
        placed = replace(
            worker,
            port=port,
            url=f"http://{LOOPBACK}:{port}",
            events_port=find_port(ranks),
            replay_port=find_port(ranks),
            classic_port=find_port(max(1, endpoint.gpus)),
            gpus=shares[number],
            transfer_port=find_port(1) if worker.role is not None else worker.transfer_port,
        )
        if servers:
            server = servers[number if len(servers) > 1 else 0]
            placed = replace(placed, lmcache_port=server.port)
        workers.append(placed)
    cache = endpoint.cache
    tier = None
    if cache is not None and cache.l2 is not None:
        tier = cache.l2.tier(L2Location(cache.l2_url, endpoint.extension, LOOPBACK, False, find_port(1)))
    reports = ReportPorts(*(find_port(1) for _ in range(4)))
    return replace(defaults, workers=tuple(workers), servers=servers, tier=tier, reports=reports)


def plan_local_endpoint(
    endpoint: EndpointPlan,
    host: EndpointHost,
    find_port: FindPort,
    *,
    bind: str | None = None,
    port: int | None = None,
) -> LocalEndpoint:
    """Plan every process of `endpoint` on `host`. Raises `ConfigError` when `host` cannot run it."""
    if endpoint.replicas == 0:
        raise ConfigError("spec.replicas", "is 0: at least one worker is needed")
    site = site_on_free_ports(endpoint, find_port, host.gpus)
    config = local_config(endpoint, site, host=bind, port=port)
    config_path = (host.state_dir / GATEWAY_CONFIG).absolute()
    cache, tier = endpoint.cache, site.tier
    plan = ProcessPlan(
        workers=tuple(
            _worker(endpoint, worker, site, number, host) for number, worker in enumerate(site.workers)
        ),
        gateway=gateway_process(
            (sys.executable, "-m", "kvroute", "serve", "-c", str(config_path), *host.admin_key.arguments),
            {**host.environ, **_gateway_secrets(endpoint, site, host)},
            host=config["server"]["host"],
            port=config["server"]["port"],
            log_path=_log(host, GATEWAY),
            stop_s=gateway_stop_s(config["server"]),
            tls=config["server"].get("tls"),
        ),
        model=endpoint.model.served_name,
        simulated=endpoint.is_simulated,
        tiny_model=None if endpoint.is_simulated else endpoint.model.tiny,
        model_folder=Path(endpoint.model.local_source),
        caches=(
            tuple(_service(service, host) for service in tier.services) if tier else (),
            tuple(
                _lmcache(endpoint, cache, server, site, number, host)
                for number, server in enumerate(site.servers)
            )
            if cache
            else (),
        ),
        name=endpoint.name,
        admin_key_file=host.admin_key.generated_file(
            host.environ, config.get("admin", {}), config["server"]["port"]
        ),
    )
    _require_unique_names(plan)
    folders = tuple(map(Path, tier.host_paths if tier else ()))
    return LocalEndpoint(plan, config, config_path, folders)


def _service(service: ServiceSpec, host: EndpointHost) -> PlannedProcess:
    argv = _local_argv((*service.command, *service.local_arguments), host)
    child = ChildSpec(service.name, argv, dict(host.environ), _log(host, service.name))
    return PlannedProcess(child, service.ready_url, service.ready_url, SERVICE_READY_S)


def _lmcache(
    endpoint: EndpointPlan,
    cache: Cache,
    server: ServerSite,
    site: DeploymentSite,
    number: int,
    host: EndpointHost,
) -> PlannedProcess:
    name = site.server_name(number)
    argv = _local_argv(server_argv(endpoint, cache, server, site), host)
    env = {**host.engine_environ, **LMCACHE_ENVIRONMENT, **server_environment(endpoint, site)}
    variable = password_name(endpoint, site)
    if variable:
        password = _password(host)
        env[variable] = password
        # The password becomes part of a JSON string in the adapter's settings.
        argv = tuple(word.replace(PASSWORD_REFERENCE, json.dumps(password)[1:-1]) for word in argv)
    if endpoint.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(
            device for worker in site.workers_of_server(number) for device in worker.gpus
        )
    url = f"http://{server.bind}:{server.http_port}"
    child = ChildSpec(name, argv, env, _log(host, name), stop_grace_s=LMCACHE_STOP_S)
    services = site.tier.services if site.tier else ()
    restart_with = tuple(service.name for service in services if not service.reconnects)
    return PlannedProcess(
        child, url, f"{url}/healthcheck", LMCACHE_READY_S, restart_with, UNNOTICED_RESTART_S
    )


def _gateway_secrets(endpoint: EndpointPlan, site: DeploymentSite, host: EndpointHost) -> dict[str, str]:
    """Environment variables with the password with which the gateway queries the second tier."""
    # Passwords never go into the configuration file.
    if not l2_password(endpoint, site):
        return {}
    password = site.tier.password if site.tier is not None else ""
    return {L2_PASSWORD_OPTION: password or _password(host)}


def _password(host: EndpointHost) -> str:
    password = host.environ.get(PASSWORD)
    if password is None:
        raise ConfigError("x-kvroute.l2.passwordSecret", f"set the variable {PASSWORD} to the password")
    return password


def _worker(
    endpoint: EndpointPlan, worker: WorkerSite, site: DeploymentSite, number: int, host: EndpointHost
) -> PlannedProcess:
    argv = _local_argv(worker_argv(endpoint, worker, site), host)
    if endpoint.is_simulated:
        env, ready_s, stop_s = dict(host.environ), SIM_READY_S, SIM_STOP_S
    else:
        core = host.cores[number % len(host.cores)]
        env = vllm_environment(vllm_spec(endpoint, worker, site, core=core), host.engine_environ)
        space = None if endpoint.gpus else cpu_kv_cache_gib(env)
        env |= {KV_CACHE_SPACE: str(space)} if space is not None else {}
        tiny = endpoint.model.tiny is not None
        ready_s = CPU_ENGINE_READY_S if tiny else float(endpoint.spec.max_deploy_time_in_seconds)
        stop_s = ENGINE_STOP_S
    child = ChildSpec(worker.name, argv, env, _log(host, worker.name), stop_grace_s=stop_s)
    return PlannedProcess(child, worker.url, f"{worker.url}/health", ready_s)


def _local_argv(argv: Sequence[str], host: EndpointHost) -> tuple[str, ...]:
    """A rendered command with the program that this host uses."""
    return (*host.programs.get(argv[0], (argv[0],)), *argv[1:])


def _log(host: EndpointHost, name: str) -> Path:
    return (host.state_dir / LOGS / f"{name}.log").absolute()


def _gpu_shares(endpoint: EndpointPlan, gpus: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    if endpoint.gpus == 0:
        return ((),) * endpoint.replicas
    if not gpus:
        raise ConfigError(
            "x-kvroute.device",
            f"{endpoint.replicas} worker(s) need {endpoint.gpus} GPU(s) each, and no GPU is visible here; "
            "use `device: cpu` to compute on cores, or `--engine sim` to simulate the workers",
        )
    try:
        if endpoint.groups:
            needs = [role_plan.gpus for role_plan in endpoint.by_role for _ in range(role_plan.replicas)]
            assign_gpus(gpus, workers=1, tensor_parallel_size=max(1, sum(needs)))
            ends = list(accumulate(needs))
            return tuple(gpus[end - need : end] for end, need in zip(ends, needs, strict=True))
        return assign_gpus(gpus, workers=endpoint.replicas, tensor_parallel_size=endpoint.gpus)
    except ConfigError as exc:
        raise ConfigError("spec.replicas", str(exc).removeprefix(f"{exc.path}: ")) from None


def _require_unique_names(plan: ProcessPlan) -> None:
    names = [process.child.name for stage in plan.stages for process in stage]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        names_text = ", ".join(sorted(duplicates))
        raise ConfigError("metadata.name", f"leads to two processes with the same name: {names_text}")
