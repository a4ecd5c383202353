"""Real vLLM workers on CPU cores, the gateway as a subprocess, and a workload of chats.

Tests share engines (pool.py); a gateway is cheap, and a test that depends on the gateway's history or map
starts its own gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from tests.engine.endpoints import ADMIN_KEY, WITHOUT_SAMPLES, Run, endpoints, prompts
from tests.engine.forging import Forging
from tests.engine.pool import (
    MOST_ENGINES,
    REQUEST_TIMEOUT_S,
    TINY,
    Engine,
    EngineKind,
    EnginePool,
    Site,
    client,
    start,
)

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import DEFAULT_PATH, EngineVenv
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec

MODEL = "tiny"
BLOCK_SIZE = 32
GATEWAY_READY_S = 30.0
AHEAD = 3
"""The pool starts the engines of so many tests ahead."""


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
SEED_SETS = [
    pytest.param((1,), id="one seed"),
    pytest.param((1, 2, 3), id="three seeds", marks=pytest.mark.full),
]
"""For tests that measure: CI measures once."""
POOL_SHARE = 0.65
POOL_BLOCKS = round(POOL_SHARE * SHAPE.blocks)
PAIR = (EngineKind(blocks=POOL_BLOCKS), EngineKind(blocks=POOL_BLOCKS, core=1, number=1))
"""The engines of most tests."""


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
class Gateway:
    """A running gateway."""

    url: str
    process: ChildProcess

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=REQUEST_TIMEOUT_S
        )


POOL = pytest.StashKey[EnginePool]()
StartEngine = Callable[..., Awaitable[Engine]]
StartGateway = Callable[..., AbstractAsyncContextManager[Gateway]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-order",
        metavar="SEED",
        help="run the modules with engine tests in a random order, and the tests of each in one, too",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle, if asked to. A module's tests stay together, because they share what is expensive to start."""
    seed = config.getoption("--random-order", None)
    if seed is not None:
        chooser = random.Random(seed)
        modules: dict[Path, list[pytest.Item]] = {}
        for item in items:
            modules.setdefault(item.path, []).append(item)
        shuffled = [chooser.sample(tests, len(tests)) for tests in modules.values()]
        chooser.shuffle(shuffled)
        items[:] = [item for tests in shuffled for item in tests]


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
def model_folder(pool: EnginePool) -> Path:
    return pool.site.model_folder(TINY)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def pool(
    request: pytest.FixtureRequest, engine_venv: EngineVenv, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnginePool]:
    """The engines that tests share (pool.py)."""
    folder = tmp_path_factory.mktemp("engines")
    forging = Forging(engine_venv, folder)
    with EnginePool(Site(engine_venv, forging.venv, folder), forging.started) as made:
        request.session.stash[POOL] = made
        yield made
        del request.session.stash[POOL]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def forged_venv(pool: EnginePool) -> EngineVenv:
    """An engine environment whose `python`, `vllm` and `lmcache` are forked from a process that has imported
    them (forge.py)."""
    await pool.forged()
    return pool.site.forged


@pytest_asyncio.fixture(loop_scope="session")
async def leased(request: pytest.FixtureRequest, pool: EnginePool) -> AsyncIterator[list[Engine]]:
    """The shared engines of the kinds that `@pytest.mark.engines(...)` names."""
    async with pool.lease(marked_kinds(request.node)) as engines:
        yield engines


@pytest_asyncio.fixture(loop_scope="session")
async def start_engine(pool: EnginePool) -> AsyncIterator[StartEngine]:
    """`(kind, name)` -> an engine that belongs to the test alone, and ends with it."""
    async with client() as http, AsyncExitStack() as owned:

        async def begin(kind: EngineKind, name: str) -> Engine:
            await pool.forged()
            engine = await start(pool.site, kind, name, http)
            owned.push_async_callback(engine.process.stop)
            return engine

        yield begin


@pytest_asyncio.fixture(loop_scope="session")
async def engines(pool: EnginePool) -> AsyncIterator[list[Engine]]:
    """Two shared workers `a` and `b` on a core each. A worker holds 65% of what the chats of `SHAPE` need
    together."""
    async with pool.lease(PAIR) as engines:
        yield named(engines)


@pytest_asyncio.fixture(loop_scope="session")
async def own_engines(start_engine: StartEngine) -> list[Engine]:
    """As `engines`, for a test that ends or restarts them."""
    return list(
        await asyncio.gather(*(start_engine(kind, name) for kind, name in zip(PAIR, "ab", strict=True)))
    )


def named(engines: list[Engine]) -> list[Engine]:
    for engine, name in zip(engines, "ab", strict=True):
        engine.name = name
    return engines


def marked_kinds(item: pytest.Item) -> list[EngineKind]:
    return [kind for marker in item.iter_markers("engines") for kind in marker.args]


def kinds_of(item: pytest.Item) -> list[EngineKind]:
    """The kinds of all shared engines that a test uses."""
    fixtures = getattr(item, "fixturenames", ())
    return [*marked_kinds(item), *(PAIR if {"engines", "gateway"} & {*fixtures} else ())]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Let the pool start what the next tests need while this one runs."""
    pool = item.session.stash.get(POOL, None)
    if pool is not None:
        if hasattr(
            item.config, "workerinput"
        ):  # pytest-xdist: other processes run some of the session's tests
            coming = [each for each in (item, nextitem) if each is not None]
        else:
            place = item.session.items.index(item)
            coming = item.session.items[place : place + AHEAD]
        wanted = [kind for each in coming for kind in kinds_of(each)]
        pool.want([*dict.fromkeys(wanted)][:MOST_ENGINES])
    return (yield)


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
        env = {**WITHOUT_SAMPLES, **os.environ, "KVROUTE__ADMIN__API_KEY": ADMIN_KEY}
        spec = ChildSpec("gateway", tuple(argv), env, logs / f"gateway-{port}.log")
        async with ChildProcess(spec, SystemClock()) as process:
            url = f"http://127.0.0.1:{port}"
            await process.wait_ready(f"{url}/ready", timeout_s=GATEWAY_READY_S)
            yield Gateway(url, process)

    return run


@pytest.fixture
def start_gateway(engines: list[Engine], run_gateway: StartGateway) -> StartGateway:
    """`(strategy, *options)` -> an async context manager: a gateway in front of `engines`."""

    @asynccontextmanager
    async def start(strategy: str = "prefixaware", *options: str) -> AsyncIterator[Gateway]:
        async with routable_gateway(run_gateway, engines, strategy, *options) as gateway:
            yield gateway

    return start


@asynccontextmanager
async def routable_gateway(
    run_gateway: StartGateway, engines: Sequence[Engine], strategy: str = "prefixaware", *options: str
) -> AsyncIterator[Gateway]:
    async with run_gateway(engines, strategy, *options) as gateway:
        await both_routable(gateway.url, len(engines))
        yield gateway


async def both_routable(url: str, count: int, known: Sequence[str] = ()) -> None:
    """Wait until the gateway at `url` has `count` healthy workers, and nothing more to say of them: their
    caches are followed and their tokens known, where its strategy asks for that. Notes with one of the texts
    in `known` are expected."""
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(GATEWAY_READY_S):
        while True:
            ready = (await http.get(f"{url}/ready")).json()
            if [*ready["workers"].values()].count("healthy") >= count and not [
                note for note in ready["notes"] if not any(text in note for text in known)
            ]:
                return
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(pool: EnginePool, run_gateway: StartGateway) -> AsyncIterator[Gateway]:
    """One gateway with the default strategy before the engines of `engines`, shared by a module's tests that
    only talk through it."""
    engines = named([replace(await pool.running(kind)) for kind in PAIR])
    async with routable_gateway(run_gateway, engines) as running:
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
def known_chats() -> dict[tuple[str, int, ChatShape], list[Turn]]:
    """The memory of `chats_through`."""
    return {}


@pytest.fixture
def chats_through(
    engines: list[Engine],
    start_gateway: StartGateway,
    hold_chats: Callable[..., Awaitable[list[Turn]]],
    known_chats: dict[tuple[str, int, ChatShape], list[Turn]],
) -> Callable[..., Awaitable[list[Turn]]]:
    """`(strategy, seed, shape)` -> every turn of those chats through a new gateway, on workers with
    empty caches. Asked again for the same, it answers from memory."""
    known = known_chats

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
def run_endpoint(forged_venv: EngineVenv, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Endpoints whose engines and LMCache servers are forked."""
    return endpoints(forged_venv.path, logs, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def run_real_endpoint(engine_venv: EngineVenv, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Endpoints as a user has them: every program is started by itself."""
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
