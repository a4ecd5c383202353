"""A base model, two LoRA adapters and tenants behind LMCache: every answer is the one without LMCache.

Both modes of LMCache, with one engine each, and a third one without LMCache for comparison. A second gateway
before each engine isolates tenants. The executable
under test is that of the environment variable KVROUTE_EXECUTABLE, where it is set.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import redis.asyncio
from tests.engine.adapters import write_adapter
from tests.engine.weights import write_weights

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import EngineVenv, separate_environment
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.deploy.tiny_model import write_tiny_model
from kvroute.deploy.vllm_command import CpuPlacement, VllmSpec, vllm_argv, vllm_environment

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

MODEL, ADAPTERS = "tiny", ("ada", "org/bob")
MODELS = (MODEL, *ADAPTERS)
BLOCK, CHUNK = 32, 64
PROMPT_TOKENS = 600
CACHED = PROMPT_TOKENS // CHUNK * CHUNK
ON_GPU = PROMPT_TOKENS // BLOCK * BLOCK
PROMPTS = 2
READY_S, ANSWER_S = 300.0, 60.0
TENANTS = ("a", "b", "late")
"""Names of keys; each name is its key."""
SHIM = Path(__file__).with_name("classic_shim")


@dataclass
class Answer:
    tokens: list[int]
    cached: int
    predicted: int


@dataclass
class Site:
    """The engines, by LMCache's mode ("none", "mp", "classic"), and two gateways before the last two each.

    `isolating` are the gateways with `server.isolation`.
    """

    http: httpx.AsyncClient
    model: Path
    logs: Path
    venv: EngineVenv
    adapters: dict[str, Path]
    store: redis.asyncio.Redis
    lmcache: str
    engines: dict[str, str] = field(default_factory=dict)
    gateways: dict[str, str] = field(default_factory=dict)
    isolating: dict[str, str] = field(default_factory=dict)

    async def ask(self, url: str, model: str, prompt: list[int], key: str = "", **more: Any) -> Answer:
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = await self.http.post(
            f"{url}/v1/completions",
            json={**body, "return_token_ids": True, **more},
            headers={"authorization": f"Bearer {key}"} if key else {},
        )
        assert answer.status_code == 200, answer.text
        found = answer.json()
        cached = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        predicted = int(answer.headers.get("x-kvroute-hit-tokens", 0))
        return Answer(found["choices"][0]["token_ids"], cached, predicted)

    async def forget(self, mode: str) -> None:
        """Empty the engine's own cache; LMCache's stays."""
        answer = await self.http.post(f"{self.engines[mode]}/reset_prefix_cache")
        assert answer.json() == {"success": True}
        # It says so with its next step (vLLM 0.32).
        await self.ask(self.engines[mode], MODEL, [5])

    async def known(self, mode: str, model: str, prompt: list[int], key: str = "", **tiers: int) -> None:
        """Wait until the gateway knows that just this much of the prompt is cached; with a `key` the gateway
        that isolates tenants."""
        body = {"model": model, "prompt": prompt, "max_tokens": 8}
        url = self.isolating[mode] if key else self.gateways[mode]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        seen: dict[str, Any] = {}
        try:
            async with asyncio.timeout(ANSWER_S):
                while seen.get("tiers") != {"gpu": 0, "l1": 0, "l2": 0, **tiers}:
                    answer = await self.http.post(f"{url}/v1/route/explain", json=body, headers=headers)
                    (seen,) = answer.json()["ranking"]
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"{mode}, {model}: {tiers} should be known, the gateway thinks {seen}")

    async def fill(self) -> None:
        for url in self.engines.values():
            await self.ask(url, MODEL, CANARY)
        async with asyncio.timeout(ANSWER_S):
            while min(await self.l1_objects(), await self.store.dbsize()) < len(CANARY) // CHUNK:
                await asyncio.sleep(0.05)

    async def l1_objects(self) -> int:
        page = (await self.http.get(f"{self.lmcache}/status")).json()
        manager = page["storage_manager"]["l1_managers"]["_default"]
        return int(manager["total_object_count"] - manager["staging_object_count"])

    async def forget_all(self) -> None:
        for mode in self.engines:
            await self.forget(mode)

    async def clear_l1(self) -> None:
        body = {"tier": "l1", "force": True}
        (await self.http.post(f"{self.lmcache}/cache/clear", json=body)).raise_for_status()

    async def clear_redis(self) -> None:
        await self.store.flushdb()

    async def reset(self, *, without: str = "") -> list[str]:
        """Bring the site back to its known state, in which all caches are empty. Returns what differs from
        it. `without` leaves out one of `RESETS`."""
        await self.fill()
        for name, step in RESETS.items():
            if name != without:
                await step(self)
        found = [f"L1 holds {held} objects"] if (held := await self.l1_objects()) else []
        found += [f"Redis holds {held} objects"] if (held := await self.store.dbsize()) else []
        for mode, url in self.engines.items():
            if cached := (await self.ask(url, MODEL, CANARY)).cached:
                found.append(f"{mode}: {cached} tokens of an earlier prompt are cached")
            served = [each["id"] for each in (await self.http.get(f"{url}/v1/models")).json()["data"]]
            if sorted(served) != sorted(MODELS):
                found.append(f"{mode}: it serves {served}")
        if not found:
            await self.fill()
            for step in RESETS.values():
                await step(self)
        return found

    def child(self, name: str, argv: list[str], env: dict[str, str]) -> ChildProcess:
        return ChildProcess(ChildSpec(name, tuple(argv), env, self.logs / f"{name}.log"), SystemClock())

    def engine(
        self, mode: str, core: int, transfer: dict[str, Any] | None, env: dict[str, str]
    ) -> ChildProcess:
        port, events, replay = free_ports(3)
        kv_events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
            "topic": "kv",
        }
        extra = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"]
        extra += [f"{name}={folder}" for name, folder in self.adapters.items()]
        extra += ["--kv-events-config", json.dumps(kv_events)]
        if transfer is not None:
            extra += ["--kv-transfer-config", json.dumps({"kv_role": "kv_both", **transfer})]
        cores = sorted(os.sched_getaffinity(0))
        spec = VllmSpec(
            model=str(self.model),
            served_name=MODEL,
            host="127.0.0.1",
            port=port,
            placement=CpuPlacement((cores[core % len(cores)],), kv_cache_gib=1),
            block_size=BLOCK,
            num_gpu_blocks=200,
            max_model_len=1024,
            offline=True,
            eager=True,
            development_mode=True,
            extra_args=tuple(extra),
        )
        self.engines[mode] = spec.url
        argv = vllm_argv(spec, (str(self.venv.script("vllm")),))
        environ = vllm_environment(spec, separate_environment(os.environ)) | env
        return self.child(f"adapters-{mode}", list(argv), environ)


RESETS = {"GPU": Site.forget_all, "L1": Site.clear_l1, "Redis": Site.clear_redis}
"""What brings the site back to its known state."""
CANARY = [11, 13, 17, 19] * 50


@pytest_asyncio.fixture(loop_scope="session")
async def site(shared: Site) -> AsyncIterator[Site]:
    """With empty caches, and left so."""
    yield shared
    assert await shared.reset() == []


@pytest.mark.parametrize("left_out", RESETS)
async def test_the_check_of_the_site_fails_when_one_reset_is_left_out(site: Site, left_out: str) -> None:
    assert await site.reset(without=left_out)

    assert await site.reset() == []


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(
    forged_venv: EngineVenv, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    redis_server = shutil.which("redis-server")
    if redis_server is None:
        pytest.fail("no redis-server: apt-get install redis-server")
    folder = tmp_path_factory.mktemp("adapters")
    model = write_tiny_model(MODEL, folder / MODEL)
    write_weights(model)
    adapters = {
        name: write_adapter(model, folder / f"adapter-{seed}", seed) for seed, name in enumerate(ADAPTERS)
    }
    redis_port, zmq, lmcache_http, coordinator, *gateways = free_ports(8)
    keys = [{"name": name, "hash": "sha256:" + hashlib.sha256(name.encode()).hexdigest()} for name in TENANTS]
    keys_file = folder / "keys.json"
    keys_file.write_text(json.dumps({"keys": keys}))
    quiet = {"LMCACHE_DISABLE_BANNER": "1", "DO_NOT_TRACK": "1"}
    limits = httpx.Limits(max_keepalive_connections=0)  # vLLM closes a connection that was idle for 5 s
    async with (
        httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, limits=limits) as http,
        AsyncExitStack() as stack,
    ):
        store = redis.asyncio.Redis(port=redis_port)
        stack.push_async_callback(store.aclose)
        site = Site(http, model, logs, forged_venv, adapters, store, f"http://127.0.0.1:{lmcache_http}")
        argv = [redis_server, "--port", str(redis_port), "--save", "", "--dir", str(folder)]
        await stack.enter_async_context(site.child("adapters-redis", argv, dict(os.environ)))

        executable = os.environ.get("KVROUTE_EXECUTABLE")
        command = [executable] if executable else [sys.executable, "-m", "kvroute"]
        settings = ["tokens.timeout_ms=2000", "fleet.health.interval_s=0.5"]
        of_mp = ["lmcache.coordinator.enabled=true", f"lmcache.coordinator.listen=127.0.0.1:{coordinator}"]

        server = [
            str(forged_venv.script("lmcache")), "server", "--instance-id", "mp",
            "--host", "127.0.0.1", "--port", str(zmq),
            "--http-host", "127.0.0.1", "--http-port", str(lmcache_http),
            "--chunk-size", str(CHUNK), "--l1-size-gb", "0.2", "--eviction-policy", "LRU",
            "--supported-transfer-mode", "auto",
            "--coordinator-url", f"http://127.0.0.1:{coordinator}", "--coordinator-event-reporting",
            "--coordinator-advertise-ip", "127.0.0.1", "--coordinator-heartbeat-interval", "1",
            "--coordinator-event-flush-interval", "0.2",
        ]  # fmt: skip
        mp_settings = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": zmq}
        mp = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": mp_settings}
        of_classic = quiet | {
            "PYTHONPATH": str(SHIM),
            "PYTHONHASHSEED": "0",
            "LMCACHE_CHUNK_SIZE": str(CHUNK),
            "LMCACHE_LOCAL_CPU": "False",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.2",
            "LMCACHE_REMOTE_URL": f"redis://127.0.0.1:{redis_port}",
            "LMCACHE_REMOTE_SERDE": "naive",
        }
        engines = {
            "none": site.engine("none", 0, None, {}),
            "mp": site.engine("mp", 1, mp, quiet),
            "classic": site.engine("classic", 0, {"kv_connector": "LMCacheConnectorV1"}, of_classic),
        }
        per_tenant = ["server.isolation=per-key", f"server.client_keys.file={keys_file}"]
        for place, port in enumerate(gateways):
            mode, isolates = ("mp", "classic")[place % 2], place >= 2
            argv = [*command, "serve", "--port", str(port), "--strategy", "kvaware"]
            argv += ["--worker", f"{mode}={site.engines[mode]}"]
            of_gateway = per_tenant if isolates else of_mp if mode == "mp" else []
            for setting in [*settings, *of_gateway]:
                argv += ["--set", setting]
            env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
            (site.isolating if isolates else site.gateways)[mode] = f"http://127.0.0.1:{port}"
            name = f"adapters-gateway-{mode}{'-tenants' if isolates else ''}"
            await stack.enter_async_context(site.child(name, argv, env))
        lmcache = site.child("adapters-lmcache", server, separate_environment(os.environ) | quiet)
        await stack.enter_async_context(lmcache)
        await lmcache.wait_ready(f"http://127.0.0.1:{lmcache_http}/healthcheck", timeout_s=READY_S)
        for engine in engines.values():
            await stack.enter_async_context(engine)
        for mode, engine in engines.items():
            await engine.wait_ready(f"{site.engines[mode]}/health", timeout_s=READY_S)
        for url in (*site.gateways.values(), *site.isolating.values()):
            async with asyncio.timeout(READY_S):
                while True:
                    ready = (await http.get(f"{url}/ready")).json()
                    if ready["ready"] and not ready["notes"]:
                        break
                    await asyncio.sleep(0.1)
        yield site


def prompts(seed: str) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(1000, 7000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


@pytest.mark.parametrize("mode", ["mp", "classic"])
async def test_every_answer_is_the_one_without_lmcache_and_each_model_finds_its_own_kv(
    site: Site, mode: str
) -> None:
    url = site.gateways[mode]
    asked = [(model, prompt) for prompt in prompts(mode) for model in MODELS]
    right = [(await site.ask(site.engines["none"], model, prompt)).tokens for model, prompt in asked]
    assert len({tuple(tokens) for tokens in right}) == len(right)

    first = [await site.ask(url, model, prompt) for model, prompt in asked]
    assert [answer.tokens for answer in first] == right
    assert {(answer.cached, answer.predicted) for answer in first} == {(0, 0)}

    # From the engine's own cache.
    behind = {"l1": 0, "l2": 0}
    for model, prompt in asked:
        await site.known(mode, model, prompt, gpu=ON_GPU, **behind)
    second = [await site.ask(url, model, prompt) for model, prompt in asked]
    assert [answer.tokens for answer in second] == right
    assert {(answer.cached, answer.predicted) for answer in second} == {(ON_GPU, ON_GPU)}

    # From LMCache, in another order. Its in-process connector does not report blocks in Redis.
    await site.forget(mode)
    known = {"l1": CACHED} if mode == "mp" else {}
    backwards = [*reversed([*zip(asked, right, strict=True)])]
    for (model, prompt), _ in backwards:
        await site.known(mode, model, prompt, **known)
    for (model, prompt), tokens in backwards:
        answer = await site.ask(url, model, prompt)
        assert answer.tokens == tokens, model
        assert answer.cached == CACHED
        assert answer.predicted == known.get("l1", 0)


@pytest.mark.parametrize("mode", ["mp", "classic"])
async def test_two_clients_salts_are_apart_for_an_adapter_too(site: Site, mode: str) -> None:
    url = site.gateways[mode]
    (prompt, _), model = prompts(f"{mode} tenants"), ADAPTERS[1]
    right = (await site.ask(site.engines["none"], model, prompt)).tokens
    for tenant in ("T1", "T2"):
        answer = await site.ask(url, model, prompt, cache_salt=tenant)
        assert (answer.tokens, answer.cached) == (right, 0)
    for tenant in ("T1", "T2"):
        await site.forget(mode)
        answer = await site.ask(url, model, prompt, cache_salt=tenant)
        assert (answer.tokens, answer.cached) == (right, CACHED)


@pytest.mark.parametrize("mode", ["mp", "classic"])
async def test_tenants_never_share_a_cached_block_and_every_answer_is_the_one_without_a_cache(
    site: Site, mode: str
) -> None:
    url = site.isolating[mode]
    (prompt, _) = prompts(f"{mode} keys")
    spaces: list[tuple[str, dict[str, str]]] = [("a", {}), ("b", {}), ("a", {"cache_salt": "s"})]
    asked = [
        (tenant, model, more)
        for tenant, more in [*spaces, ("b", {"cache_salt": "s"})]
        for model in MODELS[:2]
    ]
    right = {model: (await site.ask(site.engines["none"], model, prompt)).tokens for model in MODELS[:2]}

    for tenant, model, more in asked:
        answer = await site.ask(url, model, prompt, tenant, **more)
        assert (answer.tokens, answer.cached, answer.predicted) == (right[model], 0, 0)

    # Each tenant's own blocks in the engine's cache are known, and nobody else's.
    for model in MODELS[:2]:
        for tenant in ("a", "b"):
            await site.known(mode, model, prompt, tenant, gpu=ON_GPU)
        await site.known(mode, model, prompt, "late", gpu=0)
    for tenant, model, more in asked:
        answer = await site.ask(url, model, prompt, tenant, **more)
        assert (answer.tokens, answer.cached, answer.predicted) == (right[model], ON_GPU, ON_GPU)

    # LMCache has the blocks of all others when a tenant comes late, and each tenant's own when it returns.
    await site.forget(mode)
    for model in MODELS[:2]:
        late = await site.ask(url, model, prompt, "late")
        assert (late.tokens, late.cached) == (right[model], 0)
    for tenant, model, more in reversed(asked):
        answer = await site.ask(url, model, prompt, tenant, **more)
        assert (answer.tokens, answer.cached) == (right[model], CACHED)
