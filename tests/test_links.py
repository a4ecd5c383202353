"""The links and the test files that the project's pages name exist."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {part for part in path.relative_to(ROOT).parts if part.startswith(".")}
)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEST_FILE = re.compile(r"tests/[\w/.]+\.py")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    names = set()
    for title in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = unquote(link).partition("#")
        target = (page.parent / file) if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_test_file_that_a_page_names_exists(page: Path) -> None:
    assert [name for name in TEST_FILE.findall(page.read_text()) if not (ROOT / name).is_file()] == []


def test_the_index_of_the_documentation_has_one_line_for_each_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text()
    listed = re.findall(r"^- \[[^\]]*\]\(([^)#]+)\):", index, re.MULTILINE)
    pages = {path.name for path in docs.glob("*.md")} - {"README.md"}
    groups = re.findall(r"^## ", index, re.MULTILINE)

    assert sorted(file for file in listed if "/" not in file) == sorted(pages)
    assert "migration/README.md" in listed
    assert len(groups) == 6
