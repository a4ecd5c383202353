"""The connections to one worker."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from kvroute.errors import ConnectRefused, ConnectTimeout, PoolExhausted, UpstreamError
from kvroute.upstream.connection import UpstreamConnection
from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.outbox import Outbox
from kvroute.upstream.plain_answer import PlainAnswers
from kvroute.upstream.spares import Spares

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
