"""The chats of the comparison on real engines: the texts of each session, and their lengths."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = "small"
BLOCK = 32
POOL_SHARE = 0.65
TEMPLATE_TOKENS = 5
"""Tokens that the chat template adds to a message."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the sessions. Lengths are tokens; each word of a prompt is one token."""

    sessions: int = 10
    turns: int = 5
    common: int = 256
    opening: tuple[int, int] = (1800, 4200)
    """Shortest and longest first message of a session, evenly distributed."""
    question: int = 160
    answer: int = 16
    think_s: float = 3.0
    """Mean pause before a question; uniform from 0 to twice the mean."""

    def last_prompt(self, opening: int) -> int:
        """Length of a chat after its last answer."""
        messages = 2 * self.turns + 1
        later = (self.turns - 1) * self.question + self.turns * self.answer
        return self.common + opening + later + messages * TEMPLATE_TOKENS

    @property
    def longest(self) -> int:
        return self.last_prompt(self.opening[1])

    @property
    def pool_blocks(self) -> int:
        """KV blocks of an engine: 65% of the total length of all chats, but at least the longest chat."""
        mean = self.last_prompt(sum(self.opening) // 2)
        return max(round(POOL_SHARE * self.sessions * mean / BLOCK), -(-self.longest // BLOCK) + 1)


@dataclass(frozen=True, slots=True)
class Session:
    """The texts of one chat: the common system prompt, the first message, and the questions."""

    system: str
    questions: tuple[str, ...]
    pauses_s: tuple[float, ...]


def sessions(shape: Shape, words: Sequence[str], seed: int) -> list[Session]:
    """Create the sessions of a run; the same sessions for every router."""
    common = text(random.Random(f"common {seed}"), words, shape.common)
    least, most = shape.opening
    found = []
    for number in range(shape.sessions):
        chooser = random.Random(f"{seed} {number}")
        # Evenly distributed over the sessions, so that runs are similar.
        opening = least + (most - least) * number // max(1, shape.sessions - 1)
        lengths = (opening, *(shape.question for _ in range(shape.turns - 1)))
        questions = tuple(text(chooser, words, length) for length in lengths)
        pauses = tuple(chooser.uniform(0.0, 2 * shape.think_s) for _ in lengths)
        found.append(Session(common, questions, pauses))
    return found


def text(chooser: random.Random, words: Sequence[str], count: int) -> str:
    return "".join(chooser.choices(words, k=count))


def one_token_words(tokenizer: Path) -> list[str]:
    """Words that are one token each if they follow another word, from a tokenizer.json."""
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    return sorted(entry.replace("Ġ", " ") for entry in vocabulary if re.fullmatch("Ġ[a-z]{4,}", entry))
