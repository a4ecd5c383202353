"""Odd shapes of chats: what clients send by mistake, from other libraries, or seldom.

Each is a path after `/v1/` and a body without `model`. The engine may refuse some of them.
"""

from __future__ import annotations

from typing import Any, Final

from tests.support.chat_shapes import (
    ANSWER,
    CLOCK,
    DEVELOPER,
    FUNCTION,
    INLINE_THOUGHT,
    ONE,
    PARTS,
    SAID_IN_PARTS,
    SEARCH,
    SECOND,
    STRICT,
    SYSTEM,
    SYSTEM_PARTS,
    THOUGHT,
    TOOLS,
    TWO,
    USER,
    WEATHER,
    Body,
    asks,
    call,
    told,
    tool,
)

CONTINUE: Final = {"continue_final_message": True, "add_generation_prompt": False}


def said(*texts: Any, role: str = "user", **more: Any) -> Body:
    """A message whose content has these parts; a text is a part of type "text"."""
    parts = [{"type": "text", "text": text} if isinstance(text, str) else text for text in texts]
    return {"role": role, "content": parts, **more}


def with_call(**function: Any) -> Body:
    """A call and its result, with these members of the called function."""
    asked = {"id": "call_0001", "type": "function", "function": {"name": "get_weather", **function}}
    return {"messages": [USER, asks(asked), told(1)], "tools": TOOLS}


def with_tool(*tools: Any, **more: Any) -> Body:
    return {"messages": [SYSTEM, USER], "tools": list(tools), **more}


def with_kwargs(**kwargs: Any) -> Body:
    return {"messages": [SYSTEM, USER, THOUGHT, SECOND], "tools": TOOLS, "chat_template_kwargs": kwargs}


_NUMBERS: Final = (
    '{"i": 1, "f": 1.0, "e": 1e3, "m": -0, "n": -0.0, "big": 123456789012345678901234567890, "s": 1e-7, '
    '"long": 0.1000000000000000055, "max": 9223372036854775808, "list": [1, 2.50, null, true]}'
)
_SCHEMA: Final = {
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number", "minimum": -1.5}}}},
    "type": "object",
    "properties": {
        "union": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "all": {"allOf": [{"$ref": "#/$defs/point"}]},
        "one": {"oneOf": [{"const": 1}, {"const": "a"}]},
        "types": {"type": ["string", "integer", "null"], "description": None},
        "enum": {"enum": [1, "a", None, True, 2.5], "description": "Ünïcode <b> & 'quotes' \"here\""},
        "map": {"type": "object", "additionalProperties": {"type": "string"}},
        "any": {},
        "table": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}, "minItems": 1},
        "no items": {"type": "array"},
        "true": True,
        "type": {"type": "string"},
        "items": {"type": "integer", "exclusiveMaximum": 1e21},
    },
    "required": ["union", "type"],
    "additionalProperties": False,
}
_LONG: Final = "\n".join(f"line {number}: Ünïcode, \ttabs and {number}.5" for number in range(40))

CONTENTS: Final[dict[str, Body]] = {
    "null question": {"messages": [{"role": "user", "content": None}]},
    "question without content": {"messages": [SYSTEM, {"role": "user"}]},
    "null system prompt": {"messages": [{"role": "system", "content": None}, USER]},
    "null developer message": {"messages": [{"role": "developer", "content": None}, USER]},
    "null result": {"messages": [*ONE[:2], told(1, None)], "tools": TOOLS},
    "result without content": {
        "messages": [*ONE[:2], {"role": "tool", "tool_call_id": "call_0001"}],
        "tools": TOOLS,
    },
    "result without a call id": {
        "messages": [*ONE[:2], {"role": "tool", "content": "21"}],
        "tools": TOOLS,
    },
    "named result": {"messages": [*ONE[:2], {**told(1), "name": "get_weather"}], "tools": TOOLS},
    "answer without content": {"messages": [USER, {"role": "assistant"}, SECOND]},
    "no parts": {"messages": [{"role": "user", "content": []}]},
    "no parts in an answer": {"messages": [USER, {"role": "assistant", "content": []}, SECOND]},
    "no parts in a system prompt": {"messages": [{"role": "system", "content": []}, USER]},
    "no parts in a result": {"messages": [*ONE[:2], told(1, [])], "tools": TOOLS},
    "null part": {"messages": [said({"type": "text", "text": None}, "x")]},
    "only a null part": {"messages": [said({"type": "text", "text": None})]},
    "part without a text": {"messages": [said({"type": "text"}, "x")]},
    "part without a type": {"messages": [said({"text": "x"})]},
    "part of another type": {"messages": [said({"type": "document", "text": "x"})]},
    "empty parts": {"messages": [said("", "")]},
    "empty part in an answer": {"messages": [USER, said("", "x", role="assistant"), SECOND]},
    "texts in a list": {"messages": [{"role": "user", "content": ["one", "two"]}]},
    "texts and parts": {"messages": [{"role": "user", "content": ["one", {"type": "text", "text": "two"}]}]},
    "part of a response": {"messages": [said({"type": "input_text", "text": "in"})]},
    "part of an answer": {"messages": [USER, said({"type": "output_text", "text": "o"}, role="assistant")]},
    "thinking part": {
        "messages": [USER, said({"type": "thinking", "thinking": "Hm."}, "Four.", role="assistant"), SECOND]
    },
    "closed thinking part": {
        "messages": [
            USER,
            said({"type": "thinking", "thinking": "Hm.", "closed": True}, "Four.", role="assistant"),
            SECOND,
        ]
    },
    "refusal and a text": {
        "messages": [USER, said("No.", {"type": "refusal", "refusal": "Never."}, role="assistant"), SECOND]
    },
    "refusal field": {"messages": [USER, {"role": "assistant", "content": None, "refusal": "No."}, SECOND]},
    "cache control": {
        "messages": [
            said({"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}}, role="system"),
            said({"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}),
        ]
    },
    "cache control of a message": {"messages": [{**USER, "cache_control": {"type": "ephemeral"}}]},
    "part with a name": {"messages": [said({"type": "text", "text": "x", "name": "n", "annotations": []})]},
    "part with a uuid": {"messages": [said({"type": "text", "text": "x", "uuid": "u"})]},
    "tool reference": {
        "messages": [*ONE[:2], told(1, [{"type": "tool_reference", "name": "clock"}])],
        "tools": TOOLS,
    },
    "tool reference and a text": {
        "messages": [
            *ONE[:2],
            told(1, [{"type": "text", "text": "a"}, {"type": "tool_reference", "name": "clock"}]),
        ],
        "tools": TOOLS,
    },
    "result with a null part": {
        "messages": [*ONE[:2], told(1, [{"type": "text", "text": None}, {"type": "text", "text": "b"}])],
        "tools": TOOLS,
    },
    "number as content": {"messages": [{"role": "user", "content": 4}]},
    "object as content": {"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}]},
    "result as an object": {"messages": [*ONE[:2], told(1, {"celsius": 21})], "tools": TOOLS},
    "image": {
        "messages": [said("x", {"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}})]
    },
    "long text": {"messages": [SYSTEM, {"role": "user", "content": _LONG}, ANSWER, SECOND]},
    "controls": {"messages": [{"role": "user", "content": "a\x00b\x1b[0m\u2028c\u0085d\ufeff\x7f"}]},
    "right to left": {"messages": [{"role": "user", "content": "שלום \u202eabc\u202c مرحبا"}]},
    "high planes": {"messages": [{"role": "user", "content": "𝔘𝔫𝔦 🏳️‍🌈 \U0010ffff \ufffd"}]},
    "only blanks": {"messages": [{"role": "user", "content": " \n\t "}]},
    "blanks around": {
        "messages": [
            SYSTEM,
            {"role": "user", "content": "\n\n x \u00a0"},
            said(" y\n", role="assistant"),
            USER,
        ]
    },
    "jinja": {"messages": [{"role": "user", "content": "{{ messages }} {% if x %} {# y #}"}]},
    "html": {"messages": [{"role": "user", "content": "<b>&amp;</b> <tools></tools> <tool_response>"}]},
    "billing header": {
        "messages": [{"role": "system", "content": "x-anthropic-billing-header: a; cch=1\nBe brief."}, USER]
    },
    "billing header alone": {
        "messages": [{"role": "system", "content": "x-anthropic-billing-header: a"}, USER]
    },
    "billing header in parts": {
        "messages": [said("x-anthropic-billing-header: a", "Be brief.", role="system"), USER]
    },
    "billing header of a developer": {
        "messages": [{"role": "developer", "content": "x-anthropic-billing-header: a\nBe brief."}, USER]
    },
}

ROLES: Final[dict[str, Body]] = {
    "no messages": {"messages": []},
    "two system prompts": {"messages": [SYSTEM, SYSTEM_PARTS, USER]},
    "system prompts around": {"messages": [USER, SYSTEM]},
    "two developer messages": {"messages": [DEVELOPER, {**DEVELOPER, "content": "More."}, USER]},
    "developer message in parts": {"messages": [said("Be", "brief.", role="developer"), USER]},
    "developer messages later, in parts": {
        "messages": [USER, SAID_IN_PARTS, said("Be", "brief.", role="developer"), PARTS]
    },
    "developer message and later system prompt": {"messages": [DEVELOPER, USER, ANSWER, SYSTEM, SECOND]},
    "empty developer message": {"messages": [{"role": "developer", "content": ""}, SYSTEM, USER]},
    "developer with tools": {"messages": [{**DEVELOPER, "tools": TOOLS}, USER]},
    "developer with tools later": {"messages": [SYSTEM, USER, ANSWER, {**DEVELOPER, "tools": TOOLS}, USER]},
    "named developer": {"messages": [{**DEVELOPER, "name": "d"}, USER]},
    "function role": {"messages": [USER, {"role": "function", "name": "get_weather", "content": "21"}]},
    "unknown role": {"messages": [{"role": "critic", "content": "Hm."}, USER]},
    "latest reminder": {"messages": [USER, {"role": "latest_reminder", "content": "now"}]},
    "role in capitals": {"messages": [{"role": "User", "content": "Hm."}]},
    "two answers in a row": {"messages": [USER, ANSWER, THOUGHT, SECOND]},
    "three users in a row": {"messages": [USER, SECOND, PARTS]},
    "system prompt between users": {"messages": [USER, SYSTEM, SECOND]},
    "result after a user": {"messages": [USER, told(1)], "tools": TOOLS},
    "result first": {"messages": [told(1), USER], "tools": TOOLS},
    "question after a call": {"messages": [*ONE[:2], SECOND], "tools": TOOLS},
    "question between results": {"messages": [*TWO[:3], SECOND, TWO[3]], "tools": TOOLS},
    "unknown members": {
        "messages": [
            {**USER, "id": "m1", "metadata": {"a": 1}, "task": "t"},
            {**ANSWER, "audio": None},
            SECOND,
        ]
    },
    "null members": {
        "messages": [
            {**USER, "name": None},
            {**ANSWER, "tool_calls": None, "function_call": None, "refusal": None, "reasoning": None},
            SECOND,
        ]
    },
    "old function call": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": "{}"}},
            {"role": "function", "name": "clock", "content": "12"},
        ]
    },
    "number as a name": {"messages": [{**USER, "name": 5}]},
    "empty name": {"messages": [{**USER, "name": ""}]},
    "prefix": {"messages": [USER, {**ANSWER, "prefix": True}]},
}

CALLS: Final[dict[str, Body]] = {
    "arguments as an object": with_call(arguments={"city": "Zürich", "n": 1.0}),
    "arguments as an empty object": with_call(arguments={}),
    "arguments as a list": with_call(arguments="[1, 2]"),
    "arguments as a text": with_call(arguments='"text"'),
    "arguments as a number": with_call(arguments="42"),
    "arguments as null": with_call(arguments="null"),
    "null arguments": with_call(arguments=None),
    "no arguments": with_call(),
    "numbers in arguments": with_call(arguments=_NUMBERS),
    "blanks around arguments": with_call(arguments=' \n{"a" : 1 } '),
    "nested arguments": with_call(
        arguments='{"a": {"b": [{"c": "</tool_call>"}, []], "d": {}}, "é": "\\n\\u0000"}'
    ),
    "texts of odd kinds in arguments": with_call(
        arguments='{"a": "true", "b": "1", "c": " x ", "d": "{}", "e": ""}'
    ),
    "arguments twice": with_call(arguments='{"a": 1, "a": 2}'),
    "not a number in arguments": with_call(arguments='{"a": NaN, "b": Infinity}'),
    "cut arguments": with_call(arguments='{"city": "Zü'),
    "surrogate in arguments": with_call(arguments='{"a": "\\ud83d"}'),
    "pair of surrogates in arguments": with_call(arguments='{"a": "\\ud83d\\ude00"}'),
    "name last": {
        "messages": [
            USER,
            asks({"type": "function", "function": {"arguments": "{}", "name": "clock"}, "id": "call_0001"}),
            told(1),
        ],
        "tools": TOOLS,
    },
    "description in a call": with_call(arguments="{}", description="d", strict=True),
    "index in a call": {
        "messages": [USER, asks({**call(1), "index": 0}, {**call(2), "index": 1}), told(1), told(2)],
        "tools": TOOLS,
    },
    "call without an id": {
        "messages": [
            USER,
            asks({"type": "function", "function": {"name": "clock", "arguments": "{}"}}),
            told(1),
        ],
        "tools": TOOLS,
    },
    "call without a type": {
        "messages": [
            USER,
            asks({"id": "call_0001", "function": {"name": "clock", "arguments": "{}"}}),
            told(1),
        ],
        "tools": TOOLS,
    },
    "call of another type": {
        "messages": [
            USER,
            asks({"id": "c", "type": "custom", "custom": {"name": "x", "input": "y"}}),
            told(1),
        ]
    },
    "null id": {"messages": [USER, asks({**call(1), "id": None}), told(1)], "tools": TOOLS},
    "call without a name": with_call(name=None, arguments="{}"),
    "empty content beside a call": {"messages": [USER, asks(call(1), content=""), told(1)], "tools": TOOLS},
    "call without content": {
        "messages": [USER, {"role": "assistant", "tool_calls": [call(1)]}, told(1)],
        "tools": TOOLS,
    },
    "blank content beside a call": {
        "messages": [USER, asks(call(1), content="\n\n"), told(1)],
        "tools": TOOLS,
    },
    "parts beside a call": {
        "messages": [USER, asks(call(1), content=[{"type": "text", "text": "Let"}]), told(1)],
        "tools": TOOLS,
    },
    "no parts beside a call": {"messages": [USER, asks(call(1), content=[]), told(1)], "tools": TOOLS},
    "ids of Kimi": {
        "messages": [
            USER,
            asks({**call(1), "id": "functions.get_weather:0"}),
            {**told(1), "tool_call_id": "functions.get_weather:0"},
        ],
        "tools": TOOLS,
    },
    "calls of a user": {"messages": [{**USER, "tool_calls": [call(1)]}, ANSWER, SECOND], "tools": TOOLS},
    "result without calls": {"messages": [USER, ANSWER, told(1), SECOND], "tools": TOOLS},
    "a result that is missing": {"messages": [*TWO[:3], SECOND], "tools": TOOLS},
    "two results of one call": {"messages": [*ONE, told(1, "again")], "tools": TOOLS},
    "long result": {"messages": [*ONE[:2], told(1, _LONG), ANSWER, SECOND], "tools": TOOLS},
    "result of JSON with numbers": {"messages": [*ONE[:2], told(1, _NUMBERS)], "tools": TOOLS},
    "many calls": {
        "messages": [USER, *[each for n in range(8) for each in (asks(call(n)), told(n))], ANSWER, SECOND],
        "tools": TOOLS,
    },
    "many calls at once": {
        "messages": [USER, asks(*[call(n) for n in range(6)]), *[told(n) for n in range(6)]],
        "tools": TOOLS,
    },
    "five calls as the last": {"messages": [USER, asks(*[call(n) for n in range(5)])], "tools": TOOLS},
    "call with reasoning under its old name": {
        "messages": [USER, asks(call(1), reasoning_content="Hm."), told(1)],
        "tools": TOOLS,
    },
    "call with a thought in the text": {
        "messages": [USER, asks(call(1), content="<think>Hm.</think>\nOk"), told(1)],
        "tools": TOOLS,
    },
}

DECLARED: Final[dict[str, Body]] = {
    "schema of all kinds": with_tool(tool("complex", description="d", parameters=_SCHEMA)),
    "null parameters": with_tool(tool("f", parameters=None)),
    "empty parameters": with_tool(tool("f", parameters={})),
    "null description": with_tool(tool("f", description=None, parameters={"type": "object"})),
    "properties that are null": with_tool(tool("f", parameters={"type": "object", "properties": None})),
    "required that is null": with_tool(
        tool("f", parameters={"type": "object", "properties": {"a": {"type": "string"}}, "required": None})
    ),
    "not strict": with_tool(tool("f", strict=False)),
    "null strict": with_tool(tool("f", strict=None)),
    "unknown members of a tool": with_tool(
        {"type": "function", "function": {"name": "f", "returns": {"type": "string"}, "x": 1}, "y": 2}
    ),
    "return value": with_tool(
        tool("f", description="d", **{"return": {"type": "string"}, "response": {"a": 1}})
    ),
    "order of members": with_tool(
        {"function": {"parameters": {"type": "object"}, "description": "d", "name": "f"}, "type": "function"}
    ),
    "tool without a type": with_tool({"function": {"name": "f"}}),
    "tool of another type": with_tool({"type": "web_search"}),
    "flat tool": with_tool(FUNCTION),
    "deferred tool": with_tool(tool("f", defer_loading=True)),
    "tool that is not deferred": with_tool(tool("f", defer_loading=False)),
    "tool deferred beside": with_tool({**tool("f"), "defer_loading": True}),
    "cache control of a tool": with_tool({**tool("f"), "cache_control": {"type": "ephemeral"}}),
    "same tool twice": with_tool(CLOCK, CLOCK),
    "many tools": with_tool(WEATHER, CLOCK, STRICT, *[tool(f"f{n}", description=str(n)) for n in range(20)]),
    "unicode in a tool": with_tool(tool("größe", description="é \u2028 \U0001f600 \\u00e9 \"x\" 'y'\t")),
    "numbers in a tool": with_tool(
        tool(
            "f",
            parameters={
                "type": "object",
                "properties": {"a": {"default": 1e3, "maximum": 10**18, "x": 1e22}},
            },
        )
    ),
    "null tools": {"messages": [SYSTEM, USER], "tools": None},
    "no tools and none": {"messages": [SYSTEM, USER], "tools": [], "tool_choice": "none"},
    "no tools and auto": {"messages": [SYSTEM, USER], "tools": [], "tool_choice": "auto"},
    "null choice": with_tool(CLOCK, tool_choice=None),
    "required choice": with_tool(CLOCK, tool_choice="required"),
    "named choice": with_tool(CLOCK, tool_choice={"type": "function", "function": {"name": "clock"}}),
    "choice without tools": {"messages": [SYSTEM, USER], "tool_choice": "auto"},
    "old functions": {"messages": [SYSTEM, USER], "functions": [{"name": "f"}], "function_call": "auto"},
    "one call at a time": with_tool(CLOCK, parallel_tool_calls=False),
    "tools and documents": with_tool(CLOCK, documents=[{"title": "a", "text": "b"}]),
}

OPTIONS: Final[dict[str, Body]] = {
    "null kwargs": {"messages": [SYSTEM, USER], "chat_template_kwargs": None},
    "no kwargs": with_kwargs(),
    "null thinking": with_kwargs(enable_thinking=None, thinking=None),
    "thinking as a text": with_kwargs(enable_thinking="false", thinking="auto"),
    "thinking as a number": with_kwargs(enable_thinking=0, thinking=1),
    "old thoughts kept": with_kwargs(preserve_thinking=True, clear_thinking=False, keep_past_thinking=True),
    "thinking budget": with_kwargs(thinking_budget=512, reasoning_budget=0, max_thinking_tokens=4),
    "mode": with_kwargs(thinking_mode="thinking", mode="chat", reasoning=True, reasoning_mode="/think"),
    "effort in kwargs": with_kwargs(reasoning_effort="high"),
    "effort beside kwargs": {
        "messages": [USER],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": False},
    },
    "null effort": {"messages": [USER], "reasoning_effort": None},
    "least effort": {"messages": [USER], "reasoning_effort": "minimal"},
    "most effort": {"messages": [USER], "reasoning_effort": "max"},
    "extra effort": {"messages": [USER], "reasoning_effort": "xhigh"},
    "unknown effort": {"messages": [USER], "reasoning_effort": "huge"},
    "no effort and thinking": {
        "messages": [USER],
        "reasoning_effort": "none",
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "tokens in kwargs": with_kwargs(bos_token="<x>", eos_token="<y>", pad_token=None),
    "generation prompt in kwargs": with_kwargs(add_generation_prompt=False),
    "continue in kwargs": {
        "messages": [USER, ANSWER],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"continue_final_message": True},
    },
    "documents in kwargs": with_kwargs(documents=[{"title": "a", "text": "b"}]),
    "tools in kwargs": with_kwargs(tools=[CLOCK]),
    "messages in kwargs": with_kwargs(messages=[USER]),
    "conversation in kwargs": with_kwargs(conversation=[USER]),
    "tokenize in kwargs": with_kwargs(tokenize=True),
    "template in kwargs": with_kwargs(chat_template="x"),
    "null template in kwargs": with_kwargs(chat_template=None),
    "padding in kwargs": with_kwargs(padding=True),
    "truncation in kwargs": with_kwargs(truncation=True, max_length=5),
    "max length in kwargs": with_kwargs(max_length=5),
    "tensors in kwargs": with_kwargs(return_tensors="np"),
    "dict in kwargs": with_kwargs(return_dict=True),
    "mask in kwargs": with_kwargs(return_assistant_tokens_mask=True),
    "tokenizer's kwargs in kwargs": with_kwargs(tokenizer_kwargs={"add_special_tokens": True}),
    "tools in the user's text": with_kwargs(tools_in_user_message=False, builtin_tools=["brave_search"]),
    "builtin tools": with_kwargs(builtin_tools=["code_interpreter"], environment="ipython"),
    "dates in kwargs": with_kwargs(date_string="26 Jul 2024", today="x", current_date="2026-01-01", date="y"),
    "identity": with_kwargs(model_identity="You are Bob.", system_prompt="Be.", default_system_prompt=False),
    "xml tools": with_kwargs(xml_tools=["a"], python_tools=["b"], custom_tools=[CLOCK]),
    "own texts": with_kwargs(custom_instructions="Be.", user="ada", language="de", add_vision_id=True),
    "loop in kwargs": with_kwargs(loop="x", message="y", content="z", range="w", ns="v"),
    "globals in kwargs": with_kwargs(raise_exception="x"),
    "dates by a text": with_kwargs(strftime_now="x"),
    "both options": {"messages": [USER, ANSWER], "continue_final_message": True},
    "continued after a user": {"messages": [USER, ANSWER, SECOND], **CONTINUE},
    "continued system prompt": {"messages": [SYSTEM], **CONTINUE},
    "continued empty answer": {"messages": [USER, {"role": "assistant", "content": ""}], **CONTINUE},
    "continued blank answer": {"messages": [USER, {"role": "assistant", "content": " \n"}], **CONTINUE},
    "continued null answer": {"messages": [USER, {"role": "assistant", "content": None}], **CONTINUE},
    "continued thought": {
        "messages": [USER, {"role": "assistant", "content": None, "reasoning": "H"}],
        **CONTINUE,
    },
    "continued trimmed answer": {
        "messages": [USER, {"role": "assistant", "content": " Four, \n"}],
        **CONTINUE,
    },
    "continued call": {"messages": [USER, asks(call(1), content="Let me")], "tools": TOOLS, **CONTINUE},
    "continued call without a text": {"messages": [USER, asks(call(1))], "tools": TOOLS, **CONTINUE},
    "continued result": {"messages": [*ONE], "tools": TOOLS, **CONTINUE},
    "continued inline thought": {"messages": [USER, INLINE_THOUGHT], **CONTINUE},
    "continued open thought": {
        "messages": [USER, {"role": "assistant", "content": "<think>\nHm"}],
        **CONTINUE,
    },
    "continued repetition": {
        "messages": [{"role": "user", "content": "Four, Four, "}, ANSWER, USER, ANSWER],
        **CONTINUE,
    },
    "continued answer with a name": {"messages": [USER, {**ANSWER, "name": "bob"}], **CONTINUE},
    "continued answer with a system prompt and tools": {
        "messages": [SYSTEM, USER, ANSWER],
        "tools": TOOLS,
        **CONTINUE,
    },
    "continued empty part": {"messages": [USER, said("It", "", role="assistant")], **CONTINUE},
    "continued no parts": {"messages": [USER, said(role="assistant")], **CONTINUE},
    "continued developer message": {"messages": [USER, DEVELOPER], **CONTINUE},
    "prefilled answer": {"messages": [USER, ANSWER], "add_generation_prompt": True},
    "prefilled answer without a prompt": {"messages": [USER, THOUGHT], "add_generation_prompt": False},
    "no prompt after a result": {"messages": [*ONE], "tools": TOOLS, "add_generation_prompt": False},
    "no prompt after a call": {"messages": [*ONE[:2]], "tools": TOOLS, "add_generation_prompt": False},
    "echo": {"messages": [SYSTEM, USER, ANSWER], "echo": True, "add_generation_prompt": False},
    "no documents": {"messages": [USER], "documents": []},
    "documents without titles": {"messages": [USER], "documents": [{"text": "b"}, {"title": "c"}]},
    "documents with numbers": {"messages": [USER], "documents": [{"title": "a", "text": "b", "id": 1}]},
    "truncated to more": {"messages": [SYSTEM, USER], "truncate_prompt_tokens": 4000},
    "truncated to the context": {"messages": [SYSTEM, USER], "truncate_prompt_tokens": -1},
    "truncated to nothing": {"messages": [SYSTEM, USER], "truncate_prompt_tokens": 0},
    "truncated right": {"messages": [SYSTEM, USER], "truncate_prompt_tokens": 5, "truncation_side": "right"},
    "truncated left": {"messages": [SYSTEM, USER], "truncate_prompt_tokens": 5, "truncation_side": "left"},
    "truncated with special tokens": {
        "messages": [SYSTEM, USER],
        "truncate_prompt_tokens": 5,
        "add_special_tokens": True,
    },
    "special tokens in turns": {"messages": [SYSTEM, USER, ANSWER, SECOND], "add_special_tokens": True},
    "options as texts": {"messages": [USER], "add_generation_prompt": "false", "add_special_tokens": "true"},
    "options as numbers": {"messages": [USER], "add_generation_prompt": 0, "add_special_tokens": 1},
    "null options": {"messages": [USER], "add_generation_prompt": None, "continue_final_message": None},
    "a schema": {
        "messages": [SYSTEM, USER],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object"}},
        },
    },
    "structured outputs": {"messages": [SYSTEM, USER], "structured_outputs": {"choice": ["a", "b"]}},
    "unknown options": {
        "messages": [USER],
        "metadata": {"a": "b"},
        "verbosity": "low",
        "modalities": ["text"],
    },
    "multimodal kwargs": {
        "messages": [USER],
        "mm_processor_kwargs": {"a": 1},
        "media_io_kwargs": {"image": {}},
    },
}

_USED: Final = {"type": "tool_use", "id": "t1", "name": "search", "input": {"q": "x", "n": 1.0, "é": None}}
_CALLED: Final = {"type": "function_call", "call_id": "t1", "name": "search", "arguments": '{"q": "x"}'}
_OUTPUT: Final = {"type": "function_call_output", "call_id": "t1", "output": "y"}


def found(content: Any = "y", **more: Any) -> Body:
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": content, **more}],
    }


def turns(*messages: Body, **more: Any) -> Body:
    return {"messages": list(messages), **more}


_TEXT: Final = {"type": "text", "text": "Hm."}
_ASKS: Final = {"role": "assistant", "content": [_USED]}
_CACHED: Final = {**_TEXT, "cache_control": {"type": "ephemeral"}}

MESSAGES: Final[dict[str, Body]] = {
    "call": turns(USER, _ASKS, found(), tools=[SEARCH]),
    "text and call": turns(USER, {"role": "assistant", "content": [_TEXT, _USED]}, found(), tools=[SEARCH]),
    "thinking and call": turns(
        USER,
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "T", "signature": "s"}, _TEXT, _USED],
        },
        found(),
        tools=[SEARCH],
    ),
    "redacted thinking": turns(
        USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, _TEXT]}, SECOND
    ),
    "result of parts": turns(USER, _ASKS, found([_TEXT, _TEXT]), tools=[SEARCH]),
    "result of no parts": turns(USER, _ASKS, found([]), tools=[SEARCH]),
    "null result": turns(USER, _ASKS, found(None), tools=[SEARCH]),
    "failed result": turns(USER, _ASKS, found("No.", is_error=True), tools=[SEARCH]),
    "result without content": turns(
        USER,
        _ASKS,
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        tools=[SEARCH],
    ),
    "result and text": turns(
        USER, _ASKS, {"role": "user", "content": [*found()["content"], _TEXT, _CACHED]}, tools=[SEARCH]
    ),
    "text before the result": turns(
        USER, _ASKS, {"role": "user", "content": [_TEXT, *found()["content"]]}, tools=[SEARCH]
    ),
    "result in an answer": turns(USER, {**found(), "role": "assistant"}, SECOND, tools=[SEARCH]),
    "reference in a result": turns(
        USER, _ASKS, found([{"type": "tool_reference", "tool_name": "search"}]), tools=[SEARCH]
    ),
    "empty texts": turns({"role": "user", "content": [{"type": "text", "text": ""}, _TEXT]}),
    "only an empty text": turns({"role": "user", "content": [{"type": "text", "text": ""}]}),
    "empty question": turns({"role": "user", "content": ""}),
    "no blocks": turns({"role": "user", "content": []}),
    "no blocks in an answer": turns(USER, {"role": "assistant", "content": []}, SECOND),
    "several blocks": turns({"role": "user", "content": [_TEXT, _CACHED]}),
    "prefill": turns(USER, ANSWER),
    "prefill in blocks": turns(USER, {"role": "assistant", "content": [_TEXT]}),
    "system as an empty text": turns(USER, system=""),
    "system as an empty list": turns(USER, system=[]),
    "null system": turns(USER, system=None),
    "cached system": turns(USER, system=[_CACHED, _TEXT]),
    "billing header": turns(USER, system=[{"type": "text", "text": "x-anthropic-billing-header: a"}, _TEXT]),
    "billing header as a text": turns(USER, system="x-anthropic-billing-header: a\nBe."),
    "later system message": turns(USER, ANSWER, {"role": "system", "content": "Be."}, SECOND, system="A."),
    "later system blocks": turns(USER, ANSWER, {"role": "system", "content": [_TEXT, _TEXT]}, SECOND),
    "empty input": turns(
        USER, {"role": "assistant", "content": [{**_USED, "input": {}}]}, found(), tools=[SEARCH]
    ),
    "two calls": turns(
        USER,
        {"role": "assistant", "content": [_USED, {**_USED, "id": "t2"}]},
        {"role": "user", "content": [*found()["content"], {**found()["content"][0], "tool_use_id": "t2"}]},
        tools=[SEARCH],
    ),
    "no tools": turns(USER, tools=[]),
    "tool without a description": turns(USER, tools=[{"name": "f", "input_schema": {"type": "object"}}]),
    "tool without a schema's type": turns(USER, tools=[{"name": "f", "input_schema": {"properties": {}}}]),
    "empty schema": turns(USER, tools=[{"name": "f", "input_schema": {}}]),
    "typed tool": turns(USER, tools=[{"type": "custom", **SEARCH}]),
    "server's tool": turns(USER, tools=[{"type": "web_search_20250305", "name": "web_search"}]),
    "strict tool": turns(USER, tools=[{**SEARCH, "strict": True, "cache_control": {"type": "ephemeral"}}]),
    "choice auto": turns(USER, tools=[SEARCH], tool_choice={"type": "auto"}),
    "choice any": turns(USER, tools=[SEARCH], tool_choice={"type": "any"}),
    "choice none": turns(USER, tools=[SEARCH], tool_choice={"type": "none"}),
    "choice of a tool": turns(USER, tools=[SEARCH], tool_choice={"type": "tool", "name": "search"}),
    "disabled thinking": turns(USER, thinking={"type": "disabled"}),
    "enabled thinking": turns(USER, thinking={"type": "enabled", "budget_tokens": 1024}),
    "adaptive thinking": turns(USER, thinking={"type": "adaptive"}, output_config={"effort": "low"}),
    "most effort": turns(USER, output_config={"effort": "max"}),
    "disabled thinking with an effort": turns(
        USER, thinking={"type": "disabled"}, output_config={"effort": "high"}
    ),
    "output format": turns(
        USER, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}
    ),
    "template's kwargs": turns(USER, chat_template_kwargs={"enable_thinking": False, "thinking": False}),
    "metadata": turns(USER, metadata={"user_id": "u"}, stop_sequences=["x"], service_tier="auto"),
    "document": turns(
        {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}, _TEXT]}
    ),
    "search result": turns(
        {
            "role": "user",
            "content": [{"type": "search_result", "source": "u", "title": "t", "content": [_TEXT]}],
        }
    ),
    "server's tool use": turns(
        USER, {"role": "assistant", "content": [{**_USED, "type": "server_tool_use"}, _TEXT]}, SECOND
    ),
    "unicode": turns({"role": "user", "content": "naïve 👩‍👩‍👧‍👦\u2028"}, system="\n Be \n"),
}

_THOUGHT: Final = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "S"}]}


def items(*given: Any, **more: Any) -> Body:
    return {"input": list(given), **more}


_ASKED: Final = {"role": "user", "content": [{"type": "input_text", "text": "And?"}]}
_SAID: Final = {
    "type": "message",
    "id": "m1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Four.", "annotations": []}],
}

RESPONSES: Final[dict[str, Body]] = {
    "empty text": {"input": ""},
    "no items": items(),
    "empty instructions": {"input": "Hi", "instructions": ""},
    "null instructions": {"input": "Hi", "instructions": None},
    "instructions and a system message": items(SYSTEM, _ASKED, instructions="Be."),
    "instructions and a developer message": items(
        {**DEVELOPER, "type": "message"}, _ASKED, instructions="Be."
    ),
    "several parts": items({"role": "user", "content": [*_ASKED["content"], *_ASKED["content"]]}),
    "no parts": items({"role": "user", "content": []}),
    "answers in parts": items(_ASKED, {**_SAID, "content": [*_SAID["content"], *_SAID["content"]]}, _ASKED),
    "refusal": items(_ASKED, {**_SAID, "content": [{"type": "refusal", "refusal": "No."}]}, _ASKED),
    "two answers": items(_ASKED, _SAID, _SAID, _ASKED),
    "answer last": items(_ASKED, _SAID),
    "unfinished answer": items(_ASKED, {**_SAID, "status": "in_progress"}),
    "incomplete answer": items(_ASKED, {**_SAID, "status": "incomplete"}),
    "answer of a phase": items(_ASKED, {**_SAID, "phase": "commentary"}, _CALLED, _OUTPUT),
    "summary": items(_ASKED, _THOUGHT, _SAID, _ASKED),
    "empty summary": items(_ASKED, {**_THOUGHT, "summary": []}, _SAID, _ASKED),
    "encrypted reasoning": items(_ASKED, {**_THOUGHT, "encrypted_content": "x"}, _SAID, _ASKED),
    "null content of reasoning": items(_ASKED, {**_THOUGHT, "content": None, "summary": []}, _SAID, _ASKED),
    "two texts of reasoning": items(
        _ASKED,
        {**_THOUGHT, "content": [{"type": "reasoning_text", "text": text} for text in ("a", "b")]},
        _SAID,
        _ASKED,
    ),
    "reasoning last": items(_ASKED, _THOUGHT),
    "reasoning and a call": items(_ASKED, _THOUGHT, _CALLED, _OUTPUT, tools=[FUNCTION]),
    "answer and a call": items(_ASKED, _SAID, _CALLED, _OUTPUT, tools=[FUNCTION]),
    "two calls": items(
        _ASKED, _CALLED, {**_CALLED, "call_id": "t2"}, _OUTPUT, {**_OUTPUT, "call_id": "t2"}, tools=[FUNCTION]
    ),
    "calls with ids": items(
        _ASKED, {**_CALLED, "id": "fc_1", "status": "completed"}, _OUTPUT, tools=[FUNCTION]
    ),
    "call in a namespace": items(_ASKED, {**_CALLED, "namespace": "n"}, _OUTPUT),
    "output in parts": items(
        _ASKED, _CALLED, {**_OUTPUT, "output": [{"type": "input_text", "text": "y"}]}, tools=[FUNCTION]
    ),
    "empty output": items(_ASKED, _CALLED, {**_OUTPUT, "output": ""}, tools=[FUNCTION]),
    "output without its call": items(_ASKED, _OUTPUT, tools=[FUNCTION]),
    "custom call": items(
        _ASKED,
        {"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "o"},
    ),
    "arguments that are no JSON": items(_ASKED, {**_CALLED, "arguments": "x"}, _OUTPUT, tools=[FUNCTION]),
    "no tools": {"input": "Hi", "tools": []},
    "custom tool": {
        "input": "Hi",
        "tools": [{"type": "custom", "name": "patch", "format": {"type": "text"}}],
    },
    "namespace": {
        "input": "Hi",
        "tools": [{"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION]}],
    },
    "web search": {"input": "Hi", "tools": [{"type": "web_search"}, FUNCTION]},
    "strict function": {"input": "Hi", "tools": [{**FUNCTION, "strict": True}]},
    "not strict function": {"input": "Hi", "tools": [{**FUNCTION, "strict": False}]},
    "null parameters": {"input": "Hi", "tools": [{**FUNCTION, "parameters": None, "strict": None}]},
    "choice none": {"input": "Hi", "tools": [FUNCTION], "tool_choice": "none"},
    "choice of a function": {
        "input": "Hi",
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "search"},
    },
    "summary wanted": {"input": "Hi", "reasoning": {"effort": "medium", "summary": "auto"}},
    "no effort": {"input": "Hi", "reasoning": {"effort": "none"}},
    "null reasoning": {"input": "Hi", "reasoning": None},
    "format": {
        "input": "Hi",
        "text": {
            "format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}},
            "verbosity": "low",
        },
    },
    "truncation": {"input": "Hi", "truncation": "auto"},
    "no truncation": {"input": "Hi", "truncation": "disabled"},
    "template's kwargs": {
        "input": "Hi",
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    },
    "as Codex sends it": items(
        {"type": "message", **DEVELOPER, "content": [{"type": "input_text", "text": "Be."}]},
        {"type": "message", **_ASKED},
        _THOUGHT,
        _CALLED,
        _OUTPUT,
        {"type": "message", **_ASKED},
        instructions="You are Codex.",
        tools=[FUNCTION],
        tool_choice="auto",
        parallel_tool_calls=False,
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
    ),
    "item of another type": items(
        _ASKED, {"type": "local_shell_call", "id": "x", "call_id": "c", "status": "completed"}
    ),
    "message without a role": items({"type": "message", "content": "x"}),
    "later system message": items(_ASKED, _SAID, {"role": "system", "content": "Be."}, _ASKED),
}


def _named(path: str, kind: str, bodies: dict[str, Body]) -> dict[str, tuple[str, Body]]:
    return {f"{kind}: {name}": (path, body) for name, body in bodies.items()}


ODD_SHAPES: Final[dict[str, tuple[str, Body]]] = {
    **_named("chat/completions", "contents", CONTENTS),
    **_named("chat/completions", "roles", ROLES),
    **_named("chat/completions", "calls", CALLS),
    **_named("chat/completions", "tools", DECLARED),
    **_named("chat/completions", "options", OPTIONS),
    **_named("messages", "messages", MESSAGES),
    **_named("responses", "responses", RESPONSES),
}

INEXACT: Final = frozenset(
    (
        *("tools: deferred tool", "tools: tool that is not deferred", "tools: tool deferred beside"),
        *("options: tools in kwargs", "options: tokenize in kwargs", "options: truncated to the context"),
        *("options: loop in kwargs", "responses: truncation", "responses: call in a namespace"),
        *("responses: custom call", "responses: custom tool", "responses: namespace"),
    )
)
"""Shapes that may have no exact ids, with a reason."""
