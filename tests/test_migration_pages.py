"""docs/migration: each flag of the other routers, and only options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kvroute.config.config import Config
from kvroute.config.paths import shape_at, split
from kvroute.routing.registry import STRATEGIES

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "migration").glob("*.md"))
THEIRS = yaml.safe_load((ROOT / "tests" / "data" / "migration" / "flags.yaml").read_text())
SECTIONS = "|".join(Config.model_fields)


@pytest.mark.parametrize("page", THEIRS)
def test_the_page_has_each_flag_once(page):
    rows = re.findall(r"^\| (`--.*?) \|", (ROOT / "docs" / "migration" / page).read_text(), re.MULTILINE)
    named = re.findall(r"`(--[\w-]+)`", " ".join(rows))

    assert sorted(named) == sorted(THEIRS[page])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_option_that_the_page_names_exists(page):
    for name in re.findall(rf"`((?:{SECTIONS})(?:\.\w+)+(?:\.\*)?)", page.read_text()):
        assert shape_at(Config, split(name.removesuffix(".*"))), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_strategy_that_the_page_names_exists(page):
    for name in re.findall(r"routing\.strategy=(\w+)|--strategy (\w+)", page.read_text()):
        assert (name[0] or name[1]) in STRATEGIES


# --- the tests of production-stack's router ---------------------------------------------------------------

LISTED = yaml.safe_load((ROOT / "tests" / "data" / "production_stack" / "router_tests.yaml").read_text())
ENTRIES = [(f"{file}: {name}", entry) for file, found in LISTED.items() for name, entry in found.items()]


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=[name for name, _ in ENTRIES])
def test_each_of_that_routers_tests_has_one_here_or_a_reason(name, entry):
    assert len(entry["asserts"]) > 10
    assert entry.get("ours") or len(entry["why"]) > 20
    if ours := entry.get("ours"):
        file, function = ours.split("::")
        assert re.search(rf"^(async )?def {function}\(", (ROOT / file).read_text(), re.MULTILINE), ours
