"""Two gateways that share nothing send to the same workers, in virtual time."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from kvroute.fleet.foreign import PAGES, EngineFigures, OwnRequests, SeenPage, foreign_load, others_of
from kvroute.fleet.load import Reservation
from kvroute.fleet.worker import HealthState, Worker, WorkerId, WorkerSpec
from kvroute.index.radix_history import RadixHistory
from kvroute.routing.cost import CostModel
from kvroute.routing.strategy import RouteQuery

WORKERS = 4
POLL_S = 5.0
STEP_S = 0.05
DECODE_S = 2.0


@dataclass
class Job:
    prefill_s: float
    owner: Reservation | None
    ends: float = 0.0


@dataclass
class Engine:
    """Prefills one request after another; a prefilled one runs for `DECODE_S`."""

    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    work_s: float = 0.0
    ended: int = 0

    def step(self, now: float) -> None:
        budget = STEP_S
        while self.waiting and budget > 0:
            head = self.waiting[0]
            done = min(budget, head.prefill_s)
            head.prefill_s -= done
            budget -= done
            self.work_s -= done
            if head.prefill_s <= 1e-9:
                self.running.append(self.waiting.popleft())
                head.ends = now + DECODE_S
                if head.owner:
                    head.owner.first_token(now)
        for job in [each for each in self.running if each.ends <= now]:
            self.running.remove(job)
            self.ended += 1
            if job.owner:
                job.owner.finish(now)

    def add(self, job: Job) -> None:
        self.waiting.append(job)
        self.work_s += job.prefill_s


class Counts:
    """Requests sent to each worker."""

    def __init__(self) -> None:
        self.sent = [0] * WORKERS


class Gateway:
    def __init__(self) -> None:
        self.workers = [
            Worker(WorkerSpec(WorkerId(f"w{n}"), f"http://w{n}"), state=HealthState.HEALTHY, index=n)
            for n in range(WORKERS)
        ]
        self.costs = CostModel(RadixHistory(10_000))
        self.pages: list[deque[SeenPage]] = [deque(maxlen=PAGES) for _ in range(WORKERS)]
        self.peaks = [OwnRequests(0, 0, 0)] * WORKERS

    def poll(self, engines: list[Engine], now: float) -> None:
        for n, (worker, engine) in enumerate(zip(self.workers, engines, strict=True)):
            page = EngineFigures(len(engine.waiting), len(engine.running), 0.0, engine.ended, now)
            own = OwnRequests(*map(max, self.peaks[n], worker.load.take_peaks()))
            self.pages[n].append(SeenPage(page, others_of(page, own, worker.capacity_tokens)))
            recent = worker.load.recent(now)
            worker.set_foreign(
                foreign_load(
                    tuple(self.pages[n]),
                    ranks=1,
                    prefill_s=recent[0] / recent[1] if recent[1] else 0.0,
                    residence_s=worker.load.residence_s,
                )
            )

    def look(self) -> None:
        self.peaks = [worker.load.take_peaks() for worker in self.workers]

    def send(self, engines: list[Engine], tokens: int, fingerprint: int, now: float) -> int:
        query = RouteQuery(model="m", now=now, tokens=tokens, fingerprint=fingerprint)
        candidate = self.costs.rank(query, self.workers)[0]
        worker = candidate.worker
        prefill_s = candidate.terms.prefill
        engines[worker.index].add(Job(prefill_s, worker.load.reserve(now, prefill_s, tokens)))
        return worker.index


def run(
    *, sees: bool, load: float, seed: int, strangers: int = 0, counts: Counts | None = None
) -> tuple[float, float]:
    """Max over mean of the work that waits, and its mean in seconds.

    `strangers` requests of 0.5 s wait on one worker at first. Both gateways poll at the same times.
    """
    rng = random.Random(seed)
    engines = [Engine() for _ in range(WORKERS)]
    gateways = [Gateway(), Gateway()]
    for _ in range(strangers):
        engines[0].add(Job(0.5, None))
    tokens, now, steps = 2000, 0.0, 0
    query = RouteQuery(model="m", now=0.0, tokens=tokens)
    each_s = gateways[0].costs.rank(query, gateways[0].workers)[0].terms.prefill
    rate = load * WORKERS / each_s
    most = mean = 0.0
    while now < 300.0:
        now = steps * STEP_S
        for engine in engines:
            engine.step(now)
        if steps % round(1 / STEP_S) == 0:
            for gateway in gateways:
                if sees and steps % round(POLL_S / STEP_S) == 0:
                    gateway.poll(engines, now)
                gateway.look()
        for gateway in gateways:
            for _ in range(_arrivals(rng, rate / 2 * STEP_S)):
                worker = gateway.send(engines, int(tokens * rng.uniform(0.2, 1.8)), rng.getrandbits(60), now)
                if counts is not None:
                    counts.sent[worker] += 1
        works = [engine.work_s for engine in engines]
        most += max(works)
        mean += sum(works) / WORKERS
        steps += 1
    return most / mean, mean / steps


def _arrivals(rng: random.Random, mean: float) -> int:
    count, left = 0, rng.expovariate(1.0)
    while left < mean:
        count += 1
        left += rng.expovariate(1.0)
    return count


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
def test_two_gateways_that_see_the_same_pages_do_not_swing_together(load: float, seed: int) -> None:
    blind_ratio, blind_s = run(sees=False, load=load, seed=seed)
    ratio, wait_s = run(sees=True, load=load, seed=seed)

    assert ratio < 1.15 * blind_ratio
    assert wait_s < 1.15 * blind_s + 0.05


def test_both_leave_a_worker_alone_that_others_keep_busy() -> None:
    blind, seeing = Counts(), Counts()
    run(sees=False, load=0.7, seed=3, strangers=600, counts=blind)
    run(sees=True, load=0.7, seed=3, strangers=600, counts=seeing)

    assert seeing.sent[0] < 0.2 * blind.sent[0]
