"""Workers whose `/tokenize` gives other ids of chats than they compute with, as those with gpt-oss do."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.support.sockets import tcp_server
from tests.support.waiting import until

MODEL = "sim-model"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 1}


@pytest.fixture
async def workers(processes, sim):
    """Proxies before two workers; in the chats that `/tokenize` gets they write the role otherwise."""
    return [await proxy(processes, sim) for _ in range(2)]


async def proxy(processes, sim) -> str:
    upstream = httpx.URL(await sim("--time-scale", "0"))

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_tokenize = False
        try:
            while data := await reader.read(1 << 20):
                if data.startswith(b"POST "):
                    is_tokenize = data.startswith(b"POST /tokenize")
                writer.write(data.replace(b'"role":"user"', b'"role":"USER"') if is_tokenize else data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(upstream.host, upstream.port, limit=1 << 20)
        await asyncio.gather(relay(reader, behind[1]), relay(behind[0], writer))

    port = await processes.enter_async_context(tcp_server(serve))
    return f"http://127.0.0.1:{port}"


async def test_chats_get_no_exact_tokens_from_a_tokenize_that_the_engine_contradicts(serve, workers):
    running = await serve("--worker", workers[0], "--worker", workers[1], "--strategy", "kvaware")
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:

        async def has_chosen() -> bool:
            return "not checked yet" not in (await client.get("/ready")).text

        await until(has_chosen, within_s=60, every_s=0.05)
        chat = await client.post("/v1/chat/completions", json=CHAT)
        text = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})
        notes = (await client.get("/ready")).json()["notes"]

    assert (chat.status_code, text.status_code) == (200, 200)
    assert chat.headers["x-kvroute-reason"] == "kv_approximate"
    assert text.headers["x-kvroute-reason"] != "kv_approximate"
    assert any("no exact tokens" in note and "chats" in note for note in notes)
