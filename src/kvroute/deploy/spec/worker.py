"""Fields of `spec` for the workers, the model's source, autoscaling, caches and routing."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from pydantic import field_validator

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


DEFAULT_IMAGE: Final = "vllm/vllm-openai:v0.32.0"
"""The workers' default image: the newest pair of vLLM and LMCache that the engine tests run."""
ON_GATEWAY = "the gateway"


class Images(Fields):
    """Container images."""

    gateway: str = applied(
        "kvroute:local", becomes="the gateway's image (and tierd's, and the simulated workers')"
    )
    gateway_build: str | None = applied(becomes="the folder that compose builds the gateway's image from")
    worker: str = applied(DEFAULT_IMAGE, becomes="the workers' image if spec.worker has none")
    lmcache: str | None = applied(becomes="the LMCache servers' image; without it, the workers' image")
    redis: str = applied("redis:7.4.6-alpine", becomes="Redis' image")
    valkey: str = applied("valkey/valkey:8.1.1-alpine", becomes="Valkey's image")
    mooncake: str = applied("mooncake-master:0.3.13", becomes="the Mooncake master's image")
    prometheus: str = applied("prom/prometheus:v3.5.0", becomes="Prometheus' image (compose)")
    grafana: str = applied("grafana/grafana:12.2.0", becomes="Grafana's image (compose)")
    downloader: str = applied(
        "amazon/aws-cli:2.31.0", becomes="the image that copies a model from S3 (compose)"
    )


_VERSION = r"^v?\d+\.\d+(\.\d+)?(\.?post\d+)?$"


class StatedVersions(Fields):
    """The versions in the workers' image, if its name does not say them."""

    vllm: str | None = applied(becomes="vLLM's version, to which the workers' options fit", pattern=_VERSION)
    lmcache: str | None = applied(
        becomes="LMCache's version, to which its options and the connector fit", pattern=_VERSION
    )


class Lmcache(Fields):
    """LMCache's mode and settings."""

    mode: Literal["mp", "classic"] | None = applied(
        becomes="LMCache as a separate server (mp) or inside the engine (classic)"
    )
    """None: `mp` if the image's LMCache has a server that can use the second tier, otherwise `classic`."""
    servers: Literal["per-node", "per-worker"] = applied("per-node", becomes="the number of LMCache servers")
    chunk_size: int = applied(256, becomes="tokens per LMCache chunk", ge=16)
    hash_seed: int = applied(0, becomes="PYTHONHASHSEED of workers and LMCache", ge=0, le=4294967295)


class L1(Fields):
    """LMCache's first tier, in CPU memory."""

    size_gb: float = applied(
        20.0, becomes="size of the first tier, per LMCache server; in the classic mode per worker", gt=0
    )
    eviction_policy: Literal["LRU", "ARC", "noop"] = applied(
        "LRU", becomes="the first tier's eviction policy"
    )
    staging_gb: float = applied(1.0, becomes="LMCache's transfer buffer if only the second tier is on", gt=0)


class FileStore(Fields):
    path: str = applied("/var/cache/lmcache", becomes="the folder of the second tier")
    claim: str | None = applied(becomes="the ReadWriteMany claim of that folder (Kubernetes)")


class S3Store(Fields):
    endpoint: str = applied(
        ..., becomes="the bucket's endpoint: s3://BUCKET.s3.REGION.amazonaws.com", min_length=1
    )
    region: str = applied(..., becomes="the bucket's region", min_length=1)


class MooncakeStore(Fields):
    """Settings of the Mooncake store, passed on unchanged."""

    metadata_server: str | None = applied(becomes="Mooncake's metadata server")
    protocol: Literal["tcp", "rdma"] = applied("tcp", becomes="Mooncake's transport")
    device_name: str = applied("", becomes="Mooncake's RDMA device")
    segment_gb: float = applied(16.0, becomes="memory that each LMCache server provides to Mooncake", gt=0)


class L2(Fields):
    """Settings of the second tier in addition to kvCacheSpec."""

    size_gb: float = applied(8.0, becomes="memory of the second tier, per store", gt=0)
    store_policy: Literal["default", "skip_l1"] | None = applied(becomes="--l2-store-policy of LMCache")
    prefetch_policy: Literal["default", "retain"] = applied(
        "retain", becomes="whether an entry read from the second tier stays in the first"
    )
    password_secret: SecretKey | None = applied(
        becomes="the second tier's password (Kubernetes; other targets read the variable L2_PASSWORD)"
    )
    fs: FileStore | None = section()
    s3: S3Store | None = section()
    mooncake: MooncakeStore | None = section()
    options: dict[str, Any] | None = applied(becomes="more settings of LMCache's adapter, copied unchanged")


class SecretKey(Fields):
    """A key of an existing Kubernetes Secret."""

    name: str = applied(..., becomes="a secret by reference (Kubernetes)", min_length=1)
    key: str = applied(..., becomes="a secret by reference (Kubernetes)", min_length=1)


class Routing(Fields):
    """Routing options in addition to HyperPod's routingStrategy."""

    session_keys: list[str] | None = applied(becomes="routing.session.keys of the gateway")
    options: dict[str, Any] | None = applied(becomes="options of the routing section of the gateway")


class Gateway(Fields):
    """Settings of the gateway's deployment."""

    port: int = applied(8080, becomes="the gateway's port", ge=1, le=65535)
    replicas: int = applied(1, becomes="the number of gateways (Kubernetes)", ge=1)
    api_keys_secret: SecretKey | None = applied(becomes="the clients' keys (Kubernetes)")
    admin_key_secret: SecretKey | None = applied(becomes="the admin API's key (Kubernetes)")
    resources: dict[str, Any] | None = applied(becomes="resources of the gateway (Kubernetes)")
    settings: dict[str, Any] | None = applied(becomes="other sections of the gateway's configuration")


GPU_NODE_LABELS = (
    "nvidia.com/gpu.present",  # NVIDIA's feature discovery, and the GPU operator
    "nvidia.com/gpu",
    "cloud.google.com/gke-accelerator",
    "kubernetes.azure.com/accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-count",
    "eks.amazonaws.com/instance-gpu-count",
)
"""Labels of nodes with GPUs, as clouds and NVIDIA's components set them."""


class ModelCache(Fields):
    """Where downloaded models stay when a worker's pod ends. Only one of the fields can be given."""

    claim: str | None = applied(
        becomes="the ReadWriteMany claim that keeps downloaded models (Kubernetes)", min_length=1
    )
    host_path: str | None = applied(
        becomes="the nodes' folder that keeps downloaded models (Kubernetes)", pattern=r"^/."
    )


class ClusterSettings(Fields):
    """Settings of the rendered Kubernetes objects."""

    pod_template: dict[str, Any] | None = applied(
        becomes="an overlay of the workers' pods, and the placement of the cache servers of their nodes "
        "(Kubernetes)"
    )
    service_pod_template: dict[str, Any] | None = applied(
        becomes="an overlay of the gateway's pods and of the stores' pods (Kubernetes)"
    )
    gpu_node_labels: list[str] = applied(
        list(GPU_NODE_LABELS),
        becomes="if the spec does not choose nodes, they must have one of these labels (Kubernetes)",
    )
    workload: Literal["StatefulSet", "Deployment"] = applied(
        "StatefulSet", becomes="the kind of object that runs the workers (Kubernetes)"
    )
    max_surge: int = applied(
        0, becomes="workers that start before a rolling update ends old ones (Kubernetes)", ge=0
    )
    model_cache: ModelCache | None = section()
    metrics_from: list[dict[str, Any]] | None = applied(
        becomes="the NetworkPolicy peers that may read metrics (Kubernetes)"
    )


class Scaling(Fields):
    """How the workers' autoscaler decides, and which workers it removes. The limits are autoScalingSpec's."""

    by: Literal["cpu", "workersNeeded"] = applied(
        "cpu",
        becomes="the metric of the workers' HPA: their CPU use, or kvroute_workers_needed of the gateway "
        "(Kubernetes)",
    )
    prometheus_address: str | None = applied(
        becomes="the Prometheus server from which KEDA reads kvroute_workers_needed, instead of an HPA "
        "(Kubernetes)",
        pattern=r"^https?://.",
    )
    deletion_cost: bool = applied(
        False, becomes="scaling.deletion_cost of the gateway, and its permission to patch pods (Kubernetes)"
    )


class Extension(Fields):
    """kvroute's own settings."""

    engine: Literal["vllm", "sim"] = applied("vllm", becomes="the kind of workers")
    device: Literal["gpu", "cpu"] = applied("gpu", becomes="the engines' device")
    gpus_per_worker: int | None = applied(becomes="GPUs of one worker", ge=1)
    platform: Literal["any", "hyperpod"] | None = applied(
        becomes="whether the nodes are HyperPod's, with HyperPod's labels and storage daemon"
    )
    """None: HyperPod's if the workers' image is one of HyperPod's (`...:server-hyperpod-...`)."""
    model: str | None = applied(
        becomes="the model that the workers of a JumpStartModel load: a name on Hugging Face, or a folder",
        min_length=1,
    )
    aws_region: str | None = applied(
        becomes="the region of CloudWatch triggers; without it, the model bucket's region (Kubernetes)"
    )
    images: Images = section(Images())
    versions: StatedVersions = section(StatedVersions())
    lmcache: Lmcache = section(Lmcache())
    l1: L1 = section(L1())
    l2: L2 = section(L2())
    routing: Routing = section(Routing())
    gateway: Gateway = section(Gateway())
    kubernetes: ClusterSettings = section(ClusterSettings())
    scaling: Scaling = section(Scaling())


L2.model_rebuild()
