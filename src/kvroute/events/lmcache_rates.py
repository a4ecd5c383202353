"""Asking LMCache's servers how fast they load from their tiers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NoReturn

import httpx

from kvroute.blocks.tokens import Tier
from kvroute.clock import Clock
from kvroute.events.coordinator import Coordinator
from kvroute.events.lmcache_instances import Instance
from kvroute.wire.lmcache_metrics import LoadRates, read_load_rates

log = logging.getLogger(__name__)

_AT_A_TIME: Final = 16
_TIERS: Final = {"l1": Tier.L1, "l2": Tier.L2}

Report = Callable[[str, Tier, float, int], None]
"""(instance id, tier, mean GB/s, of how many loads); called synchronously."""


class RateWatch:
    """Reads `/metrics` of every registered server at intervals, and reports what is new. Mutable: `failures`
    counts questions without an answer. The client belongs to the caller."""

    def __init__(
        self,
        coordinator: Coordinator,
        client: httpx.AsyncClient,
        clock: Clock,
        report: Report,
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
        self._known: dict[str, LoadRates] = {}

    async def run(self) -> NoReturn:
        """Ends only by cancellation."""
        while True:
            await self._clock.sleep(self._interval_s)
            await self.look()

    async def look(self) -> None:
        """Ask all once."""
        asked = [each for each in self._coordinator.instances() if each.registered]
        self._known = {each.id: self._known[each.id] for each in asked if each.id in self._known}
        for start in range(0, len(asked), _AT_A_TIME):
            await asyncio.gather(*(self._ask(each) for each in asked[start : start + _AT_A_TIME]))

    async def _ask(self, instance: Instance) -> None:
        host = f"[{instance.address}]" if ":" in instance.address else instance.address
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.get(f"http://{host}:{instance.http_port}/metrics")
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            self.failures += 1
            log.debug("LMCache server %s does not tell its rates: %r", instance.id, error)
            return
        rates = read_load_rates(answer.text)
        before = self._known.get(instance.id)
        self._known[instance.id] = rates
        if before is not None:
            for tier, (gb_s, loads) in rates.since(before).items():
                self._report(instance.id, _TIERS[tier], gb_s, loads)
