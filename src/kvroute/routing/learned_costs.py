"""Learns the costs of prefills, and each worker's speed, from first tokens.

Pure: callers pass all times. Only prefills of streamed answers count that were sent to a worker with an empty
queue and loaded nothing from slower tiers.
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

LEAST_PREFILLS = 50
"""A fit needs this number of prefills."""
LEAST_SPAN = 8.0
"""A fit needs a largest prefill of this number of times the smallest."""
LEAST_EXPLAINED = 0.5
"""A fit needs missed tokens to explain this share of the variance of first-token times."""
MEMORY = 0.998
"""Each prefill multiplies the weight of all earlier ones by this factor, so about 500 prefills count."""
REFIT_EVERY = 10
LARGE_TOKENS = 2048
"""Only prefills of at least this size count for a worker's speed; in smaller ones other work dominates."""
LEAST_LARGE = 8
SPEED_MEMORY = 0.98
SPEED_LIMITS = (0.25, 4.0)
_SCALES = (1e3, 1e8, 1.0)


class Fit(NamedTuple):
    """Learned costs in seconds: per missed token; per missed token and context token; per iteration."""

    token_s: float
    context_token_s: float
    iteration_s: float

    def prefill_s(self, miss: int, context: float, chunks: int) -> float:
        """Seconds to compute `miss` tokens in `chunks` iterations, each after `context` tokens on average."""
        return miss * (self.token_s + self.context_token_s * context) + self.iteration_s * chunks


_Three = tuple[float, float, float]
_Six = tuple[float, float, float, float, float, float]
_Nine = tuple[float, float, float, float, float, float, float, float, float]


class PrefillSums(NamedTuple):
    """The whole state of a `PrefillFit`."""

    prefills: int
    least: float
    most: float
    products: _Nine
    targets: _Three
    moments: _Six


class PrefillFit:
    """Least squares over the prefills of one model; recent prefills weigh more. Mutable: `record` changes it.

    Each prefill is weighted by the inverse of its estimate, a compromise between absolute and relative
    errors. Coefficients are never negative: a column whose coefficient would be negative is dropped.
    """

    def __init__(self) -> None:
        self.fit: Fit | None = None
        """None before the first fit, and while missed tokens do not explain the times."""
        self._prefills = 0
        self._least = float("inf")
        self._most = 0.0
        self._products = (0.0,) * 9
        """Decayed sums of the products of all pairs of columns, row by row."""
        self._targets = (0.0,) * 3
        # Decayed sums for the explained variance: 1, x, y, xx, xy, yy.
        self._moments = (0.0,) * 6

    def record(self, miss: int, context: float, chunks: int, took_s: float, estimated_s: float) -> None:
        """Add a prefill of `miss` tokens that took `took_s`; `context`: mean number of preceding tokens."""
        # Unrolled: loops over three columns cost more than their arithmetic, and this runs for every streamed
        # request to an idle worker.
        x, y, z = miss / _SCALES[0], miss * context / _SCALES[1], chunks / _SCALES[2]
        weight = 1.0 / (estimated_s if estimated_s > 1e-3 else 1e-3)
        wx, wy, wz = weight * x, weight * y, weight * z
        xx, xy, xz, _, yy, yz, _, _, zz = self._products
        xy, xz, yz = MEMORY * xy + wx * y, MEMORY * xz + wx * z, MEMORY * yz + wy * z
        xx, yy, zz = MEMORY * xx + wx * x, MEMORY * yy + wy * y, MEMORY * zz + wz * z
        self._products = xx, xy, xz, xy, yy, yz, xz, yz, zz
        tx, ty, tz = self._targets
        self._targets = MEMORY * tx + wx * took_s, MEMORY * ty + wy * took_s, MEMORY * tz + wz * took_s
        n, sx, st, sxx, sxt, stt = self._moments
        self._moments = (
            MEMORY * n + 1.0,
            MEMORY * sx + x,
            MEMORY * st + took_s,
            MEMORY * sxx + x * x,
            MEMORY * sxt + x * took_s,
            MEMORY * stt + took_s * took_s,
        )
        self._prefills += 1
        if miss < self._least:
            self._least = miss if miss > 1 else 1
        if miss > self._most:
            self._most = miss
        if self._prefills % REFIT_EVERY == 0 and self._prefills >= LEAST_PREFILLS:
            self.fit = self._refit()

    def sums(self) -> PrefillSums:
        """The state, for a fit in another process."""
        return PrefillSums(
            self._prefills, self._least, self._most, self._products, self._targets, self._moments
        )

    def restore(self, sums: PrefillSums) -> bool:
        """Go on from the state of another process if it has seen more prefills. False if it has not."""
        figures = (sums.least, sums.most, *sums.products, *sums.targets, *sums.moments)
        if sums.prefills <= self._prefills or not all(map(isfinite, figures)):
            return False
        self._prefills, self._least, self._most = sums.prefills, sums.least, sums.most
        self._products, self._targets, self._moments = sums.products, sums.targets, sums.moments
        self.fit = self._refit() if self._prefills >= LEAST_PREFILLS else None
        return True

    @property
    def explained(self) -> float:
        """Share of the variance of first-token times that missed tokens explain, 0 to 1."""
        n, x, y, xx, xy, yy = self._moments
        if not n:
            return 0.0
        spread_x, spread_y = xx - x * x / n, yy - y * y / n
        if spread_x <= 1e-12 or spread_y <= 1e-12:
            return 0.0
        joint = xy - x * y / n
        return joint * joint / (spread_x * spread_y) if joint > 0 else 0.0

    def _refit(self) -> Fit | None:
        if self._most < LEAST_SPAN * self._least or self.explained < LEAST_EXPLAINED:
            return None
        coefficients = self._coefficients([0, 1, 2])
        token_s, context_token_s, iteration_s = (coefficients.get(i, 0.0) / _SCALES[i] for i in range(3))
        return Fit(token_s, context_token_s, iteration_s) if token_s > 0 else None

    def _coefficients(self, used: list[int]) -> dict[int, float]:
        """Coefficients by column, without negative ones and without linearly dependent columns."""
        while used:
            values = _solve(
                [[self._products[3 * i + j] for j in used] for i in used], [self._targets[i] for i in used]
            )
            if values is None:
                used = used[:-1]
                continue
            lowest = min(range(len(used)), key=values.__getitem__)
            if values[lowest] >= 0:
                return dict(zip(used, values, strict=True))
            used = used[:lowest] + used[lowest + 1 :]
        return {}


class Speeds:
    """The speed of each worker relative to the fleet's mean. Mutable: `record` and `forget` change it."""

    def __init__(self) -> None:
        self._prefills: dict[int, int] = {}
        self._took: dict[int, float] = {}
        self._estimated: dict[int, float] = {}
        self.factors: dict[int, float] = {}
        """Worker's index -> duration of a prefill relative to the mean; above 1 for a slow worker."""

    def record(self, worker: int, miss: int, took_s: float, estimated_s: float) -> None:
        """Add a prefill; `estimated_s` is its duration on a worker with the fleet's mean speed."""
        if miss < LARGE_TOKENS or estimated_s <= 0:
            return
        self._prefills[worker] = self._prefills.get(worker, 0) + 1
        self._took[worker] = SPEED_MEMORY * self._took.get(worker, 0.0) + took_s
        self._estimated[worker] = SPEED_MEMORY * self._estimated.get(worker, 0.0) + estimated_s
        ratios = {
            index: self._took[index] / self._estimated[index]
            for index, prefills in self._prefills.items()
            if prefills >= LEAST_LARGE
        }
        if not ratios:
            return
        mean = sum(ratios.values()) / len(ratios)
        low, high = SPEED_LIMITS
        # Only half of the distance from the mean counts, because part of a measured difference is chance.
        self.factors = {
            index: 0.5 + 0.5 * min(high, max(low, ratio / mean)) for index, ratio in ratios.items()
        }

    def sums(self) -> dict[int, tuple[int, float, float]]:
        """Worker's index -> number, duration and estimate of its prefills, for another process."""
        return {
            worker: (prefills, self._took[worker], self._estimated[worker])
            for worker, prefills in self._prefills.items()
        }

    def restore(self, worker: int, prefills: int, took_s: float, estimated_s: float) -> None:
        """Take over another process's sums of a worker. They count from the worker's next prefill on."""
        if isfinite(took_s) and isfinite(estimated_s) and estimated_s > 0:
            self._prefills[worker] = prefills
            self._took[worker], self._estimated[worker] = took_s, estimated_s

    def of(self, worker: int) -> float:
        """The worker's factor; 1 while it is unknown."""
        return self.factors.get(worker, 1.0)

    def forget(self, worker: int) -> None:
        self._prefills.pop(worker, None)
        for figures in (self._took, self._estimated, self.factors):
            figures.pop(worker, None)


class LearnedModel:
    """The learned figures of one model. Mutable: `Learned` changes them."""

    __slots__ = ("prefills", "speeds")

    def __init__(self) -> None:
        self.prefills = PrefillFit()
        self.speeds = Speeds()


class Learned:
    """The figures learned from first tokens: costs per model, speeds per model and worker."""

    def __init__(self) -> None:
        self.models: dict[str, LearnedModel] = {}

    def fit(self, model: str) -> Fit | None:
        """The learned prefill times of a model; None until there are enough."""
        learned = self.models.get(model)
        return learned.prefills.fit if learned else None

    def speeds(self, model: str) -> Speeds | None:
        """How fast each worker is with a model, relative to its mean; None if the model is not known."""
        learned = self.models.get(model)
        return learned.speeds if learned else None

    def record(
        self,
        model: str,
        worker: int,
        miss: int,
        context: float,
        chunks: int,
        took_s: float,
        configured_s: float,
    ) -> None:
        """Add a prefill that took `took_s` on an idle worker; the configured costs give `configured_s`."""
        learned = self.models.get(model)
        if learned is None:
            learned = self.models[model] = LearnedModel()
        # Speeds are relative to the learned costs only. Measured against wrong costs, one worker would look
        # faster than the others and attract their work.
        fit = learned.prefills.fit
        if fit is not None:
            learned.speeds.record(worker, miss, took_s, fit.prefill_s(miss, context, chunks))
        learned.prefills.record(miss, context, chunks, took_s, configured_s)
        if fit is not None and learned.prefills.fit is None:
            learned.speeds = Speeds()

    def forget(self, worker: int) -> None:
        """Drop the speed of a worker that has left; another worker may get its index."""
        for learned in self.models.values():
            learned.speeds.forget(worker)


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting; None if the rows are linearly dependent."""
    size = len(target)
    rows = [[*matrix[i], target[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) <= 1e-12 * max(1.0, abs(matrix[column][column])):
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(size):
            if i != column:
                factor = rows[i][column] / rows[column][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
