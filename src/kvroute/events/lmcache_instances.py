"""LMCache's servers and the stores that they share, as its coordinator knows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvroute.blocks.chunks import ChunkScheme
from kvroute.events.lmcache_chunks import HeldChunks
from kvroute.events.trust import Trust


class Doubt(StrEnum):
    """Why a server's memory may hold more than is known; bounded, so a metric label."""

    LOST_EVENTS = "lost_events"
    LATE = "late"
    """Its first batch here was not its first: it ran before, or while we did not."""
    REGISTERED_AGAIN = "registered_again"
    PARTS = "parts"
    """Chunks turned out to have more parts than was known."""
    FOREIGN_HASHES = "foreign_hashes"
    """It does not name chunks by BLAKE3: nothing of it is known."""


@dataclass(slots=True, eq=False)
class Pool:
    """An L2 store. Mutable: changed by the coordinator. `backend` is the adapter's type."""

    name: str
    backend: str
    held: HeldChunks
    owner: str = ""
    """Instance whose own it is; empty for one that several share."""
    last_seen: float = 0.0


@dataclass(slots=True, eq=False)
class Instance:
    """An LMCache server. Mutable: changed by the coordinator.

    `incarnation` is None until its first batch. `scheme` is how it names chunks, `scheme_known` whether it
    has said so itself.
    """

    id: str
    memory: HeldChunks
    scheme: ChunkScheme
    address: str = ""
    http_port: int = 0
    registered: bool = False
    last_heard: float = 0.0
    incarnation: int | None = None
    last_seq: int = 0
    scheme_known: bool = False
    doubt: Doubt | None = Doubt.LATE
    pools: dict[str, Pool] = field(default_factory=dict)
    """By backend."""
    quiet_seq: int = -1
    """`last_seq` when its status last agreed with what is believed."""

    @property
    def trust(self) -> Trust:
        """WHOLE if all it holds is known; else PARTIAL: it holds what is believed, and perhaps more."""
        return Trust.WHOLE if self.doubt is None else Trust.PARTIAL
