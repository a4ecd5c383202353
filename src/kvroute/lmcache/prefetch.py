"""Asking LMCache's servers to load what a queued request will need, from L2 into L1."""

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
from kvroute.lmcache.options import PrefetchOptions
from kvroute.lmcache.stored_chunks import StoredModel
from kvroute.wire.lmcache_server import prefetch_body, read_prefetch_answer

log = logging.getLogger(__name__)

_ACCEPTED: Final = 202


class PrefetchOutcome(StrEnum):
    """What became of one; bounded, so a metric label."""

    SUBMITTED = "submitted"
    """The server has begun to load."""
    NOTHING = "nothing"
    """The prompt is shorter than one of its chunks."""
    REFUSED = "refused"
    """Any other answer: an older LMCache (404), or a model that has not run there yet (503)."""
    FAILED = "failed"
    """No answer in time."""
    LATE = "late"
    """Not asked: by then the request's turn would have come."""
    CROWDED = "crowded"
    """Not asked: too many others waited for their answers."""
    UNKNOWN_MODEL = "unknown_model"
    """Not asked: what the worker's model is called in LMCache, and over how many ranks, is not known."""


class _Order(NamedTuple):
    url: str
    instance_id: str
    model: StoredModel
    token_ids: Sequence[int]
    salt: str
    due: float
    useful_until: float


class Prefetcher:
    """Sends prefetches from a queue, so that no request waits for one. Mutable: `counts`, by outcome, and the
    queue. The client belongs to the caller; `run` does the work."""

    def __init__(
        self, coordinator: Coordinator, client: httpx.AsyncClient, clock: Clock, options: PrefetchOptions
    ) -> None:
        self.counts = dict.fromkeys(PrefetchOutcome, 0)
        self._coordinator = coordinator
        self._client = client
        self._clock = clock
        self._options = options
        self._orders: asyncio.Queue[_Order] = asyncio.Queue(options.max_waiting)
        self._failing: set[str] = set()
        """Servers of which it was said that they fail."""

    def knows(self, worker_id: str) -> bool:
        """Whether there is a server to ask."""
        return self._coordinator.instance_of(worker_id) is not None

    def ask(self, worker_id: str, token_ids: Sequence[int], salt: str, spare_s: float) -> None:
        """Have the worker's server load these leading tokens of a prompt: after `delay_s` of the options, if
        it can be asked within `spare_s` from now. Returns at once."""
        instance = self._coordinator.instance_of(worker_id)
        if instance is None:
            return
        model = self._coordinator.model_of(worker_id)
        if model is None:
            self.counts[PrefetchOutcome.UNKNOWN_MODEL] += 1
            return
        host = f"[{instance.address}]" if ":" in instance.address else instance.address
        now = self._clock.now()
        order = _Order(
            f"http://{host}:{instance.http_port}/cache/prefetches",
            instance.id,
            model,
            token_ids,
            salt,
            now + self._options.delay_s,
            now + spare_s,
        )
        try:
            self._orders.put_nowait(order)
        except asyncio.QueueFull:
            self.counts[PrefetchOutcome.CROWDED] += 1

    async def run(self) -> NoReturn:
        """Ends only by cancellation."""
        async with asyncio.TaskGroup() as senders:
            for _ in range(self._options.connections):
                senders.create_task(self._send_all())
        raise AssertionError("the senders never end")

    async def _send_all(self) -> NoReturn:
        while True:
            order = await self._orders.get()
            self.counts[await self._send(order)] += 1

    async def _send(self, order: _Order) -> PrefetchOutcome:
        # All wait for the same time, so that none in the queue is due before one that is waited for here.
        await self._clock.sleep(max(order.due - self._clock.now(), 0.0))
        if self._clock.now() > order.useful_until:
            return PrefetchOutcome.LATE
        pieces = []
        for piece in prefetch_body(order.model.name, order.model.world, order.token_ids, order.salt):
            pieces.append(piece)
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(self._options.timeout_s):
                answer = await self._client.post(
                    order.url,
                    content=b"".join(pieces),
                    headers={"content-type": "application/json"},
                    timeout=None,
                )
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            return self._failed(order, PrefetchOutcome.FAILED, type(error).__name__)
        if answer.status_code != _ACCEPTED:
            return self._failed(order, PrefetchOutcome.REFUSED, f"status {answer.status_code}")
        try:
            chunks = read_prefetch_answer(answer.content)
        except WireError as error:
            return self._failed(order, PrefetchOutcome.REFUSED, str(error))
        if order.instance_id in self._failing:
            self._failing.discard(order.instance_id)
            log.info("LMCache server %s prefetches again", order.instance_id)
        return PrefetchOutcome.SUBMITTED if chunks else PrefetchOutcome.NOTHING

    def _failed(self, order: _Order, outcome: PrefetchOutcome, why: str) -> PrefetchOutcome:
        if order.instance_id not in self._failing:
            self._failing.add(order.instance_id)
            log.warning("LMCache server %s does not prefetch: %s", order.instance_id, why)
        return outcome
