"""Following one event stream: subscribe, replay, apply; repair what is missing, drop what cannot be.

Subscribe first, then replay from 0; from then on messages are applied as they come
(`kvroute.events.intake`). A gap, a lost connection, an unreadable message or silence is answered by a replay
that starts with a batch we know (`kvroute.events.sequence`). While a replay runs, live messages wait in the
inbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.events.inbox import Inbox
from kvroute.events.intake import FOLLOWING_FAILED, Intake
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.poller import TimeSlicer
from kvroute.events.sequence import SequenceVerdict
from kvroute.index.snapshot import Frame, StreamHead, decode, encode
from kvroute.index.trust import MapTrust as MapTrust
from kvroute.index.trust import TrustReason, trust_for
from kvroute.wire.zmq import EventMessage, pack_replay_request, unpack_live, unpack_replay


@asynccontextmanager
async def replay(
    context: zmq.asyncio.Context, endpoint: str, start_seq: int, timeout_s: float
) -> AsyncIterator[AsyncIterator[EventMessage]]:
    """All buffered batches from `start_seq` on, in order, as they come.

    Each has `timeout_s`. Raises TimeoutError, WireError, zmq.ZMQError; so does the iterator.
    """
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
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
_MESSAGES_A_TURN = 1000
_MESSAGES_A_TAKE = 50
_LARGE_BLOCK = 256
"""Taken for the worker's block size until it is known."""


class KvEventSubscriber:
    """Follows one stream into its ledger. Mutable throughout; `run` owns all waiting, all else may be called
    at any time from the same event loop.

    `pool_blocks` says how many blocks the worker's GPU memory has, if that is known: once as many have been
    computed, nothing is left of a history that was lost. `turns` are shared by all streams of the loop.
    `resumed` is what another process knew of this very stream; a replay has to bear it out.
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
        turns: TimeSlicer,
        *,
        pool_blocks: Callable[[], int | None] = lambda: None,
        resumed: tuple[StreamHead, Sequence[Frame]] | None = None,
    ) -> None:
        self._name = name
        self._ledger = ledger
        self._open_inbox = open_inbox
        self._replay_endpoint = replay_endpoint
        self._context = context
        self._clock = clock
        self._options = options
        self._turns = turns
        self._resumed = resumed if replay_endpoint is not None else None
        self._intake = intake = Intake(name, ledger, clock, options, turns, pool_blocks)
        self._sequence, self._standing, self.counts = intake.sequence, intake.standing, intake.counts
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
        """The map has been whole since the worker's process started."""
        return self._intake.was_whole

    @property
    def last_message(self) -> float | None:
        """`Clock.now()` of the last message, replayed ones included."""
        return self._intake.last_message

    def restarted(self) -> None:
        """The engine is a new process: what was believed goes at once, its history is read anew."""
        self._intake.was_whole = False
        self._intake.begin_anew()

    def served(self, new_tokens: int, started: float | None = None) -> None:
        """The worker has answered a request that was sent at `started` (`Clock.now()`, None: not known),
        and had to compute `new_tokens` for it: if that is more than a block, it has stored one and announced
        it. Too many such answers in silence are a reason."""
        if new_tokens > (self._ledger.block_tokens or _LARGE_BLOCK):
            self._standing.silence.served(self._clock.now(), started)

    def distrust(self, reason: TrustReason) -> None:
        """The map does not do what it should. It is not used until it has been read anew: replayed from the
        start at once, but not again within `reread_s`; or, without a replay socket, begun from nothing."""
        self._standing.distrust(reason)
        self._standing.report(self.reason)

    def repetition_asked(self, blocks: int) -> None:
        """As many may be announced again: they take no room that they do not have already."""
        self._intake.repetition_asked(blocks)

    def heal(self) -> None:
        """What lost events had announced was announced again."""
        self._intake.heal()
        self._standing.report(self.reason)

    async def capture(self) -> tuple[StreamHead, list[bytes]] | None:
        """The map as frames of a snapshot, and their head without the worker; None if it cannot be trusted
        to go on from. Waits for the batch that is being taken in; none is while this runs."""
        async with self._applying:
            await self._intake.breathe()
            position, ledger = self._sequence.position, self._ledger
            if position is None or self._standing.doubt is not None:
                return None
            whole = self._sequence.whole and ledger.is_all_placed
            head = StreamHead("", "", 0, 0.0, *position, whole, ledger.group, ledger.block_tokens)
            generation, frames = ledger.generation, []
            for part in ledger.dump():
                frames.append(encode(part))
                await self._intake.breathe()
                if generation != ledger.generation:
                    return None
            return head, frames

    async def run(self) -> None:
        """Follow the stream; ends only by cancellation. A socket that fails is opened again; after a failure
        of our own the map is begun anew."""
        complaint = ""
        try:
            while True:
                try:
                    await self._resume()
                    inbox = self._open_inbox()
                    complaint = ""
                    try:
                        await inbox.ready(self._options.replay_timeout_s)
                        inbox.on_messages = self._intake.on_messages
                        inbox.interrupted()
                        self._sequence.doubt()
                        await self._follow(inbox)
                    finally:
                        await inbox.aclose()
                except (WireError, zmq.ZMQError) as error:
                    if complaint != str(error):
                        complaint = str(error)
                        log.warning("KV events of %s: %s; trying again", self._name, error)
                except Exception:
                    log.exception(FOLLOWING_FAILED, self._name)
                    self._intake.failed()
                self._sequence.doubt()
                self._standing.report(self.reason)
                await self._clock.sleep(self._options.retry_s)
        finally:
            self._sequence.doubt()
            self._ledger.close()

    async def _resume(self) -> None:
        """Believe again what another process knew; not used before a replay has begun where that ended."""
        if self._resumed is None:
            return
        (head, frames), self._resumed = self._resumed, None
        epoch = self._intake.epoch
        self._ledger.begin_restore(head.group, head.block_tokens)
        try:
            for frame in frames:
                self._ledger.restore(decode(frame))
                await self._intake.breathe()
                if epoch != self._intake.epoch:
                    self._ledger.drop()
                    return
        except WireError as error:
            log.warning("KV events of %s: %s: its map is read anew", self._name, error)
            self._intake.forget()
            return
        self._sequence.resume(head.next_seq, head.digest, whole=head.whole)
        self._intake.resumed()

    async def _follow(self, inbox: Inbox) -> None:
        while True:
            if self._standing.doubt is not None or not self._sequence.is_sure:
                await self._make_sure()
            self._standing.report(self.reason)
            arrived = await inbox.wait(self._options.idle_check_s)
            async with self._applying:
                if not arrived:
                    if inbox.interrupted():
                        self._sequence.doubt()
                    else:
                        await self._replay()
                for _ in range(_MESSAGES_A_TURN // _MESSAGES_A_TAKE):
                    taken = inbox.take(_MESSAGES_A_TAKE)
                    if inbox.interrupted():
                        self._sequence.doubt()
                    for frames in taken:
                        if self._turns.are_over():
                            await self._turns.next()
                        if not self._intake.apply_fast((frames,)):
                            await self._one(frames)
                    if len(taken) < _MESSAGES_A_TAKE:
                        break
            await self._tidy()

    async def _make_sure(self) -> None:
        """Read anew what is not believed, and repair what may be missing."""
        async with self._applying:
            if self._standing.doubt is not None:
                self._read_anew()
            if not self._sequence.is_sure and not await self._replay() and self._replay_endpoint is None:
                self._intake.give_up_history()

    async def _one(self, frames: Sequence[bytes]) -> None:
        try:
            message = unpack_live(frames)
        except WireError:
            self.counts.unreadable += 1
            self._sequence.doubt()
            return
        await self._live(message)

    async def _live(self, message: EventMessage) -> None:
        digest = xxh3_64_intdigest(message.payload)
        while (verdict := self._sequence.live(message.seq, digest)) is SequenceVerdict.REPLAY:
            self.counts.gaps += self._sequence.is_sure
            if await self._replay():
                # The worker remembers a batch before it answers a replay: what it does not know of now
                # never came from it.
                verdict = self._sequence.live(message.seq, digest)
                if verdict is SequenceVerdict.REPLAY:
                    self.counts.foreign += message.seq > self._sequence.expected
                    self.counts.duplicates += message.seq < self._sequence.expected
                    return
                break
            if self._replay_endpoint is None or self._intake.failures >= self._options.replay_attempts:
                self._intake.lose(message.seq)
        if verdict is SequenceVerdict.SKIP:
            self.counts.duplicates += 1
            return
        if not await self._intake.take_in(message, digest):
            # The batch is there, but this copy of it is broken: the worker's own may be whole.
            self._sequence.doubt()

    async def _replay(self) -> bool:
        """Repair, or make sure that there is nothing to repair; False if the worker did not answer or
        cannot be asked."""
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
                    log.warning("KV events of %s begin anew: its map is dropped", self._name)
                    self._intake.begin_anew()
        except (TimeoutError, WireError, zmq.ZMQError) as error:
            log.debug("KV events of %s: no replay: %r", self._name, error)
        self._intake.failures += 1
        self.counts.replay_failures += 1
        return False

    async def _replay_once(self, endpoint: str) -> bool:
        """False if what we believe has to go first. Raises TimeoutError, WireError, zmq.ZMQError."""
        sequence, epoch = self._sequence, self._intake.epoch
        async with replay(
            self._context, endpoint, sequence.begin(), self._options.replay_timeout_s
        ) as messages:
            async for message in messages:
                await self._intake.breathe()
                if epoch != self._intake.epoch:
                    return False
                digest = xxh3_64_intdigest(message.payload)
                verdict = sequence.replayed(message.seq, digest)
                if verdict is SequenceVerdict.RESTART:
                    return False
                if verdict is SequenceVerdict.SKIP:
                    continue
                if verdict is SequenceVerdict.BEGIN:
                    self._intake.forget()
                if not await self._intake.take_in(message, digest):
                    self._intake.lose(message.seq + 1)
                if epoch != self._intake.epoch:
                    return False
        return epoch == self._intake.epoch and sequence.ended() is SequenceVerdict.APPLY

    def _read_anew(self) -> None:
        now = self._clock.now()
        if self._reread_at is None or now - self._reread_at >= self._options.reread_s:
            self._reread_at = now
            self.counts.rereads += 1
            self._intake.give_up_history()

    async def _tidy(self) -> None:
        await self._intake.breathe()
        while self._ledger.sweep(1000):
            await self._intake.breathe()
