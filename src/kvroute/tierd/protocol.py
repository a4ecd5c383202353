"""The daemon's HTTP/1.1 server: only what LMCache and peers need, written for speed.

A request's head is read into a buffer of the connection and parsed by httptools. The kernel receives the body
of a PUT straight into the shared memory; Python never copies the body. A request that memory can answer is
answered in the same callback, without a task. A body needs a Content-Length; a chunked body gets 411.
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
    Acquire,
    BadRequest,
    Call,
    Get,
    GetChanges,
    Head,
    Put,
    Release,
    StatusPage,
    parse_call,
    parse_head,
)
from kvroute.tierd.peers import INCARNATION_HEADER
from kvroute.tierd.pool import Entry, EntryLease, Extents
from kvroute.tierd.store import IncomingObject, Refusal, Store, changes_body

_DISCARD_BUFFER_BYTES = 256 << 10


class StallLimits(NamedTuple):
    """How slow a client may be before its connection is aborted."""

    pause_s: float
    """Longest time without a byte sent or received."""
    grace_s: float
    """Seconds from a body's start during which its average rate is not checked."""
    least_rate: float
    """Least average rate of a body after that, in bytes per second."""


class Client(Protocol):
    """A connection, as `Connections` uses it."""

    def abort_if_stalled(self, now: float, limits: StallLimits) -> None:
        """Abort the connection if a request or an answer has stopped or is too slow."""
        ...

    def close(self) -> asyncio.Task[None] | None:
        """Abort the connection. Returns its running task, which the caller must await."""
        ...


class Connections:
    """All open connections, and what they share. Mutable: each connection adds and removes itself."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        incarnation: str,
        longest_lease_s: float,
        start: int,
        peer_key: bytes | None,
        status_page: Callable[[str], tuple[int, str, bytes]],
    ) -> None:
        """`start` is the segment's first offset. `status_page(name)` returns status, content type and body of
        `health` or `metrics`."""
        self.store = store
        self.clock = clock
        self.incarnation = incarnation
        self.peer_header = f"{INCARNATION_HEADER}: {incarnation}\r\n"
        """A header line for a peer: the incarnation of the daemon that answers."""
        self.longest_lease_s = longest_lease_s
        self.start = start
        self.authorization = None if peer_key is None else b"Bearer " + peer_key
        self.status_page = status_page
        self.discard_buffer = memoryview(bytearray(_DISCARD_BUFFER_BYTES))
        """Bodies that are not stored are received into this buffer."""
        self._clients: set[Client] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def add(self, client: Client) -> None:
        """Call when a connection was made."""
        self._clients.add(client)
        self._is_empty.clear()

    def remove(self, client: Client) -> None:
        """Call when a connection was lost."""
        self._clients.discard(client)
        if not self._clients:
            self._is_empty.set()

    def abort_stalled(self, limits: StallLimits) -> None:
        """Abort the connections that have stopped in the middle of a request or an answer."""
        now = self.clock.now()
        for client in list(self._clients):
            client.abort_if_stalled(now, limits)

    async def abort_all(self) -> None:
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
    """The connection of one client. Mutable: the state of its current request, changed by each callback.

    The connection reads a head, or reads a body (into `_pieces` of memory, or `_discard_left` bytes that are
    discarded), or waits for `_task`, which makes the answer.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._store = connections.store
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._inbox = bytearray(MAX_HEAD_BYTES)
        self._window = memoryview(self._inbox)
        self._filled = 0
        self._pieces: list[memoryview] = []  # memory for the body, in reverse order
        self._incoming: IncomingObject | None = None
        self._discard_left = 0
        self._answer_after_discard: tuple[int, str, str] = answers.REFUSALS[Refusal.EXISTS]
        self._task: asyncio.Task[None] | None = None
        self._can_write: asyncio.Future[None] | None = None
        self._last_progress = connections.clock.now()
        self._body_started = self._last_progress
        self._received = 0  # bytes of the body
        self._closes_connection = False
        self._is_paused = False
        self._is_lost = False

    # --- the transport's calls --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # With a limit of 0, writing is paused until the kernel has taken all bytes.
        self._transport.set_write_buffer_limits(high=0)
        self._connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._pieces:
            return self._pieces[-1]
        if self._discard_left:
            return self._connections.discard_buffer[: self._discard_left]
        return self._window[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._pieces or self._discard_left:
            self._body_received(nbytes)
            return
        self._filled += nbytes
        if self._is_idle:
            self._read_heads()
        elif self._filled == MAX_HEAD_BYTES:
            self._pause()

    def pause_writing(self) -> None:
        self._can_write = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._last_progress = self._connections.clock.now()
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None
        if self._is_idle:
            self._resume()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._connections.remove(self)
        self._pieces = []
        self._discard_left = 0
        if self._incoming is not None:
            self._store.counts.puts["broken_off"] += 1
            self._store.discard(self._incoming)
            self._incoming = None
        if self._task is not None:
            self._task.cancel()
        if self._can_write is not None and not self._can_write.done():
            self._can_write.cancel()

    # --- calls from Connections -------------------------------------------------------------------------

    def abort_if_stalled(self, now: float, limits: StallLimits) -> None:
        """Abort the connection if a request or an answer has stopped or is too slow."""
        is_reading = bool(self._pieces or self._discard_left or self._filled) and self._task is None
        is_slow = False
        if self._incoming is not None and self._task is None:
            is_slow = self._received < (now - self._body_started - limits.grace_s) * limits.least_rate
        is_stopped = (
            is_reading or self._can_write is not None
        ) and self._last_progress < now - limits.pause_s
        if is_stopped or is_slow:
            log.warning("a client stopped in the middle of a request: its connection is closed")
            self._transport.abort()

    def close(self) -> asyncio.Task[None] | None:
        """Abort the connection. Returns its running task, which the caller must await."""
        self._transport.abort()
        return self._task

    # --- requests ---------------------------------------------------------------------------------------

    def _read_heads(self) -> None:
        """Start every request whose head is complete. There are several when the client pipelines."""
        while self._filled and self._is_idle and not self._pieces and not self._discard_left:
            end = self._inbox.find(END_OF_HEAD, 0, self._filled) + len(END_OF_HEAD)
            try:
                if end < len(END_OF_HEAD):
                    if self._filled < MAX_HEAD_BYTES:
                        return
                    raise BadRequest(431, "head", f"the head is larger than {MAX_HEAD_BYTES} bytes")
                head = parse_head(bytes(self._window[:end]))
            except BadRequest as exc:
                # The end of this request is not known, so no later request can be read.
                self._filled, self._closes_connection = 0, True
                self._refuse(exc)
                return
            self._last_progress = self._connections.clock.now()
            self._closes_connection = head.closes_connection
            # The bytes after the head belong to this request's body first.
            end += self._start_request(head, self._window[end : self._filled])
            unread = self._filled - end
            if unread:
                self._inbox[:unread] = self._inbox[end : self._filled]
            self._filled = unread
            if self._is_lost or self._transport.is_closing():
                return

    def _start_request(self, head: Head, received: memoryview) -> int:
        """Start a request. Returns how many of the bytes `received` after its head belong to its body."""
        length = head.length or 0
        try:
            call = parse_call(head.method, head.target, self._connections.longest_lease_s)
            if isinstance(call, Put) == (length == 0):
                text = "this call has no body" if length else "an object has at least one byte"
                raise BadRequest(400, "Content-Length", text)
        except BadRequest as exc:
            self._store.counts.refused[exc.status] += 1
            return self._discard_body(head, length, received, (exc.status, exc.param, str(exc)))
        if not isinstance(call, Put):
            self._answer(call, head)
            return 0
        incoming = self._store.reserve(call.name, length, in_steps=True)
        if incoming is Refusal.NO_ROOM and self._store.can_wait_for_memory:
            self._pause()
            body_start = bytes(received[:length])
            self._start_task(self._put_after_wait(call, head, body_start))
            return len(body_start)
        return self._receive(incoming, head, received)

    async def _put_after_wait(self, call: Put, head: Head, received: bytes) -> None:
        incoming = await self._store.wait_to_reserve(call.name, head.length or 0, in_steps=True)
        self._receive(incoming, head, memoryview(received))

    def _receive(self, incoming: IncomingObject | Refusal, head: Head, received: memoryview) -> int:
        """Receive the body into the reserved memory. Returns how many of the bytes `received` were used."""
        if isinstance(incoming, Refusal):
            self._store.counts.puts[incoming.value] += 1
            return self._discard_body(head, head.length or 0, received, answers.REFUSALS[incoming])
        self._incoming = incoming
        self._body_started, self._received = self._connections.clock.now(), 0
        self._receive_into(incoming.extents)
        if head.expects_continue and not received:
            self._transport.write(answers.CONTINUE)
        used = 0
        while self._pieces and used < len(received):
            piece = self._pieces[-1]
            count = min(len(piece), len(received) - used)
            piece[:count] = received[used : used + count]
            used += count
            self._body_received(count)
        return used

    def _discard_body(
        self, head: Head, length: int, received: memoryview, response: tuple[int, str, str]
    ) -> int:
        """Read a body, discard it, then answer. Returns how many of the bytes `received` were used."""
        # The answer waits for the end of the body: a client that is still sending does not read answers.
        used = min(length, len(received))
        if used < length and not (head.expects_continue and not received):
            self._discard_left = length - used
            self._answer_after_discard = response
        else:
            self._closes_connection = self._closes_connection or used < length
            self._write(answers.error(*response))
        return used

    def _body_received(self, count: int) -> None:
        self._last_progress = self._connections.clock.now()
        if self._discard_left:
            self._discard_left -= count
            if not self._discard_left:
                self._write(answers.error(*self._answer_after_discard))
            return
        self._received += count
        piece = self._pieces[-1]
        if count < len(piece):
            self._pieces[-1] = piece[count:]
            return
        self._pieces.pop()
        if self._pieces or self._incoming is None:
            return
        incoming = self._incoming
        if incoming.reserved_bytes < incoming.size_bytes:
            self._grow(incoming)
            return
        self._incoming = None
        self._store.commit(incoming)
        self._store.counts.puts["stored"] += 1
        self._store.counts.put_bytes += incoming.size_bytes
        self._write(answers.STORED)

    def _receive_into(self, extents: Extents) -> None:
        """Let the kernel write the next bytes of the body into `extents`."""
        self._pieces = self._store.pieces(extents)
        self._pieces.reverse()

    def _grow(self, incoming: IncomingObject) -> None:
        """Reserve memory for the next part of the body."""
        extents = self._store.grow(incoming)
        if extents is None and self._store.can_wait_for_memory:
            self._pause()
            self._start_task(self._grow_after_wait(incoming))
        else:
            self._continue_body(incoming, extents)

    async def _grow_after_wait(self, incoming: IncomingObject) -> None:
        self._continue_body(incoming, await self._store.wait_to_grow(incoming))

    def _continue_body(self, incoming: IncomingObject, extents: Extents | None) -> None:
        if self._is_lost:
            return  # `connection_lost` has discarded the object
        if extents is not None:
            self._receive_into(extents)
            return
        self._incoming = None
        self._store.discard(incoming)
        self._store.counts.puts[Refusal.NO_ROOM.value] += 1
        self._discard_left = incoming.size_bytes - incoming.reserved_bytes
        self._answer_after_discard = answers.REFUSALS[Refusal.NO_ROOM]

    # --- answers ----------------------------------------------------------------------------------------

    def _answer(self, call: Call, head: Head) -> None:
        if isinstance(call, Acquire):
            lease = self._store.lease(call.name, call.ttl_s)
            if lease is None and call.wait_s > 0 and self._store.is_worth_waiting_for(call.name):
                self._start_task(self._lease_after_wait(call))
            else:
                self._answer_lease(lease, "memory")
        elif isinstance(call, Release):
            was_held = self._store.release(call.lease_id)
            self._store.counts.releases["released" if was_held else "ended"] += 1
            self._write(answers.RELEASED if was_held else answers.ENDED)
        elif isinstance(call, StatusPage):
            status, content_type, body = self._connections.status_page(call.name)
            self._write(answers.response(status, content_type, body, is_head=head.method == b"HEAD"))
        else:
            wanted = self._connections.authorization
            if wanted is not None and not hmac.compare_digest(wanted, head.authorization):
                self._refuse(BadRequest(401, "Authorization", "peers need the key of this daemon"))
            elif isinstance(call, Get):
                self._start_task(self._send(call, is_head=head.method == b"HEAD"))
            elif isinstance(call, GetChanges):
                self._start_task(self._send_changes(call))

    async def _lease_after_wait(self, call: Acquire) -> None:
        self._answer_lease(await self._store.wait_for_lease(call.name, call.ttl_s, call.wait_s), "waited")

    def _answer_lease(self, lease: EntryLease | None, outcome: str) -> None:
        self._store.counts.leases["miss" if lease is None else outcome] += 1
        self._write(answers.MISSED if lease is None else answers.lease_answer(lease, self._connections.start))

    async def _send_changes(self, call: GetChanges) -> None:
        store, incarnation = self._store, self._connections.incarnation
        if call.after.incarnation == incarnation:
            await store.changes.wait(call.after.number, call.wait_s)
        body = changes_body(store.changes, incarnation, call.bucket, call.after, store.names, store.holds)
        self._transport.write(answers.response(200, "application/json", body))

    async def _send(self, call: Get, *, is_head: bool) -> None:
        """Send a peer an object from memory or the disk. A HEAD does not read the disk."""
        store, extra = self._store, self._connections.peer_header
        size_bytes = store.size_of(call.name) if is_head else None
        entry = None if is_head else await store.pin_or_read(call.name)
        if entry is not None:
            size_bytes = entry.size_bytes
        if size_bytes is None:
            missing = answers.error(
                404, "key", "no object of this name is stored here", extra=extra, is_head=is_head
            )
            self._transport.write(missing)
            return
        try:
            kind = "application/octet-stream"
            self._transport.write(answers.response(200, kind, b"", extra=extra, length=size_bytes))
            if entry is not None:
                await self._send_entry(entry)
        finally:
            if entry is not None:
                store.pool.unpin(entry)

    async def _send_entry(self, entry: Entry) -> None:
        for piece in self._store.pieces(entry.extents):
            for start in range(0, len(piece), _SEND_BYTES):
                portion = piece[start : start + _SEND_BYTES]
                self._transport.write(portion)
                if self._can_write is not None:
                    await self._can_write
                self._store.counts.served_bytes += len(portion)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Let a task make the answer. The next request is read when the task has ended."""
        self._task = asyncio.create_task(coroutine)
        self._task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled() or self._is_lost:
            return
        if (exc := task.exception()) is not None:
            log.error("a request failed", exc_info=exc)
            self._transport.abort()
        elif self._closes_connection and not self._pieces and not self._discard_left:
            self._transport.close()
        elif self._can_write is None:
            self._resume()

    @property
    def _is_idle(self) -> bool:
        """Whether the next request may start: no task runs, and the client reads its answers."""
        return self._task is None and self._can_write is None

    def _resume(self) -> None:
        if self._is_lost or self._transport.is_closing():
            return
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        if not self._pieces and not self._discard_left:
            self._read_heads()

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _refuse(self, exc: BadRequest) -> None:
        self._store.counts.refused[exc.status] += 1
        self._write(answers.error(exc.status, exc.param, str(exc)))

    def _write(self, response: bytes) -> None:
        self._transport.write(response)
        if self._closes_connection:
            self._transport.close()
