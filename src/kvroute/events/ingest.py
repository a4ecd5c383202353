"""All workers' event streams: found, followed and let go as the fleet changes; one index fed by them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import httpx
import zmq
import zmq.asyncio

from kvroute.blocks.keys import Tier
from kvroute.clock import Clock
from kvroute.errors import ConfigError
from kvroute.events.holdings import LedgerCounts
from kvroute.events.inbox import ConnectedInbox, Inbox, Listener
from kvroute.events.intake import StreamCounts
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.poller import SocketPoller, TimeSlicer
from kvroute.events.repair import KnownPrompt, PromptMemory, Repairer
from kvroute.events.snapshot import Captured, SnapshotFile
from kvroute.events.sources import KvEventSource, find_sources
from kvroute.events.subscriber import KvEventSubscriber
from kvroute.fleet.fleet import FleetChange
from kvroute.fleet.worker import Worker, WorkerId
from kvroute.index.prefix_index import PrefixIndex
from kvroute.index.trust import MapTrust, TrustReason


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """One worker's rank being followed. `slot` is its place in the index."""

    worker: Worker
    rank: int
    slot: int
    ledger: Ledger
    subscriber: KvEventSubscriber
    prompts: PromptMemory

    @property
    def trust(self) -> MapTrust:
        return self.subscriber.trust

    @property
    def reason(self) -> TrustReason | None:
        """Why the map is not whole; None if it is."""
        return self.subscriber.reason

    @property
    def why(self) -> str:
        """The same in a word, empty if it is whole."""
        return self.subscriber.reason or ""

    def served(self, new_tokens: int, started: float | None = None) -> None:
        """The worker's rank has answered a request and had to compute `new_tokens` for it (of its prompt,
        or of prompt and answer): see `KvEventSubscriber.served`."""
        self.subscriber.served(new_tokens, started)

    def note_prompt(self, prompt: KnownPrompt) -> None:
        """The worker's rank has computed this prompt: it can be asked for it again. Keeps it, bounded by
        `ProbeOptions.memory_tokens`."""
        self.prompts.note(prompt)


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """One stream's figures, as of now; `counts` and `blocks` go on counting."""

    worker: WorkerId
    rank: int
    trust: MapTrust
    reason: TrustReason | None
    held_blocks: Mapping[Tier, int]
    aside_blocks: int
    counts: StreamCounts
    blocks: LedgerCounts


log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 60.0
"""Between two questions to a worker that has said that it publishes nothing."""
_LOOK_S = 0.05
_FAREWELL_S = 10.0
"""Longest wait for the last snapshot."""


StreamsChanged = Callable[[Worker, Sequence[Stream], Sequence[Stream]], None]
"""Told of a worker's streams before and after a change; called synchronously."""


class EventIngest:
    """Feeds `index` from the events of every worker in the fleet.

    Mutable: `bind` opens what workers connect to, `fleet_changed` (a fleet listener) starts and ends
    streams, `run` owns their tasks. Touched from the event loop only. The client belongs to the caller and
    knows the workers' key.
    """

    def __init__(
        self,
        index: PrefixIndex,
        client: httpx.AsyncClient,
        clock: Clock,
        options: KvEventsOptions,
        streams_changed: StreamsChanged | None = None,
    ) -> None:
        self._index = index
        self._client = client
        self._clock = clock
        self._options = options
        self._streams_changed = streams_changed
        self._snapshot = SnapshotFile(options.snapshot.path) if options.snapshot.path else None
        self._turns = TimeSlicer(clock, options.slice_ms)
        self._arrivals = SocketPoller(clock, options.slice_ms, self._turns)
        self.look = self._arrivals.look
        """Take in what has come by now, so that a decision is made on it."""
        self._streams: dict[Worker, list[Stream]] = {}
        self._mute: set[Worker] = set()
        """Workers that publish no events."""
        self._wanted: dict[Worker, asyncio.Event] = {}
        """Workers to follow; the event asks to look for their sources again."""
        self._changed = asyncio.Event()
        self._slots: set[int] = set()
        self._context: zmq.asyncio.Context | None = None
        self._listeners: list[Listener] = []
        self._left: list[Ledger] = []
        """Of streams that ended: their memory is still to be returned."""
        self._ready = asyncio.Event()

    # What routing reads

    def streams(self, worker: Worker) -> Sequence[Stream]:
        """The worker's streams by rank; empty as long as none has been found."""
        return self._streams.get(worker, ())

    def trust(self, worker: Worker) -> MapTrust:
        """The least trust in any of the worker's streams; NONE without one."""
        trusts = [stream.trust for stream in self.streams(worker)]
        for trust in (MapTrust.NONE, MapTrust.PARTIAL):
            if not trusts or trust in trusts:
                return trust
        return MapTrust.WHOLE

    def reason(self, worker: Worker) -> TrustReason | None:
        """Why `trust` is not WHOLE: that of the least trusted of its streams."""
        streams = self.streams(worker)
        if not streams:
            return TrustReason.NO_EVENTS if worker in self._mute else TrustReason.REPLAYING
        trust = self.trust(worker)
        return next(stream.reason for stream in streams if stream.trust is trust)

    def figures(self) -> list[StreamFigures]:
        """For metrics: one entry per stream."""
        return [
            StreamFigures(
                worker.id,
                stream.rank,
                stream.trust,
                stream.reason,
                {tier: stream.ledger.held_blocks(tier) for tier in Tier},
                stream.ledger.aside_blocks,
                stream.subscriber.counts,
                stream.ledger.counts,
            )
            for worker, streams in self._streams.items()
            for stream in streams
        ]

    # What answers tell

    def distrust(self, worker: Worker, rank: int, reason: TrustReason | str) -> None:
        """Predictions from this map do not come true: it is not used until it has been replayed from the
        start, or begun from nothing. Raises ValueError for what is no `TrustReason`."""
        for stream in self.streams(worker):
            if stream.rank == rank:
                stream.subscriber.distrust(TrustReason(reason))

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
            self._mute.discard(worker)
            streams = self._streams.pop(worker, ())
            for stream in streams:
                stream.ledger.close()
                self._left.append(stream.ledger)
            if streams and self._streams_changed is not None:
                self._streams_changed(worker, streams, ())
            self._changed.set()
        elif change is FleetChange.RESTARTED:
            for stream in self.streams(worker):
                stream.subscriber.restarted()
            again = self._wanted.get(worker)
            if again is not None:
                again.set()

    def bind(self) -> None:
        """Listen for workers that connect to us. Raises ConfigError if an address cannot be had."""
        self._context = zmq.asyncio.Context()
        for number, endpoint in enumerate(self._options.bind):
            try:
                listener = Listener(self._context, endpoint, self._options.queue_messages)
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError(f"kv_events.bind.{number}", f"{endpoint}: {error.strerror}") from error
            self._listeners.append(listener)
        self._ready.set()

    def close(self) -> None:
        """Undo `bind`; `run` does so at its end."""
        self._ready.clear()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def run(self) -> None:
        """Follow all workers; ends only by cancellation, and can be run again. Raises ConfigError as `bind`
        does, which it calls if nobody did."""
        if self._context is None:
            self.bind()
        assert self._context is not None
        context = self._context
        tasks: dict[Worker, asyncio.Task[None]] = {}
        others: list[asyncio.Task[None]] = []
        try:
            if self._snapshot is not None:
                await self._snapshot.load()
                others.append(asyncio.create_task(self._save_regularly(), name="snapshots of the map"))
            for listener in self._listeners:
                others.append(
                    asyncio.create_task(self._listen(listener), name=f"KV events at {listener.endpoint}")
                )
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
            await _ended(others)
            try:
                await self._save_at_the_end()
            finally:
                await _ended([*tasks.values()])
                self.close()

    async def _tidy(self) -> None:
        """Return the memory of those who left, a little at a time."""
        while self._left:
            if not self._left[-1].sweep():
                self._left.pop()
            if self._turns.are_over():
                await self._turns.next()

    async def bound(self) -> None:
        """Returns when workers can connect."""
        await self._ready.wait()

    async def _listen(self, listener: Listener) -> None:
        while True:
            try:
                await listener.run(self._turns)
            except Exception:
                log.exception("receiving KV events at %s failed", listener.endpoint)
            await self._clock.sleep(self._options.retry_s)

    async def _save_regularly(self) -> None:
        while True:
            await self._clock.sleep(self._options.snapshot.interval_s)
            try:
                await self._save()
            except Exception:
                log.exception("writing the snapshot of the map failed")

    async def _save(self) -> None:
        if self._snapshot is not None:
            self._snapshot.discard()
            streams = [each for streams in self._streams.values() for each in streams]
            await self._snapshot.save(Captured(each.worker, each.rank, each.subscriber) for each in streams)

    async def _save_at_the_end(self) -> None:
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self._save()
        except TimeoutError:
            log.warning("the snapshot of the map was not written: a stream is being repaired")

    async def _follow(self, context: zmq.asyncio.Context, worker: Worker) -> None:
        """Look for the worker's sources until it has some, follow them, look again when it restarted."""
        again = self._wanted[worker]
        sources: list[KvEventSource] = []
        running: list[asyncio.Task[None]] = []
        pause_s = self._options.retry_s
        try:
            while True:
                again.clear()
                found: list[KvEventSource] | None = None
                try:
                    found = await find_sources(self._client, self._options, worker.spec)
                    if found is not None and found != sources:
                        await _ended(running)
                        sources, running = [], []
                        await self._incarnation_known(worker)
                        self._start(context, worker, found, running)
                        sources = found
                except Exception:
                    log.exception("following the KV events of worker %s failed", worker.id)
                if sources:
                    self._mute.discard(worker)
                    await again.wait()
                    pause_s = self._options.retry_s
                    continue
                if found is not None and worker not in self._mute and worker in self._wanted:
                    self._mute.add(worker)
                    log.warning("worker %s publishes no KV events: what it holds is not known", worker.id)
                await self._clock.sleep(pause_s)
                if found is not None:
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            await _ended(running)

    async def _incarnation_known(self, worker: Worker) -> None:
        """What a snapshot has of a worker is worth a moment's waiting for its first answers."""
        if self._snapshot is None or not self._snapshot.knows(worker):
            return
        until = self._clock.now() + self._options.discovery_timeout_s
        while worker.facts.start_time is None and self._clock.now() < until:
            await self._clock.sleep(_LOOK_S)

    def _start(
        self,
        context: zmq.asyncio.Context,
        worker: Worker,
        sources: Sequence[KvEventSource],
        tasks: list[asyncio.Task[None]],
    ) -> None:
        """Follow each of them; the caller owns what is added to `tasks`."""
        streams = []
        for source in sources:
            slot = next(number for number in count() if number not in self._slots)
            self._slots.add(slot)
            ledger = Ledger(self._index, slot, max_aside=self._options.max_aside_blocks)
            subscriber = KvEventSubscriber(
                f"{worker.id} rank {source.rank}",
                ledger,
                self._inbox_of(source),
                source.replay_endpoint,
                context,
                self._clock,
                self._options,
                self._turns,
                pool_blocks=_pool_of(worker, ledger),
                resumed=None if self._snapshot is None else self._snapshot.take(worker, source.rank),
            )
            prompts = PromptMemory(self._options.probe.memory_tokens)
            stream = Stream(worker, source.rank, slot, ledger, subscriber, prompts)
            streams.append(stream)
            task = asyncio.create_task(subscriber.run(), name=f"KV events of {worker.id}")
            task.add_done_callback(lambda _, slot=slot: self._release(slot))  # type: ignore[misc]
            tasks.append(task)
        before = self._streams.get(worker, ())
        self._streams[worker] = streams
        if self._streams_changed is not None:
            self._streams_changed(worker, before, streams)
        self._slots -= {stream.slot for stream in before}
        if self._options.probe.enabled:
            repairer = Repairer(worker, streams, self._client, self._clock, self._options.probe)
            tasks.append(asyncio.create_task(repairer.run(), name=f"repair of the map of {worker.id}"))

    def _release(self, slot: int) -> None:
        """Its stream has ended. As long as it is shown as the worker's, nobody else may have its place."""
        if not any(stream.slot == slot for streams in self._streams.values() for stream in streams):
            self._slots.discard(slot)

    def _inbox_of(self, source: KvEventSource) -> Callable[[], Inbox]:
        place, queue = source.comes_to, self._options.queue_messages
        if place is None:
            return lambda: ConnectedInbox(self._arrivals, source.endpoint, source.topic, queue)
        return lambda: self._listeners[place].inbox(source.topic)


def _pool_of(worker: Worker, ledger: Ledger) -> Callable[[], int | None]:
    """Blocks in all of the worker's GPU memory, those of its other ranks too; None while not known."""

    def blocks() -> int | None:
        tokens, size = worker.facts.capacity_tokens, ledger.block_tokens
        return tokens // size if tokens and size else None

    return blocks


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel and await; what failed is logged."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("following KV events failed", exc_info=outcome)
