"""Whether messages of a stream follow each other, and what to do when they do not. Pure.

The stream's numbers are checked and so is its identity: a digest of the last batches is kept, and every
replay starts with one that was taken in already. If it is not what it was, or no longer there, the stream
is another one (a restarted engine counts from 0 again and tells nobody) or too much is lost; then all that
was believed has to go, and what the engine remembers is read from 0.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

_REMEMBERED: Final = 4096


class SequenceVerdict(Enum):
    APPLY = "apply"
    SKIP = "skip"
    """Taken in already."""
    REPLAY = "replay"
    """Something is missing, or it is not sure that this is the same stream: ask from `replay_start`."""
    BEGIN = "begin"
    """Only in a replay, and before anything of it is applied: drop what is believed. History begins with
    this message; `whole` says if that is all of it."""
    RESTART = "restart"
    """Only in a replay: this is not the stream that we knew, or its middle is lost. Drop what is believed
    and replay from 0."""


class Sequence:
    """Mutable: `expected` and the digests move with every `applied`.

    `whole` is True while everything since the engine's start has been taken in, or since it last said that
    its cache is empty.
    """

    def __init__(self) -> None:
        self.expected = 0
        self.whole = False
        self._digests: dict[int, int] = {}
        self.is_sure = False
        """No gap is known, and the stream has been found to be the one we knew. For reading."""
        self._verified = False

    @property
    def replay_start(self) -> int:
        """Where a replay should begin: one batch before what is missing, to recognise the stream."""
        return max(0, self.expected - 1) if self._digests else 0

    def doubt(self) -> None:
        """The connection was lost, or a message could not be read: check before believing more."""
        self.is_sure = False

    def reset(self) -> None:
        """The engine is a new one: its numbers start at 0."""
        self.expected = 0
        self.whole = False
        self._digests.clear()
        self.is_sure = False

    @property
    def position(self) -> tuple[int, int] | None:
        """The next number and the digest of the batch before it; None before the first batch, or while it
        is not sure."""
        digest = self._digests.get(self.expected - 1)
        return None if not self.is_sure or digest is None else (self.expected, digest)

    def resume(self, next_seq: int, digest: int, *, whole: bool) -> None:
        """What was taken in by another process up to here is believed again. To be checked by a replay,
        which begins with the batch before `next_seq`."""
        self.reset()
        self.expected = next_seq
        self.whole = whole
        self._digests[next_seq - 1] = digest

    def heal(self) -> None:
        """What is missing has come another way."""
        self.whole = True

    def live(self, seq: int, digest: int) -> SequenceVerdict:
        """APPLY, SKIP or REPLAY."""
        if not self.is_sure or seq > self.expected:
            return SequenceVerdict.REPLAY
        if seq == self.expected:
            return SequenceVerdict.APPLY
        return SequenceVerdict.SKIP if self._digests.get(seq) == digest else SequenceVerdict.REPLAY

    def applied(self, seq: int, digest: int, *, cleared: bool = False) -> None:
        """The message has been taken in; with `cleared` it said that the cache is empty."""
        self.expected = seq + 1
        self._digests[seq] = digest
        self._digests.pop(seq - _REMEMBERED, None)
        if cleared:
            self.whole = True

    # A replay: `begin`, `replayed` for each message, then `ended` or `failed`

    def begin(self) -> int:
        """Start number to ask for."""
        self._verified = not self._digests
        return self.replay_start

    def replayed(self, seq: int, digest: int) -> SequenceVerdict:
        """APPLY, SKIP, BEGIN or RESTART."""
        if not self._verified:
            if self._digests.get(seq) == digest and seq == self.expected - 1:
                self._verified = True
                return SequenceVerdict.SKIP
            return SequenceVerdict.RESTART
        if not self._digests:
            self.whole = seq == 0
            return SequenceVerdict.BEGIN
        if seq == self.expected:
            return SequenceVerdict.APPLY
        return SequenceVerdict.SKIP if seq < self.expected else SequenceVerdict.RESTART

    def ended(self) -> SequenceVerdict:
        """The replay is complete: APPLY if all is well, RESTART if this is not the stream that we knew."""
        if not self._verified:
            return SequenceVerdict.RESTART
        if not self.expected:
            self.whole = True
        self.is_sure = True
        return SequenceVerdict.APPLY

    def lost(self, next_seq: int) -> None:
        """What is missing cannot be had. Drop what is believed; history begins with `next_seq`."""
        self.reset()
        self.expected = next_seq
        self.is_sure = True
