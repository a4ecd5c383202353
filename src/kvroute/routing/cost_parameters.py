"""The parameters of the cost model: as configured, in seconds, and as learned from first tokens.

Learning is pure: callers pass the times, and nothing here reads a clock. Only prefills that say something are
counted: of streamed answers, sent to a worker with an empty queue, with nothing fetched from slower tiers.
Prefills that waited are batched with others, so a busy worker would look fast and attract more work.
"""

from __future__ import annotations

from typing import NamedTuple

from kvroute.options import Options, option

LEAST_PREFILLS = 50
LEAST_SPAN = 8.0
"""The largest prefill must be this many times the smallest: a slope needs two ends."""

LEAST_EXPLAINED = 0.5
"""Share of the variance of first-token times that missed tokens must explain. An answer time that does not
depend on them would teach a cost of nothing per token, and conversations would leave their cache."""

MEMORY = 0.998
"""Weight that a prefill keeps with each later one: some 500 count."""

REFIT_EVERY = 10

LARGE_TOKENS = 2048
"""Prefills from here on tell a worker's speed; smaller ones are lost among what else an iteration does."""

LEAST_LARGE = 8
SPEED_MEMORY = 0.98
SPEED_LIMITS = (0.25, 4.0)

_SCALES = (1e3, 1e8, 1.0)


class CostOptions(Options):
    """What a model's work costs on one worker. The defaults are meant to be too high for most models: work
    that is taken for cheaper than it is leaves its cache too easily, which costs more than the opposite."""

    token_us: float = option(
        160.0,
        "Prefill time of one token.",
        unit="us",
        higher="keeps conversations where their cache is",
        lower="spreads requests sooner",
        gt=0,
    )
    context_token_ns: float = option(
        3.0,
        "Prefill time of one token per token of context before it (attention).",
        unit="ns",
        higher="long prompts count for more",
        lower="long prompts count like many short ones",
        ge=0,
    )
    iteration_ms: float = option(
        20.0,
        "Fixed time of one engine iteration; a prefill takes at least one.",
        unit="ms",
        higher="counts requests rather than tokens",
        lower="counts tokens rather than requests",
        ge=0,
    )
    max_batched_tokens: int = option(
        8192,
        "Tokens that the engine computes in one iteration (vLLM's --max-num-batched-tokens).",
        unit="tokens",
        higher="fewer iterations in a long prefill",
        lower="more iterations in a long prefill",
        ge=1,
    )
    lambda_cap: float = option(
        64.0,
        "Most seconds of other requests' delay that one second of own work is charged.",
        higher="more affinity near saturation",
        lower="more spreading near saturation; 0 looks at the request's own wait only",
        ge=0,
    )
    memory_limit: float = option(
        0.95,
        "Share of a worker's KV capacity that running requests may fill before sending more costs extra.",
        higher="packs workers tighter, at the risk of preemption",
        lower="spreads memory sooner",
        gt=0,
    )
    eviction_weight: float = option(
        1.0,
        "How much of the time to recompute the tracked blocks that a request pushes out it is charged.",
        higher="protects what a full worker holds",
        lower="0 lets any request push out anything",
        ge=0,
    )
    active_share: float = option(
        0.03,
        "What each prompt token of the requests in flight costs, as a share of `token_us`: about what "
        "reading it in every iteration adds to an answer. A prefix in use is computed again elsewhere "
        "once its worker has about 1 / `active_share` more requests of its size in flight.",
        higher="evens out running requests, copies hot prefixes sooner",
        lower="looks at the time to first token only; 0.001 merely breaks ties",
        ge=0,
    )
    balance_weight: float = option(
        8.0,
        "Seconds charged per second of own work, for each unit by which the worker's utilisation by prefill "
        "is above the fleet's mean: what a conversation begins on a worker, it goes on with there.",
        higher="new conversations leave a common prefix sooner for a worker that has done less",
        lower="0: a common prefix is followed as long as its holder looks idle",
        ge=0,
    )
    tie_share: float = option(
        0.02,
        "Scores within this share of the best, plus `tie_ms`, are equal: fewest active tokens goes first, "
        "then least prefill done lately.",
        higher="evens out load where costs differ little",
        lower="follows small differences in cost",
        ge=0,
    )
    tie_ms: float = option(
        1.0,
        "See `tie_share`.",
        unit="ms",
        higher="evens out load where costs differ little",
        lower="follows small differences in cost",
        ge=0,
    )


class Costs(NamedTuple):
    """`CostOptions` in seconds and tokens."""

    token_s: float
    context_token_s: float
    iteration_s: float
    max_batched_tokens: int
    lambda_cap: float
    memory_limit: float
    eviction_weight: float
    active_token_s: float
    balance_weight: float
    tie_share: float
    tie_s: float

    @classmethod
    def of(cls, options: CostOptions) -> Costs:
        return cls(
            options.token_us * 1e-6,
            options.context_token_ns * 1e-9,
            options.iteration_ms * 1e-3,
            options.max_batched_tokens,
            options.lambda_cap,
            options.memory_limit,
            options.eviction_weight,
            options.active_share * options.token_us * 1e-6,
            options.balance_weight,
            options.tie_share,
            options.tie_ms * 1e-3,
        )

    def prefill_s(self, miss: int, held: int, prompts: int = 1) -> float:
        """Seconds to compute `miss` tokens after `held` ones, both summed over `prompts` equal prompts."""
        chunks = max(1, -(-miss // self.max_batched_tokens))
        context = (held + miss / 2) / prompts
        return miss * (self.token_s + self.context_token_s * context) + self.iteration_s * chunks


class Fit(NamedTuple):
    """Learned costs in seconds: per missed token, per missed token and context token, per iteration."""

    token_s: float
    context_token_s: float
    iteration_s: float

    def prefill_s(self, miss: int, context: float, chunks: int) -> float:
        return miss * (self.token_s + self.context_token_s * context) + self.iteration_s * chunks


class PrefillFit:
    """Least squares over prefills, recent ones first, of one model on one fleet. Mutable: by `saw`.

    Each prefill is weighed by the inverse of its estimate, so that errors count between absolute and
    relative. Coefficients never fall below zero: the one that would is left out.
    """

    def __init__(self) -> None:
        self.fit: Fit | None = None
        """None until enough is known, and again when missed tokens stop explaining the times."""
        self._prefills = 0
        self._least = float("inf")
        self._most = 0.0
        self._products = (0.0,) * 9
        """Decayed sums of each column times each, row by row."""
        self._targets = (0.0,) * 3
        # Decayed sums for the variance that is explained: 1, x, y, xx, xy, yy.
        self._moments = (0.0,) * 6

    def saw(self, miss: int, context: float, chunks: int, took_s: float, estimated_s: float) -> None:
        """A prefill of `miss` tokens, with `context` tokens before each on average, took `took_s`."""
        # Spelled out: loops over three columns cost more than the arithmetic in them, and this runs for every
        # streamed request that finds its worker idle.
        x, y, z = miss / _SCALES[0], miss * context / _SCALES[1], chunks / _SCALES[2]
        weight = 1.0 / (estimated_s if estimated_s > 1e-3 else 1e-3)
        wx, wy, wz = weight * x, weight * y, weight * z
        xx, xy, xz, yx, yy, yz, zx, zy, zz = self._products
        self._products = (
            MEMORY * xx + wx * x,
            MEMORY * xy + wx * y,
            MEMORY * xz + wx * z,
            MEMORY * yx + wy * x,
            MEMORY * yy + wy * y,
            MEMORY * yz + wy * z,
            MEMORY * zx + wz * x,
            MEMORY * zy + wz * y,
            MEMORY * zz + wz * z,
        )
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
        found = self._coefficients([0, 1, 2])
        token_s, context_token_s, iteration_s = (found.get(i, 0.0) / _SCALES[i] for i in range(3))
        return Fit(token_s, context_token_s, iteration_s) if token_s > 0 else None

    def _coefficients(self, used: list[int]) -> dict[int, float]:
        """Per column, none below zero; columns that would be, or that repeat others, are left out."""
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
    """How long prefills take on each worker beside the fleet's mean. Mutable: by `saw` and `forget`."""

    def __init__(self) -> None:
        self._prefills: dict[int, int] = {}
        self._took: dict[int, float] = {}
        self._estimated: dict[int, float] = {}
        self.factors: dict[int, float] = {}
        """Of the workers that are known: above 1 for a slow one."""

    def saw(self, worker: int, miss: int, took_s: float, estimated_s: float) -> None:
        """`estimated_s` is for a worker of the fleet's mean speed."""
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
        # Half the way from the fleet's mean: what a worker just happened to do is not believed in full.
        self.factors = {
            index: 0.5 + 0.5 * min(high, max(low, ratio / mean)) for index, ratio in ratios.items()
        }

    def of(self, worker: int) -> float:
        """Above 1 for a slow worker; 1 while nothing is known."""
        return self.factors.get(worker, 1.0)

    def forget(self, worker: int) -> None:
        self._prefills.pop(worker, None)
        for figures in (self._took, self._estimated, self.factors):
            figures.pop(worker, None)


class Lessons:
    """Of one model. Mutable: by `Learned`."""

    __slots__ = ("prefills", "speeds")

    def __init__(self) -> None:
        self.prefills = PrefillFit()
        self.speeds = Speeds()


class Learned:
    """What first tokens have taught: costs per model, speeds per model and worker."""

    def __init__(self) -> None:
        self.lessons: dict[str, Lessons] = {}
        """By model, of those that have been heard of."""

    def fit(self, model: str) -> Fit | None:
        known = self.lessons.get(model)
        return known.prefills.fit if known else None

    def speeds(self, model: str) -> Speeds | None:
        known = self.lessons.get(model)
        return known.speeds if known else None

    def saw(
        self,
        model: str,
        worker: int,
        miss: int,
        context: float,
        chunks: int,
        took_s: float,
        configured_s: float,
    ) -> None:
        """A prefill that stood alone took `took_s`; by the configured costs it should take `configured_s`."""
        known = self.lessons.get(model)
        if known is None:
            known = self.lessons[model] = Lessons()
        # Speeds are told by the learned costs only: a worker whose times were mixed with those of wrong
        # ones would look faster than the rest and draw their work.
        fit = known.prefills.fit
        if fit is not None:
            known.speeds.saw(worker, miss, took_s, fit.prefill_s(miss, context, chunks))
        known.prefills.saw(miss, context, chunks, took_s, configured_s)
        if fit is not None and known.prefills.fit is None:
            known.speeds = Speeds()

    def forget(self, worker: int) -> None:
        """The worker left, or its index stands for another one now."""
        for known in self.lessons.values():
            known.speeds.forget(worker)


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting; None where the rows say the same."""
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
