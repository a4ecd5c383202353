from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.routing.cost_parameters import CostOptions, Costs
from kvroute.routing.strategy import TokenWaitLimits, token_timeout_s

LIMITS = TokenWaitLimits(least_s=0.05, most_s=1.0, loss_share=0.25)
COSTS = Costs.of(CostOptions())


def deadline(tokens: int, workers: int = 2, costs: Costs = COSTS, limits: TokenWaitLimits = LIMITS) -> float:
    return token_timeout_s(tokens, workers, costs, limits)


def test_a_short_prompt_waits_for_the_least_and_a_very_long_one_for_the_most():
    assert deadline(200) == 0.05
    assert deadline(1_000_000) == 1.0


def test_between_them_a_prompt_waits_for_its_share_of_the_prefill():
    assert deadline(8000) == pytest.approx(0.25 * COSTS.prefill_s(8000, 0))
    assert 0.05 < deadline(8000) < 1.0


def test_a_prompt_that_is_cheap_to_recompute_does_not_wait_for_tokens():
    fast = Costs.of(CostOptions(token_us=2, context_token_ns=0, iteration_ms=1))

    assert deadline(8000, costs=fast) == 0.05


@pytest.mark.parametrize("workers", [0, 1])
def test_where_there_is_nothing_to_choose_nothing_can_be_lost(workers):
    assert deadline(64_000, workers=workers) == 0.05


def test_without_a_share_every_prompt_waits_for_the_least():
    assert deadline(1_000_000, limits=LIMITS._replace(loss_share=0.0)) == 0.05


def test_a_least_wait_above_the_most_is_kept():
    assert deadline(1_000_000, limits=LIMITS._replace(least_s=2.0)) == 2.0


@given(st.integers(0, 10_000_000), st.integers(0, 10_000_000))
def test_a_longer_prompt_never_waits_for_a_shorter_time(one, other):
    short, long = sorted((one, other))

    assert 0.05 <= deadline(short) <= deadline(long) <= 1.0
