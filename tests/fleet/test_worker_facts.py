from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.fleet.worker import (
    FetchedTokens,
    LearnedConcurrency,
    MetricsPage,
    parse_metrics,
    parse_models,
    release_of,
    same_cards,
)

PAGE = b"""\
# HELP python_info Python platform information
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76361234567e+09
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",cache_dtype="auto",enable_prefix_caching="True",engine="0",\
kv_cache_size_tokens="524288",num_gpu_blocks="4096",num_gpu_blocks_override="None"} 1.0
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
"""


def models(*cards: dict[str, object]) -> bytes:
    return json.dumps({"object": "list", "data": cards}).encode()


def test_a_model_list_gives_names_adapters_and_cards() -> None:
    base = {"id": "org/base", "object": "model", "root": "/weights", "parent": None, "max_model_len": 4096}
    adapter = {"id": "sql", "object": "model", "root": "/loras/sql", "parent": "org/base"}

    page = parse_models(models(base, adapter))

    assert page.models == {"org/base", "sql"}
    assert page.adapters == (("sql", "org/base"),)
    assert page.cards == (base, adapter)


def test_cards_without_a_name_are_skipped() -> None:
    body = b'{"data": [{"id": 7}, {}, "x", {"id": "m"}]}'

    assert parse_models(body).models == {"m"}


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"data": {}}', b"\xff"])
def test_an_answer_that_is_no_model_list_is_an_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_models(body)


def test_model_cards_that_differ_only_in_generated_fields_are_the_same() -> None:
    first = {"id": "m", "created": 1, "permission": [{"id": "modelperm-1"}]}
    later = {"id": "m", "created": 2, "permission": [{"id": "modelperm-2"}]}

    assert same_cards([first], [later])
    assert not same_cards([first], [{**later, "max_model_len": 1}])
    assert not same_cards([first], [later, later])


def test_a_metrics_page_gives_capacity_block_size_and_start_time() -> None:
    assert parse_metrics(PAGE) == MetricsPage(524288, 128, 1.76361234567e9)


def test_capacity_is_blocks_times_block_size_if_no_size_is_reported() -> None:
    page = PAGE.replace(b'kv_cache_size_tokens="524288"', b'kv_cache_size_tokens="None"')

    assert parse_metrics(page).capacity_tokens == 4096 * 128
    assert parse_metrics(page.replace(b"kv_cache_size_tokens", b"other")).capacity_tokens == 4096 * 128


def test_capacity_is_unknown_before_the_engine_has_counted_its_blocks() -> None:
    page = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'

    assert parse_metrics(page) == MetricsPage(None, 16, None)


def test_pools_of_data_parallel_ranks_add_up_and_repeated_lines_do_not() -> None:
    line = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="10"} 1.0\n'
    page = "".join([line % 0, line % 1, line % 1])

    assert parse_metrics(page.encode()).capacity_tokens == 2 * 160


def test_names_are_found_at_the_start_of_a_line_only() -> None:
    page = b'x{y="\\nvllm:cache_config_info{block_size=9}"} 1\n# process_start_time_seconds 7\n'

    assert parse_metrics(page) == MetricsPage()


def test_a_last_line_without_an_end_is_read() -> None:
    assert parse_metrics(b"a 1\nprocess_start_time_seconds 12.5").start_time == 12.5


def test_a_start_time_that_is_no_number_is_absent() -> None:
    assert parse_metrics(b"process_start_time_seconds x\nprocess_start_time_seconds \n").start_time is None


@given(
    st.lists(
        st.sampled_from([PAGE, b"vllm:cache_config_info{", b'engine="', b"\n", b'"', b"\xff", b"9" * 5000])
    )
)
def test_no_page_breaks_the_scan(parts: list[bytes]) -> None:
    parse_metrics(b"".join(parts))


def test_a_model_list_that_is_nested_too_deeply_is_none() -> None:
    with pytest.raises(ValueError, match="nested"):
        parse_models(b'{"data":' + b"[" * 100_000)


@pytest.mark.parametrize(
    ("page", "has_drafter"),
    [
        (b'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0\n', True),
        (b"# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.\n", False),
        (b'vllm:num_requests_running{model_name="m"} 0.0\n', False),
    ],
)
def test_a_metrics_page_shows_a_drafter(page: bytes, has_drafter: bool) -> None:
    assert parse_metrics(page).has_drafter is has_drafter


def test_a_metrics_page_gives_the_numbers_of_requests_of_all_ranks() -> None:
    page = b"""vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} NaN
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
"""

    found = parse_metrics(page)

    assert (found.running, found.waiting) == (7, 2)
    assert parse_metrics(b"vllm:num_requests_waiting_by_reason{} 9.0\n").waiting is None


def learned(*pages: tuple[int, int]) -> int | None:
    """The limit after pages with (running, waiting)."""
    concurrency = LearnedConcurrency()
    for running, waiting in pages:
        concurrency = concurrency.after(running, waiting)
    return concurrency.limit


def test_the_concurrency_is_learned_from_three_pages_with_waiting_requests_and_equal_running_ones() -> None:
    assert learned((256, 9), (256, 1)) is None
    assert learned((256, 9), (256, 1), (256, 40)) == 256


def test_requests_that_wait_for_another_reason_teach_no_concurrency() -> None:
    assert learned((3, 1), (5, 2), (4, 1), (6, 3)) is None, "long prompts: the number of running ones changes"
    assert learned((64, 1), (64, 0), (64, 1), (64, 0)) is None, "no requests wait"
    assert learned((0, 1), (0, 1), (0, 1)) is None, "no requests run"


def test_a_learned_concurrency_stays_while_no_requests_wait() -> None:
    assert learned((8, 1), (8, 1), (8, 1), (3, 0), (8, 1)) == 8


def test_tokens_from_other_engines_are_those_of_all_ranks() -> None:
    page = b"""# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 1000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 500.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 646.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="external_kv_transfer"} 1.2e+03
"""

    assert parse_metrics(page).fetched_tokens == 1846


def test_tokens_from_other_engines_count_from_the_first_read_and_across_restarts() -> None:
    fetched = FetchedTokens()

    totals = [(fetched := fetched.after(counter)).total for counter in (1000, 1600, 1600, 200, 300)]

    assert totals == [0, 600, 600, 800, 900]


@pytest.mark.parametrize(
    "figure", ["9" * 400, "9" * 5000, "-" + "9" * 400, "-1", "NaN", "+Inf", "-Inf", "1e308"]
)
def test_figures_without_bounds_are_not_believed(figure: str) -> None:
    """A start that is NaN would be a new one at each page, and a capacity of 400 digits is no float."""
    label = f'{{engine="0",block_size="{figure}",num_gpu_blocks="{figure}",kv_cache_size_tokens="{figure}"}}'
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "request_success_total")
    lines = [f"process_start_time_seconds {figure}", f"vllm:cache_config_info{label} 1.0"]
    page = parse_metrics("\n".join([*lines, *(f'vllm:{name}{{a="b"}} {figure}' for name in names)]).encode())

    assert (page.start_time, page.capacity_tokens, page.block_size) == (None, None, None)
    assert (page.running, page.waiting, page.kv_usage, page.ended) == (0, 0, 0.0, 0)


def test_a_release_of_many_digits_is_no_error() -> None:
    assert (release_of(f"{'9' * 5000}.1.0") or ())[1:] == (1, 0)
