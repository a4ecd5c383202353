from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from kvroute.app.reference import BEGIN, METRICS, REFERENCE, TABLES, documents, main, reference_yaml, tables
from kvroute.config.config import Config
from kvroute.config.paths import options_of, shape_at, walk

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [REFERENCE, TABLES, METRICS])
def test_the_generated_document_is_fresh(name):
    """If this fails: make docs."""
    assert (ROOT / name).read_text() == documents(ROOT)[ROOT / name]


def test_the_reference_sets_every_option_to_its_default():
    data = yaml.safe_load(reference_yaml())

    assert Config.model_validate(data) == Config()
    for path, _ in walk(Config):
        place = data
        for key in path:
            assert key in place
            place = place[key]


def test_no_line_of_the_reference_is_longer_than_the_projects_lines():
    assert max(map(len, reference_yaml().splitlines())) <= 110


def test_every_option_is_described_and_every_quantity_has_a_unit_or_names_its_items():
    for path, field in walk(Config):
        if not options_of(shape_at(Config, path)):
            assert field.description, f"{path} has no description"


def test_an_option_is_explained_with_unit_range_and_the_effects_of_more_and_less():
    lines = reference_yaml().splitlines()

    (at,) = [number for number, line in enumerate(lines) if line == "  drain_timeout_s: 30.0"]

    assert [line.split(":")[0] for line in lines[at - 4 : at]] == [
        "  # Unit",
        "  # Allowed",
        "  # Higher",
        "  # Lower",
    ]


def test_the_tables_name_every_option():
    text = tables()

    for path, _ in walk(Config):
        if not options_of(shape_at(Config, path)):
            assert f"| `{path[-1]}` |" in text, f"{path} is missing"


def test_every_row_of_the_tables_has_four_cells():
    rows = [line for line in tables().splitlines() if line.startswith("|")]

    assert {line.replace("\\|", "").count("|") for line in rows} == {5}


@pytest.fixture
def copy(tmp_path):
    for name in (REFERENCE, TABLES):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_check_finds_a_stale_document_and_changes_nothing(copy, capsys):
    (copy / REFERENCE).write_text("stale")

    assert main([str(copy), "--check"]) == 1
    assert (copy / REFERENCE).read_text() == "stale"
    assert "stale: run `make docs`" in capsys.readouterr().out


def test_writing_makes_a_stale_or_missing_document_fresh(copy):
    (copy / REFERENCE).unlink()

    assert main([str(copy)]) == 0
    assert main([str(copy), "--check"]) == 0


def test_a_page_without_its_markers_is_an_error(copy):
    (copy / TABLES).write_text((copy / TABLES).read_text().replace(BEGIN, ""))

    with pytest.raises(ValueError, match="markers"):
        main([str(copy)])
