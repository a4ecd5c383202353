"""What LMCache's controller counts, and how many of what it knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class ControllerCounts:
    """What has happened since the start. Mutable; counted by the controller and its sockets."""

    messages: int = 0
    operations: int = 0
    lookups: int = 0
    heartbeats: int = 0
    unreadable: int = 0
    failed: int = 0
    """Messages that could be read and led to an error of ours, and answers that could not be sent."""
    gaps: int = 0
    duplicates: int = 0
    strays: int = 0
    """Batches out of order that could not be placed."""
    syncs_asked: int = 0
    syncs_done: int = 0
    syncs_failed: int = 0
    timeouts: int = 0
    mismatches: int = 0
    """Times that an instance's chunk hashes were found not to be ours."""


class ControllerFigures(NamedTuple):
    """For gauges."""

    instances: int
    workers: int
    chunks: int
    """Summed over workers and their locations."""
    syncing: int
    untrusted: int
    """Workers of which something is known to be missing."""
    mismatched: int
    """Instances whose chunk hashes are not ours."""
