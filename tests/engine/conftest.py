"""Real vLLM workers on CPU cores, the gateway as a subprocess, and a workload of chats.

Engines are expensive (half a minute each) and live for the whole session; a gateway is cheap, and
a test that depends on the gateway's history or map starts its own gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from tests.engine.endpoints import ADMIN_KEY, Run, endpoints, prompts

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import DEFAULT_PATH, EngineVenv, separate_environment, write_tiny_model
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.deploy.vllm_command import (
    CpuPlacement,
    VllmSpec,
    vllm_argv,
    vllm_environment,
)

MODEL = "tiny"
BLOCK_SIZE = 32
ENGINE_READY_S = 300.0
GATEWAY_READY_S = 30.0
REQUEST_TIMEOUT_S = 60.0
# Compact JSON, so that a model that says noise ends its structured answers.
STRUCTURED = '{"backend":"xgrammar","disable_any_whitespace":true}'


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Chats that are held at once. Lengths are in tokens; a word of the prompts is one token."""

    chats: int = 12
    turns: int = 8
    system_tokens: int = 160
    turn_tokens: int = 104
    answer_tokens: int = 16
    common_tokens: int = 0
    """Words at the start of every system prompt that all chats share."""

    @property
    def tokens_per_chat(self) -> int:
        """Length of a chat after its last answer. The template adds 5 tokens to each message."""
        answers = self.turns * (self.answer_tokens + 5)
        return 5 + self.system_tokens + self.turns * (self.turn_tokens + 5) + answers

    @property
    def blocks(self) -> int:
        """KV blocks that all chats together hold at their ends."""
        return self.chats * -(-self.tokens_per_chat // BLOCK_SIZE)


SHAPE = ChatShape()
POOL_SHARE = 0.65
POOL_BLOCKS = round(POOL_SHARE * SHAPE.blocks)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request of a chat cost, by the engine's own account."""

    chat: int
    worker: str
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(slots=True)
class Engine:
    """A running worker. `name` is how gateways that know it call it."""

    name: str
    url: str
    process: ChildProcess
    blocks: int
    http: httpx.AsyncClient = field(repr=False)

    async def restart(self) -> None:
        await self.process.start()
        await self.ready()

    async def ready(self) -> None:
        await self.process.wait_ready(f"{self.url}/health", timeout_s=ENGINE_READY_S)

    async def forget(self) -> None:
        """Empty the prefix cache."""
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
        for shown, value in re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
            if all(f'{label}="{wanted}"' in shown for label, wanted in labels.items()):
                total += float(value)
        return total


@dataclass(slots=True)
class Gateway:
    """A running gateway."""

    url: str
    process: ChildProcess

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=REQUEST_TIMEOUT_S
        )


StartEngine = Callable[..., Awaitable[Engine]]
StartGateway = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture(scope="session", autouse=True)
def one_process_per_core() -> Iterator[None]:
    """The engine core computes in its own process, as vLLM does by default on one GPU.

    On CPU, vLLM 0.32 starts a worker process for it, only to set its OpenMP threads. Without that process a
    start takes 26 to 28 s of CPU time instead of 34 to 41 s (three starts each).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure immediately: the suite is long, and a time limit would hide those before it."""
    if report.failed:
        print(f"\n{report.nodeid} ({report.when}) failed:\n{report.longreprtext}", file=sys.__stdout__)


@pytest.fixture(scope="session")
def engine_venv(pytestconfig: pytest.Config) -> EngineVenv:
    venv = EngineVenv.at(Path(os.environ.get("ENGINE_VENV", pytestconfig.rootpath / DEFAULT_PATH)))
    if not venv.script("vllm").exists():
        pytest.fail(f"no engine in {venv.path}: python -m kvroute.deploy.engine_install")
    return venv


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(MODEL, tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def start_engine(engine_venv: EngineVenv, model_folder: Path, logs: Path) -> AsyncIterator[StartEngine]:
    """`(name, core, blocks)` -> an engine with that many KV blocks; stopped when the session ends.
    `buffer_steps`: how many batches of events it keeps for a replay."""
    cores = sorted(os.sched_getaffinity(0))
    started: list[ChildProcess] = []

    async def start(name: str, *, core: int, blocks: int, buffer_steps: int = 10_000) -> Engine:
        port, events, replay = free_ports(3)
        kv_events: dict[str, object] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
            "topic": "kv",
            "buffer_steps": buffer_steps,
        }
        spec = VllmSpec(
            model=str(model_folder),
            served_name=MODEL,
            host="127.0.0.1",
            port=port,
            placement=CpuPlacement((cores[core % len(cores)],), kv_cache_gib=1),
            block_size=BLOCK_SIZE,
            num_gpu_blocks=blocks + 1,  # the engine keeps one for itself
            max_model_len=min(4096, blocks * BLOCK_SIZE),
            random_weights=True,
            offline=True,
            eager=True,
            tool_call_parser="hermes",
            store_responses=True,
            development_mode=True,
            extra_args=(
                *("--structured-outputs-config", STRUCTURED),
                *("--kv-events-config", json.dumps(kv_events)),
            ),
        )
        argv = vllm_argv(spec, (str(engine_venv.script("vllm")),))
        env = vllm_environment(spec, separate_environment(os.environ))
        process = ChildProcess(ChildSpec(name, argv, env, logs / f"{name}.log"), SystemClock())
        started.append(process)
        await process.start()
        engine = Engine(name, spec.url, process, blocks, http)
        await engine.ready()
        return engine

    # vLLM closes a connection that was idle for 5 s, perhaps as the next question comes: no keep-alive.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=limits) as http:
        yield start
        await asyncio.gather(*(process.stop() for process in started if process.running))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(start_engine: StartEngine) -> list[Engine]:
    """Two workers on a core each. A pool holds 65% of what the chats of `SHAPE` need together."""
    starting = [start_engine(name, core=core, blocks=POOL_BLOCKS) for core, name in enumerate("ab")]
    return list(await asyncio.gather(*starting))


@pytest.fixture(scope="session")
def run_gateway(logs: Path) -> StartGateway:
    """`(workers, strategy, *options)` -> an async context manager: a gateway in front of them, ready."""

    @asynccontextmanager
    async def run(workers: Sequence[Engine], strategy: str, *options: str) -> AsyncIterator[Gateway]:
        (port,) = free_ports(1)
        argv = [sys.executable, "-m", "kvroute", "serve", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--strategy", strategy, *options]
        for engine in workers:
            argv += ["--worker", f"{engine.name}={engine.url}"]
        env = {**os.environ, "KVROUTE__ADMIN__API_KEY": ADMIN_KEY}
        spec = ChildSpec("gateway", tuple(argv), env, logs / f"gateway-{port}.log")
        async with ChildProcess(spec, SystemClock()) as process:
            url = f"http://127.0.0.1:{port}"
            await process.wait_ready(f"{url}/ready", timeout_s=GATEWAY_READY_S)
            yield Gateway(url, process)

    return run


@pytest.fixture(scope="session")
def start_gateway(engines: list[Engine], run_gateway: StartGateway) -> StartGateway:
    """`(strategy, *options)` -> an async context manager: a gateway in front of `engines`."""

    @asynccontextmanager
    async def start(strategy: str = "prefixaware", *options: str) -> AsyncIterator[Gateway]:
        async with run_gateway(engines, strategy, *options) as gateway:
            await both_routable(gateway.url, len(engines))
            yield gateway

    return start


async def both_routable(url: str, count: int) -> None:
    """Wait until the gateway at `url` has `count` healthy workers, and nothing more to say of them: their
    caches are followed and their tokens known, where its strategy asks for that."""
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(GATEWAY_READY_S):
        while True:
            ready = (await http.get(f"{url}/ready")).json()
            if [*ready["workers"].values()].count("healthy") >= count and not ready["notes"]:
                return
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateway(start_gateway: StartGateway) -> AsyncIterator[Gateway]:
    """One gateway with the default strategy, shared by the tests that only talk through it."""
    async with start_gateway() as running:
        yield running


@pytest.fixture(scope="session")
def words(model_folder: Path) -> list[str]:
    """Words that are one token each when they follow another."""
    vocabulary = json.loads((model_folder / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(entry.replace("Ġ", " ") for entry in vocabulary if re.fullmatch("Ġ[a-z]{4,}", entry))


@pytest.fixture(scope="session")
def chat_shape() -> ChatShape:
    return SHAPE


@pytest.fixture(scope="session")
def hold_chats(words: list[str]) -> Callable[..., Awaitable[list[Turn]]]:
    """`(base_url, shape, seed)` -> hold the chats, all at once, and return every turn."""

    async def hold(base_url: str, *, seed: int, shape: ChatShape = SHAPE) -> list[Turn]:
        common = _text(random.Random(f"common {seed}"), words, shape.common_tokens)
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(limits=limits, timeout=REQUEST_TIMEOUT_S, trust_env=False) as http,
            openai.AsyncOpenAI(
                base_url=f"{base_url}/v1", api_key="unused", max_retries=0, http_client=http
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            chats = [
                group.create_task(
                    _chat(client, shape, words, common, number, random.Random(f"{seed} {number}"))
                )
                for number in range(shape.chats)
            ]
        return [turn for chat in chats for turn in chat.result()]

    return hold


async def _chat(
    client: openai.AsyncOpenAI,
    shape: ChatShape,
    words: list[str],
    common: str,
    number: int,
    chooser: random.Random,
) -> list[Turn]:
    own = _text(chooser, words, shape.system_tokens - shape.common_tokens)
    messages = [{"role": "system", "content": common + own}]
    turns = []
    for _ in range(shape.turns):
        await asyncio.sleep(chooser.random())  # the reader thinks
        messages.append({"role": "user", "content": _text(chooser, words, shape.turn_tokens)})
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=shape.answer_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        answer, usage = "", None
        async for chunk in raw.parse():
            if chunk.choices:
                answer += chunk.choices[0].delta.content or ""
            usage = chunk.usage or usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        messages.append({"role": "assistant", "content": answer})
        worker = raw.headers.get("x-kvroute-worker", "")
        cached = usage.prompt_tokens_details.cached_tokens or 0
        turns.append(Turn(number, worker, usage.prompt_tokens, cached, usage.completion_tokens))
    return turns


@pytest.fixture(scope="session")
def chats_through(
    engines: list[Engine], start_gateway: StartGateway, hold_chats: Callable[..., Awaitable[list[Turn]]]
) -> Callable[..., Awaitable[list[Turn]]]:
    """`(strategy, seed, shape)` -> every turn of those chats through a new gateway, on workers with
    empty caches. Asked again for the same, it answers from memory."""
    known: dict[tuple[str, int, ChatShape], list[Turn]] = {}

    async def measure(strategy: str, seed: int, shape: ChatShape = SHAPE) -> list[Turn]:
        key = strategy, seed, shape
        if key not in known:
            for engine in engines:
                await engine.forget()
            async with start_gateway(strategy) as gateway:
                known[key] = await hold_chats(gateway.url, seed=seed, shape=shape)
        return known[key]

    return measure


def _text(chooser: random.Random, words: list[str], count: int) -> str:
    return "".join(chooser.choices(words, k=count))


@pytest.fixture(scope="session")
def run_endpoint(engine_venv: EngineVenv, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return endpoints(engine_venv.path, logs, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Prompts for endpoints that serve the model `small`."""
    return prompts(tmp_path_factory.mktemp("words") / "small")


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints although output is captured: figures."""

    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    return line
