from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from tests.support.clocks import JumpingClock
from tests.support.waiting import until

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

FAST = SimOptions(time_scale=0, kv_events=False)
ENDLESS = {"prompt": "x", "max_tokens": 100_000, "stream": True}


async def test_refused_connections_come_back_on_the_same_port() -> None:
    async with run_sim(FAST) as sim:
        url = sim.url
        await sim.refuse()
        await sim.refuse()
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.ConnectError):
                await http.get(f"{url}/health")
            await sim.start()
            await sim.start()
            assert (await http.get(f"{url}/health")).status_code == 200


async def test_a_killed_worker_resets_its_streams_and_comes_back_empty() -> None:
    async with run_sim(FAST) as sim, httpx.AsyncClient(base_url=sim.url) as http:
        await http.post("/v1/completions", json={"prompt": "hello " * 40})
        started = sim.worker.start_time
        async with http.stream("POST", "/v1/completions", json=ENDLESS) as stream:
            chunks = stream.aiter_raw()
            await anext(chunks)
            await sim.kill()
            with pytest.raises(httpx.ReadError):
                async for _ in chunks:
                    pass
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")

        await sim.restart()

        assert (await http.get("/health")).status_code == 200
        assert sim.worker.start_time > started
        assert sim.engine.cache.held_keys == set()
        await until(lambda: not sim.engine.has_work)


async def test_the_end_of_the_context_ends_running_streams() -> None:
    async with run_sim(FAST) as sim, httpx.AsyncClient(base_url=sim.url) as http:
        async with http.stream("POST", "/v1/completions", json=ENDLESS) as stream:
            await anext(stream.aiter_raw())
            await sim.stop()
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


async def test_the_engine_takes_the_time_that_the_model_says() -> None:
    clock, options = JumpingClock(), SimOptions(time_scale=0.1, kv_events=False)
    async with run_sim(options, clock=clock) as sim, httpx.AsyncClient(base_url=sim.url) as http:
        await http.post("/v1/completions", json={"prompt": "x" * 3000, "max_tokens": 20})
        timing = sim.engine.timing

        prefill = timing.iteration_s(1000, 1000 * 500, 0)
        decode = sum(timing.iteration_s(1, 0, 1001 + step) for step in range(19))
        assert clock.time == pytest.approx(prefill + decode)


async def test_many_streams_at_once_all_finish_whole() -> None:
    async with run_sim(FAST) as sim, httpx.AsyncClient(base_url=sim.url, limits=httpx.Limits()) as http:

        async def one(number: int) -> int:
            body = {"prompt": f"stream {number}", "max_tokens": 20, "stream": True}
            return (await http.post("/v1/completions", json=body)).text.count("data: {")

        assert await asyncio.gather(*map(one, range(60))) == [20] * 60
        assert sim.worker.counters.chunks == 1200
        assert sim.worker.driver.finished == {"length": 60}


@pytest.mark.parametrize(
    "values", [{"event_dialect": "morse"}, {"block_size": 0}, {"models": ()}, {"colour": "red"}]
)
def test_wrong_options_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SimOptions(**values)


async def test_a_client_that_leaves_while_sending_its_body_reaches_no_handler() -> None:
    async with run_sim(FAST) as sim:
        _, writer = await asyncio.open_connection("127.0.0.1", sim.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.close()
        async with httpx.AsyncClient(base_url=sim.url) as http:
            assert (await http.get("/health")).status_code == 200

        assert set(sim.worker.counters.by_path) == {"/health"}


async def test_a_defect_in_the_engine_is_raised() -> None:
    async def ask() -> None:
        async with run_sim(FAST) as sim, httpx.AsyncClient(base_url=sim.url) as http:
            sim.engine.timing = None  # type: ignore[assignment]
            with pytest.raises(httpx.TransportError):
                await http.post("/v1/completions", json=ENDLESS)

    with pytest.raises(AttributeError):
        await ask()
