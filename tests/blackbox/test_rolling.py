"""Two gateways are restarted one after the other under traffic, and no request fails.

What is in front of them learns of a restart by `/ready`: HAProxy within tenths of a second, and a plain TCP
forwarder a second late, as nodes of a Kubernetes cluster do.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.sockets import free_port, tcp_server
from tests.support.waiting import until

REQUESTS = 10_000
CLIENTS = 8
LATE_S = 1.0
DELAY_S = 3.0
DEADLINE_S = 60.0
BODY = json.dumps({"model": "sim-model", "prompt": "Hi.", "max_tokens": 2}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)

pytestmark = [pytest.mark.load, pytest.mark.timeout(300)]


async def is_ready(port: int) -> bool:
    """Asked on a connection of its own, as a load balancer does."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /ready HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
        return (await reader.read()).startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False
    finally:
        writer.close()


# Clients


class Load:
    """Clients that send one request after another. Each keeps its connection until the gateway closes it."""

    def __init__(self, port: int) -> None:
        self.seen: Counter[str] = Counter()
        self._port = port
        self._is_over = False

    async def run(self) -> None:
        """Until `end`, and until REQUESTS were answered."""
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    def end(self) -> None:
        self._is_over = True

    async def _client(self) -> None:
        while not self._is_over or self.seen.total() < REQUESTS:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError as error:
                self.seen[f"connect: {type(error).__name__}"] += 1
                await asyncio.sleep(0.01)
                continue
            try:
                await self._requests(reader, writer)
            except (OSError, asyncio.IncompleteReadError) as error:
                self.seen[f"request: {type(error).__name__}"] += 1
            finally:
                writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not self._is_over or self.seen.total() < REQUESTS:
            writer.write(REQUEST)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(None, 1)[0])
            body = await reader.readexactly(length)
            status = head.split(b" ", 2)[1].decode()
            self.seen[status if status == "200" else f"{status}: {body[:80]!r}"] += 1
            if b"\r\nconnection: close\r\n" in head:
                return


# Gateways


class Gateways:
    """Two gateways on ports of their own, in front of one worker."""

    def __init__(self, serve: Callable[..., Awaitable], worker: str) -> None:
        self.ports = [free_port(), free_port()]
        self._serve = serve
        self._worker = worker
        self._running: list = []
        self._delay: tuple[str, ...] = ("--set", f"server.shutdown_delay_s={DELAY_S:g}")

    async def start(self) -> None:
        self._running = [await self._started(port) for port in self.ports]

    async def _started(self, port: int):
        arguments = ("--worker", self._worker, "--port", str(port))
        try:
            return await self._serve(*arguments, *self._delay)
        except AssertionError as error:
            if "shutdown_delay_s" not in str(error):
                raise
            self._delay = ()  # an executable without that option is tested without it
            return await self._serve(*arguments)

    async def roll(self, settled: Callable[[], Awaitable[None]]) -> list[int]:
        """Restart one after the other; `settled` waits until both get traffic. Gives the exit codes."""
        codes = []
        for number, port in enumerate(self.ports):
            await settled()
            codes.append(await self._running[number].stop(signal.SIGTERM))
            self._running[number] = await self._started(port)
        await settled()
        return codes


@pytest.fixture
async def gateways(serve, sim) -> Gateways:
    started = Gateways(serve, await sim("--time-scale", "0"))
    await started.start()
    return started


# What is in front of them


@pytest.fixture
async def haproxy(gateways: Gateways, tmp_path: Path) -> AsyncIterator[int]:
    """HAProxy in front of the gateways, without retries of its own; its port."""
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("haproxy is not installed")
        pytest.skip("haproxy is not installed")
    port = free_port()
    servers = "".join(f"  server g{number} 127.0.0.1:{each}\n" for number, each in enumerate(gateways.ports))
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text(
        "global\n  maxconn 200\n  nbthread 1\n"
        "defaults\n  mode http\n  retries 0\n"
        "  timeout connect 10s\n  timeout client 30s\n  timeout server 30s\n"
        f"frontend clients\n  bind 127.0.0.1:{port}\n  default_backend gateways\n"
        "backend gateways\n  balance roundrobin\n  option httpchk GET /ready\n"
        f"  timeout check 10s\n  default-server check inter 200ms fall 1 rise 1\n{servers}"
    )
    process = await asyncio.create_subprocess_exec(
        program, "-db", "-q", "-f", str(configuration), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await until(lambda: is_ready(port), within_s=DEADLINE_S, every_s=0.05)
        yield port
    finally:
        process.terminate()
        await process.wait()


class Forwarder:
    """A TCP forwarder: it copies bytes both ways and sends connections to the gateways in rotation. It
    reacts to `/ready` LATE_S later. Mutable: `targets`."""

    def __init__(self, ports: list[int]) -> None:
        self.targets = list(ports)
        self.port = 0
        self._ports = ports
        self._turn = 0

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                ready = [port for port in self._ports if await is_ready(port)]
                group.create_task(self._follow(ready))
                await asyncio.sleep(0.1)

    async def _follow(self, ready: list[int]) -> None:
        await asyncio.sleep(LATE_S)
        self.targets = ready

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn += 1
        target = self.targets[self._turn % len(self.targets)]
        try:
            from_there, to_there = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.transport.abort()
            return
        try:
            await asyncio.gather(_pump(reader, to_there), _pump(from_there, writer))
        finally:
            to_there.close()
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()
    except OSError:
        writer.transport.abort()


@asynccontextmanager
async def forwarding(ports: list[int]) -> AsyncIterator[Forwarder]:
    forwarder = Forwarder(ports)
    async with tcp_server(forwarder.serve) as forwarder.port:
        watching = asyncio.create_task(forwarder.watch())
        try:
            yield forwarder
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


# The restarts


async def rolled(gateways: Gateways, port: int, settled: Callable[[], Awaitable[None]]) -> Load:
    """The traffic during a rolling restart."""
    load = Load(port)
    running = asyncio.create_task(load.run())
    try:
        codes = await gateways.roll(settled)
    finally:
        load.end()
        await running
    assert codes == [0, 0]
    return load


async def test_a_rolling_restart_behind_haproxy_fails_no_request(gateways, haproxy):
    async def settled() -> None:
        # HAProxy's own checks are as old as their interval.
        await asyncio.sleep(1.0)

    load = await rolled(gateways, haproxy, settled)

    assert set(load.seen) == {"200"}, load.seen
    assert load.seen.total() >= REQUESTS


async def test_a_rolling_restart_behind_a_forwarder_that_learns_late_fails_no_request(gateways):
    async with forwarding(gateways.ports) as forwarder:

        async def settled() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.sleep(2 * LATE_S)  # what was seen before has been followed
                await until(lambda: len(forwarder.targets) >= 2, within_s=DEADLINE_S)

        load = await rolled(gateways, forwarder.port, settled)

    assert set(load.seen) == {"200"}, load.seen
    assert load.seen.total() >= REQUESTS
