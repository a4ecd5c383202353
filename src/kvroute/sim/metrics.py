"""The metrics of the simulated worker, in vLLM's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvroute.sim.engine import SimEngine
from kvroute.sim.http import Call
from kvroute.sim.worker import SimWorker


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
