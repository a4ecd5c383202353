"""Where the messages of one stream wait for their reader, and the two ways in which they arrive.

`ConnectedInbox` connects to a worker's PUB socket and reads it without libzmq: libzmq reads in a thread of
its own, which wakes the event loop, which then asks libzmq for one frame after the other. That cost four
times as much as applying a batch. `Listener` binds a socket that workers connect to. Replays are read with
libzmq, because no request waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final
from urllib.parse import urlsplit

from kvroute.errors import WireError
from kvroute.events.poller import SocketPoller, TimeSlicer
from kvroute.wire.zmq import (
    GREETING,
    MessageReader,
    check_greeting,
    command,
    ready,
    split_command,
)
from kvroute.wire.zmq import subscription as subscription_to

log = logging.getLogger(__name__)

Frames = Sequence[bytes]
"""The frames of one message."""

OnMessages = Callable[[Sequence[Frames], float], int]
"""Applies new messages: the first one, and further ones until this time of the clock. Returns how many."""

_RECONNECT_S: Final = 0.1
_MAX_RECONNECT_S: Final = 2.0
"""Pause before connecting again: each pause is twice as long as the one before, up to the maximum."""
_CONNECT_S: Final = 10.0
"""Longest time to connect; each address of the host gets an equal share."""
_HANDSHAKE_S: Final = 10.0
"""Longest time from the connection to the subscription."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds, probes: a host that disappears without closing the connection is noticed after 25 s."""
_PING_BYTES: Final = 16
"""Longest context of a PING, which the PONG repeats (ZMTP 3.1)."""
_READ_BYTES: Final = 65_536
_BACKLOG: Final = 100
_MAX_PEERS: Final = 1024
"""Connections of a `Listener`: some for each rank of each worker."""
_UNSHARED_BYTES: Final = 1 << 20
"""An incomplete message up to this size does not count for `_MAX_HELD_BYTES`."""
_MAX_HELD_BYTES: Final = 192 * 1024 * 1024
"""Of all incomplete messages of a `Listener` together: three of the longest ones."""


def _accept_none(messages: Sequence[Frames], deadline: float) -> int:
    return 0


class Inbox:
    """Messages of one stream in the order of their arrival. Construct it where an event loop runs.

    Mutable: the receiving side calls `put` and `mark_lost`; the one reader sets `on_messages`, and calls
    `wait` and `take`. While no message waits, new messages are offered to `on_messages` first; the others
    wait.
    """

    def __init__(self, poller: SocketPoller | None = None) -> None:
        """`poller` is told while messages have arrived that are not applied yet."""
        self.on_messages: OnMessages = _accept_none
        self._behind_at = poller
        self._is_behind = False
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Frames] = deque()
        self._lost = False
        self._last_arrival = self._loop.time()
        """When a message last arrived, or when `wait` was called."""
        self._timeout_s = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """The number of messages that wait."""
        return len(self._waiting)

    # For the receiving side

    def put(self, messages: Sequence[Frames], deadline: float = inf) -> None:
        """Add messages that have arrived, in this order. `on_messages` may apply the first ones until
        `deadline`.

        `deadline` is a time of the reader's clock.
        """
        self._last_arrival = self._loop.time()
        if not self._waiting and not self._lost:
            applied = self.on_messages(messages, deadline)
            if applied == len(messages):
                return
            messages = messages[applied:]
        self._waiting.extend(messages)
        self._set_behind(True)
        self._wake()

    def _set_behind(self, is_behind: bool) -> None:
        if is_behind is not self._is_behind and self._behind_at is not None:
            self._is_behind = is_behind
            self._behind_at.set_behind(self, is_behind)

    def mark_lost(self) -> None:
        """Messages may have been lost after the ones that were put in so far."""
        self._lost = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # For the reader

    async def ready(self, timeout_s: float) -> None:
        """Return once messages that are published from now on arrive here, or after `timeout_s`."""

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a message or a loss. False if no message arrived for `timeout_s`.

        The messages that were taken before are applied.
        """
        if self._waiting or self._lost:
            return True
        self._set_behind(False)
        self._last_arrival, self._timeout_s = self._loop.time(), timeout_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._last_arrival + timeout_s, self._on_timer)
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None
        return bool(self._waiting) or self._lost

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        deadline = self._last_arrival + self._timeout_s
        if self._loop.time() >= deadline:
            self._wake()
        else:
            self._timer = self._loop.call_at(deadline, self._on_timer)

    def take(self, limit: int) -> Sequence[Frames]:
        """Remove and return the oldest messages; fewer than `limit` only if no more wait."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(limit, len(waiting)))]

    def interrupted(self) -> bool:
        """True once after messages may have been lost. Call it before taking messages that arrived later."""
        lost, self._lost = self._lost, False
        return lost

    async def aclose(self) -> None:
        """Stop receiving."""
        self.on_messages = _accept_none
        self._set_behind(False)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ConnectedInbox(Inbox):
    """Subscribes to `topic` at a worker's `endpoint` and reconnects whenever the connection is lost.

    `endpoint` is `tcp://HOST:PORT` or `ipc://PATH`; raises WireError for any other. Once `queue` messages
    wait, the inbox stops reading, and further messages wait at the worker.
    """

    def __init__(self, poller: SocketPoller, endpoint: str, topic: str, queue: int) -> None:
        super().__init__(poller)
        self._poller = poller
        self._endpoint = endpoint
        self._address = _address_of(endpoint)
        self._topic = topic.encode()
        self._queue = queue
        self._socket: socket.socket | None = None
        """The connection; None until the worker has the subscription."""
        self._reader = MessageReader()
        self._is_paused = False
        self._closed: asyncio.Future[None] | None = None
        """Done when the connection is lost."""
        self._subscribed = asyncio.Event()
        self._task = self._loop.create_task(self._stay_connected(), name=f"subscription at {endpoint}")

    async def aclose(self) -> None:
        await super().aclose()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def ready(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._subscribed.wait()

    def take(self, limit: int) -> Sequence[Frames]:
        taken = super().take(limit)
        if self._is_paused and 2 * len(self) <= self._queue and self._socket is not None:
            self._is_paused = False
            self._poller.add(self._socket.fileno(), self._read)
        return taken

    async def _stay_connected(self) -> None:
        """Connect and read, again after each loss; ends only by cancellation."""
        last_warning, pause_s = "", _RECONNECT_S
        while True:
            try:
                sock = await self._open()
                try:
                    async with asyncio.timeout(_HANDSHAKE_S):
                        await self._subscribe(sock)
                except BaseException as error:
                    sock.close()
                    if isinstance(error, TimeoutError):
                        raise WireError("no ZMTP handshake: the other side only waits, as we do") from None
                    raise
                await self._read_until_closed(sock)
                last_warning, pause_s = "", _RECONNECT_S
            except OSError as error:
                log.debug("KV events at %s: %s", self._endpoint, error)
            except WireError as error:
                if last_warning != str(error):
                    last_warning = str(error)
                    log.warning("KV events at %s cannot be read: %s", self._endpoint, error)
            except Exception as error:
                if last_warning != str(error):
                    last_warning = str(error)
                    log.exception("connecting to KV events at %s failed", self._endpoint)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RECONNECT_S)

    async def _read_until_closed(self, sock: socket.socket) -> None:
        """Return when the connection is lost. Raises WireError if the worker sent something unreadable."""
        self._closed = self._loop.create_future()
        self._socket, self._is_paused = sock, False
        self._poller.add(sock.fileno(), self._read)
        self.mark_lost()  # messages published before the subscription
        self._subscribed.set()
        try:
            await self._closed
        finally:
            self._subscribed.clear()
            self._poller.remove(sock.fileno())
            self._socket = None
            sock.close()
            self.mark_lost()

    def _read(self, deadline: float) -> bool | None:
        """Read until `deadline` or until no data is left: see `poller.ReadSocket`. `SocketPoller` calls
        it."""
        assert self._socket is not None
        more: bool | None = None
        try:
            while True:
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    self._finish(None)
                    return False
                more = False
                messages = self._reader.feed(data)
                if self._reader.commands:
                    _handle_commands(self._reader, self._socket)
                topic = self._topic
                if topic:  # a publisher may send other topics; libzmq's subscribers check again as well
                    messages = [frames for frames in messages if frames[0].startswith(topic)]
                if messages:
                    self.put(messages, deadline)
                if len(self) >= self._queue:
                    self._is_paused = True
                    self._poller.remove(self._socket.fileno())
                    return False
                if len(data) < _READ_BYTES:
                    return False
                if self._poller.clock.now() >= deadline:
                    return True
        except BlockingIOError:
            return more
        except OSError:
            self._finish(None)
        except WireError as error:
            self._finish(error)
        return False

    def _finish(self, error: WireError | None) -> None:
        """Stop reading, because the connection was lost or cannot be read (`error`)."""
        assert self._socket is not None
        assert self._closed is not None
        self._poller.remove(self._socket.fileno())
        if not self._closed.done():
            if error is None:
                self._closed.set_result(None)
            else:
                self._closed.set_exception(error)

    # The handshake

    async def _open(self) -> socket.socket:
        """Connect to the first address that answers. Raises OSError."""
        address = self._address
        if isinstance(address, str):
            async with asyncio.timeout(_CONNECT_S):
                return await self._connect(socket.AF_UNIX, address)
        async with asyncio.timeout(_CONNECT_S):
            resolutions = await self._loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        last: OSError = OSError(f"{address[0]} has no address")
        for family, _, _, _, resolved in resolutions:
            try:
                async with asyncio.timeout(_CONNECT_S / len(resolutions)):
                    sock = await self._connect(family, resolved)
            except OSError as error:
                last = error
                continue
            _keep_alive(sock)
            return sock
        raise last

    async def _connect(self, family: int, address: str | tuple[object, ...]) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        return sock

    async def _subscribe(self, sock: socket.socket) -> None:
        """Make the handshake and send the subscription. Raises OSError, WireError."""
        self._reader = await _handshake(self._loop, sock, self._topic)


async def _handshake(loop: asyncio.AbstractEventLoop, sock: socket.socket, topic: bytes) -> MessageReader:
    """Make the handshake with a publisher and subscribe to `topic`. Raises OSError, WireError.

    Without security both sides do the same, so it does not matter which one has connected.
    """

    async def received() -> bytes:
        data = await loop.sock_recv(sock, _READ_BYTES)
        if not data:
            raise ConnectionResetError("closed in the handshake")
        return data

    await loop.sock_sendall(sock, GREETING)
    greeting = b""
    while len(greeting) < len(GREETING):
        greeting += await received()
    check_greeting(greeting)
    await loop.sock_sendall(sock, ready())
    reader = MessageReader()
    data = greeting[len(GREETING) :]
    while True:
        if data and reader.feed(data):
            raise WireError("a message before the handshake is done")
        if reader.commands:
            break
        data = await received()
    _handle_commands(reader, sock)
    await loop.sock_sendall(sock, subscription_to(topic))
    return reader


def _handle_commands(reader: MessageReader, sock: socket.socket) -> None:
    """Answer a publisher's commands. Raises WireError if it refuses the connection."""
    for frame in reader.commands:
        name, body = split_command(frame)
        if name == b"PING":
            with contextlib.suppress(BlockingIOError):
                sock.send(command(b"PONG", body[2 : 2 + _PING_BYTES]))
        elif name == b"ERROR":
            raise WireError(f"the publisher refuses the connection: {body[1:]!r}")
    reader.commands.clear()


def _keep_alive(sock: socket.socket) -> None:
    """Notice a host that disappears; send small messages without delay."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _address_of(endpoint: str) -> str | tuple[str, int]:
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc" and address:
        return f"\0{address[1:]}" if address.startswith("@") else address
    if scheme == "tcp":
        with contextlib.suppress(ValueError):
            parts = urlsplit(endpoint)
            if parts.hostname and parts.port and parts.netloc == address:
                return parts.hostname, parts.port
    raise WireError(f"{endpoint!r} is not an endpoint to connect to: tcp://HOST:PORT or ipc://PATH")


class SharedInbox(Inbox):
    """The messages of one worker at a `Listener`. Keeps the newest `queue` messages and drops older ones."""

    def __init__(
        self, listener: Listener, topic: bytes, queue: int, poller: SocketPoller | None = None
    ) -> None:
        super().__init__(poller)
        self._listener = listener
        self._topic = topic
        self._queue = queue

    def put(self, messages: Sequence[Frames], deadline: float = inf) -> None:
        if len(self) >= self._queue:
            self.take(1)
            self.mark_lost()
        super().put(messages, deadline)

    async def aclose(self) -> None:
        await super().aclose()
        self._listener.leave(self._topic, self)


class Listener:
    """A SUB socket that workers connect to (`endpoint` without `*` in their configuration).

    The topic says which worker's stream a message belongs to. `endpoint` is the address that was bound.
    Mutable: its connections; `unread` counts messages under topics without an inbox.
    """

    # A restart of a worker shows in the sequence numbers, or in the check of a quiet stream. libzmq is not
    # used: it keeps all frames of a message, however many there are, until the last one comes.

    def __init__(self, endpoint: str, queue: int, poller: SocketPoller | None = None) -> None:
        """Bind. Raises OSError, and WireError for an address that cannot be bound."""
        self.unread = 0
        self._poller = poller
        self._queue = queue
        self._inboxes: dict[bytes, SharedInbox] = {}
        self._peers: dict[asyncio.Task[None], MessageReader | None] = {}
        """The connections, and what each has of an incomplete message."""
        self._has_warned = False
        self._socket, self.endpoint, self._path = _bound(endpoint)

    def inbox(self, topic: str) -> SharedInbox:
        """Receive the messages under exactly this topic from now on; a second inbox replaces the first."""
        key = topic.encode()
        if key in self._inboxes:
            log.warning("two workers publish KV events under the topic %r: only one can be read", topic)
        inbox = self._inboxes[key] = SharedInbox(self, key, self._queue, self._poller)
        return inbox

    def leave(self, topic: bytes, inbox: SharedInbox) -> None:
        """Drop the messages of this topic from now on."""
        if self._inboxes.get(topic) is inbox:
            del self._inboxes[topic]

    async def run(self, slicer: TimeSlicer) -> None:
        """Receive messages; ends only by cancellation."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                sock, _ = await loop.sock_accept(self._socket)
                if len(self._peers) >= _MAX_PEERS:
                    sock.close()
                    continue
                task = asyncio.create_task(self._serve(sock, slicer), name=f"KV events at {self.endpoint}")
                self._peers[task] = None
                task.add_done_callback(self._peers.pop)
        finally:
            tasks = list(self._peers)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, sock: socket.socket, slicer: TimeSlicer) -> None:
        """Read one connection until it ends."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        try:
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                _keep_alive(sock)
            async with asyncio.timeout(_HANDSHAKE_S):
                reader = self._peers[task] = await _handshake(loop, sock, b"")
            await self._receive(reader, sock, slicer)
        except (OSError, TimeoutError) as error:
            log.debug("KV events at %s: %s", self.endpoint, error)
        except WireError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("KV events at %s cannot be read: %s", self.endpoint, error)
        finally:
            sock.close()

    async def _receive(self, reader: MessageReader, sock: socket.socket, slicer: TimeSlicer) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = await loop.sock_recv(sock, _READ_BYTES)
            if not data:
                return
            for frames in reader.feed(data):
                # `sock_recv` returns at once while data is available, so other tasks would not run.
                if slicer.exhausted():
                    await slicer.yield_to_loop()
                inbox = self._inboxes.get(frames[0])
                if inbox is None:
                    self.unread += 1
                else:
                    inbox.put((frames,))
            if reader.commands:
                _handle_commands(reader, sock)
            if reader.held_bytes > _UNSHARED_BYTES:
                held_bytes = sum(peer.held_bytes for peer in self._peers.values() if peer is not None)
                if held_bytes > _MAX_HELD_BYTES:
                    raise WireError(f"incomplete messages of {held_bytes} bytes")

    def close(self) -> None:
        self._socket.close()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def _bound(endpoint: str) -> tuple[socket.socket, str, str | None]:
    """A listening socket at a ZMQ address, the address that was bound, and the file to remove at the end.

    Raises OSError, WireError.
    """
    file = None
    if endpoint.startswith("ipc://"):
        path = _address_of(endpoint)
        assert isinstance(path, str)
        if not path.startswith("\0"):
            file = path
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # as libzmq does: a process that was killed leaves it behind
        sock, bound = socket.socket(socket.AF_UNIX), endpoint
        try:
            sock.bind(path)
        except OSError:
            sock.close()
            raise
    else:
        scheme, _, address_text = endpoint.partition("://")
        host, _, port = address_text.rpartition(":")
        if scheme != "tcp" or not host or not (port.isdecimal() or port == "*"):
            raise WireError(f"{endpoint!r} is not an endpoint to bind: tcp://HOST:PORT or ipc://PATH")
        number = 0 if port == "*" else int(port)
        if host == "*":
            is_dual = socket.has_dualstack_ipv6()
            family, address = (socket.AF_INET6, "::") if is_dual else (socket.AF_INET, "0.0.0.0")
        else:
            address = host.strip("[]")
            family, is_dual = (socket.AF_INET6 if ":" in address else socket.AF_INET), False
        sock = socket.create_server((address, number), family=family, dualstack_ipv6=is_dual)
        shown = f"[{address}]" if family is socket.AF_INET6 else sock.getsockname()[0]
        bound = f"tcp://{shown}:{sock.getsockname()[1]}"
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock, bound, file
