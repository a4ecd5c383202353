from __future__ import annotations

import pytest

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import KEY_TOKENS, Tier, block_keys, token_keys
from kvroute.caches.mirror import NOT_LINKED, CacheTrackerMirror, MirroredCaches
from kvroute.clock import SystemClock
from kvroute.config.config import Config
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker, WorkerId, WorkerSpec
from kvroute.index.map_trust import MapTrust
from kvroute.index.prefix_index import Holder
from kvroute.metrics import Metrics
from kvroute.relay.key_spaces import KeySpaces
from kvroute.replicas.map_mirror import Mirror
from kvroute.replicas.maps import PublishingPrefixIndex
from kvroute.replicas.messages import CachePlaceMessage, Finished, MapReset, TierBandwidth, WorkerPlaces
from kvroute.routing.strategy import ExactPrompt, Tokens

WORKER = Worker(WorkerSpec(WorkerId("w"), "http://w"))
KEYS = list(block_keys(b"x" * 256))
PROMPT = ExactPrompt(len(KEYS) * KEY_TOKENS, KEYS, PromptChunks(()))


@pytest.fixture
def messages():
    """The messages about a worker with two blocks on its GPU and four in host memory."""
    messages = [MapReset()]
    index = PublishingPrefixIndex(messages.append, max_blocks=100)
    for tier, blocks in ((Tier.GPU, 2), (Tier.L1, 4)):
        holder = Holder(tier)
        index.attach(3, holder)
        index.store(holder, KEY_TOKENS, None, KEYS[:blocks])
    messages.append(WorkerPlaces("w", [CachePlaceMessage(3, 0, "whole", "", by_lmcache=False)]))
    return messages


@pytest.fixture
def left():
    return []


@pytest.fixture
def rates():
    return []


@pytest.fixture
def caches(messages, left, rates):
    made = MirroredCaches(
        lambda: Mirror(max_blocks=100, max_chunks=100), left.append, lambda *rate: rates.append(rate)
    )
    for message in messages:
        assert made.on_message(message)
    return made


def test_received_places_are_trusted(caches):
    (place,) = caches.places(WORKER)

    assert (place.slot, place.trust) == (3, MapTrust.WHOLE)
    assert caches.match(PROMPT) == {3: Tokens(2 * KEY_TOKENS, 2 * KEY_TOKENS)}


def test_host_memory_that_lmcache_reports_does_not_count_twice(caches):
    caches.on_message(WorkerPlaces("w", [CachePlaceMessage(3, 0, "whole", "", by_lmcache=True)]))

    assert caches.match(PROMPT) == {3: Tokens(2 * KEY_TOKENS)}


def test_blocks_whose_hashes_cover_later_tokens_are_found_by_keys_of_their_own(caches):
    ids = list(range(100, 165))
    prompt = ExactPrompt(65, token_keys(ids[:64], 0), PromptChunks(ids[:64]), last_id=ids[64])
    holder = Holder(Tier.GPU)
    index = PublishingPrefixIndex(caches.on_message, max_blocks=100)
    index.attach(5, holder)
    index.store(holder, KEY_TOKENS, None, prompt.keys_ahead(1))

    assert 5 not in caches.match(prompt)
    caches.on_message(WorkerPlaces("v", [CachePlaceMessage(5, 0, "whole", "", by_lmcache=False, ahead=1)]))

    assert caches.match(prompt)[5] == Tokens(64)  # the last token is the one after the last block
    assert caches.match(prompt._replace(last_id=1))[5] == Tokens(48)


def test_without_a_link_no_place_is_trusted(caches, left):
    caches.on_tracker_gone()

    (place,) = caches.places(WORKER)
    assert (place.trust, place.distrust_reason, left) == (MapTrust.NONE, NOT_LINKED, [])


def test_a_map_reset_removes_the_old_map(caches, messages, left):
    caches.on_tracker_gone()

    caches.on_message(MapReset())
    assert (caches.places(WORKER), caches.match(PROMPT), left) == ((), {}, [3])

    for message in messages:
        caches.on_message(message)
    assert caches.places(WORKER)[0].trust is MapTrust.WHOLE


def test_a_removed_slot_is_reported(caches, left):
    caches.on_message(WorkerPlaces("w", [CachePlaceMessage(4, 0, "none", "replaying", by_lmcache=False)]))

    assert left == [3]
    assert caches.places(WORKER)[0].distrust_reason == "replaying"


def test_other_messages_are_not_applied(caches):
    assert not caches.on_message(Finished(1))


def test_received_bandwidths_are_reported(caches, rates):
    assert caches.on_message(TierBandwidth(3, int(Tier.L2), 1.5))

    assert rates == [(3, Tier.L2, 1.5)]


def test_a_mirroring_process_counts_its_own_tokenizing():
    made = CacheTrackerMirror(
        Config.model_validate({"routing": {"strategy": "kvaware"}}),
        Fleet(),
        Metrics(),
        SystemClock(),
        KeySpaces(Fleet(), adapters=True),
        lambda _: None,
        lambda *_: 0.05,
        lambda *_: None,
        lambda _: None,
    )
    made.preparer.cpu_s = 0.25

    (shown,) = [each for each in made.gauges() if each.name == "kvroute_tokenizing_cpu_seconds"]

    assert {each.labels["thread"]: each.value for each in shown.samples} == {"loop": 0.25, "tokenizer": 0.0}
