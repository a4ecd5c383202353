"""What an LMCache server's `/metrics` says about how fast it loads (LMCache 0.5.6)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Final

_SAMPLE: Final = re.compile(
    r"^lmcache_mp_(l0_l1|l2)_load_throughput\w*_(sum|count)(?:\{[^\n]*\})? (\S+)$", re.MULTILINE
)
"""Histograms `lmcache_mp.l0_l1_load_throughput` and `lmcache_mp.l2_load_throughput`; the exporter puts the
unit behind the name."""
_TIERS: Final = {"l0_l1": "l1", "l2": "l2"}


@dataclass(frozen=True, slots=True)
class LoadRates:
    """Since the server's start, by tier (`l1`, `l2`): how many loads there were from it, and the sum of their
    rates in GB/s."""

    loads: dict[str, int] = field(default_factory=dict)
    gb_s: dict[str, float] = field(default_factory=dict)

    def since(self, before: LoadRates) -> dict[str, tuple[float, int]]:
        """By tier: the mean rate in GB/s of the loads since, and their number; empty if the server was
        restarted in between."""
        fresh: dict[str, tuple[float, int]] = {}
        for tier, loads in self.loads.items():
            count = loads - before.loads.get(tier, 0)
            total = self.gb_s.get(tier, 0.0) - before.gb_s.get(tier, 0.0)
            if count < 0:
                return {}
            if count and total > 0:
                fresh[tier] = total / count, count
        return fresh


def read_load_rates(page: str) -> LoadRates:
    """The rates on a page in Prometheus' text format, of all GPUs and adapters together; what is not a number
    is passed over. 0.3 ms for a page of 40 KB."""
    loads: dict[str, int] = {}
    gb_s: dict[str, float] = {}
    for name, kind, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if not math.isfinite(value) or value < 0:
            continue
        tier = _TIERS[name]
        if kind == "count":
            loads[tier] = loads.get(tier, 0) + int(value)
        else:
            gb_s[tier] = gb_s.get(tier, 0.0) + value
    return LoadRates(loads, gb_s)
