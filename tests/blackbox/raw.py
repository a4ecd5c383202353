"""Requests as bytes, and raw connections to a gateway."""

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


async def answers_to(address: tuple[str, int], *segments: bytes, within_s: float = 20.0) -> bytes:
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


LANES: Iterable[str] = ("true", "false")
