"""Opens TCP connections to names with several addresses, of which some may not answer (RFC 8305).

An attempt at the next address starts when the one before has failed or has not succeeded for 250 ms; the
first connection counts. Neither uvloop's `create_connection` nor `asyncio`'s without an option does so: they
wait for one address until the whole timeout is over.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

ATTEMPT_DELAY_S = 0.25
"""The delay that RFC 8305, section 8, recommends."""


class Address(NamedTuple):
    """One address of a name, as `getaddrinfo` returns it."""

    family: int
    sockaddr: tuple[Any, ...]


class Connector:
    """Connects to one host and port. Mutable: remembers the addresses that lost the last race."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._is_name = not _is_literal(host)
        self._silent: frozenset[Address] = frozenset()

    async def connect(self) -> socket.socket | None:
        """A connected socket; None if the host is an address, so that there is nothing to choose.

        Raises OSError; the caller sets the timeout and closes the socket.
        """
        if not self._is_name:
            return None
        loop = asyncio.get_running_loop()
        resolutions = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        addresses = [Address(family, sockaddr) for family, _, _, _, sockaddr in resolutions]
        if not addresses:
            raise OSError(f"{self._host} has no address")
        ordered = in_order(addresses, self._silent)
        connected, position = await race(ordered, _connect)
        self._silent = frozenset(ordered[:position])
        return connected


def in_order(addresses: Sequence[Address], silent: frozenset[Address]) -> list[Address]:
    """The addresses in the order of the attempts: the families in turn, those in `silent` last.

    Within a family the order stays, which is that of RFC 6724.
    """
    by_family: dict[int, list[Address]] = {}
    for address in dict.fromkeys(addresses):
        by_family.setdefault(address.family, []).append(address)
    mixed = [
        address for address in chain.from_iterable(zip_longest(*by_family.values())) if address is not None
    ]
    return sorted(mixed, key=silent.__contains__)


async def race(
    addresses: Sequence[Address],
    connect: Callable[[Address], Awaitable[socket.socket]],
    delay_s: float = ATTEMPT_DELAY_S,
) -> tuple[socket.socket, int]:
    """The first connection, and the position of its address. Other attempts are cancelled and closed.

    Raises the error of an address that refused, or else the first error, when every attempt has failed.
    """
    waiting = deque(enumerate(addresses))
    running: dict[asyncio.Task[socket.socket], int] = {}
    errors: list[OSError] = []
    winner: asyncio.Task[socket.socket] | None = None
    try:
        while waiting or running:
            if waiting:
                position, address = waiting.popleft()
                running[asyncio.ensure_future(connect(address))] = position
            done, _ = await asyncio.wait(
                running, timeout=delay_s if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    winner = task
                    return task.result(), running[task]
                del running[task]
                if not isinstance(error, OSError):
                    raise error
                errors.append(error)
        raise next((failure for failure in errors if isinstance(failure, ConnectionRefusedError)), errors[0])
    finally:
        losers = [task for task in running if task is not winner]
        for task in losers:
            task.cancel()
        for ended in await asyncio.gather(*losers, return_exceptions=True):
            if isinstance(ended, socket.socket):  # it had connected at the same moment
                ended.close()


async def _connect(address: Address) -> socket.socket:
    connecting = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connecting, address.sockaddr)
    except BaseException:
        connecting.close()
        raise
    return connecting


def _is_literal(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except OSError:
            continue
        return True
    return False
