"""The documents: HyperPod's `InferenceEndpointConfig` and `JumpStartModel`, and kvroute's own `Endpoint`.

Fields and rules as in the CRDs of sagemaker-hyperpod-cli 011ca92 (inference.sagemaker.aws.amazon.com, v1 and
v1alpha1, whose fields are all fields of v1 too). `scripts/crd_fields.py` draws the fields for the tests.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from kvroute.deploy.spec.extension import Extension
from kvroute.deploy.spec.source import Fields, Shape, ValueKind, applied, noted, section
from kvroute.deploy.spec.worker import (
    ENVIRONMENT,
    AutoScaling,
    EndpointWorker,
    EnvironmentVariable,
    IntelligentRouting,
    KvCache,
    ModelSource,
    PrefillDecode,
    Resources,
    WorkerSection,
)

HYPERPOD_API, HYPERPOD_KIND = "inference.sagemaker.aws.amazon.com/v1", "InferenceEndpointConfig"
JUMPSTART_KIND, OLD_JUMPSTART_KIND = "JumpStartModel", "ModelDeployment"
INSTANCE_TYPE_LABEL: Final = "node.kubernetes.io/instance-type"
HyperpodApi = Literal["inference.sagemaker.aws.amazon.com/v1", "inference.sagemaker.aws.amazon.com/v1alpha1"]
OWN_API, OWN_KIND = "kvroute.dev/v1", "Endpoint"

_NAME = r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_SAGEMAKER = "there is no SageMaker endpoint in front of kvroute"
_NO_AWS_LB = "the gateway replaces AWS's load balancer; it answers /health and /ready"
_NO_ACM = "kvroute does not fetch certificates: terminate TLS in front of the gateway"
_NO_CAPTURE = "kvroute never stores prompts or answers"
_NO_DNS = "kvroute does not write DNS records"
_NO_HUB = "vLLM loads the model from Hugging Face, or from the folder in x-kvroute.model"
_NO_ROLE = "the workers load the model without an AWS role"
_NO_LICENCE = "a gated model needs HF_TOKEN, with a token of an account that has accepted the licence"
_READS_WEIGHTS = "vLLM loads the weights itself"


class Metadata(Fields):
    name: str = applied(
        ...,
        becomes="the name of all rendered objects",
        put="a name of lower-case letters, digits and dashes",
        pattern=_DNS_LABEL,
    )
    namespace: str = applied(
        "default", becomes="the namespace (Kubernetes)", put="the namespace's name", pattern=_DNS_LABEL
    )
    labels: dict[str, str] | None = applied(becomes="labels (Kubernetes)")
    annotations: dict[str, str] | None = noted(because="they describe the spec, not the rendered objects")


class ModelMetrics(Fields):
    path: str = applied("/metrics", becomes="the path of the workers' metrics", pattern=r"^/")
    port: int = noted(
        8080, because="vLLM serves metrics on modelInvocationPort.containerPort", ge=1024, le=65535
    )


class MetricsSpec(Fields):
    enabled: bool = applied(True, becomes="whether workers and gateway are scraped")
    metrics_scrape_interval_seconds: int = applied(15, becomes="the scrape interval in seconds", ge=5, le=300)
    model_metrics: ModelMetrics | None = section()


class PodSettings(Fields):
    """Additions to the workers' pods, in Kubernetes' own form."""

    init_containers: list[dict[str, Any]] | None = applied(
        becomes="init containers of the workers (Kubernetes)"
    )
    volumes: list[dict[str, Any]] | None = applied(becomes="volumes of the workers (Kubernetes)")
    scheduler_name: str | None = applied(becomes="the workers' scheduler (Kubernetes)")
    service_account_name: str | None = applied(becomes="the workers' service account (Kubernetes)")


class NodeAffinity(Fields):
    preferred_during_scheduling_ignored_during_execution: list[dict[str, Any]] | None = applied(
        becomes="the workers' node affinity (Kubernetes)"
    )
    required_during_scheduling_ignored_during_execution: dict[str, Any] | None = applied(
        becomes="the workers' node affinity (Kubernetes)"
    )


class LoadBalancer(Fields):
    health_check_path: str = noted("/ping", because=_NO_AWS_LB, pattern=r"^/.*")
    routing_algorithm: Literal["least_outstanding_requests", "round_robin"] = noted(
        "least_outstanding_requests", because=_NO_AWS_LB
    )


class CustomCertificate(Fields):
    acm_arn: str = noted(..., because=_NO_ACM)
    domain_name: str = noted(..., because=_NO_ACM)


class Dns(Fields):
    hosted_zone_id: str = noted(..., because=_NO_DNS)


class Tls(Fields):
    tls_certificate_output_s3_uri: str | None = noted(
        because=_NO_ACM, put="an address such as s3://BUCKET/FOLDER", pattern=r"^s3://([^/]+)/?(.*)$"
    )
    custom_certificate_config: CustomCertificate | None = noted(because=_NO_ACM)
    dns_config: Dns | None = noted(because=_NO_DNS)


class Tag(Fields):
    name: str = noted(..., because=_SAGEMAKER)
    value: str = noted(..., because=_SAGEMAKER)


_VERSION_LABEL = "the label app.kubernetes.io/version (Kubernetes)"


class SharedSpec(Fields):
    """The fields that all kinds of documents have."""

    replicas: int | None = applied(becomes="the number of workers", ge=0)
    max_deploy_time_in_seconds: int = applied(3600, becomes="how long a worker may take to start", ge=1)
    kv_cache_spec: KvCache | None = section()
    intelligent_routing_spec: IntelligentRouting | None = section()
    auto_scaling_spec: AutoScaling | None = section()
    metrics: MetricsSpec | None = section()


class CommonSpec(SharedSpec):
    """The fields that InferenceEndpointConfig and Endpoint have."""

    model_version: str | None = applied(becomes=_VERSION_LABEL)
    invocation_endpoint: str = noted(
        "invocations", because="the gateway serves every OpenAI path for every model"
    )
    node_affinity: NodeAffinity | None = section()
    kubernetes: PodSettings | None = section()
    pd_spec: PrefillDecode | None = section()


class InferenceEndpointSpec(CommonSpec):
    """The `spec` of HyperPod's InferenceEndpointConfig."""

    model_name: str = applied(..., becomes="the model's name in requests", pattern=_NAME, max_length=63)
    model_source_config: ModelSource = section(...)
    worker: WorkerSection = section(...)
    instance_type: str | None = applied(
        becomes="the workers' node affinity (Kubernetes on HyperPod)",
        put="an instance type such as ml.g5.24xlarge",
        pattern=r"^ml\..*",
    )
    instance_types: list[str] | None = applied(becomes="the workers' node affinity (Kubernetes on HyperPod)")
    endpoint_name: str | None = noted(because=_SAGEMAKER, pattern=_NAME, max_length=63)
    initial_replica_count: int | None = applied(
        becomes="the number of workers if `replicas` is not given", alias="InitialReplicaCount", ge=0
    )
    load_balancer: LoadBalancer | None = section()
    tls_config: Tls | None = section()
    dns_config: Dns | None = section()
    tags: list[Tag] | None = section()
    data_capture: dict[str, Any] | None = noted(because=_NO_CAPTURE)
    model_cache_config: dict[str, Any] | None = noted(because=_READS_WEIGHTS)


class EndpointSpec(CommonSpec):
    """The `spec` of kvroute's Endpoint. No field of it needs AWS."""

    model: str = applied(..., becomes="the model that the workers load: a name on Hugging Face, or a folder")
    model_name: str | None = applied(becomes="the model's name in requests", max_length=63)
    worker: EndpointWorker | None = section()


class InferenceEndpointConfig(Fields):
    """HyperPod's document with kvroute's extension."""

    api_version: HyperpodApi = applied(..., becomes="the form of this file")
    kind: Literal["InferenceEndpointConfig"] = applied(..., becomes="the form of this file")
    metadata: Metadata = section(...)
    spec: InferenceEndpointSpec = section(...)
    status: dict[str, Any] | None = noted(because="HyperPod writes it as a report")
    x_kvroute: Extension = section(Extension(), alias="x-kvroute")


class ModelConfig(Fields):
    name: str = noted(..., because=_NO_HUB)
    value: str = noted(..., because=_NO_HUB)


class HubModel(Fields):
    """The model in a SageMaker hub."""

    model_id: str = applied(
        ..., becomes="the model's name in requests, and the model that the workers load", pattern=_NAME + "$"
    )
    model_version: str | None = applied(becomes=_VERSION_LABEL, pattern=r"^\d{1,4}.\d{1,4}.\d{1,4}$")
    model_hub_name: str = noted("SageMakerPublicHub", because=_NO_HUB, pattern=_NAME + "$", max_length=63)
    accept_eula: bool = noted(False, because=_NO_LICENCE)
    gated_model_download_role: str | None = noted(because=_NO_ROLE)
    additional_configs: list[ModelConfig] | None = noted(because=_NO_HUB, max_length=10)


class Validations(Fields):
    accelerator_partition_validation: bool = noted(True, because="kvroute does not check GPU partitions")


class JumpStartServer(Fields):
    """The machines of the workers."""

    instance_type: str = applied(
        ...,
        becomes="the workers' GPUs, and their node affinity (Kubernetes on HyperPod)",
        put="an instance type such as ml.g5.24xlarge",
        pattern=r"^ml\..*",
    )
    accelerator_partition_type: str | None = applied(
        becomes="the GPU partition of each worker (Kubernetes)", pattern=r"^mig-.*$"
    )
    execution_role: str | None = noted(because=_NO_ROLE)
    validations: Validations | None = section()


class SageMakerEndpoint(Fields):
    name: str = noted("", because=_SAGEMAKER, pattern=r"^$|" + _NAME + "$", max_length=63)


class PlainVariable(Fields):
    """A variable of the workers' environment with its value."""

    name: str = applied(..., becomes=ENVIRONMENT)
    value: str = applied(..., becomes=ENVIRONMENT, put="the variable's value")


class JumpStartSpec(SharedSpec):
    """The `spec` of HyperPod's JumpStartModel."""

    model: HubModel = section(...)
    server: JumpStartServer = section(...)
    sage_maker_endpoint: SageMakerEndpoint | None = section()
    environment_variables: list[PlainVariable] | None = section(max_length=100)
    load_balancer: LoadBalancer | None = section()
    tls_config: Tls | None = section()
    dns_config: Dns | None = section()
    data_capture: dict[str, Any] | None = noted(because=_NO_CAPTURE)
    model_cache_config: dict[str, Any] | None = noted(because=_READS_WEIGHTS)


class JumpStartModel(Fields):
    """HyperPod's document for a model of a SageMaker hub, with kvroute's extension."""

    api_version: HyperpodApi = applied(..., becomes="the form of this file")
    kind: Literal["JumpStartModel"] = applied(..., becomes="the form of this file")
    metadata: Metadata = section(...)
    spec: JumpStartSpec = section(...)
    status: dict[str, Any] | None = noted(because="HyperPod writes it as a report")
    x_kvroute: Extension = section(Extension(), alias="x-kvroute")


class EndpointDocument(Fields):
    """kvroute's own document."""

    api_version: Literal["kvroute.dev/v1"] = applied(..., becomes="the form of this file")
    kind: Literal["Endpoint"] = applied(..., becomes="the form of this file")
    metadata: Metadata = section(...)
    spec: EndpointSpec = section(...)
    x_kvroute: Extension = section(Extension(), alias="x-kvroute")


WorkerDocument = InferenceEndpointConfig | EndpointDocument
"""A document that describes the workers' container itself."""
Document = WorkerDocument | JumpStartModel
KINDS: dict[str, type[InferenceEndpointConfig] | type[JumpStartModel] | type[EndpointDocument]] = {
    HYPERPOD_KIND: InferenceEndpointConfig,
    JUMPSTART_KIND: JumpStartModel,
    OWN_KIND: EndpointDocument,
}


def shape_of_kind(kind: object) -> Shape:
    """The shape of a document of that kind. An unknown kind gives the shape of HyperPod's document."""
    return Shape(ValueKind.MODEL, model=KINDS.get(str(kind), InferenceEndpointConfig))


JUMPSTART_MODELS: Final = {
    "deepseek-llm-r1-distill-llama-70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "deepseek-llm-r1-distill-llama-8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "deepseek-llm-r1-distill-qwen-1-5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "deepseek-llm-r1-distill-qwen-14b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
    "deepseek-llm-r1-distill-qwen-32b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-llm-r1-distill-qwen-7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "huggingface-llm-gemma-3-1b-instruct": "google/gemma-3-1b-it",
    "huggingface-llm-mistral-7b": "mistralai/Mistral-7B-v0.1",
    "huggingface-llm-mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.2",
    "huggingface-llm-mistral-7b-instruct-v3": "mistralai/Mistral-7B-Instruct-v0.3",
    "huggingface-llm-mistral-nemo-instruct-2407": "mistralai/Mistral-Nemo-Instruct-2407",
    "huggingface-llm-mistral-small-24B-Instruct-2501": "mistralai/Mistral-Small-24B-Instruct-2501",
    "huggingface-llm-mistralai-mixtral-8x22B-instruct-v0-1": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "huggingface-llm-mixtral-8x7b-instruct": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "huggingface-llm-phi-3-5-mini-instruct": "microsoft/Phi-3.5-mini-instruct",
    "huggingface-llm-phi-3-mini-4k-instruct": "microsoft/Phi-3-mini-4k-instruct",
    "huggingface-llm-phi-3-mini-128k-instruct": "microsoft/Phi-3-mini-128k-instruct",
    "huggingface-llm-qwen2-5-14b-instruct": "Qwen/Qwen2.5-14B-Instruct",
    "huggingface-llm-qwen2-5-32b-instruct": "Qwen/Qwen2.5-32B-Instruct",
    "huggingface-llm-qwen2-5-72b-instruct": "Qwen/Qwen2.5-72B-Instruct",
    "huggingface-llm-qwen2-5-7b-instruct": "Qwen/Qwen2.5-7B-Instruct",
    "huggingface-llm-qwen2-5-coder-32b-instruct": "Qwen/Qwen2.5-Coder-32B-Instruct",
    "huggingface-llm-qwen2-5-coder-7b-instruct": "Qwen/Qwen2.5-Coder-7B-Instruct",
    "huggingface-llm-qwq-32b": "Qwen/QwQ-32B",
    "huggingface-llm-tinyllama-tinyllama-1-1b-chat-v1-0": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "huggingface-reasoning-qwen3-06b": "Qwen/Qwen3-0.6B",
    "huggingface-reasoning-qwen3-1-7b": "Qwen/Qwen3-1.7B",
    "huggingface-reasoning-qwen3-14b": "Qwen/Qwen3-14B",
    "huggingface-reasoning-qwen3-32b": "Qwen/Qwen3-32B",
    "huggingface-reasoning-qwen3-4b": "Qwen/Qwen3-4B",
    "huggingface-reasoning-qwen3-8b": "Qwen/Qwen3-8B",
    "meta-textgeneration-llama-3-1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "meta-textgeneration-llama-3-2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "meta-textgeneration-llama-3-2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "meta-textgeneration-llama-3-3-70b-instruct": "meta-llama/Llama-3.3-70B-Instruct",
    "openai-reasoning-gpt-oss-120b": "openai/gpt-oss-120b",
    "openai-reasoning-gpt-oss-20b": "openai/gpt-oss-20b",
}
"""JumpStart's modelId -> the model's name on Hugging Face.

From the list of models in the documentation of sagemaker-python-sdk 2.239, and from the tables of AWS's
documentation of model customization (read in November 2026).
"""

_ONE_GPU: Final = ("g4dn", "g5", "g6", "g6e", "g7e", "gr6", "p3", "p5")
_SEVERAL_GPUS: Final = {
    2: ("g7e.12xlarge",),
    4: (
        *("g4dn.12xlarge", "g5.12xlarge", "g5.24xlarge", "g6.12xlarge", "g6.24xlarge"),
        *("g6e.12xlarge", "g6e.24xlarge", "g7e.24xlarge", "p3.8xlarge", "p6e-gb200.36xlarge"),
    ),
    8: (
        *("g5.48xlarge", "g6.48xlarge", "g6e.48xlarge", "g7e.48xlarge", "p3.16xlarge", "p3dn.24xlarge"),
        *("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge"),
        *("p6-b200.48xlarge", "p6-b300.48xlarge"),
    ),
}
"""GPUs -> AWS's instance types with that many; the other sizes of the families in `_ONE_GPU` have one."""


def gpus_of_instance(instance_type: str) -> int | None:
    """The number of NVIDIA GPUs of an instance type such as `ml.g5.24xlarge`; None if it is not known."""
    name = instance_type.removeprefix("ml.")
    for number, types in _SEVERAL_GPUS.items():
        if name in types:
            return number
    return 1 if name.partition(".")[0] in _ONE_GPU else None


def jumpstart_model(document: JumpStartModel) -> str | None:
    """The model that the workers of a JumpStartModel load; None if its modelId is not known."""
    return document.x_kvroute.model or JUMPSTART_MODELS.get(document.spec.model.model_id)


def resolved(document: Document) -> WorkerDocument:
    """The document as kvroute plans it: its platform decided, a JumpStartModel as the same Endpoint. Pure.

    Without `x-kvroute.platform`, the nodes are HyperPod's if the workers' image is one of HyperPod's.
    """
    extension = document.x_kvroute
    if extension.platform is None:
        worker = None if isinstance(document, JumpStartModel) else document.spec.worker
        image = worker.image if worker is not None and worker.image is not None else extension.images.worker
        platform = "hyperpod" if "hyperpod" in image.rpartition("/")[2] else "any"
        extension = extension.model_copy(update={"platform": platform})
    if isinstance(document, JumpStartModel):
        return _without_hub(document, extension)
    return document.model_copy(update={"x_kvroute": extension})


def _without_hub(document: JumpStartModel, extension: Extension) -> EndpointDocument:
    """The Endpoint that does the same as a JumpStartModel.

    The sections that both kinds have are the same objects. Each worker gets all GPUs of the instance type, or
    one GPU partition. On HyperPod the instance type chooses the nodes.
    """
    spec, hub, server = document.spec, document.spec.model, document.spec.server
    partition = server.accelerator_partition_type
    gpus = extension.gpus_per_worker or gpus_of_instance(server.instance_type) or 1
    limits: dict[str, str | int | float]
    limits = {f"nvidia.com/{partition}": 1} if partition else {"nvidia.com/gpu": gpus}
    variables = [
        EnvironmentVariable(name=variable.name, value=variable.value)
        for variable in spec.environment_variables or []
    ]
    worker = EndpointWorker.model_validate(
        {
            "resources": Resources(limits=limits),
            **({"environmentVariables": variables} if variables else {}),
        }
    )
    shared = {
        field.alias or name: getattr(spec, name)
        for name, field in SharedSpec.model_fields.items()
        if name in spec.model_fields_set
    }
    if extension.platform == "hyperpod":
        wanted = {"key": INSTANCE_TYPE_LABEL, "operator": "In", "values": [server.instance_type]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
        shared["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return EndpointDocument.model_validate(
        {
            "apiVersion": OWN_API,
            "kind": OWN_KIND,
            "metadata": document.metadata,
            "spec": {
                "model": jumpstart_model(document) or hub.model_id,
                "modelName": hub.model_id,
                "modelVersion": hub.model_version,
                "worker": worker,
                **shared,
            },
            "x-kvroute": extension,
        }
    )
