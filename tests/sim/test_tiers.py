from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvroute.sim.cache import TierReports
from kvroute.sim.cache_tiers import LruTier, TierChange
from kvroute.sim.fleet import FleetRequest
from kvroute.sim.tiers import GPU_ONLY, Filling, TieredFleet, TierOptions, make_tiered_engines
from kvroute.sim.timing import TimingModel
from kvroute.wire.vllm import KvEvent

BLOCK = 512
TOKEN_S = 1e-3
PLAIN = TimingModel(fixed_s=0.0, weights_s=0.0, token_s=TOKEN_S, attention_s=0.0, kv_s=0.0)


class Fixed:
    """Sends each request to the worker with the number of its conversation."""

    def __init__(self) -> None:
        self.received: list[tuple[int, int, float]] = []

    def place(self, request: FleetRequest, now: float) -> int:
        return request.conversation

    def first_token(self, request: FleetRequest, now: float) -> None:
        pass

    def finished(self, request: FleetRequest, now: float) -> None:
        pass

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        self.received.append((worker, len(events), now))


def fleet_of(tiers: TierOptions, *, capacity_tokens: int = 100 * BLOCK, delay_s: float = 0.0) -> TieredFleet:
    engines = make_tiered_engines(
        2, capacity_tokens=capacity_tokens, timing=PLAIN, tiers=tiers, record_events=delay_s > 0
    )
    return TieredFleet(engines, Fixed(), event_delay_s=delay_s)


def ask(fleet: TieredFleet, at: float, worker: int, first: int, blocks: int = 4) -> FleetRequest:
    keys = list(range(first, first + blocks))
    request = FleetRequest(keys, BLOCK * blocks + 1, 1, conversation=worker)
    fleet.submit(request, at)
    return request


def bytes_s(seconds_a_block: float) -> float:
    return BLOCK * 100 / seconds_a_block


def test_blocks_that_one_worker_computed_are_fetched_by_another_from_the_store() -> None:
    tiers = TierOptions(
        l1_tokens=0, l2_worker_bytes_s=bytes_s(0.1), l2_bytes_s=1e12, l2_latency_s=0.5, token_bytes=100
    )
    fleet = fleet_of(tiers)
    ask(fleet, 0.0, 0, 1)
    other = ask(fleet, 10.0, 1, 1)

    fleet.run()

    assert other.cached_tokens == 4 * BLOCK
    assert other.ttft_s == pytest.approx(4 * 0.1 + 0.5 + TOKEN_S)
    assert fleet.computed_tokens() == [4 * BLOCK + 1, 1]


def test_blocks_that_the_gpu_evicted_are_fetched_from_l1() -> None:
    tiers = TierOptions(l1_tokens=100 * BLOCK, l1_bytes_s=bytes_s(0.01), l2_tokens=0, token_bytes=100)
    fleet = fleet_of(tiers, capacity_tokens=6 * BLOCK)
    ask(fleet, 0.0, 0, 1)
    ask(fleet, 10.0, 0, 50)
    again = ask(fleet, 20.0, 0, 1)

    fleet.run()

    assert again.cached_tokens == 4 * BLOCK
    assert again.ttft_s == pytest.approx(again.cached_tokens / BLOCK * 0.01 + TOKEN_S, abs=0.02)


def test_without_slower_tiers_everything_is_computed_again_elsewhere() -> None:
    fleet = fleet_of(GPU_ONLY)
    ask(fleet, 0.0, 0, 1)
    other = ask(fleet, 10.0, 1, 1)

    fleet.run()

    assert other.cached_tokens == 0


def test_the_store_serves_all_workers_one_after_another() -> None:
    tiers = TierOptions(
        l1_tokens=0, l2_worker_bytes_s=1e12, l2_bytes_s=bytes_s(0.1), l2_latency_s=0.0, token_bytes=100
    )
    fleet = fleet_of(tiers)
    ask(fleet, 0.0, 0, 1)
    ask(fleet, 0.0, 0, 50)
    first, second = ask(fleet, 20.0, 1, 1), ask(fleet, 20.0, 1, 50)

    fleet.run()

    assert first.ttft_s == pytest.approx(0.4 + TOKEN_S)
    assert second.ttft_s == pytest.approx(0.8 + TOKEN_S)


def test_a_fetch_does_not_delay_other_requests() -> None:
    tiers = TierOptions(l1_tokens=0, l2_worker_bytes_s=bytes_s(1.0), l2_bytes_s=1e12, token_bytes=100)
    fleet = fleet_of(tiers)
    ask(fleet, 0.0, 0, 1)
    fetching, new = ask(fleet, 10.0, 1, 1), ask(fleet, 10.0, 1, 50)

    fleet.run()

    assert new.ttft_s == pytest.approx((4 * BLOCK + 1) * TOKEN_S)
    assert fetching.ttft_s == pytest.approx(4.0, abs=0.1)


def test_blocks_cannot_be_loaded_before_they_are_written() -> None:
    """4 blocks need 2.05 s to compute, 0.4 s into L1 and then 4 s into the store."""
    tiers = TierOptions(
        l1_bytes_s=bytes_s(0.1), l2_worker_bytes_s=bytes_s(1.0), l2_bytes_s=1e12, token_bytes=100
    )
    for at, cached in ((6.3, 0), (6.5, 4 * BLOCK)):
        fleet = fleet_of(tiers)
        ask(fleet, 0.0, 0, 1)
        other = ask(fleet, at, 1, 1)

        fleet.run()

        assert other.cached_tokens == cached


def test_each_chunk_of_a_long_prompt_is_stored_when_it_is_computed() -> None:
    """The first 8,192 tokens are in the store while the engine is at the next ones."""
    tiers = TierOptions(l1_tokens=0, l2_worker_bytes_s=1e12, l2_bytes_s=1e12, token_bytes=100)
    fleet = fleet_of(tiers)
    ask(fleet, 0.0, 0, 1, blocks=32)
    other = ask(fleet, 10.0, 1, 1, blocks=32)

    fleet.run()

    assert other.cached_tokens == 16 * BLOCK


@pytest.mark.parametrize(("stores_answers", "cached"), [(False, 4 * BLOCK), (True, 7 * BLOCK)])
def test_answers_are_stored_only_with_stores_answers(stores_answers, cached) -> None:
    tiers = TierOptions(l1_tokens=0, token_bytes=100, stores_answers=stores_answers)
    fleet = fleet_of(tiers)
    keys = list(range(1, 9))
    fleet.submit(FleetRequest(keys, 4 * BLOCK, 4 * BLOCK, conversation=0), 0.0)
    next_turn = FleetRequest(keys, 8 * BLOCK, 1, conversation=1)
    fleet.submit(next_turn, 10.0 + 4 * BLOCK)

    fleet.run()

    assert next_turn.cached_tokens == cached


@pytest.mark.parametrize(("filling", "during", "after"), [("computed", 4, 4), ("ended", 0, 7)])
def test_with_filling_ended_the_store_gets_prompt_and_answer_only_at_the_requests_end(
    filling: str, during: int, after: int
) -> None:
    """The prompt takes 2 s, the write of its blocks into the store 1 s (COMPUTED only), the answer 2 s."""
    tiers = TierOptions(
        l1_tokens=0,
        l2_bytes_s=bytes_s(0.25),
        l2_worker_bytes_s=1e12,
        token_bytes=100,
        filling=Filling(filling),
    )
    fleet = fleet_of(tiers)
    keys = list(range(1, 9))
    answered_s = (4 * BLOCK + 4 * BLOCK - 1) * TOKEN_S
    fleet.submit(FleetRequest(keys, 4 * BLOCK, 4 * BLOCK, conversation=0), 0.0)
    seen = []
    for at in (answered_s - 0.01, answered_s + 0.01):
        fleet.run(until=at)
        fleet._tiered(1).tiers.store.apply_due(at)
        seen.append(sum(fleet._tiered(1).tiers.lookup(keys, 0, 8)))

    assert seen == [during, after]


@pytest.mark.parametrize("keeps_loaded", [False, True])
def test_blocks_from_the_store_stay_in_l1_only_with_keeps_loaded(keeps_loaded) -> None:
    fleet = fleet_of(TierOptions(token_bytes=100, keeps_loaded=keeps_loaded))
    ask(fleet, 0.0, 0, 1)
    ask(fleet, 10.0, 1, 1)

    fleet.run()

    engine = fleet._tiered(1)
    engine.tiers.store.apply_due(fleet.now)
    assert engine.tiers.lookup([1, 2, 3, 4], 0, 4) == ((4, 0) if keeps_loaded else (0, 4))


def test_blocks_in_l1_are_read_from_l1_and_the_others_from_the_store() -> None:
    fleet = fleet_of(TierOptions(token_bytes=100))
    tiers = fleet._tiered(0).tiers
    tiers.l1.put([1, 3])
    tiers.store.tier.put([1, 2, 3, 4, 6])

    assert tiers.lookup([1, 2, 3, 4, 5, 6], 0, 6) == (2, 2)
    assert tiers.lookup([1, 2, 3, 4, 5, 6], 1, 6) == (1, 2)


def test_writes_wait_for_each_other_at_the_shared_store() -> None:
    tiers = TierOptions(
        l1_tokens=0, l2_worker_bytes_s=1e12, l2_bytes_s=bytes_s(1.0), l2_latency_s=0.0, token_bytes=100
    )
    fleet = fleet_of(tiers)
    for worker, first in ((0, 1), (1, 50)):
        fleet._tiered(worker).tiers.write(range(first, first + 4), 0.0)
    store = fleet._tiered(0).tiers.store

    store.apply_due(7.0)
    held = 50 in store.tier
    store.apply_due(8.0)

    assert 1 in store.tier
    assert (held, 50 in store.tier) == (False, True)


def test_a_prefetch_loads_the_stores_blocks_into_l1_while_a_request_waits() -> None:
    """The load takes 8 s. Without a prefetch it starts with the last chunk of the prompt before, 4 s before
    its end."""

    def last_first_token(*, prefetch: bool) -> float:
        fleet = fleet_of(TierOptions(l2_worker_bytes_s=bytes_s(2.0), l2_bytes_s=1e12, token_bytes=100))
        ask(fleet, 0.0, 0, 1)
        ask(fleet, 30.0, 1, 50, blocks=40)
        behind = ask(fleet, 30.1, 1, 1)
        fleet.run(until=30.1)
        if prefetch:
            fleet._tiered(1).tiers.prefetch([1, 2, 3, 4], 30.1)
        fleet.run()
        assert behind.cached_tokens == 4 * BLOCK
        return behind.ttft_s

    assert last_first_token(prefetch=True) < last_first_token(prefetch=False) - 3.5


def test_a_lookup_before_the_end_of_its_prefetch_loads_the_blocks_again() -> None:
    fleet = fleet_of(TierOptions(l2_worker_bytes_s=bytes_s(1.0), l2_bytes_s=1e12, token_bytes=100))
    tiers = fleet._tiered(0).tiers
    tiers.store.tier.put([1, 2, 3, 4])
    tiers.prefetch([1, 2, 3, 4], 0.0)

    ready = tiers.load([1, 2, 3, 4], 0, *tiers.lookup([1, 2, 3, 4], 0, 4), now=1.0)

    assert ready == pytest.approx(8.0, abs=0.1)


def test_a_server_reports_immediately_but_at_most_once_per_interval() -> None:
    reports = TierReports(1.0)

    assert [reports.report_time(at) for at in (5.0, 5.1, 5.9, 6.0, 6.5, 9.0, 9.5)] == [
        5.0,
        6.0,
        6.0,
        7.0,
        7.0,
        9.0,
        10.0,
    ]


def test_changes_of_the_tiers_arrive_when_the_server_reports_them() -> None:
    received: list[tuple[float, int, TierChange]] = []
    engines = make_tiered_engines(
        2, capacity_tokens=100 * BLOCK, timing=PLAIN, tiers=TierOptions(token_bytes=100)
    )
    fleet = TieredFleet(
        engines,
        Fixed(),
        event_delay_s=0.25,
        on_tiers=lambda worker, change, now: received.append((now, worker, change)),
    )
    for at in (0.0, 3.0, 3.3, 4.5):  # the second comes before any report, the third after that of L1
        ask(fleet, at, 0, 1 + int(at) * 50)

    fleet.run()

    first = [(now, change.is_shared) for now, worker, change in received if 1 in change.stored]
    assert first == [(3.0, False), (3.3, True)]
    assert all(list(change.stored) and not change.removed for _, _, change in received)


def test_events_come_late_and_in_order() -> None:
    fleet = fleet_of(GPU_ONLY, delay_s=5.0)
    for at in (0.0, 3.0, 6.0, 9.0, 12.0):
        ask(fleet, at, 0, 1 + int(at) * 10)

    fleet.run()

    placement = fleet.placement
    assert isinstance(placement, Fixed)
    assert [now for _, _, now in placement.received] == [9.0, 12.0]


def test_a_tier_evicts_the_least_recently_used_prompt_last_blocks_first() -> None:
    tier = LruTier(4)
    tier.put([1, 2, 3])
    tier.put([7, 8])

    assert tier.run_end([1, 2, 3], 0, 3) == 2
    assert tier.run_end([7, 8], 0, 2) == 2
    assert LruTier(0).run_end([1], 0, 1) == 0
