"""The gateway's own requests to LMCache's servers, and prefetches: a server loads a queued request's chunks
from L2 into L1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, NoReturn

import httpx

from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.membership import StoredModel
from kvroute.lmcache.options import PrefetchOptions
from kvroute.lmcache.registration import ServerAddresses
from kvroute.wire.lmcache_server import (
    prefetch_body,
    read_prefetch_answer,
)

log = logging.getLogger(__name__)


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
