"""Follows the event streams of all workers while the fleet changes, and keeps one index up to date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import httpx
import zmq
import zmq.asyncio

from kvroute.blocks.keys import Tier
from kvroute.clock import Clock
from kvroute.errors import ConfigError, WireError
from kvroute.events.holdings import LedgerCounts
from kvroute.events.inbox import ConnectedInbox, Inbox, Listener
from kvroute.events.intake import StreamCounts
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions, KvEventSource, find_sources
from kvroute.events.poller import SocketPoller, TimeSlicer
from kvroute.events.probes import KnownPrompt, Prober, PromptMemory
from kvroute.events.subscriber import Captured, KvEventSubscriber, SnapshotFile
from kvroute.fleet.fleet import FleetChange
from kvroute.fleet.worker import Worker, WorkerId
from kvroute.index.map_trust import MapTrust, TrustReason
from kvroute.index.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The stream of one worker's rank. `slot` is its number in the index."""

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

    def on_answer(self, new_tokens: int, started: float | None = None) -> None:
        """The worker's rank answered a request and computed `new_tokens` of its prompt, or of prompt and
        answer.

        See `KvEventSubscriber.on_answer`.
        """
        self.subscriber.on_answer(new_tokens, started)

    def note_prompt(self, prompt: KnownPrompt) -> None:
        """Remember a prompt that the worker's rank has computed, so that a probe can send it again.

        `ProbeOptions.memory_tokens` bounds the memory.
        """
        self.prompts.note(prompt)


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """One stream's figures for metrics. `counts` and `blocks` are the live objects, which continue to
    count."""

    worker: WorkerId
    rank: int
    trust: MapTrust
    reason: TrustReason | None
    held_blocks: Mapping[Tier, int]
    orphan_blocks: int
    counts: StreamCounts
    blocks: LedgerCounts
    last_message: float | None = None
    """When the last batch was read, in `Clock.now()` seconds; None before the first one."""


log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 60.0
"""Between two attempts to find the sources of a worker that publishes no events."""
_START_TIME_POLL_S = 0.05
_LAST_SNAPSHOT_S = 10.0
"""Longest time for the last snapshot at shutdown."""


StreamsChanged = Callable[[Worker, Sequence[Stream], Sequence[Stream]], None]
"""Called synchronously with a worker's streams before and after a change."""


class EventIngest:
    """Keeps `index` up to date from the events of every worker in the fleet.

    Mutable: `bind` opens the sockets that workers connect to, `fleet_changed` (a fleet listener) starts and
    ends streams, `run` owns their tasks. Use it from one event loop only. The client belongs to the caller
    and sends the workers' key.
    """

    def __init__(
        self,
        index: PrefixIndex,
        client: httpx.AsyncClient,
        clock: Clock,
        options: KvEventsOptions,
        streams_changed: StreamsChanged | None = None,
        on_cleared: Callable[[Worker, int], None] | None = None,
    ) -> None:
        """`on_cleared` gets worker and rank of each event that clears a whole cache."""
        self._index = index
        self._client = client
        self._clock = clock
        self._options = options
        self._streams_changed = streams_changed
        self._on_cleared = on_cleared
        self._snapshot = SnapshotFile(options.snapshot.path) if options.snapshot.path else None
        self._slicer = TimeSlicer(clock, options.slice_ms)
        self._poller = SocketPoller(clock, options.slice_ms, self._slicer)
        self.refresh = self._poller.poll
        """Apply the events that have arrived: see `SocketPoller.poll`."""
        self._streams: dict[Worker, list[Stream]] = {}
        self._without_events: set[Worker] = set()
        """Workers that publish no events."""
        self._followed: dict[Worker, asyncio.Event] = {}
        """The workers to follow. Setting the event makes their sources be searched again."""
        self._changed = asyncio.Event()
        self._slots: set[int] = set()
        self._context: zmq.asyncio.Context | None = None
        self._listeners: list[Listener] = []
        self._closed_ledgers: list[Ledger] = []
        """Ledgers of ended streams, whose memory is not fully returned yet."""
        self._ready = asyncio.Event()

    # For routing

    def streams(self, worker: Worker) -> Sequence[Stream]:
        """The worker's streams by rank; empty before its sources are found."""
        return self._streams.get(worker, ())

    def trust(self, worker: Worker) -> MapTrust:
        """The least trust in any of the worker's streams; NONE without a stream."""
        trusts = [stream.trust for stream in self.streams(worker)]
        for trust in (MapTrust.NONE, MapTrust.PARTIAL):
            if not trusts or trust in trusts:
                return trust
        return MapTrust.WHOLE

    def reason(self, worker: Worker) -> TrustReason | None:
        """Why `trust` is not WHOLE: the reason of the least trusted stream."""
        streams = self.streams(worker)
        if not streams:
            return TrustReason.NO_EVENTS if worker in self._without_events else TrustReason.REPLAYING
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
                stream.ledger.orphan_blocks,
                stream.subscriber.counts,
                stream.ledger.counts,
                stream.subscriber.last_message,
            )
            for worker, streams in self._streams.items()
            for stream in streams
        ]

    # Feedback from answers

    def distrust(self, worker: Worker, rank: int, reason: TrustReason | str) -> None:
        """Predictions from this rank's map were wrong: see `KvEventSubscriber.distrust`.

        Raises ValueError if `reason` is not a `TrustReason`.
        """
        for stream in self.streams(worker):
            if stream.rank == rank:
                stream.subscriber.distrust(TrustReason(reason))

    @property
    def listening(self) -> tuple[str, ...]:
        """The bound addresses that workers connect to."""
        return tuple(listener.endpoint for listener in self._listeners)

    # Following the fleet

    def fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        """A listener for `Fleet.subscribe`: drops the map of a worker that left or restarted."""
        if change is FleetChange.JOINED:
            self._followed[worker] = asyncio.Event()
            self._changed.set()
        elif change is FleetChange.LEFT:
            self._followed.pop(worker, None)
            self._without_events.discard(worker)
            streams = self._streams.pop(worker, ())
            for stream in streams:
                stream.ledger.close()
                self._closed_ledgers.append(stream.ledger)
            if streams and self._streams_changed is not None:
                self._streams_changed(worker, streams, ())
            self._changed.set()
        elif change is FleetChange.CLEARED:
            self.refresh(True)  # events from before must not come later
            for stream in self.streams(worker):
                stream.ledger.clear_gpu()
        elif change is FleetChange.RESTARTED:
            for stream in self.streams(worker):
                stream.subscriber.restarted()
            restarted = self._followed.get(worker)
            if restarted is not None:
                restarted.set()

    def bind(self) -> None:
        """Open the sockets that workers connect to. Raises ConfigError if an address cannot be bound."""
        self._context = zmq.asyncio.Context()
        for number, endpoint in enumerate(self._options.bind):
            try:
                listener = Listener(endpoint, self._options.queue_messages, self._poller)
            except (OSError, WireError) as error:
                self.close()
                reason = getattr(error, "strerror", None) or str(error)
                raise ConfigError(f"kv_events.bind.{number}", f"{endpoint}: {reason}") from error
            self._listeners.append(listener)
        self._ready.set()

    def close(self) -> None:
        """Close the sockets of `bind`; `run` does this at its end."""
        self._ready.clear()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def run(self) -> None:
        """Follow all workers; ends only by cancellation, and can be run again.

        Calls `bind` if the sockets are not open, and raises ConfigError as `bind` does.
        """
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
                for worker in [worker for worker in tasks if worker not in self._followed]:
                    await _cancelled([tasks.pop(worker)])
                for worker in self._followed:
                    if worker not in tasks:
                        tasks[worker] = asyncio.create_task(
                            self._follow(context, worker), name=f"KV events of {worker.id}"
                        )
                await self._tidy()
                await self._changed.wait()
        finally:
            await _cancelled(others)
            try:
                await self._save_last()
            finally:
                await _cancelled([*tasks.values()])
                self.close()

    async def _tidy(self) -> None:
        """Return the memory of ended streams, in time slices."""
        while self._closed_ledgers:
            if not self._closed_ledgers[-1].sweep():
                self._closed_ledgers.pop()
            if self._slicer.exhausted():
                await self._slicer.yield_to_loop()

    async def bound(self) -> None:
        """Return when workers can connect."""
        await self._ready.wait()

    async def _listen(self, listener: Listener) -> None:
        while True:
            try:
                await listener.run(self._slicer)
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
            streams = [stream for streams in self._streams.values() for stream in streams]
            await self._snapshot.save(
                Captured(stream.worker, stream.rank, stream.subscriber) for stream in streams
            )

    async def _save_last(self) -> None:
        try:
            async with asyncio.timeout(_LAST_SNAPSHOT_S):
                await self._save()
        except TimeoutError:
            log.warning("the last snapshot of the map was not written: a stream is being repaired")

    async def _follow(self, context: zmq.asyncio.Context, worker: Worker) -> None:
        """Find the worker's sources, follow them, and find them again when the worker restarts."""
        restarted = self._followed[worker]
        sources: list[KvEventSource] = []
        running: list[asyncio.Task[None]] = []
        pause_s = self._options.retry_s
        try:
            while True:
                restarted.clear()
                found_sources: list[KvEventSource] | None = None
                try:
                    found_sources = await find_sources(self._client, self._options, worker.spec)
                    if found_sources is not None and found_sources != sources:
                        await _cancelled(running)
                        sources, running = [], []
                        await self._wait_for_start_time(worker)
                        self._start(context, worker, found_sources, running)
                        sources = found_sources
                except Exception:
                    log.exception("following the KV events of worker %s failed", worker.id)
                if sources:
                    self._without_events.discard(worker)
                    await restarted.wait()
                    pause_s = self._options.retry_s
                    continue
                if (
                    found_sources is not None
                    and worker not in self._without_events
                    and worker in self._followed
                ):
                    self._without_events.add(worker)
                    log.warning(
                        "worker %s publishes no KV events: its cached blocks are unknown. Start vLLM with "
                        "--kv-events-config; before vLLM 0.27 also set kv_events.endpoint",
                        worker.id,
                    )
                await self._clock.sleep(pause_s)
                if found_sources is not None:
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            await _cancelled(running)

    async def _wait_for_start_time(self, worker: Worker) -> None:
        """If the snapshot has this worker, wait until its start time is known, for `discovery_timeout_s` at
        most."""
        if self._snapshot is None or not self._snapshot.knows(worker):
            return
        deadline = self._clock.now() + self._options.discovery_timeout_s
        while worker.facts.start_time is None and self._clock.now() < deadline:
            await self._clock.sleep(_START_TIME_POLL_S)

    def _start(
        self,
        context: zmq.asyncio.Context,
        worker: Worker,
        sources: Sequence[KvEventSource],
        tasks: list[asyncio.Task[None]],
    ) -> None:
        """Start a stream for each source; the caller owns the tasks that are added to `tasks`."""
        streams = []
        for source in sources:
            slot = next(number for number in count() if number not in self._slots)
            self._slots.add(slot)
            ledger = Ledger(self._index, slot, max_orphans=self._options.max_orphan_blocks)
            if self._on_cleared is not None:
                ledger.on_cleared = partial(self._on_cleared, worker, source.rank)
            subscriber = KvEventSubscriber(
                f"{worker.id} rank {source.rank}",
                ledger,
                self._inbox_of(source),
                source.replay_endpoint,
                context,
                self._clock,
                self._options,
                self._slicer,
                pool_blocks=_pool_blocks(worker, ledger),
                block_tokens=lambda: worker.facts.block_size,
                resumed=None if self._snapshot is None else self._snapshot.take(worker, source.rank),
            )
            prompts = PromptMemory(self._options.probe.memory_tokens)
            stream = Stream(worker, source.rank, slot, ledger, subscriber, prompts)
            streams.append(stream)
            task = asyncio.create_task(subscriber.run(), name=f"KV events of {worker.id}")
            task.add_done_callback(lambda _, slot=slot: self._release(slot))  # type: ignore[misc]
            tasks.append(task)
        previous = self._streams.get(worker, ())
        self._streams[worker] = streams
        if self._streams_changed is not None:
            self._streams_changed(worker, previous, streams)
        self._slots -= {stream.slot for stream in previous}
        if self._options.probe.enabled:
            prober = Prober(worker, streams, self._client, self._clock, self._options.probe)
            tasks.append(asyncio.create_task(prober.run(), name=f"probes of {worker.id}"))

    def _release(self, slot: int) -> None:
        """The slot's stream has ended: free the slot, unless the stream is still listed for its worker."""
        if not any(stream.slot == slot for streams in self._streams.values() for stream in streams):
            self._slots.discard(slot)

    def _inbox_of(self, source: KvEventSource) -> Callable[[], Inbox]:
        bind_index, queue = source.bind_index, self._options.queue_messages
        if bind_index is None:
            return lambda: ConnectedInbox(self._poller, source.endpoint, source.topic, queue)
        return lambda: self._listeners[bind_index].inbox(source.topic)


def _pool_blocks(worker: Worker, ledger: Ledger) -> Callable[[], int | None]:
    """A function that returns the blocks in the worker's GPU memory over all ranks; None while unknown."""

    def blocks() -> int | None:
        tokens, size = worker.facts.capacity_tokens, ledger.block_tokens
        return tokens // size if tokens and size else None

    return blocks


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel the tasks and await them; log the ones that failed."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("following KV events failed", exc_info=outcome)
