"""The long form of the fuzz tests: `make fuzz`, or `python -m tests.fuzz.run --help`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import uvloop
from tests.fuzz.cases import Cases
from tests.fuzz.lanes import PROFILES, Recorder, Report, lanes

_BATCH = 64
_ROUND = 4096
"""Requests with one gateway, before the next one is made."""


async def fuzz_requests(count: int, seed: int, seconds: float, folder: Path) -> Report:
    report = Report()
    recorder = Recorder(folder, report)
    started = said = time.monotonic()
    profiles = list(PROFILES)
    number = 0
    while report.inputs < count and time.monotonic() - started < seconds:
        cases = Cases(seed * 1_000_003 + number)
        async with lanes(profiles[number % len(profiles)]) as target:
            end = min(count, report.inputs + _ROUND)
            while report.inputs < end and time.monotonic() - started < seconds:
                await recorder.batch(target, [cases.case() for _ in range(min(_BATCH, end - report.inputs))])
                if time.monotonic() - said > 10:
                    said = time.monotonic()
                    rate = report.inputs / (said - started)
                    print(f"requests: {report.inputs:,}, {rate:,.0f}/s, {dict(report.findings)}", flush=True)
        number += 1
    took = time.monotonic() - started
    print(f"requests: {report.inputs:,} over both lanes in {took:.0f} s ({report.inputs / took:,.0f}/s)")
    for outcome, times in report.outcomes.most_common():
        print(f"  {outcome:>12} {times:>10,}")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="at most, for each part")
    parser.add_argument(
        "--folder", type=Path, default=Path("fuzz-findings"), help="where inputs are saved that show a defect"
    )
    options = parser.parse_args()
    report = uvloop.run(fuzz_requests(options.requests, options.seed, options.seconds, options.folder))
    for kind, times in report.findings.most_common():
        print(f"FINDING {kind}: {times}")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
