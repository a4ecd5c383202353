from __future__ import annotations

import pytest

from kvroute.blocks.keys import Tier
from kvroute.routing.cost import TierLoad
from kvroute.routing.strategy import Tokens
from kvroute.routing.transfers import TransferOptions, Transfers

A, B = 0, 1


@pytest.fixture
def transfers() -> Transfers:
    """10 us a token from L1, 100 us from L2, of which the store can serve two at a time."""
    return Transfers(
        TransferOptions(token_bytes=100_000, l1_gb_s=10, l2_gb_s=1, l2_store_gb_s=2, l2_latency_ms=5)
    )


def test_the_gpus_own_blocks_take_no_time(transfers) -> None:
    assert transfers.load(A, Tokens(gpu=1000), 0.0) == TierLoad(0.0, 0.0)


def test_each_tier_at_its_bandwidth(transfers) -> None:
    assert transfers.load(A, Tokens(l1=1000), 0.0) == pytest.approx(TierLoad(0.01, 0.01))
    assert transfers.load(A, Tokens(l2=1000), 0.0) == pytest.approx(TierLoad(0.105, 0.1))
    assert transfers.load(A, Tokens(l1=1000, l2=1000), 0.0) == pytest.approx(TierLoad(0.105, 0.11))


def test_a_worker_fetches_one_after_another_and_others_meanwhile(transfers) -> None:
    transfers.start(A, Tokens(l1=1000), 0.0)

    assert transfers.load(A, Tokens(l1=1000), 0.0).ready_s == pytest.approx(0.02)
    assert transfers.load(A, Tokens(l1=1000), 0.005).ready_s == pytest.approx(0.015)
    assert transfers.load(B, Tokens(l1=1000), 0.0).ready_s == pytest.approx(0.01)


def test_the_store_is_one_queue_for_all(transfers) -> None:
    transfers.start(A, Tokens(l2=1000), 0.0)

    assert transfers.load(B, Tokens(l2=1000), 0.0).ready_s == pytest.approx(0.05 + 0.105)
    assert transfers.load(A, Tokens(l2=1000), 0.0).ready_s == pytest.approx(0.1 + 0.105)


def test_measured_bandwidths_replace_configured_ones(transfers) -> None:
    transfers.learn(A, Tier.L1, 1.0, 8)
    assert transfers.load(A, Tokens(l1=1000), 0.0).own_s == pytest.approx((0.01 + 0.1) / 2)

    transfers.learn(A, Tier.L1, 1.0, 1000)
    transfers.learn(A, Tier.L2, 4.0, 1000)

    assert transfers.load(A, Tokens(l1=1000), 0.0).own_s == pytest.approx(0.1)
    # 25 us a token from L2 to L1, and 100 us from there on.
    assert transfers.load(A, Tokens(l2=1000), 0.0).own_s == pytest.approx(0.125)
    assert (transfers.gb_s(A, Tier.L1), transfers.gb_s(A, Tier.L2)) == (pytest.approx(1), pytest.approx(0.8))
    transfers.start(A, Tokens(l1=1000), 0.0)
    assert transfers.load(A, Tokens(l1=1), 0.0).ready_s == pytest.approx(0.1001)


def test_unmeasured_workers_get_the_others_bandwidth(transfers) -> None:
    transfers.learn(A, Tier.L1, 1.0, 1000)
    assert transfers.gb_s(B, Tier.L1) == pytest.approx(1)

    transfers.learn(B, Tier.L1, 4.0, 1000)
    assert transfers.gb_s(2, Tier.L1) == pytest.approx(1.6)  # 100 and 25 us a token

    transfers.forget(A)
    assert transfers.gb_s(2, Tier.L1) == pytest.approx(4)
    transfers.forget(B)
    assert transfers.gb_s(2, Tier.L1) == pytest.approx(10)


def test_a_prefix_in_a_slow_l1_is_no_reason_to_fetch_it_elsewhere_from_a_store_never_tried(transfers) -> None:
    """Seen with real engines: one slow first load made L1 look slower than the store."""
    transfers.learn(A, Tier.L1, 0.05, 1)

    there, elsewhere = (
        transfers.load(A, Tokens(l1=320), 0.0),
        transfers.load(B, Tokens(l2=320), 0.0),
    )

    assert there.own_s > 320 / 1e4  # slower than the configured bandwidth of L2
    assert there.ready_s < elsewhere.ready_s
    assert there.own_s <= elsewhere.own_s


def test_old_measurements_fade(transfers) -> None:
    transfers.learn(A, Tier.L1, 1.0, 1000)
    for _ in range(400):
        transfers.learn(A, Tier.L1, 20.0, 1)

    assert transfers.gb_s(A, Tier.L1) == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize(("tier", "gb_s", "loads"), [(Tier.GPU, 1, 1), (Tier.L1, 0, 1), (Tier.L1, 1, 0)])
def test_an_empty_measurement_changes_nothing(transfers, tier, gb_s, loads) -> None:
    transfers.learn(A, tier, gb_s, loads)

    assert (transfers.gb_s(A, Tier.L1), transfers.gb_s(A, Tier.L2)) == (pytest.approx(10), pytest.approx(1))


def test_a_place_that_left_leaves_no_queue_behind(transfers) -> None:
    transfers.start(A, Tokens(l1=1000), 0.0)
    transfers.learn(A, Tier.L1, 1.0, 1000)

    transfers.forget(A)

    assert transfers.load(A, Tokens(l1=1000), 0.0).ready_s == pytest.approx(0.01)


def test_a_peers_measured_bandwidth_is_used_unchanged(transfers) -> None:
    transfers.set_rate(A, Tier.L1, 5.0)
    transfers.set_rate(A, Tier.L2, 3.0)

    assert (transfers.gb_s(A, Tier.L1), transfers.gb_s(A, Tier.L2)) == (pytest.approx(5), pytest.approx(3))
