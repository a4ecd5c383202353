"""How far a draining worker is."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.clock import Clock
from kvroute.fleet.worker import Worker, WorkerId

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """`is_done`: nothing runs on the worker any more."""

    worker: WorkerId
    in_flight: int

    @property
    def is_done(self) -> bool:
        return self.in_flight == 0


def progress_of(worker: Worker) -> DrainProgress:
    """As of now; also for a worker that has left the fleet."""
    return DrainProgress(worker.id, worker.load.in_flight)


async def until_drained(worker: Worker, clock: Clock, *, timeout_s: float) -> DrainProgress:
    """Wait until nothing runs on `worker`, but no longer than `timeout_s`; the answer tells which it was.

    Looks ten times a second: a drain takes as long as the longest answer, and requests should not pay
    for a notification that hardly ever has a listener.
    """
    end = clock.now() + timeout_s
    while not (progress := progress_of(worker)).is_done and (left := end - clock.now()) > 0:
        await clock.sleep(min(_POLL_S, left))
    return progress
