"""Asking LMCache's servers what events do not say: their chunk size, and after losses what they hold."""

from __future__ import annotations

import asyncio
import logging

import httpx

from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.events.coordinator import Coordinator
from kvroute.events.lmcache_instances import Doubt, Instance
from kvroute.events.lmcache_options import CoordinatorOptions
from kvroute.wire.lmcache_mp import decode_status

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

    async def _ask(self, instance: Instance) -> None:
        host = f"[{instance.address}]" if ":" in instance.address else instance.address
        try:
            async with asyncio.timeout(self._options.status_timeout_s):
                answer = await self._client.get(f"http://{host}:{instance.http_port}/status")
            answer.raise_for_status()
            self._coordinator.status(instance.id, decode_status(answer.content))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, WireError) as error:
            self.failures += 1
            log.debug("LMCache server %s does not tell its status: %r", instance.id, error)


def _in_question(instance: Instance) -> bool:
    return (
        instance.registered
        and instance.doubt is not Doubt.FOREIGN_HASHES
        and (not instance.scheme_known or (instance.doubt is not None and instance.incarnation is not None))
    )
