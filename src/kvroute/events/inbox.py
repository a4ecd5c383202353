"""Where the messages of one stream wait for their reader."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

import zmq
import zmq.asyncio

from kvroute.loop_slices import TimeSlicer

Frames = Sequence[bytes]
"""Of one message."""

TakeIn = Callable[[Sequence[Frames], float], int]
"""Takes in messages that have just come, the first of them and further ones until this time of the clock;
returns how many."""


def _refuse(messages: Sequence[Frames], until: float) -> int:
    return 0


class Inbox:
    """Messages of one stream in the order of their arrival. Mutable: whoever receives puts in and `lose`s,
    its one reader sets `at_once`, waits and takes. To be made where an event loop runs.

    Messages that come while none waits are offered to `at_once` first; what it leaves waits.
    """

    def __init__(self) -> None:
        self.at_once: TakeIn = _refuse
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
            taken = self.at_once(messages, until)
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
        self.at_once = _refuse
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


log = logging.getLogger(__name__)


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
