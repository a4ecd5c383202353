"""Statistics of paired measurements: the ratio of two versions with its 95% confidence interval. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FEWEST_PAIRS = 4
"""With fewer pairs the t interval is too wide for a verdict."""

# Student's t, two-sided 95%, by degrees of freedom from 1 to 30.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL_975 = 1.959964


def t_975(freedom: int) -> float:
    """The 0.975 quantile of Student's t distribution, to 0.001."""
    if freedom < 1:
        raise ValueError("a t quantile needs at least one degree of freedom")
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    # Cornish-Fisher expansion about the normal quantile: its error is below 0.0001 above 30.
    z = NORMAL_975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure of both checkouts, measured one after another. `this` is the checkout under test."""

    this: float
    other: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """`this` over `other`: geometric mean of the pairs' ratios with its 95% t interval (of the logarithms).

    With one pair the interval is unbounded.
    """

    pairs: int
    this_median: float
    other_median: float
    ratio: float
    low: float
    high: float

    def is_above(self, limit: float) -> bool:
        """Whether the whole interval is above `limit`."""
        return self.low > limit

    def is_below(self, limit: float) -> bool:
        return self.high < limit


def ratio_of(pairs: Sequence[Pair]) -> Ratio:
    """The ratio of the pairs. Raises ValueError without a pair, or if a figure is not positive."""
    if not pairs or any(min(pair.this, pair.other) <= 0 for pair in pairs):
        raise ValueError("a ratio needs pairs of positive figures")
    logs = [math.log(pair.this / pair.other) for pair in pairs]
    mean = statistics.fmean(logs)
    half = math.inf
    if len(logs) > 1:
        half = t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(
        pairs=len(pairs),
        this_median=statistics.median(pair.this for pair in pairs),
        other_median=statistics.median(pair.other for pair in pairs),
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one scenario or script. Only figures with `is_judged` count for the verdict."""

    scenario: str
    figure: str
    ratio: Ratio
    is_judged: bool

    def verdict(self, limit: float) -> str:
        if not self.is_judged:
            return ""
        if self.ratio.pairs < FEWEST_PAIRS:
            return "too few pairs"
        if self.ratio.is_above(limit):
            return f"ABOVE {limit:g}"
        return f"not above {limit:g}" if self.ratio.is_below(limit) else "undecided"


def passes(compared: Iterable[Compared], limit: float) -> bool:
    """Whether a figure was judged, every judged figure has enough pairs, and no interval is wholly above
    `limit`."""
    judged = [one for one in compared if one.is_judged]
    return bool(judged) and all(
        one.ratio.pairs >= FEWEST_PAIRS and not one.ratio.is_above(limit) for one in judged
    )


def lines(compared: Sequence[Compared], limit: float) -> list[str]:
    """The lines of the table to print, and the line with the verdict."""
    width = max((len(f"{one.scenario} {one.figure}") for one in compared), default=6)
    found = [f"{'figure':{width}}{'pairs':>7}{'this':>11}{'other':>11}{'ratio':>8}   95% interval"]
    for one in compared:
        ratio = one.ratio
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}" if math.isfinite(ratio.high) else "unbounded"
        row = (
            f"{f'{one.scenario} {one.figure}':{width}}{ratio.pairs:>7}{ratio.this_median:>11.4g}"
            f"{ratio.other_median:>11.4g}{ratio.ratio:>8.3f}   {interval:16} {one.verdict(limit)}"
        )
        found.append(row.rstrip())
    judged = [one for one in compared if one.is_judged]
    above = [f"{one.scenario} {one.figure}" for one in judged if one.ratio.is_above(limit)]
    few = sorted({one.scenario for one in judged if one.ratio.pairs < FEWEST_PAIRS})
    if not judged:
        found.append("verdict: nothing was measured")
    elif few:
        found.append(f"verdict: fewer than {FEWEST_PAIRS} good pairs in {', '.join(few)}")
    elif above:
        found.append(f"verdict: intervals wholly above {limit:g}: {', '.join(above)}")
    else:
        found.append(f"verdict: no ratio whose interval lies wholly above {limit:g}")
    return found


def flatten(document: Any, prefix: str = "") -> dict[str, float]:
    """The numbers of a script's JSON by their paths. The strings in a list's row name the row."""
    if isinstance(document, bool):
        return {}
    if isinstance(document, int | float):
        return {prefix: float(document)}
    found: dict[str, float] = {}
    if isinstance(document, Mapping):
        for name, value in document.items():
            found |= flatten(value, f"{prefix}, {name}" if prefix else str(name))
    elif isinstance(document, list):
        for number, row in enumerate(document):
            found |= flatten(row, f"{prefix}, {_row_name(row, number)}" if prefix else _row_name(row, number))
    return found


def _row_name(row: Any, number: int) -> str:
    words = [value for value in row.values() if isinstance(value, str)] if isinstance(row, Mapping) else []
    return " ".join([*words, str(number)])


def as_costs(figures: Mapping[str, float]) -> dict[str, float]:
    """Convert rates (`.../s`) to microseconds per item, so that less is better in every figure. Zeros are
    dropped."""
    found = {}
    for name, value in figures.items():
        if value > 0:
            if name.endswith("/s"):
                found[f"{name.removesuffix('/s')}, us each"] = 1e6 / value
            else:
                found[name] = value
    return found
