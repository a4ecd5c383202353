"""Fields of `spec` for the workers, autoscaling, and routing."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import field_validator

from kvroute.deploy.spec.extension import (
    L2,
)
from kvroute.deploy.spec.source import Fields, applied, noted, section

ENVIRONMENT = "the workers' environment"
_ENV_BY_REFERENCE = "the workers' environment (Kubernetes)"
Quantity = str | int | float
_is_quantity = re.compile(
    r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?"
).fullmatch
"""Kubernetes' notation (apimachinery, api/resource/quantity.go)."""


class KeyRef(Fields):
    """A key of a ConfigMap or Secret."""

    key: str = applied(..., becomes=_ENV_BY_REFERENCE)
    name: str | None = applied(becomes=_ENV_BY_REFERENCE)
    optional: bool | None = applied(becomes=_ENV_BY_REFERENCE)


class FieldRef(Fields):
    api_version: str | None = applied(becomes=_ENV_BY_REFERENCE)
    field_path: str = applied(..., becomes=_ENV_BY_REFERENCE)


class ResourceFieldRef(Fields):
    container_name: str | None = applied(becomes=_ENV_BY_REFERENCE)
    divisor: Quantity | None = applied(becomes=_ENV_BY_REFERENCE)
    resource: str = applied(..., becomes=_ENV_BY_REFERENCE)


class FileKeyRef(Fields):
    """A variable from a file of one of the pod's volumes (Kubernetes 1.34)."""

    key: str = applied(..., becomes=_ENV_BY_REFERENCE)
    optional: bool = applied(False, becomes=_ENV_BY_REFERENCE)
    path: str = applied(..., becomes=_ENV_BY_REFERENCE)
    volume_name: str = applied(..., becomes=_ENV_BY_REFERENCE)


class ValueFrom(Fields):
    config_map_key_ref: KeyRef | None = applied(becomes=_ENV_BY_REFERENCE)
    field_ref: FieldRef | None = applied(becomes=_ENV_BY_REFERENCE)
    file_key_ref: FileKeyRef | None = applied(becomes=_ENV_BY_REFERENCE)
    resource_field_ref: ResourceFieldRef | None = applied(becomes=_ENV_BY_REFERENCE)
    secret_key_ref: KeyRef | None = applied(becomes=_ENV_BY_REFERENCE)


class EnvironmentVariable(Fields):
    name: str = applied(..., becomes=ENVIRONMENT, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")
    value: str | None = applied(becomes=ENVIRONMENT, put="the variable's value")
    value_from: ValueFrom | None = applied(becomes=_ENV_BY_REFERENCE)


class InvocationPort(Fields):
    container_port: int = applied(..., becomes="the port that the workers serve on", ge=1, le=65535)
    name: Literal["http", "grpc"] = applied("http", becomes="the name of the workers' port (Kubernetes)")


class VolumeMount(Fields):
    name: str = applied(..., becomes="the name of the model's volume")
    mount_path: str = applied("/opt/ml/model", becomes="the folder of the model's files in the workers")


class ResourceClaim(Fields):
    name: str = applied(..., becomes="a resource claim of the workers (Kubernetes)")
    request: str | None = applied(becomes="a resource claim of the workers (Kubernetes)")


class Resources(Fields):
    limits: dict[str, Quantity] | None = applied(becomes="limits of the workers, and their GPUs")
    requests: dict[str, Quantity] | None = applied(becomes="requests of the workers (Kubernetes)")
    claims: list[ResourceClaim] | None = applied(becomes="resource claims of the workers (Kubernetes)")

    @field_validator("limits", "requests")
    @classmethod
    def _are_quantities(cls, value: dict[str, Quantity] | None) -> dict[str, Quantity] | None:
        for name, amount in (value or {}).items():
            # An extended resource, such as a GPU, is counted in whole numbers.
            if "/" in name and not (str(amount).isascii() and str(amount).isdigit()):
                raise ValueError(f"{name}: {amount!r} is not a whole number")
            if _is_quantity(str(amount)) is None:
                raise ValueError(f"{name}: {amount!r} is not a quantity such as 2, 500m or 16Gi")
        return value


class Probe(Fields):
    """A Kubernetes probe, copied unchanged."""

    exec: dict[str, Any] | None = applied(becomes="a probe of the workers (Kubernetes)")
    grpc: dict[str, Any] | None = applied(becomes="a probe of the workers (Kubernetes)")
    http_get: dict[str, Any] | None = applied(becomes="a probe of the workers (Kubernetes)")
    tcp_socket: dict[str, Any] | None = applied(becomes="a probe of the workers (Kubernetes)")
    failure_threshold: int | None = applied(becomes="a probe of the workers (Kubernetes)", ge=1)
    initial_delay_seconds: int | None = applied(becomes="a probe of the workers (Kubernetes)", ge=0)
    period_seconds: int | None = applied(becomes="a probe of the workers (Kubernetes)", ge=1)
    success_threshold: int | None = applied(becomes="a probe of the workers (Kubernetes)", ge=1)
    termination_grace_period_seconds: int | None = applied(
        becomes="a probe of the workers (Kubernetes)", ge=1
    )
    timeout_seconds: int | None = applied(becomes="a probe of the workers (Kubernetes)", ge=1)


class Probes(Fields):
    liveness_probe: Probe | None = section()
    readiness_probe: Probe | None = section()
    startup_probe: Probe | None = section()


class RequestLimits(Fields):
    max_concurrent_requests: int | None = applied(becomes="upstream.max_connections of the gateway", ge=1)
    max_queue_size: int | None = applied(
        becomes="server.max_in_flight of the gateway: up to this many more requests per worker wait",
        ge=0,
    )
    overflow_status_code: int = noted(429, because="the gateway refuses with 429", ge=400, le=599)


class WorkerSection(Fields):
    """The workers' container, as HyperPod's document describes it."""

    image: str = applied(
        ..., becomes="the workers' image", put="the name of an image with vLLM and LMCache", min_length=1
    )
    command: list[str] | None = applied(becomes="the workers' command, which replaces `vllm serve`")
    args: list[str] | None = applied(becomes="arguments of the workers", put="the argument's value")
    working_dir: str | None = applied(becomes="the workers' working directory")
    environment_variables: list[EnvironmentVariable] | None = applied(becomes=ENVIRONMENT)
    model_invocation_port: InvocationPort = section(...)
    model_volume_mount: VolumeMount = section(...)
    resources: Resources = section(...)
    probes: Probes | None = section()
    request_limits: RequestLimits | None = section()


class EndpointWorker(WorkerSection):
    """The workers' container in kvroute's own document, where no field is required."""

    image: str | None = applied(becomes="the workers' image", min_length=1)  # type: ignore[assignment]
    model_invocation_port: InvocationPort | None = section()  # type: ignore[assignment]
    model_volume_mount: VolumeMount | None = section()  # type: ignore[assignment]
    resources: Resources | None = section()  # type: ignore[assignment]


class S3Storage(Fields):
    bucket_name: str = applied(
        ..., becomes="the bucket of the model's files", put="the name of the model's S3 bucket", min_length=1
    )
    region: str = applied(
        ..., becomes="the region of the model's bucket", put="a region such as us-west-2", min_length=1
    )


_FSX_VOLUME = "the model's volume (Kubernetes)"


class FsxStorage(Fields):
    file_system_id: str = applied(..., becomes=_FSX_VOLUME, put="the file system's ID (fs-0123456789abcdef0)")
    dns_name: str | None = applied(becomes=_FSX_VOLUME, put="the file system's DNS name")
    mount_name: str | None = applied(becomes=_FSX_VOLUME, put="the file system's mount name")


class TokenSecret(Fields):
    key: str = applied(..., becomes="HF_TOKEN of the workers (Kubernetes)")
    name: str = applied("", becomes="HF_TOKEN of the workers (Kubernetes)")
    optional: bool | None = applied(becomes="HF_TOKEN of the workers (Kubernetes)")


class HuggingFaceModel(Fields):
    model_id: str = applied(..., becomes="the model that the workers load", min_length=1)
    commit_sha: str | None = applied(becomes="--revision of the workers", alias="commitSHA")
    token_secret_ref: TokenSecret | None = applied(becomes="HF_TOKEN of the workers (Kubernetes)")


class ModelSource(Fields):
    """Where the model comes from."""

    model_source_type: Literal["fsx", "s3", "huggingface", "kubernetesVolume"] = applied(
        ..., becomes="the source of the model's files"
    )
    model_location: str | None = applied(becomes="the model's folder in its storage")
    prefetch_enabled: bool = noted(False, because="vLLM reads the weights itself")
    s3_storage: S3Storage | None = section()
    fsx_storage: FsxStorage | None = section()
    hugging_face_model: HuggingFaceModel | None = section()


_SCALER = "the KEDA ScaledObject (Kubernetes)"
_FOR_AWS = "the KEDA trigger aws-cloudwatch (Kubernetes)"
_FOR_PROMETHEUS = "the KEDA trigger prometheus (Kubernetes)"


class Dimension(Fields):
    """A CloudWatch dimension."""

    name: str = applied(..., becomes=_FOR_AWS)
    value: str = applied(..., becomes=_FOR_AWS)


class CloudWatchTrigger(Fields):
    """Scale by a CloudWatch metric."""

    name: str | None = applied(becomes=_FOR_AWS)
    namespace: str | None = applied(becomes=_FOR_AWS)
    metric_name: str | None = applied(becomes=_FOR_AWS)
    metric_stat: str = applied("Average", becomes=_FOR_AWS)
    metric_type: Literal["Value", "Average"] = applied("Average", becomes=_FOR_AWS)
    metric_collection_period: int = applied(300, becomes=_FOR_AWS, ge=1)
    metric_collection_start_time: int = applied(300, becomes=_FOR_AWS, ge=1)
    min_value: float = applied(0, becomes=_FOR_AWS)
    target_value: float | None = applied(becomes=_FOR_AWS)
    activation_target_value: float = applied(0, becomes=_FOR_AWS)
    use_cached_metrics: bool = applied(True, becomes=_FOR_AWS)
    dimensions: list[Dimension] | None = applied(becomes=_FOR_AWS)


class PrometheusTrigger(Fields):
    """Scale by a Prometheus query. Every Prometheus server is allowed, not only AWS's managed service."""

    name: str | None = applied(becomes=_FOR_PROMETHEUS)
    namespace: str | None = applied(becomes=_FOR_PROMETHEUS)
    server_address: str | None = applied(becomes=_FOR_PROMETHEUS)
    query: str | None = applied(becomes=_FOR_PROMETHEUS)
    target_value: float | None = applied(becomes=_FOR_PROMETHEUS)
    activation_target_value: float = applied(0, becomes=_FOR_PROMETHEUS)
    metric_type: Literal["Value", "Average"] = applied("Average", becomes=_FOR_PROMETHEUS)
    custom_headers: str | None = applied(becomes=_FOR_PROMETHEUS)
    use_cached_metrics: bool = applied(True, becomes=_FOR_PROMETHEUS)


class AutoScaling(Fields):
    """The limits of the number of replicas, and the triggers. Without a trigger an HPA scales by CPU use."""

    min_replica_count: int = applied(1, becomes="the smallest number of replicas (Kubernetes)", ge=0)
    max_replica_count: int = applied(5, becomes="the largest number of replicas (Kubernetes)", ge=1)
    polling_interval: int = applied(30, becomes=_SCALER, ge=0)
    cooldown_period: int = applied(300, becomes=_SCALER, ge=0)
    initial_cooldown_period: int = applied(300, becomes=_SCALER, ge=0)
    scale_down_stabilization_time: int = applied(
        300, becomes="the wait before scaling down, in seconds (Kubernetes)", ge=0, le=3600
    )
    scale_up_stabilization_time: int = applied(
        0, becomes="the wait before scaling up, in seconds (Kubernetes)", ge=0, le=3600
    )
    cloud_watch_trigger: CloudWatchTrigger | None = applied(becomes=_FOR_AWS)
    cloud_watch_trigger_list: list[CloudWatchTrigger] | None = applied(becomes=_FOR_AWS, max_length=100)
    prometheus_trigger: PrometheusTrigger | None = applied(becomes=_FOR_PROMETHEUS)
    prometheus_trigger_list: list[PrometheusTrigger] | None = applied(becomes=_FOR_PROMETHEUS, max_length=100)

    def cloud_watch(self) -> list[CloudWatchTrigger]:
        """The CloudWatch triggers. A list overrides a single trigger."""
        return self.cloud_watch_trigger_list or (
            [self.cloud_watch_trigger] if self.cloud_watch_trigger else []
        )

    def prometheus(self) -> list[PrometheusTrigger]:
        """The Prometheus triggers. A list overrides a single trigger."""
        return self.prometheus_trigger_list or ([self.prometheus_trigger] if self.prometheus_trigger else [])


class PdTopology(Fields):
    same_az: bool = applied(
        True, becomes="prefill and decode workers in one zone (Kubernetes)", alias="sameAZ"
    )
    availability_zone: str | None = applied(becomes="the zone of the workers' nodes (Kubernetes)")
    placement_group: str | None = noted(because="nodes have no label with their placement group")


class PdStage(Fields):
    """One of the two groups of workers."""

    args: list[str] | None = applied(becomes="options of the group's workers, after spec.worker.args")
    node_selector: dict[str, str] | None = applied(becomes="the nodes of the group's workers (Kubernetes)")
    replicas: int = applied(1, becomes="the number of the group's workers", ge=1)
    resources: Resources | None = section()


class PdAutoScaling(Fields):
    """The limits and triggers of each of the two groups of workers."""

    decoding_auto_scaling: AutoScaling | None = section()
    prefill_auto_scaling: AutoScaling | None = section()


class PrefillDecode(Fields):
    """Prefill and decode on different workers."""

    prefill_spec: PdStage = section(...)
    decoding_spec: PdStage = section(...)
    auto_scaling_spec: PdAutoScaling | None = section()
    routing_threshold: int = applied(4096, becomes="routing.prefill_decode.threshold_tokens", ge=0)
    topology_spec: PdTopology | None = section()


class L2Cache(Fields):
    """The kind and the address of the second tier."""

    l2_cache_backend: str | None = applied(becomes="the second cache tier behind LMCache")
    l2_cache_local_url: str | None = applied(becomes="the address of the second tier")


class KvCache(Fields):
    """The cache tiers below the GPU."""

    enable_l1_cache: bool = applied(True, becomes="LMCache's CPU memory tier")
    enable_l2_cache: bool = applied(False, becomes="LMCache's second tier")
    l2_cache_spec: L2Cache | None = section()
    cache_config_file: str | None = applied(becomes="LMCACHE_CONFIG_FILE of the workers (classic mode)")


class IntelligentRouting(Fields):
    """The gateway and its strategy."""

    enabled: bool = applied(False, becomes="whether the gateway uses the strategy; otherwise round robin")
    routing_strategy: str = applied("prefixaware", becomes="routing.strategy of the gateway")
    auto_scaling_spec: AutoScaling | None = section()


ON_GATEWAY = "the gateway"


L2.model_rebuild()
