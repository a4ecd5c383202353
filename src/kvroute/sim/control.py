"""The endpoints of the simulated worker without generation: models, health, metrics, event sources, faults,
received requests; embeddings and other pooling.
"""

from __future__ import annotations

import base64
import math
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs

from pydantic import ValidationError

from kvroute.sim.engine import SimEngine
from kvroute.sim.http import ApiError, Call
from kvroute.sim.options import SimOptions
from kvroute.sim.prompts import chat_tokens, completion_prompts, encode, fingerprint, messages_of
from kvroute.sim.publisher import Fault
from kvroute.sim.worker import SimWorker


async def models(call: Call, worker: SimWorker) -> None:
    """GET /v1/models: the served names, then the adapters with their parents."""
    created = int(worker.start_time)

    def card(name: str, parent: str | None) -> dict[str, Any]:
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            # All names of the model have the same root; an adapter has its own root (vLLM 0.32).
            "root": (worker.options.root or worker.options.models[0]) if parent is None else name,
            "parent": parent,
            "max_model_len": worker.max_model_len if parent is None else None,
            "permission": [permission],
        }

    cards = [card(name, None) for name in worker.options.models]
    cards += [card(name, parent) for name, parent in worker.options.loras.items()]
    await call.respond({"object": "list", "data": cards})


async def health(call: Call, worker: SimWorker) -> None:
    """GET /health and /ping: an empty 200."""
    await call.respond_raw(b"", 200, [])


async def version(call: Call, worker: SimWorker) -> None:
    await call.respond({"version": worker.options.version})


async def metrics(call: Call, worker: SimWorker) -> None:
    """GET /metrics: those of vLLM's metrics that routers read, under vLLM's names."""
    kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
    await call.respond_raw(exposition(worker).encode(), 200, [kind])


def exposition(worker: SimWorker) -> str:
    """The metrics as text."""
    options = worker.options
    ranks = list(enumerate(worker.engines))
    bases = [{"engine": str(rank), "model_name": options.models[0]} for rank, _ in ranks]
    base = bases[0]
    infos = [
        {
            "block_size": engine.cache.block_size,
            "cache_dtype": "auto",
            "enable_prefix_caching": options.prefix_caching,
            "engine": rank,
            "gpu_memory_utilization": 0.9,
            "kv_cache_size_tokens": engine.cache.capacity_tokens,
            "num_gpu_blocks": engine.cache.capacity,
            "prefix_caching_hash_algo": "sha256",
        }
        for rank, engine in ranks
    ]
    lines: list[str] = []

    def of_each(figure: Callable[[SimEngine], float]) -> list[tuple[dict[str, Any], float]]:
        return [(labels, figure(engine)) for labels, (_, engine) in zip(bases, ranks, strict=True)]

    def family(name: str, kind: str, help_text: str, *samples: tuple[dict[str, Any], float]) -> None:
        lines.append(f"# HELP {name} {help_text}")
        lines.append(f"# TYPE {name} {kind}")
        for labels, value in samples:
            text = ",".join(f'{key}="{_escape(str(label))}"' for key, label in labels.items())
            lines.append(f"{name}{{{text}}} {value}" if text else f"{name} {value}")

    family(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
        ({}, worker.start_time),
    )
    running = of_each(lambda engine: engine.running)
    family("vllm:num_requests_running", "gauge", "Number of running requests.", *running)
    waiting = of_each(lambda engine: engine.waiting)
    family("vllm:num_requests_waiting", "gauge", "Number of waiting requests.", *waiting)
    usage = of_each(lambda engine: engine.cache.usage)
    family("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent.", *usage)
    family(
        "vllm:cache_config_info",
        "gauge",
        "Information of the LLMEngine CacheConfig",
        *((info, 1.0) for info in infos),
    )
    level = worker.sleep_level
    states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
    family(
        "vllm:engine_sleep_state",
        "gauge",
        "Engine sleep state; awake = 0 means engine is sleeping.",
        *(
            ({**labels, "sleep_state": name}, float(is_on))
            for name, is_on in states.items()
            for labels in bases
        ),
    )
    family(
        "vllm:sleep_mode_operation_duration_seconds_count",
        "counter",
        "Number of sleep-mode operations.",
        *((({"operation": "sleep"}, float(worker.sleeps)),) if worker.sleeps else ()),
    )
    for name, help_text, figure in (
        ("prefix_cache_queries", "Prefix cache queries, in tokens.", lambda counters: counters.cache_queries),
        ("prefix_cache_hits", "Prefix cache hits, in tokens.", lambda counters: counters.cache_hits),
        ("prompt_tokens", "Number of prefill tokens processed.", lambda counters: counters.prompt_tokens),
        ("prompt_tokens_cached", "Number of cached prompt tokens.", lambda counters: counters.cache_hits),
        (
            "generation_tokens",
            "Number of generation tokens processed.",
            lambda counters: counters.generation_tokens,
        ),
        ("num_preemptions", "Cumulative number of preemptions.", lambda counters: 0),
    ):
        values = of_each(lambda engine, figure=figure: float(figure(engine.counters)))  # type: ignore[misc]
        family(f"vllm:{name}_total", "counter", help_text, *values)
    if options.drafted_tokens:
        drafts = of_each(lambda engine: 0)
        family("vllm:spec_decode_num_drafts_total", "counter", "Number of spec decoding drafts.", *drafts)
    if options.nixl:
        transfers, counters = worker.transfers, worker.engine.counters
        computed = counters.prompt_tokens - counters.cache_hits - counters.external_hits
        sources = (
            ("local_compute", computed),
            ("local_cache_hit", counters.cache_hits),
            ("external_kv_transfer", counters.external_hits),
        )
        for name, help_text, value in (
            (
                "external_prefix_cache_queries",
                "Tokens asked from other engines.",
                counters.external_queries,
            ),
            ("external_prefix_cache_hits", "Tokens received from other engines.", counters.external_hits),
            ("nixl_num_failed_transfers", "Failed transfers.", transfers.failed),
            ("nixl_num_kv_expired_reqs", "Requests whose KV nobody read.", transfers.expired),
        ):
            family(f"vllm:{name}_total", "counter", help_text, (base, float(value)))
        family(
            "vllm:prompt_tokens_by_source_total",
            "counter",
            "Number of prompt tokens by source.",
            *(({**base, "source": source}, float(value)) for source, value in sources),
        )
        family(
            "vllm:nixl_xfer_time_seconds",
            "histogram",
            "Transfer time.",
        )
        lines.append(f'vllm:nixl_xfer_time_seconds_sum{{engine="0"}} {transfers.seconds}')
        lines.append(f'vllm:nixl_xfer_time_seconds_count{{engine="0"}} {transfers.reads}')
    reasons = ("stop", "length", "abort", "error", "repetition")
    ends = [
        ({**labels, "finished_reason": reason}, float(driver.finished[reason]))
        for labels, driver in zip(bases, worker.drivers, strict=True)
        for reason in reasons
    ]
    family("vllm:request_success_total", "counter", "Count of successfully processed requests.", *ends)
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


async def kv_event_sources(call: Call, worker: SimWorker) -> None:
    """GET /kv_event_sources: the bound addresses by data-parallel rank."""
    sources: dict[str, Any] = {}
    for publisher in worker.publishers:
        sources |= publisher.sources()
    await call.respond(sources)


async def reset_prefix_cache(call: Call, worker: SimWorker) -> None:
    """POST /reset_prefix_cache: as in vLLM, refused while requests run; the event follows in the next
    iteration."""
    done = [engine.reset_prefix_cache() for engine in worker.engines]
    await call.respond({"success": all(done)})


async def sleep(call: Call, worker: SimWorker) -> None:
    """POST /sleep: ends what runs, pauses the engine and, from level 1 on, clears its cache."""
    level = _parameter(call, "level") or "1"
    if level not in ("0", "1", "2"):
        raise ApiError.validation("int_parsing", "query.level", "Input should be 0, 1 or 2")
    _pause(worker, clears=level != "0")
    worker.sleep_level = int(level)
    worker.sleeps += 1
    await call.respond({"status": "sleeping", "level": worker.sleep_level})


async def wake_up(call: Call, worker: SimWorker) -> None:
    """POST /wake_up."""
    worker.sleep_level = None
    for driver in worker.drivers:
        driver.resume()
    await call.respond({"status": "awake", "tags": None})


async def is_sleeping(call: Call, worker: SimWorker) -> None:
    """GET /is_sleeping: true while the engine is paused, too (vLLM 0.32)."""
    await call.respond({"is_sleeping": worker.sleep_level is not None or worker.driver.is_paused})


async def pause(call: Call, worker: SimWorker) -> None:
    """POST /pause: ends what runs, pauses the engine and clears its cache unless `clear_cache=false`."""
    _pause(worker, clears=_parameter(call, "clear_cache") not in ("false", "0"))
    await call.respond({"status": "paused"})


async def resume(call: Call, worker: SimWorker) -> None:
    """POST /resume."""
    for driver in worker.drivers:
        driver.resume()
    await call.respond({"status": "resumed"})


async def is_paused(call: Call, worker: SimWorker) -> None:
    """GET /is_paused."""
    await call.respond({"is_paused": worker.driver.is_paused})


def _pause(worker: SimWorker, *, clears: bool) -> None:
    for driver in worker.drivers:
        driver.abort_all()
        driver.pause()
        if clears:
            driver.engine.reset_prefix_cache()


def _parameter(call: Call, name: str) -> str | None:
    values = parse_qs(call.scope["query_string"].decode("latin-1")).get(name)
    return values[-1] if values else None


async def faults(call: Call, worker: SimWorker) -> None:
    """/sim/faults: POST adds a fault or a list of faults, GET lists the faults, DELETE clears them.

    POST with `{"restart": true}`, `{"capacity_tokens": n}`, `{"max_queued_requests": n}` or
    `{"max_queued_tokens": n}` takes effect immediately and is no fault: DELETE does not undo it.
    """
    if call.method == "DELETE":
        worker.faults.clear()
    elif call.method == "POST":
        given = call.json_value()
        for item in given if isinstance(given, list) else [given]:
            _apply(worker, item)
    await call.respond({"faults": worker.faults.listing()})


_LIMITS: Final = frozenset({"max_queued_requests", "max_queued_tokens"})


def _apply(worker: SimWorker, item: Any) -> None:
    if isinstance(item, dict) and item.get("restart") is True:
        worker.restart()
    elif isinstance(item, dict) and isinstance(item.get("capacity_tokens"), int):
        for engine in worker.engines:
            engine.cache.resize(worker.options.pool_blocks(item["capacity_tokens"]))
    elif isinstance(item, dict) and item.keys() <= _LIMITS and item:
        try:
            options = {**worker.options.model_dump(), **item}
            worker.options = SimOptions.model_validate(options)
        except ValidationError as exc:
            raise ApiError(400, "BadRequestError", str(exc)) from exc
    else:
        try:
            worker.faults.add(Fault.model_validate(item))
        except ValidationError as exc:
            raise ApiError(400, "BadRequestError", str(exc)) from exc


async def requests(call: Call, worker: SimWorker) -> None:
    """GET /sim/requests: counts and the last requests as received, oldest first, without those to /sim/."""
    await call.respond(
        {
            "requests": [
                {
                    "method": request.method,
                    "target": request.target,
                    "headers": [
                        [key.decode("latin-1"), value.decode("latin-1")] for key, value in request.headers
                    ],
                    "body": base64.b64encode(request.body).decode(),
                }
                for request in worker.received
            ],
            "received": worker.counters.requests,
            "by_path": dict(worker.counters.by_path),
            "finished": dict(sum((driver.finished for driver in worker.drivers), Counter())),
            "chunks": worker.counters.chunks,
            "running": sum(engine.running for engine in worker.engines),
            "waiting": sum(engine.waiting for engine in worker.engines),
            "computed_tokens": sum(engine.counters.computed_tokens for engine in worker.engines),
            "cached_tokens": sum(engine.counters.cache_hits for engine in worker.engines),
        }
    )


async def cache(call: Call, worker: SimWorker) -> None:
    """GET /sim/cache: the keys of all full blocks (`blocks.keys.block_keys` of token ids) of all ranks, and
    the block size in tokens."""
    keys = {key for engine in worker.engines for key in engine.cache.held_keys}
    await call.respond({"block_size": worker.options.key_tokens, "keys": sorted(keys)})


async def clear_requests(call: Call, worker: SimWorker) -> None:
    """DELETE /sim/requests: clear the recorded requests."""
    worker.received.clear()
    await call.respond({"requests": []})


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
