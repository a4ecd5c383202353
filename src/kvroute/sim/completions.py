"""/v1/completions and /v1/chat/completions of the simulated worker, with the answers of vLLM 0.32.

Completions have one or several prompts of text or token ids; chats have text, tool calls and
structured output.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvroute.sim.engine import Generation
from kvroute.sim.http import SSE, ApiError, Call
from kvroute.sim.prompts import (
    Choice,
    Sampling,
    chat_tokens,
    completion_prompts,
    decode,
    document,
    fingerprint,
    fixed,
    messages_of,
    plain,
    sampling,
)
from kvroute.sim.worker import SimWorker, kept_params

Event = Callable[[int, int], bytes]
"""(sequence, token position) -> the bytes of this token's events."""


async def stream(
    call: Call, worker: SimWorker, generation: Generation, event: Event, opening: bytes = b""
) -> None:
    """Send the head with the first token, and then each token when it is generated. The caller ends the
    answer.

    `opening` is sent before the first token. Raises `ExchangeEnded` if the client leaves; this aborts the
    generation.
    """
    sent_tokens = [0] * len(generation.requests)
    parts = [opening] if opening else []
    async with worker.abort_on_disconnect(call, generation):
        done = False
        while not done:
            await generation.wait()
            worker.raise_if_ended(generation)
            done = generation.done
            iteration = generation.iteration
            for sequence, request in enumerate(generation.requests):
                produced = request.produced(iteration)
                for position in range(sent_tokens[sequence], produced):
                    parts.append(event(sequence, position))
                sent_tokens[sequence] = max(sent_tokens[sequence], produced)
            if parts:
                if not call.started:
                    await call.start(200, [SSE])
                await call.chunk(b"".join(parts), len(parts))
                worker.counters.chunks += len(parts)
                parts = []


_json = msgspec.json.Encoder().encode


async def completions(call: Call, worker: SimWorker) -> None:
    """POST /v1/completions."""
    body = call.json()
    model = worker.model(body)
    if body.get("suffix"):
        raise ApiError.invalid("suffix is not currently supported", "suffix")
    prompts = completion_prompts(body)
    params = sampling(body, limits=("max_tokens",), default_limit=16, session=call.header(b"x-session-id"))
    answers = [_answers(worker, prompt, model, params) for prompt in prompts]
    generation = await worker.submit(call, prompts, answers, params, model)
    echo = bool(body.get("echo"))
    head = {
        "id": worker.new_id("cmpl-", call),
        "object": "text_completion",
        "created": int(worker.clock.wall()),
        "model": model,
    }
    flat = [(prompt, answer) for prompt, choices in zip(prompts, answers, strict=True) for answer in choices]
    produced = sum(len(answer.token_ids) for _, answer in flat)
    if params.stream:
        await _stream_completion(call, worker, generation, head, flat, params, echo=echo)
        if params.include_usage:
            usage = worker.usage(prompts, generation, produced, created=False)
            await call.chunk(b"data: " + _json({**head, "choices": [], "usage": usage}) + b"\n\n")
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()
        return
    await worker.wait_until_done(call, generation)
    choices = [
        _completion_choice(index, prompt, answer, params, echo=echo)
        for index, (prompt, answer) in enumerate(flat)
    ]
    usage = worker.usage(prompts, generation, produced, created=False)
    kept = kept_params(call, worker, generation)
    tail = {"service_tier": None, "system_fingerprint": None, "usage": usage, "kv_transfer_params": kept}
    await call.respond({**head, "choices": choices, **tail})


def _answers(worker: SimWorker, prompt: array[int], model: str, params: Sampling) -> list[Choice]:
    limit = worker.limit(prompt, params.limit)
    natural = worker.options.answer_tokens
    return [
        plain(fingerprint(prompt, model, choice), limit, natural, params.stop) for choice in range(params.n)
    ]


def _completion_choice(
    index: int, prompt: array[int], answer: Choice, params: Sampling, *, echo: bool
) -> dict[str, Any]:
    shown = [*(decode((token,)) for token in prompt), *answer.pieces] if echo else list(answer.pieces)
    ids = [*prompt, *answer.token_ids] if echo else list(answer.token_ids)
    return {
        "index": index,
        "text": decode(prompt) + answer.text if echo else answer.text,
        "logprobs": None if params.logprobs is None else logprobs(ids, shown, params.logprobs),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "prompt_logprobs": None,
        "prompt_token_ids": list(prompt) if params.return_token_ids else None,
        "token_ids": list(answer.token_ids) if params.return_token_ids else None,
    }


async def _stream_completion(
    call: Call,
    worker: SimWorker,
    generation: Any,
    head: dict[str, Any],
    flat: Sequence[tuple[array[int], Choice]],
    params: Sampling,
    *,
    echo: bool,
) -> None:
    front = b"data: " + _json(head)[:-1] + b',"choices":['
    offsets = [0] * len(flat)

    def event(sequence: int, position: int) -> bytes:
        prompt, answer = flat[sequence]
        has_token = position < len(answer.pieces)
        text = answer.pieces[position] if has_token else ""
        last = position + 1 >= len(answer.pieces)
        choice: dict[str, Any] = {
            "index": sequence,
            "text": decode(prompt) + text if echo and position == 0 else text,
            "logprobs": None,
            "finish_reason": answer.finish_reason if last else None,
            "stop_reason": answer.stop_reason if last else None,
            "prompt_token_ids": list(prompt) if params.return_token_ids and position == 0 else None,
            "token_ids": None,
        }
        if has_token and params.return_token_ids:
            choice["token_ids"] = [answer.token_ids[position]]
        if has_token and params.logprobs is not None:
            choice["logprobs"] = logprobs(
                [answer.token_ids[position]], [text], params.logprobs, offsets[sequence]
            )
            offsets[sequence] += len(text)
        if not params.continuous_usage:
            return front + _json(choice) + b"]}\n\n"
        usage = {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + position + 1,
            "completion_tokens": position + 1,
        }
        return front + _json(choice) + b'],"usage":' + _json(usage) + b"}\n\n"

    await stream(call, worker, generation, event)


def token_logprob(token: int) -> float:
    """A log probability that depends on the token only."""
    return -0.01 - (token * 2654435761 % 997) / 500


def logprobs(ids: Sequence[int], texts: Sequence[str], top: int, offset: int = 0) -> dict[str, Any]:
    """The completion API's logprobs object, with invented alternatives."""
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    values = [token_logprob(token) for token in ids]
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": list(texts),
        "top_logprobs": [
            {text: value, **dict(alternatives(token, top))}
            for token, text, value in zip(ids, texts, values, strict=True)
        ],
    }


def alternatives(token: int, top: int) -> list[tuple[str, float]]:
    """`top` invented tokens that are less likely than this token."""
    return [(f"~{rank}", token_logprob(token) - rank) for rank in range(1, top + 1)]


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
    prompt = chat_tokens(
        messages, tools, generate=generate, open_end=open_end, harmony=worker.options.harmony
    )
    limit = worker.limit(prompt, params.limit)
    tool, named = _called(body, tools)
    text = _structured(body)
    if tool is not None:
        text = document(next(f.get("parameters", {}) for f in _functions(tools) if f["name"] == tool))
    natural = worker.options.answer_tokens
    answers = [
        plain(fingerprint(prompt, model, choice), limit, natural, params.stop)
        if text is None
        else fixed(text, limit, params.stop)
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
    is_plain = params.logprobs is None and not params.return_token_ids and not params.continuous_usage
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
        if is_plain and not last:
            return (
                fronts[sequence] + delta + b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
            )
        tokens = answer.token_ids[position : position + 1]
        choice_fields: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": chat.reason(answer) if last else None,
        }
        if params.logprobs is not None:
            choice_fields["logprobs"] = {
                "content": _logprobs(answer, params.logprobs, position, position + 1)
            }
        if last:
            choice_fields["stop_reason"] = answer.stop_reason
        choice_fields["token_ids"] = list(tokens) if params.return_token_ids else None
        end = b"}]}\n\n"
        if params.continuous_usage:
            count = len(chat.prompt)
            usage = {
                "prompt_tokens": count,
                "total_tokens": count + position + 1,
                "completion_tokens": position + 1,
            }
            end = b'}],"usage":' + _json(usage) + b"}\n\n"
        return fronts[sequence] + delta + b"}," + _json(choice_fields)[1:-1] + end

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
            return document(schema.get("schema") or schema.get("json_schema") or {})
    guided = body.get("structured_outputs")
    if isinstance(guided, dict):
        if isinstance(choices := guided.get("choice"), list) and choices:
            return str(choices[0]).encode("ascii", "replace").decode()
        if isinstance(schema := guided.get("json"), dict):
            return document(schema)
    return None
