"""The example in docs/scoring.md, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "scoring.md"


@pytest.fixture
def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return str(code)


def test_the_guides_example_routes_its_requests(example, capsys) -> None:
    names: dict[str, object] = {}

    exec(compile(example, str(GUIDE), "exec"), names)

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    chosen = [line.split()[2] for line in lines]
    assert sorted(chosen[:3]) == ["w0", "w1", "w2"], "three manuals, three workers"
    assert all("prefix_miss" in line for line in lines[:3])
    assert all("prefix_hit" in line for line in lines[3:])
    assert chosen[3:] == chosen[:3] * 3
    assert len(names["running"]) == 8, "the others are finished"  # type: ignore[arg-type]


def test_the_guides_example_does_no_io(example) -> None:
    modules = re.findall(r"^(?:from|import) ([\w.]+)", example, re.MULTILINE)

    assert modules
    assert all(
        module.startswith(("kvroute.blocks", "kvroute.fleet.worker", "kvroute.routing")) for module in modules
    )


def test_the_guides_example_is_short(example) -> None:
    after_imports = example.split("\n\n", 1)[1]

    assert len([line for line in after_imports.splitlines() if line.strip()]) <= 30
