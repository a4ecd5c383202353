"""Converts chat completion bodies to the input of the chat template, by vLLM 0.32's rules.

Sources: entrypoints/openai/chat_completion/protocol.py (fields, their validation and order),
renderers/chat_utils.py (messages and parts), renderers/hf.py (developer role). The result for a body that
vLLM refuses does not matter: such a body never reaches a cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvroute.openai.shown import NEWEST_RULE, BillingRule, without_billing
from kvroute.tokens.options import ContentFormat, Inexact, TokensReason
from kvroute.tokens.template import ChatTemplate, Message

# Part type -> field with its text. vLLM skips a part of the first two types if its text is null.
_TEXT_FIELDS = {
    "text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "output_text": "text",
    "thinking": "thinking",
}
_SKIPPED_IF_NULL = ("text", "refusal")
_SWITCHES: Final[Mapping[Any, bool]] = {
    **dict.fromkeys((True, "1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys((False, "0", "off", "f", "false", "n", "no"), False),
}
_SPECIAL_ROLES: Final = ("system", "developer")
"""Roles whose messages vLLM changes before it renders them."""
# Fields of parts that vLLM knows. Templates that take parts get all other fields, too.
_PART_FIELDS = frozenset(
    (
        *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url"),
        *("input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid"),
        *("video_embeds", "video_url"),
    )
)


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The workers' command-line flags and their release, as far as these change prompts."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """--default-chat-template-kwargs"""
    content_format: ContentFormat | None = None
    """--chat-template-content-format"""
    tools_dropped_for_none: bool = False
    """--exclude-tools-when-tool-choice-none"""
    billing: BillingRule = NEWEST_RULE
    """The rule of the workers' release."""


class Chat(msgspec.Struct, frozen=True):
    """A chat to render, with all inputs of the template."""

    messages: Sequence[Any]
    """The client's messages; `render_chat` converts them for the template."""
    tools: list[Message] | None = None
    kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """All other template variables, the client's `chat_template_kwargs` included."""
    add_special_tokens: bool = False
    truncate_to: int | None = None
    truncation_side: str | None = None


def chat_completion(body: Mapping[str, Any], flags: EngineFlags) -> Chat:
    """Read a body of /v1/chat/completions. Raises Inexact if kvroute cannot render it."""
    if body.get("chat_template") is not None:
        raise Inexact(TokensReason.REQUEST_TEMPLATE)
    if isinstance(transfer := body.get("kv_transfer_params"), dict) and transfer.get("prompt_token_ids"):
        raise Inexact(TokensReason.UNSUPPORTED)
    tools = body.get("tools")
    if tools is not None and body.get("tool_choice") == "none" and flags.tools_dropped_for_none:
        tools = None
    return Chat(
        messages=[validated(message) for message in objects(body.get("messages"))],
        tools=None if tools is None else [_chat_tool(tool) for tool in objects(tools)],
        kwargs=template_kwargs(
            body.get("chat_template_kwargs"),
            {
                "add_generation_prompt": switch(body, "add_generation_prompt", default=True),
                "continue_final_message": _continued(body),
                "documents": body.get("documents"),
            },
            body.get("reasoning_effort"),
            flags,
        ),
        add_special_tokens=switch(body, "add_special_tokens", default=False),
        truncate_to=body.get("truncate_prompt_tokens"),
        truncation_side=body.get("truncation_side"),
    )


def switch(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A field that is true or false, by the rules of vLLM's validation (pydantic's, not strict)."""
    value = body.get(name, default)
    if isinstance(value, str):
        value = value.lower()
    # The mapping also has 1, 1.0, 0 and 0.0, because they are equal to True and False.
    if isinstance(value, (int, float, str)) and value in _SWITCHES:
        return _SWITCHES[value]
    raise Inexact(TokensReason.UNREADABLE)


def _continued(body: Mapping[str, Any]) -> bool | str:
    """Whether the final message is continued; a text names the field that is."""
    value = body.get("continue_final_message", False)
    if isinstance(value, str) and value.lower() not in _SWITCHES:
        return value
    return switch(body, "continue_final_message", default=False)


def validated(message: Message) -> Message:
    """A message after vLLM's validation of chat completions.

    `reasoning_content` is renamed to `reasoning` (`/tokenize` does not do that), and the fields of tool calls
    get a fixed order, because a template may print them.
    """
    if "reasoning_content" in message:
        message = dict(message)
        older = message.pop("reasoning_content")
        if older is not None and message.get("reasoning") is None:
            message["reasoning"] = older
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [_in_order(call) for call in objects(message["tool_calls"])]}
    return message


def _in_order(call: Message) -> Message:
    function = call.get("function")
    if isinstance(function, dict):
        call = {**call, "function": _ordered(function, "arguments", "name")}
    return _ordered(call, "id", "function", "type")


def _ordered(fields: Message, *names: str) -> Message:
    return {name: fields[name] for name in names if name in fields} | fields


def template_kwargs(
    requested: Any, fields: Mapping[str, Any], effort: Any, flags: EngineFlags
) -> dict[str, Any]:
    """The template's variables, later ones win: server defaults, the client's kwargs, the request's fields.

    In the client's kwargs and in the request's fields, None and "auto" count as missing.
    """
    requested = requested or {}
    if not isinstance(requested, dict):
        raise Inexact(TokensReason.UNREADABLE)
    if requested.get("chat_template") is not None:
        raise Inexact(TokensReason.REQUEST_TEMPLATE)
    # These are parameters of the functions that call the template, not variables of the template.
    if not requested.keys().isdisjoint(("tokenize", "tools", "messages", "return_assistant_tokens_mask")):
        raise Inexact(TokensReason.UNSUPPORTED)
    request_kwargs = {**fields, "reasoning_effort": effort}
    if effort is not None and "enable_thinking" not in requested:
        request_kwargs["enable_thinking"] = effort != "none"
    return {**flags.chat_template_kwargs, **_given(requested), **_given(request_kwargs)}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "auto")}


def _chat_tool(tool: Message) -> Message:
    if tool.get("defer_loading") is not None:
        raise Inexact(TokensReason.UNSUPPORTED)
    return tool_schema(tool.get("function"))


def tool_schema(function: Any) -> Message:
    """A tool as vLLM passes it to templates: known fields only, in vLLM's order."""
    if not isinstance(function, dict):
        raise Inexact(TokensReason.UNREADABLE)
    definition: Message = {name: function.get(name) for name in ("name", "description", "parameters")}
    definition.update((name, function[name]) for name in ("strict",) if function.get(name) is not None)
    if function.get("defer_loading") is not None:
        raise Inexact(TokensReason.UNSUPPORTED)
    return {"type": "function", "function": definition}


def objects(values: Any) -> list[dict[str, Any]]:
    if not isinstance(values, list):
        raise Inexact(TokensReason.UNREADABLE)
    for value in values:
        if not isinstance(value, dict):
            raise Inexact(TokensReason.UNREADABLE)
    return values


def refuse_media(messages: Sequence[Any]) -> None:
    """Raise Inexact if a message has a part that is not text."""
    for message in objects(messages):
        if isinstance(content := message.get("content"), list):
            for content_part in content:
                _rendered_part(content_part, "string")


def render_chat(chat: Chat, template: ChatTemplate, flags: EngineFlags | None = None) -> str:
    """The rendered text of a chat. Raises Inexact."""
    form, drops_billing = template.content_format, flags is None or flags.billing.lines
    messages = [_message(message, form, drops_billing) for message in objects(chat.messages)]
    if not template.knows_developer and "developer" in [message["role"] for message in messages]:
        messages = _without_developer(messages)
    kwargs = dict(chat.kwargs)
    return template.render(
        messages,
        tools=chat.tools,
        documents=kwargs.pop("documents", None),
        add_generation_prompt=kwargs.pop("add_generation_prompt", False),
        continue_final_message=kwargs.pop("continue_final_message", False),
        **kwargs,
    )


def _message(message: Message, form: ContentFormat, drops_billing: bool) -> Message:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise Inexact(TokensReason.UNREADABLE)
    # The usual message, with the same result as the code below.
    if len(message) == 2 and form == "string" and isinstance(content, str) and role not in _SPECIAL_ROLES:
        return {"role": role, "content": content}
    parts = [] if content is None else [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise Inexact(TokensReason.UNREADABLE)
    if role == "system" and drops_billing:
        parts = _without_billing(parts)
    # Neither a missing nor an empty text becomes a line.
    texts = [text for text in (_rendered_part(content_part, form) for content_part in parts) if text]
    rendered: Message = {"role": role, "content": texts if form == "openai" else "\n".join(texts)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            rendered["tool_calls"] = [_tool_call(call) for call in objects(calls)]
        if (reasoning := message.get("reasoning")) is not None:
            rendered["reasoning"] = rendered["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            rendered["tool_call_id"] = message["tool_call_id"]
        if form == "openai" and all(text_part["type"] == "text" for text_part in texts):
            rendered["content"] = "\n".join(text_part["text"] for text_part in texts)
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            rendered[name] = message[name]
    if role == "developer":
        rendered["tools"] = message.get("tools")
    return rendered


def _rendered_part(content_part: Any, form: ContentFormat) -> Any:
    """A part as the template gets it; None for a part that vLLM skips."""
    if isinstance(content_part, str):
        return {"type": "text", "text": content_part} if form == "openai" else content_part
    if not isinstance(content_part, dict):
        raise Inexact(TokensReason.UNREADABLE)
    kind = content_part.get("type")
    if kind == "tool_reference" and isinstance(name := content_part.get("name"), str):
        return {"type": kind, "name": name} if form == "openai" else name
    if kind not in _TEXT_FIELDS or content_part.get("uuid") is not None:
        raise Inexact(TokensReason.MEDIA)
    text = content_part.get(_TEXT_FIELDS[kind])
    if text is None and kind in _SKIPPED_IF_NULL:
        return None
    if not isinstance(text, str):
        raise Inexact(TokensReason.UNREADABLE)
    if form == "string":
        return text
    extra = {name: value for name, value in content_part.items() if name not in _PART_FIELDS}
    return {"type": "text", "text": text, **extra}


def _tool_call(call: Message) -> Message:
    """A tool call with its arguments as an object."""
    function = call.get("function")
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Inexact(TokensReason.UNREADABLE)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
        except RecursionError:
            raise Inexact(TokensReason.UNREADABLE) from None
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _without_billing(parts: list[Any]) -> list[Any]:
    kept = []
    for content_part in parts:
        is_text = isinstance(content_part, dict) and content_part.get("type") == "text"
        text = content_part.get("text") if is_text else content_part
        if isinstance(text, str) and (shown := without_billing(text, whole=False)) is not text:
            if shown:
                kept.append({**content_part, "text": shown} if is_text else shown)
        else:
            kept.append(content_part)
    return kept


def _without_developer(messages: list[Message]) -> list[Message]:
    """Convert developer messages to system messages; merge several system messages into a first one."""
    system: list[str] = []
    others: list[Message] = []
    converted: list[Message] = []
    in_order = True
    for index, message in enumerate(messages):
        if message["role"] == "developer":
            message = {name: value for name, value in message.items() if name != "tools"}
            message["role"] = "system"
        converted.append(message)
        if message["role"] != "system":
            others.append(message)
            continue
        in_order = in_order and index == 0
        content = message["content"]
        if isinstance(content, list):
            content = "\n".join(content_part["text"] for content_part in content if "text" in content_part)
        if content:
            system.append(content)
    return converted if in_order else [{"role": "system", "content": "\n\n".join(system)}, *others]
