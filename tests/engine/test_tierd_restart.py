"""A daemon that restarts under a running engine: the answers stay those of a cold prompt.

LMCache's in-process connector maps the shared memory once, so the engine has a mapping that is older than the
daemon. The executable under test is that of the environment variable KVROUTE_EXECUTABLE, where it is set.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from tests.engine.weights import write_weights

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import EngineVenv, separate_environment
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.deploy.tiny_model import write_tiny_model
from kvroute.deploy.vllm_command import CpuPlacement, VllmSpec, vllm_argv, vllm_environment

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

MODEL = "tiny"
BLOCK, CHUNK = 32, 64
PROMPT_TOKENS = 600
CACHED = PROMPT_TOKENS // CHUNK * CHUNK
PROMPTS = 5
READY_S, ANSWER_S = 300.0, 60.0
SHIM = Path(__file__).with_name("classic_shim")


@dataclass
class Restartable:
    """A `kvroute tierd` that keeps its port and shared memory over restarts."""

    port: int
    memory: str
    folder: Path
    process: ChildProcess | None = None

    async def start(self, size_gb: float) -> None:
        executable = os.environ.get("KVROUTE_EXECUTABLE")
        argv = [executable] if executable else [sys.executable, "-m", "kvroute"]
        argv += ["tierd", "--port", str(self.port), "--shared-memory-name", self.memory]
        argv += ["--size-gb", str(size_gb)]
        spec = ChildSpec("tierd", tuple(argv), dict(os.environ), self.folder / "tierd.log")
        self.process = ChildProcess(spec, SystemClock())
        await self.process.start()
        await self.process.wait_ready(f"http://127.0.0.1:{self.port}/health", timeout_s=READY_S)

    async def end(self, number: signal.Signals) -> None:
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        await self.process.wait()


@dataclass
class Answer:
    text: str
    cached_tokens: int


@dataclass
class Served:
    """An engine whose KV goes through the in-process connector to `daemon`."""

    url: str
    daemon: Restartable
    http: httpx.AsyncClient

    async def ask(self, prompt: list[int]) -> Answer:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = await self.http.post(f"{self.url}/v1/completions", json=body)
        answer.raise_for_status()
        found = answer.json()
        cached = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return Answer(found["choices"][0]["text"], cached)

    async def forget(self) -> None:
        """Empty the engine's own cache."""
        answer = await self.http.post(f"{self.url}/reset_prefix_cache")
        assert answer.json() == {"success": True}

    async def stored(self, entries: int) -> None:
        """Wait until the daemon has that many entries."""
        seen = -1
        try:
            async with asyncio.timeout(ANSWER_S):
                while seen < entries:
                    page = (await self.http.get(f"http://127.0.0.1:{self.daemon.port}/metrics")).text
                    found = re.search(r"^kvroute_tierd_objects (\S+)$", page, re.MULTILINE)
                    seen = int(float(found[1])) if found else 0
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"the daemon has {seen} entries, not {entries}")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(
    forged_venv: EngineVenv, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    model_folder = write_tiny_model(MODEL, tmp_path_factory.mktemp("weights") / MODEL)
    write_weights(model_folder)
    engine_port, daemon_port = free_ports(2)
    memory = f"kvroute_restart_{os.getpid()}"
    daemon = Restartable(daemon_port, memory, tmp_path_factory.mktemp("tierd"))
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    spec = VllmSpec(
        model=str(model_folder),
        served_name=MODEL,
        host="127.0.0.1",
        port=engine_port,
        placement=CpuPlacement((sorted(os.sched_getaffinity(0))[0],), kv_cache_gib=1),
        block_size=BLOCK,
        num_gpu_blocks=33,
        max_model_len=1024,
        offline=True,
        eager=True,
        development_mode=True,
        extra_args=("--kv-transfer-config", json.dumps(transfer)),
    )
    lmcache = {
        "PYTHONPATH": str(SHIM),
        "PYTHONHASHSEED": "0",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_CHUNK_SIZE": str(CHUNK),
        "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.2",
        "LMCACHE_REMOTE_URL": f"sagemaker-hyperpod://127.0.0.1:{daemon_port}",
        "LMCACHE_REMOTE_SERDE": "naive",
        "LMCACHE_EXTRA_CONFIG": json.dumps({"sagemaker_hyperpod_shared_memory_name": memory}),
    }
    env = vllm_environment(spec, separate_environment(os.environ)) | lmcache
    argv = vllm_argv(spec, (str(forged_venv.script("vllm")),))
    async with AsyncExitStack() as stack:
        for name in (memory, f".{memory}.kept", f".{memory}.guard"):
            stack.callback((Path("/dev/shm") / name).unlink, missing_ok=True)

        async def end_daemon() -> None:
            if daemon.process is not None:
                await daemon.process.stop()

        stack.push_async_callback(end_daemon)
        await daemon.start(0.05)
        engine = ChildProcess(ChildSpec("classic", argv, env, logs / "classic.log"), SystemClock())
        await stack.enter_async_context(engine)
        await engine.wait_ready(f"{spec.url}/health", timeout_s=READY_S)
        limits = httpx.Limits(max_keepalive_connections=0)
        http = httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, limits=limits)
        yield Served(spec.url, daemon, await stack.enter_async_context(http))


def prompts(seed: str) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(1000, 7000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


async def wrong_answers(served: Served, seed: str) -> tuple[int, int]:
    """Ask new prompts, then again through LMCache alone: wrong answers, and cached tokens in all.

    Compared with answers from the engine's own cache, which has just as many tokens: so the engine computes
    the same numbers in the same order, and right answers are equal to the last bit.
    """
    asked = prompts(seed)
    before = await entries(served)
    right = []
    for prompt in asked:
        assert (await served.ask(prompt)).cached_tokens == 0
        right.append(await served.ask(prompt))
        assert right[-1].cached_tokens == CACHED
    await served.stored(before + PROMPTS * CACHED // CHUNK)
    await served.forget()
    again = [await served.ask(prompt) for prompt in asked]
    await served.forget()
    wrong = sum(new.text != old.text for new, old in zip(again, right, strict=True))
    return wrong, sum(answer.cached_tokens for answer in again)


async def entries(served: Served) -> int:
    return int((await served.http.get(f"http://127.0.0.1:{served.daemon.port}/health")).json()["objects"])


async def test_answers_stay_right_over_restarts_of_the_daemon(served: Served) -> None:
    """Four restarts: killed and ended, larger and smaller. New prompts after each, so that what an old
    mapping holds at their offsets would be another prompt's."""
    assert await wrong_answers(served, "before") == (0, PROMPTS * CACHED)
    wrong, cached = 0, 0
    for number, size_gb in (
        (signal.SIGKILL, 0.08),
        (signal.SIGKILL, 0.02),
        (signal.SIGTERM, 0.03),
        (signal.SIGTERM, 0.02),
    ):
        await served.daemon.end(number)
        await served.daemon.start(size_gb)
        of_these, found = await wrong_answers(served, f"{number} {size_gb}")
        wrong, cached = wrong + of_these, cached + found

    assert (wrong, cached) == (0, 4 * PROMPTS * CACHED)
