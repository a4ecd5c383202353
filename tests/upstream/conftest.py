"""Raw servers that send scripted bytes; the socket tests of this room run on both event loops."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.transport import WorkerTransport

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_ON_BOTH_LOOPS = {
    "test_transport_any_worker",
    "test_pool",
    "test_pool_spares",
    "test_transport",
    "test_transport_httpx",
}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], Any]]:
    if item.path.stem in _ON_BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


class ScriptedServer:
    """Runs `script` once per connection, then waits until the peer has closed it.

    A script that wants the connection closed closes its writer. `live` counts connections that the peer
    has not closed yet.
    """

    def __init__(self, script: Script, tls: ssl.SSLContext | None) -> None:
        self._script = script
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self.url = ""
        self.accepted = 0
        self.live = 0
        self.failures: list[BaseException] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{port}"

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def until_all_closed(self) -> None:
        """Return when no peer holds a connection any more."""
        await self.until(lambda: self.live == 0)

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.live += 1
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.notify()
            await self._script(reader, writer)
            while await reader.read(65536):
                pass
        except ConnectionError:
            pass  # the peer has closed it while the script was writing
        except asyncio.IncompleteReadError:
            pass  # the peer has closed it without (another) request
        except Exception as exc:
            self.failures.append(exc)
        finally:
            writer.transport.abort()
            self.live -= 1
            await self.notify()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self.failures == []


Serve = Callable[..., Awaitable[ScriptedServer]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(script, tls=None)` starts a server on a free port; all are closed at the end."""
    servers: list[ScriptedServer] = []

    async def start(script: Script, tls: ssl.SSLContext | None = None) -> ScriptedServer:
        server = ScriptedServer(script, tls)
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., WorkerTransport]]:
    """`connect(url, **options)` makes a transport; at the end the sockets of all transports are closed."""
    transports: list[WorkerTransport] = []

    def make(url: str, *, tls: ssl.SSLContext | None = None, **options: Any) -> WorkerTransport:
        transport = WorkerTransport(url, UpstreamOptions(**options), tls=tls)
        transports.append(transport)
        return transport

    yield make
    for transport in transports:
        await transport.aclose()
        assert transport.open_connections == 0
        assert transport.idle_connections == 0


@pytest.fixture
def read_request() -> Callable[[asyncio.StreamReader], Awaitable[tuple[bytes, bytes]]]:
    """`head, body = await read_request(reader)`."""

    async def read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        head = await reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return head, await reader.readexactly(length)

    return read


@pytest.fixture
def answers(read_request: Callable[..., Awaitable[tuple[bytes, bytes]]]) -> Callable[..., Script]:
    """`answers(*replies, close=False)`: a script that gives one reply per request, then perhaps closes."""

    def make(*replies: bytes, close: bool = False) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for reply in replies:
                await read_request(reader)
                writer.write(reply)
            if close:
                await writer.drain()
                writer.close()

        return script

    return make


@pytest.fixture
def read_all() -> Callable[..., Awaitable[bytes]]:
    async def read(response: Any) -> bytes:
        body = b""
        while chunk := await response.next_chunk():
            body += chunk
        return body

    return read


@pytest.fixture
def server_tls(tls_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls_file)
    return context


@pytest.fixture
def tls_file() -> Path:
    """Self-signed for localhost and 127.0.0.1, valid into the 22nd century; certificate and key."""
    return Path(__file__).parents[1] / "data" / "tls" / "localhost.pem"
