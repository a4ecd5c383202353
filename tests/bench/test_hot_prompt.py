"""The hot prompt in virtual time (bench/hot_prompt.py), on little of its traffic."""

from __future__ import annotations

import json
import sys

import pytest

import hot_prompt


@pytest.mark.parametrize("strategy", hot_prompt.STRATEGIES[1:])
def test_a_hot_prompt_that_no_worker_can_use_costs_hardly_more_than_with_round_robin(strategy: str) -> None:
    found, spread = (
        hot_prompt.measure(name, drafter=False, load=0.8, requests=200, seed=1)
        for name in (strategy, "roundrobin")
    )
    assert found.latency_s <= 1.15 * spread.latency_s
    assert found.cached == 0
    assert min(found.requests) >= 40


def test_with_a_drafter_the_map_stays_in_use_and_promises_what_is_found() -> None:
    found = hot_prompt.measure("kvaware", drafter=True, load=0.5, requests=100, seed=0)
    assert found.used == 1.0
    assert found.cached <= found.promised <= found.cached + 16 * 3


def test_a_run_is_repeatable_and_can_be_read_by_a_program(monkeypatch, capsys) -> None:
    argv = ["hot_prompt.py", "--json", "--seeds", "1", "--requests", "20", "--load", "0.5"]
    monkeypatch.setattr(sys, "argv", argv)
    assert hot_prompt.main() in (0, 1)
    first = capsys.readouterr().out
    hot_prompt.main()
    assert capsys.readouterr().out == first
    assert [row["strategy"] for row in json.loads(first)] == list(hot_prompt.STRATEGIES)
