"""The simulated engine: a scheduler with continuous batching over a paged prefix cache, and its driver.

The engine is pure and has no clock. `begin` schedules one iteration and returns its duration; `finish`
applies the iteration. `EngineDriver` waits for the duration in real time, `kvroute.sim.fleet` in virtual
time. The CPU cost of an iteration grows with the number of sequences that change, not with those that run: a
decoding sequence costs something when it fills a block and when it ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvroute.clock import Clock
from kvroute.sim.cache import Block, Chain, PagedCache
from kvroute.sim.timing import TimingModel
from kvroute.wire.vllm import KvEvent


class RequestPhase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    ABORTED = "aborted"
    REFUSED = "refused"
    """The request needs more blocks than the whole cache has."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence. Mutable: the engine changes the fields from `phase` on.

    `chain.keys` covers prompt and answer; the answer is known in advance. With `output_tokens` 0 the request
    ends after its prefill (embeddings). Without `reads_cache` the whole prompt is computed (vLLM with
    prompt_logprobs). With `report_full` the cache announces the blocks of the hit again. `moved_tokens` of
    the prompt come from another engine. With `keeps_blocks` the blocks stay after the end, until `free_kept`,
    for another engine.
    """

    chain: Chain
    prompt_tokens: int
    output_tokens: int
    reads_cache: bool = True
    report_full: bool = False
    moved_tokens: int = 0
    keeps_blocks: bool = False
    owner: object = None
    """The caller's object for this request; the engine does not use it."""
    phase: RequestPhase = RequestPhase.WAITING
    cached_tokens: int = 0
    """Prompt tokens found in the cache; set when the request is admitted."""
    other_cached_tokens: int | None = None
    """Prompt tokens that another engine, which computed the prompt, found in its cache; None without one."""
    external_tokens: int = 0
    """Prompt tokens that came from another engine, those in the cache excluded."""
    stored_tokens: int = 0
    """Prompt tokens in blocks that this request added to the cache."""
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    stored_blocks: int = 0
    reserved: int = 0
    first_iteration: int = 0

    @property
    def reported_cached_tokens(self) -> int:
        """The cached tokens in `usage`: vLLM (0.32) repeats those of the engine that computed the prompt."""
        return self.cached_tokens if self.other_cached_tokens is None else self.other_cached_tokens

    def produced(self, iteration: int) -> int:
        """Number of output tokens at the end of `iteration`."""
        if self.phase is RequestPhase.FINISHED:
            return self.output_tokens
        if self.phase is not RequestPhase.DECODE:
            return 0
        return iteration - self.first_iteration + 1


@dataclass(frozen=True, slots=True)
class Progress:
    """The result of an iteration.

    `prefilled`: requests whose prefill ended, with their first token. `finished`: requests that ended; one of
    them may be in `prefilled` too. `refused`: requests that can never run.
    """

    prefilled: list[EngineRequest]
    finished: list[EngineRequest]
    refused: list[EngineRequest]
    events: list[KvEvent]


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start, under vLLM's names. Mutable: changed by the engine."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens computed, cache hits excluded."""
    cache_queries: int = 0
    cache_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    """Prompt tokens that came from other engines."""
    finished: int = 0
    aborted: int = 0
    iterations: int = 0


@dataclass(slots=True, eq=False)
class SimEngine:
    """One engine. Mutable: changed by `add`, `abort`, `begin`, `finish` and `reset_prefix_cache`."""

    cache: PagedCache
    timing: TimingModel = field(default_factory=TimingModel)
    counters: EngineCounters = field(default_factory=EngineCounters)
    iteration: int = 0
    """Number of finished iterations."""
    _waiting: deque[EngineRequest] = field(default_factory=deque)
    _prefilling: list[EngineRequest] = field(default_factory=list)
    _decoding: set[EngineRequest] = field(default_factory=set)
    _context: int = 0
    _reserved: int = 0
    _ends_at: dict[int, list[EngineRequest]] = field(default_factory=dict)
    _fills_at: dict[int, list[EngineRequest]] = field(default_factory=dict)
    _refused: list[EngineRequest] = field(default_factory=list)
    _busy: bool = False

    @property
    def running(self) -> int:
        """Number of sequences that were admitted and have not ended."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for admission."""
        return len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the sequences whose prefill has not ended, cached ones included."""
        return sum(request.prompt_tokens for request in (*self._waiting, *self._prefilling))

    @property
    def decoding(self) -> set[EngineRequest]:
        """Sequences that get a token in every iteration. Not a copy: the caller must not change the set."""
        return self._decoding

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding or self._refused)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Requests are admitted in order of arrival."""
        self._waiting.append(request)

    def abort(self, request: EngineRequest) -> None:
        """End a request early and free its blocks; does nothing if the request has ended. At worst
        O(waiting)."""
        phase = request.phase
        if phase is RequestPhase.WAITING:
            self._waiting.remove(request)
        elif phase is RequestPhase.PREFILL:
            self._prefilling.remove(request)
        elif phase is RequestPhase.DECODE:
            self._stop_decode(request, request.produced(self.iteration))
        else:
            return
        self._release(request)
        request.phase = RequestPhase.ABORTED
        self.counters.aborted += 1

    def begin(self) -> float | None:
        """Schedule the next iteration and return its duration in seconds; None if there is no work.

        The batch has all decodes and then prefill chunks in order of arrival, within the timing model's
        limits. As in vLLM, blocks that become full are added to the cache here, so another request in the
        same iteration can hit them.
        """
        if not self.has_work:
            return None
        upcoming = self.iteration + 1
        for request in self._fills_at.pop(upcoming, ()):
            if request.phase is RequestPhase.DECODE:
                self._block_filled(request, upcoming)
        tokens = len(self._decoding)
        budget = self.timing.max_batched_tokens - tokens
        attention = 0.0
        for request in self._prefilling:
            if budget <= 0:
                break
            chunk, cost = self._schedule_chunk(request, budget)
            budget, tokens, attention = budget - chunk, tokens + chunk, attention + cost
        while self._waiting and budget > 0 and self.running < self.timing.max_sequences:
            request = self._waiting[0]
            if not self._admit(request):
                break
            self._waiting.popleft()
            if request.phase is RequestPhase.REFUSED:
                continue
            self._prefilling.append(request)
            chunk, cost = self._schedule_chunk(request, budget)
            budget, tokens, attention = budget - chunk, tokens + chunk, attention + cost
        self._busy = True
        return self.timing.iteration_s(tokens, attention, self._context)

    def finish(self) -> Progress:
        """Apply the iteration that `begin` scheduled."""
        if not self._busy:
            raise RuntimeError("finish() without begin()")
        self._busy = False
        self.iteration = now = self.iteration + 1
        self.counters.iterations += 1
        self.counters.generation_tokens += len(self._decoding)
        self._context += len(self._decoding)
        finished = []
        for request in self._ends_at.pop(now, ()):
            if request.phase is RequestPhase.DECODE:
                self._stop_decode(request, request.output_tokens)
                self._end(request)
                finished.append(request)
        prefilled = [r for r in self._prefilling if r.computed >= r.prompt_tokens]
        if prefilled:
            self._prefilling = [r for r in self._prefilling if r.computed < r.prompt_tokens]
            for request in prefilled:
                self.counters.prompt_tokens += request.prompt_tokens
                self.counters.generation_tokens += min(1, request.output_tokens)
                if request.output_tokens <= 1:
                    self._end(request)
                    finished.append(request)
                else:
                    self._start_decode(request, now)
        refused, self._refused = self._refused, []
        return Progress(prefilled, finished, refused, self.cache.take_events())

    def free_kept(self, request: EngineRequest) -> None:
        """Free the blocks of a finished request with `keeps_blocks`; a second call does nothing."""
        self.cache.free(request.blocks)
        request.blocks = []

    def reset_prefix_cache(self) -> bool:
        """Clear the cache; False while requests run. The next iteration returns the event."""
        return self.cache.clear()

    def _admit(self, request: EngineRequest) -> bool:
        cache, size = self.cache, self.cache.block_size
        # The KV of the last sampled token is never computed, so this token needs no room in a block.
        total = -(-(request.prompt_tokens + max(0, request.output_tokens - 1)) // size)
        if total > cache.capacity:
            request.phase = RequestPhase.REFUSED
            self._refused.append(request)
            return True
        keys = request.chain.keys
        limit = max(0, request.prompt_tokens - max(1, cache.lookahead)) // size
        hits = cache.match(keys, limit) if request.reads_cache else 0
        if total - hits + cache.idle_among(keys, hits) > cache.available - self._reserved:
            return False
        request.blocks = cache.take(keys, hits)
        request.reserved = total - hits
        self._reserved += request.reserved
        request.stored_blocks = hits
        request.computed = request.cached_tokens = hits * size
        request.phase = RequestPhase.PREFILL
        if request.report_full:
            cache.reannounce(request.chain, hits)
        if request.reads_cache:
            self.counters.cache_queries += request.prompt_tokens
            self.counters.cache_hits += request.cached_tokens
        if request.moved_tokens > request.cached_tokens:
            self._take_in(request)
        self.counters.computed_tokens += request.prompt_tokens - request.computed
        return True

    def _take_in(self, request: EngineRequest) -> None:
        """Add the blocks that came from another engine. The last token is computed here (vLLM 0.32)."""
        moved = min(request.moved_tokens, request.prompt_tokens)
        request.external_tokens = moved - request.cached_tokens
        self.counters.external_queries += request.prompt_tokens - request.cached_tokens
        self.counters.external_hits += request.external_tokens
        request.computed = max(request.computed, min(moved, request.prompt_tokens - 1))
        self._allocate_up_to(request, request.computed)
        self._store(request)

    def _schedule_chunk(self, request: EngineRequest, budget: int) -> tuple[int, float]:
        chunk = min(budget, request.prompt_tokens - request.computed)
        already_computed = request.computed
        request.computed = already_computed + chunk
        self._allocate_up_to(request, request.computed)
        self._store(request)
        return chunk, chunk * (already_computed + chunk / 2)

    def _allocate_up_to(self, request: EngineRequest, tokens: int) -> None:
        need = -(-tokens // self.cache.block_size) - len(request.blocks)
        if need > 0:
            request.blocks += self.cache.allocate(need)
            request.reserved -= need
            self._reserved -= need

    def _store(self, request: EngineRequest) -> None:
        full = min(request.computed // self.cache.block_size, len(request.chain.keys))
        if full > request.stored_blocks:
            if request.phase is RequestPhase.PREFILL:
                request.stored_tokens += (full - request.stored_blocks) * self.cache.block_size
            self.cache.store(request.blocks, request.chain, request.stored_blocks, full)
            request.stored_blocks = full

    def _start_decode(self, request: EngineRequest, now: int) -> None:
        request.phase = RequestPhase.DECODE
        request.first_iteration = now
        self._decoding.add(request)
        self._context += request.prompt_tokens + 1
        self._ends_at.setdefault(now + request.output_tokens - 1, []).append(request)
        self._schedule_fill(request)

    def _schedule_fill(self, request: EngineRequest) -> None:
        # After iteration `first + k`, prompt + k tokens are computed, at most prompt + output - 1 in total.
        # Allocate the block of the next token, and note the iteration in which that block becomes full.
        size, last = self.cache.block_size, request.prompt_tokens + request.output_tokens - 1
        self._allocate_up_to(request, min(request.computed + 1, last))
        full = request.computed + size - request.computed % size
        if full <= last:
            self._fills_at.setdefault(request.first_iteration + full - request.prompt_tokens, []).append(
                request
            )

    def _block_filled(self, request: EngineRequest, upcoming: int) -> None:
        request.computed = request.prompt_tokens + upcoming - request.first_iteration
        self._store(request)
        self._schedule_fill(request)

    def _stop_decode(self, request: EngineRequest, produced: int) -> None:
        self._decoding.discard(request)
        self._context -= request.prompt_tokens + produced

    def _end(self, request: EngineRequest) -> None:
        request.phase = RequestPhase.FINISHED
        self.counters.finished += 1
        self._release(request)

    def _release(self, request: EngineRequest) -> None:
        self._reserved -= request.reserved
        request.reserved = 0
        if request.keeps_blocks and request.phase is RequestPhase.FINISHED:
            return
        self.cache.free(request.blocks)
        request.blocks = []


MAX_CATCH_UP_S = 1.0
"""Largest delay that an engine corrects by shorter sleeps. A larger delay means that the machine is too slow
or was suspended."""

_ENDED = {RequestPhase.ABORTED: "abort", RequestPhase.REFUSED: "error"}


class Generation:
    """The sequences of one HTTP request. Mutable: changed by the driver and `wait`.

    The driver wakes a streamed generation in each iteration that adds tokens, any other only at its end.
    """

    def __init__(
        self,
        requests: Sequence[EngineRequest],
        reasons: Sequence[str],
        *,
        streamed: bool,
        driver: EngineDriver | None = None,
    ) -> None:
        self.requests = requests
        self.driver = driver
        """The engine's driver that has the sequences."""
        self.reasons = reasons
        """vLLM's finished_reason of each sequence, unless the sequence is aborted or refused."""
        self.streamed = streamed
        self.remaining = len(requests)
        self.refused = False
        self.cancelled = False
        """The client left or the engine was restarted: there will be no more tokens."""
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return self.remaining == 0 or self.refused or self.cancelled

    @property
    def iteration(self) -> int:
        """The number of finished iterations of its engine."""
        return 0 if self.driver is None else self.driver.engine.iteration

    async def wait(self) -> None:
        """Wait until `wake` was called since the last `wait`."""
        if not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._woken = False

    def wake(self) -> None:
        """Let the current `wait` return, or the next one if none is running."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineDriver:
    """Runs the engine's iterations and tracks its generations. Mutable throughout."""

    def __init__(
        self, engine: SimEngine, clock: Clock, publish: Callable[[list[KvEvent]], None] | None = None
    ) -> None:
        self.engine = engine
        self.finished: Counter[str] = Counter()
        """Number of ended sequences by vLLM's finished_reason: stop, length, abort, error."""
        self._clock = clock
        self._publish = publish
        self._work = asyncio.Event()
        self._open: set[Generation] = set()
        self._runs = asyncio.Event()
        self._runs.set()
        self._streaming: set[Generation] = set()

    def submit(
        self, requests: Sequence[EngineRequest], reasons: Sequence[str], *, streamed: bool
    ) -> Generation:
        """Queue sequences. The caller ends the returned generation with `close`."""
        generation = Generation(requests, reasons, streamed=streamed, driver=self)
        for request in requests:
            request.owner = generation
            self.engine.add(request)
        self._open.add(generation)
        self._work.set()
        return generation

    def close(self, generation: Generation) -> None:
        """Abort the unfinished sequences and count how each one ended. A second call does nothing."""
        if generation not in self._open:
            return
        self._open.discard(generation)
        self._streaming.discard(generation)
        if not generation.done:
            generation.cancelled = True
            for request in generation.requests:
                self.engine.abort(request)
            generation.wake()
        for request, reason in zip(generation.requests, generation.reasons, strict=True):
            self.finished[_ENDED.get(request.phase, reason)] += 1

    @property
    def is_paused(self) -> bool:
        return not self._runs.is_set()

    @property
    def unfinished(self) -> int:
        """Generations that are not closed."""
        return len(self._open)

    def pause(self) -> None:
        """Begin no iteration until `resume`; requests are accepted and wait."""
        self._runs.clear()

    def resume(self) -> None:
        self._runs.set()

    def abort_all(self) -> None:
        """End all generations."""
        for generation in list(self._open):
            self.close(generation)

    def cancel_all(self, engine: SimEngine) -> None:
        """Simulate a restart of the process: end all generations and continue with a new engine."""
        self.abort_all()
        self.engine = engine
        self.finished.clear()
        self.resume()

    async def run(self) -> None:
        """Run iterations until cancelled; then end all generations."""
        try:
            await self._iterate()
        finally:
            for generation in list(self._open):
                self.close(generation)

    async def _iterate(self) -> None:
        due = self._clock.now()
        while True:
            await self._runs.wait()
            engine = self.engine
            duration = engine.begin()
            if duration is None:
                self._work.clear()
                await self._work.wait()
                due = self._clock.now()
                continue
            # The iteration starts at the planned end of the one before. So neither Python's own time nor a
            # late wake-up slows the engine down.
            now = self._clock.now()
            due = max(due, now - MAX_CATCH_UP_S) + duration if duration else now
            await self._clock.sleep(max(0.0, due - now))
            if engine is self.engine:
                self._finish(engine)

    def _finish(self, engine: SimEngine) -> None:
        progress = engine.finish()
        if progress.events and self._publish is not None:
            self._publish(progress.events)
        for request in progress.prefilled:
            generation = request.owner
            assert isinstance(generation, Generation)
            if generation.streamed and request.phase is not RequestPhase.ABORTED:
                self._streaming.add(generation)
        done = []
        for request in progress.finished + progress.refused:
            generation = request.owner
            assert isinstance(generation, Generation)
            generation.remaining -= 1
            generation.refused |= request.phase is RequestPhase.REFUSED
            if generation.done:
                done.append(generation)
        for generation in self._streaming:
            generation.wake()
        for generation in done:
            self._streaming.discard(generation)
            generation.wake()
