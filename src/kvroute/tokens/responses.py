"""Responses API bodies as chats, by vLLM 0.32's rules (entrypoints/openai/responses/utils.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvroute.tokens.chat import Chat, EngineFlags, objects, template_kwargs, tool_schema
from kvroute.tokens.reason import Inexact, Reason
from kvroute.tokens.template import Message

_UNFINISHED = ("in_progress", "incomplete")
_SHIMMED_TOOLS = ("namespace", "custom")
"""Tools that vLLM rewrites into functions of its own making."""


def responses_request(body: Mapping[str, Any], flags: EngineFlags) -> Chat:
    """The chat that vLLM makes of the body. Raises Inexact."""
    if body.get("previous_response_id") is not None:
        raise Inexact(Reason.STORED_RESPONSE)
    if body.get("truncation") not in (None, "disabled"):
        raise Inexact(Reason.TRUNCATION)
    if body.get("previous_input_messages") is not None:
        raise Inexact(Reason.UNSUPPORTED)
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    unfinished = False
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        items = objects(given)
        for item in items:
            _add(item, messages)
        unfinished = bool(items) and _is_unfinished(items[-1])
    reasoning = body.get("reasoning")
    return Chat(
        messages=messages,
        tools=_tools(body, flags),
        kwargs=template_kwargs(
            body.get("chat_template_kwargs"),
            {"add_generation_prompt": not unfinished, "continue_final_message": unfinished},
            reasoning.get("effort") if isinstance(reasoning, dict) else None,
            flags,
        ),
        # Unlike the other chat endpoints; a template's BOS is followed by another one.
        add_special_tokens=True,
    )


def _is_unfinished(item: Message) -> bool:
    return item.get("type", "message") in ("message", "reasoning") and item.get("status") in _UNFINISHED


def _tools(body: Mapping[str, Any], flags: EngineFlags) -> list[Message] | None:
    tools = body.get("tools")
    if not tools or (body.get("tool_choice") == "none" and flags.tools_dropped_for_none):
        return None
    shown = []
    for tool in objects(tools):
        if tool.get("type") in _SHIMMED_TOOLS:
            raise Inexact(Reason.UNSUPPORTED)
        if tool.get("type") == "function":
            shown.append(tool_schema(tool.get("function", tool)))
    return shown


def _add(item: Message, messages: list[Message]) -> None:
    """Append the item's message, or complete the assistant's message before it."""
    before = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    kind = item.get("type", "message")
    if kind == "function_call":
        if item.get("namespace"):
            raise Inexact(Reason.UNSUPPORTED)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "function": function, "type": "function"}
        if before is not None:
            before.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "function_call_output":
        output, call_id = item.get("output"), item.get("call_id")
        messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
    elif kind == "reasoning":
        _complete(before, messages, "reasoning", _thought(item))
    elif kind == "message" and isinstance(item.get("role"), str):
        content = item.get("content")
        if item["role"] != "assistant":
            messages.append({**item, "content": _as_chat_parts(content)})
        elif isinstance(content, str):
            _complete(before, messages, "content", content)
        elif parts := objects(content):
            _complete(before, messages, "content", parts[0].get("text"))
        else:
            raise Inexact(Reason.UNREADABLE)
    else:
        raise Inexact(Reason.UNSUPPORTED)


def _as_chat_parts(content: Any) -> Any:
    """Parts under the name that chat completions know too; both are text and nothing else."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text"} if part.get("type") == "input_text" else part for part in objects(content)
    ]


def _thought(item: Message) -> str:
    if item.get("encrypted_content"):
        raise Inexact(Reason.UNSUPPORTED)
    texts = objects(item.get("content") or item.get("summary") or [])
    return str(texts[0].get("text", "")) if texts else ""


def _complete(before: Message | None, messages: list[Message], name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise Inexact(Reason.UNREADABLE)
    if before is not None and before.get(name) is None:
        before[name] = text
    else:
        messages.append({"role": "assistant", name: text})
