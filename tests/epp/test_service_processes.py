"""Pickers as processes of their own behind a real Envoy: even load, and pickers that die or stop."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.blackbox.conftest import Process, spawn
from tests.epp.conftest import SERVED, START_S, Envoy, one_filter, port_of, run_envoy
from tests.support.redis import redis_server
from tests.support.sockets import free_ports
from tests.support.waiting import until

from kvroute.deploy.render.envoy import EnvoySite, envoy_config
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions

CHAT = "/v1/chat/completions"


@dataclass
class Pickers:
    """Envoy, its pickers by priority, and the workers."""

    envoy: Envoy
    processes: Sequence[Process]
    urls: Sequence[str]
    """The pickers' HTTP ports."""
    sims: Sequence[RunningSim]

    async def post(self, text: str, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        body = {"model": "sim-model", "messages": messages, "max_tokens": 4, **fields}
        return await self.envoy.client.post(CHAT, json=body)

    async def metric(self, name: str, picker: int = 0, **labels: str) -> float:
        """The sum of the samples with these labels, from a picker's /metrics."""
        page = (await self.envoy.client.get(f"{self.urls[picker]}/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until_idle(self, picker: int = 0) -> None:
        async def idle() -> bool:
            names = ("requests_in_flight", "worker_requests_in_flight", "worker_active_tokens")
            return not any([await self.metric(f"kvroute_{name}", picker) for name in names])

        await until(idle, within_s=START_S)


RunPickers = Callable[..., AbstractAsyncContextManager[Pickers]]


@pytest.fixture
def run_pickers(tmp_path: Path) -> RunPickers:
    """`async with run_pickers(2, 4, SimOptions(...)) as pickers`: so many pickers and workers."""

    @asynccontextmanager
    async def start(
        count: int,
        workers: int,
        options: SimOptions,
        *,
        change: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config,
        is_open: bool = True,
        settings: Sequence[str] = (),
    ) -> AsyncIterator[Pickers]:
        async with AsyncExitStack() as stack:
            sims = [await stack.enter_async_context(run_sim(options)) for _ in range(workers)]
            listed = [word for sim in sims for word in ("--worker", sim.url)]
            free = free_ports(2 * count)
            ports = list(zip(free[:count], free[count:], strict=True))
            processes = [
                await spawn(
                    stack, "epp", "--port", str(grpc), "--http-port", str(http), *listed, *settings,
                    "--set", f"sharing.member=picker-{number}",
                    env={"XDG_STATE_HOME": str(tmp_path / "state")},
                )
                for number, (grpc, http) in enumerate(ports)
            ]  # fmt: skip
            for process in processes:
                await process.logged("the endpoint picker listens on")
            site = EnvoySite(
                listen=("127.0.0.1", 0),
                workers=[port_of(sim.url) for sim in sims],
                pickers=[("127.0.0.1", grpc) for grpc, _ in ports],
                admin=("127.0.0.1", 0),
                is_open=is_open,
            )
            envoy = await stack.enter_async_context(run_envoy(change(envoy_config(site)), tmp_path))
            await envoy.until_pickers(count)
            urls = [f"http://127.0.0.1:{http}" for _, http in ports]

            async def ready() -> bool:
                answers = [await envoy.client.get(f"{url}/ready") for url in urls]
                return all(
                    list(answer.json()["workers"].values()).count("healthy") == workers for answer in answers
                )

            await until(ready, within_s=START_S)
            yield Pickers(envoy, processes, urls, sims)

    return start


async def test_conversations_stay_on_their_workers_and_the_load_is_even(run_pickers: RunPickers):
    """24 conversations with bodies of 200 KB and more, four workers, five turns."""
    rng, placed, follow_ups, same = random.Random(1), Counter[str](), 0, 0

    async with run_pickers(1, 4, SimOptions(time_scale=0.02, kv_events=False)) as pickers:

        async def converse(number: int) -> list[str]:
            text = " ".join(f"{rng.getrandbits(28):07x}" for _ in range(25_000))
            messages, workers = [{"role": "user", "content": text}], []
            for turn in range(5):
                body = {"model": "sim-model", "messages": messages, "max_tokens": 8, "stream": turn % 2 == 0}
                answer = await pickers.envoy.client.post(CHAT, json=body)
                assert answer.status_code == 200, answer.text
                workers.append(answer.headers[SERVED])
                messages += [
                    {"role": "assistant", "content": f"answer {number} {turn}"},
                    {"role": "user", "content": f"and then, {turn}?"},
                ]
            return workers

        for workers in await asyncio.gather(*map(converse, range(24))):
            placed.update(workers)
            follow_ups += len(workers) - 1
            same += sum(worker == workers[0] for worker in workers[1:])
        await pickers.until_idle()
        pieces = await pickers.metric("kvroute_epp_response_bodies_total")
        picked = await pickers.metric("kvroute_requests_total", status="200")

    print(f"same worker {same} of {follow_ups}, requests per worker {sorted(placed.values())}")
    assert same / follow_ups >= 0.98, (same, follow_ups)
    assert max(placed.values()) / (sum(placed.values()) / 4) <= 1.3, placed
    assert (pieces, picked) == (0, 120)


def in_turn(config: dict[str, Any]) -> dict[str, Any]:
    """One filter, and all pickers with one priority, as an Envoy of the Gateway API has them."""
    first, *others = config["static_resources"]["clusters"][1]["load_assignment"]["endpoints"]
    for other in others:
        first["lb_endpoints"] += other["lb_endpoints"]
    config["static_resources"]["clusters"][1]["load_assignment"]["endpoints"] = [first]
    return one_filter(config)


@pytest.mark.heavy
async def test_pickers_that_share_route_as_one(run_pickers: RunPickers):
    """Envoy deals the turns of conversations between them."""
    options = SimOptions(time_scale=0.02, kv_events=False)
    stayed, placed = list[bool](), Counter[str]()
    async with redis_server() as server:
        settings = ("--share", server.url)
        async with run_pickers(2, 3, options, change=in_turn, settings=settings) as pickers:

            async def both_know_each_other() -> bool:
                name = "kvroute_sharing_members"
                alive = [await pickers.metric(name, each, state="alive") for each in (0, 1)]
                return alive == [1, 1]

            await until(both_know_each_other, within_s=START_S)

            async def converse(number: int) -> None:
                rng, messages, last = random.Random(number), list[dict[str, str]](), ""
                # Not all at one moment: after a burst it costs less to compute a short prompt elsewhere.
                await asyncio.sleep(number / 12)
                for _ in range(8):
                    text = " ".join(f"{rng.getrandbits(40):x}" for _ in range(200))
                    messages.append({"role": "user", "content": text})
                    body = {"model": "sim-model", "messages": messages, "max_tokens": 4}
                    answer = await pickers.envoy.client.post(CHAT, json=body)
                    assert answer.status_code == 200, answer.text
                    worker = answer.headers[SERVED]
                    placed[worker] += 1
                    if last:
                        stayed.append(worker == last)
                    last = worker
                    messages.append(answer.json()["choices"][0]["message"])
                    # A person reads the answer first. On a busy machine a message can need 0.1 s.
                    await asyncio.sleep(0.4 + rng.random() * 0.4)

            await asyncio.gather(*map(converse, range(24)))
            for each in (0, 1):
                await pickers.until_idle(each)
            served = [await pickers.metric("kvroute_requests_total", each, status="200") for each in (0, 1)]

    print(f"same worker {sum(stayed)} of {len(stayed)}, per worker {placed}, per picker {served}")
    assert sum(served) == 192
    assert min(served) > 192 / 4
    assert sum(stayed) / len(stayed) >= 0.98
    assert max(placed.values()) / (sum(placed.values()) / 3) <= 1.3, placed


async def test_every_answer_is_accounted_with_its_status(run_pickers: RunPickers):
    """Also when many streams of Envoy end together."""
    async with run_pickers(1, 2, SimOptions(time_scale=0, kv_events=False), is_open=False) as pickers:

        async def ask(number: int) -> set[int]:
            return {(await pickers.post(f"request {number} {each}")).status_code for each in range(20)}

        assert set.union(*await asyncio.gather(*map(ask, range(16)))) == {200}
        await pickers.until_idle()
        assert await pickers.metric("kvroute_requests_total", status="200") == 320
        assert await pickers.metric("kvroute_epp_streams_total", end="missing") == 0


async def test_at_most_one_request_is_lost_when_a_picker_is_killed(run_pickers: RunPickers):
    """The streams that it has picked go on: their tokens do not pass it."""
    async with run_pickers(2, 2, SimOptions(time_scale=0.3, kv_events=False)) as pickers:
        streams = [
            asyncio.create_task(pickers.post(f"stream {number}", stream=True, max_tokens=300))
            for number in range(6)
        ]
        await until(lambda: sum(sim.worker.counters.chunks > 10 for sim in pickers.sims) == 2)
        statuses = Counter[int]()
        for number in range(60):
            if number == 20:
                pickers.processes[0].process.send_signal(signal.SIGKILL)
            statuses[(await pickers.post(f"request {number}")).status_code] += 1
        texts = [(await stream).text for stream in streams]

        assert statuses[200] >= 59, statuses
        assert all(text.rstrip().endswith("data: [DONE]") for text in texts)
        # For a moment Envoy asks nobody (`is_open`): until it has found the dead picker.
        assert await pickers.metric("kvroute_requests_total", 1, status="200") >= 30
        await pickers.until_idle(1)


async def test_no_request_is_lost_when_a_picker_stops(run_pickers: RunPickers):
    """Its health check fails during the delay, so that Envoy asks the next picker."""
    options, delay = SimOptions(time_scale=0.3, kv_events=False), ("--set", "server.shutdown_delay_s=8")
    async with run_pickers(2, 2, options, settings=delay) as pickers:
        stream = asyncio.create_task(pickers.post("stream", stream=True, max_tokens=300))
        await until(lambda: any(sim.worker.counters.chunks > 10 for sim in pickers.sims))
        ended: asyncio.Task[int] | None = None
        statuses, number = Counter[int](), 0
        while ended is None or not ended.done():
            if number == 20:
                ended = asyncio.create_task(pickers.processes[0].stop())
            number += 1
            statuses[(await pickers.post(f"request {number}")).status_code] += 1

        assert statuses == {200: number}
        assert await ended == 0
        assert await pickers.metric("kvroute_requests_total", 1, status="200") > 0
        assert (await stream).text.rstrip().endswith("data: [DONE]")


async def test_with_one_filter_a_picker_that_stops_waits_for_its_answers(run_pickers: RunPickers):
    options = SimOptions(time_scale=0.3, kv_events=False)
    async with run_pickers(1, 1, options, change=one_filter) as pickers:
        stream = asyncio.create_task(pickers.post("stream", stream=True, max_tokens=300))
        await until(lambda: pickers.sims[0].worker.counters.chunks > 10)

        assert await pickers.processes[0].stop() == 0

        assert (await stream).text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(("is_open", "status"), [(True, 200), (False, 500)])
async def test_without_any_picker_envoy_does_as_it_is_set(run_pickers: RunPickers, is_open, status):
    options = SimOptions(time_scale=0, kv_events=False)
    async with run_pickers(1, 2, options, is_open=is_open) as pickers:
        pickers.processes[0].process.send_signal(signal.SIGKILL)
        await pickers.processes[0].ended()
        await pickers.envoy.until_pickers(0)

        answers = [await pickers.post("x" * 200_000) for _ in range(4)]

        assert [answer.status_code for answer in answers] == [status] * 4
