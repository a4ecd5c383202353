from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.support.sockets import free_port, tcp_server

from kvroute.deploy import processes as readiness
from kvroute.deploy.processes import is_ready


@pytest.mark.parametrize(
    ("scheme", "answer", "ready"),
    [
        ("http", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", True),
        ("http", b"HTTP/1.1 503 Not yet\r\ncontent-length: 0\r\n\r\n", False),
        ("http", b"nonsense\r\n", False),
        ("redis", b"+PONG\r\n", True),
        ("redis", b"-LOADING Redis is loading the dataset in memory\r\n", False),
        ("redis", b"", False),
        ("tcp", b"", True),
    ],
)
async def test_a_server_is_ready_when_it_answers_like_one(scheme, answer, ready) -> None:
    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(answer)

    async with tcp_server(visited) as port, httpx.AsyncClient(trust_env=False) as http:
        assert await is_ready(f"{scheme}://127.0.0.1:{port}", http) is ready


@pytest.mark.parametrize("scheme", ["http", "redis", "tcp"])
async def test_a_port_without_a_server_is_not_ready(scheme) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        assert not await is_ready(f"{scheme}://127.0.0.1:{free_port()}", http)


async def test_silence_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(readiness, "PROBE_TIMEOUT_S", 0.05)
    left = asyncio.Event()

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        left.set()

    async with tcp_server(visited) as port, httpx.AsyncClient(trust_env=False) as http:
        assert not await is_ready(f"redis://127.0.0.1:{port}", http)
        await left.wait()


async def test_an_unknown_scheme_is_a_mistake() -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        with pytest.raises(ValueError, match="ftp"):
            await is_ready("ftp://127.0.0.1", http)
