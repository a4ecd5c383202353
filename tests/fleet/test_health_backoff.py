from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.fleet.health import Backoff, BurstWindow


def bursts(answers: str, *, failures: int = 3, window_s: float = 10.0, pace_s: float = 0.1) -> list[int]:
    """Where bursts are seen in `answers`, "x" being a failure and "." a good one."""
    window = BurstWindow(failures, window_s)
    return [at for at, answer in enumerate(answers) if window.add(at * pace_s, answer == "x")]


def test_failures_in_a_row_are_a_burst_whatever_came_before() -> None:
    assert bursts("." * 1000 + "xxx") == [1002]


def test_half_of_the_answers_failing_is_a_burst() -> None:
    assert bursts("x.x.x.") == [4]


@pytest.mark.parametrize("answers", ["x....." * 100, "xx....xx....", "." * 20])
def test_rare_failures_are_no_burst(answers: str) -> None:
    assert bursts(answers) == []


def test_failures_far_apart_are_no_burst() -> None:
    assert bursts("xxxxxx", window_s=10.0, pace_s=6.0) == []
    assert bursts("xxx", window_s=10.0, pace_s=5.0) == [2]


@given(st.text(".x", max_size=60), st.integers(1, 4))
def test_the_window_agrees_with_a_list_of_all_answers(answers: str, failures: int) -> None:
    def is_burst(at: int) -> bool:
        recent = range(max(0, at + 1 - 2 * failures), at + 1)
        return answers[at] == "x" and sum(answers[n] == "x" and n >= at - 5 for n in recent) >= failures

    seen = bursts(answers, failures=failures, window_s=5.0, pace_s=1.0)

    assert seen == [at for at in range(len(answers)) if is_burst(at)]


def test_clearing_empties_the_window() -> None:
    window = BurstWindow(2, 10.0)
    window.add(0.0, True)

    window.clear()

    assert not window.add(1.0, True)
    assert window.add(2.0, True)


def test_backoff_doubles_up_to_its_longest() -> None:
    backoff = Backoff(1.0, 6.0)

    assert [backoff.next_s(float(at)) for at in (0, 2, 5, 10, 17)] == [1.0, 2.0, 4.0, 6.0, 6.0]


def test_backoff_restarts_after_a_calm_time() -> None:
    backoff = Backoff(1.0, 6.0)
    backoff.next_s(0.0)
    backoff.next_s(2.0)

    assert backoff.next_s(4.0 + 6.0) == 4.0
    assert backoff.next_s(14.0 + 6.1) == 1.0


def test_backoff_stays_finite_for_ever() -> None:
    backoff = Backoff(1.0, 60.0)

    assert {backoff.next_s(0.0) for _ in range(3000)} == {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0}
