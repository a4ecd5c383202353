"""A field with the verdict "applied" changes the rendered files; a field with "no effect" does not."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from tests.deploy.spec.conftest import put

from kvroute.deploy.render.kubernetes import kubernetes_objects
from kvroute.deploy.render.plan import plan_endpoint
from kvroute.deploy.render.reach import findings_for
from kvroute.deploy.render.registry import TARGETS
from kvroute.deploy.spec.endpoint import KINDS, InferenceEndpointConfig, shape_of_kind
from kvroute.deploy.spec.loading import Finding, read_spec
from kvroute.deploy.spec.rules import rule_findings
from kvroute.deploy.spec.source import FieldVerdict, Path, ValueKind, dotted, walk

STRATEGIES = {"roundrobin", "session", "prefixaware", "kvaware"}
CLOUD_WATCH = (
    "{name: cw, namespace: AWS/ApplicationELB, metricName: RequestCount, metricStat: Sum, "
    "metricType: Value, metricCollectionPeriod: 60, metricCollectionStartTime: 60, "
    "minValue: 1, targetValue: 5, activationTargetValue: 2, useCachedMetrics: false, "
    "dimensions: [{name: LoadBalancer, value: a}]}"
)
PROMETHEUS = (
    "{name: p, namespace: n, serverAddress: http://prometheus:9090, query: up, targetValue: 3, "
    "activationTargetValue: 1, metricType: Value, customHeaders: a=b, useCachedMetrics: false}"
)


def scaling(number: int) -> str:
    return f"""
          minReplicaCount: {number}
          maxReplicaCount: {number + 4}
          pollingInterval: 31
          cooldownPeriod: 301
          initialCooldownPeriod: 302
          scaleDownStabilizationTime: 303
          scaleUpStabilizationTime: 4
          cloudWatchTriggerList:
            - {CLOUD_WATCH}
          prometheusTriggerList:
            - {PROMETHEUS}
"""


HYPERPOD = f"""
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata:
    name: full
    namespace: llm
    labels: {{team: a}}
    annotations: {{note: b}}
spec:
    modelName: full-model
    modelVersion: "1.2"
    endpointName: sagemaker-name
    replicas: 2
    invocationEndpoint: v1/completions
    maxDeployTimeInSeconds: 1800
    instanceType: ml.g5.24xlarge
    modelSourceConfig:
        modelSourceType: s3
        modelLocation: models/full
        prefetchEnabled: true
        s3Storage: {{bucketName: bucket, region: us-west-2}}
    kvCacheSpec:
        enableL1Cache: true
        enableL2Cache: true
        l2CacheSpec:
            l2CacheBackend: redis
            l2CacheLocalUrl: redis://cache:6379
    intelligentRoutingSpec:
        enabled: true
        routingStrategy: session
        autoScalingSpec: {scaling(1)}
    autoScalingSpec: {scaling(2)}
    loadBalancer: {{healthCheckPath: /ping, routingAlgorithm: round_robin}}
    metrics:
        enabled: true
        metricsScrapeIntervalSeconds: 20
        modelMetrics: {{path: /metrics/all, port: 8000}}
    tlsConfig:
        tlsCertificateOutputS3Uri: s3://bucket/certificates
        customCertificateConfig: {{acmArn: arn, domainName: example.com}}
        dnsConfig: {{hostedZoneId: Z1}}
    dnsConfig: {{hostedZoneId: Z2}}
    tags: [{{name: a, value: b}}]
    dataCapture: {{s3Uri: s3://bucket/capture}}
    modelCacheConfig: {{enabled: true}}
    nodeAffinity:
        preferredDuringSchedulingIgnoredDuringExecution:
            - {{weight: 1, preference: {{matchExpressions: [{{key: a, operator: Exists}}]}}}}
        requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms: [{{matchExpressions: [{{key: b, operator: Exists}}]}}]
    kubernetes:
        initContainers: [{{name: i, image: busybox}}]
        volumes: [{{name: v, emptyDir: {{}}}}]
        schedulerName: scheduler
        serviceAccountName: account
    worker:
        image: vllm/vllm-openai:v0.32.0
        command: [serve-it]
        args: [--max-model-len, "1000"]
        workingDir: /work
        environmentVariables:
            - {{name: A, value: "1"}}
            - name: B
              valueFrom:
                  configMapKeyRef: {{name: m, key: k, optional: true}}
                  secretKeyRef: {{name: s, key: k, optional: false}}
                  fieldRef: {{apiVersion: v1, fieldPath: status.podIP}}
                  fileKeyRef: {{volumeName: v, path: p, key: k, optional: true}}
                  resourceFieldRef: {{containerName: worker, divisor: "1", resource: limits.cpu}}
        modelInvocationPort: {{containerPort: 8000, name: http}}
        modelVolumeMount: {{name: weights, mountPath: /opt/ml/model}}
        resources:
            limits: {{nvidia.com/gpu: 1, cpu: 2}}
            requests: {{cpu: 1}}
            claims: [{{name: claim, request: r}}]
        probes:
            livenessProbe: &probe
                exec: {{command: [a]}}
                grpc: {{port: 1}}
                httpGet: {{path: /a, port: 1}}
                tcpSocket: {{port: 1}}
                failureThreshold: 2
                initialDelaySeconds: 3
                periodSeconds: 4
                successThreshold: 1
                terminationGracePeriodSeconds: 5
                timeoutSeconds: 6
            readinessProbe: *probe
            startupProbe: *probe
        requestLimits: {{maxConcurrentRequests: 10, maxQueueSize: 5, overflowStatusCode: 503}}
status: {{state: x}}
x-kvroute:
    engine: vllm
    device: gpu
    gpusPerWorker: 2
    platform: hyperpod
    awsRegion: eu-west-1
    images:
        gateway: g
        gatewayBuild: .
        lmcache: l
        prometheus: p
        downloader: d
    lmcache: {{mode: mp, servers: per-worker, chunkSize: 128, hashSeed: 3}}
    l1: {{sizeGb: 10, evictionPolicy: ARC}}
    l2:
        storePolicy: skip_l1
        prefetchPolicy: default
        passwordSecret: {{name: n, key: k}}
        options: {{num_workers: 3}}
    routing:
        sessionKeys: ["body:user"]
        options: {{session: {{epsilon: 0.5}}}}
    gateway:
        port: 8081
        replicas: 2
        apiKeysSecret: {{name: n, key: k}}
        adminKeySecret: {{name: n, key: k}}
        resources: {{requests: {{cpu: 3}}}}
        settings: {{logging: {{level: debug}}}}
    kubernetes:
        podTemplate: {{spec: {{priorityClassName: a}}}}
        servicePodTemplate: {{spec: {{priorityClassName: a}}}}
        workload: Deployment
        maxSurge: 1
        metricsFrom: [{{ipBlock: {{cidr: 10.0.0.0/8}}}}]
    scaling: {{by: workersNeeded, prometheusAddress: "http://prometheus:9090"}}
"""

# Where the next best value is not one: what else to write; nothing where the rest would have to change too.
OTHERS: dict[str, list[Any]] = {
    "kind": [],
    "apiVersion": [],
    "spec.modelSourceConfig.modelSourceType": [],
    "spec.replicas": [3],
    "spec.intelligentRoutingSpec.routingStrategy": ["prefixaware"],
    "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": ["fs"],
    "spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": ["redis://elsewhere:1"],
    "spec.instanceType": ["ml.p5.48xlarge"],
    "spec.worker.modelInvocationPort.name": ["grpc"],
    "spec.worker.resources.limits": [{"nvidia.com/gpu": 1, "cpu": 2, "memory": "3Gi"}],
    "spec.loadBalancer.routingAlgorithm": ["least_outstanding_requests"],
    "spec.loadBalancer.healthCheckPath": ["/other"],
    "spec.metrics.modelMetrics.path": ["/other"],
    "x-kvroute.engine": ["sim"],
    "x-kvroute.device": ["cpu"],
    "x-kvroute.platform": ["any"],
    "x-kvroute.lmcache.mode": [],
    "x-kvroute.lmcache.servers": ["per-node"],
    "x-kvroute.l1.evictionPolicy": ["LRU"],
    "x-kvroute.l2.storePolicy": ["default"],
    "x-kvroute.l2.prefetchPolicy": ["retain"],
    "x-kvroute.routing.sessionKeys": [["header:x"]],
    "x-kvroute.gateway.settings": [{"logging": {"level": "error"}}],
    "spec.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution": [
        {"nodeSelectorTerms": [{"matchExpressions": [{"key": "c", "operator": "Exists"}]}]}
    ],
    "spec.tlsConfig.tlsCertificateOutputS3Uri": ["s3://other/x"],
    "x-kvroute.kubernetes.podTemplate": [{"spec": {"priorityClassName": "b"}}],
    "x-kvroute.kubernetes.servicePodTemplate": [{"spec": {"priorityClassName": "b"}}],
    "x-kvroute.kubernetes.metricsFrom": [[{"podSelector": {}}]],
    "x-kvroute.kubernetes.workload": [],
    "x-kvroute.scaling.by": [],
}
# Applied, but not with this document: other fields of it decide.
COVERED_UP: dict[str, set[str]] = {
    "spec.maxDeployTimeInSeconds": {"kubernetes"},
    "spec.worker.resources.limits": {"worker-args"},
    "spec.kvCacheSpec.enableL1Cache": {"worker-args"},
    "spec.kvCacheSpec.enableL2Cache": {"worker-args"},
}
CHOICES = {"metricType": "Average"}


def other(path: Path, value: Any) -> list[Any]:
    """Another value that is as valid."""
    name = dotted(path)
    if name in OTHERS:
        return OTHERS[name]
    if str(path[-1]) in CHOICES:
        return [CHOICES[str(path[-1])]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value + 0.5]
    if isinstance(value, str):
        return [value + "0"]
    if isinstance(value, list):
        return [[*value, copy.deepcopy(value[0])]] if value and not isinstance(value[0], dict) else []
    if isinstance(value, dict):
        return [{**value, "added": next(iter(value.values()), "x")}]
    raise AssertionError(name)


def leaves(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Single fields as the models declare them."""
    shapes = {dotted(each): shape for each, shape in walk(shape_of_kind(value["kind"]))}
    found: list[tuple[Path, Any]] = []

    def enter(value: Any, path: Path) -> None:
        shape = shapes.get(dotted(tuple(0 if isinstance(key, int) else key for key in path)))
        is_open = (
            not path or isinstance(path[-1], int) or (shape is not None and shape.kind is ValueKind.MODEL)
        )
        if isinstance(value, dict) and is_open:
            for key, inner in value.items():
                enter(inner, (*path, key))
        elif (
            isinstance(value, list)
            and shape is not None
            and shape.item is not None
            and shape.item.model is not None
        ):
            for number, item in enumerate(value):
                enter(item, (*path, number))
        else:
            found.append((path, value))

    enter(value, path)
    return found


def changed(document: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


def rendered(document: dict[str, Any]) -> dict[str, str]:
    """The output of each target. Kubernetes manifests are compared as objects, because writing YAML is
    slow."""
    made = KINDS[document["kind"]].model_validate(document)
    assert [each for each in rule_findings(made, STRATEGIES) if each[1] is FieldVerdict.WRONG] == []
    plan = plan_endpoint(made)
    return {
        name: repr(kubernetes_objects(plan) if name == "kubernetes" else target.render(plan))
        for name, target in TARGETS.items()
    }


def verdict_of(findings: tuple[Finding, ...], path: Path) -> FieldVerdict:
    (mine,) = [each for each in findings if path[: len(each.path)] == each.path and each.path]
    return FieldVerdict.APPLIED if mine.text.startswith("applied") else mine.verdict


DOCUMENT: dict[str, Any] = yaml.safe_load(HYPERPOD)
CASES = [(path, another) for path, value in leaves(DOCUMENT) for another in other(path, value)]


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    return rendered(DOCUMENT)


@pytest.fixture(scope="module")
def findings() -> tuple[Finding, ...]:
    return read_spec(json.dumps(DOCUMENT), strategies=STRATEGIES).findings


@pytest.fixture(scope="module")
def by_target(findings) -> dict[str, tuple[Finding, ...]]:
    document = InferenceEndpointConfig.model_validate(DOCUMENT)
    return {name: tuple(findings_for(name, document, findings)) for name in TARGETS}


def test_the_document_has_a_wrong_field_nowhere(findings):
    assert [each for each in findings if each.verdict is FieldVerdict.WRONG] == []


@pytest.mark.parametrize(("path", "another"), CASES, ids=[dotted(path) for path, _ in CASES])
def test_a_fields_effect_in_each_target_matches_its_verdict(path, another, before, findings, by_target):
    after = rendered(changed(DOCUMENT, path, another))
    has_effect = {name for name in TARGETS if after[name] != before[name]}
    is_applied = {name for name in TARGETS if verdict_of(by_target[name], path) is FieldVerdict.APPLIED}

    # The document has an autoscaler for the gateways.
    is_decided = dotted(path) == "x-kvroute.gateway.replicas"
    assert bool(has_effect) == (verdict_of(findings, path) is FieldVerdict.APPLIED and not is_decided)
    assert has_effect == is_applied - COVERED_UP.get(dotted(path), set())


BACKEND = "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend"
SOURCE = "spec.modelSourceConfig"
VARIANTS: dict[str, dict[str, Any]] = {
    "redis": {"x-kvroute.l1.sizeGb": 2.0, "x-kvroute.l2.sizeGb": 2.0, "x-kvroute.images.redis": "r"},
    "fs": {BACKEND: "fs", "x-kvroute.l2.fs": {"path": "/a", "claim": "c"}},
    "s3": {BACKEND: "s3", "x-kvroute.l2.s3": {"endpoint": "s3://b", "region": "r"}},
    "mooncake": {BACKEND: "mooncake", "x-kvroute.l2.mooncake": {"segmentGb": 2.0, "deviceName": "x"}},
    "classic": {"x-kvroute.lmcache": {"mode": "classic", "chunkSize": 64}, "x-kvroute.l1.sizeGb": 2.0},
    "kvaware": {"spec.intelligentRoutingSpec.routingStrategy": "kvaware"},
    "cluster": {
        "x-kvroute.kubernetes.modelCache": {"claim": "c"},
        "x-kvroute.kubernetes.gpuNodeLabels": ["gpu"],
    },
    "needed workers": {
        "x-kvroute.scaling.by": "workersNeeded",
        "spec.autoScalingSpec": {"maxReplicaCount": 4},
    },
    "node folder": {"x-kvroute.kubernetes.modelCache": {"hostPath": "/models"}},
    "folder": {"spec.model": "/data/model", "spec.modelName": "name", "spec.maxDeployTimeInSeconds": 60},
}
SOURCES: dict[str, dict[str, Any]] = {
    "huggingface": {
        "modelSourceType": "huggingface",
        "huggingFaceModel": {"modelId": "a/b", "commitSHA": "x", "tokenSecretRef": {"name": "n", "key": "k"}},
    },
    "fsx": {"modelSourceType": "fsx", "fsxStorage": {"fileSystemId": "f", "dnsName": "d", "mountName": "m"}},
}
JUMPSTART_OTHERS = {
    "spec.model.modelId": "huggingface-reasoning-qwen3-4b",
    "spec.server.instanceType": "ml.g5.48xlarge",
    "spec.server.acceleratorPartitionType": "mig-2g.10gb",
}
JUMPSTART: dict[str, Any] = {
    "apiVersion": "inference.sagemaker.aws.amazon.com/v1",
    "kind": "JumpStartModel",
    "metadata": {"name": "hub"},
    "spec": {
        "model": {
            "modelId": "huggingface-reasoning-qwen3-8b",
            "modelVersion": "1.2.3",
            "modelHubName": "SageMakerPublicHub",
            "acceptEula": True,
            "gatedModelDownloadRole": "arn:aws:iam::123456789012:role/a",
            "additionalConfigs": [{"name": "a", "value": "b"}],
        },
        "server": {
            "instanceType": "ml.g5.12xlarge",
            "executionRole": "arn:aws:iam::123456789012:role/a",
            "validations": {"acceleratorPartitionValidation": True},
        },
        "sageMakerEndpoint": {"name": "endpoint"},
        "environmentVariables": [{"name": "A", "value": "b"}],
        "loadBalancer": {"healthCheckPath": "/ping"},
        "dataCapture": {"s3Uri": "s3://bucket/capture"},
        "modelCacheConfig": {"enabled": True},
        "replicas": 2,
        "intelligentRoutingSpec": {"enabled": True, "routingStrategy": "kvaware"},
        "kvCacheSpec": {"enableL1Cache": True},
    },
    "x-kvroute": {"platform": "hyperpod"},
}
HUB: dict[str, dict[str, Any]] = {
    "by id": {},
    "by name": {"x-kvroute.model": "a/b"},
    "partition": {"spec.server.acceleratorPartitionType": "mig-1g.5gb"},
}


@pytest.mark.parametrize("variant", HUB)
def test_a_jumpstart_models_own_fields_have_the_effects_of_their_verdicts(variant):
    document = copy.deepcopy(JUMPSTART)
    for path, value in HUB[variant].items():
        put(document, path, value)
    findings = read_spec(json.dumps(document), strategies=STRATEGIES).findings
    made = KINDS[document["kind"]].model_validate(document)
    by_target = {name: tuple(findings_for(name, made, findings)) for name in TARGETS}
    before, tried = rendered(document), set()

    for path, value in leaves(document):
        name = dotted(path)
        if not name.startswith(("spec.model.", "spec.server.", "spec.env", "x-kvroute.model")):
            continue
        tried.add(name)
        after = rendered(changed(document, path, JUMPSTART_OTHERS.get(name, other(path, value)[0])))
        effects = {target for target in TARGETS if after[target] != before[target]}
        applied = {
            target for target in TARGETS if verdict_of(by_target[target], path) is FieldVerdict.APPLIED
        }
        assert effects <= applied, name
        assert effects or not applied, name
    assert len(tried) > 8


CLOSED = ("kind", "apiVersion", "mode", "modelSourceType", "l2CacheBackend", "routingStrategy", "endpoint")


@pytest.mark.parametrize("variant", [*VARIANTS, *SOURCES])
def test_where_a_field_is_noted_in_a_target_it_has_no_effect_there(variant, own, hyperpod):
    document = own(VARIANTS[variant]) if variant in VARIANTS else hyperpod({SOURCE: SOURCES[variant]})
    findings = read_spec(json.dumps(document), strategies=STRATEGIES).findings
    made = KINDS[document["kind"]].model_validate(document)
    by_target = {name: tuple(findings_for(name, made, findings)) for name in TARGETS}
    before, tried = rendered(document), 0

    for path, value in leaves(document):
        if path[-1] in CLOSED or value == {}:
            continue
        for another in other(path, value):
            tried += 1
            after = rendered(changed(document, path, another))
            for name in TARGETS:
                if after[name] != before[name]:
                    assert verdict_of(by_target[name], path) is FieldVerdict.APPLIED, (name, path)
    assert tried > 5
