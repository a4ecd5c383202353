"""/v1/chat/completions: text, tool calls and structured output, with the answers of vLLM 0.32."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvroute.sim import answers as make
from kvroute.sim.answers import Choice
from kvroute.sim.completions import alternatives, stream, token_logprob
from kvroute.sim.driver import Generation
from kvroute.sim.http import ApiError, Call
from kvroute.sim.prompts import Sampling, chat_tokens, messages_of, sampling
from kvroute.sim.transfer import kept_params
from kvroute.sim.worker import SimWorker

_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A rendered chat and its answers, for the chat, messages and responses endpoints.

    `tool` is the function that the answer calls. `named`: the request names this function; then vLLM's
    finish_reason is "stop" instead of "tool_calls".
    """

    prompt: array[int]
    answers: list[Choice]
    tool: str | None
    named: bool

    def reason(self, answer: Choice) -> str:
        """The choice's finish_reason."""
        if self.tool is not None and not self.named and answer.finish_reason == "stop":
            return "tool_calls"
        return answer.finish_reason


def prepare(worker: SimWorker, body: Mapping[str, Any], model: str, params: Sampling) -> PreparedChat:
    """Check and render a chat, and compute its answers. Raises `ApiError`."""
    messages = messages_of(body)
    tools = _tools(body)
    open_end = bool(body.get("continue_final_message"))
    generate = body.get("add_generation_prompt", True) is not False
    prompt = chat_tokens(messages, tools, generate=generate, open_end=open_end)
    limit = worker.limit(prompt, params.limit)
    tool, named = _called(body, tools)
    text = _structured(body)
    if tool is not None:
        text = make.document(next(f.get("parameters", {}) for f in _functions(tools) if f["name"] == tool))
    natural = worker.options.answer_tokens
    answers = [
        make.plain(make.fingerprint(prompt, model, choice), limit, natural, params.stop)
        if text is None
        else make.fixed(text, limit, params.stop)
        for choice in range(params.n)
    ]
    return PreparedChat(prompt, answers, tool, named)


async def chat_completions(call: Call, worker: SimWorker) -> None:
    """POST /v1/chat/completions."""
    body = call.json()
    model = worker.model(body)
    params = sampling(
        body, limits=("max_completion_tokens", "max_tokens"), session=call.header(b"x-session-id")
    )
    chat = prepare(worker, body, model, params)
    generation = await worker.submit(call, [chat.prompt], [chat.answers], params, model)
    head = {
        "id": worker.new_id("chatcmpl-", call),
        "object": "chat.completion.chunk" if params.stream else "chat.completion",
        "created": int(worker.clock.wall()),
        "model": model,
    }
    produced = sum(len(answer.token_ids) for answer in chat.answers)
    if params.stream:
        await _stream(call, worker, generation, head, chat, params)
        if params.include_usage:
            usage = worker.usage([chat.prompt], generation, produced, created=True)
            await call.chunk(b"data: " + _json({**head, "choices": [], "usage": usage}) + b"\n\n")
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()
        return
    await worker.wait_until_done(call, generation)
    choices = [_choice(worker, index, chat, answer, params) for index, answer in enumerate(chat.answers)]
    tail = {
        "service_tier": None,
        "system_fingerprint": None,
        "usage": worker.usage([chat.prompt], generation, produced, created=True),
        "prompt_logprobs": None,
        "prompt_token_ids": list(chat.prompt) if params.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": kept_params(call, worker, generation),
    }
    await call.respond({**head, "choices": choices, **tail})


def _choice(
    worker: SimWorker, index: int, chat: PreparedChat, answer: Choice, params: Sampling
) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text if chat.tool is None else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if chat.tool is not None:
        message["tool_calls"] = [_tool_call(worker, chat.tool, answer.text)]
    message["reasoning"] = None
    return {
        "index": index,
        "message": message,
        "logprobs": None if params.logprobs is None else {"content": _logprobs(answer, params.logprobs)},
        "finish_reason": chat.reason(answer),
        "stop_reason": answer.stop_reason,
        "token_ids": list(answer.token_ids) if params.return_token_ids else None,
    }


def _tool_call(worker: SimWorker, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": worker.new_id("chatcmpl-tool-"), "type": "function", "function": function}


async def _stream(
    call: Call,
    worker: SimWorker,
    generation: Generation,
    head: dict[str, Any],
    chat: PreparedChat,
    params: Sampling,
) -> None:
    front = b"data: " + _json(head)[:-1] + b',"choices":[{"index":'
    plain = params.logprobs is None and not params.return_token_ids and not params.continuous_usage
    ids = _json(list(chat.prompt)) if params.return_token_ids else b""
    opening = b"".join(
        front
        + str(index).encode()
        + b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        + (b',"prompt_token_ids":' + ids if ids else b"")
        + b"}\n\n"
        for index in range(params.n)
    )
    fronts = [front + str(index).encode() + b',"delta":{' for index in range(params.n)]

    def event(sequence: int, position: int) -> bytes:
        answer = chat.answers[sequence]
        piece = answer.pieces[position] if position < len(answer.pieces) else ""
        last = position + 1 >= len(answer.pieces)
        if chat.tool is None:
            delta = b'"content":' + _json(piece)
        else:
            delta = _tool_delta(worker, chat.tool if position == 0 else None, piece)
        if plain and not last:
            return (
                fronts[sequence] + delta + b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
            )
        tokens = answer.token_ids[position : position + 1]
        rest: dict[str, Any] = {"logprobs": None, "finish_reason": chat.reason(answer) if last else None}
        if params.logprobs is not None:
            rest["logprobs"] = {"content": _logprobs(answer, params.logprobs, position, position + 1)}
        if last:
            rest["stop_reason"] = answer.stop_reason
        rest["token_ids"] = list(tokens) if params.return_token_ids else None
        end = b"}]}\n\n"
        if params.continuous_usage:
            count = len(chat.prompt)
            usage = {
                "prompt_tokens": count,
                "total_tokens": count + position + 1,
                "completion_tokens": position + 1,
            }
            end = b'}],"usage":' + _json(usage) + b"}\n\n"
        return fronts[sequence] + delta + b"}," + _json(rest)[1:-1] + end

    await stream(call, worker, generation, event, opening)


def _tool_delta(worker: SimWorker, name: str | None, piece: str) -> bytes:
    entry: dict[str, Any] = {"index": 0, "function": {"arguments": piece}}
    if name is not None:
        entry = {"id": worker.new_id("chatcmpl-tool-"), "type": "function", **entry}
        entry["function"] = {"name": name, "arguments": piece}
    return b'"tool_calls":[' + _json(entry) + b"]"


def _logprobs(answer: Choice, top: int, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
    return [
        {
            **_logprob(piece, token_logprob(token)),
            "top_logprobs": [_logprob(text, value) for text, value in alternatives(token, top)],
        }
        for piece, token in zip(answer.pieces[start:stop], answer.token_ids[start:stop], strict=True)
    ]


def _logprob(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def _tools(body: Mapping[str, Any]) -> list[Any]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ApiError.validation("list_type", "body.tools", "Input should be a valid list")
    for position, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError.validation("missing", f"body.tools.{position}.function.name", "Field required")
    return tools


def _functions(tools: Sequence[Any]) -> list[dict[str, Any]]:
    return [tool["function"] for tool in tools]


def _called(body: Mapping[str, Any], tools: Sequence[Any]) -> tuple[str | None, bool]:
    choice = body.get("tool_choice")
    if choice is None or choice in ("none", "auto"):
        return None, False
    if not tools:
        raise ApiError.invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
    names = [function["name"] for function in _functions(tools)]
    if choice == "required":
        return names[0], False
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    if name not in names:
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise ApiError.invalid(message, "tool_choice")
    return name, True


def _structured(body: Mapping[str, Any]) -> str | None:
    """The text that `response_format` or vLLM's `structured_outputs` requires; None for plain text."""
    response_format = body.get("response_format")
    if isinstance(response_format, dict):
        if response_format.get("type") == "json_object":
            return "{}"
        if response_format.get("type") == "json_schema":
            schema = response_format.get("json_schema")
            if not isinstance(schema, dict):
                message = (
                    "When response_format type is 'json_schema', the 'json_schema' field must be provided."
                )
                raise ApiError.invalid(message, "response_format")
            return make.document(schema.get("schema") or schema.get("json_schema") or {})
    guided = body.get("structured_outputs")
    if isinstance(guided, dict):
        if isinstance(choices := guided.get("choice"), list) and choices:
            return str(choices[0]).encode("ascii", "replace").decode()
        if isinstance(schema := guided.get("json"), dict):
            return make.document(schema)
    return None
