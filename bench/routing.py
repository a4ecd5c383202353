"""Routing quality in virtual time: what is promised, what is reached, and whether that is enough.

    python bench/routing.py [--quick] [--goal 5] [--seeds 3] [--jobs 2] [--json]

kvroute's own router, cost model, history and reservations place requests on simulated engines with a GPU,
a CPU and a shared cache tier; so do other routers' published policies. Each goal is judged for two
subjects: `prefixaware`, the default, which knows what it has sent, and `kvaware`, told what every tier
holds. Figures are means over seeds; TTFT unless said otherwise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from statistics import fmean

from routing_policies import TRUE_COSTS
from routing_runs import Case, Figures, run

SUBJECTS = {"prefixaware": "kvroute", "kvaware": "kvroute-aware"}

CONV, TOOL = Case("conv", 10.5, ""), Case("tool", 29.0, "")

CAPACITY_P90_S = 5.0


@dataclass(frozen=True)
class Capacity:
    """The highest rate at which the case's p90 stays within 5 s, to 1.5%."""

    case: Case


@dataclass(frozen=True)
class Bound:
    """One figure and what it must be; `most` unless `least` is set."""

    name: str
    value: float
    most: float | None = None
    least: float | None = None

    @property
    def is_met(self) -> bool:
        return (self.most is None or self.value <= self.most) and (
            self.least is None or self.value >= self.least
        )

    def __str__(self) -> str:
        sign, limit = ("<=", self.most) if self.least is None else (">=", self.least)
        return f"{self.name} {self.value:.2f} ({sign} {limit:g}){'' if self.is_met else ' MISSED'}"


Task = Case | Capacity
Ask = Callable[[Task], Figures]
Goal = Callable[[Ask, str], list[Bound]]


def against(base: Case, other: str, p50: float, p90: float, ask: Ask, subject: str) -> list[Bound]:
    ours, theirs = ask(replace(base, policy=subject)), ask(replace(base, policy=other))
    return [
        Bound(f"{base.workload} p50", ours.p50 / theirs.p50, p50),
        Bound(f"{base.workload} p90", ours.p90 / theirs.p90, p90),
    ]


def mean_against(base: Case, other: str, most: float, ask: Ask, subject: str) -> list[Bound]:
    ours, theirs = ask(replace(base, policy=subject)), ask(replace(base, policy=other))
    return [Bound(f"{base.workload} mean", ours.mean / theirs.mean, most)]


def both(*goals: Goal) -> Goal:
    return lambda ask, subject: [bound for goal in goals for bound in goal(ask, subject)]


def against_roundrobin(
    base: Case, limits: tuple[float, float, float, float], ask: Ask, subject: str
) -> list[Bound]:
    """The set-up of published claims: against round robin with the GPU's cache only. In percent."""
    ours = ask(replace(base, policy=subject))
    theirs = ask(replace(base, policy="roundrobin", tiers="gpu"))
    return [
        Bound("p50 %", 100 * (ours.p50 / theirs.p50 - 1), limits[0]),
        Bound("p90 %", 100 * (ours.p90 / theirs.p90 - 1), limits[1]),
        Bound("throughput %", 100 * (ours.throughput / theirs.throughput - 1), least=limits[2]),
        Bound("cost %", 100 * (theirs.throughput / ours.throughput - 1), limits[3]),
    ]


def no_collapse(ask: Ask, subject: str) -> list[Bound]:
    ours, theirs = ask(replace(CONV, policy=subject)), ask(replace(CONV, policy="stack-prefix"))
    apart = Case("chat64k_nosys", 4, "")
    our_chats, their_chats = ask(replace(apart, policy=subject)), ask(replace(apart, policy="stack-prefix"))
    return [
        Bound("imbalance", ours.imbalance, 1.15),
        Bound("conv p90", ours.p90 / theirs.p90, 0.05),
        Bound("chat64k_nosys p90", our_chats.p90 / their_chats.p90, 0.90),
        Bound("throughput", our_chats.throughput / their_chats.throughput, least=1.05),
    ]


def capacity(base: Case, roundrobin: float, ask: Ask, subject: str) -> list[Bound]:
    ours, even, llmd = (
        ask(Capacity(replace(base, policy=policy))).throughput for policy in (subject, "roundrobin", "llm-d")
    )
    return [
        Bound(f"{base.workload} roundrobin", ours / even, least=roundrobin),
        Bound(f"{base.workload} llm-d", ours / llmd, least=0.97),
    ]


def second_tier(ask: Ask, subject: str) -> list[Bound]:
    base = Case("l2post", 8.0, subject, tiers="l2post", workers=2, capacity_tokens=650_000)
    return [
        Bound(
            "output tokens/s",
            ask(base).throughput / ask(replace(base, policy="session")).throughput,
            least=1.05,
        )
    ]


def costs(factor: float) -> tuple[tuple[str, float], ...]:
    return tuple((f"costs.{name}", value * factor) for name, value in TRUE_COSTS.items())


def robust(base: Case, slow: float, ask: Ask, subject: str) -> list[Bound]:
    ours = replace(base, policy=subject)
    usual, name = ask(ours).mean, base.workload
    right = ask(replace(ours, options=costs(1.0))).mean
    late = [Bound(f"{name} late events", ask(replace(ours, event_delay_s=0.5)).mean / usual, 1.05)]
    blind = [Bound(f"{name} no events", usual / ask(replace(base, policy="kvroute-aware")).mean, 1.15)]
    lame = replace(ours, slow_worker=2.0)
    return [
        *(late if subject == "kvroute-aware" else blind),
        Bound(f"{name} costs x2", ask(replace(ours, options=costs(2.0))).mean / right, 1.08),
        Bound(f"{name} costs x0.5", ask(replace(ours, options=costs(0.5))).mean / right, 1.08),
        Bound(f"{name} slow worker", ask(lame).mean / usual, slow),
        Bound(f"{name} slow, dynamo", ask(lame).mean / ask(replace(lame, policy="dynamo")).mean, 0.85),
    ]


def itl(base: Case, ask: Ask, subject: str) -> list[Bound]:
    ours, theirs = ask(replace(base, policy=subject)), ask(replace(base, policy="llm-d"))
    return [
        Bound(f"{base.workload} ITL p50", ours.itl50 / theirs.itl50, 1.05),
        Bound(f"{base.workload} ITL p90", ours.itl90 / theirs.itl90, 1.05),
    ]


GOALS: dict[int, tuple[str, Goal]] = {
    1: ("against roundrobin", partial(against, CONV, "roundrobin", 0.30, 0.20)),
    2: (
        "against smg's tree",
        both(
            partial(against, CONV, "smg-tree", 0.55, 0.45),
            partial(against, TOOL, "smg-tree", 0.40, 0.35),
        ),
    ),
    3: (
        "against llm-d",
        both(partial(against, CONV, "llm-d", 0.75, 0.75), partial(against, TOOL, "llm-d", 0.88, 0.85)),
    ),
    4: (
        "against Dynamo",
        both(partial(against, CONV, "dynamo", 0.65, 0.85), partial(against, TOOL, "dynamo", 0.70, 0.72)),
    ),
    5: (
        "against Mooncake's conductor",
        both(partial(mean_against, CONV, "conductor", 0.97), partial(mean_against, TOOL, "conductor", 0.85)),
    ),
    6: ("no collapse; against production-stack's prefixaware", no_collapse),
    7: (
        "distance to one infinite shared cache",
        both(partial(mean_against, CONV, "shared", 1.6), partial(mean_against, TOOL, "shared", 1.25)),
    ),
    8: ("capacity at p90 <= 5 s", both(partial(capacity, CONV, 1.45), partial(capacity, TOOL, 1.15))),
    9: (
        "8K chats, 32 clients a worker, against roundrobin + GPU cache",
        partial(against_roundrobin, Case("chat8k", 32, ""), (-80, -50, 30, -23)),
    ),
    10: (
        "64K chats, 4 clients a worker, against roundrobin + GPU cache",
        partial(against_roundrobin, Case("chat64k", 4, ""), (-95, -42, 50, -33)),
    ),
    11: ("100 sessions in turn, 650K tokens a worker, against session routing", second_tier),
    12: (
        "robustness (mean; two replicas are not simulated)",
        both(partial(robust, CONV, 1.35), partial(robust, TOOL, 1.8)),
    ),
    13: ("inter-token latency against llm-d", both(partial(itl, CONV), partial(itl, TOOL))),
}

QUICK = (1, 3, 5, 9, 10)


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


_ONES = Figures(*[1.0] * 9)


def seeded(task: Task, seed: int) -> Task:
    return task.with_seed(seed) if isinstance(task, Case) else Capacity(task.case.with_seed(seed))


def averaged(results: list[Figures]) -> Figures:
    return Figures(*(fmean(getattr(result, field.name) for result in results) for field in fields(Figures)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"goals {', '.join(map(str, QUICK))}, one seed")
    parser.add_argument("--goal", type=int, action="append", choices=GOALS, help="this goal only; repeatable")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    numbers = options.goal or (QUICK if options.quick else tuple(GOALS))
    seeds = range(options.seeds or (1 if options.quick else 3))

    wanted: dict[Task, None] = {}

    def note(task: Task) -> Figures:
        wanted[task] = None
        return _ONES

    def judge(ask: Ask) -> dict[int, dict[str, list[Bound]]]:
        return {
            number: {name: GOALS[number][1](ask, policy) for name, policy in SUBJECTS.items()}
            for number in numbers
        }

    judge(note)
    tasks = [seeded(task, seed) for task in wanted for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        results = dict(zip(tasks, pool.map(run_task, tasks, chunksize=1), strict=True))
    means = {task: averaged([results[seeded(task, seed)] for seed in seeds]) for task in wanted}
    judged = judge(means.__getitem__)

    if options.json:
        json.dump(
            [
                {
                    "goal": number,
                    "what": GOALS[number][0],
                    "subject": subject,
                    **asdict(bound),
                    "met": bound.is_met,
                }
                for number, subjects in judged.items()
                for subject, bounds in subjects.items()
                for bound in bounds
            ],
            sys.stdout,
            indent=2,
        )
        return
    for number, subjects in judged.items():
        print(f"{number:2}  {GOALS[number][0]}")
        for subject, bounds in subjects.items():
            verdict = "met" if all(bound.is_met for bound in bounds) else "MISSED"
            print(f"    {subject:12} {verdict:7}", "; ".join(map(str, bounds)))


if __name__ == "__main__":
    main()
