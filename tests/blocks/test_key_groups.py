from __future__ import annotations

import random
from array import array
from collections import OrderedDict

import pytest

from kvroute.blocks import key_groups
from kvroute.blocks.key_groups import KeyGroups
from kvroute.blocks.keys import GROUP_BLOCKS, block_keys


def keys_of(seed: int, blocks: int) -> list[int]:
    return list(block_keys(random.Random(seed).randbytes(64 * blocks)))


@pytest.mark.parametrize("as_list", [False, True], ids=["lazy keys", "a list"])
def test_processes_restore_each_others_keys_although_all_forget_groups(as_list, monkeypatch):
    monkeypatch.setattr(key_groups, "MAX_GROUPS", 20)
    rng, both = random.Random(3), (KeyGroups(), KeyGroups())
    texts, asked = [rng.randbytes(50) for _ in range(5)], 0

    for _ in range(200):
        place, (sender, receiver) = rng.randrange(5), rng.sample(both, 2)
        texts[place] += rng.randbytes(rng.randrange(3 * 64 * GROUP_BLOCKS))
        if len(texts[place]) > 12 * 64 * GROUP_BLOCKS:
            texts[place] = rng.randbytes(50)
        keys = block_keys(texts[place])

        known, fresh = sender.encode(list(keys) if as_list else keys)
        received = receiver.decode(known, fresh)
        if received is None:
            asked += 1
            receiver.learn(array("Q", sender.keys_to(known)))
            received = receiver.decode(known, fresh)

        assert list(received) == list(keys)
    assert asked < 10


def test_each_forgotten_group_costs_one_step_however_long_the_prompts_are(monkeypatch):
    class Counted(OrderedDict):
        steps = 0

        def popitem(self, last=True):
            Counted.steps += 1
            return super().popitem(last)

    monkeypatch.setattr(key_groups, "OrderedDict", Counted)
    monkeypatch.setattr(key_groups, "MAX_GROUPS", 100)
    groups = KeyGroups()
    for seed in range(20):
        groups.encode(keys_of(seed, 10 * GROUP_BLOCKS))

    assert Counted.steps == 20 * 10 - 100


def test_a_prompt_is_forgotten_from_its_end_and_never_below_a_used_one(monkeypatch):
    monkeypatch.setattr(key_groups, "MAX_GROUPS", 4)
    groups, old, other = KeyGroups(), keys_of(1, 3 * GROUP_BLOCKS), keys_of(2, 2 * GROUP_BLOCKS)
    groups.encode(old)
    groups.encode(other)

    assert not groups.use(old[-1])
    assert groups.use(old[2 * GROUP_BLOCKS - 1])
    assert groups.use(other[-1])


def test_keys_that_were_sent_or_received_before_take_a_few_bytes():
    one, other, text = KeyGroups(), KeyGroups(), random.Random(1).randbytes(256 * 1024)

    known, fresh = one.encode(block_keys(text))
    other.decode(known, fresh)

    assert known is None
    assert len(fresh) == 4096
    for groups in (one, other):
        assert groups.encode(block_keys(text)) == (block_keys(text)[-1], ())
        known, fresh = groups.encode(block_keys(text + b"x" * 640))
        assert (known, len(fresh)) == (block_keys(text)[-1], 10)


def test_a_longer_prompt_begins_after_the_last_whole_group():
    groups, keys = KeyGroups(), keys_of(2, 3 * GROUP_BLOCKS + 5)
    groups.encode(keys[: 2 * GROUP_BLOCKS + 7])

    known, fresh = groups.encode(keys)
    assert (known, list(fresh)) == (keys[2 * GROUP_BLOCKS - 1], keys[2 * GROUP_BLOCKS :])


def test_keys_that_were_missed_are_asked_for():
    one, other, late = KeyGroups(), KeyGroups(), KeyGroups()
    keys = keys_of(2, 3 * GROUP_BLOCKS + 5)
    other.decode(*one.encode(keys[: 2 * GROUP_BLOCKS]))

    known, fresh = one.encode(keys)

    assert list(other.decode(known, fresh)) == keys
    assert late.decode(known, fresh) is None
    late.learn(array("Q", one.keys_to(known)))
    assert list(late.decode(known, fresh)) == keys


def test_a_group_that_the_receiver_knows_and_the_sender_does_not_is_no_problem():
    fresh_sender, receiver, keys = KeyGroups(), KeyGroups(), keys_of(4, 2 * GROUP_BLOCKS + 3)
    receiver.encode(keys[:GROUP_BLOCKS])

    assert list(receiver.decode(*fresh_sender.encode(keys))) == keys


def test_keys_after_the_end_of_a_prompt_are_not_believed():
    one, other, keys = KeyGroups(), KeyGroups(), keys_of(6, GROUP_BLOCKS + 3)
    other.decode(*one.encode(keys))

    assert other.decode(keys[-1], array("Q", [1, 2])) is None


def test_keys_that_nobody_knows_are_not_in_an_answer():
    groups, keys = KeyGroups(), keys_of(5, 2 * GROUP_BLOCKS)
    groups.encode(keys[:GROUP_BLOCKS])

    assert list(groups.keys_to(keys[GROUP_BLOCKS - 1])) == keys[:GROUP_BLOCKS]
    assert list(groups.keys_to(keys[-1])) == []


def test_grouped_keys_are_a_sequence():
    keys = keys_of(7, 3 * GROUP_BLOCKS + 5)
    grouped = KeyGroups().decode(*KeyGroups().encode(keys))
    rng = random.Random(8)

    assert len(grouped) == len(keys)
    assert [grouped[place] for place in range(-len(keys), len(keys))] == keys + keys
    for _ in range(50):
        start, stop, step = rng.randrange(120), rng.randrange(120), rng.randrange(1, 4)
        assert list(grouped[start:stop:step]) == keys[start:stop:step]
    for place in (len(keys), -len(keys) - 1):
        with pytest.raises(IndexError):
            grouped[place]


def test_no_keys_are_no_bytes():
    groups = KeyGroups()

    assert groups.encode([]) == (None, [])
    assert list(groups.decode(None, array("Q"))) == []
