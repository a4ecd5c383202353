"""A fleet of simulated engines in virtual time: hours of traffic in seconds, no sockets, no sleeping.

Whoever wants to try a placement hands in a `Placement`; this module knows nothing of routing. Network
and router take no time here. Arrivals come as a list, from `SimFleet.submit`, or from what `finished`
submits (closed-loop clients, `kvroute.sim.fleet`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.engine import EngineRequest, SimEngine
from kvroute.sim.options import TimingModel
from kvroute.wire.vllm import KvEvent


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
class SimFleet:
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


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What a chat looks like; lengths in tokens, times in seconds.

    `context_tokens` is the first prompt in all; what is not the common system prompt varies by 30%. Later
    turns add what was answered and `turn_tokens` of question. Turns are 1 + floor(Exp(`mean_turns`)).
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
    """`clients` people who chat, think, and start anew, until `requests` requests have been sent in all.

    Mutable: who is at which turn. Install with `start`; it drives itself through `SimFleet.on_finish`.
    """

    def __init__(
        self, fleet: SimFleet, *, clients: int, requests: int, shape: ChatShape | None = None, seed: int = 0
    ) -> None:
        self._fleet = fleet
        self._shape = shape or ChatShape()
        self._random = Random(seed)
        self._clients = clients
        self._left = requests
        self._chats: dict[int, _Chat] = {}
        self._numbers = 0
        self._block = fleet.engines[0].cache.block_size

    def start(self) -> None:
        """Let every client begin at a random moment of the first think time."""
        self._fleet.on_finish = self._answered
        for _ in range(self._clients):
            self._send(self._begin(), self._random.uniform(0.0, self._shape.think_s))

    def _begin(self) -> _Chat:
        shape, random = self._shape, self._random
        self._numbers += 1
        private = (shape.context_tokens - shape.system_tokens) * random.uniform(0.7, 1.3)
        turns = 1 + int(random.expovariate(1 / shape.mean_turns))
        chat = _Chat(self._numbers, turns, shape.system_tokens + int(private))
        self._chats[chat.number] = chat
        return chat

    def _send(self, chat: _Chat, at: float) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        output = max(1, int(self._shape.output_tokens * self._random.uniform(0.5, 1.5)))
        self._extend(chat, chat.tokens + output)
        request = FleetRequest(
            chat.keys, chat.tokens, output, conversation=chat.number, turn=chat.turn, arrival_s=at
        )
        self._fleet.submit(request, at)

    def _extend(self, chat: _Chat, tokens: int) -> None:
        common = self._shape.system_tokens // self._block
        for position in range(len(chat.keys), tokens // self._block):
            # Unique per chat and place is all that a chained key has to be.
            chat.keys.append(position + 1 if position < common else chat.number << 32 | position)

    def _answered(self, request: FleetRequest, now: float) -> None:
        chat = self._chats[request.conversation]
        chat.turn += 1
        chat.tokens += request.output_tokens + self._shape.turn_tokens
        if chat.turn >= chat.turns:
            del self._chats[chat.number]
            chat = self._begin()
        self._send(chat, now + self._random.expovariate(1 / self._shape.think_s))


def returned_share(done: list[FleetRequest]) -> float:
    """Share of follow-up turns that went to the worker of the turn before."""
    where: dict[int, int] = {}
    followed = returned = 0
    for request in sorted(done, key=lambda r: r.arrival_s):
        if request.turn:
            followed += 1
            returned += where.get(request.conversation) == request.worker
        where[request.conversation] = request.worker
    return returned / followed if followed else 1.0


def imbalance(amounts: list[int]) -> float:
    """The largest over the mean; 1 when all are equal or nothing was done."""
    return max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else 1.0
