"""Count the phrases in this project's prose that are not plain English, and the names in its code.

    python scripts/plain_words.py                  exit code 1 if the rate is above the limit
    python scripts/plain_words.py --list           also print each place
    python scripts/plain_words.py --names DIR      print each name below a folder that says nothing
    python scripts/plain_words.py --root DIR       count in another checkout

A phrase is not plain if a reader with English as a second language stumbles over it, or if the glossary in
CONTRIBUTING.md has another word for its meaning. plain_words.txt lists the phrases with the plain words.

Prose is docstrings, comments, option texts (strings of `option(...)`), the pages in `PAGES` and docs/*.md.
Code does not count: fenced blocks, `inline code`, link targets and comments for tools.

Names are those that src binds: variables, parameters, attributes, functions and classes. A name says nothing
if it is one of `NAMES`: `found` does not say what was found. Nor may `VAGUE` names take their place.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LIMIT_PER_1000 = 2.0
"""Commit 1fd48c2 has 13.84, without CHANGELOG.md and SECURITY.md. The limit may only fall."""

NAMES = frozenset(
    (
        "found",
        "each",
        "known",
        "place",
        "part",
        "before",
        "own",
        "held",
        "why",
        "left",
        "sent",
        "first",
        "rest",
    )
)
NAMES_LIMIT = 0.01
"""Share of the names in src that are among `NAMES`. Commit daac6af has 0.039. The limit may only fall."""
VAGUE = frozenset(("item", "thing", "data", "value", "info", "entry"))
VAGUE_LIMIT = 0.0155

WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
CODE = re.compile(r"`[^`\n]*`|\]\([^)]*\)|https?://\S+")
TOOL_COMMENT = re.compile(r"#\s*(noqa|type:|fmt:|pragma|mypy:|ruff:|!)")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "bench/results/README.md")
GENERATED = {"docs/configuration.md"}
"""The texts of this page are those of the options, which count already."""

Place = tuple[str, int, str]
"""File, first line, text."""


def phrases(path: Path) -> list[tuple[re.Pattern[str], str]]:
    """Read the lines `PATTERN => PLAIN`; lines that start with `#` are comments."""
    found = []
    for line in path.read_text("utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, _, plain = line.partition("=>")
            found.append((re.compile(rf"\b(?:{pattern.strip()})\b", re.IGNORECASE), plain.strip()))
    return found


def prose(root: Path) -> Iterator[Place]:
    """All prose below `root`."""
    for folder in ("src", "bench", "scripts", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            if "native" not in path.parts and not any(part.startswith(".venv") for part in path.parts):
                yield from of_python(path.relative_to(root).as_posix(), path.read_text("utf-8"))
    for path in [*(root / page for page in PAGES), *sorted((root / "docs").rglob("*.md"))]:
        name = path.relative_to(root).as_posix()
        if name not in GENERATED:
            yield from of_markdown(name, path.read_text("utf-8"))


def of_python(name: str, source: str) -> Iterator[Place]:
    """Docstrings of modules, classes, functions and attributes; option texts; comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield name, node.lineno, node.value.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "option":
            for value in [*node.args[1:2], *(word.value for word in node.keywords if word.arg != "unit")]:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield name, value.lineno, value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not TOOL_COMMENT.match(token.string):
            yield name, token.start[0], token.string.lstrip("#: ")


def of_markdown(name: str, source: str) -> Iterator[Place]:
    """Each line of paragraphs, lists and tables, without fenced code."""
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield name, number, line


def bound_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, parameter, attribute, function and class that the source binds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def shares(root: Path) -> tuple[float, float]:
    """Of all names that src binds: the share of `NAMES`, and of `VAGUE`."""
    names = [
        name.strip("_").lower()
        for path in sorted((root / "src").rglob("*.py"))
        for _, name in bound_names(path.read_text("utf-8"))
    ]
    return sum(name in NAMES for name in names) / len(names), sum(name in VAGUE for name in names) / len(
        names
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--limit", type=float, default=LIMIT_PER_1000, help="hits per 1,000 words")
    parser.add_argument("--list", action="store_true", help="print each place")
    parser.add_argument("--names", type=Path, metavar="DIR", help="print names that say nothing")
    options = parser.parse_args()
    if options.names:
        for path in sorted(options.names.rglob("*.py")):
            for line, name in sorted(bound_names(path.read_text("utf-8"))):
                if name.strip("_").lower() in NAMES:
                    print(f"{path}:{line}: {name}")
        return 0
    patterns = phrases(Path(__file__).with_suffix(".txt"))
    words: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    by_phrase: Counter[str] = Counter()
    for name, line, text in prose(options.root):
        plain = CODE.sub(" ", text)
        parts = name.split("/")
        area = name if name.endswith(".md") else "/".join(parts[: 3 if parts[0] == "src" else 1])
        words[area] += len(WORD.findall(plain))
        for pattern, instead in patterns:
            for match in pattern.finditer(plain):
                hits[area] += 1
                by_phrase[match[0].lower()] += 1
                if options.list:
                    at = line + plain.count("\n", 0, match.start())
                    print(f"{name}:{at}: {match[0]!r}: {instead}")
    for area, count in sorted(words.items(), key=lambda each: -hits[each[0]]):
        if hits[area]:
            print(f"{1000 * hits[area] / count:6.1f} per 1,000  {hits[area]:5} of {count:6}  {area}")
    print("most often:", ", ".join(f"{phrase} {count}" for phrase, count in by_phrase.most_common(25)))
    total, found = sum(words.values()), sum(hits.values())
    rate = 1000 * found / total
    print(f"{rate:.2f} per 1,000 words: {found} of {total}; at most {options.limit:g}")
    silent, vague = shares(options.root)
    print(
        f"{silent:.2%} of names say nothing (at most {NAMES_LIMIT:.2%}), "
        f"{vague:.2%} are vague (at most {VAGUE_LIMIT:.2%})"
    )
    return 0 if rate <= options.limit and silent <= NAMES_LIMIT and vague <= VAGUE_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
