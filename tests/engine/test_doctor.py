"""The doctor and real engines: events that are off, and LMCache inside the engine with a wrong hash seed.

The healthy stack, two engines with LMCache servers and Redis, is examined in test_kvaware_tiers.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.endpoints import ADMIN_KEY

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import EngineVenv, separate_environment
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.deploy.vllm_command import CpuPlacement, VllmSpec, vllm_argv, vllm_environment

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

MODEL = "tiny"
BLOCK, CHUNK = 32, 64
READY_S = 300.0
KVROUTE = (sys.executable, "-m", "kvroute")
SHIM = Path(__file__).with_name("classic_shim")


@dataclass
class Site:
    """One engine `w` and a gateway before it, started anew with other settings."""

    venv: EngineVenv
    model: Path
    logs: Path
    config: Path

    def __post_init__(self) -> None:
        self.engine_port, self.gateway_port, self.events, self.replay, *others = free_ports(8)
        self.pull, self.reply, self.heartbeat, self.lmcache_port = others
        self.url = f"http://127.0.0.1:{self.gateway_port}"

    @asynccontextmanager
    async def engine(self, name: str, *arguments: str, **environment: str) -> AsyncIterator[None]:
        spec = VllmSpec(
            model=str(self.model),
            served_name=MODEL,
            host="127.0.0.1",
            port=self.engine_port,
            placement=CpuPlacement((min(os.sched_getaffinity(0)),), kv_cache_gib=1),
            block_size=BLOCK,
            num_gpu_blocks=200,
            max_model_len=2048,
            random_weights=True,
            offline=True,
            eager=True,
            extra_args=arguments,
        )
        env = vllm_environment(spec, separate_environment(os.environ)) | environment
        argv = vllm_argv(spec, (str(self.venv.script("vllm")),))
        async with self._child(name, argv, env) as process:
            await process.wait_ready(f"{spec.url}/health", timeout_s=READY_S)
            yield

    @asynccontextmanager
    async def gateway(self, hash_seed: str = "0") -> AsyncIterator[httpx.AsyncClient]:
        controller: dict[str, Any] = {
            "enabled": True,
            "pull": f"127.0.0.1:{self.pull}",
            "reply": f"127.0.0.1:{self.reply}",
            "heartbeat": f"127.0.0.1:{self.heartbeat}",
            "chunk_tokens": CHUNK,
            "hash_seed": hash_seed,
        }
        settings = {
            "server": {"host": "127.0.0.1", "port": self.gateway_port},
            "admin": {"api_key": ADMIN_KEY},
            "routing": {"strategy": "kvaware"},
            "tokens": {"timeout_ms": 5000},
            "fleet": {
                "workers": [{"id": "w", "url": f"http://127.0.0.1:{self.engine_port}"}],
                "health": {"interval_s": 0.5},
            },
            "lmcache": {"controller": controller},
        }
        self.config.write_text(json.dumps(settings))
        argv = (*KVROUTE, "serve", "-c", str(self.config))
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False) as http,
            self._child("doctor-gateway", argv, dict(os.environ)) as process,
        ):
            await process.wait_ready(f"{self.url}/health", timeout_s=READY_S)
            yield http

    def _child(self, name: str, argv: Sequence[str], env: dict[str, str]) -> ChildProcess:
        return ChildProcess(ChildSpec(name, tuple(argv), env, self.logs / f"{name}.log"), SystemClock())

    async def findings(self) -> tuple[int, dict[str, dict[str, str]]]:
        """The exit code of `kvroute doctor`, and the findings that are not "not checked", by code."""
        argv = [*KVROUTE, "doctor", "-c", str(self.config), "--json"]
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        assert process.returncode is not None
        found = json.loads(output)["findings"]
        return process.returncode, {each["code"]: each for each in found if each["severity"] != "not checked"}


async def until_compared(http: httpx.AsyncClient) -> None:
    """Send prompts that are new to LMCache until the gateway has compared its hashes with LMCache's."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    known: dict[str, Any] = {}
    try:
        async with asyncio.timeout(120):
            for token in count(1000):
                body = {"model": MODEL, "prompt": [token] * 2 * CHUNK, "max_tokens": 1}
                answer = await http.post("/v1/completions", json=body)
                known = (await http.get("/admin/index", headers=headers)).json()["caches"]["lmcache"]
                if answer.is_success and known["instances"] and not known["uncompared"]:
                    return
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"the hashes were not compared: {known}")


async def test_missing_events_and_a_wrong_seed_are_named_and_the_printed_fixes_work(
    forged_venv: EngineVenv,
    model_folder: Path,
    logs: Path,
    tmp_path: Path,
    report: Callable[[str], None],
) -> None:
    site = Site(forged_venv, model_folder, logs, tmp_path / "kvroute.yaml")
    async with site.engine("doctor-no-events"), site.gateway():
        code, found = await site.findings()
        report(f"without events: {code} {found}")
    assert code == 1
    assert {name for name, each in found.items() if each["severity"] == "error"} == {
        "events-off",
        "lmcache-registered",
    }

    # What the fix says, with free ports.
    printed = re.search(r"--kv-events-config '.*?'", found["events-off"]["fix"])
    assert printed is not None
    ports = {"5557": str(site.events), "5657": str(site.replay)}
    flags = shlex.split(re.sub("5[56]57", lambda port: ports[port[0]], printed[0]))
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    lmcache = {
        "PYTHONPATH": str(SHIM),
        "PYTHONHASHSEED": "7",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_CHUNK_SIZE": str(CHUNK),
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.2",
        "LMCACHE_ENABLE_CONTROLLER": "True",
        "LMCACHE_LMCACHE_INSTANCE_ID": "w",
        "LMCACHE_CONTROLLER_PULL_URL": f"127.0.0.1:{site.pull}",
        "LMCACHE_CONTROLLER_REPLY_URL": f"127.0.0.1:{site.reply}",
        "LMCACHE_LMCACHE_WORKER_HEARTBEAT_TIME": "1",
        "LMCACHE_LMCACHE_WORKER_PORTS": str(site.lmcache_port),
    }
    engine = site.engine("doctor-seed-7", "--kv-transfer-config", json.dumps(transfer), *flags, **lmcache)
    async with AsyncExitStack() as stack:
        async with site.gateway() as http:  # LMCache registers with it when the engine starts
            await stack.enter_async_context(engine)
            await until_compared(http)
            code, found = await site.findings()
            report(f"with seed 7: {code} {found}")
        assert (code, set(found)) == (1, {"hashes-differ"})
        assert "set lmcache.controller.hash_seed" in found["hashes-differ"]["fix"]

        async with site.gateway(hash_seed="7") as http:
            await until_compared(http)
            code, found = await site.findings()
            report(f"with the gateway's seed 7: {code} {found}")
        assert (code, found) == (0, {})
