"""`autoScalingSpec`, of the workers and of the gateway."""

from __future__ import annotations

from typing import Literal

from kvroute.deploy.spec.fields import Fields, applied, noted

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
    """Scale by a Prometheus query. Any server is allowed, not only AWS's managed one."""

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
    """Between how many replicas, and by what. Without a trigger: by CPU use, with an HPA."""

    min_replica_count: int = applied(1, becomes="the fewest replicas (Kubernetes)", ge=0)
    max_replica_count: int = applied(5, becomes="the most replicas (Kubernetes)", ge=1)
    polling_interval: int = applied(30, becomes=_SCALER, ge=0)
    cooldown_period: int = applied(300, becomes=_SCALER, ge=0)
    initial_cooldown_period: int = applied(300, becomes=_SCALER, ge=0)
    scale_down_stabilization_time: int = applied(
        300, becomes="how long to wait before fewer replicas (Kubernetes)", ge=0, le=3600
    )
    scale_up_stabilization_time: int = applied(
        0, becomes="how long to wait before more replicas (Kubernetes)", ge=0, le=3600
    )
    cloud_watch_trigger: CloudWatchTrigger | None = applied(becomes=_FOR_AWS)
    cloud_watch_trigger_list: list[CloudWatchTrigger] | None = applied(becomes=_FOR_AWS, max_length=100)
    prometheus_trigger: PrometheusTrigger | None = applied(becomes=_FOR_PROMETHEUS)
    prometheus_trigger_list: list[PrometheusTrigger] | None = applied(becomes=_FOR_PROMETHEUS, max_length=100)

    def cloud_watch(self) -> list[CloudWatchTrigger]:
        """The CloudWatch triggers; the list wins over the single one."""
        return self.cloud_watch_trigger_list or (
            [self.cloud_watch_trigger] if self.cloud_watch_trigger else []
        )

    def prometheus(self) -> list[PrometheusTrigger]:
        """The Prometheus triggers; the list wins over the single one."""
        return self.prometheus_trigger_list or ([self.prometheus_trigger] if self.prometheus_trigger else [])


_NO_SPLIT = "kvroute sends prefill and decode of a request to one worker"


class PdTopology(Fields):
    same_az: bool = noted(True, because=_NO_SPLIT, alias="sameAZ")


class PdStage(Fields):
    args: list[str] | None = noted(because=_NO_SPLIT)
    node_selector: dict[str, str] | None = noted(because=_NO_SPLIT)
    replicas: int | None = noted(because=_NO_SPLIT, ge=0)
    resources: dict[str, object] | None = noted(because=_NO_SPLIT)


class PrefillDecode(Fields):
    """Prefill and decode on different workers."""

    prefill_spec: PdStage = noted(..., because=_NO_SPLIT)
    decoding_spec: PdStage = noted(..., because=_NO_SPLIT)
    auto_scaling_spec: AutoScaling | None = noted(because=_NO_SPLIT)
    routing_threshold: int = noted(4096, because=_NO_SPLIT, ge=0)
    topology_spec: PdTopology | None = noted(because=_NO_SPLIT)
