"""What came on one stream, and what became of it. For metrics."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(slots=True)
class LedgerCounts:
    """What came, in blocks, since the stream was first read. Mutable; counted by its ledger."""

    stored: int = 0
    elsewhere: int = 0
    """Of those, the copies and the set aside: such as are not in GPU memory."""
    removed: int = 0
    copies: int = 0
    """Stored again while held: counted, each has to be removed."""
    repeated: int = 0
    """Announced again from the start of a prompt: may be no copy, so not counted as one."""
    set_aside: int = 0
    """Their parent was not known."""
    confirmed: int = 0
    """Placed by a request that continued them."""
    unknown_removed: int = 0
    """Removed without having been known."""
    passed_over: int = 0
    """Of other groups of a hybrid model, which say nothing about the whole prefix."""
    unusable: int = 0
    """Unknown medium, a block size that is no multiple of `KEY_TOKENS`, or no tokens and an unknown hash."""
    refused: int = 0
    """The index was full, or too many blocks were set aside."""
    cleared: int = 0
    """How often everything was cleared."""

    @property
    def computed(self) -> int:
        """Blocks that took room in GPU memory just then."""
        return self.stored + self.copies + self.set_aside - self.elsewhere
