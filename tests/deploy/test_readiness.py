from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from kvroute.deploy import processes as readiness
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import is_ready


@pytest.fixture
async def serving() -> AsyncIterator[Callable[[bytes], object]]:
    """`(answer)` -> the port of a server that answers the first bytes of each visitor with that."""
    servers = []

    async def serve(answer: bytes) -> int:
        async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1024)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(visited, "127.0.0.1", 0)
        servers.append(server)
        return server.sockets[0].getsockname()[1]

    yield serve
    for server in servers:
        server.close()


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
async def test_ready_is_who_answers_as_a_ready_server_does(scheme, answer, ready, serving) -> None:
    port = await serving(answer)

    async with httpx.AsyncClient(trust_env=False) as http:
        assert await is_ready(f"{scheme}://127.0.0.1:{port}", http) is ready


@pytest.mark.parametrize("scheme", ["http", "redis", "tcp"])
async def test_nobody_is_not_ready(scheme) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        assert not await is_ready(f"{scheme}://127.0.0.1:{free_ports(1)[0]}", http)


async def test_silence_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(readiness, "VISIT_TIMEOUT_S", 0.05)
    left = asyncio.Event()

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        left.set()

    silent = await asyncio.start_server(visited, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]

    async with silent, httpx.AsyncClient(trust_env=False) as http:
        assert not await is_ready(f"redis://127.0.0.1:{port}", http)
        await left.wait()


async def test_an_unknown_scheme_is_a_mistake() -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        with pytest.raises(ValueError, match="ftp"):
            await is_ready("ftp://127.0.0.1", http)
