"""Whether the messages of a stream follow each other, and what to do when they do not. Pure.

The sequence numbers of the stream are checked, and also its identity: the digests of the last batches are
kept, and every replay starts with a batch that was applied before. If that batch has another digest or is
missing, the stream is another one (a restarted engine counts from 0 again and sends no notice), or the replay
does not reach back far enough. Then the map is dropped and the worker's whole buffer is replayed from 0.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

_REMEMBERED: Final = 4096
"""Batches whose digests are kept."""


class SequenceVerdict(Enum):
    """What to do with a message."""

    APPLY = "apply"
    SKIP = "skip"
    """The message was applied before."""
    REPLAY = "replay"
    """A message is missing, or the stream's identity is unchecked: request a replay from `replay_start`."""
    BEGIN = "begin"
    """Only in a replay, before its first message is applied: drop the map. The history begins with this
    message; `whole` says whether that is all of the history."""
    RESTART = "restart"
    """Only in a replay: this is another stream, or messages in the middle are lost. Drop the map and replay
    from 0."""


class Sequence:
    """The position in one stream. Mutable: `expected` and the digests change with every `applied`.

    `whole` is True while every message since the engine's start has been applied, or since the engine's cache
    was last cleared.
    """

    def __init__(self) -> None:
        self.expected = 0
        """The sequence number of the next message."""
        self.whole = False
        self._digests: dict[int, int] = {}
        self.is_sure = False
        """No gap is known, and the identity of the stream has been checked. For reading."""
        self._verified = False

    @property
    def replay_start(self) -> int:
        """The first number to replay: one batch before the first missing one, to check the identity."""
        return max(0, self.expected - 1) if self._digests else 0

    def mark_unsure(self) -> None:
        """The connection was lost, or a message could not be read: a replay is needed."""
        self.is_sure = False

    def reset(self) -> None:
        """The engine is a new process: its numbers start at 0."""
        self.expected = 0
        self.whole = False
        self._digests.clear()
        self.is_sure = False

    @property
    def position(self) -> tuple[int, int] | None:
        """The next number, and the digest of the batch before it; None before the first batch or while
        unsure."""
        digest = self._digests.get(self.expected - 1)
        return None if not self.is_sure or digest is None else (self.expected, digest)

    def resume(self, next_seq: int, digest: int, *, whole: bool) -> None:
        """Continue at the position of a snapshot. A replay that starts one batch before `next_seq` checks
        it."""
        self.reset()
        self.expected = next_seq
        self.whole = whole
        self._digests[next_seq - 1] = digest

    def heal(self) -> None:
        """The blocks of the lost messages are known by other means, or evicted."""
        self.whole = True

    def on_live(self, seq: int, digest: int) -> SequenceVerdict:
        """The verdict on a message of the live stream: APPLY, SKIP or REPLAY."""
        if not self.is_sure or seq > self.expected:
            return SequenceVerdict.REPLAY
        if seq == self.expected:
            return SequenceVerdict.APPLY
        return SequenceVerdict.SKIP if self._digests.get(seq) == digest else SequenceVerdict.REPLAY

    def applied(self, seq: int, digest: int, *, cleared: bool = False) -> None:
        """The message has been applied; with `cleared` it reported that the cache is empty."""
        self.expected = seq + 1
        self._digests[seq] = digest
        self._digests.pop(seq - _REMEMBERED, None)
        if cleared:
            self.whole = True

    # A replay: `start_replay`, `on_replayed` for each message, then `end_replay`

    def start_replay(self) -> int:
        """Start a replay. Returns the first number to request."""
        self._verified = not self._digests
        return self.replay_start

    def on_replayed(self, seq: int, digest: int) -> SequenceVerdict:
        """The verdict on a replayed message: APPLY, SKIP, BEGIN or RESTART."""
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

    def end_replay(self) -> SequenceVerdict:
        """The replay is complete: APPLY if the stream is the same one, else RESTART."""
        if not self._verified:
            return SequenceVerdict.RESTART
        if not self.expected:
            self.whole = True
        self.is_sure = True
        return SequenceVerdict.APPLY

    def begin(self) -> None:
        """The next message is the engine's first one, so none is missing. The caller has dropped the map."""
        self.reset()
        self.is_sure = self.whole = True

    def lost(self, next_seq: int) -> None:
        """The missing messages cannot be replayed, and the caller has dropped the map. The history begins
        with `next_seq`."""
        self.reset()
        self.expected = next_seq
        self.is_sure = True
