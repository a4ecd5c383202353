from __future__ import annotations

import pytest
import yaml

from kvroute.deploy.spec.aliases import ALIASES, SAME_NAME
from kvroute.deploy.spec.endpoint import KINDS, shape_of_kind
from kvroute.deploy.spec.loading import fix_layout, read_spec
from kvroute.deploy.spec.source import FieldVerdict, ValueKind, declared, dotted, shape_at, walk
from kvroute.errors import InvalidConfig


def found(reading) -> dict[str, tuple[str, str]]:
    return {dotted(each.path): (each.verdict.value, each.text) for each in reading.findings}


def wrong(reading) -> dict[str, str]:
    return {dotted(each.path): each.text for each in reading.wrong}


# --- declarations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_with_a_value_has_a_verdict(kind):
    root = shape_of_kind(kind)

    silent = [
        dotted(path)
        for path, shape in walk(root)
        if shape.kind is not ValueKind.MODEL
        and not (shape.kind is ValueKind.LIST and shape.item is not None and shape.item.model is not None)
        and declared(root, path) is None
    ]

    assert silent == []


@pytest.mark.parametrize("name", [*ALIASES, *SAME_NAME])
def test_every_flat_name_is_an_alias_of_a_field(name):
    assert shape_at(shape_of_kind("InferenceEndpointConfig"), (ALIASES | SAME_NAME)[name]) is not None


# --- what is good -----------------------------------------------------------------------------------------


def test_each_written_field_has_a_verdict_and_a_line(hyperpod, read):
    text = yaml.safe_dump(hyperpod({"spec.tags": [{"name": "a", "value": "b"}]}), sort_keys=False)
    reading = read(text)

    assert reading.document is not None
    lines = text.splitlines()
    for each in reading.findings:
        assert str(each.path[-1]) in lines[each.line - 1]
    assert found(reading)["spec.modelName"][0] == "applied"
    assert found(reading)["spec.tags[0].name"][0] == "noted"
    assert "has no effect here because" in found(reading)["spec.tags[0].name"][1]


@pytest.mark.parametrize("backend", ["redis", "REDIS", "TieredStorage", "valkey", "fs", "mooncake"])
def test_backends_are_known_whatever_their_case(backend, own, read):
    assert wrong(read(own({"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": backend}))) == {}


def test_a_section_that_is_empty_is_as_good_as_none(own, read):
    text = yaml.safe_dump(own()) + "\n"
    reading = read(text.replace("x-kvroute: {}", "x-kvroute:\n"))

    assert reading.document is not None


def test_the_command_lines_flat_form_is_the_same_endpoint(read):
    flat = {
        "template": "hyp-custom-endpoint",
        "version": "1.2",
        "metadata_name": "demo",
        "namespace": "llm",
        "model_name": "demo-model",
        "model_source_type": "s3",
        "s3_bucket_name": "bucket",
        "s3_region": "us-west-2",
        "image_uri": "vllm/vllm-openai:v0.32.0",
        "container_port": 8000,
        "model_volume_mount_name": "weights",
        "resources_limits": {"nvidia.com/gpu": "2"},
        "env": {"A": "1"},
        "worker_args": "--max-model-len, 20000",
        "replicas": 3,
        "intelligent_routing_enabled": True,
        "routing_strategy": "session",
        "enable_l1_cache": True,
        "enable_l2_cache": True,
        "l2_cache_backend": "redis",
        "l2_cache_local_url": "redis://cache:6379",
    }
    reading = read(flat)

    assert wrong(reading) == {}
    spec = reading.require("x").spec
    assert spec.replicas == 3
    assert spec.worker.args == ["--max-model-len", "20000"]
    assert spec.worker.environment_variables[0].name == "A"
    assert spec.intelligent_routing_spec.routing_strategy == "session"
    assert spec.kv_cache_spec.l2_cache_spec.l2_cache_local_url == "redis://cache:6379"
    assert reading.require("x").metadata.namespace == "llm"
    assert "read from routing_strategy" in found(reading)["spec.intelligentRoutingSpec.routingStrategy"][1]


def test_flat_names_are_also_read_directly_under_spec(hyperpod, read):
    reading = read(hyperpod({"spec.routing_strategy": "session", "spec.intelligent_routing_enabled": True}))

    assert reading.require("x").spec.intelligent_routing_spec.routing_strategy == "session"


def test_a_flat_name_and_its_field_together_are_wrong(hyperpod, read):
    reading = read(hyperpod({"spec.model_name": "other"}))

    assert wrong(reading) == {"spec.model_name": "spec.modelName is also given"}


# --- what is misplaced ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec.routingStrategy", "session", "belongs under spec.intelligentRoutingSpec"),
        ("spec.modelSourceConfig.s3Storage.modelLocation", "x", "belongs under spec.modelSourceConfig"),
        ("spec.worker.kvCacheSpec", {}, "belongs under spec"),
        ("spec.l2CacheBackend", "redis", "belongs under spec.kvCacheSpec.l2CacheSpec"),
        ("replicas", 1, "belongs under spec"),
        ("spec.containerPort", 1, "belongs under spec.worker.modelInvocationPort"),
        ("spec.chunkSize", 1, "belongs under x-kvroute.lmcache"),
        ("spec.worker.routing_strategy", "x", "belongs at spec.intelligentRoutingSpec.routingStrategy"),
        ("spec.replica", 1, "did you mean spec.replicas?"),
        ("spec.frobnicate", 1, "unknown field under spec"),
    ],
)
def test_the_finding_for_a_misplaced_field_names_the_right_place(path, value, message, hyperpod, read):
    reading = read(hyperpod({path: value}))

    assert reading.document is None
    assert message in wrong(reading)[path]


def test_a_field_of_aws_in_our_own_kind_is_wrong(own, read):
    assert "spec.instanceType" in wrong(read(own({"spec.instanceType": "ml.g5.xlarge"})))


def test_a_required_field_at_a_wrong_place_is_reported_with_that_place(hyperpod, read):
    document = hyperpod(
        {"spec.worker.modelInvocationPort": None, "spec.modelInvocationPort": {"containerPort": 1}}
    )

    message = wrong(read(document))

    assert "it is at spec.modelInvocationPort" in message["spec.worker.modelInvocationPort"]
    assert "belongs under spec.worker" in message["spec.modelInvocationPort"]


def test_the_pasted_sample_has_a_finding_per_line(sample, read):
    reading = read(sample)
    lines = sample.splitlines()
    about = {}
    for each in reading.findings:
        about.setdefault(each.line, []).append(str(each))

    assert reading.document is None
    assert "the text has no indentation" in about[None][0]
    for number, line in enumerate(lines, start=1):
        key = line.removeprefix("- ").split(":")[0]
        if line.startswith("#") or key in ("apiVersion", "kind", "metadata", "spec"):
            assert number not in about
        else:
            assert any("belongs under" in text for text in about[number]), line
        if "${" in line:
            name = line[line.index("${") : line.index("}") + 1]
            assert any(f"the variable {name} is not filled in" in text for text in about[number])
    second = next(n for n, line in enumerate(lines, start=1) if line == "name: http")
    assert any("duplicate of line 4" in text for text in about[second])


def test_the_reindented_and_completed_sample_is_right(sample, fill_in, read):
    reading = read(fill_in(fix_layout(sample).text))

    assert wrong(reading) == {}
    verdict, text = found(reading)["spec.worker.image"]
    assert verdict == "applied"
    assert "vLLM 0.11.1 + LMCache 0.3.9.post2, LMCache inside the engines" in text


def test_variables_in_a_proper_spec_are_wrong_too(sample, read):
    message = wrong(read(fix_layout(sample).text))

    assert message["spec.modelName"] == (
        "the variable ${MODEL_NAME} is not filled in: put the model's name in requests here"
    )
    assert len(message) == sample.count("${")


def test_variables_of_kubernetes_are_none_of_ours(hyperpod, read):
    env = [{"name": "A", "value": "$(NODE_IP)"}]

    assert wrong(read(hyperpod({"spec.worker.environmentVariables": env}))) == {}


def test_a_key_given_twice_is_wrong_with_both_lines(read, hyperpod):
    text = yaml.safe_dump(hyperpod(), sort_keys=False) + "metadata:\n  name: again\n"
    last = len(text.splitlines()) - 1

    assert wrong(read(text))["metadata"].endswith(f"in lines 3 and {last}")


@pytest.mark.parametrize(
    "text", ["", "just words", "- a\n- b\n", "a: 1\n---\nb: 2\n", "a: [1", "a: {b: 1", "\x00"]
)
def test_a_file_that_is_no_spec_has_one_finding(text, read):
    reading = read(text)

    assert reading.document is None
    assert reading.wrong


def test_a_wrong_spec_names_everything_in_one_error(hyperpod, read):
    reading = read(hyperpod({"spec.replicas": "two", "spec.routingStrategy": "x"}))

    with pytest.raises(InvalidConfig) as caught:
        reading.require("spec.yaml")
    assert len(caught.value.problems) == 2
    assert "spec.yaml:" in str(caught.value)


# --- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.replicas", -1),
        ("spec.replicas", "2"),
        ("spec.instanceType", "g5.xlarge"),
        ("spec.worker.modelInvocationPort.containerPort", 70000),
        ("spec.worker.modelInvocationPort.name", "https"),
        ("spec.worker.args", [1]),
        ("spec.worker.environmentVariables", [{"name": "9"}]),
        ("spec.worker.requestLimits", {"maxConcurrentRequests": 0}),
        ("spec.worker.requestLimits", {"overflowStatusCode": 200}),
        ("spec.loadBalancer.healthCheckPath", "ping"),
        ("spec.loadBalancer.routingAlgorithm", "random"),
        ("spec.metrics.metricsScrapeIntervalSeconds", 4),
        ("spec.metrics.modelMetrics.port", 80),
        ("spec.tlsConfig.tlsCertificateOutputS3Uri", "https://x"),
        ("spec.modelSourceConfig.modelSourceType", "gcs"),
        ("spec.intelligentRoutingSpec.routingStrategy", "random"),
        ("spec.kvCacheSpec", {"enableL2Cache": True}),
        ("spec.kvCacheSpec", {"enableL2Cache": True, "l2CacheSpec": {"l2CacheBackend": "tape"}}),
        (
            "spec.kvCacheSpec",
            {
                "enableL2Cache": True,
                "l2CacheSpec": {"l2CacheBackend": "redis", "l2CacheLocalUrl": "http://x"},
            },
        ),
        ("spec.modelSourceConfig", {"modelSourceType": "huggingface"}),
        ("spec.worker.args", ["--port", "9"]),
        ("spec.worker.args", ["--kv-transfer-config={}"]),
        ("spec.autoScalingSpec", {"minReplicaCount": 3, "maxReplicaCount": 2}),
        ("spec.autoScalingSpec", {"minReplicaCount": 0}),
        ("spec.autoScalingSpec", {"prometheusTrigger": {"query": "up"}}),
        ("spec.autoScalingSpec", {"cloudWatchTrigger": {"metricName": "m"}}),
        ("metadata.name", "Not_A_Label"),
        ("kind", "Deployment"),
        ("apiVersion", "inference.sagemaker.aws.amazon.com/v2"),
        ("x-kvroute.lmcache.mode", "magic"),
        ("x-kvroute.l1.sizeGb", 0),
    ],
)
def test_a_value_that_breaks_a_rule_is_wrong_at_its_place(path, value, hyperpod, read):
    reading = read(hyperpod({path: value}))

    assert reading.document is None
    assert any(name.startswith(path) or path.startswith(name) for name in wrong(reading)), wrong(reading)


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (
            "spec.kvCacheSpec",
            {"enableL2Cache": True, "l2CacheSpec": {"l2CacheBackend": "s3"}},
            "x-kvroute.l2.s3",
        ),
        ("spec.modelSourceConfig", {"modelSourceType": "kubernetesVolume"}, "spec.kubernetes.volumes"),
    ],
)
def test_a_choice_can_require_a_field_at_another_place(path, value, place, hyperpod, read):
    assert list(wrong(read(hyperpod({path: value})))) == [place]


def test_instance_type_and_types_together_are_wrong(hyperpod, read):
    document = hyperpod({"spec.instanceType": "ml.a", "spec.instanceTypes": ["ml.b"]})

    assert "spec.instanceTypes" in wrong(read(document))


def test_a_strategy_that_this_gateway_lacks_is_wrong(hyperpod):
    document = hyperpod({"spec.intelligentRoutingSpec": {"enabled": True, "routingStrategy": "kvaware"}})

    reading = read_spec(yaml.safe_dump(document), strategies={"session"})

    assert "no strategy kvaware yet" in wrong(reading)["spec.intelligentRoutingSpec.routingStrategy"]


def test_kvaware_for_chat_is_accepted_and_hyperpods_refusal_noted(hyperpod, read):
    reading = read(
        hyperpod(
            {
                "spec.intelligentRoutingSpec": {"enabled": True, "routingStrategy": "kvaware"},
                "spec.invocationEndpoint": "v1/chat/completions",
            }
        )
    )

    assert reading.document is not None
    assert "HyperPod refuses" in found(reading)["spec.invocationEndpoint"][1]


CLASSIC = {"x-kvroute.lmcache.mode": "classic"}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"spec.kvCacheSpec.enableL2Cache": False}, "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend"),
        (
            {"spec.kvCacheSpec.l2CacheSpec": {"l2CacheBackend": "fs", "l2CacheLocalUrl": "x"}},
            "spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl",
        ),
        ({"spec.kvCacheSpec.cacheConfigFile": "/x"}, "spec.kvCacheSpec.cacheConfigFile"),
        ({"spec.kvCacheSpec.enableL1Cache": False, "x-kvroute.l1.sizeGb": 3.0}, "x-kvroute.l1.sizeGb"),
        ({"x-kvroute.l1.stagingGb": 3.0}, "x-kvroute.l1.stagingGb"),
        ({"spec.kvCacheSpec.enableL2Cache": False, "x-kvroute.l2.sizeGb": 3.0}, "x-kvroute.l2"),
        ({"spec.kvCacheSpec": None, "x-kvroute.lmcache.mode": "mp"}, "x-kvroute.lmcache"),
        (CLASSIC | {"x-kvroute.lmcache.servers": "per-node"}, "x-kvroute.lmcache.servers"),
        (CLASSIC | {"x-kvroute.l2.prefetchPolicy": "default"}, "x-kvroute.l2.prefetchPolicy"),
        (
            {
                "spec.intelligentRoutingSpec.routingStrategy": "roundrobin",
                "x-kvroute.routing.sessionKeys": ["body:user"],
            },
            "x-kvroute.routing.sessionKeys",
        ),
        ({"spec.intelligentRoutingSpec.enabled": False}, "spec.intelligentRoutingSpec.routingStrategy"),
        ({"x-kvroute.engine": "sim", "spec.worker.args": ["-v"]}, "spec.worker.args"),
        ({"x-kvroute.gateway.replicas": 2}, "x-kvroute.gateway.replicas"),
        (
            {"spec.intelligentRoutingSpec.autoScalingSpec.maxReplicaCount": 3},
            "spec.intelligentRoutingSpec.autoScalingSpec.maxReplicaCount",
        ),
        ({"spec.autoScalingSpec.pollingInterval": 3}, "spec.autoScalingSpec.pollingInterval"),
    ],
)
def test_a_field_without_effect_because_of_another_is_noted(changes, path, own, read):
    reading = read(own(changes))

    assert reading.document is not None, wrong(reading)
    assert found(reading)[path][0] == FieldVerdict.NOTED.value


@pytest.mark.parametrize("policy", ["ARC", "noop"])
def test_classic_mode_has_one_eviction_policy(policy, own, read):
    assert "x-kvroute.l1.evictionPolicy" in wrong(
        read(own(CLASSIC | {"x-kvroute.l1.evictionPolicy": policy}))
    )


@pytest.mark.parametrize("mode", ["classic", "mp"])
@pytest.mark.parametrize("model", ["openai/gpt-oss-20b", "a folder", "meta-llama/Llama-3.1-8B"])
def test_the_connector_of_classic_mode_is_noted_for_hybrid_models(mode, model, own, read, tmp_path):
    """production-stack #1062: without vLLM's hybrid KV cache manager up to 10 times the memory."""
    name = model
    if model == "a folder":
        (tmp_path / "config.json").write_text('{"layer_types": ["sliding_attention", "full_attention"]}')
        name = str(tmp_path)

    verdict, text = found(read(own({"x-kvroute.lmcache.mode": mode, "spec.model": name}))).get(
        "spec.kvCacheSpec", ("", "")
    )

    is_noted = "LMCacheConnectorV1" in text
    assert is_noted is (mode == "classic" and "Llama" not in model)
    if is_noted:
        assert verdict == FieldVerdict.NOTED.value


def test_classic_mode_has_no_mooncake(own, read):
    changes = CLASSIC | {"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "mooncake"}

    assert "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend" in wrong(read(own(changes)))


def test_a_metrics_port_other_than_the_workers_is_noted(hyperpod, read):
    assert found(read(hyperpod({"spec.metrics.modelMetrics.port": 9000})))[
        "spec.metrics.modelMetrics.port"
    ] == (
        "noted",
        "has no effect here because vLLM serves metrics on modelInvocationPort.containerPort",
    )


URL = "spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl"
SECRET = {"x-kvroute.l2.passwordSecret": {"name": "redis", "key": "password"}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (CLASSIC | {URL: "redis://cache:1"}, "classic mode accepts a password only in the address"),
        ({}, "the Redis that kvroute starts has no password"),
        ({"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "fs"}, "fs has no password"),
    ],
)
def test_a_password_by_reference_that_nothing_takes_is_noted(changes, why, own, read):
    verdict, message = found(read(own(SECRET | changes)))["x-kvroute.l2.passwordSecret"]

    assert verdict == FieldVerdict.NOTED.value
    assert message.startswith(f"has no effect here because {why}")


@pytest.mark.parametrize("changes", [{}, CLASSIC])
def test_a_password_in_an_address_is_reported_and_never_shown(changes, own, read):
    reading = read(own(changes | {URL: "redis://me:hunter2@cache:1"}))
    verdict, message = found(reading)[URL]

    assert (reading.document is not None, verdict) == (True, FieldVerdict.NOTED.value)
    assert "plain text" in message
    assert "x-kvroute.l2.passwordSecret" in message
    assert not [each for each in reading.findings if "hunter2" in str(each)]


@pytest.mark.parametrize(
    "path",
    [
        "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend",
        "spec.kvCacheSpec.enableL2Cache",
        "spec.intelligentRoutingSpec.routingStrategy",
        "metadata.name",
    ],
)
def test_an_address_at_a_wrong_place_is_reported_without_its_password(path, own, read):
    reading = read(own({path: "redis://me:hunter2@cache:1"}))

    assert path in wrong(reading)
    assert not [each for each in reading.findings if "hunter2" in str(each)]


def test_the_platforms_daemon_is_reported(own, read):
    backend = {"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "TieredStorage"}
    ours, theirs = read(own(backend)), read(own(backend | {"x-kvroute.platform": "hyperpod"}))
    (path,) = backend

    assert found(ours)[path][0] == found(theirs)[path][0] == FieldVerdict.APPLIED.value
    assert "kvroute tierd on each node" in found(ours)[path][1]
    assert "HyperPod's nodes" in found(theirs)[path][1]


@pytest.mark.parametrize(
    ("changes", "is_applied"),
    [
        ({}, True),
        ({URL: "redis://cache:1"}, False),
        ({"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "fs"}, False),
        ({"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage"}, True),
        (
            {
                "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage",
                "x-kvroute.platform": "hyperpod",
            },
            False,
        ),
    ],
)
def test_a_size_is_applied_where_a_store_comes_up(changes, is_applied, own, read):
    verdict, _ = found(read(own({"x-kvroute.l1.sizeGb": 1.0, "x-kvroute.l2.sizeGb": 3.0} | changes)))[
        "x-kvroute.l2.sizeGb"
    ]

    assert (verdict == FieldVerdict.APPLIED.value) == is_applied


def test_the_folder_of_a_file_system_is_named_to_vllm_itself(hyperpod, read):
    source = {"modelSourceType": "fsx", "modelLocation": "a", "fsxStorage": {"fileSystemId": "fs-1"}}
    verdict, message = found(read(hyperpod({"spec.modelSourceConfig": source})))[
        "spec.modelSourceConfig.modelLocation"
    ]

    assert verdict == FieldVerdict.NOTED.value
    assert "--model" in message


# --- adapters behind LMCache ------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--enable-lora"], ["--max-model-len", "8", "--lora-modules=a=/a"]])
def test_adapters_behind_lmcache_are_a_finding(own, read, args):
    place = f"spec.worker.args[{len(args) - 1}]"
    verdict, text = found(read(own({"spec.worker.args": args})))[place]
    assert verdict == "noted"
    assert "its own key space" in text

    settings = {"lmcache": {"isolate_adapters": False}}
    reading = read(own({"spec.worker.args": args, "x-kvroute.gateway.settings": settings}))
    assert "answers become wrong" in found(reading)[place][1]

    no_cache = {"spec.worker.args": args, "spec.kvCacheSpec.enableL1Cache": False}
    no_cache["spec.kvCacheSpec.enableL2Cache"] = False
    assert place not in found(read(own(no_cache)))
