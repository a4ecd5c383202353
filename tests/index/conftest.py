from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import pytest
from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import BlockKey
from kvroute.index.history import PinnedBlocks, RouteHistory
from kvroute.index.registry import HISTORIES

Chain = Callable[[Iterable[object]], list[BlockKey]]


def chain_of(content: Iterable[object]) -> list[BlockKey]:
    """Chained keys of a sequence of blocks given as anything with a repr."""
    digests = accumulate(content, lambda key, block: xxh3_64_intdigest(repr(block).encode(), key), initial=7)
    return [BlockKey(key) for key in digests][1:]


class PlainHistory:
    """The plainest model: per worker the set of keys, and the free queue as a list of keys."""

    def __init__(self, capacity: int, workers: Iterable[int]) -> None:
        self.capacity = dict.fromkeys(workers, capacity)
        self.pins: dict[int, dict[BlockKey, int]] = {worker: {} for worker in self.capacity}
        self.free: dict[int, list[BlockKey]] = {worker: [] for worker in self.capacity}

    def match(self, keys: Sequence[BlockKey]) -> dict[int, int]:
        held = {}
        for worker, pins in self.pins.items():
            depth = 0
            while depth < len(keys) and keys[depth] in pins:
                depth += 1
            if depth:
                held[worker] = depth
        return held

    def acquire(self, worker: int, keys: Sequence[BlockKey]) -> int:
        new = 0
        for key in keys:
            if key in self.free[worker]:
                self.free[worker].remove(key)
            new += key not in self.pins[worker]
            self.pins[worker][key] = self.pins[worker].get(key, 0) + 1
        self._evict(worker)
        return new

    def release(self, worker: int, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):
            self.pins[worker][key] -= 1
            if not self.pins[worker][key]:
                self.free[worker].append(key)
        self._evict(worker)

    def set_capacity(self, worker: int, blocks: int) -> None:
        self.capacity[worker] = blocks
        self._evict(worker)

    def forget(self, worker: int) -> None:
        self.pins[worker].clear()
        self.free[worker].clear()

    def blocks(self, worker: int) -> int:
        return len(self.pins[worker])

    def active(self, worker: int) -> int:
        return sum(1 for pins in self.pins[worker].values() if pins)

    def _evict(self, worker: int) -> None:
        while len(self.pins[worker]) > self.capacity[worker] and self.free[worker]:
            del self.pins[worker][self.free[worker].pop(0)]


@pytest.fixture(params=HISTORIES)
def make_history(request: pytest.FixtureRequest) -> Callable[[int], RouteHistory]:
    """Constructor of one registered history; the test runs with each."""
    return HISTORIES[request.param]


@pytest.fixture
def history(make_history: Callable[[int], RouteHistory]) -> RouteHistory:
    return make_history(100)


@pytest.fixture
def chain() -> Chain:
    return chain_of


@pytest.fixture
def plain_history() -> type[PlainHistory]:
    return PlainHistory


@pytest.fixture
def sent(history: RouteHistory) -> Callable[[int, Sequence[BlockKey]], PinnedBlocks]:
    """Send a prompt and let it finish."""

    def send(worker: int, keys: Sequence[BlockKey]) -> PinnedBlocks:
        lease = history.acquire(worker, keys)
        lease.release()
        return lease

    return send
