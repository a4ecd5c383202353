"""Blocks that a worker announced under an unknown parent. They count as not held until they find their place.

An answer that reports `cached_tokens` can place them: `OrphanBlocks.branch`, `PendingConfirmations`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvroute.blocks.keys import BlockKey, Tier, token_keys
from kvroute.wire.vllm import BlockStored, ExternalBlockHash


@dataclass(slots=True, eq=False)
class Fragment:
    """Consecutive orphan blocks, as announced in one event. Mutable: `removed` grows."""

    event: BlockStored
    tier: Tier
    removed: set[ExternalBlockHash] = field(default_factory=set)

    @property
    def parent(self) -> ExternalBlockHash:
        parent = self.event.parent_block_hash
        assert parent is not None  # the start of a prompt needs no parent
        return parent


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Consecutive orphan blocks on the path of a prompt. `start` is the number of the first one in the
    prompt."""

    root: Fragment
    start: int


class OrphanBlocks:
    """The orphan blocks of one stream, at most `max_blocks`. Mutable: `add`, `discard`, `take` and `clear`.

    `len` is the number of orphan blocks that the worker still holds.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._by_parent: dict[ExternalBlockHash, list[Fragment]] = {}
        self.hashes: dict[ExternalBlockHash, Fragment] = {}
        """All orphan blocks. Always the same dict. For reading."""
        self._by_tokens: dict[int, dict[ExternalBlockHash, Fragment]] = {}
        """GPU blocks by a digest of their own tokens, without the tokens before them."""

    def __len__(self) -> int:
        return len(self.hashes)

    def __contains__(self, block_hash: ExternalBlockHash) -> bool:
        return block_hash in self.hashes

    def add(self, event: BlockStored, tier: Tier) -> bool:
        """Keep the event's blocks; False if there is no room."""
        hashes = event.block_hashes
        if len(self.hashes) + len(hashes) > self._max_blocks:
            return False
        fragment = Fragment(event, tier)
        self._by_parent.setdefault(fragment.parent, []).append(fragment)
        self.hashes.update(dict.fromkeys(hashes, fragment))
        if tier is Tier.GPU:
            for block_hash, content in zip(hashes, _contents(event), strict=True):
                self._by_tokens.setdefault(content, {})[block_hash] = fragment
        return True

    def discard(self, block_hash: ExternalBlockHash) -> bool:
        """The worker removed this block, or the block found its place; False if it is not an orphan."""
        fragment = self.hashes.pop(block_hash, None)
        if fragment is None:
            return False
        fragment.removed.add(block_hash)
        if len(fragment.removed) == len(fragment.event.block_hashes):
            siblings = self._by_parent.get(fragment.parent, [])
            if fragment in siblings:
                siblings.remove(fragment)
                if not siblings:
                    del self._by_parent[fragment.parent]
            self._forget_contents(fragment)
        return True

    def take(self, parent: ExternalBlockHash) -> list[Fragment]:
        """Remove and return the fragments under this parent."""
        fragments = self._by_parent.pop(parent, [])
        for fragment in fragments:
            for block_hash in fragment.event.block_hashes:
                self.hashes.pop(block_hash, None)
            self._forget_contents(fragment)
        return fragments

    def clear(self, tier: Tier | None = None) -> None:
        """Forget all orphan blocks, or those of one tier."""
        if tier is None or not self.hashes:
            self.hashes.clear()
            self._by_parent, self._by_tokens = {}, {}
            return
        for fragment in [fragment for fragment in self.fragments() if fragment.tier is tier]:
            for block_hash in fragment.event.block_hashes:
                self.discard(block_hash)

    def fragments(self) -> Iterator[Fragment]:
        """All fragments, oldest first under each parent."""
        for fragments in self._by_parent.values():
            yield from fragments

    def has_block(self, token_ids: Sequence[int], size: int, number: int) -> bool:
        """Does any orphan block have the tokens of the prompt's block `number` (blocks of `size` tokens)?"""
        wanted = token_ids[number * size : (number + 1) * size] if self._by_tokens else ()
        return len(wanted) == size and token_keys(wanted, 0)[-1] in self._by_tokens

    def branch(
        self, token_ids: Sequence[int], size: int, number: int, adapter: str | None = None
    ) -> Branch | None:
        """The orphan blocks on the path of a prompt, up to and with its block `number` (blocks of `size`
        tokens).

        None if they are ambiguous: exactly one orphan block must have the tokens of block `number`, and all
        orphan blocks that lead to it must agree with the prompt and its LoRA adapter.
        """
        wanted = token_ids[number * size : (number + 1) * size]
        if len(wanted) < size:
            return None
        fragments = self._by_tokens.get(token_keys(wanted, 0)[-1], {})
        if len(fragments) != 1:
            return None
        ((block_hash, fragment),) = fragments.items()
        index = fragment.event.block_hashes.index(block_hash)
        while True:
            event = fragment.event
            start = number - index
            if start < 1 or event.block_size != size or not _is_plain(event, adapter):
                return None
            if list(event.token_ids[: (index + 1) * size]) != list(
                token_ids[start * size : (number + 1) * size]
            ):
                return None
            parent_fragment = self.hashes.get(fragment.parent)
            if parent_fragment is None:
                return Branch(fragment, start)
            index = parent_fragment.event.block_hashes.index(fragment.parent)
            number, fragment = start - 1, parent_fragment

    def _forget_contents(self, fragment: Fragment) -> None:
        if fragment.tier is not Tier.GPU:
            return
        for block_hash, content in zip(fragment.event.block_hashes, _contents(fragment.event), strict=True):
            hashes = self._by_tokens.get(content)
            if hashes is not None and hashes.get(block_hash) is fragment:
                del hashes[block_hash]
                if not hashes:
                    del self._by_tokens[content]


def _contents(event: BlockStored) -> Iterator[int]:
    size = event.block_size
    for start in range(0, len(event.token_ids), size):
        yield token_keys(event.token_ids[start : start + size], 0)[-1]


def _is_plain(event: BlockStored, adapter: str | None) -> bool:
    """Is a block of the event known by its token ids and this adapter alone?"""
    # With images or embeddings, blocks with equal token ids may differ.
    if event.lora_name != adapter or (event.lora_id is not None and event.lora_name is None):
        return False
    return not any(entry and entry != [adapter] for entry in event.extra_keys or ())


_ANSWERS: Final = 16
"""Answers that wait at the same time; the oldest is dropped for a newer one."""
_BATCHES: Final = 16
"""Batches that an answer waits for. An engine publishes the events of a step before it returns the tokens of
that step (vLLM 0.32), so an event that the answer needs is only a few batches behind."""


class ReportedPrompt(NamedTuple):
    """A prompt whose `cached_tokens` a worker reported; `keys` are its `blocks.keys.prompt_keys`."""

    keys: Sequence[BlockKey]
    token_ids: Sequence[int]
    cached_tokens: int
    adapter: str | None


@dataclass(slots=True, eq=False)
class _Waiting:
    answer: ReportedPrompt
    batches: int = _BATCHES


class PendingConfirmations:
    """Reported prompts that wait for a late event: the newest ones, each for a few batches.

    Mutable: `add`, `tick`, `drop` and `clear`. Keeps the objects that it is given, without copies.
    """

    def __init__(self) -> None:
        self.waiting: deque[_Waiting] = deque(maxlen=_ANSWERS)
        """For reading: empty while no answer waits."""

    def add(self, answer: ReportedPrompt) -> None:
        self.waiting.append(_Waiting(answer))

    def tick(self) -> list[ReportedPrompt]:
        """A batch was applied. Returns the answers that may have waited for that batch."""
        answers = [pending.answer for pending in self.waiting]
        for pending in self.waiting:
            pending.batches -= 1
        self.waiting = deque((pending for pending in self.waiting if pending.batches), maxlen=_ANSWERS)
        return answers

    def drop(self, answer: ReportedPrompt) -> None:
        """The orphan blocks of this answer found their place."""
        self.waiting = deque(
            (pending for pending in self.waiting if pending.answer is not answer), maxlen=_ANSWERS
        )

    def clear(self) -> None:
        self.waiting.clear()
