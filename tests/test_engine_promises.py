"""The table of what only real engines can show is checked against documents, tests and packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROMISE = {
    "file": "README.md",
    "sentence": "Chats stay\nwith their cache.",
    "packages": ["routing"],
    "tests": [{"set": "ci", "test": "test_a.py::test_one"}, {"set": "all", "test": "test_a.py::test_two"}],
}
ONE, TWO = "tests/engine/test_a.py::test_one", "tests/engine/test_a.py::test_two"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("engine_promises", ROOT / "scripts" / "engine_promises.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text("First.\nChats stay with their\ncache. Last.\n")
    (tmp_path / "src" / "kvroute" / "routing").mkdir(parents=True)
    return tmp_path


def test_a_table_that_is_true_has_no_problems(script: Any, root: Path) -> None:
    assert script.problems([PROMISE], {ONE}, {ONE, TWO}, root) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sentence": "Chats stay with their caches."}, "the sentence is not in the file"),
        ({"file": "docs/nothing.md"}, "the sentence is not in the file"),
        ({"packages": ["routing", "rooting"]}, "there is no package rooting"),
        ({"tests": [*PROMISE["tests"], {"set": "ci", "test": "test_a.py::test_gone"}]}, "there is no test"),
        ({"tests": [{"set": "ci", "test": "test_a.py::test_two"}]}, "is not in the set 'ci'"),
        (
            {"tests": [*PROMISE["tests"], {"set": "all", "test": "test_a.py::test_one"}]},
            "is not in the set 'all'",
        ),
        ({"tests": PROMISE["tests"][1:]}, "no test of CI shows it"),
    ],
)
def test_what_is_not_true_any_more_is_named(
    script: Any, root: Path, change: dict[str, Any], said: str
) -> None:
    (problem,) = script.problems([{**PROMISE, **change}], {ONE}, {ONE, TWO}, root)

    assert said in problem
