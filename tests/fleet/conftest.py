"""A clock that tests advance, and workers whose answers tests set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from tests.support.clocks import AdvancingClock
from tests.support.sockets import tcp_server


@dataclass
class FakeWorker:
    """What a worker would answer; tests change the fields."""

    health: int = 200
    refuses: bool = False
    hangs: bool = False
    models: list[dict[str, Any]] | None = field(
        default_factory=lambda: [{"id": "m", "object": "model", "root": "m", "parent": None}]
    )
    blocks: int | None = 100
    block_size: int = 16
    start_time: float | None = 5000.0
    waiting: int | None = None
    version: str = "0.32.0"
    metrics_status: int = 200
    asked: list[str] = field(default_factory=list)

    def metrics(self) -> str:
        page = "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
        if self.blocks is not None:
            labels = f'block_size="{self.block_size}",num_gpu_blocks="{self.blocks}"'
            page += f"vllm:cache_config_info{{{labels}}} 1.0\n"
        if self.start_time is not None:
            page += f"process_start_time_seconds {self.start_time}\n"
        if self.waiting is not None:
            page += f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}.0\n'
        return page

    async def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if self.refuses:
            raise httpx.ConnectError("refused") from ConnectionRefusedError(111, "refused")
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        if path == "/v1/models":
            if self.models is None:
                return httpx.Response(500)
            return httpx.Response(200, json={"object": "list", "data": self.models})
        if path == "/version":
            return httpx.Response(200, json={"version": self.version})
        if path == "/metrics":
            return httpx.Response(self.metrics_status, text=self.metrics())
        return httpx.Response(self.health)


class FakeNetwork(dict[str, FakeWorker]):
    """Workers by host name."""

    def __missing__(self, host: str) -> FakeWorker:
        self[host] = FakeWorker()
        return self[host]

    async def handle(self, request: httpx.Request) -> httpx.Response:
        return await self[request.url.host].answer(request)


@pytest.fixture
def clock() -> AdvancingClock:
    return AdvancingClock()


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
async def client(network: FakeNetwork) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(network.handle)) as client:
        yield client


@pytest.fixture
async def running() -> AsyncIterator[Callable[[Awaitable[None]], asyncio.Task[None]]]:
    """Run a coroutine for the length of a test; a failure in it fails the test."""
    tasks: list[asyncio.Task[None]] = []

    def start(work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        tasks.append(task)
        return task

    yield start
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`async with serve(handle) as url`: a real HTTP/1.1 server on a free port. `handle(path, head)`
    returns (status, body); None leaves the connection open without an answer."""

    @asynccontextmanager
    async def start(
        handle: Callable[[str, bytes], tuple[int, bytes] | None], port: int = 0
    ) -> AsyncIterator[str]:
        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                answer = handle(head.split(b" ")[1].decode(), head)
                if answer is not None:
                    status, body = answer
                    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))

        async with tcp_server(serve_one, port=port) as served:
            yield f"http://127.0.0.1:{served}"

    return start
