"""All workers' event streams: found, followed and let go as the fleet changes; one index fed by them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import httpx
import zmq
import zmq.asyncio

from kvroute.clock import Clock
from kvroute.events.inbox import Inbox, Listener, SubscribedInbox
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.sources import KvEventSource, find_sources
from kvroute.events.subscriber import KvEventSubscriber, Trust
from kvroute.fleet.fleet import FleetChange
from kvroute.fleet.worker import Worker
from kvroute.index.prefix_index import PrefixIndex

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """One worker's rank being followed. `slot` is its place in the index."""

    worker: Worker
    rank: int
    slot: int
    ledger: Ledger
    subscriber: KvEventSubscriber

    @property
    def trust(self) -> Trust:
        return self.subscriber.trust


class EventIngest:
    """Feeds `index` from the events of every worker in the fleet.

    Mutable: `fleet_changed` (a fleet listener) starts and ends streams, `run` owns their tasks. Touched
    from the event loop only. The client belongs to the caller.
    """

    def __init__(
        self, index: PrefixIndex, client: httpx.AsyncClient, clock: Clock, options: KvEventsOptions
    ) -> None:
        self._index = index
        self._client = client
        self._clock = clock
        self._options = options
        self._streams: dict[Worker, list[Stream]] = {}
        self._wanted: dict[Worker, asyncio.Event] = {}
        """Workers to follow; the event asks to look for their sources again."""
        self._changed = asyncio.Event()
        self._slots: set[int] = set()
        self._listeners: list[Listener] = []
        self._left: list[Ledger] = []
        """Of streams that ended: their memory is still to be returned."""
        self._ready = asyncio.Event()

    # What routing reads

    def streams(self, worker: Worker) -> Sequence[Stream]:
        """The worker's streams by rank; empty as long as none has been found."""
        return self._streams.get(worker, ())

    def trust(self, worker: Worker) -> Trust:
        """The least trust in any of the worker's streams; NONE without one."""
        trusts = [stream.trust for stream in self.streams(worker)]
        for trust in (Trust.NONE, Trust.PARTIAL):
            if not trusts or trust in trusts:
                return trust
        return Trust.WHOLE

    @property
    def listening(self) -> tuple[str, ...]:
        """Where we listen for workers that connect to us, as bound."""
        return tuple(listener.endpoint for listener in self._listeners)

    # Following the fleet

    def fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        """A listener for `Fleet.subscribe`: forgets at once what a worker that left or restarted held."""
        if change is FleetChange.JOINED:
            self._wanted[worker] = asyncio.Event()
            self._changed.set()
        elif change is FleetChange.LEFT:
            self._wanted.pop(worker, None)
            for stream in self._streams.pop(worker, ()):
                stream.ledger.close()
                self._left.append(stream.ledger)
            self._changed.set()
        elif change is FleetChange.RESTARTED:
            for stream in self.streams(worker):
                stream.subscriber.restarted()
            again = self._wanted.get(worker)
            if again is not None:
                again.set()

    async def run(self) -> None:
        """Follow all workers; ends only by cancellation. Raises zmq.ZMQError if an address to listen on is
        taken."""
        tasks: dict[Worker, asyncio.Task[None]] = {}
        others: list[asyncio.Task[None]] = []
        context = zmq.asyncio.Context()
        try:
            for endpoint in self._options.bind:
                listener = Listener(context, endpoint, self._options.queue_messages)
                self._listeners.append(listener)
                others.append(asyncio.create_task(listener.run(), name=f"KV events at {endpoint}"))
            self._ready.set()
            while True:
                self._changed.clear()
                for worker in [worker for worker in tasks if worker not in self._wanted]:
                    await _ended([tasks.pop(worker)])
                for worker in self._wanted:
                    if worker not in tasks:
                        tasks[worker] = asyncio.create_task(
                            self._follow(context, worker), name=f"KV events of {worker.id}"
                        )
                await self._tidy()
                await self._changed.wait()
        finally:
            await _ended([*tasks.values(), *others])
            for listener in self._listeners:
                listener.close()
            self._listeners.clear()
            self._ready.clear()
            context.destroy(linger=0)

    async def _tidy(self) -> None:
        """Return the memory of those who left, a little at a time."""
        while self._left:
            if not self._left[-1].sweep():
                self._left.pop()
            await asyncio.sleep(0)

    async def bound(self) -> None:
        """Returns when `run` listens."""
        await self._ready.wait()

    async def _follow(self, context: zmq.asyncio.Context, worker: Worker) -> None:
        """Look for the worker's sources until it has some, follow them, look again when it restarted."""
        again = self._wanted[worker]
        sources: list[KvEventSource] = []
        running: list[asyncio.Task[None]] = []
        try:
            while True:
                again.clear()
                found = await find_sources(self._client, self._options, worker.spec)
                if found is not None and found != sources:
                    await _ended(running)
                    sources = found
                    running = self._start(context, worker, sources)
                if sources:
                    await again.wait()
                else:
                    await self._clock.sleep(self._options.retry_s)
        finally:
            await _ended(running)

    def _start(
        self, context: zmq.asyncio.Context, worker: Worker, sources: Sequence[KvEventSource]
    ) -> list[asyncio.Task[None]]:
        streams, tasks = [], []
        for source in sources:
            slot = next(number for number in count() if number not in self._slots)
            self._slots.add(slot)
            ledger = Ledger(self._index, slot, max_aside=self._options.max_aside_blocks)
            subscriber = KvEventSubscriber(
                f"{worker.id} rank {source.rank}",
                ledger,
                self._inbox_of(context, source),
                source.replay_endpoint,
                context,
                self._clock,
                self._options,
            )
            stream = Stream(worker, source.rank, slot, ledger, subscriber)
            streams.append(stream)
            task = asyncio.create_task(subscriber.run(), name=f"KV events of {worker.id}")
            task.add_done_callback(lambda _, slot=slot: self._slots.discard(slot))  # type: ignore[misc]
            tasks.append(task)
        self._streams[worker] = streams
        return tasks

    def _inbox_of(self, context: zmq.asyncio.Context, source: KvEventSource) -> Callable[[], Inbox]:
        place, queue = source.comes_to, self._options.queue_messages
        if place is None:
            return lambda: SubscribedInbox(context, source.endpoint, source.topic, queue)
        return lambda: self._listeners[place].inbox(source.topic)


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel and await; what failed is logged."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("following KV events failed", exc_info=outcome)
