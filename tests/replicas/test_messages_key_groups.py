from __future__ import annotations

import random

import pytest

from kvroute.blocks.keys import block_keys
from kvroute.errors import WireError
from kvroute.replicas import messages as wire
from kvroute.replicas.messages import GROUP_BLOCKS, KeyGroupDecoder, KeyGroupEncoder


@pytest.mark.parametrize("as_list", [False, True], ids=["lazy keys", "a list"])
def test_the_decoder_restores_the_keys_although_both_sides_evict_groups(as_list, monkeypatch):
    monkeypatch.setattr(wire, "MAX_GROUPS", 20)
    rng, encoder, decoder = random.Random(3), KeyGroupEncoder(), KeyGroupDecoder()
    texts = [rng.randbytes(50) for _ in range(5)]

    for _ in range(120):
        place = rng.randrange(5)
        texts[place] += rng.randbytes(rng.randrange(3 * 64 * GROUP_BLOCKS))
        if len(texts[place]) > 12 * 64 * GROUP_BLOCKS:
            texts[place] = rng.randbytes(50)
        keys = block_keys(texts[place])

        encoded = encoder.encode(list(keys) if as_list else keys)

        assert list(decoder.decode(*encoded)) == list(keys)


def test_keys_that_were_sent_before_take_a_few_bytes():
    encoder, text = KeyGroupEncoder(), random.Random(1).randbytes(256 * 1024)

    first = sum(map(len, encoder.encode(block_keys(text))))
    again = sum(map(len, encoder.encode(block_keys(text + b"x" * 640))))

    assert first > 32 * 1024
    assert again < 1200


def test_a_decoder_that_missed_a_group_raises():
    encoder, keys = KeyGroupEncoder(), block_keys(bytes(64 * GROUP_BLOCKS))
    encoder.encode(keys)

    with pytest.raises(WireError):
        KeyGroupDecoder().decode(*encoder.encode(keys))


def test_encoder_and_decoder_can_be_reset():
    encoder, keys = KeyGroupEncoder(), block_keys(bytes(64 * GROUP_BLOCKS))
    encoder.encode(keys)
    encoder.reset()

    assert list(KeyGroupDecoder().decode(*encoder.encode(keys))) == list(keys)


def test_no_keys_are_no_bytes():
    assert KeyGroupEncoder().encode([]) == (b"", b"")
