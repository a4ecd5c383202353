"""Whole endpoints, as `kvroute up -f` runs them: what two engines have computed, and share or do not."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvroute.clock import SystemClock
from kvroute.deploy.ports import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.deploy.state import StateFolder
from kvroute.deploy.tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
READY_S = 600.0
BACK_S = 240.0
# A question to an engine whose LMCache server is gone waits for it for half a minute.
REQUEST_TIMEOUT_S = 180.0
PROMPT_TOKENS, CHUNK_TOKENS, BLOCK_TOKENS = 1500, 64, 32
# The last token is always computed; LMCache keeps whole chunks, as does the engine blocks.
SHARED_TOKENS = (PROMPT_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Answer:
    worker: str
    text: str
    cached_tokens: int


@dataclass(slots=True)
class Endpoint:
    """A running endpoint of two workers, `a` and `b`, each with an LMCache server of its own."""

    url: str
    state: StateFolder
    process: ChildProcess
    http: httpx.AsyncClient

    def told(self, name: str) -> Any:
        state = self.state.read()
        assert state is not None, self.process.last_words()
        return next(each for each in state.processes if each.name == name)

    def pids(self) -> list[int]:
        state = self.state.read()
        assert state is not None
        return [each.pid for each in state.processes if each.pid is not None]

    def server_of(self, worker: str) -> str:
        return f"lmcache-{worker[-1]}"

    async def ask(self, prompt: str) -> Answer:
        body = {"model": "small", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        reply = await self.http.post(f"{self.url}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert usage["prompt_tokens"] == PROMPT_TOKENS
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return Answer(reply.headers["x-kvroute-worker"], reply.json()["choices"][0]["text"], cached)

    async def ask_the_other(self, prompt: str, than: str) -> Answer:
        """The answer of the other worker, while this one is drained."""
        drain = f"{self.url}/admin/workers/{than}/drain"
        drained = (await self.http.post(drain, params={"wait_s": 30})).json()
        assert drained["drained"], drained
        try:
            return await self.ask(prompt)
        finally:
            await self.http.delete(drain)

    async def metric(self, process: str, name: str, **labels: str) -> float:
        """The sum of the samples of a metric that carry `labels`."""
        text = (await self.http.get(f"{self.told(process).url}/metrics")).text
        found = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for shown, value in found if all(each in shown for each in wanted))

    async def until_stored(self, worker: str, chunks: int) -> None:
        """Until the server of `worker` has stored so many chunks in the second tier."""
        name = "lmcache_mp_l2_store_completed_objects_chunks_total"
        async with asyncio.timeout(60):
            while await self.metric(self.server_of(worker), name) < chunks:
                await asyncio.sleep(0.1)

    async def forget(self, worker: str) -> None:
        """Empty the engine's own cache, and leave LMCache's."""
        done = await self.http.post(f"{self.told(worker).url}/reset_prefix_cache")
        assert done.json() == {"success": True}

    async def kill(self, name: str) -> None:
        """SIGKILL it, and wait until it serves again."""
        before = self.told(name).restarts
        (command,) = children(self.told(name).pid)
        os.kill(command, signal.SIGKILL)
        await self.until_restarted(name, before)

    async def until_restarted(self, name: str, before: int) -> None:
        async with asyncio.timeout(BACK_S):
            while self.told(name).restarts == before or self.told(name).phase != "ready":
                await asyncio.sleep(0.1)


Run = Callable[..., AbstractAsyncContextManager[Endpoint]]


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (comm) state ppid ...
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def segments() -> set[str]:
    """Shared memory of engines and caches."""
    names = [file.name for file in Path("/dev/shm").iterdir()]
    return {name for name in names if "lmcache" in name or "tierd" in name}


@pytest.fixture(scope="session")
def run_endpoint(engine_venv, logs, tmp_path_factory) -> Run:
    """`(spec, **changes to kvCacheSpec)` -> an async context manager: the endpoint of one of our specs."""

    @asynccontextmanager
    async def run(spec: str, **changes: object) -> AsyncIterator[Endpoint]:
        folder = tmp_path_factory.mktemp("endpoint")
        file = ROOT / "configs" / spec
        if changes:
            document = yaml.safe_load(file.read_text())
            document["spec"]["kvCacheSpec"] |= changes
            file = folder / spec
            file.write_text(yaml.safe_dump(document))
        (port,) = free_ports(1)
        argv = [sys.executable, "-m", "kvroute", "up", "-f", str(file), "--port", str(port)]
        argv += ["--engine-venv", str(engine_venv.path)]
        # Engines inherit it, and can be told to forget.
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        child = ChildSpec("up", tuple(argv), env, logs / f"{folder.name}.log", folder, stop_grace_s=90.0)
        limits = httpx.Limits(max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=limits) as http,
            ChildProcess(child, SystemClock()) as process,
        ):
            url = f"http://127.0.0.1:{port}"
            await process.wait_ready(f"{url}/ready", timeout_s=READY_S)
            endpoint = Endpoint(url, StateFolder(folder / ".kvroute"), process, http)
            async with asyncio.timeout(60):
                while (await http.get(f"{url}/ready")).text.count('"healthy"') < 2:
                    await asyncio.sleep(0.1)
            yield endpoint

    return run


@pytest.fixture(scope="module")
def prompt(tmp_path_factory) -> Callable[[int], str]:
    """`(seed)` -> a prompt of `PROMPT_TOKENS` tokens that has nothing in common with another seed's."""
    model = write_tiny_model("small", tmp_path_factory.mktemp("words") / "small")
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(entry.replace("Ġ", " ") for entry in vocabulary if re.fullmatch("Ġ[a-z]{4,}", entry))
    return lambda seed: "".join(random.Random(seed).choices(words, k=PROMPT_TOKENS))


async def passed_on_through_l2(endpoint: Endpoint, prompt: str, *, l2_name: str, say) -> Answer:
    """Compute on one worker, ask the other; what came from where, by everybody's own account."""
    first = await endpoint.ask(prompt)
    assert first.cached_tokens == 0
    await endpoint.until_stored(first.worker, SHARED_TOKENS // CHUNK_TOKENS)
    other = next(name for name in workers(endpoint) if name != first.worker)
    hits = ("vllm:external_prefix_cache_hits_total", "vllm:prompt_tokens_by_source_total")
    before = [
        await endpoint.metric(other, hits[0]),
        await endpoint.metric(other, hits[1], source="external_kv_transfer"),
        await endpoint.metric(endpoint.server_of(other), "lmcache_mp_lookup_hit_l2_tokens_total"),
    ]

    second = await endpoint.ask_the_other(prompt, than=first.worker)

    after = [
        await endpoint.metric(other, hits[0]),
        await endpoint.metric(other, hits[1], source="external_kv_transfer"),
        await endpoint.metric(endpoint.server_of(other), "lmcache_mp_lookup_hit_l2_tokens_total"),
    ]
    found = f"{second.worker} found {second.cached_tokens} of {PROMPT_TOKENS} tokens"
    say(f"{l2_name}: computed on {first.worker}; {found}")
    assert second.worker == other
    assert second.cached_tokens == SHARED_TOKENS
    assert [now - then for now, then in zip(after, before, strict=True)] == [SHARED_TOKENS] * 3
    loads = "lmcache_mp_l2_load_completed_requests_total"
    assert await endpoint.metric(endpoint.server_of(other), loads, l2_name=l2_name) >= 1
    assert second.text == first.text
    return first


def workers(endpoint: Endpoint) -> list[str]:
    state = endpoint.state.read()
    assert state is not None
    return [each.name for each in state.processes if re.fullmatch(rf"{state.name}-[ab]", each.name)]


async def served_by_l1(endpoint: Endpoint, prompt: str, worker: str, expected: str) -> None:
    """After the engine has forgotten, its server's own memory has the prompt."""
    hit = "lmcache_mp_lookup_hit_l1_tokens_total"
    before = await endpoint.metric(endpoint.server_of(worker), hit)
    await endpoint.forget(worker)
    other = next(name for name in workers(endpoint) if name != worker)

    answer = await endpoint.ask_the_other(prompt, than=other)

    assert answer.worker == worker
    assert answer.cached_tokens == SHARED_TOKENS
    assert await endpoint.metric(endpoint.server_of(worker), hit) - before == SHARED_TOKENS
    assert answer.text == expected


async def test_redis_passes_on_what_one_worker_has_computed(run_endpoint, prompt, capsys) -> None:
    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    left = segments()
    async with run_endpoint("redis-l2.yaml") as endpoint:
        first = await passed_on_through_l2(endpoint, prompt(1), l2_name="resp", say=say)
        await served_by_l1(endpoint, prompt(1), first.worker, first.text)

        # Any process may die: nothing is lost but time and cache, and the tiers work again afterwards.
        servers = {name: endpoint.told(name).restarts for name in ("lmcache-a", "lmcache-b")}
        await endpoint.kill("redis")
        for name, before in servers.items():
            await endpoint.until_restarted(name, before)
        assert (await endpoint.ask(prompt(2))).text
        await passed_on_through_l2(endpoint, prompt(3), l2_name="resp", say=say)
        await endpoint.kill("lmcache-a")
        await passed_on_through_l2(endpoint, prompt(4), l2_name="resp", say=say)
        pids = endpoint.pids()
    assert endpoint.state.read() is None
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert segments() <= left


async def test_without_a_second_tier_each_worker_computes_for_itself(run_endpoint, prompt) -> None:
    async with run_endpoint("redis-l2.yaml", enableL2Cache=False) as endpoint:
        first = await endpoint.ask(prompt(1))
        second = await endpoint.ask_the_other(prompt(1), than=first.worker)

        assert second.worker != first.worker
        assert (first.cached_tokens, second.cached_tokens) == (0, 0)
        assert second.text == first.text
        await served_by_l1(endpoint, prompt(1), first.worker, first.text)

        # An engine that dies comes back, and finds in its server's memory what it had computed.
        await endpoint.kill(first.worker)
        async with asyncio.timeout(60):
            while (await endpoint.http.get(f"{endpoint.url}/ready")).text.count('"healthy"') < 2:
                await asyncio.sleep(0.1)
        again = await endpoint.ask_the_other(prompt(1), than=second.worker)
        assert (again.worker, again.text) == (first.worker, first.text)
        assert again.cached_tokens == SHARED_TOKENS


async def test_tierd_passes_on_what_one_worker_has_computed(run_endpoint, prompt, capsys) -> None:
    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    left = segments()
    async with run_endpoint("tieredstorage.yaml") as endpoint:
        await passed_on_through_l2(endpoint, prompt(1), l2_name="sagemaker-hyperpod", say=say)
        await endpoint.kill("tierd")
        await passed_on_through_l2(endpoint, prompt(2), l2_name="sagemaker-hyperpod", say=say)
    assert segments() <= left
