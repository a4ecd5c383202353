from __future__ import annotations

import sys
from pathlib import Path

import pytest

from compare import OTHER, THIS, Checkout, Samples, compare_scripts, order, split_arguments
from pairs import Pair


@pytest.mark.parametrize("runs", [1, 2, 5, 6])
def test_each_checkout_runs_as_often_as_the_other_and_begins_as_often(runs):
    even, odd = order(0, runs), order(1, runs)

    assert even.count(THIS) == even.count(OTHER) == runs
    assert [name == THIS for name in even] == [name == OTHER for name in odd]


def test_within_a_pair_both_run_equally_late_on_average():
    places = {THIS: 0, OTHER: 0}
    for place, name in enumerate(order(0, 6)):
        places[name] += place

    assert places[THIS] == places[OTHER]


def test_a_pair_needs_a_good_run_of_both_and_takes_their_medians():
    samples = Samples()
    for value in (1.0, 2.0, 90.0):
        samples.add("a", 0, THIS, {"cpu": value})
    samples.add("a", 0, OTHER, {"cpu": 4.0})
    samples.add("a", 1, THIS, {"cpu": 1.0})

    assert samples.pairs("a", "cpu") == [Pair(2.0, 4.0)]
    assert samples.figures("a") == ["cpu"]


def test_arguments_after_two_dashes_go_to_the_script():
    assert split_arguments(["x", "--pairs", "2", "--", "--blocks", "9"]) == (
        ["x", "--pairs", "2"],
        ["--blocks", "9"],
    )
    assert split_arguments(["x"]) == (["x"], [])


SCRIPT = """
import json, sys
from pathlib import Path
record = Path(__file__).parents[2] / "order"
record.write_text((record.read_text() if record.exists() else "") + Path(__file__).parents[1].name + " ")
print(json.dumps({{"cost us": {cost}, "things/s": {rate}, "arguments": len(sys.argv)}}))
"""


def test_micro_benchmarks_of_both_checkouts_alternate_and_are_compared_figure_by_figure(tmp_path: Path):
    sides = tuple(Checkout(name, tmp_path / name, Path(sys.prefix)) for name in (THIS, OTHER))
    for side, cost, rate in zip(sides, (30, 10), (1e6, 2e6), strict=True):
        (side.folder / "bench").mkdir(parents=True)
        (side.folder / "bench" / "micro_x.py").write_text(SCRIPT.format(cost=cost, rate=rate))
    options = type("Options", (), {"micro": "micro_x", "same_script": False, "pairs": 2, "rest": ["--few"]})

    samples = Samples()
    compare_scripts(options, sides, samples)

    assert (tmp_path / "order").read_text().split() == [THIS, OTHER, OTHER, THIS]
    assert samples.pairs("micro_x", "cost us") == [Pair(30, 10), Pair(30, 10)]
    assert samples.pairs("micro_x", "things, us each") == [Pair(1.0, 0.5), Pair(1.0, 0.5)]
    assert samples.pairs("micro_x", "arguments") == [Pair(3, 3), Pair(3, 3)]
