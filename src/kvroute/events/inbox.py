"""How messages of one stream reach us: over a SUB socket of its own, or out of one that many share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import zmq
import zmq.asyncio

from kvroute.events.turns import Turns

log = logging.getLogger(__name__)


class Inbox(Protocol):
    """Messages of one stream in the order of their arrival."""

    async def wait(self, timeout_s: float) -> bool:
        """True as soon as there is a message; False if none came in time."""
        ...

    def take(self) -> Sequence[bytes] | None:
        """The next message's frames, None if there is none."""
        ...

    def interrupted(self) -> bool:
        """True once after the connection was lost or messages were thrown away."""
        ...

    def close(self) -> None: ...


class SubscribedInbox:
    """A SUB socket connected to one worker's PUB. Raises zmq.ZMQError if the endpoint cannot be used."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, topic: str, queue: int) -> None:
        # Taking messages is synchronous, only waiting for them is not.
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.SUB)
        self._waiting = zmq.asyncio.Socket.from_socket(self._socket)
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.RCVHWM, queue)
            self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    async def wait(self, timeout_s: float) -> bool:
        return bool(await self._waiting.poll(int(timeout_s * 1000)))

    def take(self) -> Sequence[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def interrupted(self) -> bool:
        """ZMQ reconnects by itself and says so only here; the notice comes before any later message."""
        lost = False
        assert self._monitor is not None
        with contextlib.suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                lost = True
        return lost

    def close(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._waiting.close()
        self._socket.close(linger=0)


class SharedInbox:
    """One worker's part of what a `Listener` receives. Mutable: the listener puts in, its reader takes."""

    def __init__(self, listener: Listener, topic: bytes, queue: int) -> None:
        self._listener = listener
        self._topic = topic
        self._queue = queue
        self._waiting: deque[Sequence[bytes]] = deque()
        self._arrived = asyncio.Event()
        self._lost = False

    def put(self, frames: Sequence[bytes]) -> None:
        if len(self._waiting) >= self._queue:
            self._waiting.popleft()
            self._lost = True
        self._waiting.append(frames)
        self._arrived.set()

    async def wait(self, timeout_s: float) -> bool:
        if not self._waiting:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
        return bool(self._waiting)

    def take(self) -> Sequence[bytes] | None:
        return self._waiting.popleft() if self._waiting else None

    def interrupted(self) -> bool:
        lost, self._lost = self._lost, False
        return lost

    def close(self) -> None:
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

    async def run(self, turns: Turns) -> None:
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
                inbox.put(frames)

    def close(self) -> None:
        self._socket.close(linger=0)
