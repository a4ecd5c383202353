"""Taking in one stream's batches: what each does to the ledger, and what is then to be thought of the map.

Pure bookkeeping without sockets. Who follows the stream (`kvroute.events.subscriber`) brings the messages
and repairs what is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from xxhash import xxh3_64_intdigest

from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.events.inbox import Frames
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.poller import TimeSlicer
from kvroute.events.sequence import Sequence as EventSequence
from kvroute.index.trust import MapTrust, TrustReason, trust_for
from kvroute.wire.batch_split import Piece, split_batch
from kvroute.wire.vllm import AllBlocksCleared, EventBatch, decode_batch, decode_newest
from kvroute.wire.zmq import EventMessage

log = logging.getLogger(__name__)

FOLLOWING_FAILED: Final = "KV events of %s: following them failed: its map is dropped"
_QUICK_BYTES = 2048
"""A batch of at most as many is taken in in one go: about 0.2 ms if it is full of removals."""
_QUICK_STORE_BYTES = 8192
"""As many if it only stores: the blocks of about 2,000 tokens, in about 0.2 ms."""
_FRAMES = 3
_NUMBER_BYTES = 8


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
    undivided: int = 0
    """Large events that had to be taken in as one: those may hold the loop for as long as they are large."""
    gaps: int = 0
    """Messages that did not follow the one before."""
    replays: int = 0
    replay_failures: int = 0
    restarts: int = 0
    """The stream was another one than before: the engine restarted, or the buffer was overrun."""
    losses: int = 0
    """Gaps that could not be filled: the map was dropped."""
    rereads: int = 0
    """Maps that were distrusted and read anew."""
    healed: int = 0
    """Lost histories that were made up for, by re-announcement or because nothing is left of them."""
    resumed: int = 0
    """Maps begun with a snapshot."""
    failures: int = 0
    """Times that following failed on our side: a defect, which the log has; the map was begun anew."""


class SilenceDetector:
    """Whether a worker serves without announcing what it stores. Mutable: `served` and `heard`.

    It is silent after `requests` answers that must have stored a block and were all asked for after the
    last batch, once there has been none for `seconds`; until the next batch. Times are `Clock.now()`.
    """

    def __init__(self, requests: int, seconds: float, now: float) -> None:
        self._requests = requests
        self._seconds = seconds
        self.may_be = False
        """False: it is not silent. For reading."""
        self.answers = 0
        """That must have stored a block, since the last batch."""
        self._heard = now
        self._quiet_s = 0.0

    def served(self, now: float, started: float | None = None) -> None:
        """Such an answer, asked for at `started`, has ended; without that, what counts is whether it ended
        `seconds` after the last batch."""
        if now - self._heard >= self._seconds if started is None else started > self._heard:
            self.answers += 1
            self.may_be = self.answers >= self._requests
            self._quiet_s = now - self._heard

    def heard(self, now: float) -> None:
        """A batch has come."""
        self._heard = now
        self.answers = 0
        self.may_be = False

    @property
    def is_silent(self) -> bool:
        return self.may_be and self._quiet_s >= self._seconds


class TrustState:
    """What speaks against one stream beside a gap that is being repaired. Mutable: `distrust` and `fresh`
    change the doubt, `report` remembers what was logged last."""

    def __init__(self, name: str, silence: SilenceDetector) -> None:
        self.silence = silence
        self.doubt: TrustReason | None = None
        self._name = name
        self.reported: TrustReason | None = TrustReason.REPLAYING
        """For reading: what was logged last."""

    def distrust(self, reason: TrustReason) -> None:
        """Do not believe the map until it is another one."""
        self.doubt = reason

    def fresh(self) -> None:
        """What was believed so far is gone: nothing speaks against what comes now."""
        self.doubt = None

    def reason(
        self, *, is_sure: bool, is_whole: bool, aside_blocks: int, is_full: bool = False
    ) -> TrustReason | None:
        """The first that applies; None if nothing does."""
        if not is_sure:
            return TrustReason.REPLAYING
        if self.doubt is not None:
            return self.doubt
        if self.silence.is_silent:
            return TrustReason.SILENT
        if not is_whole:
            return TrustReason.GAP
        if is_full:
            return TrustReason.FULL
        return TrustReason.UNKNOWN_PARENT if aside_blocks else None

    def report(self, reason: TrustReason | None) -> None:
        """Log a change."""
        if reason is self.reported:
            return
        before, self.reported = self.reported, reason
        if reason is None:
            log.info("KV events of %s: its map is whole again (was: %s)", self._name, before)
        elif trust_for(reason) is MapTrust.NONE:
            log.warning("KV events of %s: its map is not used: %s", self._name, reason)
        else:
            log.warning("KV events of %s: its map may lack blocks: %s", self._name, reason)


class Intake:
    """One stream's map as its batches change it. Mutable: by `apply_fast` and `take_in`, and by its
    subscriber, which also moves `sequence` on, `standing`, and counts what it does itself into `counts`.

    `pool_blocks` says how many blocks the worker's GPU memory has, if that is known: once as many have been
    computed, nothing is left of a history that was lost.
    """

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        clock: Clock,
        options: KvEventsOptions,
        turns: TimeSlicer,
        pool_blocks: Callable[[], int | None],
    ) -> None:
        self.counts = StreamCounts()
        self.sequence = EventSequence()
        self.standing = TrustState(
            name, SilenceDetector(options.silent_requests, options.silent_s, clock.now())
        )
        self.epoch = 0
        """Rises when what is being taken in is of a process that is no more."""
        self.failures = 0
        """Replays that failed in a row."""
        self.was_whole = False
        self.last_message: float | None = None
        self.applying = asyncio.Lock()
        """Held by the subscriber's task while it applies batches, some of them in several steps."""
        self._name = name
        self._ledger = ledger
        self._aside = ledger.aside_names
        self._clock = clock
        self._max_failures = options.replay_attempts
        self._turns = turns
        self._pool_blocks = pool_blocks
        self._computed_before = 0
        self._refused_at: int | None = None
        """Blocks computed when one was last refused; None when nothing is missing for that."""

    @property
    def reason(self) -> TrustReason | None:
        """Why the map is not whole; None if it is."""
        standing, sequence = self.standing, self.sequence
        if (
            sequence.is_sure
            and sequence.whole
            and not self.failures
            and standing.doubt is None
            and not standing.silence.may_be
            and self._refused_at is None
            and not self._aside
        ):
            return None  # nearly always, and asked several times for each request
        return standing.reason(
            is_sure=sequence.is_sure and self.failures < self._max_failures,
            is_whole=sequence.whole,
            aside_blocks=self._ledger.aside_blocks,
            is_full=self._refused_at is not None,
        )

    @property
    def _computed(self) -> int:
        return self._ledger.counts.computed

    # What comes

    def on_messages(self, messages: Sequence[Frames], until: float) -> int:
        """For the inbox: as `apply_fast`, unless a batch is being applied. A failure of ours is logged, and
        the stream is read from its start."""
        if self.applying.locked():
            return 0
        try:
            return self.apply_fast(messages, until)
        except Exception:
            log.exception(FOLLOWING_FAILED, self._name)
            self.failed()
            return 0  # so that the subscriber's task wakes and reads the stream again

    def apply_fast(self, messages: Sequence[Frames], until: float = inf) -> int:
        """Take in small batches that follow the ones before, as nearly all do: the first of these messages,
        and further ones until this time of the clock, which is read every 2 KB. Returns how many; of what
        comes behind them nothing is done."""
        sequence, standing = self.sequence, self.standing
        if not sequence.is_sure or standing.doubt is not None:
            return 0
        ledger, now = self._ledger, self._clock.now()
        counts, taken, work = ledger.counts, 0, 0
        for frames in messages:
            if work >= _QUICK_BYTES:
                work, now = 0, self._clock.now()
                if now >= until:
                    break
            if len(frames) != _FRAMES:
                break
            _, number, payload = frames
            if len(number) != _NUMBER_BYTES or len(payload) > _QUICK_STORE_BYTES:
                break
            seq = int.from_bytes(number)
            if seq != sequence.expected:
                break
            refused = counts.refused
            events = decode_newest(payload)
            is_stored = events is not None and ledger.store(events)
            if not is_stored and (len(payload) > _QUICK_BYTES or not self._small(payload)):
                break
            taken += 1
            work += len(payload)
            if counts.refused == refused and sequence.whole and self._refused_at is None:
                # As `_applied`, without what is for others.
                sequence.applied(seq, xxh3_64_intdigest(payload))
                self.was_whole = True
            else:
                self._applied(seq, xxh3_64_intdigest(payload), counts.cleared, refused)
        if taken:
            self.counts.messages += taken
            self._heard(now)
            if standing.reported is not None or self._aside or self._refused_at is not None:
                standing.report(self.reason)
        return taken

    def _small(self, payload: bytes) -> bool:
        """Take in a batch of which `Ledger.store` knows less; False if it is for `take_in`."""
        try:
            batch = decode_batch(payload)
        except WireError:
            return False
        if AllBlocksCleared in map(type, batch.events):
            return False  # there will be memory to return
        for _ in self._ledger.apply(batch):
            pass
        self._count_unknown(batch)
        return True

    async def take_in(self, message: EventMessage, digest: int) -> bool:
        """Take in one batch; False, and nothing of it is believed, if it cannot be read."""
        epoch, cleared, refused = self.epoch, self._ledger.counts.cleared, self._ledger.counts.refused
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
                await self.breathe()
        except WireError:
            self.counts.unreadable += 1
            return False
        if epoch != self.epoch:
            return True
        for piece in pieces:
            batch, first = first or decode_batch(piece.payload), None
            if not piece.continues:
                self._count_unknown(batch)
                self.counts.undivided += piece.is_whole
            for _ in self._ledger.apply(batch, from_root=piece.from_root):
                await self.breathe()
                if epoch != self.epoch:
                    return True
        self.counts.messages += 1
        self._heard(self._clock.now())
        self._applied(message.seq, digest, cleared, refused)
        await self.breathe()
        return True

    def _heard(self, now: float) -> None:
        self.last_message = now
        self.standing.silence.heard(now)

    def _applied(self, seq: int, digest: int, cleared: int, refused: int) -> None:
        """A batch has been taken in; `cleared` and `refused` are the ledger's counts as of before it."""
        if self._ledger.counts.refused > refused:
            self._refused_at = self._computed
        elif self._refused_at is not None:
            self._made_up_for_refusals()
        if self._ledger.counts.cleared > cleared:
            self.standing.fresh()
            self.sequence.applied(seq, digest, cleared=True)
            if self._ledger.counts.refused == refused:
                self._refused_at = None
        else:
            self.sequence.applied(seq, digest)
        if self.sequence.whole:
            self.was_whole = True
        else:
            self._turned_over()

    def _count_unknown(self, batch: EventBatch) -> None:
        self.counts.unknown_events += batch.unknown_events
        self.counts.unknown_fields += batch.unknown_fields

    def _turned_over(self) -> None:
        """A lost history ends when as many blocks have been computed as the worker has: the least recently
        used ones make room. What is still held of it has been hit since, and then its continuation is set
        aside."""
        pool = self._pool_blocks()
        if pool is not None and self._computed - self._computed_before >= pool:
            self.heal()

    def _made_up_for_refusals(self) -> None:
        """Blocks that were refused are gone by the same rule, or were announced again."""
        pool, refused_at = self._pool_blocks(), self._refused_at
        if pool is not None and refused_at is not None and self._computed - refused_at >= pool:
            self._refused_at = None

    # What is no more believed, and what is again

    def begin_anew(self) -> None:
        """The stream is another one."""
        self.epoch += 1
        self.give_up_history()

    def failed(self) -> None:
        """An error of ours was raised: believe nothing, and read the stream from its start."""
        self.counts.failures += 1
        self.begin_anew()

    def give_up_history(self) -> None:
        """Believe nothing; the stream is to be read from its start."""
        self.forget()
        self.sequence.reset()

    def lose(self, next_seq: int) -> None:
        """What lies before `next_seq` cannot be had any more."""
        self.counts.losses += 1
        log.warning("KV events of %s: a gap cannot be filled: its map is dropped", self._name)
        self.forget()
        self.sequence.lost(next_seq)
        self.failures = 0

    def forget(self) -> None:
        """Believe nothing of what was taken in."""
        self._ledger.drop()
        self.standing.fresh()
        self._computed_before = self._computed
        self._refused_at = None

    def heal(self) -> None:
        """What lost events had announced was announced again, or is gone."""
        self.sequence.heal()
        self.counts.healed += 1

    def resumed(self) -> None:
        """What another process knew has been believed again."""
        if self._ledger.counts.refused:
            self._refused_at = self._computed
        self.counts.resumed += 1

    def repetition_asked(self, blocks: int) -> None:
        """As many may be announced again: they take no room that they do not have already."""
        self._computed_before += blocks

    async def breathe(self) -> None:
        """Let others run if all streams together have had their slice of this turn."""
        if self._turns.are_over():
            await self._turns.next()
