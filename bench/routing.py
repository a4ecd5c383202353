"""Measure the quality of routing in virtual time: goals, figures, verdicts.

    python bench/routing.py [--quick] [--goal 5] [--seeds 3] [--first-seed 0] [--jobs 2] [--json]
                            [--filling computed|ended] [--load stated|equal]

kvroute's own router, cost model, history, reservations and event ledgers place requests on simulated engines
with a GPU, a CPU and a shared cache tier. The published policies of other routers do the same. Each goal is
judged for two subjects: `prefixaware`, the default, which knows the prompts that it has sent, and `kvaware`,
which knows the content of every tier from events. Figures are means over seeds. All goals with three seeds
take about 25 minutes on one core, --quick (one seed, without the search for capacities) about 4.

Verdicts are those of the defaults. The goals were set on another model and partly on other traffic. Two
options, alone or together, come nearer to that set-up and show the effect of the difference:

--filling ended    slower tiers get a prompt and its answer when the request ends, in no time. Real tiers
                   (LMCache 0.5.6; `computed`) get a prompt while it is computed.
--load equal       the trace at 9.6 and agents at 31.5 requests a second, not at 10.5 and 29: 85% of the rate
                   that kvroute carries here with a p90 of 5 s, as the stated rates were of its rate there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean

from kvroute.sim.tiers import Filling
from routing_goals import GOALS, Bound, Capacity, FiguresOf, Task, judged_for
from routing_runs import SUBJECTS, Case, Figures, run

CAPACITY_P90_S = 5.0

SLOW = 8
"""The goal that searches for rates; it takes as long as all other goals together."""

LOADS: dict[str, dict[str, float]] = {"stated": {}, "equal": {"conv": 9.6, "tool": 31.5}}
"""Requests a second by workload, if they differ from those of the goals."""

_ONES = Figures(*[1.0] * len(fields(Figures)))

Judged = dict[int, dict[str, list[Bound]]]


def run_task(task: Task) -> Figures:
    if isinstance(task, Case):
        return run(task)
    low, high = 0.4 * task.case.rate, 2.0 * task.case.rate
    while high / low > 1.015:
        middle = (low * high) ** 0.5
        if run(replace(task.case, rate=middle)).p90 <= CAPACITY_P90_S:
            low = middle
        else:
            high = middle
    return replace(_ONES, throughput=low)


@dataclass(frozen=True)
class Setting:
    """Settings that the goals do not determine."""

    filling: Filling = Filling.COMPUTED
    rates: Mapping[str, float] = field(default_factory=dict)

    def seeded(self, task: Task, seed: int) -> Task:
        if isinstance(task, Capacity):
            return Capacity(self._case(task.case, seed))
        return self._case(task, seed)

    def _case(self, case: Case, seed: int) -> Case:
        rate = self.rates.get(case.workload, case.rate)
        return replace(case, seed=seed, filling=self.filling, rate=rate)


def averaged(results: list[Figures]) -> Figures:
    return Figures(*(fmean(getattr(result, field.name) for result in results) for field in fields(Figures)))


def judge(numbers: list[int], figures_of: FiguresOf) -> Judged:
    return {
        number: {subject: judged_for(number, figures_of, subject) for subject in SUBJECTS}
        for number in numbers
    }


def tasks_of(numbers: list[int]) -> list[Task]:
    """The tasks that the goals need, each once."""
    wanted: dict[Task, None] = {}

    def note(task: Task) -> Figures:
        wanted[task] = None
        return _ONES

    judge(numbers, note)
    return list(wanted)


def report(judged: Judged) -> None:
    for number, subjects in judged.items():
        print(f"{number:2}  {GOALS[number][0]}")
        for subject, bounds in subjects.items():
            if not bounds:
                continue
            verdict = "met" if all(bound.is_met for bound in bounds) else "MISSED"
            if not any(bound.is_goal for bound in bounds):
                verdict = "shown"
            print(f"    {subject:12} {verdict:7}", "; ".join(map(str, bounds)))


def report_json(judged: Judged) -> None:
    rows = [
        {"goal": number, "what": GOALS[number][0], "subject": subject, **asdict(bound), "met": bound.is_met}
        for number, subjects in judged.items()
        for subject, bounds in subjects.items()
        for bound in bounds
    ]
    json.dump(rows, sys.stdout, indent=2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"one seed; all goals but {SLOW}")
    parser.add_argument("--goal", type=int, action="append", choices=GOALS, help="this goal only; repeatable")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--filling", choices=[filling.value for filling in Filling], default="computed")
    parser.add_argument("--load", choices=LOADS, default="stated")
    options = parser.parse_args()
    setting = Setting(Filling(options.filling), LOADS[options.load])
    numbers = options.goal or [number for number in GOALS if not (options.quick and number == SLOW)]
    count = options.seeds or (1 if options.quick else 3)
    seeds = range(options.first_seed, options.first_seed + count)

    wanted = tasks_of(numbers)
    tasks = [setting.seeded(task, seed) for task in wanted for seed in seeds]
    results = {}
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for task, result in zip(tasks, pool.imap(run_task, tasks), strict=True):
            results[task] = result
            if len(results) % 10 == 0 or len(results) == len(tasks):
                print(f"{len(results)} of {len(tasks)} simulations", file=sys.stderr, flush=True)
    means = {task: averaged([results[setting.seeded(task, seed)] for seed in seeds]) for task in wanted}
    judged = judge(numbers, means.__getitem__)
    if options.json:
        report_json(judged)
        return
    print(f"filling: {options.filling}; load: {options.load}; seeds: {', '.join(map(str, seeds))}")
    report(judged)


if __name__ == "__main__":
    main()
