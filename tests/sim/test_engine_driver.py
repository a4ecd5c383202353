"""The engine in real time takes the time of its timing model, even if the event loop wakes late."""

from __future__ import annotations

import asyncio
from array import array

import pytest
from tests.support.clocks import JumpingClock

from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.engine import MAX_CATCH_UP_S, EngineDriver, EngineRequest, SimEngine
from kvroute.sim.timing import TimingModel

TIMING = TimingModel()
ITERATION_S = TIMING.iteration_s(0, 0.0, 0)


async def taken_s(clock: JumpingClock, tokens: int, idle_s: float = 0.0) -> float:
    """Seconds that a worker with this clock takes for an answer after `idle_s` without work."""
    driver = EngineDriver(SimEngine(PagedCache(100, 16), TIMING), clock)
    running = asyncio.create_task(driver.run())
    await asyncio.sleep(0)
    clock.time += idle_s
    request = EngineRequest(Chain([], array("I")), prompt_tokens=16, output_tokens=tokens)
    began = clock.now()
    generation = driver.submit([request], ["length"], streamed=False)
    async with asyncio.timeout(10):
        while not generation.done:
            await generation.wait()
    took = clock.now() - began
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return took


async def test_late_wakeups_delay_an_answer_only_once() -> None:
    punctual = await taken_s(JumpingClock(late_s=0.0), 100)

    late = await taken_s(JumpingClock(late_s=0.01), 100)

    assert punctual == pytest.approx(100 * ITERATION_S, rel=0.01)
    assert late - punctual < 0.011


async def test_an_idle_engine_has_no_delay_to_correct() -> None:
    assert await taken_s(JumpingClock(late_s=0.0), 10, idle_s=0.5) == pytest.approx(
        10 * ITERATION_S, rel=0.01
    )


class SuspendedOnce(JumpingClock):
    """Only the first sleep takes longer."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        self.late_s = 0.0


async def test_little_of_the_time_of_a_suspended_machine_is_corrected() -> None:
    lost = 10 * MAX_CATCH_UP_S

    took = await taken_s(SuspendedOnce(late_s=lost), 100)

    assert took == pytest.approx(lost + 100 * ITERATION_S - MAX_CATCH_UP_S, abs=2 * ITERATION_S)
