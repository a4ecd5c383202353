"""Every finding is documented."""

from __future__ import annotations

import re
from pathlib import Path

from kvroute.doctor.checks import MATRIX
from kvroute.doctor.observations import Finding, Severity, exit_code

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_docs_list_exactly_the_codes_of_the_checks() -> None:
    code = re.compile(r'(?:error|warning|unchecked)\(\s*"([a-z0-9-]+)"')
    source = "".join(file.read_text() for file in (ROOT / "src/kvroute/doctor").glob("*checks.py"))
    cells = re.findall(r"^\| (`[^|]+`) \|", GUIDE.partition("## Findings")[2].partition("## Traces")[0], re.M)

    assert set(code.findall(source)) == {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_docs_have_the_matrix_of_releases() -> None:
    for row in MATRIX:
        assert f"| {'.'.join(map(str, row.since))} |" in GUIDE


def test_only_errors_count() -> None:
    warning = Finding("c", Severity.WARNING, "s", "w", "y", "f")

    assert exit_code([]) == exit_code([warning]) == 0
    assert exit_code([warning, Finding("e", Severity.ERROR, "s", "w")]) == 1
