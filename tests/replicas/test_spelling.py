from __future__ import annotations

import random

import pytest

from kvroute.blocks.keys import block_keys
from kvroute.errors import WireError
from kvroute.replicas import messages as spelling
from kvroute.replicas.messages import GROUP, KeyGroupDecoder, KeyGroupEncoder


@pytest.mark.parametrize("as_list", [False, True], ids=["lazy keys", "a list"])
def test_a_reader_gets_what_was_told_even_where_both_forget(as_list, monkeypatch):
    monkeypatch.setattr(spelling, "MOST_GROUPS", 20)
    rng, teller, reader = random.Random(3), KeyGroupEncoder(), KeyGroupDecoder()
    texts = [rng.randbytes(50) for _ in range(5)]

    for _ in range(120):
        place = rng.randrange(5)
        texts[place] += rng.randbytes(rng.randrange(3 * 64 * GROUP))
        if len(texts[place]) > 12 * 64 * GROUP:
            texts[place] = rng.randbytes(50)
        keys = block_keys(texts[place])

        told = teller.tell(list(keys) if as_list else keys)

        assert list(reader.read(*told)) == list(keys)


def test_what_was_told_before_takes_a_few_bytes():
    teller, text = KeyGroupEncoder(), random.Random(1).randbytes(256 * 1024)

    first = sum(map(len, teller.tell(block_keys(text))))
    again = sum(map(len, teller.tell(block_keys(text + b"x" * 640))))

    assert first > 32 * 1024
    assert again < 1200


def test_who_has_not_read_all_says_so():
    teller, keys = KeyGroupEncoder(), block_keys(bytes(64 * GROUP))
    teller.tell(keys)

    with pytest.raises(WireError):
        KeyGroupDecoder().read(*teller.tell(keys))


def test_both_can_begin_anew():
    teller, keys = KeyGroupEncoder(), block_keys(bytes(64 * GROUP))
    teller.tell(keys)
    teller.begin_anew()

    assert list(KeyGroupDecoder().read(*teller.tell(keys))) == list(keys)


def test_no_keys_are_no_bytes():
    assert KeyGroupEncoder().tell([]) == (b"", b"")
