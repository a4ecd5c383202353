"""Shows processes coming up: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvroute.clock import Clock
from kvroute.deploy.keeper import Keeper, Phase

REFRESH_S = 0.25
LINE_EVERY_S = 15.0


@asynccontextmanager
async def showing(console: Console, keepers: Sequence[Keeper], *, clock: Clock) -> AsyncIterator[None]:
    """Show `keepers` for as long as the block runs."""
    show = _live if console.is_terminal else _lines
    task = asyncio.create_task(show(console, keepers, clock))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def _live(console: Console, keepers: Sequence[Keeper], clock: Clock) -> None:
    spinner = Spinner("dots")
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(_table(keepers, clock.now(), spinner, console.width), refresh=True)
                await clock.sleep(REFRESH_S)
        finally:
            live.update(_table(keepers, clock.now(), spinner, console.width), refresh=True)


async def _lines(console: Console, keepers: Sequence[Keeper], clock: Clock) -> None:
    while True:
        await clock.sleep(LINE_EVERY_S)
        for keeper in keepers:
            if keeper.status.phase is Phase.STARTING:
                waited = clock.now() - keeper.status.since
                line = f"{keeper.name}: starting, {waited:.0f} s: {_plain(keeper.last_line)[:90]}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(keepers: Sequence[Keeper], now: float, spinner: Spinner, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    for keeper in keepers:
        phase = keeper.status.phase
        mark: Spinner | Text = (
            spinner if phase is Phase.STARTING else Text("✓" if phase is Phase.READY else "·")
        )
        waited = f"{now - keeper.status.since:.0f} s" if phase is Phase.STARTING else ""
        line = _plain(keeper.last_line)[: max(20, width - 40)] if phase is Phase.STARTING else ""
        table.add_row(mark, keeper.name, phase.value, waited, Text(line, style="dim", no_wrap=True))
    return table


def _plain(line: str) -> str:
    """`line` without what terminals read as colours and movements."""
    return Text.from_ansi(line).plain
