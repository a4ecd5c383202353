"""Ports and servers on 127.0.0.1, which the kernel numbers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from itertools import cycle, islice

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one connection."""


_PORTS = range(10_000, 20_000)
"""Below those that the kernel gives to outgoing connections, and those that `kvroute up` chooses."""
_PORTS_OF_A_PROCESS = 2_000


@cache
def _own_ports() -> Iterator[int]:
    """Ports in turn. Another test process has others: a port is free for seconds until its server listens."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = number * _PORTS_OF_A_PROCESS % len(_PORTS)
    ports = _PORTS[first : first + _PORTS_OF_A_PROCESS]
    start = random.randrange(len(ports))  # another run on this machine begins elsewhere
    return cycle([*ports[start:], *ports[:start]])


def free_ports(count: int) -> tuple[int, ...]:
    """TCP ports on which no program listens at present, and which no other test or connection gets soon."""
    found = list[int]()
    for port in islice(_own_ports(), _PORTS_OF_A_PROCESS):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return tuple(found)
    raise RuntimeError(f"fewer than {count} ports are free")


def free_port() -> int:
    """A TCP port on which no program listens at present, and which the kernel gives to no other socket."""
    return free_ports(1)[0]


def port_of(listener: socket.socket | asyncio.Server) -> int:
    """The port on which a socket or a server listens."""
    port: int = (listener if isinstance(listener, socket.socket) else listener.sockets[0]).getsockname()[1]
    return port


@contextmanager
def listening(backlog: int | None = None) -> Iterator[int]:
    """The port of a socket that listens while the block runs; no program accepts its connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listener:
        yield port_of(listener)


@asynccontextmanager
async def tcp_server(
    handle: Handle, *, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """The port of a server that runs `handle` for each connection while the block runs.

    A client that leaves early ends `handle` without an error. At the end, open connections are aborted.
    """
    tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
    is_over = False

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_over:  # a connection that was accepted while the server closed
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        tasks[task] = writer
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await handle(reader, writer)
        except asyncio.CancelledError:
            pass  # asyncio.streams would log it
        finally:
            writer.close()
            del tasks[task]

    server = await asyncio.start_server(connected, "127.0.0.1", port, ssl=tls, limit=1 << 20)
    try:
        yield port_of(server)
    finally:
        is_over = True
        server.close()
        for _ in range(5):  # connections that are accepted by now reach `connected`
            await asyncio.sleep(0)
        for task, writer in list(tasks.items()):
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
