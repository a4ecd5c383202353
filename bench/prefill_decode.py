"""Measure when prefill and decode on different workers pay, in virtual time: by cost, and by other rules.

    python bench/prefill_decode.py [--workload conv] [--seeds 3] [--jobs 2] [--json]
    python bench/prefill_decode.py --choose [--workload conv] [--jobs 2]

Eight simulated engines (Llama-3.1-70B on 8 H100, GPU cache only) and kvroute's own router. The rules differ
in what they hand over: nothing (all workers are for both roles), each prompt, prompts above a length
(HyperPod's `routingThreshold`), prompts with more uncached tokens (llm-d), or what costs less (kvroute). Each
rule has the split of roles and the threshold that are best for it: `--choose` searches them on seeds 0 to 2,
by the product of mean time to first token and p90 time per output token, and prints the table `CHOSEN`; the
verdicts use seeds 3 to 5. The loads are 70% and 90% of the highest load that any of `CAPACITY_SETTINGS`
carries with a p90 of `CAPACITY_P90_S` to the first token.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.pool import Pool
from statistics import fmean

from prefill_decode_chosen import CHOSEN
from prefill_decode_runs import WORKLOADS, Case, Setting, run
from routing_runs import Figures

SHARES = (0.7, 0.9)
CAPACITY_P90_S = {"conv": 5.0, "agents": 5.0, "chat8k": 5.0, "chat64k": 15.0}
"""A cold prompt of 64K takes 4.2 s alone."""
CAPACITY_SETTINGS = (Setting("both"), Setting("cost", 2), Setting("cost", 3))
_SEARCH = {"conv": (4.0, 24.0), "agents": (10.0, 80.0), "chat8k": (30.0, 240.0), "chat64k": (5.0, 40.0)}
_SPLITS = range(1, 6)
_THRESHOLDS = (1024, 2048, 4096, 8192, 16_384, 32_768)
GRID: dict[str, list[Setting]] = {
    "both": [Setting("both")],
    "always": [Setting("always", prefill) for prefill in _SPLITS],
    "length": [Setting("length", prefill, threshold=each) for prefill in _SPLITS for each in _THRESHOLDS],
    "uncached": [Setting("uncached", prefill, threshold=each) for prefill in _SPLITS for each in _THRESHOLDS],
    "cost": [
        Setting("cost"),
        *(Setting("cost", prefill, is_mixed) for prefill in _SPLITS for is_mixed in (False, True)),
    ],
}


@dataclass(frozen=True)
class Result:
    """Means over seeds, in seconds."""

    ttft: float
    tpot: float

    @property
    def score(self) -> float:
        return self.ttft * self.tpot


def result(figures: Sequence[Figures]) -> Result:
    return Result(fmean(each.mean for each in figures), fmean(each.itl90 for each in figures))


def run_all(pool: Pool, cases: Iterable[Case]) -> dict[Case, Figures]:
    wanted = list(dict.fromkeys(cases))
    return dict(zip(wanted, pool.map(run, wanted, chunksize=1), strict=True))


def capacity(task: tuple[str, Setting]) -> float:
    """The highest rate with a p90 of at most the workload's bound, to 3%."""
    workload, setting = task
    low, high = _SEARCH[workload]
    while high / low > 1.03:
        middle = (low * high) ** 0.5
        if run(Case(workload, middle, setting)).p90 <= CAPACITY_P90_S[workload]:
            low = middle
        else:
            high = middle
    return low


def choose(pool: Pool, workload: str) -> None:
    """Print the lines of `CHOSEN` for a workload."""
    tasks = [(workload, setting) for setting in CAPACITY_SETTINGS]
    capacities = pool.map(capacity, tasks, chunksize=1)
    for setting, found in zip(CAPACITY_SETTINGS, capacities, strict=True):
        print(f"# {workload}: {setting.rule}, {setting}: {found:.3g}", file=sys.stderr, flush=True)
    for share in SHARES:
        rate = round(share * max(capacities), 2)
        bases = [Case(workload, rate, setting) for settings in GRID.values() for setting in settings]
        first = run_all(pool, bases)
        best: dict[str, Setting] = {}
        shortlist = {
            rule: sorted(settings, key=lambda each: result([first[Case(workload, rate, each)]]).score)[:3]
            for rule, settings in GRID.items()
        }
        more = run_all(
            pool,
            (
                Case(workload, rate, each, seed)
                for settings in shortlist.values()
                for each in settings
                for seed in (1, 2)
            ),
        )
        known = first | more
        for rule, settings in shortlist.items():
            best[rule] = min(
                settings,
                key=lambda each: (
                    result([known[Case(workload, rate, each, seed)] for seed in (0, 1, 2)]).score
                ),
            )
        print(f'    ("{workload}", {share}): ({rate}, {list(best.values())!r}),', flush=True)


@dataclass(frozen=True)
class Row:
    """One workload at one load: each rule's setting and figures, and the verdicts."""

    workload: str
    share: float
    rate: float
    settings: dict[str, str]
    results: dict[str, Result]

    @property
    def best_baseline(self) -> str:
        baselines = {rule: each for rule, each in self.results.items() if rule != "cost"}
        return min(baselines, key=lambda rule: baselines[rule].score)

    def ratios(self, rule: str) -> tuple[float, float]:
        ours, theirs = self.results["cost"], self.results[rule]
        return ours.ttft / theirs.ttft, ours.tpot / theirs.tpot


def judge(rows: Sequence[Row]) -> dict[str, bool]:
    """The goals of prefill and decode apart: name -> met."""
    at_least = {
        rule: {row.workload for row in rows if min(row.ratios(rule)) <= bound}
        for rule, bound in (("length", 0.90), ("uncached", 0.95))
    }
    return {
        "never more than 3% worse than the best baseline": all(
            max(row.ratios(row.best_baseline)) <= 1.03 for row in rows
        ),
        "10% better than by length on three workloads": len(at_least["length"]) >= 3,
        "5% better than by uncached length on one workload": len(at_least["uncached"]) >= 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="repeatable")
    parser.add_argument("--choose", action="store_true", help="search the settings again (an hour)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.workload or list(WORKLOADS)
    with multiprocessing.Pool(options.jobs) as pool:
        if options.choose:
            for name in names:
                choose(pool, name)
            return
        chosen = {key: value for key, value in CHOSEN.items() if key[0] in names}
        seeds = range(3, 3 + options.seeds)
        cases = {
            (key, setting.rule, seed): Case(key[0], rate, setting, seed)
            for key, (rate, settings) in chosen.items()
            for setting in settings
            for seed in seeds
        }
        figures = run_all(pool, cases.values())
    rows = [
        Row(
            workload,
            share,
            rate,
            {setting.rule: str(setting) for setting in settings},
            {
                setting.rule: result(
                    [figures[cases[(workload, share), setting.rule, seed]] for seed in seeds]
                )
                for setting in settings
            },
        )
        for (workload, share), (rate, settings) in chosen.items()
    ]
    verdicts = judge(rows)
    if options.json:
        json.dump({"rows": [asdict(row) for row in rows], "goals": verdicts}, sys.stdout, indent=2)
        return
    for row in rows:
        print(f"{row.workload} at {row.share:.0%} of capacity ({row.rate:g})")
        for rule, each in row.results.items():
            ttft, tpot = row.ratios(rule)
            mark = " *" if rule == row.best_baseline else ""
            print(
                f"    {rule:9} {row.settings[rule]:32} mean TTFT {each.ttft:7.3f} s, "
                f"p90 TPOT {1e3 * each.tpot:6.1f} ms"
                f"  cost/this {ttft:.3f} {tpot:.3f}{mark}"
            )
    for name, is_met in verdicts.items():
        print(f"{'met' if is_met else 'MISSED'}: {name}")


if __name__ == "__main__":
    main()
