"""The documents: HyperPod's `InferenceEndpointConfig`, and kvroute's `Endpoint` without the AWS parts.

Fields and rules as in the CRD of sagemaker-hyperpod-cli 3.12 (inference.sagemaker.aws.amazon.com/v1).
"""

from __future__ import annotations

from typing import Any, Literal

from kvroute.deploy.spec.extension import Extension
from kvroute.deploy.spec.source import Fields, Shape, ValueKind, applied, noted, section
from kvroute.deploy.spec.worker import (
    AutoScaling,
    EndpointWorker,
    IntelligentRouting,
    KvCache,
    ModelSource,
    PrefillDecode,
    WorkerSection,
)

HYPERPOD_API, HYPERPOD_KIND = "inference.sagemaker.aws.amazon.com/v1", "InferenceEndpointConfig"
OWN_API, OWN_KIND = "kvroute.dev/v1", "Endpoint"

_NAME = r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_SAGEMAKER = "there is no SageMaker endpoint in front of kvroute"
_NO_AWS_LB = "the gateway replaces AWS's load balancer; it answers /health and /ready"
_NO_ACM = "kvroute does not fetch certificates: terminate TLS in front of the gateway"
_NO_CAPTURE = "kvroute never stores prompts or answers"


class Metadata(Fields):
    name: str = applied(..., becomes="the name of all rendered objects", pattern=_DNS_LABEL)
    namespace: str = applied("default", becomes="the namespace (Kubernetes)", pattern=_DNS_LABEL)
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
    hosted_zone_id: str = noted(..., because="kvroute does not write DNS records")


class Tls(Fields):
    tls_certificate_output_s3_uri: str | None = noted(because=_NO_ACM, pattern=r"^s3://([^/]+)/?(.*)$")
    custom_certificate_config: CustomCertificate | None = noted(because=_NO_ACM)
    dns_config: Dns | None = noted(because="kvroute does not write DNS records")


class Tag(Fields):
    name: str = noted(..., because=_SAGEMAKER)
    value: str = noted(..., because=_SAGEMAKER)


class CommonSpec(Fields):
    """The fields that both kinds of documents have."""

    replicas: int | None = applied(becomes="the number of workers", ge=0)
    model_version: str | None = applied(becomes="the label app.kubernetes.io/version (Kubernetes)")
    invocation_endpoint: str = noted(
        "invocations", because="the gateway serves every OpenAI path for every model"
    )
    max_deploy_time_in_seconds: int = applied(3600, becomes="how long a worker may take to start", ge=1)
    kv_cache_spec: KvCache | None = section()
    intelligent_routing_spec: IntelligentRouting | None = section()
    auto_scaling_spec: AutoScaling | None = section()
    metrics: MetricsSpec | None = section()
    node_affinity: NodeAffinity | None = section()
    kubernetes: PodSettings | None = section()
    pd_spec: PrefillDecode | None = section()


class InferenceEndpointSpec(CommonSpec):
    """The `spec` of HyperPod's InferenceEndpointConfig."""

    model_name: str = applied(..., becomes="the model's name in requests", pattern=_NAME, max_length=63)
    model_source_config: ModelSource = section(...)
    worker: WorkerSection = section(...)
    instance_type: str | None = applied(
        becomes="the workers' node affinity (Kubernetes on HyperPod)", pattern=r"^ml\..*"
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
    model_cache_config: dict[str, Any] | None = noted(because="vLLM loads the weights itself")


class EndpointSpec(CommonSpec):
    """The `spec` of kvroute's Endpoint. No field of it needs AWS."""

    model: str = applied(..., becomes="the model that the workers load: a name on Hugging Face, or a folder")
    model_name: str | None = applied(becomes="the model's name in requests", max_length=63)
    worker: EndpointWorker | None = section()


class InferenceEndpointConfig(Fields):
    """HyperPod's document with kvroute's extension."""

    api_version: Literal["inference.sagemaker.aws.amazon.com/v1"] = applied(
        ..., becomes="the form of this file"
    )
    kind: Literal["InferenceEndpointConfig"] = applied(..., becomes="the form of this file")
    metadata: Metadata = section(...)
    spec: InferenceEndpointSpec = section(...)
    status: dict[str, Any] | None = noted(because="HyperPod writes it as a report")
    x_kvroute: Extension = section(Extension(), alias="x-kvroute")


class EndpointDocument(Fields):
    """kvroute's own document."""

    api_version: Literal["kvroute.dev/v1"] = applied(..., becomes="the form of this file")
    kind: Literal["Endpoint"] = applied(..., becomes="the form of this file")
    metadata: Metadata = section(...)
    spec: EndpointSpec = section(...)
    x_kvroute: Extension = section(Extension(), alias="x-kvroute")


Document = InferenceEndpointConfig | EndpointDocument
KINDS: dict[str, type[InferenceEndpointConfig] | type[EndpointDocument]] = {
    HYPERPOD_KIND: InferenceEndpointConfig,
    OWN_KIND: EndpointDocument,
}


def shape_of_kind(kind: object) -> Shape:
    """The shape of a document of that kind. An unknown kind gives the shape of HyperPod's document."""
    return Shape(ValueKind.MODEL, model=KINDS.get(str(kind), InferenceEndpointConfig))
