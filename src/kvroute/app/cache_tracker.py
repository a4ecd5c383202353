"""Everything that a gateway needs to follow its workers' caches; built only where a strategy asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

import httpx
from prometheus_client.core import Metric

from kvroute.app.background_tasks import BackgroundTasks
from kvroute.app.config import Config
from kvroute.app.lmcache import LMCache
from kvroute.app.tokenizing import Tokenizing
from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import Tier
from kvroute.clock import Clock
from kvroute.errors import ConfigError, NotFound
from kvroute.events.ingest import EventIngest, Stream, StreamFigures
from kvroute.events.options import KvEventsOptions
from kvroute.events.repair import KnownPrompt
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.worker import Worker
from kvroute.gateway.caches import LiveCaches
from kvroute.gateway.preparation import AdapterIsolation, DeadlineOf
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.prefix_index import PrefixIndex
from kvroute.index.trust import TrustReason
from kvroute.metrics import Metrics, counter, gauge
from kvroute.replicas.maps import Publish, PublishingChunkIndex, PublishingPrefixIndex
from kvroute.replicas.messages import (
    Distrusted,
    L2TargetMessage,
    MapBegins,
    Message,
    Place,
    PromptAnswered,
    Rate,
    Targets,
    WorkerPlaces,
    unpacked,
    unpacked_ids,
)
from kvroute.routing.strategy import CacheMap, Candidate, ExactPrompt, RouteQuery
from kvroute.upstream.transport import AnyWorkerTransport


def map_notes(fleet: Fleet, caches: CacheMap) -> list[str]:
    """For `/ready`: workers whose map is not whole."""
    notes = []
    for worker in fleet.workers():
        places = caches.places(worker)
        if not places:
            notes.append(f"kvaware: worker {worker.id!r}: {TrustReason.NO_EVENTS}")
        notes += [f"kvaware: worker {worker.id!r}: {place.why}" for place in places if place.why]
    return notes


def describe_map(
    fleet: Fleet, caches: CacheMap, index: PrefixIndex, tokens: dict[str, object]
) -> dict[str, object]:
    """For the admin API; `tokens` says who tells each model's tokens."""
    size = index.size()
    return {
        "blocks": size.blocks,
        "held_blocks": size.held,
        "dropped_blocks": size.dropped,
        "bytes": size.bytes,
        "tokens": tokens,
        "workers": {
            worker.id: [
                {"rank": place.rank, "standing": place.standing.value, "why": place.why or None}
                for place in caches.places(worker)
            ]
            for worker in fleet.workers()
        },
    }


_STREAM_COUNTS = {
    "messages": "Event batches read.",
    "duplicates": "Event batches that had come before.",
    "unreadable": "Messages that are no event batch.",
    "unknown_events": "Events of a type that is not known, skipped.",
    "undivided": "Large events unlike what vLLM writes, taken in as one: they may hold the loop.",
    "gaps": "Event batches that did not follow the one before.",
    "replays": "Replays asked for.",
    "replay_failures": "Replays that failed.",
    "restarts": "Streams that began anew: the engine restarted, or its buffer was overrun.",
    "losses": "Gaps that could not be filled.",
    "rereads": "Maps that were distrusted and read anew.",
    "failures": "Times that following failed on our side (the log has it) and the map was begun anew.",
}


def stream_metrics(streams: Sequence[StreamFigures]) -> Iterable[Metric]:
    """One series per worker and data-parallel rank."""
    labelled = [((stream.worker, str(stream.rank)), stream) for stream in streams]
    yield gauge(
        "kvroute_map_standing",
        "1 for how far each worker's map is believed, and why not further.",
        ("worker", "rank", "standing", "cause"),
        [
            ((*place, each.trust.value, each.reason.value if each.reason else ""), 1.0)
            for place, each in labelled
        ],
    )
    yield gauge(
        "kvroute_map_held_blocks",
        "Blocks that the map has of each worker.",
        ("worker", "rank", "tier"),
        [
            ((*place, tier.name.lower()), float(blocks))
            for place, each in labelled
            for tier, blocks in each.held_blocks.items()
        ],
    )
    yield gauge(
        "kvroute_map_aside_blocks",
        "Announced blocks that could not be placed, because what comes before them is not known.",
        ("worker", "rank"),
        [(place, float(each.aside_blocks)) for place, each in labelled],
    )
    for name, text in _STREAM_COUNTS.items():
        yield counter(
            f"kvroute_kv_events_{name}",
            text,
            ("worker", "rank"),
            [(place, float(getattr(each.counts, name))) for place, each in labelled],
        )
    for name, text in {"stored": "Blocks announced.", "removed": "Blocks withdrawn."}.items():
        yield counter(
            f"kvroute_map_{name}_blocks",
            text,
            ("worker", "rank"),
            [(place, float(getattr(each.blocks, name))) for place, each in labelled],
        )


class CacheTracker:
    """The workers' events, the map that they draw, and the tokens to read it with.

    An async context manager: entering begins to follow, leaving ends all of it. A
    listener of the fleet, and the `Feedback` of the prediction audit.
    """

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        metrics: Metrics,
        clock: Clock,
        isolation: AdapterIsolation,
        places_left: Callable[[int], None],
        token_deadline_s: DeadlineOf,
        rate_measured: Callable[[int, Tier, float, int], None],
        indexes: tuple[PrefixIndex, ChunkIndex] | None = None,
    ) -> None:
        """`places_left` hears of each slot of the map that is no more, `rate_measured` of the mean bandwidth
        in GB/s of so many loads from a tier to a slot; `indexes` are what is to be drawn on, where others
        look on (`replicas.maps`)."""
        self._fleet = fleet
        self._client = worker_client(config)
        self._index, chunks = indexes or (
            PrefixIndex(max_blocks=config.kv_events.max_index_blocks),
            ChunkIndex(max_chunks=config.lmcache.coordinator.max_chunks),
        )
        self._places_left = places_left
        self._isolation = isolation
        self._upkeep = BackgroundTasks(clock)
        self._ingest = EventIngest(self._index, self._client, clock, config.kv_events, self._streams_changed)
        # Whoever registers as an LMCache server is asked for its status: without the workers' key.
        self._keyless = _keyless_client()
        self.lmcache = LMCache(
            chunks,
            self._keyless,
            clock,
            config.lmcache,
            self._upkeep,
            rate_measured,
            hyperpod_lines=config.logging.hyperpod_lines,
        )
        self.caches = LiveCaches(self._index, self.lmcache.chunks, self._ingest, self.lmcache.tells_of)
        self._tokens = Tokenizing(
            config.tokens,
            self._client,
            fleet,
            metrics,
            clock,
            isolation,
            self.lmcache.probe,
            lambda: bool(self.lmcache.targets()),
            token_deadline_s,
        )
        self.preparer = self._tokens.preparer

    async def __aenter__(self) -> Self:
        """Raises ConfigError if an address to listen on cannot be had."""
        try:
            self._ingest.bind()
            self.lmcache.open()
        except ConfigError:
            await self._upkeep.aclose()
            self._ingest.close()
            await self.lmcache.aclose()
            await self._client.aclose()
            await self._keyless.aclose()
            raise
        self._upkeep.begin("KV events", self._ingest.run)
        await self._tokens.open(self._upkeep)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._upkeep.aclose()
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
            self._tell_lmcache(worker, self._ingest.streams(worker))

    def _streams_changed(self, worker: Worker, before: Sequence[Stream], now: Sequence[Stream]) -> None:
        for slot in {stream.slot for stream in before} - {stream.slot for stream in now}:
            self.lmcache.place_left(slot)
            self._places_left(slot)
        if now:
            self._tell_lmcache(worker, now)

    def _tell_lmcache(self, worker: Worker, streams: Sequence[Stream]) -> None:
        if streams:
            self.lmcache.places_changed(worker, {stream.rank: stream.slot for stream in streams})

    @property
    def sent(self) -> Callable[[RouteQuery, Candidate], None] | None:
        """What wants to hear of each attempt, if anything does."""
        return self.lmcache.sent if self.lmcache.prefetches else None

    # What answers tell.

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
        stream.subscriber.served(prompt.tokens - (cached_tokens or 0), sent)
        if self._isolation.predicts(worker.id, model):  # else it was sent with another salt
            stream.prompts.note(KnownPrompt(model, ids, prompt.keys, prompt.salt))
            if cached_tokens and stream.reason is not None:
                stream.ledger.confirm(prompt.keys, ids, cached_tokens, adapter=prompt.adapter)
        self.lmcache.answered(stream.slot, ids)

    def distrust(self, worker: Worker, rank: int, why: str) -> None:
        self._ingest.distrust(worker, rank, TrustReason(why))

    def _stream(self, worker: Worker, rank: int) -> Stream | None:
        for stream in self._ingest.streams(worker):
            if stream.rank == rank:
                return stream
        return None

    # What is shown.

    def notes(self) -> list[str]:
        """What `/ready` says beside its verdict: workers whose map is not whole, and models without exact
        tokens."""
        notes = map_notes(self._fleet, self.caches)
        return notes + self._tokens.notes() + self.lmcache.notes() + self._upkeep.notes()

    def describe(self) -> dict[str, object]:
        """For the admin API."""
        return describe_map(self._fleet, self.caches, self._index, self._tokens.describe())

    def gauges(self) -> Iterable[Metric]:
        size = self._index.size()
        yield gauge("kvroute_map_blocks", "Different blocks in the map.", (), [((), float(size.blocks))])
        yield gauge("kvroute_map_bytes", "Estimated memory of the map.", (), [((), float(size.bytes))])
        yield counter(
            "kvroute_map_dropped_blocks",
            "Blocks not taken into the map because it is full (kv_events.max_index_blocks).",
            (),
            [((), float(size.dropped))],
        )
        yield counter(
            "kvroute_following_failures",
            "Times that following the workers' caches failed on our side and was begun again (the log has "
            "it), by what it was.",
            ("work",),
            [((name,), float(failures)) for name, failures in self._upkeep.failures.items()],
        )
        yield from stream_metrics(self._ingest.figures())
        yield from self._tokens.metrics()
        yield from self.lmcache.metrics()


def worker_client(config: Config) -> httpx.AsyncClient:
    """For tokenizer and event-source calls: with the workers' key, over connections as the gateway's own."""
    key = config.fleet.worker_api_key
    return httpx.AsyncClient(
        transport=AnyWorkerTransport(config.upstream),
        headers={"authorization": f"Bearer {key.get_secret_value()}"} if key else {},
    )


def _keyless_client() -> httpx.AsyncClient:
    """Without proxies."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0)
    return httpx.AsyncClient(trust_env=False, limits=limits)


_LOOK_EVERY_S: Final = 0.02
"""How late the others learn that a map is believed, or no more; its blocks come at once."""


class CacheMapPublisher:
    """Publishes every change of `blocks` and `chunks` by itself, and by `run` how far they are believed.

    Mutable: `follow` names the follower whose indexes these are, `run` is a task of its owner.
    """

    def __init__(self, publish: Publish, clock: Clock, options: KvEventsOptions, *, max_chunks: int) -> None:
        self.blocks = PublishingPrefixIndex(publish, max_blocks=options.max_index_blocks)
        self.chunks = PublishingChunkIndex(publish, max_chunks=max_chunks)
        self._publish = publish
        self._clock = clock
        self._following: CacheTracker | None = None
        self._fleet: Fleet | None = None
        self._places: dict[str, WorkerPlaces] = {}
        self._rates: dict[tuple[int, Tier], Rate] = {}
        self._targets = Targets([])

    def follow(self, following: CacheTracker, fleet: Fleet) -> None:
        """`following` draws on these indexes, for the workers of `fleet`."""
        self._following, self._fleet = following, fleet

    def greeting(self) -> Iterable[Message]:
        """All that a process knows once it has heard it; then what is published keeps it level."""
        yield MapBegins()
        yield from self.blocks.as_messages()
        yield from self.chunks.as_messages()
        yield from self._places.values()
        yield from self._rates.values()
        yield self._targets

    async def run(self) -> None:
        """Ends only by cancellation."""
        while True:
            self.look()
            await self._clock.sleep(_LOOK_EVERY_S)

    def look(self) -> None:
        """Publish what has changed of places and targets. About 1 us a worker."""
        following, fleet = self._following, self._fleet
        if following is None or fleet is None:
            return
        seen: dict[str, WorkerPlaces] = {}
        for worker in fleet.workers():
            places = self._places_of(following, worker)
            if places.places or worker.id in self._places:
                seen[worker.id] = places
        for name in self._places.keys() - seen.keys():
            self._publish(WorkerPlaces(name, []))
        for name, places in seen.items():
            if self._places.get(name) != places:
                self._publish(places)
        self._places = seen
        targets = Targets(
            [
                L2TargetMessage(self.chunks.number_of(each.holder), each.scheme, each.model, list(each.parts))
                for each in following.lmcache.targets()
            ]
        )
        if targets != self._targets:
            self._targets = targets
            self._publish(targets)

    def rate_learnt(self, slot: int, tier: Tier, gb_s: float) -> None:
        """Publish the bandwidth that is reckoned with from now on, from a slower tier to this place."""
        rate = self._rates[slot, tier] = Rate(slot, tier, gb_s)
        self._publish(rate)

    def place_left(self, slot: int) -> None:
        """What is known of this place stands for nothing any more."""
        for tier in Tier:
            self._rates.pop((slot, tier), None)

    def heard(self, message: Message) -> bool:
        """What another process's answers tell; False if `message` is something else."""
        following, fleet = self._following, self._fleet
        if not isinstance(message, PromptAnswered | Distrusted):
            return False
        if following is None or fleet is None:
            return True
        try:
            worker = fleet.get(message.worker)
        except NotFound:
            return True
        if isinstance(message, Distrusted):
            following.distrust(worker, message.rank, message.why)
        else:
            keys, chunks = unpacked(message.keys), PromptChunks(unpacked_ids(message.ids))
            prompt = ExactPrompt(
                message.tokens,
                keys,  # type: ignore[arg-type]
                chunks,
                message.salt,
                message.adapter,
            )
            following.answered(
                worker, message.rank, message.model, prompt, message.sent, message.cached_tokens
            )
        return True

    def _places_of(self, following: CacheTracker, worker: Worker) -> WorkerPlaces:
        tells = following.lmcache.tells_of
        return WorkerPlaces(
            worker.id,
            [
                Place(place.slot, place.rank, place.standing.value, place.why, tells(place.slot))
                for place in following.caches.places(worker)
            ],
        )
