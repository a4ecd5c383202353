"""The simulated worker's render endpoints (vLLM 0.32, --enable-scale-out): token ids and media, no answer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from kvroute.sim.completions import prepare
from kvroute.sim.http import ApiError, Call
from kvroute.sim.other_apis import chat_of_message, chat_of_response, conversation
from kvroute.sim.prompts import MEDIA_TOKENS, completion_prompts, sampling, with_placeholders
from kvroute.sim.worker import SimWorker


async def render_chat(call: Call, worker: SimWorker) -> None:
    """POST /v1/chat/completions/render."""
    body = call.json()
    await _respond(call, worker, body, body)


async def render_message(call: Call, worker: SimWorker) -> None:
    """POST /v1/messages/render."""
    body = call.json()
    await _respond(call, worker, body, chat_of_message(body))


async def render_response(call: Call, worker: SimWorker) -> None:
    """POST /v1/responses/render."""
    body = call.json()
    await _respond(call, worker, body, chat_of_response(body, conversation(body, worker)))


async def render_texts(call: Call, worker: SimWorker) -> None:
    """POST /v1/completions/render."""
    _check(worker)
    body = call.json()
    model = worker.model(body)
    await call.respond([_rendered(worker, call, model, prompt) for prompt in completion_prompts(body)])


async def _respond(call: Call, worker: SimWorker, body: dict[str, Any], chat: Mapping[str, Any]) -> None:
    _check(worker)
    model = worker.model(body)
    prompt = prepare(worker, chat, model, sampling({}, limits=())).prompt
    await call.respond(_rendered(worker, call, model, prompt))


def _check(worker: SimWorker) -> None:
    if not worker.options.scale_out:
        raise ApiError(403, "PermissionDeniedError", "This endpoint needs --enable-scale-out.")


def _rendered(worker: SimWorker, call: Call, model: str, prompt: array[int]) -> dict[str, Any]:
    ids, media = with_placeholders(prompt)
    features = None
    if media:
        ranges = [{"offset": at, "length": MEDIA_TOKENS, "is_embed": None} for at, _ in media]
        features = {
            "mm_hashes": {"image": [identifier for _, identifier in media]},
            "mm_placeholders": {"image": ranges},
            "kwargs_data": None,
        }
    return {
        "request_id": worker.new_id("chatcmpl-", call),
        "token_ids": list(ids),
        "features": features,
        "model": model,
    }
