"""Engines with slower cache tiers in virtual time: a CPU tier per worker (L1), one store for all (L2).

As LMCache works: what has been computed is written through to both tiers; a prompt's lookup goes on
where the GPU's own hit ends, first in L1, then in L2; what is found is always fetched, from the moment
the request's turn has come, or from its arrival with `prefetch`. Stores and fetches take no GPU time. A
fetch occupies the worker's L1 or L2 link, one after another, and those from L2 the store's own bandwidth.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.engine import EngineRequest, Phase, Progress, SimEngine
from kvroute.sim.fleet import Fleet, FleetRequest
from kvroute.sim.timing import TimingModel
from kvroute.wire.events import KvEvent


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Sizes in tokens, bandwidths in bytes per second; 0 tokens is a tier that is not there.

    The defaults stand for Llama-3.1-70B (320 KiB of KV cache a token) with 400 GB of CPU memory a
    worker and a 4 TB store.
    """

    l1_tokens: int = 1_200_000
    l1_bytes_s: float = 64e9
    l2_tokens: int = 12_000_000
    l2_worker_bytes_s: float = 10e9
    l2_bytes_s: float = 50e9
    l2_latency_s: float = 2e-3
    token_bytes: int = 327_680
    prefetch: bool = False


GPU_ONLY = TierOptions(l1_tokens=0, l2_tokens=0)


@dataclass(slots=True, eq=False)
class LruTier:
    """Keys, least recently used first, ends of prompts before their beginnings. Mutable."""

    capacity: int
    _held: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def run(self, keys: Sequence[int], start: int, stop: int) -> int:
        """Where the keys held from `start` on without a hole end, `stop` at most."""
        held = self._held
        while start < stop and keys[start] in held:
            start += 1
        return start

    def put(self, keys: Sequence[int]) -> None:
        held = self._held
        if not self.capacity:
            return
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self.capacity:
            held.popitem(last=False)


@dataclass(slots=True)
class Link:
    """Something that carries one transfer after another. Mutable: `busy_until_s`."""

    bytes_s: float
    busy_until_s: float = 0.0

    def carry(self, size: float, now: float) -> float:
        """When a transfer that is asked for now is through."""
        self.busy_until_s = max(now, self.busy_until_s) + size / self.bytes_s
        return self.busy_until_s


@dataclass(slots=True, eq=False)
class SharedStore:
    """L2: one for all workers."""

    tier: LruTier
    link: Link
    latency_s: float


@dataclass(slots=True, eq=False)
class _Staged(EngineRequest):
    """`staged_from` to `staged_to` are the blocks that slower tiers bring."""

    order: int = 0
    is_fetched: bool = False
    staged_from: int = 0
    staged_to: int = 0


@dataclass(slots=True, eq=False)
class TieredEngine(SimEngine):
    """An engine whose requests join the queue once their blocks from slower tiers have come."""

    l1: LruTier = field(default_factory=lambda: LruTier(0))
    l1_link: Link = field(default_factory=lambda: Link(float("inf")))
    l2_link: Link = field(default_factory=lambda: Link(float("inf")))
    store: SharedStore = field(
        default_factory=lambda: SharedStore(LruTier(0), Link(float("inf")), latency_s=0.0)
    )
    token_bytes: int = 0
    prefetch: bool = False
    loaded_tokens: int = 0
    """Prompt tokens that came from slower tiers."""
    _staging: list[tuple[float, int, _Staged]] = field(default_factory=list)
    _order: int = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._staging)

    @property
    def next_ready_s(self) -> float | None:
        """When the next fetch is through; None when none is under way."""
        return self._staging[0][0] if self._staging else None

    def arrive(self, request: FleetRequest, now: float) -> None:
        """Queue a request; with `prefetch` its blocks in slower tiers set out at once."""
        self._order += 1
        staged = _Staged(
            Chain(request.keys),
            request.prompt_tokens,
            request.output_tokens,
            owner=request,
            order=self._order,
        )
        if not (self.prefetch and self._fetch(staged, now)):
            self._waiting.append(staged)

    def begin_at(self, now: float) -> float | None:
        """`begin` at a moment: what has been fetched by then may run, in order of arrival."""
        staging, waiting = self._staging, self._waiting
        while staging and staging[0][0] <= now:
            staged = heapq.heappop(staging)[2]
            place = len(waiting)
            while place and _staged(waiting[place - 1]).order > staged.order:
                place -= 1
            waiting.insert(place, staged)
        if waiting and not self.prefetch:
            self._fetch_next(now)
        return self.begin()

    def _fetch_next(self, now: float) -> None:
        """Start fetching for those whose turn has come: the batch would have room for them."""
        budget = self.timing.max_batched_tokens - len(self._decoding)
        for running in self._prefilling:
            budget -= running.prompt_tokens - running.computed
        fetching = []
        for request in self._waiting:
            if budget <= 0:
                break
            staged = _staged(request)
            if not staged.is_fetched and self._fetch(staged, now):
                fetching.append(staged)
            else:
                budget -= staged.prompt_tokens - self.cache.block_size * staged.staged_to
        for staged in fetching:
            self._waiting.remove(staged)

    def _fetch(self, staged: _Staged, now: float) -> bool:
        """Look the prompt up in all tiers; whether it has to wait for blocks from the slower ones."""
        staged.is_fetched = True
        keys, size = staged.chain.keys, self.cache.block_size
        limit = min(len(keys), (staged.prompt_tokens - 1) // size)
        start = self.cache.match(keys, limit)
        middle = self.l1.run(keys, start, limit)
        stop = self.store.tier.run(keys, middle, limit)
        ready = now
        if middle > start:
            ready = self.l1_link.carry((middle - start) * size * self.token_bytes, now)
        if stop > middle:
            fetched = (stop - middle) * size * self.token_bytes
            through = max(self.l2_link.carry(fetched, now), self.store.link.carry(fetched, now))
            ready = max(ready, through + self.store.latency_s)
            self.store.tier.put(keys[:stop])
        staged.staged_from, staged.staged_to = start, stop
        if stop > start:
            self.l1.put(keys[:stop])
        if ready <= now:
            return False
        heapq.heappush(self._staging, (ready, staged.order, staged))
        return True

    def finish(self) -> Progress:
        progress = SimEngine.finish(self)
        size = self.cache.block_size
        for item in progress.first:
            self._write(item.chain.keys[: item.prompt_tokens // size])
        for item in progress.finished:
            self._write(item.chain.keys[: (item.prompt_tokens + item.output_tokens - 1) // size])
        return progress

    def _write(self, keys: Sequence[int]) -> None:
        self.l1.put(keys)
        self.store.tier.put(keys)

    def _admit(self, request: EngineRequest) -> bool:
        if not SimEngine._admit(self, request):
            return False
        staged = _staged(request)
        start, stop, size = request.stored_blocks, staged.staged_to, self.cache.block_size
        # What was on the GPU at arrival may have been evicted since: then the rest is of no use.
        if request.phase is Phase.PREFILL and staged.staged_from <= start < stop:
            self._grow(request, stop * size)
            self.cache.store(request.blocks, request.chain, start, stop)
            request.stored_blocks = stop
            request.computed = request.cached_tokens = stop * size
            loaded = (stop - start) * size
            self.loaded_tokens += loaded
            self.counters.computed_tokens -= loaded
        return True


def _staged(request: EngineRequest) -> _Staged:
    assert isinstance(request, _Staged)
    return request


@dataclass(slots=True, eq=False)
class TieredFleet(Fleet):
    """A fleet of `TieredEngine`s. Events reach the placement `event_delay_s` after the fact."""

    event_delay_s: float = 0.0
    _news: list[tuple[float, int, list[KvEvent]]] = field(default_factory=list)

    def _arrive(self, request: FleetRequest) -> None:
        self._tell()
        request.worker = worker = self.placement.place(request, self.now)
        engine = self._tiered(worker)
        engine.arrive(request, self.now)
        if not self._busy[worker]:
            self._begin(worker)

    def _begin(self, worker: int) -> None:
        engine = self._tiered(worker)
        duration = engine.begin_at(self.now)
        self._busy[worker] = duration is not None
        if duration is not None:
            self._push(self.now + duration, worker)
        elif (ready_s := engine.next_ready_s) is not None:
            self._push(ready_s, ~worker)

    def _advance(self, worker: int) -> None:
        if worker < 0:  # woken by a fetch; it may have got other work in the meantime
            if not self._busy[~worker]:
                self._begin(~worker)
            return
        if self.event_delay_s:
            self._keep_news(worker)
        Fleet._advance(self, worker)

    def _keep_news(self, worker: int) -> None:
        events = self.engines[worker].cache.take_events()
        if events:
            self._news.append((self.now + self.event_delay_s, worker, events))

    def _tell(self) -> None:
        """Pass on what is old enough. A placement looks at it in `place` only."""
        news = self._news
        told = 0
        for due, worker, events in news:
            if due > self.now:
                break
            self.placement.events(worker, events, self.now)
            told += 1
        del news[:told]

    def _tiered(self, worker: int) -> TieredEngine:
        engine = self.engines[worker]
        assert isinstance(engine, TieredEngine)
        return engine


def make_tiered_engines(
    count: int,
    *,
    capacity_tokens: int = 1_200_000,
    block_size: int = 512,
    timing: Sequence[TimingModel] | TimingModel | None = None,
    tiers: TierOptions | None = None,
    record_events: bool = False,
) -> list[TieredEngine]:
    """`count` engines with empty caches and a store in common; `timing` one for all or one for each."""
    tiers = tiers or TierOptions()
    if timing is None or isinstance(timing, TimingModel):
        timing = [timing or TimingModel()] * count
    store = SharedStore(LruTier(tiers.l2_tokens // block_size), Link(tiers.l2_bytes_s), tiers.l2_latency_s)
    return [
        TieredEngine(
            PagedCache(capacity_tokens // block_size, block_size, record=record_events),
            timing[number],
            l1=LruTier(tiers.l1_tokens // block_size),
            l1_link=Link(tiers.l1_bytes_s),
            l2_link=Link(tiers.l2_worker_bytes_s),
            store=store,
            token_bytes=tiers.token_bytes,
            prefetch=tiers.prefetch,
        )
        for number in range(count)
    ]
