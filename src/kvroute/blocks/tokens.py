"""Exact token ids as chained `BlockKey`s, at one granularity for every cache.

Blocks of engines and chunks of LMCache differ in size (vLLM 16 on GPU, 128 on CPU; LMCache 256). All are
multiples of `KEY_TOKENS`, so one chain of keys names them all: a block that ends at token *n* is known by
the key of the first *n* tokens, whatever its size, and matched lengths add up in tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import Final

from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import BlockKey, CacheSpace

KEY_TOKENS: Final = 16
"""Tokens between two keys of a chain: vLLM's block on GPU, of which all other sizes are multiples."""


class Tier(IntEnum):
    """Where a block lies, fastest first."""

    GPU = 0
    L1 = 1
    """The worker's host memory."""
    L2 = 2
    """A slower or shared store behind it."""


_PLAIN: Final = CacheSpace("")

_blocks = Struct(f"{KEY_TOKENS * 4}s").iter_unpack


def token_keys(token_ids: Sequence[int], seed: int) -> list[BlockKey]:
    """Chain `token_ids` into one key per full `KEY_TOKENS` tokens; a trailing rest gets none.

    `seed` starts the chain: `CacheSpace.seed`, or the last key of what comes before. Ids are unsigned
    32-bit; others raise OverflowError. About 0.2 us a key (bench/micro_events.py).
    """
    rest = len(token_ids) % KEY_TOKENS
    if rest:
        token_ids = token_ids[: len(token_ids) - rest]
    ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    key, digest = seed, xxh3_64_intdigest
    keys: list[int] = [key := digest(block, key) for (block,) in _blocks(ids.tobytes())]
    return keys  # type: ignore[return-value]  # a `NewType` is a call


def prompt_keys(token_ids: Sequence[int], space: CacheSpace) -> list[BlockKey]:
    """The keys of a prompt that a cache can serve: its last token is always computed, so it is left out."""
    return token_keys(token_ids[: max(0, len(token_ids) - 1)], space.seed)


def adapter_space(adapter: str | None, salt: str = "") -> CacheSpace:
    """The space of exact keys: LoRA name and salt, but no base model.

    A worker has one base model and its blocks are its own, so the model need not be in the keys; and its
    events do not say it.
    """
    return CacheSpace(adapter or "", salt) if adapter or salt else _PLAIN


def mixed_seed(key: int, extra: bytes) -> int:
    """`key` as the seed of a block whose content is more than its token ids (images, embeddings)."""
    return xxh3_64_intdigest(extra, key)
