"""A socket that workers connect to, and who reads which of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf

import zmq
import zmq.asyncio

from kvroute.events.inbox import Frames, Inbox
from kvroute.events.turns import Turns

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
                inbox.put((frames,))

    def close(self) -> None:
        self._socket.close(linger=0)
