"""Where the messages of one stream wait for their reader, and the two ways in which they arrive.

`ConnectedInbox` connects to a worker's PUB socket and reads it without libzmq: libzmq reads in a thread of
its own, which wakes the event loop, which then asks libzmq for one frame after the other; that cost four
times what applying a batch costs. `Listener` binds a socket that workers connect to, and reads it with
libzmq, as replays are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from kvroute.errors import WireError
from kvroute.events.poller import SocketPoller, TimeSlicer
from kvroute.wire.zmq import GREETING, MessageReader, check_greeting, command, ready, split_command
from kvroute.wire.zmq import subscription as subscription_to

log = logging.getLogger(__name__)

Frames = Sequence[bytes]
"""Of one message."""

OnMessages = Callable[[Sequence[Frames], float], int]
"""Takes in messages that have just come, the first of them and further ones until this time of the clock;
returns how many."""

_RECONNECT_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
"""Between two attempts to connect: each pause is twice as long as the one before."""
_CONNECT_S: Final = 10.0
"""Longest time to connect, of which each of the host's addresses has its part."""
_HANDSHAKE_S: Final = 10.0
"""Longest time from then on until the worker knows what we want."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds, probes: a host that went away without a word is noticed after 25 s."""
_PING_BYTES: Final = 16
"""Of a PING's context, which comes back with the PONG (ZMTP 3.1)."""
_READ_BYTES: Final = 65_536


def _refuse(messages: Sequence[Frames], until: float) -> int:
    return 0


class Inbox:
    """Messages of one stream in the order of their arrival. Mutable: whoever receives puts in and `lose`s,
    its one reader sets `on_messages`, waits and takes. To be made where an event loop runs.

    Messages that come while none waits are offered to `on_messages` first; what it leaves waits.
    """

    def __init__(self) -> None:
        self.on_messages: OnMessages = _refuse
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Frames] = deque()
        self._lost = False
        self._last = self._loop.time()
        """When a message came, or waiting for one began."""
        self._timeout_s = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._waiting)

    # For whoever receives

    def put(self, messages: Sequence[Frames], until: float = inf) -> None:
        """They have come, in this order. Of what can be taken in at once the first is, and others until this
        time of the reader's clock."""
        self._last = self._loop.time()
        if not self._waiting and not self._lost:
            taken = self.on_messages(messages, until)
            if taken == len(messages):
                return
            messages = messages[taken:]
        self._waiting.extend(messages)
        self._wake()

    def lose(self) -> None:
        """Messages may have been lost, behind those that were put in by now."""
        self._lost = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # For the reader

    async def ready(self, timeout_s: float) -> None:
        """Returns when what is published from now on arrives here, or after so long."""

    async def wait(self, timeout_s: float) -> bool:
        """True as soon as there is something to take or was lost; False if nothing came for so long."""
        if self._waiting or self._lost:
            return True
        self._last, self._timeout_s = self._loop.time(), timeout_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._last + timeout_s, self._late)
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None
        return bool(self._waiting) or self._lost

    def _late(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        until = self._last + self._timeout_s
        if self._loop.time() >= until:
            self._wake()
        else:
            self._timer = self._loop.call_at(until, self._late)

    def take(self, most: int) -> Sequence[Frames]:
        """Up to `most` messages that are there; fewer only if there are no more."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(most, len(waiting)))]

    def interrupted(self) -> bool:
        """True once after messages may have been lost, before any message that came later is taken."""
        lost, self._lost = self._lost, False
        return lost

    async def aclose(self) -> None:
        """No more is read."""
        self.on_messages = _refuse
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ConnectedInbox(Inbox):
    """Subscribed to `topic` at a worker's `endpoint`, `tcp://HOST:PORT` or `ipc://PATH`, again whenever the
    connection is lost. Raises WireError for any other endpoint. No more is read while `queue` messages wait:
    further ones wait at the worker."""

    def __init__(self, arrivals: SocketPoller, endpoint: str, topic: str, queue: int) -> None:
        super().__init__()
        self._arrivals = arrivals
        self._endpoint = endpoint
        self._address = _address_of(endpoint)
        self._topic = topic.encode()
        self._queue = queue
        self._socket: socket.socket | None = None
        """Subscribed."""
        self._reader = MessageReader()
        self._is_paused = False
        self._ended: asyncio.Future[None] | None = None
        self._subscribed = asyncio.Event()
        self._task = self._loop.create_task(self._keep(), name=f"subscription at {endpoint}")

    async def aclose(self) -> None:
        await super().aclose()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def ready(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._subscribed.wait()

    def take(self, most: int) -> Sequence[Frames]:
        taken = super().take(most)
        if self._is_paused and 2 * len(self) <= self._queue and self._socket is not None:
            self._is_paused = False
            self._arrivals.add(self._socket.fileno(), self._read)
        return taken

    async def _keep(self) -> None:
        """Connected as long as it can be; ends only by cancellation."""
        complaint, pause_s = "", _RECONNECT_S
        while True:
            try:
                opened = await self._open()
                try:
                    async with asyncio.timeout(_HANDSHAKE_S):
                        await self._subscribe(opened)
                except BaseException as error:
                    opened.close()
                    if isinstance(error, TimeoutError):
                        raise WireError("no ZMTP handshake: whoever listens there waits, too") from None
                    raise
                await self._follow(opened)
                complaint, pause_s = "", _RECONNECT_S
            except OSError as error:
                log.debug("KV events at %s: %s", self._endpoint, error)
            except WireError as error:
                if complaint != str(error):
                    complaint = str(error)
                    log.warning("KV events at %s cannot be read: %s", self._endpoint, error)
            except Exception as error:
                if complaint != str(error):
                    complaint = str(error)
                    log.exception("connecting to KV events at %s failed", self._endpoint)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _follow(self, opened: socket.socket) -> None:
        """Until the connection is lost. Raises WireError if that is for what came."""
        self._ended = self._loop.create_future()
        self._socket, self._is_paused = opened, False
        self._arrivals.add(opened.fileno(), self._read)
        self.lose()  # what was published before
        self._subscribed.set()
        try:
            await self._ended
        finally:
            self._subscribed.clear()
            self._arrivals.remove(opened.fileno())
            self._socket = None
            opened.close()
            self.lose()

    def _read(self, until: float) -> bool | None:
        """Called when there may be something; `SocketPoller` says when."""
        assert self._socket is not None
        came: bool | None = None
        try:
            while True:
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    self._end(None)
                    return False
                came = False
                messages = self._reader.feed(data)
                if self._reader.commands:
                    self._obey(self._socket)
                topic = self._topic
                if topic:  # libzmq's subscribers look once more, too
                    messages = [frames for frames in messages if frames[0].startswith(topic)]
                if messages:
                    self.put(messages, until)
                if len(self) >= self._queue:
                    self._is_paused = True
                    self._arrivals.remove(self._socket.fileno())
                    return False
                if len(data) < _READ_BYTES:
                    return False
                if self._arrivals.clock.now() >= until:
                    return True
        except BlockingIOError:
            return came
        except OSError:
            self._end(None)
        except WireError as error:
            self._end(error)
        return False

    def _end(self, error: WireError | None) -> None:
        """The connection is over: nothing more is read."""
        assert self._socket is not None
        assert self._ended is not None
        self._arrivals.remove(self._socket.fileno())
        if not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

    # The handshake

    async def _open(self) -> socket.socket:
        """Raises OSError."""
        address = self._address
        if isinstance(address, str):
            async with asyncio.timeout(_CONNECT_S):
                return await self._connected(socket.AF_UNIX, address)
        async with asyncio.timeout(_CONNECT_S):
            found = await self._loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        last: OSError = OSError(f"{address[0]} has no address")
        for family, _, _, _, place in found:
            try:
                async with asyncio.timeout(_CONNECT_S / len(found)):
                    opened = await self._connected(family, place)
            except OSError as error:
                last = error
                continue
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # subscribed without a delay
            return opened
        raise last

    async def _connected(self, family: int, address: str | tuple[object, ...]) -> socket.socket:
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            opened.setblocking(False)
            await self._loop.sock_connect(opened, address)
        except BaseException:
            opened.close()
            raise
        return opened

    async def _subscribe(self, opened: socket.socket) -> None:
        """Raises OSError, WireError."""
        await self._loop.sock_sendall(opened, GREETING)
        said = b""
        while len(said) < len(GREETING):
            said += await self._heard(opened)
        check_greeting(said)
        await self._loop.sock_sendall(opened, ready())
        self._reader = reader = MessageReader()
        data = said[len(GREETING) :]
        while True:
            if data and reader.feed(data):
                raise WireError("a message before the handshake is done")
            if reader.commands:
                break
            data = await self._heard(opened)
        self._obey(opened)
        await self._loop.sock_sendall(opened, subscription_to(self._topic))

    async def _heard(self, opened: socket.socket) -> bytes:
        data = await self._loop.sock_recv(opened, _READ_BYTES)
        if not data:
            raise ConnectionResetError("closed in the handshake")
        return data

    def _obey(self, opened: socket.socket) -> None:
        for body in self._reader.commands:
            name, rest = split_command(body)
            if name == b"PING":
                with contextlib.suppress(BlockingIOError):
                    opened.send(command(b"PONG", rest[2 : 2 + _PING_BYTES]))
            elif name == b"ERROR":
                raise WireError(f"the publisher refuses us: {rest[1:]!r}")
        self._reader.commands.clear()


def _address_of(endpoint: str) -> str | tuple[str, int]:
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return f"\0{rest[1:]}" if rest.startswith("@") else rest
    if scheme == "tcp":
        with contextlib.suppress(ValueError):
            parts = urlsplit(endpoint)
            if parts.hostname and parts.port and parts.netloc == rest:
                return parts.hostname, parts.port
    raise WireError(f"{endpoint!r} is no endpoint to connect to: tcp://HOST:PORT or ipc://PATH")


class SharedInbox(Inbox):
    """One worker's part of what a `Listener` receives: of more than `queue` messages the oldest are lost."""

    def __init__(self, listener: Listener, topic: bytes, queue: int) -> None:
        super().__init__()
        self._listener = listener
        self._topic = topic
        self._queue = queue

    def put(self, messages: Sequence[Frames], until: float = inf) -> None:
        if len(self) >= self._queue:
            self.take(1)
            self.lose()
        super().put(messages, until)

    async def aclose(self) -> None:
        await super().aclose()
        self._listener.leave(self._topic, self)


class Listener:
    """A SUB socket that workers connect to (`endpoint` without `*` in their configuration). Their streams
    are told apart by topic. Mutable: `strangers` counts messages under topics that nobody reads.

    `endpoint` is what was really bound. Whose connection breaks cannot be seen here: a restart shows in the
    sequence numbers, or in the check of a quiet stream.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, queue: int) -> None:
        self.strangers = 0
        self._queue = queue
        self._inboxes: dict[bytes, SharedInbox] = {}
        self._socket = context.socket(zmq.SUB)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.RCVHWM, queue)
            self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def inbox(self, topic: str) -> SharedInbox:
        """What comes under exactly this topic from now on; a second reader of a topic replaces the first."""
        key = topic.encode()
        if key in self._inboxes:
            log.warning("two workers publish KV events under the topic %r: only one can be followed", topic)
        inbox = self._inboxes[key] = SharedInbox(self, key, self._queue)
        return inbox

    def leave(self, topic: bytes, inbox: SharedInbox) -> None:
        if self._inboxes.get(topic) is inbox:
            del self._inboxes[topic]

    async def run(self, turns: TimeSlicer) -> None:
        """Receive; ends only by cancellation. As long as messages are there, receiving them does not wait:
        that has to stop for `turns`."""
        while True:
            if turns.are_over():
                await turns.next()
            frames = await self._socket.recv_multipart()
            inbox = self._inboxes.get(frames[0])
            if inbox is None:
                self.strangers += 1
            else:
                inbox.put((frames,))

    def close(self) -> None:
        self._socket.close(linger=0)
