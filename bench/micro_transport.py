"""Measure a connection to a worker: CPU of this process per request and per streamed chunk.

Three clients alternate against one small server in another process: `send` (the data plane's client), httpx
over kvroute's transport, and httpx over its default transport. The output has medians over the repeats, and
their ratio to the last client. `python bench/micro_transport.py [--json FILE] [--repeats 5] [--requests 2000]
[--loop asyncio]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import uvloop

from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.transport import WorkerTransport

CHUNK = b"data: " + b"x" * 222 + b"\n\n"
PLAIN = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: 300\r\n"
    b"content-type: application/json\r\n\r\n" + b"x" * 300
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
REQUEST_HEADERS = [
    (b"content-type", b"application/json"),
    (b"accept", b"*/*"),
    (b"x-request-id", b"0123456789abcdef"),
]
BODY = b'{"prompt": "' + b"y" * 180 + b'"}'
TICK_S = 0.01


class Server(asyncio.Protocol):
    """Answers each request whose body is `BODY`: a plain answer, or (target /s/N) N chunks, one per tick."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        self.unread = b""

    def data_received(self, data: bytes) -> None:
        # httpx's default transport writes head and body separately, and one read may have both.
        self.unread += data
        while True:
            head, end, rest = self.unread.partition(b"\r\n\r\n")
            if not end or len(rest) < len(BODY):
                return
            self.unread = rest[len(BODY) :]
            self.answer(head.split(b" ", 2)[1])

    def answer(self, target: bytes) -> None:
        if target == b"/":
            self.transport.write(PLAIN)
        else:
            self.transport.write(STREAM_HEAD)
            self.tick(int(target.rsplit(b"/")[-1]))

    def tick(self, left: int) -> None:
        if self.transport.is_closing():
            return
        if left == 0:
            self.transport.write(b"0\r\n\r\n")
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
        asyncio.get_running_loop().call_later(TICK_S, self.tick, left - 1)


def serve(ready: Any) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=1024)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


Exchange = Callable[[bytes], Awaitable[int]]


async def direct(transport: WorkerTransport, target: bytes) -> int:
    response = await transport.send(b"POST", target, REQUEST_HEADERS, BODY)
    size = 0
    while chunk := await response.next_chunk():
        size += len(chunk)
    return size


async def through_httpx(client: httpx.AsyncClient, target: bytes) -> int:
    size = 0
    async with client.stream("POST", target.decode(), content=BODY, headers=REQUEST_HEADERS) as response:
        async for chunk in response.aiter_raw():
            size += len(chunk)
    return size


async def cpu_us(exchange: Exchange, target: bytes, total: int, at_once: int, size: int) -> float:
    """CPU microseconds of this process per exchange, with `at_once` exchanges at a time."""
    left = total

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            if await exchange(target) != size:
                raise RuntimeError("an answer is incomplete")

    started = time.process_time()
    await asyncio.gather(*[work() for _ in range(at_once)])
    return (time.process_time() - started) / total * 1e6


async def measure(url: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    transport = WorkerTransport(url, UpstreamOptions())
    ours = httpx.AsyncClient(transport=WorkerTransport(url, UpstreamOptions()), base_url=url, timeout=60)
    default = httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None))
    clients: dict[str, Exchange] = {
        "send": lambda target: direct(transport, target),
        "httpx, our transport": lambda target: through_httpx(ours, target),
        "httpx, default": lambda target: through_httpx(default, target),
    }
    samples: dict[str, dict[str, list[float]]] = {name: {"request": [], "chunk": []} for name in clients}
    for repeat in range(args.repeats + 1):
        for name, exchange in clients.items():
            request_us = await cpu_us(exchange, b"/", args.requests, 16, 300)
            streams, chunks = 32, args.chunks
            target = b"/s/%d" % chunks
            stream_us = await cpu_us(exchange, target, streams, streams, chunks * len(CHUNK))
            if repeat:  # the first round is a warm-up
                samples[name]["request"].append(request_us)
                samples[name]["chunk"].append((stream_us - request_us) / chunks)
    await transport.aclose()
    await ours.aclose()
    await default.aclose()
    return {
        name: {what: statistics.median(values) for what, values in by_what.items()}
        for name, by_what in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    receive, ready = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(ready,), daemon=True)
    server.start()
    try:
        if not receive.poll(30):
            raise RuntimeError("the server did not start")
        url = f"http://127.0.0.1:{receive.recv()}"
        run = uvloop.run if args.loop == "uvloop" else asyncio.run
        medians = run(measure(url, args))
    finally:
        server.terminate()
        server.join()

    base = medians["httpx, default"]
    print(f"{'client':<22}{'us/request':>12}{'ratio':>8}{'us/chunk':>12}{'ratio':>8}")
    for name, row in medians.items():
        ratios = {what: row[what] / base[what] for what in row}
        print(
            f"{name:<22}{row['request']:>12.1f}{ratios['request']:>8.3f}"
            f"{row['chunk']:>12.1f}{ratios['chunk']:>8.3f}"
        )
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "what": "CPU microseconds of the client process: 16 requests at once; 32 streams",
                    "python": sys.version.split()[0],
                    "machine": platform.machine(),
                    "loop": args.loop,
                    "repeats": args.repeats,
                    "medians": medians,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
