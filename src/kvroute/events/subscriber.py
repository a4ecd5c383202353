"""Follows one event stream: subscribes, replays, applies, repairs gaps, and drops the map if a repair fails.

The subscriber connects first and then replays from 0; after that, messages are applied as they arrive
(`kvroute.events.intake`). A gap, a lost connection, an unreadable message or silence leads to a replay that
starts with a batch applied before (`kvroute.events.sequence`). During a replay, live messages wait in the
inbox.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Final, NamedTuple, ParamSpec

import msgspec
import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.events.inbox import Inbox
from kvroute.events.intake import APPLYING_FAILED, Intake
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.poller import TimeSlicer
from kvroute.events.sequence import SequenceVerdict
from kvroute.fleet.worker import Worker
from kvroute.index.map_trust import MapTrust, TrustReason, trust_for
from kvroute.index.snapshot import HEAD, Frame, StreamHead, decode, encode, encode_end, split
from kvroute.wire.zmq import MAX_MESSAGE_BYTES, EventMessage, pack_replay_request, unpack_live, unpack_replay


@asynccontextmanager
async def replay(
    context: zmq.asyncio.Context, endpoint: str, start_seq: int, timeout_s: float
) -> AsyncIterator[AsyncIterator[EventMessage]]:
    """Request a replay: an iterator over the worker's buffered batches from `start_seq` on, in order.

    Each batch has to arrive within `timeout_s`. This function and the iterator raise TimeoutError, WireError
    and zmq.ZMQError.
    """
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        async with asyncio.timeout(timeout_s):
            await socket.send_multipart(pack_replay_request(start_seq))
        yield _messages(socket, timeout_s)
    finally:
        socket.close(linger=0)


async def _messages(socket: zmq.asyncio.Socket, timeout_s: float) -> AsyncIterator[EventMessage]:
    while True:
        async with asyncio.timeout(timeout_s):
            frames = await socket.recv_multipart()
        message = unpack_replay(frames)
        if message is None:
            return
        yield message


log = logging.getLogger(__name__)

_RESTARTS = 3
"""Replays in a row that may show another stream, before the repair counts as failed."""
_MESSAGES_PER_ROUND = 1000
"""Messages between two checks of the stream's state."""
_MESSAGES_PER_TAKE = 50
_LARGE_BLOCK = 256
"""Tokens in a block, assumed until the events or the worker's metrics show its size."""


class KvEventSubscriber:
    """Follows one stream and keeps its ledger up to date.

    Mutable: `run` owns all waiting; every other method is synchronous or takes the lock, and may be called at
    any time from the same event loop. All streams of the loop share `slicer`. `pool_blocks` is as for
    `Intake`; `block_tokens` returns the worker's block size by its metrics, or None. `resumed` is a
    snapshot of this stream: it is used once a replay has confirmed its position.
    """

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        open_inbox: Callable[[], Inbox],
        replay_endpoint: str | None,
        context: zmq.asyncio.Context,
        clock: Clock,
        options: KvEventsOptions,
        slicer: TimeSlicer,
        *,
        pool_blocks: Callable[[], int | None] = lambda: None,
        block_tokens: Callable[[], int | None] = lambda: None,
        resumed: tuple[StreamHead, Sequence[Frame]] | None = None,
    ) -> None:
        self._name = name
        self._ledger = ledger
        self._open_inbox = open_inbox
        self._replay_endpoint = replay_endpoint
        self._context = context
        self._clock = clock
        self._options = options
        self._slicer = slicer
        self._block_tokens = block_tokens
        self._resumed = resumed if replay_endpoint is not None else None
        self._intake = intake = Intake(name, ledger, clock, options, slicer, pool_blocks)
        self._sequence, self._trust_state, self.counts = intake.sequence, intake.trust_state, intake.counts
        self._applying = intake.applying
        self._reread_at: float | None = None

    @property
    def trust(self) -> MapTrust:
        return trust_for(self.reason)

    @property
    def reason(self) -> TrustReason | None:
        """Why the map is not whole; None if it is."""
        return self._intake.reason

    @property
    def was_whole(self) -> bool:
        """The map has been whole at least once since the worker's process started."""
        return self._intake.was_whole

    @property
    def last_message(self) -> float | None:
        """`Clock.now()` of the last message, replayed ones included."""
        return self._intake.last_message

    def restarted(self) -> None:
        """The engine is a new process: drop the map, and replay the new history from its start."""
        self._intake.was_whole = False
        self._intake.restart()

    def on_answer(self, new_tokens: int, started: float | None = None) -> None:
        """The worker answered a request sent at `started` (`Clock.now()`; None: unknown) and computed
        `new_tokens`.

        More new tokens than a block has means that the worker stored a block and published an event. Too many
        such answers without an event make the map unusable (`TrustReason.SILENT`).
        """
        if new_tokens > max(self._ledger.unit_tokens or _LARGE_BLOCK, self._block_tokens() or 0):
            self._trust_state.silence.on_answer(self._clock.now(), started)

    def distrust(self, reason: TrustReason) -> None:
        """Predictions from the map were wrong: do not use it until it has been read again.

        The stream is replayed from its start, at most once in `reread_s`. Without a replay socket the map
        starts empty.
        """
        self._trust_state.distrust(reason)
        self._trust_state.report(self.reason, self._ledger.not_understood)

    def note_reannounce_requested(self, blocks: int) -> None:
        """See `Intake.note_reannounce_requested`."""
        self._intake.note_reannounce_requested(blocks)

    def heal(self) -> None:
        """The blocks of lost events were announced again: the map is whole."""
        self._intake.heal()
        self._trust_state.report(self.reason, self._ledger.not_understood)

    async def capture(self) -> tuple[StreamHead, list[bytes]] | None:
        """The map as a snapshot: its head, without the worker's fields, and its frames; None if it is not
        trusted.

        Waits until the current batch is applied; no batch is applied while this runs.
        """
        async with self._applying:
            await self._intake.maybe_yield()
            position, ledger = self._sequence.position, self._ledger
            if position is None or self._trust_state.doubt is not None:
                return None
            whole = self._sequence.whole and ledger.is_all_placed
            group, size, ahead = ledger.group, ledger.block_tokens, ledger.lookahead
            head = StreamHead("", "", 0, 0.0, *position, whole, group, size, ahead)
            generation, frames = ledger.generation, []
            for piece in ledger.dump():
                frames.append(encode(piece))
                await self._intake.maybe_yield()
                if generation != ledger.generation:
                    return None
            return head, frames

    async def run(self) -> None:
        """Follow the stream; ends only by cancellation.

        A socket that fails is opened again. After an error in our own code the map is dropped and read again.
        """
        last_warning = ""
        try:
            while True:
                try:
                    await self._resume()
                    inbox = self._open_inbox()
                    last_warning = ""
                    try:
                        await inbox.ready(self._options.replay_timeout_s)
                        inbox.on_messages = self._intake.on_messages
                        inbox.interrupted()
                        self._sequence.mark_unsure()
                        await self._follow(inbox)
                    finally:
                        await inbox.aclose()
                except (WireError, zmq.ZMQError) as error:
                    if last_warning != str(error):
                        last_warning = str(error)
                        log.warning("KV events of %s: %s; the stream is opened again", self._name, error)
                except Exception:
                    log.exception(APPLYING_FAILED, self._name)
                    self._intake.failed()
                self._sequence.mark_unsure()
                self._trust_state.report(self.reason, self._ledger.not_understood)
                await self._clock.sleep(self._options.retry_s)
        finally:
            self._sequence.mark_unsure()
            self._ledger.close()

    async def _resume(self) -> None:
        """Restore the map from the snapshot. It is not used before a replay has confirmed its position."""
        if self._resumed is None:
            return
        (head, frames), self._resumed = self._resumed, None
        epoch = self._intake.epoch
        self._ledger.begin_restore(head.group, head.block_tokens, head.lookahead)
        try:
            for frame in frames:
                self._ledger.restore(decode(frame))
                await self._intake.maybe_yield()
                if epoch != self._intake.epoch:
                    self._ledger.drop()
                    return
        except WireError as error:
            log.warning("KV events of %s: the snapshot is not used: %s", self._name, error)
            self._intake.drop_map()
            return
        self._sequence.resume(head.next_seq, head.digest, whole=head.whole)
        self._intake.on_resumed()

    async def _follow(self, inbox: Inbox) -> None:
        while True:
            if self._trust_state.doubt is not None or not self._sequence.is_sure:
                await self._repair()
            self._trust_state.report(self.reason, self._ledger.not_understood)
            arrived = await inbox.wait(self._options.idle_check_s)
            async with self._applying:
                if not arrived:
                    if inbox.interrupted():
                        self._sequence.mark_unsure()
                    else:
                        await self._replay()
                for _ in range(_MESSAGES_PER_ROUND // _MESSAGES_PER_TAKE):
                    taken = inbox.take(_MESSAGES_PER_TAKE)
                    if inbox.interrupted():
                        self._sequence.mark_unsure()
                    for frames in taken:
                        if self._slicer.exhausted():
                            await self._slicer.yield_to_loop()
                        if not self._intake.apply_fast((frames,)):
                            await self._on_frames(frames)
                    if len(taken) < _MESSAGES_PER_TAKE:
                        break
            await self._tidy()

    async def _repair(self) -> None:
        """Drop a distrusted map, and replay the messages that may be missing."""
        async with self._applying:
            if self._trust_state.doubt is not None:
                self._reread()
            if not self._sequence.is_sure and not await self._replay() and self._replay_endpoint is None:
                self._intake.reset()

    async def _on_frames(self, frames: Sequence[bytes]) -> None:
        try:
            message = unpack_live(frames)
        except WireError:
            self.counts.unreadable += 1
            self._sequence.mark_unsure()
            return
        await self._on_live(message)

    async def _on_live(self, message: EventMessage) -> None:
        """Apply a live message. After a gap, first replay the missing ones, or drop the map."""
        digest = xxh3_64_intdigest(message.payload)
        while (verdict := self._sequence.on_live(message.seq, digest)) is SequenceVerdict.REPLAY:
            self.counts.gaps += self._sequence.is_sure
            if await self._replay():
                # vLLM buffers a batch before it answers a replay. So a batch that the replay does not have
                # was not published by this worker.
                verdict = self._sequence.on_live(message.seq, digest)
                if verdict is SequenceVerdict.REPLAY:
                    self.counts.foreign += message.seq > self._sequence.expected
                    self.counts.duplicates += message.seq < self._sequence.expected
                    return
                log.debug("KV events of %s: the batches before %d were replayed", self._name, message.seq)
                break
            if self._replay_endpoint is None or self._intake.failures >= self._options.replay_attempts:
                self._intake.give_up_gap(message.seq)
        if verdict is SequenceVerdict.SKIP:
            self.counts.duplicates += 1
            return
        if not await self._intake.apply(message, digest):
            # This copy of the batch is damaged; the copy in the worker's buffer may be readable.
            self._sequence.mark_unsure()

    async def _replay(self) -> bool:
        """Replay missing messages, or confirm that none is missing; False if the worker did not answer."""
        if self._replay_endpoint is None:
            return False
        self.counts.replays += 1
        try:
            for _ in range(_RESTARTS):
                epoch = self._intake.epoch
                if await self._replay_once(self._replay_endpoint):
                    self._intake.failures = 0
                    return True
                if epoch == self._intake.epoch:
                    self.counts.restarts += 1
                    log.warning(
                        "KV events of %s: the engine restarted or its buffer was overrun: its map is dropped",
                        self._name,
                    )
                    self._intake.restart()
        except (TimeoutError, WireError, zmq.ZMQError) as error:
            log.debug("KV events of %s: the replay failed: %r", self._name, error)
        self._intake.failures += 1
        self.counts.replay_failures += 1
        return False

    async def _replay_once(self, endpoint: str) -> bool:
        """False if the map has to be dropped first. Raises TimeoutError, WireError, zmq.ZMQError."""
        sequence, epoch = self._sequence, self._intake.epoch
        async with replay(
            self._context, endpoint, sequence.start_replay(), self._options.replay_timeout_s
        ) as messages:
            async for message in messages:
                await self._intake.maybe_yield()
                if epoch != self._intake.epoch:
                    return False
                digest = xxh3_64_intdigest(message.payload)
                verdict = sequence.on_replayed(message.seq, digest)
                if verdict is SequenceVerdict.RESTART:
                    return False
                if verdict is SequenceVerdict.SKIP:
                    continue
                if verdict is SequenceVerdict.BEGIN:
                    self._intake.drop_map()
                if not await self._intake.apply(message, digest):
                    self._intake.give_up_gap(message.seq + 1)
                if epoch != self._intake.epoch:
                    return False
        return epoch == self._intake.epoch and sequence.end_replay() is SequenceVerdict.APPLY

    def _reread(self) -> None:
        now = self._clock.now()
        if self._reread_at is None or now - self._reread_at >= self._options.reread_s:
            self._reread_at = now
            self.counts.rereads += 1
            self._intake.reset()

    async def _tidy(self) -> None:
        """Return the memory of dropped blocks, in time slices."""
        await self._intake.maybe_yield()
        while self._ledger.sweep(1000):
            await self._intake.maybe_yield()


_BUFFER_BYTES: Final = 1 << 20


class Captured(NamedTuple):
    """A stream whose map goes into the file."""

    worker: Worker
    rank: int
    subscriber: KvEventSubscriber


class SnapshotFile:
    """The snapshot file. Mutable: `load` reads streams, `take` and `discard` remove them.

    Errors with the file are logged and not raised: the map is then read from the workers.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._streams: dict[tuple[str, str, int], tuple[StreamHead, Sequence[Frame]]] = {}

    async def load(self) -> None:
        """Read and check the file, off the event loop."""
        try:
            data = await asyncio.to_thread(self._path.read_bytes)
            streams = await asyncio.to_thread(split, data)
        except FileNotFoundError:
            return
        except (OSError, WireError) as error:
            log.warning("the snapshot of the map is ignored: %s", error)
            return
        self._streams = {(head.worker, head.url, head.rank): (head, frames) for head, frames in streams}
        log.info("a snapshot of the map has %d streams", len(self._streams))

    def knows(self, worker: Worker) -> bool:
        """Does the snapshot have a stream of this worker, of any incarnation?"""
        return any((worker_id, url) == (worker.id, worker.spec.url) for worker_id, url, _ in self._streams)

    def take(self, worker: Worker, rank: int) -> tuple[StreamHead, Sequence[Frame]] | None:
        """Remove and return this stream's snapshot; None if the worker is another process by now."""
        stream = self._streams.pop((worker.id, worker.spec.url, rank), None)
        if stream is None or stream[0].incarnation != worker.facts.start_time:
            return None
        return stream

    def discard(self) -> None:
        """Forget all streams that were loaded."""
        self._streams = {}

    async def save(self, streams: Iterable[Captured]) -> int:
        """Write all streams that can be resumed, and replace the file atomically; returns how many were
        written."""
        writing = _Writing(self._path)
        written, frames = 0, 0
        try:
            try:
                await _in_thread(writing.begin)
                for worker, rank, subscriber in streams:
                    incarnation = worker.facts.start_time
                    captured = None if incarnation is None else await subscriber.capture()
                    if captured is None or incarnation != worker.facts.start_time:
                        continue
                    head = msgspec.structs.replace(
                        captured[0], worker=worker.id, url=worker.spec.url, rank=rank, incarnation=incarnation
                    )
                    await _in_thread(writing.add, [encode(head), *captured[1]])
                    written += 1
                    frames += 1 + len(captured[1])
                await _in_thread(writing.finish, encode_end(frames))
            finally:
                await _in_thread(writing.close)
        except OSError as error:
            log.warning("the snapshot of the map was not written: %s", error)
            return 0
        return written


class _Writing:
    """Writes a new file and renames it to `path` when it is complete. Blocks: for threads, one call at a
    time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fresh = path.with_name(path.name + ".new")
        self._file: IO[bytes] | None = None

    def begin(self) -> None:
        descriptor = os.open(self._fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
        self._file.write(HEAD)

    def add(self, frames: Sequence[bytes]) -> None:
        assert self._file is not None
        self._file.writelines(frames)

    def finish(self, end: bytes) -> None:
        assert self._file is not None
        self._file.write(end)
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._fresh, self._path)

    def close(self) -> None:
        """Close the file, and delete it if it is not complete."""
        if self._file is not None:
            try:
                self._file.close()
            finally:
                self._file = None
                self._fresh.unlink(missing_ok=True)


_P = ParamSpec("_P")


async def _in_thread(work: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Run `work` in a thread, and wait for its end even when cancelled: two writes must not overlap."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        raise
