"""A fleet of simulated engines in virtual time: hours of traffic in seconds, no sockets, no sleeping.

Whoever wants to try a placement hands in a `Placement`; this module knows nothing of routing. Network
and router take no time here. Arrivals come as a list, from `Fleet.submit`, or from what `finished`
submits (closed-loop clients, `kvroute.sim.workload`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.engine import EngineRequest, SimEngine
from kvroute.sim.timing import TimingModel
from kvroute.wire.events import KvEvent


@dataclass(slots=True, eq=False)
class FleetRequest:
    """One request and what became of it; the fields after `arrival_s` are the fleet's to fill.

    `keys` has one chained key per full block of prompt *and* answer; lengths are tokens, times virtual
    seconds. `conversation` and `turn` are for whoever counts.
    """

    keys: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    conversation: int = 0
    turn: int = 0
    arrival_s: float = 0.0
    worker: int = -1
    first_token_s: float = -1.0
    finished_s: float = -1.0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s


class Placement(Protocol):
    """Decides where requests go and hears what became of them. `now` is virtual time in seconds."""

    def place(self, request: FleetRequest, now: float) -> int:
        """The number of the worker that takes the request; called once, at its arrival."""
        ...

    def first_token(self, request: FleetRequest, now: float) -> None:
        """Its first token came."""
        ...

    def finished(self, request: FleetRequest, now: float) -> None:
        """It is done."""
        ...

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        """A worker's cache changed; called only where the fleet's caches record events."""
        ...


@dataclass(slots=True, eq=False)
class Fleet:
    """Engines, a clock that jumps, and a placement. Mutable: everything, through `submit` and `run`."""

    engines: Sequence[SimEngine]
    placement: Placement
    on_finish: Callable[[FleetRequest, float], None] | None = None
    """Called after the placement has heard of an end; may submit more."""
    now: float = 0.0
    done: list[FleetRequest] = field(default_factory=list)
    """Finished requests in the order of their ends."""
    _agenda: list[tuple[float, int, FleetRequest | int]] = field(default_factory=list)
    _order: int = 0
    _busy: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._busy = [False] * len(self.engines)

    def submit(self, request: FleetRequest, at: float) -> None:
        """Let a request arrive at virtual time `at`, not before now."""
        request.arrival_s = max(at, self.now)
        self._push(request.arrival_s, request)

    def run(self, until: float = float("inf")) -> None:
        """Go on until nothing is left to happen, or until virtual time `until`."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= until:
            self.now, _, what = heapq.heappop(agenda)
            if isinstance(what, FleetRequest):
                self._arrive(what)
            else:
                self._advance(what)

    def computed_tokens(self) -> list[int]:
        """Prompt tokens that each engine had to compute."""
        return [engine.counters.computed_tokens for engine in self.engines]

    def _push(self, at: float, what: FleetRequest | int) -> None:
        # The counter keeps equal times in order of their making, so that a run repeats exactly.
        self._order += 1
        heapq.heappush(self._agenda, (at, self._order, what))

    def _arrive(self, request: FleetRequest) -> None:
        request.worker = worker = self.placement.place(request, self.now)
        self.engines[worker].add(
            EngineRequest(Chain(request.keys), request.prompt_tokens, request.output_tokens, owner=request)
        )
        if not self._busy[worker]:
            self._begin(worker)

    def _begin(self, worker: int) -> None:
        duration = self.engines[worker].begin()
        self._busy[worker] = duration is not None
        if duration is not None:
            self._push(self.now + duration, worker)

    def _advance(self, worker: int) -> None:
        progress = self.engines[worker].finish()
        now = self.now
        if progress.events:
            self.placement.events(worker, progress.events, now)
        for item in progress.first:
            request = _request(item)
            request.first_token_s = now
            request.cached_tokens = item.cached_tokens
            self.placement.first_token(request, now)
        for item in progress.finished:
            request = _request(item)
            request.finished_s = now
            self.done.append(request)
            self.placement.finished(request, now)
            if self.on_finish is not None:
                self.on_finish(request, now)
        if progress.refused:
            raise ValueError("a request does not fit into a worker's cache")
        self._begin(worker)


def _request(item: EngineRequest) -> FleetRequest:
    assert isinstance(item.owner, FleetRequest)
    return item.owner


def make_engines(
    count: int,
    *,
    capacity_tokens: int = 1_200_000,
    block_size: int = 16,
    timing: TimingModel | None = None,
    record_events: bool = False,
) -> list[SimEngine]:
    """`count` equal engines with empty caches."""
    timing = timing or TimingModel()
    return [
        SimEngine(PagedCache(capacity_tokens // block_size, block_size, record=record_events), timing)
        for _ in range(count)
    ]
