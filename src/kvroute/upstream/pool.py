"""The connections to one worker."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from kvroute.errors import ConnectRefused, ConnectTimeout, PoolExhausted, UpstreamError
from kvroute.upstream.connection import UpstreamConnection
from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.response import PlainAnswers
from kvroute.upstream.writes import Outbox

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


# What opening a connection may raise, most special first. UnicodeError: a host that IDNA refuses.
_CONNECT_ERRORS: tuple[tuple[type[Exception], type[UpstreamError], str], ...] = (
    (TimeoutError, ConnectTimeout, "no connection within the deadline"),
    (ssl.SSLError, ConnectRefused, "TLS failed"),
    (OSError, ConnectRefused, "no connection"),
    (UnicodeError, ConnectRefused, "not a host name"),
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a worker listens."""

    scheme: str
    host: str
    port: int

    @property
    def host_header(self) -> bytes:
        """`host` or `host:port`, as in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_default = self.port == (443 if self.scheme == "https" else 80)
        return (host if is_default else f"{host}:{self.port}").encode("ascii")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class ConnectionPool:
    """Open connections of one worker; the last one used is the next one used.

    Needs no task: connections come back through their callbacks, and one timer closes the idle ones, which
    spares replace for a while.
    Mutable; changed on the loop by `acquire`, `retire`, `aclose` and the connections' callbacks.
    """

    def __init__(
        self,
        origin: Origin,
        options: UpstreamOptions,
        tls: ssl.SSLContext | None,
        outbox: Outbox | None = None,
    ) -> None:
        self.origin = origin
        self._options = options
        self._most_idle = options.max_idle
        self._tls = tls
        self._open: set[UpstreamConnection] = set()
        self._idle: dict[UpstreamConnection, None] = {}  # oldest first: a stack with cheap removal
        self._permits = asyncio.Semaphore(options.max_connections) if options.max_connections else None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_retired = False
        self._plain = PlainAnswers()
        self._outbox = outbox
        most_spares = 0 if options.max_connections else min(options.spare_connections, options.max_idle)
        self._spares = Spares(most_spares, lambda: self._connect(options.connect_timeout_s))
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    @property
    def open_connections(self) -> int:
        """Sockets not yet closed, idle ones included."""
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        return len(self._idle) + len(self._spares)

    async def acquire(self, *, connect_timeout_s: float, fresh: bool = False) -> UpstreamConnection:
        """An open connection without an exchange; `start` one on it before the next await.

        An idle one at once where there is one and `fresh` is not asked; else a new one. With all allowed
        connections busy it waits its turn. Both waits end after `connect_timeout_s`, 0 waits for ever.
        Raises ConnectRefused, ConnectTimeout or PoolExhausted. Cancelling it leaves nothing open.
        """
        if self._permits is not None:
            await self._take_permit(self._permits, connect_timeout_s)
        try:
            idle = self._idle
            if not fresh:
                while idle:
                    connection = idle.popitem()[0]
                    if connection.is_open:
                        return connection
                if spare := self._spares.take():
                    return spare
            elif self._permits is not None and len(self._open) >= self._options.max_connections and idle:
                self._close_idle(next(iter(idle)))
            return await self._connect(connect_timeout_s)
        except BaseException:
            self._return_permit()
            raise

    def take_idle(self) -> UpstreamConnection | None:
        """An idle connection as of `acquire`, None where that may have to wait."""
        if self._permits is None:
            idle = self._idle
            while idle:
                connection = idle.popitem()[0]
                if connection.is_open:
                    return connection
            return self._spares.take()
        return None

    def retire(self) -> None:
        """Open and keep no more connections; exchanges under way finish. Idempotent."""
        self._is_retired = True
        self._most_idle = 0
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()
        self._spares.close()

    async def aclose(self) -> None:
        """Retire, break off what is under way with ConnectionLost, and return once all sockets are closed."""
        self.retire()
        await self._spares.aclose()
        for connection in list(self._open):
            connection.close()
        await self._all_closed.wait()

    # What connections tell.

    def connection_opened(self, connection: UpstreamConnection) -> None:
        self._open.add(connection)
        self._all_closed.clear()

    def exchange_ended(self, connection: UpstreamConnection) -> None:
        if self._permits is not None:
            self._permits.release()
        if not connection.is_open:
            return
        idle = self._idle
        if len(idle) >= self._most_idle:
            if not self._most_idle:
                connection.close()
                return
            self._close_idle(next(iter(idle)))
        connection.idle_since = connection.loop.time()
        idle[connection] = None
        if self._expiry is None:
            self._expiry = connection.loop.call_later(
                self._options.keepalive_s, self._expire, connection.loop
            )

    def connection_closed(self, connection: UpstreamConnection) -> None:
        self._idle.pop(connection, None)
        self._spares.forget(connection)
        self._open.discard(connection)
        if not self._open:
            self._all_closed.set()

    async def _connect(self, timeout_s: float) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(
            self,
            loop,
            origin=str(self.origin),
            read_buffer_bytes=self._options.read_buffer_bytes,
            plain=self._plain,
            outbox=self._outbox,
        )
        try:
            if not self._is_retired:
                async with asyncio.timeout(timeout_s or None):
                    await loop.create_connection(
                        lambda: connection, self.origin.host, self.origin.port, ssl=self._tls
                    )
            if self._is_retired:
                raise ConnectRefused(f"{self.origin}: the worker has left")
            if not connection.is_open:
                raise ConnectRefused(f"{self.origin}: closed as soon as it was opened")
        except BaseException as exc:
            connection.close()
            # uvloop closes a connection whose opening is cancelled last-minute without `connection_lost`.
            self.connection_closed(connection)
            for raised, error, text in _CONNECT_ERRORS:
                if isinstance(exc, raised):
                    raise error(f"{self.origin}: {text}") from exc
            raise
        return connection

    def _close_idle(self, connection: UpstreamConnection) -> None:
        self._idle.pop(connection, None)
        connection.close()

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._expiry = None
        while self._idle:
            oldest = next(iter(self._idle))
            left_s = oldest.idle_since + self._options.keepalive_s - loop.time()
            if left_s > 0:
                self._expiry = loop.call_later(left_s, self._expire, loop)
                return
            self._close_idle(oldest)
            self._spares.replace(oldest)

    async def _take_permit(self, permits: asyncio.Semaphore, timeout_s: float) -> None:
        if permits.locked():
            try:
                async with asyncio.timeout(timeout_s or None):
                    await permits.acquire()
            except TimeoutError as exc:
                raise PoolExhausted(f"{self.origin}: all connections stayed busy") from exc
        else:
            await permits.acquire()

    def _return_permit(self) -> None:
        if self._permits is not None:
            self._permits.release()
