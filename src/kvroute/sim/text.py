"""Endpoints around text: tokenize, detokenize, audio to text, and SageMaker's /invocations."""

from __future__ import annotations

from typing import Any

import msgspec

from kvroute.sim.chat import chat_completions
from kvroute.sim.completions import completions
from kvroute.sim.http import SSE, ApiError, Call
from kvroute.sim.pooling import embeddings, rerank, score
from kvroute.sim.prompts import chat_tokens, messages_of
from kvroute.sim.tokenizer import VOCABULARY, decode, encode, token_bytes
from kvroute.sim.worker import Worker

_json = msgspec.json.Encoder().encode


async def tokenize(call: Call, worker: Worker) -> None:
    """POST /tokenize: a text or a chat, to the very ids that the engine would use."""
    body = call.json()
    worker.model(body)
    if "messages" in body:
        open_end = bool(body.get("continue_final_message"))
        generate = body.get("add_generation_prompt", True) is not False
        ids = chat_tokens(messages_of(body), body.get("tools"), generate=generate, open_end=open_end)
    elif isinstance(body.get("prompt"), str):
        ids = encode(body["prompt"])
    else:
        kind = "string_type" if "prompt" in body else "missing"
        raise ApiError.validation(kind, "body.prompt", "Input should be a valid string")
    strings = None
    if body.get("return_token_strs"):
        strings = [token_bytes(token).decode("utf-8", "replace") for token in ids]
    await call.respond(
        {"count": len(ids), "max_model_len": worker.max_model_len, "tokens": list(ids), "token_strs": strings}
    )


async def detokenize(call: Call, worker: Worker) -> None:
    """POST /detokenize."""
    body = call.json()
    worker.model(body)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < VOCABULARY for token in tokens
    ):
        kind = "missing" if tokens is None else "int_type"
        raise ApiError.validation(kind, "body.tokens", "Input should be a valid integer")
    await call.respond({"prompt": decode(tokens)})


async def transcriptions(call: Call, worker: Worker) -> None:
    """POST /v1/audio/transcriptions."""
    await _audio(call, worker, "transcription")


async def translations(call: Call, worker: Worker) -> None:
    """POST /v1/audio/translations."""
    await _audio(call, worker, "translation")


async def _audio(call: Call, worker: Worker, kind: str) -> None:
    form = _form(call)
    model = worker.model({"model": form["model"].decode("utf-8", "replace")} if "model" in form else {})
    if "file" not in form:
        raise ApiError.validation("missing", "body.file", "Field required")
    text = f"Simulated {kind} of {len(form['file'])} bytes."
    wanted = form.get("response_format", b"json")
    if form.get("stream") in (b"true", b"True", b"1"):
        await _stream_text(call, worker, kind, model, text)
    elif wanted == b"text":
        await call.respond_raw(_json(text), 200, [(b"content-type", b"text/plain; charset=utf-8")])
    elif wanted == b"verbose_json":
        await call.respond({"duration": 1.0, "language": "en", "text": text, "segments": [], "words": None})
    elif kind == "translation":
        await call.respond({"text": text})
    else:
        await call.respond({"text": text, "usage": {"type": "duration", "seconds": 1}})


async def _stream_text(call: Call, worker: Worker, kind: str, model: str, text: str) -> None:
    prefix = {"transcription": "trsc-", "translation": "trsl-"}[kind]
    head = {"id": worker.new_id(prefix), "object": f"{kind}.chunk", "created": int(worker.clock.wall())}
    await call.start(200, [SSE])
    words = text.split(" ")
    for position, word in enumerate(words):
        last = position == len(words) - 1
        delta: dict[str, Any] = {"content": word if last else f"{word} "}
        choice = {"delta": delta, "finish_reason": "stop" if last else None}
        await call.chunk(b"data: " + _json({**head, "model": model, "choices": [choice]}) + b"\n\n")
    await call.chunk(b"data: [DONE]\n\n")
    await call.end()


def _form(call: Call) -> dict[str, bytes]:
    """The parts of a multipart body by name, contents only."""
    content_type = call.header(b"content-type") or ""
    kind, _, parameters = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise ApiError.validation("missing", "body.file", "Field required")
    boundary = ""
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name.lower() == "boundary":
            boundary = value.strip('"')
    if not boundary:
        raise ApiError(400, "Bad Request", "Missing boundary in multipart.")
    form: dict[str, bytes] = {}
    for part in (b"\r\n" + call.body).split(b"\r\n--" + boundary.encode("latin-1"))[1:]:
        head, found, content = part.partition(b"\r\n\r\n")
        if not found:
            continue
        for field in head.decode("utf-8", "replace").split(";"):
            key, _, value = field.strip().partition("=")
            if key.lower() == "name":
                form[value.split("\r\n")[0].strip('"')] = content
    return form


async def invocations(call: Call, worker: Worker) -> None:
    """POST /invocations: whatever endpoint the body fits, in vLLM's order."""
    body = call.json()
    for field, handler in (
        ("messages", chat_completions),
        ("prompt", completions),
        ("input", embeddings),
        ("query", rerank),
        ("text_1", score),
        ("queries", score),
        ("data_1", score),
    ):
        if field in body:
            await handler(call, worker)
            return
    raise ApiError.invalid("Cannot find suitable handler for request.")
