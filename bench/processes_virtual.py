"""Several routers over one fleet in virtual time that exchange the messages of `kvroute.replicas`.

`processes.py` uses this module. Only the simulated engines and the delay between routers take time, so a
figure is exact for its seed and includes no cost of sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from kvroute.blocks.key_groups import KeyGroups
from kvroute.blocks.keys import BlockKey, PromptKeys
from kvroute.fleet.fleet import Fleet as Workers
from kvroute.fleet.worker import WorkerFacts, WorkerId, WorkerSpec
from kvroute.replicas.decisions import DispatchPublisher, PeerDispatches
from kvroute.replicas.mesh import FrameReader, encode_frame
from kvroute.replicas.messages import (
    Dispatched,
    EndedRequests,
    Finished,
    FirstToken,
    Message,
    PeerId,
    SharedMessage,
)
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Dispatch, Router
from kvroute.routing.strategy import RouteQuery
from kvroute.sim.fleet import FleetRequest, SimFleet, make_engines
from kvroute.wire.vllm import KvEvent

MODEL = "m"
BLOCK = 16
WORKERS = 4
CAPACITY_TOKENS = 150_000
CONVERSATIONS = 48
MOST_TURNS = 6
SYSTEM, OWN, TURN, OUTPUT = 1024, 4096, 128, 64
SATURATING = 64
WARM_UP = 0.15


@dataclass
class VirtualClock:
    """Time as the simulation sets it. Mutable: `time`. Nothing sleeps."""

    time: float = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError  # the simulation has no tasks


def _never(peer: PeerId, message: SharedMessage) -> None:
    raise AssertionError("no message is lost here, so no group of keys is asked for")


class Gateway:
    def __init__(self, number: int, clock: VirtualClock) -> None:
        self.number = number
        groups = KeyGroups()
        self.own = DispatchPublisher(lambda: None, groups)
        self.router = Router(RoutingOptions(), observer=self.own)
        self.workers = Workers()
        self.workers.apply("bench", [WorkerSpec(WorkerId(f"w{n}"), f"http://w{n}") for n in range(WORKERS)])
        for worker in self.workers.workers():
            facts = WorkerFacts(frozenset([MODEL]), capacity_tokens=CAPACITY_TOKENS, block_size=BLOCK)
            self.workers.update_facts(worker, facts)
            self.workers.mark_healthy(worker, 0.0)
            self.router.worker_joined(worker)
        self.peers = PeerDispatches(self.router, self.workers, clock, groups, _never)

    def receive(self, number: int, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Dispatched):
                self.peers.dispatched(number, message)
            elif isinstance(message, FirstToken):
                self.peers.first_token(number, message.id)
            elif isinstance(message, Finished):
                self.peers.finished(number, message.id)
            elif isinstance(message, EndedRequests):
                self.peers.ended(number, message)


class Gateways:
    """A `Placement`: each request goes to one of `count` gateways at random. Each gateway receives the
    messages of the others after `delay_s`, or never for None."""

    def __init__(self, count: int, delay_s: float | None, seed: int) -> None:
        self._clock = VirtualClock()
        self._gateways = [Gateway(number, self._clock) for number in range(count)]
        self._delay_s = delay_s
        self._random = Random(seed)
        self._in_transit: deque[tuple[float, int, bytes]] = deque()
        self._open: dict[FleetRequest, tuple[Gateway, Dispatch]] = {}

    def place(self, request: FleetRequest, now: float) -> int:
        self._deliver(now)
        gateway = self._random.choice(self._gateways)
        prompt = [BlockKey(key) for key in request.keys[: request.prompt_tokens // BLOCK]]
        prompts = (PromptKeys(prompt, request.prompt_tokens, float(BLOCK)),)
        query = RouteQuery(MODEL, now, prompts, request.prompt_tokens, fingerprint=prompt[-1])
        decision = gateway.router.decide(query, gateway.workers.view(MODEL))
        chosen = decision.ranking[0]
        self._open[request] = gateway, gateway.router.dispatch(query, decision, chosen, now)
        self._publish(gateway, now)
        return int(chosen.worker.id[1:])

    def first_token(self, request: FleetRequest, now: float) -> None:
        self._deliver(now)
        gateway, dispatch = self._open[request]
        dispatch.first_token(now)
        self._publish(gateway, now)

    def finished(self, request: FleetRequest, now: float) -> None:
        self._deliver(now)
        gateway, dispatch = self._open.pop(request)
        dispatch.finish(now)
        self._publish(gateway, now)

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        pass

    def _publish(self, gateway: Gateway, now: float) -> None:
        messages = gateway.own.take(now, everything=True)
        if self._delay_s is not None and len(self._gateways) > 1:
            self._in_transit.append((now + self._delay_s, gateway.number, encode_frame(messages)))

    def _deliver(self, now: float) -> None:
        while self._in_transit and self._in_transit[0][0] <= now:
            self._clock.time, number, data = self._in_transit.popleft()
            for gateway in self._gateways:
                if gateway.number != number:
                    gateway.receive(number, FrameReader().feed(data))
        self._clock.time = now


@dataclass
class _Traffic:
    """Turns of random conversations over one system prompt. Mutable: each conversation's turn."""

    random: Random
    live: dict[int, tuple[int, int, list[int]]] = field(default_factory=dict)
    """Number, turn and keys."""
    numbers: int = 0

    def next(self) -> FleetRequest:
        place = self.random.randrange(CONVERSATIONS)
        own, turn, keys = self.live.get(place, (0, MOST_TURNS, []))
        if turn == MOST_TURNS:
            self.numbers += 1
            own, turn, keys = self.numbers, 0, list(range(1, SYSTEM // BLOCK + 1))
        more = TURN + OUTPUT if turn else int(OWN * self.random.uniform(0.4, 1.6))
        keys = keys + [own << 32 | len(keys) + number for number in range(more // BLOCK)]
        self.live[place] = own, turn + 1, keys
        answer = [own << 48 | turn << 40 | number for number in range(OUTPUT // BLOCK)]
        return FleetRequest(keys + answer, len(keys) * BLOCK, OUTPUT, conversation=place)


def capacity(seed: int = 1, requests: int = 1500) -> float:
    """Requests per second of one gateway with `SATURATING` requests at a time."""
    fleet = SimFleet(make_engines(WORKERS, capacity_tokens=CAPACITY_TOKENS), Gateways(1, None, seed))
    traffic, left = _Traffic(Random(seed)), requests

    def again(_: FleetRequest, now: float) -> None:
        nonlocal left
        if left:
            left -= 1
            fleet.submit(traffic.next(), now)

    fleet.on_finish = again
    for _ in range(SATURATING):
        again(FleetRequest([], 0, 0), 0.0)
    fleet.run()
    quarter = fleet.done[requests // 4].finished_s
    last = fleet.done[-SATURATING].finished_s
    return (requests - SATURATING - requests // 4) / (last - quarter)


def mean_ttft_s(count: int, delay_s: float | None, rate: float, seed: int, requests: int = 1500) -> float:
    """Mean time to first token of `requests` Poisson arrivals, without the first ones."""
    fleet = SimFleet(make_engines(WORKERS, capacity_tokens=CAPACITY_TOKENS), Gateways(count, delay_s, seed))
    traffic, random, at_s = _Traffic(Random(seed)), Random(seed + 1), 0.0
    for _ in range(requests):
        at_s += random.expovariate(rate)
        fleet.submit(traffic.next(), at_s)
    fleet.run()
    arrived = sorted(fleet.done, key=lambda request: request.arrival_s)
    return fmean(request.ttft_s for request in arrived[int(WARM_UP * len(arrived)) :])


def ratios(processes: int, load: float, seeds: int) -> dict[str, list[float]]:
    """Mean TTFT of `processes` gateways divided by that of one, by the delay of their messages; by seed."""
    rate = load * capacity()
    delays = {"0 ms": 0.0, "6 ms": 0.006, "50 ms": 0.05, "never": None}
    found: dict[str, list[float]] = {name: [] for name in delays}
    for seed in range(seeds):
        alone = mean_ttft_s(1, None, rate, seed)
        for name, delay_s in delays.items():
            found[name].append(mean_ttft_s(processes, delay_s, rate, seed) / alone)
    return found
