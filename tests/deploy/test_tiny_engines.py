"""`kvroute up -f SPEC --tiny`: any spec as CPU engines with a tiny model, and its caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kvroute.cli import main
from kvroute.deploy.endpoint import EndpointHost, plan_local_endpoint
from kvroute.deploy.plan import local_findings
from kvroute.deploy.prepare import FreePorts
from kvroute.deploy.render.plan import plan_endpoint
from kvroute.deploy.spec.loading import read_spec
from kvroute.deploy.spec.source import dotted
from kvroute.deploy.tiny_engines import TINY_WORKERS, with_tiny_engines

STRATEGIES = frozenset({"roundrobin", "session", "prefixaware", "kvaware"})
ROOT = Path(__file__).parents[2]
SPECS = {
    file.name: file.read_text()
    for file in (
        *sorted((ROOT / "configs").glob("*.yaml")),
        *sorted((ROOT / "tests" / "data" / "hyperpod" / "samples").glob("*.yaml")),
    )
    if "kind:" in file.read_text() or "model_id:" in file.read_text()
}


def document_of(text: str) -> Any:
    return read_spec(text, strategies=STRATEGIES).document


RIGHT = [name for name, text in SPECS.items() if document_of(text) is not None]
HUGE = """
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata: {name: huge}
spec:
  modelName: Llama-3.3-70B-Instruct
  replicas: 7
  modelSourceConfig:
    modelSourceType: s3
    modelLocation: models/llama
    s3Storage: {bucketName: bucket, region: us-west-2}
  kvCacheSpec:
    enableL1Cache: true
    enableL2Cache: true
    l2CacheSpec: {l2CacheBackend: redis, l2CacheLocalUrl: "redis://:hunter2@redis.default.svc:6379"}
  intelligentRoutingSpec: {enabled: true, routingStrategy: kvaware}
  worker:
    image: vllm/vllm-openai:v0.32.0
    command: [python3, -m, vllm.entrypoints.openai.api_server]
    args: [--tensor-parallel-size=8, --quantization, fp8, --max-num-seqs, "16", --max-model-len, "131072"]
    environmentVariables: [{name: NCCL_DEBUG, value: INFO}, {name: PYTHONHASHSEED, value: "7"}]
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: weights}
    resources: {limits: {nvidia.com/gpu: 8}}
    requestLimits: {maxConcurrentRequests: 3}
x-kvroute:
  l1: {sizeGb: 400}
  l2: {passwordSecret: {name: a, key: b}}
  lmcache: {chunkSize: 48}
"""


def tiny(text: str, **options: Any) -> tuple[Any, tuple[str, ...]]:
    document, notes = with_tiny_engines(document_of(text), **options)
    return plan_endpoint(document), notes


def host(folder: Path) -> EndpointHost:
    return EndpointHost({}, {}, (0, 1), (), {}, folder)


@pytest.mark.parametrize("name", RIGHT)
def test_every_spec_can_be_planned_without_gpus_and_without_its_model(name, tmp_path):
    plan, _ = tiny(SPECS[name], folder=tmp_path)
    local = plan_local_endpoint(plan, host(tmp_path), FreePorts().run)
    written = plan_endpoint(document_of(SPECS[name]))

    assert local.plan.tiny_model in ("tiny", "small")
    assert 1 <= len(local.plan.workers) <= TINY_WORKERS
    assert local.plan.model == written.model.served_name
    assert local.config["routing"]["strategy"] == written.strategy
    has_cache = document_of(SPECS[name]).spec.kv_cache_spec is not None and not written.groups
    assert (plan.cache is not None) == has_cache


def test_what_fits_no_cpu_or_no_tiny_model_is_left_out_and_said():
    plan, notes = tiny(HUGE)

    assert plan.args == ("--max-num-seqs", "16")
    assert (plan.command, plan.environment, plan.hash_seed, plan.gpus) == (None, (), "7", 0)
    assert notes == (
        "4 of 7 workers run; --workers sets another number",
        "worker.args without --tensor-parallel-size, --quantization, --max-model-len",
        "`vllm serve` runs instead of worker.command",
        "worker.environmentVariables without NCCL_DEBUG",
        "the second tier is redis on this machine instead of the one in l2CacheLocalUrl",
        "the first tier has 0.5 GB instead of 400",
    )


def test_what_the_users_see_of_the_endpoint_stays():
    plan, _ = tiny(HUGE, most_workers=2)

    assert plan.replicas == 2
    assert (plan.name, plan.model.served_name, plan.strategy) == ("huge", "Llama-3.3-70B-Instruct", "kvaware")
    assert plan.limits is not None
    assert plan.limits.max_concurrent_requests == 3
    assert plan.token_bytes is not None
    assert plan.extension.gateway.settings == {
        "fleet": {"aliases": {"/opt/ml/model": "Llama-3.3-70B-Instruct"}}
    }


def test_caches_are_small_local_and_without_the_password():
    plan, _ = tiny(HUGE)

    assert plan.cache is not None
    assert plan.cache.l2 is not None
    assert (plan.cache.l2.name, plan.cache.l2_url, plan.l2_password) == ("redis", None, None)
    assert (plan.extension.l1.size_gb, plan.extension.l2.size_gb) == (0.5, 1.0)
    # The engine has blocks of 32 tokens.
    assert plan.extension.lmcache.chunk_size == 64


@pytest.mark.parametrize(
    ("backend", "more"),
    [
        ("s3", {"s3": {"endpoint": "s3://b", "region": "r"}}),
        ("mooncake", {}),
        ("fs", {"fs": {"path": "/data"}}),
    ],
)
def test_a_second_tier_that_is_not_on_this_machine_becomes_a_folder(backend, more, tmp_path):
    data = yaml.safe_load(HUGE)
    data["spec"]["kvCacheSpec"]["l2CacheSpec"] = {"l2CacheBackend": backend}
    data["x-kvroute"]["l2"] = more
    plan, notes = tiny(yaml.safe_dump(data), folder=tmp_path)
    local = plan_local_endpoint(plan, host(tmp_path), FreePorts().run)

    assert local.folders == (tmp_path / "l2",)
    assert (f"the second tier is a folder instead of {backend}" in notes) == (backend != "fs")


def test_lmcache_inside_the_engines_runs_as_a_server():
    plan, notes = tiny(SPECS["classic.yaml"])

    assert plan.cache is not None
    assert plan.cache.has_servers
    assert "LMCache runs as a server: inside the engines it needs GPUs" in notes


@pytest.mark.parametrize("name", ["hyperpod.yaml", "tiered-storage.yaml"])
def test_command_lines_are_those_of_the_engine_on_this_machine(name):
    plan, _ = tiny(SPECS[name])

    assert plan_endpoint(document_of(SPECS[name])).versions.pair.vllm.name == "0.19.1"
    assert (plan.versions.pair.vllm.name, plan.versions.pair.lmcache.name) == ("0.32.0", "0.5.6")
    assert plan.versions.note == ""


def test_simulated_workers_become_engines():
    plan, _ = tiny(SPECS["session.yaml"])

    assert not plan.is_simulated
    assert plan.model.tiny == "tiny"


def test_a_field_whose_text_differs_in_up_still_has_an_effect():
    reading = read_spec(SPECS["tiered-storage.yaml"], strategies=STRATEGIES)
    assert reading.document is not None
    texts = {dotted(each.path): each.text for each in local_findings(reading.document, reading.findings)}

    assert texts["spec.kvCacheSpec.l2CacheSpec.l2CacheBackend"].startswith("`kvroute tierd`")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tiny"], "--tiny needs -f SPEC"),
        (["-f", "SPEC", "--tiny", "--engine", "sim"], "--engine cannot be used with --tiny"),
        (["-f", "SPEC", "--tiny", "--model", "small"], "--model cannot be used with -f"),
        (["-f", "SPEC", "--workers", "2"], "--workers cannot be used with -f"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments, text, tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(HUGE)
    result = CliRunner().invoke(main, ["up", *[str(file) if each == "SPEC" else each for each in arguments]])

    assert result.exit_code == 2
    assert text in result.output
