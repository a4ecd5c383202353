"""What the process that follows the caches says of them, and what it takes from the others."""

from __future__ import annotations

from array import array

import pytest

from kvroute.app.cache_tracker import CacheMapPublisher
from kvroute.blocks.chunks import ChunkScheme
from kvroute.blocks.keys import Tier
from kvroute.clock import SystemClock
from kvroute.events.options import KvEventsOptions
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerId, WorkerSpec
from kvroute.index.chunk_index import ChunkHolder
from kvroute.lmcache.l2_redis import L2Target
from kvroute.replicas.messages import (
    Distrusted,
    Finished,
    L2TargetMessage,
    MapBegins,
    Place,
    PromptAnswered,
    Rate,
    Targets,
    WorkerPlaces,
    packed,
)
from kvroute.routing.strategy import CachePlace, Standing

POOL = ChunkHolder(Tier.L2, shared=True)


class Followed:
    """In place of what follows the caches; it is its own map and its own LMCache."""

    def __init__(self):
        self.known = [CachePlace(3, 0, Standing.WHOLE)]
        self.pools: list[L2Target] = []
        self.heard: list = []
        self.caches = self.lmcache = self

    def places(self, worker):
        return self.known

    def tells_of(self, slot):
        return slot == 4

    def targets(self):
        return self.pools

    def answered(self, *what):
        self.heard.append(what)

    def distrust(self, *what):
        self.heard.append(what)


@pytest.fixture
def said():
    return []


@pytest.fixture
def followed():
    return Followed()


@pytest.fixture
def fleet():
    made = Fleet()
    made.apply("test", [WorkerSpec(WorkerId("w"), "http://w")])
    return made


@pytest.fixture
def teller(said, followed, fleet):
    made = CacheMapPublisher(said.append, SystemClock(), KvEventsOptions(), max_chunks=10)
    made.follow(followed, fleet)
    return made


def test_places_are_said_when_they_change(teller, said, followed, fleet):
    teller.look()
    teller.look()
    assert said == [WorkerPlaces("w", [Place(3, 0, "whole", "", False)])]

    followed.known = [CachePlace(4, 0, Standing.PARTIAL, "gap")]
    teller.look()
    assert said[1:] == [WorkerPlaces("w", [Place(4, 0, "partial", "gap", True)])]

    fleet.apply("test", [])
    teller.look()
    assert said[2:] == [WorkerPlaces("w", [])]


def test_pools_are_said_when_they_change(teller, said, followed):
    teller.look()
    followed.pools = [L2Target(POOL, ChunkScheme(), "m", ((0, 0),))]

    teller.look()
    teller.look()

    number = teller.chunks.number_of(POOL)
    assert said[1:] == [Targets([L2TargetMessage(number, ChunkScheme(), "m", [(0, 0)])])]


def test_a_greeting_begins_from_nothing_and_has_what_was_said(teller, said):
    teller.look()

    assert list(teller.greeting()) == [MapBegins(), *said, Targets([])]


def test_what_answers_elsewhere_tell_is_taken_as_told_here(teller, followed, fleet):
    ids, keys = array("I", range(32)), [5, 6]
    answered = PromptAnswered("w", 0, "m", 33, ids.tobytes(), packed(keys), "salt", None, 1.5, 16)

    assert teller.heard(answered)
    assert teller.heard(Distrusted("w", 0, "audit"))

    (worker, rank, model, prompt, sent, cached), distrusted = followed.heard
    assert (worker, rank, model, sent, cached) == (fleet.get("w"), 0, "m", 1.5, 16)
    assert (prompt.tokens, list(prompt.keys), prompt.salt) == (33, keys, "salt")
    assert prompt.chunks.token_ids == ids
    assert distrusted == (fleet.get("w"), 0, "audit")


def test_answers_of_workers_that_left_are_passed_over(teller, followed):
    assert teller.heard(Distrusted("gone", 0, "audit"))

    assert followed.heard == []


def test_what_is_not_of_the_map_is_left_to_others(teller):
    assert not teller.heard(Finished(1))


def test_bandwidths_are_said_at_once_and_to_who_comes_later(teller, said):
    teller.rate_learnt(3, Tier.L1, 10.0)
    teller.rate_learnt(3, Tier.L1, 12.0)
    teller.rate_learnt(4, Tier.L2, 1.0)

    assert said == [Rate(3, Tier.L1, 10.0), Rate(3, Tier.L1, 12.0), Rate(4, Tier.L2, 1.0)]
    teller.place_left(4)
    assert list(teller.greeting()) == [MapBegins(), Rate(3, Tier.L1, 12.0), Targets([])]
