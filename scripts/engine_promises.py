"""Checks the table of promises that only a real engine can show, tests/engine/promises.toml.

    python scripts/engine_promises.py

Fails where a sentence is no longer in its file, a test is missing or not in its set, a package does not
exist, or no test of CI shows a promise. Collects the engine tests, and runs none.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "engine" / "promises.toml"
FOLDER = "tests/engine/"


def problems(
    promises: Sequence[Mapping[str, Any]], ci: Collection[str], every: Collection[str], root: Path = ROOT
) -> list[str]:
    """What is wrong with the table. `ci` and `every` are the tests of the two sets."""
    found = []
    for promise in promises:
        file, sentence = promise["file"], _words(promise["sentence"])
        name = f"{file}, {sentence[:60]!r}"
        if not (root / file).exists() or sentence not in _words((root / file).read_text()):
            found.append(f"{name}: the sentence is not in the file")
        for package in promise["packages"]:
            if not (root / "src" / "kvroute" / package).is_dir():
                found.append(f"{name}: there is no package {package}")
        for row in promise["tests"]:
            test, wanted = FOLDER + row["test"], row["set"]
            if test not in every:
                found.append(f"{name}: there is no test {test}")
            elif wanted not in ("ci", "all") or (wanted == "ci") != (test in ci):
                found.append(f"{name}: {test} is not in the set {wanted!r}")
        if not any(row["set"] == "ci" for row in promise["tests"]):
            found.append(f"{name}: no test of CI shows it")
    return found


def _words(text: str) -> str:
    """The text in one line, without the marks of a quotation."""
    return " ".join(re.sub(r"^> ?", "", text, flags=re.MULTILINE).split())


class Collected:
    """A plugin of pytest: the ids of the engine tests. Mutable: `ci` and `every`."""

    def __init__(self) -> None:
        self.ci: set[str] = set()
        self.every: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.every = {item.nodeid for item in session.items}
        self.ci = {item.nodeid for item in session.items if item.get_closest_marker("full") is None}


def main() -> int:
    promises = tomllib.loads(TABLE.read_text())["promise"]
    tests = Collected()
    arguments = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", "engine", "--rootdir", str(ROOT)]
    with redirect_stdout(StringIO()) as said:
        code = pytest.main([*arguments, str(ROOT / FOLDER)], plugins=[tests])
    if code:
        sys.exit(said.getvalue())
    found = problems(promises, tests.ci, tests.every)
    for problem in found:
        print(problem, file=sys.stderr)
    rows = [row for promise in promises for row in promise["tests"]]
    if not found:
        print(f"{len(promises)} promises are shown by {len(rows)} engine tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
