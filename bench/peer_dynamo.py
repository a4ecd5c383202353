"""Dynamo's side of micro_peers.py; runs with the peers' Python, which has no kvroute.

The script reads the case as JSON from stdin and writes microseconds of CPU (all threads) and of waiting as
JSON. The tree is dynamo.llm.RadixTree of ai-dynamo-runtime with its Python interface: events are JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from dynamo.llm import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]


def best_us(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """The least of the repeats."""
    cpu = wall = float("inf")
    for _ in range(repeats):
        cpu_before, wall_before = time.process_time_ns(), time.perf_counter_ns()
        work()
        cpu = min(cpu, (time.process_time_ns() - cpu_before) / 1000)
        wall = min(wall, (time.perf_counter_ns() - wall_before) / 1000)
    return {"cpu_us": cpu, "wall_us": wall}


def stored(number: int, keys: list[int], parent: int | None = None) -> bytes:
    blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode()


def main() -> None:
    case = json.load(sys.stdin)
    keys, repeats = case["keys"], case["repeats"]
    tree = RadixTree()
    for worker, share in enumerate(case["shares"]):
        tree.apply_event(worker, stored(0, keys[:share]))
    scores = tree.find_matches(keys).scores
    prompts = iter([stored(1 + number, prompt) for number, prompt in enumerate(case["new"])])
    last = case["new"][0][-1]
    steps = iter([stored(1000 + n, [key], last) for n, key in enumerate(case["single"])])
    result = {
        "blocks": [scores.get((worker, 0), 0) for worker in range(len(case["shares"]))],
        "match": best_us(lambda: tree.find_matches(keys), repeats),
        "store a prompt": best_us(lambda: tree.apply_event(0, next(prompts)), len(case["new"])),
        "store a block": best_us(lambda: tree.apply_event(0, next(steps)), len(case["single"])),
        "hash a prompt": best_us(lambda: compute_block_hash_for_seq(case["tokens"], 16), repeats),
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
