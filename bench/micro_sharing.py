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
from kvroute.blocks.known_prompts import KeyGroups
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerFacts, WorkerId, WorkerSpec
from kvroute.replicas.decisions import OwnDecisions, PeerDecisions
from kvroute.replicas.mesh import FrameReader, encode_frame
from kvroute.replicas.messages import Dispatched, Finished
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Router
from kvroute.routing.strategy import RouteQuery

MODEL = "m"
SIZES = (200, 32_000)
"""Bytes of a prompt."""
PROMPTS, BATCH, ROUNDS, RUNS = 48, 8, 20, 7


class Clock:
    """Shows the time that is set."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


class Gateway:
    """A router with two workers, and what it publishes and receives."""

    def __init__(self, clock: Clock) -> None:
        groups, self.clock = KeyGroups(), clock
        self.own = OwnDecisions(lambda: None, groups)
        self.router = Router(RoutingOptions(), observer=self.own)
        self.fleet = Fleet()
        self.fleet.apply("bench", [WorkerSpec(WorkerId(f"w{n}"), f"http://w{n}") for n in range(2)])
        for worker in self.fleet.workers():
            facts = WorkerFacts(frozenset([MODEL]), capacity_tokens=10_000_000, block_size=16)
            self.fleet.update_facts(worker, facts)
            self.fleet.mark_healthy(worker, clock.now())
            self.router.worker_joined(worker)
        self.peers = PeerDecisions(self.router, self.fleet, clock, groups, lambda peer, *messages: None)


def exchange(sender: Gateway, receiver: Gateway, prompts: Sequence[PromptKeys]) -> tuple[float, float]:
    """Dispatch the prompts, publish and end them. Returns the seconds of sender and receiver."""
    clock = sender.clock
    dispatches = []
    for prompt in prompts:
        query = RouteQuery(MODEL, clock.now(), (prompt,), prompt.tokens)
        decision = sender.router.decide(query, sender.fleet.view(MODEL))
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
        for message in FrameReader().feed(frame):
            if isinstance(message, Dispatched):
                receiver.peers.dispatched(1, message)
            elif isinstance(message, Finished):
                receiver.peers.finished(1, message.id)
        received_s += time.process_time() - sent
        sent_s += sent - start
        clock.time += 0.01
    return sent_s, received_s


def measure(size: int) -> tuple[float, float]:
    """Microseconds per request at the sender and at the receiver."""
    rng, clock = random.Random(1), Clock()
    sender, receiver = Gateway(clock), Gateway(clock)
    texts = [rng.randbytes(size // 2).hex().encode() for _ in range(PROMPTS)]
    prompts = [PromptKeys(block_keys(text), size // 4, 16.0) for text in texts]
    batches = [prompts[start : start + BATCH] for start in range(0, PROMPTS, BATCH)]
    least = [float("inf")] * 2
    for run in range(RUNS + 1):
        costs = [exchange(sender, receiver, batch) for _ in range(ROUNDS) for batch in batches]
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
