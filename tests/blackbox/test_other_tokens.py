"""Workers whose `/tokenize` gives other ids of chats than they compute with, as those with gpt-oss do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import httpx
import pytest
from tests.support.sockets import tcp_server
from tests.support.waiting import until

MODEL = "sim-model"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 1}


def of_tokenize(data: bytes) -> bytes:
    """The chats that `/tokenize` gets have another role."""
    return data.replace(b'"role":"user"', b'"role":"USER"') if data.startswith(b"POST /tokenize") else data


def of_kimi_k3(data: bytes) -> bytes:
    """What is generated shows the tool choice and the response format, which `/tokenize` does not."""
    if data.startswith(b"POST /tokenize"):
        return data
    shown = (b'"tool_choice":"required"', b'"response_format":{"type":"json_object"}')
    return data.replace(b'"role":"user"', b'"role":"USER"') if any(each in data for each in shown) else data


async def proxy(processes, sim, change: Callable[[bytes], bytes], *arguments: str) -> str:
    """A proxy before a worker, which changes each request without changing its length."""
    upstream = httpx.URL(await sim("--time-scale", "0", *arguments))

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = b""
        try:
            while data := await reader.read(1 << 20):
                if whole or data.startswith(b"POST "):
                    whole += data
                    head, _, body = whole.partition(b"\r\n\r\n")
                    length = re.search(rb"(?i)content-length: *(\d+)", head)
                    if length is None or len(body) < int(length[1]):
                        continue
                    data, whole = change(whole), b""
                writer.write(data)
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


async def until_tokens_are_chosen(client: httpx.AsyncClient) -> None:
    async def has_chosen() -> bool:
        return "not checked yet" not in (await client.get("/ready")).text

    await until(has_chosen, within_s=60, every_s=0.05)


async def test_chats_get_no_exact_tokens_from_a_tokenize_that_the_engine_contradicts(serve, processes, sim):
    workers = [await proxy(processes, sim, of_tokenize) for _ in range(2)]
    running = await serve("--worker", workers[0], "--worker", workers[1], "--strategy", "kvaware")
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:
        await until_tokens_are_chosen(client)
        chat = await client.post("/v1/chat/completions", json=CHAT)
        text = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})
        notes = (await client.get("/ready")).json()["notes"]

    assert (chat.status_code, text.status_code) == (200, 200)
    assert chat.headers["x-kvroute-reason"] == "kv_approximate"
    assert text.headers["x-kvroute-reason"] != "kv_approximate"
    assert any("no exact tokens" in note and "chats" in note for note in notes)


@pytest.mark.parametrize(
    "shown",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ],
    ids=["tool choice", "response format"],
)
async def test_what_kimi_k3_shows_of_a_request_makes_it_inexact_and_no_other_one(
    serve, processes, sim, shown
):
    workers = [await proxy(processes, sim, of_kimi_k3, "--events") for _ in range(2)]
    running = await serve("--worker", workers[0], "--worker", workers[1], "--strategy", "kvaware")
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:
        await until_tokens_are_chosen(client)
        plain = await client.post("/v1/chat/completions", json=CHAT)
        other = await client.post("/v1/chat/completions", json={**CHAT, **shown})

    assert (plain.status_code, other.status_code) == (200, 200)
    assert plain.headers["x-kvroute-reason"] != "kv_approximate"
    assert other.headers["x-kvroute-reason"] == "kv_approximate"
