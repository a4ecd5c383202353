"""A test file is named after the module that it tests: tests/<room>/test_<module>[_<topic>].py."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kvroute"
EXCEPTIONS = {
    "cli/test_commands.py": "tests the package kvroute.cli itself",
    "deploy/test_chart.py": "tests charts/kvroute",
    "deploy/test_dockerfile.py": "tests the Dockerfile",
    "deploy/test_service_unit.py": "tests configs/systemd",
    "app/test_kvaware_guide.py": "tests docs/kvaware.md",
    "routing/test_scoring_guide.py": "tests docs/scoring.md",
}
"""File below tests/ -> what it tests instead of a module."""
FILES = sorted(
    path.relative_to(ROOT / "tests").as_posix()
    for room in SOURCE.iterdir()
    for path in (ROOT / "tests" / room.name).rglob("test_*.py")
)


def module_of(file: str) -> str | None:
    """The longest name of a module or package of the room with which the file's name begins."""
    room, name = file.split("/")[0], Path(file).stem.removeprefix("test_")
    found = [path.stem for path in (SOURCE / room).rglob("*") if path.is_dir() or path.suffix == ".py"]
    return max((each for each in found if f"{name}_".startswith(f"{each}_")), key=len, default=None)


@pytest.mark.parametrize("file", FILES)
def test_a_test_file_is_named_after_a_module_of_its_room(file: str) -> None:
    assert (module_of(file) is None) == (file in EXCEPTIONS)


def test_each_exception_is_a_file() -> None:
    assert EXCEPTIONS.keys() <= set(FILES)
