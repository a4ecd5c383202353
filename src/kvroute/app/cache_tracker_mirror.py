"""The workers' caches as another process follows them: what `Following` is to the process that does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from prometheus_client.core import Metric

from kvroute.app.background_tasks import BackgroundTasks
from kvroute.app.cache_tracker import describe_map, map_notes, worker_client
from kvroute.app.config import Config
from kvroute.app.lmcache import l2_metrics
from kvroute.app.tokenizing import Tokenizing
from kvroute.blocks.chunks import ChunkScheme
from kvroute.blocks.keys import Tier
from kvroute.blocks.known_prompts import id_array
from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.worker import Worker
from kvroute.gateway.caches import held_tokens
from kvroute.gateway.preparation import AdapterIsolation, DeadlineOf
from kvroute.lmcache.l2_redis import L2Target, RedisL2
from kvroute.metrics import Metrics, counter, gauge
from kvroute.replicas.maps import Mirror
from kvroute.replicas.messages import (
    Distrusted,
    MapBegins,
    Message,
    PromptAnswered,
    Rate,
    Targets,
    WorkerPlaces,
    packed,
)
from kvroute.routing.strategy import CachePlace, ExactPrompt, Probed, Standing, Tokens

ALONE: Final = "not_linked"
"""Why a map is not believed while the process that follows the caches cannot be heard."""

_SWEEP_S: Final = 0.05


class MirroredCaches:
    """A `routing.caches.CacheMap` from what another process tells. Mutable: by `heard` and `alone`."""

    def __init__(
        self,
        make: Callable[[], Mirror],
        place_left: Callable[[int], None],
        rate_known: Callable[[int, Tier, float], None],
    ) -> None:
        """`rate_known` hears of the bandwidth in GB/s from a tier to a slot."""
        self._make = make
        self._place_left = place_left
        self._rate_known = rate_known
        self.mirror = make()
        self.targets: list[L2Target] = []
        self._places: dict[str, tuple[CachePlace, ...]] = {}
        self._by_lmcache: set[int] = set()

    def refresh(self, force: bool) -> bool:
        """True: the other process's messages are applied as they arrive."""
        return True

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        return self._places.get(worker.id, ())

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        mirror = self.mirror
        return held_tokens(mirror.blocks, mirror.chunks, self._by_lmcache.__contains__, prompt)

    def heard(self, message: Message) -> bool:
        """Take in what the other process tells; False if it is not of the map."""
        match message:
            case MapBegins():
                self.mirror = self._make()
                self.targets = []
                for worker in list(self._places):
                    self._set_places(worker, ())
            case WorkerPlaces(worker, places):
                self._by_lmcache |= {place.slot for place in places if place.by_lmcache}
                self._by_lmcache -= {place.slot for place in places if not place.by_lmcache}
                self._set_places(
                    worker,
                    tuple(CachePlace(p.slot, p.rank, Standing(p.standing), p.why) for p in places),
                )
            case Rate(slot, tier, gb_s):
                self._rate_known(slot, Tier(tier), gb_s)
            case Targets(targets):
                self.targets = [
                    L2Target(
                        self.mirror.chunk_holder(target.holder, Tier.L2, shared=True),
                        ChunkScheme(*target.scheme),
                        target.model,
                        tuple(target.parts),
                    )
                    for target in targets
                ]
            case _:
                return self.mirror.apply(message)
        return True

    def alone(self) -> None:
        """The other process cannot be heard: the map grows old, so what was sent where counts instead."""
        self._places = {
            worker: tuple(place._replace(standing=Standing.NONE, why=ALONE) for place in places)
            for worker, places in self._places.items()
        }

    def _set_places(self, worker: str, places: tuple[CachePlace, ...]) -> None:
        gone = {place.slot for place in self._places.get(worker, ())} - {place.slot for place in places}
        if places:
            self._places[worker] = places
        else:
            self._places.pop(worker, None)
        for slot in gone:
            self._by_lmcache.discard(slot)
            self._place_left(slot)


class CacheTrackerMirror:
    """A mirror of the map, and tokenizers of this process's own. What answers tell goes to the process that
    follows the caches. An async context manager, a listener of the fleet, and `Feedback`, as `Following`."""

    sent = None
    """This process knows no LMCache servers to have anything prefetched by."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        metrics: Metrics,
        clock: Clock,
        isolation: AdapterIsolation,
        places_left: Callable[[int], None],
        token_deadline_s: DeadlineOf,
        rate_known: Callable[[int, Tier, float], None],
        tell: Callable[[Message], object],
    ) -> None:
        """`tell` sends to the process that follows the caches."""
        self._fleet = fleet
        self._clock = clock
        self._tell = tell
        self._client = worker_client(config)
        self._upkeep = BackgroundTasks(clock)
        self.caches = MirroredCaches(
            lambda: Mirror(
                max_blocks=config.kv_events.max_index_blocks,
                max_chunks=config.lmcache.coordinator.max_chunks,
            ),
            places_left,
            rate_known,
        )
        self._redis = RedisL2(config.lmcache.l2, clock) if config.lmcache.l2.redis_url else None
        is_probing = self._redis is not None
        self._tokens = Tokenizing(
            config.tokens,
            self._client,
            fleet,
            metrics,
            clock,
            isolation,
            self._probe,
            lambda: is_probing,
            token_deadline_s,
        )
        self.preparer = self._tokens.preparer

    async def __aenter__(self) -> Self:
        await self._tokens.open(self._upkeep)
        self._upkeep.begin("sweeping the map", self._sweep)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._upkeep.aclose()
        if self._redis is not None:
            await self._redis.aclose()
        await self._tokens.aclose()
        await self._client.aclose()

    def fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        self._tokens.fleet_changed(change, worker)

    def answered(
        self,
        worker: Worker,
        rank: int,
        model: str,
        prompt: ExactPrompt,
        sent: float,
        cached_tokens: int | None,
    ) -> None:
        self._tell(
            PromptAnswered(
                worker.id,
                rank,
                model,
                prompt.tokens,
                id_array(prompt.chunks.token_ids).tobytes(),
                packed(prompt.keys),
                prompt.salt,
                prompt.adapter,
                sent,
                cached_tokens,
            )
        )

    def distrust(self, worker: Worker, rank: int, why: str) -> None:
        self._tell(Distrusted(worker.id, rank, why))

    def notes(self) -> list[str]:
        notes = map_notes(self._fleet, self.caches)
        return notes + self._tokens.notes() + self._upkeep.notes()

    def describe(self) -> dict[str, object]:
        return describe_map(self._fleet, self.caches, self.caches.mirror.blocks, self._tokens.describe())

    def gauges(self) -> Iterable[Metric]:
        size = self.caches.mirror.blocks.size()
        chunks = self.caches.mirror.chunks.size()
        yield gauge("kvroute_map_blocks", "Different blocks in the map.", (), [((), float(size.blocks))])
        yield gauge("kvroute_map_bytes", "Estimated memory of the map.", (), [((), float(size.bytes))])
        yield gauge(
            "kvroute_lmcache_map_bytes", "Estimated memory of LMCache's map.", (), [((), float(chunks.bytes))]
        )
        yield counter(
            "kvroute_following_failures",
            "Times that following the workers' caches failed on our side and was begun again (the log has "
            "it), by what it was.",
            ("work",),
            [((name,), float(failures)) for name, failures in self._upkeep.failures.items()],
        )
        yield from self._tokens.metrics()
        if self._redis is not None:
            yield from l2_metrics(self._redis.counts)

    async def _probe(self, prompts: Sequence[ExactPrompt]) -> Sequence[Probed]:
        redis, targets = self._redis, self.caches.targets
        if redis is None or not targets:
            return [None] * len(prompts)
        answers = await asyncio.gather(
            *(redis.lookup(prompt.chunks, prompt.salt, targets) for prompt in prompts)
        )
        return [answer.held for answer in answers]

    async def _sweep(self) -> None:
        while True:
            while self.caches.mirror.sweep():
                await self._clock.sleep(0)
            await self._clock.sleep(_SWEEP_S)
