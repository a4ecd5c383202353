"""Two simulated workers that exchange KV as vLLM's NixlConnector does."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PROMPT = "word " * 400
MEMBERS = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
    "remote_prefill_cached_tokens",
}


@pytest.fixture
async def pair() -> AsyncIterator[tuple[RunningSim, RunningSim]]:
    options = SimOptions(nixl=True, time_scale=0)
    async with run_sim(options) as prefill, run_sim(options) as decode:
        yield prefill, decode


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as client:
        yield client


async def post(http: httpx.AsyncClient, worker: RunningSim, path: str, **body: Any) -> dict[str, Any]:
    answer = await http.post(worker.url + path, json={"max_tokens": 8, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def figures(http: httpx.AsyncClient, worker: RunningSim) -> dict[str, float]:
    page = (await http.get(worker.url + "/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^(vllm:\S+) ([0-9.e+-]+)$", page, re.M)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/responses", {"input": PROMPT}),
    ],
)
async def test_the_decode_worker_gets_the_whole_prompt_by_transfer(path, body, pair, http) -> None:
    prefill, decode = pair

    first = await post(http, prefill, path, **body | {"max_tokens": 1, "kv_transfer_params": ASK})
    params = first["kv_transfer_params"]
    assert set(params) == MEMBERS
    assert prefill.engine.cache.usage > 0
    second = await post(http, decode, path, **body | {"kv_transfer_params": params})

    assert prefill.engine.cache.usage == 0
    tokens = params["remote_num_tokens"]
    assert decode.engine.counters.external_hits == tokens
    assert decode.engine.counters.computed_tokens == 1
    assert second.get("kv_transfer_params") is None
    alone = await post(http, prefill, path, **body)
    texts = [re.search(r"'(?:text|content)': '([^']+)'", str(answer)) for answer in (second, alone)]
    assert texts[0] is not None
    assert texts[1] is not None
    assert texts[0][1] == texts[1][1]


async def test_figures_have_vllms_names(pair, http) -> None:
    prefill, decode = pair
    first = await post(http, prefill, "/v1/completions", prompt=PROMPT, max_tokens=1, kv_transfer_params=ASK)
    params = first["kv_transfer_params"]

    second = await post(http, decode, "/v1/completions", prompt=PROMPT, kv_transfer_params=params)

    labels = 'engine="0",model_name="sim-model"'
    found = await figures(http, decode)
    assert found[f"vllm:external_prefix_cache_hits_total{{{labels}}}"] == params["remote_num_tokens"]
    by_source = f'vllm:prompt_tokens_by_source_total{{{labels},source="external_kv_transfer"}}'
    assert found[by_source] == params["remote_num_tokens"]
    assert found['vllm:nixl_xfer_time_seconds_count{engine="0"}'] == 1
    # usage counts the worker's own cache only
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_later_turn_fetches_only_what_the_decode_worker_lacks(pair, http) -> None:
    prefill, decode = pair
    for prompt in (PROMPT, PROMPT + "more " * 100):
        first = await post(
            http, prefill, "/v1/completions", prompt=prompt, max_tokens=1, kv_transfer_params=ASK
        )
        params = first["kv_transfer_params"]
        await post(http, decode, "/v1/completions", prompt=prompt, kv_transfer_params=params)

    size = decode.engine.cache.block_size
    assert decode.engine.counters.cache_hits == pytest.approx(len(PROMPT) / 4, abs=400)
    assert params["remote_prefill_cached_tokens"] % size == 0
    assert decode.engine.counters.external_hits < 2 * params["remote_num_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_dead_prefill_worker_fails_the_second_leg(streamed, pair, http) -> None:
    prefill, decode = pair
    first = await post(http, prefill, "/v1/completions", prompt=PROMPT, max_tokens=1, kv_transfer_params=ASK)
    await prefill.kill()

    body = {"prompt": PROMPT, "stream": streamed, "kv_transfer_params": first["kv_transfer_params"]}
    answer = await http.post(decode.url + "/v1/completions", json=body)

    assert answer.status_code == (200 if streamed else 500)
    assert answer.text.startswith('data: {"error":' if streamed else '{"error":')


async def test_with_recompute_the_second_leg_computes_the_prompt(pair, http) -> None:
    prefill, _ = pair
    first = await post(http, prefill, "/v1/completions", prompt=PROMPT, max_tokens=1, kv_transfer_params=ASK)
    await prefill.restart()  # the blocks are gone, although the worker answers

    async with run_sim(SimOptions(nixl=True, time_scale=0, kv_load_failure_policy="recompute")) as decode:
        params = first["kv_transfer_params"]
        await post(http, decode, "/v1/completions", prompt=PROMPT, kv_transfer_params=params)

        assert decode.engine.counters.external_hits == 0
        assert decode.engine.counters.computed_tokens == params["remote_num_tokens"]
        assert decode.worker.transfers.failed == 1


async def test_with_two_answers_the_blocks_of_one_wait_for_the_lease(http) -> None:
    async with run_sim(SimOptions(nixl=True, time_scale=0)) as prefill:
        await post(http, prefill, "/v1/completions", prompt=PROMPT, max_tokens=1, n=2, kv_transfer_params=ASK)

        assert len(prefill.worker.transfers.kept) == 2


async def test_blocks_that_nobody_reads_are_free_after_the_lease(http) -> None:
    async with run_sim(SimOptions(nixl=True, time_scale=0, kv_lease_s=0.001)) as prefill:
        await post(http, prefill, "/v1/completions", prompt=PROMPT, max_tokens=1, kv_transfer_params=ASK)
        while prefill.worker.transfers.kept:
            await prefill.worker.clock.sleep(0.001)

        assert prefill.engine.cache.usage == 0
        assert prefill.worker.transfers.expired == 1


async def test_without_the_connector_the_parameters_have_no_effect(http) -> None:
    async with run_sim(SimOptions(time_scale=0)) as worker:
        answer = await post(http, worker, "/v1/completions", prompt=PROMPT, kv_transfer_params=ASK)

        assert answer["kv_transfer_params"] is None
