"""Anthropic Messages bodies as chats, by vLLM 0.32's rules (entrypoints/anthropic/serving.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvroute.tokens.chat import Chat, EngineFlags, objects, template_kwargs, tool_schema
from kvroute.tokens.reason import Inexact, Reason
from kvroute.tokens.template import ChatTemplate, Message

_BILLING_LINE = "x-anthropic-billing-header"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def messages_request(body: Mapping[str, Any], flags: EngineFlags, template: ChatTemplate | None) -> Chat:
    """The chat that vLLM makes of the body.

    Two of its rules look at the chat template; without one, bodies that they concern are not told.
    Raises Inexact.
    """
    turns = objects(body.get("messages"))
    system = [text for text in _system_texts(body.get("system")) if text]
    later = [text for turn in turns if turn.get("role") == "system" for text in [_joined(turn)] if text]
    if later and template is None:
        raise Inexact(Reason.UNSUPPORTED)
    moved = template is not None and template.wants_system_first
    messages: list[Message] = []
    if moved:
        system += later
    if system:
        messages.append({"role": "system", "content": "".join(system)})
    for turn in turns:
        if turn.get("role") == "system":
            if not moved and (text := _joined(turn)):
                messages.append({"role": "system", "content": text})
        else:
            messages.extend(_turn(turn))
    tools = body.get("tools")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "none" and flags.tools_dropped_for_none:
        tools = None
    return Chat(
        messages=messages,
        tools=None if tools is None else [_tool(tool) for tool in objects(tools)],
        kwargs=template_kwargs(
            body.get("chat_template_kwargs"),
            {"add_generation_prompt": True, "continue_final_message": False},
            _effort(body, template),
            flags,
        ),
    )


def _effort(body: Mapping[str, Any], template: ChatTemplate | None) -> str | None:
    thinking, output = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        if template is None:
            raise Inexact(Reason.UNSUPPORTED)
        return _least_effort(template)
    return output.get("effort") if isinstance(output, dict) else None


def _least_effort(template: ChatTemplate) -> str:
    """What vLLM sends for disabled thinking: "low" where the template does not know "none"."""

    def probe(effort: str) -> str | None:
        message: Message = {"role": "user", "content": "Hi"}
        if template.content_format == "openai":
            message["content"] = [{"type": "text", "text": "Hi"}]
        try:
            return template.render([message], reasoning_effort=effort, enable_thinking=effort != "none")
        except Inexact:
            return None

    none = probe("none")
    return "low" if none is None or any(probe(effort) == none for effort in _EFFORTS) else "none"


def _system_texts(system: Any) -> Iterator[str]:
    if isinstance(system, str):
        yield system
    elif system is not None:
        yield from _block_texts(system)


def _block_texts(blocks: Any) -> Iterator[str]:
    for block in objects(blocks):
        if block.get("type") in ("tool_addition", "tool_removal"):
            raise Inexact(Reason.UNSUPPORTED)
        text = block.get("text")
        if block.get("type") == "text" and isinstance(text, str) and not text.startswith(_BILLING_LINE):
            yield text


def _joined(turn: Message) -> str:
    """The text of a system message in the middle of a conversation."""
    content = turn.get("content")
    if isinstance(content, str):
        return "" if content.startswith(_BILLING_LINE) else content
    return "".join(_block_texts(content))


def _turn(turn: Message) -> Iterator[Message]:
    """The messages of one turn: its tool results first, each a message of its own."""
    role, content = turn.get("role"), turn.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for block in objects(content):
        match block.get("type"):
            case "text":
                if block.get("text"):
                    parts.append({"type": "text", "text": block["text"]})
            case "thinking":
                if block.get("thinking") is not None:
                    thoughts.append(block["thinking"])
            case "tool_use":
                function = {
                    "arguments": json.dumps(block.get("input") or {}),
                    "name": block.get("name") or "",
                }
                # An id is made up where there is none; few templates show it.
                calls.append({"id": block.get("id") or "", "function": function, "type": "function"})
            case "tool_result" if role == "user":
                yield from _tool_result(block)
            case "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
            case "redacted_thinking" | "tool_reference":
                pass
            case "image":
                raise Inexact(Reason.MEDIA)
            case _:
                raise Inexact(Reason.UNSUPPORTED)
    message: Message = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts[0]["text"] if len(parts) == 1 else parts
    if role != "user" or parts:
        yield message


def _tool_result(block: Message) -> Iterator[Message]:
    content, call = block.get("content"), block.get("tool_use_id") or ""
    references: list[Message] = []
    texts: list[str] = []
    if isinstance(content, str):
        texts.append(content)
    for item in content if isinstance(content, list) else ():
        match item.get("type"):
            case "text":
                texts.append(item.get("text", ""))
            case "image":
                raise Inexact(Reason.MEDIA)
            case "tool_reference" if name := item.get("tool_name") or item.get("name"):
                references.append({"type": "tool_reference", "name": name})
    yield {"role": "tool", "tool_call_id": call, "content": "\n".join(texts)}
    if references:
        yield {"role": "tool", "tool_call_id": call, "content": references}


def _tool(tool: Message) -> Message:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise Inexact(Reason.UNREADABLE)
    # The default goes to the end, as vLLM adds it to what the client sent.
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    return tool_schema({**tool, "parameters": parameters})
