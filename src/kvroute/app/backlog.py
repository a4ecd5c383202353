"""Accepting clients that come together."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 32
"""Connections taken in one round of the loop: a millisecond or two, after which running answers have their
turn."""


class Backlog:
    """Accepts all that wait on listening sockets, beside the loop's own server.

    libuv accepts one connection in each round of the loop. A round that relays some hundred streams lasts
    milliseconds, and so of 640 clients that come together the last ones waited 2 seconds to be accepted.
    Errors are left to the loop's server, which accepts from the same sockets. Mutable: `begin` and `close`;
    `_opening` holds what was accepted a moment ago. Belongs to one event loop.
    """

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._make_protocol = make_protocol
        self._sockets: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()

    def begin(self, listening: Iterable[socket.SocketType]) -> None:
        """Watch these, through descriptors of its own."""
        loop = asyncio.get_running_loop()
        for each in listening:
            # Told no protocol, Python asks the descriptor; asyncio sets TCP_NODELAY by it.
            own = socket.socket(fileno=os.dup(each.fileno()))
            own.setblocking(False)
            self._sockets.append(own)
            loop.add_reader(own, self._accept, loop, own)

    def close(self) -> None:
        """Accept no more. Idempotent."""
        for own in self._sockets:
            asyncio.get_running_loop().remove_reader(own)
            own.close()
        self._sockets.clear()

    def _accept(self, loop: asyncio.AbstractEventLoop, own: socket.socket) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                accepted, _ = own.accept()
            except OSError:  # mostly: nobody waits any more
                return
            accepted.setblocking(False)
            opening = loop.create_task(self._open(loop, accepted))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> None:
        try:
            await loop.connect_accepted_socket(self._make_protocol, accepted)
        except Exception:
            log.exception("a client's connection could not be set up")
            accepted.close()
