"""HyperPod documents as AWS publishes them are explained and rendered.

The samples in tests/data/hyperpod/samples are written after AWS's documentation and its operator's samples.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvroute.deploy.render.kubernetes import kubernetes_objects
from kvroute.deploy.render.plan import plan_endpoint
from kvroute.deploy.render.registry import TARGETS
from kvroute.deploy.spec.endpoint import JUMPSTART_MODELS, gpus_of_instance
from kvroute.deploy.spec.source import dotted
from kvroute.deploy.tiny_engines import with_tiny_engines

SAMPLES = {
    file.stem: file.read_text()
    for file in sorted((Path(__file__).parents[2] / "data" / "hyperpod" / "samples").glob("*.yaml"))
}
# The fields that a reader must change, with words of the advice.
WRONG: dict[str, dict[str, str]] = {
    "fsx-djl-placeholders": {
        "metadata.name": "$SAGEMAKER_ENDPOINT_NAME is not filled in: put a name of lower-case letters",
        "metadata.namespace": "<YOUR_NAMESPACE> is not filled in: put the namespace's name here",
        "spec.endpointName": "remove the field, which has no effect here",
        "spec.instanceType": "$INSTANCE_TYPE is not filled in: put an instance type such as ml.g5.24xlarge",
        "spec.modelSourceConfig.fsxStorage.fileSystemId": "put the file system's ID (fs-0123456789abcdef0)",
        "spec.tlsConfig.tlsCertificateOutputS3Uri": "the placeholder <PLACEHOLDER_TLS_CERT_S3_URI>",
        "spec.worker.image": "djl-inference:0.32.0-lmi14.0.0-cu124 runs DJL Serving (LMI)",
        "spec.worker.environmentVariables[1].value": "<YOUR_ACCESS_KEY_ID> is not filled in",
    },
    "huggingface-tgi": {
        "spec.worker.image": "huggingface/text-generation-inference:2.4.1 runs Text Generation Inference"
    },
    "jumpstart-old-names": {"kind": "write JumpStartModel"},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_each_problem_is_one_line_that_says_what_to_do(name, read):
    wrong = [(dotted(each.path), each.text) for each in read(SAMPLES[name]).wrong]
    advice = WRONG.get(name, {})

    assert {path for path, _ in wrong} == set(advice)
    for path, words in advice.items():
        assert any(words in text for field, text in wrong if field == path), wrong
    # The image is the one field with two problems: it is not filled in, and it is not vLLM's.
    assert len(wrong) == len(advice) + (name == "fsx-djl-placeholders")
    assert not [text for _, text in wrong if "\n" in text]


def test_the_image_of_another_server_has_one_line(read):
    """No line says with which versions of vLLM it is planned."""
    findings = read(SAMPLES["huggingface-tgi"]).findings

    (image,) = [each for each in findings if dotted(each.path) == "spec.worker.image"]
    assert image.verdict.value == "wrong"


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - WRONG.keys()))
def test_what_is_right_is_rendered_for_every_target(name, plan):
    made = plan(SAMPLES[name])

    for target in TARGETS.values():
        assert all(target.render(made).values())


def test_the_samples_of_both_kinds_include_both_versions():
    kinds = {
        (data["kind"], data["apiVersion"].rpartition("/")[2])
        for data in map(yaml.safe_load, SAMPLES.values())
        if "kind" in data
    }

    assert {
        (kind, v) for kind in ("InferenceEndpointConfig", "JumpStartModel") for v in ("v1", "v1alpha1")
    } <= kinds


def test_prefill_and_decode_become_two_groups_of_workers(plan):
    made = plan(SAMPLES["prefill-decode"])
    objects = [each for objects in kubernetes_objects(made).values() for each in objects]
    sets = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "StatefulSet"}

    assert set(sets) == {"apart-prefill", "apart-decode"}
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        spec = sets[f"apart-{role}"]
        labels = spec["template"]["metadata"]["labels"]
        assert labels["kvroute.dev/role"] == role
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert "replicas" not in spec  # its autoscaler decides
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert f'"kv_role":"{kv_role}"' in str(container["args"])
        assert '"kv_load_failure_policy":"recompute"' in str(container["args"])
        assert ("--max-num-seqs" in container["args"]) is (role == "decode")
        assert {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "$(POD_IP)"} in container["env"]
        zone = {"topology.kubernetes.io/zone": "us-east-2a"}
        assert pod["nodeSelector"] == (zone | ({"pool": "decode"} if role == "decode" else {}))
        assert "podAffinity" in pod["affinity"]
    scaled = {each["metadata"]["name"] for each in objects if each["kind"] == "HorizontalPodAutoscaler"}
    assert scaled == {"apart-prefill", "apart-decode"}
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    assert any(set(rule) == {"from"} for policy in policies for rule in policy["ingress"])


def test_on_one_host_the_two_groups_have_their_own_gpus_and_roles(plan):
    made = plan(SAMPLES["prefill-decode"])
    config = yaml.safe_load(TARGETS["config"].render(made)["kvroute.yaml"])
    compose = yaml.safe_load(TARGETS["compose"].render(made)["docker-compose.yml"])["services"]

    assert [(each["id"], each["role"]) for each in config["fleet"]["workers"]] == [
        ("apart-prefill-a", "prefill"),
        ("apart-decode-a", "decode"),
    ]
    assert config["routing"]["prefill_decode"] == {"threshold_tokens": 4096}
    assert {"vllm-prefill-a", "vllm-decode-a", "sim-prefill-a", "sim-decode-a"} <= set(compose)
    devices = [
        compose[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in ("vllm-prefill-a", "vllm-decode-a")
    ]
    assert devices == [[str(gpu) for gpu in range(8)], [str(gpu) for gpu in range(8, 16)]]
    assert any("--prefill=vllm-prefill-a=http://" in word for word in compose["kvroute-gpu"]["command"])
    assert compose["vllm-decode-a"]["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "vllm-decode-a"
    assert "--nixl" in compose["sim-decode-a"]["command"]


def test_with_a_tiny_model_both_groups_run_on_one_machine(read):
    small, _ = with_tiny_engines(read(SAMPLES["prefill-decode"]).document)
    made = plan_endpoint(small)

    assert [(group.role, group.replicas) for group in made.groups] == [("prefill", 1), ("decode", 1)]
    assert made.threshold_tokens == 4096
    assert made.gpus == 0
    assert "kv_buffer_device" in TARGETS["worker-args"].render(made)["worker-args.sh"]


def objects_of(plan):
    return [each for objects in kubernetes_objects(plan).values() for each in objects]


def worker_of(plan):
    (found,) = [
        each
        for each in objects_of(plan)
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] == f"{plan.name}-worker"
    ]
    return found["spec"]["template"]["spec"]


def test_a_jumpstart_model_becomes_workers_with_the_model_and_all_gpus(plan):
    made = plan(SAMPLES["jumpstart"])
    container = worker_of(made)["containers"][0]

    assert container["command"] == ["vllm", "serve"]
    assert container["args"][0] == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    assert made.model.served_name == "deepseek-llm-r1-distill-qwen-1-5b"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert {"name": "VLLM_LOGGING_LEVEL", "value": "INFO"} in container["env"]
    assert (made.replicas, made.is_hyperpod_document) == (2, True)
    scaled = [each for each in objects_of(made) if each["kind"] == "ScaledObject"]
    assert [each["spec"]["maxReplicaCount"] for each in scaled] == [4]


@pytest.mark.parametrize("name", ["jumpstart-mig-kv-cache", "mig-partition"])
def test_a_worker_with_a_gpu_partition_reserves_no_whole_gpu(name, plan):
    limits = worker_of(plan(SAMPLES[name]))["containers"][0]["resources"]["limits"]

    assert {key: str(value) for key, value in limits.items()} == {"nvidia.com/mig-3g.20gb": "1"}


def test_a_jumpstart_model_on_hyperpod_runs_on_its_instance_type(plan):
    made = plan(SAMPLES["jumpstart-mig-kv-cache"])
    wanted = {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["ml.p4d.24xlarge"]}
    pods = [worker_of(made)] + [
        each["spec"]["template"]["spec"] for each in objects_of(made) if each["kind"] == "DaemonSet"
    ]

    # The cache servers run on the same nodes, and no other label is asked for.
    assert len(pods) == 2
    for pod in pods:
        rules = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rules == {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}


def test_an_unknown_model_id_is_one_note_that_names_the_field(read):
    reading = read(SAMPLES["jumpstart-v1alpha1-unknown-model"])
    notes = [each.text for each in reading.findings if dotted(each.path) == "spec.model.modelId"]

    assert reading.document is not None
    assert len(notes) == 1
    assert "acme-textgeneration-secret-3b: set x-kvroute.model" in notes[0]


def test_x_kvroute_model_names_the_model_of_an_unknown_id(plan, read):
    text = (
        SAMPLES["jumpstart-v1alpha1-unknown-model"] + "x-kvroute: {model: acme/secret-3b, gpusPerWorker: 2}\n"
    )
    made = plan(text)
    notes = [each for each in read(text).findings if each.verdict.value == "noted"]

    assert (made.model.source, made.model.served_name) == ("acme/secret-3b", "acme-textgeneration-secret-3b")
    assert made.gpus == 2
    assert {dotted(each.path) for each in notes} == {"spec.sageMakerEndpoint.name"}


def test_x_kvroute_model_is_noted_in_other_documents(read, own):
    findings = read(own({"x-kvroute.model": "a/b"})).findings
    (note,) = [each for each in findings if each.path == ("x-kvroute", "model")]

    assert note.text == "has no effect here because the document is not a JumpStartModel"


def test_the_flat_file_of_the_command_line_is_a_jumpstart_model(plan):
    made = plan(SAMPLES["jumpstart-command-line"])

    assert (made.name, made.model.source, made.gpus) == ("flat", "mistralai/Mistral-7B-Instruct-v0.3", 4)


def test_earlier_names_of_fields_are_reported_with_the_new_ones(read):
    text = SAMPLES["jumpstart-old-names"].replace("ModelDeployment", "JumpStartModel")
    message = {dotted(each.path): each.text for each in read(text).wrong}

    assert message == {
        f"spec.server.{name}AutoScaleReplicas": "is an unknown field: "
        f"spec.autoScalingSpec.{name}ReplicaCount replaces it"
        for name in ("max", "min")
    }


@pytest.mark.parametrize(
    ("instance_type", "gpus"),
    [
        ("ml.g5.xlarge", 1),
        ("ml.g5.24xlarge", 4),
        ("ml.g6e.48xlarge", 8),
        ("ml.p4d.24xlarge", 8),
        ("ml.p5.4xlarge", 1),
        ("ml.p5en.48xlarge", 8),
        ("ml.trn1.32xlarge", None),
        ("ml.c5.large", None),
    ],
)
def test_the_gpus_of_an_instance_type(instance_type, gpus):
    assert gpus_of_instance(instance_type) == gpus


def test_the_models_of_jumpstart_are_names_on_hugging_face():
    assert all(name.count("/") == 1 and " " not in name for name in JUMPSTART_MODELS.values())


# --- HyperPod's image and its storage daemon --------------------------------------------------------------


def variables_of(plan):
    return {each["name"]: each.get("value") for each in worker_of(plan)["containers"][0]["env"]}


@pytest.mark.parametrize("platform", ["hyperpod", None])
def test_hyperpods_image_reaches_the_nodes_storage_daemon_inside_the_engine(platform, plan):
    data = yaml.safe_load(SAMPLES["tiered-storage"])
    data["x-kvroute"]["platform"] = platform
    made = plan(data)
    pod, variables = worker_of(made), variables_of(made)
    args = pod["containers"][0]["args"]

    assert json.loads(args[args.index("--kv-transfer-config") + 1]) == {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
    }
    assert variables["LMCACHE_REMOTE_URL"] == "sagemaker-hyperpod://$(NODE_IP):9200"
    assert variables["LMCACHE_SAVE_UNFULL_CHUNK"] == "True"
    assert variables["LMCACHE_REMOTE_SERDE"] == "naive"
    assert json.loads(variables["LMCACHE_EXTRA_CONFIG"]) == {
        "sagemaker_hyperpod_bucket": "lmcache",
        "sagemaker_hyperpod_shared_memory_name": "ai_toolkit_cache",
    }
    assert variables["PYTHONHASHSEED"] == "0"
    names = [each["name"] for each in pod["containers"][0]["env"]]
    # Kubernetes replaces $(NODE_IP) only by a variable that comes before.
    assert names.index("NODE_IP") < names.index("LMCACHE_REMOTE_URL")
    paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    assert paths == ["/dev/shm/ai_toolkit_cache"]
    assert not [each for each in objects_of(made) if each["kind"] == "DaemonSet"]
    assert made.instance_types == ("ml.g5.8xlarge",)


def test_with_other_nodes_hyperpods_image_uses_tierd(plan):
    data = yaml.safe_load(SAMPLES["tiered-storage"])
    data["x-kvroute"]["platform"] = "any"
    made = plan(data)

    daemons = [each["metadata"]["name"] for each in objects_of(made) if each["kind"] == "DaemonSet"]

    assert variables_of(made)["LMCACHE_REMOTE_URL"] == "sagemaker-hyperpod://tiered-tierd:9200"
    assert daemons == ["tiered-tierd"]


def test_the_platform_of_other_images_is_not_hyperpods(hyperpod, plan):
    assert plan(hyperpod()).extension.platform == "any"


# --- arguments that AWS's samples have --------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["/opt/ml/model", "--host", "0.0.0.0", "--port", "8000", "--max-model-len", "9"],
        ["--model=/opt/ml/model", "--host=0.0.0.0", "--port=8000", "--max-model-len", "9"],
        ["vllm", "serve", "/opt/ml/model", "--max-model-len", "9"],
    ],
)
def test_model_host_and_port_in_the_arguments_are_not_given_twice(arguments, hyperpod, plan):
    container = worker_of(plan(hyperpod({"spec.worker.args": arguments})))["containers"][0]
    args = container["args"]

    assert container["command"] == ["vllm", "serve"]
    assert args[0] == "/opt/ml/model"
    assert args.count("/opt/ml/model") == 1
    assert [args[args.index(name) + 1] for name in ("--host", "--port")] == ["0.0.0.0", "8000"]
    assert len([each for each in args if each.startswith(("--host", "--port", "--model"))]) == 2
    assert args[-2:] == ["--max-model-len", "9"]


def test_vllm_serve_as_the_command_is_the_rendered_command(plan):
    args = worker_of(plan(SAMPLES["kubernetes-volume"]))["containers"][0]["args"]

    assert args[:3] == ["/opt/ml/model", "--served-model-name", "Qwen2.5-VL-7B-Instruct"]
    assert args.count("/opt/ml/model") == 1


def test_a_port_other_than_the_workers_is_wrong(hyperpod, read):
    (wrong,) = read(hyperpod({"spec.worker.args": ["--port", "9000"]})).wrong

    assert dotted(wrong.path) == "spec.worker.args[0]"
    assert wrong.text == (
        "--port 9000 is not worker.modelInvocationPort.containerPort, which is 8000: omit --port"
    )


def test_arguments_in_the_command_follow_the_rules_of_arguments(hyperpod, read):
    command = ["vllm", "serve", "M", "--port", "9000", "--kv-transfer-config={}"]

    wrong = read(hyperpod({"spec.worker.command": command})).wrong

    assert [dotted(each.path) for each in wrong] == ["spec.worker.command[3]", "spec.worker.command[5]"]


def test_a_misplaced_field_of_a_jumpstart_model_is_not_sent_to_another_kinds_place(read):
    document = yaml.safe_load(SAMPLES["jumpstart"])
    document["spec"]["server"]["instance_type"] = "ml.g5.xlarge"

    texts = [each.text for each in read(document).wrong]

    assert not any("spec.instanceType" in each for each in texts)
    assert texts


@pytest.mark.parametrize(
    "image",
    [
        "763104351884.dkr.ecr.us-east-2.amazonaws.com/huggingface-pytorch-tgi-inference:2.4.0-tgi2.3.1-gpu",
        "deepjavalibrary/djl-serving:0.30.0-lmi",
        "lmsysorg/sglang:latest",
    ],
)
def test_an_image_without_vllm_is_wrong_and_named(image, hyperpod, read):
    (wrong,) = read(hyperpod({"spec.worker.image": image})).wrong

    assert dotted(wrong.path) == "spec.worker.image"
    assert wrong.text.startswith(f"{image} runs ")


@pytest.mark.parametrize(
    ("path", "value", "is_placeholder"),
    [
        ("spec.modelSourceConfig.s3Storage.bucketName", "<bucket>", True),
        ("spec.modelSourceConfig.s3Storage.bucketName", "<your-bucket>", True),
        ("spec.modelSourceConfig.modelLocation", "models/{MODEL_NAME}", True),
        ("spec.modelSourceConfig.modelLocation", "models/$MODEL_NAME/v1", True),
        ("spec.modelSourceConfig.modelLocation", "models/US$HOP", False),
        ("spec.worker.command", ["sh", "-c", "exec serve $MODEL_NAME"], False),
        ("spec.worker.args", ["--stop", "<start_of_turn>"], False),
        ("spec.worker.args", ["--served", "<YOUR_MODEL>"], True),
        ("spec.worker.environmentVariables", [{"name": "A", "value": "$HOME/$(NODE_IP)"}], False),
    ],
)
def test_placeholders_are_recognised_where_they_can_be_nothing_else(
    path, value, is_placeholder, hyperpod, read
):
    wrong = [each.text for each in read(hyperpod({path: value})).wrong]

    assert bool(wrong) is is_placeholder
    assert all("is not filled in: put" in text for text in wrong)


def test_both_versions_of_a_document_have_the_same_plan(hyperpod, read):
    changed = hyperpod({"apiVersion": "inference.sagemaker.aws.amazon.com/v1alpha1"})

    assert plan_endpoint(read(changed).document) == plan_endpoint(read(hyperpod()).document)
