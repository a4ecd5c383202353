"""The blocks of one stream: what an event says about them, and which ones the worker holds.

An engine's hashes are opaque, so a block key is computed from the token ids of the event, the parent's key
and the extra keys (LoRA adapter, multimodal identifiers, cache salt). The engine hash of a block is kept
while the worker holds the block, because a removal names nothing but the hash. Copies are counted, because
the worker removes each copy separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import Struct
from typing import Final, cast

import msgspec
from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier, adapter_space, mixed_seed, token_keys
from kvroute.blocks.media import is_media, media_keys, starting_items
from kvroute.index.prefix_index import Holder, PrefixIndex
from kvroute.index.snapshot import Blocks, Copies, Runs
from kvroute.wire.vllm import BlockStored, ExternalBlockHash, Medium, medium_of

_SHARDS: Final = 64
SHARD_MASK: Final = _SHARDS - 1


class ShardedHashMap:
    """Maps engine hashes to block keys. Mutable: `put`, `pop` and `shrink`."""

    # Many small dicts: a dict of 100,000 entries takes several milliseconds whenever it grows.

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[ExternalBlockHash, BlockKey]] = [{} for _ in range(_SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __contains__(self, block_hash: ExternalBlockHash) -> bool:
        return block_hash in self._shards[hash(block_hash) & SHARD_MASK]

    def shards(self) -> Sequence[dict[ExternalBlockHash, BlockKey]]:
        """The dicts; a hash belongs in number `hash(block_hash) & SHARD_MASK`."""
        return self._shards

    def get(self, block_hash: ExternalBlockHash) -> BlockKey | None:
        return self._shards[hash(block_hash) & SHARD_MASK].get(block_hash)

    def pop(self, block_hash: ExternalBlockHash) -> BlockKey | None:
        return self._shards[hash(block_hash) & SHARD_MASK].pop(block_hash, None)

    def put(self, hashes: Sequence[ExternalBlockHash], keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Map each hash to its key. Returns the different keys that some hashes had before.

        An engine hash and a block key are computed from the same tokens, so only an engine that contradicts
        itself changes a key.
        """
        shards, replaced = self._shards, list[BlockKey]()
        for block_hash, key in zip(hashes, keys, strict=True):
            shard = shards[hash(block_hash) & SHARD_MASK]
            previous_key = shard.setdefault(block_hash, key)
            if previous_key is not key and previous_key != key:
                replaced.append(previous_key)
                shard[block_hash] = key
        return replaced

    def among(self, hashes: Sequence[ExternalBlockHash]) -> list[ExternalBlockHash]:
        """The hashes that have a key."""
        shards = self._shards
        return [block_hash for block_hash in hashes if block_hash in shards[hash(block_hash) & SHARD_MASK]]

    def keys(self) -> Iterator[BlockKey]:
        """All block keys. Takes time proportional to their number."""
        for shard in self._shards:
            yield from shard.values()

    def shrink(self, steps: int) -> int:
        """Remove up to `steps` entries; returns how many steps are left."""
        for shard in self._shards:
            for _ in range(min(steps, len(shard))):
                shard.popitem()
                steps -= 1
            if not steps:
                break
        return steps


@dataclass(slots=True)
class LedgerCounts:
    """Counts of blocks since the stream was first read. Mutable: its ledger counts."""

    stored: int = 0
    elsewhere: int = 0
    """Blocks outside GPU memory among `stored`, `copies` and `orphaned`."""
    removed: int = 0
    copies: int = 0
    """Stored again while held. The worker removes each copy separately."""
    repeated: int = 0
    """Announced again from the start of a prompt. That may be a repetition and not a copy."""
    orphaned: int = 0
    """Stored under an unknown parent."""
    confirmed: int = 0
    """Orphans that found their place because a request continued them."""
    unknown_removed: int = 0
    """Removed although not known to be held."""
    passed_over: int = 0
    """Blocks of other groups of a hybrid model, which do not cover the whole prefix."""
    unusable: int = 0
    """Unknown medium, a block size that is no multiple of `KEY_TOKENS`, or no tokens and an unknown hash."""
    refused: int = 0
    """Not stored because the index was full, or because there were too many orphans."""
    cleared: int = 0
    """Events that cleared the whole cache."""

    @property
    def computed(self) -> int:
        """Blocks that the worker computed into GPU memory."""
        return self.stored + self.copies + self.orphaned - self.elsewhere


CHUNK_BLOCKS: Final = 512
"""Blocks in one part of a snapshot."""

_packed = Struct(f"={KEY_TOKENS}I").pack
_hashed = cast("Callable[[bytes, int], BlockKey]", xxh3_64_intdigest)
"""A block's key from its packed tokens and its parent's key. A cast in each call would cost as much as the
call."""


class HeldBlocks:
    """The blocks that the worker holds, by engine hash and per tier, mirrored in the index.

    Mutable: `hold`, `append_one`, `release`, `forget`, `forget_all`, `restore`; counts into `counts`.
    `max_remembered` bounds the hashes kept of released blocks, whose children may still be announced.
    `generation` rises whenever a tier is forgotten.
    """

    def __init__(self, index: PrefixIndex, slot: int, counts: LedgerCounts, max_remembered: int) -> None:
        self.generation = 0
        self._index = index
        self._slot = slot
        self._counts = counts
        self._max_remembered = max_remembered
        self._holders = {tier: Holder(tier) for tier in Tier}
        self._keys_by_hash = {tier: ShardedHashMap() for tier in Tier}
        self._gpu_shards, self._gpu_holder = self._keys_by_hash[Tier.GPU].shards(), self._holders[Tier.GPU]
        self._extra_copies: dict[Tier, dict[ExternalBlockHash, int]] = {tier: {} for tier in Tier}
        """Copies of held blocks beyond the first."""
        self._released: dict[ExternalBlockHash, BlockKey] = {}
        self._released_before: dict[ExternalBlockHash, BlockKey] = {}
        self._garbage: list[ShardedHashMap] = []
        index.attach(slot, self._holders[Tier.GPU])

    def count(self, tier: Tier) -> int:
        """The number of different blocks in the tier."""
        return len(self._keys_by_hash[tier])

    def keys(self, tier: Tier) -> Iterator[BlockKey]:
        """The keys of all blocks in the tier. Takes time proportional to their number: for inspection."""
        return self._keys_by_hash[tier].keys()

    def holder(self, tier: Tier) -> Holder:
        """The tier's place in the index."""
        return self._holders[tier]

    def holds(self, tier: Tier, block_hash: ExternalBlockHash) -> bool:
        return block_hash in self._keys_by_hash[tier]

    def key_of(self, block_hash: ExternalBlockHash, tier: Tier) -> BlockKey | None:
        """The key of a block that is held in this tier, was released lately, or is held in another tier."""
        key = self._keys_by_hash[tier].get(block_hash)
        if key is None:
            key = self._released.get(block_hash) or self._released_before.get(block_hash)
        if key is None:
            for other in Tier:
                key = self._keys_by_hash[other].get(block_hash)
                if key is not None:
                    break
        return key

    def hold(
        self,
        tier: Tier,
        size: int,
        parent: BlockKey | None,
        hashes: Sequence[ExternalBlockHash],
        keys: Sequence[BlockKey],
        *,
        may_repeat: bool = False,
    ) -> Sequence[ExternalBlockHash]:
        """The worker stored these blocks of `size` tokens, each the parent of the next.

        Returns the hashes of the blocks that are held now; empty if no block is new. Blocks that were held
        before count as copies, or as repeated if the event `may_repeat` an announcement.
        """
        keys_by_hash, counts = self._keys_by_hash[tier], self._counts
        new = len(hashes)
        again = keys_by_hash.among(hashes)
        if again:
            new -= len(again)
            if may_repeat:
                counts.repeated += len(again)
            else:
                counts.copies += len(again)
                if tier is not Tier.GPU:
                    counts.elsewhere += len(again)
                copies = self._extra_copies[tier]
                for block_hash in again:
                    copies[block_hash] = copies.get(block_hash, 0) + 1
        if not new:
            return ()
        holder = self._holders[tier]
        if not holder.lanes:
            self._index.attach(self._slot, holder)
        done = self._index.store(holder, size, parent, keys)
        if done < len(keys):
            counts.refused += len(keys) - done
            hashes, keys = hashes[:done], keys[:done]
        counts.stored += new
        if tier is not Tier.GPU:
            counts.elsewhere += new
        for replaced_key in keys_by_hash.put(hashes, keys):
            # No removal can name the old key any more, so the index would keep it while the worker lives.
            self._index.remove(holder, replaced_key)
        return hashes

    def append_one(
        self, parent: ExternalBlockHash, block_hash: ExternalBlockHash, token_ids: Sequence[int]
    ) -> bool:
        """As `hold` for one block of `KEY_TOKENS` in GPU memory after `parent`, in a fraction of the time.

        False, and no change, if `parent` is not held in GPU memory.
        """
        shards = self._gpu_shards
        parent_key = shards[hash(parent) & SHARD_MASK].get(parent)
        if parent_key is None:
            return False
        shard, counts = shards[hash(block_hash) & SHARD_MASK], self._counts
        if block_hash in shard:
            counts.copies += 1
            more = self._extra_copies[Tier.GPU]
            more[block_hash] = more.get(block_hash, 0) + 1
            return True
        key = _hashed(_packed(*token_ids), parent_key)
        if self._index.append_one(self._gpu_holder, 1, parent_key, key):
            counts.stored += 1
            shard[block_hash] = key
        else:
            counts.refused += 1
        return True

    def release(self, tier: Tier, block_hash: ExternalBlockHash) -> bool:
        """The worker removed one copy of this block; False if the block was not known to be held."""
        more = self._extra_copies[tier]
        if block_hash in more:
            more[block_hash] -= 1
            if not more[block_hash]:
                del more[block_hash]
            return True
        key = self._keys_by_hash[tier].pop(block_hash)
        if key is None:
            return False
        self._counts.removed += 1
        self._index.remove(self._holders[tier], key)
        self.remember(block_hash, key)
        return True

    def set_copies(self, tier: Tier, block_hash: ExternalBlockHash, copies: int) -> None:
        """The worker has this number of copies of a held block left; with 0, `release` follows."""
        if block_hash in self._keys_by_hash[tier]:
            more = self._extra_copies[tier]
            if copies > 1:
                more[block_hash] = copies - 1
            else:
                more.pop(block_hash, None)

    def assign_hash(self, tier: Tier, block_hash: ExternalBlockHash, key: BlockKey) -> None:
        """The engine hash of a block that the index has already."""
        self._keys_by_hash[tier].put((block_hash,), (key,))
        self._counts.stored += 1

    def remember(self, block_hash: ExternalBlockHash, key: BlockKey) -> None:
        """Keep the key of a released block, because its children may still be announced."""
        # Two generations, so that the older half is dropped in one step.
        self._released[block_hash] = key
        if 2 * len(self._released) > self._max_remembered:
            self._released_before, self._released = self._released, {}

    def forget(self, tier: Tier) -> None:
        """The tier is empty. Takes constant time; `sweep` returns the memory."""
        self.generation += 1
        self._index.clear(self._holders[tier])
        if len(self._keys_by_hash[tier]):
            self._garbage.append(self._keys_by_hash[tier])
            self._keys_by_hash[tier] = ShardedHashMap()
        self._gpu_shards = self._keys_by_hash[Tier.GPU].shards()
        self._extra_copies[tier] = {}

    def forget_all(self) -> None:
        """All tiers are empty, and no hash is known."""
        for tier in Tier:
            self.forget(tier)
        self._released, self._released_before = {}, {}

    def detach(self) -> None:
        """Remove the worker's holders from the index."""
        for holder in self._holders.values():
            self._index.detach(self._slot, holder)

    def sweep(self, steps: int) -> bool:
        """Return the memory of at most `steps` forgotten blocks; True while there is more."""
        while self._garbage and steps > 0:
            steps = self._garbage[-1].shrink(steps)
            if steps:
                self._garbage.pop()
        return bool(self._garbage) or self._index.sweep(steps)

    # Snapshots

    def dump(self) -> Iterator[Runs | Blocks | Copies]:
        """Yield all held blocks in parts of about `CHUNK_BLOCKS`.

        The caller applies no event until the iterator ends, and abandons it when `generation` changes. Other
        workers' parts of the index may change.
        """
        for tier in Tier:
            holder = self._holders[tier]
            for stride in holder.lanes:
                for shard in self._keys_by_hash[tier].shards():
                    rows = iter(shard.items())
                    while chunk := list(islice(rows, CHUNK_BLOCKS)):
                        here = [
                            (block_hash, key)
                            for block_hash, key in chunk
                            if self._index.has(holder, stride, key)
                        ]
                        hashes, keys = [block_hash for block_hash, _ in here], [key for _, key in here]
                        runs, blocks = [], 0
                        for run in self._index.runs_at(holder, stride, keys):
                            runs.append(run)
                            blocks += len(run)
                            if blocks >= CHUNK_BLOCKS:
                                yield Runs(tier, stride, runs)
                                runs, blocks = [], 0
                        if runs:
                            yield Runs(tier, stride, runs)
                        if here:
                            yield Blocks(tier, stride, hashes, keys)
            if self._extra_copies[tier]:
                copies = list(self._extra_copies[tier].items())
                for start in range(0, len(copies), CHUNK_BLOCKS):
                    some = copies[start : start + CHUNK_BLOCKS]
                    yield Copies(tier, [block_hash for block_hash, _ in some], [more for _, more in some])

    def restore(self, piece: Runs | Blocks | Copies) -> None:
        """Restore one part of a snapshot. All `Runs` come before any `Blocks`, so that the index has long
        runs."""
        holder = self._holders[piece.tier]
        if isinstance(piece, Copies):
            keys_by_hash = self._keys_by_hash[piece.tier]
            more = self._extra_copies[piece.tier]
            more.update(
                (block_hash, n)
                for block_hash, n in zip(piece.hashes, piece.more, strict=True)
                if block_hash in keys_by_hash
            )
            return
        if not holder.lanes:
            self._index.attach(self._slot, holder)
        if isinstance(piece, Runs):
            for run in piece.runs:
                self._index.store(holder, piece.stride * KEY_TOKENS, None, run)
            return
        hashes, keys = piece.hashes, piece.keys
        for index, key in enumerate(keys):
            # While the snapshot was taken, another worker's changes may have moved the start of a run.
            if not self._index.has(holder, piece.stride, key) and not self._index.store(
                holder, piece.stride * KEY_TOKENS, None, (key,)
            ):
                self._counts.refused += len(hashes) - index  # the index is full
                hashes, keys = hashes[:index], keys[:index]
                break
        self._keys_by_hash[piece.tier].put(hashes, keys)


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
            is_first = index == 0 and event.parent_block_hash is None
            without_salt, _ = _without_salt(entry, event.lora_name, is_first)
            other = [value for value in without_salt if not is_media(value)]
            if other:  # embeddings, whose content no request shows
                key = mixed_seed(key, msgspec.msgpack.encode(other))
            items = starting_items(without_salt)
        else:
            items = iter(())
        key = media_keys(event.token_ids[index * size : (index + 1) * size], key, items)[-1]
        keys.append(BlockKey(key))
    return keys


def _without_salt(entry: list[object], adapter: str | None, is_first: bool) -> tuple[list[object], str]:
    """Split one block's extra keys into (keys without the adapter's name and the salt, salt).

    The order in vLLM (0.32, v1/core/kv_cache_utils.py): adapter, multimodal identifiers, then in the first
    block of a prompt the salt.
    """
    extra_keys = list(entry)
    if adapter is not None and extra_keys and extra_keys[0] == adapter:
        del extra_keys[0]
    if is_first:
        texts = [value for value in extra_keys if isinstance(value, str)]
        if texts:
            extra_keys.remove(texts[-1])
            return extra_keys, texts[-1]
    return extra_keys, ""
