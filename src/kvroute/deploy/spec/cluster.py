"""Overlays of pod templates: rules and the strategic merge. Also what a cluster does with a spec. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvroute.deploy.spec.endpoint import (
    CommonSpec,
    InferenceEndpointConfig,
    InferenceEndpointSpec,
    WorkerDocument,
)
from kvroute.deploy.spec.extension import ClusterSettings, Extension
from kvroute.deploy.spec.source import FieldVerdict, Path, dotted
from kvroute.deploy.spec.versions import is_classic
from kvroute.deploy.tiny_model import TINY_MODELS
from kvroute.routing.registry import needs_of
from kvroute.routing.strategy import Needs

ClusterFinding = tuple[Path, FieldVerdict, str]
Object = Mapping[str, Any]

CLUSTER: Final[Path] = ("x-kvroute", "kubernetes")
SCALING: Final[Path] = ("x-kvroute", "scaling")
PATCH: Final = "$patch"
"""The key of a directive of Kubernetes' strategic merge: `delete`, `replace` or `merge`."""

MERGE_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "claims": ("name",),
    "schedulingGates": ("name",),
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    # Kubernetes itself replaces tolerations. Added, because the pods need their own ones, too.
    "tolerations": ("key", "operator", "value", "effect"),
}
"""List of a pod template -> the fields that identify an item. Every other list is replaced."""
# From the patch keys of v1 PodSpec and v1 Container, Kubernetes 1.37.

_OPTIONAL_KEYS: Final = {"ports": {"protocol": "TCP"}}
_MAY_BE_ABSENT: Final = frozenset({"ports", "tolerations", "topologySpreadConstraints"})
_METADATA: Final = frozenset({"annotations", "labels"})
_POD: Final = frozenset(
    {
        *("activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers", "dnsConfig"),
        *("dnsPolicy", "enableServiceLinks", "hostAliases", "hostIPC", "hostNetwork", "hostPID", "hostUsers"),
        *("hostname", "imagePullSecrets", "initContainers", "nodeName", "nodeSelector", "os", "overhead"),
        *("preemptionPolicy", "priority", "priorityClassName", "readinessGates", "resourceClaims"),
        *("resources", "restartPolicy", "runtimeClassName", "schedulerName", "schedulingGates"),
        *("securityContext", "serviceAccountName", "setHostnameAsFQDN", "shareProcessNamespace"),
        *("subdomain", "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints"),
        "volumes",
    }
)
"""The fields of v1 PodSpec that Kubernetes 1.29 to 1.37 accept, without ephemeralContainers."""
_PEER: Final = frozenset({"ipBlock", "namespaceSelector", "podSelector"})
_OWN_LABELS: Final = re.compile(r"app\.kubernetes\.io/(?:instance|component)")
CONTAINERS: Final = {
    "podTemplate": ("worker", "lmcache", "tierd"),
    "servicePodTemplate": ("kvroute", "redis", "valkey", "mooncake"),
}
"""Overlay -> the containers that kvroute renders in its pods."""


# --- rules ------------------------------------------------------------------------------------------------


def cluster_rules(document: WorkerDocument) -> Iterator[ClusterFinding]:
    """Yield the wrong and unused fields of `x-kvroute.kubernetes`."""
    settings = document.x_kvroute.kubernetes
    for key, template in (
        ("podTemplate", settings.pod_template),
        ("servicePodTemplate", settings.service_pod_template),
    ):
        for below, text in template_problems(template or {}, CONTAINERS[key]):
            yield (*CLUSTER, key, *below), FieldVerdict.WRONG, text
    if settings.max_surge and settings.workload == "StatefulSet":
        text = "a StatefulSet cannot surge: set workload: Deployment"
        yield (*CLUSTER, "maxSurge"), FieldVerdict.WRONG, text
    cache = settings.model_cache
    if cache is not None:
        if cache.claim is not None and cache.host_path is not None:
            yield (*CLUSTER, "modelCache", "hostPath"), FieldVerdict.WRONG, "give claim or hostPath, not both"
        elif not _is_downloaded(document):
            for key, value in (("claim", cache.claim), ("hostPath", cache.host_path)):
                if value is not None:
                    yield _unused("the workers do not download the model", "modelCache", key)
    for number, peer in enumerate(settings.metrics_from or []):
        unknown = sorted(set(peer) - _PEER)
        if unknown or not peer:
            text = f"a NetworkPolicy peer has {', '.join(sorted(_PEER))}, got {', '.join(unknown) or 'none'}"
            yield (*CLUSTER, "metricsFrom", number), FieldVerdict.WRONG, text
    metrics = document.spec.metrics
    if settings.metrics_from is not None and metrics is not None and not metrics.enabled:
        yield _unused("metrics.enabled is false", "metricsFrom")
    has_label = needs_gpu_label(document.spec, document.x_kvroute, classic=is_classic(document))
    if "gpu_node_labels" in settings.model_fields_set and not has_label:
        yield _unused("the spec chooses the nodes itself, or no cache server runs per node", "gpuNodeLabels")


def scaling_rules(document: WorkerDocument) -> Iterator[ClusterFinding]:
    """Yield the wrong combinations of `x-kvroute.scaling` with other fields."""
    settings, extension, spec = document.x_kvroute.scaling, document.x_kvroute, document.spec
    limits, routing = spec.auto_scaling_spec, spec.intelligent_routing_spec
    if settings.by == "workersNeeded":
        yield from _needed_workers_rules(document)
    elif settings.prometheus_address is not None:
        yield (*SCALING, "prometheusAddress"), FieldVerdict.WRONG, "needs by: workersNeeded"
    if not settings.deletion_cost:
        return
    here = (*SCALING, "deletionCost")
    if extension.kubernetes.workload != "Deployment":
        text = (
            "needs x-kvroute.kubernetes.workload: Deployment, because a StatefulSet always removes the pod "
            "with the highest number"
        )
        yield here, FieldVerdict.WRONG, text
    strategy = routing.routing_strategy if routing is not None and routing.enabled else None
    if needs_of(strategy) not in (Needs.PROMPT, Needs.TOKENS):
        text = (
            "needs spec.intelligentRoutingSpec with routingStrategy prefixaware or kvaware: other strategies "
            "do not know what the caches are worth"
        )
        yield here, FieldVerdict.WRONG, text
    if extension.gateway.replicas > 1 or (routing is not None and routing.auto_scaling_spec is not None):
        text = "needs one gateway: several would each write costs that follow from their own requests only"
        yield here, FieldVerdict.WRONG, text
    if limits is None and spec.replicas == 1:
        yield here, FieldVerdict.NOTED, "applied, but there is one worker and no autoScalingSpec"


def _needed_workers_rules(document: WorkerDocument) -> Iterator[ClusterFinding]:
    settings, limits, metrics = (
        document.x_kvroute.scaling,
        document.spec.auto_scaling_spec,
        document.spec.metrics,
    )
    here = (*SCALING, "by")
    if limits is None:
        yield here, FieldVerdict.WRONG, "workersNeeded needs spec.autoScalingSpec, which has the limits"
        return
    triggers = [*limits.prometheus(), *limits.cloud_watch()]
    if triggers and settings.prometheus_address is None:
        text = (
            "workersNeeded with triggers needs x-kvroute.scaling.prometheusAddress: KEDA, which the triggers "
            "need, makes an HPA of its own, and two HPAs of the same workers disturb each other"
        )
        yield here, FieldVerdict.WRONG, text
    if limits.min_replica_count == 0 and not triggers:
        text = (
            "must be at least 1 with x-kvroute.scaling.by: workersNeeded: without a worker the gateway "
            "refuses requests, and nothing would start the first worker"
        )
        yield ("spec", "autoScalingSpec", "minReplicaCount"), FieldVerdict.WRONG, text
    if metrics is not None and not metrics.enabled:
        text = (
            "applied, but spec.metrics.enabled is false: let Prometheus read the gateway's /metrics yourself"
        )
        yield here, FieldVerdict.NOTED, text


def template_problems(template: Object, containers: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield path and text of each part of an overlay that no pod template can have.

    Checks the names of the pod's fields and the items of merged lists; the API server checks the rest.
    """
    for key, value in template.items():
        if key not in ("metadata", "spec"):
            yield (key,), "is unknown: a pod template has metadata and spec"
        elif not isinstance(value, Mapping):
            yield (key,), "must be a mapping"
    metadata, spec = template.get("metadata"), template.get("spec")
    if isinstance(metadata, Mapping):
        for key, value in metadata.items():
            if key not in _METADATA:
                yield ("metadata", key), "is not one of annotations, labels"
            elif not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
                yield ("metadata", key), "must be a mapping of texts"
            elif key == "labels":
                for label in filter(_OWN_LABELS.fullmatch, value):
                    yield ("metadata", key, label), "is the label by which Kubernetes finds these pods"
    if isinstance(spec, Mapping):
        for key in spec:
            if key not in _POD and key != PATCH:
                yield ("spec", key), "is no field of a Kubernetes pod"
        yield from _list_problems(spec, ("spec",))
        yield from _container_problems(spec, containers)


def _list_problems(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield problems of lists whose items are merged by key."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _list_problems(item, (*path, number))
    if not isinstance(value, Mapping):
        return
    for key, inner in value.items():
        here = (*path, str(key))
        if key in MERGE_KEYS and not (key in ("claims", "ports") and len(path) < 3):
            if not isinstance(inner, list) or not all(isinstance(item, Mapping) for item in inner):
                yield here, "must be a list of mappings"
                continue
            wanted = MERGE_KEYS[key][0]
            for number, item in enumerate(inner):
                if wanted not in item and key not in _MAY_BE_ABSENT:
                    yield (*here, number), f"needs {wanted}, which identifies the item"
        yield from _list_problems(inner, here)


def _container_problems(spec: Object, container_names: Sequence[str]) -> Iterator[tuple[Path, str]]:
    for list_key in ("containers", "initContainers"):
        items = spec.get(list_key)
        for number, item in enumerate(items if isinstance(items, list) else ()):
            if not isinstance(item, Mapping):
                continue
            name = item.get("name")
            if name is not None and name not in container_names and "image" not in item:
                names = ", ".join(container_names)
                text = f"changes no container: there is {names}; a new container needs an image"
                yield ("spec", list_key, number), text


# --- the merge --------------------------------------------------------------------------------------------


def merged(base: Object, overlay: Object) -> dict[str, Any]:
    """`base` with `overlay` on top, as Kubernetes' strategic merge does it.

    Mappings are merged key by key, the lists of `MERGE_KEYS` item by item, and every other value is replaced.
    New items follow the old ones. `$patch: delete` removes an item, `$patch: replace` replaces a mapping.
    """
    if overlay.get(PATCH) == "replace":
        return _plain(overlay)
    result = dict(base)
    for key, value in overlay.items():
        if key == PATCH:
            continue
        old = result.get(key)
        if isinstance(value, Mapping):
            if value.get(PATCH) == "delete":
                result.pop(key, None)
            else:
                result[key] = merged(old if isinstance(old, Mapping) else {}, value)
        elif key in MERGE_KEYS and isinstance(value, list):
            result[key] = _merged_items(key, old if isinstance(old, list) else [], value)
        else:
            result[key] = value
    return result


def _merged_items(key: str, old: Sequence[Object], new: Sequence[Object]) -> list[dict[str, Any]]:
    items = {_identity(key, item): dict(item) for item in old}
    for item in new:
        identity = _identity(key, item)
        if item.get(PATCH) == "delete":
            items.pop(identity, None)
        else:
            items[identity] = merged(items.get(identity, {}), item)
    return list(items.values())


def _identity(key: str, item: Object) -> tuple[object, ...]:
    absent = _OPTIONAL_KEYS.get(key, {})
    return tuple(item.get(field, absent.get(field)) for field in MERGE_KEYS[key])


def _plain(value: Object) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if key != PATCH}


_SHARED: Final = (
    "nodeName",
    "nodeSelector",
    "tolerations",
    "runtimeClassName",
    "imagePullSecrets",
    "priorityClassName",
    "preemptionPolicy",
    # Pods that share memory must run as the same user.
    "securityContext",
)


def with_overlay(template: Object, overlay: Object | None, *, is_main: bool) -> dict[str, Any]:
    """The pod template with the part of `overlay` that concerns it.

    The main pods (workers, gateways) get everything. The others, which run beside them, get the annotations,
    what decides nodes, user, priority and image access, and changes of containers that they have.
    """
    if not overlay:
        return dict(template)
    spec = dict(overlay.get("spec", {}))
    metadata = dict(overlay.get("metadata", {}))
    base = template["spec"]
    if not is_main:
        node = _below(spec, "affinity", "nodeAffinity")
        containers = spec.get("containers", [])
        spec = {key: spec[key] for key in _SHARED if key in spec}
        if node is not None:
            spec["affinity"] = {"nodeAffinity": node}
        names = {container["name"] for container in base["containers"]}
        spec["containers"] = [container for container in containers if container["name"] in names]
        metadata.pop("labels", None)
    else:
        # LMCache's server is a sidecar of some workers, and `containers` changes it there, too.
        early = {container["name"] for container in base.get("initContainers", [])}
        moved = [container for container in spec.get("containers", []) if container["name"] in early]
        if moved:
            spec["initContainers"] = [*spec.get("initContainers", []), *moved]
            spec["containers"] = [container for container in spec["containers"] if container not in moved]
        # A change of another pod's container is no new container of this one.
        have = early | {container["name"] for container in base["containers"]}
        spec = {
            key: [container for container in value if container["name"] in have or "image" in container]
            if key in ("containers", "initContainers")
            else value
            for key, value in spec.items()
        }
    return merged(template, {"metadata": metadata, "spec": spec})


# --- what a cluster does ----------------------------------------------------------------------------------


def needs_gpu_label(spec: CommonSpec, extension: Extension, *, classic: bool) -> bool:
    """Whether the workers' nodes must have one of the labels of nodes with GPUs.

    True if pods on each node share memory, and neither the spec nor the overlay chooses nodes.
    """
    settings, affinity = extension.kubernetes, spec.node_affinity
    chosen = (
        (affinity is not None and affinity.required_during_scheduling_ignored_during_execution)
        or _chooses_nodes(settings)
        or (
            isinstance(spec, InferenceEndpointSpec)
            and extension.platform == "hyperpod"
            and (spec.instance_type or spec.instance_types)
        )
    )
    has_gpus = extension.device == "gpu" and extension.engine != "sim"
    shares = shares_host_memory(spec, extension, classic=classic)
    return bool(settings.gpu_node_labels) and has_gpus and shares and not chosen


def _chooses_nodes(settings: ClusterSettings) -> bool:
    """Whether the overlay of the workers' pods chooses their nodes."""
    template, required = settings.pod_template, "requiredDuringSchedulingIgnoredDuringExecution"
    return bool(
        _below(template, "spec", "nodeSelector")
        or _below(template, "spec", "nodeName")
        or _below(template, "spec", "affinity", "nodeAffinity", required)
    )


def _below(value: object, *keys: str) -> object:
    """The value at `keys` below `value`; None if a key is missing or a part is no mapping."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def shares_host_memory(spec: CommonSpec, extension: Extension, *, classic: bool) -> bool:
    """Whether engine, LMCache and storage daemon share memory across pods, which needs hostIPC."""
    cache = spec.kv_cache_spec
    if cache is None or extension.engine == "sim":
        return False
    has_daemon = has_storage_daemon(spec)
    is_on = cache.enable_l1_cache or cache.enable_l2_cache
    across_pods = is_on and not classic and extension.lmcache.servers == "per-node"
    return across_pods or (has_daemon and extension.platform != "hyperpod")


def has_storage_daemon(spec: CommonSpec) -> bool:
    """Whether the second tier is a storage daemon on each node."""
    cache = spec.kv_cache_spec
    l2 = cache.l2_cache_spec if cache is not None and cache.enable_l2_cache else None
    return l2 is not None and (l2.l2_cache_backend or "").lower() == "tieredstorage"


def _is_downloaded(document: WorkerDocument) -> bool:
    """Whether vLLM downloads the model by its name."""
    if document.x_kvroute.engine == "sim":
        return False
    if isinstance(document, InferenceEndpointConfig):
        return document.spec.model_source_config.model_source_type == "huggingface"
    return document.spec.model not in TINY_MODELS and not document.spec.model.startswith(("/", "./", "../"))


def cluster_notes(document: WorkerDocument) -> dict[Path, str]:
    """What an operator must know about this spec in Kubernetes: field -> text."""
    spec, extension = document.spec, document.x_kvroute
    settings, notes = extension.kubernetes, dict[Path, str]()
    classic = is_classic(document)
    if shares_host_memory(spec, extension, classic=classic):
        also = (
            "" if has_storage_daemon(spec) else "; lmcache.servers: per-worker shares no memory between pods"
        )
        notes["x-kvroute", "lmcache", "servers"] = (
            "applied, but workers and cache servers share memory through hostIPC, which the levels baseline "
            "and restricted of Pod Security refuse: the namespace needs the label "
            f"pod-security.kubernetes.io/enforce: privileged{also}"
        )
    if settings.workload == "StatefulSet":
        notes[*CLUSTER, "workload"] = (
            "applied, but a StatefulSet cannot surge: an update ends each worker before its successor loads "
            "the model; workload: Deployment with maxSurge: 1 starts the successor first, on a free node"
        )
    if settings.model_cache is None and _is_downloaded(document):
        notes[*CLUSTER, "modelCache"] = (
            "is not given, so each start of a worker downloads the model; "
            "modelCache.claim or modelCache.hostPath keeps the files"
        )
    if needs_gpu_label(spec, extension, classic=classic):
        notes[*CLUSTER, "gpuNodeLabels"] = (
            "applied: the workers' nodes must have one of the labels "
            f"{', '.join(settings.gpu_node_labels)}; a nodeSelector in "
            f"{dotted((*CLUSTER, 'podTemplate'))}.spec chooses others"
        )
    return notes


def _unused(reason: str, *below: str) -> ClusterFinding:
    return (*CLUSTER, *below), FieldVerdict.NOTED, f"has no effect here because {reason}"
