"""Measure the route histories: match and acquire + release at 8K and 64K tokens, with eviction.

    python bench/micro_index.py [--json]

Blocks have 16 tokens (512 and 4,096 keys per prompt). Each of 8 workers has a share of 31,250 blocks (500,000
tokens), which is full at the start. `known` repeats a conversation that one worker holds, `turn` adds 16
blocks to it, `cold` sends a new prompt, which evicts as many blocks as it adds. Times are CPU microseconds,
median of the repeats; the ratio is pygtrie over radix.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence

from kvroute.blocks.keys import BlockKey, block_keys
from kvroute.index.history import RouteHistory
from kvroute.index.registry import HISTORIES

WORKERS = 8
CAPACITY = 500_000 // 16
PROMPTS = {"8K": 512, "64K": 4096}
COMMON = random.Random(0).randbytes(64 * 64)
"""The common system prompt: 64 blocks."""


def prompt(rng: random.Random, blocks: int) -> Sequence[BlockKey]:
    return block_keys(COMMON + rng.randbytes(64 * (blocks - 64)))


def full_history(name: str, blocks: int) -> RouteHistory:
    history, rng = HISTORIES[name](CAPACITY), random.Random(1)
    for worker in range(WORKERS):
        while history.share(worker).room_blocks:
            history.acquire(worker, prompt(rng, blocks)).release()
    return history


def median_us(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def measure(name: str, blocks: int, repeats: int) -> dict[str, float]:
    history, rng = full_history(name, blocks), random.Random(2)
    known, cold = prompt(rng, blocks), iter([prompt(rng, blocks) for _ in range(2 * repeats)])
    history.acquire(3, known).release()
    grown = known

    def turn() -> None:
        nonlocal grown
        history.acquire(3, grown).release()

    times = {
        "match known": median_us(lambda: history.match(known), repeats),
        "match cold": median_us(lambda: history.match(next(cold)), repeats),
        "acquire known": median_us(lambda: history.acquire(3, known).release(), repeats),
    }
    turns = []
    for _ in range(repeats):
        grown = [*grown, *block_keys(rng.randbytes(64 * 16), seed=grown[-1])]
        turns.append(median_us(turn, 1))
    times["acquire turn"] = statistics.median(turns)
    times["acquire cold"] = median_us(lambda: history.acquire(3, next(cold)).release(), repeats)
    size = history.size()
    times["bytes a block"] = size.bytes / size.blocks
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    results = {
        length: {name: measure(name, blocks, options.repeats) for name in HISTORIES}
        for length, blocks in PROMPTS.items()
    }
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'tokens':>6}  {'':14}{'radix us':>12}{'pygtrie us':>12}{'ratio':>8}")
    for length, by_name in results.items():
        for what, radix in by_name["radix"].items():
            trie = by_name["pygtrie"][what]
            print(f"{length:>6}  {what:14}{radix:12.1f}{trie:12.1f}{trie / radix:8.0f}")


if __name__ == "__main__":
    main()
