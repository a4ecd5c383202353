"""What fetching blocks from slower tiers takes, in seconds, with the fetches already under way."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvroute.blocks.keys import Tier
from kvroute.index.in_flight import InFlight
from kvroute.options import Options, option
from kvroute.routing.cost import TierLoad
from kvroute.routing.strategy import CacheMap, Tokens

_GIGA: Final = 1e9
_CONFIGURED_LOADS: Final = 8
"""Measured loads that weigh as much as the configured bandwidth."""
_REMEMBERED_LOADS: Final = 64


class TransferOptions(Options):
    """How fast KV blocks come from slower tiers. As bandwidth counts what a request really gets: the
    default of L2 is Redis over a 25 Gbit/s network. What a worker's LMCache server has measured takes their
    place (`lmcache.coordinator.rates_interval_s`)."""

    token_bytes: int = option(
        131_072,
        "KV cache of one token over all GPUs of a worker: 2 x layers x KV heads x head size x bytes of a "
        "number (Llama-3.1-8B: 131,072; 70B: 327,680).",
        unit="bytes",
        higher="blocks in slower tiers are worth less",
        lower="they are worth more",
        ge=1,
    )
    l1_gb_s: float = option(
        20.0,
        "Bandwidth from a worker's CPU memory to its GPU.",
        unit="GB/s",
        higher="L1 is followed more readily",
        lower="L1 counts for less",
        gt=0,
    )
    l2_gb_s: float = option(
        2.0,
        "Bandwidth from the shared store to one worker.",
        unit="GB/s",
        higher="L2 is followed more readily",
        lower="L2 counts for less",
        gt=0,
    )
    l2_store_gb_s: float = option(
        8.0,
        "Bandwidth of the shared store to all workers together.",
        unit="GB/s",
        higher="many fetches at once cost little",
        lower="fetches queue at the store",
        gt=0,
    )
    l2_latency_ms: float = option(
        2.0,
        "Time before the first block comes from the shared store.",
        unit="ms",
        higher="short hits in L2 count for less",
        lower="short hits in L2 count for more",
        ge=0,
    )


class _Link:
    """What a token takes from one tier to one worker, in seconds. Mutable: `learn`."""

    __slots__ = ("token_s", "weight")

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s
        self.weight = _CONFIGURED_LOADS

    def learn(self, token_s: float, loads: int) -> None:
        self.weight = min(self.weight + loads, _REMEMBERED_LOADS)
        self.token_s += (token_s - self.token_s) * min(1.0, loads / self.weight)


class _Links:
    """One tier's, to all workers. A worker that nothing is known of is taken to be as the others are, else
    one that was measured to be slow would lose to any that was never tried. Mutable: `learn`, `adopt`,
    `forget`."""

    __slots__ = ("_by_slot", "_configured_s", "_usual_s")

    def __init__(self, configured_s: float) -> None:
        self._configured_s = self._usual_s = configured_s
        self._by_slot: dict[int, _Link] = {}

    def token_s(self, slot: int) -> float:
        link = self._by_slot.get(slot)
        return self._usual_s if link is None else link.token_s

    def learn(self, slot: int, token_s: float, loads: int) -> None:
        link = self._by_slot.get(slot)
        if link is None:
            link = self._by_slot[slot] = _Link(self._usual_s)
        link.learn(token_s, loads)
        self._survey()

    def adopt(self, slot: int, token_s: float) -> None:
        self._by_slot[slot] = _Link(token_s)
        self._survey()

    def forget(self, slot: int) -> None:
        if self._by_slot.pop(slot, None) is not None:
            self._survey()

    def _survey(self) -> None:
        known = [link.token_s for link in self._by_slot.values()]
        self._usual_s = sum(known) / len(known) if known else self._configured_s


class Transfers:
    """Links as queues: one per worker and slower tier, one for the shared store.

    Mutable: `start` makes links busy, `learn` changes how fast they are. Times are `Clock.now()` seconds.
    """

    def __init__(self, options: TransferOptions | None = None) -> None:
        options = options or TransferOptions()
        self._token_bytes = options.token_bytes
        self._l1 = _Links(options.token_bytes / (options.l1_gb_s * _GIGA))
        self._l2 = _Links(options.token_bytes / (options.l2_gb_s * _GIGA))
        self._store_token_s = options.token_bytes / (options.l2_store_gb_s * _GIGA)
        self._latency_s = options.l2_latency_ms * 1e-3
        self._l1_busy: dict[int, float] = {}
        self._l2_busy: dict[int, float] = {}
        self._store_busy = 0.0

    def learn(self, slot: int, tier: Tier, gb_s: float, loads: int) -> None:
        """`loads` loads from this tier to `slot` had a mean of `gb_s` GB/s, waiting at the store included;
        those from L2 as LMCache counts them, into L1, from where it loads them as any others.
        What was expected before counts as eight loads; the last 64 decide."""
        if tier is Tier.GPU or gb_s <= 0 or loads <= 0:
            return
        token_s = self._token_bytes / (gb_s * _GIGA)
        if tier is Tier.L1:
            self._l1.learn(slot, token_s, loads)
        else:
            self._l2.learn(slot, token_s + self._l1.token_s(slot), loads)

    def adopt(self, slot: int, tier: Tier, gb_s: float) -> None:
        """Reckon with this bandwidth, which was learnt elsewhere."""
        (self._l1 if tier is Tier.L1 else self._l2).adopt(slot, self._token_bytes / (gb_s * _GIGA))

    def gb_s(self, slot: int, tier: Tier) -> float:
        """The bandwidth that is reckoned with, from a slower tier to `slot`."""
        return self._token_bytes / (self._token_s(slot, tier) * _GIGA)

    def _token_s(self, slot: int, tier: Tier) -> float:
        """To the GPU: what comes from L2 passes through L1."""
        l1_s = self._l1.token_s(slot)
        return l1_s if tier is Tier.L1 else max(l1_s, self._l2.token_s(slot))

    def load(self, slot: int, tokens: Tokens, now: float) -> TierLoad:
        """What fetching the slower tiers' part of `tokens` to `slot` takes from now on."""
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
        """A request that fetches was sent to `slot`."""
        if tokens.l1:
            l1_s = tokens.l1 * self._token_s(slot, Tier.L1)
            self._l1_busy[slot] = max(now, self._l1_busy.get(slot, 0.0)) + l1_s
        if tokens.l2:
            l2_s = tokens.l2 * self._token_s(slot, Tier.L2)
            self._l2_busy[slot] = max(now, self._l2_busy.get(slot, 0.0)) + l2_s
            self._store_busy = max(now, self._store_busy) + tokens.l2 * self._store_token_s

    def forget(self, slot: int) -> None:
        for busy in (self._l1_busy, self._l2_busy):
            busy.pop(slot, None)
        for links in (self._l1, self._l2):
            links.forget(slot)


class CacheViews(NamedTuple):
    """What a strategy may read of the workers' caches.

    `caches` is empty (`NoMap`) unless a configured strategy needs `TOKENS`. `in_flight` has the exact
    prompts of unfinished requests by slot: the worker holds their blocks, or will hold them before the next
    request runs, whether or not it has announced them yet.
    """

    caches: CacheMap
    in_flight: InFlight
    transfers: Transfers
