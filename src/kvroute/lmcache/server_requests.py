"""The gateway's own requests to LMCache's servers: polls for what their events do not report, and prefetches.

`/status` has the chunk size and, after lost events, the number of objects; `/metrics` has the load rates. A
prefetch makes a server load a queued request's chunks from L2 into L1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, NoReturn

import httpx

from kvroute.blocks.keys import Tier
from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.membership import Doubt, LMCacheServer, StoredModel
from kvroute.lmcache.options import CoordinatorOptions, PrefetchOptions
from kvroute.lmcache.registration import ServerAddresses
from kvroute.wire.lmcache_server import (
    LoadRates,
    decode_status,
    prefetch_body,
    read_load_rates,
    read_prefetch_answer,
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


_ACCEPTED: Final = 202


class PrefetchOutcome(StrEnum):
    """How a prefetch ended. A closed set, so it can be a metric label."""

    SUBMITTED = "submitted"
    """The server has started to load."""
    NOTHING = "nothing"
    """The prompt is shorter than one of the server's chunks."""
    REFUSED = "refused"
    """The server gave another answer: an older LMCache (404), or a model that has not run there yet (503)."""
    FAILED = "failed"
    """No answer in time."""
    LATE = "late"
    """Not sent: the engine will have started the request by then."""
    CROWDED = "crowded"
    """Not sent: the queue (`max_waiting`) was full."""
    UNPROVEN = "unproven"
    """Not sent: the server's address is neither its worker's nor in `lmcache.coordinator.servers`, and a
    prefetch sends the prompt's token ids."""
    UNKNOWN_MODEL = "unknown_model"
    """Not sent: the model's name in LMCache and its number of ranks are not known."""


class _PrefetchRequest(NamedTuple):
    """A queued prefetch. `due` and `useful_until` are times of the clock, in seconds."""

    url: str
    instance_id: str
    model: StoredModel
    token_ids: Sequence[int]
    salt: str
    due: float
    useful_until: float


class Prefetcher:
    """Sends prefetches from a queue, so that no client's request waits for a prefetch.

    `run` does the work. Mutable: the queue, and `counts` by outcome. The caller owns and closes the client.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        client: httpx.AsyncClient,
        clock: Clock,
        options: PrefetchOptions,
        addresses: ServerAddresses,
    ) -> None:
        self.counts = dict.fromkeys(PrefetchOutcome, 0)
        self._coordinator = coordinator
        self._client = client
        self._clock = clock
        self._options = options
        self._addresses = addresses
        self._unproven: set[str] = set()
        """Ids of servers that the log has named because their address is unproven."""
        self._queue: asyncio.Queue[_PrefetchRequest] = asyncio.Queue(options.max_waiting)
        self._failing: set[str] = set()
        """Ids of servers whose failure was logged; removed when a prefetch succeeds."""

    def has_server(self, worker_id: str) -> bool:
        """Whether an LMCache server is known for this worker."""
        return self._coordinator.instance_of(worker_id) is not None

    def request(self, worker_id: str, token_ids: Sequence[int], salt: str, spare_s: float) -> None:
        """Queue a prefetch of a prompt's leading tokens by the worker's server. Returns at once.

        The prefetch is sent `delay_s` (option) from now, and dropped if it cannot be sent within `spare_s`
        seconds from now.
        """
        instance = self._coordinator.instance_of(worker_id)
        if instance is None:
            return
        host = self._coordinator.host_of(worker_id)
        if not self._addresses.belongs(instance.address, host) and not self._addresses.is_listed(
            instance.address
        ):
            self.counts[PrefetchOutcome.UNPROVEN] += 1
            if instance.id not in self._unproven:
                self._unproven.add(instance.id)
                log.warning(
                    "no prefetches to LMCache server %s: its address %s is neither that of its worker (%s) "
                    "nor in lmcache.coordinator.servers",
                    instance.id,
                    instance.address,
                    host,
                )
            return
        model = self._coordinator.model_of(worker_id)
        if model is None:
            self.counts[PrefetchOutcome.UNKNOWN_MODEL] += 1
            return
        now = self._clock.now()
        request = _PrefetchRequest(
            self._coordinator.url_of(instance) + "/cache/prefetches",
            instance.id,
            model,
            token_ids,
            salt,
            now + self._options.delay_s,
            now + spare_s,
        )
        try:
            self._queue.put_nowait(request)
        except asyncio.QueueFull:
            self.counts[PrefetchOutcome.CROWDED] += 1

    async def run(self) -> NoReturn:
        """Send queued prefetches, `connections` at a time, until cancelled."""
        async with asyncio.TaskGroup() as senders:
            for _ in range(self._options.connections):
                senders.create_task(self._send_all())
        raise AssertionError("the senders never end")

    async def _send_all(self) -> NoReturn:
        while True:
            request = await self._queue.get()
            self.counts[await self._send(request)] += 1

    async def _send(self, request: _PrefetchRequest) -> PrefetchOutcome:
        # Every prefetch has the same delay, so the queue is in order of `due`. This sleep delays no other
        # one.
        await self._clock.sleep(max(request.due - self._clock.now(), 0.0))
        if self._clock.now() > request.useful_until:
            return PrefetchOutcome.LATE
        pieces = []
        for piece in prefetch_body(request.model.name, request.model.world, request.token_ids, request.salt):
            pieces.append(piece)
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(self._options.timeout_s):
                answer = await self._client.post(
                    request.url,
                    content=b"".join(pieces),
                    headers={"content-type": "application/json"},
                    timeout=None,
                )
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            return self._failed(request, PrefetchOutcome.FAILED, type(error).__name__)
        if answer.status_code != _ACCEPTED:
            return self._failed(request, PrefetchOutcome.REFUSED, f"status {answer.status_code}")
        try:
            chunks = read_prefetch_answer(answer.content)
        except WireError as error:
            return self._failed(request, PrefetchOutcome.REFUSED, str(error))
        if request.instance_id in self._failing:
            self._failing.discard(request.instance_id)
            log.info("LMCache server %s accepts prefetches again", request.instance_id)
        return PrefetchOutcome.SUBMITTED if chunks else PrefetchOutcome.NOTHING

    def _failed(self, request: _PrefetchRequest, outcome: PrefetchOutcome, reason: str) -> PrefetchOutcome:
        if request.instance_id not in self._failing:
            self._failing.add(request.instance_id)
            log.warning("LMCache server %s did not accept a prefetch: %s", request.instance_id, reason)
        return outcome
