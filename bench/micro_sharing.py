"""Measure what a request of another gateway costs, in CPU microseconds.

    python bench/micro_sharing.py [--json]

One router dispatches prompts that were sent before, and another one accounts them, with the messages of
`kvroute.replicas` and without sockets. The requests still run when they are published, as requests of LLMs
do, and end later. The sender's figure includes encoding, the receiver's figure decoding. The figure is the
least of several runs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence

from kvroute.blocks.keys import PromptKeys, block_keys
from kvroute.replicas.mesh import FrameReader, encode_frame
from kvroute.routing.strategy import RouteQuery
from processes_virtual import BLOCK, MODEL, Gateway, VirtualClock

SIZES = (200, 32_000)
"""Bytes of a prompt."""
PROMPTS, BATCH, ROUNDS, RUNS = 16, 8, 60, 7


def exchange(
    sender: Gateway, receiver: Gateway, clock: VirtualClock, prompts: Sequence[PromptKeys]
) -> tuple[float, float]:
    """Dispatch the prompts, publish and end them. Returns the seconds of sender and receiver."""
    dispatches = []
    for prompt in prompts:
        query = RouteQuery(MODEL, clock.now(), (prompt,), prompt.tokens)
        decision = sender.router.decide(query, sender.workers.view(MODEL))
        dispatches.append(sender.router.dispatch(query, decision, decision.ranking[0], clock.now()))
    clock.time += 0.01
    sent_s = received_s = 0.0
    for is_end in (False, True):
        if is_end:
            for dispatch in dispatches:
                dispatch.finish(clock.now())
        start = time.process_time()
        frame = encode_frame(sender.own.take(clock.now(), everything=True))
        sent = time.process_time()
        receiver.receive(sender.number, FrameReader().feed(frame))
        received_s += time.process_time() - sent
        sent_s += sent - start
        clock.time += 0.01
    return sent_s, received_s


def measure(size: int) -> tuple[float, float]:
    """Microseconds per request at the sender and at the receiver."""
    rng, clock = random.Random(1), VirtualClock()
    sender, receiver = Gateway(0, clock), Gateway(1, clock)
    texts = [rng.randbytes(size // 2).hex().encode() for _ in range(PROMPTS)]
    prompts = [PromptKeys(block_keys(text), size // 4, float(BLOCK)) for text in texts]
    batches = [prompts[start : start + BATCH] for start in range(0, PROMPTS, BATCH)]
    least = [float("inf")] * 2
    for run in range(RUNS + 1):
        costs = [exchange(sender, receiver, clock, batch) for _ in range(ROUNDS) for batch in batches]
        if run:  # the first one teaches the receiver the prompts
            for place, column in enumerate(zip(*costs, strict=True)):
                least[place] = min(least[place], sum(column) / (ROUNDS * PROMPTS) * 1e6)
    return least[0], least[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {}
    for size in SIZES:
        for side, figure in zip(("sender", "each receiver"), measure(size), strict=True):
            results[f"{side}, {size:,} B"] = figure
    if options.json:
        json.dump(results, sys.stdout, indent=2)
        return
    for name, microseconds in results.items():
        print(f"{name:24}{microseconds:8.1f} us")


if __name__ == "__main__":
    main()
