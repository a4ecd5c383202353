"""`kvroute epp` behind a real Envoy, in front of real vLLM workers."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from tests.engine.conftest import ADMIN_KEY, GATEWAY_READY_S, ChatShape, both_routable
from tests.engine.pool import Engine
from tests.epp.conftest import port_of, run_envoy
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.deploy.render.envoy import EnvoySite, envoy_config

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

SHAPE = ChatShape(chats=4, turns=4)


@dataclass
class Proxy:
    """Envoy, and the HTTP port of its picker."""

    url: str
    client: httpx.AsyncClient
    http: str

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples, from the picker."""
        page = (await self.client.get(f"{self.http}/metrics")).text
        return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)))

    async def until_idle(self) -> None:
        async def idle() -> bool:
            names = ("requests_in_flight", "worker_requests_in_flight", "worker_active_tokens")
            return not any([await self.metric(f"kvroute_{name}") for name in names])

        await until(idle, within_s=GATEWAY_READY_S)


@asynccontextmanager
async def proxy(engines: list[Engine], logs: Path, folder: Path) -> AsyncIterator[Proxy]:
    """Envoy with a picker that follows the engines' KV events."""
    grpc, http = free_ports(2)
    argv = [sys.executable, "-m", "kvroute", "epp", "--host", "127.0.0.1", "--port", str(grpc)]
    argv += ["--http-port", str(http), "--strategy", "kvaware", "--set", "tokens.timeout_ms=5000"]
    for engine in engines:
        argv += ["--worker", f"{engine.name}={engine.url}"]
    env = {**os.environ, "KVROUTE__ADMIN__API_KEY": ADMIN_KEY}
    spec = ChildSpec("picker", tuple(argv), env, logs / f"picker-{grpc}.log")
    site = EnvoySite(
        listen=("127.0.0.1", 0),
        workers=[port_of(engine.url) for engine in engines],
        pickers=[("127.0.0.1", grpc)],
        admin=("127.0.0.1", 0),
        is_open=False,
    )
    async with ChildProcess(spec, SystemClock()) as process:
        await process.wait_ready(f"http://127.0.0.1:{http}/ready", timeout_s=GATEWAY_READY_S)
        await both_routable(f"http://127.0.0.1:{http}", len(engines))
        async with run_envoy(envoy_config(site), folder) as envoy:
            await envoy.until_pickers(1)
            yield Proxy(envoy.url, envoy.client, f"http://127.0.0.1:{http}")


async def test_chats_through_envoy_find_their_caches(engines, logs, tmp_path, hold_chats, report):
    """Envoy relays, kvroute decides by the engines' events, and no token passes it."""
    for engine in engines:
        await engine.forget()
    async with proxy(engines, logs, tmp_path) as running:
        turns = await hold_chats(running.url, seed=21, shape=SHAPE)
        await running.until_idle()

        follow_ups = [(before, turn) for before, turn in pairwise(turns) if turn.chat == before.chat]
        stayed = sum(turn.worker == before.worker for before, turn in follow_ups)
        cached = sum(turn.cached_tokens for _, turn in follow_ups)
        known = sum(before.prompt_tokens for before, _ in follow_ups)
        report(
            f"behind Envoy: {stayed} of {len(follow_ups)} follow-ups on the same vLLM worker, "
            f"{cached / known:.2f} of the earlier prompts' tokens cached, "
            f"requests per worker {dict(Counter(turn.worker for turn in turns))}"
        )
        assert len(follow_ups) == SHAPE.chats * (SHAPE.turns - 1)
        assert stayed / len(follow_ups) >= 0.9
        assert cached / known >= 0.8
        assert {turn.worker for turn in turns} == {engine.name for engine in engines}
        assert await running.metric("kvroute_epp_response_bodies_total") == 0

        body = {"model": "tiny", "prompt": "Count.", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with running.client.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.aiter_bytes()
            await anext(chunks)
            assert await running.metric("kvroute_worker_requests_in_flight") == 1
        await running.until_idle()  # the client has left

        async def engines_are_idle() -> bool:
            return not any([await engine.metric("vllm:num_requests_running") for engine in engines])

        await until(engines_are_idle, within_s=GATEWAY_READY_S)
