"""Background work that fails is logged, shown in notes and metrics, and restarted."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from tests.support.clocks import JumpingClock

from kvroute.background_tasks import BackgroundTasks


@pytest.mark.parametrize("raises", [True, False])
async def test_work_that_fails_or_ends_is_logged_and_restarted(
    raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock, starts, again = JumpingClock(), [], asyncio.Event()
    background = BackgroundTasks(clock)

    async def work() -> None:
        starts.append(clock.now())
        if len(starts) == 1:
            if raises:
                raise KeyError("x")
            return
        again.set()
        await asyncio.Event().wait()

    background.start("reading", work)
    await again.wait()

    assert starts == [0.0, 1.0]
    assert background.failures == {"reading": 1}
    (note,) = background.notes()
    assert note.startswith("reading failed (KeyError)" if raises else "reading failed (it ended)")
    assert sum("reading" in record.getMessage() for record in caplog.records) == 1
    clock.time = 60.5
    assert background.notes() == []
    await background.aclose()


async def test_running_work_is_cancelled_and_awaited(caplog: pytest.LogCaptureFixture) -> None:
    background, ended = BackgroundTasks(JumpingClock()), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    background.start("reading", work)
    await asyncio.sleep(0)
    await background.aclose()

    assert ended == [True]
    assert (background.failures, background.notes(), caplog.records) == ({"reading": 0}, [], [])


async def test_work_that_keeps_failing_is_restarted_later_each_time() -> None:
    clock, starts, enough = JumpingClock(), [], asyncio.Event()
    background = BackgroundTasks(clock)

    async def work() -> None:
        starts.append(clock.now())
        if len(starts) == 9:
            clock.time += 100  # it runs long enough to count as stable
        if len(starts) == 11:
            enough.set()
            await asyncio.Event().wait()
        raise KeyError("x")

    background.start("reading", work)
    await enough.wait()
    await background.aclose()

    pauses = [later - sooner for sooner, later in pairwise(starts)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 100 + 1, 2]
