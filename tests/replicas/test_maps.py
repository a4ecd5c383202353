"""A mirror that receives every change equals the published index, from whichever change it starts."""

from __future__ import annotations

import random

import pytest

from kvroute.blocks.chunks import BUILTIN, ChunkScheme, ChunkSpace, PromptChunks
from kvroute.blocks.keys import KEY_TOKENS, Tier, block_keys
from kvroute.index.chunk_index import ChunkHolder
from kvroute.index.prefix_index import Holder, PrefixIndex
from kvroute.index.snapshot import CopyableChunkIndex
from kvroute.replicas.map_mirror import Mirror
from kvroute.replicas.maps import PublishingChunkIndex, PublishingPrefixIndex
from kvroute.replicas.mesh import FrameReader, encode_frame
from kvroute.replicas.messages import Finished

SCHEMES = [ChunkScheme(), ChunkScheme(BUILTIN, 256, 3)]


def transferred(messages):
    """The messages after encoding and decoding."""
    return FrameReader().feed(encode_frame(list(messages)))


def mirror() -> Mirror:
    return Mirror(max_blocks=100_000, max_chunks=100_000)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_mirrored_from_the_start_and_from_the_middle(seed):
    rng, published = random.Random(seed), []
    index = PublishingPrefixIndex(published.append, max_blocks=100_000)
    early, late = mirror(), None
    prompts = [block_keys(f"prompt {n % 4} ".encode() * 90 + b"%d" % n * 400) for n in range(12)]
    holders = {slot: [Holder(tier) for tier in (Tier.GPU, Tier.L1)] for slot in range(4)}
    for slot, owned in holders.items():
        for holder in owned:
            index.attach(slot, holder)
    for step in range(160):
        if step == 80:
            late = mirror()
            for message in transferred(index.as_messages()):
                assert late.apply(message)
        holder = rng.choice(holders[rng.randrange(4)])
        keys = rng.choice(prompts)
        blocks = len(keys) // 2 * 2
        place = rng.randrange(blocks)
        kind = rng.random()
        if kind < 0.5:
            stride = rng.choice((1, 2))
            ends = keys[stride - 1 : blocks : stride]
            at = place // stride
            parent = ends[at - 1] if at else None
            index.store(holder, stride * KEY_TOKENS, parent, list(ends[at : at + 9]))
        elif kind < 0.6 and place:
            index.append_one(holder, 1, keys[place - 1], keys[place])
        elif kind < 0.97:
            index.remove(holder, keys[place])
        elif kind < 0.985:
            index.clear(holder)
        else:
            slot = rng.randrange(4)
            index.forget(slot)
            holders[slot] = [Holder(tier) for tier in (Tier.GPU, Tier.L1)]
            for fresh in holders[slot]:
                index.attach(slot, fresh)
        for message in transferred(published):
            for each in (early, late):
                assert each is None or each.apply(message)
        published.clear()
        if step % 7 == 0:
            early.sweep()
            index.sweep()

        for keys in prompts:
            matches = index.match(keys)
            assert early.blocks.match(keys) == matches
            assert late is None or late.blocks.match(keys) == matches
    assert late is not None
    assert index.size().held_blocks == early.blocks.size().held_blocks == late.blocks.size().held_blocks > 100


@pytest.mark.parametrize("scheme", SCHEMES, ids=["blake3", "signed keys"])
def test_chunks_are_mirrored_from_the_start_and_from_the_middle(scheme):
    rng, published = random.Random(1), []
    index = PublishingChunkIndex(published.append, max_chunks=100_000)
    early, late = mirror(), None
    prompts = [PromptChunks([n] * 300 + [rng.randrange(9000) for _ in range(1500)]) for n in range(8)]
    spaces = [ChunkSpace(scheme, "m"), ChunkSpace(scheme, "m", "salt")]
    shared = ChunkHolder(Tier.L2, shared=True)
    own = {slot: ChunkHolder(Tier.L1) for slot in range(3)}
    for slot, holder in own.items():
        index.attach(slot, holder, [(scheme, "m")])
        index.attach(slot, shared, [(scheme, "m")])
    for step in range(100):
        if step == 50:
            late = mirror()
            for message in transferred(index.as_messages()):
                assert late.apply(message)
        holder = rng.choice([shared, *own.values()])
        keys = list(rng.choice(prompts).keys(scheme))
        space, some = rng.choice(spaces), keys[: rng.randrange(1, len(keys))]
        kind = rng.random()
        if kind < 0.6:
            index.store(holder, space, iter(some))
        elif kind < 0.9:
            index.remove_all(holder, space, iter(some[-2:]))
        elif kind < 0.95:
            index.clear(holder)
        else:
            slot = rng.randrange(3)
            index.detach(slot, shared)
            index.attach(slot, shared, [(scheme, "m")])
        for message in transferred(published):
            for each in (early, late):
                assert each is None or each.apply(message)
        published.clear()
        if step % 7 == 0:
            early.sweep()

        for prompt in prompts:
            for salt in ("", "salt"):
                matches = index.match(prompt, salt, {})
                assert early.chunks.match(prompt, salt, {}) == matches
                assert late is None or late.chunks.match(prompt, salt, {}) == matches
    assert late is not None
    assert index.size().held_chunks == early.chunks.size().held_chunks == late.chunks.size().held_chunks > 10


def test_a_full_index_publishes_only_the_stored_blocks():
    published = []
    index, far = PublishingPrefixIndex(published.append, max_blocks=3), mirror()
    holder, keys = Holder(Tier.GPU), block_keys(b"x" * 640)
    index.attach(0, holder)

    index.store(holder, KEY_TOKENS, None, list(keys))
    for message in published:
        far.apply(message)

    assert far.blocks.match(keys) == index.match(keys)
    assert far.blocks.size().blocks == 3


def test_other_messages_are_not_applied():
    assert not mirror().apply(Finished(1))


@pytest.mark.parametrize(
    ("published", "index", "own"),
    [
        (PublishingPrefixIndex, PrefixIndex, {"as_messages"}),
        (PublishingChunkIndex, CopyableChunkIndex, {"as_messages", "number_of"}),
    ],
)
def test_a_published_index_overrides_methods_that_the_index_has(published, index, own):
    """A renamed method of the index would else keep its name here, and its changes would not be published."""
    overridden = {name for name in vars(published) if not name.startswith("_")} - own

    assert overridden
    assert all(hasattr(index, name) for name in overridden)
