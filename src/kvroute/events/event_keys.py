"""What one `BlockStored` event says: the tier of its blocks, and the block key of each.

An engine's hashes are opaque, so a block key is computed from the token ids of the event, the parent's key
and the extra keys (LoRA adapter, multimodal identifiers, cache salt).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier, adapter_space, mixed_seed, token_keys
from kvroute.wire.vllm import BlockStored, Medium, medium_of

_TIERS: Final = {
    Medium.GPU: Tier.GPU,
    Medium.CPU: Tier.L1,
    Medium.DISK: Tier.L2,
    Medium.REMOTE: Tier.L2,
}
_FREQUENT: Final = {None: Tier.GPU, "GPU": Tier.GPU, "CPU": Tier.L1}
"""The media of nearly all events, for a lookup without `medium_of`."""


def tier_of(medium: str | None) -> Tier | None:
    """The tier of an event's blocks; None for an unknown medium."""
    tier = _FREQUENT.get(medium)
    return _TIERS.get(medium_of(medium)) if tier is None else tier


def is_divisible(event: BlockStored) -> bool:
    """Does the event have no token ids, or the right number for its hashes? Else its parts are
    meaningless."""
    return not event.token_ids or event.block_size * len(event.block_hashes) == len(event.token_ids)


def pieces_of(event: BlockStored, blocks: int) -> Iterator[BlockStored]:
    """Split a long event into several events of at most `blocks` blocks."""
    hashes, size = event.block_hashes, event.block_size
    for start in range(0, len(hashes), blocks):
        stop = start + blocks
        yield msgspec.structs.replace(
            event,
            block_hashes=hashes[start:stop],
            parent_block_hash=hashes[start - 1] if start else event.parent_block_hash,
            token_ids=event.token_ids[start * size : stop * size],
            extra_keys=event.extra_keys[start:stop] if event.extra_keys else None,
            lookahead_token_ids=event.lookahead_token_ids[start:stop] if event.lookahead_token_ids else None,
        )


def without_lookahead(event: BlockStored) -> tuple[BlockStored, Sequence[int], int] | None:
    """An event with lookahead, as the plain event of the same chain without its first tokens.

    Returns the plain event, these first tokens (empty if the event has a parent), and the number of tokens
    that a hash covers after its block. The plain event's tokens end where the hashes end, so `keys_of` gives
    the keys of `blocks.keys.lookahead_keys`. None if the event's fields do not fit together.
    """
    rows, size = event.lookahead_token_ids, event.block_size
    if not rows or len(rows) != len(event.block_hashes) or size * len(rows) != len(event.token_ids):
        return None
    ahead = len(rows[0])
    if not ahead or any(len(row) != ahead for row in rows):
        return None
    tokens = event.token_ids + rows[-1]
    plain = msgspec.structs.replace(event, token_ids=tokens[ahead:], lookahead_token_ids=None)
    return plain, tokens[:ahead] if event.parent_block_hash is None else (), ahead


def root_seed(event: BlockStored) -> int:
    """The seed of a prompt's key chain, made from its adapter and its cache salt."""
    adapter = event.lora_name
    if adapter is None and event.lora_id is not None:
        # Before 0.19 an event has only the adapter's number. No request uses this key space.
        adapter = f"\0{event.lora_id}"
    salt = ""
    if event.extra_keys and event.extra_keys[0]:
        _, salt = _without_salt(event.extra_keys[0], adapter, True)
    return adapter_space(adapter, salt).seed


def keys_of(event: BlockStored, seed: int) -> list[BlockKey]:
    """The key at the end of each of the event's blocks; `seed` is the parent's key, or `root_seed`."""
    stride = event.block_size // KEY_TOKENS
    extra = event.extra_keys
    if extra and any(extra):
        return _keys_with_extra(event, seed, extra)
    keys = token_keys(event.token_ids, seed)
    return keys if stride == 1 else keys[stride - 1 :: stride]


def _keys_with_extra(event: BlockStored, seed: int, extra: Sequence[list[object] | None]) -> list[BlockKey]:
    keys: list[BlockKey] = []
    size, key = event.block_size, seed
    for index in range(len(event.block_hashes)):
        entry = extra[index] if index < len(extra) else None
        if entry:
            first = index == 0 and event.parent_block_hash is None
            rest, _ = _without_salt(entry, event.lora_name, first)
            if rest:
                key = mixed_seed(key, msgspec.msgpack.encode(rest))
        key = token_keys(event.token_ids[index * size : (index + 1) * size], key)[-1]
        keys.append(BlockKey(key))
    return keys


def _without_salt(entry: list[object], adapter: str | None, first: bool) -> tuple[list[object], str]:
    """Split one block's extra keys into (keys without the adapter's name and the salt, salt).

    The order in vLLM (0.32, v1/core/kv_cache_utils.py): adapter, multimodal identifiers, then in the first
    block of a prompt the salt.
    """
    rest = list(entry)
    if adapter is not None and rest and rest[0] == adapter:
        del rest[0]
    if first:
        texts = [value for value in rest if isinstance(value, str)]
        if texts:
            rest.remove(texts[-1])
            return rest, texts[-1]
    return rest, ""
