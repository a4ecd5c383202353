"""Chats over a common system prompt in virtual time, placed by the gateway's own router."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvroute.blocks.keys import PromptKeys
from kvroute.fleet.worker import FleetView, HealthState, Worker, WorkerFacts, WorkerId, WorkerSpec
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Dispatch, Router
from kvroute.routing.strategy import RouteQuery
from kvroute.sim.fleet import (
    ChatClients,
    ChatShape,
    FleetRequest,
    SimFleet,
    imbalance,
    make_engines,
    returned_share,
)
from kvroute.sim.timing import TimingModel
from kvroute.wire.vllm import KvEvent

pytestmark = pytest.mark.heavy


class RouterPlacement:
    """A `Placement` that uses the router as the gateway does. Mutable: the requests in flight."""

    def __init__(self, size: int, *, capacity_tokens: int, strategy: str) -> None:
        self.router = Router(RoutingOptions(strategy=strategy))
        self.workers = [
            Worker(
                WorkerSpec(WorkerId(f"w{number}"), f"http://w{number}"),
                state=HealthState.HEALTHY,
                facts=WorkerFacts(capacity_tokens=capacity_tokens, block_size=16),
                index=number,
            )
            for number in range(size)
        ]
        for worker in self.workers:
            self.router.worker_joined(worker)
        self._view = FleetView("model", tuple(self.workers), 1)
        self._running: dict[FleetRequest, Dispatch] = {}

    def place(self, request: FleetRequest, now: float) -> int:
        keys = request.keys[: request.prompt_tokens // 16]
        query = RouteQuery(
            "model",
            now,
            (PromptKeys(keys, request.prompt_tokens, 16.0),),
            request.prompt_tokens,
            session_key=str(request.conversation),
            fingerprint=request.conversation,
        )
        decision = self.router.decide(query, self._view)
        first = decision.ranking[0]
        self._running[request] = self.router.dispatch(query, decision, first, now)
        return first.worker.index

    def first_token(self, request: FleetRequest, now: float) -> None:
        self._running[request].first_token(now)

    def finished(self, request: FleetRequest, now: float) -> None:
        self._running.pop(request).finish(now)

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        raise AssertionError("nothing was to be recorded")


def run_chats(
    strategy: str,
    *,
    workers: int,
    clients: int,
    requests: int,
    capacity_tokens: int = 1_200_000,
    seed: int = 0,
) -> tuple[SimFleet, RouterPlacement]:
    """`clients` per worker, closed loop, until `requests` requests are answered."""
    placement = RouterPlacement(workers, capacity_tokens=capacity_tokens, strategy=strategy)
    fleet = SimFleet(make_engines(workers, capacity_tokens=capacity_tokens), placement)
    ChatClients(fleet, clients=workers * clients, requests=requests, shape=ChatShape(), seed=seed).start()
    fleet.run()
    assert len(fleet.done) == requests
    return fleet, placement


@pytest.mark.parametrize("seed", [0, 1])
def test_chats_of_8k_tokens_return_to_their_worker_and_all_workers_compute_alike(seed: int) -> None:
    """7 workers, 64 clients each, a common system prompt of 1K tokens."""
    fleet, placement = run_chats("prefixaware", workers=7, clients=64, requests=3000, seed=seed)

    assert imbalance(fleet.computed_tokens()) <= 1.2
    assert returned_share(fleet.done) >= 0.85
    loads = [worker.load for worker in placement.workers]
    assert {(load.in_flight, load.active_tokens, load.queued) for load in loads} == {(0, 0, 0)}


def test_chats_that_return_to_their_worker_save_compute() -> None:
    """With round robin the same chats are spread as evenly, but the engines compute most of their tokens
    again."""
    aware, _ = run_chats("prefixaware", workers=3, clients=16, requests=600)
    even, _ = run_chats("roundrobin", workers=3, clients=16, requests=600)

    assert returned_share(even.done) < 0.5
    assert imbalance(even.computed_tokens()) <= 1.2
    assert sum(aware.computed_tokens()) < 0.7 * sum(even.computed_tokens())


def test_chats_that_do_not_fit_lose_no_more_than_with_blind_placement() -> None:
    """There is memory for three quarters of the chats. Evictions must not concentrate on one worker and must
    not exceed those of blind placement."""
    tight = {"workers": 4, "clients": 24, "requests": 1200, "capacity_tokens": 160_000}
    aware, _ = run_chats("prefixaware", **tight)
    even, _ = run_chats("roundrobin", **tight)

    assert imbalance(aware.computed_tokens()) <= 1.2
    assert sum(aware.computed_tokens()) < 0.9 * sum(even.computed_tokens())


def test_a_few_chats_over_a_short_common_prompt_do_not_follow_it_to_one_worker() -> None:
    """12 chats on 2 engines that are ten times faster than the cost model assumes: the worker that holds the
    common prompt is idle whenever another chat starts. The same test with real engines:
    tests/engine/test_cached_tokens.py."""
    fast = TimingModel(fixed_s=2e-3, weights_s=5e-4, token_s=2e-5, attention_s=1e-8, kv_s=0.0)
    shape = ChatShape(128, 288, mean_turns=8, turn_tokens=112, output_tokens=16, think_s=0.5)
    ratios = []
    for seed in range(20):
        placement = RouterPlacement(2, capacity_tokens=8_800, strategy="prefixaware")
        fleet = SimFleet(make_engines(2, capacity_tokens=8_800, timing=fast), placement)
        ChatClients(fleet, clients=12, requests=96, shape=shape, seed=seed).start()
        fleet.run()
        computed = fleet.computed_tokens()
        ratios.append(max(computed) / max(1, min(computed)))
        assert returned_share(fleet.done) >= 0.85

    assert sorted(ratios)[-2] <= 1.5, "one of twenty may be unlucky"


def test_a_run_repeats_exactly() -> None:
    first, again = (run_chats("prefixaware", workers=2, clients=8, requests=150)[0] for _ in range(2))

    assert [(r.worker, r.finished_s) for r in first.done] == [(r.worker, r.finished_s) for r in again.done]
