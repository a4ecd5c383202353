"""How messages of one stream reach us: over a SUB socket of its own, or out of one that many share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
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
        """True as soon as there may be a message; False if there was none for so long."""
        ...

    def take(self, most: int) -> Sequence[Sequence[bytes]]:
        """The frames of up to `most` messages that are there; fewer only if there are no more."""
        ...

    def interrupted(self) -> bool:
        """True once after the connection was lost or messages were thrown away, before any message that was
        taken by now."""
        ...

    def close(self) -> None: ...


class SubscribedInbox:
    """A SUB socket connected to one worker's PUB. Raises zmq.ZMQError if the endpoint cannot be used; to be
    made where an event loop runs.

    Read without `zmq.asyncio`, which makes a future and a timer of every wait and asks libzmq what it knows
    before and after each: one reader stays with the loop, one timer goes on from wait to wait. What libzmq
    is asked takes 10 to 20 us on a busy core, so it is told to give messages until it has none, and asked
    nothing else.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, topic: str, queue: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.SUB)
        self._monitor: zmq.Socket[bytes] | None = None
        self._monitored = select.poll()
        self._descriptor: int | None = None
        self._is_empty = False
        """Nothing was left when messages were last taken, and the loop has told of none since."""
        self._is_quiet = False
        """No message was taken since this wait began: it goes on."""
        self._waiter: asyncio.Future[bool] | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.RCVHWM, queue)
            self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self._socket.connect(endpoint)
            self._monitored.register(self._monitor.fileno(), select.POLLIN)
            descriptor: int = self._socket.fileno()
            self._loop.add_reader(descriptor, self._told)
            self._descriptor = descriptor
        except zmq.ZMQError:
            self.close()
            raise

    async def wait(self, timeout_s: float) -> bool:
        if not self._is_empty:
            return True
        if not self._is_quiet:
            self._is_quiet = True
            self._until = self._loop.time() + timeout_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._until, self._late)
        waiter = self._waiter = self._loop.create_future()
        try:
            has_any: bool = await waiter
        finally:
            self._waiter = None
        self._is_quiet = has_any
        return has_any

    def _told(self) -> None:
        """Something has happened to the socket. Taking messages until there are none makes libzmq tell of
        the next; where nobody is about to, asking does, else the loop would be told again at once."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            self._is_empty = False
            waiter.set_result(True)
        elif _has_any(self._socket):
            self._is_empty = False

    def _late(self) -> None:
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._loop.time() >= self._until:
            waiter.set_result(False)
        else:
            self._timer = self._loop.call_at(self._until, self._late)

    def take(self, most: int) -> Sequence[Sequence[bytes]]:
        messages: list[list[bytes]] = []
        receive = self._socket.recv
        try:
            while len(messages) < most:
                # A frame knows whether more follow; asking the socket costs more than making one.
                frame = receive(zmq.NOBLOCK, copy=False)
                frames = [frame.bytes]
                while frame.more:
                    frame = receive(zmq.NOBLOCK, copy=False)
                    frames.append(frame.bytes)
                messages.append(frames)
        except zmq.Again:
            self._is_empty = True
        if messages:
            self._is_quiet = False
        return messages

    def interrupted(self) -> bool:
        """ZMQ reconnects by itself and says so only to its monitor; the notice comes before any later
        message. The monitor's descriptor can be read as soon as there is one: looking at that is much
        cheaper than asking libzmq."""
        lost = False
        if not self._monitored.poll(0):
            return False
        assert self._monitor is not None
        with contextlib.suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                lost = True
        return lost

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._socket.close(linger=0)


def _has_any(socket: zmq.Socket[bytes]) -> bool:
    events = socket.get(zmq.EVENTS)
    return isinstance(events, int) and bool(events & zmq.POLLIN)


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

    def take(self, most: int) -> Sequence[Sequence[bytes]]:
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(most, len(waiting)))]

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
