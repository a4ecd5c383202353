"""Do an instance's chunk hashes mean what ours mean?

LMCache's `builtin` hashes hang on PYTHONHASHSEED, on the chunk size and on the algorithm, and nothing in the
protocol says them. If one differs, no chunk ever matches and nothing looks wrong: every prompt is merely
"not cached". So one chunk of each prompt that we sent to an instance is looked for in what it reports.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from kvroute.wire.lmcache_controller import ChunkHash

_GRACE_S: Final = 2.0
"""Time for a stored chunk to be reported; LMCache takes about 10 ms."""
_KEPT: Final = 256


class Agreement(Enum):
    UNKNOWN = auto()
    AGREES = auto()
    """A chunk of a prompt of ours was reported under the hash that we compute."""
    DIFFERS = auto()
    """Prompts of ours were served, chunks were reported, and none was one of theirs."""


class HashAgreement:
    """Mutable. Once it agrees, nothing more is looked at."""

    __slots__ = ("_needed", "_reported", "_waiting", "state")

    def __init__(self, needed_prompts: int) -> None:
        self.state = Agreement.UNKNOWN
        self._needed = needed_prompts
        self._waiting: dict[ChunkHash, float] = {}
        """Chunks of prompts that were not reported so far, with when they were sent."""
        self._reported = 0
        """Chunks that were reported since the first of them."""

    def sent(self, chunk: ChunkHash, *, held: bool, now: float) -> bool:
        """A prompt was served by the instance; True if that has changed the state."""
        if held:
            return self._agree()
        if len(self._waiting) < _KEPT:
            self._waiting.setdefault(chunk, now)
        overdue = sum(now - when >= _GRACE_S for when in self._waiting.values())
        if self.state is Agreement.UNKNOWN and min(overdue, self._reported) >= self._needed:
            self.state = Agreement.DIFFERS
            return True
        return False

    def reported(self, keys: Collection[ChunkHash]) -> bool:
        """The instance has stored these; True if that has changed the state."""
        if self.state is Agreement.AGREES or not self._waiting:
            return False
        if self._waiting.keys().isdisjoint(keys):
            self._reported += len(keys)
            return False
        return self._agree()

    def _agree(self) -> bool:
        changed = self.state is not Agreement.AGREES
        self.state = Agreement.AGREES
        self._waiting.clear()
        return changed
