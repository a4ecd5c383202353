"""Polls of LMCache's servers for what their events do not report.

`/status` has the chunk size and, after lost events, the number of objects; `/metrics` has the load rates.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NoReturn

import httpx

from kvroute.blocks.keys import Tier
from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.membership import Doubt, LMCacheServer
from kvroute.lmcache.options import CoordinatorOptions
from kvroute.wire.lmcache_server import (
    LoadRates,
    decode_status,
    read_load_rates,
)

log = logging.getLogger(__name__)

_CONCURRENT_POLLS = 16
_MAX_PAUSE_FACTOR = 12
"""Longest pause, in multiples of `status_interval_s`, for a server whose count still differs from the map's:
to count its objects costs the server CPU time."""


class StatusPoller:
    """Polls `/status` of each server until its chunk size is known and its map is complete.

    Mutable: `failures` counts polls without a usable answer. The caller owns and closes the client.
    """

    def __init__(
        self, coordinator: Coordinator, client: httpx.AsyncClient, clock: Clock, options: CoordinatorOptions
    ) -> None:
        self.failures = 0
        self._coordinator = coordinator
        self._client = client
        self._clock = clock
        self._options = options
        self._schedule: dict[str, tuple[float, float]] = {}
        """Instance id -> (time of the next poll, the pause before that poll in seconds)."""

    async def run(self, registered: asyncio.Event) -> None:
        """Poll until cancelled: every `status_interval_s`, and at once when `registered` is set."""
        while True:
            registered.clear()
            await self.poll(due_only=True)
            waits = [
                asyncio.ensure_future(registered.wait()),
                asyncio.ensure_future(self._clock.sleep(self._options.status_interval_s)),
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    async def poll(self, *, due_only: bool = False) -> None:
        """Poll every server that needs it once; with `due_only` only those whose pause has ended."""
        now = self._clock.now()
        due = [instance for instance in self._coordinator.instances() if _needs_status(instance)]
        self._schedule = {instance.id: self._schedule.get(instance.id, (now, 0.0)) for instance in due}
        if due_only:
            due = [instance for instance in due if self._schedule[instance.id][0] <= now]
        for start in range(0, len(due), _CONCURRENT_POLLS):
            await asyncio.gather(
                *(self._poll_server(instance) for instance in due[start : start + _CONCURRENT_POLLS])
            )
        for instance in due:
            interval = self._options.status_interval_s
            differs = instance.scheme_known and instance.agreed_seq < 0
            pause = min(2 * self._schedule[instance.id][1], _MAX_PAUSE_FACTOR * interval) if differs else 0.0
            self._schedule[instance.id] = now + max(pause, interval), max(pause, interval)

    async def _poll_server(self, instance: LMCacheServer) -> None:
        try:
            async with asyncio.timeout(self._options.status_timeout_s):
                answer = await self._client.get(self._coordinator.url_of(instance) + "/status")
            answer.raise_for_status()
            self._coordinator.status(instance.id, decode_status(answer.content))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, WireError) as error:
            self.failures += 1
            log.debug("LMCache server %s: no answer from /status: %r", instance.id, error)


def _needs_status(instance: LMCacheServer) -> bool:
    return (
        instance.registered
        and instance.doubt is not Doubt.FOREIGN_HASHES
        and (not instance.scheme_known or (instance.doubt is not None and instance.incarnation is not None))
    )


_TIERS: Final = {"l1": Tier.L1, "l2": Tier.L2}
ReportRate = Callable[[str, Tier, float, int], None]
"""Called with (instance id, tier, mean GB/s, number of loads); synchronous."""


class RatePoller:
    """Polls `/metrics` of every registered server, and reports the load rates since the poll before.

    Mutable: `failures` counts polls without an answer. The caller owns and closes the client.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        client: httpx.AsyncClient,
        clock: Clock,
        report: ReportRate,
        *,
        interval_s: float,
        timeout_s: float,
    ) -> None:
        self.failures = 0
        self._coordinator = coordinator
        self._client = client
        self._clock = clock
        self._report = report
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._last_rates: dict[str, LoadRates] = {}

    async def run(self) -> NoReturn:
        """Poll every `interval_s` until cancelled."""
        while True:
            await self._clock.sleep(self._interval_s)
            await self.poll()

    async def poll(self) -> None:
        """Poll every registered server once."""
        due = [instance for instance in self._coordinator.instances() if instance.registered]
        self._last_rates = {
            instance.id: self._last_rates[instance.id] for instance in due if instance.id in self._last_rates
        }
        for start in range(0, len(due), _CONCURRENT_POLLS):
            await asyncio.gather(
                *(self._poll_server(instance) for instance in due[start : start + _CONCURRENT_POLLS])
            )

    async def _poll_server(self, instance: LMCacheServer) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.get(self._coordinator.url_of(instance) + "/metrics")
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            self.failures += 1
            log.debug("LMCache server %s: no answer from /metrics: %r", instance.id, error)
            return
        rates = read_load_rates(answer.text)
        previous_rates = self._last_rates.get(instance.id)
        self._last_rates[instance.id] = rates
        if previous_rates is not None:
            for tier, (gb_s, loads) in rates.since(previous_rates).items():
                self._report(instance.id, _TIERS[tier], gb_s, loads)
