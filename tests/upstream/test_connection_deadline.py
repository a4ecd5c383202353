from __future__ import annotations

from collections.abc import Callable

import pytest

from kvroute.upstream.connection import Deadline


class Timer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class VirtualLoop:
    """The two methods of a loop that a deadline needs; time moves by `advance`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(at, callback)
        self.timers.append(timer)
        return timer

    @property
    def pending(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.is_cancelled]

    def advance(self, to: float) -> None:
        self.now = to
        for timer in self.pending:
            if timer.at <= to:
                self.timers.remove(timer)
                timer.callback()


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


@pytest.fixture
def expired() -> list[float]:
    return []


@pytest.fixture
def deadline(loop: VirtualLoop, expired: list[float]) -> Deadline:
    return Deadline(loop, lambda: expired.append(loop.now))  # type: ignore[arg-type]


def test_it_expires_once_when_its_time_has_come(
    deadline: Deadline, loop: VirtualLoop, expired: list[float]
) -> None:
    deadline.set(5)

    loop.advance(4)
    assert expired == []
    loop.advance(5)
    loop.advance(50)

    assert expired == [5]


def test_moving_it_later_needs_no_new_timer_and_still_expires(
    deadline: Deadline, loop: VirtualLoop, expired: list[float]
) -> None:
    deadline.set(5)
    loop.advance(3)
    deadline.set(5)
    assert len(loop.timers) == 1

    loop.advance(5)
    assert expired == []
    loop.advance(8)

    assert expired == [8]


def test_moving_it_earlier_replaces_the_timer(
    deadline: Deadline, loop: VirtualLoop, expired: list[float]
) -> None:
    deadline.set(600)
    deadline.set(1)

    loop.advance(1)

    assert expired == [1]
    assert loop.pending == []


def test_a_cleared_one_never_expires_but_can_be_set_again(
    deadline: Deadline, loop: VirtualLoop, expired: list[float]
) -> None:
    deadline.set(1)
    deadline.clear()
    loop.advance(2)
    assert expired == []

    deadline.set(1)
    loop.advance(3)

    assert expired == [3]


def test_closing_takes_the_timer_off_the_loop(
    deadline: Deadline, loop: VirtualLoop, expired: list[float]
) -> None:
    deadline.set(1)
    deadline.close()

    assert loop.pending == []
    deadline.close()
    loop.advance(9)
    assert expired == []
