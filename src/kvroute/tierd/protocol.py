"""HTTP/1.1 as little as the daemon needs, and as fast as an event loop allows.

A request's head is read into a buffer of the connection and parsed by httptools. The body of a PUT is
received by the kernel straight into the shared memory: it is never an object of ours. What memory can answer
is answered in the same callback, without a task. Bodies need a Content-Length; chunked ones get 411.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol, cast

from kvroute.clock import Clock
from kvroute.tierd import http as answers
from kvroute.tierd.http import (
    END_OF_HEAD,
    BadRequest,
    Call,
    Get,
    Head,
    Page,
    Put,
    Release,
    Take,
    parse_call,
    parse_head,
)
from kvroute.tierd.peers import INCARNATION_HEADER
from kvroute.tierd.pool import Entry, EntryLease, Extents
from kvroute.tierd.store import Arrival, Refusal, Store

_SCRAP_BYTES = 256 << 10


class StallLimits(NamedTuple):
    """What a client may take for a request."""

    pause_s: float
    """Without a byte moving."""
    grace_s: float
    """Before the average rate of a new entry counts."""
    least_rate: float
    """Bytes a second after that."""


class Client(Protocol):
    """A connection, as the site sees it."""

    def cut_if_stalled(self, now: float, limits: StallLimits) -> None:
        """Abort when something is under way that has stopped or is too slow."""
        ...

    def close(self) -> asyncio.Task[None] | None:
        """Abort; the task that must be awaited, if there is one."""
        ...


class Connections:
    """Mutable: the set of connections, which each of them keeps up."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        incarnation: str,
        longest_lease_s: float,
        start: int,
        peer_key: bytes | None,
        page: Callable[[str], tuple[int, str, bytes]],
    ) -> None:
        """`start` is the segment's first offset. `page(name)` is status, content type and body of `health` or
        `metrics`."""
        self.store = store
        self.clock = clock
        self.for_peers = f"{INCARNATION_HEADER}: {incarnation}\r\n"
        """A header line that tells a peer whom it has asked."""
        self.longest_lease_s = longest_lease_s
        self.start = start
        self.authorization = None if peer_key is None else b"Bearer " + peer_key
        self.page = page
        self.scrap = memoryview(bytearray(_SCRAP_BYTES))
        """Where bodies go that nobody wants."""
        self._clients: set[Client] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def enter(self, client: Client) -> None:
        """A connection was made."""
        self._clients.add(client)
        self._is_empty.clear()

    def leave(self, client: Client) -> None:
        """It was lost."""
        self._clients.discard(client)
        if not self._clients:
            self._is_empty.set()

    def sweep(self, limits: StallLimits) -> None:
        """Cut the connections that have stopped in the middle of a request or an answer."""
        now = self.clock.now()
        for client in list(self._clients):
            client.cut_if_stalled(now, limits)

    async def hang_up(self) -> None:
        """Abort all connections and wait until their tasks have ended."""
        tasks = [task for client in list(self._clients) if (task := client.close()) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._is_empty.wait()


log = logging.getLogger("kvroute.tierd")

MAX_HEAD_BYTES = 16 << 10
_SEND_BYTES = 1 << 20


class Connection(asyncio.BufferedProtocol):
    """One client. Mutable: where in a request or answer it is; each callback moves it on.

    Either a head is being read, or a body is (`_pieces` of memory to fill, or `_scrap_left` bytes to forget),
    or a task works on the answer (`_task`).
    """

    def __init__(self, site: Connections) -> None:
        self._site = site
        self._store = site.store
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._inbox = bytearray(MAX_HEAD_BYTES)
        self._window = memoryview(self._inbox)
        self._filled = 0
        self._pieces: list[memoryview] = []  # the next one last
        self._arrival: Arrival | None = None
        self._scrap_left = 0
        self._after_scrap: tuple[int, str, str] = answers.REFUSALS[Refusal.EXISTS]
        self._task: asyncio.Task[None] | None = None
        self._can_write: asyncio.Future[None] | None = None
        self._moved = site.clock.now()
        self._began = self._moved  # when the body did, and how much of it has come
        self._received = 0
        self._is_last = False
        self._is_paused = False
        self._is_lost = False

    # --- the transport's calls --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)  # paused means: the kernel does not have it all yet
        self._site.enter(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._pieces:
            return self._pieces[-1]
        if self._scrap_left:
            return self._site.scrap[: self._scrap_left]
        return self._window[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._pieces or self._scrap_left:
            self._body_grew(nbytes)
            return
        self._filled += nbytes
        if self._is_free:
            self._read_heads()
        elif self._filled == MAX_HEAD_BYTES:
            self._pause()

    def pause_writing(self) -> None:
        self._can_write = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._moved = self._site.clock.now()
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None
        if self._is_free:
            self._go_on()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._site.leave(self)
        self._pieces = []
        self._scrap_left = 0
        if self._arrival is not None:
            self._store.counts.puts["broken_off"] += 1
            self._store.give_up(self._arrival)
            self._arrival = None
        if self._task is not None:
            self._task.cancel()
        if self._can_write is not None and not self._can_write.done():
            self._can_write.cancel()

    # --- the site's calls -------------------------------------------------------------------------------

    def cut_if_stalled(self, now: float, limits: StallLimits) -> None:
        """Abort the connection when something is under way that has stopped or is too slow."""
        is_reading = bool(self._pieces or self._scrap_left or self._filled) and self._task is None
        is_slow = False
        if self._arrival is not None and self._task is None:
            is_slow = self._received < (now - self._began - limits.grace_s) * limits.least_rate
        is_stopped = (is_reading or self._can_write is not None) and self._moved < now - limits.pause_s
        if is_stopped or is_slow:
            log.warning("a client stopped in the middle of a request: its connection is cut")
            self._transport.abort()

    def close(self) -> asyncio.Task[None] | None:
        """Abort; the task that must be awaited, if there is one."""
        self._transport.abort()
        return self._task

    # --- requests ---------------------------------------------------------------------------------------

    def _read_heads(self) -> None:
        """Answer what has come completely; more than one when the client pipelines."""
        while self._filled and self._is_free and not self._pieces and not self._scrap_left:
            end = self._inbox.find(END_OF_HEAD, 0, self._filled) + len(END_OF_HEAD)
            try:
                if end < len(END_OF_HEAD):
                    if self._filled < MAX_HEAD_BYTES:
                        return
                    raise BadRequest(431, "head", f"the head is larger than {MAX_HEAD_BYTES} bytes")
                head = parse_head(bytes(self._window[:end]))
            except BadRequest as exc:
                # Where it ends is not known, so nothing after it can be read.
                self._filled, self._is_last = 0, True
                self._refuse(exc)
                return
            self._moved = self._site.clock.now()
            self._is_last = head.is_last
            # What follows the head is of this request's body first.
            end += self._begin(head, self._window[end : self._filled])
            left = self._filled - end
            if left:
                self._inbox[:left] = self._inbox[end : self._filled]
            self._filled = left
            if self._is_lost or self._transport.is_closing():
                return

    def _begin(self, head: Head, received: memoryview) -> int:
        """Start on a request; how many of the `received` bytes after its head are its body."""
        length = head.length or 0
        try:
            call = parse_call(head.method, head.target, self._site.longest_lease_s)
            if isinstance(call, Put) == (length == 0):
                text = "this call has no body" if length else "an object has at least one byte"
                raise BadRequest(400, "Content-Length", text)
        except BadRequest as exc:
            self._store.counts.refused[exc.status] += 1
            return self._skip_body(head, length, received, (exc.status, exc.param, str(exc)))
        if not isinstance(call, Put):
            self._answer(call, head)
            return 0
        arrival = self._store.begin(call.name, length, in_steps=True)
        if arrival is Refusal.NO_ROOM and self._store.can_wait_for_room:
            self._pause()
            early = bytes(received[:length])
            self._work(self._put_later(call, head, early))
            return len(early)
        return self._receive(arrival, head, received)

    async def _put_later(self, call: Put, head: Head, early: bytes) -> None:
        arrival = await self._store.wait_for_room(call.name, head.length or 0, in_steps=True)
        self._receive(arrival, head, memoryview(early))

    def _receive(self, arrival: Arrival | Refusal, head: Head, received: memoryview) -> int:
        """Let the body fill the arrival; how many of the `received` bytes did."""
        if isinstance(arrival, Refusal):
            self._store.counts.puts[arrival.value] += 1
            return self._skip_body(head, head.length or 0, received, answers.REFUSALS[arrival])
        self._arrival = arrival
        self._began, self._received = self._site.clock.now(), 0
        self._fill(arrival.extents)
        if head.expects and not received:
            self._transport.write(answers.CONTINUE)
        taken = 0
        while self._pieces and taken < len(received):
            piece = self._pieces[-1]
            count = min(len(piece), len(received) - taken)
            piece[:count] = received[taken : taken + count]
            taken += count
            self._body_grew(count)
        return taken

    def _skip_body(self, head: Head, length: int, received: memoryview, answer: tuple[int, str, str]) -> int:
        """Read a body without keeping it, then answer: who is still sending would not read an answer."""
        taken = min(length, len(received))
        if taken < length and not (head.expects and not received):
            self._scrap_left = length - taken
            self._after_scrap = answer
        else:
            self._is_last = self._is_last or taken < length
            self._write(answers.error(*answer))
        return taken

    def _body_grew(self, count: int) -> None:
        self._moved = self._site.clock.now()
        if self._scrap_left:
            self._scrap_left -= count
            if not self._scrap_left:
                self._write(answers.error(*self._after_scrap))
            return
        self._received += count
        piece = self._pieces[-1]
        if count < len(piece):
            self._pieces[-1] = piece[count:]
            return
        self._pieces.pop()
        if self._pieces or self._arrival is None:
            return
        arrival = self._arrival
        if arrival.reserved_bytes < arrival.size_bytes:
            self._grow(arrival)
            return
        self._arrival = None
        self._store.admit(arrival)
        self._store.counts.puts["stored"] += 1
        self._store.counts.put_bytes += arrival.size_bytes
        self._write(answers.STORED)

    def _fill(self, extents: Extents) -> None:
        """Let the kernel write what comes next into `extents`."""
        self._pieces = self._store.pieces(extents)
        self._pieces.reverse()

    def _grow(self, arrival: Arrival) -> None:
        """Reserve memory for the next part of the body."""
        extents = self._store.grow(arrival)
        if extents is None and self._store.can_wait_for_room:
            self._pause()
            self._work(self._grow_later(arrival))
        else:
            self._go_on_with(arrival, extents)

    async def _grow_later(self, arrival: Arrival) -> None:
        self._go_on_with(arrival, await self._store.wait_to_grow(arrival))

    def _go_on_with(self, arrival: Arrival, extents: Extents | None) -> None:
        if self._is_lost:
            return  # given up when the connection was lost
        if extents is not None:
            self._fill(extents)
            return
        self._arrival = None
        self._store.give_up(arrival)
        self._store.counts.puts[Refusal.NO_ROOM.value] += 1
        self._scrap_left = arrival.size_bytes - arrival.reserved_bytes
        self._after_scrap = answers.REFUSALS[Refusal.NO_ROOM]

    # --- answers ----------------------------------------------------------------------------------------

    def _answer(self, call: Call, head: Head) -> None:
        if isinstance(call, Take):
            lease = self._store.lease(call.name, call.ttl_s)
            if lease is None and call.wait_s > 0 and self._store.may_come(call.name):
                self._work(self._lease_later(call))
            else:
                self._tell(lease, "memory")
        elif isinstance(call, Release):
            was_held = self._store.release(call.lease_id)
            self._store.counts.releases["released" if was_held else "ended"] += 1
            self._write(answers.RELEASED if was_held else answers.ENDED)
        elif isinstance(call, Page):
            status, content_type, body = self._site.page(call.name)
            self._write(answers.answer(status, content_type, body, is_head=head.method == b"HEAD"))
        elif isinstance(call, Get):
            wanted = self._site.authorization
            if wanted is not None and not hmac.compare_digest(wanted, head.authorization):
                self._refuse(BadRequest(401, "Authorization", "peers need the key of this daemon"))
            else:
                self._work(self._send(call, is_head=head.method == b"HEAD"))

    async def _lease_later(self, call: Take) -> None:
        self._tell(await self._store.await_lease(call.name, call.ttl_s, call.wait_s), "waited")

    def _tell(self, lease: EntryLease | None, outcome: str) -> None:
        self._store.counts.leases["miss" if lease is None else outcome] += 1
        self._write(answers.MISSED if lease is None else answers.leased(lease, self._site.start))

    async def _send(self, call: Get, *, is_head: bool) -> None:
        """To a peer: what memory or the disk holds. A HEAD leaves what is on the disk there."""
        store, extra = self._store, self._site.for_peers
        size_bytes = store.size_of(call.name) if is_head else None
        entry = None if is_head else await store.local_or_disk(call.name)
        if entry is not None:
            size_bytes = entry.size_bytes
        if size_bytes is None:
            missing = answers.error(404, "key", "the object is not here", extra=extra, is_head=is_head)
            self._transport.write(missing)
            return
        try:
            kind = "application/octet-stream"
            self._transport.write(answers.answer(200, kind, b"", extra=extra, length=size_bytes))
            if entry is not None:
                await self._send_entry(entry)
        finally:
            if entry is not None:
                store.pool.unpin(entry)

    async def _send_entry(self, entry: Entry) -> None:
        for piece in self._store.pieces(entry.extents):
            for start in range(0, len(piece), _SEND_BYTES):
                part = piece[start : start + _SEND_BYTES]
                self._transport.write(part)
                if self._can_write is not None:
                    await self._can_write
                self._store.counts.served_bytes += len(part)

    def _work(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Let a task answer; the next request is read after it."""
        self._task = asyncio.create_task(coroutine)
        self._task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled() or self._is_lost:
            return
        if (exc := task.exception()) is not None:
            log.error("a request failed", exc_info=exc)
            self._transport.abort()
        elif self._is_last and not self._pieces and not self._scrap_left:
            self._transport.close()
        elif self._can_write is None:
            self._go_on()

    @property
    def _is_free(self) -> bool:
        """Whether the next request may be begun: none is worked on, and the client takes its answers."""
        return self._task is None and self._can_write is None

    def _go_on(self) -> None:
        if self._is_lost or self._transport.is_closing():
            return
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        if not self._pieces and not self._scrap_left:
            self._read_heads()

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _refuse(self, exc: BadRequest) -> None:
        self._store.counts.refused[exc.status] += 1
        self._write(answers.error(exc.status, exc.param, str(exc)))

    def _write(self, answer: bytes) -> None:
        self._transport.write(answer)
        if self._is_last:
            self._transport.close()
