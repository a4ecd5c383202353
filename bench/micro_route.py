"""Measure routing per request: decide + dispatch + first token + finish, in CPU microseconds.

    python bench/micro_route.py [--json]

The script sends a conversation again that one worker holds, with 2, 8 and 64 workers, and with a short prompt
(8 blocks of 16 tokens), 8K tokens and 64K tokens. Block keys are computed beforehand: hashing is not part of
routing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from kvroute.blocks.keys import PromptKeys, block_keys
from kvroute.fleet.worker import FleetView, HealthState, Worker, WorkerFacts, WorkerId, WorkerSpec
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Router
from kvroute.routing.strategy import RouteQuery

PROMPTS = {"short": 8, "8K": 512, "64K": 4096}
FLEETS = (2, 8, 64)


def fleet(size: int) -> FleetView:
    workers = tuple(
        Worker(
            WorkerSpec(WorkerId(f"worker-{index}"), f"http://10.0.0.{index}:8000"),
            state=HealthState.HEALTHY,
            facts=WorkerFacts(capacity_tokens=1_000_000, block_size=16),
            index=index,
        )
        for index in range(size)
    )
    return FleetView("model", workers, 1)


def measure(strategy: str, size: int, blocks: int, repeats: int) -> float:
    """Median microseconds of the whole routing of one request."""
    router, view, rng = Router(RoutingOptions(strategy=strategy)), fleet(size), random.Random(3)
    prompts = [
        (PromptKeys(block_keys(rng.randbytes(64 * blocks)), 16 * blocks + 5, 16.0),) for _ in range(50)
    ]
    times = []
    now = 0.0
    for turn in range(repeats):
        now += 0.05
        query = RouteQuery(
            "model", now, prompts[turn % 50], 16 * blocks + 5, f"session-{turn % 50}", True, turn
        )
        start = time.perf_counter_ns()
        decision = router.decide(query, view)
        dispatch = router.dispatch(query, decision, decision.ranking[0], now)
        dispatch.first_token(now + 0.02)
        dispatch.finish(now + 0.04)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times[100:]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=600)
    options = parser.parse_args()
    results = {
        f"{strategy}, {size} workers, {length}": measure(strategy, size, blocks, options.repeats)
        for strategy in ("prefixaware", "session", "roundrobin")
        for size in FLEETS
        for length, blocks in PROMPTS.items()
    }
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for case, microseconds in results.items():
        print(f"{case:32}{microseconds:8.1f} us")


if __name__ == "__main__":
    main()
