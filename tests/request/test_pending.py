from __future__ import annotations

import asyncio

import pytest

from kvroute.request.pending import PendingExchange


class FakeExchange:
    def __init__(self) -> None:
        self.is_over = False
        self.ended_by: list[str] = []
        self.resumed = 0
        self.paused = 0

    def end(self, by: str) -> None:
        self.is_over = True
        self.ended_by.append(by)

    def pause(self) -> None:
        self.paused += 1

    def resume(self) -> None:
        self.resumed += 1


@pytest.fixture
def ended_by() -> list[str]:
    return []


@pytest.fixture
def pend(ended_by):
    return lambda prepare: PendingExchange(prepare, lambda _, by: ended_by.append(by))


async def test_calls_before_the_exchange_exists_reach_it_later(pend, ended_by) -> None:
    exchange = FakeExchange()

    async def prepare():
        return exchange

    pending = pend(prepare)
    pending.pause()
    pending.resume()
    await pending.task
    pending.pause()
    pending.resume()

    assert not pending.is_over
    assert (exchange.paused, exchange.resumed) == (1, 1)
    pending.end("client")
    assert pending.is_over
    assert (exchange.ended_by, ended_by) == (["client"], [])


async def test_ended_before_it_has_been_run_it_does_nothing(pend, ended_by) -> None:
    started = []

    async def prepare():
        started.append(True)

    pending = pend(prepare)
    pending.end("client")
    pending.end("shutdown")
    with pytest.raises(asyncio.CancelledError):
        await pending.task

    assert pending.is_over
    assert (started, ended_by) == ([], ["client"])


async def test_ended_while_it_waits_it_is_cancelled(pend, ended_by) -> None:
    waiting, cancelled = asyncio.Event(), asyncio.Event()

    async def prepare():
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    pending = pend(prepare)
    await waiting.wait()
    pending.end("shutdown")
    with pytest.raises(asyncio.CancelledError):
        await pending.task

    assert cancelled.is_set()
    assert ended_by == ["shutdown"]


async def test_answered_without_an_exchange_it_is_over(pend, ended_by) -> None:
    async def prepare():
        return None

    pending = pend(prepare)
    await pending.task

    assert pending.is_over
    pending.end("client")
    assert ended_by == []
