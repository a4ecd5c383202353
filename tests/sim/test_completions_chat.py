"""The openai package against /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from kvroute.sim.app import RunningSim

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_equal_prompts_get_equal_answers_in_every_call(
    client: openai.AsyncOpenAI,
) -> None:
    one = await client.chat.completions.create(model="sim-model", messages=HELLO)
    two = await client.chat.completions.create(model="sim-model", messages=HELLO)
    other = await client.chat.completions.create(
        model="sim-model", messages=[{"role": "user", "content": "hullo"}]
    )

    assert one.choices[0].message.content == two.choices[0].message.content
    assert one.choices[0].message.content != other.choices[0].message.content
    assert one.id != two.id
    assert one.choices[0].finish_reason == "stop"
    assert one.usage is not None
    assert one.usage.completion_tokens == 32


async def test_a_limit_is_met_exactly_and_ends_by_length(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="sim-model", messages=HELLO, max_completion_tokens=7)

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert len(answer.choices[0].message.content or "") == 21


async def test_a_stream_has_one_chunk_per_token_and_the_text_of_the_plain_answer(
    client: openai.AsyncOpenAI,
) -> None:
    plain = await client.chat.completions.create(model="sim-model", messages=HELLO, max_tokens=9)
    stream = await client.chat.completions.create(
        model="sim-model", messages=HELLO, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    first, *tokens, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert len(tokens) == 9
    assert "".join(c.choices[0].delta.content or "" for c in tokens) == plain.choices[0].message.content
    assert [c.choices[0].finish_reason for c in tokens] == [None] * 8 + ["length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.total_tokens == usage.usage.prompt_tokens + 9


async def test_continuous_usage_counts_up(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="sim-model",
        messages=HELLO,
        max_tokens=3,
        stream=True,
        extra_body={"stream_options": {"continuous_usage_stats": True}},
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]

    assert counts == [1, 2, 3]


async def test_several_choices_differ_and_stream_at_the_same_time(client: openai.AsyncOpenAI) -> None:
    plain = await client.chat.completions.create(model="sim-model", messages=HELLO, n=3, max_tokens=4)
    stream = await client.chat.completions.create(
        model="sim-model", messages=HELLO, n=3, max_tokens=4, stream=True
    )
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""

    assert len({choice.message.content for choice in plain.choices}) == 3
    assert texts == [choice.message.content for choice in plain.choices]


async def test_logprobs_come_plain_and_streamed(client: openai.AsyncOpenAI) -> None:
    plain = await client.chat.completions.create(
        model="sim-model", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3
    )
    stream = await client.chat.completions.create(
        model="sim-model", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3, stream=True
    )
    streamed = [
        entry
        async for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]

    assert plain.choices[0].logprobs is not None
    entries = plain.choices[0].logprobs.content
    assert entries is not None
    assert streamed == entries
    assert "".join(entry.token for entry in entries) == plain.choices[0].message.content
    assert all(entry.logprob < 0 and len(entry.top_logprobs) == 2 for entry in entries)


async def test_a_required_tool_is_called_with_arguments_that_fit(
    client: openai.AsyncOpenAI, weather: dict[str, Any]
) -> None:
    answer = await client.chat.completions.create(
        model="sim-model",
        messages=HELLO,
        tools=[{"type": "function", "function": weather}],  # type: ignore[list-item]
        tool_choice="required",
    )

    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "x"}


async def test_a_named_tool_streams_its_arguments(
    client: openai.AsyncOpenAI, weather: dict[str, Any]
) -> None:
    stream = await client.chat.completions.create(
        model="sim-model",
        messages=HELLO,
        tools=[{"type": "function", "function": weather}],  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "weather"}},
        stream=True,
    )
    names, arguments, reasons = [], "", []
    async for chunk in stream:
        reasons.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            names.append(call.function.name)
            arguments += call.function.arguments or ""

    assert [name for name in names if name] == ["weather"]
    assert json.loads(arguments) == {"city": "x"}
    assert reasons[-1] == "stop"


async def test_optional_tools_are_not_called(client: openai.AsyncOpenAI, weather: dict[str, Any]) -> None:
    answer = await client.chat.completions.create(
        model="sim-model",
        messages=HELLO,
        tools=[{"type": "function", "function": weather}],  # type: ignore[list-item]
    )

    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


class Person(BaseModel):
    name: str
    age: int
    likes: list[str]


async def test_structured_output_is_an_instance_of_the_schema(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(model="sim-model", messages=HELLO, response_format=Person)

    assert answer.choices[0].message.parsed == Person(name="x", age=0, likes=[])


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "{}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true"),
    ],
)
async def test_other_structured_outputs(client: openai.AsyncOpenAI, extra: dict[str, Any], text: str) -> None:
    answer = await client.chat.completions.create(model="sim-model", messages=HELLO, extra_body=extra)

    assert answer.choices[0].message.content == text


async def test_a_stop_string_ends_the_answer_before_it(client: openai.AsyncOpenAI) -> None:
    whole = (await client.chat.completions.create(model="sim-model", messages=HELLO)).choices[0]
    stop = (whole.message.content or "")[10:14]

    cut = (await client.chat.completions.create(model="sim-model", messages=HELLO, stop=[stop])).choices[0]

    assert cut.message.content == (whole.message.content or "").split(stop)[0]
    assert cut.finish_reason == "stop"
    assert cut.model_dump()["stop_reason"] == stop


async def test_a_conversation_is_found_in_the_cache_turn_by_turn(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "tell me " * 40}]
    known, cached = 0, []
    for _ in range(3):
        answer = await client.chat.completions.create(model="sim-model", messages=messages, max_tokens=20)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append((answer.usage.prompt_tokens_details.cached_tokens or 0, known))
        # Computed tokens: the prompt and the answer without its last token, in blocks of 16.
        known = (answer.usage.prompt_tokens + 19) // 16 * 16
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "and more"},
        ]

    assert all(found == expected for found, expected in cached)
    assert cached[2][0] > cached[1][0] > 0


async def test_salts_adapters_and_images_keep_caches_apart(client: openai.AsyncOpenAI) -> None:
    async def cached(model: str = "sim-model", image: str = "", **extra: Any) -> int:
        content: list[Any] = [{"type": "image_url", "image_url": {"url": f"data:{image}"}}]
        content.append({"type": "text", "text": "what is this " * 30})
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": content}], extra_body=extra, max_tokens=1
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert await cached() == 0
    assert await cached() > 100
    assert await cached("alias") > 100
    assert await cached("ada") == 0
    assert await cached(cache_salt="tenant") == 0
    assert await cached(cache_salt="tenant") > 100
    assert await cached(image="other") == 0
    assert await cached(prompt_logprobs=1) == 0


async def test_the_tokenizer_endpoint_gives_the_ids_that_the_engine_used(http: httpx.AsyncClient) -> None:
    body = {"model": "sim-model", "messages": HELLO, "return_token_ids": True, "max_tokens": 3}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    ids = (await http.post("/tokenize", json={"messages": HELLO})).json()

    assert answer["prompt_token_ids"] == ids["tokens"]
    assert answer["usage"]["prompt_tokens"] == ids["count"]
    assert len(answer["choices"][0]["token_ids"]) == 3

    streamed = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert chunks[0]["prompt_token_ids"] == ids["tokens"]
    assert [t for c in chunks[1:] for t in c["choices"][0]["token_ids"]] == answer["choices"][0]["token_ids"]


async def test_a_prefill_can_be_continued(http: httpx.AsyncClient) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    whole = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    open_end = (await http.post("/tokenize", json={"messages": messages, **flags})).json()["tokens"]

    assert whole[: len(open_end)] == open_end
    assert len(open_end) < len(whole)


async def test_openais_exceptions_are_raised(client: openai.AsyncOpenAI, sim: RunningSim) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nobody", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as empty:
        await client.chat.completions.create(model="sim-model", messages=[])
    with pytest.raises(openai.BadRequestError) as tool:
        await client.chat.completions.create(model="sim-model", messages=HELLO, tool_choice="required")

    assert missing.value.body == {
        "message": "The model `nobody` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert empty.value.type == "BadRequestError"
    assert tool.value.param == "tool_choice"
    assert not sim.engine.has_work


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": None}, "body.messages"),
        ({"messages": [7]}, "body.messages.0"),
        ({"messages": [{"role": "user", "content": [7]}]}, "body.messages.0.content"),
        ({"tools": 7}, "body.tools"),
        ({"tools": [{"type": "function"}]}, "body.tools.0.function.name"),
        ({"tool_choice": {"function": {"name": "nothing"}}, "tools": ["weather"]}, "tool_choice"),
        ({"tool_choice": 7, "tools": ["weather"]}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": "all"}, "body.top_logprobs"),
        ({"max_tokens": 1.5}, "body.max_tokens"),
    ],
)
async def test_wrong_chats_are_refused(
    http: httpx.AsyncClient, weather: dict[str, Any], extra: dict[str, Any], param: str
) -> None:
    if extra.get("tools") == ["weather"]:
        extra = {**extra, "tools": [{"type": "function", "function": weather}]}
    answer = await http.post("/v1/chat/completions", json={"messages": HELLO, **extra})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_formats_that_ask_for_nothing_leave_plain_text(http: httpx.AsyncClient) -> None:
    plain = await http.post("/v1/chat/completions", json={"messages": HELLO})
    for extra in (
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"regex": ".*"}},
        {"tool_choice": "none"},
        {"max_tokens": 32.0},
    ):
        answer = await http.post("/v1/chat/completions", json={"messages": HELLO, **extra})
        assert answer.json()["choices"][0]["message"] == plain.json()["choices"][0]["message"]


async def test_the_request_id_of_the_call_is_part_of_the_answers(http: httpx.AsyncClient) -> None:
    answer = await http.post(
        "/v1/chat/completions", json={"messages": HELLO}, headers={"X-Request-Id": "abc"}
    )

    assert answer.json()["id"] == "chatcmpl-abc"
