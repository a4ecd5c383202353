"""The arithmetic of the churn bench."""

from __future__ import annotations

from dataclasses import replace

import pytest

from churn import Held, exceeding, slope_mb

HELD = Held(tasks=5, sockets=9, descriptors=12, memory_mb=80.0)


def test_the_slope_is_per_ten_minutes():
    points = [(float(second), 80.0 + second / 300) for second in range(300, 1800, 10)]

    assert slope_mb(points) == pytest.approx(2.0)
    assert slope_mb([(at, 80.0 + (at % 20 == 0)) for at, _ in points]) == pytest.approx(0.0, abs=0.05)


def test_only_more_tasks_sockets_and_descriptors_are_a_leak():
    assert exceeding(HELD, replace(HELD, tasks=4, memory_mb=100.0)) == []
    assert exceeding(HELD, replace(HELD, tasks=6, sockets=10)) == [
        "6 tasks after the churn, 5 before",
        "10 sockets after the churn, 9 before",
    ]
