"""The gateway's queue in virtual time: simulated engines, the gateway's router, permits and fair queue.

`bench/admission.py` runs the same traffic in real time. `tests/bench/test_admission.py` checks the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from kvroute.admission.fair_queue import (
    AdmissionOptions,
    FairQueue,
    Outcome,
    QueueEntry,
    Target,
    TokenAccounts,
)
from kvroute.admission.request_queue import Permits
from kvroute.blocks.keys import BlockKey, PromptKeys
from kvroute.fleet.worker import FleetView, HealthState, Worker, WorkerFacts, WorkerId, WorkerSpec
from kvroute.routing.router import Dispatch, Router
from kvroute.routing.strategy import RouteQuery
from kvroute.sim.fleet import FleetRequest, SimFleet, make_engines
from kvroute.wire.vllm import KvEvent
from processes_virtual import VirtualClock

BLOCK = 16
MODEL = "model"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one key at random times (Poisson), `rate` per second; mean lengths in tokens.

    Each prompt is new, so that no cache helps. The lengths of answers vary evenly by half.
    """

    key: str
    rate: float
    prompt_tokens: int
    output_tokens: int
    weight: float = 1.0
    priority: int = 0

    def output(self, random: Random) -> int:
        """The length of one answer."""
        return max(1, round(self.output_tokens * random.uniform(0.5, 1.5)))

    def arrivals(self, seconds: float, random: Random) -> list[float]:
        """Times in seconds, in order."""
        times, at = [], random.expovariate(self.rate)
        while at < seconds:
            times.append(at)
            at += random.expovariate(self.rate)
        return times


@dataclass(slots=True, eq=False)
class Sent:
    """One request of a traffic. Mutable: the run sets its result. Times in virtual seconds."""

    traffic: Traffic
    request: FleetRequest
    outcome: Outcome = Outcome.WAIT
    waited_s: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.request.finished_s >= 0

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.request.output_tokens


class AdmissionFleet(SimFleet):
    """Engines behind the gateway's router and queue. Without `options` there is no queue.

    Mutable throughout, by `submit` and `run`.
    """

    def __init__(self, workers: int, options: AdmissionOptions) -> None:
        super().__init__(make_engines(workers, block_size=BLOCK), self)
        self.clock = VirtualClock()
        self.options = options
        self.permits = Permits(options, self.clock)
        self.router = Router(observer=self.permits)
        self.queue = FairQueue(
            TokenAccounts(options.output_token_weight),
            ageing_s=options.ageing_s,
            max_waiting=options.max_waiting,
        )
        self.workers = [
            Worker(
                WorkerSpec(WorkerId(f"w{number}"), f"http://w{number}", models=(MODEL,)),
                state=HealthState.HEALTHY,
                facts=WorkerFacts(capacity_tokens=engine.cache.capacity * BLOCK, block_size=BLOCK),
                index=number,
            )
            for number, engine in enumerate(self.engines)
        ]
        for worker in self.workers:
            self.router.worker_joined(worker)
        self.view = FleetView(MODEL, tuple(self.workers), 1)
        self.sent: dict[FleetRequest, Sent] = {}
        self._dispatches: dict[FleetRequest, Dispatch] = {}
        self._charged: dict[FleetRequest, float] = {}
        self._held: dict[QueueEntry, FleetRequest] = {}
        self._ids = count(1)

    def offer(self, traffic: Traffic, seconds: float, random: Random) -> None:
        """Submit all requests of a traffic."""
        for at in traffic.arrivals(seconds, random):
            number, output = next(self._ids), traffic.output(random)
            blocks = -(-(traffic.prompt_tokens + output) // BLOCK)
            keys = [number << 32 | position for position in range(blocks)]
            request = FleetRequest(keys, traffic.prompt_tokens, output, conversation=number)
            self.sent[request] = Sent(traffic, request)
            self.submit(request, at)

    # The queue.

    def _place(self, request: FleetRequest) -> None:
        self._expire()
        traffic = self.sent[request].traffic
        entry = QueueEntry(
            Target(MODEL), traffic.key, traffic.weight, traffic.priority, self.now,
            self.now + self.options.max_wait_s,
        )  # fmt: skip
        outcome, displaced = self.queue.offer(entry, self._can_start)
        if outcome is Outcome.START:
            self._send(request)
        elif outcome is Outcome.WAIT:
            if displaced is not None:
                self.queue.remove(displaced)
                self._refuse(displaced, Outcome.DISPLACED)
            self.queue.push(entry)
            self._held[entry] = request
        else:
            self.sent[request].outcome = outcome

    def _finish_iteration(self, worker: int) -> None:
        super()._finish_iteration(worker)
        self._expire()
        self.clock.time = self.now
        while (entry := self.queue.pop(self._can_start, self.now)) is not None:
            self._send(self._held.pop(entry))

    def _send(self, request: FleetRequest) -> None:
        sent = self.sent[request]
        sent.outcome, sent.waited_s = Outcome.START, self.now - request.arrival_s
        self._charged[request] = self.queue.accounts.started(sent.traffic.key, request.prompt_tokens)
        super()._place(request)

    def _expire(self) -> None:
        for entry in self.queue.expired(self.now):
            self._refuse(entry, Outcome.DEADLINE)

    def _refuse(self, entry: QueueEntry, outcome: Outcome) -> None:
        sent = self.sent[self._held.pop(entry)]
        sent.outcome, sent.waited_s = outcome, self.now - entry.entered

    def _can_start(self, target: Target) -> bool:
        self.clock.time = self.now
        return any(map(self.permits.has_free, self.workers))

    # The placement of the requests that start.

    def place(self, request: FleetRequest, now: float) -> int:
        keys = [BlockKey(key) for key in request.keys[: request.prompt_tokens // BLOCK]]
        query = RouteQuery(
            MODEL,
            now,
            (PromptKeys(keys, request.prompt_tokens, float(BLOCK)),),
            request.prompt_tokens,
            fingerprint=request.conversation * 0x9E3779B97F4A7C15 % 2**64,
        )
        decision = self.permits.placed(self.router.decide(query, self.view))
        first = decision.ranking[0]
        self._dispatches[request] = self.router.dispatch(query, decision, first, now)
        return first.worker.index

    def first_token(self, request: FleetRequest, now: float) -> None:
        self._dispatches[request].first_token(now)

    def finished(self, request: FleetRequest, now: float) -> None:
        self._dispatches.pop(request).finish(now)
        key = self.sent[request].traffic.key
        self.queue.accounts.finished(key, self._charged.pop(request), request.output_tokens)

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        raise NotImplementedError  # these engines record no events


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The figures of one key. Times in seconds, `tokens` per second of prompts and answers completed."""

    sent: int
    done: int
    tokens_per_s: float
    p50_ttft_s: float
    p90_ttft_s: float
    longest_wait_s: float
    p99_refusal_s: float
    """From the arrival of a refused request to its answer."""
    refused: dict[str, int] = field(default_factory=dict)


def outcomes(sent: Sequence[Sent], start: float, end: float) -> Outcomes:
    """The figures of requests that arrived in [start, end), and of the tokens completed in that time."""
    arrived = [one for one in sent if start <= one.request.arrival_s < end]
    done = [one for one in arrived if one.is_done]
    completed = sum(one.tokens for one in sent if one.is_done and start <= one.request.finished_s < end)
    ttft = sorted(one.request.ttft_s for one in done)
    refused = Counter(one.outcome.value for one in arrived if not one.is_done)
    return Outcomes(
        len(arrived),
        len(done),
        completed / (end - start),
        percentile(ttft, 0.5),
        percentile(ttft, 0.9),
        max((one.waited_s for one in arrived), default=0.0),
        percentile(sorted(one.waited_s for one in arrived if not one.is_done), 0.99),
        dict(refused),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values; 0 without values."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def run(
    traffics: Sequence[Traffic],
    options: AdmissionOptions,
    *,
    workers: int,
    seconds: float,
    warm_up: float,
    seed: int = 0,
) -> dict[str, Outcomes]:
    """Run traffics together; the figures by key, of the time after `warm_up` seconds."""
    fleet = AdmissionFleet(workers, options)
    for number, traffic in enumerate(traffics):
        fleet.offer(traffic, seconds, Random(seed * 1000 + number))
    fleet.run()
    return {
        traffic.key: outcomes(
            [one for one in fleet.sent.values() if one.traffic is traffic], warm_up, seconds
        )
        for traffic in traffics
    }
