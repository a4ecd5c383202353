"""The openai package against /v1/completions."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from kvroute.sim.app import RunningSim
from kvroute.sim.prompts import encode

IDS = list(encode("hello there"))


@pytest.mark.parametrize(
    ("prompt", "choices", "tokens"),
    [
        ("hello there", 1, 4),
        (["hello there", "hi"], 2, 5),
        (IDS, 1, 4),
        ([IDS, [1, 2, 3]], 2, 7),
    ],
)
async def test_every_prompt_shape_is_answered_plain_and_streamed(
    client: openai.AsyncOpenAI, prompt: Any, choices: int, tokens: int
) -> None:
    plain = await client.completions.create(model="sim-model", prompt=prompt)
    stream = await client.completions.create(
        model="sim-model", prompt=prompt, stream=True, stream_options={"include_usage": True}
    )
    texts = [""] * choices
    reasons: list[str | None] = []
    usage = None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons.append(choice.finish_reason)
        usage = chunk.usage or usage

    assert [choice.text for choice in plain.choices] == texts
    assert plain.usage is not None
    assert usage is not None
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (tokens, 16 * choices)
    assert (usage.prompt_tokens, usage.completion_tokens) == (tokens, 16 * choices)
    assert reasons.count("length") == choices


async def test_a_text_and_its_ids_are_the_same_prompt(client: openai.AsyncOpenAI) -> None:
    text = await client.completions.create(model="sim-model", prompt="hello there")
    ids = await client.completions.create(model="sim-model", prompt=IDS)

    assert text.choices[0].text == ids.choices[0].text


async def test_echo_repeats_the_prompt_and_n_multiplies_every_prompt(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="sim-model", prompt=["ab", "cd"], echo=True, n=2, logprobs=1, max_tokens=2
    )

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 2, 5]
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text


async def test_echo_alone_generates_nothing(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="sim-model", prompt="ab", echo=True, max_tokens=0)

    assert answer.choices[0].text == "ab"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


async def test_a_stream_echoes_counts_and_lists_ids(http: httpx.AsyncClient) -> None:
    body = {
        "prompt": "hello",
        "max_tokens": 2,
        "stream": True,
        "echo": True,
        "logprobs": 0,
        "return_token_ids": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    lines = (await http.post("/v1/completions", json=body)).text.split("\n\n")

    first, second = (json.loads(line[6:]) for line in lines[:2])
    assert lines[2:] == ["data: [DONE]", ""]
    assert first["choices"][0]["text"].startswith("hello")
    assert first["choices"][0]["prompt_token_ids"] == list(encode("hello"))
    assert second["choices"][0]["prompt_token_ids"] is None
    assert [line["usage"]["completion_tokens"] for line in (first, second)] == [1, 2]
    assert second["choices"][0]["logprobs"]["text_offset"] == [3]


async def test_cached_tokens_are_those_of_the_last_prompt_as_vllm_reports_them(
    client: openai.AsyncOpenAI,
) -> None:
    known, fresh = "known " * 40, "fresh " * 40
    await client.completions.create(model="sim-model", prompt=known)

    last_known = await client.completions.create(model="sim-model", prompt=[fresh, known])
    last_fresh = await client.completions.create(model="sim-model", prompt=[known, "other " * 40])

    assert last_known.usage is not None
    assert last_known.usage.prompt_tokens_details is not None
    assert last_known.usage.prompt_tokens_details.cached_tokens == 64
    assert last_fresh.usage is not None
    assert last_fresh.usage.prompt_tokens_details is not None
    assert last_fresh.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({}, "BadRequestError", "prompt"),
        ({"prompt": []}, "BadRequestError", "prompt"),
        ({"prompt": ""}, "BadRequestError", None),
        ({"prompt": [[]]}, "BadRequestError", None),
        ({"prompt": 7}, "Bad Request", "body.prompt"),
        ({"prompt": ["a", 1]}, "Bad Request", "body.prompt"),
        ({"prompt": [[1, "a"]]}, "Bad Request", "body.prompt"),
        ({"prompt": [1 << 26]}, "BadRequestError", "prompt"),
        ({"prompt": [-1]}, "BadRequestError", "prompt"),
        ({"prompt": "a", "suffix": "b"}, "BadRequestError", "suffix"),
        ({"prompt": "a", "max_tokens": 0}, "BadRequestError", "max_tokens"),
        ({"prompt": "a", "max_tokens": "many"}, "Bad Request", "body.max_tokens"),
        ({"prompt": "a", "n": 0}, "BadRequestError", "n"),
        ({"prompt": "a", "stop": 7}, "Bad Request", "body.stop"),
        ({"prompt": "a", "stream": "yes"}, "Bad Request", "body.stream"),
        ({"prompt": "a", "stream_options": {}}, "BadRequestError", "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": 7}, "Bad Request", "body.stream_options"),
        ({"prompt": "a", "temperature": -1}, "BadRequestError", "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "Bad Request", "body.temperature"),
        ({"prompt": "a", "cache_salt": ""}, "BadRequestError", "cache_salt"),
        ({"prompt": "a", "cache_salt": "a@b"}, "BadRequestError", "cache_salt"),
        ({"prompt": "a", "cache_salt": "a" * 129}, "BadRequestError", "cache_salt"),
        ({"prompt": "a", "kv_transfer_params": []}, "Bad Request", "body.kv_transfer_params"),
        ({"prompt": "a", "logprobs": -1}, "BadRequestError", "logprobs"),
        ({"prompt": "a", "model": 7}, "Bad Request", "body.model"),
    ],
)
async def test_wrong_requests_get_vllms_error_body(
    http: httpx.AsyncClient, body: dict[str, Any], kind: str, param: str | None
) -> None:
    answer = await http.post("/v1/completions", json=body)

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, 400)
    assert error["message"]


async def test_a_prompt_that_fills_the_context_is_refused_and_a_limit_is_clipped(
    http: httpx.AsyncClient, sim: RunningSim
) -> None:
    longest = sim.worker.max_model_len
    full = await http.post("/v1/completions", json={"prompt": [1] * longest})
    nearly = await http.post("/v1/completions", json={"prompt": [1] * (longest - 5), "max_tokens": 100})

    assert full.status_code == 400
    assert "maximum context length" in full.json()["error"]["message"]
    assert nearly.json()["usage"]["completion_tokens"] == 5
