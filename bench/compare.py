"""Compare two checkouts of kvroute: the ratio of their costs, measured in interleaved pairs.

    python bench/compare.py OTHER [--scenarios a,b,c,d] [--pairs 12] [--output FILE]
    python bench/compare.py OTHER --micro micro_gateway [--pairs 12] [-- arguments of the script]
    python bench/compare.py . --set-this PATH=VALUE [--limit 1.10]

Run the script with the Python of the checkout under test ("this"). OTHER is the folder of the other checkout.
Each checkout needs its own virtual environment: OTHER/.venv/bin/kvroute (`--other-venv` selects another
folder). Load, workers and scenarios are those of this checkout.

For each pair the script starts two new gateways, because processes of the same code differ (memory layout,
hash seed). It warms up both and sends the same number of requests to both in many short runs (`--runs` per
gateway), in the order this, other, other, this, and so on. The next pair starts with the other gateway. The
figure of a pair is the median of its runs. The ratio is the geometric mean of the pairs' ratios; its interval
is a 95% t interval of the pairs' logarithms. CPU is user and system time of the gateway's process tree.

With OTHER `.` both gateways have the same code, and `--set-this` compares two settings of it. The requests'
API key is `sk-1234`.

With `--micro` a pair runs the script of each checkout with the Python of that checkout (`--same-script`: the
script of this checkout in both), and compares each number of the `--json` output.

The exit code is 1 if the whole interval of a judged figure lies above `--limit`, or if a judged figure has
too few pairs. CPU per request and per chunk are judged. With `--micro`, only the figures are judged that
`--judge` selects by a part of their names.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from gateway_machine import describe
from gateway_requests import write_all
from gateway_routers import Command, Router, kvroute
from gateway_running import Bed, Started, build, choose_cores
from gateway_scenarios import SCENARIOS, Runner, Scenario
from pairs import Compared, Pair, as_costs, flatten, lines, passes, ratio_of

HERE = Path(__file__).parent
CPU_FIGURES = {"closed": "cpu_us_request", "streams": "cpu_us_chunk", "tokens": "cpu_us_request"}
SHOWN = {
    "closed": ("cpu_us_request", "main_us_request", "p50_us", "peak_rss_mib"),
    "streams": ("cpu_us_chunk", "first_byte_p50_us", "first_byte_p99_us", "peak_rss_mib"),
    "latency": ("a_p50_us", "b_p50_us", "first_byte_p50_us", "first_byte_p99_us"),
    "tokens": ("cpu_us_request", "main_us_request", "p50_us"),
}
EVENT_SCENARIOS = ("ka", "kb", "t")
THIS, OTHER = "this", "other"
MICRO_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout with its folder and its virtual environment."""

    name: str
    folder: Path
    venv: Path

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def commit(self) -> str:
        command = ["git", "-C", str(self.folder), "describe", "--always", "--dirty"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else "no git checkout"


@dataclass(slots=True)
class Samples:
    """The runs by scenario, figure and pair. Mutable: `add` adds runs without errors."""

    runs: dict[tuple[str, str], dict[int, dict[str, list[float]]]] = field(default_factory=dict)

    def add(self, scenario: str, number: int, checkout: str, figures: dict[str, float]) -> None:
        for figure, value in figures.items():
            by_pair = self.runs.setdefault((scenario, figure), {})
            by_pair.setdefault(number, {THIS: [], OTHER: []})[checkout].append(value)

    def pairs(self, scenario: str, figure: str) -> list[Pair]:
        """Pairs in which both checkouts have a positive figure."""
        found = []
        for by_checkout in self.runs.get((scenario, figure), {}).values():
            if by_checkout[THIS] and by_checkout[OTHER]:
                pair = Pair(median(by_checkout[THIS]), median(by_checkout[OTHER]))
                if min(pair.this, pair.other) > 0:
                    found.append(pair)
        return found

    def figures(self, scenario: str) -> list[str]:
        return [figure for name, figure in self.runs if name == scenario]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument(
        "--other-venv", type=Path, help="virtual environment of the other checkout (OTHER/.venv)"
    )
    parser.add_argument("--scenarios", default="a,b,c,d", help="some of " + ",".join(SCENARIOS))
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument(
        "--runs", type=int, default=6, help="runs per gateway in a pair; a third of them in d, e, f, l, t"
    )
    parser.add_argument("--seconds", type=float, default=0.25, help="length of a run in a, b, c")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="an option for both gateways"
    )
    parser.add_argument(
        "--set-this",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="an option for this gateway only",
    )
    parser.add_argument("--limit", type=float, default=1.02, help="largest judged ratio (%(default)s)")
    parser.add_argument("--micro", metavar="SCRIPT", help="compare this micro benchmark instead")
    parser.add_argument("--same-script", action="store_true", help="run the script of this checkout in both")
    parser.add_argument(
        "--judge", metavar="TEXT", action="append", default=[], help="judge figures with TEXT in their names"
    )
    parser.add_argument("--output", type=Path, help="write the report to this JSON file")
    own, rest = split_arguments(sys.argv[1:])
    options = parser.parse_args(own)
    options.rest = rest
    options.scenarios = [name.strip() for name in options.scenarios.split(",") if name.strip()]
    if unknown := set(options.scenarios) - SCENARIOS.keys():
        parser.error(f"--scenarios: there is no {', '.join(sorted(unknown))}")
    options.other = options.other.resolve()
    options.other_venv = (options.other_venv or options.other / ".venv").absolute()
    if not (options.other_venv / "bin" / "kvroute").exists():
        parser.error(
            f"{options.other_venv}/bin/kvroute is missing: make .venv/.installed-dev in {options.other}"
        )
    if min(options.pairs, options.runs) < 1:
        parser.error("--pairs, --runs: at least 1")
    return options


def split_arguments(line: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line at `--`: arguments of this script, and arguments of the micro benchmark."""
    place = line.index("--") if "--" in line else len(line)
    return list(line[:place]), list(line[place + 1 :])


def checkouts(options: argparse.Namespace) -> tuple[Checkout, Checkout]:
    return (
        Checkout(THIS, HERE.parent.resolve(), Path(sys.prefix)),
        Checkout(OTHER, options.other, options.other_venv),
    )


def order(number: int, runs: int) -> list[str]:
    """The order of runs in a pair: `runs` per gateway, mirrored, so that drift cancels out."""
    first, second = (THIS, OTHER) if number % 2 == 0 else (OTHER, THIS)
    return [name for turn in range(runs) for name in ((first, second) if turn % 2 == 0 else (second, first))]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- gateways ---------------------------------------------------------------------------------------------


def gateway_command(checkout: Checkout, scenario: Scenario, settings: Sequence[str]) -> Command:
    if scenario.name in EVENT_SCENARIOS:
        declared = (checkout.folder / "src/kvroute/tokens/options.py").read_text()
        timeout = "timeout_ms" if " timeout_ms:" in declared else "deadline_ms"  # its name in older checkouts
        tokens = (f"tokens.{timeout}=2000", "tokens.models.bench={folder}")
        make = kvroute("kvaware", *tokens, *settings, python=str(checkout.python))
    else:
        make = kvroute("prefixaware", *settings, python=str(checkout.python))
    return make


def compare_gateways(options: argparse.Namespace, sides: tuple[Checkout, Checkout], samples: Samples) -> None:
    from kvroute.deploy.tiny_model import write_tiny_model

    settings = {THIS: [*options.set, *options.set_this], OTHER: options.set}
    scenarios = [SCENARIOS[name] for name in SCENARIOS if name in options.scenarios]
    # Scenarios with the same workers share the gateways of a pair.
    groups = [
        [one for one in scenarios if (one.name in EVENT_SCENARIOS) is with_events]
        for with_events in (False, True)
    ]
    with tempfile.TemporaryDirectory(prefix="kvroute-compare-") as scratch:
        folder = Path(scratch)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")  # files that gateways keep for their user
        tools, cores = build(folder), choose_cores()
        model_folder = write_tiny_model("tiny", folder / "model")
        requests = write_all(folder, {each.file for each in scenarios if each.file} | {"a", "b", "d"})
        totals: dict[str, int] = {}
        for group in filter(None, groups):
            for number in range(options.pairs):
                # New workers as well: workers with events would replay the events of all earlier pairs.
                with ExitStack() as stack:
                    bed = Bed(stack, folder, cores, tools, folder, model_folder, [])
                    try:
                        started = start_pair(bed, sides, group[0], number, settings)
                    except (OSError, RuntimeError) as error:
                        say(f"pair {number} of {group[0].name} is skipped: {error}")
                        continue
                    runner = Runner(bed, requests, options.seconds, run_again=False, totals=totals)
                    for scenario in group:
                        one_pair(runner, scenario, started, number, samples, options.runs)


def start_pair(
    bed: Bed,
    sides: tuple[Checkout, Checkout],
    scenario: Scenario,
    number: int,
    settings: Mapping[str, Sequence[str]],
) -> dict[str, Started]:
    """Start both gateways, each with its own workers and settings; by checkout name.

    Raises RuntimeError and OSError.
    """
    kind = "events" if scenario.name in EVENT_SCENARIOS else "plain"
    workers = bed.start_workers(kind)
    started = {}
    for side in sides if number % 2 == 0 else sides[::-1]:
        name = (
            f"{side.name} kvaware" if kind == "events" else side.name
        )  # the name decides which readiness check is used
        router = Router(name, gateway_command(side, scenario, settings[side.name]), kind)
        started[side.name] = bed.start(router, workers)
    return started


def one_pair(
    runner: Runner, scenario: Scenario, started: dict[str, Started], number: int, samples: Samples, runs: int
) -> None:
    errors = 0
    try:
        for name in order(number, 1):
            runner.warm_up(scenario, started[name])
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        say(f"{scenario.name} {number} is skipped: {error}")
        return
    for name in order(number, runs if scenario.kind == "closed" else max(1, runs // 3)):
        try:
            one = runner.run(scenario, started[name], number)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            say(f"{scenario.name} {number} {name}: {error}")
            errors += 1
            continue
        if one.errors:
            errors += 1
        else:
            samples.add(scenario.name, number, name, one.figures)
    figure = CPU_FIGURES.get(scenario.kind, "first_byte_p50_us")
    last = samples.pairs(scenario.name, figure)[-1:]
    found = ", ".join(f"{pair.this:.1f} / {pair.other:.1f} = {pair.this / pair.other:.3f}" for pair in last)
    say(f"  {scenario.name} {number}: {found}" + (f", {errors} failed runs" if errors else ""))


def gateway_figures(samples: Samples, scenarios: Sequence[str]) -> list[Compared]:
    found = []
    for name in scenarios:
        kind = SCENARIOS[name].kind
        for figure in SHOWN[kind]:
            if pairs := samples.pairs(name, figure):
                found.append(Compared(name, figure, ratio_of(pairs), figure == CPU_FIGURES.get(kind)))
    return found


# --- micro benchmarks -------------------------------------------------------------------------------------


def compare_scripts(options: argparse.Namespace, sides: tuple[Checkout, Checkout], samples: Samples) -> None:
    script = options.micro if options.micro.endswith(".py") else f"{options.micro}.py"
    cores = choose_cores()
    paths = {
        side.name: (sides[0] if options.same_script else side).folder / "bench" / script for side in sides
    }
    if paths[THIS].read_bytes() != paths[OTHER].read_bytes():
        say(f"note: the two checkouts' {script} differ")
    by_name = {side.name: side for side in sides}
    for number in range(options.pairs):
        for name in order(number, 1):
            figures = run_script(by_name[name], paths[name], options.rest, frozenset({cores.router}))
            samples.add(script.removesuffix(".py"), number, name, as_costs(flatten(figures)))
        say(f"  {script} {number}")


def run_script(checkout: Checkout, script: Path, rest: Sequence[str], cores: frozenset[int]) -> Any:
    """Run a script and parse its JSON output. Raises RuntimeError when the script fails."""
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / "figures.json"
        to_file = script.name == "micro_transport.py"  # the other scripts print the JSON
        command = [str(checkout.python), str(script), *rest, "--json", *([str(written)] if to_file else [])]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=MICRO_TIMEOUT_S,
            check=False,
            preexec_fn=partial(os.sched_setaffinity, 0, cores),
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return json.loads(written.read_text())["medians"] if to_file else json.loads(done.stdout)


def script_figures(samples: Samples, script: str, judged: Sequence[str]) -> list[Compared]:
    name = script.removesuffix(".py")
    found = []
    for figure in samples.figures(name):
        if pairs := samples.pairs(name, figure):
            found.append(Compared(name, figure, ratio_of(pairs), any(text in figure for text in judged)))
    return found


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the children, and report the pairs so far
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    sides = checkouts(options)
    samples, was_ended = Samples(), False
    try:
        (compare_scripts if options.micro else compare_gateways)(options, sides, samples)
    except KeyboardInterrupt:
        was_ended = True
        say("ended early: these are the pairs so far")
    if options.micro:
        compared = script_figures(samples, options.micro, options.judge)
    else:
        compared = gateway_figures(samples, options.scenarios)
    if options.output:
        document = {
            "began": began,
            "method": "geometric mean of paired ratios, 95% t interval of their logarithms",
            "machine": describe(),
            "commits": {side.name: side.commit() for side in sides},
            "settings": {
                "scenarios": [] if options.micro else options.scenarios,
                "micro": options.micro,
                "arguments": options.rest,
                "set": options.set,
                "set_this": options.set_this,
                "pairs": options.pairs,
                "runs": options.runs,
                "seconds": options.seconds,
                "limit": options.limit,
            },
            "compared": [asdict(one) | {"verdict": one.verdict(options.limit)} for one in compared],
            "runs": [
                {
                    "scenario": scenario,
                    "figure": figure,
                    "pairs": [by_pair[number] for number in sorted(by_pair)],
                }
                for (scenario, figure), by_pair in samples.runs.items()
            ],
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(f"{side.name}: {side.commit()}" for side in sides))
    print("\n".join(lines(compared, options.limit)))
    if was_ended:
        sys.exit(130)
    judges_nothing = options.micro and not options.judge
    sys.exit(0 if judges_nothing or passes(compared, options.limit) else 1)


if __name__ == "__main__":
    main()
