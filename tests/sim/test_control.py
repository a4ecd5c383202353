"""Endpoints without inference: models, metrics, bodies that are not JSON, received requests."""

from __future__ import annotations

import base64

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.waiting import until

from kvroute.blocks.keys import CacheSpace, block_keys
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.prompts import encode


async def figures(http: httpx.AsyncClient) -> dict[str, float]:
    """All samples of /metrics, as a Prometheus server reads them; the last label value distinguishes."""
    samples = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason")
            samples[f"{sample.name}/{reason}" if reason else sample.name] = sample.value
    return samples


async def test_models_name_their_adapters_parents(client: openai.AsyncOpenAI) -> None:
    cards = {card.id: card.model_dump() for card in (await client.models.list()).data}

    assert list(cards) == ["sim-model", "alias", "ada"]
    assert cards["ada"]["parent"] == "sim-model"
    assert cards["sim-model"]["parent"] is None
    assert cards["sim-model"]["max_model_len"] == 131_072


async def test_liveness_and_version(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ping"):
        answer = await http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await http.get("/version")).json() == {"version": "0.32.0"}


async def test_metrics_have_vllms_names_and_the_caches_size(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json={"prompt": "hello " * 40, "max_tokens": 5})
    await http.post("/v1/completions", json={"prompt": "hello " * 40, "max_tokens": 5})
    page = await http.get("/metrics")
    samples = await figures(http)

    assert 'block_size="16"' in page.text
    assert 'num_gpu_blocks="75000"' in page.text
    assert 'kv_cache_size_tokens="1200000"' in page.text
    assert samples["vllm:prefix_cache_queries_total"] == 160
    assert samples["vllm:prefix_cache_hits_total"] == 64
    assert samples["vllm:generation_tokens_total"] == 10
    assert samples["vllm:request_success_total/length"] == 2
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["process_start_time_seconds"] > 1e9


async def test_a_client_that_leaves_counts_as_an_abort(http: httpx.AsyncClient, sim: RunningSim) -> None:
    for stream in (True, False):
        body = {"prompt": "x", "max_tokens": 100_000, "stream": stream}
        async with httpx.AsyncClient(base_url=sim.url) as leaving:
            request = leaving.build_request("POST", "/v1/completions", json=body)
            if stream:
                answer = await leaving.send(request, stream=True)
                await anext(answer.aiter_raw())
                await answer.aclose()
            else:
                request.extensions["timeout"] = {"connect": 5, "read": 0.05, "write": 5, "pool": 5}
                with pytest.raises(httpx.ReadTimeout):
                    await leaving.send(request)
        await until(lambda: not sim.engine.has_work)

    samples = await figures(http)
    assert samples["vllm:request_success_total/abort"] == 2
    assert samples["vllm:num_requests_running"] == 0


async def test_the_cache_can_be_reset(http: httpx.AsyncClient, sim: RunningSim) -> None:
    await http.post("/v1/completions", json={"prompt": "hello " * 40})

    assert (await http.post("/reset_prefix_cache")).json() == {"success": True}
    assert sim.engine.cache.held_keys == set()


async def test_unknown_paths_and_methods(http: httpx.AsyncClient) -> None:
    missing = await http.get("/v1/nothing")
    wrong = await http.get("/v1/completions")

    assert (missing.status_code, missing.json()["error"]["message"]) == (404, "Not Found")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "Method Not Allowed")
    assert (await http.delete("/v1/responses/x")).status_code == 404


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'"x"', "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"prompt": "x"}', "text/plain", 400),
        (b'{"prompt": "x"}', "", 400),
        (b'{"prompt": "x", "temperature": NaN}', "application/json", 200),
        (b'{"prompt": "x", "prompt": "y"}', "application/json; charset=utf-8", 200),
        (b'{"prompt": "x", "seed": 123456789012345678901234567890}', "Application/JSON", 200),
        ('{"prompt": "x"}'.encode("utf-16"), "application/json", 200),
    ],
)
async def test_bodies_are_read_as_pythons_json_reads_them(
    http: httpx.AsyncClient, content: bytes, kind: str, status: int
) -> None:
    headers = {"content-type": kind} if kind else {}
    answer = await http.post("/v1/completions", content=content, headers=headers)

    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["type"] == "Bad Request"


async def test_received_requests_are_kept_byte_for_byte(http: httpx.AsyncClient, sim: RunningSim) -> None:
    body = b'{"prompt" :  "x"  }\n'
    headers = [(b"content-type", b"application/json"), (b"X-Odd", b"caf\xe9")]
    await http.post("/v1/completions?a=%20b", content=body, headers=headers)

    log = (await http.get("/sim/requests")).json()
    (request,) = log["requests"]
    assert (request["method"], request["target"]) == ("POST", "/v1/completions?a=%20b")
    assert ["x-odd", "caf\xe9"] in request["headers"]
    assert base64.b64decode(request["body"]) == body
    assert sim.worker.received[0].body == body
    assert (log["received"], log["by_path"]) == (1, {"/v1/completions": 1})
    assert log["finished"] == {"length": 1}

    await http.delete("/sim/requests")
    assert (await http.get("/sim/requests")).json()["requests"] == []


async def test_the_log_is_bounded_and_can_be_off() -> None:
    for limit, recorded in ((2, 2), (0, 0)):
        options = SimOptions(time_scale=0, recorded_requests=limit)
        async with run_sim(options) as sim, httpx.AsyncClient(base_url=sim.url) as http:
            for _ in range(4):
                await http.get("/health")

            assert (len(sim.worker.received), sim.worker.counters.requests) == (recorded, 4)


async def test_cached_tokens_can_be_omitted() -> None:
    options = SimOptions(time_scale=0, report_cached_tokens=False, kv_events=False)
    async with run_sim(options) as sim, httpx.AsyncClient(base_url=sim.url) as http:
        chat = {"messages": [{"role": "user", "content": "x"}]}
        answer = (await http.post("/v1/chat/completions", json=chat)).json()
        message = (await http.post("/v1/messages", json={**chat, "max_tokens": 1})).json()

        assert answer["usage"]["prompt_tokens_details"] is None
        assert set(message["usage"]) == {"input_tokens", "output_tokens"}
        assert (await http.get("/kv_event_sources")).json() == {}


async def test_the_cached_blocks_are_listed_by_their_keys(http: httpx.AsyncClient) -> None:
    text = "hello " * 40  # 80 tokens, five blocks
    await http.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
    cached = (await http.get("/sim/cache")).json()

    keys = block_keys(encode(text).tobytes(), block_bytes=4 * 16, seed=CacheSpace("", "").seed)
    assert cached == {"block_size": 16, "keys": sorted(keys)}
