"""What all connections of a daemon share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvroute.clock import Clock
from kvroute.tierd.peers import INCARNATION_HEADER
from kvroute.tierd.store import Store

_SCRAP_BYTES = 256 << 10


class StallLimits(NamedTuple):
    """What a client may take for a request."""

    pause_s: float
    """Without a byte moving."""
    grace_s: float
    """Before the average rate of a new entry counts."""
    least_rate: float
    """Bytes a second after that."""


class Client(Protocol):
    """A connection, as the site sees it."""

    def cut_if_stalled(self, now: float, limits: StallLimits) -> None:
        """Abort when something is under way that has stopped or is too slow."""
        ...

    def close(self) -> asyncio.Task[None] | None:
        """Abort; the task that must be awaited, if there is one."""
        ...


class Site:
    """Mutable: the set of connections, which each of them keeps up."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        incarnation: str,
        longest_lease_s: float,
        start: int,
        peer_key: bytes | None,
        page: Callable[[str], tuple[int, str, bytes]],
    ) -> None:
        """`start` is the segment's first offset. `page(name)` is status, content type and body of `health` or
        `metrics`."""
        self.store = store
        self.clock = clock
        self.for_peers = f"{INCARNATION_HEADER}: {incarnation}\r\n"
        """A header line that tells a peer whom it has asked."""
        self.longest_lease_s = longest_lease_s
        self.start = start
        self.authorization = None if peer_key is None else b"Bearer " + peer_key
        self.page = page
        self.scrap = memoryview(bytearray(_SCRAP_BYTES))
        """Where bodies go that nobody wants."""
        self._clients: set[Client] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def enter(self, client: Client) -> None:
        """A connection was made."""
        self._clients.add(client)
        self._is_empty.clear()

    def leave(self, client: Client) -> None:
        """It was lost."""
        self._clients.discard(client)
        if not self._clients:
            self._is_empty.set()

    def sweep(self, limits: StallLimits) -> None:
        """Cut the connections that have stopped in the middle of a request or an answer."""
        now = self.clock.now()
        for client in list(self._clients):
            client.cut_if_stalled(now, limits)

    async def hang_up(self) -> None:
        """Abort all connections and wait until their tasks have ended."""
        tasks = [task for client in list(self._clients) if (task := client.close()) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._is_empty.wait()
