"""Keeps one server process up: starts it, waits until it serves, starts it again when it dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from kvroute.clock import Clock
from kvroute.deploy.plan import PlannedProcess
from kvroute.deploy.processes import ChildProcess, ProcessFailed, describe_exit

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
    """Owns one `ChildProcess`. Mutable: its status, and the process behind it.

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
        self.status = Status()
        self._clock = clock
        self._report = report
        self._changed = changed
        self._child = ChildProcess(planned.child, clock)

    @property
    def name(self) -> str:
        return self.planned.child.name

    @property
    def last_line(self) -> str:
        """The last line of its log."""
        return self._child.last_words(1)

    async def bring_up(self) -> None:
        """Start it and wait until it serves. Raises `ProcessFailed`; the process is then stopped."""
        self._enter(Phase.STARTING)
        try:
            await self._child.start()
            await self._child.wait_ready(self.planned.ready_url, timeout_s=self.planned.ready_timeout_s)
        except BaseException:
            await self.stop()
            raise
        self._enter(Phase.READY)

    async def keep_up(self) -> NoReturn:
        """From `bring_up` on: report each death with its last words, start again after a back-off
        that doubles until the process has been up for `STABLE_S`. Runs until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            code = await self._child.wait()
            if self._clock.now() - self.status.since >= STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            failure = self._child.failure(f"ended with {describe_exit(code)}")
            while True:
                self._enter(Phase.DOWN)
                self._report(f"{failure}\n  starting it again in {backoff_s:.0f} s")
                await self._clock.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
                self.status = Status(self.status.phase, self.status.since, self.status.restarts + 1)
                try:
                    await self.bring_up()
                    break
                except ProcessFailed as exc:
                    failure = exc

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
