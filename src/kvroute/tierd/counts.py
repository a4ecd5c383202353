"""The daemon's counters: requests add to them, and `/metrics` reads them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Counters since the daemon's start. Mutable: the parts of the daemon add to them."""

    puts: Counter[str] = field(default_factory=Counter)
    """By outcome: stored, exists, no_room, too_large, broken_off."""
    put_bytes: int = 0
    leases: Counter[str] = field(default_factory=Counter)
    """By outcome: memory, waited (the object came while the client waited), miss."""
    releases: Counter[str] = field(default_factory=Counter)
    """By outcome: released, ended (the lease had ended already)."""
    refused: Counter[int] = field(default_factory=Counter)
    """Requests that the protocol does not allow, by status."""
    served_bytes: int = 0
    """Bytes sent to peers."""
    disk: Counter[str] = field(default_factory=Counter)
    """Files by event: written, read, evicted, write_failed, read_failed, skipped."""
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    peer_questions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By peer and answer: yes, no, failed."""
    peer_fetches: Counter[str] = field(default_factory=Counter)
    """By outcome: fetched, failed, no_room."""
    fetched_bytes: int = 0
    names_restored: int = 0
