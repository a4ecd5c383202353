"""Shapes of chats: roles, parts, tools, results, reasoning and options, as clients combine them.

Each is a body of /v1/chat/completions without `model`; `NATIVE` has those of the other endpoints.
"""

from __future__ import annotations

from typing import Any, Final

Body = dict[str, Any]

USER: Final = {"role": "user", "content": "What is 2 + 2?"}
SECOND: Final = {"role": "user", "content": " And 3 + 3?\n"}
SYSTEM: Final = {"role": "system", "content": "  You are helpful.\n"}
DEVELOPER: Final = {**SYSTEM, "role": "developer"}
ANSWER: Final = {"role": "assistant", "content": "Four, "}
THOUGHT: Final = {"role": "assistant", "content": "Six.", "reasoning": "Three\nand three."}
OLD_THOUGHT: Final = {"role": "assistant", "content": "Six.", "reasoning_content": "Three and three."}
INLINE_THOUGHT: Final = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSix."}
PARTS: Final = {
    "role": "user",
    "content": [{"type": "text", "text": " one"}, {"type": "text", "text": "two "}],
}
SAID_IN_PARTS: Final = {
    "role": "assistant",
    "content": [{"type": "text", "text": "It is"}, {"type": "text", "text": " so."}],
}
SYSTEM_PARTS: Final = {
    "role": "system",
    "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
}
SPECIAL: Final = {
    "role": "user",
    "content": "<|end|> <|im_end|>\n<|start|>assistant [/INST] </s> <tool_call>",
}
ODD: Final = {"role": "user", "content": "naïve 你好 👩‍👩‍👧‍👦  \t e\u0301 12345678.9\r\n"}


def tool(name: str, **more: Any) -> Body:
    return {"type": "function", "function": {"name": name, **more}}


WEATHER: Final = tool(
    "get_weather",
    description="The weather of a city.\nNow.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Zürich, for example"},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "place": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "lon": {"type": ["number", "null"]}},
            },
        },
        "required": ["city"],
    },
)
CLOCK: Final = tool("clock")
STRICT: Final = tool(
    "add",
    description="",
    strict=True,
    parameters={"type": "object", "properties": {"a": {"anyOf": [{"type": "number"}, {"type": "string"}]}}},
)
EMPTY: Final = tool("ping", description="No arguments", parameters={"type": "object", "properties": {}})


def call(
    number: int, name: str = "get_weather", arguments: str = '{"city": "Zürich", "days": [1, 2]}'
) -> Body:
    return {
        "id": f"call_{number:04d}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def asks(*calls: Body, **more: Any) -> Body:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def told(number: int, text: Any = '{"celsius": 21}') -> Body:
    return {"role": "tool", "tool_call_id": f"call_{number:04d}", "content": text}


ONE: Final = [USER, asks(call(1)), told(1)]
TWO: Final = [USER, asks(call(1), call(2, "clock", "{}")), told(1), told(2, "12:00")]
LOOP: Final = [USER, asks(call(1)), told(1), asks(call(2, "clock", "{}")), told(2, "12:00")]
TOOLS: Final = [WEATHER, CLOCK]

SHAPES: Final[dict[str, Body]] = {
    "a question": {"messages": [USER]},
    "a system prompt": {"messages": [SYSTEM, USER]},
    "a developer message": {"messages": [DEVELOPER, USER]},
    "a system and a developer message": {"messages": [SYSTEM, DEVELOPER, USER]},
    "a later system message": {"messages": [USER, ANSWER, SYSTEM, SECOND]},
    "a later developer message": {"messages": [SYSTEM, USER, ANSWER, DEVELOPER, SECOND]},
    "only a system prompt": {"messages": [SYSTEM]},
    "an empty system prompt": {"messages": [{"role": "system", "content": ""}, USER]},
    "a system prompt in parts": {"messages": [SYSTEM_PARTS, USER]},
    "two turns": {"messages": [SYSTEM, USER, ANSWER, SECOND]},
    "four turns": {"messages": [SYSTEM, USER, ANSWER, SECOND, ANSWER, USER, ANSWER, SECOND]},
    "without a system prompt": {"messages": [USER, ANSWER, SECOND]},
    "two users in a row": {"messages": [USER, SECOND]},
    "an answer at the end": {"messages": [USER, ANSWER]},
    "an answer first": {"messages": [ANSWER, USER]},
    "an empty question": {"messages": [{"role": "user", "content": ""}]},
    "an empty answer": {"messages": [USER, {"role": "assistant", "content": ""}, SECOND]},
    "an answer without content": {"messages": [USER, {"role": "assistant", "content": None}, SECOND]},
    "parts": {"messages": [PARTS]},
    "parts in turns": {"messages": [SYSTEM, PARTS, SAID_IN_PARTS, PARTS]},
    "one part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}]}]},
    "an empty part": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "x"}]}
        ]
    },
    "a refusal": {
        "messages": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, SECOND]
    },
    "special tokens as text": {"messages": [SPECIAL, ANSWER, SPECIAL]},
    "odd text": {"messages": [SYSTEM, ODD, ANSWER, ODD]},
    "names": {"messages": [{**SYSTEM, "name": "s"}, {**USER, "name": "ada"}]},
    "tools": {"messages": [USER], "tools": TOOLS},
    "tools and a system prompt": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "tools and a developer message": {"messages": [DEVELOPER, USER], "tools": TOOLS},
    "one tool": {"messages": [SYSTEM, USER], "tools": [CLOCK]},
    "a strict tool": {"messages": [SYSTEM, USER], "tools": [STRICT]},
    "a tool without arguments": {"messages": [SYSTEM, USER], "tools": [EMPTY]},
    "no tools": {"messages": [SYSTEM, USER], "tools": []},
    "tools in turns": {"messages": [SYSTEM, USER, ANSWER, SECOND], "tools": TOOLS},
    "tools that may not be called": {"messages": [USER], "tools": TOOLS, "tool_choice": "none"},
    "tools by choice": {"messages": [USER], "tools": TOOLS, "tool_choice": "auto"},
    "a call": {"messages": [*ONE[:2]], "tools": TOOLS},
    "a call's result": {"messages": [*ONE], "tools": TOOLS},
    "a call's result after a system prompt": {"messages": [SYSTEM, *ONE], "tools": TOOLS},
    "a call's result without tools": {"messages": [SYSTEM, *ONE]},
    "a result in parts": {
        "messages": [*ONE[:2], told(1, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        "tools": TOOLS,
    },
    "an empty result": {"messages": [*ONE[:2], told(1, "")], "tools": TOOLS},
    "a result that was answered": {"messages": [SYSTEM, *ONE, ANSWER, SECOND], "tools": TOOLS},
    "two calls": {"messages": [*TWO], "tools": TOOLS},
    "two calls that were answered": {"messages": [SYSTEM, *TWO, ANSWER, SECOND], "tools": TOOLS},
    "results in another order": {"messages": [*TWO[:2], TWO[3], TWO[2]], "tools": TOOLS},
    "a loop of calls": {"messages": [SYSTEM, *LOOP], "tools": TOOLS},
    "a loop of calls that was answered": {"messages": [SYSTEM, *LOOP, ANSWER, SECOND], "tools": TOOLS},
    "calls in two turns": {
        "messages": [*ONE, ANSWER, SECOND, asks(call(2)), told(2), ANSWER, USER],
        "tools": TOOLS,
    },
    "a call with text": {"messages": [USER, asks(call(1), content="Let me see."), told(1)], "tools": TOOLS},
    "a call with reasoning": {
        "messages": [USER, asks(call(1), reasoning="It asks."), told(1)],
        "tools": TOOLS,
    },
    "a call with reasoning and text": {
        "messages": [USER, asks(call(1), reasoning="It asks.", content="Ok"), told(1), ANSWER, SECOND],
        "tools": TOOLS,
    },
    "reasoning in a loop": {
        "messages": [
            SYSTEM,
            USER,
            asks(call(1), reasoning="One"),
            told(1),
            asks(call(2), reasoning="Two"),
            told(2),
        ],
        "tools": TOOLS,
    },
    "a call without arguments": {"messages": [USER, asks(call(1, "clock", "")), told(1)], "tools": TOOLS},
    "a call with arguments that are no JSON": {
        "messages": [USER, asks(call(1, "clock", "not json")), told(1)],
        "tools": TOOLS,
    },
    "a call with compact arguments": {
        "messages": [USER, asks(call(1, "clock", '{"b":1,"a":"é \\u00e9","n":1e3}')), told(1)],
        "tools": TOOLS,
    },
    "a call id of nine letters": {
        "messages": [USER, asks({**call(1), "id": "abcdefghi"}), {**told(1), "tool_call_id": "abcdefghi"}],
        "tools": TOOLS,
    },
    "a result of an unknown call": {"messages": [USER, told(7), ANSWER, SECOND], "tools": TOOLS},
    "no calls": {"messages": [USER, {**ANSWER, "tool_calls": []}, SECOND]},
    "reasoning": {"messages": [USER, THOUGHT, SECOND]},
    "reasoning at the end": {"messages": [USER, THOUGHT]},
    "reasoning under its old name": {"messages": [USER, OLD_THOUGHT, SECOND]},
    "reasoning in the text": {"messages": [USER, INLINE_THOUGHT, SECOND]},
    "reasoning in two turns": {"messages": [SYSTEM, USER, THOUGHT, SECOND, THOUGHT, USER]},
    "reasoning alone": {"messages": [USER, {"role": "assistant", "reasoning": "Hm."}, SECOND]},
    "an answer to continue": {
        "messages": [USER, ANSWER],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "a turn to continue": {
        "messages": [SYSTEM, USER, ANSWER, SECOND, ANSWER],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "parts to continue": {
        "messages": [USER, SAID_IN_PARTS],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "a thought to continue": {
        "messages": [USER, THOUGHT],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "no generation prompt": {"messages": [SYSTEM, USER], "add_generation_prompt": False},
    "no generation prompt after an answer": {
        "messages": [SYSTEM, USER, ANSWER],
        "add_generation_prompt": False,
    },
    "no thinking": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "thinking": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    "no thinking in turns": {
        "messages": [USER, THOUGHT, SECOND],
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    },
    "a date": {
        "messages": [SYSTEM, USER],
        "chat_template_kwargs": {"date_string": "1 Apr 2026", "custom": [1, {"a": None}]},
    },
    "low effort": {"messages": [USER], "reasoning_effort": "low"},
    "high effort with tools": {"messages": [SYSTEM, USER], "reasoning_effort": "high", "tools": TOOLS},
    "no effort": {"messages": [USER], "reasoning_effort": "none"},
    "documents": {"messages": [USER], "documents": [{"title": "a", "text": "b", "doc_id": "1"}]},
    "a response format": {"messages": [USER], "response_format": {"type": "json_object"}},
    "added special tokens": {"messages": [USER], "add_special_tokens": True},
    "a truncated chat": {"messages": [SYSTEM, USER, ANSWER, SECOND], "truncate_prompt_tokens": 9},
}

SEARCH: Final = {
    "name": "search",
    "description": "Finds.",
    "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}},
}
FUNCTION: Final = {
    "type": "function",
    "name": "search",
    "description": "Finds.",
    "parameters": SEARCH["input_schema"],
}
_USED: Final = {"type": "tool_use", "id": "t1", "name": "search", "input": {"q": "x"}}
_FOUND: Final = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "y"}]}
_CALLED: Final = {"type": "function_call", "call_id": "t1", "name": "search", "arguments": '{"q": "x"}'}
_OUTPUT: Final = {"type": "function_call_output", "call_id": "t1", "output": "y"}
_THOUGHT: Final = {
    "type": "reasoning",
    "id": "rs1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
_SAID: Final = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Four."}]}
_ASKED: Final = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And 3?"}]}

NATIVE: Final[dict[str, tuple[str, Body]]] = {
    "messages: a question": ("messages", {"messages": [USER]}),
    "messages: a system prompt": ("messages", {"system": "Be brief.", "messages": [USER]}),
    "messages: system blocks": (
        "messages",
        {"system": [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}], "messages": [USER]},
    ),
    "messages: turns": ("messages", {"messages": [USER, ANSWER, SECOND]}),
    "messages: tools": ("messages", {"messages": [USER], "tools": [SEARCH]}),
    "messages: a call's result": (
        "messages",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [_USED]},
                {"role": "user", "content": [_FOUND]},
            ],
            "tools": [SEARCH],
        },
    ),
    "messages: thinking": (
        "messages",
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "text", "text": "Four."},
                    ],
                },
                SECOND,
            ]
        },
    ),
    "messages: an effort": ("messages", {"messages": [USER], "output_config": {"effort": "high"}}),
    "responses: a text": ("responses", {"input": "What is 2 + 2?"}),
    "responses: instructions": ("responses", {"input": "Hi", "instructions": "Be brief."}),
    "responses: a developer message": (
        "responses",
        {"input": [{"role": "developer", "content": "Be brief."}, _ASKED]},
    ),
    "responses: turns": ("responses", {"input": [USER, _SAID, _ASKED], "instructions": "Be brief."}),
    "responses: an answer as text": (
        "responses",
        {"input": [USER, {"role": "assistant", "content": "Four."}, SECOND]},
    ),
    "responses: tools": ("responses", {"input": "Hi", "tools": [FUNCTION]}),
    "responses: a call's result": ("responses", {"input": [USER, _CALLED, _OUTPUT], "tools": [FUNCTION]}),
    "responses: reasoning": (
        "responses",
        {"input": [USER, _THOUGHT, _CALLED, _OUTPUT, _SAID, _ASKED], "tools": [FUNCTION]},
    ),
    "responses: an effort": ("responses", {"input": "Hi", "reasoning": {"effort": "low"}}),
}
