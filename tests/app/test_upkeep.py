"""Work in the background that fails is said at once, shown, and begun again."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from kvroute.app.background_tasks import BackgroundTasks


class Clock:
    """Time that a test moves; every sleep ends at once."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


@pytest.mark.parametrize("raises", [True, False])
async def test_what_fails_or_ends_is_logged_at_once_and_begun_again(
    raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock, begun, again = Clock(), [], asyncio.Event()
    upkeep = BackgroundTasks(clock)

    async def work() -> None:
        begun.append(clock.now())
        if len(begun) == 1:
            if raises:
                raise KeyError("x")
            return
        again.set()
        await asyncio.Event().wait()

    upkeep.begin("reading", work)
    await again.wait()

    assert begun == [0.0, 1.0]
    assert upkeep.failures == {"reading": 1}
    (note,) = upkeep.notes()
    assert note.startswith("reading failed (KeyError)" if raises else "reading failed (it ended)")
    assert sum("reading" in record.getMessage() for record in caplog.records) == 1
    clock.time = 60.5
    assert upkeep.notes() == []
    await upkeep.aclose()


async def test_what_goes_on_is_ended_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    upkeep, ended = BackgroundTasks(Clock()), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    upkeep.begin("reading", work)
    await asyncio.sleep(0)
    await upkeep.aclose()

    assert ended == [True]
    assert (upkeep.failures, upkeep.notes(), caplog.records) == ({"reading": 0}, [], [])


async def test_what_keeps_failing_is_tried_less_and_less_often() -> None:
    clock, begun, enough = Clock(), [], asyncio.Event()
    upkeep = BackgroundTasks(clock)

    async def work() -> None:
        begun.append(clock.now())
        if len(begun) == 9:
            clock.time += 100  # it was well for a while
        if len(begun) == 11:
            enough.set()
            await asyncio.Event().wait()
        raise KeyError("x")

    upkeep.begin("reading", work)
    await enough.wait()
    await upkeep.aclose()

    pauses = [later - sooner for sooner, later in pairwise(begun)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 100 + 1, 2]
