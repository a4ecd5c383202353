"""The live map as routing sees it: places follow what is said of their streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvroute.events.trust import Reason
from kvroute.gateway.caches import LiveCaches
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.prefix_index import PrefixIndex
from kvroute.routing.caches import CachePlace, Standing


class FakeIngest:
    """Streams by worker, as `(slot, rank, reason)`."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, int, Reason | None]]] = {}

    def streams(self, worker: Any) -> list[Any]:
        return [
            SimpleNamespace(slot=slot, rank=rank, subscriber=SimpleNamespace(reason=reason))
            for slot, rank, reason in self.told.get(worker, [])
        ]


@pytest.fixture
def ingest() -> FakeIngest:
    return FakeIngest()


@pytest.fixture
def caches(ingest: Any) -> LiveCaches:
    return LiveCaches(PrefixIndex(), ChunkIndex(), ingest, lambda _: False)


def test_a_place_follows_its_streams_standing(caches: Any, ingest: FakeIngest) -> None:
    for reason, standing, why in (
        (Reason.REPLAYING, Standing.NONE, "replaying"),
        (None, Standing.WHOLE, ""),
        (None, Standing.WHOLE, ""),
        (Reason.GAP, Standing.PARTIAL, "gap"),
        (Reason.FULL, Standing.PARTIAL, "full"),
        (None, Standing.WHOLE, ""),
    ):
        ingest.told = {"a": [(3, 0, reason)]}
        assert caches.places("a") == [CachePlace(3, 0, standing, why)]
    assert caches.places("b") == []


def test_a_slot_that_is_anothers_now_has_its_rank(caches: Any, ingest: FakeIngest) -> None:
    ingest.told = {"a": [(3, 0, None), (4, 1, Reason.GAP)]}
    assert [place.rank for place in caches.places("a")] == [0, 1]

    ingest.told = {"b": [(4, 0, Reason.GAP)]}

    assert caches.places("b") == [CachePlace(4, 0, Standing.PARTIAL, "gap")]
