"""The anthropic package against /v1/messages."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_a_message_is_answered_and_its_cache_use_adds_up(claude: anthropic.AsyncAnthropic) -> None:
    body: Any = {"model": "sim-model", "max_tokens": 5, "system": "Be brief. " * 20, "messages": HELLO}
    first = await claude.messages.create(**body)
    second = await claude.messages.create(**body)

    assert first.content == second.content
    assert first.content[0].type == "text"
    assert (first.stop_reason, first.usage.output_tokens) == ("max_tokens", 5)
    for answer in (first, second):
        usage = answer.usage
        total = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        total += usage.cache_creation_input_tokens or 0
        counted = await claude.messages.count_tokens(model="sim-model", system=body["system"], messages=HELLO)
        assert total == counted.input_tokens
    assert first.usage.cache_read_input_tokens == 0
    assert second.usage.cache_read_input_tokens == (counted.input_tokens - 1) // 16 * 16


async def test_a_stream_has_the_packages_events_and_the_plain_text(claude: anthropic.AsyncAnthropic) -> None:
    plain = await claude.messages.create(model="sim-model", max_tokens=4, messages=HELLO)
    async with claude.messages.stream(model="sim-model", max_tokens=4, messages=HELLO) as stream:
        kinds = [event.type async for event in stream if event.type not in ("text", "content_block_delta")]
        final = await stream.get_final_message()

    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert final.content[0].type == plain.content[0].type == "text"
    assert final.content[0].text == plain.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 4


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_tools_are_used_plain_and_streamed(
    claude: anthropic.AsyncAnthropic, weather: dict[str, Any], choice: Any
) -> None:
    tool: Any = {"name": "weather", "description": "Sky.", "input_schema": weather["parameters"]}
    body: Any = {"model": "sim-model", "max_tokens": 50, "messages": HELLO, "tools": [tool]}
    plain = await claude.messages.create(**body, tool_choice=choice)
    async with claude.messages.stream(**body, tool_choice=choice) as stream:
        final = await stream.get_final_message()

    for answer in (plain, final):
        use = answer.content[0]
        assert use.type == "tool_use"
        assert (use.name, use.input) == ("weather", {"city": "x"})
        assert answer.stop_reason == "tool_use"


async def test_a_tool_call_cut_short_is_no_tool_use(
    claude: anthropic.AsyncAnthropic, weather: dict[str, Any]
) -> None:
    tool: Any = {"name": "weather", "input_schema": weather["parameters"]}
    answer = await claude.messages.create(
        model="sim-model", max_tokens=1, messages=HELLO, tools=[tool], tool_choice={"type": "any"}
    )

    assert answer.stop_reason == "max_tokens"


async def test_stop_sequences_end_the_answer(claude: anthropic.AsyncAnthropic) -> None:
    whole = await claude.messages.create(model="sim-model", max_tokens=30, messages=HELLO)
    assert whole.content[0].type == "text"
    stop = whole.content[0].text[10:14]

    cut = await claude.messages.create(
        model="sim-model", max_tokens=30, messages=HELLO, stop_sequences=[stop]
    )

    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


async def test_blocks_tool_results_and_images_are_part_of_the_prompt(
    claude: anthropic.AsyncAnthropic,
) -> None:
    image = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    conversation: Any = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "source": image}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "x"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "rain"}]},
    ]

    async def count(messages: Any) -> int:
        return (await claude.messages.count_tokens(model="sim-model", messages=messages)).input_tokens

    counts = [await count(conversation[:length]) for length in (1, 2, 3)]

    assert counts == sorted(set(counts))


async def test_errors_of_the_engine_come_in_anthropics_shape(
    claude: anthropic.AsyncAnthropic, http: httpx.AsyncClient
) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.messages.create(model="nobody", max_tokens=1, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.count_tokens(model="nobody", messages=HELLO)

    assert caught.value.body == {
        "type": "error",
        "error": {"type": "NotFoundError", "message": "The model `nobody` does not exist."},
    }
    for body in (
        {"model": "sim-model", "messages": HELLO},
        {"model": "sim-model", "max_tokens": 1},
        {"model": "sim-model", "max_tokens": 1, "messages": 7},
        {"model": "sim-model", "max_tokens": 1, "messages": [7]},
    ):
        form = await http.post("/v1/messages", json=body)
        assert (form.status_code, form.json()["error"]["type"]) == (400, "Bad Request")


@pytest.mark.parametrize("inline", [False, True])
async def test_a_billing_header_is_no_part_of_the_prompt(
    claude: anthropic.AsyncAnthropic, inline: bool
) -> None:
    async def tokens(*texts: str) -> int:
        blocks: Any = [{"type": "text", "text": text} for text in texts]
        messages: Any = [*HELLO, {"role": "system", "content": blocks}] if inline else HELLO
        system: Any = anthropic.NOT_GIVEN if inline else blocks
        counted = await claude.messages.count_tokens(model="sim-model", system=system, messages=messages)
        return counted.input_tokens

    assert await tokens("x-anthropic-billing-header: cch=1a2b3;", "Be kind.") == await tokens("Be kind.")


async def test_blocks_of_a_system_prompt_are_one_text(claude: anthropic.AsyncAnthropic) -> None:
    blocks: Any = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    counted = [
        await claude.messages.count_tokens(model="sim-model", system=system, messages=HELLO)
        for system in (blocks, "Be kind.")
    ]

    assert counted[0].input_tokens == counted[1].input_tokens
