"""Thousands of streams at once through a gateway process: all finish, and nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httptools
import httpx
import pytest
from tests.support.waiting import until

ADMIN = {"authorization": "Bearer admin-key-of-the-tests"}
ROUNDS = 3
STREAMS = 2000
TOKENS = 100

pytestmark = [pytest.mark.load, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def enough_descriptors():
    """Each stream is one socket here, two in the gateway, one in a worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def process(log: Path, ready: str, *arguments: str) -> AsyncIterator[tuple[subprocess.Popen, str]]:
    """`python -m kvroute ...` until it logs `ready`; gives what the pattern's group matched."""
    # Coverage is measured elsewhere: here its tracer would be most of the load.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    with log.open("wb") as output:
        command = [sys.executable, "-m", "kvroute", *arguments]
        running = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        async with asyncio.timeout(60):
            while not (found := re.search(ready, log.read_text())):
                assert running.poll() is None, log.read_text()
                await asyncio.sleep(0.02)
        yield running, found[1]
    finally:
        running.terminate()
        await asyncio.to_thread(running.wait, 60)


class Stream(asyncio.Protocol):
    """One streamed chat: counts its events. As lean as a client can be."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self.done = asyncio.get_running_loop().create_future()
        self.events = 0
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(f"closed early: {exc}")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self.done.set_result(f"status {status}")

    def on_body(self, data: bytes) -> None:
        # An event may be split anywhere, also within its blank line.
        self.events += (self.tail[-1:] + data).count(b"\n\n")
        self.tail = (self.tail + data)[-16:]

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result("complete" if self.tail.endswith(b"data: [DONE]\n\n") else "cut")
        self._transport.close()


def request(host: bytes, number: int) -> bytes:
    """One of the round's prompts, of which no two are alike."""
    message = {"role": "user", "content": f"{number:08x}" * 50}
    body = {"messages": [message], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n" % host
    return head + b"Content-Length: %d\r\n\r\n" % len(data) + data


def made(host: bytes, number: int) -> Callable[[], Stream]:
    return lambda: Stream(request(host, number))


async def streams(client: httpx.AsyncClient, workers: list[subprocess.Popen]) -> list[Stream]:
    """One round, ended. The workers stand still until the gateway has all requests in flight at once.

    All rounds send the same prompts: new ones would fill the index, which grows up to its bound.
    """
    loop, url = asyncio.get_running_loop(), client.base_url
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    try:
        made_here = [
            (await loop.create_connection(made(url.netloc, number), url.host, url.port))[1]
            for number in range(STREAMS)
        ]

        async def all_are_in_flight() -> bool:
            return f"\nkvroute_requests_in_flight {STREAMS}.0\n" in (await client.get("/metrics")).text

        await until(all_are_in_flight, within_s=60, every_s=0.02)
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
    async with asyncio.timeout(120):
        await asyncio.gather(*(stream.done for stream in made_here))
    return made_here


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def at_rest(metrics: str, workers: list[dict[str, object]]) -> bool:
    """Whether every gauge of requests in flight is zero."""
    gauges = re.findall(r"^(kvroute_\w*in_flight\w*)(?:\{.*\})? (\S+)$", metrics, re.M)
    assert gauges
    figures = [
        worker[key] for worker in workers for key in ("running_requests", "active_tokens", "active_blocks")
    ]
    return not any(float(value) for _, value in gauges) and not any(figures)


async def test_rounds_of_2000_streams_all_finish_and_leave_nothing_behind(tmp_path) -> None:
    sim = ("sim", "--port", "0", "--no-events", "--time-scale", "0.2", "--max-sequences", str(STREAMS))
    ready = r"ready at (\S+)"
    async with (
        process(tmp_path / "one", ready, *sim) as (one, one_url),
        process(tmp_path / "two", ready, *sim) as (two, two_url),
        process(
            tmp_path / "gateway",
            r"listens on (\S+)",
            *("serve", "--port", "0", "--worker", one_url, "--worker", two_url),
            *("--set", "admin.api_key=admin-key-of-the-tests"),
            *("--set", "fleet.health.interval_s=60"),  # a worker that stands still is not to be ejected
        ) as (gateway, url),
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
    ):

        async def all_are_healthy() -> bool:
            return {*(await client.get("/ready")).json()["workers"].values()} == {"healthy"}

        await until(all_are_healthy, within_s=30, every_s=0.05)
        resident = []
        for _ in range(ROUNDS):
            ended = await streams(client, [one, two])

            assert {stream.done.result() for stream in ended} == {"complete"}
            assert {stream.events for stream in ended} == {TOKENS + 2}
            async with asyncio.timeout(30):
                while not at_rest(
                    (await client.get("/metrics")).text,
                    (await client.get("/admin/workers", headers=ADMIN)).json()["workers"],
                ):
                    await asyncio.sleep(0.05)
            resident.append(resident_bytes(gateway.pid))
        gateway.terminate()
        assert await asyncio.to_thread(gateway.wait, 30) == 0

    assert resident[-1] <= 1.1 * resident[0]
