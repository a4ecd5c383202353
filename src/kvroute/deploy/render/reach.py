"""Decides which fields have an effect in each render target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final

from kvroute.deploy.render.lmcache import PASSWORD
from kvroute.deploy.render.plan import EndpointPlan
from kvroute.deploy.render.site import EVENTS_PORT, REPLAY_PORT, DeploymentSite
from kvroute.deploy.spec.cluster import cluster_notes
from kvroute.deploy.spec.endpoint import Document, WorkerDocument, resolved
from kvroute.deploy.spec.loading import Finding
from kvroute.deploy.spec.source import FieldVerdict, Path, dotted
from kvroute.deploy.spec.versions import is_classic
from kvroute.routing.registry import needs_of
from kvroute.routing.strategy import Needs

COMPOSE, KUBERNETES, LMCACHE, WORKER_ARGS, CONFIG, ENVOY = (
    "compose",
    "kubernetes",
    "lmcache",
    "worker-args",
    "config",
    "envoy",
)
_ENV = "spec.worker.environmentVariables"
_CONTAINERS = frozenset({COMPOSE, KUBERNETES})
_WORKERS = _CONTAINERS | {WORKER_ARGS}
_CONFIG = frozenset({CONFIG, ENVOY})
"""Both contain the gateway's configuration."""
_GATEWAY = _CONTAINERS | _CONFIG
_CACHE = _CONTAINERS | {LMCACHE}
_ENGINE = _WORKERS | {LMCACHE}

TARGETS_OF_FIELDS: Final[dict[str, frozenset[str]]] = {
    "apiVersion": _ENGINE | _CONFIG,
    "kind": _ENGINE | _CONFIG,
    "metadata.name": _CACHE | _CONFIG,
    "spec.environmentVariables": _WORKERS,
    "spec.model": _WORKERS,
    "spec.model.modelId": _WORKERS | _CONFIG,
    "spec.model.modelVersion": frozenset({KUBERNETES}),
    "spec.modelName": _WORKERS | _CONFIG,
    "spec.modelSourceConfig": _CONTAINERS,
    "spec.modelSourceConfig.modelSourceType": _WORKERS | _CONFIG,
    "spec.modelSourceConfig.huggingFaceModel": _WORKERS,
    "spec.modelSourceConfig.huggingFaceModel.tokenSecretRef": frozenset({KUBERNETES}),
    "spec.modelSourceConfig.fsxStorage": frozenset({KUBERNETES}),
    "spec.replicas": _ENGINE | _CONFIG,
    "spec.pdSpec.prefillSpec.args": _WORKERS,
    "spec.pdSpec.prefillSpec.replicas": _WORKERS | _CONFIG,
    "spec.pdSpec.prefillSpec.resources.limits": _WORKERS,
    "spec.pdSpec.decodingSpec.args": _WORKERS,
    "spec.pdSpec.decodingSpec.replicas": _WORKERS | _CONFIG,
    "spec.pdSpec.decodingSpec.resources.limits": _WORKERS,
    "spec.pdSpec.routingThreshold": _GATEWAY,
    "spec.server.instanceType": _WORKERS,
    "spec.server.acceleratorPartitionType": _WORKERS,
    "spec.InitialReplicaCount": _ENGINE | _CONFIG,
    "spec.maxDeployTimeInSeconds": _CONTAINERS,
    "spec.kvCacheSpec": _CACHE,
    "spec.kvCacheSpec.enableL1Cache": _ENGINE,
    "spec.kvCacheSpec.enableL2Cache": _ENGINE,
    "spec.kvCacheSpec.cacheConfigFile": _ENGINE,
    "spec.intelligentRoutingSpec": _GATEWAY,
    "spec.intelligentRoutingSpec.autoScalingSpec": frozenset({KUBERNETES}),
    "spec.metrics": _CONTAINERS,
    "spec.worker.image": _CONTAINERS,
    "spec.worker.workingDir": _CONTAINERS,
    "spec.worker.command": _WORKERS,
    "spec.worker.args": _WORKERS,
    "spec.worker.environmentVariables": _WORKERS,
    "spec.worker.modelInvocationPort.containerPort": _WORKERS | _CONFIG,
    "spec.worker.modelVolumeMount.mountPath": _WORKERS | _CONFIG,
    "spec.worker.resources.limits": _WORKERS,
    "spec.worker.requestLimits": _GATEWAY,
    "x-kvroute.engine": _ENGINE,
    "x-kvroute.model": _WORKERS,
    "x-kvroute.device": _WORKERS,
    "x-kvroute.gpusPerWorker": _WORKERS,
    "x-kvroute.images": _CONTAINERS,
    "x-kvroute.images.gatewayBuild": frozenset({COMPOSE}),
    "x-kvroute.images.prometheus": frozenset({COMPOSE}),
    "x-kvroute.images.grafana": frozenset({COMPOSE}),
    "x-kvroute.images.downloader": frozenset({COMPOSE}),
    "x-kvroute.versions": _ENGINE,
    "x-kvroute.lmcache": _CACHE,
    "x-kvroute.lmcache.mode": _ENGINE,
    "x-kvroute.lmcache.servers": _ENGINE,
    "x-kvroute.lmcache.hashSeed": _ENGINE,
    "x-kvroute.l1": _CACHE,
    "x-kvroute.l2": _CACHE,
    "x-kvroute.l2.sizeGb": _CONTAINERS,
    "x-kvroute.l2.passwordSecret": frozenset({KUBERNETES}),
    "x-kvroute.l2.fs.claim": frozenset({KUBERNETES}),
    "x-kvroute.routing": _GATEWAY,
    "x-kvroute.gateway.port": _GATEWAY,
    "x-kvroute.gateway.settings": _GATEWAY,
}
"""Field -> targets in which it and all fields below it have an effect.

Of several matching fields the longest counts. A field without a match has an effect in Kubernetes only.
"""

GATEWAY_FIELDS: Final = (
    "spec.model",
    "spec.kvCacheSpec.enableL1Cache",
    "spec.kvCacheSpec.enableL2Cache",
    "spec.kvCacheSpec.l2CacheSpec",
    "x-kvroute.versions",
    "x-kvroute.lmcache",
    "x-kvroute.l2.options",
    "x-kvroute.l2.passwordSecret",
)
"""Fields that also have an effect in the gateway's configuration if the gateway follows the caches."""
# To find LMCache's chunks, the gateway needs LMCache's settings.

REASONS: Final[dict[str, dict[str, str]]] = {
    "x-kvroute.l2.passwordSecret": {
        COMPOSE: f"the password is read from the variable {PASSWORD}",
        LMCACHE: f"lmcache-servers.sh reads the password from {PASSWORD}; lmcache.yaml leaves it out",
    },
    "x-kvroute.l2.sizeGb": {LMCACHE: "the store is started manually, with its own size"},
    "x-kvroute.gateway.apiKeysSecret": {COMPOSE: "the keys are read from the variable KVROUTE_API_KEYS"},
    "x-kvroute.gateway.adminKeySecret": {
        COMPOSE: "the key is read from the variable KVROUTE_ADMIN_KEY; without it the gateway makes a key"
    },
    "spec.modelSourceConfig.huggingFaceModel.tokenSecretRef": {
        COMPOSE: "the token is read from the variable HF_TOKEN",
        WORKER_ARGS: "the workers read the token from HF_TOKEN of the shell",
    },
    "spec.modelSourceConfig.fsxStorage": {
        COMPOSE: "the variable MODEL_DIR names the folder where this host has mounted the file system"
    },
    _ENV: dict.fromkeys((COMPOSE, WORKER_ARGS), "it refers to an object of Kubernetes"),
}
"""Field -> target -> why the field has no effect there. Overrides `DEFAULT_REASONS`."""
DEFAULT_REASONS: Final = {
    COMPOSE: "it is a setting of Kubernetes",
    KUBERNETES: "it is a setting of compose",
    LMCACHE: "this target contains only settings of LMCache",
    WORKER_ARGS: "this target contains only the workers' command lines",
    CONFIG: "this target contains only the gateway's configuration",
    ENVOY: "this target contains only Envoy's configuration and that of the endpoint pickers",
}
_GATEWAYS: Final[Path] = ("x-kvroute", "gateway", "replicas")
_TIERD_TEXT = "`kvroute tierd`, with the same protocol as the storage daemon that only HyperPod's nodes have"


def findings_for(
    target: str, written: Document, findings: Iterable[Finding], *, shares: bool = False
) -> Iterator[Finding]:
    """Yield `findings` for `target`: applied fields that have no effect there become noted ones.

    For Kubernetes, also what the operator must know about the cluster. With `shares` several gateways share
    what they know.
    """
    document = resolved(written)
    notes = cluster_notes(document) if target == KUBERNETES else {}
    for finding in findings:
        is_shared = shares and finding.path == _GATEWAYS and not _is_autoscaled(document, dotted(_GATEWAYS))
        if is_shared and finding.verdict is not FieldVerdict.WRONG:
            yield dataclasses.replace(finding, verdict=FieldVerdict.APPLIED, text="the pickers, two at least")
            continue
        if finding.verdict is not FieldVerdict.WRONG and finding.path in notes:
            text = notes.pop(finding.path)
            yield dataclasses.replace(finding, verdict=FieldVerdict.NOTED, text=text)
            continue
        is_applied = finding.verdict is FieldVerdict.APPLIED or finding.text.startswith("applied")
        reason = _why_not(target, document, finding.path) if is_applied and finding.path else ""
        if reason:
            text = f"has no effect in {target} because {reason}"
            yield dataclasses.replace(finding, verdict=FieldVerdict.NOTED, text=text)
        elif target != KUBERNETES and is_applied and _chooses_hyperpod_daemon(document, finding.path):
            yield dataclasses.replace(finding, verdict=FieldVerdict.APPLIED, text=_TIERD_TEXT)
        else:
            yield finding
    for path, text in notes.items():
        yield Finding(path, None, FieldVerdict.NOTED, text)


def _why_not(target: str, document: WorkerDocument, path: Path) -> str:
    """Why a field has no effect in `target`; empty if it has an effect."""
    name = dotted(tuple(key for key in path if isinstance(key, str)))
    reached = TARGETS_OF_FIELDS.get(_longest_prefix(name, TARGETS_OF_FIELDS), frozenset({KUBERNETES}))
    if name.startswith(_ENV) and _is_by_reference(document, path):
        reached = frozenset({KUBERNETES})
    elif is_classic(document) and reached == _CACHE:
        # In classic mode LMCache runs inside the engines, and its settings are in the workers' environment.
        reached = _ENGINE
    elif name == "x-kvroute.l2.sizeGb" and _backend(document) == "tieredstorage":
        # The target lmcache has the size in tierd.sh.
        reached = _CACHE
    elif _decides_events(document, name):
        reached = _ENGINE | _CONFIG
    is_part_of_model = name.startswith("spec.model.")  # of a JumpStartModel, whose `spec.model` is a section
    if _follows_caches(document) and _longest_prefix(name, GATEWAY_FIELDS) and not is_part_of_model:
        reached = reached | _CONFIG
    if target == KUBERNETES and name in _COUNTS and _is_autoscaled(document, name):
        return "the autoscaler decides the number"
    if target in reached:
        return ""
    return REASONS.get(_longest_prefix(name, REASONS), {}).get(target, DEFAULT_REASONS[target])


_COUNTS: Final = ("spec.replicas", "spec.InitialReplicaCount", "x-kvroute.gateway.replicas")


def _is_autoscaled(document: WorkerDocument, name: str) -> bool:
    """Whether an autoscaler decides the number in the field `name`."""
    if name.startswith("spec."):
        return document.spec.auto_scaling_spec is not None
    routing = document.spec.intelligent_routing_spec
    return routing is not None and routing.auto_scaling_spec is not None


def _chooses_hyperpod_daemon(document: WorkerDocument, path: Path) -> bool:
    """Whether this field chooses the storage daemon of HyperPod's nodes."""
    return (
        dotted(path) == "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend"
        and _backend(document) == "tieredstorage"
        and document.x_kvroute.platform == "hyperpod"
    )


def _backend(document: WorkerDocument) -> str:
    cache = document.spec.kv_cache_spec
    l2 = cache.l2_cache_spec if cache is not None else None
    return (l2.l2_cache_backend or "").lower() if l2 is not None else ""


def _longest_prefix(name: str, names: Iterable[str]) -> str:
    """The longest of `names` that is `name` or a field above it; empty when there is none."""
    return max(
        (candidate for candidate in names if f"{name}.".startswith(f"{candidate}.")), key=len, default=""
    )


def _is_by_reference(document: WorkerDocument, path: Path) -> bool:
    worker = document.spec.worker
    variables = worker.environment_variables if worker is not None else None
    numbers = [key for key in path if isinstance(key, int)]
    return bool(variables and numbers and variables[numbers[0]].value_from is not None)


def _decides_events(document: WorkerDocument, name: str) -> bool:
    """Whether the field `name` decides if engines and LMCache report their caches to the gateway."""
    routing = document.spec.intelligent_routing_spec
    fields = ("spec.intelligentRoutingSpec.enabled", "spec.intelligentRoutingSpec.routingStrategy")
    return name in fields and routing is not None and needs_of(routing.routing_strategy) is Needs.TOKENS


def _follows_caches(document: WorkerDocument) -> bool:
    routing = document.spec.intelligent_routing_spec
    return routing is not None and routing.enabled and needs_of(routing.routing_strategy) is Needs.TOKENS


def report_ports(plan: EndpointPlan, site: DeploymentSite) -> dict[str, int]:
    """The gateway's ports for LMCache's reports: name -> port."""
    if not plan.follows_caches or plan.cache is None:
        return {}
    ports = site.reports
    if not plan.cache.classic:
        reports = plan.versions.pair.lmcache.reports_chunks
        return {"coordinator": ports.coordinator} if reports else {}
    return {"lmcache-pull": ports.pull, "lmcache-reply": ports.reply, "lmcache-beat": ports.heartbeat}


def event_ports(plan: EndpointPlan) -> dict[str, int]:
    """The ports of a worker's container for KV events and replay: name -> port, one pair per rank."""
    if not plan.has_events:
        return {}
    ranks = range(plan.ranks)
    rank_zero = {"kv-events": EVENTS_PORT, "kv-replay": REPLAY_PORT}
    more = {f"{name}-{rank}": port + rank for name, port in rank_zero.items() for rank in ranks if rank}
    return rank_zero | more
