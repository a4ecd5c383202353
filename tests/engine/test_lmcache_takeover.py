"""Two gateways with a real LMCache: the one that it reports to is killed, and the other takes over."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.engine.lmcache_stack import CACHED, MODEL, QUIET_S, Stack, prompt, started
from tests.support.gateways import Gateway, enter, gateway
from tests.support.redis import redis_server
from tests.support.sockets import tcp_server
from tests.support.waiting import until

from kvroute.deploy.engine_install import EngineVenv
from kvroute.deploy.prepare import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(loop_scope="session")
async def stack(forged_venv: EngineVenv, model_folder: Path, logs: Path) -> AsyncIterator[Stack]:
    async with started(forged_venv, model_folder, logs) as stack:
        yield stack


@asynccontextmanager
async def virtual_address(port: int) -> AsyncIterator[list[int]]:
    """Forwards connections from `port` to the last of the returned ports; a dead one refuses them."""
    targets: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not targets:
            return
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", targets[-1])
        except OSError:
            return

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        try:
            with suppress(OSError):
                await asyncio.gather(pass_on(reader, to_writer), pass_on(to_reader, writer))
        finally:
            to_writer.close()

    async with tcp_server(serve, port=port):
        yield targets


async def test_another_gateway_takes_over_and_predicts_exactly(
    stack: Stack, report: Callable[[str], None]
) -> None:
    """The gateway that LMCache reports to is killed; its coordinator URL then leads to another one."""
    await stack.leave()
    port = int(stack.options.coordinator.listen.rpartition(":")[2])
    listens = free_ports(2)
    clock = asyncio.get_running_loop().time

    def start(number: int) -> Any:
        options = {
            "routing.strategy": "kvaware",
            "tokens.timeout_ms": 5000,
            # Chunks of samples would be in L2 and, once L1 is cleared, not in L1.
            "tokens.computed_samples": "false",
            "lmcache.instance": "w",
            "lmcache.coordinator.enabled": "true",
            "lmcache.coordinator.listen": f"127.0.0.1:{listens[number]}",
            "lmcache.coordinator.status_interval_s": 0.5,
        }
        words = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        return gateway(f"g{number}", server.url, [stack.engine_url], *words)

    async def tiers(at: Gateway, seed: int) -> dict[str, int]:
        body = {"model": MODEL, "prompt": prompt(seed), "max_tokens": 2}
        explained = (await at.client.post("/v1/route/explain", json=body)).json()
        return explained["ranking"][0]["tiers"] or {}

    def sees(at: Gateway, seed: int, l1: int) -> Any:
        async def seen() -> bool:
            found = await tiers(at, seed)
            return (found.get("gpu"), found.get("l1")) == (0, l1)

        return seen

    async def ask(at: Gateway, seed: int) -> tuple[int, int]:
        """Predicted and reported cached tokens."""
        body = {"model": MODEL, "prompt": prompt(seed), "max_tokens": 2, "temperature": 0}
        answer = await at.client.post("/v1/completions", json=body)
        details = answer.json()["usage"]["prompt_tokens_details"] or {}
        return int(answer.headers["x-kvroute-hit-tokens"]), int(details.get("cached_tokens") or 0)

    async def forget() -> None:
        await stack.forget_gpu()
        await stack.ask(prompt(999, 8))  # vLLM publishes a reset with its next step

    async def batches() -> float:
        """How many reports have reached the first gateway."""
        page = (await one.client.get("/metrics")).text
        counts = re.findall(r"^kvroute_lmcache_batches_total\{.*\} (\S+)$", page, re.MULTILINE)
        assert counts
        return sum(map(float, counts))

    async def are_in_l2() -> bool:
        """Whether the server has reported every chunk of L1 as stored in L2, too."""
        page = (await one.client.get("/metrics")).text
        found = re.findall(r'^kvroute_lmcache_held_chunks\{tier="l[12]"\} (\S+)$', page, re.MULTILINE)
        return len(found) == 2 and found[0] == found[1] != "0.0"

    async def are_silent() -> bool:
        """Whether no report comes for five of the server's intervals of 0.2 s."""
        before = await batches()
        await asyncio.sleep(1)
        return await batches() == before

    async with (
        virtual_address(port) as targets,
        redis_server() as server,
        AsyncExitStack() as owned,
    ):
        targets.append(listens[0])
        one, two = await enter(owned, start(0), start(1))
        await stack.http.post(f"{stack.lmcache_url}/cache/clear", json={"tier": "l1", "force": True})

        async def are_whole() -> bool:
            notes = [note for each in (one, two) for note in (await each.answer("/ready"))["notes"]]
            return not [note for note in notes if "LMCache server" in note]

        await stack.ask(prompt(500))
        await until(are_whole, within_s=QUIET_S)
        for seed in (501, 502):
            assert (await ask(one, seed))[1] == 0
        await forget()
        for each in (one, two):
            for seed in (501, 502):
                await until(sees(each, seed, CACHED), within_s=QUIET_S)

        # LMCache 0.5.6 reports a batch once: one that a dying gateway does not take is lost, and then no
        # gateway can know what the server holds (`Doubt.LOST_EVENTS`). The server can take more than a second
        # to store a chunk in L2.
        await until(are_in_l2, within_s=QUIET_S)
        await until(are_silent, within_s=QUIET_S)
        one.process.send_signal(signal.SIGKILL)
        await one.process.wait()
        killed_at = clock()
        await until(sees(two, 501, 0), within_s=3)
        targets.append(listens[1])
        for seed in (501, 502):
            await until(sees(two, seed, CACHED), within_s=30 - (clock() - killed_at))
        report(f"exact again {clock() - killed_at:.1f} s after the kill")

        for seed in (501, 502):
            assert await ask(two, seed) == (CACHED, CACHED)
            await forget()
        assert (await ask(two, 503))[1] == 0
        await forget()
        await until(sees(two, 503, CACHED), within_s=QUIET_S)
        assert await ask(two, 503) == (CACHED, CACHED)
