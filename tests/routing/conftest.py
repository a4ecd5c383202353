from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import BlockKey, PromptKeys
from kvroute.fleet.worker import FleetView, HealthState, Worker, WorkerFacts, WorkerId, WorkerSpec
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Dispatch, Router
from kvroute.routing.strategy import RouteQuery
from kvroute.sim.fleet import FleetRequest, SimFleet, make_engines

MODEL = "model"


def new_worker(index: int, capacity_tokens: int = 1_200_000, block_size: int = 16) -> Worker:
    return Worker(
        WorkerSpec(WorkerId(f"worker-{index}"), f"http://10.0.0.{index}:8000"),
        state=HealthState.HEALTHY,
        facts=WorkerFacts(frozenset([MODEL]), capacity_tokens=capacity_tokens, block_size=block_size),
        index=index,
    )


def fleet_of(*workers: Worker, version: int = 1) -> FleetView:
    return FleetView(MODEL, tuple(sorted(workers, key=lambda worker: worker.id)), version)


def fresh_keys(rng: random.Random, tokens: int) -> list[BlockKey]:
    """Keys of a prompt that shares nothing: any distinct numbers are a chain of their own."""
    return [BlockKey(rng.getrandbits(64)) for _ in range(tokens // 16)]


class VirtualFleet:
    """Simulated engines in virtual time behind a real router, which gets the gateway's calls."""

    def __init__(
        self, workers: int, strategy: str = "prefixaware", *, capacity_tokens: int = 1_200_000
    ) -> None:
        self.router = Router(RoutingOptions(strategy=strategy))
        self.workers = [new_worker(index, capacity_tokens) for index in range(workers)]
        for worker in self.workers:
            self.router.worker_joined(worker)
        self.view = fleet_of(*self.workers)
        self.fleet = SimFleet(make_engines(workers, capacity_tokens=capacity_tokens), self)
        self.matched_tokens = 0
        self.streamed = True
        self._open: dict[FleetRequest, Dispatch] = {}

    def ask(self, at: float, keys: Sequence[BlockKey], tokens: int, output_tokens: int) -> FleetRequest:
        """Have a request arrive; `keys` cover prompt and answer."""
        request = FleetRequest(keys, tokens, output_tokens)
        self.fleet.submit(request, at)
        return request

    def place(self, request: FleetRequest, now: float) -> int:
        tokens = request.prompt_tokens
        prompt = PromptKeys(list(request.keys[: tokens // 16]), tokens, 16.0)
        session = f"chat {request.conversation}"
        fingerprint = xxh3_64_intdigest(repr((request.keys[-1], tokens)).encode())
        query = RouteQuery(MODEL, now, (prompt,), tokens, session, self.streamed, fingerprint)
        decision = self.router.decide(query, self.view)
        best = decision.ranking[0]
        self.matched_tokens += best.matched_tokens
        self._open[request] = self.router.dispatch(query, decision, best, now)
        return best.worker.index

    def first_token(self, request: FleetRequest, now: float) -> None:
        if self.streamed:
            self._open[request].first_token(now)

    def finished(self, request: FleetRequest, now: float) -> None:
        self._open.pop(request).finish(now)

    def events(self, worker: int, events: object, now: float) -> None:
        raise AssertionError("nothing is recorded")

    def shares(self) -> list[int]:
        """Requests that each worker answered."""
        taken = Counter(request.worker for request in self.fleet.done)
        return [taken[worker.index] for worker in self.workers]

    def is_at_rest(self) -> bool:
        """Whether every figure that must return to zero has."""
        return all(
            (worker.load.in_flight, worker.load.active_tokens, worker.load.queued) == (0, 0, 0)
            and worker.load.wait(self.fleet.now) == 0.0
            and self.router.describe_worker(worker)["active_blocks"] == 0
            for worker in self.workers
        )


@pytest.fixture
def rng() -> random.Random:
    return random.Random(20)


@pytest.fixture
def make_worker() -> Callable[..., Worker]:
    return new_worker


@pytest.fixture
def make_view() -> Callable[..., FleetView]:
    return fleet_of


@pytest.fixture(scope="session")
def make_view_of() -> Callable[[set[int], int], FleetView]:
    """A view of the workers with these indices, the same workers each time."""
    workers = [new_worker(index) for index in range(6)]
    return lambda indices, version: fleet_of(*(workers[index] for index in indices), version=version)


@pytest.fixture
def virtual_fleet() -> type[VirtualFleet]:
    return VirtualFleet


@pytest.fixture
def keys_of() -> Callable[[random.Random, int], list[BlockKey]]:
    return fresh_keys


def new_query(
    now: float = 0.0,
    *,
    tokens: int = 1000,
    keys: Sequence[BlockKey] | None = None,
    session_key: str | None = None,
    streamed: bool = True,
    fingerprint: int = 1,
    block_tokens: float = 16.0,
    model: str = MODEL,
    parent_session: str | None = None,
) -> RouteQuery:
    prompts = () if keys is None else (PromptKeys(keys, tokens, block_tokens),)
    return RouteQuery(
        *(model, now, prompts, tokens, session_key, streamed, fingerprint), parent_session=parent_session
    )


@pytest.fixture
def query() -> Callable[..., RouteQuery]:
    """A request; by default of 1,000 tokens and without a prompt."""
    return new_query


@pytest.fixture
def send() -> Callable[..., Dispatch]:
    """Decide and dispatch one query on a router."""

    def send(router: Router, query: RouteQuery, view: FleetView, now: float | None = None) -> Dispatch:
        decision = router.decide(query, view)
        return router.dispatch(query, decision, decision.ranking[0], query.now if now is None else now)

    return send
