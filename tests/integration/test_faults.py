"""Parts that only help routing die and come back; requests are answered throughout."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from tests.support.clocks import SteppedClock
from tests.support.programs import program
from tests.support.sockets import free_port, tcp_server
from tests.support.waiting import until
from tests.support.workers import ScriptedWorker, scripted_worker

from kvroute.blocks.chunks import ChunkScheme, chunk_names
from kvroute.fleet.worker import HealthState
from kvroute.lmcache.l2_redis import object_name
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault

MODEL = "sim-model"
CHUNK = 16
RANK = 0x01000100
"""`kv_rank` of the only rank of a model in LMCache's names."""
LENGTH = 200
WHOLE = LENGTH // CHUNK * CHUNK


@pytest.fixture
def lane() -> str:
    """The way into the gateway does not matter here."""
    return "fast lane"


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + LENGTH))


def names(number: int) -> list[bytes]:
    return list(chunk_names(prompt(number), ChunkScheme(chunk_tokens=CHUNK)))


async def complete(running, ids: list[int], model: str = MODEL) -> httpx.Response:
    body = {"model": model, "prompt": ids, "max_tokens": 2}
    answer = await running.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def chat(running, text: str) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = await running.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def explained(running, number: int) -> dict[str, Any]:
    """The ranking's first worker for a prompt, without a request."""
    body = {"model": MODEL, "prompt": prompt(number), "max_tokens": 2}
    answer = await running.client.post("/v1/route/explain", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["ranking"][0])


async def tiers(running, number: int) -> dict[str, int]:
    return dict((await explained(running, number))["tiers"])


async def notes(running) -> list[str]:
    """The notes of `/ready`, which stays 200: a worse choice of worker is no reason to take no requests."""
    answer = await running.client.get("/ready")
    assert answer.status_code == 200
    return [note for note in answer.json()["notes"] if "'held'" not in note]


async def until_ready(running) -> None:
    await running.until_healthy(1)

    async def is_ready() -> bool:
        return not await notes(running)

    await until(is_ready)


def worker_of(held: ScriptedWorker) -> dict[str, str]:
    return {"id": "held", "url": held.url}


@asynccontextmanager
async def stream_through(running, held: ScriptedWorker) -> AsyncIterator[None]:
    """A stream that begins before the block, runs while it runs, and ends after it."""
    held.may_finish.clear()
    body = {"model": "held", "prompt": "hi", "stream": True}
    async with running.client.stream("POST", "/v1/completions", json=body) as answer:
        chunks = answer.aiter_bytes()
        received = await anext(chunks)
        yield
        assert running.metric("kvroute_requests_in_flight") == 1
        held.may_finish.set()
        async for chunk in chunks:
            received += chunk
    assert received == b"data: 1\n\ndata: [DONE]\n\n"


@pytest.fixture
async def held() -> AsyncIterator[ScriptedWorker]:
    """A worker of the model `held`; its streams stop in the middle while `may_finish` is not set."""
    async with scripted_worker({"id": "held", "object": "model"}) as worker:
        worker.answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 23\r\n\r\n"
        worker.answer += b"data: 1\n\n"
        worker.rest = b"data: [DONE]\n\n"
        worker.may_finish.set()
        yield worker


def sections(**lmcache: Any) -> dict[str, Any]:
    coordinator = {"enabled": True, "listen": "127.0.0.1:0", "chunk_tokens": CHUNK}
    return {
        "routing": {"strategy": "kvaware"},
        "tokens": {"timeout_ms": 10_000, "computed_samples": False},
        "lmcache": {"coordinator": {**coordinator, **lmcache.pop("coordinator", {})}, **lmcache},
    }


class LMCacheServer:
    """The LMCache server of worker `w0`. Mutable: `incarnation` rises with each start."""

    def __init__(self) -> None:
        self.incarnation = 1000
        self._seq = 0
        self.coordinator = ""
        self._port = 0
        self._heartbeats: asyncio.Task[None] | None = None
        self._sockets = AsyncExitStack()
        self._client: httpx.AsyncClient

    async def start(self, coordinator: str) -> None:
        self.coordinator = coordinator
        self._client = await self._sockets.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{coordinator}", trust_env=False)
        )
        self._port = await self._sockets.enter_async_context(tcp_server(self._serve, port=self._port))
        self.incarnation, self._seq = self.incarnation + 1, 0
        await self._post("/instances", {"instance_id": "w0", "ip": "127.0.0.1", "http_port": self._port})
        self._heartbeats = asyncio.create_task(self._send_heartbeats())

    async def die(self) -> None:
        """No heartbeat, no answer and no goodbye."""
        assert self._heartbeats is not None
        self._heartbeats.cancel()
        await asyncio.gather(self._heartbeats, return_exceptions=True)
        await self._sockets.aclose()

    async def report(self, number: int, tier: str) -> None:
        """Report the chunks of a prompt as stored."""
        self._seq += 1
        key = {"model_name": MODEL, "kv_rank": RANK, "object_group_id": 0, "cache_salt": ""}
        entries = [{"key": key | {"chunk_hash_hex": name.hex()}, "size_bytes": 1} for name in names(number)]
        batch = {
            "instance_id": "w0",
            "incarnation": self.incarnation,
            "seq": self._seq,
            "event_type": "store",
            "tier": tier,
            "backend": "resp" if tier == "l2" else "dram",
            "entries": entries,
            "shared": tier == "l2",
        }
        assert (await self._post("/events", {"batches": [batch]}))["applied"] == 1

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            await self._post("/instances/w0/heartbeat", {}, "PUT")

    async def _post(self, path: str, body: dict[str, Any], method: str = "POST") -> dict[str, Any]:
        answer = await self._client.request(method, path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


@pytest.fixture
async def lmcache() -> AsyncIterator[LMCacheServer]:
    server = LMCacheServer()
    yield server
    await server.die()


class RedisServer:
    """A real Redis, which the test stops, kills and starts. Mutable: its process."""

    def __init__(self, program: str, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://:hunter2@127.0.0.1:{self.port}/0"
        self._argv = [program, "--port", str(self.port), "--save", "", "--dir", str(folder)]
        self._argv += ["--requirepass", "hunter2"]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, *prompts: int) -> None:
        """Start with the chunks of these prompts; with a process that runs, only add them."""
        if self._process is None:
            self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL)
        async with redis.asyncio.Redis.from_url(self.url) as client:

            async def stored() -> bool:
                assert self._process is not None
                assert self._process.poll() is None
                try:
                    objects = {object_name(MODEL, RANK, 0, name, ""): b"kv" for name in self._names(prompts)}
                    return bool(await client.mset(objects))
                except redis.exceptions.ConnectionError:
                    return False

            await until(stored)

    def _names(self, prompts: tuple[int, ...]) -> list[bytes]:
        return [name for number in prompts for name in names(number)]

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(program("redis-server", "valkey-server"), tmp_path)
    yield server
    server.kill()


@pytest.mark.parametrize("death", ["killed", "frozen"])
async def test_without_its_redis_the_gateway_predicts_l2_by_events(
    run_gateway, instant_sim, held, lmcache, store, caplog, death
) -> None:
    """Prompt 1 is in Redis and reported by events, prompt 2 is in Redis only."""
    caplog.set_level(logging.INFO)
    l2 = {"redis_url": store.url, "remember_s": 0, "timeout_ms": 1000.0}
    await store.start(1, 2)
    async with run_gateway([instant_sim.url, worker_of(held)], **sections(l2=l2)) as running:
        await until_ready(running)
        await lmcache.start(running.runtime.cache_tracker.lmcache.coordinator_address)
        await lmcache.report(1, "l2")
        assert (await tiers(running, 1))["l2"] == (await tiers(running, 2))["l2"] == WHOLE

        async with stream_through(running, held):
            failed = running.metric("kvroute_l2_failures_total")
            store.kill() if death == "killed" else store.send(signal.SIGSTOP)
            assert (await tiers(running, 1))["l2"] == WHOLE
            assert (await tiers(running, 2))["l2"] == 0
            await complete(running, prompt(3))
            cause = "unreachable" if death == "killed" else "deadline"
            assert running.metric("kvroute_l2_failures_total") == failed + 3
            assert running.metric("kvroute_l2_failures_total", cause=cause) >= 3
            assert f"L2: lookups in Redis fail: {cause}" in await notes(running)

        if death == "killed":
            await store.start(1, 2)
        else:
            store.send(signal.SIGCONT)

        async def healed() -> bool:
            return (await tiers(running, 2))["l2"] == WHOLE

        await until(healed)
        assert not await notes(running)
    told = [record.message for record in caplog.records if record.name == "kvroute.lmcache.l2_redis"]
    assert len(told) == 2
    assert told[0].startswith(f"lookup in the Redis of lmcache.l2.redis_url failed: {cause}")
    assert told[1] == "lookups in the Redis of lmcache.l2.redis_url succeed again"
    assert "hunter2" not in caplog.text


async def test_an_lmcache_server_that_dies_leaves_the_map_and_comes_back(
    run_gateway, instant_sim, held, lmcache, caplog
) -> None:
    """Its memory is lost; what it reported of L2 stays."""
    config = sections(coordinator={"heartbeat_timeout_s": 10})
    async with run_gateway([instant_sim.url, worker_of(held)], **config) as running:
        await until_ready(running)
        await lmcache.start(running.runtime.cache_tracker.lmcache.coordinator_address)
        await lmcache.report(1, "l1")
        await lmcache.report(2, "l2")
        assert (await tiers(running, 1))["l1"] == WHOLE

        async with stream_through(running, held):
            await lmcache.die()
            await until(lambda: running.metric("kvroute_lmcache_servers_expired_total") == 1, within_s=60)
            assert (await tiers(running, 1))["l1"] == 0
            await complete(running, prompt(3))
            assert running.metric("kvroute_lmcache_servers") == 0
            assert "LMCache server w0 was removed: no heartbeat in time" in caplog.text

        await lmcache.start(lmcache.coordinator)
        await lmcache.report(1, "l1")
        await lmcache.report(2, "l2")
        assert await tiers(running, 1) == {"gpu": 0, "l1": WHOLE, "l2": 0}
        assert (await tiers(running, 2))["l2"] == WHOLE
        assert not await notes(running)


class Line:
    """Passes TCP connections to `target` on, until it is cut. Mutable: `cut` and `mend`."""

    def __init__(self, target: str) -> None:
        self._target = target.removeprefix("tcp://").rsplit(":", 1)
        self._sockets = AsyncExitStack()
        self._port = 0

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    async def mend(self) -> None:
        self._port = await self._sockets.enter_async_context(tcp_server(self._serve, port=self._port))

    async def cut(self) -> None:
        """Reset the connections and refuse new ones."""
        await self._sockets.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._target[0], int(self._target[1]))
        try:
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            back.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError


async def test_an_event_stream_that_is_cut_costs_its_workers_map_until_it_is_back(
    run_gateway, held, caplog
) -> None:
    """`w0` is then ranked by what was sent to it. What it has stored meanwhile is replayed."""
    async with AsyncExitStack() as stack:
        sims = [await stack.enter_async_context(run_sim(SimOptions(time_scale=0))) for _ in range(2)]
        publisher = sims[0].worker.publisher
        assert publisher is not None
        lines = [Line(publisher.endpoint), Line(publisher.replay_endpoint)]
        for each in lines:
            await each.mend()
            stack.push_async_callback(each.cut)
        publisher.endpoint, publisher.replay_endpoint = (each.address for each in lines)
        config = sections()
        config["kv_events"] = {"idle_check_s": 0.1, "replay_timeout_s": 0.1, "retry_s": 0.1}
        # Without blocks of samples, so that held blocks are those of the prompt.
        config["tokens"] = {**config.get("tokens", {}), "computed_samples": False}
        workers = [*(sim.url for sim in sims), worker_of(held)]
        async with run_gateway(workers, **config) as running:
            await until_ready(running)
            await running.until(lambda: _cause(running, "w0") == _cause(running, "w1") == "")
            await _direct(sims[0], prompt(1))
            await running.until(lambda: running.runtime.cache_tracker.describe()["held_blocks"] > 0)
            assert (await complete(running, prompt(1))).headers["x-kvroute-reason"] == "kv_hit"

            async with stream_through(running, held):
                for each in lines:
                    await each.cut()
                await running.until(lambda: _cause(running, "w0") == "replaying")
                assert "kvaware: worker 'w0': replaying" in await notes(running)
                answer = await complete(running, prompt(1))
                assert answer.headers["x-kvroute-worker"] == "w0"
                first = await explained(running, 1)
                assert (first["worker"], first["map"]) == ("w0", "replaying")
                assert first["believed_from"] == "what was sent there"
                await _direct(sims[0], prompt(2))
                assert (await explained(running, 2))["tiers"]["gpu"] == 0
                assert running.metric("kvroute_map_trust", worker="w0", cause="replaying") == 1
                line = "KV events of w0 rank 0: its map is not used: replaying"
                await running.until(lambda: line in caplog.text)  # the stream's task logs it a moment later

            for each in lines:
                await each.mend()
            await running.until(lambda: _cause(running, "w0") == "")
            best = await explained(running, 2)
            assert (best["worker"], best["tiers"]["gpu"]) == ("w0", WHOLE)
            assert (await complete(running, prompt(2))).headers["x-kvroute-reason"] == "kv_hit"
            assert not await notes(running)
    assert "KV events of w1" not in caplog.text


def _cause(running, worker: str) -> str | None:
    """Why the worker's map is not used; "" if it is, None before its stream is known."""
    places = running.runtime.cache_tracker.describe()["workers"].get(worker)
    return None if not places else places[0]["why"] or ""


async def _direct(sim: RunningSim, ids: list[int]) -> None:
    """A request that bypasses the gateway."""
    async with httpx.AsyncClient(base_url=sim.url, trust_env=False) as client:
        body = {"model": MODEL, "prompt": ids, "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("fault", "cause"), [({"kind": "status", "status": 500}, "worker_failed"), ({"kind": "hang"}, "late")]
)
async def test_without_a_tokenizer_requests_are_routed_by_what_was_sent_where(
    run_gateway, held, caplog, fault, cause
) -> None:
    caplog.set_level(logging.INFO)
    async with AsyncExitStack() as stack:
        sims = [await stack.enter_async_context(run_sim(SimOptions(time_scale=0))) for _ in range(2)]
        config = sections() | {"tokens": {"timeout_ms": 500 if cause == "late" else 10_000}}
        async with run_gateway([*(sim.url for sim in sims), worker_of(held)], **config) as running:
            await until_ready(running)

            async def is_exact() -> bool:
                return (await chat(running, TEXT)).headers["x-kvroute-reason"] == "kv_hit"

            await until(is_exact)  # not the first time: it is a miss, or late on a slow machine
            worker = (await chat(running, TEXT)).headers["x-kvroute-worker"]

            async with stream_through(running, held):
                for sim in sims:
                    sim.worker.faults.add(Fault(path="/tokenize", count=None, **fault))
                failed = running.metric("kvroute_inexact_prompts_total", cause=cause)
                for _ in range(3):
                    answer = await chat(running, TEXT)
                    assert answer.headers["x-kvroute-reason"] == "kv_approximate"
                    assert answer.headers["x-kvroute-worker"] == worker
                assert running.metric("kvroute_inexact_prompts_total", cause=cause) == failed + 3
                note = f"kvaware: no exact tokens of the last prompts for 'sim-model': {cause}"
                assert note in await notes(running)
                assert f"got no exact tokens ({cause}), and are routed by the route history" in caplog.text

            for sim in sims:
                sim.worker.faults.clear()
            await until(is_exact)
            assert not await notes(running)
    assert "kvaware: prompts for sim-model get exact tokens again" in caplog.text


TEXT = "word " * 500


@pytest.mark.parametrize("fault", [{"kind": "status", "status": 500}, {"kind": "reset"}])
async def test_workers_that_all_fail_stay_in_routing(run_gateway, caplog, fault) -> None:
    """At most half of them are ejected, so the first request after the fault is answered."""
    async with AsyncExitStack() as stack:
        sims = [await stack.enter_async_context(run_sim(SimOptions(time_scale=0))) for _ in range(4)]
        health = {"burst_failures": 2, "backoff_s": 600}
        workers = [sim.url for sim in sims]
        async with run_gateway(workers, fleet={"health": health}, retries={"budget_percent": 0}) as running:
            for sim in sims:
                sim.worker.faults.add(Fault(path="/v1/completions", count=None, **fault))
            numbers = itertools.count()  # one prompt again and again would be refused, as it loses workers

            async def ask() -> httpx.Response:
                body = {"model": MODEL, "prompt": f"hi {next(numbers)}", "max_tokens": 2}
                return await running.client.post("/v1/completions", json=body)

            async def is_held_back() -> bool:
                answer = await ask()
                assert answer.status_code in (500, 502)
                return running.metric("kvroute_worker_ejections_held_back_total") > 0

            await until(is_held_back)
            assert running.runtime.fleet.states()[HealthState.HEALTHY] == 2
            assert "stays in routing despite a burst of failures" in caplog.text
            for sim in sims:
                sim.worker.faults.clear()
            assert (await ask()).status_code == 200


YEAR_S = 365 * 86_400.0


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
async def test_a_jump_of_the_wall_clock_ends_no_request_and_refills_no_limit(
    run_gateway, instant_sim, held, tmp_path, jump_s
) -> None:
    """Only what has a date ends by the wall clock: here a key that expires in half a year."""
    clock = SteppedClock()
    expires = datetime.fromtimestamp(clock.wall() + YEAR_S / 2, UTC)
    keys = {
        "all": {},
        "limited": {"limits": {"requests_per_minute": 1}},
        "dated": {"expires": expires.isoformat()},
    }
    file = tmp_path / "keys.json"
    entries = [{"name": name, "hash": _hash(name), **more} for name, more in keys.items()]
    file.write_text(json.dumps({"keys": entries}))
    config = {"server": {"client_keys": {"file": str(file)}}}

    async def status(key: str) -> int:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        headers = {"authorization": f"Bearer {key}"}
        return (await running.client.post("/v1/completions", json=body, headers=headers)).status_code

    workers = [instant_sim.url, worker_of(held)]
    async with run_gateway(workers, clock=clock, **config) as running:
        running.client.headers["authorization"] = "Bearer all"
        assert [await status(key) for key in ("all", "limited", "limited", "dated")] == [200, 200, 429, 200]

        async with stream_through(running, held):
            clock.ahead_s = jump_s
            expected = [200, 429, 401 if jump_s > 0 else 200]
            assert [await status(key) for key in ("all", "limited", "dated")] == expected
            assert running.runtime.fleet.states()[HealthState.HEALTHY] == 2
            clock.ahead_s = 0.0
        assert [await status(key) for key in ("all", "limited", "dated")] == [200, 429, 200]
        await running.until(lambda: running.metric("kvroute_request_duration_seconds_count") > 0)
        assert 0 <= running.metric("kvroute_request_duration_seconds_sum") < 60
        assert running.metric("kvroute_worker_ejections_total") == 0


def _hash(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()
