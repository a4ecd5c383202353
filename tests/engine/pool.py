"""Engines that tests share: each configuration is started once, and every test gets it in one known state.

A configuration is one frozen value, an `EngineKind`. A test names those that it needs:

    GEMMA = EngineKind(Model("gemma3", write_gemma3), blocks=200, args=("--seed", "1"))

    @pytest.mark.engines(GEMMA, replace(GEMMA, number=1))
    async def test_...(leased): ...     # `leased` is the list of their engines, in this order

The pool starts them while the tests before run. After the test each engine is brought back to its known
state (`RESETS`), and the test fails if it is not in that state (`differences`). A test that kills an engine,
or leaves it in a state that no reset ends, uses `start_engine`: such an engine ends with the test.

Engines are forked from a process that has imported vLLM (forge.py), which takes 3 to 5 s on an idle core.
`is_real=True` starts `vllm serve` itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from tests.engine.weights import write_weights

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import EngineVenv, separate_environment
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.deploy.tiny_model import write_tiny_model
from kvroute.deploy.vllm_command import CpuPlacement, VllmSpec, vllm_argv, vllm_environment

ENGINE_READY_S = 300.0
REQUEST_TIMEOUT_S = 60.0
IDLE_WITHIN_S = 30.0
MOST_ENGINES = 6
"""Engines that the pool keeps at a time. A forked one has about 1 GB of its own."""
# Compact JSON, so that a model that says noise ends its structured answers.
STRUCTURED = '{"backend":"xgrammar","disable_any_whitespace":true}'


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is written once for the test run: `write(folder)` writes its files into an empty folder.
    Values are equal if both fields are, so `write` must be a function of a module."""

    name: str
    write: Callable[[Path], object]


def _tiny(folder: Path) -> None:
    write_tiny_model("tiny", folder)


def _weighted(folder: Path) -> None:
    write_weights(write_tiny_model("tiny", folder))


TINY = Model("tiny", _tiny)
WEIGHTED = Model("tiny-weighted", _weighted)
"""`TINY` with weights whose answers depend on the whole prompt."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One configuration of an engine. Equal values are the same engine."""

    model: Model = TINY
    blocks: int = 200
    """KV blocks that requests can use."""
    served_name: str = "tiny"
    block_size: int | None = 32
    max_model_len: int | None = None
    """None: 4096, or as much as the blocks hold."""
    args: tuple[str, ...] = ()
    """More options of `vllm serve`. They override what the pool sets. `{events}`, `{replay}` and `{port}`
    become free ports."""
    env: tuple[tuple[str, str], ...] = ()
    has_weights: bool = False
    """Whether the model's folder has weights. Without, vLLM makes its own, small and random."""
    has_events: bool = True
    """It publishes KV events, and answers replays."""
    buffer_steps: int = 10_000
    """How many batches of events it keeps for a replay."""
    kernels_replaced: bool = False
    """Kernels that a CPU lacks are replaced by zeros (kernel_shim). The answers are noise; what is cached and
    reported is as ever."""
    packages: tuple[str, ...] = ()
    """Further packages, with their versions. They are installed for the engine alone, without those that they
    need, and torchvision is made to load (media_shim). Only for engines that are started by themselves."""
    generates: bool = True
    """It answers `/v1/completions`; False for embeddings and the like."""
    core: int = 0
    """Which of the machine's cores computes, counted round."""
    number: int = 0
    """Tells engines apart that are otherwise equal."""
    is_real: bool = False
    """`vllm serve` is started by itself, not forked."""


@dataclass(slots=True)
class Engine:
    """A running worker. `name` is how gateways that know it call it. Only an engine of `start_engine` may be
    killed or restarted by a test."""

    name: str
    url: str
    process: ChildProcess
    blocks: int
    http: httpx.AsyncClient = field(repr=False)
    kind: EngineKind = field(default_factory=EngineKind, repr=False)
    models: frozenset[str] = frozenset()
    """What it served when it was started."""
    began: float = 0.0
    """When its process began, by its own word."""

    async def restart(self) -> None:
        await self.process.start()
        await self.ready()

    async def ready(self) -> None:
        await self.process.wait_ready(f"{self.url}/health", timeout_s=ENGINE_READY_S)

    async def forget(self) -> None:
        """Empty the prefix cache. It says so with its next step."""
        answer = await self.http.post(f"{self.url}/reset_prefix_cache")
        assert answer.json() == {"success": True}

    async def events(self) -> str:
        """Where it publishes its KV events."""
        sources = (await self.http.get(f"{self.url}/kv_event_sources")).json()
        endpoint: str = sources["0"]["endpoint"]
        return endpoint.replace("*", "127.0.0.1")

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`."""
        text = (await self.http.get(f"{self.url}/metrics")).text
        total = 0.0
        for shown, value in re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE):
            if all(f'{label}="{wanted}"' in shown for label, wanted in labels.items()):
                total += float(value)
        return total

    async def served(self) -> frozenset[str]:
        """The names of its model and adapters."""
        listed = (await self.http.get(f"{self.url}/v1/models")).json()["data"]
        return frozenset(each["id"] for each in listed)

    async def ask(self, prompt: list[int]) -> None:
        """One step of the engine, and the blocks of `prompt` in its cache."""
        name = self.kind.served_name
        path, body = "embeddings", {"model": name, "input": prompt}
        if self.kind.generates:
            path, body = "completions", {"model": name, "prompt": prompt, "max_tokens": 1}
        answer = await self.http.post(f"{self.url}/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text


CANARY = [11, 13, 17, 19] * 24 + [23]
"""Three blocks, and one token: the last one is always computed."""
STEP = [5]
HITS = "vllm:prefix_cache_hits_total"


async def _end_requests(engine: Engine) -> None:
    """Wait for those that the test has left; they cannot be ended from here."""
    async with asyncio.timeout(IDLE_WITHIN_S):
        while await requests_left(engine):
            await asyncio.sleep(0.02)


async def _unload_adapters(engine: Engine) -> None:
    for name in await engine.served() - engine.models:
        answer = await engine.http.post(f"{engine.url}/v1/unload_lora_adapter", json={"lora_name": name})
        assert answer.status_code == 200, answer.text


async def _wake_up(engine: Engine) -> None:
    if await is_asleep(engine):
        (await engine.http.post(f"{engine.url}/wake_up")).raise_for_status()


RESETS: Mapping[str, Callable[[Engine], Awaitable[None]]] = {
    "requests": _end_requests,
    "sleep": _wake_up,
    "adapters": _unload_adapters,
    "cache": Engine.forget,
}
"""What brings an engine back to its known state, in this order."""


async def requests_left(engine: Engine) -> int:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return int(sum([await engine.metric(name) for name in names]))


async def is_asleep(engine: Engine) -> bool:
    """False also for an engine that cannot sleep: it has no such address."""
    answer = await engine.http.get(f"{engine.url}/is_sleeping")
    return answer.status_code == 200 and bool(answer.json()["is_sleeping"])


async def differences(engine: Engine) -> list[str]:
    """What distinguishes the engine from its known state. Asks the canary, which `reset` has asked before the
    cache was emptied: so the engine computes a step, and the canary is in the cache afterwards."""
    found = []
    if not engine.process.running:
        return ["it has ended"]
    if await engine.metric("process_start_time_seconds") != engine.began:
        found.append("it was restarted")
    if await is_asleep(engine):
        return [*found, "it is asleep"]
    if left := await requests_left(engine):
        found.append(f"{left} requests are running or waiting")
    elif await engine.metric("vllm:kv_cache_usage_perc"):
        found.append("blocks are held for requests that have ended")
    if (served := await engine.served()) != engine.models:
        found.append(f"it serves {sorted(served)} and not {sorted(engine.models)}")
    before = await engine.metric(HITS)
    await engine.ask(CANARY)
    if hits := await engine.metric(HITS) - before:
        found.append(f"{hits:.0f} tokens of an earlier prompt are cached")
    return found


async def reset(engine: Engine, *, without: str = "") -> list[str]:
    """Bring an engine back to its known state. Returns `differences`: empty if it is in that state. `without`
    leaves out one of `RESETS`."""
    if not await is_asleep(engine):
        await engine.ask(CANARY)
    for name, step in RESETS.items():
        if name != without:
            await step(engine)
    found = await differences(engine)
    if not found:
        await engine.forget()
        await engine.ask(STEP)
    return found


@dataclass(frozen=True, slots=True)
class Site:
    """Where engines are started."""

    real: EngineVenv
    forged: EngineVenv
    folder: Path

    def model_folder(self, model: Model) -> Path:
        folder = self.folder / "models" / model.name
        if not folder.exists():
            new = folder.with_name(f"{model.name}.new")
            new.mkdir(parents=True)
            model.write(new)
            new.rename(folder)
        return folder

    def packages_folder(self, packages: tuple[str, ...]) -> Path:
        """A folder with these packages. The first call installs them."""
        folder = self.folder / "packages"
        if not folder.exists():
            new = folder.with_name("packages.new")
            pip = [
                str(self.real.python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(new),
            ]
            subprocess.run([*pip, *packages], check=True, env=separate_environment(os.environ))
            new.rename(folder)
        return folder

    def process(self, kind: EngineKind, name: str) -> tuple[ChildProcess, str]:
        """The process of an engine, not started yet, and its URL."""
        cores = sorted(os.sched_getaffinity(0))
        port, events, replay = free_ports(3)
        ports = {"port": port, "events": events, "replay": replay}
        extra = ["--structured-outputs-config", STRUCTURED]
        if kind.has_events:
            extra += ["--kv-events-config", json.dumps(_events(kind, **ports))]
        for word in kind.args:
            extra.append(re.sub(r"\{(port|events|replay)\}", lambda found: str(ports[found[1]]), word))
        spec = VllmSpec(
            model=str(self.model_folder(kind.model)),
            served_name=kind.served_name,
            host="127.0.0.1",
            port=port,
            placement=CpuPlacement((cores[kind.core % len(cores)],), kv_cache_gib=1),
            block_size=kind.block_size,
            num_gpu_blocks=kind.blocks + 1,  # the engine keeps one for itself
            max_model_len=kind.max_model_len or min(4096, kind.blocks * (kind.block_size or 128)),
            random_weights=not kind.has_weights,
            offline=True,
            eager=True,
            tool_call_parser="hermes" if kind.generates else None,
            store_responses=True,
            development_mode=True,
            extra_args=tuple(extra),
        )
        venv = self.real if kind.is_real else self.forged
        env = vllm_environment(spec, separate_environment(os.environ)) | dict(kind.env)
        paths = [env.get("PYTHONPATH", "")]
        if kind.kernels_replaced:
            paths.insert(0, str(Path(__file__).with_name("kernel_shim")))
        if kind.packages:
            paths[:0] = str(Path(__file__).with_name("media_shim")), str(self.packages_folder(kind.packages))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        argv = vllm_argv(spec, (str(venv.script("vllm")),))
        log = self.folder / "logs" / f"{name}-{port}.log"
        return ChildProcess(ChildSpec(name, argv, env, log), SystemClock()), spec.url


def _events(kind: EngineKind, *, port: int, events: int, replay: int) -> dict[str, object]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "kv",
        "buffer_steps": kind.buffer_steps,
    }


def client() -> httpx.AsyncClient:
    """A client for engines."""
    # vLLM closes a connection that was idle for 5 s, perhaps as the next question comes: no keep-alive.
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=limits)


async def start(site: Site, kind: EngineKind, name: str, http: httpx.AsyncClient) -> Engine:
    """A new engine, ready. The caller stops its process."""
    process, url = site.process(kind, name)
    await process.start()
    try:
        engine = Engine(name, url, process, kind.blocks, http, kind)
        await engine.ready()
        engine.models = await engine.served()
        engine.began = await engine.metric("process_start_time_seconds")
    except BaseException:
        await process.stop()
        raise
    return engine


class EnginePool:
    """The shared engines. They are started in a thread with an event loop of its own, beside the tests.

    Mutable: what has been started, in the order of its last use.
    """

    def __init__(self, site: Site, forge: Callable[[], Any]) -> None:
        """`forge` makes an async context manager: entered, what `site.forged` runs can be forked."""
        self.site = site
        self._make_forge = forge
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine pool", daemon=True)
        self._owned = AsyncExitStack()
        self._forge: asyncio.Task[None] | None = None
        self._engines: dict[EngineKind, asyncio.Task[Engine]] = {}
        self._leased: set[EngineKind] = set()

    def __enter__(self) -> EnginePool:
        self._thread.start()
        self._http = self._in_thread(self._owned.enter_async_context(client())).result()
        self._in_thread(self._import())
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def want(self, kinds: Sequence[EngineKind]) -> None:
        """Begin to start these engines, unless they run, as far as there is room."""
        self._in_thread(self._want(kinds, is_early=True))

    async def forged(self) -> None:
        """Wait until what `site.forged` runs can be forked."""
        await asyncio.wrap_future(self._in_thread(self._import()))

    async def running(self, kind: EngineKind) -> Engine:
        """The shared engine of this kind, as it is: for those that change nothing of it."""
        return await asyncio.wrap_future(self._in_thread(self._started(kind)))

    @asynccontextmanager
    async def lease(self, kinds: Sequence[EngineKind]) -> AsyncIterator[list[Engine]]:
        """These engines in their known state, for one test. AssertionError if they cannot be brought back."""
        assert not self._leased & set(kinds)
        self._leased |= set(kinds)
        try:
            async with client() as http:
                engines = [replace(await self.running(kind), http=http) for kind in kinds]
                yield engines
                returned = {engine.name: await self._returned(engine) for engine in engines}
                found = [f"{name}: {what}" for name, differs in returned.items() for what in differs]
                assert not found, "after this test an engine is not in its known state: " + "; ".join(found)
        finally:
            self._leased -= set(kinds)

    async def _returned(self, engine: Engine) -> list[str]:
        """Reset an engine; it is ended if that does not succeed, so that the next test gets a new one."""
        try:
            found = await reset(engine)
        except (httpx.HTTPError, AssertionError, TimeoutError) as exc:
            found = [f"{type(exc).__name__}: {exc}"]
        if found:
            await asyncio.wrap_future(self._in_thread(self._ended(engine.kind)))
        return found

    def _in_thread(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # --- in the pool's own loop

    async def _import(self) -> None:
        if self._forge is None:
            self._forge = asyncio.create_task(self._owned.enter_async_context(self._make_forge()))
        await asyncio.shield(self._forge)

    async def _want(self, kinds: Sequence[EngineKind], is_early: bool = False) -> None:
        """Start these. If there is no room, an idle one is ended for each, or else it is started
        nevertheless, unless that `is_early`."""
        for kind in kinds:
            if kind not in self._engines and len(self._engines) >= MOST_ENGINES:
                idle = [each for each in self._engines if each not in self._leased and each not in kinds]
                if idle:
                    await self._ended(idle[0])
                elif is_early:
                    return
            starting = self._engines.pop(kind, None) or asyncio.create_task(self._start(kind))
            self._engines[kind] = starting  # the last used one is the last

    async def _started(self, kind: EngineKind) -> Engine:
        await self._want([kind])
        try:
            return await asyncio.shield(self._engines[kind])
        except BaseException:
            self._engines.pop(kind, None)
            raise

    async def _start(self, kind: EngineKind) -> Engine:
        if not kind.is_real:
            await self._import()
        name = f"{kind.model.name}-{kind.number}"
        return await start(self.site, kind, name, self._http)

    async def _ended(self, kind: EngineKind) -> None:
        starting = self._engines.pop(kind, None)
        if starting is not None:
            (engine,) = await asyncio.gather(starting, return_exceptions=True)
            if isinstance(engine, Engine):
                await engine.process.stop()

    async def _end(self) -> None:
        await asyncio.gather(*(self._ended(kind) for kind in [*self._engines]))
        if self._forge is not None:
            await asyncio.gather(self._forge, return_exceptions=True)
        await self._owned.aclose()
