"""Links between the gateway processes: a full mesh over Unix sockets in one folder.

Of two processes the one with the higher number connects, and reconnects while it runs, so each pair has one
link. Published messages are batched for 5 ms and sent to all linked processes. On a new link a process first
sends the messages of `PeerListener.greeting`, then all that is published later: no message is lost between
the two or sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from struct import Struct as Packing
from typing import Final, Protocol, cast

import msgspec

from kvroute.errors import WireError
from kvroute.replicas.messages import (
    Hello,
    Leaving,
    Message,
    PeerAnswer,
    PeerId,
    PeerRequest,
)

log = logging.getLogger(__name__)

GATHER_S: Final = 0.005
"""How long a published message may wait for others, to go out with them."""

_MAX_QUEUED: Final = 512
"""Messages; with more, the batch is sent before `GATHER_S` has passed."""
_MAX_UNREAD_BYTES: Final = 256 * 1024 * 1024
"""Bound of the write buffer of one link. A peer that does not read is disconnected at this size; it gets a
whole snapshot when it reconnects."""
_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 1.0
_STABLE_S: Final = 5.0
"""After a link has lasted this long, the next reconnect waits only `_RETRY_S` again."""
_LEAVE_S: Final = 1.0
"""How long a process that ends waits until the others have read that it leaves."""


class PeerListener(Protocol):
    """The receiver of the messages of other processes. All methods are synchronous and return soon."""

    @property
    def is_synced(self) -> bool:
        """Whether this process has the complete shared state, so that new processes may ask for it."""
        ...

    def greeting(self, peer: PeerId) -> Sequence[Message]:
        """The first messages for a process whose link has just been opened."""
        ...

    def on_linked(self, peer: PeerId, *, is_synced: bool) -> None:
        """A process is linked. `is_synced`: it can answer `SnapshotRequest`."""
        ...

    def on_message(self, peer: PeerId, message: Message) -> None:
        """A process sent a message."""
        ...

    def on_peer_gone(self, peer: PeerId) -> None:
        """A process is gone: the link to it is closed, or it is silent. Its requests no longer count."""
        ...


@dataclass(slots=True)
class MeshCounts:
    """Totals since the start. Mutable: incremented by the mesh."""

    messages_sent: int = 0
    messages_received: int = 0
    breaks: int = 0
    """Links that broke while this process was not shutting down."""


RequestHandler = Callable[[bytes], Awaitable[bytes]]


class Mesh:
    """The links of this process. Mutable; belongs to one event loop.

    `start` listens and connects; `aclose` ends all links and tasks.
    """

    def __init__(self, number: int, processes: int, folder: Path) -> None:
        self.number = number
        self.counts = MeshCounts()
        self._peers = [peer for peer in range(processes) if peer != number]
        self.folder = folder
        self._listener: PeerListener | None = None
        self._request_handlers: dict[str, RequestHandler] = {}
        self._links: dict[int, _Link] = {}
        self._open: set[_Link] = set()
        """All connections, also those whose process has not sent `Hello` yet."""
        self._queued: list[Message] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._requests: dict[tuple[int, int], asyncio.Future[bytes]] = {}
        """Requests without an answer, by process and request id."""
        self._ids = count(1)
        self._changed = asyncio.Event()
        self._is_closing = False

    @property
    def peers(self) -> Sequence[int]:
        """Numbers of all other processes, linked or not."""
        return self._peers

    @property
    def linked_peers(self) -> Sequence[int]:
        """Numbers of the processes that are linked now."""
        return sorted(self._links)

    def handle(self, topic: str, handler: RequestHandler) -> None:
        """Answer the other processes' requests of this topic with `handler`."""
        self._request_handlers[topic] = handler

    async def start(self, listener: PeerListener) -> None:
        """Listen, and connect to the other processes. Raises OSError if the socket cannot be created."""
        self._listener = listener
        loop = asyncio.get_running_loop()
        path = self._path(self.number)
        path.unlink(missing_ok=True)
        self._server = await loop.create_unix_server(lambda: _Link(self), str(path))
        for other in self._peers:
            if other < self.number:
                self.spawn(self._connect(other), f"link to process {other}")

    async def all_linked(self) -> None:
        """Wait until all other processes are linked."""
        while len(self._links) < len(self._peers):
            self._changed.clear()
            await self._changed.wait()

    def publish(self, *messages: Message) -> None:
        """Send to all linked processes, within `GATHER_S`."""
        if not self._links:
            return
        self._queued += messages
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.flush)
        elif len(self._queued) >= _MAX_QUEUED:
            self.flush()

    def send(self, peer: PeerId, *messages: Message) -> bool:
        """Send to one process now, before the messages that are still queued. False if it is not linked."""
        link = self._links.get(peer) if isinstance(peer, int) else None
        if link is None:
            return False
        link.write(messages)
        return True

    def flush(self) -> None:
        """Send the queued messages now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        messages, self._queued = self._queued, []
        if messages and self._links:
            data = encode_frame(messages)
            for link in list(self._links.values()):
                link.write_frame(data, len(messages))

    async def request_all(self, topic: str, argument: bytes, timeout_s: float) -> Mapping[int, bytes]:
        """Send a request to every linked process. Returns the answers that arrive in time, by process
        number."""
        answers: dict[int, asyncio.Future[bytes]] = {}
        self.flush()
        for number, link in self._links.items():
            request_id = next(self._ids)
            future = answers[number] = asyncio.get_running_loop().create_future()
            self._requests[number, request_id] = future
            future.add_done_callback(lambda _, key=(number, request_id): self._requests.pop(key, None))  # type: ignore[misc]
            link.write([PeerRequest(request_id, topic, argument)])
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=timeout_s)
            return {
                number: future.result()
                for number, future in answers.items()
                if future.done() and not future.cancelled()
            }
        finally:
            for future in answers.values():
                future.cancel()

    async def aclose(self) -> None:
        """Send the queued messages, then end every link and task. Waits `_LEAVE_S` at most."""
        self._is_closing = True
        self.publish(Leaving())
        self.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        # The others end their links when they have read `Leaving`. If this process ended a link first, a
        # write of the other process could fail before it reads `Leaving`, and it would log a broken link.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                for link in list(self._links.values()):
                    await link.closed.wait()
        for link in list(self._open):
            link.end()
        for future in list(self._requests.values()):
            future.cancel()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.sock"

    async def _connect(self, other: int) -> None:
        loop, path, pause_s = asyncio.get_running_loop(), str(self._path(other)), _RETRY_S
        while True:
            try:
                _, link = await loop.create_unix_connection(lambda: _Link(self), path)
                async with asyncio.timeout(_STABLE_S):
                    await link.closed.wait()
            except TimeoutError:
                pause_s = _RETRY_S
                await link.closed.wait()
            except OSError:
                pass  # the other process does not listen (yet)
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _MAX_RETRY_S)

    def spawn(self, work: Awaitable[None], name: str) -> None:
        """Run `work` in a task that `aclose` cancels."""

        async def run() -> None:
            await work

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Called by the links

    def on_open(self, link: _Link) -> None:
        assert self._listener is not None
        self._open.add(link)
        link.write([Hello(self.number, self._listener.is_synced)])

    def on_message(self, link: _Link, message: Message) -> None:
        """Handle a message. Raises WireError if the first one of a link is not `Hello`."""
        assert self._listener is not None
        if isinstance(message, Hello):
            self._on_hello(link, message)
        elif link.number is None or self._links.get(link.number) is not link:
            raise WireError("the first message of a process is not its number")
        elif isinstance(message, Leaving):
            link.is_leaving = True
            link.end()
        elif self._is_closing:
            pass  # this process ends and needs no messages
        elif isinstance(message, PeerRequest):
            self.spawn(self._answer(link, message), f"answer to process {link.number}")
        elif isinstance(message, PeerAnswer):
            future = self._requests.get((link.number, message.id))
            if future is not None and not future.done():
                future.set_result(message.payload)
        else:
            self._listener.on_message(link.number, message)

    def _on_hello(self, link: _Link, hello: Hello) -> None:
        assert self._listener is not None
        number = hello.number
        if number not in self._peers:
            raise WireError(f"there is no process {number}")
        previous_link = self._links.get(number)
        if previous_link is not None and previous_link is not link:
            # The successor of a process connects before the end of the old link is noticed.
            previous_link.close()
            self.on_close(previous_link)
        link.number = number
        greeting = self._listener.greeting(number)  # before the link: it may publish what it has gathered
        self.flush()
        self._links[number] = link
        link.write(greeting)
        self._changed.set()
        self._listener.on_linked(number, is_synced=hello.is_synced)

    async def _answer(self, link: _Link, request: PeerRequest) -> None:
        handler = self._request_handlers.get(request.topic)
        if handler is None:
            return
        try:
            payload = await handler(request.argument)
        except Exception:
            log.exception("the request of process %s for %s failed", link.number, request.topic)
            return
        link.write([PeerAnswer(request.id, payload)])

    def on_close(self, link: _Link) -> None:
        self._open.discard(link)
        number = link.number
        if number is None or self._links.get(number) is not link:
            return
        del self._links[number]
        for (process, _), future in list(self._requests.items()):
            if process == number:
                future.cancel()
        if self._is_closing:
            return
        if link.is_leaving:
            log.info("process %d has ended", number)
        else:
            self.counts.breaks += 1
            log.warning("the link to process %d broke; its messages are missing until it reconnects", number)
        assert self._listener is not None
        self._listener.on_peer_gone(number)


_LENGTH: Final = Packing("<I")
MAX_FRAME_BYTES: Final = 1 << 30
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Message]).decode


def encode_frame(messages: Sequence[Message]) -> bytes:
    """`messages` as one frame. Costs about 1 us per message, and the copy of its keys."""
    payload = _encode(messages)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits a byte stream into frames. Mutable: buffers the incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages of all frames that `data` completes, in order. Raises WireError for a malformed
        frame."""
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise WireError("a frame from another process is too long")
            end = start + _LENGTH.size + length
            if end > len(buffer):
                break
            try:
                messages += _decode(memoryview(buffer)[start + _LENGTH.size : end])
            except msgspec.MsgspecError as error:
                raise WireError("a frame from another process cannot be decoded") from error
            start = end
        if start:
            del buffer[:start]
        return messages


class _Link(asyncio.Protocol):
    """One connection to another process. Mutable; `number` is None until its `Hello` arrives."""

    def __init__(self, mesh: Mesh) -> None:
        self.number: int | None = None
        self.is_leaving = False
        self.closed = asyncio.Event()
        self._mesh = mesh
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The cast: uvloop's transports are not subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        # `write_frame` bounds the buffer itself: writing is never paused, and a whole snapshot must fit.
        self._transport.set_write_buffer_limits(high=_MAX_UNREAD_BYTES)
        self._mesh.on_open(self)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._frames.feed(data)
            self._mesh.counts.messages_received += len(messages)
            for message in messages:
                self._mesh.on_message(self, message)
        except WireError as error:
            log.error("a message from process %s is invalid, its link is closed: %s", self.number, error)
            self.close()
        except Exception:
            log.exception("handling a message from process %s failed, its link is closed", self.number)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.closed.set()
        self._mesh.on_close(self)

    def write(self, messages: Sequence[Message]) -> None:
        if messages:
            self.write_frame(encode_frame(messages), len(messages))

    def write_frame(self, data: bytes, messages: int) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            log.warning("process %s does not read its messages, its link is closed", self.number)
            self.close()
            return
        self._mesh.counts.messages_sent += messages
        transport.write(data)

    def close(self) -> None:
        """Close immediately; unsent data is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Close after the written data has been sent."""
        if self._transport is not None:
            self._transport.close()


def make_socket_folder(parent: Path) -> Path:
    """A new folder for the sockets and files of one gateway, readable by this user only. Raises OSError."""
    folder = parent / f"kvroute-{os.getpid()}-{os.urandom(4).hex()}"
    folder.mkdir(mode=0o700)
    return folder
