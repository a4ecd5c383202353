"""Keeps one server process running: starts it, waits until it is ready, restarts it when it ends."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvroute.clock import Clock
from kvroute.deploy.plan import PlannedProcess
from kvroute.deploy.processes import ChildProcess, ProcessFailed, describe_exit

SHARED_MEMORY_FOLDER = Path("/dev/shm")
SEGMENT_NAME = re.compile(r"lmcache_kv_(\d+)_\d+")


def remove_orphan_segments(folder: Path = SHARED_MEMORY_FOLDER) -> int:
    """Remove LMCache's shared-memory segments of engines that have ended. Returns the bytes freed.

    Removes only segments of this user whose creator has ended and that no process maps. Blocking; costs one
    listing of `folder` when there is nothing to remove.
    """
    freed = 0
    for segment in _orphans(folder):
        try:
            size = segment.stat().st_size
            segment.unlink()
        except OSError:
            continue  # already removed, or not permitted: this must not end running processes
        freed += size
    return freed


def _orphans(folder: Path) -> list[Path]:
    orphans = []
    for segment in folder.glob("lmcache_kv_*"):
        name = SEGMENT_NAME.fullmatch(segment.name)
        try:
            if name and segment.stat().st_uid == os.getuid() and not Path(f"/proc/{name[1]}").exists():
                orphans.append(segment)
        except FileNotFoundError:
            continue
    if not orphans:
        return []
    mapped = _mapped(folder)
    return [segment for segment in orphans if str(segment) not in mapped]


def _mapped(folder: Path) -> set[str]:
    """The files of `folder` that any process of this user maps."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            # address perms offset dev inode pathname
            lines = maps.read_text().splitlines()
        except OSError:
            continue  # the process has ended, or belongs to another user
        mapped |= {line.split(maxsplit=5)[5] for line in lines if str(folder) in line}
    return mapped


FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
# After this time without a failure, the back-off starts again at FIRST_BACKOFF_S.
STABLE_S = 60.0


class ProcessPhase(Enum):
    """The state of a kept process."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Status:
    """A kept process's phase and restarts, for display."""

    phase: ProcessPhase = ProcessPhase.WAITING
    since: float = 0.0
    """When the phase began, by the keeper's clock."""
    restarts: int = 0


class Keeper:
    """Owns one `ChildProcess` and restarts it. Mutable: its status, its process, the cause of a restart.

    `changed` is called with the keeper after each change of phase, `report` with one text per failure.
    """

    def __init__(
        self,
        planned: PlannedProcess,
        *,
        clock: Clock,
        report: Callable[[str], None],
        changed: Callable[[Keeper], None],
    ) -> None:
        self.planned = planned
        self.status = Status(since=clock.now())
        self._clock = clock
        self._report = report
        self._changed = changed
        self._child = ChildProcess(planned.child, clock)
        self._restart_cause: str | None = None

    @property
    def name(self) -> str:
        return self.planned.child.name

    @property
    def pid(self) -> int | None:
        """The process id of the guard under which the process runs; None while it does not run."""
        return self._child.pid if self._child.running else None

    @property
    def last_line(self) -> str:
        """The last line of the process's log."""
        return self._child.last_log_lines(1)

    async def start_and_wait(self) -> None:
        """Start the process and wait until it is ready. Raises `ProcessFailed` after stopping the process."""
        try:
            await self._child.start()
            self._enter(ProcessPhase.STARTING)
            await self._child.wait_ready(self.planned.ready_url, timeout_s=self.planned.ready_timeout_s)
        except BaseException as exc:
            await self.stop()
            if isinstance(exc, OSError):
                # No process could be made, or its log could not be written: a later start may succeed.
                raise ProcessFailed(f"{self.name} could not be started: {exc.strerror or exc}") from exc
            raise
        self._enter(ProcessPhase.READY)

    async def restart_on_exit(self) -> NoReturn:
        """Restart the process each time it ends. Call after `start_and_wait`. Runs until cancelled.

        Reports each failure with the end of the log. The back-off before a restart doubles, and starts again
        once the process has run for `STABLE_S`.
        """
        backoff_s = FIRST_BACKOFF_S
        while True:
            code = await self._child.wait()
            failure: ProcessFailed | None = None
            if self._restart_cause is None:
                failure = self._child.failure(f"ended with {describe_exit(code)}")
            else:
                self._report(f"restarting {self.name}, because {self._restart_cause} was restarted")
            if self._restart_cause is not None or self._clock.now() - self.status.since >= STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            while True:
                self._restart_cause = None
                self._enter(ProcessPhase.DOWN)
                wait_s = self.planned.restart_delay_s
                if failure is not None:
                    wait_s = max(wait_s, backoff_s)
                    self._report(f"{failure}\n  restarting it in {wait_s:.0f} s")
                    backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
                if wait_s > 0:
                    await self._clock.sleep(wait_s)
                await asyncio.to_thread(remove_orphan_segments)
                self.status = Status(self.status.phase, self.status.since, self.status.restarts + 1)
                try:
                    await self.start_and_wait()
                    break
                except ProcessFailed as exc:
                    failure = exc

    def restart(self, because_of: str) -> None:
        """End the process without waiting, so that `restart_on_exit` restarts it.

        If the process was ready, only its `restart_delay_s` applies, no back-off.
        """
        if self.status.phase is ProcessPhase.READY:
            self._restart_cause = because_of
        self._child.terminate()

    async def stop(self) -> None:
        """End the process if it runs: SIGTERM, then SIGKILL after its grace period."""
        if self._child.started:
            await self._child.stop()
        self._enter(ProcessPhase.STOPPED)

    def kill(self) -> None:
        """SIGKILL the process if it runs, without waiting."""
        self._child.kill()

    def _enter(self, phase: ProcessPhase) -> None:
        self.status = Status(phase, self._clock.now(), self.status.restarts)
        self._changed(self)


REFRESH_S = 0.25
LINE_EVERY_S = 15.0


@asynccontextmanager
async def show_status(console: Console, keepers: Sequence[Keeper], *, clock: Clock) -> AsyncIterator[None]:
    """Show the status of `keepers` while the block runs."""
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
            if keeper.status.phase is ProcessPhase.STARTING:
                waited = clock.now() - keeper.status.since
                line = f"{keeper.name}: starting, {waited:.0f} s: {_plain(keeper.last_line)[:90]}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(keepers: Sequence[Keeper], now: float, spinner: Spinner, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    for keeper in keepers:
        phase = keeper.status.phase
        mark: Spinner | Text = (
            spinner if phase is ProcessPhase.STARTING else Text("✓" if phase is ProcessPhase.READY else "·")
        )
        waited = f"{now - keeper.status.since:.0f} s" if phase is ProcessPhase.STARTING else ""
        line = _plain(keeper.last_line)[: max(20, width - 40)] if phase is ProcessPhase.STARTING else ""
        table.add_row(mark, keeper.name, phase.value, waited, Text(line, style="dim", no_wrap=True))
    return table


def _plain(line: str) -> str:
    """`line` without terminal control sequences."""
    return Text.from_ansi(line).plain
