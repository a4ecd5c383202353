"""What a worker with several KV cache groups can use of a prompt, by vLLM's rules.

vLLM keeps layers with equal needs in one *group*, and each group caches its own copy of a block. A hit is the
longest beginning of the prompt on which all groups agree (vLLM 0.32, v1/core/kv_cache_coordinator.py and
single_type_kv_cache_manager.py). A group that sees the whole prompt needs every block of it; the index has
these blocks as runs. The other groups need few blocks, at the end of the hit: here each of them is a set of
the keys at the ends of its blocks. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from math import lcm
from typing import NamedTuple

from kvroute.blocks.keys import KEY_TOKENS, BlockKey


class GroupKind(StrEnum):
    """Which blocks a group needs for a hit."""

    WHOLE = "whole"
    """All from the start: full attention, MLA, attention sinks."""
    WINDOW = "window"
    """Those of the last `span` tokens before the end of the hit."""
    CHUNK = "chunk"
    """Those of the current chunk of `span` tokens."""
    STATE = "state"
    """The state at the end of the hit: Mamba, linear attention."""


class GroupRule(NamedTuple):
    """A group's kind, the tokens in its blocks, and the tokens of its window or chunk."""

    kind: GroupKind
    block_tokens: int
    span: int = 0


Drops = bool
"""Whether the engine computes the last matched unit again, for a drafter of the EAGLE family."""


class _Alike:
    """The groups of one slot with equal rules. vLLM looks their blocks up together: all must have a block."""

    __slots__ = ("rule", "sets", "stride")

    def __init__(self, rule: GroupRule, sets: Sequence[set[BlockKey]]) -> None:
        self.rule = rule
        self.sets = sets
        self.stride = rule.block_tokens // KEY_TOKENS

    def has(self, keys: Sequence[BlockKey], block: int) -> bool:
        """Do all groups have the prompt's block with this number?"""
        key = keys[(block + 1) * self.stride - 1]
        for keys_of_group in self.sets:  # noqa: SIM110 - `all` would construct a generator for each block
            if key not in keys_of_group:
                return False
        return True

    def longest(self, keys: Sequence[BlockKey], tokens: int, unit: int, drops: Drops) -> int:
        """The longest hit of at most `tokens`, as these groups alone allow it."""
        kind = self.rule.kind
        if kind is GroupKind.WINDOW:
            return self._window(keys, tokens, unit, drops)
        if kind is GroupKind.STATE:
            return self._state(keys, tokens, unit)
        return self._from(keys, tokens, tokens // self.rule.span * self.rule.span if self.rule.span else 0)

    def _state(self, keys: Sequence[BlockKey], tokens: int, unit: int) -> int:
        size = self.rule.block_tokens
        step = unit // size
        for end in range(tokens // unit * step, 0, -step):
            if self.has(keys, end - 1):
                return end * size
        return 0

    def _from(self, keys: Sequence[BlockKey], tokens: int, start: int) -> int:
        size = self.rule.block_tokens
        block, blocks = start // size, tokens // size
        while block < blocks and self.has(keys, block):
            block += 1
        return block * size

    def _window(self, keys: Sequence[BlockKey], tokens: int, unit: int, drops: Drops) -> int:
        """The rightmost run of enough blocks; else the run at the start of the prompt.

        With `drops` the run has one block more, which is not used.
        """
        size, more = self.rule.block_tokens, 1 if drops else 0
        step, need = unit // size, max(1, -(-(self.rule.span - 1) // size) + more)
        blocks = min((tokens + more * size) // size, len(keys) // self.stride)
        has, end = self.has, blocks
        while True:
            end -= (end - more) % step
            start = end - need
            if start < 0:
                break
            # From the left, so that a missing block excludes as many ends as possible.
            missing = next((block for block in range(start, end) if not has(keys, block)), None)
            if missing is None:
                return (end - more) * size
            end = missing
        end = 0
        while end < min(need, blocks) and has(keys, end):
            end += 1
        if step > 1:
            end -= (end - more) % step
            end = max(0, end) // step * step
        if drops and end:
            end = (end - 1) // step * step
        return end * size


class SlotGroups:
    """The groups of one slot besides the one whose blocks the index has as runs. Mutable."""

    def __init__(self) -> None:
        self.whole_tokens = KEY_TOKENS
        """Tokens in a block of the group that the index has as runs."""
        self.rules: dict[int, GroupRule] = {}
        self.keys_by_group: dict[int, set[BlockKey]] = {}
        self._alike: list[_Alike] = []
        self._unit = KEY_TOKENS

    @property
    def unit(self) -> int:
        """Tokens in the unit of hits."""
        return self._unit

    def define(self, group: int, rule: GroupRule) -> None:
        self.rules[group] = rule
        self.keys_by_group.setdefault(group, set())
        self._arrange()

    def _arrange(self) -> None:
        by_rule: dict[GroupRule, list[set[BlockKey]]] = {}
        for group in sorted(self.rules):
            by_rule.setdefault(self.rules[group], []).append(self.keys_by_group[group])
        self._alike = [_Alike(rule, sets) for rule, sets in by_rule.items()]
        self._unit = lcm(self.whole_tokens, *(rule.block_tokens for rule in by_rule))

    def clear(self) -> None:
        """The groups have no blocks any more; their rules stay."""
        self.keys_by_group = {group: set() for group in self.rules}
        self._arrange()

    def set_whole_tokens(self, tokens: int) -> None:
        if tokens != self.whole_tokens:
            self.whole_tokens = tokens
            self._arrange()

    def usable(
        self, keys: Sequence[BlockKey], whole: int, most: int, drops: Drops, end_key: BlockKey | None = None
    ) -> int:
        """The tokens of a hit if the index has the first `whole` tokens.

        `most` is the longest possible hit: the prompt without its last token. `end_key` is the key at the
        very end of a prompt that ends with a key's tokens, if known: with `drops` vLLM also looks at the
        block before the dropped one.
        """
        unit, alike = self._unit, self._alike
        if drops:
            if end_key is not None:
                keys = [*keys, end_key]
            whole -= self.whole_tokens
            if whole <= 0:
                return 0
        hit, allowed = most, whole - whole % unit
        dropped: set[int] = set()
        while True:
            current = min(hit, allowed)
            for number, groups in enumerate(alike):
                drop = drops and number not in dropped
                limited = groups.longest(keys, current, unit, drop)
                if drop:
                    dropped.add(number)
                elif limited < current:
                    dropped.clear()
                current = limited
            if current >= hit or not current:
                return current
            hit = current
            if len(alike) == 1:
                return current


class GroupIndex:
    """The groups of all slots that have several. Mutable: the workers' ledgers change it, routing reads it.

    `max_blocks` bounds the number of keys in all sets together.
    """

    def __init__(self, max_blocks: int) -> None:
        self.slots: dict[int, SlotGroups] = {}
        """For reading: empty while no worker has several groups."""
        self.blocks = 0
        self._max_blocks = max_blocks

    def define(self, slot: int, group: int, rule: GroupRule) -> None:
        """The slot's group has this rule."""
        self.slots.setdefault(slot, SlotGroups()).define(group, rule)

    def store(self, slot: int, group: int, keys: Iterable[BlockKey]) -> bool:
        """The group has these blocks; False if there was no room for one of them."""
        stored_keys = self.slots[slot].keys_by_group[group]
        for key in keys:
            if key not in stored_keys:
                if self.blocks >= self._max_blocks:
                    return False
                stored_keys.add(key)
                self.blocks += 1
        return True

    def remove(self, slot: int, group: int, keys: Iterable[BlockKey]) -> None:
        """The group no longer has these blocks."""
        slot_groups = self.slots.get(slot)
        stored_keys = None if slot_groups is None else slot_groups.keys_by_group.get(group)
        if stored_keys is None:
            return
        for key in keys:
            if key in stored_keys:
                stored_keys.discard(key)
                self.blocks -= 1

    def clear(self, slot: int) -> None:
        """The slot's groups have no blocks any more."""
        slot_groups = self.slots.get(slot)
        if slot_groups is not None:
            self.blocks -= sum(map(len, slot_groups.keys_by_group.values()))
            slot_groups.clear()

    def forget(self, slot: int) -> None:
        """The slot has no groups."""
        self.clear(slot)
        self.slots.pop(slot, None)

    def entries(self) -> Iterator[tuple[int, int, GroupRule, Sequence[BlockKey]]]:
        """Slot, group, rule and keys of every group."""
        for slot, slot_groups in self.slots.items():
            for group, rule in slot_groups.rules.items():
                yield slot, group, rule, list(slot_groups.keys_by_group[group])
