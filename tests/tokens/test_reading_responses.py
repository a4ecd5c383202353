from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvroute.tokens.options import Inexact, TokensReason

Render = Callable[..., str]
TURN, END = "<|turn|>", "<|end|>\n"


def test_a_text_is_the_users_and_instructions_the_systems(rendered: Render) -> None:
    text = rendered("plain", "responses", instructions="Be kind.", input="Hi")

    assert text == f"{TURN}system\nBe kind.{END}{TURN}user\nHi{END}{TURN}assistant\n"


def test_items_of_one_answer_become_one_message(rendered: Render) -> None:
    text = rendered(
        "parts",
        "responses",
        input=[
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"q": 1}'},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "4"},
            {"role": "assistant", "content": "d"},
            {"role": "assistant", "content": "e"},
        ],
        tools=[{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}],
        reasoning={"effort": "low"},
    )

    assert "user\nab<|end|>" in text
    assert (
        'assistant\nc[hm]<call>{"id": "1", "function": {"name": "f", "arguments": {"q": 1}}, '
        '"type": "function"}</call><call>{"id": "2"' in text
    )
    assert f"assistant\nd{END}{TURN}assistant\ne{END}[True low]" in text
    assert "web_search" not in text


def test_an_unfinished_answer_is_continued(rendered: Render) -> None:
    part = {"type": "output_text", "text": "So far"}
    item = {"type": "message", "role": "assistant", "status": "incomplete", "content": [part]}

    text = rendered("plain", "responses", input=[{"role": "user", "content": "Hi"}, item])

    assert text.endswith(f"{TURN}assistant\nSo far")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input": "Hi", "previous_response_id": "resp_1"}, TokensReason.STORED_RESPONSE),
        ({"input": "Hi", "truncation": "auto"}, TokensReason.TRUNCATION),
        ({"input": "Hi", "previous_input_messages": []}, TokensReason.UNSUPPORTED),
        ({"input": "Hi", "tools": [{"type": "custom", "name": "f"}]}, TokensReason.UNSUPPORTED),
        ({"input": [{"type": "item_reference", "id": "x"}]}, TokensReason.UNSUPPORTED),
        ({"input": [{"type": "function_call", "namespace": "n", "name": "f"}]}, TokensReason.UNSUPPORTED),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, TokensReason.UNSUPPORTED),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            TokensReason.MEDIA,
        ),
        ({"input": [{"role": "assistant", "content": []}]}, TokensReason.UNREADABLE),
        ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, TokensReason.UNREADABLE),
        ({}, TokensReason.UNREADABLE),
    ],
)
def test_a_prompt_without_exact_tokens_gives_a_reason(
    rendered: Render, fields: dict[str, Any], reason: TokensReason
) -> None:
    with pytest.raises(Inexact) as refused:
        rendered("plain", "responses", **fields)

    assert refused.value.reason is reason
