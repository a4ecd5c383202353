"""Whole endpoints on this machine, as `kvroute up -f` runs them, and requests to them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvroute.clock import SystemClock
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.deploy.tiny_model import write_tiny_model
from kvroute.deploy.up_state import StateFolder

WITHOUT_SAMPLES = {"KVROUTE__TOKENS__COMPUTED_SAMPLES": "false"}
"""The tests count blocks and chunks: no requests but theirs. A test that needs samples sets the variable."""
ADMIN_KEY = "admin-key-of-the-tests"
ROOT = Path(__file__).parents[2]
READY_S = 600.0
BACK_S = 240.0
# An engine whose LMCache server has ended waits for the server for half a minute.
REQUEST_TIMEOUT_S = 420.0
PROMPT_TOKENS, CHUNK_TOKENS, BLOCK_TOKENS = 1500, 64, 32
# The last token is always computed; LMCache keeps whole chunks, as does the engine blocks.
SHARED_TOKENS = (PROMPT_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Answer:
    """`predicted` is the gateway's prediction of the matched tokens, in all and by tier; `reason` is the
    decision's reason."""

    worker: str
    text: str
    cached_tokens: int
    predicted: int
    tiers: dict[str, int]
    reason: str


@dataclass(slots=True)
class Endpoint:
    """A running endpoint of two workers, `a` and `b`, each with an LMCache server of its own."""

    url: str
    state: StateFolder
    process: ChildProcess
    http: httpx.AsyncClient

    def state_of(self, name: str) -> Any:
        state = self.state.read()
        assert state is not None, self.process.last_log_lines()
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
        text, headers = reply.json()["choices"][0]["text"], reply.headers
        tiers = (each.split("=") for each in headers["x-kvroute-hit-tiers"].split(";"))
        return Answer(
            headers["x-kvroute-worker"],
            text,
            cached,
            int(headers["x-kvroute-hit-tokens"]),
            {name: int(tokens) for name, tokens in tiers},
            headers["x-kvroute-reason"],
        )

    async def explain(self, prompt: str) -> list[dict[str, Any]]:
        """The ranking that the prompt would get now."""
        body = {"model": "small", "prompt": prompt, "max_tokens": 12}
        reply = await self.http.post(f"{self.url}/v1/route/explain", json=body)
        assert reply.status_code == 200, reply.text
        ranking: list[dict[str, Any]] = reply.json()["ranking"]
        return ranking

    async def place(self, prompt: str, worker: str) -> dict[str, Any]:
        """What the gateway thinks of this worker for the prompt."""
        return next(each for each in await self.explain(prompt) if each["worker"] == worker)

    async def until_known(self, prompt: str, worker: str, **tiers: int) -> None:
        """Until the gateway knows that the worker holds just this much of the prompt, by the caches' word."""
        seen: dict[str, Any] = {}
        try:
            async with asyncio.timeout(60):
                while seen.get("tiers") != {"gpu": 0, "l1": 0, "l2": 0, **tiers} or seen["map"] != "whole":
                    await asyncio.sleep(0.1)
                    seen = await self.place(prompt, worker)
        except TimeoutError:
            raise AssertionError(f"{worker} should hold {tiers}, the gateway thinks {seen}") from None

    async def ask_the_other(self, prompt: str, than: str) -> Answer:
        """The answer of the other worker, while this one is drained."""
        async with self.drained(than):
            return await self.ask(prompt)

    def drained(self, worker: str) -> AbstractAsyncContextManager[None]:
        """Meanwhile the gateway sends this worker nothing."""
        return drained(self.http, self.url, worker)

    async def until_queued(self, worker: str, for_s: float) -> None:
        """Until the gateway has sent this worker what a request would wait for so long, as it reckons."""
        async with asyncio.timeout(30):
            while (await self.place("anything", worker))["terms_s"]["wait"] < for_s:
                await asyncio.sleep(0.01)

    async def prefetches(self) -> dict[str, int]:
        """What became of the prefetches that the gateway asked for, by outcome."""
        text = (await self.http.get(f"{self.url}/metrics")).text
        found = re.findall(r'^kvroute_lmcache_prefetches_total\{outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
        return {outcome: int(float(times)) for outcome, times in found if float(times)}

    async def metric(self, process: str, name: str, **labels: str) -> float:
        """The sum of the samples of a metric that carry `labels`."""
        text = (await self.http.get(f"{self.state_of(process).url}/metrics")).text
        found = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for shown, value in found if all(each in shown for each in wanted))

    async def learned(self, worker: str, tier: str, *, other_than: float) -> float:
        """The gateway's bandwidth in GB/s from a tier to a worker, once it is not this one any more."""
        name = "kvroute_tier_bandwidth_bytes_per_second"
        seen = other_than
        async with asyncio.timeout(30):
            while isclose(seen, other_than):
                await asyncio.sleep(0.1)
                text = (await self.http.get(f"{self.url}/metrics")).text
                shown = rf'^{name}\{{(?=.*worker="{worker}")(?=.*tier="{tier}").*\}} (\S+)$'
                (figure,) = re.findall(shown, text, re.MULTILINE)
                seen = float(figure) / 1e9
        return seen

    async def stored(self, worker: str) -> float:
        """How many chunks the server of `worker` has stored in the second tier since it started."""
        return await self.metric(self.server_of(worker), "lmcache_mp_l2_store_completed_objects_chunks_total")

    async def until_stored(self, worker: str, chunks: float) -> None:
        """Wait until the LMCache server of `worker` has stored `chunks` chunks in L2."""
        async with asyncio.timeout(180):
            while await self.stored(worker) < chunks:
                await asyncio.sleep(0.1)

    async def until_used_again(self, server: str, prompts: Iterator[str]) -> None:
        """Wait until the engine of this LMCache server stores there again after the server's restart.
        `prompts` yields prompts that are new to the engine."""
        worker = next(name for name in workers(self) if self.server_of(name) == server)
        while await self.stored(worker) < SHARED_TOKENS // CHUNK_TOKENS:
            body = {"model": "small", "prompt": next(prompts), "max_tokens": 1}
            reply = await self.http.post(f"{self.state_of(worker).url}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            await asyncio.sleep(0.5)

    async def forget(self, worker: str) -> None:
        """Empty the engine's own cache, and leave LMCache's."""
        url = self.state_of(worker).url
        done = await self.http.post(f"{url}/reset_prefix_cache")
        assert done.json() == {"success": True}
        # It says so with its next step (vLLM 0.32).
        step = await self.http.post(
            f"{url}/v1/completions", json={"model": "small", "prompt": [5], "max_tokens": 1}
        )
        assert step.status_code == 200, step.text

    async def clear_l1(self, worker: str) -> None:
        """Empty the memory of its LMCache server."""
        url = f"{self.state_of(self.server_of(worker)).url}/cache/clear"
        (await self.http.post(url, json={"tier": "l1", "force": True})).raise_for_status()

    async def compute_at(self, worker: str, prompt: str) -> None:
        """Ask the worker itself, past the gateway."""
        body = {"model": "small", "prompt": prompt, "max_tokens": 1}
        reply = await self.http.post(f"{self.state_of(worker).url}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text

    async def l1_objects(self, worker: str) -> int:
        """How many objects the memory of its LMCache server holds."""
        url = self.state_of(self.server_of(worker)).url
        manager = (await self.http.get(f"{url}/status")).json()["storage_manager"]["l1_managers"]["_default"]
        return int(manager["total_object_count"] - manager["staging_object_count"])

    async def until_in_l1(self, worker: str) -> None:
        """Until the memory of its LMCache server holds as much as a prompt has."""
        async with asyncio.timeout(60):
            while await self.l1_objects(worker) < SHARED_TOKENS // CHUNK_TOKENS:
                await asyncio.sleep(0.05)

    async def until_healthy(self) -> None:
        async with asyncio.timeout(60):
            while (await self.http.get(f"{self.url}/ready")).text.count('"healthy"') < 2:
                await asyncio.sleep(0.1)

    async def kill(self, name: str) -> None:
        """SIGKILL it, and wait until it serves again."""
        before = self.state_of(name).restarts
        self.shoot(name)
        await self.until_restarted(name, before)

    def shoot(self, name: str) -> None:
        """SIGKILL it."""
        (command,) = children(self.state_of(name).pid)
        os.kill(command, signal.SIGKILL)

    async def until_restarted(self, name: str, before: int) -> None:
        async with asyncio.timeout(BACK_S):
            while self.state_of(name).restarts == before or self.state_of(name).phase != "ready":
                await asyncio.sleep(0.1)


Run = Callable[..., AbstractAsyncContextManager[Endpoint]]


@asynccontextmanager
async def drained(http: httpx.AsyncClient, gateway: str, worker: str) -> AsyncIterator[None]:
    """Meanwhile the gateway at this URL sends this worker nothing."""
    drain = f"{gateway}/admin/workers/{worker}/drain"
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    ended = (await http.post(drain, params={"wait_s": 30}, headers=key)).json()
    assert ended["drained"], ended
    try:
        yield
    finally:
        await http.delete(drain, headers=key)


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


def kept_by_tierd(names: set[str]) -> set[str]:
    """Those of `names` that a daemon leaves for the next one (docs/tierd.md, "Restarts").

    The segment's own name may be missing: an engine with LMCache inside removes it when it ends.
    """
    return {
        name for name in names if re.fullmatch(r"kvroute_tierd_\d+|\.kvroute_tierd_\d+\.(kept|guard)", name)
    }


def endpoints(engine: Path, logs: Path, new_folder: Callable[[str], Path]) -> Run:
    """`(spec, *options of up, settings of the gateway, **changes to kvCacheSpec)` -> an async context
    manager: one of our specs, running. Nothing of it may be left at the end."""

    @asynccontextmanager
    async def run(
        spec: str, *options: str, settings: dict[str, Any] | None = None, **changes: object
    ) -> AsyncIterator[Endpoint]:
        folder = new_folder("endpoint")
        file = ROOT / "configs" / spec
        if changes or settings:
            document = yaml.safe_load(file.read_text())
            document["spec"]["kvCacheSpec"] |= changes
            document["x-kvroute"]["gateway"] = {"settings": settings or {}}
            file = folder / spec
            file.write_text(yaml.safe_dump(document))
        (port,) = free_ports(1)
        argv = [sys.executable, "-m", "kvroute", "up", "-f", str(file), "--port", str(port), *options]
        argv += ["--engine-venv", str(engine)]
        # Engines inherit VLLM_SERVER_DEV_MODE, which adds the route that resets the prefix cache.
        env = {
            **WITHOUT_SAMPLES,
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "KVROUTE__ADMIN__API_KEY": ADMIN_KEY,
        }
        child = ChildSpec("up", tuple(argv), env, logs / f"{folder.name}.log", folder, stop_grace_s=90.0)
        limits = httpx.Limits(max_keepalive_connections=0)
        with nothing_is_left() as left:
            async with (
                httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=limits) as http,
                ChildProcess(child, SystemClock()) as process,
            ):
                url = f"http://127.0.0.1:{port}"
                await process.wait_ready(f"{url}/ready", timeout_s=READY_S)
                endpoint = Endpoint(url, StateFolder(folder / ".kvroute"), process, http)
                await endpoint.until_healthy()
                yield endpoint
                left += endpoint.pids()
            assert endpoint.state.read() is None

    return run


@contextmanager
def nothing_is_left() -> Iterator[list[int]]:
    """Tests append process ids to the list. Afterwards no such process runs and no new shared memory exists,
    except the files of an ended daemon, which this fixture removes."""
    before, pids = segments(), list[int]()
    yield pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    new = segments() - before
    kept = kept_by_tierd(new)
    for name in kept:
        (Path("/dev/shm") / name).unlink()
    assert new == kept


def prompts(folder: Path) -> Callable[[int], str]:
    """`(seed)` -> a prompt of `PROMPT_TOKENS` tokens that has nothing in common with another seed's."""
    model = write_tiny_model("small", folder)
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(entry.replace("Ġ", " ") for entry in vocabulary if re.fullmatch("Ġ[a-z]{4,}", entry))
    return lambda seed: "".join(random.Random(seed).choices(words, k=PROMPT_TOKENS))


async def passed_on_through_l2(endpoint: Endpoint, prompt: str, *, l2_name: str, report) -> Answer:
    """Compute on one worker, ask the other; what came from where, by everybody's own account."""
    stored = {worker: await endpoint.stored(worker) for worker in workers(endpoint)}
    first = await endpoint.ask(prompt)
    assert first.cached_tokens == 0
    await endpoint.until_stored(first.worker, stored[first.worker] + SHARED_TOKENS // CHUNK_TOKENS)
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
    report(f"{l2_name}: computed on {first.worker}; {found}")
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


async def hits(endpoint: Endpoint, worker: str) -> Counter[str]:
    """Tokens that were found so far: by the engine outside of its GPU, as it counts hits and as it counts
    transfers, and by its LMCache server in either tier."""
    server = endpoint.server_of(worker)
    return Counter(
        engine=int(await endpoint.metric(worker, "vllm:external_prefix_cache_hits_total")),
        transfer=int(
            await endpoint.metric(worker, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        ),
        l1=int(await endpoint.metric(server, "lmcache_mp_lookup_hit_l1_tokens_total")),
        l2=int(await endpoint.metric(server, "lmcache_mp_lookup_hit_l2_tokens_total")),
    )


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
