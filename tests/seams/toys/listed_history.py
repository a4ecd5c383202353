"""A toy history: every prompt that was sent to a worker, in one list without a bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvroute.blocks.keys import BlockKey
from kvroute.index.history import HistoryShare, HistorySize


class _Pinned:
    new_blocks = 0

    def __init__(self, prompts: list[Sequence[BlockKey]]) -> None:
        self._prompts = prompts

    def extend(self, keys: Sequence[BlockKey]) -> None:
        self._prompts.append(tuple(keys))

    def release(self) -> None:
        """Nothing is ever evicted."""


class ListedHistory:
    """Mutable, touched from the event loop only; implements `RouteHistory`."""

    def __init__(self, default_capacity_blocks: int) -> None:
        self._capacity = default_capacity_blocks
        self._prompts: dict[int, list[Sequence[BlockKey]]] = {}
        self.shares: dict[int, HistoryShare] = {}

    def match(self, keys: Sequence[BlockKey]) -> dict[int, int]:
        held = {
            worker: max((_common(keys, prompt) for prompt in prompts), default=0)
            for worker, prompts in self._prompts.items()
        }
        return {worker: blocks for worker, blocks in held.items() if blocks}

    def acquire(self, worker: int, keys: Sequence[BlockKey]) -> _Pinned:
        self.share(worker)
        pinned = _Pinned(self._prompts.setdefault(worker, []))
        pinned.extend(keys)
        return pinned

    def touch(self, worker: int, lasts: Sequence[BlockKey]) -> Iterable[int]:
        return range(len(lasts))

    def share(self, worker: int) -> HistoryShare:
        return self.shares.setdefault(worker, HistoryShare(worker, self._capacity))

    def set_capacity(self, worker: int, blocks: int) -> None:
        self.share(worker).capacity_blocks = blocks

    def forget(self, worker: int) -> None:
        self._prompts.pop(worker, None)

    def recent(self, worker: int, most_blocks: int) -> list[Sequence[BlockKey]]:
        return list(self._prompts.get(worker, ()))

    def size(self) -> HistorySize:
        return HistorySize(0, 0, 0)


def _common(left: Sequence[BlockKey], right: Sequence[BlockKey]) -> int:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))
