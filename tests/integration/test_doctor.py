"""Broken set-ups: the doctor names each one, and its fix makes the finding disappear.

Simulated workers, real gateways and a real Redis over real sockets.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from tests.integration.conftest import gateway
from tests.support.cache_servers import CacheInstance, CacheServers
from tests.support.programs import program
from tests.support.sockets import free_ports
from tests.support.waiting import until

from kvroute.cli.doctor import examine
from kvroute.clock import SystemClock
from kvroute.config.config import Config
from kvroute.doctor.observations import Finding, Severity, exit_code
from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.options import ControllerOptions
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault, Faults

KVAWARE: dict[str, Any] = {"routing": {"strategy": "kvaware"}, "tokens": {"timeout_ms": 10_000}}


@asynccontextmanager
async def sims(*options: dict[str, Any]) -> AsyncIterator[list[RunningSim]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_sim(SimOptions(time_scale=0, **each))) for each in options]


def configuration(urls: Sequence[str], **sections: Any) -> Config:
    """A gateway on a free port in front of workers w0, w1, ..."""
    workers = [{"id": f"w{number}", "url": url} for number, url in enumerate(urls)]
    return Config.model_validate(
        {
            "server": {"port": 0},
            "admin": {"api_key": "admin-key-of-the-tests"},
            **KVAWARE,
            **sections,
            "fleet": {
                "workers": workers,
                "health": {"interval_s": 0.1, "recheck_s": 0.05, "metrics_interval_s": 0.1},
                **sections.get("fleet", {}),
            },
        }
    )


async def examined(config: Config, **arguments: Any) -> list[Finding]:
    """The findings on a gateway that runs with `config`, without what was not checked."""
    async with gateway(config) as running:
        await until(lambda: running.runtime.fleet.workers())
        await until(lambda: all(each.state.value != "unknown" for each in running.runtime.fleet.workers()))
        _, found, _ = await examine(config, url=running.url, **arguments)
    return found


def codes(found: Sequence[Finding]) -> set[str]:
    return {each.code for each in found if each.severity is not Severity.NOT_CHECKED}


def named(found: Sequence[Finding], code: str) -> Finding:
    """The finding with this code. It names a worker with its URL, a reason and a fix."""
    [first, *_] = [each for each in found if each.code == code]
    assert first.what
    assert first.why
    assert first.fix
    return first


async def test_a_healthy_stack_gets_a_clean_bill():
    async with sims({}, {}) as workers:
        found = await examined(configuration([each.url for each in workers]))

    assert codes(found) == set(), found
    assert {each.code for each in found} <= {"clock"}
    assert exit_code(found) == 0


async def test_a_healthy_stack_with_prefixaware_gets_a_clean_bill():
    async with sims({"kv_events": False}, {"kv_events": False}) as workers:
        config = configuration([each.url for each in workers], routing={"strategy": "prefixaware"})
        found = await examined(config)

    assert codes(found) == set(), found


WORKER_FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "events off": ("events-off", {"kv_events": False}, {}),
    "replay off": ("replay-off", {"replay_endpoint": ""}, {}),
    "old vLLM": ("vllm-version", {"version": "0.9.2"}, {}),
    "prefix caching off": ("prefix-caching-off", {"prefix_caching": False}, {}),
    "tokenizer differs": ("tokenizer-differs", {"token_shift": 1}, {}),
    "block sizes differ": ("block-sizes-differ", {"block_size": 32}, {}),
}
"""Set-up -> the finding's code, the options of the broken second worker, and those with the fix."""


@pytest.mark.parametrize("setup", WORKER_FAULTS)
async def test_a_broken_worker_is_named_until_it_is_started_as_the_fix_says(setup):
    code, broken, fixed = WORKER_FAULTS[setup]
    async with sims({}, broken) as workers:
        found = await examined(configuration([each.url for each in workers]))
        assert workers[1].url in named(found, code).subject
        assert "w1" in named(found, code).subject
        assert codes(found) == {code}, found
    async with sims({}, fixed) as workers:
        found = await examined(configuration([each.url for each in workers]))
    assert codes(found) == set(), found


async def test_a_publisher_that_connects_instead_of_binding_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    async with sims({"event_endpoint": nowhere, "event_connects": True}) as [worker]:
        found = await examined(configuration([worker.url]))
    assert "tcp://*:PORT" in named(found, "events-bound").fix
    assert codes(found) == {"events-bound"}

    async with sims({"event_endpoint": "tcp://*:0"}) as [worker]:
        assert codes(await examined(configuration([worker.url]))) == set()


async def test_a_stream_that_loses_its_events_is_named():
    async with sims({}) as [worker]:
        worker.worker.faults.add(Fault(kind="drop_events", count=None))
        found = await examined(configuration([worker.url]))
        assert named(found, "events-silent")

        worker.worker.faults.clear()
        assert "events-silent" not in codes(await examined(configuration([worker.url])))


class LateSubscription(Faults):
    """A publisher that has not read the doctor's subscription before its pair of prompts was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = 0

    def for_request(self, path: str, body: bytes = b"") -> list[Fault]:
        self.prompts += re.search(rb'"prompt": ?"([a-z] ){9}', body) is not None
        return []

    def for_batch(self) -> list[Fault]:
        return [Fault(kind="drop_events")] if self.prompts <= 2 else []


async def test_a_subscription_that_takes_effect_late_is_no_silent_stream():
    async with sims({}) as [worker]:
        worker.worker.faults = late = LateSubscription()
        assert codes(await examined(configuration([worker.url]))) == set()
        assert late.prompts > 2


async def test_a_worker_whose_url_does_not_serve_metrics_is_named():
    async with sims({}) as [worker]:
        worker.worker.faults.add(Fault(kind="status", status=404, path="/metrics", count=None))
        found = await examined(configuration([worker.url]))
        assert "/metrics answered 404" in named(found, "metrics-port").what

        worker.worker.faults.clear()
        assert codes(await examined(configuration([worker.url]))) == set()


async def test_a_worker_that_refuses_our_key_is_named_and_the_key_is_not_printed():
    async with sims({"api_key": "right-key"}) as [worker]:
        wrong = configuration([worker.url], fleet={"worker_api_key": "wrong-key"})
        found = await examined(wrong)
        assert "refuses the key" in named(found, "worker-key").what
        assert not any("wrong-key" in str(each) for each in found)

        right = configuration([worker.url], fleet={"worker_api_key": "right-key"})
        assert codes(await examined(right)) == set()


async def test_one_worker_under_two_names_is_named():
    async with sims({}) as [worker]:
        twice = [worker.url, worker.url.replace("127.0.0.1", "localhost")]
        found = await examined(configuration(twice))
        assert worker.url in named(found, "same-worker").what

        assert codes(await examined(configuration(twice[:1]))) == set()


async def test_a_dead_worker_is_named_in_words():
    async with sims({}) as [worker]:
        config = configuration([worker.url, "http://127.0.0.1:9"])
        finding = named(await examined(config), "worker-unreachable")

    assert finding.subject == "worker w1 (http://127.0.0.1:9)"
    assert finding.what == "/health refuses connections"


async def test_adapters_with_lmcache_need_their_own_keys():
    async with sims({"loras": {"ada": "sim-model"}}) as [worker]:
        sections = {"lmcache": {"controller": _controller(), "isolate_adapters": False}}
        found = await examined(configuration([worker.url], **sections))
        assert "ada" in named(found, "adapters-share-keys").what

        sections["lmcache"]["isolate_adapters"] = True
        assert "adapters-share-keys" not in codes(await examined(configuration([worker.url], **sections)))


def _controller(**options: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "pull": "127.0.0.1:0",
        "reply": "127.0.0.1:0",
        "heartbeat": "127.0.0.1:0",
        **options,
    }


# --- LMCache ----------------------------------------------------------------------------------------------


async def with_servers(servers: CacheServers, sims_: Sequence[RunningSim]) -> list[Finding]:
    """The findings while these LMCache servers report to the gateway."""
    lmcache = {"coordinator": {"enabled": True, "listen": "127.0.0.1:0"}}
    config = configuration([each.url for each in sims_], lmcache=lmcache)
    async with gateway(config) as running, servers.running():
        await running.until_healthy(len(sims_))
        await servers.join(running.runtime.cache_tracker.lmcache.coordinator_address)
        await until(lambda: not running.runtime.cache_tracker.lmcache.notes() or servers.degraded)
        _, found, _ = await examine(config, url=running.url)
    return found


async def test_healthy_lmcache_servers_get_a_clean_bill():
    async with sims({}, {}) as workers:
        assert codes(await with_servers(CacheServers("w0", "w1"), workers)) == set()


async def test_a_worker_without_an_lmcache_server_is_named():
    async with sims({}, {}) as workers:
        found = await with_servers(CacheServers("w0", "other"), workers)
        assert "w1" in named(found, "lmcache-registered").subject
        assert "--instance-id w1" in named(found, "lmcache-registered").fix


async def test_chunk_sizes_that_do_not_fit_are_named():
    async with sims({}, {}) as workers:
        found = await with_servers(CacheServers("w0", "w1", chunks=(256, 64)), workers)
        assert "64 tokens" in named(found, "chunk-size").what

        found = await with_servers(CacheServers("w0", "w1", chunks=(256, 24)), workers)
        assert "no multiple of the engine's blocks of 16" in named(found, "chunk-size").what

        assert codes(await with_servers(CacheServers("w0", "w1", chunks=(64, 64)), workers)) == set()


async def test_a_degraded_lmcache_server_is_named():
    async with sims({}) as workers:
        found = await with_servers(CacheServers("w0", degraded=True), workers)
        assert "/healthcheck" in named(found, "lmcache-degraded").what

        assert codes(await with_servers(CacheServers("w0"), workers)) == set()


async def test_a_wrong_hash_seed_is_named_until_the_gateway_uses_the_engines_seed():
    """LMCache inside the engine, with PYTHONHASHSEED=7. tests/engine/test_doctor.py has the real one."""
    chunk = 64
    theirs = ControllerOptions(hash_seed="7", chunk_tokens=chunk)
    scheme = Controller(ChunkIndex(), SystemClock(), theirs).scheme
    async with sims({}) as [worker]:

        async def with_seed(seed: str) -> list[Finding]:
            pull, reply = (f"127.0.0.1:{port}" for port in free_ports(2))
            options = _controller(
                pull=pull, reply=reply, hash_seed=seed, chunk_tokens=chunk, mismatch_prompts=1
            )
            config = configuration([worker.url], lmcache={"controller": options})
            instance = CacheInstance("w0", scheme)
            async with gateway(config) as running:
                await running.until_healthy(1)
                async with instance.reporting_to(pull, reply):
                    prompts = count(1)

                    async def compared() -> bool:
                        tokens = [next(prompts)] * 2 * chunk
                        body = {"model": "sim-model", "prompt": tokens, "max_tokens": 1}
                        assert (await running.client.post("/v1/completions", json=body)).is_success
                        await instance.store(tokens)
                        return running.runtime.cache_tracker.lmcache.describe()["uncompared"] == []

                    _, before, _ = await examine(config, url=running.url, probes=False)
                    assert ("hashes-differ", "not checked") in {(e.code, e.severity.value) for e in before}
                    await until(compared)
                    _, found, _ = await examine(config, url=running.url)
            return found

        finding = named(await with_seed("0"), "hashes-differ")
        assert "LMCache instance 'w0' computes other chunk hashes" in finding.what
        assert "or set lmcache.controller.hash_seed" in finding.fix

        assert codes(await with_seed("7")) == set()


# --- L2 ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running_redis(
    folder: Path, port: int | None = None
) -> AsyncIterator[tuple[str, redis.asyncio.Redis]]:
    executable = program("redis-server", "valkey-server")
    port = port or free_ports(1)[0]
    argv = [executable, "--port", str(port), "--save", "", "--requirepass", "hunter2", "--dir", str(folder)]
    url = f"redis://:hunter2@127.0.0.1:{port}/0"
    with (folder / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        store = redis.asyncio.Redis.from_url(url)
        try:
            await until_answers(store)
            yield url, store
        finally:
            await store.aclose()
            process.terminate()


async def until_answers(store: redis.asyncio.Redis) -> None:
    async def answers() -> bool:
        try:
            return bool(await store.ping())
        except redis.exceptions.ConnectionError:
            return False

    while not await answers():
        pass


async def test_the_redis_of_l2_is_judged_by_policy_and_memory(tmp_path):
    async with sims({}) as [worker], running_redis(tmp_path) as (url, store):
        config = configuration([worker.url], lmcache={"l2": {"redis_url": url}})
        assert codes(await examined(config)) == {"l2-unbounded"}

        await store.config_set("maxmemory-policy", "noeviction")
        await store.config_set("maxmemory", "8mb")
        await store.set("a", b"x" * 1_000_000)
        assert codes(await examined(config)) == {"l2-policy"}

        await store.config_set("maxmemory", "1500000")
        found = await examined(config)
        assert "hunter2" not in str(found)
        assert "CONFIG SET maxmemory-policy allkeys-lru" in named(found, "l2-full").fix

        await store.config_set("maxmemory-policy", "allkeys-lru")
        assert codes(await examined(config)) == set()


async def test_a_redis_that_does_not_answer_is_named_until_it_is_started(tmp_path):
    [port] = free_ports(1)
    async with sims({}) as [worker]:
        url = f"redis://:hunter2@127.0.0.1:{port}/0"
        config = configuration([worker.url], lmcache={"l2": {"redis_url": url}})
        found = await examined(config)
        finding = named(found, "l2-unreachable")
        assert f"127.0.0.1:{port}" in finding.subject
        assert finding.fix.startswith("Start the Redis")
        assert codes(found) == {"l2-unreachable"}
        assert "hunter2" not in str(found)

        async with running_redis(tmp_path, port) as (_, store):
            await store.config_set("maxmemory", "8mb")
            await store.config_set("maxmemory-policy", "allkeys-lru")
            assert codes(await examined(config)) == set()

            wrong = configuration([worker.url], lmcache={"l2": {"redis_url": url.replace("hunter2", "h3")}})
            assert named(await examined(wrong), "l2-unreachable").what == "refuses the password"


async def test_without_a_gateway_the_workers_are_examined_and_the_rest_is_not_checked():
    async with sims({}) as [worker]:
        config = configuration([worker.url], server={"port": 9})
        _, found, seen = await examine(config)

    assert codes(found) == set()
    assert {"gateway", "prediction-missed"} <= {each.code for each in found}
    assert seen.workers[0].pair is not None
    assert seen.workers[0].pair.cached


async def test_events_are_not_checked_for_a_strategy_that_does_not_read_them():
    async with sims({"kv_events": False, "token_shift": 3}) as [worker]:
        config = configuration([worker.url], routing={"strategy": "roundrobin"})
        assert codes(await examined(config)) == set()
        async with httpx.AsyncClient(base_url=worker.url) as client:
            received = (await client.get("/sim/requests")).json()["by_path"]

    assert "/v1/completions" not in received
    assert "/kv_event_sources" not in received
