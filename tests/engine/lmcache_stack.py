"""A real engine with its real LMCache server and Redis."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from tests.support.waiting import until

from kvroute.blocks.chunks import PromptChunks
from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import EngineVenv, separate_environment
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.deploy.vllm_command import (
    CpuPlacement,
    KvEventsEndpoint,
    VllmSpec,
    vllm_argv,
    vllm_environment,
)
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.map_trust import MapTrust
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.listeners import CoordinatorApp, CoordinatorServer
from kvroute.lmcache.membership import LMCacheServer, ServedWorker
from kvroute.lmcache.options import LMCacheOptions
from kvroute.lmcache.polls import StatusPoller

MODEL = "tiny"
CHUNK = 64
BLOCK = 32
PROMPT_TOKENS = 600
CACHED = PROMPT_TOKENS // CHUNK * CHUNK
READY_S = 300.0
QUIET_S = 150.0
FILLERS = 16
"""Prompts that are more than L1 holds."""


@dataclass
class Stack:
    """One worker `w` with its LMCache server of the same name, their Redis, and a coordinator here."""

    options: LMCacheOptions
    store: redis.asyncio.Redis
    model: str
    http: httpx.AsyncClient
    engine_url: str
    lmcache_url: str
    lmcache: ChildProcess
    clock: SystemClock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        self.index = ChunkIndex()
        self.coordinator = Coordinator(self.index, self.clock, self.options)
        self.app = CoordinatorApp(self.coordinator, self.clock, self.options.coordinator)
        self.watch = StatusPoller(self.coordinator, self.http, self.clock, self.options.coordinator)
        self.coordinator.worker_changed(ServedWorker("w", "127.0.0.1", (0,), frozenset({self.model})))
        self.tasks: list[asyncio.Task[None]] = []
        self.resets = 0

    def listen(self) -> None:
        """Be there for LMCache, at the configured address."""
        server = CoordinatorServer(self.app, self.coordinator, self.index, self.options.coordinator)
        server.bind()
        self.tasks = [
            asyncio.create_task(server.run()),
            asyncio.create_task(self.watch.run(self.app.registered)),
        ]

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    @property
    def instance(self) -> LMCacheServer:
        instance = self.coordinator.instance("w")
        assert instance is not None
        return instance

    @property
    def knows(self) -> bool:
        return self.coordinator.instance("w") is not None

    async def ask(self, prompt: list[int], **more: Any) -> int:
        """Send a prompt; the cached tokens that the engine reports."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, **more}
        answer = await self.http.post(f"{self.engine_url}/v1/completions", json=body)
        answer.raise_for_status()
        details = answer.json()["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens") or 0)

    async def forget_gpu(self) -> None:
        answer = await self.http.post(f"{self.engine_url}/reset_prefix_cache")
        assert answer.json() == {"success": True}

    async def clear_l1(self) -> None:
        answer = await self.http.post(f"{self.lmcache_url}/cache/clear", json={"tier": "l1", "force": True})
        answer.raise_for_status()
        await until(lambda: self.instance.memory.objects == 0, within_s=QUIET_S)

    async def clear_l2(self) -> None:
        """Also for the coordinator: nobody reports it."""
        await self.store.flushdb()
        for pool in self.coordinator.pools():
            pool.chunks.clear()

    async def settled(self, l2_objects: int) -> None:
        """Wait until Redis holds so much, and nothing more is stored, whether the map knows it or not."""
        agreed, seen = 0, (0, 0)
        async with asyncio.timeout(QUIET_S):
            while agreed < 3:
                now = (await self.l1_objects(), int(await self.store.dbsize()))
                agreed = agreed + 1 if now == seen and now[1] >= l2_objects else 0
                seen = now
                await asyncio.sleep(0.3)

    async def differences(self, canary: list[int]) -> list[str]:
        """What distinguishes the stack from its known state, in which all caches are empty and the map knows
        it. Asks the canary."""
        believed = {"L1": self.instance.memory.objects}
        believed |= {"L2": sum(pool.chunks.objects for pool in self.coordinator.pools())}
        held = {"L1": await self.l1_objects(), "L2": int(await self.store.dbsize())}
        found = [f"{tier} holds {count} objects" for tier, count in held.items() if count]
        if believed != held:
            found.append(f"the map has {believed}, the stores {held}")
        if self.instance.trust is not MapTrust.WHOLE:
            found.append(f"the map is {self.instance.trust}")
        if cached := await self.ask(canary):
            found.append(f"{cached} tokens of an earlier prompt are cached")
        return found

    async def reset(self, *, without: str = "") -> list[str]:
        """Bring the stack back to its known state. Returns `differences`. `without` leaves out one of
        `RESETS`."""
        self.resets += 1
        canary, held = prompt(10_000 + self.resets), int(await self.store.dbsize())  # new to all caches
        await self.ask(canary)
        await self.settled(held + CACHED // CHUNK)
        for name, step in RESETS.items():
            if name != without:
                await step(self)
        found = await self.differences(canary)
        if not found:
            await self.settled(CACHED // CHUNK)
            for step in RESETS.values():
                await step(self)
        return found

    def predicted(self, prompt: list[int], salt: str = "") -> tuple[int, int]:
        return self.index.match(PromptChunks(prompt[:-1]), salt, {}).get(0, (0, 0))

    async def l1_objects(self) -> int:
        page = (await self.http.get(f"{self.lmcache_url}/status")).json()
        manager = page["storage_manager"]["l1_managers"]["_default"]
        return int(manager["total_object_count"] - manager["staging_object_count"])

    async def hits(self) -> tuple[float, float]:
        """Tokens that LMCache says it found in L1 and in L2 so far."""
        page = (await self.http.get(f"{self.lmcache_url}/metrics")).text

        def total(tier: str) -> float:
            name = rf"^lmcache_mp_lookup_hit_{tier}_tokens_total(?:\{{.*\}})? (\S+)$"
            return sum(float(value) for value in re.findall(name, page, re.MULTILINE))

        return total("l1"), total("l2")

    async def quiet(self) -> None:
        """Wait until the map equals the contents of LMCache and Redis twice in a row; otherwise fail with
        the difference."""
        agreed, seen = 0, (0, 0, 0, 0)
        async with asyncio.timeout(QUIET_S):
            try:
                while agreed < 3:
                    (pool,) = self.coordinator.pools() or (None,)
                    now = (
                        self.instance.memory.objects,
                        await self.l1_objects(),
                        pool.chunks.objects if pool else 0,
                        int(await self.store.dbsize()),
                    )
                    agreed = agreed + 1 if now == seen and now[0] == now[1] and now[2] == now[3] else 0
                    seen = now
                    await asyncio.sleep(0.3)
            except TimeoutError:
                pytest.fail(f"believed and held, in L1 and in L2: {seen}")


RESETS: Mapping[str, Callable[[Stack], Awaitable[None]]] = {
    "GPU": Stack.forget_gpu,
    "L1": Stack.clear_l1,
    "L2": Stack.clear_l2,
}
"""What brings a stack back to its known state."""


@asynccontextmanager
async def started(engine_venv: EngineVenv, model_folder: Path, logs: Path) -> AsyncIterator[Stack]:
    """Start Redis, LMCache and the engine."""
    redis_server = shutil.which("redis-server")
    if redis_server is None:
        pytest.fail("no redis-server: apt-get install redis-server")
    redis_port, zmq_port, http_port, engine_port, coordinator_port, events_port, replay_port = free_ports(7)
    environ = separate_environment(os.environ) | {"LMCACHE_DISABLE_BANNER": "1", "DO_NOT_TRACK": "1"}
    l2 = {"type": "resp", "host": "127.0.0.1", "port": redis_port, "shared": True}
    lmcache = [
        str(engine_venv.script("lmcache")), "server", "--instance-id", "w",
        "--host", "127.0.0.1", "--port", str(zmq_port),
        "--http-host", "127.0.0.1", "--http-port", str(http_port),
        "--chunk-size", str(CHUNK), "--l1-size-gb", "0.02", "--eviction-policy", "LRU",
        "--supported-transfer-mode", "auto",
        "--l2-adapter", json.dumps(l2),
        "--coordinator-url", f"http://127.0.0.1:{coordinator_port}", "--coordinator-event-reporting",
        "--coordinator-advertise-ip", "127.0.0.1", "--coordinator-heartbeat-interval", "1",
        "--coordinator-event-flush-interval", "0.2",
    ]  # fmt: skip
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": zmq_port},
    }
    core = sorted(os.sched_getaffinity(0))[0]
    spec = VllmSpec(
        model=str(model_folder),
        served_name=MODEL,
        host="127.0.0.1",
        port=engine_port,
        placement=CpuPlacement((core,), kv_cache_gib=1),
        block_size=BLOCK,
        num_gpu_blocks=33,
        max_model_len=1024,
        random_weights=True,
        offline=True,
        eager=True,
        development_mode=True,
        kv_events=KvEventsEndpoint(f"tcp://*:{events_port}", f"tcp://*:{replay_port}"),
        extra_args=("--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details"),
    )
    options = LMCacheOptions.model_validate(
        {
            "coordinator": {
                "listen": f"127.0.0.1:{coordinator_port}",
                "heartbeat_timeout_s": 6,
                "status_interval_s": 0.5,
            },
            "l2": {"redis_url": f"redis://127.0.0.1:{redis_port}/0", "timeout_ms": 5000},
        }
    )

    def child(name: str, argv: list[str], env: dict[str, str]) -> ChildProcess:
        return ChildProcess(ChildSpec(name, tuple(argv), env, logs / f"{name}.log"), SystemClock())

    async with AsyncExitStack() as owned:
        argv = [redis_server, "--port", str(redis_port), "--save", "", "--dir", str(logs)]
        await owned.enter_async_context(child("redis", argv, dict(os.environ)))
        store = redis.asyncio.Redis(port=redis_port)
        owned.push_async_callback(store.aclose)
        http = await owned.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        server = child("lmcache", lmcache, environ)
        lmcache_url, engine_url = f"http://127.0.0.1:{http_port}", spec.url
        stack = Stack(options, store, str(model_folder), http, engine_url, lmcache_url, server)
        stack.listen()
        owned.push_async_callback(stack.leave)
        await owned.enter_async_context(server)
        await server.wait_ready(f"{lmcache_url}/healthcheck", timeout_s=READY_S)
        argv = list(vllm_argv(spec, (str(engine_venv.script("vllm")),)))
        engine = await owned.enter_async_context(child("w", argv, vllm_environment(spec, environ)))
        await engine.wait_ready(f"{engine_url}/health", timeout_s=READY_S)
        await until(lambda: stack.knows, within_s=QUIET_S)
        yield stack


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    return random.Random(seed).choices(range(10, 8000), k=tokens)
