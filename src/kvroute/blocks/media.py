"""Block keys of prompts with images, audio or video, whose token ids are placeholders without the content.

vLLM (0.32, v1/core/kv_cache_utils.py, `_gen_mm_extra_hash_keys`) hashes into each block the identifiers of
the media that lie in it, with their offsets from the block's start. Block sizes differ between workers, so
kvroute hashes an identifier once: into the `KEY_TOKENS` unit in which its first placeholder lies. The chain
of keys carries it on, so two prompts share a key exactly if the engine's hashes of the same tokens are equal,
for every block size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeGuard

import msgspec

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, mixed_seed, token_keys


class MediaItem(NamedTuple):
    """One image, video or audio of a prompt."""

    offset: int
    """Index of its first placeholder among the prompt's token ids."""
    identifier: str
    """The engine's hash of its content, or the client's own id where the engine uses that."""


def media_keys(token_ids: Sequence[int], seed: int, items: Iterable[MediaItem]) -> list[BlockKey]:
    """The chained keys of `token_ids` as `token_keys` has them, with the `items` that lie in them.

    `items` in the order of their offsets; those in a trailing rest, which has no key, change nothing. Costs
    as much as `token_keys`, and more per item.
    """
    keys: list[BlockKey] = []
    start, key = 0, seed
    for unit, within in groupby(items, _unit_of):
        keys += token_keys(token_ids[start * KEY_TOKENS : unit * KEY_TOKENS], key)
        start, key = unit, keys[-1] if keys else seed
        marks = [(identifier, offset % KEY_TOKENS) for offset, identifier in within]
        key = mixed_seed(key, msgspec.msgpack.encode(marks))
    keys += token_keys(token_ids[start * KEY_TOKENS :], key)
    return keys


def _unit_of(item: MediaItem) -> int:
    return item.offset // KEY_TOKENS


def starting_items(extra: Sequence[object]) -> Iterator[MediaItem]:
    """The media that begin in a block, from its extra keys in an event: pairs of identifier and offset.

    An item that began in an earlier block has a negative offset (vLLM 0.32).
    """
    for value in extra:
        if is_media(value) and value[1] >= 0:
            yield MediaItem(value[1], value[0])


def is_media(value: object) -> TypeGuard[Sequence[Any]]:
    """Is this extra key of an event a medium: a pair of identifier and offset?"""
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int)
    )
