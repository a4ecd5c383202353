"""Rules that depend on several fields: verdicts that no single field has."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from pydantic.alias_generators import to_camel, to_snake

from kvroute.deploy.l2.backend import Backend, has_password, masked
from kvroute.deploy.l2.registry import BACKENDS, backend_named, is_backend
from kvroute.deploy.spec.cluster import cluster_rules, scaling_rules
from kvroute.deploy.spec.endpoint import (
    Document,
    InferenceEndpointConfig,
    JumpStartModel,
    WorkerDocument,
    gpus_of_instance,
    jumpstart_model,
    resolved,
)
from kvroute.deploy.spec.extension import DEFAULT_IMAGE
from kvroute.deploy.spec.source import FieldVerdict, Path
from kvroute.deploy.spec.versions import adapter_problem, is_classic, server_with, uses_lmcache, version_rules
from kvroute.deploy.spec.worker import (
    AutoScaling,
    EndpointWorker,
    IntelligentRouting,
    KvCache,
    ModelSource,
    WorkerSection,
)
from kvroute.fleet.model_layers import has_hybrid_name, is_hybrid
from kvroute.routing.registry import needs_of
from kvroute.routing.strategy import Needs

RuleFinding = tuple[Path, FieldVerdict, str]

HYPERPOD_BACKENDS = ("redis", "tieredstorage")
DERIVED_ARGUMENTS = {
    "--kv-transfer-config": "follows from kvCacheSpec",
    "--kv-events-config": "follows from routingStrategy",
}
"""Arguments of vLLM that follow from other fields -> a text that names the field."""
OTHER_SERVERS = {
    "text-generation-inference": "Text Generation Inference (TGI)",
    "tgi-inference": "Text Generation Inference (TGI)",
    "djl-inference": "DJL Serving (LMI)",
    "djl-serving": "DJL Serving (LMI)",
    "sglang": "SGLang",
    "tritonserver": "Triton",
}
"""Part of an image's name -> the server in the image, which is not vLLM's."""
ADAPTER_ARGUMENTS = frozenset({"--enable-lora", "--lora-modules", "--default-mm-loras"})
"""Arguments of vLLM for LoRA adapters."""
REQUIRED_OF_TRIGGERS = {
    "cloudWatchTrigger": ("namespace", "metric_name", "target_value", "dimensions"),
    "prometheusTrigger": ("server_address", "query", "target_value"),
}
"""Trigger -> the fields without which KEDA refuses it."""
DEFAULT_PORT = 8000
"""The workers' port without `modelInvocationPort`."""
_CACHE: Path = ("spec", "kvCacheSpec")
_L2: Path = (*_CACHE, "l2CacheSpec")
_WORKER: Path = ("spec", "worker")


def rule_findings(document: Document, strategies: Collection[str]) -> Iterator[RuleFinding]:
    """Yield the verdicts that depend on several fields. `strategies` are the gateway's strategies."""
    if isinstance(document, JumpStartModel):
        yield from _hub_model(document)
    elif document.x_kvroute.model is not None:
        yield _noted(("x-kvroute", "model"), "the document is not a JumpStartModel")
    endpoint = resolved(document)
    yield from _cache(endpoint)
    yield from _routing(endpoint, strategies)
    if not isinstance(document, JumpStartModel):
        yield from _worker(endpoint)
    if isinstance(endpoint, InferenceEndpointConfig):
        yield from _source(endpoint.spec.model_source_config, endpoint)
        yield from _placement(endpoint)
    worker = endpoint.spec.worker
    if worker is None or not any(_other_server(worker.image or "")):
        yield from version_rules(endpoint)
    yield from _scaling(endpoint)
    yield from cluster_rules(endpoint)
    yield from scaling_rules(endpoint)
    if document.x_kvroute.gateway.replicas > 1:
        yield _noted(
            ("x-kvroute", "gateway", "replicas"),
            f"applied, but {_several_gateways_text(endpoint)}",
            is_whole_text=True,
        )


def early_findings(data: Mapping[str, Any]) -> Iterator[RuleFinding]:
    """Yield verdicts of an image in a document that has errors in other fields."""
    spec = data.get("spec")
    worker = spec.get("worker") if isinstance(spec, dict) else None
    image = worker.get("image") if isinstance(worker, dict) else None
    if isinstance(image, str):
        yield from _other_server(image)


def _hub_model(document: JumpStartModel) -> Iterator[RuleFinding]:
    """Yield verdicts for the model and the GPUs, of which a JumpStartModel has only names."""
    model, server = document.spec.model, document.spec.server
    path: Path = ("spec", "model", "modelId")
    name = jumpstart_model(document)
    if name is None:
        yield _noted(
            path,
            f"applied as the model's name in requests, but kvroute does not know the model {model.model_id}: "
            "set x-kvroute.model to its name on Hugging Face, or to a folder",
            is_whole_text=True,
        )
    else:
        yield path, FieldVerdict.APPLIED, f"the model's name in requests; the workers load {name}"
    extension = document.x_kvroute
    needs_gpus = extension.engine != "sim" and extension.device == "gpu" and extension.gpus_per_worker is None
    if (
        needs_gpus
        and server.accelerator_partition_type is None
        and gpus_of_instance(server.instance_type) is None
    ):
        yield _noted(
            ("spec", "server", "instanceType"),
            f"applied, but kvroute does not know the number of GPUs of {server.instance_type}, and plans one "
            "for each worker: set x-kvroute.gpusPerWorker",
            is_whole_text=True,
        )


def _several_gateways_text(document: WorkerDocument) -> str:
    """A text that says which knowledge several gateways do not share."""
    routing = document.spec.intelligent_routing_spec
    if routing is not None and routing.enabled and _reads_caches(routing) and uses_lmcache(document):
        return (
            "gateways share neither their route histories nor LMCache's reports: "
            "each LMCache reports to only one gateway, and the other gateways do not know its tiers"
        )
    return "gateways do not share their route histories: each gateway routes by its own requests only"


def _noted(path: Path, reason: str, *, is_whole_text: bool = False) -> RuleFinding:
    return path, FieldVerdict.NOTED, reason if is_whole_text else f"has no effect here because {reason}"


def _wrong(path: Path, reason: str) -> RuleFinding:
    return path, FieldVerdict.WRONG, reason


def _cache(document: WorkerDocument) -> Iterator[RuleFinding]:
    cache, extension = document.spec.kv_cache_spec, document.x_kvroute
    classic = is_classic(document)
    if cache is None:
        yield from _unused_cache_settings(document, "there is no spec.kvCacheSpec", l1=False, l2=False)
        return
    l2 = cache.l2_cache_spec
    url = l2.l2_cache_local_url if l2 else None
    name = l2.l2_cache_backend if l2 else None
    if name is not None and not is_backend(name.lower()):
        yield _wrong((*_L2, "l2CacheBackend"), f"is none of {', '.join(BACKENDS)}, got {masked(name)!r}")
        return
    if cache.enable_l2_cache:
        yield from _second_tier(document, name, url, classic=classic)
    else:
        for key, value in (("l2CacheBackend", name), ("l2CacheLocalUrl", url)):
            if value is not None:
                yield _noted((*_L2, key), "enableL2Cache is not true")
    yield from _config_file(cache, classic=classic)
    if classic and (reason := _why_hybrid(document)):
        text = (
            f"applied, but {reason}: LMCacheConnectorV1, which classic mode uses, turns vLLM's hybrid KV "
            "cache manager off, so the model needs up to 10 times the KV memory; mode: mp does not"
        )
        yield _noted(_CACHE, text, is_whole_text=True)
    if classic and extension.l1.eviction_policy != "LRU":
        yield _wrong(
            ("x-kvroute", "l1", "evictionPolicy"),
            "LMCache in classic mode has only LRU; mode: mp has more policies",
        )
    if not cache.enable_l1_cache and not cache.enable_l2_cache and cache.cache_config_file is None:
        yield from _unused_cache_settings(document, "both cache tiers are off", l1=False, l2=False)
    else:
        yield from _unused_cache_settings(
            document, "", l1=cache.enable_l1_cache, l2=cache.enable_l2_cache, classic=classic
        )


def _why_hybrid(document: WorkerDocument) -> str:
    """How the document shows that its model is hybrid; "" if it does not. Reads a local `config.json`."""
    spec = document.spec
    if isinstance(document, InferenceEndpointConfig):
        source = document.spec.model_source_config.hugging_face_model
        model = "" if source is None else source.model_id
    else:
        model = getattr(spec, "model", "") or ""
    if not isinstance(model, str) or not model:
        return ""
    if has_hybrid_name(model):
        return f"{model} has layers of several kinds"
    if not model.startswith(("/", ".")):
        return ""
    try:
        with (FilePath(model) / "config.json").open("rb") as file:
            config = json.loads(file.read(_MOST_CONFIG_BYTES))
    except (OSError, ValueError):
        return ""
    is_sure = isinstance(config, dict) and is_hybrid(config)
    return f"{model}/config.json has layers of several kinds" if is_sure else ""


_MOST_CONFIG_BYTES = 1_048_576


def _second_tier(
    document: WorkerDocument, name: str | None, url: str | None, *, classic: bool
) -> Iterator[RuleFinding]:
    if name is None:
        yield _wrong((*_L2, "l2CacheBackend"), "is required when enableL2Cache is true")
        return
    backend, cache = backend_named(name), document.spec.kv_cache_spec
    if url is not None and not backend.accepts_url:
        yield _noted((*_L2, "l2CacheLocalUrl"), f"{name} has no URL")
    elif url is not None:
        problem = backend.url_problem(url)
        if problem:
            yield _wrong((*_L2, "l2CacheLocalUrl"), problem)
        elif has_password(url):
            instead = (
                "with x-kvroute.lmcache.mode: mp it can come from x-kvroute.l2.passwordSecret"
                if classic
                else "omit it here and use x-kvroute.l2.passwordSecret"
            )
            reason = f"applied, but rendered files contain its password in plain text: {instead}"
            yield _noted((*_L2, "l2CacheLocalUrl"), reason, is_whole_text=True)
    if document.x_kvroute.l2.password_secret is not None and not accepts_password(
        backend, url, classic=classic
    ):
        yield _noted(("x-kvroute", "l2", "passwordSecret"), _why_no_password(backend, classic=classic))
    if "size_gb" in document.x_kvroute.l2.model_fields_set and not _has_own_store(document, backend, url):
        yield _noted(("x-kvroute", "l2", "sizeGb"), "no store is started for this second tier")
    tiers = document.x_kvroute
    is_smaller = tiers.l2.size_gb <= tiers.l1.size_gb and tiers.l2.store_policy != "skip_l1"
    if _has_own_store(document, backend, url) and cache is not None and cache.enable_l1_cache and is_smaller:
        reason = (
            f"applied, but {tiers.l2.size_gb:g} GB are not more than the first tier's "
            f"{tiers.l1.size_gb:g} GB (x-kvroute.l1.sizeGb), whose entries the second tier keeps, too: "
            "make it larger"
        )
        yield _noted(("x-kvroute", "l2", "sizeGb"), reason, is_whole_text=True)
    for path, reason in backend.missing(document.x_kvroute, url):
        yield _wrong(path, reason)
    if classic and not backend.has_classic:
        yield _wrong(
            (*_L2, "l2CacheBackend"),
            f"LMCache in classic mode has no {name}; {server_with(document, backend)}",
        )
    if name.lower() not in HYPERPOD_BACKENDS and isinstance(document, InferenceEndpointConfig):
        text = f"{backend.description}; HyperPod itself accepts only {' and '.join(HYPERPOD_BACKENDS)}"
        yield (*_L2, "l2CacheBackend"), FieldVerdict.APPLIED, text
    else:
        yield (*_L2, "l2CacheBackend"), FieldVerdict.APPLIED, backend.describe(document.x_kvroute, url)


def _has_own_store(document: WorkerDocument, backend: Backend, url: str | None) -> bool:
    """Whether the deployment starts a store whose size can be set."""
    if backend.name == "tieredstorage":
        return document.x_kvroute.platform != "hyperpod"
    return backend.accepts_password and url is None


def accepts_password(backend: Backend | None, url: str | None, *, classic: bool) -> bool:
    """Whether a password by reference can be used: by LMCache's server, for a store that the user runs."""
    return backend is not None and backend.accepts_password and url is not None and not classic


def _why_no_password(backend: Backend, *, classic: bool) -> str:
    if not backend.accepts_password:
        return f"{backend.name} has no password"
    if classic:
        return (
            "classic mode accepts a password only in the address; x-kvroute.lmcache.mode: mp accepts a Secret"
        )
    return f"the {backend.description} that kvroute starts has no password; l2CacheLocalUrl can name another"


def _config_file(cache: KvCache, *, classic: bool) -> Iterator[RuleFinding]:
    if cache.cache_config_file is None:
        return
    path = (*_CACHE, "cacheConfigFile")
    if classic:
        yield (
            path,
            FieldVerdict.APPLIED,
            "LMCACHE_CONFIG_FILE of the workers, which replaces all other cache settings",
        )
    else:
        yield _noted(
            path, "LMCache's server (mode: mp) does not read this file; x-kvroute.lmcache.mode: classic does"
        )


def _unused_cache_settings(
    document: WorkerDocument, reason: str, *, l1: bool, l2: bool, classic: bool = False
) -> Iterator[RuleFinding]:
    """Yield notes for settings of x-kvroute that belong to tiers that are off."""
    given = document.x_kvroute.model_fields_set
    if reason:
        for name in ("lmcache", "l1", "l2"):
            if name in given:
                yield _noted(("x-kvroute", name), reason)
        return
    extension = document.x_kvroute
    if "l1" in given:
        for name in extension.l1.model_fields_set:
            key = {"size_gb": "sizeGb", "eviction_policy": "evictionPolicy", "staging_gb": "stagingGb"}[name]
            if name == "staging_gb" and (l1 or classic):
                yield _noted(
                    ("x-kvroute", "l1", key),
                    "the first tier is on" if l1 else "classic mode has no such buffer",
                )
            elif name != "staging_gb" and not l1:
                yield _noted(("x-kvroute", "l1", key), "enableL1Cache is false")
    if "l2" in given and not l2:
        yield _noted(("x-kvroute", "l2"), "enableL2Cache is not true")
    elif "l2" in given and classic:
        for name, key in (
            ("store_policy", "storePolicy"),
            ("prefetch_policy", "prefetchPolicy"),
            ("options", "options"),
        ):
            if name in extension.l2.model_fields_set:
                yield _noted(("x-kvroute", "l2", key), "it is a setting of LMCache's server (mode: mp)")
    if "lmcache" in given and classic and "servers" in extension.lmcache.model_fields_set:
        yield _noted(("x-kvroute", "lmcache", "servers"), "classic mode has no LMCache servers")


def _routing(document: WorkerDocument, strategies: Collection[str]) -> Iterator[RuleFinding]:
    routing = document.spec.intelligent_routing_spec or IntelligentRouting()
    path: Path = ("spec", "intelligentRoutingSpec", "routingStrategy")
    given = document.spec.intelligent_routing_spec is not None
    if given and routing.routing_strategy not in strategies:
        has = ", ".join(sorted(strategies))
        text = f"this version of kvroute has no strategy {masked(routing.routing_strategy)} yet; it has {has}"
        yield _wrong(path, text)
    if not routing.enabled:
        if given and "routing_strategy" in routing.model_fields_set:
            yield _noted(path, "intelligentRoutingSpec.enabled is not true")
        if document.x_kvroute.routing.session_keys:
            yield _noted(
                ("x-kvroute", "routing", "sessionKeys"), "intelligentRoutingSpec.enabled is not true"
            )
        return
    endpoint = document.spec.invocation_endpoint
    if _reads_caches(routing) and "chat" in endpoint:
        yield _noted(
            ("spec", "invocationEndpoint"),
            f"the gateway serves chat with {routing.routing_strategy} like every OpenAI path;"
            " HyperPod refuses this combination",
        )
    if needs_of(routing.routing_strategy) is Needs.NOTHING and document.x_kvroute.routing.session_keys:
        yield _noted(("x-kvroute", "routing", "sessionKeys"), f"{routing.routing_strategy} knows no sessions")


def _reads_caches(routing: IntelligentRouting) -> bool:
    return needs_of(routing.routing_strategy) is Needs.TOKENS


def _worker(document: WorkerDocument) -> Iterator[RuleFinding]:
    worker: WorkerSection | EndpointWorker | None = document.spec.worker
    extension = document.x_kvroute
    if worker is None:
        return
    if extension.engine == "sim":
        for name, key in (("image", "image"), ("args", "args"), ("command", "command")):
            if name in worker.model_fields_set:
                yield _noted((*_WORKER, key), "the workers are simulated (x-kvroute.engine: sim)")
        return
    yield from _other_server(worker.image or "")
    # The plan reads the words after `vllm serve` as arguments, too.
    command = worker.command or []
    parts = {"command": command if command[:2] == ["vllm", "serve"] else [], "args": worker.args or []}
    for key, words in parts.items():
        for number, argument in enumerate(words):
            path: Path = (*_WORKER, key, number)
            option = argument.split("=", 1)[0]
            if option in DERIVED_ARGUMENTS:
                yield _wrong(path, f"{option} {DERIVED_ARGUMENTS[option]}: omit it here")
            elif option == "--port":
                yield from _port(worker, words, path)
        yield from _adapters(document, words, key)


def _other_server(image: str) -> Iterator[RuleFinding]:
    """Yield an error for an image whose server is not vLLM: other arguments, metrics, events and caches."""
    name = image.rpartition("@")[0] or image
    for fragment, server in OTHER_SERVERS.items():
        if fragment in name.lower():
            yield _wrong(
                (*_WORKER, "image"),
                f"{image} runs {server}, and kvroute's workers are vLLM: use an image with vLLM, such as "
                f"{DEFAULT_IMAGE}",
            )
            return


def _port(worker: WorkerSection | EndpointWorker, words: list[str], path: Path) -> Iterator[RuleFinding]:
    """Yield an error if the argument `--port` at `path` is not the port in `modelInvocationPort`."""
    number = int(path[-1])
    _, equals, value = words[number].partition("=")
    given = value if equals else "".join(words[number + 1 : number + 2])
    port = worker.model_invocation_port
    wanted = str(port.container_port if port is not None else DEFAULT_PORT)
    if given != wanted:
        text = (
            f"--port {given} is not worker.modelInvocationPort.containerPort, which is {wanted}: omit --port"
        )
        yield _wrong(path, text)


def _adapters(document: WorkerDocument, arguments: list[str], key: str) -> Iterator[RuleFinding]:
    """Yield a note for LoRA adapters with LMCache, which does not distinguish adapters."""
    indexes = [
        index for index, argument in enumerate(arguments) if argument.split("=", 1)[0] in ADAPTER_ARGUMENTS
    ]
    if not indexes or not uses_lmcache(document):
        return
    problem = adapter_problem(document)
    if problem:
        yield _wrong((*_WORKER, key, indexes[0]), problem)
        return
    settings = (document.x_kvroute.gateway.settings or {}).get("lmcache")
    is_off = isinstance(settings, dict) and settings.get("isolate_adapters") is False
    hint = (
        "x-kvroute.gateway.settings.lmcache.isolate_adapters is false: answers become wrong"
        if is_off
        else "the gateway gives each adapter its own key space: send every request through the gateway"
    )
    reason = f"applied, but LMCache gives a LoRA adapter KV that another model computed; {hint}"
    yield _noted((*_WORKER, key, indexes[0]), reason, is_whole_text=True)


def _source(source: ModelSource, document: InferenceEndpointConfig) -> Iterator[RuleFinding]:
    here: Path = ("spec", "modelSourceConfig")
    required = {"s3": "s3Storage", "fsx": "fsxStorage", "huggingface": "huggingFaceModel"}
    stores = {
        "s3Storage": source.s3_storage,
        "fsxStorage": source.fsx_storage,
        "huggingFaceModel": source.hugging_face_model,
    }
    needed = required.get(source.model_source_type)
    if needed and stores[needed] is None:
        yield _wrong((*here, needed), f"is required for modelSourceType: {source.model_source_type}")
    for name, store in stores.items():
        if store is not None and name != needed:
            yield _noted((*here, name), f"modelSourceType is {source.model_source_type}")
    if source.model_source_type in ("huggingface", "kubernetesVolume") and source.model_location is not None:
        yield _noted((*here, "modelLocation"), f"modelSourceType is {source.model_source_type}")
    if source.model_source_type == "fsx" and source.model_location is not None:
        reason = "the whole file system is mounted; name the folder in worker.args with --model"
        yield _noted((*here, "modelLocation"), reason)
    if source.model_source_type == "kubernetesVolume":
        volumes = document.spec.kubernetes.volumes if document.spec.kubernetes else None
        name = document.spec.worker.model_volume_mount.name
        if name not in [volume.get("name") for volume in volumes or []]:
            yield _wrong(("spec", "kubernetes", "volumes"), f"needs the model's volume {name!r}")


def _placement(document: InferenceEndpointConfig) -> Iterator[RuleFinding]:
    spec = document.spec
    if spec.instance_type and spec.instance_types:
        yield _wrong(("spec", "instanceTypes"), "give instanceType or instanceTypes, not both")
    if document.x_kvroute.platform != "hyperpod":
        for key, value in (("instanceType", spec.instance_type), ("instanceTypes", spec.instance_types)):
            if value:
                yield _noted(("spec", key), "the nodes are not HyperPod's (x-kvroute.platform: hyperpod)")
    if spec.replicas is not None and spec.initial_replica_count is not None:
        yield _noted(("spec", "InitialReplicaCount"), "replicas is given")


def region_of(document: WorkerDocument) -> str | None:
    """The AWS region in the spec; None if it names none."""
    if document.x_kvroute.aws_region is not None or not isinstance(document, InferenceEndpointConfig):
        return document.x_kvroute.aws_region
    store = document.spec.model_source_config.s3_storage
    return store.region if store is not None else None


def _prefill_decode(document: WorkerDocument) -> Iterator[RuleFinding]:
    spec = document.spec
    if spec.replicas is not None:
        yield _noted(("spec", "replicas"), "pdSpec has the number of workers of each group")
    if isinstance(document, InferenceEndpointConfig) and document.spec.initial_replica_count is not None:
        yield _noted(("spec", "InitialReplicaCount"), "pdSpec has the number of workers of each group")
    if spec.auto_scaling_spec is not None:
        yield _noted(("spec", "autoScalingSpec"), "pdSpec has the autoscaler of each group")
    if spec.kv_cache_spec is not None:
        yield _noted(_CACHE, "workers with roles exchange KV by vLLM's NixlConnector, without LMCache")


def _scaling(document: WorkerDocument) -> Iterator[RuleFinding]:
    if document.spec.pd_spec is not None:
        yield from _prefill_decode(document)
    routing = document.spec.intelligent_routing_spec
    for path, scaling in (
        (("spec", "autoScalingSpec"), document.spec.auto_scaling_spec),
        (
            ("spec", "intelligentRoutingSpec", "autoScalingSpec"),
            routing.auto_scaling_spec if routing else None,
        ),
    ):
        if scaling is not None:
            yield from _scaler(document, path, scaling)
    if routing is not None and routing.auto_scaling_spec is not None:
        yield _noted(
            ("spec", "intelligentRoutingSpec", "autoScalingSpec", "maxReplicaCount"),
            f"applied, but {_several_gateways_text(document)}",
            is_whole_text=True,
        )


def _scaler(document: WorkerDocument, path: Path, scaling: AutoScaling) -> Iterator[RuleFinding]:
    if scaling.max_replica_count < scaling.min_replica_count:
        yield _wrong((*path, "maxReplicaCount"), "is less than minReplicaCount")
    triggers = [*scaling.prometheus(), *scaling.cloud_watch()]
    is_workers = scaling is document.spec.auto_scaling_spec
    if not triggers and not (is_workers and document.x_kvroute.scaling.prometheus_address):
        if scaling.min_replica_count == 0:
            yield _wrong((*path, "minReplicaCount"), "0 needs a trigger: an HPA cannot scale to 0")
        for name in ("polling_interval", "cooldown_period", "initial_cooldown_period"):
            if name in scaling.model_fields_set:
                yield _noted((*path, to_camel(name)), "without a trigger an HPA scales")
    for kind in ("cloudWatchTrigger", "prometheusTrigger"):
        single = getattr(scaling, to_snake(kind))
        several = getattr(scaling, f"{to_snake(kind)}_list")
        if single is not None and several:
            yield _noted((*path, kind), f"{kind}List is given")
        for number, trigger in enumerate(several or ([single] if single else [])):
            here = (*path, f"{kind}List", number) if several else (*path, kind)
            for name in REQUIRED_OF_TRIGGERS[kind]:
                if not getattr(trigger, name):
                    yield _wrong((*here, to_camel(name)), "is required")
            if kind == "cloudWatchTrigger" and region_of(document) is None:
                yield _wrong(here, "needs a region: x-kvroute.awsRegion")
