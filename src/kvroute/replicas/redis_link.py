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
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol, cast

import redis.asyncio
from redis.asyncio.connection import Connection
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from kvroute.replicas.envelope import MAX_ENVELOPE_BYTES
from kvroute.replicas.options import SharingOptions

log = logging.getLogger(__name__)

_CONNECT_S: Final = 2.0
_WRITE_S: Final = 2.0
"""Longest wait until the kernel takes what was written; then the connection is made again."""
_MAX_LINE: Final = 4096
_MAX_ELEMENTS: Final = 16
"""A subscriber gets lists of three."""
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

    def on_too_large(self, size: int) -> None:
        """A message of so many bytes has arrived and was not kept."""
        ...

    def on_up(self) -> None:
        """Both connections are open."""
        ...

    def on_down(self, reason: str) -> None:
        """The link is down, or stays down; `reason` is without secrets."""
        ...

    def on_refused(self, reason: str) -> None:
        """Redis has answered a command with an error."""
        ...


class RedisLink:
    """Keeps both connections open. Mutable; belongs to one event loop. `run` works until it is cancelled."""

    def __init__(self, options: SharingOptions, channels: tuple[bytes, ...], owner: LinkOwner) -> None:
        """`channels`: what to subscribe to."""
        assert options.url is not None
        self._channels = channels
        self._owner = owner
        self._broken = asyncio.Event()
        self._subscribed = asyncio.Event()
        self._unconfirmed: set[bytes] = set()
        """Channels whose subscription Redis has not confirmed."""
        self._listening: _Stream | None = None
        self._is_paused = False
        self._publishing: _Stream | None = None
        """Written to while the link is up."""
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
        # Used as a factory of connections only: its `Connection` does AUTH and TLS, see `_Stream`.
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
        stream = self._publishing
        while stream is not None and stream.has_room:
            command = self._owner.next_command()
            if command is None:
                return
            stream.write(b"PUBLISH", *command)

    def reconnect(self) -> None:
        """Close the connections and open others: this link is open but does not deliver."""
        self._broken.set()

    def pause(self) -> None:
        """Receive nothing until `resume`; what has been read already is still delivered."""
        self._is_paused = True
        if self._listening is not None:
            self._listening.pause_reading()

    def resume(self) -> None:
        self._is_paused = False
        if self._listening is not None:
            self._listening.resume_reading()

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
                    to_write = _Stream(publishing, self._on_answer, self.wake)
                    to_read = _Stream(listening, self._on_message, lambda: None)
                    self._unconfirmed, self._listening = set(self._channels), to_read
                    if self._is_paused:
                        to_read.pause_reading()
                    to_read.write(b"SUBSCRIBE", *self._channels)
                    await _wait_while(self._subscribed, to_read)
                pause_s, self._publishing = _FIRST_PAUSE_S, to_write
                self._owner.on_up()
                self.wake()
                await _wait_while(self._broken, to_read, to_write)
                self._owner.on_down("it does not deliver messages")
            except (RedisError, OSError, TimeoutError) as error:
                self._owner.on_down(_reason(error))
            finally:
                self._publishing = self._listening = None
                self._subscribed.clear()
                for connection in (publishing, listening):
                    with contextlib.suppress(RedisError, OSError):
                        await connection.disconnect(nowait=True)
            # Spread, so that all members of a fleet do not connect in one moment.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _on_answer(self, answer: object) -> None:
        """The answers are numbers of receivers; only errors matter, such as a missing permission."""
        if isinstance(answer, ResponseError):
            self._owner.on_refused(_reason(answer))

    def _on_message(self, message: object) -> None:
        if isinstance(message, ResponseError):
            raise message
        if isinstance(message, list) and len(message) == 3:
            if message[0] == b"message":
                if isinstance(message[2], bytes):
                    self._owner.on_data(message[2])
                elif isinstance(message[2], TooLarge):
                    self._owner.on_too_large(message[2].size)
            elif message[0] == b"subscribe":
                self._unconfirmed.discard(cast("bytes", message[1]))
                if not self._unconfirmed:
                    self._subscribed.set()


class UnsupportedClient(RedisError):
    """The installed release of redis-py does not have what kvroute needs of it."""


def _transport_of(connection: Connection) -> asyncio.Transport:
    """The transport of an open connection. Raises UnsupportedClient.

    redis-py (8.1) has no public name for it. To connect without redis-py would mean to write TLS, AUTH and
    the rest of its handshake here.
    """
    try:
        writer = connection._writer
    except AttributeError as error:
        raise UnsupportedClient("redis.asyncio.Connection has no _writer") from error
    if writer is None:
        raise RedisConnectionError("it was closed")
    return cast("asyncio.Transport", writer.transport)


class _Stream(asyncio.Protocol):
    """The bytes of a connection that redis-py has opened. Mutable; `failed` gets its end.

    redis-py's own reader awaits every line of an answer, which costs more than everything else that is done
    with a message.
    """

    def __init__(
        self, connection: Connection, on_answer: Callable[[object], None], on_room: Callable[[], None]
    ) -> None:
        """`on_answer` gets each answer; what it raises ends the stream. `on_room`: may be written again."""
        self._transport = _transport_of(connection)  # all answers until now were read, so none is lost
        self._on_answer = on_answer
        self._on_room = on_room
        self._reader = AnswerReader(MAX_ENVELOPE_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.set_protocol(self)

    @property
    def has_room(self) -> bool:
        """Whether the kernel takes what is written."""
        return self._timer is None and not self.failed.done()

    def write(self, *words: bytes) -> None:
        command = [b"*%d\r\n" % len(words)]
        for word in words:
            command += (b"$%d\r\n" % len(word), word, b"\r\n")
        self._transport.write(b"".join(command))

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data, self._on_answer)
        except (RedisError, ValueError) as error:
            self._fail(error if isinstance(error, RedisError) else InvalidResponse("no RESP"))

    def pause_writing(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_WRITE_S, self._fail, TimeoutError())

    def resume_writing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._on_room()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError())

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # asyncio would log it if nobody waits any more


class TooLarge(NamedTuple):
    """Stands in an answer for a string that was longer than the limit and was not kept."""

    size: int


class AnswerReader:
    """Splits bytes in RESP2 into answers. Keeps at most `max_bytes` of one string: longer ones are skipped.

    Anybody who can write to the Redis can publish 512 MB in one message. Mutable: the incomplete answer.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._skipped = self._to_skip = 0
        """Length of the string that is skipped, and what of it is still to come, with its end."""
        self._elements: list[object] = []
        self._missing = 0
        """Elements of the incomplete list that are still to come; 0 outside a list."""

    def feed(self, data: bytes, on_answer: Callable[[object], None]) -> None:
        """Call `on_answer` with each complete answer; what it raises ends the reading.

        An error is a ResponseError; lists are flat, as those of a subscriber are. Raises ValueError if the
        bytes are no answers, or lists in lists, or longer lists than a subscriber gets.
        """
        buffer, start = self._data, 0
        buffer += data
        try:
            while True:
                if self._to_skip:
                    count = min(self._to_skip, len(buffer) - start)
                    start += count
                    self._to_skip -= count
                    if self._to_skip:
                        return
                    self._add(TooLarge(self._skipped), on_answer)
                    continue
                end = buffer.find(b"\r\n", start, start + _MAX_LINE)
                if end < 0:
                    if len(buffer) - start >= _MAX_LINE:
                        raise ValueError("a line is too long")
                    return
                kind, line = buffer[start], bytes(buffer[start + 1 : end])
                if kind == 0x24:  # $
                    size, begin = int(line), end + 2
                    if size > self._max_bytes:
                        self._skipped, self._to_skip, start = size, size + 2, begin
                        continue
                    if size < 0:
                        start = begin
                        self._add(None, on_answer)
                        continue
                    if len(buffer) < begin + size + 2:
                        return
                    start = begin + size + 2
                    self._add(bytes(buffer[begin : begin + size]), on_answer)
                    continue
                start = end + 2
                if kind == 0x2A:  # *
                    count = int(line)
                    if self._missing or count > _MAX_ELEMENTS:
                        raise ValueError("a list is too long")
                    if count <= 0:
                        on_answer([])
                    self._missing = max(0, count)
                elif kind == 0x2D:  # -
                    text = line.decode(errors="replace")
                    self._add(
                        (NoPermissionError if text.startswith("NOPERM") else ResponseError)(text), on_answer
                    )
                elif kind in b"+:":
                    self._add(line, on_answer)
                else:
                    raise ValueError(kind)
        finally:
            del buffer[:start]

    def _add(self, value: object, on_answer: Callable[[object], None]) -> None:
        if not self._missing:
            on_answer(value)
            return
        self._elements.append(value)
        self._missing -= 1
        if not self._missing:
            answer, self._elements = self._elements, []
            on_answer(answer)


async def _wait_while(event: asyncio.Event, *streams: _Stream) -> None:
    """Wait for the event. Raises what has ended one of the streams."""
    waiting = asyncio.create_task(event.wait())
    try:
        waits: list[asyncio.Future[Any]] = [waiting, *(stream.failed for stream in streams)]
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
    finally:
        waiting.cancel()


def _reason(error: BaseException) -> str:
    """Why Redis cannot be used, without the URL, user and password."""
    if isinstance(error, TimeoutError) or "timeout" in type(error).__name__.lower():
        return "it does not answer in time"
    if isinstance(error, AuthenticationError):
        return "it refuses the user or password"
    if isinstance(error, NoPermissionError):
        return "it does not permit its user the commands SUBSCRIBE and PUBLISH for the fleet's channels"
    if isinstance(error, UnsupportedClient):
        return f"the installed redis-py {redis.__version__} is not supported: {error}"
    if isinstance(error, ResponseError):
        # Its text may have names of users and channels.
        return f"it answers with an error ({type(error).__name__})"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return "its TLS certificate or protocol is not accepted"
        cause = cause.__cause__ or cause.__context__
    return "it cannot be reached"
