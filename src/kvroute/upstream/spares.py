"""Connections to one worker that are opened ahead of need."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from kvroute.errors import UpstreamError
from kvroute.upstream.connection import UpstreamConnection

log = logging.getLogger(__name__)

_REMEMBERED_S = 300.0
"""How long a connection that was needed once is kept ready for the next time."""
_LIFE_S = 30.0
"""Time that a spare stays open. Servers close a connection soon after an answer (uvicorn after 5 s), but
leave one alone for longer that has not had its first request (uvicorn for ever, others for a minute)."""
_APART_S = 0.02
"""Spares are opened one at a time and so far apart, so that no running stream waits for many of them."""


class Spares:
    """Replaces connections that expire unused by fresh ones: requests that come together after a pause find
    as many open as they needed the last time, and do not wait for connects and TLS handshakes.

    At most `most`; a connection that was not needed for `_REMEMBERED_S` is not replaced, nor is one that the
    worker closes or refuses. Needs no task but for opening.
    Mutable: `_ready` and `_due`, changed on the loop.
    """

    def __init__(self, most: int, connect: Callable[[], Coroutine[Any, Any, UpstreamConnection]]) -> None:
        self._most = most
        self._connect = connect
        self._ready: dict[UpstreamConnection, float] = {}  # until when it is replaced; oldest first
        self._due: deque[float] = deque()  # as many as are to be opened, until when they are replaced
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._ready)

    def take(self) -> UpstreamConnection | None:
        """The one opened last, None where there is none."""
        ready = self._ready
        while ready:
            connection = ready.popitem()[0]
            if connection.is_open:
                return connection
        return None

    def replace(self, expired: UpstreamConnection) -> None:
        """`expired` was kept after an exchange and is closed now: soon have another one in its place."""
        self._replace(expired.loop, expired.idle_since + _REMEMBERED_S)

    def forget(self, connection: UpstreamConnection) -> None:
        """It has been closed."""
        self._ready.pop(connection, None)

    def close(self) -> None:
        """Close all and open no more. Idempotent."""
        self._most = 0
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._opening is not None:
            self._opening.cancel()
        for connection in list(self._ready):
            connection.close()
        self._ready.clear()

    async def aclose(self) -> None:
        """As `close`; returns once nothing is being opened."""
        self.close()
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)

    def _replace(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        if len(self._ready) + len(self._due) >= self._most or loop.time() >= until:
            return
        self._due.append(until)
        if self._opening is None:
            self._opening = loop.create_task(self._open(loop))

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while self._due:
                until = self._due[0]
                connection = await self._connect()
                connection.idle_since = loop.time()
                self._ready[connection] = until
                self._due.popleft()
                if self._timer is None:
                    self._timer = loop.call_later(_LIFE_S, self._expire, loop)
                await asyncio.sleep(_APART_S)
        except UpstreamError as error:
            self._due.clear()
            log.debug("no spare connection: %s", error)
        finally:
            self._opening = None

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        while self._ready:
            oldest, until = next(iter(self._ready.items()))
            left_s = oldest.idle_since + _LIFE_S - loop.time()
            if left_s > 0:
                self._timer = loop.call_later(left_s, self._expire, loop)
                return
            del self._ready[oldest]
            oldest.close()
            self._replace(loop, until)
