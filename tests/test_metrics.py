"""A histogram counts the same whether a value is counted at once or put off."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute.metrics import Spread

BOUNDS = (0.5, 1.0, 2.0)
VALUES = st.lists(st.one_of(st.sampled_from(BOUNDS), st.integers(0, 24).map(lambda n: n / 8)), max_size=12)


@given(st.lists(VALUES, max_size=4))
def test_deferred_values_count_like_others(batches: list[list[float]]) -> None:
    immediate, deferred = Spread(BOUNDS), Spread(BOUNDS)

    for batch in batches:
        for value in batch:
            immediate.observe(value)
            deferred.later(value)
        deferred.settle()

    assert deferred.cumulative() == immediate.cumulative()
    assert deferred.sum == immediate.sum


def test_a_reader_sees_deferred_values() -> None:
    spread = Spread(BOUNDS)

    spread.later(0.75)

    assert spread.sum == 0.75
    assert spread.cumulative()[1] == ("1.0", 1.0)
