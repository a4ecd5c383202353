"""A fleet of simulated engines in virtual time: hours of traffic in seconds, without sockets and sleeps.

The caller's `Placement` chooses the workers; this module contains no routing. Network and router take no
time. The caller submits requests before `run`, or from `on_finish` while it runs (closed-loop clients:
`ChatClients`).

In a `HandoverFleet` one worker may compute the prompt of a request and another one its answer, as with vLLM's
NixlConnector (0.32, pull): the prefill worker generates one token and keeps its blocks until they are
fetched; the decode worker fetches the tokens that it lacks and computes the last token of the prompt itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol, runtime_checkable

from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.cache_tiers import Link
from kvroute.sim.engine import EngineRequest, SimEngine
from kvroute.sim.timing import TimingModel
from kvroute.wire.vllm import KvEvent


@dataclass(slots=True, eq=False)
class FleetRequest:
    """One request and its result. Mutable: the fleet sets the fields after `arrival_s`.

    `keys` has one chained key per full block of prompt *and* answer. Lengths are in tokens, times in virtual
    seconds. The fleet does not use `conversation` and `turn`; they are for the caller's statistics.
    """

    keys: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    conversation: int = 0
    turn: int = 0
    arrival_s: float = 0.0
    worker: int = -1
    prefill_worker: int = -1
    """The worker that computes the prompt, if another one answers (`HandoverFleet`); else -1."""
    first_token_s: float = -1.0
    finished_s: float = -1.0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Virtual seconds from arrival to the first token."""
        return self.first_token_s - self.arrival_s


class Placement(Protocol):
    """Chooses a worker for each request and is notified of the request's progress. `now`: virtual seconds."""

    def place(self, request: FleetRequest, now: float) -> int:
        """Return the number of the worker that gets the request. Called once, when the request arrives."""
        ...

    def first_token(self, request: FleetRequest, now: float) -> None:
        """The request's first token was generated."""
        ...

    def finished(self, request: FleetRequest, now: float) -> None:
        """The request has ended."""
        ...

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        """A worker's cache has changed. Called only if the fleet's caches record events."""
        ...


@dataclass(slots=True, eq=False)
class SimFleet:
    """Runs engines in virtual time, with a placement. Mutable throughout: changed by `submit` and `run`."""

    engines: Sequence[SimEngine]
    placement: Placement
    on_finish: Callable[[FleetRequest, float], None] | None = None
    """Called with a finished request and the time, after `Placement.finished`. May submit more requests."""
    now: float = 0.0
    done: list[FleetRequest] = field(default_factory=list)
    """Finished requests in the order of their ends."""
    _queue: list[tuple[float, int, FleetRequest | int]] = field(default_factory=list)
    """A heap of (time, counter, arriving request or number of the worker whose iteration ends)."""
    _order: int = 0
    _busy: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._busy = [False] * len(self.engines)

    def submit(self, request: FleetRequest, at: float) -> None:
        """Let a request arrive at virtual time `at`, or now if `at` is in the past."""
        request.arrival_s = max(at, self.now)
        self._push(request.arrival_s, request)

    def run(self, until: float = float("inf")) -> None:
        """Run until no work is left, or until virtual time `until`."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, entry = heapq.heappop(queue)
            if isinstance(entry, FleetRequest):
                self._place(entry)
            else:
                self._finish_iteration(entry)

    def replace(self, worker: int, engine: SimEngine) -> None:
        """Let an engine with its own cache take the place of a worker, whose requests never end."""
        engines = list(self.engines)
        engines[worker] = engine
        self.engines = engines
        self._busy[worker] = False
        self._queue = [entry for entry in self._queue if entry[2] != worker and entry[2] != ~worker]
        heapq.heapify(self._queue)

    def computed_tokens(self) -> list[int]:
        """Prompt tokens that each engine computed, cache hits excluded."""
        return [engine.counters.computed_tokens for engine in self.engines]

    def _push(self, at: float, entry: FleetRequest | int) -> None:
        # The counter keeps entries with equal times in order of creation, so that every run is the same.
        self._order += 1
        heapq.heappush(self._queue, (at, self._order, entry))

    def _place(self, request: FleetRequest) -> None:
        request.worker = worker = self.placement.place(request, self.now)
        self.engines[worker].add(
            EngineRequest(Chain(request.keys), request.prompt_tokens, request.output_tokens, owner=request)
        )
        if not self._busy[worker]:
            self._start_iteration(worker)

    def _start_iteration(self, worker: int) -> None:
        duration = self.engines[worker].begin()
        self._busy[worker] = duration is not None
        if duration is not None:
            self._push(self.now + duration, worker)

    def _finish_iteration(self, worker: int) -> None:
        progress = self.engines[worker].finish()
        if progress.events:
            self.placement.events(worker, progress.events, self.now)
        for item in progress.prefilled:
            self._first_token(item)
        for item in progress.finished:
            self._finished(item)
        if progress.refused:
            raise ValueError("a request does not fit into a worker's cache")
        self._start_iteration(worker)

    def _first_token(self, item: EngineRequest) -> None:
        request = _request(item)
        request.first_token_s = self.now
        request.cached_tokens = item.cached_tokens
        self.placement.first_token(request, self.now)

    def _finished(self, item: EngineRequest) -> None:
        request = _request(item)
        request.finished_s = self.now
        self.done.append(request)
        self.placement.finished(request, self.now)
        if self.on_finish is not None:
            self.on_finish(request, self.now)


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


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The lengths of a chat, in tokens, and its think time, in seconds.

    `context_tokens` is the length of the first prompt. Its part after the common system prompt varies by 30%.
    Each later turn adds the answer before and a question of `turn_tokens`. A chat has 1 +
    floor(Exp(`mean_turns`)) turns.
    """

    system_tokens: int = 1024
    context_tokens: int = 8192
    mean_turns: float = 7.0
    turn_tokens: int = 128
    output_tokens: int = 256
    think_s: float = 5.0


@dataclass(slots=True, eq=False)
class _Chat:
    number: int
    turns: int
    tokens: int
    turn: int = 0
    keys: list[int] = field(default_factory=list)


class ChatClients:
    """Closed-loop clients: each sends a turn, thinks after the answer, and sends the next turn or a new chat.

    They stop after `requests` requests in total. `start` begins; `SimFleet.on_finish` then sends each next
    turn. Mutable: the chats and their turns.
    """

    def __init__(
        self, fleet: SimFleet, *, clients: int, requests: int, shape: ChatShape | None = None, seed: int = 0
    ) -> None:
        self._fleet = fleet
        self._shape = shape or ChatShape()
        self._random = Random(seed)
        self._clients = clients
        self._requests_left = requests
        self._chats: dict[int, _Chat] = {}
        self._chats_started = 0
        self._block = fleet.engines[0].cache.block_size

    def start(self) -> None:
        """Let each client send its first request at a random time within `think_s`."""
        self._fleet.on_finish = self._on_finish
        for _ in range(self._clients):
            self._send(self._new_chat(), self._random.uniform(0.0, self._shape.think_s))

    def _new_chat(self) -> _Chat:
        shape, random = self._shape, self._random
        self._chats_started += 1
        private = (shape.context_tokens - shape.system_tokens) * random.uniform(0.7, 1.3)
        turns = 1 + int(random.expovariate(1 / shape.mean_turns))
        chat = _Chat(self._chats_started, turns, shape.system_tokens + int(private))
        self._chats[chat.number] = chat
        return chat

    def _send(self, chat: _Chat, at: float) -> None:
        if self._requests_left <= 0:
            return
        self._requests_left -= 1
        output = max(1, int(self._shape.output_tokens * self._random.uniform(0.5, 1.5)))
        self._extend(chat, chat.tokens + output)
        request = FleetRequest(
            chat.keys, chat.tokens, output, conversation=chat.number, turn=chat.turn, arrival_s=at
        )
        self._fleet.submit(request, at)

    def _extend(self, chat: _Chat, tokens: int) -> None:
        common = self._shape.system_tokens // self._block
        for position in range(len(chat.keys), tokens // self._block):
            # A chained key only has to be unique for its chat and position.
            chat.keys.append(position + 1 if position < common else chat.number << 32 | position)

    def _on_finish(self, request: FleetRequest, now: float) -> None:
        chat = self._chats[request.conversation]
        chat.turn += 1
        chat.tokens += request.output_tokens + self._shape.turn_tokens
        if chat.turn >= chat.turns:
            del self._chats[chat.number]
            chat = self._new_chat()
        self._send(chat, now + self._random.expovariate(1 / self._shape.think_s))


def returned_share(done: list[FleetRequest]) -> float:
    """Share of follow-up turns that went to the same worker as the turn before."""
    worker_of: dict[int, int] = {}
    followed = returned = 0
    for request in sorted(done, key=lambda r: r.arrival_s):
        if request.turn:
            followed += 1
            returned += worker_of.get(request.conversation) == request.worker
        worker_of[request.conversation] = request.worker
    return returned / followed if followed else 1.0


def imbalance(amounts: list[int]) -> float:
    """The largest amount divided by the mean; 1 if all are equal or all are 0."""
    return max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else 1.0


_TRANSFER_ENDS = -1
"""An entry of the fleet's queue; other entries are requests and numbers of workers."""


@runtime_checkable
class HandoverPlacement(Placement, Protocol):
    """A placement whose `place` may name the worker that computes the prompt: `prefill_worker`."""

    def prefilled(self, request: FleetRequest, now: float) -> None:
        """The prefill worker has computed the prompt; the transfer begins."""
        ...

    def moved(self, request: FleetRequest, tokens: int, seconds: float, now: float) -> None:
        """The decode worker has fetched `tokens` tokens. It took `seconds`."""
        ...


class _Leg(NamedTuple):
    """The owner of a request on a prefill worker."""

    request: FleetRequest


class _Transfer(NamedTuple):
    end_s: float
    order: int
    leg: EngineRequest
    start_s: float
    tokens: int


@dataclass(slots=True, eq=False)
class HandoverFleet(SimFleet):
    """Runs engines of both roles. `links` has the network into each worker; its transfers follow one
    another."""

    links: Sequence[Link] = ()
    token_bytes: int = 327_680
    latency_s: float = 0.0
    """Time of a transfer in addition to that of its bytes."""
    moved_tokens: int = 0
    """Tokens of all transfers."""
    _transfers: list[_Transfer] = field(default_factory=list)

    def _place(self, request: FleetRequest) -> None:
        request.worker = self.placement.place(request, self.now)
        chain = Chain(request.keys)
        if request.prefill_worker < 0:
            item = EngineRequest(chain, request.prompt_tokens, request.output_tokens, owner=request)
            self._add(item, request.worker)
        else:
            item = EngineRequest(chain, request.prompt_tokens, 1, keeps_blocks=True, owner=_Leg(request))
            self._add(item, request.prefill_worker)

    def _add(self, item: EngineRequest, worker: int) -> None:
        self.engines[worker].add(item)
        if not self._busy[worker]:
            self._start_iteration(worker)

    def _finish_iteration(self, worker: int) -> None:
        if worker == _TRANSFER_ENDS:
            self._end_transfer()
        else:
            SimFleet._finish_iteration(self, worker)

    def _first_token(self, item: EngineRequest) -> None:
        if not isinstance(item.owner, _Leg):
            SimFleet._first_token(self, item)

    def _finished(self, item: EngineRequest) -> None:
        if isinstance(item.owner, _Leg):
            self._begin_transfer(item, item.owner.request)
        else:
            SimFleet._finished(self, item)

    def _begin_transfer(self, leg: EngineRequest, request: FleetRequest) -> None:
        placement = self.placement
        assert isinstance(placement, HandoverPlacement)
        placement.prefilled(request, self.now)
        cache = self.engines[request.worker].cache
        full_blocks = request.prompt_tokens // cache.block_size
        tokens = request.prompt_tokens - cache.match(request.keys, full_blocks) * cache.block_size
        link = self.links[request.worker]
        end_s = link.transfer(tokens * self.token_bytes, self.now) + self.latency_s
        self._order += 1
        heapq.heappush(self._transfers, _Transfer(end_s, self._order, leg, self.now, tokens))
        self._push(end_s, _TRANSFER_ENDS)

    def _end_transfer(self) -> None:
        _, _, leg, start_s, tokens = heapq.heappop(self._transfers)
        assert isinstance(leg.owner, _Leg)
        request = leg.owner.request
        self.engines[request.prefill_worker].free_kept(leg)
        self.moved_tokens += tokens
        placement = self.placement
        assert isinstance(placement, HandoverPlacement)
        placement.moved(request, tokens, self.now - start_s, self.now)
        item = EngineRequest(
            Chain(request.keys),
            request.prompt_tokens,
            request.output_tokens,
            moved_tokens=request.prompt_tokens,
            owner=request,
        )
        self._add(item, request.worker)
