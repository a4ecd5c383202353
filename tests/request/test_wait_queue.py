"""Waits end when their time has come, oldest first, and never all in one round of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvroute.request.wait_queue import WaitQueue


class Loop:
    """A clock that tests move, and timers that run when it passes them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.rounds = 0

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> object:
        self.timers.append((self.now + delay_s, callback))
        return object()

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= until]:
            timer = min(due, key=lambda each: each[0])
            self.timers.remove(timer)
            self.now = max(self.now, timer[0])
            self.rounds += 1
            timer[1]()
        self.now = until


class Waiting:
    def __init__(self, again: bool = False) -> None:
        self.ended: list[str] = []
        self._again = again

    def wait_expired(self, queue: WaitQueue) -> None:
        self.ended.append(queue.name)
        if self._again:
            queue.add(self)


def queue_of(limit_s: float) -> tuple[WaitQueue, Loop]:
    loop: Any = Loop()
    return WaitQueue("head", limit_s, lambda: loop), loop


def test_a_wait_ends_after_its_time_and_not_before():
    queue, loop = queue_of(10.0)
    first, second = Waiting(), Waiting()
    queue.add(first)
    loop.advance(4.0)
    queue.add(second)

    loop.advance(5.9)
    assert (first.ended, second.ended) == ([], [])
    loop.advance(0.2)
    assert (first.ended, second.ended) == (["head"], [])
    loop.advance(4.0)
    assert (first.ended, second.ended) == (["head"], ["head"])
    assert len(queue) == 0


def test_a_discarded_waiter_is_not_called():
    queue, loop = queue_of(10.0)
    first, second = Waiting(), Waiting()
    queue.add(first)
    loop.advance(1.0)
    queue.add(second)
    queue.discard(first)
    queue.discard(first)

    loop.advance(20.0)

    assert (first.ended, second.ended) == ([], ["head"])
    assert loop.timers == []


def test_a_waiter_that_is_added_again_waits_again():
    queue, loop = queue_of(10.0)
    waiting = Waiting(again=True)
    queue.add(waiting)

    loop.advance(35.0)

    assert waiting.ended == ["head"] * 3


def test_a_queue_without_limit_keeps_no_waiter_and_needs_no_timer():
    queue, loop = queue_of(0.0)
    queue.add(Waiting())

    assert len(queue) == 0
    assert loop.timers == []


def test_ten_thousand_waits_that_end_together_do_so_in_many_rounds():
    queue, loop = queue_of(10.0)
    everyone = [Waiting() for _ in range(10_000)]
    for waiting in everyone:
        queue.add(waiting)

    loop.advance(10.0)

    assert all(waiting.ended == ["head"] for waiting in everyone)
    assert loop.rounds >= 100


def test_one_timer_serves_all_waits():
    queue, loop = queue_of(10.0)
    for _ in range(1_000):
        waiting = Waiting()
        queue.add(waiting)
        queue.discard(waiting)

    assert len(loop.timers) == 1


def test_a_waiter_that_fails_does_not_stop_the_queue():
    queue, loop = queue_of(10.0)

    class Failing:
        def wait_expired(self, _queue: WaitQueue) -> None:
            raise ValueError

    last = Waiting()
    queue.add(Failing())
    loop.advance(1.0)
    queue.add(last)
    try:
        loop.advance(20.0)
    except ValueError:
        loop.advance(20.0)

    assert last.ended == ["head"]
