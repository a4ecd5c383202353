"""The endpoints of the simulated worker that return vectors and scores."""

from __future__ import annotations

import base64
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from kvroute.sim.http import ApiError, Call
from kvroute.sim.prompts import chat_tokens, completion_prompts, encode, fingerprint, messages_of
from kvroute.sim.worker import SimWorker

DIMENSIONS = 32
"""Length of a vector if the request does not set one."""
_CLASSES = 2


async def embeddings(call: Call, worker: SimWorker) -> None:
    """POST /v1/embeddings: float or base64 vectors of length one."""
    body = call.json()
    model = worker.model(body)
    prompts = _inputs(body)
    form = body.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise ApiError.validation(
            "literal_error", "body.encoding_format", "Input should be 'float' or 'base64'"
        )
    size = body.get("dimensions") or DIMENSIONS
    if type(size) is not int or size < 1:
        raise ApiError.validation("int_type", "body.dimensions", "Input should be a valid integer")
    usage = await _compute(call, worker, prompts, model)
    data = []
    for index, prompt in enumerate(prompts):
        vector: Any = _vector(fingerprint(prompt, model), size)
        if form == "base64":
            vector = base64.b64encode(struct.pack(f"<{size}f", *vector)).decode()
        data.append({"index": index, "object": "embedding", "embedding": vector})
    await call.respond(_listing(worker, "embd-", model, data, usage))


async def pooling(call: Call, worker: SimWorker) -> None:
    """POST /pooling: one vector per token."""
    body = call.json()
    model = worker.model(body)
    prompts = _inputs(body)
    usage = await _compute(call, worker, prompts, model)
    data = [
        {
            "index": index,
            "object": "pooling",
            "data": [_vector(fingerprint(array("I", (token,)), model), 4) for token in prompt],
        }
        for index, prompt in enumerate(prompts)
    ]
    await call.respond(_listing(worker, "pool-", model, data, usage))


async def classify(call: Call, worker: SimWorker) -> None:
    """POST /classify."""
    body = call.json()
    model = worker.model(body)
    prompts = _inputs(body)
    usage = await _compute(call, worker, prompts, model)
    data = []
    for index, prompt in enumerate(prompts):
        share = _unit(fingerprint(prompt, model))
        probabilities = [share, 1.0 - share]
        label = f"LABEL_{probabilities.index(max(probabilities))}"
        data.append({"index": index, "label": label, "probs": probabilities, "num_classes": _CLASSES})
    await call.respond(_listing(worker, "classify-", model, data, usage))


async def score(call: Call, worker: SimWorker) -> None:
    """POST /score and /v1/score: one text against several, or pairs, under any of vLLM's field names."""
    body = call.json()
    model = worker.model(body)
    for query_field, document_field in (
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
        ("text_1", "text_2"),
    ):
        if query_field in body and document_field in body:
            queries, documents = _texts(body, query_field), _texts(body, document_field)
            break
    else:
        raise ApiError.validation("missing", "body.text_1", "Field required")
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise ApiError.invalid("Input lengths must be either 1:1, 1:N or N:N")
    pairs = [encode(a) + encode(b) for a, b in zip(queries, documents, strict=True)]
    usage = await _compute(call, worker, pairs, model)
    data = [
        {"index": index, "object": "score", "score": _unit(fingerprint(pair, model))}
        for index, pair in enumerate(pairs)
    ]
    await call.respond(_listing(worker, "score-", model, data, usage))


async def rerank(call: Call, worker: SimWorker) -> None:
    """POST /rerank, /v1/rerank and /v2/rerank: the documents, best one first."""
    body = call.json()
    model = worker.model(body)
    if "query" not in body:
        raise ApiError.validation("missing", "body.query", "Field required")
    if "documents" not in body:
        raise ApiError.validation("missing", "body.documents", "Field required")
    query, documents = _texts(body, "query")[0], _texts(body, "documents")
    top = body.get("top_n") or len(documents)
    if type(top) is not int or top < 0:
        raise ApiError.validation("int_type", "body.top_n", "Input should be a valid integer")
    pairs = [encode(query) + encode(document) for document in documents]
    usage = await _compute(call, worker, pairs, model)
    scores = [_unit(fingerprint(pair, model)) for pair in pairs]
    results = [
        {
            "index": index,
            "document": {"text": documents[index], "multi_modal": None},
            "relevance_score": scores[index],
        }
        for index in sorted(range(len(pairs)), key=scores.__getitem__, reverse=True)
    ]
    tokens = usage["prompt_tokens"]
    await call.respond(
        {
            "id": worker.new_id("rerank-"),
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": results[:top],
        }
    )


def _listing(
    worker: SimWorker, prefix: str, model: str, data: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": worker.new_id(prefix),
        "object": "list",
        "created": int(worker.clock.wall()),
        "model": model,
        "data": data,
        "usage": usage,
    }


async def _compute(
    call: Call, worker: SimWorker, prompts: Sequence[array[int]], model: str
) -> dict[str, Any]:
    """Prefill each prompt; returns the usage object."""
    for prompt in prompts:
        worker.limit(prompt, None)
    sequences = [worker.sequence(prompt, array("I"), model) for prompt in prompts]
    worker.admit(len(sequences))
    driver = worker.driver_for(call, takes_rank=False)
    generation = driver.submit(sequences, ["stop"] * len(sequences), streamed=False)
    await worker.wait_until_done(call, generation)
    tokens = sum(len(prompt) for prompt in prompts)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _inputs(body: Mapping[str, Any]) -> list[array[int]]:
    if "messages" in body:
        return [chat_tokens(messages_of(body), generate=False)]
    if "input" not in body:
        raise ApiError.validation("missing", "body.input", "Field required")
    return completion_prompts({"prompt": body["input"]})


def _texts(body: Mapping[str, Any], name: str) -> list[str]:
    value = body[name]
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, str) for item in values):
        raise ApiError.validation("string_type", f"body.{name}", "Input should be a valid string")
    return values


def _unit(seed: int) -> float:
    return (seed >> 11) / (1 << 53)


def _vector(seed: int, size: int) -> list[float]:
    values = []
    for _ in range(size):
        seed = (seed * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        values.append(_unit(seed) - 0.5)
    norm = math.sqrt(sum(value * value for value in values))
    return [value / norm for value in values]
