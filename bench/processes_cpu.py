"""CPU per request of several gateway processes, of as many independent gateways, and of one process.

`processes.py --cpu` runs this module. Load generator, workers, requests and scenarios are those of
`gateway.py`: a has bodies of 200 B, b of 32 KB, c of 256 KB. All gateways share one core; load and workers
share another one. CPU is that of all processes of a gateway together, from /proc.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gateway_goals import OURS
from gateway_machine import busy_s, cpu_sample, spent
from gateway_requests import write_all
from gateway_routers import Launch, Router, kvroute
from gateway_running import Bed, Started, build, choose_cores
from gateway_scenarios import SCENARIOS, Runner, Scenario
from pairs import Pair, Ratio, ratio_of

GOALS = {"a": 1.30, "b": 1.35, "c": 1.60}
"""Most CPU per request of four processes, relative to one."""
INDEPENDENT_GOAL = 1.1
"""Most CPU per request of several processes, relative to independent ones. One of both goals must be met."""


@dataclass(frozen=True)
class Setting:
    """Gateways that serve together. The connections are distributed among the `ports`."""

    name: str
    started: tuple[Started, ...]

    @property
    def ports(self) -> str:
        return ",".join(str(each.port) for each in self.started)

    def pids(self) -> list[int]:
        return [pid for each in self.started for pid in each.tree()]


def _command(*more: str) -> Callable[[Launch], list[str]]:
    def command(launch: Launch) -> list[str]:
        return [*kvroute("prefixaware")(launch), *more]

    return command


def _settings(bed: Bed, processes: int) -> list[Setting]:
    workers = bed.start_workers("plain")
    one = Router(OURS, _command())
    several = Router(f"{OURS} x {processes}", _command("--processes", str(processes)))
    apart = [Router(f"{OURS} {number}", _command()) for number in range(processes)]
    return [
        Setting("one", (bed.start(one, workers),)),
        Setting("several", (bed.start(several, workers),)),
        Setting("independent", tuple(bed.start(router, workers) for router in apart)),
    ]


def _cpu_us(runner: Runner, setting: Setting, scenario: Scenario, requests: int) -> float:
    before = cpu_sample(setting.pids())
    result = runner.load(setting.ports, scenario.file, scenario.connections, requests)
    if result["errors"]:
        raise RuntimeError(f"{setting.name}, {scenario.name}: {result['last_error']}")
    return spent(before, cpu_sample(setting.pids())).all_ns / 1000 / requests


def _round(
    folder: Path, tools: dict[str, Path], names: list[str], options: Options
) -> list[dict[str, object]]:
    """One round with new processes: the runs of all settings, by scenario and repeat."""
    rows: list[dict[str, object]] = []
    files = write_all(folder, {SCENARIOS[name].file for name in names})
    with ExitStack() as stack:
        bed = Bed(stack, folder, choose_cores(), tools, folder, folder, [])
        settings = _settings(bed, options.processes)
        runner = Runner(bed, files, options.seconds, run_again=False)
        for name in names:
            scenario = SCENARIOS[name]
            rate = 0.0
            for setting in settings:  # pools and histories; then the rate of the first one
                for number in (64, 512, 512):
                    result = runner.load(setting.ports, scenario.file, scenario.connections, number)
                rate = rate or result["requests"] / result["seconds"]
            requests = max(256, min(scenario.most, int(rate * options.seconds)))
            for repeat in range(options.repeats):
                order = settings[repeat % 3 :] + settings[: repeat % 3]
                busy = busy_s()
                row: dict[str, object] = {"scenario": name, "requests": requests}
                for setting in order:
                    row[setting.name] = _cpu_us(runner, setting, scenario, requests)
                row["machine_busy_s"] = busy_s() - busy
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    return rows


@dataclass(frozen=True)
class Options:
    processes: int = 4
    rounds: int = 3
    repeats: int = 36
    seconds: float = 0.3
    """Of a run. The speed of a machine changes within seconds, so many short runs compare better than few."""
    scenarios: tuple[str, ...] = tuple(GOALS)


def measure(options: Options) -> dict[str, object]:
    """The runs, and for each scenario the ratios: geometric means of the pairs, as in `pairs.Ratio`."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as scratch:
        folder = Path(scratch)
        tools = build(folder)
        for _ in range(options.rounds):
            rows += _round(folder, tools, list(options.scenarios), options)
    return {"processes": options.processes, "runs": rows, "scenarios": summary(rows)}


def summary(rows: list[dict[str, object]]) -> dict[str, dict[str, float | bool | list[float]]]:
    """For each scenario CPU in us per request, and the ratios. `interval`: of `several_over_independent`."""
    found: dict[str, dict[str, float | bool | list[float]]] = {}
    for name in dict.fromkeys(str(row["scenario"]) for row in rows):
        mine = [row for row in rows if row["scenario"] == name]
        cpu = {each: [float(str(row[each])) for row in mine] for each in ("one", "several", "independent")}
        several = _ratio(cpu["several"], cpu["one"]).ratio
        # Directly, not by way of the ratios to one process: those add the noise of its runs twice.
        apart = _ratio(cpu["several"], cpu["independent"])
        found[name] = {
            **{f"{each}_us": fmean(values) for each, values in cpu.items()},
            "several_over_one": several,
            "independent_over_one": _ratio(cpu["independent"], cpu["one"]).ratio,
            "several_over_independent": apart.ratio,
            "interval": [apart.low, apart.high],
            "is_met": several <= GOALS.get(name, 0.0) or apart.ratio <= INDEPENDENT_GOAL,
        }
    return found


def _ratio(some: list[float], others: list[float]) -> Ratio:
    return ratio_of([Pair(a, b) for a, b in zip(some, others, strict=True)])


def lines(found: dict[str, object]) -> list[str]:
    """The summary as text."""
    scenarios, count = found["scenarios"], found["processes"]
    assert isinstance(scenarios, dict)
    return [
        f"{name}: {count} processes {each['several_over_one']:.2f} x one (goal {GOALS.get(name, 0.0):.2f}), "
        f"{each['several_over_independent']:.2f} ({each['interval'][0]:.2f} to {each['interval'][1]:.2f}) x "
        f"{count} independent (goal {INDEPENDENT_GOAL:.2f}): "
        f"{'met' if each['is_met'] else 'MISSED'}; independent {each['independent_over_one']:.2f} x one; "
        f"us per request {each['one_us']:.0f}, {each['several_us']:.0f}, {each['independent_us']:.0f}"
        for name, each in scenarios.items()
    ]
