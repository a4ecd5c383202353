"""What the daemon counts. Plain numbers: a request adds to them, a scrape reads them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Counters since the start. Mutable: their owners add."""

    puts: Counter[str] = field(default_factory=Counter)
    """By outcome: stored, exists, no_room, too_large, broken_off."""
    put_bytes: int = 0
    leases: Counter[str] = field(default_factory=Counter)
    """By outcome: memory, waited (it came while the client waited), miss."""
    releases: Counter[str] = field(default_factory=Counter)
    """By outcome: released, ended (nothing to release any more)."""
    refused: Counter[int] = field(default_factory=Counter)
    """Requests that are not of the protocol, by status."""
    served_bytes: int = 0
    """To peers."""
    disk: Counter[str] = field(default_factory=Counter)
    """Files, by what happened: written, read, evicted, write_failed, read_failed, skipped."""
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    peer_questions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By peer and answer: yes, no, failed."""
    peer_fetches: Counter[str] = field(default_factory=Counter)
    """By outcome: fetched, failed, no_room."""
    fetched_bytes: int = 0
    names_restored: int = 0
