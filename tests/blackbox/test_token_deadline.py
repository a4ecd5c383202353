"""How long a request waits for its exact tokens when the worker that tokenizes is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import httpx
import pytest
from tests.support.sockets import tcp_server
from tests.support.waiting import until

TOKENIZE_S = 0.15
"""Three times the 50 ms that every request waits; far below what a long prompt takes to compute."""
MODEL = "sim-model"
SHORT, LONG = "word " * 20, "word " * 20_000

Slow = Callable[[str], Awaitable[str]]


@pytest.fixture
async def slow_to_tokenize(processes: AsyncExitStack) -> Slow:
    """`await slow_to_tokenize(URL)` is a proxy before a worker; it holds back each `/tokenize`."""

    async def start(url: str) -> str:
        worker = httpx.URL(url)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hold: bool) -> None:
            try:
                while data := await reader.read(1 << 20):
                    if hold and data.startswith(b"POST /tokenize"):
                        await asyncio.sleep(TOKENIZE_S)  # the worker is slow
                    writer.write(data)
                    await writer.drain()
            except ConnectionError:
                pass
            finally:
                writer.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream = await asyncio.open_connection(worker.host, worker.port, limit=1 << 20)
            await asyncio.gather(relay(reader, upstream[1], True), relay(upstream[0], writer, False))

        port = await processes.enter_async_context(tcp_server(serve))
        return f"http://127.0.0.1:{port}"

    return start


@pytest.fixture
async def gateway(serve, sim, slow_to_tokenize) -> str:
    """A `kvaware` gateway before two such workers, which has found out how to get exact tokens."""
    workers = [await slow_to_tokenize(await sim("--time-scale", "0")) for _ in range(2)]
    running = await serve("--worker", workers[0], "--worker", workers[1], "--strategy", "kvaware")
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:

        async def has_exact_tokens() -> bool:
            return "no exact tokens" not in (await client.get("/ready")).text

        await until(has_exact_tokens, within_s=60, every_s=0.05)
    return running.url


async def reason(url: str, prompt: str) -> str:
    """Why the gateway chose the worker that it chose for this prompt."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        answer = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1}
        )
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvroute-reason"]


async def test_a_long_prompt_waits_for_its_tokens_since_a_wrong_choice_costs_far_more(gateway):
    assert await reason(gateway, LONG) != "kv_approximate"


async def test_a_short_prompt_is_routed_at_the_deadline_without_its_tokens(gateway):
    assert await reason(gateway, SHORT) == "kv_approximate"


async def test_the_share_of_approximate_decisions_can_be_read_from_the_metrics(gateway):
    await reason(gateway, LONG)
    await reason(gateway, SHORT)

    async with httpx.AsyncClient(trust_env=False) as client:
        page = (await client.get(f"{gateway}/metrics")).text

    counters = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert counters[f'kvroute_exact_prompts_total{{model="{MODEL}"}}'] == "1.0"
    assert counters[f'kvroute_inexact_prompts_total{{cause="late",model="{MODEL}"}}'] == "1.0"
