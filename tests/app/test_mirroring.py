from __future__ import annotations

import pytest

from kvroute.app.cache_tracker_mirror import ALONE, CacheTrackerMirror, MirroredCaches
from kvroute.app.config import Config
from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import KEY_TOKENS, Tier, block_keys
from kvroute.clock import SystemClock
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker, WorkerId, WorkerSpec
from kvroute.gateway.preparation import AdapterIsolation
from kvroute.index.prefix_index import Holder
from kvroute.metrics import Metrics
from kvroute.replicas.maps import Mirror, PublishingPrefixIndex
from kvroute.replicas.messages import Finished, MapBegins, Place, Rate, WorkerPlaces
from kvroute.routing.strategy import ExactPrompt, Standing, Tokens

WORKER = Worker(WorkerSpec(WorkerId("w"), "http://w"))
KEYS = list(block_keys(b"x" * 256))
PROMPT = ExactPrompt(len(KEYS) * KEY_TOKENS, KEYS, PromptChunks(()))


@pytest.fixture
def told():
    """What a process says that has a worker with four blocks on its GPU and some in host memory."""
    said = [MapBegins()]
    index = PublishingPrefixIndex(said.append, max_blocks=100)
    for tier, blocks in ((Tier.GPU, 2), (Tier.L1, 4)):
        holder = Holder(tier)
        index.attach(3, holder)
        index.store(holder, KEY_TOKENS, None, KEYS[:blocks])
    said.append(WorkerPlaces("w", [Place(3, 0, "whole", "", by_lmcache=False)]))
    return said


@pytest.fixture
def left():
    return []


@pytest.fixture
def rates():
    return []


@pytest.fixture
def caches(told, left, rates):
    made = MirroredCaches(
        lambda: Mirror(max_blocks=100, max_chunks=100), left.append, lambda *rate: rates.append(rate)
    )
    for message in told:
        assert made.heard(message)
    return made


def test_what_is_told_is_believed(caches):
    (place,) = caches.places(WORKER)

    assert (place.slot, place.standing) == (3, Standing.WHOLE)
    assert caches.match(PROMPT) == {3: Tokens(2 * KEY_TOKENS, 2 * KEY_TOKENS)}


def test_host_memory_that_lmcache_tells_of_does_not_count_twice(caches):
    caches.heard(WorkerPlaces("w", [Place(3, 0, "whole", "", by_lmcache=True)]))

    assert caches.match(PROMPT) == {3: Tokens(2 * KEY_TOKENS)}


def test_alone_nothing_is_believed(caches, left):
    caches.alone()

    (place,) = caches.places(WORKER)
    assert (place.standing, place.why, left) == (Standing.NONE, ALONE, [])


def test_a_map_that_begins_anew_leaves_nothing_of_the_old_one(caches, told, left):
    caches.alone()

    caches.heard(MapBegins())
    assert (caches.places(WORKER), caches.match(PROMPT), left) == ((), {}, [3])

    for message in told:
        caches.heard(message)
    assert caches.places(WORKER)[0].standing is Standing.WHOLE


def test_a_place_that_is_no_more_is_said(caches, left):
    caches.heard(WorkerPlaces("w", [Place(4, 0, "none", "replaying", by_lmcache=False)]))

    assert left == [3]
    assert caches.places(WORKER)[0].why == "replaying"


def test_what_is_not_of_the_map_is_left_to_others(caches):
    assert not caches.heard(Finished(1))


def test_bandwidths_that_are_told_are_reckoned_with(caches, rates):
    assert caches.heard(Rate(3, int(Tier.L2), 1.5))

    assert rates == [(3, Tier.L2, 1.5)]


def test_a_process_that_looks_on_counts_its_own_tokenizing():
    made = CacheTrackerMirror(
        Config.model_validate({"routing": {"strategy": "kvaware"}}),
        Fleet(),
        Metrics(),
        SystemClock(),
        AdapterIsolation(Fleet(), enabled=True),
        lambda _: None,
        lambda *_: 0.05,
        lambda *_: None,
        lambda _: None,
    )
    made.preparer.cpu_s = 0.25

    (shown,) = [each for each in made.gauges() if each.name == "kvroute_tokenizing_cpu_seconds"]

    assert {each.labels["thread"]: each.value for each in shown.samples} == {"loop": 0.25, "tokenizer": 0.0}
