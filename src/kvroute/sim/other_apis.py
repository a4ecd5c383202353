"""/v1/messages (Anthropic's API) and /v1/responses (OpenAI's), which vLLM 0.32 both maps to a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvroute.sim.completions import PreparedChat, prepare, stream
from kvroute.sim.engine import Generation
from kvroute.sim.http import JSON, SSE, ApiError, Call, ExchangeEnded
from kvroute.sim.prompts import BILLING_HEADER, Choice, sampling
from kvroute.sim.worker import SimWorker, StoredResponse, kept_params

_json = msgspec.json.Encoder().encode


async def create_message(call: Call, worker: SimWorker) -> None:
    """POST /v1/messages. The engine's errors have Anthropic's form, errors of the body's form OpenAI's."""
    try:
        await _answer_message(call, worker)
    except ApiError as error:
        await _respond_error(call, error)


async def count_tokens(call: Call, worker: SimWorker) -> None:
    """POST /v1/messages/count_tokens."""
    try:
        body = call.json()
        model = worker.model(body)
        chat = prepare(worker, chat_of_message(body), model, sampling({}, limits=()))
    except ApiError as error:
        await _respond_error(call, error)
        return
    tokens = len(chat.prompt)
    context = {"original_input_tokens": tokens}
    await call.respond({"input_tokens": tokens, "context_management": context})


async def _respond_error(call: Call, error: ApiError) -> None:
    if call.started or error.kind == "Bad Request":
        raise error
    body = {"type": "error", "error": {"type": error.kind, "message": error.message}}
    await call.respond_raw(_json(body), error.status, [JSON])


async def _answer_message(call: Call, worker: SimWorker) -> None:
    body = call.json()
    if "max_tokens" not in body:
        raise ApiError.validation("missing", "body.max_tokens", "Field required")
    model = worker.model(body)
    stops = body.get("stop_sequences")
    params = sampling({**body, "stop": stops, "stream_options": None}, limits=("max_tokens",))
    chat = prepare(worker, chat_of_message(body), model, params)
    generation = await worker.submit(call, [chat.prompt], [chat.answers], params, model)
    message_id = worker.new_id("chatcmpl-", call)
    if params.stream:
        await _stream_message(call, worker, generation, chat, message_id, model)
        return
    await worker.wait_until_done(call, generation)
    answer = chat.answers[0]
    block: dict[str, Any] = {"type": "text", "text": answer.text}
    if chat.tool is not None:
        block = {"type": "tool_use", "id": worker.new_id("chatcmpl-tool-"), "name": chat.tool}
        block["input"] = _parsed_arguments(answer.text)
    reason, sequence = _stop_reason(chat)
    message = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "content": [block],
        "model": model,
        "stop_reason": reason,
        "usage": _message_usage(worker, generation, chat),
    }
    if sequence is not None:
        message["stop_sequence"] = sequence
    if (kept := kept_params(call, worker, generation)) is not None:
        message["kv_transfer_params"] = kept
    await call.respond(message)


async def _stream_message(
    call: Call, worker: SimWorker, generation: Generation, chat: PreparedChat, message_id: str, model: str
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
        + send("message_delta", delta=ended, usage=_message_usage(worker, generation, chat))
        + send("message_stop")
    )
    await call.end()


def _parsed_arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}  # cut by max_tokens


def _message_usage(worker: SimWorker, generation: Generation, chat: PreparedChat) -> dict[str, int]:
    request = generation.requests[0]
    tokens = {"input_tokens": len(chat.prompt), "output_tokens": len(chat.answers[0].token_ids)}
    if worker.options.report_cached_tokens:
        cached = request.reported_cached_tokens
        tokens["input_tokens"] -= cached + request.stored_tokens
        tokens["cache_creation_input_tokens"] = request.stored_tokens
        tokens["cache_read_input_tokens"] = cached
    return tokens


def _stop_reason(chat: PreparedChat) -> tuple[str, str | None]:
    answer = chat.answers[0]
    if answer.finish_reason == "length":
        return "max_tokens", None
    if chat.tool is not None:
        return "tool_use", None
    if answer.stop_reason is not None:
        return "stop_sequence", answer.stop_reason
    return "end_turn", None


def chat_of_message(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a body of /v1/messages to a chat request, as vLLM does."""
    messages: list[Any] = []
    if system := _system_text(body.get("system")):
        messages.append({"role": "system", "content": system})
    given = body.get("messages")
    if not isinstance(given, list):
        kind = "missing" if given is None else "list_type"
        raise ApiError.validation(kind, "body.messages", "Input should be a valid list")
    for message in given:
        if isinstance(message, dict) and message.get("role") == "system":
            content = message.get("content")
            text = _system_text([content] if isinstance(content, str) else content)
            messages += [{**message, "content": text}] if text else []
            continue
        messages += _chat_messages(message) if isinstance(message, dict) else [message]
    chat: dict[str, Any] = {"messages": messages}
    tools = body.get("tools")
    if isinstance(tools, list):
        chat["tools"] = [
            {"type": "function", "function": _chat_function(tool)} for tool in tools if isinstance(tool, dict)
        ]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        choice_kind = choice.get("type")
        chat["tool_choice"] = (
            named if choice_kind == "tool" else "required" if choice_kind == "any" else choice_kind
        )
    return chat


def _system_text(system: Any) -> Any:
    """The texts of a system prompt in one, without the blocks that begin with a client's billing header."""
    if not isinstance(system, list):
        return system
    texts = [block.get("text") if isinstance(block, dict) else block for block in system]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(BILLING_HEADER))


def _chat_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    return function | ({"description": tool["description"]} if tool.get("description") else {})


def _chat_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert one Anthropic message to chat messages; each tool result becomes a message."""
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
    plain_blocks = [block for block in content if block.get("type") not in ("tool_result", "tool_use")]
    converted = {**message, "content": plain_blocks or None, **({"tool_calls": calls} if calls else {})}
    return results + ([converted] if plain_blocks or calls else [])


async def create_response(call: Call, worker: SimWorker) -> None:
    """POST /v1/responses: answered as a whole, streamed, or in the background."""
    body = call.json()
    model = worker.model(body)
    params = sampling(body, limits=("max_output_tokens",), session=call.header(b"x-session-id"))
    messages = conversation(body, worker)
    chat = prepare(worker, chat_of_response(body, messages), model, params)
    response_id = body.get("request_id") or worker.new_id("resp_")
    record = _new_record(body, model, response_id, int(worker.clock.wall()))
    stored = StoredResponse(record, messages)
    store = body.get("store") is not False
    if store:
        worker.responses[response_id] = stored
    generation = await worker.submit(call, [chat.prompt], [chat.answers], params, model)
    items = [_output_item(worker, chat)]
    if params.stream:
        await _stream_response(call, worker, generation, chat, stored, items[0])
        return
    if body.get("background") and store:
        record["status"] = "queued"
        stored.generation = generation
        worker.run_in_background(_finish_in_background(worker, generation, chat, stored, items))
        await call.respond(record)
        return
    await worker.wait_until_done(call, generation)
    _finish_response(worker, generation, chat, stored, items)
    if (kept := kept_params(call, worker, generation)) is not None:
        record["kv_transfer_params"] = kept
    await call.respond(record)


async def retrieve_response(call: Call, worker: SimWorker) -> None:
    """GET /v1/responses/{id}."""
    await call.respond(_stored_response(call.path.rpartition("/")[2], worker).record)


async def cancel_response(call: Call, worker: SimWorker) -> None:
    """POST /v1/responses/{id}/cancel. Only a response in the background can be cancelled."""
    stored = _stored_response(call.path.removesuffix("/cancel").rpartition("/")[2], worker)
    if stored.record["status"] not in ("queued", "in_progress") or stored.generation is None:
        raise ApiError(400, "invalid_request_error", "Cannot cancel a synchronous response.", "response_id")
    stored.record["status"] = "cancelled"
    worker.close(stored.generation)
    await call.respond(stored.record)


def _stored_response(response_id: str, worker: SimWorker) -> StoredResponse:
    stored = worker.responses.get(response_id)
    if stored is None:
        message = f"Response with id '{response_id}' not found."
        raise ApiError(404, "invalid_request_error", message, "response_id")
    return stored


async def _finish_in_background(
    worker: SimWorker,
    generation: Generation,
    chat: PreparedChat,
    stored: StoredResponse,
    items: list[dict[str, Any]],
) -> None:
    try:
        while not generation.done:
            await generation.wait()
        worker.raise_if_ended(generation)
        _finish_response(worker, generation, chat, stored, items)
    except ExchangeEnded:
        pass  # cancelled: `cancel_response` has set the status
    except ApiError:
        stored.record["status"] = "failed"
    finally:
        worker.close(generation)


def _finish_response(
    worker: SimWorker,
    generation: Generation,
    chat: PreparedChat,
    stored: StoredResponse,
    items: list[dict[str, Any]],
) -> None:
    answer, record = chat.answers[0], stored.record
    is_cut = answer.finish_reason == "length"
    record["status"] = "incomplete" if is_cut else "completed"
    record["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    record["output"] = items
    prompt, output = len(chat.prompt), len(answer.token_ids)
    record["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": generation.requests[0].reported_cached_tokens,
            "cache_write_tokens": generation.requests[0].stored_tokens,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": output,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt + output,
    }
    stored.messages.append(_assistant_message(chat, answer))


def _assistant_message(chat: PreparedChat, answer: Choice) -> dict[str, Any]:
    if chat.tool is None:
        return {"role": "assistant", "content": answer.text}
    function = {"name": chat.tool, "arguments": answer.text}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


async def _stream_response(
    call: Call,
    worker: SimWorker,
    generation: Generation,
    chat: PreparedChat,
    stored: StoredResponse,
    item: dict[str, Any],
) -> None:
    answer, sequence = chat.answers[0], iter(range(1 << 62))
    where = {"output_index": 0, "item_id": item["id"]}

    def send(kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": next(sequence), **fields}
        return b"event: " + kind.encode() + b"\ndata: " + _json(event) + b"\n\n"

    await call.start(200, [SSE])
    stored.record["status"] = "in_progress"
    await call.chunk(
        send("response.created", response=stored.record)
        + send("response.in_progress", response=stored.record)
    )
    text = chat.tool is None
    kinds = "response.output_text" if text else "response.function_call_arguments"
    empty = {**item, "status": "in_progress"}
    empty["content" if text else "arguments"] = [] if text else ""
    opening = send("response.output_item.added", output_index=0, item=empty)
    text_part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    inside = {**where, "content_index": 0} if text else where
    if text:
        opening += send("response.content_part.added", **inside, part=text_part)

    def event(_: int, position: int) -> bytes:
        piece = answer.pieces[position] if position < len(answer.pieces) else ""
        return send(f"{kinds}.delta", **inside, delta=piece, **({"logprobs": []} if text else {}))

    await stream(call, worker, generation, event, opening)
    if text:
        tail = send(f"{kinds}.done", **inside, text=answer.text, logprobs=[])
        tail += send("response.content_part.done", **inside, part={**text_part, "text": answer.text})
    else:
        tail = send(f"{kinds}.done", **inside, name=chat.tool, arguments=answer.text)
    tail += send("response.output_item.done", output_index=0, item=item)
    _finish_response(worker, generation, chat, stored, [item])
    if (kept := kept_params(call, worker, generation)) is not None:
        stored.record["kv_transfer_params"] = kept
    kind = "response.completed" if stored.record["status"] == "completed" else "response.incomplete"
    await call.chunk(tail + send(kind, response=stored.record))
    await call.end()


def _output_item(worker: SimWorker, chat: PreparedChat) -> dict[str, Any]:
    answer = chat.answers[0]
    if chat.tool is not None:
        return {
            "type": "function_call",
            "id": worker.new_id("fc_"),
            "call_id": worker.new_id("call_"),
            "name": chat.tool,
            "arguments": answer.text,
            "status": "completed",
        }
    return {
        "type": "message",
        "id": worker.new_id("msg_"),
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": answer.text, "annotations": [], "logprobs": None}],
    }


def _new_record(body: Mapping[str, Any], model: str, response_id: str, created: int) -> dict[str, Any]:
    return {
        "id": response_id,
        "created_at": created,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": model,
        "object": "response",
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "temperature": body.get("temperature") or 1.0,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p") or 1.0,
        "background": bool(body.get("background")),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "previous_response_id": body.get("previous_response_id"),
        "prompt": None,
        "reasoning": body.get("reasoning"),
        "service_tier": body.get("service_tier") or "auto",
        "status": "in_progress",
        "text": body.get("text"),
        "top_logprobs": body.get("top_logprobs"),
        "truncation": body.get("truncation") or "disabled",
        "usage": None,
        "user": body.get("user"),
    }


def conversation(body: Mapping[str, Any], worker: SimWorker) -> list[dict[str, Any]]:
    """The messages before the answer: instructions, the stored conversation without its own instructions,
    input."""
    messages: list[dict[str, Any]] = []
    if isinstance(body.get("instructions"), str):
        messages.append({"role": "system", "content": body["instructions"]})
    if (previous := body.get("previous_response_id")) is not None:
        messages += [m for m in _stored_response(str(previous), worker).messages if m["role"] != "system"]
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        kind = "missing" if given is None else "string_type"
        raise ApiError.validation(kind, "body.input", "Input should be a valid string")
    for position, item in enumerate(given):
        convert = _INPUT_ITEMS.get(item.get("type", "message")) if isinstance(item, dict) else None
        if convert is None or (convert is _message and not isinstance(item.get("role"), str)):
            raise ApiError.validation("model_type", f"body.input.{position}", "Input should be a valid item")
        messages.append(convert(item))
    return messages


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": item["role"], "content": item.get("content")}


def _function_call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def _function_output(item: Mapping[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    return {
        "role": "tool",
        "content": output if isinstance(output, str) else str(_json(output), "utf-8"),
    }


_INPUT_ITEMS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_output,
}


def chat_of_response(body: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Convert a body of /v1/responses to a chat request with these messages (see `conversation`)."""
    chat: dict[str, Any] = {"messages": messages}
    tools = body.get("tools")
    if isinstance(tools, list):
        chat["tools"] = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in tools
            if isinstance(tool, dict) and tool.get("type") == "function"
        ]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        chat["tool_choice"] = choice
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": form}
    elif isinstance(form, dict):
        chat["response_format"] = form
    return chat
