"""One event stream's blocks: from the engine's own names to ours, and how many copies of each there are.

An engine's hashes are opaque. Each block is named by our key, computed from the tokens that the event
brings and the key of its parent, and the hash is remembered as long as the block is held. Unknown beats
wrong: a block whose parent is not known is set aside and counts as not held; an announcement that may be
a repetition is not counted as one more copy. What the index believes may be less than what the worker
holds, never more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvroute.blocks.keys import BlockKey
from kvroute.blocks.tokens import KEY_TOKENS, Tier, adapter_space, mixed_seed, token_keys
from kvroute.events.names import Names
from kvroute.index.prefix_index import Holder, PrefixIndex
from kvroute.wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalBlockHash,
    Medium,
    medium_of,
)

PIECE_BLOCKS: Final = 128
"""Blocks taken in between two chances to do something else."""

_TIERS: Final = {
    Medium.GPU: Tier.GPU,
    Medium.CPU: Tier.L1,
    Medium.DISK: Tier.L2,
    Medium.REMOTE: Tier.L2,
}
_USUAL: Final = {"GPU": Tier.GPU, "CPU": Tier.L1}
"""What nearly all events say, found without taking the long way."""
_WHOLE_PREFIX: Final = frozenset({"full_attention", "mla_attention"})
"""Kinds of KV cache whose blocks cover every token (vLLM 0.32, v1/kv_cache_interface.py)."""


@dataclass(slots=True)
class LedgerCounts:
    """What came, in blocks, since the stream was first read. Mutable; counted by its ledger."""

    stored: int = 0
    removed: int = 0
    copies: int = 0
    """Stored again while held: counted, each has to be removed."""
    repeated: int = 0
    """Announced again from the start of a prompt: may be no copy, so not counted as one."""
    set_aside: int = 0
    """Their parent was not known."""
    unknown_removed: int = 0
    """Removed without having been known."""
    passed_over: int = 0
    """Of other groups of a hybrid model, which say nothing about the whole prefix."""
    unusable: int = 0
    """Unknown medium, a block size that is no multiple of `KEY_TOKENS`, or no tokens and an unknown hash."""
    refused: int = 0
    """The index was full, or too many blocks were set aside."""
    cleared: int = 0
    """How often everything was cleared."""


@dataclass(slots=True, eq=False)
class _Fragment:
    """Blocks set aside. Mutable: `gone` grows."""

    event: BlockStored
    tier: Tier
    gone: set[ExternalBlockHash] = field(default_factory=set)


class Ledger:
    """What one stream has told about one slot. Mutable: changes by `apply` and `drop`.

    `max_aside` bounds the blocks set aside, `max_remembered` the names kept of blocks that are gone (their
    children may still be announced).
    """

    def __init__(
        self, index: PrefixIndex, slot: int, *, max_aside: int = 100_000, max_remembered: int = 65_536
    ) -> None:
        self.counts = LedgerCounts()
        self._index = index
        self._slot = slot
        self._max_aside = max_aside
        self._max_remembered = max_remembered
        self._holders = {tier: Holder(tier) for tier in Tier}
        self._held = {tier: Names() for tier in Tier}
        self._more: dict[Tier, dict[ExternalBlockHash, int]] = {tier: {} for tier in Tier}
        """Further copies of held blocks."""
        self._gone: dict[ExternalBlockHash, BlockKey] = {}
        self._gone_before: dict[ExternalBlockHash, BlockKey] = {}
        self._aside: dict[ExternalBlockHash, list[_Fragment]] = {}
        """By the unknown parent."""
        self._aside_by_hash: dict[ExternalBlockHash, _Fragment] = {}
        self._group: int | None = None
        self._block_tokens = 0
        self._closed = False
        self._garbage: list[Names] = []
        index.attach(slot, self._holders[Tier.GPU])

    @property
    def aside_blocks(self) -> int:
        """Blocks that the worker holds and we cannot place."""
        return len(self._aside_by_hash)

    def held_blocks(self, tier: Tier) -> int:
        """Different blocks held there."""
        return len(self._held[tier])

    def apply(self, batch: EventBatch) -> Iterator[None]:
        """Take in one batch, in order. Yields after every `PIECE_BLOCKS` or so, when what is believed is
        true of some moment of the engine step or before it; abandoning the iterator leaves it there, and
        then only `drop` makes it right."""
        # Releases that write arrays cannot repeat announcements (kv_cache_report_mode is of 0.32).
        may_repeat = batch.dialect != "array"
        work = 0
        for event in batch.events:
            if self._closed:
                return
            if isinstance(event, BlockStored):
                work += len(event.block_hashes)
                if len(event.block_hashes) <= PIECE_BLOCKS:
                    self._stored(event, may_repeat and event.parent_block_hash is None)
                else:
                    repeats = may_repeat and event.parent_block_hash is None
                    for piece in _pieces(event):
                        self._stored(piece, repeats)
                        yield
            elif isinstance(event, BlockRemoved):
                work += 4 * len(event.block_hashes)
                self._removed(event)
            elif isinstance(event, AllBlocksCleared):
                self._cleared()
            if work >= PIECE_BLOCKS:
                work = 0
                yield

    def held(self, tier: Tier) -> Iterator[BlockKey]:
        """The keys of all blocks held there. Walks them: for inspection."""
        return self._held[tier].keys()

    def drop(self) -> None:
        """Believe nothing any more, at once; `sweep` returns the memory."""
        for tier in Tier:
            self._forget(tier)
        self._aside.clear()
        self._aside_by_hash.clear()
        self._gone, self._gone_before = {}, {}
        self._group = None

    def close(self) -> None:
        """The stream has ended: drop all and leave the index for good."""
        self._closed = True
        self.drop()
        for holder in self._holders.values():
            self._index.detach(self._slot, holder)

    def sweep(self, steps: int = 1000) -> bool:
        """Return memory of what was dropped, `steps` blocks of it; True while there is more."""
        while self._garbage and steps > 0:
            steps = self._garbage[-1].shrink(steps)
            if steps:
                self._garbage.pop()
        return bool(self._garbage) or self._index.sweep(steps)

    # Events

    def _stored(self, event: BlockStored, may_repeat: bool) -> None:
        hashes = event.block_hashes
        tier = _USUAL.get(event.medium or "GPU")
        if tier is None:
            tier = _TIERS.get(medium_of(event.medium))
        if tier is None:
            self.counts.unusable += len(hashes)
            return
        if event.group_idx is not None and not self._speaks_for_prefix(event):
            self.counts.passed_over += len(hashes)
            return
        size = event.block_size
        if not event.token_ids:
            self._stored_by_name(hashes, tier)
            return
        if size <= 0 or size % KEY_TOKENS or size * len(hashes) != len(event.token_ids):
            self.counts.unusable += len(hashes)
            return
        parent = event.parent_block_hash
        if parent is None:
            parent_key, seed = None, _root_seed(event)
        else:
            parent_key = self._key_of(parent, tier)
            if parent_key is None:
                self._set_aside(event, tier)
                return
            seed = parent_key
        keys = _block_keys(event, seed)
        if tier is Tier.GPU:
            self._block_tokens = size
        self._hold(tier, size, parent_key, hashes, keys, may_repeat)

    def _hold(
        self,
        tier: Tier,
        size: int,
        parent: BlockKey | None,
        hashes: Sequence[ExternalBlockHash],
        keys: Sequence[BlockKey],
        may_repeat: bool,
    ) -> None:
        held, counts = self._held[tier], self.counts
        fresh = len(hashes)
        again = held.among(hashes)
        if again:
            fresh -= len(again)
            if may_repeat:
                counts.repeated += len(again)
            else:
                counts.copies += len(again)
                more = self._more[tier]
                for name in again:
                    more[name] = more.get(name, 0) + 1
        if not fresh:
            return
        holder = self._holders[tier]
        if not holder.lanes:
            self._index.attach(self._slot, holder)
        done = self._index.store(holder, size, parent, keys)
        if done < len(keys):
            counts.refused += len(keys) - done
            hashes, keys = hashes[:done], keys[:done]
        counts.stored += fresh
        held.put(hashes, keys)
        if self._aside_by_hash:
            for name in hashes:
                self._no_longer_aside(name)
            self._place_children(list(hashes))

    def _stored_by_name(self, hashes: Sequence[ExternalBlockHash], tier: Tier) -> None:
        """Placeholders of offloading connectors: blocks that another tier has named before."""
        for name in hashes:
            key = self._key_of(name, tier)
            if key is None or not self._block_tokens:
                self.counts.unusable += 1
            else:
                self._hold(tier, self._block_tokens, None, (name,), (key,), False)

    def _removed(self, event: BlockRemoved) -> None:
        tier = _USUAL.get(event.medium or "GPU")
        if tier is None:
            tier = _TIERS.get(medium_of(event.medium))
        if tier is None:
            self.counts.unusable += len(event.block_hashes)
            return
        group = event.group_idx
        if group is not None and group != (self._group or 0):
            self.counts.passed_over += len(event.block_hashes)
            return
        held, more, counts = self._held[tier], self._more[tier], self.counts
        for name in event.block_hashes:
            if name in more:
                more[name] -= 1
                if not more[name]:
                    del more[name]
                continue
            key = held.pop(name)
            if key is None:
                if not self._no_longer_aside(name):
                    counts.unknown_removed += 1
                continue
            counts.removed += 1
            self._index.remove(self._holders[tier], key)
            self._remember(name, key)

    def _cleared(self) -> None:
        """vLLM emptied its own prefix cache. LMCache's memory stays as it is (seen: a hit in L1 right
        after a reset, LMCache 0.5.6), and withdraws its blocks itself."""
        self.counts.cleared += 1
        self._forget(Tier.GPU)
        for fragments in list(self._aside.values()):
            for fragment in fragments:
                if fragment.tier is Tier.GPU:
                    for name in fragment.event.block_hashes:
                        self._no_longer_aside(name)

    # Names

    def _key_of(self, name: ExternalBlockHash, tier: Tier) -> BlockKey | None:
        key = self._held[tier].get(name)
        if key is None:
            key = self._gone.get(name) or self._gone_before.get(name)
        if key is None:
            for other in Tier:
                key = self._held[other].get(name)
                if key is not None:
                    break
        return key

    def _remember(self, name: ExternalBlockHash, key: BlockKey) -> None:
        # Two generations: the older half goes at once.
        self._gone[name] = key
        if 2 * len(self._gone) > self._max_remembered:
            self._gone_before, self._gone = self._gone, {}

    def _forget(self, tier: Tier) -> None:
        self._index.clear(self._holders[tier])
        self._garbage.append(self._held[tier])
        self._held[tier] = Names()
        self._more[tier] = {}

    def _speaks_for_prefix(self, event: BlockStored) -> bool:
        """A hybrid model announces each block once per group of layers: one group is enough."""
        group, kind = event.group_idx, event.kv_cache_spec_kind
        if self._group is None:
            if kind is None:
                return group == 0
            if kind not in _WHOLE_PREFIX:
                return False
            self._group = group
        return group == self._group

    # Blocks set aside

    def _set_aside(self, event: BlockStored, tier: Tier) -> None:
        hashes, known = event.block_hashes, self._aside_by_hash
        held = self._held[tier]
        if any(name in known or name in held for name in hashes):
            return  # a copy of what is known or aside already: less is believed, not more
        self.counts.set_aside += len(hashes)
        if len(known) + len(hashes) > self._max_aside:
            self.counts.refused += len(hashes)
            return
        fragment = _Fragment(event, tier)
        assert event.parent_block_hash is not None
        self._aside.setdefault(event.parent_block_hash, []).append(fragment)
        known.update(dict.fromkeys(hashes, fragment))

    def _no_longer_aside(self, name: ExternalBlockHash) -> bool:
        fragment = self._aside_by_hash.pop(name, None)
        if fragment is None:
            return False
        fragment.gone.add(name)
        if len(fragment.gone) == len(fragment.event.block_hashes):
            parent = fragment.event.parent_block_hash
            assert parent is not None
            siblings = self._aside.get(parent, [])
            if fragment in siblings:
                siblings.remove(fragment)
                if not siblings:
                    del self._aside[parent]
        return True

    def _place_children(self, names: list[ExternalBlockHash]) -> None:
        """`names` are known now: so are the blocks that wait for them, and those that wait for these."""
        while names:
            for fragment in self._aside.pop(names.pop(), ()):
                event, tier = fragment.event, fragment.tier
                parent = event.parent_block_hash
                assert parent is not None
                parent_key = self._key_of(parent, tier)
                if parent_key is None:
                    continue
                keys = _block_keys(event, parent_key)
                for name, key in zip(event.block_hashes, keys, strict=True):
                    if name in fragment.gone:
                        self._remember(name, key)
                        continue
                    del self._aside_by_hash[name]
                    done = self._index.store(self._holders[tier], event.block_size, parent_key, (key,))
                    if done:
                        self._held[tier].put((name,), (key,))
                        self.counts.stored += 1
                    parent_key = key
                names.extend(event.block_hashes)


def _pieces(event: BlockStored) -> Iterator[BlockStored]:
    """A long announcement as several that say the same."""
    hashes, size = event.block_hashes, event.block_size
    for start in range(0, len(hashes), PIECE_BLOCKS):
        stop = start + PIECE_BLOCKS
        yield msgspec.structs.replace(
            event,
            block_hashes=hashes[start:stop],
            parent_block_hash=hashes[start - 1] if start else event.parent_block_hash,
            token_ids=event.token_ids[start * size : stop * size],
            extra_keys=event.extra_keys[start:stop] if event.extra_keys else None,
        )


def _root_seed(event: BlockStored) -> int:
    """Where the chain of a prompt starts: its adapter and its cache salt."""
    adapter = event.lora_name
    if adapter is None and event.lora_id is not None:
        # Before 0.19 an adapter has a number only: blocks under a name that nobody asks for.
        adapter = f"\0{event.lora_id}"
    salt = ""
    if event.extra_keys and event.extra_keys[0]:
        _, salt = _without_salt(event.extra_keys[0], adapter, True)
    return adapter_space(adapter, salt).seed


def _without_salt(entry: list[object], adapter: str | None, first: bool) -> tuple[list[object], str]:
    """One block's extra keys without the adapter's name and the salt, and the salt: in vLLM (0.32,
    v1/core/kv_cache_utils.py) adapter, then multimodal identifiers, then in the first block the salt."""
    rest = list(entry)
    if adapter is not None and rest and rest[0] == adapter:
        del rest[0]
    if first:
        texts = [value for value in rest if isinstance(value, str)]
        if texts:
            rest.remove(texts[-1])
            return rest, texts[-1]
    return rest, ""


def _block_keys(event: BlockStored, seed: int) -> list[BlockKey]:
    """The key at the end of each of the event's blocks."""
    stride = event.block_size // KEY_TOKENS
    extra = event.extra_keys
    if extra and any(extra):
        return _keys_with_extra(event, seed, extra)
    keys = token_keys(event.token_ids, seed)
    return keys if stride == 1 else keys[stride - 1 :: stride]


def _keys_with_extra(event: BlockStored, seed: int, extra: Sequence[list[object] | None]) -> list[BlockKey]:
    keys: list[BlockKey] = []
    size, key = event.block_size, seed
    for place in range(len(event.block_hashes)):
        entry = extra[place] if place < len(extra) else None
        if entry:
            first = place == 0 and event.parent_block_hash is None
            rest, _ = _without_salt(entry, event.lora_name, first)
            if rest:
                key = mixed_seed(key, msgspec.msgpack.encode(rest))
        key = token_keys(event.token_ids[place * size : (place + 1) * size], key)[-1]
        keys.append(BlockKey(key))
    return keys
