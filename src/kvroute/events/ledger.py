"""One event stream's blocks: from the engine's own names to ours, and how many copies of each there are.

An engine's hashes are opaque. Each block is named by our key, computed from the tokens that the event
brings and the key of its parent, and the hash is remembered as long as the block is held. Unknown beats
wrong: a block whose parent is not known is set aside and counts as not held; an announcement that may be
a repetition is not counted as one more copy. What the index believes may be less than what the worker
holds, never more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier
from kvroute.events.event_keys import is_divisible, keys_of, pieces_of, root_seed, tier_of
from kvroute.events.holdings import HeldBlocks, LedgerCounts
from kvroute.events.orphans import OrphanBlocks, PendingConfirmations, ReportedPrompt
from kvroute.index.prefix_index import PrefixIndex
from kvroute.index.snapshot import Part, Runs
from kvroute.wire.vllm import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalBlockHash,
    KvEvent,
)

PIECE_BLOCKS: Final = 128
"""Blocks taken in between two chances to do something else."""

_REMOVAL_WEIGHT: Final = 4
"""What a removal costs, in stored blocks."""

_EVENT_WEIGHT: Final = 2
"""What any event costs besides."""

_NOTHING: Final[list[list[object] | None]] = [None]
"""Extra keys of one block that has none."""

_MAX_NAMELESS: Final = 65_536

_WHOLE_PREFIX: Final = frozenset({"full_attention", "mla_attention"})
"""Kinds of KV cache whose blocks cover every token (vLLM 0.32, v1/kv_cache_interface.py)."""


class Ledger:
    """What one stream has told about one slot. Mutable: changes by `apply`, `confirm`, `restore` and `drop`.

    `max_aside` bounds the blocks set aside, `max_remembered` the names kept of blocks that are gone (their
    children may still be announced).
    """

    def __init__(
        self, index: PrefixIndex, slot: int, *, max_aside: int = 100_000, max_remembered: int = 65_536
    ) -> None:
        self.counts = LedgerCounts()
        self.forgotten = 0
        """Rises whenever the worker may have lost any block whose name is not known: see `confirm`."""
        self._index = index
        self._holdings = HeldBlocks(index, slot, self.counts, max_remembered)
        self._aside = OrphanBlocks(max_aside)
        self.aside_names = self._aside.names
        """Blocks that the worker holds and we cannot place. Always the same mapping; to be read only."""
        self._early = PendingConfirmations()
        self._nameless: dict[BlockKey, None] = {}
        """Held as a request has shown, but under names that were never heard."""
        self._group: int | None = None
        self._block_tokens = 0
        self._closed = False

    @property
    def aside_blocks(self) -> int:
        """Blocks that the worker holds and we cannot place."""
        return len(self._aside)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block of GPU memory; 0 as long as none was announced."""
        return self._block_tokens

    @property
    def generation(self) -> int:
        """Rises whenever much is forgotten at once: then a `dump` under way is worth nothing."""
        return self._holdings.generation

    def held_blocks(self, tier: Tier) -> int:
        """Different blocks held there."""
        return self._holdings.count(tier) + (len(self._nameless) if tier is Tier.GPU else 0)

    def held(self, tier: Tier) -> Iterator[BlockKey]:
        """The keys of all blocks held there. Walks them: for inspection."""
        yield from self._holdings.keys(tier)
        if tier is Tier.GPU:
            yield from self._nameless

    def believed(self, tier: Tier) -> Iterator[BlockKey]:
        """The same as the index has it. Walks the whole index: for inspection."""
        return self._index.blocks_of(self._holdings.holder(tier))

    def reach(self, keys: Sequence[BlockKey]) -> int:
        """Tokens of the prompt with these keys that are held in GPU memory by name, from its start on.
        0.3 us a block."""
        size = self._block_tokens
        if not size:
            return 0
        stride, holder, blocks = size // KEY_TOKENS, self._holdings.holder(Tier.GPU), 0
        for key in keys[stride - 1 :: stride]:
            if key in self._nameless or not self._index.has(holder, stride, key):
                break
            blocks += 1
        return blocks * size

    def apply(self, batch: EventBatch, *, from_root: bool = False) -> Iterator[None]:
        """Take in one batch, in order. Yields after every `PIECE_BLOCKS` or so, when what is believed is
        true of some moment of the engine step or before it; abandoning the iterator leaves it there, and
        then only `drop` makes it right. `from_root`: the batch is a later part of an announcement that
        began with a prompt (`wire.splitting`)."""
        # Releases that write arrays cannot repeat announcements (kv_cache_report_mode is of 0.32).
        may_repeat = batch.dialect != "array"
        work, set_aside = 0, self.counts.set_aside
        for event in batch.events:
            if self._closed:
                return
            if isinstance(event, BlockStored):
                blocks = len(event.block_hashes)
                work += blocks + _EVENT_WEIGHT
                repeats = may_repeat and (from_root or event.parent_block_hash is None)
                if blocks > PIECE_BLOCKS and is_divisible(event):
                    for piece in pieces_of(event, PIECE_BLOCKS):
                        self._stored(piece, repeats)
                        yield
                elif not self._grown(event):
                    self._stored(event, repeats)
            elif isinstance(event, BlockRemoved):
                names, some = event.block_hashes, PIECE_BLOCKS // _REMOVAL_WEIGHT
                work += _REMOVAL_WEIGHT * len(names) + _EVENT_WEIGHT
                if len(names) <= some:
                    certain = self._removed(event, names)
                else:
                    certain = True
                    for start in range(0, len(names), some):
                        certain &= self._removed(event, names[start : start + some])
                        yield
                while not certain and self._nameless:
                    self._doubt_nameless(some)
                    yield
            elif isinstance(event, AllBlocksCleared):
                self._cleared()
            if work >= PIECE_BLOCKS:
                work = 0
                yield
        if self._early.kept:
            self._hear_of_early(new_aside=self.counts.set_aside > set_aside)

    def store(self, events: Sequence[KvEvent]) -> bool:
        """What `apply` does with a small batch of the newest shape that only stores, as nearly all do, at
        once; False, and nothing is done, if there is anything else in it."""
        for event in events:
            if type(event) is not BlockStored:
                return False
        if self._closed:
            return False
        set_aside, grown = self.counts.set_aside, self._grown
        for event in cast("Sequence[BlockStored]", events):
            if not grown(event):
                self._stored(event, event.parent_block_hash is None)
        if self._early.kept:
            self._hear_of_early(new_aside=self.counts.set_aside > set_aside)
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
        """A request of this worker reported `cached_tokens` of its prompt: place the blocks set aside that
        it runs through; returns how many blocks are believed that were not before.

        They are placed only if the request has computed a full block behind its cached ones, so that the
        parents' names lead from that block back to them, and no other block aside has the same tokens. If
        that block has not been announced yet, they are placed when it is, by one of the next batches.
        What lies before them is then held as well, under names that we have not heard: it is believed until
        a block is removed that could be one of these. `since` is `forgotten` as of when the answer began;
        if it has changed since, nothing is done. To be called where something is not known of the worker;
        costs 0.5 us for each block of the prompt.
        """
        size = self._block_tokens
        if not size or self._closed or since not in (None, self.forgotten):
            return 0
        answer = ReportedPrompt(keys, token_ids, cached_tokens, adapter)
        number = cached_tokens // size
        if self._aside.has_block(token_ids, size, number):
            return self._place_by(answer)
        if (number + 1) * size <= len(token_ids) and self.reach(keys) <= number * size:
            self._early.add(answer)
        return 0

    def _hear_of_early(self, *, new_aside: bool) -> None:
        """A batch was taken in. What it has stored has its beginning in the cache now, whatever was removed
        since the answer."""
        answers, size = self._early.tick(), self._block_tokens
        for answer in answers if new_aside else ():
            if self._aside.has_block(answer.token_ids, size, answer.cached_tokens // size):
                self._early.drop(answer)
                self._place_by(answer)

    def _place_by(self, answer: ReportedPrompt) -> int:
        """How many blocks are believed by this answer that were not before."""
        keys, token_ids, cached_tokens, adapter = answer
        size = self._block_tokens
        branch = self._aside.branch(token_ids, size, cached_tokens // size, adapter)
        if branch is None:
            return 0
        stride, holder = size // KEY_TOKENS, self._holdings.holder(Tier.GPU)
        head = keys[stride - 1 : branch.start * stride : stride]
        if len(head) < branch.start:
            return 0
        missing = [key for key in head if not self._index.has(holder, stride, key)]
        if len(self._nameless) + len(missing) > _MAX_NAMELESS:
            return 0
        before = self.held_blocks(Tier.GPU)
        done = self._index.store(holder, size, None, head)
        self._nameless.update((key, None) for key in missing if self._index.has(holder, stride, key))
        if done == len(head):
            name, key = branch.root.parent, head[-1]
            if key in self._nameless:
                del self._nameless[key]
                self._holdings.name(Tier.GPU, name, key)
            else:
                self._holdings.remember(name, key)
            self._place_children([name])
        placed = self.held_blocks(Tier.GPU) - before
        self.counts.confirmed += placed
        return placed

    def drop(self) -> None:
        """Believe nothing any more, at once; `sweep` returns the memory."""
        self._holdings.forget_all()
        self._aside.clear()
        self._early.clear()
        self._nameless = {}
        self.forgotten += 1
        self._group = None

    def close(self) -> None:
        """The stream has ended: drop all and leave the index for good."""
        self._closed = True
        self.drop()
        self._holdings.detach()

    def sweep(self, steps: int = 1000) -> bool:
        """Return memory of what was dropped, `steps` blocks of it; True while there is more."""
        return self._holdings.sweep(steps)

    # Snapshots

    @property
    def group(self) -> int | None:
        """The group of a hybrid model that speaks for the prefix, if it has shown."""
        return self._group

    @property
    def is_all_placed(self) -> bool:
        """A snapshot would say all that is known."""
        return not self._nameless and not len(self._aside)

    def dump(self) -> Iterator[Part]:
        """All that is held by name, in small parts. Nothing may be applied until it is through; worth
        nothing if `generation` changes meanwhile, and not to be continued then."""
        nameless = self._nameless
        for part in self._holdings.dump():
            if nameless and isinstance(part, Runs):
                runs = [run for run in part.runs if not any(key in nameless for key in run)]
                part = Runs(part.tier, part.stride, runs)
            yield part

    def begin_restore(self, group: int | None, block_tokens: int) -> None:
        """The parts of a snapshot follow."""
        self._group, self._block_tokens = group, block_tokens

    def restore(self, part: Part) -> None:
        """Take in one part of a snapshot, in the order of their kinds."""
        if not self._closed:
            self._holdings.restore(part)

    # Events

    def _grown(self, event: BlockStored) -> bool:
        """What decoding announces, one block behind another, and nearly all events are: as `_stored`, in
        half the time. False, and nothing is done, if this is not of that kind."""
        parent, names, tokens = event.parent_block_hash, event.block_hashes, event.token_ids
        if parent is None or len(names) != 1 or len(tokens) != KEY_TOKENS or event.block_size != KEY_TOKENS:
            return False
        medium, extra, group = event.medium, event.extra_keys, event.group_idx
        if (medium is not None and medium != "GPU") or (extra is not None and extra != _NOTHING):
            return False
        if (group is not None and group != self._group) or self._nameless or self.aside_names:
            return False
        return self._holdings.grow(parent, names[0], tokens)

    def _stored(self, event: BlockStored, repeats: bool) -> None:
        hashes = event.block_hashes
        tier = tier_of(event.medium)
        if tier is None:
            self.counts.unusable += len(hashes)
            return
        if event.group_idx is not None and not self._speaks_for_prefix(event):
            self.counts.passed_over += len(hashes)
            return
        tokens, size = event.token_ids, event.block_size
        if not tokens:
            self._stored_by_name(hashes, tier)
            return
        if size <= 0 or size % KEY_TOKENS or size * len(hashes) != len(tokens):
            self.counts.unusable += len(hashes)
            return
        if tier is Tier.GPU:
            self._block_tokens = size
        parent = event.parent_block_hash
        if parent is None:
            parent_key, seed = None, root_seed(event)
        else:
            parent_key = self._holdings.key_of(parent, tier)
            if parent_key is None:
                self._set_aside(event, tier)
                return
            seed = parent_key
        keys = keys_of(event, seed)
        self._placed(self._holdings.hold(tier, size, parent_key, hashes, keys, may_repeat=repeats), keys)

    def _stored_by_name(self, hashes: Sequence[ExternalBlockHash], tier: Tier) -> None:
        """Placeholders of offloading connectors: blocks that another tier has named before."""
        for name in hashes:
            key = self._holdings.key_of(name, tier)
            if key is None or not self._block_tokens:
                self.counts.unusable += 1
            else:
                self._placed(self._holdings.hold(tier, self._block_tokens, None, (name,), (key,)), (key,))

    def _placed(self, names: Sequence[ExternalBlockHash], keys: Sequence[BlockKey]) -> None:
        """`names` are held now, by these keys."""
        if self._nameless:
            for _, key in zip(names, keys, strict=False):
                self._nameless.pop(key, None)
        if len(self._aside) and names:
            for name in names:
                self._aside.discard(name)
            self._place_children(list(names))

    def _removed(self, event: BlockRemoved, names: Sequence[ExternalBlockHash]) -> bool:
        """False if one of them may be any block of GPU memory."""
        tier = tier_of(event.medium)
        if tier is None:
            self.counts.unusable += len(names)
            return True
        group = event.group_idx
        if group is not None and group != (self._group or 0):
            self.counts.passed_over += len(names)
            return True
        release, certain = self._holdings.release, True
        for name in names:
            if not release(tier, name) and not self._aside.discard(name):
                self.counts.unknown_removed += 1
                if tier is Tier.GPU:
                    certain = False
        if not certain:
            self.forgotten += 1
        return certain

    def _cleared(self) -> None:
        """vLLM emptied its own prefix cache. LMCache's memory stays as it is, and withdraws its blocks
        itself."""
        self.counts.cleared += 1
        self.forgotten += 1
        self._holdings.forget(Tier.GPU)
        self._nameless = {}
        self._aside.clear(Tier.GPU)
        self._early.clear()

    def _doubt_nameless(self, blocks: int) -> None:
        """Believe `blocks` of them no longer, the last first."""
        holder = self._holdings.holder(Tier.GPU)
        for _ in range(min(blocks, len(self._nameless))):
            key, _ = self._nameless.popitem()
            self._index.remove(holder, key)

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
        hashes = event.block_hashes
        if any(name in self._aside or self._holdings.holds(tier, name) for name in hashes):
            return  # a copy of what is known or aside already: less is believed, not more
        self.counts.set_aside += len(hashes)
        if tier is not Tier.GPU:
            self.counts.elsewhere += len(hashes)
        if not self._aside.add(event, tier):
            self.counts.refused += len(hashes)

    def _place_children(self, names: list[ExternalBlockHash]) -> None:
        """`names` are known now: so are the blocks that wait for them, and those that wait for these."""
        holdings = self._holdings
        while names:
            for fragment in self._aside.take(names.pop()):
                event, tier = fragment.event, fragment.tier
                parent_key = holdings.key_of(fragment.parent, tier)
                if parent_key is None:
                    continue
                for name, key in zip(event.block_hashes, keys_of(event, parent_key), strict=True):
                    if name in fragment.gone:
                        holdings.remember(name, key)
                    elif holdings.hold(tier, event.block_size, parent_key, (name,), (key,), may_repeat=True):
                        self._nameless.pop(key, None)
                    parent_key = key
                names.extend(event.block_hashes)
