"""Writes of one round of the event loop, sent one right after another."""

from __future__ import annotations

import asyncio

_MOST = 16
"""Writes that wait for the end of a round; one more sends them at once, so that the first does not wait for
more than about 1 ms of other requests."""


class Outbox:
    """Keeps what is to be written until the loop has heard of everything that it was woken for.

    A write wakes whoever reads the other end. With the work for the next request in between, that one has
    gone back to sleep by the next write and is woken once for each; the writes of a round together wake it
    once.

    Mutable, touched from one event loop only. `rounds` tells whether something sent before may still be
    waiting: whoever writes to a transport himself, or closes it, after `send` in the same round calls
    `flush` first. What waits for a transport that is closed meanwhile is dropped, as the transport does
    with what it has not written.
    """

    __slots__ = ("_is_due", "_waiting", "rounds")

    def __init__(self) -> None:
        self.rounds = 0
        """How often what waited was written."""
        self._waiting: list[tuple[asyncio.Transport, bytes, bytes]] = []
        self._is_due = False

    def send(self, transport: asyncio.Transport, data: bytes, body: bytes = b"") -> None:
        """Write `data`, then `body` (they are not joined), at the end of this round. Needs a running loop."""
        waiting = self._waiting
        waiting.append((transport, data, body))
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._end_round)
        elif len(waiting) > _MOST:
            self.flush()

    def flush(self) -> None:
        """Write what waits, now."""
        waiting = self._waiting
        if not waiting:
            return
        self._waiting = []
        self.rounds += 1
        for transport, data, body in waiting:
            if transport.is_closing():
                continue
            if body:
                transport.writelines((data, body))
            else:
                transport.write(data)

    def _end_round(self) -> None:
        self._is_due = False
        self.flush()


def send_at_once(transport: asyncio.Transport, data: bytes, body: bytes = b"") -> None:
    """In place of `Outbox.send` where there is none."""
    if body:
        transport.writelines((data, body))
    else:
        transport.write(data)
