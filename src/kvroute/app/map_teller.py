"""What the process that follows the workers' caches tells the others of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvroute.app.following import Following
from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.tokens import Tier
from kvroute.clock import Clock
from kvroute.errors import NotFound
from kvroute.events.options import KvEventsOptions
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker
from kvroute.replicas.map_messages import (
    Distrusted,
    MapBegins,
    Place,
    Places,
    PromptAnswered,
    Rate,
    Target,
    Targets,
)
from kvroute.replicas.maps import Publish, ToldChunkIndex, ToldPrefixIndex
from kvroute.replicas.messages import (
    Message,
    unpacked,
    unpacked_ids,
)
from kvroute.routing.caches import ExactPrompt

_LOOK_EVERY_S: Final = 0.02
"""How late the others learn that a map is believed, or no more; its blocks come at once."""


class MapTeller:
    """Publishes every change of `blocks` and `chunks` by itself, and by `run` how far they are believed.

    Mutable: `follow` names the follower whose indexes these are, `run` is a task of its owner.
    """

    def __init__(self, publish: Publish, clock: Clock, options: KvEventsOptions, *, max_chunks: int) -> None:
        self.blocks = ToldPrefixIndex(publish, max_blocks=options.max_index_blocks)
        self.chunks = ToldChunkIndex(publish, max_chunks=max_chunks)
        self._publish = publish
        self._clock = clock
        self._following: Following | None = None
        self._fleet: Fleet | None = None
        self._places: dict[str, Places] = {}
        self._rates: dict[tuple[int, Tier], Rate] = {}
        self._targets = Targets([])

    def follow(self, following: Following, fleet: Fleet) -> None:
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
        seen: dict[str, Places] = {}
        for worker in fleet.workers():
            places = self._places_of(following, worker)
            if places.places or worker.id in self._places:
                seen[worker.id] = places
        for name in self._places.keys() - seen.keys():
            self._publish(Places(name, []))
        for name, places in seen.items():
            if self._places.get(name) != places:
                self._publish(places)
        self._places = seen
        targets = Targets(
            [
                Target(self.chunks.number_of(each.holder), each.scheme, each.model, list(each.parts))
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

    def _places_of(self, following: Following, worker: Worker) -> Places:
        tells = following.lmcache.tells_of
        return Places(
            worker.id,
            [
                Place(place.slot, place.rank, place.standing.value, place.why, tells(place.slot))
                for place in following.caches.places(worker)
            ],
        )
