"""Chained block keys: equal keys mean equal content *and* equal prefix.

An engine's own block hash is opaque and per worker (`ExternalBlockHash` in `wire`); a `BlockKey`
is ours, and the two are never mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from xxhash import xxh3_64_intdigest

BlockKey = NewType("BlockKey", int)
"""64-bit xxh3, chained through its seed."""

BLOCK_BYTES = 64
"""Bytes of prompt per block of the approximate view: about 16 tokens of English text at 4 bytes a
token, and exactly 16 token ids (4 bytes each), so that texts and ids share one granularity."""

BYTES_PER_TOKEN = 4.0
"""What a token of text is taken to weigh until `usage` of real answers says better."""


@dataclass(frozen=True, slots=True)
class CacheSpace:
    """What must agree before two equal prompts may share KV blocks.

    `model` is the served model *or LoRA adapter* name (vLLM hashes the adapter into every block),
    `salt` the request's `cache_salt` (vLLM 0.32, engine docs "cache_salt").
    """

    model: str
    salt: str = ""

    @property
    def seed(self) -> int:
        """Start of the chain for this space."""
        return xxh3_64_intdigest(f"{self.model}\0{self.salt}".encode())


def block_keys(data: bytes, *, block_bytes: int = BLOCK_BYTES, seed: int = 0) -> list[BlockKey]:
    """Chain `data` into one key per full block of `block_bytes`.

    Key *i* depends on every byte before it, so two prompts share key *i* exactly when they share
    their first `(i + 1) * block_bytes` bytes (and the seed). A trailing partial block gets no key:
    engines cache full blocks only. About 0.25 us a block (bench/micro_blocks.py).
    """
    keys: list[BlockKey] = []
    append = keys.append
    key = seed
    view = memoryview(data)
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        key = xxh3_64_intdigest(view[start : start + block_bytes], key)
        append(BlockKey(key))
    return keys


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """One prompt as the approximate view sees it.

    `tokens` is the estimated length of the whole prompt, `block_tokens` the estimated tokens in one
    of `keys`' blocks; both are estimates unless the prompt came as token ids.
    """

    keys: Sequence[BlockKey]
    tokens: int
    block_tokens: float
