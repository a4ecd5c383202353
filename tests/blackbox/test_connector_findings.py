"""What check, render and doctor say of a connector that turns vLLM's hybrid KV cache manager off."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.blackbox.conftest import command, spawn
from tests.support.sockets import tcp_server


def model_in(folder: Path, layers: str) -> str:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"layer_types": [layers, "full_attention"]}))
    return str(folder / "model")


@pytest.mark.parametrize(("layers", "is_noted"), [("sliding_attention", True), ("full_attention", False)])
@pytest.mark.parametrize("subcommand", ["check", "render"])
def test_a_connector_that_makes_a_hybrid_models_cache_larger_is_named(tmp_path, subcommand, layers, is_noted):
    file = tmp_path / "endpoint.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kvroute.dev/v1",
                "kind": "Endpoint",
                "metadata": {"name": "demo"},
                "spec": {
                    "model": model_in(tmp_path, layers),
                    "replicas": 2,
                    "kvCacheSpec": {"enableL1Cache": True},
                    "intelligentRoutingSpec": {"enabled": True, "routingStrategy": "prefixaware"},
                },
                "x-kvroute": {"lmcache": {"mode": "classic"}},
            }
        )
    )
    arguments = {"check": ["check", "--file"], "render": ["render", "--to", "compose", "-f"]}[subcommand]

    done = subprocess.run(
        [*command(), *arguments, str(file)], capture_output=True, text=True, check=False, timeout=60
    )

    findings = {"check": done.stdout, "render": done.stderr}[subcommand]
    assert done.returncode == 0, done
    assert str(file) in findings, done
    assert ("spec.kvCacheSpec" in findings and "hybrid KV cache manager" in findings) is is_noted, done


@pytest.fixture
async def worker(processes):
    """`await worker(ROOT, inside)` serves a model, with the metrics of a connector in the engine or not."""

    async def start(root: str, *, inside: bool) -> str:
        label = 'block_size="16",num_gpu_blocks="1000",enable_prefix_caching="True"'
        pages = {
            "/health": "",
            "/version": '{"version": "0.32.0"}',
            "/v1/models": json.dumps(
                {"object": "list", "data": [{"id": "m", "object": "model", "root": root}]}
            ),
            "/metrics": f"vllm:cache_config_info{{{label}}} 1.0\n"
            + "lmcache:num_hit_tokens_total 0.0\n" * inside,
        }

        async def answer(reader, writer) -> None:
            while head := await reader.readuntil(b"\r\n\r\n"):
                text = pages.get(head.split(b" ", 2)[1].decode())
                data = (text or "").encode()
                status = b"404 Not Found" if text is None else b"200 OK"
                writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data))
                await writer.drain()

        return f"http://127.0.0.1:{await processes.enter_async_context(tcp_server(answer))}"

    return start


@pytest.mark.parametrize(
    ("layers", "inside", "is_named"),
    [("sliding_attention", True, True), ("sliding_attention", False, False), ("full_attention", True, False)],
)
async def test_the_doctor_warns_of_a_connector_in_a_hybrid_models_engine(
    processes, worker, tmp_path, layers, inside, is_named
):
    url = await worker(model_in(tmp_path, layers), inside=inside)
    doctor = await spawn(
        processes,
        *("doctor", "--worker", url, "--strategy", "prefixaware", "--no-probe", "--json"),
        stdout=True,
    )
    assert doctor.process.stdout is not None
    printed = await doctor.process.stdout.read()
    await doctor.ended()
    findings = json.loads(printed)["findings"]
    named = [each for each in findings if "LMCacheConnectorV1" in each["what"]]
    assert all(url in each["subject"] and each["severity"] == "warning" for each in named), named
    assert ["LMCacheMPConnector" in each["fix"] for each in named] == [True] * is_named
