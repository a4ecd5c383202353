"""Tracks the workers' caches: KV events, LMCache, the map and exact tokens.

Constructed only where a strategy needs the map or tokens. `LiveCaches` is the map that strategies read:
vLLM's blocks and LMCache's chunks together.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import httpx
from prometheus_client.core import Metric

from kvroute.answers import BoundedTransport
from kvroute.background_tasks import BackgroundTasks
from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier
from kvroute.caches.lmcache import LMCache
from kvroute.caches.metrics import map_metrics, stream_metrics
from kvroute.caches.tokenizing import Tokenizing
from kvroute.clock import Clock
from kvroute.config.config import Config
from kvroute.errors import ConfigError, NotFound
from kvroute.events.ingest import EventIngest, Stream, StreamFigures
from kvroute.events.options import KvEventsOptions
from kvroute.events.probes import KnownPrompt
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.worker import Worker
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.map_trust import TrustReason, cause_and_fix, trust_for
from kvroute.index.prefix_index import PrefixIndex, TierMatch
from kvroute.index.snapshot import CopyableChunkIndex
from kvroute.lmcache.options import CoordinatorOptions
from kvroute.metrics import Metrics
from kvroute.relay.key_spaces import KeySpaces
from kvroute.relay.preparation import TimeoutOf
from kvroute.replicas.cache_reports import CacheReports
from kvroute.replicas.channel import Channel
from kvroute.replicas.maps import Publish, PublishingChunkIndex, PublishingPrefixIndex
from kvroute.replicas.messages import (
    CachePlaceMessage,
    Distrusted,
    L2TargetMessage,
    L2Targets,
    MapReset,
    Message,
    PromptAnswered,
    TierBandwidth,
    WorkerPlaces,
    unpack_ids,
    unpack_keys,
)
from kvroute.routing.reports import LastUnits
from kvroute.routing.strategy import (
    CacheMap,
    CachePlace,
    Candidate,
    ExactPrompt,
    GroupTokens,
    RouteQuery,
    Tokens,
)
from kvroute.tls import client_context
from kvroute.upstream.transport import AnyWorkerTransport

_new: Final = tuple.__new__
_NO_TOKENS: Final = Tokens()


class LiveCaches:
    """The `CacheMap` over the prefix index, the chunk index and the state of the event streams.

    Mutable: caches the last place of each slot, because every request reads it.
    """

    def __init__(
        self,
        index: PrefixIndex,
        chunks: ChunkIndex,
        ingest: EventIngest,
        lmcache_reports_l1: Callable[[int], bool],
    ) -> None:
        """`lmcache_reports_l1(slot)`: LMCache reports that slot's L1, so vLLM's events about L1 are
        ignored."""
        self._index = index
        self._chunks = chunks
        self._ingest = ingest
        self.refresh = ingest.refresh
        self._lmcache_reports_l1 = lmcache_reports_l1
        self._places: dict[int, tuple[TrustReason | None, tuple[CachePlace]]] = {}
        """Trust reason and place of each slot."""
        self._aheads: frozenset[int] = frozenset()
        """The lookaheads of all places so far, without 0."""
        self.last_units = LastUnits(index.unit)
        index.drops = self.last_units.slots

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        streams = self._ingest.streams(worker)
        if len(streams) == 1:
            return self._place(streams[0])
        return [self._place(stream)[0] for stream in streams]

    def _place(self, stream: Stream) -> tuple[CachePlace]:
        reason, slot, ahead = stream.subscriber.reason, stream.slot, stream.ledger.lookahead
        cached = self._places.get(slot)
        if cached is not None and cached[0] is reason:
            place = cached[1][0]
            is_current = place.rank == stream.rank and place.ahead == ahead
        else:
            is_current = False
        if cached is None or not is_current:
            why = "" if reason is None else reason.value
            note = stream.ledger.not_understood if reason is TrustReason.KINDS else ""
            place = CachePlace(slot, stream.rank, trust_for(reason), why, ahead, note=note)
            if ahead:
                self._aheads = self._aheads | {ahead}
            cached = self._places[slot] = reason, (place,)
        index = self._index
        if slot in index.groups.slots or slot in index.drops:
            return (with_rules(cached[1][0], index),)
        return cached[1]

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        return held_tokens(self._index, self._chunks, self._lmcache_reports_l1, prompt, self._aheads)

    def holds(self, slot: int, keys: Sequence[BlockKey], tokens: int) -> bool:
        return self._index.holds(slot, keys, tokens)

    def has_end(self, slot: int, keys: Sequence[BlockKey]) -> bool:
        return self._index.has_end(slot, keys)

    def keys_of(self, slot: int, prompt: ExactPrompt) -> Sequence[BlockKey]:
        if not self._aheads:
            return prompt.keys
        known = self._places.get(slot)
        ahead = 0 if known is None else known[1][0].ahead
        return prompt.keys_ahead(ahead) if ahead else prompt.keys


def with_rules(place: CachePlace, index: PrefixIndex) -> CachePlace:
    """The place of a slot with several KV cache groups, or whose engine drops a unit, with its rules."""
    slot = place.slot
    groups = index.groups.slots.get(slot)
    has_groups = groups is not None and bool(groups.rules)
    return place._replace(unit=index.unit(slot), has_groups=has_groups, drops=slot in index.drops)


def held_tokens(
    index: PrefixIndex,
    chunks: ChunkIndex,
    lmcache_reports_l1: Callable[[int], bool],
    prompt: ExactPrompt,
    aheads: Iterable[int] = (),
) -> Mapping[int, Tokens]:
    """The leading tokens of the prompt that each slot can use, from both indexes together.

    `aheads` are the lookaheads of workers whose hashes cover tokens after each block. Their blocks have keys
    of their own.
    """
    if aheads:
        return _held_with_lookahead(index, chunks, lmcache_reports_l1, prompt, aheads)
    if index.groups.slots:
        return _held_by_groups(index, chunks, lmcache_reports_l1, prompt)
    if not prompt.probed and not chunks.is_read:
        gpu = index.match_gpu(prompt.keys)
        if gpu is not None:  # a shortcut for fleets without slower tiers, with the same result
            # Like `Tokens(...)`, but without its constructor, which is Python code.
            return {slot: _new(Tokens, (tokens, 0, 0)) for slot, tokens in gpu.items()}
    return _held_in_tiers(chunks, lmcache_reports_l1, prompt, index.match(prompt.keys))


def _held_by_groups(
    index: PrefixIndex, chunks: ChunkIndex, lmcache_reports_l1: Callable[[int], bool], prompt: ExactPrompt
) -> Mapping[int, Tokens]:
    """As `held_tokens`, in a fleet in which some workers have several KV cache groups."""
    others: dict[int, int] = {}
    blocks = index.match(prompt.keys, prompt.end_key if index.drops else None, others)
    found = dict(_held_in_tiers(chunks, lmcache_reports_l1, prompt, blocks))
    for slot, otherwise in others.items():
        found[slot] = GroupTokens.of(*found.get(slot, _NO_TOKENS), otherwise)
    return found


def _held_in_tiers(
    chunks: ChunkIndex,
    lmcache_reports_l1: Callable[[int], bool],
    prompt: ExactPrompt,
    blocks: Mapping[int, TierMatch],
) -> Mapping[int, Tokens]:
    starts = {slot: match.gpu for slot, match in blocks.items()}
    behind = chunks.match(prompt.chunks, prompt.salt, starts, prompt.probed)
    found = {
        slot: Tokens(match.gpu) if match.l1 and lmcache_reports_l1(slot) else Tokens(*match)
        for slot, match in blocks.items()
    }
    for slot, (l1, l2) in behind.items():
        known = found.get(slot)
        if known is None:
            found[slot] = Tokens(0, l1, l2)
        elif l1 + l2 > known.l1 + known.l2:
            found[slot] = Tokens(known.gpu, l1, l2)
    return found


def _held_with_lookahead(
    index: PrefixIndex,
    chunks: ChunkIndex,
    lmcache_reports_l1: Callable[[int], bool],
    prompt: ExactPrompt,
    aheads: Iterable[int],
) -> Mapping[int, Tokens]:
    found = dict(held_tokens(index, chunks, lmcache_reports_l1, prompt))
    for ahead in aheads:
        # Such workers have no connector, so they have blocks in GPU memory only.
        for slot, match in index.match(prompt.keys_ahead(ahead)).items():
            if slot not in found or match.gpu > found[slot].gpu:
                found[slot] = Tokens(match.gpu)
    return found


def map_notes(fleet: Fleet, caches: CacheMap) -> list[str]:
    """Notes for `/ready`: workers whose map is incomplete."""
    notes = []
    for worker in fleet.workers():
        places = caches.places(worker)
        if not places:
            notes.append(f"kvaware: worker {worker.id!r}: {TrustReason.NO_EVENTS}")
        notes += [
            f"kvaware: worker {worker.id!r}: {place.distrust_reason}"
            f"{cause_and_fix(place.distrust_reason, place.note)}"
            for place in places
            if place.distrust_reason
        ]
    return notes


def describe_map(
    fleet: Fleet, caches: CacheMap, index: PrefixIndex, tokens: dict[str, object]
) -> dict[str, object]:
    """The map for the admin API; `tokens` describes the source of each model's tokens."""
    size = index.size()
    return {
        "blocks": size.blocks,
        "held_blocks": size.held_blocks,
        "dropped_blocks": size.dropped,
        "bytes": size.bytes,
        "tokens": tokens,
        "workers": {
            worker.id: [
                {
                    "rank": place.rank,
                    "trust": place.trust.value,
                    "why": place.distrust_reason or None,
                    "note": cause_and_fix(place.distrust_reason, place.note).strip(" ()") or None,
                }
                for place in caches.places(worker)
            ]
            for worker in fleet.workers()
        },
    }


def stream_row(stream: StreamFigures, started: float) -> dict[str, object]:
    """One event stream for the live page, as JSON values. `started`: `Clock.wall()` minus `Clock.now()`."""
    counts = stream.counts
    return {
        "worker": stream.worker,
        "rank": stream.rank,
        "map": stream.trust.value,
        "why": stream.reason,
        "held": {tier.name.lower(): blocks for tier, blocks in stream.held_blocks.items()},
        "orphans": stream.orphan_blocks,
        "batches": counts.messages,
        "gaps": counts.gaps,
        "replays": counts.replays,
        "restarts": counts.restarts,
        "losses": counts.losses,
        "last_batch": None if stream.last_message is None else round(started + stream.last_message),
    }


class CacheTracker:
    """Reads the workers' cache events into the map, and provides exact tokens for lookups.

    An async context manager that owns the tasks. Also a subscriber of the fleet and the `Feedback` of the
    prediction audit.
    """

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        metrics: Metrics,
        clock: Clock,
        isolation: KeySpaces,
        on_slot_removed: Callable[[int], None],
        token_timeout_s: TimeoutOf,
        rate_measured: Callable[[int, Tier, float, int], None],
        channel: Channel | None = None,
        indexes: tuple[PrefixIndex, CopyableChunkIndex] | None = None,
        on_cleared: Callable[[Worker, int], None] | None = None,
    ) -> None:
        """`on_slot_removed` gets each slot that leaves the map. `rate_measured` gets slot, tier, the mean
        bandwidth in GB/s from the tier to the slot, and the number of measured loads. `channel` leads to the
        gateways that LMCache's reports are forwarded to. `indexes` replace the default ones, for a map that
        is published to other processes (`replicas.maps`). `on_cleared` gets worker and rank of each event
        that clears a whole cache."""
        self._fleet = fleet
        self._clock = clock
        self._client = worker_client(config, metrics.answer_refused)
        self._index, chunks = indexes or (
            PrefixIndex(max_blocks=config.kv_events.max_index_blocks),
            CopyableChunkIndex(max_chunks=config.lmcache.coordinator.max_chunks),
        )
        self._on_slot_removed = on_slot_removed
        self._isolation = isolation
        self._background = BackgroundTasks(clock)
        self._ingest = EventIngest(
            self._index, self._client, clock, config.kv_events, self._streams_changed, on_cleared
        )
        # Any program can register as an LMCache server, and the gateway polls its status: it must not get the
        # workers' key.
        self._keyless = lmcache_client(config.lmcache.coordinator, metrics.answer_refused)
        self.lmcache = LMCache(
            chunks,
            self._keyless,
            clock,
            config.lmcache,
            self._background,
            rate_measured,
            channel,
            hyperpod_lines=config.logging.hyperpod_lines,
        )
        self.caches = LiveCaches(self._index, self.lmcache.chunks, self._ingest, self.lmcache.reports_l1)
        self._tokens = Tokenizing(
            config.tokens,
            self._client,
            fleet,
            metrics,
            clock,
            isolation,
            self.lmcache.probe,
            lambda: bool(self.lmcache.targets()),
            token_timeout_s,
        )
        self.preparer = self._tokens.preparer

    async def __aenter__(self) -> Self:
        """Raises ConfigError if an address to listen on cannot be bound."""
        try:
            self._ingest.bind()
            self.lmcache.open()
        except ConfigError:
            await self._background.aclose()
            self._ingest.close()
            await self.lmcache.aclose()
            await self._client.aclose()
            await self._keyless.aclose()
            raise
        self._background.start("KV events", self._ingest.run)
        await self._tokens.open(self._background)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.aclose()
        await self.lmcache.aclose()
        await self._tokens.aclose()
        await self._client.aclose()
        await self._keyless.aclose()

    def fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        self._ingest.fleet_changed(change, worker)
        self._tokens.fleet_changed(change, worker)
        if change is FleetChange.LEFT:
            self.lmcache.worker_left(worker)
        elif change is FleetChange.MODELS:
            self._update_lmcache(worker, self._ingest.streams(worker))

    def _streams_changed(self, worker: Worker, before: Sequence[Stream], now: Sequence[Stream]) -> None:
        for slot in {stream.slot for stream in before} - {stream.slot for stream in now}:
            self.lmcache.slot_removed(slot)
            self.caches.last_units.forget(slot)
            self._on_slot_removed(slot)
        if now:
            self._update_lmcache(worker, now)

    def _update_lmcache(self, worker: Worker, streams: Sequence[Stream]) -> None:
        if streams:
            self.lmcache.slots_changed(worker, {stream.rank: stream.slot for stream in streams})

    @property
    def reports(self) -> CacheReports | None:
        """LMCache's reports to and from other gateways; None if there are none."""
        return self.lmcache.reports

    @property
    def on_dispatch(self) -> Callable[[RouteQuery, Candidate], None] | None:
        """Called for each attempt; None if no service observes attempts."""
        return self.lmcache.on_dispatch if self.lmcache.prefetches else None

    # `Feedback`

    def answered(
        self,
        worker: Worker,
        rank: int,
        model: str,
        prompt: ExactPrompt,
        sent: float,
        cached_tokens: int | None,
    ) -> None:
        stream = self._stream(worker, rank)
        if stream is None:
            return
        ids = prompt.chunks.token_ids
        stream.subscriber.on_answer(prompt.tokens - (cached_tokens or 0), sent)
        if self._isolation.predicts(worker.id, model):  # otherwise the salt was another one
            keys, followed, ahead = prompt.keys, ids, stream.ledger.lookahead
            if ahead:
                keys, followed = prompt.keys_ahead(ahead), ids[ahead:]
            elif len(keys) * KEY_TOKENS > len(ids):  # of a prompt with images `ids` end before the first one
                keys = keys[: len(ids) // KEY_TOKENS]
            stream.prompts.note(KnownPrompt(model, ids, keys, prompt.salt))
            if cached_tokens and stream.reason is not None:
                stream.ledger.confirm(keys, followed, cached_tokens, adapter=prompt.adapter)
        self.lmcache.answered(stream.slot, ids)

    def judged(self, slot: int, tokens: Tokens, cached_tokens: int, has_drafter: bool) -> bool:
        return self.caches.last_units.reported(slot, tokens, cached_tokens, has_drafter=has_drafter)

    def distrust(self, worker: Worker, rank: int, why: str) -> None:
        self._ingest.distrust(worker, rank, TrustReason(why))

    def _stream(self, worker: Worker, rank: int) -> Stream | None:
        for stream in self._ingest.streams(worker):
            if stream.rank == rank:
                return stream
        return None

    # Metrics and notes

    def notes(self) -> list[str]:
        """Notes for `/ready`: workers whose map is incomplete, models without exact tokens, failed tasks."""
        notes = map_notes(self._fleet, self.caches)
        return notes + self._tokens.notes() + self.lmcache.notes() + self._background.notes()

    def streams(self) -> list[dict[str, object]]:
        """A row per event stream, for the live page."""
        started = self._clock.wall() - self._clock.now()
        return [stream_row(stream, started) for stream in self._ingest.figures()]

    def describe(self) -> dict[str, object]:
        """The map for the admin API."""
        described = describe_map(self._fleet, self.caches, self._index, self._tokens.describe())
        return {**described, "lmcache": self.lmcache.describe()}

    def gauges(self) -> Iterable[Metric]:
        size = self._index.size()
        yield from map_metrics(size, self._background.failures, dropped_blocks=size.dropped)
        yield from stream_metrics(self._ingest.figures())
        yield from self._tokens.metrics()
        yield from self.lmcache.metrics()


def worker_client(config: Config, on_refused: Callable[[str], None]) -> httpx.AsyncClient:
    """A client for tokenizer and event-source calls, with the workers' key and the gateway's connection
    pool. `on_refused` gets the reason of each answer that is too long or encoded."""
    key = config.fleet.worker_api_key
    return httpx.AsyncClient(
        transport=BoundedTransport(AnyWorkerTransport(config.upstream), on_refused=on_refused),
        headers={"authorization": f"Bearer {key.get_secret_value()}"} if key else {},
    )


def lmcache_client(options: CoordinatorOptions, on_refused: Callable[[str], None]) -> httpx.AsyncClient:
    """A client for LMCache's servers, without keys and proxies, for answers of at most 4 MiB.

    Raises TlsFileError.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0)
    verify: ssl.SSLContext | bool = True
    if options.server_tls.is_set:
        place = "lmcache.coordinator.server_tls"
        verify = client_context(options.server_tls, place, httpx.create_ssl_context)
    inner = httpx.AsyncHTTPTransport(verify=verify, limits=limits, trust_env=False)
    bounded = BoundedTransport(inner, max_bytes=_MAX_STATUS_BYTES, on_refused=on_refused)
    return httpx.AsyncClient(trust_env=False, transport=bounded)


_MAX_STATUS_BYTES: Final = 4 << 20


_POLL_INTERVAL_S: Final = 0.02
"""Interval at which changes of trust are published; changes of blocks are published immediately."""


class CacheMapPublisher:
    """Publishes the cache map to the other processes.

    `blocks` and `chunks` publish their changes themselves; `run` publishes changes of trust and places.
    Mutable: `attach_tracker` sets the tracker that fills these indexes.
    """

    def __init__(self, publish: Publish, clock: Clock, options: KvEventsOptions, *, max_chunks: int) -> None:
        self.blocks = PublishingPrefixIndex(publish, max_blocks=options.max_index_blocks)
        self.chunks = PublishingChunkIndex(publish, max_chunks=max_chunks)
        self._publish = publish
        self._clock = clock
        self._cache_tracker: CacheTracker | None = None
        self._fleet: Fleet | None = None
        self._places: dict[str, WorkerPlaces] = {}
        self._rates: dict[tuple[int, Tier], TierBandwidth] = {}
        self._targets = L2Targets([])

    def attach_tracker(self, cache_tracker: CacheTracker, fleet: Fleet) -> None:
        """Set the tracker that fills these indexes for the workers of `fleet`."""
        self._cache_tracker, self._fleet = cache_tracker, fleet

    def snapshot(self) -> Iterable[Message]:
        """The messages that fill an empty mirror; after them the published changes keep it synced."""
        yield MapReset()
        yield from self.blocks.as_messages()
        yield from self.chunks.as_messages()
        yield from self._places.values()
        yield from self._rates.values()
        yield self._targets

    async def run(self) -> None:
        """Publish changes of trust and places; runs until it is cancelled."""
        while True:
            self.publish_changes()
            await self._clock.sleep(_POLL_INTERVAL_S)

    def publish_changes(self) -> None:
        """Publish changes of places and L2 targets. About 1 us per worker."""
        cache_tracker, fleet = self._cache_tracker, self._fleet
        if cache_tracker is None or fleet is None:
            return
        current: dict[str, WorkerPlaces] = {}
        for worker in fleet.workers():
            places = self._places_of(cache_tracker, worker)
            if places.places or worker.id in self._places:
                current[worker.id] = places
        for name in self._places.keys() - current.keys():
            self._publish(WorkerPlaces(name, []))
        for name, places in current.items():
            if self._places.get(name) != places:
                self._publish(places)
        self._places = current
        targets = L2Targets(
            [
                L2TargetMessage(self.chunks.number_of(each.holder), each.scheme, each.model, list(each.parts))
                for each in cache_tracker.lmcache.targets()
            ]
        )
        if targets != self._targets:
            self._targets = targets
            self._publish(targets)

    def publish_bandwidth(self, slot: int, tier: Tier, gb_s: float) -> None:
        """Publish a new bandwidth in GB/s from a slower tier to this slot."""
        bandwidth = self._rates[slot, tier] = TierBandwidth(slot, tier, gb_s)
        self._publish(bandwidth)

    def slot_removed(self, slot: int) -> None:
        """Forget the bandwidths of a slot that has left the map."""
        for tier in Tier:
            self._rates.pop((slot, tier), None)

    def on_message(self, message: Message) -> bool:
        """Apply what another process learned from an answer; False if `message` is another one."""
        cache_tracker, fleet = self._cache_tracker, self._fleet
        if not isinstance(message, PromptAnswered | Distrusted):
            return False
        if cache_tracker is None or fleet is None:
            return True
        try:
            worker = fleet.get(message.worker)
        except NotFound:
            return True
        if isinstance(message, Distrusted):
            cache_tracker.distrust(worker, message.rank, message.reason)
        else:
            keys, chunks = unpack_keys(message.keys), PromptChunks(unpack_ids(message.ids))
            prompt = ExactPrompt(
                message.tokens,
                keys,  # type: ignore[arg-type]
                chunks,
                message.salt,
                message.adapter,
            )
            cache_tracker.answered(
                worker, message.rank, message.model, prompt, message.sent_at, message.cached_tokens
            )
        return True

    def _places_of(self, cache_tracker: CacheTracker, worker: Worker) -> WorkerPlaces:
        reports_l1 = cache_tracker.lmcache.reports_l1
        return WorkerPlaces(
            worker.id,
            [
                CachePlaceMessage(
                    place.slot,
                    place.rank,
                    place.trust.value,
                    place.distrust_reason,
                    reports_l1(place.slot),
                    place.ahead,
                    place.note,
                )
                for place in cache_tracker.caches.places(worker)
            ],
        )
