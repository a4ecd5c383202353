"""/v1/completions for one or several prompts of text or token ids, with the answers of vLLM 0.32."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvroute.sim import answers as make
from kvroute.sim.answers import Choice
from kvroute.sim.driver import Generation
from kvroute.sim.http import SSE, ApiError, Call
from kvroute.sim.prompts import Sampling, completion_prompts, decode, sampling
from kvroute.sim.transfer import kept_params
from kvroute.sim.worker import SimWorker

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
    sent = [0] * len(generation.requests)
    parts = [opening] if opening else []
    async with worker.abort_on_disconnect(call, generation):
        done = False
        while not done:
            await generation.wait()
            worker.raise_if_ended(generation)
            done = generation.done
            iteration = worker.engine.iteration
            for sequence, request in enumerate(generation.requests):
                produced = request.produced(iteration)
                for position in range(sent[sequence], produced):
                    parts.append(event(sequence, position))
                sent[sequence] = max(sent[sequence], produced)
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
        await _stream(call, worker, generation, head, flat, params, echo=echo)
        if params.include_usage:
            usage = worker.usage(prompts, generation, produced, created=False)
            await call.chunk(b"data: " + _json({**head, "choices": [], "usage": usage}) + b"\n\n")
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()
        return
    await worker.wait_until_done(call, generation)
    choices = [
        _choice(index, prompt, answer, params, echo=echo) for index, (prompt, answer) in enumerate(flat)
    ]
    usage = worker.usage(prompts, generation, produced, created=False)
    kept = kept_params(call, worker, generation)
    tail = {"service_tier": None, "system_fingerprint": None, "usage": usage, "kv_transfer_params": kept}
    await call.respond({**head, "choices": choices, **tail})


def _answers(worker: SimWorker, prompt: array[int], model: str, params: Sampling) -> list[Choice]:
    limit = worker.limit(prompt, params.limit)
    natural = worker.options.answer_tokens
    return [
        make.plain(make.fingerprint(prompt, model, choice), limit, natural, params.stop)
        for choice in range(params.n)
    ]


def _choice(
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


async def _stream(
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
