"""How the CPU of several gateway processes is judged (bench/processes_cpu.py)."""

from __future__ import annotations

import pytest

from processes_cpu import lines, summary


def judged(one: float, several: float, independent: float) -> tuple[bool, str]:
    rows: list[dict[str, object]] = [
        {"scenario": "b", "one": level * one, "several": level * several, "independent": level * independent}
        for level in (100.0, 300.0, 150.0, 90.0)  # a shared machine's speed
    ]
    found = summary(rows)
    (line,) = lines({"scenarios": found, "processes": 4})
    return bool(found["b"]["is_met"]), line


@pytest.mark.parametrize(
    ("several", "independent", "is_met"),
    [(1.34, 1.0, True), (1.36, 1.0, False), (1.9, 1.75, True), (1.9, 1.7, False)],
)
def test_one_of_both_goals_must_be_met(several, independent, is_met):
    met, line = judged(1.0, several, independent)

    assert met is is_met
    assert ("MISSED" in line) is not is_met
    assert f"{several:.2f} x one (goal 1.35)" in line
    assert f"{several / independent:.2f} ({several / independent:.2f} to " in line
