"""Answers that were here before the events of what they had computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvroute.blocks.keys import BlockKey

_ANSWERS: Final = 16
_BATCHES: Final = 16
"""An engine hands a step's events over before the step's tokens (vLLM 0.32), so what is late is behind few
other batches."""


class Answer(NamedTuple):
    """A prompt of which a worker reported `cached_tokens`; `keys` are its `blocks.tokens.prompt_keys`."""

    keys: Sequence[BlockKey]
    token_ids: Sequence[int]
    cached_tokens: int
    adapter: str | None


@dataclass(slots=True, eq=False)
class _Kept:
    answer: Answer
    batches: int = _BATCHES


class EarlyAnswers:
    """The newest of them, each for a few batches. Mutable: `add`, `tick`, `drop` and `clear`; keeps what it
    is given, without a copy. False if there is none."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=_ANSWERS)

    def __bool__(self) -> bool:
        return bool(self._kept)

    def add(self, answer: Answer) -> None:
        self._kept.append(_Kept(answer))

    def tick(self) -> list[Answer]:
        """A batch has been taken in: those that may have waited for it."""
        answers = [kept.answer for kept in self._kept]
        for kept in self._kept:
            kept.batches -= 1
        self._kept = deque((kept for kept in self._kept if kept.batches), maxlen=_ANSWERS)
        return answers

    def drop(self, answer: Answer) -> None:
        """It has found its place."""
        self._kept = deque((kept for kept in self._kept if kept.answer is not answer), maxlen=_ANSWERS)

    def clear(self) -> None:
        self._kept.clear()
