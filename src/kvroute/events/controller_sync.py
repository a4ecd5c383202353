"""One full synchronisation: a worker stands still and says, batch by batch, all that a location holds."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Final

from kvroute.wire.lmcache_controller import ChunkHash

_PATIENCE: Final = 6
"""Questions of a frozen worker for a synchronisation that lacks batches, before it may go on without. LMCache
asks every 5 s and sends missing batches again three times."""


class FullSync:
    """Mutable. Whole when every batch and the end have come, in whatever order and however often."""

    __slots__ = ("_batch_count", "_keys", "_patience", "_seen", "_total", "sync_id", "touched")

    def __init__(self, sync_id: str, batch_count: int, now: float) -> None:
        self.sync_id = sync_id
        self.touched = now
        """When something of it last arrived."""
        self._batch_count = batch_count
        self._seen: set[int] = set()
        self._keys: set[ChunkHash] = set()
        self._total: int | None = None
        self._patience = _PATIENCE

    def batch(self, number: int, keys: Collection[ChunkHash], now: float) -> None:
        self.touched = now
        self._seen.add(number)
        self._keys.update(keys)

    def end(self, total_keys: int, now: float) -> None:
        self.touched = now
        self._total = total_keys

    def missing(self) -> list[int]:
        """Numbers of batches that have not come, the first thousand of them."""
        absent = (number for number in range(self._batch_count) if number not in self._seen)
        return list(islice(absent, 1000))

    @property
    def is_over(self) -> bool:
        return self._total is not None and len(self._seen) >= self._batch_count and not self.missing()

    @property
    def agrees(self) -> bool:
        """As many chunks came as the worker says it has sent."""
        return self._total == len(self._keys)

    def ask(self) -> bool:
        """The worker asks whether it may go on; False when it has waited in vain for long enough."""
        self._patience -= 1
        return self._patience > 0
