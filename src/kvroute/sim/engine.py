"""The simulated engine: a scheduler of continuous batching over a paged prefix cache. Pure.

It knows no clock. `begin` schedules one iteration and says how long it takes; `finish` applies it. The
HTTP server waits that long in real time (`kvroute.sim.driver`), the fleet model in virtual time
(`kvroute.sim.fleet`). An iteration costs time in the number of sequences that change, not in those that
run: a decoding sequence is touched when it fills a block and when it ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kvroute.sim.cache import Block, Chain, PagedCache
from kvroute.sim.options import TimingModel
from kvroute.wire.vllm import KvEvent


class RequestPhase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    ABORTED = "aborted"
    REFUSED = "refused"
    """It can never fit, not even alone."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence. The first fields never change; the rest is the engine's to change.

    `chain.keys` covers prompt and answer, which is known in advance; `output_tokens` 0 ends the request
    with its prefill (embeddings). `reads_cache` False computes the whole prompt (vLLM with
    prompt_logprobs); `report_full` re-announces the blocks it hits.
    """

    chain: Chain
    prompt_tokens: int
    output_tokens: int
    reads_cache: bool = True
    report_full: bool = False
    owner: object = None
    """Whatever the caller wants to find again."""
    phase: RequestPhase = RequestPhase.WAITING
    cached_tokens: int = 0
    """Prompt tokens found in the cache, once admitted."""
    stored_tokens: int = 0
    """Prompt tokens in blocks that this request was the first to put there."""
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    stored_blocks: int = 0
    reserved: int = 0
    first_iteration: int = 0

    def produced(self, iteration: int) -> int:
        """Output tokens that exist at the end of `iteration`."""
        if self.phase is RequestPhase.FINISHED:
            return self.output_tokens
        if self.phase is not RequestPhase.DECODE:
            return 0
        return iteration - self.first_iteration + 1


@dataclass(frozen=True, slots=True)
class Progress:
    """What an iteration did. `first` got their first token (or all of a prefill-only request),
    `finished` ended, `refused` can never run; a request may be in both of the first two."""

    first: list[EngineRequest]
    finished: list[EngineRequest]
    refused: list[EngineRequest]
    events: list[KvEvent]


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start, in vLLM's words; tokens unless said otherwise."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that no cache hit saved."""
    cache_queries: int = 0
    cache_hits: int = 0
    finished: int = 0
    aborted: int = 0
    iterations: int = 0


@dataclass(slots=True, eq=False)
class SimEngine:
    """One engine. Mutable throughout; all changes go through `add`, `abort`, `begin`, `finish`."""

    cache: PagedCache
    timing: TimingModel = field(default_factory=TimingModel)
    counters: EngineCounters = field(default_factory=EngineCounters)
    iteration: int = 0
    """Iterations finished."""
    _waiting: deque[EngineRequest] = field(default_factory=deque)
    _prefilling: list[EngineRequest] = field(default_factory=list)
    _decoding: set[EngineRequest] = field(default_factory=set)
    _context: int = 0
    _reserved: int = 0
    _ends: dict[int, list[EngineRequest]] = field(default_factory=dict)
    _fills: dict[int, list[EngineRequest]] = field(default_factory=dict)
    _refused: list[EngineRequest] = field(default_factory=list)
    _busy: bool = False

    @property
    def running(self) -> int:
        """Sequences admitted and not ended."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Sequences not yet admitted."""
        return len(self._waiting)

    @property
    def decoding(self) -> set[EngineRequest]:
        """Sequences that get a token in every iteration. Live; do not change it."""
        return self._decoding

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding or self._refused)

    def add(self, request: EngineRequest) -> None:
        """Queue a request, first come first served."""
        self._waiting.append(request)

    def abort(self, request: EngineRequest) -> None:
        """End a request early and free its blocks; nothing happens if it has ended. O(waiting) at worst."""
        phase = request.phase
        if phase is RequestPhase.WAITING:
            self._waiting.remove(request)
        elif phase is RequestPhase.PREFILL:
            self._prefilling.remove(request)
        elif phase is RequestPhase.DECODE:
            self._leave_decode(request, request.produced(self.iteration))
        else:
            return
        self._release(request)
        request.phase = RequestPhase.ABORTED
        self.counters.aborted += 1

    def begin(self) -> float | None:
        """Schedule the next iteration and return its length in seconds; None when there is nothing to do.

        Decodes first, then prefill chunks in order of arrival, within the timing model's batch limits.
        Blocks that become full are registered here, as vLLM does, so a request in the same iteration can
        hit them.
        """
        if not self.has_work:
            return None
        upcoming = self.iteration + 1
        for request in self._fills.pop(upcoming, ()):
            if request.phase is RequestPhase.DECODE:
                self._fill(request, upcoming)
        tokens = len(self._decoding)
        budget = self.timing.max_batched_tokens - tokens
        attention = 0.0
        for request in self._prefilling:
            if budget <= 0:
                break
            chunk, cost = self._chunk(request, budget)
            budget, tokens, attention = budget - chunk, tokens + chunk, attention + cost
        while self._waiting and budget > 0 and self.running < self.timing.max_sequences:
            request = self._waiting[0]
            if not self._admit(request):
                break
            self._waiting.popleft()
            if request.phase is RequestPhase.REFUSED:
                continue
            self._prefilling.append(request)
            chunk, cost = self._chunk(request, budget)
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
        for request in self._ends.pop(now, ()):
            if request.phase is RequestPhase.DECODE:
                self._leave_decode(request, request.output_tokens)
                self._end(request)
                finished.append(request)
        first = [r for r in self._prefilling if r.computed >= r.prompt_tokens]
        if first:
            self._prefilling = [r for r in self._prefilling if r.computed < r.prompt_tokens]
            for request in first:
                self.counters.prompt_tokens += request.prompt_tokens
                self.counters.generation_tokens += min(1, request.output_tokens)
                if request.output_tokens <= 1:
                    self._end(request)
                    finished.append(request)
                else:
                    self._join_decode(request, now)
        refused, self._refused = self._refused, []
        return Progress(first, finished, refused, self.cache.take_events())

    def reset_prefix_cache(self) -> bool:
        """Empty the cache; False while requests run. The event goes out with the next iteration."""
        return self.cache.clear()

    def _admit(self, request: EngineRequest) -> bool:
        cache, size = self.cache, self.cache.block_size
        # The last sampled token is never computed, so it needs no room.
        total = -(-(request.prompt_tokens + max(0, request.output_tokens - 1)) // size)
        if total > cache.capacity:
            request.phase = RequestPhase.REFUSED
            self._refused.append(request)
            return True
        keys = request.chain.keys
        limit = (request.prompt_tokens - 1) // size
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
        self.counters.computed_tokens += request.prompt_tokens - request.cached_tokens
        return True

    def _chunk(self, request: EngineRequest, budget: int) -> tuple[int, float]:
        chunk = min(budget, request.prompt_tokens - request.computed)
        before = request.computed
        request.computed = before + chunk
        self._grow(request, request.computed)
        self._store(request)
        return chunk, chunk * (before + chunk / 2)

    def _grow(self, request: EngineRequest, tokens: int) -> None:
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

    def _join_decode(self, request: EngineRequest, now: int) -> None:
        request.phase = RequestPhase.DECODE
        request.first_iteration = now
        self._decoding.add(request)
        self._context += request.prompt_tokens + 1
        self._ends.setdefault(now + request.output_tokens - 1, []).append(request)
        self._await_fill(request)

    def _await_fill(self, request: EngineRequest) -> None:
        # After iteration `first + k`, prompt + k tokens are computed, at most prompt + output - 1 in all.
        # Take the block of the next token, and come back when it is full.
        size, last = self.cache.block_size, request.prompt_tokens + request.output_tokens - 1
        self._grow(request, min(request.computed + 1, last))
        full = request.computed + size - request.computed % size
        if full <= last:
            self._fills.setdefault(request.first_iteration + full - request.prompt_tokens, []).append(request)

    def _fill(self, request: EngineRequest, upcoming: int) -> None:
        request.computed = request.prompt_tokens + upcoming - request.first_iteration
        self._store(request)
        self._await_fill(request)

    def _leave_decode(self, request: EngineRequest, produced: int) -> None:
        self._decoding.discard(request)
        self._context -= request.prompt_tokens + produced

    def _end(self, request: EngineRequest) -> None:
        request.phase = RequestPhase.FINISHED
        self.counters.finished += 1
        self._release(request)

    def _release(self, request: EngineRequest) -> None:
        self._reserved -= request.reserved
        request.reserved = 0
        self.cache.free(request.blocks)
        request.blocks = []
