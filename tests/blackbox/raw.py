"""Raw sockets towards a gateway, and a worker that answers with whatever bytes a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

BODY = b'{"model":"m","prompt":"hi"}'


def post(
    *lines: bytes,
    target: bytes = b"/v1/completions",
    version: bytes = b"1.1",
    host: bytes = b"host: g\r\n",
    body: bytes = BODY,
    length: bool = True,
) -> bytes:
    """A POST with these header lines."""
    head = b"POST %b HTTP/%b\r\n%b" % (target, version, host)
    if length:
        head += b"content-length: %d\r\n" % len(body)
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


GET = b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n"


class Client:
    """One connection. What comes is in `received`; `closed` is set when the other side has ended it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.received = b""

    async def read_all(self, within_s: float = 20.0) -> bytes:
        """Everything until the connection ends; fails when it does not."""
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionError):
                while data := await self.reader.read(65536):
                    self.received += data
        return self.received

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def until(self, text: bytes, within_s: float = 20.0) -> bytes:
        """What comes, until `text` has."""
        async with asyncio.timeout(within_s):
            while text not in self.received:
                data = await self.reader.read(65536)
                assert data, self.received
                self.received += data
        return self.received


@asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def said(address: tuple[str, int], *segments: bytes, within_s: float = 20.0) -> bytes:
    """Everything that is answered to these segments until the connection ends, which a request that has
    `connection: close` or one that is refused brings about."""
    async with connected(address) as client:
        for segment in segments:
            await client.send(segment)
            await asyncio.sleep(0)
        return await client.read_all(within_s)


def statuses(answers: bytes) -> list[int]:
    """Of all final answers, in order."""
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]
    return [status for status in found if status >= 200]


class Worker:
    """Healthy, serves the model `m`, and answers every POST with `answer`. Mutable: tests set it."""

    def __init__(self) -> None:
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
        self.asked: list[bytes] = []
        self.url = ""
        self.go_on = asyncio.Event()
        """No answer is given until it is set."""
        self.go_on.set()

    @property
    def targets(self) -> list[bytes]:
        return [request.split(b" ", 2)[1] for request in self.asked]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"content-length: (\d+)", head, re.I)
                body = await reader.readexactly(int(found[1]) if found else 0)
                if b" /v1/models " in head:
                    answer = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
                elif head.startswith(b"GET /") and b" /v1/" not in head[:16]:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                else:
                    self.asked.append(head + body)
                    await self.go_on.wait()
                    writer.write(self.answer)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def raw_worker() -> AsyncIterator[Worker]:
    worker = Worker()
    server = await asyncio.start_server(worker._serve, "127.0.0.1", 0, limit=1 << 20)
    worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield worker
    finally:
        server.close()


LANES: Iterable[str] = ("true", "false")
