"""Applying one stream's batches to its ledger, and how far the map of the stream can be trusted after that.

No sockets: the subscriber (`kvroute.events.subscriber`) receives the messages and repairs gaps.
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
from kvroute.index.map_trust import MapTrust, TrustReason, cause_and_fix, trust_for
from kvroute.wire.batch_split import Piece, split_batch
from kvroute.wire.vllm import AllBlocksCleared, EventBatch, decode_batch, decode_newest
from kvroute.wire.zmq import EventMessage

log = logging.getLogger(__name__)

APPLYING_FAILED: Final = "KV events of %s: an error while applying them: its map is dropped"
_SMALL_BYTES = 2048
"""A batch of at most this size is applied in one step: about 0.2 ms if it is full of removals."""
_SMALL_STORE_BYTES = 8192
"""The same bound for a batch that only stores: the blocks of about 2,000 tokens, in about 0.2 ms."""
_FRAMES = 3
_NUMBER_BYTES = 8


@dataclass(slots=True)
class StreamCounts:
    """Counts of what happened on one stream. Mutable: its intake and its subscriber count."""

    messages: int = 0
    duplicates: int = 0
    unreadable: int = 0
    foreign: int = 0
    """Messages whose numbers the worker's own replay does not have."""
    unknown_events: int = 0
    unknown_fields: int = 0
    undivided: int = 0
    """Large events that could not be divided: each holds the event loop for as long as decoding it takes."""
    gaps: int = 0
    """Messages that did not follow the one before."""
    replays: int = 0
    replay_failures: int = 0
    restarts: int = 0
    """Replays that showed another stream: the engine restarted, or its buffer was overrun."""
    losses: int = 0
    """Gaps that could not be repaired: the map was dropped."""
    rereads: int = 0
    """Distrusted maps that were dropped and replayed from the start."""
    healed: int = 0
    """Lost histories that no longer matter: their blocks were announced again, or are evicted by now."""
    resumed: int = 0
    """Maps that started from a snapshot."""
    failures: int = 0
    """Errors in our own code, which the log has; each dropped the map."""


class SilenceDetector:
    """Detects a worker that serves requests but publishes no events. Mutable: `on_answer` and `on_event`.

    A worker is silent after `requests` answers that must have stored a block, each to a request sent
    after the last batch, and once no batch has arrived for `seconds`. The next batch ends the silence. Times
    are `Clock.now()`.
    """

    def __init__(self, requests: int, seconds: float, now: float) -> None:
        self._requests = requests
        self._seconds = seconds
        self.may_be_silent = False
        """False: the worker is not silent. For reading, because it costs less than `is_silent`."""
        self.answers = 0
        """Answers since the last batch that must have stored a block."""
        self._last_event_at = now
        self._quiet_s = 0.0

    def on_answer(self, now: float, started: float | None = None) -> None:
        """An answer that must have stored a block has ended; its request was sent at `started`.

        Without `started`, the answer counts if it ended `seconds` or more after the last batch.
        """
        quiet_s = now - self._last_event_at
        if quiet_s >= self._seconds if started is None else started > self._last_event_at:
            self.answers += 1
            self.may_be_silent = self.answers >= self._requests
            self._quiet_s = quiet_s

    def on_event(self, now: float) -> None:
        """A batch has arrived."""
        self._last_event_at = now
        self.answers = 0
        self.may_be_silent = False

    @property
    def is_silent(self) -> bool:
        return self.may_be_silent and self._quiet_s >= self._seconds


class TrustState:
    """The reasons not to trust the map of one stream, other than a gap that is being repaired.

    Mutable: `distrust` and `clear_doubt` change the doubt, `report` remembers the reason that was logged
    last.
    """

    def __init__(self, name: str, silence: SilenceDetector) -> None:
        self.silence = silence
        self.doubt: TrustReason | None = None
        self._name = name
        self.reported: TrustReason | None = TrustReason.REPLAYING
        """The reason that was logged last. For reading."""

    def distrust(self, reason: TrustReason) -> None:
        """Do not use the map until `clear_doubt`."""
        self.doubt = reason

    def clear_doubt(self) -> None:
        """The map is empty again, so the doubt about the old one no longer applies."""
        self.doubt = None

    def reason(
        self,
        *,
        is_sure: bool,
        is_whole: bool,
        orphan_blocks: int,
        is_full: bool = False,
        is_understood: bool = True,
    ) -> TrustReason | None:
        """The first reason that applies; None if the map is whole."""
        if not is_sure:
            return TrustReason.REPLAYING
        if not is_understood:
            return TrustReason.KINDS
        if self.doubt is not None:
            return self.doubt
        if self.silence.is_silent:
            return TrustReason.SILENT
        if not is_whole:
            return TrustReason.GAP
        if is_full:
            return TrustReason.FULL
        return TrustReason.UNKNOWN_PARENT if orphan_blocks else None

    def report(self, reason: TrustReason | None, note: str = "") -> None:
        """Log the reason if it has changed, with its likely cause and the fix; `note` says more about it."""
        if reason is self.reported:
            return
        previous, self.reported = self.reported, reason
        if reason is None:
            log.info("KV events of %s: its map is whole again (before: %s)", self._name, previous)
        elif trust_for(reason) is MapTrust.NONE:
            hint = cause_and_fix(reason, note)
            log.warning("KV events of %s: its map is not used: %s%s", self._name, reason, hint)
        else:
            hint = cause_and_fix(reason, note)
            log.warning("KV events of %s: its map may lack blocks: %s%s", self._name, reason, hint)


class Intake:
    """Applies the batches of one stream to its ledger, and knows how far the map can be trusted.

    Mutable: `apply_fast` and `apply` change the map. The subscriber also changes `sequence` and
    `trust_state`, and counts into `counts`. `pool_blocks` returns the number of blocks in the worker's GPU
    memory, or None.
    """

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        clock: Clock,
        options: KvEventsOptions,
        slicer: TimeSlicer,
        pool_blocks: Callable[[], int | None],
    ) -> None:
        self.counts = StreamCounts()
        self.sequence = EventSequence()
        self.trust_state = TrustState(
            name, SilenceDetector(options.silent_requests, options.silent_s, clock.now())
        )
        self.epoch = 0
        """Rises when the worker's process has ended whose batch is being applied."""
        self.failures = 0
        """Consecutive replays that failed."""
        self.was_whole = False
        self.last_message: float | None = None
        self.applying = asyncio.Lock()
        """The subscriber's task holds this lock while it applies batches, which may take several
        iterations."""
        self._name = name
        self._ledger = ledger
        self._orphans = ledger.orphan_hashes
        self._clock = clock
        self._max_failures = options.replay_attempts
        self._slicer = slicer
        self._pool_blocks = pool_blocks
        self._computed_at_loss = 0
        """Blocks computed when the history was last lost."""
        self._computed_at_refusal: int | None = None
        """Blocks computed when the index last refused one; None when no refused block is missing."""

    @property
    def reason(self) -> TrustReason | None:
        """Why the map is not whole; None if it is."""
        state, sequence = self.trust_state, self.sequence
        if (
            sequence.is_sure
            and sequence.whole
            and not self.failures
            and state.doubt is None
            and not state.silence.may_be_silent
            and self._computed_at_refusal is None
            and not self._orphans
            and not self._ledger.not_understood
        ):
            return None  # the usual case, and read several times for each request
        return state.reason(
            is_sure=sequence.is_sure and self.failures < self._max_failures,
            is_understood=not self._ledger.not_understood,
            is_whole=sequence.whole,
            orphan_blocks=self._ledger.orphan_blocks,
            is_full=self._computed_at_refusal is not None,
        )

    @property
    def _computed(self) -> int:
        return self._ledger.counts.computed

    # Applying batches

    def on_messages(self, messages: Sequence[Frames], deadline: float) -> int:
        """The inbox's callback: as `apply_fast`, but 0 while the subscriber's task applies a batch.

        An error of our own is logged, and the stream is replayed from its start.
        """
        if self.applying.locked():
            return 0
        try:
            return self.apply_fast(messages, deadline)
        except Exception:
            log.exception(APPLYING_FAILED, self._name)
            self.failed()
            return 0  # so that the subscriber's task wakes and replays the stream

    def apply_fast(self, messages: Sequence[Frames], deadline: float = inf) -> int:
        """Apply small, consecutive, in-order batches synchronously. Returns how many were applied.

        Stops at `deadline`, a time of the clock that is checked every 2 KB, and at the first message that
        needs `apply`. That message and the later ones are left untouched. A batch of one block takes 4.4 us
        instead of 7.8 us by `apply` (docs/benchmarks.md).
        """
        sequence, state = self.sequence, self.trust_state
        if not sequence.is_sure or state.doubt is not None:
            return 0
        ledger, now = self._ledger, self._clock.now()
        counts, applied, unchecked_bytes = ledger.counts, 0, 0
        for frames in messages:
            if unchecked_bytes >= _SMALL_BYTES:
                unchecked_bytes, now = 0, self._clock.now()
                if now >= deadline:
                    break
            if len(frames) != _FRAMES:
                break
            _, number, payload = frames
            if len(number) != _NUMBER_BYTES or len(payload) > _SMALL_STORE_BYTES:
                break
            seq = int.from_bytes(number)
            if seq != sequence.expected:
                break
            refused = counts.refused
            events = decode_newest(payload)
            is_stored = events is not None and ledger.store(events)
            if not is_stored and (len(payload) > _SMALL_BYTES or not self._apply_small(payload)):
                break
            applied += 1
            unchecked_bytes += len(payload)
            if counts.refused == refused and sequence.whole and self._computed_at_refusal is None:
                # As `_after_batch`, without the steps for the other cases.
                sequence.applied(seq, xxh3_64_intdigest(payload))
                self.was_whole = True
            else:
                self._after_batch(seq, xxh3_64_intdigest(payload), counts.cleared, refused)
        if applied:
            self.counts.messages += applied
            self._note_message(now)
            if (
                state.reported is not None
                or self._orphans
                or self._computed_at_refusal is not None
                or ledger.not_understood
            ):
                state.report(self.reason, ledger.not_understood)
        return applied

    def _apply_small(self, payload: bytes) -> bool:
        """Apply a small batch that `Ledger.store` does not accept; False if the batch needs `apply`."""
        try:
            batch = decode_batch(payload)
        except WireError:
            return False
        if AllBlocksCleared in map(type, batch.events):
            return False  # much memory may have to be released, in several steps
        for _ in self._ledger.apply(batch):
            pass
        self._count_unknown(batch)
        return True

    async def apply(self, message: EventMessage, digest: int) -> bool:
        """Apply one batch of any size, in time slices. False, and no change, if the batch cannot be read."""
        epoch, cleared, refused = self.epoch, self._ledger.counts.cleared, self._ledger.counts.refused
        pieces: list[Piece] = []
        first_batch: EventBatch | None = None
        try:
            # The whole batch is decoded before the first piece is applied. The decoded pieces are not kept:
            # the objects of a large batch would keep the garbage collector busy.
            for piece in split_batch(message.payload):
                if piece is not None:
                    if not piece.is_checked:
                        batch = decode_batch(piece.payload)
                        if not pieces:
                            first_batch = batch
                    pieces.append(piece)
                await self.maybe_yield()
        except WireError:
            self.counts.unreadable += 1
            return False
        if epoch != self.epoch:
            return True
        for piece in pieces:
            batch, first_batch = first_batch or decode_batch(piece.payload), None
            if not piece.continues:
                self._count_unknown(batch)
                self.counts.undivided += piece.is_whole
            for _ in self._ledger.apply(batch, from_root=piece.from_root):
                await self.maybe_yield()
                if epoch != self.epoch:
                    return True
            await self.maybe_yield()
            if epoch != self.epoch:
                return True
        self.counts.messages += 1
        self._note_message(self._clock.now())
        self._after_batch(message.seq, digest, cleared, refused)
        await self.maybe_yield()
        return True

    def _note_message(self, now: float) -> None:
        self.last_message = now
        self.trust_state.silence.on_event(now)

    def _after_batch(self, seq: int, digest: int, cleared: int, refused: int) -> None:
        """Account for an applied batch; `cleared` and `refused` are the ledger's counts before that batch."""
        if self._ledger.counts.refused > refused:
            self._computed_at_refusal = self._computed
        elif self._computed_at_refusal is not None:
            self._forget_refusal_if_pool_recycled()
        if self._ledger.counts.cleared > cleared:
            self.trust_state.clear_doubt()
            self.sequence.applied(seq, digest, cleared=True)
            if self._ledger.counts.refused == refused:
                self._computed_at_refusal = None
        else:
            self.sequence.applied(seq, digest)
        if self.sequence.whole:
            self.was_whole = True
        else:
            self._heal_if_pool_recycled()

    def _count_unknown(self, batch: EventBatch) -> None:
        self.counts.unknown_events += batch.unknown_events
        self.counts.unknown_fields += batch.unknown_fields

    def _heal_if_pool_recycled(self) -> None:
        """Heal once the worker has computed as many blocks since the loss as its GPU memory has."""
        # vLLM evicts the least recently used blocks. A block of the lost history that is still held has been
        # hit since, and then the blocks that continue it were announced and are orphans here.
        pool = self._pool_blocks()
        if pool is not None and self._computed - self._computed_at_loss >= pool:
            self.heal()

    def _forget_refusal_if_pool_recycled(self) -> None:
        """By the same rule, refused blocks are evicted by now, or were announced again."""
        pool, refused_at = self._pool_blocks(), self._computed_at_refusal
        if pool is not None and refused_at is not None and self._computed - refused_at >= pool:
            self._computed_at_refusal = None

    # Dropping the map, and trusting it again

    def restart(self) -> None:
        """The stream is another one: drop the map, and replay the new stream from its start."""
        self.epoch += 1
        self.reset()

    def failed(self) -> None:
        """Our own code raised an error: drop the map, and replay the stream from its start."""
        self.counts.failures += 1
        self.restart()

    def reset(self) -> None:
        """Drop the map and the position in the stream; the next replay starts from 0."""
        self.drop_map()
        self.sequence.reset()

    def give_up_gap(self, next_seq: int) -> None:
        """Messages before `next_seq` cannot be replayed: drop the map, and continue with `next_seq`."""
        if not next_seq:  # an engine's first batch: none before it is missing
            if self.sequence.expected:
                self.counts.restarts += 1
                log.warning("KV events of %s: the engine restarted: its map is dropped", self._name)
            self.drop_map()
            self.sequence.begin()
            self.failures = 0
            return
        self.counts.losses += 1
        log.warning(
            "KV events of %s: the batches before number %d are not known and cannot be replayed: all "
            "blocks of this stream are removed from the map",
            self._name,
            next_seq,
        )
        self.drop_map()
        self._ledger.is_repairing = True
        self.sequence.lost(next_seq)
        self.failures = 0

    def drop_map(self) -> None:
        """Drop all blocks of the map."""
        self._ledger.drop()
        self._ledger.is_repairing = False
        self.trust_state.clear_doubt()
        self._computed_at_loss = self._computed
        self._computed_at_refusal = None

    def heal(self) -> None:
        """The blocks of lost events were announced again, or are evicted: the map is whole."""
        self.sequence.heal()
        self._ledger.is_repairing = False
        self.counts.healed += 1

    def on_resumed(self) -> None:
        """The map was restored from a snapshot."""
        if self._ledger.counts.refused:
            self._computed_at_refusal = self._computed
        self.counts.resumed += 1

    def note_reannounce_requested(self, blocks: int) -> None:
        """The worker may announce this number of blocks again, which take no new room in its GPU memory."""
        self._computed_at_loss += blocks

    async def maybe_yield(self) -> None:
        """Let other tasks run if the time slice of this iteration is used up."""
        if self._slicer.exhausted():
            await self._slicer.yield_to_loop()
