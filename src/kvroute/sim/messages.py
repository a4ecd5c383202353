"""/v1/messages and its count_tokens: Anthropic's API as vLLM 0.32 maps it onto a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from kvroute.sim.chat import Chat, prepare
from kvroute.sim.driver import Generation
from kvroute.sim.http import JSON, ApiError, Call
from kvroute.sim.prompts import sampling
from kvroute.sim.streams import stream
from kvroute.sim.worker import Worker

_json = msgspec.json.Encoder().encode


async def create_message(call: Call, worker: Worker) -> None:
    """POST /v1/messages. Errors of the engine come in Anthropic's shape, of the form in OpenAI's."""
    try:
        await _create(call, worker)
    except ApiError as error:
        await _refuse(call, error)


async def count_tokens(call: Call, worker: Worker) -> None:
    """POST /v1/messages/count_tokens."""
    try:
        body = call.json()
        model = worker.model(body)
        chat = prepare(worker, _as_chat(body), model, sampling({}, limits=()))
    except ApiError as error:
        await _refuse(call, error)
        return
    tokens = len(chat.prompt)
    context = {"original_input_tokens": tokens}
    await call.respond({"input_tokens": tokens, "context_management": context})


async def _refuse(call: Call, error: ApiError) -> None:
    if call.started or error.kind == "Bad Request":
        raise error
    body = {"type": "error", "error": {"type": error.kind, "message": error.message}}
    await call.respond_raw(_json(body), error.status, [JSON])


async def _create(call: Call, worker: Worker) -> None:
    body = call.json()
    if "max_tokens" not in body:
        raise ApiError.validation("missing", "body.max_tokens", "Field required")
    model = worker.model(body)
    stops = body.get("stop_sequences")
    asked = sampling({**body, "stop": stops, "stream_options": None}, limits=("max_tokens",))
    chat = prepare(worker, _as_chat(body), model, asked)
    generation = worker.submit([chat.prompt], [chat.answers], asked, model)
    message_id = worker.new_id("chatcmpl-", call)
    if asked.stream:
        await _stream(call, worker, generation, chat, message_id, model)
        return
    await worker.complete(call, generation)
    answer = chat.answers[0]
    block: dict[str, Any] = {"type": "text", "text": answer.text}
    if chat.tool is not None:
        block = {"type": "tool_use", "id": worker.new_id("chatcmpl-tool-"), "name": chat.tool}
        block["input"] = _parsed(answer.text)
    reason, sequence = _stop_reason(chat)
    message = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "content": [block],
        "model": model,
        "stop_reason": reason,
        "usage": _usage(worker, generation, chat),
    }
    if sequence is not None:
        message["stop_sequence"] = sequence
    await call.respond(message)


async def _stream(
    call: Call, worker: Worker, generation: Generation, chat: Chat, message_id: str, model: str
) -> None:
    answer = chat.answers[0]

    def send(kind: str, **fields: Any) -> bytes:
        return b"event: " + kind.encode() + b"\ndata: " + _json({"type": kind, **fields}) + b"\n\n"

    start: dict[str, Any] = {"id": message_id, "type": "message", "role": "assistant", "content": []}
    start |= {"model": model, "stop_reason": None, "stop_sequence": None}
    start["usage"] = {"input_tokens": len(chat.prompt), "output_tokens": 0}
    block: dict[str, Any] = {"type": "text", "text": ""}
    if chat.tool is not None:
        block = {"type": "tool_use", "id": worker.new_id("chatcmpl-tool-"), "name": chat.tool, "input": {}}
    opening = send("message_start", message=start) + send("content_block_start", index=0, content_block=block)

    def event(_: int, position: int) -> bytes:
        piece = answer.pieces[position] if position < len(answer.pieces) else ""
        if chat.tool is None:
            delta = {"type": "text_delta", "text": piece}
        else:
            delta = {"type": "input_json_delta", "partial_json": piece}
        return send("content_block_delta", index=0, delta=delta)

    await stream(call, worker, generation, event, opening)
    reason, sequence = _stop_reason(chat)
    ended = {"stop_reason": reason, "stop_sequence": sequence}
    await call.chunk(
        send("content_block_stop", index=0)
        + send("message_delta", delta=ended, usage=_usage(worker, generation, chat))
        + send("message_stop")
    )
    await call.end()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}  # cut by max_tokens


def _usage(worker: Worker, generation: Generation, chat: Chat) -> dict[str, int]:
    request = generation.requests[0]
    tokens = {"input_tokens": len(chat.prompt), "output_tokens": len(chat.answers[0].token_ids)}
    if worker.options.report_cached_tokens:
        tokens["input_tokens"] -= request.cached_tokens + request.stored_tokens
        tokens["cache_creation_input_tokens"] = request.stored_tokens
        tokens["cache_read_input_tokens"] = request.cached_tokens
    return tokens


def _stop_reason(chat: Chat) -> tuple[str, str | None]:
    answer = chat.answers[0]
    if answer.finish_reason == "length":
        return "max_tokens", None
    if chat.tool is not None:
        return "tool_use", None
    if answer.stop_reason is not None:
        return "stop_sequence", answer.stop_reason
    return "end_turn", None


def _as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request that vLLM would make of it."""
    messages: list[Any] = []
    if body.get("system"):
        messages.append({"role": "system", "content": body["system"]})
    given = body.get("messages")
    if not isinstance(given, list):
        kind = "missing" if given is None else "list_type"
        raise ApiError.validation(kind, "body.messages", "Input should be a valid list")
    for message in given:
        messages += _messages(message) if isinstance(message, dict) else [message]
    chat: dict[str, Any] = {"messages": messages}
    tools = body.get("tools")
    if isinstance(tools, list):
        chat["tools"] = [
            {"type": "function", "function": _function(tool)} for tool in tools if isinstance(tool, dict)
        ]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        wanted = choice.get("type")
        chat["tool_choice"] = named if wanted == "tool" else "required" if wanted == "any" else wanted
    return chat


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    return function | ({"description": tool["description"]} if tool.get("description") else {})


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """One Anthropic message; tool results become messages of their own."""
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        return [message]
    results = [
        {"role": "tool", "content": block.get("content")}
        for block in content
        if block.get("type") == "tool_result"
    ]
    calls = [
        {"function": {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}}
        for block in content
        if block.get("type") == "tool_use"
    ]
    rest = [block for block in content if block.get("type") not in ("tool_result", "tool_use")]
    own = {**message, "content": rest or None, **({"tool_calls": calls} if calls else {})}
    return results + ([own] if rest or calls else [])
