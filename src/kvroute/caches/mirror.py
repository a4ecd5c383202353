"""The cache tracker of a process that mirrors another process's map (see `caches/tracker.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from prometheus_client.core import Metric

from kvroute.background_tasks import BackgroundTasks
from kvroute.blocks.chunks import ChunkScheme
from kvroute.blocks.keys import BlockKey, Tier
from kvroute.blocks.known_prompts import id_array
from kvroute.caches.metrics import l2_metrics, lmcache_map_bytes, map_metrics
from kvroute.caches.tokenizing import Tokenizing
from kvroute.caches.tracker import describe_map, held_tokens, map_notes, with_rules, worker_client
from kvroute.clock import Clock
from kvroute.config.config import Config
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.worker import Worker
from kvroute.index.map_trust import MapTrust
from kvroute.lmcache.l2_redis import L2Target, RedisL2
from kvroute.metrics import Metrics
from kvroute.relay.key_spaces import KeySpaces
from kvroute.relay.preparation import TimeoutOf
from kvroute.replicas.map_mirror import Mirror
from kvroute.replicas.messages import (
    Distrusted,
    L2Targets,
    MapReset,
    Message,
    PromptAnswered,
    TierBandwidth,
    WorkerPlaces,
    pack_keys,
)
from kvroute.routing.reports import LastUnits
from kvroute.routing.strategy import CachePlace, ExactPrompt, Probed, Tokens

NOT_LINKED: Final = "not_linked"
"""Why a map is not trusted while there is no link to the process that tracks the caches."""

_SWEEP_S: Final = 0.05


class MirroredCaches:
    """A `CacheMap` filled from another process's messages. Mutable: by `on_message` and `on_tracker_gone`."""

    def __init__(
        self,
        make: Callable[[], Mirror],
        on_slot_removed: Callable[[int], None],
        on_bandwidth: Callable[[int, Tier, float], None],
    ) -> None:
        """`on_bandwidth` gets slot, tier and the bandwidth in GB/s from the tier to the slot."""
        self._make = make
        self._on_slot_removed = on_slot_removed
        self._on_bandwidth = on_bandwidth
        self.mirror = make()
        self.last_units = LastUnits(lambda slot: self.mirror.blocks.unit(slot))
        self.mirror.blocks.drops = self.last_units.slots
        self.targets: list[L2Target] = []
        self._places: dict[str, tuple[CachePlace, ...]] = {}
        self._by_lmcache: set[int] = set()
        self._aheads: frozenset[int] = frozenset()
        """The lookaheads of all places so far, without 0."""

    def refresh(self, force: bool) -> bool:
        """True: the messages of the other process are applied as they arrive, so the map is fresh."""
        return True

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        places, blocks = self._places.get(worker.id, ()), self.mirror.blocks
        if blocks.groups.slots or blocks.drops:
            known = blocks.groups.slots.keys() | blocks.drops
            return [with_rules(place, blocks) if place.slot in known else place for place in places]
        return places

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        mirror = self.mirror
        by_lmcache = self._by_lmcache.__contains__
        return held_tokens(mirror.blocks, mirror.chunks, by_lmcache, prompt, self._aheads)

    def holds(self, slot: int, keys: Sequence[BlockKey], tokens: int) -> bool:
        return self.mirror.blocks.holds(slot, keys, tokens)

    def has_end(self, slot: int, keys: Sequence[BlockKey]) -> bool:
        return self.mirror.blocks.has_end(slot, keys)

    def keys_of(self, slot: int, prompt: ExactPrompt) -> Sequence[BlockKey]:
        if not self._aheads:
            return prompt.keys
        ahead = next(
            (place.ahead for places in self._places.values() for place in places if place.slot == slot), 0
        )
        return prompt.keys_ahead(ahead) if ahead else prompt.keys

    def on_message(self, message: Message) -> bool:
        """Apply a message of the other process; False if it does not concern the map."""
        match message:
            case MapReset():
                self.mirror = self._make()
                self.mirror.blocks.drops = self.last_units.slots
                self.targets = []
                for worker in list(self._places):
                    self._set_places(worker, ())
            case WorkerPlaces(worker, places):
                self._by_lmcache |= {place.slot for place in places if place.by_lmcache}
                self._aheads = self._aheads | {place.ahead for place in places if place.ahead}
                self._by_lmcache -= {place.slot for place in places if not place.by_lmcache}
                self._set_places(
                    worker,
                    tuple(
                        CachePlace(p.slot, p.rank, MapTrust(p.trust), p.reason, p.ahead, note=p.note)
                        for p in places
                    ),
                )
            case TierBandwidth(slot, tier, gb_s):
                self._on_bandwidth(slot, Tier(tier), gb_s)
            case L2Targets(targets):
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

    def on_tracker_gone(self) -> None:
        """Distrust the map: its changes no longer arrive, so routing uses the route history instead."""
        self._places = {
            worker: tuple(place._replace(trust=MapTrust.NONE, distrust_reason=NOT_LINKED) for place in places)
            for worker, places in self._places.items()
        }

    def _set_places(self, worker: str, places: tuple[CachePlace, ...]) -> None:
        removed = {place.slot for place in self._places.get(worker, ())} - {place.slot for place in places}
        if places:
            self._places[worker] = places
        else:
            self._places.pop(worker, None)
        for slot in removed:
            self._by_lmcache.discard(slot)
            self.last_units.forget(slot)
            self._on_slot_removed(slot)


class CacheTrackerMirror:
    """A mirror of the map, and this process's own tokenizers.

    Feedback from answers goes to the process that tracks the caches. As `CacheTracker` an async context
    manager, a subscriber of the fleet, and `Feedback`.
    """

    on_dispatch = None
    """No prefetching: this process has no contact with the LMCache servers."""
    reports = None
    """LMCache reports to the process that tracks the caches, and that one forwards it to other gateways."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        metrics: Metrics,
        clock: Clock,
        isolation: KeySpaces,
        on_slot_removed: Callable[[int], None],
        token_timeout_s: TimeoutOf,
        on_bandwidth: Callable[[int, Tier, float], None],
        send: Callable[[Message], object],
    ) -> None:
        """`send` sends a message to the process that tracks the caches."""
        self._fleet = fleet
        self._clock = clock
        self._send = send
        self._client = worker_client(config, metrics.answer_refused)
        self._background = BackgroundTasks(clock)
        self.caches = MirroredCaches(
            lambda: Mirror(
                max_blocks=config.kv_events.max_index_blocks,
                max_chunks=config.lmcache.coordinator.max_chunks,
            ),
            on_slot_removed,
            on_bandwidth,
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
            token_timeout_s,
        )
        self.preparer = self._tokens.preparer

    async def __aenter__(self) -> Self:
        await self._tokens.open(self._background)
        self._background.start("sweeping the map", self._sweep)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.aclose()
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
        self._send(
            PromptAnswered(
                worker.id,
                rank,
                model,
                prompt.tokens,
                id_array(prompt.chunks.token_ids).tobytes(),
                pack_keys(prompt.keys),
                prompt.salt,
                prompt.adapter,
                sent,
                cached_tokens,
            )
        )

    def judged(self, slot: int, tokens: Tokens, cached_tokens: int, has_drafter: bool) -> bool:
        return self.caches.last_units.reported(slot, tokens, cached_tokens, has_drafter=has_drafter)

    def distrust(self, worker: Worker, rank: int, why: str) -> None:
        self._send(Distrusted(worker.id, rank, why))

    def notes(self) -> list[str]:
        notes = map_notes(self._fleet, self.caches) + self._tokens.notes() + self._background.notes()
        return notes if self._redis is None else notes + self._redis.notes()

    def streams(self) -> list[dict[str, object]]:
        """Nothing: the process that tracks the caches shows the streams."""
        return []

    def describe(self) -> dict[str, object]:
        return describe_map(self._fleet, self.caches, self.caches.mirror.blocks, self._tokens.describe())

    def gauges(self) -> Iterable[Metric]:
        yield from map_metrics(self.caches.mirror.blocks.size(), self._background.failures)
        yield lmcache_map_bytes(self.caches.mirror.chunks.size())
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
        return [answer.chunks for answer in answers]

    async def _sweep(self) -> None:
        while True:
            while self.caches.mirror.sweep():
                await self._clock.sleep(0)
            await self._clock.sleep(_SWEEP_S)
