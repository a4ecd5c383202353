"""Measure rolling updates and scaling down in virtual time: lost requests, and hits of the caches.

    python bench/scaling.py [--part roll|down] [--seeds 24] [--random 8] [--jobs 2] [--json]

kvroute's router with `prefixaware` places the recorded conversations on 12 simulated engines, whose only
cache is the GPU's: a shared store would keep what a removed worker held. "70% load" is 70% of the rate at
which the engines complete the same requests from a backlog.

roll    Each 60 s one worker drains, ends and starts again with an empty cache. A start takes 30 s. Answers
        that still run 120 s after the drain began are lost, as with the rendered manifests. The trace runs
        three times, each time with other content. The hit rate is compared with that of the same requests in
        a run without the update.
down    Scaling down after a peak, at the recorded pace, because the value of a cache depends on the pauses of
        its conversations; the engines are slow enough for 70% load. After 15 minutes the load falls to a
        third: two of three conversations end ("users leave"), or two of three new conversations do not begin
        and begun ones go on ("fewer arrive"). After 300 s more, the default stabilisation window of an HPA, 6
        of 12 workers are removed at once: those with the lowest deletion costs that the gateway has written,
        or random ones. With "steering" the workers that would be removed first get `surplus_share` of their
        traffic while the load needs fewer workers; random removals have no steering before them. The figures
        are the cached tokens of the requests that arrive in the next seconds, summed over the seeds, relative
        to the mean of the random removals of each seed, with a 90% interval from resampled seeds. A seed
        chooses the conversations and the moments of arrivals. "steady": the load stays, and 3 of 12 workers
        are removed. Then all workers are worth about the same. What steering costs is the mean time to first
        token of the requests between the fall of the load and the removal.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import exp
from multiprocessing.pool import Pool
from random import Random
from statistics import fmean

from kvroute.deploy.render.plan import DRAIN_S
from kvroute.fleet.worker import FleetView, WorkerId
from kvroute.routing.cache_value import CacheValue
from kvroute.routing.scaling import (
    DeletionCostOptions,
    ScalingOptions,
    WorkerWorth,
    demand_of,
    due_patches,
    surplus,
)
from kvroute.sim.fleet import FleetRequest
from kvroute.sim.tiers import GPU_ONLY, TieredEngine, TieredFleet, TierOptions, make_tiered_engines
from kvroute.sim.timing import TimingModel
from routing_kvroute import Gateway, Kvroute
from routing_workloads import Row, trace_rows

WORKERS = 12
LOAD = 0.7
START_S = 30.0
EACH_S = 60.0
PEAK_S, REMOVAL_S = 900.0, 1200.0
QUANTUM_S = 3.0
"""The trace has times in steps of 3 s; a request arrives at a random moment of its step."""
WINDOWS_S = (60.0, 120.0, 300.0)
KEPT = 1 / 3
CHANGES = USERS, ARRIVALS, STEADY = "users leave", "fewer arrive", "steady"
OPTIONS = DeletionCostOptions(enabled=True)


class Fleet(Kvroute):
    """kvroute's router, whose view of the fleet changes, and the fleet that it routes to."""

    def __init__(self, seed: int, scale: float = 1.0, *, steers: bool = False) -> None:
        super().__init__(seed)
        self.scale, self.steers = scale, steers
        self.needed: float | None = None
        """The average of `WorkersNeeded`."""
        engines = self._engines(WORKERS)
        self.attach(engines, GPU_ONLY)
        self.run = TieredFleet(engines, self)
        self.absent: set[int] = set()
        self.written: dict[WorkerId, int] = {}

    def attach(self, engines: list[TieredEngine], tiers: TierOptions) -> None:  # type: ignore[override]
        super().attach(engines, tiers)
        self.value = CacheValue(OPTIONS.window_s)
        self.gateways = [Gateway(self.options, engines, cache_value=self.value)]

    def _engines(self, count: int) -> list[TieredEngine]:
        return make_tiered_engines(count, timing=TimingModel(scale=self.scale), tiers=GPU_ONLY)

    def leave(self, *workers: int) -> None:
        """The workers get no new requests; running ones continue."""
        self.absent.update(workers)
        self._change_view()

    def until(self, now: float) -> None:
        self.run.run(until=now)
        self.run.now = now

    def end(self, worker: int) -> int:
        """The worker ends, and an empty engine takes its place. Returns the number of lost requests."""
        lost = [request for request in self.open if request.worker == worker]
        for request in lost:
            self.open.pop(request).dispatch.finish(self.run.now)
        self.run.replace(worker, self._engines(1)[0])
        gateway = self.gateways[0]
        gateway.router.worker_restarted(gateway.workers[worker])
        self.value.forget(worker)
        return len(lost)

    def enter(self, worker: int) -> None:
        self.absent.discard(worker)
        self._change_view()

    def is_drained(self, worker: int) -> bool:
        return not any(request.worker == worker for request in self.open)

    def write_costs(self) -> None:
        """One round of the gateway: write the deletion costs that have changed."""
        now = self.run.now
        worths = [
            WorkerWorth(worker.id, self.value.seconds(worker.index, now), worker.load.wait(now))
            for worker in self.gateways[0].view.workers
        ]
        due = due_patches(worths, self.written, min_change=OPTIONS.min_change, most=OPTIONS.max_patches)
        self.written.update(due)
        if self.steers:
            self._steer(now)

    def _steer(self, now: float) -> None:
        """As `app.scaling.DeletionCosts.steer`; the autoscaler keeps at least half of the workers."""
        options, workers = ScalingOptions(), self.gateways[0].view.workers
        needed = demand_of(workers, now, queue_s=options.queue_s).total / options.target_utilisation
        if self.needed is not None:
            needed += (self.needed - needed) * exp(-OPTIONS.interval_s / options.smoothing_s)
        self.needed = needed
        rest = surplus(self.written, needed, WORKERS // 2)
        for worker in workers:
            worker.share = OPTIONS.surplus_share if worker.id in rest else 1.0

    def cheapest(self, count: int) -> list[int]:
        """The workers that Kubernetes removes first."""
        workers = sorted(self.gateways[0].view.workers, key=lambda worker: self.written[worker.id])
        return [worker.index for worker in workers[:count]]

    def _change_view(self) -> None:
        gateway = self.gateways[0]
        present = tuple(worker for worker in gateway.workers if worker.index not in self.absent)
        gateway.view = FleetView("model", present, gateway.view.version + 1)


def submit(fleet: Fleet, row: Row, at: float, offset: int = 0) -> None:
    """Let a request of the trace arrive at `at`; each `offset` gives the trace another content."""
    keys = [key + (offset << 32) for key in row.keys] if offset else row.keys
    request = FleetRequest(keys, row.prompt, row.output, conversation=row.session + (offset << 32))
    fleet.run.submit(request, at)


def scale_at_full_load() -> float:
    """How many times as slow engines must be for the recorded rate to be their rate from a backlog."""
    fleet, rows = Fleet(0), trace_rows()
    for row in rows:
        submit(fleet, row, row.quantum_s / 20)
    fleet.run.run()
    ends = sorted(request.finished_s for request in fleet.run.done)
    first, last = len(ends) // 10, len(ends) * 8 // 10  # without the ramp and the long answers at the end
    rate = (last - first) / (ends[last] - ends[first])
    return rate * trace_length_s() / len(rows)


def trace_length_s() -> float:
    return trace_rows()[-1].quantum_s + QUANTUM_S


@dataclass(frozen=True)
class Roll:
    """A run of three traces at `speed` times the recorded pace, with or without a rolling update."""

    speed: float
    is_updated: bool
    seed: int


@dataclass(frozen=True)
class RollResult:
    requests: int
    lost: int
    hit: float
    """Share of the prompt tokens that were cached, of the requests that arrived during the update."""
    longest_drain_s: float


def roll(case: Roll) -> RollResult:
    fleet, random, rows = Fleet(case.seed), Random(case.seed), trace_rows()
    start = trace_length_s() / case.speed
    for again in range(3):
        for row in rows:
            at = (row.quantum_s + random.uniform(0.0, QUANTUM_S)) / case.speed
            submit(fleet, row, again * start + at, again)
    end = start + WORKERS * EACH_S
    lost, longest = update(fleet, start) if case.is_updated else (0, 0.0)
    fleet.run.run()
    done = [request for request in fleet.run.done if start <= request.arrival_s < end]
    hit = sum(request.cached_tokens for request in done) / sum(request.prompt_tokens for request in done)
    assert lost == 3 * len(rows) - len(fleet.run.done)
    return RollResult(3 * len(rows), lost, hit, longest)


def update(fleet: Fleet, start: float) -> tuple[int, float]:
    """Restart all workers, one each `EACH_S`. Returns the lost requests and the longest drain in seconds."""
    lost, longest = 0, 0.0
    drains: dict[int, float] = {}
    starts: dict[int, float] = {}
    for second in range(int(WORKERS * EACH_S + DRAIN_S + START_S) + 1):
        now = start + second
        fleet.until(now)
        if second % EACH_S == 0 and second // EACH_S < WORKERS:
            worker = int(second // EACH_S)
            drains[worker] = now
            fleet.leave(worker)
        for worker, since in list(drains.items()):
            if fleet.is_drained(worker) or now - since >= DRAIN_S:
                longest = max(longest, now - since)
                lost += fleet.end(worker)
                starts[worker] = now + START_S
                del drains[worker]
        for worker, ready in list(starts.items()):
            if ready <= now:
                fleet.enter(worker)
                del starts[worker]
    return lost, longest


@dataclass(frozen=True)
class Down:
    """Removals of `removed` workers: by deletion cost, and `choices` random ones."""

    scale: float
    seed: int
    change: str
    """How the load falls: one of `CHANGES`."""
    choices: int

    @property
    def removed(self) -> int:
        return WORKERS // 4 if self.change == STEADY else WORKERS // 2


Hits = list[int]
"""The cached tokens of the requests that arrive within each of `WINDOWS_S` after the removal."""


@dataclass(frozen=True)
class DownResult:
    by_cost: Hits
    with_steering: Hits
    at_random: list[Hits]
    ttft_s: tuple[float, float]
    """Mean time to first token between the fall of the load and the removal, without and with steering."""


def down(case: Down) -> DownResult:
    plain, steered = before_removal(case), before_removal(case, steers=True)
    random = Random(f"removals {case.seed}")
    at_random = [random.sample(range(WORKERS), case.removed) for _ in range(case.choices)]
    return DownResult(
        in_copy(partial(after_removal, plain, plain.cheapest(case.removed))),
        in_copy(partial(after_removal, steered, steered.cheapest(case.removed))),
        [in_copy(partial(after_removal, plain, workers)) for workers in at_random],
        (mean_ttft_s(plain), mean_ttft_s(steered)),
    )


def mean_ttft_s(fleet: Fleet) -> float:
    """Of the requests that arrived since the load fell and have their first token."""
    done = [request for request in fleet.run.done if request.arrival_s >= PEAK_S]
    return fmean(request.ttft_s for request in done)


def before_removal(case: Down, *, steers: bool = False) -> Fleet:
    fleet = Fleet(case.seed, case.scale, steers=steers)
    for at, row in arrivals(case):
        submit(fleet, row, at)
    for number in range(1, int(REMOVAL_S / OPTIONS.interval_s) + 1):
        fleet.until(number * OPTIONS.interval_s)
        fleet.write_costs()
    return fleet


def after_removal(fleet: Fleet, workers: Sequence[int]) -> Hits:
    fleet.leave(*workers)
    fleet.run.run()
    late = [request for request in fleet.run.done if request.arrival_s >= REMOVAL_S]
    return [
        sum(request.cached_tokens for request in late if request.arrival_s < REMOVAL_S + window_s)
        for window_s in WINDOWS_S
    ]


def in_copy(function: Callable[[], Hits]) -> Hits:
    """Call the function in a copy of this process, so that its changes are lost."""
    # To run the same 20 minutes again for each removal would take most of the time.
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, json.dumps(function()).encode())  # less than a pipe holds
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        hits: Hits = json.loads(answer.read())
    os.waitpid(child, 0)
    return hits


def arrivals(case: Down) -> Iterator[tuple[float, Row]]:
    """The requests of the trace with their times, without those of conversations that end or do not begin."""
    random, kept, begun = Random(case.seed), dict[int, bool](), set[int]()
    for row in trace_rows():
        at = row.quantum_s + random.uniform(0.0, QUANTUM_S)
        if at >= REMOVAL_S + max(WINDOWS_S):
            continue
        is_kept = kept.setdefault(row.session, random.random() < KEPT)
        if row.quantum_s < PEAK_S:
            begun.add(row.session)
        elif not (is_kept or case.change == STEADY or (case.change == ARRIVALS and row.session in begun)):
            continue
        yield at, row


Choice = Callable[[DownResult], Hits]


def gains(results: Sequence[DownResult], choice: Choice) -> list[float]:
    """The hits after `choice` relative to random removal, less 1, for each window; summed over seeds."""
    found = []
    for window in range(len(WINDOWS_S)):
        chosen = sum(choice(result)[window] for result in results)
        at_random = sum(fmean(each[window] for each in result.at_random) for result in results)
        found.append(chosen / at_random - 1)
    return found


def measure_roll(pool: Pool, full: float) -> dict[str, object]:
    cases = [Roll(LOAD * full, is_updated, 0) for is_updated in (False, True)]
    steady, updated = pool.map(roll, cases)
    print(
        f"roll: {updated.lost} of {updated.requests} requests lost, "
        f"longest drain {updated.longest_drain_s:.0f} s; "
        f"hits {updated.hit:.1%} of prompt tokens, without update {steady.hit:.1%}: "
        f"{updated.hit / steady.hit:.1%} (goal: 0 lost, at least 85%)",
    )
    return {"steady": asdict(steady), "updated": asdict(updated)}


def interval(results: Sequence[DownResult], choice: Choice) -> list[tuple[float, float]]:
    """The 90% interval of each of `gains`, from 1,000 samples of the seeds with replacement."""
    random = Random(0)
    samples = [gains(random.choices(results, k=len(results)), choice) for _ in range(1000)]
    columns = [sorted(column) for column in zip(*samples, strict=True)]
    return [(column[50], column[949]) for column in columns]


def measure_down(pool: Pool, full: float, seeds: int, choices: int) -> dict[str, object]:
    report: dict[str, object] = {}
    by: dict[str, Choice] = {
        "by cost": lambda result: result.by_cost,
        "with steering": lambda result: result.with_steering,
    }
    for change in CHANGES:
        cases = [Down(LOAD * full, seed, change, choices) for seed in range(seeds)]
        results = pool.map(down, cases, chunksize=1)
        print(f"down, {change}: hits relative to random removal")
        rows: dict[str, object] = {}
        for name, choice in by.items():
            found = list(zip(WINDOWS_S, gains(results, choice), interval(results, choice), strict=True))
            parts = [
                f"{gain:+.1%} ({low:+.0%} to {high:+.0%}) in {s:.0f} s" for s, gain, (low, high) in found
            ]
            print(f"    {name}: {', '.join(parts)}")
            rows[name] = found
        plain, steered = (fmean(result.ttft_s[with_] for result in results) for with_ in (0, 1))
        print(f"    mean time to first token before the removal: {steered / plain:.3f} times", flush=True)
        report[change] = rows | {"ttft_s": (plain, steered)}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("roll", "down"), help="one part; default: both")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--random", type=int, default=8, help="random removals for each seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    full = scale_at_full_load()
    report: dict[str, object] = {"scale_at_full_load": full}
    print(f"the recorded rate is full load for engines {full:.2f} times as slow", file=sys.stderr)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        if options.part != "down":
            report["roll"] = measure_roll(pool, full)
        if options.part != "roll":
            report["down"] = measure_down(pool, full, options.seeds, options.random)
    if options.json:
        json.dump(report, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
