"""Fields of `x-kvroute`: what a spec says beyond HyperPod's."""

from __future__ import annotations

from typing import Any, Final, Literal

from kvroute.deploy.spec.source import Fields, applied, section

DEFAULT_IMAGE: Final = "vllm/vllm-openai:v0.32.0"
"""The workers' default image: the newest pair of vLLM and LMCache that the engine tests run."""


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
