"""The connections to one worker."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import ssl
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from kvroute.errors import ConnectRefused, ConnectTimeout, NoResources, PoolExhausted, UpstreamError
from kvroute.upstream.connecting import Connector
from kvroute.upstream.connection import UpstreamConnection
from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.response import PlainAnswers
from kvroute.upstream.writes import Outbox

log = logging.getLogger(__name__)

_REPLACE_FOR_S = 300.0
"""How long expired connections are replaced after the last request that needed them."""
_MAX_AGE_S = 30.0
"""How long a spare connection stays open.

Servers close a connection soon after an answer (uvicorn after 5 s). They wait longer for the first request of
a connection (uvicorn without limit, others for a minute).
"""
_OPEN_INTERVAL_S = 0.02
"""Time between two connects. Spares are opened one at a time, so that running streams are not delayed."""


class SpareConnections:
    """Replaces connections that expire unused by new ones, at most `max_spares`.

    Requests that arrive together after a pause then do not wait for connects and TLS handshakes. Mutable:
    `_ready` and `_to_open` change on the event loop.
    """

    # Not replaced: a connection without a request for `_REPLACE_FOR_S`, and one that the worker closes or
    # refuses.

    def __init__(
        self, max_spares: int, connect: Callable[[], Coroutine[Any, Any, UpstreamConnection]]
    ) -> None:
        self._max_spares = max_spares
        self._connect = connect
        self._ready: dict[UpstreamConnection, float] = {}
        """Open spares, oldest first, and the time until which each is replaced."""
        self._to_open: deque[float] = deque()
        """The same time for each spare that is to be opened."""
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._ready)

    def take(self) -> UpstreamConnection | None:
        """The spare that was opened last; None if there is none."""
        ready = self._ready
        while ready:
            connection = ready.popitem()[0]
            if connection.is_open:
                return connection
        return None

    def replace(self, expired: UpstreamConnection) -> None:
        """Open a spare instead of `expired`, which was kept after an exchange and is closed now."""
        self._replace(expired.loop, expired.idle_since + _REPLACE_FOR_S)

    def forget(self, connection: UpstreamConnection) -> None:
        """The connection was closed: it is no spare any more."""
        self._ready.pop(connection, None)

    def close(self) -> None:
        """Close all spares and open no more. Idempotent."""
        self._max_spares = 0
        self._to_open.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._opening is not None:
            self._opening.cancel()
        for connection in list(self._ready):
            connection.close()
        self._ready.clear()

    async def aclose(self) -> None:
        """Like `close`, but wait until no connection is being opened."""
        self.close()
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)

    def _replace(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        if len(self._ready) + len(self._to_open) >= self._max_spares or loop.time() >= until:
            return
        self._to_open.append(until)
        if self._opening is None:
            self._opening = loop.create_task(self._open(loop))

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while self._to_open:
                until = self._to_open[0]
                connection = await self._connect()
                connection.idle_since = loop.time()
                self._ready[connection] = until
                self._to_open.popleft()
                if self._timer is None:
                    self._timer = loop.call_later(_MAX_AGE_S, self._expire, loop)
                await asyncio.sleep(_OPEN_INTERVAL_S)
        except UpstreamError as error:
            self._to_open.clear()
            log.debug("no spare connection: %s", error)
        finally:
            self._opening = None

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        while self._ready:
            oldest, until = next(iter(self._ready.items()))
            left_s = oldest.idle_since + _MAX_AGE_S - loop.time()
            if left_s > 0:
                self._timer = loop.call_later(left_s, self._expire, loop)
                return
            del self._ready[oldest]
            oldest.close()
            self._replace(loop, until)


# Exceptions of opening a connection, subclasses first. UnicodeError: a host name that IDNA refuses.
_CONNECT_ERRORS: tuple[tuple[type[Exception], type[UpstreamError], str], ...] = (
    (TimeoutError, ConnectTimeout, "no connection within the deadline"),
    (ssl.SSLError, ConnectRefused, "TLS failed"),
    (OSError, ConnectRefused, "no connection"),
    (UnicodeError, ConnectRefused, "not a host name"),
)


_OWN_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of the gateway's host. They say nothing about the worker."""


def _is_own_error(error: BaseException) -> bool:
    """Whether a connection could not be opened because this process lacks descriptors, ports or memory."""
    if not isinstance(error, OSError) or isinstance(error, (TimeoutError, ssl.SSLError)):
        return False
    if error.errno in _OWN_ERRORS:
        return True
    if error.errno is not None and error.errno > 0:
        return False
    # A name lookup fails without a descriptor, too, but does not say why; nor do errors of several addresses.
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as failure:
        return failure.errno in _OWN_ERRORS
    return False


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a worker."""

    scheme: str
    host: str
    port: int

    @property
    def host_header(self) -> bytes:
        """The value of the Host header: `host` or `host:port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_default = self.port == (443 if self.scheme == "https" else 80)
        return (host if is_default else f"{host}:{self.port}").encode("ascii")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class ConnectionPool:
    """The open connections to one worker. The connection that was used last is used next.

    Mutable: `acquire`, `retire`, `aclose` and the connections' callbacks change it on the event loop.
    """

    # There is no task: connections return through callbacks, and one timer closes idle ones.

    def __init__(
        self,
        origin: Origin,
        options: UpstreamOptions,
        tls: ssl.SSLContext | None,
        outbox: Outbox | None = None,
    ) -> None:
        self.origin = origin
        self._options = options
        self._max_idle = options.max_idle
        self._tls = tls
        self._open: set[UpstreamConnection] = set()
        self._idle: dict[UpstreamConnection, None] = {}  # oldest first: a stack with cheap removal
        self._permits = asyncio.Semaphore(options.max_connections) if options.max_connections else None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_retired = False
        self._connector = Connector(origin.host, origin.port)
        self._plain = PlainAnswers()
        self._outbox = outbox
        max_spares = 0 if options.max_connections else min(options.spare_connections, options.max_idle)
        self._spares = SpareConnections(max_spares, lambda: self._connect(options.connect_timeout_s))
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    @property
    def open_connections(self) -> int:
        """Number of open sockets, including idle ones."""
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        return len(self._idle) + len(self._spares)

    async def acquire(self, *, connect_timeout_s: float, fresh: bool = False) -> UpstreamConnection:
        """Return an open connection without an exchange. The caller starts one before its next await.

        Returns an idle connection if there is one and `fresh` is false; otherwise opens one. While the limit
        of connections is reached, it waits. Each of the two waits takes at most `connect_timeout_s`; 0 sets
        no limit. Raises ConnectRefused, NoResources, ConnectTimeout or PoolExhausted. After a cancellation
        nothing is left open.
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
        """An idle connection like that of `acquire`; None if `acquire` might wait."""
        if self._permits is None:
            idle = self._idle
            while idle:
                connection = idle.popitem()[0]
                if connection.is_open:
                    return connection
            return self._spares.take()
        return None

    def replace(self) -> None:
        """Keep no more connections; running exchanges, and requests that wait for a connection, finish."""
        self._max_idle = 0
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()
        self._spares.close()

    def retire(self) -> None:
        """Open and keep no more connections; running exchanges finish. Idempotent."""
        self._is_retired = True
        self.replace()

    async def aclose(self) -> None:
        """Retire, end running exchanges with ConnectionLost, and wait until all sockets are closed."""
        self.retire()
        await self._spares.aclose()
        for connection in list(self._open):
            connection.close()
        await self._all_closed.wait()

    # Callbacks of the connections (`ConnectionOwner`).

    def connection_opened(self, connection: UpstreamConnection) -> None:
        self._open.add(connection)
        self._all_closed.clear()

    def exchange_ended(self, connection: UpstreamConnection) -> None:
        if self._permits is not None:
            self._permits.release()
        if not connection.is_open:
            return
        idle = self._idle
        if len(idle) >= self._max_idle:
            if not self._max_idle:
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
                    await self._open_socket(loop, connection)
            if self._is_retired:
                raise ConnectRefused(f"{self.origin}: the worker has left")
            if not connection.is_open:
                raise ConnectRefused(f"{self.origin}: closed as soon as it was opened")
        except BaseException as exc:
            connection.close()
            # uvloop does not call `connection_lost` if opening is cancelled at the last moment.
            self.connection_closed(connection)
            if _is_own_error(exc):
                reason = getattr(exc, "strerror", None) or "no descriptors"
                raise NoResources(f"{self.origin}: the gateway cannot open a connection ({reason})") from exc
            for raised, error, text in _CONNECT_ERRORS:
                if isinstance(exc, raised):
                    raise error(f"{self.origin}: {text}") from exc
            raise
        return connection

    async def _open_socket(self, loop: asyncio.AbstractEventLoop, connection: UpstreamConnection) -> None:
        connected = await self._connector.connect()
        if connected is None:
            await loop.create_connection(
                lambda: connection, self.origin.host, self.origin.port, ssl=self._tls
            )
            return
        try:
            await loop.create_connection(
                lambda: connection,
                sock=connected,
                ssl=self._tls,
                server_hostname=self.origin.host if self._tls is not None else None,
            )
        except BaseException:
            connected.close()
            raise

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
