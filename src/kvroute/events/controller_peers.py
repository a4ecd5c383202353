"""Where else a worker can fetch chunks: LMCache's peer-to-peer lookup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvroute.events.controller_instance import Instance
from kvroute.wire.lmcache_controller import ChunkHash


def find_peer(
    instances: Iterable[Instance], asker: str, rank_number: int, hashes: Sequence[ChunkHash]
) -> tuple[str, str, int, str] | None:
    """Instance, location, chunks from the first on, and peer URL of the location that has most of them.

    Only the same rank of other instances is of use: each has its own part of a chunk. None if nobody has
    the first chunk and says where to fetch it. Costs what is found, at most the number of hashes for each
    location that has the first.
    """
    best: tuple[str, str, int, str] | None = None
    if not hashes:
        return None
    first, most = hashes[0], 0
    for instance in instances:
        if instance.name == asker:
            continue
        rank = instance.ranks.get(rank_number)
        if rank is None or not rank.peer_url:
            continue
        for location in rank.locations.values():
            keys = location.keys
            if first not in keys:
                continue
            count = 1
            for key in hashes[1:]:
                if key not in keys:
                    break
                count += 1
            if count > most:
                best, most = (instance.name, location.name, count, rank.peer_url), count
                if most == len(hashes):
                    return best
    return best
