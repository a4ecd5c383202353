"""Following one event stream: subscribe, replay, apply; repair what is missing, drop what cannot be.

Subscribe first, then replay from 0; from then on messages are applied as they come. A gap, a lost
connection, an unreadable message or silence is answered by a replay that starts with a batch we know
(`kvroute.events.sequence`). While a replay runs, live messages wait in the socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.events.counts import StreamCounts
from kvroute.events.inbox import Inbox
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.replay import replay
from kvroute.events.sequence import Sequence as EventSequence
from kvroute.events.sequence import Verdict
from kvroute.events.trust import Reason, Silence, Standing, trust_for
from kvroute.events.trust import Trust as Trust
from kvroute.events.turns import Turns
from kvroute.index.snapshot import Frame, StreamHead, decode, encode
from kvroute.wire.events import EventBatch
from kvroute.wire.framing import EventMessage, unpack_live
from kvroute.wire.splitting import Piece, split_batch
from kvroute.wire.vllm import decode_batch

log = logging.getLogger(__name__)

_RESTARTS = 3
_MESSAGES_A_TURN = 1000
_MESSAGES_A_TAKE = 50
_QUICK_BYTES = 2048
"""Batches of at most as many together are taken in in one go: about 0.2 ms if they are full of removals."""
_FRAMES = 3
_NUMBER_BYTES = 8
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
        turns: Turns,
        *,
        pool_blocks: Callable[[], int | None] = lambda: None,
        resumed: tuple[StreamHead, Sequence[Frame]] | None = None,
    ) -> None:
        self.counts = StreamCounts()
        self.was_whole = False
        """The map has been whole since the worker's process started."""
        self.last_message: float | None = None
        """`Clock.now()` of the last message, replayed ones included."""
        self._name = name
        self._ledger = ledger
        self._open_inbox = open_inbox
        self._replay_endpoint = replay_endpoint
        self._context = context
        self._clock = clock
        self._options = options
        self._turns = turns
        self._pool_blocks = pool_blocks
        self._resumed = resumed if replay_endpoint is not None else None
        self._sequence = EventSequence()
        self._standing = Standing(name, Silence(options.silent_requests, options.silent_s, clock.now()))
        self._applying = asyncio.Lock()
        self._failures = 0
        self._epoch = 0
        self._computed_before = 0
        self._refused_at: int | None = None
        """Blocks computed when one was last refused; None when nothing is missing for that."""
        self._reread_at: float | None = None

    @property
    def trust(self) -> Trust:
        return trust_for(self.reason)

    @property
    def reason(self) -> Reason | None:
        """Why the map is not whole; None if it is."""
        standing, sequence = self._standing, self._sequence
        if (
            sequence.is_sure
            and sequence.whole
            and not self._failures
            and standing.doubt is None
            and not standing.silence.answers
            and self._refused_at is None
            and not self._ledger.aside_blocks
        ):
            return None  # nearly always, and asked several times for each request
        return standing.reason(
            is_sure=self._sequence.is_sure and self._failures < self._options.replay_attempts,
            is_whole=self._sequence.whole,
            aside_blocks=self._ledger.aside_blocks,
            is_full=self._refused_at is not None,
        )

    @property
    def _computed(self) -> int:
        return self._ledger.counts.computed

    def restarted(self) -> None:
        """The engine is a new process: what was believed goes at once, its history is read anew."""
        self.was_whole = False
        self._begin_anew()

    def served(self, new_tokens: int, started: float | None = None) -> None:
        """The worker has answered a request that was sent at `started` (`Clock.now()`, None: not known),
        and had to compute `new_tokens` for it: if that is more than a block, it has stored one and announced
        it. Too many such answers in silence are a reason."""
        if new_tokens > (self._ledger.block_tokens or _LARGE_BLOCK):
            self._standing.silence.served(self._clock.now(), started)

    def distrust(self, reason: Reason) -> None:
        """The map does not do what it should. It is not used until it has been read anew: replayed from the
        start at once, but not again within `reread_s`; or, without a replay socket, begun from nothing."""
        self._standing.distrust(reason)
        self._standing.report(self.reason)

    def repetition_asked(self, blocks: int) -> None:
        """As many may be announced again: they take no room that they do not have already."""
        self._computed_before += blocks

    def heal(self) -> None:
        """What lost events had announced was announced again."""
        self._sequence.heal()
        self.counts.healed += 1
        self._standing.report(self.reason)

    async def capture(self) -> tuple[StreamHead, list[bytes]] | None:
        """The map as frames of a snapshot, and their head without the worker; None if it cannot be trusted
        to go on from. Waits for the batch that is being taken in; none is while this runs."""
        async with self._applying:
            await self._breathe()
            position, ledger = self._sequence.position, self._ledger
            if position is None or self._standing.doubt is not None:
                return None
            whole = self._sequence.whole and ledger.is_all_placed
            head = StreamHead("", "", 0, 0.0, *position, whole, ledger.group, ledger.block_tokens)
            generation, frames = ledger.generation, []
            for part in ledger.dump():
                frames.append(encode(part))
                await self._breathe()
                if generation != ledger.generation:
                    return None
            return head, frames

    async def run(self) -> None:
        """Follow the stream; ends only by cancellation. A socket that fails is opened again; after a failure
        of our own the map is begun anew."""
        try:
            while True:
                try:
                    await self._resume()
                    inbox = self._open_inbox()
                    try:
                        self._sequence.doubt()
                        await self._follow(inbox)
                    finally:
                        inbox.close()
                except zmq.ZMQError as error:
                    log.warning("KV events of %s: %s; trying again", self._name, error)
                except Exception:
                    self.counts.failures += 1
                    log.exception("KV events of %s: following them failed: its map is dropped", self._name)
                    self._begin_anew()
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
        epoch = self._epoch
        self._ledger.begin_restore(head.group, head.block_tokens)
        try:
            for frame in frames:
                self._ledger.restore(decode(frame))
                await self._breathe()
                if epoch != self._epoch:
                    self._ledger.drop()
                    return
        except WireError as error:
            log.warning("KV events of %s: %s: its map is read anew", self._name, error)
            self._forget()
            return
        self._sequence.resume(head.next_seq, head.digest, whole=head.whole)
        if self._ledger.counts.refused:
            self._refused_at = self._computed
        self.counts.resumed += 1

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
                    place = 0
                    while place < len(taken):
                        if self._turns.are_over():
                            await self._turns.next()
                        done = self._quickly(taken, place)
                        if done == place:
                            await self._one(taken[place])
                            done += 1
                        place = done
                    if len(taken) < _MESSAGES_A_TAKE:
                        break
            await self._tidy()

    async def _make_sure(self) -> None:
        """Read anew what is not believed, and repair what may be missing."""
        async with self._applying:
            if self._standing.doubt is not None:
                self._read_anew()
            if not self._sequence.is_sure and not await self._replay() and self._replay_endpoint is None:
                self._give_up_history()

    def _quickly(self, taken: Sequence[Sequence[bytes]], place: int) -> int:
        """What `_one` does with small batches that follow each other, as nearly all do, in a fraction of the
        time. From `place` on, as long as they are of that kind and together no longer than the longest of
        them may be; returns the place of the first that was left."""
        sequence, ledger, left, heard = self._sequence, self._ledger, _QUICK_BYTES, False
        while place < len(taken):
            frames = taken[place]
            if len(frames) != _FRAMES or len(frames[1]) != _NUMBER_BYTES:
                break
            payload, seq = frames[2], int.from_bytes(frames[1])
            left -= len(payload)
            if left < 0 or seq != sequence.expected or not sequence.is_sure:
                break
            digest = xxh3_64_intdigest(payload)
            try:
                batch = decode_batch(payload)
            except WireError:
                break
            counts = ledger.counts
            cleared, refused = counts.cleared, counts.refused
            if batch.unknown_events or batch.unknown_fields:
                self.counts.unknown_events += batch.unknown_events
                self.counts.unknown_fields += batch.unknown_fields
            if not ledger.grow(batch):
                for _ in ledger.apply(batch):
                    pass
            place += 1
            is_usual = counts.cleared == cleared and counts.refused == refused
            if is_usual and sequence.whole and self._refused_at is None:
                # As `_applied`, but for what can wait until the last of them.
                self.counts.messages += 1
                sequence.applied(seq, digest)
                heard = True
            else:
                self._applied(seq, digest, cleared, refused)
        if heard:
            self.was_whole = True
            self.last_message = self._clock.now()
            self._standing.silence.heard(self.last_message)
        return place

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
        while (verdict := self._sequence.live(message.seq, digest)) is Verdict.REPLAY:
            self.counts.gaps += self._sequence.is_sure
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
        epoch, cleared, refused = self._epoch, self._ledger.counts.cleared, self._ledger.counts.refused
        pieces: list[Piece] = []
        first: EventBatch | None = None
        try:
            # All of it is read before anything is believed, but not kept: what is decoded of a burst would
            # keep the garbage collector busy.
            for piece in split_batch(message.payload):
                if piece is not None:
                    if not piece.is_checked:
                        batch = decode_batch(piece.payload)
                        if not pieces:
                            first = batch
                    pieces.append(piece)
                await self._breathe()
        except WireError:
            self.counts.unreadable += 1
            return False
        if epoch != self._epoch:
            return True
        for piece in pieces:
            batch, first = first or decode_batch(piece.payload), None
            if not piece.continues:
                self.counts.unknown_events += batch.unknown_events
                self.counts.unknown_fields += batch.unknown_fields
                self.counts.undivided += piece.is_whole
            for _ in self._ledger.apply(batch, from_root=piece.from_root):
                await self._breathe()
                if epoch != self._epoch:
                    return True
        self._applied(message.seq, digest, cleared, refused)
        await self._breathe()
        return True

    def _applied(self, seq: int, digest: int, cleared: int, refused: int) -> None:
        """A batch has been taken in; `cleared` and `refused` are the ledger's counts as of before it."""
        self.counts.messages += 1
        self.last_message = self._clock.now()
        self._standing.silence.heard(self.last_message)
        if self._ledger.counts.refused > refused:
            self._refused_at = self._computed
        elif self._refused_at is not None:
            self._made_up_for_refusals()
        if self._ledger.counts.cleared > cleared:
            self._standing.fresh()
            self._sequence.applied(seq, digest, cleared=True)
            if self._ledger.counts.refused == refused:
                self._refused_at = None
        else:
            self._sequence.applied(seq, digest)
        if self._sequence.whole:
            self.was_whole = True
        else:
            self._turned_over()

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
                    self._begin_anew()
        except (TimeoutError, WireError, zmq.ZMQError) as error:
            log.debug("KV events of %s: no replay: %r", self._name, error)
        self._failures += 1
        self.counts.replay_failures += 1
        return False

    async def _replay_once(self, endpoint: str) -> bool:
        """False if what we believe has to go first. Raises TimeoutError, WireError, zmq.ZMQError."""
        sequence, epoch = self._sequence, self._epoch
        async with replay(
            self._context, endpoint, sequence.begin(), self._options.replay_timeout_s
        ) as messages:
            async for message in messages:
                await self._breathe()
                if epoch != self._epoch:
                    return False
                digest = xxh3_64_intdigest(message.payload)
                verdict = sequence.replayed(message.seq, digest)
                if verdict is Verdict.RESTART:
                    return False
                if verdict is Verdict.SKIP:
                    continue
                if verdict is Verdict.BEGIN:
                    self._forget()
                if not await self._apply(message, digest):
                    self._lose(message.seq + 1)
                if epoch != self._epoch:
                    return False
        return epoch == self._epoch and sequence.ended() is Verdict.APPLY

    def _begin_anew(self) -> None:
        self._epoch += 1
        self._forget()
        self._sequence.reset()

    def _lose(self, next_seq: int) -> None:
        self.counts.losses += 1
        log.warning("KV events of %s: a gap cannot be filled: its map is dropped", self._name)
        self._forget()
        self._sequence.lost(next_seq)
        self._failures = 0

    def _give_up_history(self) -> None:
        """Without a replay socket an interruption costs all that was believed."""
        self._forget()
        self._sequence.reset()

    def _forget(self) -> None:
        self._ledger.drop()
        self._standing.fresh()
        self._computed_before = self._computed
        self._refused_at = None

    def _read_anew(self) -> None:
        now = self._clock.now()
        if self._reread_at is None or now - self._reread_at >= self._options.reread_s:
            self._reread_at = now
            self.counts.rereads += 1
            self._give_up_history()

    def _turned_over(self) -> None:
        """A lost history ends when as many blocks have been computed as the worker has: the least recently
        used ones make room. What is still held of it has been hit since, and then its continuation is set
        aside."""
        pool = self._pool_blocks()
        if pool is not None and self._computed - self._computed_before >= pool:
            self._sequence.heal()
            self.counts.healed += 1

    def _made_up_for_refusals(self) -> None:
        """Blocks that were refused are gone by the same rule, or were announced again."""
        pool, refused_at = self._pool_blocks(), self._refused_at
        if pool is not None and refused_at is not None and self._computed - refused_at >= pool:
            self._refused_at = None

    async def _breathe(self) -> None:
        """Let others run if all streams together have had their slice of this turn."""
        if self._turns.are_over():
            await self._turns.next()

    async def _tidy(self) -> None:
        await self._breathe()
        while self._ledger.sweep(1000):
            await self._breathe()
