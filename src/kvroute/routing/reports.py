"""What the token counts in answers teach about predictions. Pure.

`Discounts`: which share of a worker's predicted tokens is really found. `LastUnits`: whether an engine
computes the last matched unit again, which drafters of the EAGLE family need and no event tells. `Answers`:
how long a sequence is with its answer, which the worker holds too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec import Struct

from kvroute.blocks.keys import BlockKey
from kvroute.routing.strategy import Tokens

_WINDOW: Final = 16
"""Latest predictions of a worker that count."""
_LEAST: Final = 2
"""Predictions of a worker before a discount. Answers report at their end, and until then more requests wait
for what the worker does not hold."""
_STEADY: Final = 0.5
"""Share of them that promised at least a block too much."""
_LEAST_OTHER: Final = 3
"""Reports by the other rule before it counts, and they must be more than twice those by the present rule."""


class _Latest(Struct, gc=False):
    """The latest predictions of a worker. Mutable: every answer adds a row."""

    rows: deque[tuple[int, int, bool]]
    """Predicted tokens, those that were found, and whether a block or more was missing."""
    wrong: int = 0
    """Number of rows in which a block or more was missing."""
    is_right: bool = False
    """There are enough rows for a verdict, and none is wrong."""


class Discounts:
    """The share of the predicted tokens that each worker really finds. Mutable: `reported` and `forget`.

    Predictions by the cache map and by the route history have shares of their own. While the reports of all
    workers agree with the predictions there are none. As soon as one worker has a share, those that agree
    have the share 1; for a worker with fewer reports than `_LEAST`, which is not in a mapping, the mean of
    the others that serve the same model counts (`routing.cost.discounted`).
    """

    def __init__(self) -> None:
        self.by_map: dict[int, float] = {}
        """Worker's index -> share, for predictions by the cache map. Always the same mapping."""
        self.by_history: dict[int, float] = {}
        """The same for predictions by the route history."""
        self._latest: tuple[dict[int, _Latest], dict[int, _Latest]] = {}, {}
        """By history and by map: worker's index -> its latest predictions."""
        self._verdicts: tuple[dict[int, float], dict[int, float]] = {}, {}
        """By history and by map: every worker's share, also if all are 1."""

    def reported(
        self, index: int, is_mapped: bool, predicted: int, cached_tokens: int, block_tokens: int
    ) -> None:
        """A prediction of `predicted` tokens, before any discount, and the tokens that the worker found."""
        if not predicted:
            return
        latest = self._latest[is_mapped].get(index)
        if latest is None:
            latest = self._latest[is_mapped][index] = _Latest(deque(maxlen=_WINDOW))
        rows, is_wrong = latest.rows, predicted - cached_tokens >= block_tokens
        if latest.is_right and not is_wrong:  # so it is with most: the share is 1 and stays so
            rows.append((predicted, cached_tokens, False))
            return
        if len(rows) == _WINDOW:
            latest.wrong -= rows[0][2]
        rows.append((predicted, cached_tokens, is_wrong))
        latest.wrong += is_wrong
        count = len(rows)
        if count < _LEAST:
            return
        latest.is_right = not latest.wrong
        share = 1.0
        if latest.wrong >= _STEADY * count:
            share = sum([min(row[0], row[1]) for row in rows]) / sum([row[0] for row in rows])
        verdicts = self._verdicts[is_mapped]
        if verdicts.get(index) != share:
            verdicts[index] = share
            self._show(is_mapped)

    def forget(self, index: int) -> None:
        """The worker has left or restarted; another one may have its index."""
        for is_mapped in (False, True):
            self._latest[is_mapped].pop(index, None)
            if self._verdicts[is_mapped].pop(index, None) is not None:
                self._show(is_mapped)

    def _show(self, is_mapped: bool) -> None:
        shares, verdicts = self.by_map if is_mapped else self.by_history, self._verdicts[is_mapped]
        shares.clear()
        if any(share < 1.0 for share in verdicts.values()):
            shares.update(verdicts)


_MOST_ANSWERS: Final = 4096
"""Per worker; the oldest are dropped first."""


class Answers:
    """The lengths of answered prompts with their answers, by the prompts' last keys.

    Mutable: `add` and `forget`.

    The route history has the prompts only. A prompt that continues a whole earlier one is the next turn of a
    chat, and then the worker holds the answer before it too.
    """

    def __init__(self) -> None:
        self.by_unit: dict[int, dict[BlockKey, int]] = {}
        """Unit of a worker (`Worker.units`) -> last key of a prompt -> tokens of prompt and answer there."""

    def add(self, unit: int, last: BlockKey, prompt_tokens: int, answer_tokens: int) -> None:
        """The worker answered the prompt whose last key is `last`."""
        ends = self.by_unit.get(unit)
        if ends is None:
            ends = self.by_unit[unit] = {}
        if last in ends:
            del ends[last]
        elif len(ends) >= _MOST_ANSWERS:
            del ends[next(iter(ends))]
        ends[last] = prompt_tokens + answer_tokens - 1  # the last token is never computed

    def forget(self, unit: int) -> None:
        """The unit's cache is empty; another worker may have its number."""
        self.by_unit.pop(unit, None)


class Reports(NamedTuple):
    """What answers have taught about the workers of a router."""

    discounts: Discounts
    answers: Answers

    def forget(self, index: int) -> None:
        """The worker has left or restarted."""
        self.discounts.forget(index)
        self.answers.forget(index)


class LastUnits:
    """Learns which engines compute the last matched unit again. Mutable: `reported` and `forget`.

    `unit` returns the tokens in the unit of a slot's hits.
    """

    def __init__(self, unit: Callable[[int], int]) -> None:
        self.slots: set[int] = set()
        """The slots whose engine drops the unit. Always the same set."""
        self._unit = unit
        self._latest: dict[int, deque[bool]] = {}
        """Slot -> which of its latest reports agree with the other rule only."""

    def reported(self, slot: int, tokens: Tokens, cached_tokens: int, *, has_drafter: bool = False) -> bool:
        """A worker reported `cached_tokens` where `tokens` were predicted; True if the slot's rule changed.

        `has_drafter`: its engine has one, perhaps of the EAGLE family.
        """
        gpu, l1, l2 = tokens
        other = tokens.otherwise
        if other is None:
            unit = self._unit(slot)
            other = gpu + unit if slot in self.slots else max(0, gpu - unit)
        if l1 or l2 or other == gpu or cached_tokens not in (gpu, other):
            return False
        latest = self._latest.get(slot)
        if latest is None:
            latest = self._latest[slot] = deque(maxlen=_WINDOW)
        latest.append(cached_tokens == other)
        # Requests that race each other are often wrong by a unit, so a rule that has proved itself stays.
        # One report is enough for an engine that has a drafter, and if another one drops the unit: most
        # workers of a model have the same drafter.
        others, least = sum(latest), _LEAST_OTHER
        if (has_drafter or self.slots) and slot not in self.slots:
            least = 1
        if others < least or others <= 2 * (len(latest) - others):
            return False
        latest.clear()
        self.slots ^= {slot}
        return True

    def forget(self, slot: int) -> None:
        """The slot was removed; its number may be reused."""
        self.slots.discard(slot)
        self._latest.pop(slot, None)
