"""Keys of prompts with media: the same from an engine's events, for every block size, and from a request."""

from __future__ import annotations

import pytest

from kvroute.blocks.keys import KEY_TOKENS, token_keys
from kvroute.blocks.media import MediaItem, media_keys, starting_items
from kvroute.events.holdings import keys_of, root_seed
from kvroute.wire.vllm import BlockStored

TOKENS = 384
PLAIN = list(range(1, TOKENS + 1))
LENGTH = 40
"""Placeholders of an item."""


def with_placeholders(items: list[MediaItem]) -> list[int]:
    ids = PLAIN.copy()
    for offset, _ in items:
        ids[offset : offset + LENGTH] = [9] * LENGTH
    return ids


def stored(items: list[MediaItem], size: int, *, salt: str = "") -> BlockStored:
    """The event of the whole prompt, as vLLM 0.32 writes it."""
    extra: list[list[object] | None] = []
    for start in range(0, TOKENS, size):
        entry: list[object] = [
            [identifier, offset - start]
            for offset, identifier in items
            if offset < start + size and offset + LENGTH > start
        ]
        if not start and salt:
            entry.append(salt)
        extra.append(entry or None)
    return BlockStored(
        block_hashes=list(range(TOKENS // size)),
        parent_block_hash=None,
        token_ids=with_placeholders(items),
        block_size=size,
        medium="GPU",
        extra_keys=extra,
    )


CASES = {
    "in the first block": [MediaItem(0, "a")],
    "across blocks": [MediaItem(20, "a")],
    "at a block's end": [MediaItem(63, "a")],
    "two, side by side": [MediaItem(20, "a"), MediaItem(60, "b")],
    "two in one block": [MediaItem(128, "a"), MediaItem(170, "b"), MediaItem(300, "a")],
}


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("items", CASES.values(), ids=CASES)
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_a_request_has_the_keys_of_the_events(items, size, salt):
    event = stored(items, size, salt=salt)

    keys = media_keys(with_placeholders(items), root_seed(event), items)

    stride = size // KEY_TOKENS
    assert keys_of(event, root_seed(event)) == keys[stride - 1 :: stride]


@pytest.mark.parametrize("items", CASES.values(), ids=CASES)
def test_keys_differ_from_the_unit_on_in_which_another_item_begins(items):
    other = [*items[:-1], items[-1]._replace(identifier="z")]
    ids = with_placeholders(items)
    begins = items[-1].offset // KEY_TOKENS

    keys, others = media_keys(ids, 7, items), media_keys(ids, 7, other)

    assert len(keys) == len(others) == TOKENS // KEY_TOKENS
    assert keys[:begins] == others[:begins]
    assert not set(keys[begins:]) & set(others[begins:])


def test_the_same_item_at_another_place_of_the_unit_is_another_prompt():
    ids = [9] * 64

    assert not set(media_keys(ids, 7, [MediaItem(1, "a")])) & set(media_keys(ids, 7, [MediaItem(2, "a")]))


def test_a_prompt_without_media_has_plain_keys_and_one_that_ends_before_an_item_too():
    assert media_keys(PLAIN, 7, []) == token_keys(PLAIN, 7)
    assert media_keys(PLAIN[:40], 7, [MediaItem(35, "a")]) == token_keys(PLAIN[:40], 7)


def test_of_a_block_only_items_that_begin_there_count():
    extra = ["adapter", ["a", -3], ["b", 0], ["c", 15], b"digest of embeddings", "salt"]

    assert list(starting_items(extra)) == [MediaItem(0, "b"), MediaItem(15, "c")]
