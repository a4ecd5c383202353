"""The links between the processes: every process to every other one, over Unix sockets in a folder of theirs.

The process with the higher number connects, and tries again for as long as it lives; so there is one link to
each. What is published is gathered for a moment and goes to all that are linked. A process that comes first
hears everything that `MeshMember.greeting` says, and from then on whatever is published: nothing is missed in
between and nothing said twice.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, Protocol, cast

from kvroute.errors import ConfigError, WireError
from kvroute.replicas.messages import Ask, Frames, Hello, Leaving, Message, PeerAnswer, frame

log = logging.getLogger(__name__)

GATHER_S: Final = 0.005
"""How long what is published may wait for more."""

_MOST_WAITING: Final = 512
_MOST_UNREAD_BYTES: Final = 256 * 1024 * 1024
"""Of a peer that does not read: then it is let go, and gets everything anew when it is back."""
_RETRY_S: Final = 0.05
_LONGEST_RETRY_S: Final = 1.0
_STEADY_S: Final = 5.0
"""A link that has held for so long is well: the next pause is the first one again."""


class MeshMember(Protocol):
    """Who speaks and listens over the mesh. All calls are synchronous and return soon."""

    @property
    def is_level(self) -> bool:
        """It knows what there is to know, so others may ask it."""
        ...

    def greeting(self, number: int) -> Sequence[Message]:
        """What process `number`, linked just now, must hear first."""
        ...

    def linked(self, number: int, *, is_level: bool) -> None: ...

    def heard(self, number: int, message: Message) -> None:
        """A message of process `number`."""
        ...

    def lost(self, number: int) -> None:
        """The link to process `number` is no more."""
        ...


@dataclass(slots=True)
class MeshCounts:
    """Totals since the start. Mutable: the mesh counts."""

    sent: int = 0
    received: int = 0
    breaks: int = 0
    """Links that ended while this process went on."""


Answering = Callable[[bytes], Awaitable[bytes]]


class Mesh:
    """This process's links. Mutable; belongs to one event loop. `start` listens and begins to connect,
    `aclose` ends all of it."""

    def __init__(self, number: int, processes: int, folder: Path) -> None:
        self.number = number
        self.counts = MeshCounts()
        self._others = [other for other in range(processes) if other != number]
        self._folder = folder
        self._member: MeshMember | None = None
        self._answering: dict[str, Answering] = {}
        self._links: dict[int, _Link] = {}
        self._open: set[_Link] = set()
        self._waiting: list[Message] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._asked: dict[tuple[int, int], asyncio.Future[bytes]] = {}
        self._ids = count(1)
        self._changed = asyncio.Event()
        self._is_closing = False

    @property
    def others(self) -> Sequence[int]:
        """Numbers of all other processes, linked or not."""
        return self._others

    @property
    def peers(self) -> Sequence[int]:
        """Numbers of those that are linked now."""
        return sorted(self._links)

    def answers(self, what: str, answering: Answering) -> None:
        """Answer the others' questions called `what`."""
        self._answering[what] = answering

    async def start(self, member: MeshMember) -> None:
        """Raises OSError if the socket cannot be made."""
        self._member = member
        loop = asyncio.get_running_loop()
        path = self._path(self.number)
        path.unlink(missing_ok=True)
        self._server = await loop.create_unix_server(lambda: _Link(self), str(path))
        for other in self._others:
            if other < self.number:
                self.own(self._connect(other), f"link to process {other}")

    async def all_linked(self) -> None:
        """Returns once there are links to all others."""
        while len(self._links) < len(self._others):
            self._changed.clear()
            await self._changed.wait()

    def publish(self, message: Message) -> None:
        """Tell all processes that are linked, soon."""
        if not self._links:
            return
        self._waiting.append(message)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.flush)
        elif len(self._waiting) >= _MOST_WAITING:
            self.flush()

    def send(self, number: int, *messages: Message) -> bool:
        """Tell one process, now, before what was published and still waits; False if it is not linked."""
        link = self._links.get(number)
        if link is None:
            return False
        link.write(messages)
        return True

    def flush(self) -> None:
        """Send what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        if waiting and self._links:
            data = frame(waiting)
            for link in list(self._links.values()):
                link.write_frame(data, len(waiting))

    async def ask(self, what: str, how: bytes, deadline_s: float) -> Mapping[int, bytes]:
        """Ask every process that is linked; the answers that came in time, by number."""
        asked: dict[int, asyncio.Future[bytes]] = {}
        self.flush()
        for number, link in self._links.items():
            question = next(self._ids)
            future = asked[number] = asyncio.get_running_loop().create_future()
            self._asked[number, question] = future
            future.add_done_callback(lambda _, key=(number, question): self._asked.pop(key, None))  # type: ignore[misc]
            link.write([Ask(question, what, how)])
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=deadline_s)
            return {
                number: future.result()
                for number, future in asked.items()
                if future.done() and not future.cancelled()
            }
        finally:
            for future in asked.values():
                future.cancel()

    async def aclose(self) -> None:
        """Tell what waits, then end every link and task."""
        self._is_closing = True
        self.publish(Leaving())
        self.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for link in list(self._open):
            link.end()
        for future in list(self._asked.values()):
            future.cancel()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.sock"

    async def _connect(self, other: int) -> None:
        loop, path, pause_s = asyncio.get_running_loop(), str(self._path(other)), _RETRY_S
        while True:
            try:
                _, link = await loop.create_unix_connection(lambda: _Link(self), path)
                async with asyncio.timeout(_STEADY_S):
                    await link.over.wait()
            except TimeoutError:
                pause_s = _RETRY_S
                await link.over.wait()
            except OSError:
                pass  # it is not there (yet)
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_RETRY_S)

    def own(self, work: Awaitable[None], name: str) -> None:
        """See `work` through in a task; `aclose` ends it."""

        async def run() -> None:
            await work

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What links tell

    def opened(self, link: _Link) -> None:
        assert self._member is not None
        self._open.add(link)
        link.write([Hello(self.number, self._member.is_level)])

    def heard(self, link: _Link, message: Message) -> None:
        """Any message; the first one must say who it is."""
        assert self._member is not None
        if isinstance(message, Hello):
            self._greet(link, message)
        elif link.number is None or self._links.get(link.number) is not link:
            raise WireError("a process that has not said who it is")
        elif isinstance(message, Leaving):
            link.is_leaving = True
        elif isinstance(message, Ask):
            self.own(self._answer(link, message), f"answer to process {link.number}")
        elif isinstance(message, PeerAnswer):
            future = self._asked.get((link.number, message.id))
            if future is not None and not future.done():
                future.set_result(message.told)
        else:
            self._member.heard(link.number, message)

    def _greet(self, link: _Link, hello: Hello) -> None:
        assert self._member is not None
        number = hello.number
        if number not in self._others:
            raise WireError(f"there is no process {number}")
        before = self._links.get(number)
        if before is not None and before is not link:
            before.close()  # a successor that is quicker than the news of the death before it
            self.closed(before)
        link.number = number
        self.flush()
        self._links[number] = link
        link.write(self._member.greeting(number))
        self._changed.set()
        self._member.linked(number, is_level=hello.level)

    async def _answer(self, link: _Link, question: Ask) -> None:
        answering = self._answering.get(question.what)
        if answering is None:
            return
        try:
            told = await answering(question.how)
        except Exception:
            log.exception("process %s asked for %s, which failed", link.number, question.what)
            return
        link.write([PeerAnswer(question.id, told)])

    def closed(self, link: _Link) -> None:
        self._open.discard(link)
        number = link.number
        if number is None or self._links.get(number) is not link:
            return
        del self._links[number]
        for asked, future in list(self._asked.items()):
            if asked[0] == number:
                future.cancel()
        if self._is_closing:
            return
        if link.is_leaving:
            log.info("process %d has ended", number)
        else:
            self.counts.breaks += 1
            log.warning("the link to process %d broke: what it sends is not known until it is back", number)
        assert self._member is not None
        self._member.lost(number)


class _Link(asyncio.Protocol):
    """One connection. Mutable; `number` is None until the other end has said it."""

    def __init__(self, mesh: Mesh) -> None:
        self.number: int | None = None
        self.is_leaving = False
        self.over = asyncio.Event()
        self._mesh = mesh
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        # The mesh itself bounds what may wait: nothing is paused, and whole snapshots must pass.
        self._transport.set_write_buffer_limits(high=_MOST_UNREAD_BYTES)
        self._mesh.opened(self)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._frames.take(data)
            self._mesh.counts.received += len(messages)
            for message in messages:
                self._mesh.heard(self, message)
        except WireError as error:
            log.error("process %s is not understood: %s", self.number, error)
            self.close()
        except Exception:
            log.exception("what process %s said could not be taken in", self.number)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.over.set()
        self._mesh.closed(self)

    def write(self, messages: Sequence[Message]) -> None:
        if messages:
            self.write_frame(frame(messages), len(messages))

    def write_frame(self, data: bytes, messages: int) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            log.warning("process %s does not read: its link is cut", self.number)
            self.close()
            return
        self._mesh.counts.sent += messages
        transport.write(data)

    def close(self) -> None:
        """At once, whatever was not read yet."""
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Once the other end has what was written."""
        if self._transport is not None:
            self._transport.close()


def folder_of_links(parent: Path) -> Path:
    """A new folder, only this user's, for the sockets and files of one gateway. Raises OSError."""
    folder = parent / f"kvroute-{os.getpid()}-{os.urandom(4).hex()}"
    folder.mkdir(mode=0o700)
    return folder


_NOT_HERE: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


class SharedPort:
    """An address that processes of one user listen on together; the kernel deals connections out among
    those that do. Holding it keeps others from it, and does not listen."""

    def __init__(self, host: str, port: int) -> None:
        """Raises ConfigError if the address cannot be had, or if somebody listens there already: without
        that check another gateway of the same user would share its clients with this one."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ConfigError("server.host", f"{host}: {error.strerror}") from error
        self._held: list[socket.socket] = []
        failed: OSError | None = None
        for family, *_, address in dict.fromkeys(found):
            place = address if not self._held or port else (address[0], self.port, *address[2:])
            try:
                with _bound(family, place, shared=False) as alone:
                    place = alone.getsockname()
                self._held.append(_bound(family, place, shared=True))
            except OSError as error:
                failed = error
                if error.errno not in _NOT_HERE:  # a name may have addresses that this machine lacks
                    break
        if failed is not None and (failed.errno not in _NOT_HERE or not self._held):
            self.close()
            raise ConfigError("server.port", f"{host}:{port}: {failed.strerror}") from failed

    @property
    def port(self) -> int:
        """As taken, where the configuration left it to the system."""
        number: int = self._held[0].getsockname()[1]
        return number

    def sockets(self) -> list[socket.socket]:
        """Sockets of this process's own, to listen on. Raises OSError."""
        return [_bound(held.family, held.getsockname(), shared=True) for held in self._held]

    def close(self) -> None:
        for held in self._held:
            held.close()


def _bound(family: int, address: tuple[object, ...], *, shared: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setblocking(False)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
