"""Engines with slower cache tiers in virtual time: L1 (CPU memory of a worker) and L2 (one store for all).

The rules are those of LMCache (0.5.6, multiprocess mode) and its connector in vLLM (lmcache_mp_connector.py):

- After each iteration the prompt's full blocks are written to L1 and from there to L2 (`GetStoreMetadata`,
  `wait_for_save`). Blocks of generated tokens are written only with `stores_answers`
  (`lmcache.mp.save_decode_cache`, off by default), or later as part of the next turn's prompt.
- The lookup of a prompt starts where the hit in the GPU's cache ends. All blocks found are fetched once the
  batch has room for the request: then vLLM calls `get_num_new_matched_tokens`.
- Writes and fetches take no GPU time. Fetches occupy the worker's link from L1 or L2 one after another, and
  fetches from L2 also the store's own bandwidth. Writes do the same in the other direction.
- A subscriber of LMCache's events gets the changes when the server reports them, every `report_s`.

`Filling.ENDED` replaces the first rule by a simpler one that real servers do not follow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from kvroute.sim.cache import Chain, PagedCache, TierReports
from kvroute.sim.cache_tiers import Link, LruTier, SharedStore, TierChange, WorkerTiers
from kvroute.sim.engine import EngineRequest, Progress, RequestPhase, SimEngine
from kvroute.sim.fleet import FleetRequest, SimFleet
from kvroute.sim.timing import TimingModel
from kvroute.wire.vllm import KvEvent


class Filling(Enum):
    """When a request's blocks are written to the slower tiers."""

    COMPUTED = "computed"
    """After each iteration the prompt's blocks that it computed, over links that take time: LMCache 0.5.6."""
    ENDED = "ended"
    """All blocks of prompt and answer when the request ends, in no time. LMCache does not work like this. It
    is for comparison with other simulations, in which concurrent requests find no blocks of each other."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Sizes in tokens (0: no such tier) and bandwidths in bytes per second for each direction.

    Defaults: Llama-3.1-70B (320 KiB of KV cache per token), 400 GB of CPU memory per worker, a store of 4 TB.
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
    """Write blocks of answers too. Only for `Filling.COMPUTED`: `Filling.ENDED` always writes them."""
    keeps_loaded: bool = False
    """Blocks loaded from L2 stay in L1 (`--l2-prefetch-policy retain`; LMCache drops them by default)."""
    report_s: float = 1.0
    """Shortest time between two reports of a server's changes."""


GPU_ONLY = TierOptions(l1_tokens=0, l2_tokens=0)


@dataclass(slots=True, eq=False)
class _TieredRequest(EngineRequest):
    """A request and its blocks in slower tiers. Mutable: changed by the `TieredEngine`.

    Blocks `fetched_from` to `fetched_to` are fetched from slower tiers. Blocks before `written` are in these
    tiers or being written to them.
    """

    order: int = 0
    is_fetched: bool = False
    fetched_from: int = 0
    fetched_to: int = 0
    written: int = 0


@dataclass(slots=True, eq=False)
class TieredEngine(SimEngine):
    """An engine that fetches a request's blocks from slower tiers before the request can run."""

    tiers: WorkerTiers = field(kw_only=True)
    options: TierOptions = field(default_factory=TierOptions)
    loaded_tokens: int = 0
    """Prompt tokens that were loaded from slower tiers."""
    _fetches: list[tuple[float, int, _TieredRequest]] = field(default_factory=list)
    _order: int = 0
    _ends_s: float = 0.0
    """When the current iteration ends."""

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._fetches)

    @property
    def next_ready_s(self) -> float | None:
        """When the next fetch ends; None if no fetch is running."""
        return self._fetches[0][0] if self._fetches else None

    def add_request(self, request: FleetRequest) -> None:
        """Queue a request."""
        self._order += 1
        self._waiting.append(
            _TieredRequest(
                Chain(request.keys),
                request.prompt_tokens,
                request.output_tokens,
                owner=request,
                order=self._order,
            )
        )

    def begin_at(self, now: float) -> float | None:
        """`begin` at time `now`. Requests whose fetches have ended may run, in order of arrival."""
        fetches, waiting = self._fetches, self._waiting
        while fetches and fetches[0][0] <= now:
            tiered = heapq.heappop(fetches)[2]
            position = len(waiting)
            while position and _as_tiered(waiting[position - 1]).order > tiered.order:
                position -= 1
            waiting.insert(position, tiered)
        if waiting:
            self._fetch_next(now)
        duration = self.begin()
        self._ends_s = now + (duration or 0.0)
        return duration

    def _fetch_next(self, now: float) -> None:
        """Start fetches for the requests that the batch has room for."""
        budget = self.timing.max_batched_tokens - len(self._decoding)
        for running in self._prefilling:
            budget -= running.prompt_tokens - running.computed
        fetching = []
        for request in self._waiting:
            if budget <= 0:
                break
            tiered = _as_tiered(request)
            if not tiered.is_fetched and self._fetch(tiered, now):
                fetching.append(tiered)
            else:
                budget -= tiered.prompt_tokens - self.cache.block_size * tiered.fetched_to
        for tiered in fetching:
            self._waiting.remove(tiered)

    def _fetch(self, tiered: _TieredRequest, now: float) -> bool:
        """Look the prompt up in all tiers and start the fetch. True if the request must wait for it."""
        tiered.is_fetched = True
        keys, size = tiered.chain.keys, self.cache.block_size
        limit = min(len(keys), (tiered.prompt_tokens - 1) // size)
        tiers = self.tiers
        tiers.store.apply_due(now)
        start = self.cache.match(keys, limit)
        l1_blocks, l2_blocks = tiers.lookup(keys, start, limit)
        ready = tiers.load(keys, start, l1_blocks, l2_blocks, now)
        tiered.fetched_from, tiered.fetched_to = start, start + l1_blocks + l2_blocks
        # LMCache's own lookup starts at the prompt's beginning. The blocks that it finds are not written
        # again.
        tiered.written = sum(tiers.lookup(keys, 0, limit))
        if ready <= now:
            return False
        heapq.heappush(self._fetches, (ready, tiered.order, tiered))
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
        tiered, full = _as_tiered(request), tokens // self.cache.block_size
        if full > tiered.written:
            self.tiers.write(request.chain.keys[tiered.written : full], self._ends_s)
            tiered.written = full

    def _admit(self, request: EngineRequest) -> bool:
        if not SimEngine._admit(self, request):
            return False
        tiered = _as_tiered(request)
        start, stop, size = request.stored_blocks, tiered.fetched_to, self.cache.block_size
        # The GPU may have evicted blocks since the lookup. Then the fetched blocks do not follow the hit and
        # are of no use.
        if request.phase is RequestPhase.PREFILL and tiered.fetched_from <= start < stop:
            self._allocate_up_to(request, stop * size)
            self.cache.store(request.blocks, request.chain, start, stop)
            request.stored_blocks = stop
            request.computed = request.cached_tokens = stop * size
            loaded = (stop - start) * size
            self.loaded_tokens += loaded
            self.counters.computed_tokens -= loaded
        return True


def _as_tiered(request: EngineRequest) -> _TieredRequest:
    assert isinstance(request, _TieredRequest)
    return request


@dataclass(slots=True, eq=False)
class TieredFleet(SimFleet):
    """A fleet of `TieredEngine`s with delayed events.

    KV events reach the placement after `event_delay_s`. LMCache's changes reach `on_tiers` after their report
    and the same delay.
    """

    event_delay_s: float = 0.0
    on_tiers: Callable[[int, TierChange, float], None] | None = None
    """Called with (worker, change, now) before a request is placed."""
    _delayed_events: list[tuple[float, int, list[KvEvent]]] = field(default_factory=list)
    _reports: list[tuple[float, int, int, TierChange]] = field(default_factory=list)
    _reported: int = 0

    def __post_init__(self) -> None:
        SimFleet.__post_init__(self)
        if self.on_tiers is not None:
            for worker in range(len(self.engines)):
                engine = self._tiered(worker)
                engine.tiers.on_change = partial(self._report, worker, TierReports(engine.options.report_s))

    def _report(self, worker: int, reports: TierReports, change: TierChange, at: float) -> None:
        self._reported += 1
        due = reports.report_time(at) + self.event_delay_s
        heapq.heappush(self._reports, (due, self._reported, worker, change))

    def _place(self, request: FleetRequest) -> None:
        self._deliver()
        request.worker = worker = self.placement.place(request, self.now)
        engine = self._tiered(worker)
        engine.add_request(request)
        if not self._busy[worker]:
            self._start_iteration(worker)

    def _start_iteration(self, worker: int) -> None:
        engine = self._tiered(worker)
        duration = engine.begin_at(self.now)
        self._busy[worker] = duration is not None
        if duration is not None:
            self._push(self.now + duration, worker)
        elif (ready_s := engine.next_ready_s) is not None:
            self._push(ready_s, ~worker)  # a negative number: the end of a fetch, not of an iteration

    def _finish_iteration(self, worker: int) -> None:
        if worker < 0:  # a fetch has ended; the worker may be busy with other work already
            if not self._busy[~worker]:
                self._start_iteration(~worker)
            return
        if self.event_delay_s:
            self._delay_events(worker)
        SimFleet._finish_iteration(self, worker)

    def _delay_events(self, worker: int) -> None:
        events = self.engines[worker].cache.take_events()
        if events:
            self._delayed_events.append((self.now + self.event_delay_s, worker, events))

    def _deliver(self) -> None:
        """Pass on the events and reports whose delay has ended. A placement uses them in `place` only."""
        self._tiered(0).tiers.store.apply_due(self.now)
        delayed = self._delayed_events
        delivered = 0
        for due, worker, events in delayed:
            if due > self.now:
                break
            self.placement.events(worker, events, self.now)
            delivered += 1
        del delayed[:delivered]
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
    """`count` engines with empty caches and one shared store. `timing`: one for all, or one for each."""
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
                to_l1=Link(tiers.l1_bytes_s),
                from_store=Link(tiers.l2_worker_bytes_s),
                to_store=Link(tiers.l2_worker_bytes_s),
                keeps_loaded=tiers.keeps_loaded,
            ),
            options=tiers,
        )
        for number in range(count)
    ]
