from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvroute.tokens.exact import TokenThreads
from kvroute.tokens.options import Inexact, TokensReason


async def test_work_runs_in_a_thread_and_returns_its_result() -> None:
    async with TokenThreads(1) as threads:
        name = await threads.run(lambda: threading.current_thread().name)

    assert name.startswith("tokens")


async def test_cpu_time_of_prompts_is_counted_and_that_of_one_time_work_is_not() -> None:
    def work() -> float:
        began = time.thread_time()
        sum(range(10_000))
        return time.thread_time() - began

    async with TokenThreads(2) as threads:
        await threads.run_long(work)
        assert threads.cpu_s == 0
        spent = [await threads.run(work) for _ in range(3)]

    assert threads.cpu_s >= sum(spent) > 0


async def test_a_caller_times_out_while_the_work_continues() -> None:
    gate, finished = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(30)
        finished.set()

    async with TokenThreads(1) as threads:
        with pytest.raises(Inexact) as refused:
            await threads.run(work, timeout_s=0.001)
        gate.set()

    assert refused.value.reason is TokensReason.LATE
    assert finished.is_set()
    assert threads.unfinished == 0


async def test_a_result_that_came_in_time_counts_even_if_the_loop_was_too_busy_to_see_it() -> None:
    finished = threading.Event()

    def work() -> str:
        finished.set()
        return "in time"

    async with TokenThreads(1) as threads:
        running = asyncio.create_task(threads.run(work, timeout_s=0.001))
        await asyncio.sleep(0)
        assert finished.wait(30)  # the loop is held, as a busy one is
        while threads.unfinished:
            pass
        end = time.monotonic() + 0.01  # and until after the deadline
        while time.monotonic() < end:
            pass

        assert await running == "in time"


async def test_work_beyond_the_limit_is_refused_immediately() -> None:
    gate = threading.Event()
    async with TokenThreads(1, max_waiting=1) as threads:
        waiting = [asyncio.create_task(threads.run(gate.wait, 30)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Inexact) as refused:
            await threads.run(gate.wait, 30)
        gate.set()
        await asyncio.gather(*waiting)

    assert refused.value.reason is TokensReason.BUSY


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    gate, ran = threading.Event(), []
    async with TokenThreads(1) as threads:
        first = asyncio.create_task(threads.run(gate.wait, 30))
        second = asyncio.create_task(threads.run(ran.append, 1))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.set()
        await first

    assert ran == []
    assert threads.unfinished == 0


async def test_closing_drops_work_that_has_not_started_and_wakes_its_caller() -> None:
    gate, entered = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        gate.wait(30)

    threads = TokenThreads(1)
    async with threads:
        running = asyncio.create_task(threads.run(work))
        waiting = asyncio.create_task(threads.run(work))
        await asyncio.to_thread(entered.wait, 30)
        asyncio.get_running_loop().call_soon(gate.set)  # after `aclose` has started to wait

    await running
    with pytest.raises(Inexact) as refused:
        await waiting
    assert refused.value.reason is TokensReason.BUSY
    with pytest.raises(Inexact):
        await threads.run(work)


async def test_an_error_of_the_work_reaches_its_waiter() -> None:
    async with TokenThreads(1) as threads:
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
