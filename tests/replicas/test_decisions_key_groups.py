from __future__ import annotations

import random

import pytest

from kvroute.blocks.keys import GROUP_BLOCKS, block_keys
from kvroute.replicas import decisions
from kvroute.replicas.decisions import KeyGroups
from kvroute.replicas.messages import unpack_keys


@pytest.mark.parametrize("as_list", [False, True], ids=["lazy keys", "a list"])
def test_processes_restore_each_others_keys_although_all_forget_groups(as_list, monkeypatch):
    monkeypatch.setattr(decisions, "MAX_GROUPS", 20)
    rng, both = random.Random(3), (KeyGroups(), KeyGroups())
    texts = [rng.randbytes(50) for _ in range(5)]

    for _ in range(120):
        place, (sender, receiver) = rng.randrange(5), rng.sample(both, 2)
        texts[place] += rng.randbytes(rng.randrange(3 * 64 * GROUP_BLOCKS))
        if len(texts[place]) > 12 * 64 * GROUP_BLOCKS:
            texts[place] = rng.randbytes(50)
        keys = block_keys(texts[place])

        encoded = sender.encode(list(keys) if as_list else keys)

        assert list(receiver.decode(*encoded)) == list(keys)


def test_keys_that_were_sent_or_received_before_take_a_few_bytes():
    one, other, text = KeyGroups(), KeyGroups(), random.Random(1).randbytes(256 * 1024)

    sent = one.encode(block_keys(text))
    other.decode(*sent)

    assert sum(map(len, sent)) > 32 * 1024
    for groups in (one, other):
        assert sum(map(len, groups.encode(block_keys(text + b"x" * 640)))) < 1200


def test_a_group_that_was_missed_is_asked_for():
    one, other, late = KeyGroups(), KeyGroups(), KeyGroups()
    keys = list(block_keys(random.Random(2).randbytes(64 * (3 * GROUP_BLOCKS + 5))))
    other.decode(*one.encode(keys[: 2 * GROUP_BLOCKS]))

    ends, fresh = one.encode(keys)

    assert list(other.decode(ends, fresh)) == keys
    assert late.decode(ends, fresh) is None
    wanted = late.unknown(ends)
    assert list(unpack_keys(wanted)) == [keys[GROUP_BLOCKS - 1], keys[2 * GROUP_BLOCKS - 1]]
    late.learn(unpack_keys(one.packed(wanted)))
    assert list(late.decode(ends, fresh)) == keys


def test_a_group_that_the_receiver_knows_and_the_sender_does_not_is_no_problem():
    fresh_sender, receiver = KeyGroups(), KeyGroups()
    keys = list(block_keys(random.Random(4).randbytes(64 * (2 * GROUP_BLOCKS + 3))))
    receiver.learn(keys[:GROUP_BLOCKS])

    assert list(receiver.decode(*fresh_sender.encode(keys))) == keys


def test_groups_that_nobody_knows_are_left_out_of_an_answer():
    groups = KeyGroups()
    keys = list(block_keys(random.Random(5).randbytes(64 * 2 * GROUP_BLOCKS)))
    ends, _ = KeyGroups().encode(keys)
    groups.learn(keys[:GROUP_BLOCKS])

    assert list(unpack_keys(groups.packed(ends))) == keys[:GROUP_BLOCKS]


def test_no_keys_are_no_bytes():
    assert KeyGroups().encode([]) == (b"", b"")
