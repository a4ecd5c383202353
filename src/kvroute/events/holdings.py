"""The blocks that one stream's worker holds: by the engine's names, tier by tier, and in the index.

A block is remembered by its hash as long as it is held, since its removal says nothing else; how many
copies of it there are, because each is removed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import Struct
from typing import Final, cast

from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier
from kvroute.index.prefix_index import Holder, PrefixIndex
from kvroute.index.snapshot import Blocks, Copies, Runs
from kvroute.wire.vllm import ExternalBlockHash

_SHARDS: Final = 64
SHARD_MASK: Final = _SHARDS - 1


class ShardedHashMap:
    """External hash -> our key. Mutable. Split into many small dicts: one of 100,000 entries takes several
    milliseconds whenever it grows."""

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[ExternalBlockHash, BlockKey]] = [{} for _ in range(_SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __contains__(self, name: ExternalBlockHash) -> bool:
        return name in self._shards[hash(name) & SHARD_MASK]

    def shards(self) -> Sequence[dict[ExternalBlockHash, BlockKey]]:
        """A name is, or would be, in that of number `hash(name) & SHARD_MASK`."""
        return self._shards

    def get(self, name: ExternalBlockHash) -> BlockKey | None:
        return self._shards[hash(name) & SHARD_MASK].get(name)

    def pop(self, name: ExternalBlockHash) -> BlockKey | None:
        return self._shards[hash(name) & SHARD_MASK].pop(name, None)

    def put(self, names: Sequence[ExternalBlockHash], keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Each name has this key from now on. Returns the other keys that some of them had before: none,
        unless an engine contradicts itself: its names are hashes of what our keys are hashes of."""
        shards, replaced = self._shards, list[BlockKey]()
        for name, key in zip(names, keys, strict=True):
            shard = shards[hash(name) & SHARD_MASK]
            known = shard.setdefault(name, key)
            if known is not key and known != key:
                replaced.append(known)
                shard[name] = key
        return replaced

    def among(self, names: Sequence[ExternalBlockHash]) -> list[ExternalBlockHash]:
        """Those of `names` that are known."""
        shards = self._shards
        return [name for name in names if name in shards[hash(name) & SHARD_MASK]]

    def keys(self) -> Iterator[BlockKey]:
        """Our keys of all of them. Walks them."""
        for shard in self._shards:
            yield from shard.values()

    def shrink(self, steps: int) -> int:
        """Let go of up to `steps` entries; returns how many of the steps are left."""
        for shard in self._shards:
            for _ in range(min(steps, len(shard))):
                shard.popitem()
                steps -= 1
            if not steps:
                break
        return steps


@dataclass(slots=True)
class LedgerCounts:
    """What came, in blocks, since the stream was first read. Mutable; counted by its ledger."""

    stored: int = 0
    elsewhere: int = 0
    """Of those, the copies and the set aside: such as are not in GPU memory."""
    removed: int = 0
    copies: int = 0
    """Stored again while held: counted, each has to be removed."""
    repeated: int = 0
    """Announced again from the start of a prompt: may be no copy, so not counted as one."""
    set_aside: int = 0
    """Their parent was not known."""
    confirmed: int = 0
    """Placed by a request that continued them."""
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

    @property
    def computed(self) -> int:
        """Blocks that took room in GPU memory just then."""
        return self.stored + self.copies + self.set_aside - self.elsewhere


CHUNK_BLOCKS: Final = 512
"""Blocks in one part of a snapshot."""

_packed = Struct(f"={KEY_TOKENS}I").pack
_hashed = cast("Callable[[bytes, int], BlockKey]", xxh3_64_intdigest)
"""A block's key from its tokens and its parent's: to name the type in a call would cost as much."""


class HeldBlocks:
    """Mutable: `hold`, `hold_one`, `release`, `forget`, `forget_all`, `restore`. Counts into `counts`.

    `max_remembered` bounds the names kept of blocks that are gone (their children may still be announced).
    `generation` rises whenever much is forgotten at once.
    """

    def __init__(self, index: PrefixIndex, slot: int, counts: LedgerCounts, max_remembered: int) -> None:
        self.generation = 0
        self._index = index
        self._slot = slot
        self._counts = counts
        self._max_remembered = max_remembered
        self._holders = {tier: Holder(tier) for tier in Tier}
        self._held = {tier: ShardedHashMap() for tier in Tier}
        self._gpu_shards, self._gpu_holder = self._held[Tier.GPU].shards(), self._holders[Tier.GPU]
        self._more: dict[Tier, dict[ExternalBlockHash, int]] = {tier: {} for tier in Tier}
        """Further copies of held blocks."""
        self._gone: dict[ExternalBlockHash, BlockKey] = {}
        self._gone_before: dict[ExternalBlockHash, BlockKey] = {}
        self._garbage: list[ShardedHashMap] = []
        index.attach(slot, self._holders[Tier.GPU])

    def count(self, tier: Tier) -> int:
        """Different blocks held there."""
        return len(self._held[tier])

    def keys(self, tier: Tier) -> Iterator[BlockKey]:
        """The keys of all blocks held there. Walks them: for inspection."""
        return self._held[tier].keys()

    def holder(self, tier: Tier) -> Holder:
        """The tier's place in the index."""
        return self._holders[tier]

    def holds(self, tier: Tier, name: ExternalBlockHash) -> bool:
        return name in self._held[tier]

    def key_of(self, name: ExternalBlockHash, tier: Tier) -> BlockKey | None:
        """Our key of a block that is held, here or in another tier, or was."""
        key = self._held[tier].get(name)
        if key is None:
            key = self._gone.get(name) or self._gone_before.get(name)
        if key is None:
            for other in Tier:
                key = self._held[other].get(name)
                if key is not None:
                    break
        return key

    def hold(
        self,
        tier: Tier,
        size: int,
        parent: BlockKey | None,
        names: Sequence[ExternalBlockHash],
        keys: Sequence[BlockKey],
        *,
        may_repeat: bool = False,
    ) -> Sequence[ExternalBlockHash]:
        """These blocks of `size` tokens were stored, each the parent of the next; returns the names of
        those that are held now, none if nothing is new. Those known already are copies, unless it
        `may_repeat`."""
        held, counts = self._held[tier], self._counts
        fresh = len(names)
        again = held.among(names)
        if again:
            fresh -= len(again)
            if may_repeat:
                counts.repeated += len(again)
            else:
                counts.copies += len(again)
                if tier is not Tier.GPU:
                    counts.elsewhere += len(again)
                more = self._more[tier]
                for name in again:
                    more[name] = more.get(name, 0) + 1
        if not fresh:
            return ()
        holder = self._holders[tier]
        if not holder.lanes:
            self._index.attach(self._slot, holder)
        done = self._index.store(holder, size, parent, keys)
        if done < len(keys):
            counts.refused += len(keys) - done
            names, keys = names[:done], keys[:done]
        counts.stored += fresh
        if tier is not Tier.GPU:
            counts.elsewhere += fresh
        for before in held.put(names, keys):
            # No removal would ever name it: it would be believed for as long as the worker lives.
            self._index.remove(holder, before)
        return names

    def grow(self, parent: ExternalBlockHash, name: ExternalBlockHash, token_ids: Sequence[int]) -> bool:
        """As `hold` for one block of `KEY_TOKENS` in GPU memory behind `parent`, which is held there too, in
        a fraction of the time; False, and nothing is done, if it is not."""
        shards = self._gpu_shards
        parent_key = shards[hash(parent) & SHARD_MASK].get(parent)
        if parent_key is None:
            return False
        shard, counts = shards[hash(name) & SHARD_MASK], self._counts
        if name in shard:
            counts.copies += 1
            more = self._more[Tier.GPU]
            more[name] = more.get(name, 0) + 1
            return True
        key = _hashed(_packed(*token_ids), parent_key)
        if self._index.store_one(self._gpu_holder, 1, parent_key, key):
            counts.stored += 1
            shard[name] = key
        else:
            counts.refused += 1
        return True

    def release(self, tier: Tier, name: ExternalBlockHash) -> bool:
        """One copy of it was removed; False if it was not known to be held."""
        more = self._more[tier]
        if name in more:
            more[name] -= 1
            if not more[name]:
                del more[name]
            return True
        key = self._held[tier].pop(name)
        if key is None:
            return False
        self._counts.removed += 1
        self._index.remove(self._holders[tier], key)
        self.remember(name, key)
        return True

    def name(self, tier: Tier, name: ExternalBlockHash, key: BlockKey) -> None:
        """A block that the index has already is held under this name."""
        self._held[tier].put((name,), (key,))
        self._counts.stored += 1

    def remember(self, name: ExternalBlockHash, key: BlockKey) -> None:
        """It is gone, but children of it may still be announced."""
        # Two generations: the older half goes at once.
        self._gone[name] = key
        if 2 * len(self._gone) > self._max_remembered:
            self._gone_before, self._gone = self._gone, {}

    def forget(self, tier: Tier) -> None:
        """Nothing is held there any more; takes a moment, `sweep` returns the memory."""
        self.generation += 1
        self._index.clear(self._holders[tier])
        self._garbage.append(self._held[tier])
        self._held[tier] = ShardedHashMap()
        self._gpu_shards = self._held[Tier.GPU].shards()
        self._more[tier] = {}

    def forget_all(self) -> None:
        """As if the stream had just begun."""
        for tier in Tier:
            self.forget(tier)
        self._gone, self._gone_before = {}, {}

    def detach(self) -> None:
        """Leave the index for good."""
        for holder in self._holders.values():
            self._index.detach(self._slot, holder)

    def sweep(self, steps: int) -> bool:
        """Return memory of what was forgotten, `steps` blocks of it; True while there is more."""
        while self._garbage and steps > 0:
            steps = self._garbage[-1].shrink(steps)
            if steps:
                self._garbage.pop()
        return bool(self._garbage) or self._index.sweep(steps)

    # Snapshots

    def dump(self) -> Iterator[Runs | Blocks | Copies]:
        """All that is held, in parts of about `CHUNK_BLOCKS`. Nothing may change until it is through,
        apart from the rest of the index; ended by a change of `generation`."""
        for tier in Tier:
            holder = self._holders[tier]
            for stride in holder.lanes:
                for shard in self._held[tier].shards():
                    rows = iter(shard.items())
                    while chunk := list(islice(rows, CHUNK_BLOCKS)):
                        here = [(name, key) for name, key in chunk if self._index.has(holder, stride, key)]
                        names, keys = [name for name, _ in here], [key for _, key in here]
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
                            yield Blocks(tier, stride, names, keys)
            if self._more[tier]:
                copies = list(self._more[tier].items())
                for start in range(0, len(copies), CHUNK_BLOCKS):
                    some = copies[start : start + CHUNK_BLOCKS]
                    yield Copies(tier, [name for name, _ in some], [more for _, more in some])

    def restore(self, part: Runs | Blocks | Copies) -> None:
        """Take in one part of a snapshot; all `Runs` come before any `Blocks`, so that the index has few
        runs and long ones."""
        holder = self._holders[part.tier]
        if isinstance(part, Copies):
            held = self._held[part.tier]
            more = self._more[part.tier]
            more.update((name, n) for name, n in zip(part.names, part.more, strict=True) if name in held)
            return
        if not holder.lanes:
            self._index.attach(self._slot, holder)
        if isinstance(part, Runs):
            for run in part.runs:
                self._index.store(holder, part.stride * KEY_TOKENS, None, run)
            return
        names, keys = part.names, part.keys
        for place, key in enumerate(keys):
            # Another worker's changes may have moved a run's start while the snapshot was taken.
            if not self._index.has(holder, part.stride, key) and not self._index.store(
                holder, part.stride * KEY_TOKENS, None, (key,)
            ):
                self._counts.refused += len(names) - place  # the index is full
                names, keys = names[:place], keys[:place]
                break
        self._held[part.tier].put(names, keys)
