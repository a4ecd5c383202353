"""The goals of the gateway benchmark, and their verdicts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

OURS, THEIRS, DIRECT = "kvroute", "sglang-router", "direct"
COMPLETE, SESSION, ROLES, KV_PREFIX, KV_AWARE = (
    "kvroute complete path",
    "kvroute session",
    "kvroute, two legs",
    "kvroute, event workers",
    "kvroute kvaware, event workers",
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one scenario through one router. The runs of one `repeat` followed one another directly.

    `foreign_cores` is the CPU that processes outside the benchmark used during the run.
    """

    router: str
    scenario: str
    repeat: int
    figures: dict[str, float]
    errors: int = 0
    foreign_cores: float = 0.0


class Results:
    """Measurements by router and scenario. Runs with errors are kept but not counted."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self.measurements = list(measurements)

    def values(self, router: str, scenario: str, figure: str) -> dict[int, float]:
        """The values of a figure by repeat."""
        return {
            one.repeat: one.figures[figure]
            for one in self.measurements
            if (one.router, one.scenario, one.errors) == (router, scenario, 0) and figure in one.figures
        }

    def median(self, router: str, scenario: str, figure: str) -> float | None:
        return median(self.values(router, scenario, figure).values())

    def least(self, router: str, scenario: str, figure: str) -> float | None:
        return min(self.values(router, scenario, figure).values(), default=None)

    def ratio(self, router: str, other: str, scenario: str, figure: str) -> float | None:
        """Median of the ratios of runs that followed one another directly."""
        ours, theirs = (self.values(name, scenario, figure) for name in (router, other))
        return median(ours[repeat] / theirs[repeat] for repeat in ours if theirs.get(repeat))

    def added_ratio(self, router: str, other: str, scenario: str, figure: str) -> float | None:
        """Median of the ratios of the differences between each router and no router."""
        ours, theirs, none = (self.values(name, scenario, figure) for name in (router, other, DIRECT))
        return median(
            (ours[repeat] - none[repeat]) / (theirs[repeat] - none[repeat])
            for repeat in ours
            if repeat in theirs and repeat in none and theirs[repeat] > none[repeat]
        )


def median(values: Iterable[float]) -> float | None:
    """The median; None without values."""
    found = list(values)
    return statistics.median(found) if found else None


Read = Callable[[Results], float | None]


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal. `goal` is the upper bound of the value that `read` returns, or with `is_least` the lower
    bound."""

    name: str
    read: Read
    goal: float
    stretch: float
    unit: str = "x"
    is_least: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a goal. `value` is None if it was not measured."""

    name: str
    value: float | None
    goal: float
    stretch: float
    unit: str
    is_least: bool
    verdict: str


def _ratio(router: str, other: str, scenario: str, figure: str) -> Read:
    return lambda results: results.ratio(router, other, scenario, figure)


def _median(router: str, scenario: str, figure: str, scale: float = 1.0) -> Read:
    def read(results: Results) -> float | None:
        found = results.median(router, scenario, figure)
        return None if found is None else found * scale

    return read


def _first_byte_over_direct(results: Results) -> float | None:
    ours, direct = (results.least(router, "l", "first_byte_p99_us") for router in (OURS, DIRECT))
    return None if ours is None or direct is None else (ours - direct) / 1000


def _rows() -> list[Goal]:
    rows = [
        Goal(f"{scenario}: CPU per request", _ratio(OURS, THEIRS, scenario, "cpu_us_request"), goal, stretch)
        for scenario, goal, stretch in (("a", 0.73, 0.58), ("b", 0.60, 0.47), ("c", 0.52, 0.41))
    ]
    rows += [
        Goal(f"{scenario}: CPU per chunk", _ratio(OURS, THEIRS, scenario, "cpu_us_chunk"), goal, stretch)
        for scenario, goal, stretch in (("d", 0.95, 0.8), ("e", 1.15, 0.9), ("f", 1.15, 0.95))
    ]
    rows.append(
        Goal(
            "added p50, one connection, a",
            lambda results: results.added_ratio(OURS, THEIRS, "l", "a_p50_us"),
            0.85,
            0.7,
        )
    )
    rows.append(Goal("first byte p99 over direct", _first_byte_over_direct, 1.0, 0.5, "ms"))
    rows += [
        Goal(
            f"{scenario}: requests/s on one core",
            _ratio(OURS, THEIRS, scenario, "requests_s"),
            goal,
            stretch,
            is_least=True,
        )
        for scenario, goal, stretch in (("a", 1.3, 1.7), ("b", 1.5, 2.0), ("c", 1.9, 2.4))
    ]
    rows.append(Goal("RSS in a", _median(OURS, "a", "peak_rss_mib"), 80, 60, "MiB"))
    rows += [
        Goal(
            f"{scenario}: fast lane off", _ratio(COMPLETE, THEIRS, scenario, "cpu_us_request"), goal, stretch
        )
        for scenario, goal, stretch in (("a", 1.3, 0.85), ("b", 1.0, 0.7), ("c", 0.65, 0.55))
    ]
    rows.append(
        Goal("64K-token turn, exact tokens", _median(KV_AWARE, "t", "cpu_us_request", 1e-3), 2.0, 1.2, "ms")
    )
    rows += [
        Goal(f"{scenario}: two legs / one", _ratio(ROLES, OURS, scenario, "cpu_us_request"), 1.8, 1.8)
        for scenario in ("a", "c")
    ]
    for scenario in ("a", "b"):
        kv = f"k{scenario}"
        rows += [
            Goal(
                f"{scenario}: kvaware / prefixaware",
                _ratio(KV_AWARE, KV_PREFIX, kv, "untokenized_us_request"),
                1.5,
                1.5,
            ),
            Goal(
                f"{scenario}: session / prefixaware",
                _ratio(SESSION, OURS, scenario, "cpu_us_request"),
                1.5,
                1.5,
            ),
        ]
    return rows


GOALS: Sequence[Goal] = tuple(_rows())


def judge(results: Results, goals: Sequence[Goal] = GOALS) -> list[Verdict]:
    verdicts = []
    for goal in goals:
        value = goal.read(results)
        verdicts.append(
            Verdict(
                goal.name, value, goal.goal, goal.stretch, goal.unit, goal.is_least, _verdict(value, goal)
            )
        )
    return verdicts


def _verdict(value: float | None, goal: Goal) -> str:
    if value is None:
        return "not measured"
    sign = -1 if goal.is_least else 1
    if sign * value > sign * goal.goal:
        return "MISSED"
    return "stretch" if sign * value <= sign * goal.stretch and goal.stretch != goal.goal else "met"
