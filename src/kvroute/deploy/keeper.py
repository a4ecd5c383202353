"""Keeps one server process up: starts it, waits until it serves, starts it again when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from kvroute.clock import Clock
from kvroute.deploy.plan import PlannedProcess
from kvroute.deploy.processes import ChildProcess, ProcessFailed, describe_exit
from kvroute.deploy.segments import sweep

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
# Up for this long: the next failure is a new one, and its back-off starts from the beginning.
STABLE_S = 60.0


class Phase(Enum):
    """Where a kept process is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Status:
    """What to show about a kept process."""

    phase: Phase = Phase.WAITING
    since: float = 0.0
    """When the phase began, by the keeper's clock."""
    restarts: int = 0


class Keeper:
    """Owns one `ChildProcess`. Mutable: its status, the process behind it, and why it is to be renewed.

    `changed` is called with the keeper after each change of phase, `report` with one text per
    failure.
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
        self._renewed_for: str | None = None

    @property
    def name(self) -> str:
        return self.planned.child.name

    @property
    def pid(self) -> int | None:
        """Of the guard that the process runs under; None while it does not run."""
        return self._child.pid if self._child.running else None

    @property
    def last_line(self) -> str:
        """The last line of its log."""
        return self._child.last_words(1)

    async def bring_up(self) -> None:
        """Start it and wait until it serves. Raises `ProcessFailed`; the process is then stopped."""
        try:
            await self._child.start()
            self._enter(Phase.STARTING)
            await self._child.wait_ready(self.planned.ready_url, timeout_s=self.planned.ready_timeout_s)
        except BaseException as exc:
            await self.stop()
            if isinstance(exc, OSError):
                # No process could be made, or its log not be written: it may go better later.
                raise ProcessFailed(f"{self.name} could not be started: {exc.strerror or exc}") from exc
            raise
        self._enter(Phase.READY)

    async def keep_up(self) -> NoReturn:
        """From `bring_up` on: report each death with its last words, start again after a back-off
        that doubles until the process has been up for `STABLE_S`. Runs until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            code = await self._child.wait()
            failure: ProcessFailed | None = None
            if self._renewed_for is None:
                failure = self._child.failure(f"ended with {describe_exit(code)}")
            else:
                self._report(f"{self.name} starts again, because {self._renewed_for} has")
            if self._renewed_for is not None or self._clock.now() - self.status.since >= STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            while True:
                self._renewed_for = None
                self._enter(Phase.DOWN)
                wait_s = self.planned.rest_s
                if failure is not None:
                    wait_s = max(wait_s, backoff_s)
                    self._report(f"{failure}\n  starting it again in {wait_s:.0f} s")
                    backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
                if wait_s > 0:
                    await self._clock.sleep(wait_s)
                await asyncio.to_thread(sweep)
                self.status = Status(self.status.phase, self.status.since, self.status.restarts + 1)
                try:
                    await self.bring_up()
                    break
                except ProcessFailed as exc:
                    failure = exc

    def renew(self, because_of: str) -> None:
        """End the process, so that `keep_up` starts it again; without waiting, and with its rest but no
        back-off if it was serving."""
        if self.status.phase is Phase.READY:
            self._renewed_for = because_of
        self._child.terminate()

    async def stop(self) -> None:
        """End the process if it runs: SIGTERM, then SIGKILL after its grace."""
        if self._child.started:
            await self._child.stop()
        self._enter(Phase.STOPPED)

    def kill(self) -> None:
        """SIGKILL the process if it runs, without waiting."""
        self._child.kill()

    def _enter(self, phase: Phase) -> None:
        self.status = Status(phase, self._clock.now(), self.status.restarts)
        self._changed(self)
