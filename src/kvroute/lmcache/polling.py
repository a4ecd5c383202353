"""Asking LMCache's servers what events do not say: their chunk size, and after losses what they hold."""

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
from kvroute.wire.lmcache_server import LoadRates, decode_status, read_load_rates

log = logging.getLogger(__name__)

_AT_A_TIME = 16
_LONGEST_PAUSE = 12
"""Times the usual one, for servers whose count still differs: counting costs them something."""


class StatusWatch:
    """Reads `/status` of servers whose chunk size is not known or whose map lacks something, again and again
    until neither is so. Mutable: `failures` counts questions without a good answer. The client belongs to the
    caller."""

    def __init__(
        self, coordinator: Coordinator, client: httpx.AsyncClient, clock: Clock, options: CoordinatorOptions
    ) -> None:
        self.failures = 0
        self._coordinator = coordinator
        self._client = client
        self._clock = clock
        self._options = options
        self._pauses: dict[str, tuple[float, float]] = {}
        """Instance -> when to ask next, and after what pause."""

    async def run(self, registered: asyncio.Event) -> None:
        """Ends only by cancellation. `registered` asks for a look at once."""
        while True:
            registered.clear()
            await self.look(due_only=True)
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

    async def look(self, *, due_only: bool = False) -> None:
        """Ask all that are in question once, or those of them whose time has come."""
        now = self._clock.now()
        asked = [each for each in self._coordinator.instances() if _in_question(each)]
        self._pauses = {each.id: self._pauses.get(each.id, (now, 0.0)) for each in asked}
        if due_only:
            asked = [each for each in asked if self._pauses[each.id][0] <= now]
        for start in range(0, len(asked), _AT_A_TIME):
            await asyncio.gather(*(self._ask(each) for each in asked[start : start + _AT_A_TIME]))
        for each in asked:
            usual = self._options.status_interval_s
            differs = each.scheme_known and each.quiet_seq < 0
            pause = min(2 * self._pauses[each.id][1], _LONGEST_PAUSE * usual) if differs else 0.0
            self._pauses[each.id] = now + max(pause, usual), max(pause, usual)

    async def _ask(self, instance: LMCacheServer) -> None:
        host = f"[{instance.address}]" if ":" in instance.address else instance.address
        try:
            async with asyncio.timeout(self._options.status_timeout_s):
                answer = await self._client.get(f"http://{host}:{instance.http_port}/status")
            answer.raise_for_status()
            self._coordinator.status(instance.id, decode_status(answer.content))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, WireError) as error:
            self.failures += 1
            log.debug("LMCache server %s does not tell its status: %r", instance.id, error)


def _in_question(instance: LMCacheServer) -> bool:
    return (
        instance.registered
        and instance.doubt is not Doubt.FOREIGN_HASHES
        and (not instance.scheme_known or (instance.doubt is not None and instance.incarnation is not None))
    )


_CONCURRENT_RATES: Final = 16
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
        for start in range(0, len(asked), _CONCURRENT_RATES):
            await asyncio.gather(*(self._ask(each) for each in asked[start : start + _CONCURRENT_RATES]))

    async def _ask(self, instance: LMCacheServer) -> None:
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
