"""One event stream's blocks: the translation from engine hashes to block keys, and the blocks that are held.

An engine hash is opaque. The ledger computes a block key from the tokens in the event and the key of the
parent, and keeps the hash while the worker holds the block. When in doubt the ledger believes less: a block
with an unknown parent is an orphan and does not count as held; an announcement that may be a repetition does
not count as another copy. The index may know less than the worker holds, never more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier, lookahead_seed, token_keys
from kvroute.events.groups import WHOLE_PREFIX, OtherGroups
from kvroute.events.holdings import (
    HeldBlocks,
    LedgerCounts,
    is_divisible,
    keys_of,
    pieces_of,
    root_seed,
    tier_of,
    without_lookahead,
)
from kvroute.events.orphans import OrphanBlocks, PendingConfirmations, ReportedPrompt
from kvroute.index.prefix_index import PrefixIndex
from kvroute.index.snapshot import GroupBlocks, Runs, SnapshotPiece
from kvroute.wire.vllm import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalBlockHash,
    KvEvent,
)

PIECE_BLOCKS: Final = 128
"""Blocks applied between two points where the caller may yield to the event loop."""

_REMOVAL_WEIGHT: Final = 4
"""The cost of a removal, in stored blocks."""

_EVENT_WEIGHT: Final = 2
"""The fixed cost of an event, in stored blocks."""

_CLEAR_WEIGHT: Final = 16
"""The cost of an event that empties the cache, in stored blocks."""

_NO_EXTRA_KEYS: Final[list[list[object] | None]] = [None]
"""`extra_keys` of an event with one block that has none."""

_MAX_HASHLESS: Final = 65_536
"""Blocks that may be held without a known hash."""


class Ledger:
    """The blocks that one worker (its slot in the index) holds according to its stream.

    Mutable: `apply`, `store`, `confirm`, `restore` and `drop`. `max_orphans` bounds the orphan blocks,
    `max_remembered` the hashes kept of released blocks, whose children may still be announced.
    """

    def __init__(
        self, index: PrefixIndex, slot: int, *, max_orphans: int = 100_000, max_remembered: int = 65_536
    ) -> None:
        self.counts = LedgerCounts()
        self.on_cleared: Callable[[], None] | None = None
        """Called when an event has cleared the whole cache of GPU memory."""
        self.lookahead = 0
        """Tokens that the worker's hashes cover after each block (EAGLE-style speculation). If not 0, the
        keys of the held blocks are those of `blocks.keys.lookahead_keys`."""
        self.forgotten = 0
        """Rises whenever a block without a known hash may have been removed: see `confirm`."""
        self.is_repairing = False
        """Whether lost blocks may be announced again. The owner changes it."""
        self.not_understood = ""
        """Why no hit can be computed from the kinds of KV cache that the events name; usually empty."""
        self._index = index
        self._held_blocks = HeldBlocks(index, slot, self.counts, max_remembered)
        self._others = OtherGroups(index, slot, self.counts, self._name_of)
        self._orphans = OrphanBlocks(max_orphans)
        self.orphan_hashes = self._orphans.hashes
        """Blocks with an unknown parent. Always the same mapping. For reading."""
        self._pending = PendingConfirmations()
        self._hashless: dict[BlockKey, None] = {}
        """Blocks that an answer showed to be held, but whose hashes were never received."""
        self._group: int | None = None
        self._block_tokens = 0
        self._closed = False
        self._root: tuple[BlockStored, bool] | None = None
        """The last event of the batch, if it began at the start of a prompt, and whether it may repeat."""

    @property
    def orphan_blocks(self) -> int:
        """The number of blocks with an unknown parent."""
        return len(self._orphans)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block of GPU memory; 0 before the first block."""
        return self._block_tokens

    @property
    def unit_tokens(self) -> int:
        """Tokens in the unit in which the engine stores blocks of all groups; 0 before the first block."""
        return max(self._block_tokens, self._others.unit)

    @property
    def generation(self) -> int:
        """Rises whenever a whole tier is forgotten; an unfinished `dump` is useless then."""
        return self._held_blocks.generation

    def held_blocks(self, tier: Tier) -> int:
        """The number of different blocks held in the tier."""
        return self._held_blocks.count(tier) + (len(self._hashless) if tier is Tier.GPU else 0)

    def held_keys(self, tier: Tier) -> Iterator[BlockKey]:
        """The keys of all blocks held in the tier. Takes time proportional to their number: for
        inspection."""
        yield from self._held_blocks.keys(tier)
        if tier is Tier.GPU:
            yield from self._hashless

    def indexed(self, tier: Tier) -> Iterator[BlockKey]:
        """The keys that the index has for the tier. Walks the whole index: for inspection."""
        return self._index.blocks_of(self._held_blocks.holder(tier))

    def reach(self, keys: Sequence[BlockKey]) -> int:
        """Leading tokens of the prompt with these keys that are held in GPU memory under known hashes.

        0.3 us a block.
        """
        size = self._block_tokens
        if not size:
            return 0
        stride, holder, blocks = size // KEY_TOKENS, self._held_blocks.holder(Tier.GPU), 0
        for key in keys[stride - 1 :: stride]:
            if key in self._hashless or not self._index.has(holder, stride, key):
                break
            blocks += 1
        return blocks * size

    def apply(self, batch: EventBatch, *, from_root: bool = False) -> Iterator[None]:
        """Apply one batch, in order. Yields after about every `PIECE_BLOCKS` blocks.

        At each yield the ledger describes some moment during the engine's step or before it. A caller that
        abandons the iterator has to call `drop`. `from_root`: the batch is a later part of an event that
        began at the start of a prompt (`wire.batch_split`).
        """
        # Releases that write arrays never repeat announcements (kv_cache_report_mode came with 0.32).
        may_repeat = batch.dialect != "array"
        if not from_root:
            self._root = None
        work, orphaned = 0, self.counts.orphaned
        for event in batch.events:
            if self._closed:
                return
            if isinstance(event, BlockStored):
                blocks = len(event.block_hashes)
                work += blocks + _EVENT_WEIGHT
                repeats = may_repeat and self._may_repeat(event, from_root)
                if blocks > PIECE_BLOCKS and is_divisible(event):
                    for piece in pieces_of(event, PIECE_BLOCKS):
                        self._stored(piece, repeats)
                        yield
                elif not self._try_append(event):
                    self._stored(event, repeats)
            elif isinstance(event, BlockRemoved):
                self._root = None
                hashes, limit = event.block_hashes, PIECE_BLOCKS // _REMOVAL_WEIGHT
                work += _REMOVAL_WEIGHT * len(hashes) + _EVENT_WEIGHT
                if len(hashes) <= limit:
                    certain = self._removed(event, hashes)
                else:
                    certain = True
                    for start in range(0, len(hashes), limit):
                        certain &= self._removed(event, hashes[start : start + limit])
                        yield
                while not certain and self._hashless:
                    self._drop_hashless(limit)
                    yield
            elif isinstance(event, AllBlocksCleared):
                self._cleared()
                work += _CLEAR_WEIGHT
            if work >= PIECE_BLOCKS:
                work = 0
                yield
        if self._pending.waiting:
            self._retry_pending(has_new_orphans=self.counts.orphaned > orphaned)

    def store(self, events: Sequence[KvEvent]) -> bool:
        """As `apply` for a small batch of the newest shape that only stores blocks, without an iterator.

        False, and no change, if the batch has any other event. Nearly all batches only store. A batch of one
        block takes 4.2 us instead of 4.7 us (docs/benchmarks.md).
        """
        for event in events:
            if type(event) is not BlockStored:
                return False
        if self._closed:
            return False
        orphaned, try_append = self.counts.orphaned, self._try_append
        self._root = None
        for event in cast("Sequence[BlockStored]", events):
            if not try_append(event):
                self._stored(event, self._may_repeat(event))
        if self._pending.waiting:
            self._retry_pending(has_new_orphans=self.counts.orphaned > orphaned)
        return True

    def confirm(
        self,
        keys: Sequence[BlockKey],
        token_ids: Sequence[int],
        cached_tokens: int,
        *,
        adapter: str | None = None,
        since: int | None = None,
    ) -> int:
        """An answer reported `cached_tokens` of its prompt: use it to place the orphan blocks on the prompt's
        path.

        Returns how many blocks count as held that did not before. The orphans are placed only if the request
        has computed a full block after its cached ones, and no other orphan has the tokens of that block: the
        parent hashes lead from that block back to the orphans. If that block has not been announced yet, the
        orphans are placed by one of the next batches that announces it.

        The blocks before the orphans are held too, but their hashes were never received. They count as held
        until the worker removes a block with an unknown hash. `since` is `forgotten` at the start of the
        answer; nothing happens if it has changed. Call this only while the map is not whole; it costs 0.5 us
        for each block of the prompt.
        """
        size = self._block_tokens
        if not size or self._closed or since not in (None, self.forgotten):
            return 0
        answer = ReportedPrompt(keys, token_ids, cached_tokens, adapter)
        number = cached_tokens // size
        if self._orphans.has_block(token_ids, size, number):
            return self._place_orphans(answer)
        if (number + 1) * size <= len(token_ids) and self.reach(keys) <= number * size:
            self._pending.add(answer)
        return 0

    def _retry_pending(self, *, has_new_orphans: bool) -> None:
        """A batch was applied: place the orphans of the answers that waited for it."""
        # The blocks before a block that was just stored are in the cache now, even if some block was
        # removed after the answer.
        answers, size = self._pending.tick(), self._block_tokens
        for answer in answers if has_new_orphans else ():
            if self._orphans.has_block(answer.token_ids, size, answer.cached_tokens // size):
                self._pending.drop(answer)
                self._place_orphans(answer)

    def _place_orphans(self, answer: ReportedPrompt) -> int:
        """Returns how many blocks count as held that did not before."""
        keys, token_ids, cached_tokens, adapter = answer
        size = self._block_tokens
        branch = self._orphans.branch(token_ids, size, cached_tokens // size, adapter)
        if branch is None:
            return 0
        stride, holder = size // KEY_TOKENS, self._held_blocks.holder(Tier.GPU)
        head = keys[stride - 1 : branch.start * stride : stride]
        if len(head) < branch.start:
            return 0
        missing = [key for key in head if not self._index.has(holder, stride, key)]
        if len(self._hashless) + len(missing) > _MAX_HASHLESS:
            return 0
        held_before = self.held_blocks(Tier.GPU)
        done = self._index.store(holder, size, None, head)
        self._hashless.update((key, None) for key in missing if self._index.has(holder, stride, key))
        if done == len(head):
            block_hash, key = branch.root.parent, head[-1]
            if key in self._hashless:
                del self._hashless[key]
                self._held_blocks.assign_hash(Tier.GPU, block_hash, key)
            else:
                self._held_blocks.remember(block_hash, key)
            self._place_children([block_hash])
        placed = self.held_blocks(Tier.GPU) - held_before
        self.counts.confirmed += placed
        return placed

    def drop(self) -> None:
        """Forget all blocks, in constant time; `sweep` returns the memory."""
        self._held_blocks.forget_all()
        self._orphans.clear()
        self._pending.clear()
        self._hashless = {}
        self.forgotten += 1
        self._group = None
        self._others.forget()
        self.not_understood = ""

    def close(self) -> None:
        """The stream has ended: forget all blocks and remove the worker from the index."""
        self._closed = True
        self.drop()
        self._held_blocks.detach()

    def sweep(self, steps: int = 1000) -> bool:
        """Return the memory of at most `steps` dropped blocks; True while there is more."""
        return self._held_blocks.sweep(steps)

    # Snapshots

    @property
    def group(self) -> int | None:
        """The group of a hybrid model whose blocks cover the whole prefix; None if unknown."""
        return self._group

    @property
    def is_all_placed(self) -> bool:
        """Does a snapshot contain everything that the ledger knows?"""
        return not self._hashless and not len(self._orphans)

    def dump(self) -> Iterator[SnapshotPiece]:
        """Yield all blocks that are held under known hashes, in small parts.

        The caller applies no event until the iterator ends, and abandons it when `generation` changes.
        """
        hashless = self._hashless
        for piece in self._held_blocks.dump():
            if hashless and isinstance(piece, Runs):
                runs = [run for run in piece.runs if not any(key in hashless for key in run)]
                piece = Runs(piece.tier, piece.stride, runs)
            yield piece
        yield from self._others.dump()

    def begin_restore(self, group: int | None, block_tokens: int, lookahead: int = 0) -> None:
        """Start to restore a snapshot: calls of `restore` follow."""
        self._group, self._block_tokens, self.lookahead = group, block_tokens, lookahead
        self._others.whole_tokens = block_tokens

    def restore(self, piece: SnapshotPiece) -> None:
        """Restore one part of a snapshot; the parts come in the order of `dump`."""
        if self._closed:
            return
        if isinstance(piece, GroupBlocks):
            self._others.restore(piece)
        else:
            self._held_blocks.restore(piece)

    # Events

    def _try_append(self, event: BlockStored) -> bool:
        """As `_stored`, for one plain block after a held one. False, and no change, for every other event.

        Nearly all events are of this kind: decoding announces one block after another. 2.7 us a block with
        the decoding of its message instead of 7.4 us (docs/benchmarks.md).
        """
        parent, hashes, tokens = event.parent_block_hash, event.block_hashes, event.token_ids
        if parent is None or len(hashes) != 1 or len(tokens) != KEY_TOKENS or event.block_size != KEY_TOKENS:
            return False
        medium, extra, group = event.medium, event.extra_keys, event.group_idx
        if (medium is not None and medium != "GPU") or (extra is not None and extra != _NO_EXTRA_KEYS):
            return False
        if (group is not None and group != self._group) or self._hashless or self.orphan_hashes:
            return False
        if group is not None and self._others.unnamed:
            return False
        if event.lookahead_token_ids is not None:
            return False
        return self._held_blocks.append_one(parent, hashes[0], tokens)

    def _stored(self, event: BlockStored, repeats: bool) -> None:
        hashes = event.block_hashes
        tier = tier_of(event.medium)
        if tier is None:
            self.counts.unusable += len(hashes)
            return
        if event.group_idx is not None and not self._speaks_for_prefix(event):
            if tier is Tier.GPU:
                self._others.stored(event, repeats, self.is_repairing)
                self._judge_kinds()
            else:
                self.counts.passed_over += len(hashes)
            return
        head: Sequence[int] = ()
        if event.lookahead_token_ids is not None:
            plain = without_lookahead(event)
            if plain is None:
                self.counts.unusable += len(hashes)
                return
            event, head, self.lookahead = plain
        tokens, size = event.token_ids, event.block_size
        if not tokens:
            self._stored_by_hash(hashes, tier)
            return
        if size <= 0 or size % KEY_TOKENS or size * len(hashes) != len(tokens):
            self.counts.unusable += len(hashes)
            return
        if tier is Tier.GPU and size != self._block_tokens:
            if event.group_idx is not None and self._block_tokens:
                # vllm#58119: the end of a prompt within a block, whose place no event tells.
                self._others.has_parts = True
                self._judge_kinds()
                if size < self._block_tokens:
                    self.counts.passed_over += len(hashes)
                    return
            self._block_tokens = self._others.whole_tokens = size
        parent = event.parent_block_hash
        if parent is None:
            parent_key, seed = None, root_seed(event)
            if head:
                seed = lookahead_seed(head, seed)
        else:
            parent_key = self._held_blocks.key_of(parent, tier)
            if parent_key is None:
                self._keep_orphans(event, tier)
                return
            seed = parent_key
        keys = keys_of(event, seed)
        self._placed(self._held_blocks.hold(tier, size, parent_key, hashes, keys, may_repeat=repeats), keys)

    def _may_repeat(self, event: BlockStored, from_root: bool = False) -> bool:
        """Whether the event may announce blocks again that the worker has announced before.

        vLLM announces the blocks of a hit again for requests that ask for it (0.32,
        `BlockPool.emit_cached_block_events`): from the start of the prompt to the end of the hit, once for
        each group. So where this ledger knows all blocks and finds no such hit, the blocks are new copies.
        Hybrid models have many: if one group has lost its blocks, the engine computes the whole prompt and
        stores the blocks of the others twice.
        """
        last_root = self._root
        if event.parent_block_hash is not None:
            if from_root:
                return last_root is None or last_root[1]
            self._root = None
            return False
        if self.is_repairing or self._hashless or self.orphan_hashes or self.counts.refused:
            return True
        if last_root is not None and _begin_alike(last_root[0], event):
            # The next group of the same request: by now the ledger has the blocks of the groups before it.
            may_repeat = last_root[1]
        else:
            may_repeat = self._is_hit(event)
        self._root = event, may_repeat
        return may_repeat

    def _is_hit(self, event: BlockStored) -> bool:
        """Could a request find all tokens of the event, which begins at the start of a prompt?

        True if that is unknown.
        """
        if tier_of(event.medium) is not Tier.GPU:
            return True
        tokens = event.token_ids
        if not len(self._others):
            holds = self._held_blocks.holds
            for block_hash in event.block_hashes:  # noqa: SIM110 - this returns at the first one
                if not holds(Tier.GPU, block_hash):
                    return False
            return True
        extra = event.extra_keys
        if self.lookahead or self.not_understood or (extra and any(len(entry or ()) > 1 for entry in extra)):
            return True
        keys = token_keys(tokens, root_seed(event))
        return self.reach(keys) >= len(tokens) and self._others.usable(keys, len(tokens)) == len(tokens)

    def _stored_by_hash(self, hashes: Sequence[ExternalBlockHash], tier: Tier) -> None:
        """Blocks without tokens, which offloading connectors write: their hashes are known from another
        tier."""
        for block_hash in hashes:
            key = self._held_blocks.key_of(block_hash, tier)
            if key is None or not self._block_tokens:
                self.counts.unusable += 1
            else:
                self._placed(
                    self._held_blocks.hold(tier, self._block_tokens, None, (block_hash,), (key,)), (key,)
                )

    def _placed(self, hashes: Sequence[ExternalBlockHash], keys: Sequence[BlockKey]) -> None:
        """These blocks are held now: place the orphans under them, and name those of other groups."""
        if self._others.unnamed:
            self._others.named_now(hashes, keys)
        if self._hashless:
            for _, key in zip(hashes, keys, strict=False):
                self._hashless.pop(key, None)
        if len(self._orphans) and hashes:
            for block_hash in hashes:
                self._orphans.discard(block_hash)
            self._place_children(list(hashes))

    def _removed(self, event: BlockRemoved, hashes: Sequence[ExternalBlockHash]) -> bool:
        """Apply a removal. False if a removed block may be any of the held GPU blocks without a known
        hash."""
        tier = tier_of(event.medium)
        if tier is None:
            self.counts.unusable += len(hashes)
            return True
        group = event.group_idx
        if group is not None and group != (self._group or 0):
            if tier is Tier.GPU:
                self._others.removed(group, hashes, _remaining_copies(event, hashes))
            else:
                self.counts.passed_over += len(hashes)
            return True
        if event.remaining_copy_counts is not None:
            hashes = self._without_copies(tier, hashes, _remaining_copies(event, hashes))
        release, certain = self._held_blocks.release, True
        for block_hash in hashes:
            if not release(tier, block_hash) and not self._orphans.discard(block_hash):
                self.counts.unknown_removed += 1
                if tier is Tier.GPU:
                    certain = False
        if not certain:
            self.forgotten += 1
        return certain

    def clear_gpu(self) -> None:
        """As an event that clears the whole cache: it is known to be empty, but no event says so yet."""
        # vLLM publishes the event with its next step, so an idle engine publishes none.
        self._cleared()

    def _without_copies(
        self, tier: Tier, hashes: Sequence[ExternalBlockHash], remaining_copies: Sequence[int] | None
    ) -> Sequence[ExternalBlockHash]:
        """Note how many copies of each block are left; returns the blocks without one."""
        if remaining_copies is None:
            return hashes
        for block_hash, copies in zip(hashes, remaining_copies, strict=True):
            self._held_blocks.set_copies(tier, block_hash, copies)
        return [block_hash for block_hash, copies in zip(hashes, remaining_copies, strict=True) if not copies]

    def _cleared(self) -> None:
        """vLLM emptied its own prefix cache. LMCache keeps its blocks and announces their removal itself."""
        self.counts.cleared += 1
        self.forgotten += 1
        self._held_blocks.forget(Tier.GPU)
        self._others.clear()
        self._hashless = {}
        self._orphans.clear(Tier.GPU)
        self._pending.clear()
        if self.on_cleared is not None:
            self.on_cleared()

    def _drop_hashless(self, blocks: int) -> None:
        """Forget at most `blocks` blocks without a known hash, the last ones first."""
        holder = self._held_blocks.holder(Tier.GPU)
        for _ in range(min(blocks, len(self._hashless))):
            key, _ = self._hashless.popitem()
            self._index.remove(holder, key)

    def _speaks_for_prefix(self, event: BlockStored) -> bool:
        """Does this event's group of layers cover every token? A hybrid model announces each block once per
        group."""
        group, kind = event.group_idx, event.kv_cache_spec_kind
        if self._group is None:
            if kind is None:
                return group == 0
            if kind not in WHOLE_PREFIX:
                return False
            self._group = group
            self._judge_kinds()
        return group == self._group

    def _name_of(self, block_hash: ExternalBlockHash) -> BlockKey | None:
        return self._held_blocks.key_of(block_hash, Tier.GPU)

    def _judge_kinds(self) -> None:
        """Set `not_understood`."""
        others = self._others
        unclear = ", ".join(sorted(set(others.kinds.values())))
        if "no kind" in unclear:
            self.not_understood = "several groups without a kind (vLLM 0.20 and 0.21)"
        elif others.has_parts:
            kinds = ", ".join(["whole", *others.named])
            self.not_understood = f"hits end within blocks, whose places no event tells ({kinds})"
        elif self._group is None and (unclear or len(others)):
            named = ", ".join([*others.named, *([unclear] if unclear else [])])
            self.not_understood = f"no group covers the whole prompt, only {named}"
        else:
            self.not_understood = ""

    # Orphan blocks

    def _keep_orphans(self, event: BlockStored, tier: Tier) -> None:
        hashes = event.block_hashes
        if any(
            block_hash in self._orphans or self._held_blocks.holds(tier, block_hash) for block_hash in hashes
        ):
            return  # a copy of a known block: rather believe less than more
        self.counts.orphaned += len(hashes)
        if tier is not Tier.GPU:
            self.counts.elsewhere += len(hashes)
        if not self._orphans.add(event, tier):
            self.counts.refused += len(hashes)

    def _place_children(self, hashes: list[ExternalBlockHash]) -> None:
        """These hashes are known now: place the orphans under them, and the orphans under those."""
        held_blocks = self._held_blocks
        while hashes:
            for fragment in self._orphans.take(hashes.pop()):
                event, tier = fragment.event, fragment.tier
                parent_key = held_blocks.key_of(fragment.parent, tier)
                if parent_key is None:
                    continue
                for block_hash, key in zip(event.block_hashes, keys_of(event, parent_key), strict=True):
                    if block_hash in fragment.removed:
                        held_blocks.remember(block_hash, key)
                    elif held_blocks.hold(
                        tier, event.block_size, parent_key, (block_hash,), (key,), may_repeat=True
                    ):
                        self._hashless.pop(key, None)
                    parent_key = key
                hashes.extend(event.block_hashes)


def _begin_alike(one: BlockStored, other: BlockStored) -> bool:
    """Are these events of different groups for the same prompt, as far as both go?"""
    both = min(len(one.token_ids), len(other.token_ids))
    return one.group_idx != other.group_idx and one.token_ids[:both] == other.token_ids[:both]


def _remaining_copies(event: BlockRemoved, hashes: Sequence[ExternalBlockHash]) -> Sequence[int] | None:
    """The remaining copies of `hashes`, which are some of the event's; None if the event does not say."""
    remaining_copies = event.remaining_copy_counts
    if (
        remaining_copies is None
        or len(remaining_copies) != len(event.block_hashes)
        or min(remaining_copies, default=0) < 0
    ):
        return None
    if len(hashes) == len(remaining_copies):
        return remaining_copies
    counts = dict(zip(event.block_hashes, remaining_copies, strict=True))
    return [counts[block_hash] for block_hash in hashes]
