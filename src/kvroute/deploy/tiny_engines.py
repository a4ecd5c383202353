"""Replaces the engines of an endpoint by tiny ones that run on any CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvroute.deploy.engine_install import ALIAS_VERSION
from kvroute.deploy.plan import (
    TINY_BLOCK_SIZE,
)
from kvroute.deploy.render.config import merged
from kvroute.deploy.render.plan import EndpointPlan, plan_endpoint
from kvroute.deploy.spec.endpoint import (
    OWN_API,
    OWN_KIND,
    Document,
    EndpointDocument,
    EndpointSpec,
    resolved,
)
from kvroute.deploy.spec.extension import Extension, FileStore, Images, StatedVersions
from kvroute.deploy.spec.worker import EndpointWorker, KvCache
from kvroute.deploy.tiny_model import MAX_POSITIONS

TINY_L1_GB, TINY_L2_GB = 0.5, 1.0


TINY_MODEL: Final = "tiny"
TINY_WORKERS: Final = 4
"""The largest number of workers of `up --tiny` if `--workers` does not say another."""
_TINY_ARGUMENTS: Final = frozenset(
    {
        *("--served-model-name", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--seed"),
        *("--enable-prefix-caching", "--no-enable-prefix-caching", "--prefix-caching-hash-algo", "--api-key"),
        *("--enable-chunked-prefill", "--max-logprobs", "--enable-force-include-usage", "--max-log-len"),
        *("--enable-scale-out", "--enable-request-id-headers", "--uvicorn-log-level"),
    }
)
"""Arguments of vLLM that mean the same for every model and device. `up --tiny` leaves out all others."""
_TINY_STORES: Final = ("redis", "valkey", "tieredstorage", "fs")
"""Second tiers that need no cloud. `up --tiny` replaces all others by `fs`."""


def with_tiny_engines(
    document: Document, *, most_workers: int = TINY_WORKERS, folder: Path = Path(".kvroute")
) -> tuple[EndpointDocument, tuple[str, ...]]:
    """The Endpoint that runs a document with CPU engines of a tiny model, and texts about what differs. Pure.

    Strategy, routing options, gateway settings, metrics, request limits, cache tiers and the model's name in
    requests stay. `folder` is for the second tier `fs`.
    """
    plan, source = plan_endpoint(document), resolved(document)
    wanted, notes = max(1, plan.replicas), list[str]()
    if wanted > most_workers:
        notes.append(f"{most_workers} of {wanted} workers run; --workers sets another number")
    arguments, left_out = _tiny_arguments(plan.args)
    if left_out:
        notes.append(f"worker.args without {', '.join(left_out)}")
    if plan.command is not None:
        notes.append("`vllm serve` runs instead of worker.command")
    if plan.environment:
        notes.append(
            f"worker.environmentVariables without {', '.join(variable.name for variable in plan.environment)}"
        )
    cache = _tiny_cache(source.spec.kv_cache_spec, notes)
    extension = _tiny_extension(source.x_kvroute, plan, cache, folder, notes)
    worker = {"args": arguments, "requestLimits": plan.limits}
    spec = EndpointSpec.model_validate(
        {
            "model": plan.model.tiny or TINY_MODEL,
            "replicas": None if plan.groups else min(wanted, most_workers),
            "kvCacheSpec": cache,
            "intelligentRoutingSpec": source.spec.intelligent_routing_spec,
            "metrics": source.spec.metrics,
            "pdSpec": _tiny_groups(plan, most_workers, notes),
            "worker": EndpointWorker.model_validate(worker),
        }
    ).model_copy(update={"model_name": plan.model.served_name})
    head = {"apiVersion": OWN_API, "kind": OWN_KIND, "metadata": source.metadata}
    return EndpointDocument.model_validate({**head, "spec": spec, "x-kvroute": extension}), tuple(notes)


def _tiny_groups(plan: EndpointPlan, most_workers: int, notes: list[str]) -> dict[str, object] | None:
    """`pdSpec` with fewer workers and without the settings of GPUs and nodes."""
    if not plan.groups:
        return None
    stages = {"prefill": "prefillSpec", "decode": "decodingSpec"}
    settings: dict[str, object] = {"routingThreshold": plan.threshold_tokens}
    for group in plan.groups:
        arguments, _ = _tiny_arguments(group.args[len(plan.args) :])
        settings[stages[group.role]] = {
            "replicas": min(group.replicas, max(1, most_workers // 2)),
            "args": arguments,
        }
    notes.append("pdSpec without resources, node selectors, topology and autoscalers")
    return settings


def _tiny_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments that fit a tiny model on a CPU, and those that are left out."""
    kept, left_out = list[str](), list[str]()
    for option in _options(arguments):
        name, _, value = option[0].partition("=")
        value = value or (option[1] if len(option) > 1 else "")
        is_too_long = name == "--max-model-len" and not (value.isdigit() and int(value) <= MAX_POSITIONS)
        if name in _TINY_ARGUMENTS and not is_too_long:
            kept += option
        else:
            left_out.append(name)
    return kept, left_out


def _options(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield each option with its values."""
    option: list[str] = []
    for argument in arguments:
        if argument.startswith("-") and option:
            yield option
            option = []
        option.append(argument)
    if option:
        yield option


def _tiny_cache(cache: KvCache | None, notes: list[str]) -> KvCache | None:
    """The cache tiers with a store that can run on this machine."""
    if cache is None:
        return None
    if cache.cache_config_file is not None:
        notes.append("kvCacheSpec without cacheConfigFile")
    # A configuration file alone turns LMCache on, too.
    only_file = cache.cache_config_file is not None and not cache.enable_l2_cache
    settings: dict[str, object] = {
        "enableL1Cache": cache.enable_l1_cache or only_file,
        "enableL2Cache": cache.enable_l2_cache,
    }
    l2 = cache.l2_cache_spec if cache.enable_l2_cache else None
    if l2 is not None and l2.l2_cache_backend is not None:
        name = l2.l2_cache_backend.lower()
        if name not in _TINY_STORES:
            notes.append(f"the second tier is a folder instead of {name}")
            name = "fs"
        elif l2.l2_cache_local_url is not None:
            notes.append(f"the second tier is {name} on this machine instead of the one in l2CacheLocalUrl")
        settings["l2CacheSpec"] = {"l2CacheBackend": name}
    return KvCache.model_validate(settings)


def _tiny_extension(
    extension: Extension, plan: EndpointPlan, cache: KvCache | None, folder: Path, notes: list[str]
) -> Extension:
    """The settings of `x-kvroute` for CPU engines with small caches."""
    lmcache = extension.lmcache
    # A chunk is a whole number of the engine's blocks.
    chunk = -(-lmcache.chunk_size // TINY_BLOCK_SIZE) * TINY_BLOCK_SIZE
    seed = int(plan.hash_seed) if plan.hash_seed.isdigit() else lmcache.hash_seed
    if cache is not None and plan.cache is not None and plan.cache.classic:
        notes.append("LMCache runs as a server: inside the engines it needs GPUs")
    sizes = {"size_gb": min(extension.l1.size_gb, TINY_L1_GB), "staging_gb": TINY_L1_GB}
    store = {"size_gb": min(extension.l2.size_gb, TINY_L2_GB), "password_secret": None, "options": None}
    if cache is not None and cache.enable_l1_cache and extension.l1.size_gb > TINY_L1_GB:
        notes.append(f"the first tier has {TINY_L1_GB:g} GB instead of {extension.l1.size_gb:g}")
    gateway = extension.gateway
    if plan.model.store is not None or plan.model.is_own_volume:
        # HyperPod's clients may name the model by its folder.
        aliases = {"fleet": {"aliases": {plan.model.source: plan.model.served_name}}}
        gateway = gateway.model_copy(update={"settings": merged(aliases, gateway.settings or {})})
    changes: dict[str, object] = {
        "gateway": gateway,
        "engine": "vllm",
        "device": "cpu",
        "gpus_per_worker": None,
        "platform": "any",
        "model": None,
        "images": Images(),
        # The engine that is installed here, whatever the spec's image has.
        "versions": StatedVersions(vllm=ALIAS_VERSION.partition("+")[0]),
        "lmcache": lmcache.model_copy(update={"mode": "mp", "chunk_size": chunk, "hash_seed": seed}),
        "l1": extension.l1.model_copy(update=sizes),
        "l2": extension.l2.model_copy(update={**store, "fs": FileStore(path=str(folder / "l2"))}),
    }
    return extension.model_copy(update=changes)
