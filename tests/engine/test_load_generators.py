"""The engines' own load generators run through the gateway without an error."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import separate_environment
from kvroute.deploy.processes import ChildProcess, ChildSpec

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

MODEL = "tiny"
DEADLINE_S = 240.0


@pytest.fixture
def run(forged_venv, tmp_path: Path):
    """`(script, *argv)` -> run a console script of the engine's environment to its end."""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OPENAI_API_KEY": "unused",
    }

    async def run_to_end(script: str, *argv: str) -> None:
        command = (str(forged_venv.script(script)), *argv)
        env = separate_environment(os.environ) | offline
        spec = ChildSpec(script, command, env, tmp_path / f"{script}.log", cwd=tmp_path)
        async with ChildProcess(spec, SystemClock()) as process, asyncio.timeout(DEADLINE_S):
            code = await process.wait()
        assert code == 0, process.last_log_lines(40)

    return run_to_end


@pytest.mark.full
async def test_lmcache_bench_engine(run, gateway, tmp_path: Path, capsys) -> None:
    """Chats of several rounds over one shared system prompt, at 4 requests a second."""
    await run(
        "lmcache",
        *("bench", "engine", "--engine-url", gateway.url, "--model", MODEL),
        *("--workload", "multi-round-chat", "--kv-cache-volume", "0.02", "--tokens-per-gb-kvcache", "524288"),
        *("--mrc-shared-prompt-length", "200", "--mrc-chat-history-length", "400"),
        *("--mrc-user-input-length", "30", "--mrc-output-length", "16", "--mrc-qps", "4"),
        *("--mrc-duration", "15", "--ignore-eos", "--no-interactive", "--json"),
        *("--output-dir", str(tmp_path / "bench"), "-q"),
    )

    figures = json.loads((tmp_path / "bench" / "bench_summary.json").read_text())["results"]
    with capsys.disabled():
        print(
            f"\nlmcache bench engine: {figures['successful_requests']} of {figures['total_requests']} "
            f"answered, TTFT median {figures['p50_ttft_ms']:.0f} ms, p99 {figures['p99_ttft_ms']:.0f} ms"
        )
    assert figures["successful_requests"] == figures["total_requests"] > 0
    assert figures["failed_requests"] == 0


async def test_vllm_bench_serve(run, gateway, model_folder: Path, tmp_path: Path, capsys) -> None:
    """Completions that share five long prefixes, at 8 requests a second."""
    await run(
        "vllm",
        *("bench", "serve", "--base-url", gateway.url, "--model", MODEL, "--tokenizer", str(model_folder)),
        *("--endpoint", "/v1/completions", "--dataset-name", "prefix_repetition", "--num-prompts", "40"),
        *("--prefix-repetition-prefix-len", "512", "--prefix-repetition-suffix-len", "64"),
        *("--prefix-repetition-num-prefixes", "5", "--prefix-repetition-output-len", "8"),
        *("--request-rate", "8", "--seed", "1", "--ignore-eos"),
        *("--save-result", "--result-dir", str(tmp_path / "bench")),
    )

    (result,) = (tmp_path / "bench").glob("*.json")
    figures = json.loads(result.read_text())
    with capsys.disabled():
        print(
            f"\nvllm bench serve: {figures['completed']} of {figures['num_prompts']} answered, "
            f"TTFT median {figures['median_ttft_ms']:.0f} ms, p99 {figures['p99_ttft_ms']:.0f} ms"
        )
    assert figures["completed"] == figures["num_prompts"] == 40
    assert figures["failed"] == 0
