"""Resolves a document into an `EndpointPlan`: every default filled in, independent of the render target.

The grace periods for stopping gateway and workers follow from the plan, so that updates and scale-downs lose
no request:

worker:   preStop (gateways notice) -> SIGTERM -> running requests finish -> exit
gateway:  SIGTERM -> server.shutdown_delay_s -> server.drain_timeout_s -> exit
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvroute.deploy.l2.backend import Backend
from kvroute.deploy.l2.registry import backend_named
from kvroute.deploy.spec.endpoint import (
    CommonSpec,
    Document,
    EndpointDocument,
    InferenceEndpointConfig,
    MetricsSpec,
    WorkerDocument,
    resolved,
)
from kvroute.deploy.spec.extension import Extension, SecretKey
from kvroute.deploy.spec.rules import DEFAULT_PORT, accepts_password, region_of
from kvroute.deploy.spec.versions import Versions, is_classic, versions_of
from kvroute.deploy.spec.worker import (
    AutoScaling,
    EndpointWorker,
    EnvironmentVariable,
    FsxStorage,
    HuggingFaceModel,
    IntelligentRouting,
    InvocationPort,
    KvCache,
    ModelSource,
    PdTopology,
    PrefillDecode,
    RequestLimits,
    Resources,
    S3Storage,
    VolumeMount,
    WorkerSection,
)
from kvroute.deploy.tiny_model import TINY_MODELS
from kvroute.http.options import ServerOptions
from kvroute.routing.registry import needs_of
from kvroute.routing.strategy import Needs

GPU = "nvidia.com/gpu"
GPU_PARTITION = "nvidia.com/mig-"
"""The beginning of the resource names of GPU partitions."""
SEED = "PYTHONHASHSEED"
TINY_FOLDER = ".kvroute/models"
"""The folder for models with random weights that `kvroute up` writes."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model that the workers load, and where they load it from."""

    source: str
    """The model argument of vLLM: a name on Hugging Face, or a folder inside the worker's container."""
    served_name: str
    volume: VolumeMount | None = None
    """The mount of the model's files; None: vLLM downloads the model by its name."""
    store: S3Storage | FsxStorage | None = None
    location: str = ""
    hub: HuggingFaceModel | None = None
    is_own_volume: bool = False
    """The volume is one of `spec.kubernetes.volumes`."""
    tiny: str | None = None
    """The name of a model of TINY_MODELS, whose files `kvroute up` writes; None for all other models."""

    @property
    def local_source(self) -> str:
        """The model argument of vLLM for a process of this host: a folder by its path on the host."""
        return self.location if self.volume is not None and self.location[:1] in ("/", ".") else self.source

    @property
    def is_downloaded(self) -> bool:
        return self.volume is None


@dataclass(frozen=True, slots=True)
class Cache:
    """LMCache's tiers and mode."""

    l1: bool
    l2: Backend | None
    l2_url: str | None
    config_file: str | None
    classic: bool
    per_worker: bool
    """Whether each worker has its own LMCache server. Otherwise the workers of a node share one."""

    @property
    def has_servers(self) -> bool:
        return not self.classic


@dataclass(frozen=True, slots=True)
class RoleGroup:
    """The workers of one role (`pdSpec`)."""

    role: str
    """`prefill` or `decode`."""
    replicas: int
    args: tuple[str, ...]
    """All arguments of these workers."""
    resources: Resources
    gpus: int
    """GPUs of one worker."""
    node_selector: Mapping[str, str]
    scaling: AutoScaling | None


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """An endpoint with all defaults filled in. `extension` and `spec` have the other settings as written."""

    name: str
    namespace: str
    labels: dict[str, str]
    spec: CommonSpec
    extension: Extension
    model: Model
    replicas: int
    image: str
    versions: Versions
    """The releases of vLLM and LMCache in the image."""
    command: tuple[str, ...] | None
    """The user's command, which replaces `vllm serve`."""
    args: tuple[str, ...]
    """The user's arguments, without the model."""
    environment: tuple[EnvironmentVariable, ...]
    port: int
    port_name: str
    resources: Resources
    gpus: int
    """GPUs of one worker; 0 on CPUs."""
    hash_seed: str
    strategy: str
    cache: Cache | None
    metrics: MetricsSpec
    worker: WorkerSection | EndpointWorker
    limits: RequestLimits | None
    region: str | None
    instance_types: tuple[str, ...] = ()
    is_hyperpod_document: bool = False
    """Whether the document is one of HyperPod's: InferenceEndpointConfig or JumpStartModel."""
    token_bytes: int | None = None
    """Bytes of one token's KV cache, over all GPUs of a worker; None: not known."""
    groups: tuple[RoleGroup, ...] = ()
    """The workers by role; empty if each one does prefill and decode. `replicas` is their sum."""
    threshold_tokens: int | None = None
    """Prompts with more uncached tokens are handed over between the groups; None without groups."""
    topology: PdTopology | None = None
    group: RoleGroup | None = None
    """The group of the workers that this plan is for; None for all of them."""

    def of_role(self, role: str | None) -> EndpointPlan:
        """The plan for the workers of one role; the plan itself without a role."""
        group = next((candidate for candidate in self.groups if candidate.role == role), None)
        if group is None:
            return self
        return replace(
            self,
            groups=(),
            group=group,
            replicas=group.replicas,
            args=group.args,
            resources=group.resources,
            gpus=group.gpus if self.gpus else 0,
        )

    @property
    def by_role(self) -> tuple[EndpointPlan, ...]:
        """The plan for each group of workers; one plan without groups."""
        return tuple(self.of_role(group.role) for group in self.groups) or (self,)

    @property
    def is_simulated(self) -> bool:
        return self.extension.engine == "sim"

    @property
    def follows_caches(self) -> bool:
        return needs_of(self.strategy) is Needs.TOKENS

    @property
    def has_events(self) -> bool:
        """Whether the engines publish KV events."""
        return self.follows_caches

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks of one worker. Each rank has its own event ports."""
        value = option_value(list(self.args), "--data-parallel-size", "-dp")
        return int(value) if value is not None and value.isdigit() and int(value) else 1

    @property
    def l2_password(self) -> SecretKey | None:
        """The Secret with the second tier's password; None if LMCache's server needs or accepts none."""
        cache = self.cache
        has_one = cache is not None and accepts_password(cache.l2, cache.l2_url, classic=cache.classic)
        return self.extension.l2.password_secret if has_one else None

    @property
    def scrape_path(self) -> str:
        return self.metrics.model_metrics.path if self.metrics.model_metrics else "/metrics"


def plan_endpoint(written: Document) -> EndpointPlan:
    """Resolve a document without wrong fields. Pure."""
    document = resolved(written)
    spec, extension = document.spec, document.x_kvroute
    worker: WorkerSection | EndpointWorker = spec.worker or EndpointWorker()
    command, args = _command(worker)
    model = _model(document, _model_argument(command, args))
    port = worker.model_invocation_port or InvocationPort.model_validate({"containerPort": DEFAULT_PORT})
    resources = worker.resources or Resources()
    environment = tuple(worker.environment_variables or ())
    seeds = [variable.value for variable in environment if variable.name == SEED and variable.value]
    routing = spec.intelligent_routing_spec or IntelligentRouting()
    replicas, instance_types = spec.replicas, list[str]()
    if isinstance(document, InferenceEndpointConfig):
        replicas = replicas if replicas is not None else document.spec.initial_replica_count
        one = [document.spec.instance_type] if document.spec.instance_type else []
        instance_types = document.spec.instance_types or one
    groups = _groups(spec.pd_spec, extension, resources, args)
    pd = spec.pd_spec
    return EndpointPlan(
        name=document.metadata.name,
        namespace=document.metadata.namespace,
        labels=document.metadata.labels or {},
        spec=spec,
        extension=extension,
        model=model,
        replicas=sum(group.replicas for group in groups) if groups else 1 if replicas is None else replicas,
        image=worker.image or extension.images.worker,
        versions=versions_of(document),
        command=command,
        args=tuple(args),
        environment=tuple(
            variable for variable in environment if variable.name != SEED or not variable.value
        ),
        port=port.container_port,
        port_name=port.name,
        resources=resources,
        gpus=_gpus(extension, resources, args),
        hash_seed=seeds[-1] if seeds else str(extension.lmcache.hash_seed),
        strategy=routing.routing_strategy if routing.enabled else "roundrobin",
        cache=None if groups else _cache(spec.kv_cache_spec, extension, classic=is_classic(document)),
        metrics=spec.metrics or MetricsSpec(),
        worker=worker,
        limits=worker.request_limits,
        region=region_of(document),
        instance_types=tuple(instance_types) if extension.platform == "hyperpod" else (),
        is_hyperpod_document=not isinstance(written, EndpointDocument),
        token_bytes=TINY_MODELS[model.tiny].kv_bytes_per_token if model.tiny is not None else None,
        groups=groups,
        threshold_tokens=pd.routing_threshold if pd is not None else None,
        topology=pd.topology_spec if pd is not None else None,
    )


def _groups(
    pd: PrefillDecode | None, extension: Extension, resources: Resources, args: list[str]
) -> tuple[RoleGroup, ...]:
    if pd is None:
        return ()
    scaling = pd.auto_scaling_spec
    stages = (
        ("prefill", pd.prefill_spec, scaling.prefill_auto_scaling if scaling else None),
        ("decode", pd.decoding_spec, scaling.decoding_auto_scaling if scaling else None),
    )
    groups = []
    for role, stage, its_scaling in stages:
        role_args = [*args, *(stage.args or ())]
        reserved = stage.resources or resources
        gpus = _gpus(extension, reserved, role_args)
        groups.append(
            RoleGroup(
                role, stage.replicas, tuple(role_args), reserved, gpus, stage.node_selector or {}, its_scaling
            )
        )
    return tuple(groups)


VLLM_SERVE: Final = ("vllm", "serve")
ANY_ADDRESS: Final = "0.0.0.0"


def _command(worker: WorkerSection | EndpointWorker) -> tuple[tuple[str, ...] | None, list[str]]:
    """The user's command, None for `vllm serve`, and the arguments without those that follow from the spec.

    The rendered command has its own `--port` with the same number, and its own `--host`: 127.0.0.1 on one
    host, and all addresses in a container, as `--host 0.0.0.0` says.
    """
    command, args = tuple(worker.command or ()), list(worker.args or [])
    if command[:2] == VLLM_SERVE:
        command, args = (), [*command[2:], *args]
    elif not command and tuple(args[:2]) == VLLM_SERVE:
        args = args[2:]
    _pop_option(args, "--port")
    if option_value(args, "--host") == ANY_ADDRESS:
        _pop_option(args, "--host")
    return command or None, args


def _model_argument(command: tuple[str, ...] | None, args: list[str]) -> str | None:
    """Remove the model from the arguments of `vllm serve`: `--model` or the first one. Returns the model."""
    positional = args.pop(0) if command is None and args and not args[0].startswith("-") else None
    return _pop_option(args, "--model") or positional


def _model(document: WorkerDocument, from_args: str | None) -> Model:
    if not isinstance(document, InferenceEndpointConfig):
        spec = document.spec
        tiny = spec.model if spec.model in TINY_MODELS and document.x_kvroute.engine == "vllm" else None
        folder = f"./{TINY_FOLDER}/{tiny}" if tiny else spec.model
        is_folder = folder.startswith(("/", "./", "../"))
        mount = spec.worker.model_volume_mount if spec.worker else None
        if is_folder and mount is None:
            mount = VolumeMount.model_validate({"name": "model", "mountPath": "/opt/ml/model"})
        return Model(
            source=mount.mount_path if mount and is_folder else spec.model,
            served_name=spec.model_name or spec.model,
            volume=mount if is_folder else None,
            location=folder if is_folder else "",
            tiny=tiny,
        )
    spec_ = document.spec
    source: ModelSource = spec_.model_source_config
    if source.model_source_type == "huggingface" and source.hugging_face_model is not None:
        hub = source.hugging_face_model
        return Model(source=hub.model_id, served_name=spec_.model_name, hub=hub)
    mount = spec_.worker.model_volume_mount
    return Model(
        source=from_args or mount.mount_path,
        served_name=spec_.model_name,
        volume=mount,
        store={"s3": source.s3_storage, "fsx": source.fsx_storage}.get(source.model_source_type),
        location=(source.model_location or "").strip("/"),
        is_own_volume=source.model_source_type == "kubernetesVolume",
    )


def _cache(spec: KvCache | None, extension: Extension, *, classic: bool) -> Cache | None:
    if spec is None or extension.engine == "sim":
        return None
    if not (spec.enable_l1_cache or spec.enable_l2_cache or spec.cache_config_file):
        return None
    l2 = spec.l2_cache_spec
    backend = (
        backend_named(l2.l2_cache_backend) if l2 and l2.l2_cache_backend and spec.enable_l2_cache else None
    )
    if not classic and not spec.enable_l1_cache and backend is None:
        return None
    return Cache(
        l1=spec.enable_l1_cache,
        l2=backend,
        l2_url=l2.l2_cache_local_url if l2 and backend and backend.accepts_url else None,
        config_file=spec.cache_config_file if classic else None,
        classic=classic,
        per_worker=extension.lmcache.servers == "per-worker",
    )


def _gpus(extension: Extension, resources: Resources, args: list[str]) -> int:
    """GPUs of one worker: `gpusPerWorker`, or the reserved GPUs, or the tensor parallel size."""
    if extension.device == "cpu" or extension.engine == "sim":
        return 0
    if extension.gpus_per_worker is not None:
        return extension.gpus_per_worker
    reserved = {**(resources.requests or {}), **(resources.limits or {})}.get(GPU)
    if reserved is not None:
        return int(reserved)
    return int(option_value(args, "--tensor-parallel-size", "-tp") or 1)


def option_value(args: list[str], *names: str) -> str | None:
    """The value of the last argument among `args` that is one of the options `names`; None without any."""
    last_value = None
    for number, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if name in names:
            last_value = value if equals else (args[number + 1] if number + 1 < len(args) else None)
    return last_value


def _pop_option(args: list[str], option: str) -> str | None:
    """Remove an option and its value from `args`. Returns the value."""
    value = option_value(args, option)
    kept, skip = [], False
    for argument in args:
        if skip:
            skip = False
        elif argument == option:
            skip = True
        elif not argument.startswith(option + "="):
            kept.append(argument)
    args[:] = kept
    return value


def suffix(number: int) -> str:
    """A worker's suffix in names: `a` to `z`, then numbers from 26."""
    return "abcdefghijklmnopqrstuvwxyz"[number] if number < 26 else str(number)


def identifier(name: str) -> str:
    """`name` as the name of an environment variable."""
    return re.sub(r"\W", "_", name).upper()


NUMBER_BYTES: Final = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_MOST_BYTES: Final = 1024 * 1024


def with_local_token_bytes(endpoint: EndpointPlan) -> EndpointPlan:
    """`endpoint` with `token_bytes`, if its model is a folder of this host. Reads the folder's
    `config.json`."""
    folder = endpoint.model.local_source
    if endpoint.token_bytes is not None or endpoint.is_simulated or not folder.startswith(("/", ".")):
        return endpoint
    try:
        with (Path(folder) / "config.json").open("rb") as file:
            config = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return endpoint
    kv_type = option_value(list(endpoint.args), "--kv-cache-dtype") or "auto"
    return replace(endpoint, token_bytes=token_bytes(config, kv_type) if isinstance(config, dict) else None)


def token_bytes(config: Mapping[str, Any], kv_type: str = "auto") -> int | None:
    """Bytes of one token's keys and values in all layers. `kv_type` is vLLM's `--kv-cache-dtype`.

    None if `config` does not contain the sizes, and for models whose layers have different kinds of cache
    (sliding windows, state spaces, latent attention).
    """
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    special = ("kv_lora_rank", "layer_types", "layers_block_type", "state_size", "mamba_d_state", "ssm_cfg")
    if any(text.get(name) for name in special):
        kinds = text.get("layer_types")
        if not isinstance(kinds, list) or set(kinds) != {"full_attention"}:
            return None
    layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    kv_heads = text.get("num_key_value_heads") or heads
    size = text.get("head_dim")
    hidden = text.get("hidden_size")
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        size = hidden // heads
    if kv_type.startswith("fp8"):
        number: int | None = 1
    elif kv_type == "auto":
        names = (where.get(key) for where in (text, config) for key in ("torch_dtype", "dtype"))
        number = NUMBER_BYTES.get(str(next((name for name in names if name), "")))
    else:
        number = NUMBER_BYTES.get(kv_type)
    parts = (layers, kv_heads, size, number)
    if not all(isinstance(factor, int) and factor > 0 for factor in parts):
        return None
    return 2 * int(layers or 0) * int(kv_heads or 0) * int(size or 0) * int(number or 0)


GATEWAY_DELAY_S = 5
"""`server.shutdown_delay_s` in Kubernetes: endpoints and kube-proxy's rules are updated within seconds."""
DRAIN_S = 120
"""In Kubernetes, how long running answers may take to finish, in the gateway and in workers."""
NOTICE_S = 5
"""How long a terminating worker continues to serve, until every gateway knows that it terminates."""
# A gateway's watch takes less than a second; a gateway that is just listing all pods again takes some
# seconds.
SHUTDOWN_TIMEOUT = "--shutdown-timeout"
"""vLLM's option (`deploy/spec/versions.py` has the releases). Without it, SIGTERM aborts running requests."""
_MARGIN_S = 5


def gateway_stop_s(server: Mapping[str, Any]) -> int:
    """Seconds from SIGTERM to SIGKILL for a gateway with this `server` section in its configuration."""
    names = ("processes", "shutdown_delay_s", "drain_timeout_s")
    durations = {name: server[name] for name in names if name in server}
    return math.ceil(ServerOptions.model_validate(durations).longest_shutdown_s) + _MARGIN_S


def engine_drains(plan: EndpointPlan) -> bool:
    """Whether the engine itself finishes running requests after SIGTERM."""
    return not plan.is_simulated and (_own_timeout_s(plan) is not None or _accepts_timeout(plan))


def shutdown_arguments(plan: EndpointPlan) -> tuple[str, ...]:
    """The arguments that make an engine drain at shutdown; empty if its image may not accept them."""
    return (SHUTDOWN_TIMEOUT, str(DRAIN_S)) if _accepts_timeout(plan) else ()


def worker_drain_s(plan: EndpointPlan) -> int:
    """Seconds that a worker's running requests may take to finish."""
    timeout_s = _own_timeout_s(plan)
    return DRAIN_S if timeout_s is None else timeout_s


def worker_grace_s(plan: EndpointPlan) -> int:
    """Seconds from a worker's termination to SIGKILL, `pre_stop` included. Engines need seconds to end."""
    return NOTICE_S + worker_drain_s(plan) + 2 * _MARGIN_S


def pre_stop(plan: EndpointPlan) -> dict[str, Any]:
    """A worker pod's preStop hook, which delays SIGTERM until gateways send the worker no more requests.

    If the engine would abort running requests at SIGTERM, the hook also waits until they have finished.
    """
    if engine_drains(plan):
        return {"exec": {"command": ["sleep", str(NOTICE_S)]}}
    return {"exec": {"command": ["python3", "-c", _WAIT % (NOTICE_S, worker_drain_s(plan), plan.port)]}}


_WAIT = """\
import time, urllib.request
time.sleep(%d)
end = time.monotonic() + %d
counts = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
while time.monotonic() < end:
    page = urllib.request.urlopen("http://127.0.0.1:%d/metrics", timeout=5).read().decode()
    if not any(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(counts)):
        break
    time.sleep(1)
"""


def _own_timeout_s(plan: EndpointPlan) -> int | None:
    value = option_value(list(plan.args), SHUTDOWN_TIMEOUT)
    return int(value) if value is not None and value.isdigit() else None


def _accepts_timeout(plan: EndpointPlan) -> bool:
    """Whether the engine certainly accepts `--shutdown-timeout`."""
    # An engine that does not know the option does not start, so an unknown version means no.
    if plan.is_simulated or plan.command is not None:
        return False
    return plan.versions.is_known and plan.versions.pair.vllm.has_shutdown_timeout
