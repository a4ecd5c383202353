from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvroute.sim.fleet import FleetRequest
from kvroute.sim.tiers import GPU_ONLY, LruTier, TieredFleet, TierOptions, make_tiered_engines
from kvroute.sim.timing import TimingModel
from kvroute.wire.events import KvEvent

BLOCK = 512
TOKEN_S = 1e-3
PLAIN = TimingModel(fixed_s=0.0, weights_s=0.0, token_s=TOKEN_S, attention_s=0.0, kv_s=0.0)


class Fixed:
    """Sends each request where its conversation's number says."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int, float]] = []

    def place(self, request: FleetRequest, now: float) -> int:
        return request.conversation

    def first_token(self, request: FleetRequest, now: float) -> None:
        pass

    def finished(self, request: FleetRequest, now: float) -> None:
        pass

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        self.heard.append((worker, len(events), now))


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


def test_what_one_worker_computed_another_fetches_from_the_store() -> None:
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


def test_what_the_gpu_has_evicted_comes_back_from_l1() -> None:
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


def test_a_fetch_holds_up_nobody_else() -> None:
    tiers = TierOptions(l1_tokens=0, l2_worker_bytes_s=bytes_s(1.0), l2_bytes_s=1e12, token_bytes=100)
    fleet = fleet_of(tiers)
    ask(fleet, 0.0, 0, 1)
    fetching, new = ask(fleet, 10.0, 1, 1), ask(fleet, 10.0, 1, 50)

    fleet.run()

    assert new.ttft_s == pytest.approx((4 * BLOCK + 1) * TOKEN_S)
    assert fetching.ttft_s == pytest.approx(4.0, abs=0.1)


@pytest.mark.parametrize("prefetch", [False, True])
def test_prefetching_loads_while_the_request_waits(prefetch) -> None:
    tiers = TierOptions(
        l1_tokens=0, l2_worker_bytes_s=bytes_s(2.0), l2_bytes_s=1e12, token_bytes=100, prefetch=prefetch
    )
    fleet = fleet_of(tiers)
    ask(fleet, 0.0, 0, 1)
    long = ask(fleet, 10.0, 1, 50, blocks=40)
    behind = ask(fleet, 10.1, 1, 1)

    fleet.run()

    assert long.ttft_s == pytest.approx((40 * BLOCK + 1) * TOKEN_S, rel=0.3)
    assert (behind.first_token_s < long.first_token_s + 1.0) == prefetch


def test_events_come_late_and_in_order() -> None:
    fleet = fleet_of(GPU_ONLY, delay_s=5.0)
    for at in (0.0, 3.0, 6.0, 9.0, 12.0):
        ask(fleet, at, 0, 1 + int(at) * 10)

    fleet.run()

    placement = fleet.placement
    assert isinstance(placement, Fixed)
    assert [now for _, _, now in placement.heard] == [9.0, 12.0]


def test_a_tier_drops_what_was_used_least_recently_ends_first() -> None:
    tier = LruTier(4)
    tier.put([1, 2, 3])
    tier.put([7, 8])

    assert tier.run([1, 2, 3], 0, 3) == 2
    assert tier.run([7, 8], 0, 2) == 2
    assert LruTier(0).run([1], 0, 1) == 0
