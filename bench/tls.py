"""Measure what TLS costs the gateway per request, per chunk and per connection, beside nginx.

    python bench/tls.py [--rounds 5] [--output FILE]

The gateway and nginx run with and without TLS, each on the first core, in front of two workers that do almost
no work (native/worker.c). This process is the client: 32 connections on the other core. The figure is the CPU
time (user and system, all processes and threads) of the server alone, divided by the units:

    request      short answers, one after another on open connections
    chunk        streams of 200 chunks of 320 bytes, 10 ms apart
    connection   a new connection with one request; each is a full handshake

Each round measures all servers one after another, so that other work on the machine meets all of them. The
report has medians, and the difference between TLS and plain of the same round with its range. Certificates
have ECDSA keys (P-256); both servers negotiate TLS 1.3 with the same cipher. About three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from edge_watch import cpu_ns
from gateway_machine import describe, process_tree
from gateway_requests import chat, said
from gateway_routers import NGINX_CONFIGURATION, Launch, kvroute, nginx_binary
from gateway_running import Bed, build, choose_cores, free_port, running
from kvroute.deploy.prepare import write_self_signed

CONNECTIONS = 32
REQUESTS_EACH = 150
STREAMS_EACH = 1
CHUNKS = 200
OPENED_EACH = 20
READY_S = 30.0
KINDS = ("request", "chunk", "connection")
SERVERS = ("nginx", "kvroute")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server; `tls` is the context of its clients, None without TLS."""

    name: str
    port: int
    pid: int
    tls: ssl.SSLContext | None

    def cpu_ns(self) -> int:
        return sum(cpu_ns(pid) for pid in process_tree(self.pid))


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time in us per unit: medians, and the difference of TLS with its least and its largest value."""

    server: str
    kind: str
    plain_us: float
    tls_us: float
    added_us: float
    least_us: float
    largest_us: float


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def request(**fields: object) -> bytes:
    body = json.dumps(chat([said("user", "How are you today? " * 10)], **fields)).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


SHORT, STREAMED = request(), request(stream=True)


async def connect(server: Server) -> Connection:
    name = "localhost" if server.tls is not None else None
    return await asyncio.open_connection(
        "127.0.0.1", server.port, limit=1 << 20, ssl=server.tls, server_hostname=name
    )


async def answer(connection: Connection) -> None:
    """Send a short request and read its answer."""
    reader, writer = connection
    writer.write(SHORT)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(f"the answer is {head[:80]!r}")
    await reader.readexactly(int(head.partition(b"content-length:")[2].split(None, 1)[0]))


async def stream(connection: Connection) -> None:
    """Send a streamed request and read its answer to the end."""
    reader, writer = connection
    writer.write(STREAMED)
    await reader.readuntil(b"data: [DONE]")
    await reader.readuntil(b"0\r\n\r\n")


async def on_open_connections(
    server: Server, each: Callable[[Connection], Awaitable[None]], times: int
) -> float:
    """CPU time in ns of the server for `times` calls of `each` on every connection."""
    connections = await asyncio.gather(*(connect(server) for _ in range(CONNECTIONS)))
    await asyncio.gather(*(answer(connection) for connection in connections))

    async def repeat(connection: Connection) -> None:
        for _ in range(times):
            await each(connection)

    before = server.cpu_ns()
    await asyncio.gather(*(repeat(connection) for connection in connections))
    spent = server.cpu_ns() - before
    for _, writer in connections:
        writer.transport.abort()
    return spent


async def on_new_connections(server: Server) -> float:
    """CPU time in ns of the server for connections with one request each."""

    async def repeat() -> None:
        for _ in range(OPENED_EACH):
            connection = await connect(server)
            await answer(connection)
            connection[1].transport.abort()

    before = server.cpu_ns()
    await asyncio.gather(*(repeat() for _ in range(CONNECTIONS)))
    return server.cpu_ns() - before


async def cost_us(server: Server, kind: str) -> float:
    """CPU time of the server in us per unit of `kind`."""
    if kind == "request":
        spent = await on_open_connections(server, answer, REQUESTS_EACH)
        return spent / 1000 / (CONNECTIONS * REQUESTS_EACH)
    if kind == "chunk":
        spent = await on_open_connections(server, stream, STREAMS_EACH)
        return spent / 1000 / (CONNECTIONS * STREAMS_EACH * CHUNKS)
    return await on_new_connections(server) / 1000 / (CONNECTIONS * OPENED_EACH)


async def ready(server: Server) -> None:
    give_up = time.monotonic() + READY_S
    while True:
        try:
            connection = await connect(server)
            await answer(connection)
        except (OSError, EOFError, RuntimeError):
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(0.2)
        else:
            connection[1].transport.abort()
            return


def command(name: str, launch: Launch, pair: tuple[Path, Path] | None) -> list[str]:
    """The command line of a server, with TLS if it has a `pair` of certificate and key."""
    if name == "kvroute":
        settings = (
            [] if pair is None else [f"server.tls.cert_file={pair[0]}", f"server.tls.key_file={pair[1]}"]
        )
        return kvroute("prefixaware", *settings)(launch)
    listen = str(launch.port)
    if pair is not None:
        listen += (
            f" ssl; ssl_certificate {pair[0]}; ssl_certificate_key {pair[1]}; ssl_protocols TLSv1.2 TLSv1.3"
        )
    servers = " ".join(f"server {worker.removeprefix('http://')};" for worker in launch.workers)
    launch.folder.mkdir()
    file = launch.folder / "nginx.conf"
    file.write_text(NGINX_CONFIGURATION.format(folder=launch.folder, servers=servers, port=listen))
    return [nginx_binary() or "nginx", "-e", f"{launch.folder}/nginx.log", "-c", str(file)]


async def measure(servers: list[Server], rounds: int) -> dict[tuple[str, str, bool], list[float]]:
    """CPU time per unit by server, kind and TLS, one value for each round."""
    for server in servers:
        await ready(server)
    if len({await negotiated(server) for server in servers if server.tls is not None}) != 1:
        raise SystemExit("the servers negotiate different versions or ciphers")
    found: dict[tuple[str, str, bool], list[float]] = {}
    for _ in range(rounds):
        for kind in KINDS:
            for server in servers:
                key = server.name, kind, server.tls is not None
                found.setdefault(key, []).append(await cost_us(server, kind))
    return found


async def negotiated(server: Server) -> object:
    _, writer = await connect(server)
    chosen = writer.get_extra_info("cipher")
    writer.transport.abort()
    return chosen


def costs(found: dict[tuple[str, str, bool], list[float]]) -> list[Cost]:
    made = []
    for name in SERVERS:
        for kind in KINDS:
            plain, tls = found[name, kind, False], found[name, kind, True]
            added = [with_tls - without for with_tls, without in zip(tls, plain, strict=True)]
            medians = [round(statistics.median(each), 2) for each in (plain, tls, added)]
            made.append(
                Cost(
                    name,
                    kind,
                    plain_us=medians[0],
                    tls_us=medians[1],
                    added_us=medians[2],
                    least_us=round(min(added), 2),
                    largest_us=round(max(added), 2),
                )
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cores, machine = choose_cores(), describe()  # before this process is pinned to one core
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)  # nginx's workers run as another user
        bed = Bed(stack, folder, cores, build(folder), folder, folder, [])
        workers = bed.start_workers("plain")
        pair = folder / "bench.crt", folder / "bench.key"
        write_self_signed(*pair, "127.0.0.1")
        context = ssl.create_default_context(cafile=str(pair[0]))
        servers: list[Server] = []
        for name in SERVERS:
            for tls in (None, context):
                launch = Launch(
                    folder / f"{name}{len(servers)}", folder, workers, free_port(), free_port(), folder
                )
                words = command(name, launch, None if tls is None else pair)
                log = folder / f"{len(servers)}.log"
                pid = stack.enter_context(running(words, frozenset({cores.router}), log))
                servers.append(Server(name, launch.port, pid, tls))
        os.sched_setaffinity(0, cores.rest)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(measure(servers, options.rounds))
    made = costs(found)
    print(f"{'server':<8} {'unit':<11} {'plain us':>9} {'TLS us':>9} {'added us':>9}   range")
    for each in made:
        print(
            f"{each.server:<8} {each.kind:<11} {each.plain_us:9.1f} {each.tls_us:9.1f} {each.added_us:9.1f}"
            f"   {each.least_us:.1f} to {each.largest_us:.1f}"
        )
    if options.output is not None:
        rounds = {
            " ".join((name, kind, "TLS" if tls else "plain")): v for (name, kind, tls), v in found.items()
        }
        result = {"machine": machine, "costs": [asdict(each) for each in made], "us_by_round": rounds}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
