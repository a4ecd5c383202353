"""Requests leave workers that are found asleep: requests hang there, and nothing has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvroute.fleet.fleet import FleetChange
from kvroute.fleet.worker import HealthState, Worker
from kvroute.relay.exchange import Exchange
from kvroute.request.downstream import InFlightRequest


class SleepersLeft:
    """Listens to the fleet: when a worker falls asleep, its requests without an answer are sent to others.

    `requests` are those in flight. Stateless.
    """

    def __init__(self, requests: Callable[[], Iterable[InFlightRequest]]) -> None:
        self._requests = requests

    def __call__(self, change: FleetChange, worker: Worker) -> None:
        """A `FleetListener`. O(requests in flight) when a worker falls asleep."""
        if change is FleetChange.STATE and worker.state is HealthState.ASLEEP:
            for request in list(self._requests()):
                if isinstance(request, Exchange):
                    request.leave(worker)
