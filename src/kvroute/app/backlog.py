"""Accepting clients that come together."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

_SERVERS = 8
"""For each listening socket. One that finds nobody waiting any more costs 3 us, hence no more of them."""


class Backlog:
    """Further servers of the loop on sockets that listen, beside the one that is there.

    libuv accepts one connection in each round of the loop, for each server. A round that relays some
    hundred streams lasts milliseconds, and so of 640 clients that come together the last ones waited 2
    seconds to be accepted. (asyncio's own loop accepts all that wait at once.)
    Mutable: `begin` and `close`. Belongs to one event loop.
    """

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol], length: int) -> None:
        """`length` is how many connections the kernel holds, as the sockets were told before."""
        self._make_protocol = make_protocol
        self._length = length
        self._servers: list[asyncio.Server] = []

    async def begin(self, listening: Iterable[socket.SocketType]) -> None:
        """Accept from these, through descriptors of its own."""
        loop = asyncio.get_running_loop()
        for each in listening:
            for _ in range(_SERVERS):
                own = socket.socket(fileno=os.dup(each.fileno()))
                own.setblocking(False)
                server = await loop.create_server(self._protocol, sock=own, backlog=self._length)
                self._servers.append(server)

    def close(self) -> None:
        """Accept no more; what was accepted stays open. Idempotent."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    def _protocol(self) -> asyncio.Protocol:
        try:
            return self._make_protocol()
        except Exception:  # uvloop would end the server
            log.exception("a client's connection could not be set up")
            return _Refused()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
