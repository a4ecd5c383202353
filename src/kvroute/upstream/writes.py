"""Writes of one round of the event loop, sent one right after another."""

from __future__ import annotations

import asyncio

_MOST = 16
"""Writes that wait for the end of a round; one more sends them at once, so that the first does not wait for
more than about 1 ms of other requests."""

_FEW = 3
"""Requests for streams that wait for each other, where rounds have several."""

_LOOK_EVERY = 16
"""Writes at once, until the next of them looks how many there are in its round."""

_LONELY_ROUNDS = 4
"""Rounds of one write each, one after another, after which the next is written at once."""


class Outbox:
    """Keeps what is to be written until the loop has heard of everything that it was woken for.

    A write wakes whoever reads the other end. With the work for the next request in between, that one has
    gone back to sleep by the next write and is woken once for each; the writes of a round together wake it
    once. To wait for the end of a round makes the loop ask the kernel once more, so it is done only while
    rounds do have several writes; where they have one, it is sent at once, and a look at one round in some
    tells when that changes.

    Mutable, touched from one event loop only. `rounds` tells whether something sent before may still be
    waiting: whoever writes to a transport himself, or closes it, after `send` in the same round calls
    `flush` first. What waits for a transport that is closed meanwhile is dropped, as the transport does
    with what it has not written.
    """

    __slots__ = ("_gathers", "_is_due", "_lonely", "_sent", "_waiting", "rounds")

    def __init__(self) -> None:
        self.rounds = 0
        """How often what waited was written."""
        self._waiting: list[tuple[asyncio.Transport, bytes, bytes]] = []
        self._gathers = False
        self._is_due = False
        """The end of this round is waited for."""
        self._sent = 0
        """In the round whose end is waited for; else writes at once since the last look."""
        self._lonely = 0

    def send(self, transport: asyncio.Transport, data: bytes, body: bytes = b"") -> None:
        """Write `data`, then `body` (they are not joined), by the end of this round. Needs a running loop."""
        self._sent += 1
        if self._gathers:
            waiting = self._waiting
            waiting.append((transport, data, body))
            if not self._is_due:
                self._wait()
            elif len(waiting) > _MOST:
                self.flush()
            return
        send_at_once(transport, data, body)
        if self._sent > _LOOK_EVERY and not self._is_due:
            self._wait()

    def send_soon(self, transport: asyncio.Transport, data: bytes, body: bytes = b"") -> None:
        """As `send`, for a request whose client waits for the first byte of a stream: the first of a round
        goes at once, the others in threes.

        Sixteen that come together would all be planned before the first of them went, and then their first
        bytes would come all at once. In threes the workers answer the first ones while the others are
        planned, and are woken a third as often as by each alone.
        """
        self._sent += 1
        if self._is_due:
            waiting = self._waiting
            waiting.append((transport, data, body))
            if len(waiting) >= _FEW:
                self.flush()
            return
        send_at_once(transport, data, body)
        self._wait()

    def flush(self) -> None:
        """Write what waits, now."""
        waiting = self._waiting
        if not waiting:
            return
        self._waiting = []
        self.rounds += 1
        for transport, data, body in waiting:
            if not transport.is_closing():
                send_at_once(transport, data, body)

    def _wait(self) -> None:
        self._is_due, self._sent = True, 1
        asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        self._is_due = False
        if self._sent > 1:
            self._gathers, self._lonely = True, 0
        else:
            self._lonely += 1
            self._gathers = self._gathers and self._lonely < _LONELY_ROUNDS
        self._sent = 0
        self.flush()


def send_at_once(transport: asyncio.Transport, data: bytes, body: bytes = b"") -> None:
    """Write both, without joining them."""
    if body:
        transport.writelines((data, body))
    else:
        transport.write(data)
