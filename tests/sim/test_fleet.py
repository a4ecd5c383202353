from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvroute.sim.fleet import (
    ChatClients,
    ChatShape,
    FleetRequest,
    SimFleet,
    imbalance,
    make_engines,
    returned_share,
)
from kvroute.wire.vllm import BlockStored, KvEvent


class RecordingPlacement:
    """Places requests by conversation and records every call."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.calls: list[tuple[str, int, float]] = []
        self.stored = 0

    def place(self, request: FleetRequest, now: float) -> int:
        self.calls.append(("place", id(request), now))
        return request.conversation % self.workers

    def first_token(self, request: FleetRequest, now: float) -> None:
        self.calls.append(("first", id(request), now))

    def finished(self, request: FleetRequest, now: float) -> None:
        self.calls.append(("finished", id(request), now))

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        self.stored += sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))


def test_one_request_takes_what_the_timing_model_says() -> None:
    engines = make_engines(1)
    placement = RecordingPlacement(1)
    fleet = SimFleet(engines, placement)
    request = FleetRequest(list(range(70)), 1000, 3)

    fleet.submit(request, 5.0)
    fleet.run()

    timing = engines[0].timing
    first = timing.iteration_s(1000, 1000 * 500, 0)
    rest = timing.iteration_s(1, 0, 1001) + timing.iteration_s(1, 0, 1002)
    assert request.ttft_s == pytest.approx(first)
    assert request.finished_s == pytest.approx(5.0 + first + rest)
    assert [what for what, _, _ in placement.calls] == ["place", "first", "finished"]
    assert fleet.done == [request]


def test_a_run_can_stop_at_a_time_and_continue() -> None:
    fleet = SimFleet(make_engines(1), RecordingPlacement(1))
    late, early = FleetRequest([1], 20, 1), FleetRequest([2], 20, 1)
    fleet.submit(late, 10.0)
    fleet.submit(early, 1.0)

    fleet.run(until=5.0)
    assert fleet.done == [early]

    fleet.run()
    assert fleet.done == [early, late]


def test_a_repeat_on_the_same_worker_hits_and_elsewhere_does_not() -> None:
    fleet = SimFleet(make_engines(2), RecordingPlacement(2))
    keys = list(range(6))
    requests = [FleetRequest(keys, 96, 1, conversation=n) for n in (0, 0, 1)]
    for at, request in enumerate(requests):
        fleet.submit(request, float(at))
    fleet.run()

    assert [request.cached_tokens for request in requests] == [0, 80, 0]
    assert fleet.computed_tokens() == [112, 96]


def test_events_reach_the_placement_when_recorded() -> None:
    for record, stored in ((True, 6), (False, 0)):
        placement = RecordingPlacement(1)
        fleet = SimFleet(make_engines(1, record_events=record), placement)
        fleet.submit(FleetRequest(list(range(6)), 96, 1), 0.0)
        fleet.run()

        assert placement.stored == stored


def test_a_request_that_never_fits_is_an_error() -> None:
    fleet = SimFleet(make_engines(1, capacity_tokens=64), RecordingPlacement(1))
    fleet.submit(FleetRequest(list(range(6)), 96, 1), 0.0)

    with pytest.raises(ValueError, match="does not fit"):
        fleet.run()


def test_chat_clients_send_the_requested_number_and_each_turn_follows_the_one_before() -> None:
    placement = RecordingPlacement(3)
    fleet = SimFleet(make_engines(3, block_size=64), placement)
    shape = ChatShape(system_tokens=256, context_tokens=1024, output_tokens=32, think_s=1.0)
    ChatClients(fleet, clients=6, requests=90, shape=shape, seed=3).start()
    fleet.run()

    assert len(fleet.done) == 90
    assert returned_share(fleet.done) == 1.0
    by_chat: dict[int, list[FleetRequest]] = {}
    for request in sorted(fleet.done, key=lambda r: r.arrival_s):
        by_chat.setdefault(request.conversation, []).append(request)
    for turns in by_chat.values():
        assert [request.turn for request in turns] == list(range(len(turns)))
        for before, after in pairwise(turns):
            assert after.arrival_s >= before.finished_s
            assert after.prompt_tokens == before.prompt_tokens + before.output_tokens + 128
            # The cache still has all computed tokens.
            assert after.cached_tokens == (before.prompt_tokens + before.output_tokens - 1) // 64 * 64


def test_a_seed_repeats_exactly() -> None:
    def ends(seed: int) -> list[float]:
        fleet = SimFleet(make_engines(2, block_size=64), RecordingPlacement(2))
        ChatClients(fleet, clients=4, requests=20, shape=ChatShape(context_tokens=2048), seed=seed).start()
        fleet.run()
        return [request.finished_s for request in fleet.done]

    assert ends(1) == ends(1) != ends(2)


def test_returned_share_and_imbalance() -> None:
    assert imbalance([1, 1, 4]) == 2.0
    assert imbalance([0, 0]) == 1.0
    assert returned_share([]) == 1.0
    turns = [
        FleetRequest([], 1, 1, conversation=1, turn=turn, worker=worker, arrival_s=turn)
        for turn, worker in enumerate([0, 0, 1])
    ]
    assert returned_share(turns) == 0.5
