"""Memory that work needs and that it keeps, by tracemalloc: Python objects only."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable


def growth_bytes(work: Callable[[int], object], count: int) -> int:
    """Bytes kept after `work(n)` for n from `count` to 2 * `count`, beyond those kept after `count`."""
    kept = []
    tracemalloc.start()
    try:
        for start in (0, count):
            for number in range(start, start + count):
                work(number)
            gc.collect()
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return kept[1] - kept[0]


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that are allocated at one time while `work` runs."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
