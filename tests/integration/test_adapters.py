"""LoRA adapters' key spaces end to end: what workers get is what is predicted."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions

BASE, ADAPTERS = "sim-model", ("ada", "org/bob")
MODELS = (BASE, *ADAPTERS)
OPTIONS = SimOptions(time_scale=0, loras=dict.fromkeys(ADAPTERS, BASE))
PROMPT = list(range(10, 650))
TEXT = "one two three " * 300
KVAWARE: dict[str, Any] = {
    "routing": {"strategy": "kvaware"},
    "tokens": {"timeout_ms": 10_000, "computed_samples": False},
}


@pytest.fixture
async def sim() -> AsyncIterator[RunningSim]:
    async with run_sim(OPTIONS) as sim:
        yield sim


async def received(sim: RunningSim) -> list[dict[str, Any]]:
    """The bodies that the worker got, oldest first; they are forgotten then."""
    async with httpx.AsyncClient(base_url=sim.url, trust_env=False) as client:
        requests = (await client.get("/sim/requests")).json()["requests"]
        await client.delete("/sim/requests")
    bodies = [base64.b64decode(each["body"]) for each in requests if each["method"] == "POST"]
    return [json.loads(body) for body in bodies if body]


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def ask(running: Any, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    # On /invocations vLLM ignores the body's model; on other paths, the header.
    headers = {"x-amzn-sagemaker-adapter-identifier": body.get("model", "")}
    answer = await running.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("sections", [KVAWARE, {"routing": {"strategy": "prefixaware"}}])
async def test_each_model_hits_its_own_blocks_as_predicted(run_gateway, sim, sections) -> None:
    async with run_gateway([sim.url], **sections) as running:
        following = running.runtime.cache_tracker
        if following is not None:
            await running.until(lambda: not following.notes())
        for tenant in ({}, {"cache_salt": "t"}):
            for model in MODELS:
                first = await ask(running, model=model, prompt=PROMPT, max_tokens=1, **tenant)
                assert (cached(first), int(first.headers["x-kvroute-hit-tokens"])) == (0, 0)
        if following is not None:
            blocks = 6 * len(PROMPT) // 16
            await running.until(lambda: following.describe()["held_blocks"] >= blocks)
        for tenant in ({}, {"cache_salt": "t"}):
            for model in MODELS:
                again = await ask(running, model=model, prompt=PROMPT, max_tokens=1, **tenant)
                assert cached(again) == len(PROMPT) - 16
                predicted = int(again.headers["x-kvroute-hit-tokens"])
                assert predicted == cached(again) if following is not None else predicted > 0
        assert running.metric("kvroute_isolated_requests_total") == 2 * 2 * len(ADAPTERS)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT, "n": 2, "stream": True}),
        ("/v1/completions", {"prompt": [TEXT, TEXT + "!"]}),
        ("/v1/completions", {"prompt": [PROMPT, PROMPT[:100]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT * 4}], "stream": True}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
        ("/invocations", {"prompt": TEXT}),
    ],
)
async def test_every_form_of_a_request_is_changed_in_those_two_members_only(
    run_gateway, sim, path, body
) -> None:
    async with run_gateway([sim.url]) as running:
        for _ in range(3):  # a long chat's beginning is recognised from the second time on
            for model in ADAPTERS:
                await received(sim)
                await ask(running, path, model=model, **body)
                (got,) = await received(sim)
                salt, params = got.pop("cache_salt"), got.pop("kv_transfer_params")
                assert got == {"model": model, **body}
                assert [*params.values()] == [salt]
                assert salt.startswith("kvroute-lora-")


async def test_an_adapters_body_that_cannot_be_read_is_refused_counted_and_logged(
    run_gateway, sim, caplog
) -> None:
    body = b'{"model":"ada","prompt":"p","temperature":NaN}'
    async with run_gateway([sim.url]) as running:
        for _ in range(2):
            answer = await running.client.post("/v1/completions", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "adapter_not_isolated"
        rejected = running.metric("kvroute_requests_rejected_total", code="adapter_not_isolated")
        assert rejected == 2
    warnings = [record for record in caplog.records if "cannot get a key space" in record.getMessage()]
    assert len(warnings) == 1
    assert await received(sim) == []


async def test_turned_off_every_request_stays_as_it_came(run_gateway, sim) -> None:
    async with run_gateway([sim.url], lmcache={"isolate_adapters": False}) as running:
        assert not running.runtime.plane.planner.isolates
        await ask(running, model="ada", prompt="p", cache_salt="t")
    assert await received(sim) == [{"model": "ada", "prompt": "p", "cache_salt": "t"}]


async def test_only_fleets_with_adapters_isolate(run_gateway, sim, instant_sim) -> None:
    async with run_gateway([instant_sim.url]) as running:
        assert not running.runtime.plane.planner.isolates
    async with run_gateway([sim.url, instant_sim.url]) as running:
        assert running.runtime.plane.planner.isolates


async def test_explain_predicts_the_hits_of_an_adapters_request(run_gateway, sim) -> None:
    async with run_gateway([sim.url], routing={"strategy": "prefixaware"}) as running:
        body = {"model": "ada", "prompt": TEXT}
        await ask(running, **body)
        explained = (await running.client.post("/v1/route/explain", json=body)).json()
        other = (await running.client.post("/v1/route/explain", json={**body, "model": BASE})).json()
        assert explained["ranking"][0]["matched_tokens"] > 0
        assert other["ranking"][0]["matched_tokens"] == 0
