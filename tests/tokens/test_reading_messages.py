from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvroute.openai.shown import billing_rule
from kvroute.tokens.chat import Chat, EngineFlags, render_chat
from kvroute.tokens.options import Inexact, TokensReason
from kvroute.tokens.reading import messages_request, no_template
from kvroute.tokens.template import ChatTemplate

Render = Callable[..., str]
TURN, END = "<|turn|>", "<|end|>\n"
USER = {"role": "user", "content": "Hi"}


def test_blocks_become_messages_and_tool_results_come_first(rendered: Render) -> None:
    text = rendered(
        "plain",
        "messages",
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"q": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And?"},
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]},
                ],
            },
        ],
    )

    assert text == (
        f"{TURN}system\nBe kind.{END}{TURN}user\nHi{END}{TURN}assistant\nLet me see."
        '<tool_call>\n{"name": "f", "arguments": {"q": 1}}\n</tool_call>'
        f"{END}{TURN}tool\n4{END}{TURN}user\nAnd?{END}{TURN}assistant\n"
    )


def test_an_input_schema_without_a_type_is_an_object(rendered: Render) -> None:
    text = rendered("plain", "messages", messages=[USER], tools=[{"name": "f", "input_schema": {"a": 1}}])

    assert '"parameters": {"a": 1, "type": "object"}}' in text


def test_later_system_messages_stay_where_the_template_takes_them(rendered: Render) -> None:
    messages = [USER, {"role": "system", "content": "Now."}]

    assert f"user\nHi{END}{TURN}system\nNow.{END}" in rendered("plain", "messages", messages=messages)
    assert rendered("trim", "messages", system="First.", messages=messages).startswith(
        f"{TURN}system\nFirst.Now."
    )


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"thinking": {"type": "disabled"}}, "[False none]"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "[True high]"),
    ],
)
def test_thinking_sets_the_effort(rendered: Render, fields: dict[str, Any], shown: str) -> None:
    assert f"{END}{shown}{TURN}assistant" in rendered("parts", "messages", messages=[USER], **fields)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({"type": "image", "source": {}}, TokensReason.MEDIA),
        ({"type": "tool_result", "content": [{"type": "image"}]}, TokensReason.MEDIA),
        ({"type": "document"}, TokensReason.UNSUPPORTED),
    ],
)
def test_blocks_that_are_no_text_give_a_reason(
    rendered: Render, block: dict[str, Any], reason: TokensReason
) -> None:
    with pytest.raises(Inexact) as refused:
        rendered("plain", "messages", messages=[{"role": "user", "content": [block]}])

    assert refused.value.reason is reason


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER, {"role": "system", "content": "late"}]},
        {"messages": [USER], "thinking": {"type": "disabled"}},
        {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]},
    ],
)
def test_rules_that_need_the_template_are_not_guessed(body: dict[str, Any]) -> None:
    with pytest.raises(Inexact) as refused:
        messages_request(body, EngineFlags(), no_template)

    assert refused.value.reason is TokensReason.UNSUPPORTED


def test_tool_references_and_odd_results_are_rendered_as_the_engine_does(rendered: Render) -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "tool_reference", "tool_name": "f"}],
    }
    late = {"type": "tool_result", "content": "x"}

    text = rendered(
        "plain",
        "messages",
        system="x-anthropic-billing-header: 1",
        messages=[{"role": "user", "content": [result]}, {"role": "assistant", "content": [late]}],
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
        tool_choice={"type": "none"},
    )

    assert f"{TURN}tool\n{END}{TURN}tool\nf{END}{TURN}assistant\nTool result: x{END}" in text


@pytest.mark.parametrize(
    ("release", "block", "line"),
    [
        ((0, 17, 1), True, True),
        ((0, 18, 0), False, True),
        ((0, 31, 0), False, True),
        ((0, 32, 0), False, False),
    ],
)
def test_a_billing_header_stays_for_releases_that_show_it(release: Any, block: bool, line: bool) -> None:
    header = "x-anthropic-billing-header: cch=1;"
    flags = EngineFlags(billing=billing_rule(release))
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", {})
    blocks: Any = {
        "system": [{"type": "text", "text": header}, {"type": "text", "text": "Be kind."}],
        "messages": [USER, {"role": "system", "content": header}, {"role": "user", "content": "Go."}],
    }
    chat = messages_request(blocks, flags, lambda _: template)
    plain = Chat([{"role": "system", "content": header + "\nBe kind."}])

    assert [message["content"] for message in chat.messages] == (
        [header + "Be kind.", "Hi", header, "Go."] if block else ["Be kind.", "Hi", "Go."]
    )
    assert render_chat(plain, template, flags) == "[system]" + (header + "\n") * line + "Be kind."
