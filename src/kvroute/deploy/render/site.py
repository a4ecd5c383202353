"""Addresses of an endpoint's parts: as processes of one host, as containers, and as pods."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.deploy.l2.backend import L2Location, L2Tier, ServiceSpec
from kvroute.deploy.render.plan import Cache, EndpointPlan, suffix

LMCACHE_PORT, LMCACHE_HTTP_PORT = 5555, 9555
EVENTS_PORT, REPLAY_PORT = 5557, 6557
CLASSIC_WORKER_PORT = 8788
TRANSFER_PORT = 5600
"""vLLM's default of VLLM_NIXL_SIDE_CHANNEL_PORT."""
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
PORT_STRIDE = 10
"""Distance between the ports of two workers on one host, because each rank of a worker needs its own port."""


@dataclass(frozen=True, slots=True)
class ReportPorts:
    """The gateway's ports for LMCache's reports. Both the gateway and LMCache are configured with them.

    The defaults are those of the gateway's options (`lmcache.coordinator`, `lmcache.controller`).
    """

    coordinator: int = 9300
    pull: int = 8300
    reply: int = 8400
    heartbeat: int = 8500


@dataclass(frozen=True, slots=True)
class WorkerSite:
    """Name and addresses of one worker, and the address of its LMCache server."""

    name: str
    """The worker's id in the gateway. Also its LMCache server's instance id if each worker has its own
    server."""
    url: str
    bind: str
    port: int
    events_port: int
    replay_port: int
    lmcache_host: str
    lmcache_port: int
    classic_port: int
    gpus: tuple[str, ...]
    role: str | None = None
    """Its role for the gateway; None if all workers do prefill and decode."""
    transfer_host: str = ""
    """Where other engines reach its NIXL side channel, at `transfer_port`."""
    transfer_port: int = TRANSFER_PORT


@dataclass(frozen=True, slots=True)
class ServerSite:
    """Instance id and addresses of one LMCache server."""

    instance_id: str
    bind: str
    port: int
    http_port: int
    advertise: str | None = None
    """The address that the server reports to the coordinator; None: the server finds it itself."""


@dataclass(frozen=True, slots=True)
class DeploymentSite:
    """All addresses of one deployment."""

    workers: tuple[WorkerSite, ...]
    servers: tuple[ServerSite, ...]
    tier: L2Tier | None
    gateway_bind: str
    gateway_host: str
    """The gateway's host name for workers and LMCache servers."""
    is_local: bool = False
    """Whether the parts are processes of this host, which see the host's folders under their own paths."""
    reports: ReportPorts = ReportPorts()
    is_cluster: bool = False
    """Whether the parts are pods, which the gateway finds by their labels."""

    def server_name(self, number: int) -> str:
        """The name of LMCache server `number` as service or process. It has a suffix if there are several."""
        return f"lmcache-{suffix(number)}" if len(self.servers) > 1 else "lmcache"

    def workers_of_server(self, number: int) -> tuple[WorkerSite, ...]:
        """The workers that use LMCache server `number`."""
        return (self.workers[number],) if len(self.servers) > 1 else self.workers


def peers_name(plan: EndpointPlan, service: ServiceSpec) -> str:
    """The name of the headless Service of a tier: it resolves to the address of every instance."""
    return f"{plan.name}-{service.name}-peers"


def tier_of(plan: EndpointPlan, host: str, *, on_hyperpod: bool = False) -> L2Tier | None:
    """The second tier, whose service is at `host` if the deployment starts it; None without a second tier."""
    cache = plan.cache
    if cache is None or cache.l2 is None:
        return None
    return cache.l2.tier(L2Location(cache.l2_url, plan.extension, host, on_hyperpod))


def _placed(plan: EndpointPlan) -> list[tuple[str, str | None, tuple[int, int]]]:
    """Each worker's suffix and role, and the range of its GPUs on one host."""
    placed: list[tuple[str, str | None, tuple[int, int]]] = []
    at = 0
    for role_plan in plan.by_role:
        role = role_plan.group.role if role_plan.group is not None else None
        for number in range(role_plan.replicas):
            name = suffix(number) if role is None else f"{role}-{suffix(number)}"
            placed.append((name, role, (at, at + role_plan.gpus)))
            at += role_plan.gpus
    return placed


def local_site(plan: EndpointPlan) -> DeploymentSite:
    """All parts on this host. The workers' ports start at the spec's port."""
    servers = _server_count(plan, plan.replicas)
    return DeploymentSite(
        workers=tuple(
            WorkerSite(
                name=f"{plan.name}-{name}",
                url=f"http://{LOOPBACK}:{plan.port + number}",
                bind=LOOPBACK,
                port=plan.port + number,
                events_port=EVENTS_PORT + PORT_STRIDE * number,
                replay_port=REPLAY_PORT + PORT_STRIDE * number,
                lmcache_host=LOOPBACK,
                lmcache_port=LMCACHE_PORT + PORT_STRIDE * (number if servers > 1 else 0),
                classic_port=CLASSIC_WORKER_PORT + PORT_STRIDE * number,
                gpus=tuple(map(str, range(*gpus))),
                role=role,
                transfer_host=LOOPBACK,
                transfer_port=TRANSFER_PORT + PORT_STRIDE * number,
            )
            for number, (name, role, gpus) in enumerate(_placed(plan))
        ),
        servers=tuple(
            ServerSite(
                instance_id=_instance_id(plan, number),
                bind=LOOPBACK,
                port=LMCACHE_PORT + PORT_STRIDE * number,
                http_port=LMCACHE_HTTP_PORT + PORT_STRIDE * number,
                advertise=LOOPBACK,
            )
            for number in range(servers)
        ),
        tier=tier_of(plan, LOOPBACK, on_hyperpod=False),
        gateway_bind=LOOPBACK,
        gateway_host=LOOPBACK,
        is_local=True,
    )


def compose_site(plan: EndpointPlan, gateway: str) -> DeploymentSite:
    """Containers that reach each other by service names. `gateway` is the gateway's service name."""
    prefix = "sim" if plan.is_simulated else "vllm"
    placed = _placed(plan)
    names = [f"{prefix}-{name}" for name, _, _ in placed]
    servers = _server_count(plan, plan.replicas)
    server_names = [f"lmcache-{suffix(number)}" if servers > 1 else "lmcache" for number in range(servers)]
    service = plan.cache.l2.service_name if plan.cache and plan.cache.l2 else ""
    return DeploymentSite(
        workers=tuple(
            WorkerSite(
                name=name,
                url=f"http://{name}:{plan.port}",
                bind=EVERYWHERE,
                port=plan.port,
                events_port=EVENTS_PORT,
                replay_port=REPLAY_PORT,
                lmcache_host=server_names[number if servers > 1 else 0] if servers else "",
                lmcache_port=LMCACHE_PORT,
                classic_port=CLASSIC_WORKER_PORT,
                gpus=tuple(map(str, range(*gpus))),
                role=role,
                transfer_host=name,
            )
            for number, (name, (_, role, gpus)) in enumerate(zip(names, placed, strict=True))
        ),
        servers=tuple(
            ServerSite(
                instance_id=names[number] if servers > 1 else f"{plan.name}-node",
                bind=EVERYWHERE,
                port=LMCACHE_PORT,
                http_port=LMCACHE_HTTP_PORT,
            )
            for number in range(servers)
        ),
        tier=tier_of(plan, service),
        gateway_bind=EVERYWHERE,
        gateway_host=gateway,
    )


def kubernetes_site(plan: EndpointPlan, workers: int) -> DeploymentSite:
    """Pods of a StatefulSet, each with its own name. `workers` is the largest number of worker pods."""
    domain = f"{plan.name}-workers.{plan.namespace}.svc"
    cache = plan.cache
    per_worker = cache is not None and cache.per_worker
    on_hyperpod = plan.extension.platform == "hyperpod"
    service = f"{plan.name}-{cache.l2.service_name}" if cache and cache.l2 and cache.l2.service_name else ""
    return DeploymentSite(
        workers=tuple(
            WorkerSite(
                name=f"{plan.name}-{kind}-{number}",
                url=f"http://{plan.name}-{kind}-{number}.{domain}:{plan.port}",
                bind=EVERYWHERE,
                port=plan.port,
                events_port=EVENTS_PORT,
                replay_port=REPLAY_PORT,
                lmcache_host=LOOPBACK if per_worker else f"{plan.name}-lmcache",
                lmcache_port=LMCACHE_PORT,
                classic_port=CLASSIC_WORKER_PORT,
                gpus=tuple(str(gpu) for gpu in range(role_plan.gpus)),
                role=role_plan.group.role if role_plan.group is not None else None,
                transfer_host="$(POD_IP)",
            )
            for role_plan in plan.by_role
            for kind in [role_plan.group.role if role_plan.group is not None else "worker"]
            for number in range(_largest(role_plan) if role_plan.group is not None else workers)
        ),
        servers=tuple(
            ServerSite(
                instance_id="$(POD_NAME)" if per_worker else f"{plan.name}-$(NODE_NAME)",
                bind=EVERYWHERE,
                port=LMCACHE_PORT,
                http_port=LMCACHE_HTTP_PORT,
                advertise="$(POD_IP)",
            )
            for _ in range(1 if cache and cache.has_servers else 0)
        ),
        tier=tier_of(plan, service, on_hyperpod=on_hyperpod),
        gateway_bind=EVERYWHERE,
        gateway_host=f"{plan.name}-gateway-cache",
        is_cluster=True,
    )


def _largest(plan: EndpointPlan) -> int:
    """The largest number of workers of one role."""
    scaling = plan.group.scaling if plan.group is not None else None
    return max(plan.replicas, scaling.max_replica_count if scaling is not None else 0)


def _server_count(plan: EndpointPlan, replicas: int) -> int:
    cache: Cache | None = plan.cache
    if cache is None or not cache.has_servers:
        return 0
    return replicas if cache.per_worker else 1


def _instance_id(plan: EndpointPlan, number: int) -> str:
    cache = plan.cache
    return f"{plan.name}-{suffix(number)}" if cache and cache.per_worker else f"{plan.name}-node"
