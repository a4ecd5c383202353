"""Chat bodies as text. The expected texts come from the render endpoint of vLLM 0.32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvroute.tokens.chat import EngineFlags
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.local import LocalTokenizer, load_model
from kvroute.tokens.options import Inexact, TokensReason

Render = Callable[..., str]
USER = {"role": "user", "content": "Hi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": ""}, "b"]}
TURN, END = "<|turn|>", "<|end|>\n"


def call(**function: Any) -> dict[str, Any]:
    return {"index": 0, "type": "function", "function": function, "id": "c1"}


def test_text_parts_become_lines_for_a_template_of_strings(rendered: Render) -> None:
    assert rendered("plain", messages=[PARTS]) == f"{TURN}user\n a \nb{END}{TURN}assistant\n"


def test_a_string_becomes_a_part_for_a_template_of_parts(rendered: Render) -> None:
    text = rendered("parts", messages=[USER, PARTS])

    assert text == f"{TURN}{TURN}user\nHi{END}{TURN}user\n a b{END}{TURN}assistant\n"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"b": 1, "a": "é"}', '{"b": 1, "a": "é"}'),
        ("", "{}"),
        ("not json", "{}"),
        ("[1]", "{}"),
    ],
)
def test_arguments_of_calls_become_objects(rendered: Render, arguments: str, shown: str) -> None:
    asked = {"role": "assistant", "content": None, "tool_calls": [call(name="f", arguments=arguments)]}

    text = rendered("trim", messages=[USER, asked], add_generation_prompt=False)

    assert f'{{"f": {shown}}}' in text


def test_calls_show_their_fields_in_the_engines_order(rendered: Render) -> None:
    asked = {"role": "assistant", "tool_calls": [call(name="f", arguments="{}")]}

    text = rendered("parts", messages=[USER, asked])

    assert (
        '<call>{"id": "c1", "function": {"arguments": {}, "name": "f"}, "type": "function", "index": 0}'
        in text
    )


def test_tools_show_known_fields_in_the_engines_order(rendered: Render) -> None:
    tools = [
        {
            "function": {"parameters": {"z": 1, "a": 2}, "strict": True, "name": "f", "x": 1},
            "type": "function",
        }
    ]

    text = rendered("plain", messages=[USER], tools=tools, tool_choice="none")

    assert text.startswith(
        f'{TURN}tools\n{{"type": "function", "function": '
        '{"name": "f", "description": null, "parameters": {"z": 1, "a": 2}, "strict": true}}\n'
    )


def test_a_tools_answer_in_parts_becomes_a_string(rendered: Render) -> None:
    reasons = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "5"}],
    }

    assert "tool\n4\n5<|end|>" in rendered("trim", messages=[USER, reasons])


def test_developer_messages_become_one_system_message_in_front(rendered: Render) -> None:
    messages = [{"role": "system", "content": "a"}, USER, {"role": "developer", "content": "b"}]

    text = rendered("plain", messages=messages)

    assert text == f"{TURN}system\na\n\nb{END}{TURN}user\nHi{END}{TURN}assistant\n"


def test_a_first_developer_message_becomes_the_system_message_as_it_is(rendered: Render) -> None:
    text = rendered("parts", messages=[{"role": "developer", "content": " a "}, USER])

    assert text.startswith(f"{TURN}{TURN}system\n a {END}{TURN}user")


def test_both_names_of_reasoning_count(rendered: Render) -> None:
    messages = [
        {"role": "assistant", "content": "x", "reasoning_content": "older"},
        {"role": "assistant", "content": "y", "reasoning": "newer", "reasoning_content": "older"},
    ]

    text = rendered("parts", messages=messages)

    assert "x[older]" in text
    assert "y[newer]" in text


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"reasoning_effort": "none"}, "[False none]"),
        ({"reasoning_effort": "high"}, "[True high]"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": 7}}, "[7 high]"),
        ({"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "x"}}, "[False x]"),
        ({"chat_template_kwargs": {"enable_thinking": None}}, ""),
        ({"chat_template_kwargs": {"enable_thinking": "auto"}}, ""),
    ],
)
def test_kwargs_reach_the_template(rendered: Render, fields: dict[str, Any], shown: str) -> None:
    text = rendered("parts", messages=[USER], **fields)

    assert text == f"{TURN}{TURN}user\nHi{END}{shown}{TURN}assistant\n"


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ("x-anthropic-billing-header: cch=1;\nBe kind.", "Be kind."),
        ([{"type": "text", "text": "x-anthropic-billing-header: 1"}, "Be kind."], "Be kind."),
        (["x-anthropic-billing-header: 1\nBe kind."], "Be kind."),
    ],
)
def test_a_billing_line_is_dropped(rendered: Render, content: Any, kept: str) -> None:
    text = rendered("plain", messages=[{"role": "system", "content": content}, USER])

    assert text.startswith(f"{TURN}system\n{kept}{END}")


@pytest.mark.parametrize("template", ["plain", "parts", "trim"])
@pytest.mark.parametrize("content", ["So far, ", [{"type": "text", "text": "So far, "}]])
def test_a_final_message_can_be_continued(rendered: Render, template: str, content: Any) -> None:
    final = {"role": "assistant", "content": content}

    text = rendered(
        template, messages=[USER, final], add_generation_prompt=False, continue_final_message=True
    )

    assert text.endswith("So far," if template == "trim" else "So far, ")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            TokensReason.MEDIA,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "uuid": "1"}]}]},
            TokensReason.MEDIA,
        ),
        ({"messages": [USER], "chat_template": "x"}, TokensReason.REQUEST_TEMPLATE),
        ({"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}, TokensReason.REQUEST_TEMPLATE),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, TokensReason.UNSUPPORTED),
        ({"messages": [USER], "chat_template_kwargs": 3}, TokensReason.UNREADABLE),
        ({"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [1]}}, TokensReason.UNSUPPORTED),
        (
            {"messages": [USER], "tools": [{"function": {"name": "f", "defer_loading": True}}]},
            TokensReason.UNSUPPORTED,
        ),
        ({"messages": [USER], "tools": ["f"]}, TokensReason.UNREADABLE),
        ({"messages": "Hi"}, TokensReason.UNREADABLE),
        ({"messages": [{"content": "Hi"}]}, TokensReason.UNREADABLE),
        ({"messages": [{"role": "user", "content": 3}]}, TokensReason.UNREADABLE),
        ({"messages": [{"role": "user", "content": [3]}]}, TokensReason.UNREADABLE),
        ({"messages": [{"role": "user", "content": [{"type": "input_text"}]}]}, TokensReason.UNREADABLE),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, TokensReason.UNREADABLE),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call(name="f", arguments="[" * 100_000)]}]},
            TokensReason.UNREADABLE,
        ),
        ({"messages": []}, TokensReason.TEMPLATE_REFUSED),
        ({"messages": [USER], "continue_final_message": True}, TokensReason.TEMPLATE_REFUSED),
        (
            {
                "messages": [{"role": "assistant", "content": None}],
                "add_generation_prompt": False,
                "continue_final_message": "reasoning",
            },
            TokensReason.TEMPLATE_REFUSED,
        ),
        ({"messages": [USER, {"role": "system", "content": "late"}]}, TokensReason.TEMPLATE_REFUSED),
        ({"messages": [USER], "truncate_prompt_tokens": -1}, TokensReason.TRUNCATION),
    ],
)
def test_a_prompt_without_exact_tokens_gives_a_reason(
    rendered: Render, body: dict[str, Any], reason: TokensReason
) -> None:
    with pytest.raises(Inexact) as refused:
        rendered("trim", **body)

    assert refused.value.reason is reason


def test_the_workers_start_options_count(write_model: Any, make_request: Any) -> None:
    flags = EngineFlags(
        {"enable_thinking": True, "reasoning_effort": "low"}, "string", tools_dropped_for_none=True
    )
    tokenizer = LocalTokenizer(load_model(write_model("plain"), flags), SegmentCache(0), flags)
    tools = [{"type": "function", "function": {"name": "f"}}]

    bare = tokenizer.prompts(make_request(messages=[USER]))
    without_tools = tokenizer.prompts(make_request(messages=[USER], tools=tools, tool_choice="none"))
    with_tools = tokenizer.prompts(make_request(messages=[USER], tools=tools))

    assert bare == without_tools != with_tools
    assert tokenizer.files.templates["default"].content_format == "string"
