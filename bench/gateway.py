"""Measure the cost of the gateway, of nginx, of sglang-router and of vllm-router: goals, figures, verdicts.

    python bench/gateway.py [--quick] [--scenarios a,c] [--repeats 3] [--pairs 9] [--output FILE]

The router has one core; load (native/load.c) and two workers (native/worker.c) share another one. All routers
run during the whole benchmark. A repeat of a scenario is one run of each router, one directly after another;
each repeat starts with another router. Only a scenario that compares nothing runs before the other scenarios,
with kvroute alone. CPU is that of the router's process tree, from /proc. Figures are medians of the repeats;
ratios are medians of the repeats' ratios to sglang-router with its cache_aware policy.

sglang-router and vllm-router are installed from PyPI into bench/.venv-peers; the output lists missing
routers. docs/benchmarks.md describes how to read the output. The exit code is 1 if a goal is missed, except
with --quick.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from gateway_goals import OURS, THEIRS, Measurement, Results, judge
from gateway_machine import describe
from gateway_report import document, from_document, table, verdict_lines
from gateway_requests import write_all
from gateway_routers import ROUTERS, Router, install_peers
from gateway_running import Bed, Started, build, choose_cores
from gateway_scenarios import SCENARIOS, Runner, Scenario

HERE = Path(__file__).parent
OWN_PACKAGES = ("kvroute", "uvicorn", "uvloop", "httptools", "msgspec", "fastapi", "fastokens", "tokenizers")
FIRST_BYTE_REPEATS = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short runs, fewer repeats: about five minutes")
    measured = ",".join(name for name, scenario in SCENARIOS.items() if scenario.routers)
    parser.add_argument("--scenarios", default=measured, help="some of %(default)s")
    parser.add_argument("--repeats", type=int, help="runs of each router (3; quick: 2)")
    parser.add_argument(
        "--pairs", type=int, help="runs of kvroute and sglang-router in d, e, f (9; quick: 3)"
    )
    parser.add_argument("--seconds", type=float, help="length of a run in a, b, c (1.6; quick: 0.8)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    parser.add_argument("--show", type=Path, help="print the report of a results file")
    parser.add_argument(
        "--peers", type=Path, default=HERE / ".venv-peers", help="folder of the installed peers"
    )
    parser.add_argument("--no-install", action="store_true", help="use only installed peers")
    options = parser.parse_args()
    options.repeats = options.repeats or (2 if options.quick else 3)
    options.pairs = options.pairs or (3 if options.quick else 9)
    options.seconds = options.seconds or (0.8 if options.quick else 1.6)
    options.scenarios = [name.strip() for name in options.scenarios.split(",") if name.strip()]
    if unknown := set(options.scenarios) - SCENARIOS.keys():
        parser.error(f"--scenarios: there is no {', '.join(sorted(unknown))}")
    return options


def repeats_of(scenario: Scenario, router: str, options: argparse.Namespace) -> int:
    if scenario.kind == "streams" and router in (OURS, THEIRS):
        return int(max(options.pairs, options.repeats))
    if scenario.kind == "latency":
        return int(max(options.repeats, 3 if options.quick else FIRST_BYTE_REPEATS))
    return int(options.repeats)


def run_orders(
    scenario: Scenario, routers: Sequence[str], options: argparse.Namespace
) -> list[tuple[int, list[str]]]:
    """The repeats of a scenario: number, and the routers in the order of their runs."""
    counts = {router: repeats_of(scenario, router, options) for router in routers}
    found = []
    for repeat in range(max(counts.values(), default=0)):
        now = [router for router in routers if repeat < counts[router]]
        place = repeat % len(now)
        found.append((repeat, now[place:] + now[:place]))
    return found


def versions() -> dict[str, str]:
    found = {}
    for name in OWN_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    commit = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    if commit.returncode == 0:
        found["commit"] = commit.stdout.strip()
    return found


def wanted_routers(scenarios: Sequence[Scenario], missing: dict[str, str]) -> list[Router]:
    names = {name for scenario in scenarios for name in scenario.routers}
    return [router for router in ROUTERS if router.name in names and router.peer not in missing]


def start_all(bed: Bed, routers: Sequence[Router], missing: dict[str, str]) -> dict[str, Started]:
    """Start the routers; returns those that are ready and adds the others to `missing` with the reason."""
    started: dict[str, Started] = {}
    urls: dict[str, list[str]] = {}
    for router in routers:
        if router.workers not in urls:
            urls[router.workers] = bed.start_workers(router.workers)
        try:
            started[router.name] = bed.start(router, urls[router.workers])
        except (OSError, RuntimeError) as error:
            missing[router.name] = str(error)
            say(f"{router.name} did not start: {error}")
    return started


def measure(
    scenarios: Sequence[Scenario], started: dict[str, Started], runner: Runner, options: argparse.Namespace
) -> list[Measurement]:
    measurements = []
    for scenario in scenarios:
        routers = [name for name in scenario.routers if name in started]
        for name in routers:
            runner.warm_up(scenario, started[name])
        for repeat, order in run_orders(scenario, routers, options):
            for name in order:
                try:
                    one = runner.run(scenario, started[name], repeat)
                except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
                    say(f"{scenario.name} {name}: {error}")
                    one = Measurement(name, scenario.name, repeat, {}, errors=1)
                measurements.append(one)
                say_one(one)
    return measurements


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def say_one(one: Measurement) -> None:
    shown = ("cpu_us_request", "cpu_us_chunk", "requests_s", "a_p50_us", "first_byte_p99_us")
    figures = " ".join(f"{name} {one.figures[name]:.1f}" for name in shown if name in one.figures)
    errors = f" errors {one.errors}" if one.errors else ""
    say(f"  {one.scenario} {one.repeat} {one.router}: {figures} foreign {one.foreign_cores:.2f}{errors}")


def run(options: argparse.Namespace) -> dict[str, object]:
    from kvroute.deploy.tiny_model import write_tiny_model

    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    clock = time.monotonic()
    scenarios = [SCENARIOS[name] for name in SCENARIOS if name in options.scenarios]
    peers, missing = install_peers(options.peers, allow_install=not options.no_install)
    for name, why in missing.items():
        say(f"without {name}: {why}")
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)  # nginx's workers run as another user
        tools, cores = build(folder), choose_cores()
        model_folder = write_tiny_model("tiny", folder / "model")
        files = {each.file for each in scenarios if each.file} | {"a", "b", "d"}
        requests = write_all(folder, files)
        alone = [scenario for scenario in scenarios if len(scenario.routers) == 1]
        for some in (alone, [scenario for scenario in scenarios if scenario not in alone]):
            with ExitStack() as stack:
                bed = Bed(stack, folder, cores, tools, options.peers, model_folder, [])
                started = start_all(bed, wanted_routers(some, missing), missing)
                runner = Runner(bed, requests, options.seconds, run_again=not options.quick)
                measurements += measure(some, started, runner, options)
    return document(
        measurements,
        judge(Results(measurements)),
        machine=describe(),
        versions=versions() | peers,
        missing=missing,
        settings={
            "quick": options.quick,
            "scenarios": options.scenarios,
            "repeats": options.repeats,
            "pairs": options.pairs,
            "seconds": options.seconds,
            "router_core": cores.router,
            "other_cores": sorted(cores.rest),
            "took_s": round(time.monotonic() - clock),
        },
        began=began,
    )


def report(saved: dict[str, object]) -> list[str]:
    """The report of a saved run as text; computes the verdicts again."""
    results = from_document(saved)
    lines = [f"{key}: {json.dumps(saved[key])}" for key in ("began", "machine", "versions", "settings")]
    missing = saved["missing"]
    assert isinstance(missing, dict)
    lines += [f"MISSING {name}: {why}" for name, why in missing.items()]
    measured = {one.scenario for one in results.measurements}
    for scenario in SCENARIOS.values():
        if scenario.name in measured:
            lines += ["", *table(results, scenario.name, scenario.title, scenario.kind)]
    return [*lines, "", *verdict_lines(judge(results))]


def main() -> None:
    options = arguments()
    if options.show:
        print("\n".join(report(json.loads(options.show.read_text()))))
        return
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # the exception ends the children
    saved = run(options)
    if options.output:
        options.output.write_text(json.dumps(saved, indent=1) + "\n")
    print("\n".join(report(saved)))
    missed = any(one.verdict == "MISSED" for one in judge(from_document(saved)))
    sys.exit(1 if missed and not options.quick else 0)


if __name__ == "__main__":
    main()
