"""Renders a compose file: workers, gateway, caches, Prometheus and Grafana on one host.

The profile `gpu` or `cpu` has the spec's engines. The profile `sim` has simulated workers, for a host that
has neither GPUs nor the model. Each profile has its own gateway. For docker-compose 1.29 and newer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from kvroute.deploy.l2.backend import ServiceSpec
from kvroute.deploy.render.config import gateway_config
from kvroute.deploy.render.gateway_caches import L2_PASSWORD_OPTION, l2_password, model_folder
from kvroute.deploy.render.lmcache import (
    PASSWORD,
    PASSWORD_REFERENCE,
    compact,
    password_name,
    server_argv,
    server_environment,
)
from kvroute.deploy.render.monitoring import (
    ALERTS_FILE,
    DASHBOARDS,
    PROVISIONING,
    monitoring_files,
    provisioning_files,
)
from kvroute.deploy.render.plan import Cache, EndpointPlan, gateway_stop_s, identifier, worker_grace_s
from kvroute.deploy.render.reach import event_ports, report_ports
from kvroute.deploy.render.site import (
    LMCACHE_HTTP_PORT,
    TRANSFER_PORT,
    DeploymentSite,
    ServerSite,
    WorkerSite,
    compose_site,
)
from kvroute.deploy.render.worker_args import container_environment, worker_argv
from kvroute.deploy.spec.worker import S3Storage

Service = dict[str, Any]


def http_health(
    port: int, python: str, *, path: str = "/health", start_period: str, interval: str = "5s"
) -> dict[str, Any]:
    """A health check that runs Python in the container; every image here has Python."""
    code = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}{path}', timeout=3)"
    return {
        "test": ["CMD", python, "-c", code],
        "interval": interval,
        "timeout": "5s",
        "retries": 3,
        "start_period": start_period,
    }


def escaped(text: str) -> str:
    """`text` with `$` escaped, so that compose replaces no variables in it."""
    return text.replace("$", "$$")


def byte_count(quantity: str) -> str:
    """A Kubernetes memory quantity as a number of bytes, which compose accepts."""
    units = {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4, "k": 10**3, "M": 10**6, "G": 10**9}
    for unit, factor in units.items():
        if quantity.endswith(unit):
            return str(round(float(quantity.removesuffix(unit)) * factor))
    return quantity


def yaml_text(value: object) -> str:
    """`value` as YAML in block style, with text that contains `${VARIABLES}` in quotes."""
    text: str = yaml.dump(
        value, Dumper=_NoAliases, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=False
    )
    return text


class _NoAliases(yaml.SafeDumper):
    """Dumps YAML without aliases, and quotes text with variables, because their values are text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_none(self, data: None) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:null", "")

    def represent_text(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "${" in data else None)


_NoAliases.add_representer(type(None), _NoAliases.represent_none)
_NoAliases.add_representer(str, _NoAliases.represent_text)


SIM_PROFILE = "sim"
HUB_CACHE = "/root/.cache/huggingface"
PROMETHEUS_FILE = "prometheus.yml"
_RULES = "kvroute-alerts.yaml"
STATE = "/var/lib/kvroute"
"""The folder of the admin key that the gateway makes. The image has this folder, owned by its user."""
BY_NAME = frozenset({"fleet.aliases", "tokens.models"})
"""Options whose keys are names, which may contain dots."""


def render_compose(plan: EndpointPlan) -> dict[str, str]:
    """`docker-compose.yml`, and with metrics the files of Prometheus and Grafana: file name -> text."""
    profiles = _profiles(plan)
    services: dict[str, Service] = {}
    volumes: dict[str, None] = {}
    targets: list[str] = []
    for profile, profile_plan in profiles.items():
        gateway = "kvroute" if profile == SIM_PROFILE else f"kvroute-{profile}"
        site = compose_site(profile_plan, gateway)
        services[gateway] = _gateway(profile_plan, site, profile)
        volumes["kvroute-state"] = None
        for worker in site.workers:
            services[worker.name] = _worker(profile_plan, worker, site, profile, volumes)
        if profile_plan.cache is not None and not profile_plan.is_simulated:
            for number, server in enumerate(site.servers):
                services[site.server_name(number)] = _lmcache(
                    profile_plan, profile_plan.cache, server, site, profile, number
                )
        for service in site.tier.services if site.tier else ():
            services[service.name] = _tier_service(service)
        if isinstance(profile_plan.model.store, S3Storage) and not profile_plan.is_simulated:
            services["model"] = _download(profile_plan, profile_plan.model.store, profile)
        if model_folder(profile_plan, site):
            _mount_model(services[gateway], profile_plan, volumes)
        targets += [f"{worker.name}:{profile_plan.port}" for worker in site.workers]
    files: dict[str, str] = {}
    if plan.metrics.enabled:
        services["prometheus"] = _prometheus(plan)
        services["grafana"] = _grafana(plan)
        volumes |= {"prometheus": None, "grafana": None}
        files[PROMETHEUS_FILE] = _scrape_config(plan, targets, services)
        files |= monitoring_files() | provisioning_files()
    document = {"services": services, **({"volumes": volumes} if volumes else {})}
    head = _head(plan, list(profiles))
    return {"docker-compose.yml": head + yaml_text(document), **files}


def _profiles(plan: EndpointPlan) -> dict[str, EndpointPlan]:
    """The endpoint of each profile. The simulated endpoint has no engines and no caches."""
    extension = plan.extension.model_copy(update={"engine": "sim"})
    simulated = dataclasses.replace(plan, extension=extension, cache=None, gpus=0)
    if plan.is_simulated:
        return {SIM_PROFILE: simulated}
    return {"gpu" if plan.gpus else "cpu": plan, SIM_PROFILE: simulated}


def _head(plan: EndpointPlan, profiles: list[str]) -> str:
    lines = [
        f"# {plan.name}, generated by `kvroute render --to compose`: change the spec, not this file.",
        "#",
    ]
    lines += [f"#   docker compose --profile {profile} up" for profile in profiles]
    lines += ["#", f"# The gateway is on http://127.0.0.1:{plan.extension.gateway.port}."]
    lines += [f"# Its admin key is in {STATE} of its container, unless KVROUTE_ADMIN_KEY is set."]
    lines += ["# Run one profile at a time. Every variable has a default."]
    return "\n".join(lines) + "\n\n"


def _own_image(plan: EndpointPlan) -> Service:
    """The settings of all containers that run kvroute itself."""
    images = plan.extension.images
    service: Service = {"image": f"${{KVROUTE_IMAGE:-{images.gateway}}}"}
    if images.gateway_build is not None:
        service["build"] = images.gateway_build
    return service | {
        "restart": "unless-stopped",
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }


def _gateway(plan: EndpointPlan, site: DeploymentSite, profile: str) -> Service:
    config = gateway_config(plan, site, names=tuple(dict.fromkeys(("kvroute", site.gateway_host))))
    port = config["server"]["port"]
    command = ["serve", "--host", site.gateway_bind, "--port", str(port), "--state-dir", STATE]
    command += [f"--{worker.role or 'worker'}={worker.name}={worker.url}" for worker in site.workers]
    command += [f"--set={path}={value}" for path, value in _assignments(plan, config)]
    environment = {
        "KVROUTE__SERVER__API_KEYS": "${KVROUTE_API_KEYS:-}",
        "KVROUTE__ADMIN__API_KEY": "${KVROUTE_ADMIN_KEY:-}",
        "KVROUTE__ROUTING__STRATEGY": f"${{KVROUTE_STRATEGY:-{plan.strategy}}}",
    }
    if l2_password(plan, site) and site.tier is not None:
        environment[L2_PASSWORD_OPTION] = escaped(site.tier.password) or f"${{{PASSWORD}:-}}"
    reports = report_ports(plan, site)
    return _own_image(plan) | {
        "profiles": [profile],
        "command": [escaped(word) for word in command],
        "environment": environment,
        "ports": [f"${{KVROUTE_BIND:-127.0.0.1}}:${{KVROUTE_PORT:-{port}}}:{port}"],
        # Only for LMCache, inside of this network.
        **({"expose": [str(port) for port in reports.values()]} if reports else {}),
        "volumes": [f"kvroute-state:{STATE}"],
        "networks": {"default": {"aliases": ["kvroute"]}},
        # Covers server.shutdown_delay_s, server.drain_timeout_s and closing the remaining connections.
        "stop_grace_period": f"{gateway_stop_s(config['server'])}s",
    }


def _assignments(plan: EndpointPlan, config: dict[str, Any]) -> list[tuple[str, str]]:
    """The configuration as option paths and values, without the options that flags and environment set."""
    sections = {key: value for key, value in config.items() if key not in ("server", "fleet", "routing")}
    sections["server"] = {
        key: value for key, value in config["server"].items() if key not in ("host", "port")
    }
    sections["routing"] = {key: value for key, value in config["routing"].items() if key != "strategy"}
    sections["fleet"] = {key: value for key, value in config["fleet"].items() if key != "workers"}
    return [(path, value) for key, inner in sorted(sections.items()) for path, value in _flat(key, inner)]


def _flat(path: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict) and path not in BY_NAME:
        return [pair for key, inner in value.items() for pair in _flat(f"{path}.{key}", inner)]
    return [(path, value if isinstance(value, str) else compact(value))]


def _worker(
    plan: EndpointPlan, worker: WorkerSite, site: DeploymentSite, profile: str, volumes: dict[str, None]
) -> Service:
    plan = plan.of_role(worker.role)
    if plan.is_simulated:
        command = list(worker_argv(plan, worker, site))[1:]
        return _own_image(plan) | {
            "profiles": [profile],
            "command": [escaped(word) for word in command],
            "healthcheck": http_health(plan.port, "python3", start_period="10s"),
            **_event_ports(plan),
        }
    argv = [escaped(word) for word in worker_argv(plan, worker, site)]
    entrypoint, command = (argv[:2], argv[2:]) if plan.command is None else (argv[:1], argv[1:])
    if plan.model.is_downloaded and plan.command is None:
        command[0] = model = f"${{MODEL:-{plan.model.source}}}"
        if plan.model.served_name == plan.model.source and "--served-model-name" in command:
            # If MODEL names another model, it is served under that name.
            command[command.index("--served-model-name") + 1] = model
    environment = {key: escaped(value) for key, value in container_environment(plan, worker, site).items()}
    service: Service = {
        "image": f"${{VLLM_IMAGE:-{plan.image}}}",
        "profiles": [profile],
        "restart": "unless-stopped",
        "entrypoint": entrypoint,
        "command": command,
        "environment": {"HF_TOKEN": "${HF_TOKEN:-}"} | environment,
        # Engine and LMCache share memory of the GPU and of the host.
        "ipc": "host",
        "healthcheck": http_health(
            plan.port, "python3", start_period=f"{plan.spec.max_deploy_time_in_seconds}s", interval="10s"
        ),
        "stop_grace_period": f"{worker_grace_s(plan)}s",
        **_event_ports(plan),
    }
    mounts = _mounts(plan, volumes)
    if mounts:
        service["volumes"] = mounts
    dependencies = _dependencies(plan, site)
    if dependencies:
        service["depends_on"] = dependencies
    if plan.worker.working_dir is not None:
        service["working_dir"] = plan.worker.working_dir
    memory = (plan.resources.limits or {}).get("memory")
    if memory is not None:
        service["mem_limit"] = byte_count(str(memory))
    if plan.gpus:
        service["deploy"] = _reservation(_devices(plan, worker))
    return service


def _event_ports(plan: EndpointPlan) -> Service:
    ports = dict(event_ports(plan))
    if plan.group is not None and not plan.is_simulated:
        ports["transfer"] = TRANSFER_PORT
    return {"expose": [str(port) for port in ports.values()]} if ports else {}


def _devices(plan: EndpointPlan, worker: WorkerSite) -> list[str]:
    """The worker's GPU ids. If each worker has one GPU, a variable can select another one."""
    if plan.gpus == 1:
        letter = worker.name.partition("-")[2]
        return [f"${{GPU_{identifier(letter)}:-{worker.gpus[0]}}}"]
    return list(worker.gpus)


def _reservation(devices: list[str]) -> dict[str, Any]:
    device = {"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}
    return {"resources": {"reservations": {"devices": [device]}}}


def _mounts(plan: EndpointPlan, volumes: dict[str, None]) -> list[str]:
    mounts = _model_mounts(plan, volumes)
    if not mounts:
        volumes["models"] = None
        mounts.append(f"models:{HUB_CACHE}")
    if plan.cache is not None and plan.cache.classic:
        mounts += _tier_mounts(plan)
    return mounts


def _model_mounts(plan: EndpointPlan, volumes: dict[str, None]) -> list[str]:
    """The mount of the model's files; empty if the model is downloaded by its name."""
    model = plan.model
    if model.volume is None:
        return []
    if isinstance(model.store, S3Storage):
        volumes["model"] = None
        return [f"model:{model.volume.mount_path}:ro"]
    # A folder, or a file system that this host has mounted.
    folder = model.location if model.location.startswith(("/", ".")) else "./model"
    return [f"${{MODEL_DIR:-{folder}}}:{model.volume.mount_path}:ro"]


def _mount_model(gateway: Service, plan: EndpointPlan, volumes: dict[str, None]) -> None:
    """Mount the model's files in the gateway, which needs the tokenizer."""
    gateway["volumes"] += _model_mounts(plan, volumes)
    if isinstance(plan.model.store, S3Storage):
        gateway["depends_on"] = {"model": {"condition": "service_completed_successfully"}}


def _tier_mounts(plan: EndpointPlan) -> list[str]:
    cache = plan.cache
    if cache is None or cache.l2 is None or cache.l2.name != "fs":
        return []
    path = plan.extension.l2.fs.path if plan.extension.l2.fs else "/var/cache/lmcache"
    return [f"${{LMCACHE_DIR:-{path}}}:{path}"]


def _dependencies(plan: EndpointPlan, site: DeploymentSite) -> dict[str, Any]:
    dependencies: dict[str, Any] = {}
    if plan.cache is not None and plan.cache.has_servers:
        names = [site.server_name(number) for number in range(len(site.servers))]
        dependencies |= {name: {"condition": "service_healthy"} for name in names}
    elif site.tier is not None:
        dependencies |= {service.name: {"condition": "service_healthy"} for service in site.tier.services}
    if isinstance(plan.model.store, S3Storage):
        dependencies["model"] = {"condition": "service_completed_successfully"}
    return dependencies


def _lmcache(
    plan: EndpointPlan, cache: Cache, server: ServerSite, site: DeploymentSite, profile: str, number: int
) -> Service:
    reference = f"${{{PASSWORD}:-}}"
    argv = [
        escaped(word).replace(escaped(PASSWORD_REFERENCE), reference)
        for word in server_argv(plan, cache, server, site)
    ]
    environment = {key: escaped(value) for key, value in server_environment(plan, site).items()}
    if password_name(plan, site) not in ("", PASSWORD):
        environment[password_name(plan, site)] = reference
    service: Service = {
        "image": f"${{LMCACHE_IMAGE:-{plan.extension.images.lmcache or plan.image}}}",
        "profiles": [profile],
        "restart": "unless-stopped",
        "entrypoint": argv[:2],
        "command": argv[2:],
        "environment": environment,
        "ipc": "host",
        "healthcheck": http_health(LMCACHE_HTTP_PORT, "python3", path="/healthcheck", start_period="120s"),
    }
    mounts = _tier_mounts(plan)
    if mounts:
        service["volumes"] = mounts
    if site.tier is not None and site.tier.services:
        service["depends_on"] = {
            dependency.name: {"condition": "service_healthy"} for dependency in site.tier.services
        }
    if plan.gpus:
        service["deploy"] = _reservation(
            [device for worker in site.workers_of_server(number) for device in _devices(plan, worker)]
        )
    return service


def _tier_service(service: ServiceSpec) -> Service:
    command = list(service.command)
    if command[0] == "kvroute":
        # The image's entrypoint is `kvroute`.
        command = command[1:]
    result: Service = {
        "image": f"${{{identifier(service.name)}_IMAGE:-{service.image}}}",
        "restart": "unless-stopped",
        "command": [escaped(word) for word in command],
        "healthcheck": {
            "test": ["CMD", *service.probe],
            "interval": "5s",
            "timeout": "3s",
            "retries": 5,
        },
    }
    if "--maxmemory" in command:
        index = command.index("--maxmemory") + 1
        result["command"][index] = f"${{{identifier(service.name)}_MAXMEMORY:-{command[index]}}}"
    if service.shares_memory:
        result["ipc"] = "host"
        # At its start it reserves memory, and waits until the leases of a killed daemon have ended.
        result["healthcheck"]["start_period"] = "120s"
    return result


def _download(plan: EndpointPlan, store: S3Storage, profile: str) -> Service:
    """A service that copies the model from its bucket, once."""
    volume = plan.model.volume
    target = volume.mount_path if volume is not None else "/model"
    return {
        "image": plan.extension.images.downloader,
        "profiles": [profile],
        "command": [
            *("s3", "sync", "--only-show-errors"),
            escaped(f"s3://{store.bucket_name}/{plan.model.location}"),
            target,
        ],
        "environment": {
            "AWS_REGION": store.region,
            "AWS_ACCESS_KEY_ID": "${AWS_ACCESS_KEY_ID:-}",
            "AWS_SECRET_ACCESS_KEY": "${AWS_SECRET_ACCESS_KEY:-}",
            "AWS_SESSION_TOKEN": "${AWS_SESSION_TOKEN:-}",
        },
        "volumes": [f"model:{target}"],
    }


def _prometheus(plan: EndpointPlan) -> Service:
    return {
        "image": f"${{PROMETHEUS_IMAGE:-{plan.extension.images.prometheus}}}",
        "restart": "unless-stopped",
        "ports": ["127.0.0.1:${PROMETHEUS_PORT:-9090}:9090"],
        "volumes": [
            f"./{PROMETHEUS_FILE}:/etc/prometheus/prometheus.yml:ro",
            f"./{ALERTS_FILE}:/etc/prometheus/{_RULES}:ro",
            "prometheus:/prometheus",
        ],
    }


def _grafana(plan: EndpointPlan) -> Service:
    """Grafana with the dashboards, on this host only. Everybody is a viewer, and nobody can log in."""
    return {
        "image": f"${{GRAFANA_IMAGE:-{plan.extension.images.grafana}}}",
        "restart": "unless-stopped",
        "environment": {
            "GF_AUTH_ANONYMOUS_ENABLED": "true",
            "GF_AUTH_BASIC_ENABLED": "false",
            "GF_AUTH_DISABLE_LOGIN_FORM": "true",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        },
        "ports": ["127.0.0.1:${GRAFANA_PORT:-3000}:3000"],
        "volumes": [
            f"./{PROVISIONING}:/etc/grafana/provisioning:ro",
            f"./{DASHBOARDS}:/var/lib/grafana/dashboards:ro",
            "grafana:/var/lib/grafana",
        ],
        "depends_on": ["prometheus"],
    }


def _scrape_config(plan: EndpointPlan, workers: list[str], services: dict[str, Service]) -> str:
    interval = f"{plan.metrics.metrics_scrape_interval_seconds}s"
    gateway = f"kvroute:{plan.extension.gateway.port}"
    jobs: list[dict[str, Any]] = [
        {"job_name": "kvroute", "static_configs": [{"targets": [gateway]}]},
        {"job_name": "vllm", "metrics_path": plan.scrape_path, "static_configs": [{"targets": workers}]},
    ]
    servers = [f"{name}:{LMCACHE_HTTP_PORT}" for name in services if name.startswith("lmcache")]
    if servers:
        jobs.append({"job_name": "lmcache", "static_configs": [{"targets": servers}]})
    head = "# Prometheus for docker-compose.yml. Workers of a profile that does not run are shown as down.\n"
    times = {"scrape_interval": interval, "evaluation_interval": interval}
    return head + yaml_text({"global": times, "rule_files": [_RULES], "scrape_configs": jobs})
