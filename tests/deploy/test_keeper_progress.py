from __future__ import annotations

import asyncio
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.clocks import QuickClock
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.deploy import keeper as progress
from kvroute.deploy.keeper import Keeper, ProcessPhase, Status, show_status
from kvroute.deploy.plan import PlannedProcess
from kvroute.deploy.processes import ChildSpec


@pytest.fixture
def keepers(tmp_path: Path) -> list[Keeper]:
    """One that is starting, one that is ready."""
    made = []
    for name, phase in (("worker-0", ProcessPhase.STARTING), ("worker-1", ProcessPhase.READY)):
        child = ChildSpec(name, ("true",), {}, tmp_path / f"{name}.log")
        child.log_path.write_text("loading [weights]\n")
        planned = PlannedProcess(child, "http://127.0.0.1:1", "http://127.0.0.1:1/health", 1.0)
        keeper = Keeper(planned, clock=SystemClock(), report=print, changed=lambda _: None)
        keeper.status = Status(phase, SystemClock().now())
        made.append(keeper)
    return made


@pytest.mark.parametrize("terminal", [True, False])
async def test_a_starting_process_is_shown_with_its_last_line(keepers: list[Keeper], terminal: bool) -> None:
    console = Console(file=StringIO(), force_terminal=terminal, width=120)
    clock = QuickClock(0)

    async with show_status(console, keepers, clock=clock):
        await until(lambda: len(clock.slept) >= 2)

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "worker-0" in text
    assert "loading [weights]" in text
    assert ("worker-1" in text) == terminal


async def test_a_failing_display_raises(keepers: list[Keeper], monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(progress, "_lines", broken)

    with pytest.raises(ZeroDivisionError):
        async with show_status(Console(file=StringIO()), keepers, clock=SystemClock()):
            await asyncio.sleep(0)
