"""Blocks that a worker announced under a parent that we do not know: kept aside, never believed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvroute.blocks.keys import BlockKey, Tier, token_keys
from kvroute.wire.vllm import BlockStored, ExternalBlockHash


@dataclass(slots=True, eq=False)
class Fragment:
    """Consecutive blocks set aside, as announced. Mutable: `gone` grows."""

    event: BlockStored
    tier: Tier
    gone: set[ExternalBlockHash] = field(default_factory=set)

    @property
    def parent(self) -> ExternalBlockHash:
        parent = self.event.parent_block_hash
        assert parent is not None  # a start of a prompt has a place
        return parent


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Blocks set aside that a prompt runs through. `start` is the number of the first of them."""

    root: Fragment
    start: int


class OrphanBlocks:
    """At most `max_blocks` of them. Mutable: `add`, `discard`, `take` and `clear`. `len` counts blocks that
    the worker still holds."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._by_parent: dict[ExternalBlockHash, list[Fragment]] = {}
        self.names: dict[ExternalBlockHash, Fragment] = {}
        """Every block that is kept. Always the same dict; to be read only."""
        self._by_tokens: dict[int, dict[ExternalBlockHash, Fragment]] = {}
        """By what is in a block, whatever lies before it; GPU only."""

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: ExternalBlockHash) -> bool:
        return name in self.names

    def add(self, event: BlockStored, tier: Tier) -> bool:
        """Keep these blocks; False if there is no room for them."""
        names = event.block_hashes
        if len(self.names) + len(names) > self._max_blocks:
            return False
        fragment = Fragment(event, tier)
        self._by_parent.setdefault(fragment.parent, []).append(fragment)
        self.names.update(dict.fromkeys(names, fragment))
        if tier is Tier.GPU:
            for name, content in zip(names, _contents(event), strict=True):
                self._by_tokens.setdefault(content, {})[name] = fragment
        return True

    def discard(self, name: ExternalBlockHash) -> bool:
        """The worker has dropped this block, or it has been placed; False if it is not here."""
        fragment = self.names.pop(name, None)
        if fragment is None:
            return False
        fragment.gone.add(name)
        if len(fragment.gone) == len(fragment.event.block_hashes):
            siblings = self._by_parent.get(fragment.parent, [])
            if fragment in siblings:
                siblings.remove(fragment)
                if not siblings:
                    del self._by_parent[fragment.parent]
            self._forget_contents(fragment)
        return True

    def take(self, parent: ExternalBlockHash) -> list[Fragment]:
        """Everything that waits for this parent, which is no longer kept."""
        fragments = self._by_parent.pop(parent, [])
        for fragment in fragments:
            for name in fragment.event.block_hashes:
                self.names.pop(name, None)
            self._forget_contents(fragment)
        return fragments

    def clear(self, tier: Tier | None = None) -> None:
        """Forget all of it, or all of one tier."""
        if tier is None or not self.names:
            self.names.clear()
            self._by_parent, self._by_tokens = {}, {}
            return
        for fragment in [each for each in self.fragments() if each.tier is tier]:
            for name in fragment.event.block_hashes:
                self.discard(name)

    def fragments(self) -> Iterator[Fragment]:
        """All that is kept, oldest first under each parent."""
        for fragments in self._by_parent.values():
            yield from fragments

    def has_block(self, token_ids: Sequence[int], size: int, number: int) -> bool:
        """Whether any block set aside has the tokens of a prompt's block `number` (of `size` tokens each)."""
        wanted = token_ids[number * size : (number + 1) * size] if self._by_tokens else ()
        return len(wanted) == size and token_keys(wanted, 0)[-1] in self._by_tokens

    def branch(
        self, token_ids: Sequence[int], size: int, number: int, adapter: str | None = None
    ) -> Branch | None:
        """The blocks set aside that a prompt runs through up to and with its block `number` (of `size`
        tokens each), if there is no doubt which they are: exactly one block has these tokens, and all that
        lead to it agree with the prompt and its LoRA adapter."""
        wanted = token_ids[number * size : (number + 1) * size]
        if len(wanted) < size:
            return None
        found = self._by_tokens.get(token_keys(wanted, 0)[-1], {})
        if len(found) != 1:
            return None
        ((name, fragment),) = found.items()
        place = fragment.event.block_hashes.index(name)
        while True:
            event = fragment.event
            start = number - place
            if start < 1 or event.block_size != size or not _is_plain(event, adapter):
                return None
            if list(event.token_ids[: (place + 1) * size]) != list(
                token_ids[start * size : (number + 1) * size]
            ):
                return None
            before = self.names.get(fragment.parent)
            if before is None:
                return Branch(fragment, start)
            place = before.event.block_hashes.index(fragment.parent)
            number, fragment = start - 1, before

    def _forget_contents(self, fragment: Fragment) -> None:
        if fragment.tier is not Tier.GPU:
            return
        for name, content in zip(fragment.event.block_hashes, _contents(fragment.event), strict=True):
            names = self._by_tokens.get(content)
            if names is not None and names.get(name) is fragment:
                del names[name]
                if not names:
                    del self._by_tokens[content]


def _contents(event: BlockStored) -> Iterator[int]:
    size = event.block_size
    for start in range(0, len(event.token_ids), size):
        yield token_keys(event.token_ids[start : start + size], 0)[-1]


def _is_plain(event: BlockStored, adapter: str | None) -> bool:
    """Nothing but token ids and this adapter: with images or embeddings equal ids are not equal blocks."""
    if event.lora_name != adapter or (event.lora_id is not None and event.lora_name is None):
        return False
    return not any(entry and entry != [adapter] for entry in event.extra_keys or ())


_ANSWERS: Final = 16
_BATCHES: Final = 16
"""An engine hands a step's events over before the step's tokens (vLLM 0.32), so what is late is behind few
other batches."""


class ReportedPrompt(NamedTuple):
    """A prompt of which a worker reported `cached_tokens`; `keys` are its `blocks.tokens.prompt_keys`."""

    keys: Sequence[BlockKey]
    token_ids: Sequence[int]
    cached_tokens: int
    adapter: str | None


@dataclass(slots=True, eq=False)
class _Kept:
    answer: ReportedPrompt
    batches: int = _BATCHES


class PendingConfirmations:
    """The newest of them, each for a few batches. Mutable: `add`, `tick`, `drop` and `clear`; keeps what it
    is given, without a copy."""

    def __init__(self) -> None:
        self.kept: deque[_Kept] = deque(maxlen=_ANSWERS)
        """For reading: empty while no answer waits."""

    def add(self, answer: ReportedPrompt) -> None:
        self.kept.append(_Kept(answer))

    def tick(self) -> list[ReportedPrompt]:
        """A batch has been taken in: those that may have waited for it."""
        answers = [kept.answer for kept in self.kept]
        for kept in self.kept:
            kept.batches -= 1
        self.kept = deque((kept for kept in self.kept if kept.batches), maxlen=_ANSWERS)
        return answers

    def drop(self, answer: ReportedPrompt) -> None:
        """It has found its place."""
        self.kept = deque((kept for kept in self.kept if kept.answer is not answer), maxlen=_ANSWERS)

    def clear(self) -> None:
        self.kept.clear()
