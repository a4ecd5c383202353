"""`spec.worker`: the model server's container; and where its model comes from."""

from __future__ import annotations

from typing import Any, Literal

from kvroute.deploy.spec.fields import Fields, applied, noted, section

_ENV = "the workers' environment"
_ENV_BY_REFERENCE = "the workers' environment (Kubernetes)"
Quantity = str | int | float


class KeyRef(Fields):
    """One key of a ConfigMap or Secret."""

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


class ValueFrom(Fields):
    config_map_key_ref: KeyRef | None = applied(becomes=_ENV_BY_REFERENCE)
    field_ref: FieldRef | None = applied(becomes=_ENV_BY_REFERENCE)
    resource_field_ref: ResourceFieldRef | None = applied(becomes=_ENV_BY_REFERENCE)
    secret_key_ref: KeyRef | None = applied(becomes=_ENV_BY_REFERENCE)


class EnvironmentVariable(Fields):
    name: str = applied(..., becomes=_ENV, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")
    value: str | None = applied(becomes=_ENV)
    value_from: ValueFrom | None = applied(becomes=_ENV_BY_REFERENCE)


class InvocationPort(Fields):
    container_port: int = applied(..., becomes="the port that the workers serve on", ge=1, le=65535)
    name: Literal["http", "grpc"] = applied("http", becomes="the name of the workers' port (Kubernetes)")


class VolumeMount(Fields):
    name: str = applied(..., becomes="the name of the model's volume")
    mount_path: str = applied("/opt/ml/model", becomes="where the workers see the model's files")


class ResourceClaim(Fields):
    name: str = applied(..., becomes="a resource claim of the workers (Kubernetes)")
    request: str | None = applied(becomes="a resource claim of the workers (Kubernetes)")


class Resources(Fields):
    limits: dict[str, Quantity] | None = applied(becomes="limits of the workers, and their GPUs")
    requests: dict[str, Quantity] | None = applied(becomes="requests of the workers (Kubernetes)")
    claims: list[ResourceClaim] | None = applied(becomes="resource claims of the workers (Kubernetes)")


class Probe(Fields):
    """A Kubernetes probe; what it does is taken over as it stands."""

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
        becomes="server.max_in_flight of the gateway: so many more per worker may wait, the rest is refused",
        ge=0,
    )
    overflow_status_code: int = noted(429, because="the gateway refuses with 429", ge=400, le=599)


class Worker(Fields):
    """The model server."""

    image: str = applied(..., becomes="the workers' image", min_length=1)
    command: list[str] | None = applied(becomes="the workers' command in place of `vllm serve`")
    args: list[str] | None = applied(becomes="arguments of the workers")
    working_dir: str | None = applied(becomes="the workers' working directory")
    environment_variables: list[EnvironmentVariable] | None = applied(becomes=_ENV)
    model_invocation_port: InvocationPort = section(...)
    model_volume_mount: VolumeMount = section(...)
    resources: Resources = section(...)
    probes: Probes | None = section()
    request_limits: RequestLimits | None = section()


class EndpointWorker(Worker):
    """The same where nothing is required."""

    image: str | None = applied(becomes="the workers' image", min_length=1)  # type: ignore[assignment]
    model_invocation_port: InvocationPort | None = section()  # type: ignore[assignment]
    model_volume_mount: VolumeMount | None = section()  # type: ignore[assignment]
    resources: Resources | None = section()  # type: ignore[assignment]


class S3Storage(Fields):
    bucket_name: str = applied(..., becomes="the bucket that the model is read from", min_length=1)
    region: str = applied(..., becomes="the region of the model's bucket", min_length=1)


class FsxStorage(Fields):
    file_system_id: str = applied(..., becomes="the model's volume (Kubernetes)")
    dns_name: str | None = applied(becomes="the model's volume (Kubernetes)")
    mount_name: str | None = applied(becomes="the model's volume (Kubernetes)")


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
        ..., becomes="where the workers get the model from"
    )
    model_location: str | None = applied(becomes="the model's folder in its storage")
    prefetch_enabled: bool = noted(False, because="vLLM reads the weights itself")
    s3_storage: S3Storage | None = section()
    fsx_storage: FsxStorage | None = section()
    hugging_face_model: HuggingFaceModel | None = section()
