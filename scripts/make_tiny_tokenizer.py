"""Train the tokenizer of the tiny models: src/kvroute/deploy/assets/tiny_model/tokenizer.json.

    python scripts/make_tiny_tokenizer.py [--check]

The tokenizer is a byte-level BPE of 8,000 entries. This script generates the training text from the words in
tiny_tokenizer_words.txt, so the result depends only on these two files and on the version of `tokenizers` (a
development dependency). The repository has the result, because tests rely on fixed token ids. With `--check`
the exit code is 1 if the result is stale.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TARGET = Path(__file__).parents[1] / "src/kvroute/deploy/assets/tiny_model/tokenizer.json"
WORDS = Path(__file__).with_name("tiny_tokenizer_words.txt")
VOCABULARY = 8000
SPECIAL = ("<|pad|>", "<|turn|>", "<|end|>")
LINES = 30_000

ENDINGS = (
    "",
    "s",
    "ed",
    "ing",
    "er",
    "ers",
    "ly",
    "ness",
    "less",
    "ful",
    "ment",
    "able",
    "ation",
    "ish",
    "est",
)
OPENINGS = ("", "", "", "", "re", "un", "over", "out", "pre", "sub", "inter", "micro", "non", "mis", "under")
STOPS = (". ", ".\n", "? ", "! ", ", ", ": ", ";\n", "...\n", ".\n\n")
ROLES = ("system", "user", "assistant", "tool", "developer")


def read_words(path: Path = WORDS) -> dict[str, list[str]]:
    """The word lists by section name."""
    sections: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            words = sections.setdefault(line.strip("[]"), [])
        else:
            words += line.split()
    return sections


class Writer:
    """Generates lines of text. Mutable: the state of the random number generator."""

    def __init__(self, words: dict[str, list[str]]) -> None:
        self._words = words
        self._random = random.Random("kvroute tiny tokenizer")

    def lines(self) -> Iterator[str]:
        """Yield sentences, JSON records and code; the same lines on every run."""
        for number in range(LINES):
            if number % 10 == 8:
                yield self._record()
            elif number % 10 == 9:
                yield self._code()
            else:
                yield self._sentence()

    def _any(self, section: str) -> str:
        return self._random.choice(self._words[section])

    def _word(self) -> str:
        root = self._any(self._random.choice(("nouns", "verbs", "adjectives")))
        if self._random.random() < 0.6:
            return root
        opening = self._random.choice(OPENINGS) if self._random.random() < 0.3 else ""
        return opening + root + self._random.choice(ENDINGS)

    def _sentence(self) -> str:
        words: list[str] = []
        for _ in range(self._random.randint(1, 3)):
            words += [self._any("small"), self._any("adjectives"), self._any("nouns")]
            words += [
                self._any("verbs") + self._random.choice(("", "s", "ed")),
                self._any("small"),
                self._word(),
            ]
            words.append(self._any("links"))
        words[-1] = self._word()
        if self._random.random() < 0.15:
            words.insert(self._random.randrange(len(words)), str(self._random.randrange(10_000)))
        text = " ".join(words)
        return text[0].upper() + text[1:] + self._random.choice(STOPS)

    def _record(self) -> str:
        inner = {self._any("keys"): self._random.choice((self._word(), 7, True, None)) for _ in range(5)}
        role = self._random.choice(ROLES)
        record = {"role": role, "content": self._sentence().strip(), self._any("keys"): inner}
        return json.dumps(record, indent=self._random.choice((None, None, 2))) + "\n"

    def _code(self) -> str:
        name, argument = f"{self._any('verbs')}_{self._any('nouns')}", self._any("nouns")
        call = f'{argument}.{self._word()}({self._random.randrange(256)}, "{self._word()}")'
        head = f"def {name}({argument}: {self._any('code')}) -> {self._any('code')}:"
        return f"{head}\n    {self._any('code')} {call}\n    return {name}[{argument}]\n"


def train() -> str:
    """tokenizer.json as text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(Writer(read_words()).lines(), trainer)
    return tokenizer.to_str(pretty=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    made = train()
    if arguments.check:
        if made != TARGET.read_text():
            sys.stderr.write(f"{TARGET} is stale; run python scripts/make_tiny_tokenizer.py\n")
            return 1
        return 0
    TARGET.write_text(made)
    sys.stdout.write(f"{TARGET}: {len(made):,} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
