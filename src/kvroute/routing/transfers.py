"""Estimates the time to load blocks from slower tiers, with the loads that are already running."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from kvroute.blocks.keys import Tier
from kvroute.index.in_flight import InFlight
from kvroute.options import Options, option
from kvroute.routing.cost import TierLoad
from kvroute.routing.reports import Reports
from kvroute.routing.strategy import CacheMap, Tokens

_GIGA: Final = 1e9
_CONFIGURED_LOADS: Final = 8
"""The configured bandwidth has the weight of this number of measured loads."""
_REMEMBERED_LOADS: Final = 64
"""Largest weight of the previous measurements."""


class TransferOptions(Options):
    """Bandwidths of the slower tiers, as one request gets them.

    The default of L2 is Redis over a 25 Gbit/s network. The measurements of a worker's LMCache server replace
    these values (`lmcache.coordinator.rates_interval_s`).
    """

    token_bytes: int = option(
        131_072,
        "Size of one token's KV over all GPUs of a worker: 2 x layers x KV heads x head size x bytes per "
        "value (Llama-3.1-8B: 131,072; 70B: 327,680).",
        unit="bytes",
        higher="blocks in slower tiers are worth less",
        lower="blocks in slower tiers are worth more",
        ge=1,
    )
    l1_gb_s: float = option(
        20.0,
        "Bandwidth from a worker's CPU memory to its GPU.",
        unit="GB/s",
        higher="blocks in L1 are worth more",
        lower="blocks in L1 are worth less",
        gt=0,
    )
    l2_gb_s: float = option(
        2.0,
        "Bandwidth from the shared store to one worker.",
        unit="GB/s",
        higher="blocks in L2 are worth more",
        lower="blocks in L2 are worth less",
        gt=0,
    )
    l2_store_gb_s: float = option(
        8.0,
        "Bandwidth of the shared store to all workers together.",
        unit="GB/s",
        higher="many simultaneous loads cost little",
        lower="simultaneous loads wait for each other",
        gt=0,
    )
    l2_latency_ms: float = option(
        2.0,
        "Time until the first block arrives from the shared store.",
        unit="ms",
        higher="short hits in L2 are worth less",
        lower="short hits in L2 are worth more",
        ge=0,
    )


class _Link:
    """Seconds per token from one tier to one worker. Mutable: `learn` changes it."""

    __slots__ = ("token_s", "weight")

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s
        self.weight = _CONFIGURED_LOADS

    def learn(self, token_s: float, loads: int) -> None:
        self.weight = min(self.weight + loads, _REMEMBERED_LOADS)
        self.token_s += (token_s - self.token_s) * min(1.0, loads / self.weight)


class Links:
    """The links from one tier to all workers. Mutable: `learn`, `set` and `forget` change them."""

    # A link without measurements has the mean of the measured ones. With the configured bandwidth instead, a
    # worker that was measured as slow would lose to every worker without measurements.

    __slots__ = ("_by_slot", "_configured_s", "_mean_s")

    def __init__(self, configured_s: float) -> None:
        self._configured_s = self._mean_s = configured_s
        self._by_slot: dict[int, _Link] = {}

    def token_s(self, slot: int) -> float:
        """Seconds to transfer one token to a slot; the mean of all slots if none was measured there."""
        link = self._by_slot.get(slot)
        return self._mean_s if link is None else link.token_s

    def learn(self, slot: int, token_s: float, loads: int) -> None:
        """Add a measured mean of `loads` transfers."""
        link = self._by_slot.get(slot)
        if link is None:
            link = self._by_slot[slot] = _Link(self._mean_s)
        link.learn(token_s, loads)
        self._update_mean()

    def set(self, slot: int, token_s: float) -> None:
        """Replace the time of a slot."""
        self._by_slot[slot] = _Link(token_s)
        self._update_mean()

    def forget(self, slot: int) -> None:
        if self._by_slot.pop(slot, None) is not None:
            self._update_mean()

    def _update_mean(self) -> None:
        measured = [link.token_s for link in self._by_slot.values()]
        self._mean_s = sum(measured) / len(measured) if measured else self._configured_s


class Transfers:
    """Transfers from slower tiers as queues: one per worker and tier, and one for the shared store.

    Mutable: `start` adds a load to the queues; `learn` and `set_rate` change the speeds. Times are
    `Clock.now()` seconds.
    """

    def __init__(self, options: TransferOptions | None = None) -> None:
        options = options or TransferOptions()
        self._token_bytes = options.token_bytes
        self._l1 = Links(options.token_bytes / (options.l1_gb_s * _GIGA))
        self._l2 = Links(options.token_bytes / (options.l2_gb_s * _GIGA))
        self._store_token_s = options.token_bytes / (options.l2_store_gb_s * _GIGA)
        self._latency_s = options.l2_latency_ms * 1e-3
        self._l1_busy: dict[int, float] = {}
        self._l2_busy: dict[int, float] = {}
        self._store_busy = 0.0

    def learn(self, slot: int, tier: Tier, gb_s: float, loads: int) -> None:
        """Learn the mean bandwidth of `loads` loads from this tier to `slot`, waits at the store included.

        For L2, `gb_s` is the bandwidth into L1, as LMCache measures it. The configured bandwidth has the
        weight of 8 loads; about the last 64 loads count.
        """
        if tier is Tier.GPU or gb_s <= 0 or loads <= 0:
            return
        token_s = self._token_bytes / (gb_s * _GIGA)
        if tier is Tier.L1:
            self._l1.learn(slot, token_s, loads)
        else:
            self._l2.learn(slot, token_s + self._l1.token_s(slot), loads)

    def set_rate(self, slot: int, tier: Tier, gb_s: float) -> None:
        """Set the bandwidth in GB/s that a peer has learned."""
        (self._l1 if tier is Tier.L1 else self._l2).set(slot, self._token_bytes / (gb_s * _GIGA))

    def gb_s(self, slot: int, tier: Tier) -> float:
        """The assumed bandwidth in GB/s from a slower tier to `slot`."""
        return self._token_bytes / (self._token_s(slot, tier) * _GIGA)

    def _token_s(self, slot: int, tier: Tier) -> float:
        """Seconds per token to the GPU. Blocks from L2 pass through L1."""
        l1_s = self._l1.token_s(slot)
        return l1_s if tier is Tier.L1 else max(l1_s, self._l2.token_s(slot))

    def load(self, slot: int, tokens: Tokens, now: float) -> TierLoad:
        """The time to load the part of `tokens` in slower tiers to `slot`, from `now` on."""
        if not tokens.l1 and not tokens.l2:
            return TierLoad()
        ready_s = own_s = 0.0
        if tokens.l1:
            own_s = tokens.l1 * self._token_s(slot, Tier.L1)
            ready_s = max(0.0, self._l1_busy.get(slot, 0.0) - now) + own_s
        if tokens.l2:
            l2_s = tokens.l2 * self._token_s(slot, Tier.L2)
            busy = max(self._l2_busy.get(slot, 0.0), self._store_busy)
            ready_s = max(ready_s, max(0.0, busy - now) + l2_s + self._latency_s)
            own_s += l2_s
        return TierLoad(ready_s, own_s)

    def start(self, slot: int, tokens: Tokens, now: float) -> None:
        """Account a request that was sent to `slot` and loads `tokens` from slower tiers."""
        if tokens.l1:
            l1_s = tokens.l1 * self._token_s(slot, Tier.L1)
            self._l1_busy[slot] = max(now, self._l1_busy.get(slot, 0.0)) + l1_s
        if tokens.l2:
            l2_s = tokens.l2 * self._token_s(slot, Tier.L2)
            self._l2_busy[slot] = max(now, self._l2_busy.get(slot, 0.0)) + l2_s
            self._store_busy = max(now, self._store_busy) + tokens.l2 * self._store_token_s

    def excerpt(self, slots: Iterable[int]) -> Transfers:
        """A copy with the queues and speeds of `slots`: `load` returns the same for them."""
        copy = Transfers()
        copy._token_bytes, copy._store_token_s = self._token_bytes, self._store_token_s
        copy._latency_s, copy._store_busy = self._latency_s, self._store_busy
        for slot in slots:
            copy._l1.set(slot, self._l1.token_s(slot))
            copy._l2.set(slot, self._l2.token_s(slot))
            copy._l1_busy[slot] = self._l1_busy.get(slot, 0.0)
            copy._l2_busy[slot] = self._l2_busy.get(slot, 0.0)
        return copy

    def forget(self, slot: int) -> None:
        for busy in (self._l1_busy, self._l2_busy):
            busy.pop(slot, None)
        for links in (self._l1, self._l2):
            links.forget(slot)


class CacheViews(NamedTuple):
    """The views of the workers' caches that a strategy may read."""

    caches: CacheMap
    """`NoMap` unless a configured strategy needs `TOKENS`."""
    in_flight: InFlight
    """Exact prompts of unfinished requests by slot. The worker has their blocks, or will have them before the
    next request runs, even if it has not published events for them yet."""
    transfers: Transfers
    reports: Reports | None = None
    """What answers have taught; None: nothing."""
