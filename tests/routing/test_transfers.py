from __future__ import annotations

import pytest

from kvroute.routing.caches import Tokens
from kvroute.routing.cost import TierLoad
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


def test_a_place_that_left_leaves_no_queue_behind(transfers) -> None:
    transfers.start(A, Tokens(l1=1000), 0.0)

    transfers.forget(A)

    assert transfers.load(A, Tokens(l1=1000), 0.0).ready_s == pytest.approx(0.01)
