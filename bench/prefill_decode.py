"""Measure when prefill and decode on different workers pay, in virtual time: by cost, and by other rules.

    python bench/prefill_decode.py [--workload conv] [--seeds 3] [--jobs 2] [--json]
    python bench/prefill_decode.py --choose [--keep] [--workload conv] [--jobs 2]

Eight simulated engines (Llama-3.1-70B on 8 H100, GPU cache only) and kvroute's own router. The rules differ
in what they hand over: nothing (all workers are for both roles), each prompt, prompts above a length
(HyperPod's `routingThreshold`), prompts with more uncached tokens (llm-d), or what costs less (kvroute). Each
rule has the split of roles and the threshold that are best for it: `--choose` searches them on seeds 0 to 2,
by the product of mean time to first token and p90 time per output token (for kvroute: by the figure that is
worse relative to the best other rule), and prints the table `CHOSEN`. The verdicts use seeds 3 to 5. The
loads are 70% and 90% of the highest load that any of `CAPACITY_SETTINGS` carries with a p90 of
`CAPACITY_P90_S` to the first token.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.pool import Pool
from statistics import fmean

from prefill_decode_chosen import CHOSEN
from prefill_decode_runs import WORKERS, WORKLOADS, Case, Setting, run
from routing_runs import Figures

SHARES = (0.7, 0.9)
FIRST_SEED, SEARCH_SEEDS, SHORTLIST = (0,), (0, 1, 2), 3
"""All settings of a rule are run with the first seed, and the best ones with all."""
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
        *(Setting("cost", prefill, both) for prefill in _SPLITS for both in (0, 2, WORKERS - prefill)),
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


class Searcher:
    """Runs settings of one workload at one rate. Mutable: keeps the figures of its runs."""

    def __init__(self, pool: Pool, workload: str, rate: float) -> None:
        self._pool, self._workload, self._rate = pool, workload, rate
        self._known: dict[tuple[Setting, int], Figures] = {}

    def means(self, settings: Iterable[Setting], seeds: Sequence[int]) -> dict[Setting, Result]:
        wanted = [(setting, seed) for setting in settings for seed in seeds]
        cases = {key: Case(self._workload, self._rate, *key) for key in wanted if key not in self._known}
        figures = run_all(self._pool, cases.values())
        self._known |= {key: figures[case] for key, case in cases.items()}
        return {setting: result([self._known[setting, seed] for seed in seeds]) for setting, _ in wanted}

    def best_of_rule(self, settings: Sequence[Setting]) -> Setting:
        """The setting with the least product of both figures."""
        first = self.means(settings, FIRST_SEED)
        found = self.means(sorted(settings, key=lambda each: first[each].score)[:SHORTLIST], SEARCH_SEEDS)
        return min(found, key=lambda each: found[each].score)

    def best_by_cost(self, settings: Sequence[Setting], others: Sequence[Setting]) -> Setting:
        """kvroute's setting: see `best_by_cost`. `others` has the settings of the other rules."""
        all_others = self.means(others, SEARCH_SEEDS)
        baseline = min(others, key=lambda each: all_others[each].score)
        first, theirs = self.means(settings, FIRST_SEED), self.means([baseline], FIRST_SEED)[baseline]
        shortlist = sorted(settings, key=lambda each: worse_ratio(first[each], theirs))[:SHORTLIST]
        return best_by_cost(self.means(shortlist, SEARCH_SEEDS), all_others[baseline])


def worse_ratio(ours: Result, theirs: Result) -> float:
    """The larger one of the two figures, each relative to another rule's."""
    return max(ours.ttft / theirs.ttft, ours.tpot / theirs.tpot)


def best_by_cost(found: Mapping[Setting, Result], baseline: Result) -> Setting:
    """The setting whose worse figure is lowest, relative to the best other rule."""
    return min(found, key=lambda each: worse_ratio(found[each], baseline))


def choose(pool: Pool, workload: str, *, keep: bool) -> None:
    """Print the lines of `CHOSEN` for a workload; with `keep` the other rules keep their settings."""
    if not keep:
        tasks = [(workload, setting) for setting in CAPACITY_SETTINGS]
        capacities = pool.map(capacity, tasks, chunksize=1)
        for setting, found in zip(CAPACITY_SETTINGS, capacities, strict=True):
            print(f"# {workload}: {setting.rule}, {setting}: {found:.3g}", file=sys.stderr, flush=True)
    for share in SHARES:
        rate, best = CHOSEN[workload, share]
        if not keep:
            rate = round(share * max(capacities), 2)
        searcher = Searcher(pool, workload, rate)
        others = [setting for setting in best if setting.rule != "cost"]
        if not keep:
            others = [searcher.best_of_rule(settings) for rule, settings in GRID.items() if rule != "cost"]
        ours = searcher.best_by_cost(GRID["cost"], others)
        print(f'    ("{workload}", {share}): ({rate}, {[*others, ours]!r}),', flush=True)


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
    parser.add_argument("--keep", action="store_true", help="with --choose: search those of kvroute only")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.workload or list(WORKLOADS)
    with multiprocessing.Pool(options.jobs) as pool:
        if options.choose:
            for name in names:
                choose(pool, name, keep=options.keep)
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
