"""The connection of one gateway process to the Redis of its fleet.

Two connections: one publishes, without waiting for the answers, and one is subscribed. On each one Redis
keeps the order, so every subscriber receives what one process has written in the order of writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import redis.asyncio
from redis.asyncio.connection import Connection
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from kvroute.replicas.options import SharingOptions

log = logging.getLogger(__name__)

_CONNECT_S: Final = 2.0
_WRITE_S: Final = 2.0
"""Longest wait until the kernel takes what was written; then the connection is made again."""
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 2.0


class LinkOwner(Protocol):
    """What a `RedisLink` writes, and where it delivers what arrives. All methods return soon."""

    def next_command(self) -> tuple[bytes, bytes] | None:
        """The next channel and envelope to publish; None if nothing waits."""
        ...

    def on_data(self, data: bytes) -> None:
        """An envelope has arrived."""
        ...

    def on_up(self) -> None:
        """Both connections are open."""
        ...

    def on_down(self, why: str) -> None:
        """The link is down, or stays down; `why` is without secrets."""
        ...

    def on_refused(self, why: str) -> None:
        """Redis has answered a command with an error."""
        ...


class RedisLink:
    """Keeps both connections open. Mutable; belongs to one event loop. `run` works until it is cancelled."""

    def __init__(self, options: SharingOptions, channels: tuple[bytes, ...], owner: LinkOwner) -> None:
        """`channels`: what to subscribe to."""
        assert options.url is not None
        self._channels = channels
        self._owner = owner
        self._wake = asyncio.Event()
        self._broken: asyncio.Event = asyncio.Event()
        tls: dict[str, Any] = {}
        if options.uses_tls:
            files = options.tls
            tls = {
                # None: the default list of authorities.
                "ssl_ca_certs": str(files.ca_file) if files.ca_file is not None else None,
                "ssl_certfile": str(files.cert_file) if files.cert_file is not None else None,
                "ssl_keyfile": str(files.key_file) if files.key_file is not None else None,
                "ssl_check_hostname": True,  # redis 5 does not check it by default
                "ssl_min_version": ssl.TLSVersion.TLSv1_2,
            }
        # Used as a factory of connections only: its `Connection` does AUTH and TLS. The commands of
        # redis.asyncio's client cost ten times as much, because each waits for its own answer.
        self._factory = redis.asyncio.ConnectionPool.from_url(
            options.url.get_secret_value(),
            password=options.password.get_secret_value() if options.password else None,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=None,  # a subscriber waits for as long as nothing is sent
            protocol=2,
            **tls,
        )

    def wake(self) -> None:
        """Something waits to be published."""
        self._wake.set()

    def reconnect(self) -> None:
        """Close the connections and open others: this link is open but does not deliver."""
        self._broken.set()

    async def run(self) -> None:
        """Connect, publish and receive; connect again after each failure. Ends by cancellation only."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self._broken.clear()
            publishing: Connection = self._factory.make_connection()  # type: ignore[no-untyped-call]
            listening: Connection = self._factory.make_connection()  # type: ignore[no-untyped-call]
            try:
                async with asyncio.timeout(2 * _CONNECT_S):
                    await publishing.connect()  # type: ignore[no-untyped-call]
                    await listening.connect()  # type: ignore[no-untyped-call]
                    await listening.send_command("SUBSCRIBE", *self._channels)
                    for _ in self._channels:
                        await listening.read_response()
                self._owner.on_up()
                pause_s = _FIRST_PAUSE_S
                await self._until_broken(publishing, listening)
                self._owner.on_down("it does not deliver messages")
            except (RedisError, OSError, TimeoutError) as error:
                self._owner.on_down(_reason(error))
            finally:
                for connection in (publishing, listening):
                    with contextlib.suppress(RedisError, OSError):
                        await connection.disconnect(nowait=True)
            # Spread, so that all members of a fleet do not connect in one moment.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _until_broken(self, publishing: Connection, listening: Connection) -> None:
        """Work until a connection fails, which raises, or until `reconnect`."""
        work: tuple[Coroutine[Any, Any, object], ...] = (
            self._publish(publishing),
            self._read_answers(publishing),
            self._receive(listening),
            self._broken.wait(),
        )
        tasks = [asyncio.create_task(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _publish(self, connection: Connection) -> None:
        next_command = self._owner.next_command
        while True:
            self._wake.clear()
            while (command := next_command()) is not None:
                packed = connection.pack_command("PUBLISH", *command)
                async with asyncio.timeout(_WRITE_S):
                    await connection.send_packed_command(packed, check_health=False)
            await self._wake.wait()

    async def _read_answers(self, connection: Connection) -> None:
        """The answers are numbers of receivers; only errors matter, such as a missing permission."""
        while True:
            try:
                await connection.read_response()
            except ResponseError as error:
                self._owner.on_refused(_reason(error))

    async def _receive(self, connection: Connection) -> None:
        on_data: Callable[[bytes], None] = self._owner.on_data
        while True:
            message = await connection.read_response()
            if isinstance(message, list) and message[0] == b"message":
                on_data(message[2])


def _reason(error: BaseException) -> str:
    """Why Redis cannot be used, without the URL, user and password."""
    if isinstance(error, TimeoutError) or "timeout" in type(error).__name__.lower():
        return "it does not answer in time"
    if isinstance(error, AuthenticationError):
        return "it refuses the user or password"
    if isinstance(error, NoPermissionError):
        return "it does not permit its user the commands SUBSCRIBE and PUBLISH for the fleet's channels"
    if isinstance(error, ResponseError):
        # Its text may have names of users and channels.
        return f"it answers with an error ({type(error).__name__})"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return "its TLS certificate or protocol is not accepted"
        cause = cause.__cause__ or cause.__context__
    return "it cannot be reached"
