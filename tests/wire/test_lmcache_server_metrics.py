from __future__ import annotations

import pytest

from kvroute.wire.lmcache_server import LoadRates, read_load_rates

PAGE = """\
# HELP lmcache_mp_l2_load_throughput_GB_per_second Histogram of L2->L1 load throughput in GB/s
# TYPE lmcache_mp_l2_load_throughput_GB_per_second histogram
lmcache_mp_l2_load_throughput_GB_per_second_bucket{l2_name="resp",le="5.0"} 3.0
lmcache_mp_l2_load_throughput_GB_per_second_count{l2_name="resp"} 3.0
lmcache_mp_l2_load_throughput_GB_per_second_sum{l2_name="resp"} 4.5
lmcache_mp_l2_load_throughput_GB_per_second_count{l2_name="fs"} 1.0
lmcache_mp_l2_load_throughput_GB_per_second_sum{l2_name="fs"} 0.5
lmcache_mp_l2_store_throughput_GB_per_second_count{l2_name="resp"} 9.0
lmcache_mp_l2_store_throughput_GB_per_second_sum{l2_name="resp"} 9.0
lmcache_mp_l0_l1_load_throughput_GB_per_second_count 2.0
lmcache_mp_l0_l1_load_throughput_GB_per_second_sum 40.0
"""


def test_gpus_and_adapters_are_added_up_and_stores_left_out() -> None:
    assert read_load_rates(PAGE) == LoadRates({"l2": 4, "l1": 2}, {"l2": 5.0, "l1": 40.0})


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "much"])
def test_lines_without_a_figure_are_skipped(value: str) -> None:
    assert read_load_rates(f"lmcache_mp_l2_load_throughput_sum {value}\n") == LoadRates()


def test_the_mean_of_the_loads_in_between() -> None:
    before = LoadRates({"l1": 10, "l2": 4}, {"l1": 100.0, "l2": 4.0})
    now = LoadRates({"l1": 14, "l2": 4}, {"l1": 120.0, "l2": 4.0})

    assert now.since(before) == {"l1": (5.0, 4)}
    assert now.since(LoadRates()) == {"l1": (pytest.approx(120 / 14), 14), "l2": (1.0, 4)}


def test_rates_restart_with_a_restarted_server() -> None:
    before = LoadRates({"l1": 10}, {"l1": 100.0})

    assert LoadRates({"l1": 2}, {"l1": 2.0}).since(before) == {}
