"""Following one event stream: subscribe, replay, apply; repair what is missing, drop what cannot be.

Subscribe first, then replay from 0; from then on messages are applied as they come. A gap, a lost
connection, an unreadable message or silence is answered by a replay that starts with a batch we know
(`kvroute.events.sequence`). While a replay runs, live messages wait in the socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.events.inbox import Inbox
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.sequence import Sequence, Verdict
from kvroute.wire.framing import EventMessage, pack_replay_request, unpack_live, unpack_replay
from kvroute.wire.splitting import split_batch
from kvroute.wire.vllm import decode_batch

log = logging.getLogger(__name__)

_RESTARTS = 3


class Trust(StrEnum):
    """How far the map of one stream can be believed."""

    WHOLE = "whole"
    """It is what the worker holds, as of its last message."""
    PARTIAL = "partial"
    """The worker holds what it says, and perhaps more: history is lost, or blocks could not be placed."""
    NONE = "none"
    """Not connected, or a gap is not repaired yet."""


@dataclass(slots=True)
class StreamCounts:
    """What happened on the stream. Mutable; counted by its subscriber."""

    messages: int = 0
    duplicates: int = 0
    unreadable: int = 0
    foreign: int = 0
    """Numbers that the worker's own replay does not know."""
    unknown_events: int = 0
    unknown_fields: int = 0
    replays: int = 0
    replay_failures: int = 0
    restarts: int = 0
    """The stream was another one than before: the engine restarted, or the buffer was overrun."""
    losses: int = 0
    """Gaps that could not be filled: the map was dropped."""


class KvEventSubscriber:
    """Follows one stream into its ledger. Mutable throughout; `run` owns all waiting, `restarted` may be
    called at any time from the same event loop."""

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        open_inbox: Callable[[], Inbox],
        replay_endpoint: str | None,
        context: zmq.asyncio.Context,
        clock: Clock,
        options: KvEventsOptions,
    ) -> None:
        self.counts = StreamCounts()
        self.last_message: float | None = None
        """`Clock.now()` of the last message, replayed ones included."""
        self._name = name
        self._ledger = ledger
        self._open_inbox = open_inbox
        self._replay_endpoint = replay_endpoint
        self._context = context
        self._clock = clock
        self._options = options
        self._sequence = Sequence()
        self._failures = 0
        self._epoch = 0
        self._turn_started = 0.0

    @property
    def trust(self) -> Trust:
        if not self._sequence.is_sure or self._failures >= self._options.replay_attempts:
            return Trust.NONE
        if self._sequence.whole and not self._ledger.aside_blocks:
            return Trust.WHOLE
        return Trust.PARTIAL

    def restarted(self) -> None:
        """The engine is a new process: what was believed goes at once, its history is read anew."""
        self._epoch += 1
        self._ledger.drop()
        self._sequence.reset()

    async def run(self) -> None:
        """Follow the stream; ends only by cancellation. A socket that fails is opened again."""
        try:
            while True:
                try:
                    inbox = self._open_inbox()
                    try:
                        self._sequence.doubt()
                        await self._follow(inbox)
                    finally:
                        inbox.close()
                except zmq.ZMQError as error:
                    log.warning("KV events of %s: %s; trying again", self._name, error)
                self._sequence.doubt()
                await self._clock.sleep(self._options.retry_s)
        finally:
            self._ledger.close()

    async def _follow(self, inbox: Inbox) -> None:
        self._turn_started = self._clock.now()
        while True:
            if not self._sequence.is_sure and not await self._replay() and self._replay_endpoint is None:
                self._give_up_history()
            arrived = await inbox.wait(self._options.idle_check_s)
            self._turn_started = self._clock.now()
            if inbox.interrupted():
                self._sequence.doubt()
            elif not arrived:
                await self._replay()
            while (frames := inbox.take()) is not None:
                if inbox.interrupted():
                    self._sequence.doubt()
                try:
                    message = unpack_live(frames)
                except WireError:
                    self.counts.unreadable += 1
                    self._sequence.doubt()
                    continue
                await self._live(message)
            await self._tidy()

    async def _live(self, message: EventMessage) -> None:
        digest = xxh3_64_intdigest(message.payload)
        while (verdict := self._sequence.live(message.seq, digest)) is Verdict.REPLAY:
            if await self._replay():
                # The worker remembers a batch before it answers a replay: what it does not know of now
                # never came from it.
                verdict = self._sequence.live(message.seq, digest)
                if verdict is Verdict.REPLAY:
                    self.counts.foreign += message.seq > self._sequence.expected
                    self.counts.duplicates += message.seq < self._sequence.expected
                    return
                break
            if self._replay_endpoint is None or self._failures >= self._options.replay_attempts:
                self._lose(message.seq)
        if verdict is Verdict.SKIP:
            self.counts.duplicates += 1
            return
        if not await self._apply(message, digest):
            # The batch is there, but this copy of it is broken: the worker's own may be whole.
            self._sequence.doubt()

    async def _apply(self, message: EventMessage, digest: int) -> bool:
        """Take in one batch; False, and nothing of it is believed, if it cannot be read."""
        epoch, cleared = self._epoch, self._ledger.counts.cleared
        batches = []
        try:
            for piece in split_batch(message.payload):
                batches.append(decode_batch(piece))
                await self._breathe()
        except WireError:
            self.counts.unreadable += 1
            return False
        if epoch != self._epoch:
            return True
        for batch in batches:
            self.counts.unknown_events += batch.unknown_events
            self.counts.unknown_fields += batch.unknown_fields
            for _ in self._ledger.apply(batch):
                await self._breathe()
                if epoch != self._epoch:
                    return True
        self.counts.messages += 1
        self.last_message = self._clock.now()
        self._sequence.applied(message.seq, digest, cleared=self._ledger.counts.cleared > cleared)
        await self._breathe()
        return True

    async def _replay(self) -> bool:
        """Repair, or make sure that there is nothing to repair; False if the worker did not answer or
        cannot be asked."""
        if self._replay_endpoint is None:
            return False
        self.counts.replays += 1
        try:
            for _ in range(_RESTARTS):
                epoch = self._epoch
                if await self._replay_once(self._replay_endpoint):
                    self._failures = 0
                    return True
                if epoch == self._epoch:
                    self.counts.restarts += 1
                    log.warning("KV events of %s begin anew: its map is dropped", self._name)
                    self.restarted()
        except (TimeoutError, WireError, zmq.ZMQError) as error:
            log.debug("KV events of %s: no replay: %r", self._name, error)
        self._failures += 1
        self.counts.replay_failures += 1
        return False

    async def _replay_once(self, endpoint: str) -> bool:
        """False if what we believe has to go first. Raises TimeoutError, WireError, zmq.ZMQError."""
        sequence, epoch = self._sequence, self._epoch
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(endpoint)
            async with asyncio.timeout(self._options.replay_timeout_s):
                await socket.send_multipart(pack_replay_request(sequence.begin()))
            while True:
                async with asyncio.timeout(self._options.replay_timeout_s):
                    frames = await socket.recv_multipart()
                if epoch != self._epoch:
                    return False
                message = unpack_replay(frames)
                if message is None:
                    return sequence.ended() is Verdict.APPLY
                digest = xxh3_64_intdigest(message.payload)
                verdict = sequence.replayed(message.seq, digest)
                if verdict is Verdict.RESTART:
                    return False
                if verdict is Verdict.SKIP:
                    continue
                if verdict is Verdict.BEGIN:
                    self._ledger.drop()
                if not await self._apply(message, digest):
                    self._lose(message.seq + 1)
                if epoch != self._epoch:
                    return False
        finally:
            socket.close(linger=0)

    def _lose(self, next_seq: int) -> None:
        self.counts.losses += 1
        log.warning("KV events of %s: a gap cannot be filled: its map is dropped", self._name)
        self._ledger.drop()
        self._sequence.lost(next_seq)
        self._failures = 0

    def _give_up_history(self) -> None:
        """Without a replay socket an interruption costs all that was believed."""
        self._ledger.drop()
        self._sequence.reset()

    async def _breathe(self) -> None:
        """Let others run if our turn has lasted for long enough."""
        now = self._clock.now()
        if now - self._turn_started >= self._options.slice_ms / 1000:
            await asyncio.sleep(0)
            self._turn_started = self._clock.now()

    async def _tidy(self) -> None:
        while self._ledger.sweep(1000):
            await self._breathe()
