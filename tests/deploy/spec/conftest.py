"""Specs to start from, and the way from a spec to what is rendered."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvroute.deploy.render.plan import EndpointPlan, plan_endpoint
from kvroute.deploy.spec.loading import SpecReading, read_spec

ROOT = Path(__file__).parents[3]
STRATEGIES = frozenset({"roundrobin", "session", "prefixaware", "kvaware"})
FILLED_IN = {
    "NAME": "demo",
    "NAMESPACE": "default",
    "MODEL_NAME": "Llama-3.1-8B-Instruct",
    "INSTANCE_TYPE": "ml.g5.24xlarge",
    "S3_BUCKET": "my-model-bucket",
    "AWS_REGION": "us-west-2",
    "S3_MODEL_PATH": "models/Llama-3.1-8B-Instruct",
    "CERT_S3_URI": "s3://my-bucket/certs/",
    "MODEL_IMAGE": "public.ecr.aws/deep-learning-containers/vllm:0.11.1-gpu-py312-cu129-ubuntu22.04-ec2-v1.0",
}

OWN: dict[str, Any] = {
    "apiVersion": "kvroute.dev/v1",
    "kind": "Endpoint",
    "metadata": {"name": "demo"},
    "spec": {
        "model": "Qwen/Qwen3-8B",
        "replicas": 2,
        "kvCacheSpec": {
            "enableL1Cache": True,
            "enableL2Cache": True,
            "l2CacheSpec": {"l2CacheBackend": "redis"},
        },
        "intelligentRoutingSpec": {"enabled": True, "routingStrategy": "prefixaware"},
    },
    "x-kvroute": {},
}
HYPERPOD: dict[str, Any] = {
    "apiVersion": "inference.sagemaker.aws.amazon.com/v1",
    "kind": "InferenceEndpointConfig",
    "metadata": {"name": "demo"},
    "spec": {
        "modelName": "demo-model",
        "modelSourceConfig": {
            "modelSourceType": "s3",
            "modelLocation": "models/demo",
            "s3Storage": {"bucketName": "bucket", "region": "us-west-2"},
        },
        "worker": {
            "image": "vllm/vllm-openai:v0.32.0",
            "modelInvocationPort": {"containerPort": 8000},
            "modelVolumeMount": {"name": "model-weights"},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
        },
    },
    "x-kvroute": {},
}


def put(document: dict[str, Any], path: str, value: object) -> None:
    """Set `a.b.c`; a value of None removes it."""
    *above, last = path.split(".")
    for key in above:
        document = document.setdefault(key, {})
    if value is None:
        document.pop(last, None)
    else:
        document[last] = value


Making = Callable[..., dict[str, Any]]


@pytest.fixture
def own() -> Making:
    """`({"spec.replicas": 3})` -> an `Endpoint` with these fields changed."""

    def make(changes: dict[str, object] | None = None) -> dict[str, Any]:
        document = copy.deepcopy(OWN)
        for path, value in (changes or {}).items():
            put(document, path, value)
        return document

    return make


@pytest.fixture
def hyperpod() -> Making:
    """The same for an `InferenceEndpointConfig`."""

    def make(changes: dict[str, object] | None = None) -> dict[str, Any]:
        document = copy.deepcopy(HYPERPOD)
        for path, value in (changes or {}).items():
            put(document, path, value)
        return document

    return make


@pytest.fixture
def read() -> Callable[[dict[str, Any] | str], SpecReading]:
    """A document, or its text -> what is found in it."""

    def parse(document: dict[str, Any] | str) -> SpecReading:
        text = document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False)
        return read_spec(text, strategies=STRATEGIES)

    return parse


@pytest.fixture
def plan(
    read: Callable[[dict[str, Any] | str], SpecReading],
) -> Callable[[dict[str, Any] | str], EndpointPlan]:
    """A document without a wrong field -> its plan."""
    return lambda document: plan_endpoint(read(document).require("spec.yaml"))


@pytest.fixture(scope="session")
def sample() -> str:
    """The announcement's spec, as people paste it."""
    return (ROOT / "tests" / "data" / "hyperpod-announcement-sample.yaml").read_text()


@pytest.fixture(scope="session")
def fill_in() -> Callable[[str], str]:
    """The announcement's own values for its variables."""
    return lambda text: re.sub(r"\$\{(\w+)\}", lambda match: FILLED_IN[match[1]], text)
