"""Engines with slower cache tiers in virtual time: a CPU tier per worker (L1), one store for all (L2).

As LMCache works (0.5.6, multiprocess mode, and its connector in vLLM, lmcache_mp_connector.py):

- After each iteration the prompt's blocks that are full by then set out for L1 and from there for L2
  (`GetStoreMetadata`, `wait_for_save`). Generated tokens do not, unless `stores_answers` (`lmcache.mp.
  save_decode_cache`, off by default); they do as part of the next turn's prompt.
- A prompt's lookup goes on where the GPU's own hit ends. What is found is always fetched, from the moment
  the request's turn has come: vLLM asks `get_num_new_matched_tokens` then.
- Stores and fetches take no GPU time, but a fetch occupies the worker's link from L1 or L2, one after
  another, and those from L2 the store's own bandwidth; likewise stores in the other direction.
- Who follows LMCache's events hears of changes when the server reports them, every `report_s`.

`Filling.ENDED` replaces the first of these by a simpler model that real servers do not follow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.engine import EngineRequest, Progress, RequestPhase, SimEngine
from kvroute.sim.fleet import FleetRequest, SimFleet
from kvroute.sim.options import TimingModel
from kvroute.sim.tier_memory import Link, LruTier, SharedStore, TierChange, TierReports, WorkerTiers
from kvroute.wire.vllm import KvEvent


class Filling(Enum):
    """When slower tiers take in what a request leaves."""

    COMPUTED = "computed"
    """Its prompt, block by block as it is computed, over links that take time: LMCache 0.5.6."""
    ENDED = "ended"
    """Prompt and answer, all at once and in no time, when the request ends. No LMCache does this. It is for
    comparison with models that do: requests that run at the same time find nothing of each other's."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Sizes in tokens, bandwidths in bytes per second and direction; 0 tokens is a tier that is not there.

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
    filling: Filling = Filling.COMPUTED
    stores_answers: bool = False
    """With `Filling.COMPUTED`; the other one always does."""
    keeps_loaded: bool = False
    """What was loaded from L2 stays in L1 (`--l2-prefetch-policy retain`; LMCache's default drops it)."""
    report_s: float = 1.0


GPU_ONLY = TierOptions(l1_tokens=0, l2_tokens=0)


@dataclass(slots=True, eq=False)
class _Staged(EngineRequest):
    """`staged_from` to `staged_to` are the blocks that slower tiers bring; those before `written` are in
    them, or on their way."""

    order: int = 0
    is_fetched: bool = False
    staged_from: int = 0
    staged_to: int = 0
    written: int = 0


@dataclass(slots=True, eq=False)
class TieredEngine(SimEngine):
    """An engine whose requests join the queue once their blocks from slower tiers have come."""

    tiers: WorkerTiers = field(kw_only=True)
    options: TierOptions = field(default_factory=TierOptions)
    loaded_tokens: int = 0
    """Prompt tokens that came from slower tiers."""
    _staging: list[tuple[float, int, _Staged]] = field(default_factory=list)
    _order: int = 0
    _ends_s: float = 0.0
    """When the iteration under way ends."""

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._staging)

    @property
    def next_ready_s(self) -> float | None:
        """When the next fetch is through; None when none is under way."""
        return self._staging[0][0] if self._staging else None

    def arrive(self, request: FleetRequest) -> None:
        """Queue a request."""
        self._order += 1
        self._waiting.append(
            _Staged(
                Chain(request.keys),
                request.prompt_tokens,
                request.output_tokens,
                owner=request,
                order=self._order,
            )
        )

    def begin_at(self, now: float) -> float | None:
        """`begin` at a moment: what has been fetched by then may run, in order of arrival."""
        staging, waiting = self._staging, self._waiting
        while staging and staging[0][0] <= now:
            staged = heapq.heappop(staging)[2]
            place = len(waiting)
            while place and _staged(waiting[place - 1]).order > staged.order:
                place -= 1
            waiting.insert(place, staged)
        if waiting:
            self._fetch_next(now)
        duration = self.begin()
        self._ends_s = now + (duration or 0.0)
        return duration

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
        tiers = self.tiers
        tiers.store.settle(now)
        start = self.cache.match(keys, limit)
        near, far = tiers.found(keys, start, limit)
        ready = tiers.load(keys, start, near, far, now)
        staged.staged_from, staged.staged_to = start, start + near + far
        # What LMCache's own lookup found, which starts at the prompt's beginning, is not stored again.
        staged.written = sum(tiers.found(keys, 0, limit))
        if ready <= now:
            return False
        heapq.heappush(self._staging, (ready, staged.order, staged))
        return True

    def finish(self) -> Progress:
        prefilling = list(self._prefilling)
        progress = SimEngine.finish(self)
        if self.options.filling is Filling.ENDED:
            for item in progress.finished:
                full = (item.prompt_tokens + max(0, item.output_tokens - 1)) // self.cache.block_size
                self.tiers.put(item.chain.keys[:full], self._ends_s)
            return progress
        for item in prefilling:
            self._write(item, min(item.computed, item.prompt_tokens))
        if self.options.stores_answers:
            for item in progress.finished:
                self._write(item, item.prompt_tokens + item.output_tokens - 1)
        return progress

    def _write(self, request: EngineRequest, tokens: int) -> None:
        staged, full = _staged(request), tokens // self.cache.block_size
        if full > staged.written:
            self.tiers.write(request.chain.keys[staged.written : full], self._ends_s)
            staged.written = full

    def _admit(self, request: EngineRequest) -> bool:
        if not SimEngine._admit(self, request):
            return False
        staged = _staged(request)
        start, stop, size = request.stored_blocks, staged.staged_to, self.cache.block_size
        # What was on the GPU at arrival may have been evicted since: then the rest is of no use.
        if request.phase is RequestPhase.PREFILL and staged.staged_from <= start < stop:
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
class TieredFleet(SimFleet):
    """A fleet of `TieredEngine`s. Events reach the placement `event_delay_s` after the fact, what LMCache
    tells of its tiers reaches `on_tiers` that much after it was reported."""

    event_delay_s: float = 0.0
    on_tiers: Callable[[int, TierChange, float], None] | None = None
    """(worker, change, now); called before a request is placed."""
    _news: list[tuple[float, int, list[KvEvent]]] = field(default_factory=list)
    _reports: list[tuple[float, int, int, TierChange]] = field(default_factory=list)
    _reported: int = 0

    def __post_init__(self) -> None:
        SimFleet.__post_init__(self)
        if self.on_tiers is not None:
            for worker in range(len(self.engines)):
                engine = self._tiered(worker)
                engine.tiers.told = partial(self._report, worker, TierReports(engine.options.report_s))

    def _report(self, worker: int, reports: TierReports, change: TierChange, at: float) -> None:
        self._reported += 1
        due = reports.told_at(at) + self.event_delay_s
        heapq.heappush(self._reports, (due, self._reported, worker, change))

    def _arrive(self, request: FleetRequest) -> None:
        self._tell()
        request.worker = worker = self.placement.place(request, self.now)
        engine = self._tiered(worker)
        engine.arrive(request)
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
        SimFleet._advance(self, worker)

    def _keep_news(self, worker: int) -> None:
        events = self.engines[worker].cache.take_events()
        if events:
            self._news.append((self.now + self.event_delay_s, worker, events))

    def _tell(self) -> None:
        """Pass on what is old enough. A placement looks at it in `place` only."""
        self._tiered(0).tiers.store.settle(self.now)
        news = self._news
        told = 0
        for due, worker, events in news:
            if due > self.now:
                break
            self.placement.events(worker, events, self.now)
            told += 1
        del news[:told]
        reports = self._reports
        while reports and reports[0][0] <= self.now:
            _, _, worker, change = heapq.heappop(reports)
            assert self.on_tiers is not None
            self.on_tiers(worker, change, self.now)

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
    store = SharedStore(
        LruTier(tiers.l2_tokens // block_size),
        Link(tiers.l2_bytes_s),
        tiers.l2_latency_s,
        Link(tiers.l2_bytes_s),
    )
    return [
        TieredEngine(
            PagedCache(capacity_tokens // block_size, block_size, record=record_events),
            timing[number],
            tiers=WorkerTiers(
                LruTier(tiers.l1_tokens // block_size),
                store,
                block_size * tiers.token_bytes,
                from_l1=Link(tiers.l1_bytes_s),
                in_l1=Link(tiers.l1_bytes_s),
                from_store=Link(tiers.l2_worker_bytes_s),
                in_store=Link(tiers.l2_worker_bytes_s),
                keeps_loaded=tiers.keeps_loaded,
            ),
            options=tiers,
        )
        for number in range(count)
    ]
