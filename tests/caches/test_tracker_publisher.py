"""The process that tracks the caches publishes its map, and applies the feedback of the others."""

from __future__ import annotations

from array import array

import pytest

from kvroute.blocks.chunks import ChunkScheme
from kvroute.blocks.keys import Tier
from kvroute.caches.tracker import CacheMapPublisher
from kvroute.clock import SystemClock
from kvroute.events.options import KvEventsOptions
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerId, WorkerSpec
from kvroute.index.chunk_index import ChunkHolder
from kvroute.index.map_trust import MapTrust
from kvroute.lmcache.l2_redis import L2Target
from kvroute.replicas.messages import (
    CachePlaceMessage,
    Distrusted,
    Finished,
    L2TargetMessage,
    L2Targets,
    MapReset,
    PromptAnswered,
    TierBandwidth,
    WorkerPlaces,
    pack_keys,
)
from kvroute.routing.strategy import CachePlace

POOL = ChunkHolder(Tier.L2, shared=True)


class FakeTracker:
    """A cache tracker that is its own map and its own LMCache."""

    def __init__(self):
        self.slots = [CachePlace(3, 0, MapTrust.WHOLE)]
        self.pools: list[L2Target] = []
        self.feedback: list = []
        self.caches = self.lmcache = self

    def places(self, worker):
        return self.slots

    def reports_l1(self, slot):
        return slot == 4

    def targets(self):
        return self.pools

    def answered(self, *arguments):
        self.feedback.append(arguments)

    def distrust(self, *arguments):
        self.feedback.append(arguments)


@pytest.fixture
def published():
    return []


@pytest.fixture
def tracker():
    return FakeTracker()


@pytest.fixture
def fleet():
    made = Fleet()
    made.apply("test", [WorkerSpec(WorkerId("w"), "http://w")])
    return made


@pytest.fixture
def publisher(published, tracker, fleet):
    made = CacheMapPublisher(published.append, SystemClock(), KvEventsOptions(), max_chunks=10)
    made.attach_tracker(tracker, fleet)
    return made


def test_places_are_published_when_they_change(publisher, published, tracker, fleet):
    publisher.publish_changes()
    publisher.publish_changes()
    assert published == [WorkerPlaces("w", [CachePlaceMessage(3, 0, "whole", "", False)])]

    tracker.slots = [CachePlace(4, 0, MapTrust.PARTIAL, "gap")]
    publisher.publish_changes()
    assert published[1:] == [WorkerPlaces("w", [CachePlaceMessage(4, 0, "partial", "gap", True)])]

    fleet.apply("test", [])
    publisher.publish_changes()
    assert published[2:] == [WorkerPlaces("w", [])]


def test_l2_targets_are_published_when_they_change(publisher, published, tracker):
    publisher.publish_changes()
    tracker.pools = [L2Target(POOL, ChunkScheme(), "m", ((0, 0),))]

    publisher.publish_changes()
    publisher.publish_changes()

    number = publisher.chunks.number_of(POOL)
    assert published[1:] == [L2Targets([L2TargetMessage(number, ChunkScheme(), "m", [(0, 0)])])]


def test_a_snapshot_starts_with_a_reset_and_has_all_published_messages(publisher, published):
    publisher.publish_changes()

    assert list(publisher.snapshot()) == [MapReset(), *published, L2Targets([])]


def test_feedback_of_other_processes_reaches_the_tracker(publisher, tracker, fleet):
    ids, keys = array("I", range(32)), [5, 6]
    answered = PromptAnswered("w", 0, "m", 33, ids.tobytes(), pack_keys(keys), "salt", None, 1.5, 16)

    assert publisher.on_message(answered)
    assert publisher.on_message(Distrusted("w", 0, "audit"))

    (worker, rank, model, prompt, sent, cached), distrusted = tracker.feedback
    assert (worker, rank, model, sent, cached) == (fleet.get("w"), 0, "m", 1.5, 16)
    assert (prompt.tokens, list(prompt.keys), prompt.salt) == (33, keys, "salt")
    assert prompt.chunks.token_ids == ids
    assert distrusted == (fleet.get("w"), 0, "audit")


def test_feedback_about_workers_that_left_is_ignored(publisher, tracker):
    assert publisher.on_message(Distrusted("gone", 0, "audit"))

    assert tracker.feedback == []


def test_other_messages_are_not_applied(publisher):
    assert not publisher.on_message(Finished(1))


def test_bandwidths_are_published_immediately_and_in_snapshots(publisher, published):
    publisher.publish_bandwidth(3, Tier.L1, 10.0)
    publisher.publish_bandwidth(3, Tier.L1, 12.0)
    publisher.publish_bandwidth(4, Tier.L2, 1.0)

    assert published == [
        TierBandwidth(3, Tier.L1, 10.0),
        TierBandwidth(3, Tier.L1, 12.0),
        TierBandwidth(4, Tier.L2, 1.0),
    ]
    publisher.slot_removed(4)
    assert list(publisher.snapshot()) == [MapReset(), TierBandwidth(3, Tier.L1, 12.0), L2Targets([])]
