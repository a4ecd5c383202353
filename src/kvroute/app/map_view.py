"""What is shown of the map of the workers' caches, whoever keeps it."""

from __future__ import annotations

from kvroute.events.trust import Reason
from kvroute.fleet.fleet import Fleet
from kvroute.index.prefix_index import PrefixIndex
from kvroute.routing.caches import CacheMap


def map_notes(fleet: Fleet, caches: CacheMap) -> list[str]:
    """For `/ready`: workers whose map is not whole."""
    notes = []
    for worker in fleet.workers():
        places = caches.places(worker)
        if not places:
            notes.append(f"kvaware: worker {worker.id!r}: {Reason.NO_EVENTS}")
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
