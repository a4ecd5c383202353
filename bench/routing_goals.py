"""The goals of the routing benchmark: each goal is a function that returns figures with bounds.

A goal is called with `figures_of`, which returns the figures of a task (means over seeds), and the subject's
name. Before that, the benchmark calls the goal once with a `figures_of` that only records the tasks. So the
tasks of a goal must not depend on figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from routing_kvroute import TRUE_COSTS
from routing_runs import Case, Figures

CONV, TOOL = Case("conv", 10.5, ""), Case("tool", 29.0, "")

SHARED = "shared"
"""The baseline of every goal: least backlog in front of one infinite cache that all workers share. No router
in front of real caches can expect better figures."""


@dataclass(frozen=True)
class Capacity:
    """The highest rate with a p90 of at most 5 s for the case, as `throughput`, to 1.5%."""

    case: Case


@dataclass(frozen=True)
class Bound:
    """One figure and its limit: `most`, or `least` if that is set; without a limit the figure is only shown.

    `goal` is the original limit if a regression bound has replaced it. `ideal` is the same figure of
    `SHARED`.
    """

    name: str
    value: float
    most: float | None = None
    least: float | None = None
    ideal: float | None = None
    goal: float | None = None

    @property
    def is_goal(self) -> bool:
        return self.most is not None or self.least is not None

    @property
    def is_met(self) -> bool:
        return (self.most is None or self.value <= self.most) and (
            self.least is None or self.value >= self.least
        )

    def with_limit(self, limit: float, *, is_regression: bool) -> Bound:
        """The same figure with another limit. With `is_regression`, `goal` keeps the original one."""
        goal = (self.most if self.least is None else self.least) if is_regression else None
        if self.least is None:
            return replace(self, most=limit, goal=goal)
        return replace(self, least=limit, goal=goal)

    def __str__(self) -> str:
        beside = "" if self.ideal is None else f" [infinite cache: {self.ideal:.3g}]"
        if not self.is_goal:
            return f"{self.name} {self.value:.3g}{beside}"
        sign, limit = ("<=", self.most) if self.least is None else (">=", self.least)
        kind = "" if self.goal is None else f", regression bound; goal {self.goal:g}"
        verdict = "" if self.is_met else " MISSED"
        return f"{self.name} {self.value:.3g} ({sign} {limit:g}{kind}){verdict}{beside}"


Task = Case | Capacity
FiguresOf = Callable[[Task], Figures]
Goal = Callable[[FiguresOf, str], list[Bound]]


def against(
    base: Case, other: str, p50: float, p90: float, figures_of: FiguresOf, subject: str
) -> list[Bound]:
    ours, theirs = (figures_of(replace(base, policy=policy)) for policy in (subject, other))
    return [
        Bound(f"{base.workload} p50", ours.p50 / theirs.p50, p50),
        Bound(f"{base.workload} p90", ours.p90 / theirs.p90, p90),
    ]


def mean_against(base: Case, other: str, most: float, figures_of: FiguresOf, subject: str) -> list[Bound]:
    ours, theirs = (figures_of(replace(base, policy=policy)) for policy in (subject, other))
    return [Bound(f"{base.workload} mean", ours.mean / theirs.mean, most)]


def both(*goals: Goal) -> Goal:
    return lambda figures_of, subject: [bound for goal in goals for bound in goal(figures_of, subject)]


def against_roundrobin(
    base: Case, limits: tuple[float, float, float, float], figures_of: FiguresOf, subject: str
) -> list[Bound]:
    """The set-up of published claims: compared with round robin, with the GPU cache only. In percent."""
    ours = figures_of(replace(base, policy=subject))
    theirs = figures_of(replace(base, policy="roundrobin", tiers="gpu"))
    return [
        Bound("p50 %", 100 * (ours.p50 / theirs.p50 - 1), limits[0]),
        Bound("p90 %", 100 * (ours.p90 / theirs.p90 - 1), limits[1]),
        Bound("throughput %", 100 * (ours.throughput / theirs.throughput - 1), least=limits[2]),
        Bound("cost %", 100 * (theirs.throughput / ours.throughput - 1), limits[3]),
    ]


def no_collapse(figures_of: FiguresOf, subject: str) -> list[Bound]:
    ours, theirs = figures_of(replace(CONV, policy=subject)), figures_of(replace(CONV, policy="stack-prefix"))
    apart = Case("chat64k_nosys", 4, "")
    our_chats, their_chats = (
        figures_of(replace(apart, policy=subject)),
        figures_of(replace(apart, policy="stack-prefix")),
    )
    return [
        Bound("conv imbalance", ours.imbalance, 1.15),
        Bound("conv p90", ours.p90 / theirs.p90, 0.05),
        Bound("chat64k_nosys p90", our_chats.p90 / their_chats.p90, 0.90),
        Bound("throughput", our_chats.throughput / their_chats.throughput, least=1.05),
    ]


def capacity(base: Case, roundrobin: float, figures_of: FiguresOf, subject: str) -> list[Bound]:
    ours, even, llmd = (
        figures_of(Capacity(replace(base, policy=policy))).throughput
        for policy in (subject, "roundrobin", "llm-d")
    )
    return [
        Bound(f"{base.workload} of roundrobin's", ours / even, least=roundrobin),
        Bound(f"{base.workload} of llm-d's", ours / llmd, least=0.97),
    ]


def second_tier(figures_of: FiguresOf, subject: str) -> list[Bound]:
    base = Case("l2post", 8.0, "", tiers="l2post", workers=2, capacity_tokens=650_000)
    ours, theirs = figures_of(replace(base, policy=subject)), figures_of(replace(base, policy="session"))
    return [Bound("output tokens/s", ours.throughput / theirs.throughput, least=1.05)]


def costs(factor: float) -> tuple[tuple[str, float | bool], ...]:
    return tuple((f"costs.{name}", value * factor) for name, value in TRUE_COSTS.items())


def robust(base: Case, slow: float, figures_of: FiguresOf, subject: str) -> list[Bound]:
    """Compare wrong costs with right costs; all else is compared with the case itself.

    `SHARED` has no events, costs or replicas, so only its slow worker is measured.
    """
    name, ours = base.workload, replace(base, policy=subject)
    slow_case = replace(ours, slow_worker=2.0)
    if subject == SHARED:
        return _slow_worker(name, ours, slow_case, slow, figures_of)
    usual, right = figures_of(ours).mean, figures_of(replace(ours, options=costs(1.0))).mean
    aware = replace(base, policy="kvaware")
    if subject == "kvaware":
        events = Bound(
            f"{name} late events", figures_of(replace(aware, event_delay_s=0.5)).mean / usual, 1.05
        )
    else:
        events = Bound(f"{name} no events", usual / figures_of(aware).mean, 1.15)
    return [
        events,
        Bound(f"{name} costs x2", figures_of(replace(ours, options=costs(2.0))).mean / right, 1.08),
        Bound(f"{name} costs x0.5", figures_of(replace(ours, options=costs(0.5))).mean / right, 1.08),
        Bound(f"{name} 2 replicas", figures_of(replace(ours, replicas=2)).mean / usual, 1.12),
        *_slow_worker(name, ours, slow_case, slow, figures_of),
    ]


def _slow_worker(name: str, ours: Case, slow_case: Case, slow: float, figures_of: FiguresOf) -> list[Bound]:
    return [
        Bound(f"{name} slow worker", figures_of(slow_case).mean / figures_of(ours).mean, slow),
        Bound(
            f"{name} slow worker, of Dynamo's",
            figures_of(slow_case).mean / figures_of(replace(slow_case, policy="dynamo")).mean,
            0.85,
        ),
    ]


def itl(base: Case, figures_of: FiguresOf, subject: str) -> list[Bound]:
    ours, theirs = figures_of(replace(base, policy=subject)), figures_of(replace(base, policy="llm-d"))
    return [
        Bound(f"{base.workload} p50", ours.itl50 / theirs.itl50, 1.05),
        Bound(f"{base.workload} p90", ours.itl90 / theirs.itl90, 1.05),
    ]


def prefetching(figures_of: FiguresOf, subject: str) -> list[Bound]:
    """`lmcache.prefetch`, which is off by default: no goal, figures only. Needs a map of L2."""
    if subject != "kvaware":
        return []
    bounds = []
    for base in (CONV, TOOL, Case("chat64k", 8, "")):
        usual = replace(base, policy=subject)
        without, with_it = figures_of(usual), figures_of(replace(usual, prefetch=True))
        bounds += [
            Bound(f"{base.workload} mean", with_it.mean / without.mean),
            Bound(f"{base.workload} p90", with_it.p90 / without.p90),
        ]
    return bounds


GOALS: dict[int, tuple[str, Goal]] = {
    1: ("of roundrobin's TTFT", partial(against, CONV, "roundrobin", 0.30, 0.20)),
    2: (
        "of smg's tree's TTFT",
        both(
            partial(against, CONV, "smg-tree", 0.55, 0.45),
            partial(against, TOOL, "smg-tree", 0.40, 0.35),
        ),
    ),
    3: (
        "of llm-d's TTFT",
        both(partial(against, CONV, "llm-d", 0.75, 0.75), partial(against, TOOL, "llm-d", 0.88, 0.85)),
    ),
    4: (
        "of Dynamo's TTFT",
        both(partial(against, CONV, "dynamo", 0.65, 0.85), partial(against, TOOL, "dynamo", 0.70, 0.72)),
    ),
    5: (
        "of the TTFT of Mooncake's conductor",
        both(partial(mean_against, CONV, "conductor", 0.97), partial(mean_against, TOOL, "conductor", 0.85)),
    ),
    6: ("no collapse; of production-stack's prefixaware", no_collapse),
    7: (
        "of the TTFT of one infinite shared cache",
        both(partial(mean_against, CONV, SHARED, 1.6), partial(mean_against, TOOL, SHARED, 1.25)),
    ),
    8: ("capacity at p90 <= 5 s", both(partial(capacity, CONV, 1.45), partial(capacity, TOOL, 1.15))),
    9: (
        "8K chats, 32 clients a worker, against roundrobin with the GPU's cache only",
        partial(against_roundrobin, Case("chat8k", 32, ""), (-80, -50, 30, -23)),
    ),
    10: (
        "64K chats, 4 clients a worker, against roundrobin with the GPU's cache only",
        partial(against_roundrobin, Case("chat64k", 4, ""), (-95, -42, 50, -33)),
    ),
    11: ("100 sessions in turn, 650K tokens a worker, of session routing", second_tier),
    12: ("robustness, mean TTFT", both(partial(robust, CONV, 1.35), partial(robust, TOOL, 1.8))),
    13: ("of llm-d's inter-token latency", both(partial(itl, CONV), partial(itl, TOOL))),
    14: ("no goal: prefetching while queued, of the TTFT without", prefetching),
}

OWN_LIMITS: dict[tuple[int, str], dict[str, float]] = {
    (7, "kvaware"): {"conv mean": 1.5, "tool mean": 1.14},
}
"""By goal and subject: stricter limits than the goal's, by the name of the figure."""

REGRESSION_BOUNDS: dict[tuple[int, str], dict[str, float]] = {}
"""By goal and subject: limits that replace missed goals, by the name of the figure. Each is the figure of
seeds 0 to 2 times 1.03, or divided by 1.03 if more is better."""


def judged_for(number: int, figures_of: FiguresOf, subject: str) -> list[Bound]:
    """The figures of a goal for `subject`, each with its limit and with the figure of `SHARED`."""
    goal = GOALS[number][1]
    bounds, ideal = goal(figures_of, subject), {bound.name: bound.value for bound in goal(figures_of, SHARED)}
    own, regression = OWN_LIMITS.get((number, subject), {}), REGRESSION_BOUNDS.get((number, subject), {})
    judged = []
    for bound in bounds:
        if bound.name in own:
            bound = bound.with_limit(own[bound.name], is_regression=False)
        if bound.name in regression:
            bound = bound.with_limit(regression[bound.name], is_regression=True)
        judged.append(replace(bound, ideal=ideal.get(bound.name)))
    return judged
