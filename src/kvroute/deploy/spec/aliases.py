"""The flat field names of HyperPod's command line and their places in the spec; advice for unknown fields.

The names are those of hyperpod-custom-inference-template and hyperpod-jumpstart-inference-template 1.2.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kvroute.deploy.spec.endpoint import HYPERPOD_API, HYPERPOD_KIND, JUMPSTART_KIND, KINDS
from kvroute.deploy.spec.source import Path, Problem, Shape, Source, dotted, walk


def _spec(*keys: str) -> Path:
    return ("spec", *keys)


_TRIGGER = ("autoScalingSpec", "cloudWatchTrigger")
_SOURCE, _HUGGING = "modelSourceConfig", ("modelSourceConfig", "huggingFaceModel")

ALIASES: Final[dict[str, Path]] = {
    "metadata_name": ("metadata", "name"),
    "namespace": ("metadata", "namespace"),
    "endpoint_name": _spec("endpointName"),
    "env": _spec("worker", "environmentVariables"),
    "instance_type": _spec("instanceType"),
    "instance_types": _spec("instanceTypes"),
    "metrics_enabled": _spec("metrics", "enabled"),
    "metrics_scrape_interval_seconds": _spec("metrics", "metricsScrapeIntervalSeconds"),
    "model_metrics_path": _spec("metrics", "modelMetrics", "path"),
    "model_metrics_port": _spec("metrics", "modelMetrics", "port"),
    "model_name": _spec("modelName"),
    "model_version": _spec("modelVersion"),
    "model_source_type": _spec(_SOURCE, "modelSourceType"),
    "model_location": _spec(_SOURCE, "modelLocation"),
    "prefetch_enabled": _spec(_SOURCE, "prefetchEnabled"),
    "s3_bucket_name": _spec(_SOURCE, "s3Storage", "bucketName"),
    "s3_region": _spec(_SOURCE, "s3Storage", "region"),
    "fsx_dns_name": _spec(_SOURCE, "fsxStorage", "dnsName"),
    "fsx_file_system_id": _spec(_SOURCE, "fsxStorage", "fileSystemId"),
    "fsx_mount_name": _spec(_SOURCE, "fsxStorage", "mountName"),
    "huggingface_model_id": _spec(*_HUGGING, "modelId"),
    "huggingface_commit_sha": _spec(*_HUGGING, "commitSHA"),
    "huggingface_token_secret_name": _spec(*_HUGGING, "tokenSecretRef", "name"),
    "huggingface_token_secret_key": _spec(*_HUGGING, "tokenSecretRef", "key"),
    "tls_certificate_output_s3_uri": _spec("tlsConfig", "tlsCertificateOutputS3Uri"),
    "custom_certificate_acm_arn": _spec("tlsConfig", "customCertificateConfig", "acmArn"),
    "custom_certificate_domain_name": _spec("tlsConfig", "customCertificateConfig", "domainName"),
    "dns_hosted_zone_id": _spec("dnsConfig", "hostedZoneId"),
    "image_uri": _spec("worker", "image"),
    "container_port": _spec("worker", "modelInvocationPort", "containerPort"),
    "model_volume_mount_path": _spec("worker", "modelVolumeMount", "mountPath"),
    "model_volume_mount_name": _spec("worker", "modelVolumeMount", "name"),
    "resources_limits": _spec("worker", "resources", "limits"),
    "resources_requests": _spec("worker", "resources", "requests"),
    "worker_args": _spec("worker", "args"),
    "worker_command": _spec("worker", "command"),
    "working_dir": _spec("worker", "workingDir"),
    "probes": _spec("worker", "probes"),
    "max_concurrent_requests": _spec("worker", "requestLimits", "maxConcurrentRequests"),
    "max_queue_size": _spec("worker", "requestLimits", "maxQueueSize"),
    "overflow_status_code": _spec("worker", "requestLimits", "overflowStatusCode"),
    "dimensions": _spec(*_TRIGGER, "dimensions"),
    "metric_collection_period": _spec(*_TRIGGER, "metricCollectionPeriod"),
    "metric_collection_start_time": _spec(*_TRIGGER, "metricCollectionStartTime"),
    "metric_name": _spec(*_TRIGGER, "metricName"),
    "metric_stat": _spec(*_TRIGGER, "metricStat"),
    "metric_type": _spec(*_TRIGGER, "metricType"),
    "min_value": _spec(*_TRIGGER, "minValue"),
    "cloud_watch_trigger_name": _spec(*_TRIGGER, "name"),
    "cloud_watch_trigger_namespace": _spec(*_TRIGGER, "namespace"),
    "target_value": _spec(*_TRIGGER, "targetValue"),
    "use_cached_metrics": _spec(*_TRIGGER, "useCachedMetrics"),
    "auto_scaling_spec": _spec("autoScalingSpec"),
    "invocation_endpoint": _spec("invocationEndpoint"),
    "intelligent_routing_enabled": _spec("intelligentRoutingSpec", "enabled"),
    "routing_strategy": _spec("intelligentRoutingSpec", "routingStrategy"),
    "enable_l1_cache": _spec("kvCacheSpec", "enableL1Cache"),
    "enable_l2_cache": _spec("kvCacheSpec", "enableL2Cache"),
    "l2_cache_backend": _spec("kvCacheSpec", "l2CacheSpec", "l2CacheBackend"),
    "l2_cache_local_url": _spec("kvCacheSpec", "l2CacheSpec", "l2CacheLocalUrl"),
    "cache_config_file": _spec("kvCacheSpec", "cacheConfigFile"),
    "max_deploy_time_in_seconds": _spec("maxDeployTimeInSeconds"),
    "load_balancer_health_check_path": _spec("loadBalancer", "healthCheckPath"),
    "load_balancer_routing_algorithm": _spec("loadBalancer", "routingAlgorithm"),
    "initial_replica_count": _spec("InitialReplicaCount"),
    "node_affinity": _spec("nodeAffinity"),
    "tags": _spec("tags"),
    "data_capture": _spec("dataCapture"),
}
"""Flat name -> place in the spec of an InferenceEndpointConfig."""

JUMPSTART_ALIASES: Final[dict[str, Path]] = {
    "metadata_name": ("metadata", "name"),
    "namespace": ("metadata", "namespace"),
    "model_id": _spec("model", "modelId"),
    "model_version": _spec("model", "modelVersion"),
    "accept_eula": _spec("model", "acceptEula"),
    "endpoint_name": _spec("sageMakerEndpoint", "name"),
    "instance_type": _spec("server", "instanceType"),
    "accelerator_partition_type": _spec("server", "acceleratorPartitionType"),
    "accelerator_partition_validation": _spec("server", "validations", "acceleratorPartitionValidation"),
    "tls_certificate_output_s3_uri": _spec("tlsConfig", "tlsCertificateOutputS3Uri"),
}
"""Flat name -> place in the spec of a JumpStartModel."""

MOVED: Final[dict[str, Path]] = {
    "minAutoScaleReplicas": _spec("autoScalingSpec", "minReplicaCount"),
    "maxAutoScaleReplicas": _spec("autoScalingSpec", "maxReplicaCount"),
}
"""Fields of earlier documents -> the fields that replace them."""

SAME_NAME: Final = {"replicas": _spec("replicas"), "kubernetes": _spec("kubernetes")}
"""Fields with the same name in both forms -> place in the spec."""
TEMPLATE_FIELDS: Final = ("template", "version")
"""The first fields of the command line's files. They do not describe the endpoint."""


def _pairs(value: object) -> object:
    return [{"name": k, "value": v} for k, v in value.items()] if isinstance(value, dict) else value


def _comma_separated(value: object) -> object:
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


CONVERSIONS: Final[dict[str, Callable[[object], object]]] = {
    "env": _pairs,
    "dimensions": _pairs,
    "tags": _pairs,
    "worker_args": _comma_separated,
    "worker_command": _comma_separated,
    "instance_types": _comma_separated,
}


def is_flat(data: dict[str, Any]) -> bool:
    """Whether a document is in the command line's flat form."""
    names = ALIASES | JUMPSTART_ALIASES
    return "spec" not in data and "kind" not in data and any(name in names for name in data)


def unflattened(source: Source) -> tuple[Source, dict[Path, str]]:
    """Move fields with flat names to their places. Returns the new document, and each such place's flat name.

    Flat names are accepted at the root of a flat document, and directly under `spec` of a nested one.
    """
    flat = is_flat(source.data)
    prefix: Path = () if flat else ("spec",)
    section = source.data if flat else source.data.get("spec")
    if not isinstance(section, dict):
        return source, {}
    kind = source.data.get("kind", JUMPSTART_KIND if flat and "model_id" in section else HYPERPOD_KIND)
    aliases = JUMPSTART_ALIASES if kind == JUMPSTART_KIND else ALIASES
    names = aliases | SAME_NAME if flat else {name: aliases[name] for name in aliases if "_" in name}
    flat_fields = {name: names[name] for name in section if name in names}
    data: dict[str, Any] = {"apiVersion": HYPERPOD_API, "kind": kind} if flat else {**source.data}
    others = {key: value for key, value in section.items() if key not in flat_fields}
    if flat:
        data |= {key: value for key, value in others.items() if key not in TEMPLATE_FIELDS}
    else:
        data["spec"] = _copy(others)
    lines, origins = dict(source.lines), dict[Path, str]()
    problems = [_moved(problem, prefix, flat_fields) for problem in source.problems]
    for name, path in flat_fields.items():
        line = source.line_of((*prefix, name))
        convert = CONVERSIONS.get(name)
        value = convert(section[name]) if convert is not None else section[name]
        if value is None:
            continue
        if not _set_if_absent(data, path, value):
            problems.append(Problem((*prefix, name), line, f"{dotted(path)} is also given"))
        elif line is not None:
            lines[path] = line
        origins[path] = name
    if flat and "metadata_name" not in section and isinstance(section.get("endpoint_name"), str):
        _set_if_absent(data, ("metadata", "name"), section["endpoint_name"])
    return Source(data, lines, tuple(problems)), origins


def _moved(problem: Problem, prefix: Path, flat_fields: dict[str, Path]) -> Problem:
    """The problem with its field's place in the spec, if the field has a flat name."""
    name, below = problem.path[len(prefix) : len(prefix) + 1], problem.path[len(prefix) + 1 :]
    is_flat_name = problem.path[: len(prefix)] == prefix and bool(name) and str(name[0]) in flat_fields
    return replace(problem, path=(*flat_fields[str(name[0])], *below)) if is_flat_name else problem


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _set_if_absent(data: dict[str, Any], path: Path, value: object) -> bool:
    """Set the value at `path`. Returns False, without a change, if there is a value already."""
    for key in path[:-1]:
        inner = data.setdefault(str(key), {})
        if not isinstance(inner, dict):
            return False
        data = inner
    if str(path[-1]) in data:
        return False
    data[str(path[-1])] = value
    return True


class FieldPaths:
    """The places of all fields of one kind of document, by field name."""

    def __init__(self, root: Shape) -> None:
        self._aliases = JUMPSTART_ALIASES if root.model is KINDS[JUMPSTART_KIND] else ALIASES
        self.by_name: dict[str, list[Path]] = defaultdict(list)
        for path, _ in walk(root):
            self.by_name[str(path[-1])].append(path)

    def paths_for(self, wrong: Path) -> list[Path]:
        """Up to three places for the last key of `wrong`: those with the longest common path, then the
        shortest."""
        paths = self.by_name.get(str(wrong[-1]), [])
        ranked = sorted(paths, key=lambda path: (-_shared(path, wrong), len(path)))
        nearest = [path for path in ranked if _shared(path, wrong) == _shared(ranked[0], wrong)]
        return [path for path in nearest if len(path) == len(nearest[0])][:3]

    def advice(self, wrong: Path) -> str:
        """The text for a field that is unknown at its place: the right place, or a similar name."""
        name = str(wrong[-1])
        if name in self._aliases:
            return f"belongs at {dotted(self._aliases[name])}"
        if name in MOVED:
            return f"is an unknown field: {dotted(MOVED[name])} replaces it"
        paths = self.paths_for(wrong)
        if paths:
            return "belongs under " + " or ".join(dotted(path[:-1]) or "the root" for path in paths)
        close = difflib.get_close_matches(name, self.by_name, n=1, cutoff=0.75)
        if close:
            nearest = self.paths_for((*wrong[:-1], close[0]))[0]
            return f"unknown field; did you mean {dotted(nearest)}?"
        return f"unknown field under {dotted(wrong[:-1]) or 'the root'}: remove it"


def _shared(one: Path, other: Path) -> int:
    """The number of common first keys of two paths. Any two list items count as equal."""
    count = 0
    for one_key, other_key in zip(one, other, strict=False):
        if one_key != other_key and not (isinstance(one_key, int) and isinstance(other_key, int)):
            break
        count += 1
    return count
