from __future__ import annotations

import math
import random

import pytest

from pairs import FEWEST_PAIRS, Compared, Pair, Ratio, as_costs, flatten, lines, passes, ratio_of, t_975


def paired(ratio: float, noise: float, count: int, seed: int = 0) -> list[Pair]:
    """Pairs whose common level drifts by a factor of four, as a shared machine's speed does."""
    rng = random.Random(seed)
    pairs = []
    for number in range(count):
        level = 50 * 4 ** (number / count)
        pairs.append(Pair(level * ratio * math.exp(rng.gauss(0, noise)), level))
    return pairs


def judged(ratio: Ratio) -> Compared:
    return Compared("a", "cpu_us_request", ratio, is_judged=True)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (11, 2.201), (30, 2.042), (40, 2.021), (120, 1.980)]
)
def test_t_quantiles_agree_with_published_tables(freedom, quantile):
    assert t_975(freedom) == pytest.approx(quantile, abs=0.0006)


def test_a_quantile_without_degrees_of_freedom_is_an_error():
    with pytest.raises(ValueError, match="degree of freedom"):
        t_975(0)


def test_the_ratio_is_the_geometric_mean_and_its_interval_is_symmetric_in_logarithms():
    ratio = ratio_of([Pair(2.0, 1.0), Pair(1.0, 2.0), Pair(4.0, 1.0), Pair(1.0, 4.0)])

    assert ratio.ratio == pytest.approx(1.0)
    assert ratio.low * ratio.high == pytest.approx(1.0)
    logs = [math.log(value) for value in (2, 0.5, 4, 0.25)]
    spread = math.sqrt(sum(value**2 for value in logs) / 3)
    assert ratio.high == pytest.approx(math.exp(3.182 * spread / 2))


def test_drift_that_both_sides_share_does_not_widen_the_interval():
    ratio = ratio_of(paired(1.05, 0.0, 8))

    assert ratio.low == pytest.approx(1.05)
    assert ratio.high == pytest.approx(1.05)


def test_the_interval_covers_the_true_ratio_in_95_percent_of_experiments():
    covered = 0
    for seed in range(2000):
        ratio = ratio_of(paired(1.02, 0.05, 6, seed))
        covered += ratio.low <= 1.02 <= ratio.high

    assert 0.935 < covered / 2000 < 0.965


def test_only_an_interval_wholly_above_the_limit_fails():
    assert not passes([judged(ratio_of(paired(1.10, 0.01, 8)))], 1.02)
    assert passes([judged(ratio_of(paired(1.10, 0.30, 8)))], 1.02)
    assert passes([judged(ratio_of(paired(1.00, 0.01, 8)))], 1.02)


def test_the_wide_interval_of_a_noisy_run_is_called_undecided():
    noisy, calm, dear = (
        judged(ratio_of(paired(*case, 8))) for case in ((1.0, 0.3), (0.9, 0.01), (1.1, 0.01))
    )

    assert [one.verdict(1.02) for one in (noisy, calm, dear)] == ["undecided", "not above 1.02", "ABOVE 1.02"]


def test_too_few_pairs_are_no_verdict_and_do_not_pass():
    few = judged(ratio_of(paired(1.0, 0.01, FEWEST_PAIRS - 1)))

    assert not passes([few], 1.02)
    assert "fewer than" in lines([few], 1.02)[-1]


def test_nothing_judged_does_not_pass():
    shown = Compared("l", "first_byte_p99_us", ratio_of(paired(2.0, 0.01, 8)), is_judged=False)

    assert not passes([], 1.02)
    assert not passes([shown], 1.02)
    assert passes([shown, judged(ratio_of(paired(1.0, 0.01, 8)))], 1.02)


def test_the_report_ends_with_the_verdict_and_names_what_failed():
    good, bad = judged(ratio_of(paired(1.0, 0.01, 8))), judged(ratio_of(paired(1.1, 0.01, 8)))

    assert lines([good], 1.02)[-1] == "verdict: no ratio whose interval lies wholly above 1.02"
    assert lines([good, bad], 1.02)[-1].endswith("wholly above 1.02: a cpu_us_request")
    assert lines([judged(ratio_of([Pair(1, 1)]))], 1.02)[1].split()[-4:-3] == ["unbounded"]


@pytest.mark.parametrize("pairs", [[], [Pair(0.0, 1.0)], [Pair(1.0, -1.0)]])
def test_figures_without_a_ratio_are_an_error(pairs):
    with pytest.raises(ValueError, match="positive"):
        ratio_of(pairs)


def test_the_numbers_of_a_script_are_named_by_their_paths():
    document = {"ingest": {"prompts blocks/s": 2e6}, "ok": True, "rows": [{"model": "tiny", "cold": 3.5}]}

    assert flatten(document) == {"ingest, prompts blocks/s": 2e6, "rows, tiny 0, cold": 3.5}


def test_rates_become_costs_so_that_less_is_better_everywhere():
    assert as_costs({"blocks/s": 2e6, "match us": 7.0, "nothing": 0.0}) == {
        "blocks, us each": 0.5,
        "match us": 7.0,
    }
