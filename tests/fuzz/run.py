"""The long form of the fuzz tests: `make fuzz`, or `python -m tests.fuzz.run --help`.

Parts run in processes of their own, some thousand inputs each. Every part is a function of its seed; what
shows a defect is saved. Exit code 1 if anything does.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count
from pathlib import Path

import uvloop
from tests.fuzz.control import fuzz_control
from tests.fuzz.documents import fuzz_documents
from tests.fuzz.envelopes import fuzz_envelopes
from tests.fuzz.frames import fuzz_frames
from tests.fuzz.lanes import PROFILES, Report, fuzz_requests
from tests.fuzz.probes import fuzz_probes
from tests.fuzz.served import fuzz_served

_REQUESTS, _SERVED, _FRAMES, _DOCUMENTS = 4096, 2048, 25_000, 2000
_ENVELOPES, _PROBES = 5000, 5000
"""Inputs in one process's turn."""
_SERVED_SHARE = 0.02
_PARTS = ("requests", "served", "frames", "envelopes", "probes", "documents", "control")


def turn(part: str, inputs: int, seed: int, folder: Path) -> tuple[Report, int]:
    """One part of the work, and the most memory (KB) that this process has had."""
    logging.getLogger().addHandler(logging.NullHandler())
    profile = list(PROFILES)[seed % len(PROFILES)]
    match part:
        case "requests":
            report = uvloop.run(fuzz_requests(inputs, seed, profile, folder))
        case "served":
            report = uvloop.run(fuzz_served(inputs, seed, profile, folder=folder))
        case "frames":
            report = uvloop.run(fuzz_frames(inputs, seed, folder=folder))
        case "envelopes":
            report = uvloop.run(fuzz_envelopes(inputs, seed, folder=folder))
        case "probes":
            report = uvloop.run(fuzz_probes(inputs, seed, folder=folder))
        case "documents":
            report = fuzz_documents(inputs, seed, folder=folder)
        case _:
            report = uvloop.run(fuzz_control(inputs, seed))
    sys.stdout.flush()
    return report, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def turns(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """(part, inputs, seed) of all that is to be done."""
    seeds = count(options.seed * 1_000_003)
    totals = {
        "control": (options.examples, options.examples),
        "served": (int(options.requests * _SERVED_SHARE), _SERVED),
        "documents": (options.documents, _DOCUMENTS),
        "envelopes": (options.envelopes, _ENVELOPES),
        "probes": (options.probes, _PROBES),
        "requests": (options.requests, _REQUESTS),
        "frames": (options.frames, _FRAMES),
    }
    for part, (total, size) in totals.items():
        if part in options.parts:
            for start in range(0, total, size or 1):
                yield part, min(size, total - start), next(seeds)


def run(options: argparse.Namespace, report_line: Callable[[str], None]) -> dict[str, Report]:
    started, reports = time.monotonic(), dict[str, Report]()
    waiting, peak, reported_at = turns(options), 0, 0.0
    context = multiprocessing.get_context("spawn")
    # A process ends after some turns, so that what one leaves behind is not taken for another's.
    with ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=10) as pool:
        running: dict[Future[tuple[Report, int]], str] = {}
        while True:
            while len(running) < options.jobs and time.monotonic() - started < options.seconds:
                if (following := next(waiting, None)) is None:
                    break
                running[pool.submit(turn, *following, options.folder)] = following[0]
            if not running:
                return reports
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                part = running.pop(done)
                report, most = done.result()
                reports.setdefault(part, Report()).add(report)
                peak = max(peak, most)
                now = time.monotonic()
                if now - reported_at > 10:
                    reported_at = now
                    counts = ", ".join(f"{name} {each.inputs:,}" for name, each in reports.items())
                    found = sum(sum(each.findings.values()) for each in reports.values())
                    report_line(
                        f"{now - started:5.0f} s: {counts}; {found} findings; {peak // 1024} MiB at most"
                    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000, help="through both lanes; 2%% more by TCP")
    parser.add_argument("--frames", type=int, default=1_000_000, help="event frames and LMCache's messages")
    parser.add_argument("--documents", type=int, default=20_000, help="specs, configurations, bodies")
    parser.add_argument("--envelopes", type=int, default=100_000, help="messages of the fleet through Redis")
    parser.add_argument("--probes", type=int, default=100_000, help="answers to probes; files")
    parser.add_argument("--examples", type=int, default=50, help="schemathesis: for each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="nothing new is begun after that")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--folder", type=Path, default=Path("fuzz-findings"), help="for what shows a defect")
    options = parser.parse_args()
    started = time.monotonic()
    reports = run(options, lambda text: print(text, flush=True))
    for part, report in reports.items():
        print(f"{part}: {report.inputs:,} inputs")
        for outcome, times in report.outcomes.most_common():
            print(f"  {outcome:<28} {times:>10,}")
    print(f"seed {options.seed}, {time.monotonic() - started:.0f} s")
    findings = [
        f"FINDING in {part}: {kind}: {times}"
        for part, report in reports.items()
        for kind, times in report.findings.most_common()
    ]
    print("\n".join(findings or ["no findings"]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
