"""Builds the command line and environment of `vllm serve`, and assigns GPUs and cores to engines. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvroute.errors import ConfigError

# An engine without compiled byte code takes 25 s longer at each start.
NOT_INHERITED = "PYTHONDONTWRITEBYTECODE"
KV_CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True, slots=True)
class KvEventsEndpoint:
    """Where an engine publishes its KV events (PUB) and answers replay requests (ROUTER)."""

    publish: str
    """ZMQ endpoint, such as `tcp://*:5557`. The engine binds an endpoint with `*` and connects to any
    other."""
    replay: str | None = None
    topic: str = "kv"


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """How an engine exchanges KV with others, by vLLM's NixlConnector."""

    role: str
    """The worker's role for the gateway: `prefill`, `decode` or `both`. The engine enforces none."""
    host: str
    """Where other engines reach its side channel; `port` likewise, unique on its host."""
    port: int
    buffer_device: str | None = None
    """The memory that NIXL registers: `cpu` for CPU engines, None for the engine's default."""
    on_one_host: bool = True
    """Whether all engines that exchange KV run on one host."""

    @property
    def config(self) -> dict[str, object]:
        """The value of `--kv-transfer-config`."""
        config: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": KV_ROLES[self.role]}
        if self.buffer_device is not None:
            config["kv_buffer_device"] = self.buffer_device
        # Without it a request whose blocks are gone, because the prefill worker died, fails with status 500.
        return config | {"kv_load_failure_policy": "recompute"}

    @property
    def environment(self) -> dict[str, str]:
        side_channel = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port),
        }
        # UCX looks for RDMA devices, and there are none for the engines of one machine without GPUs.
        is_local = self.buffer_device == "cpu" and self.on_one_host
        return side_channel | (_UCX_ON_ONE_HOST if is_local else {})


KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
"""The worker's role -> vLLM's `kv_role`."""
_UCX_ON_ONE_HOST = {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}


@dataclass(frozen=True, slots=True)
class CpuPlacement:
    """A CPU engine's cores and KV memory."""

    cores: tuple[int, ...]
    """Cores of the compute threads. Two engines must not share a core, because waiting threads spin."""
    kv_cache_gib: int | None = None
    """Upper bound of the KV pool; `VllmSpec.num_gpu_blocks` may make the pool smaller. None: the engine's
    default, or the value of VLLM_CPU_KVCACHE_SPACE if that is set."""


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """A GPU engine's devices, as CUDA_VISIBLE_DEVICES names them (index or UUID)."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VllmSpec:
    """One engine: `model` (a name or a folder) served as `served_name` on `host`:`port`."""

    model: str
    served_name: str
    host: str
    port: int
    placement: CpuPlacement | GpuPlacement
    block_size: int | None = None
    """Tokens per KV block; on a CPU a multiple of 32. None: the engine's default."""
    num_gpu_blocks: int | None = None
    """KV blocks, of which the engine uses one internally. None: as many as memory allows."""
    max_model_len: int | None = None
    random_weights: bool = False
    """The engine generates random weights and downloads nothing."""
    offline: bool = False
    """The engine never connects to the model hub."""
    eager: bool = False
    """No compilation: the engine starts sooner, needs no C++ compiler and computes a little slower."""
    kv_events: KvEventsEndpoint | None = None
    transfer: KvTransfer | None = None
    tool_call_parser: str | None = None
    store_responses: bool = False
    """Keep every answer of `/v1/responses` in memory permanently, for `previous_response_id` and GET."""
    development_mode: bool = False
    """Adds endpoints such as `/reset_prefix_cache`, which every client that reaches the port may call."""
    extra_args: tuple[str, ...] = ()
    """Appended unchanged; later options override earlier ones."""
    extra_env: Mapping[str, str] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def vllm_argv(spec: VllmSpec, executable: Sequence[str] = ("vllm",)) -> tuple[str, ...]:
    """The command line of one engine. `executable` replaces the word `vllm`."""
    argv = [*executable, "serve", spec.model, "--served-model-name", spec.served_name]
    argv += ["--host", spec.host, "--port", str(spec.port)]
    # The first option makes the engine report how many prompt tokens came from its cache. The second keeps
    # probes, several per second, out of its log.
    argv += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if isinstance(spec.placement, GpuPlacement) and len(spec.placement.devices) > 1:
        argv += ["--tensor-parallel-size", str(len(spec.placement.devices))]
    for option, value in (
        ("--block-size", spec.block_size),
        ("--num-gpu-blocks-override", spec.num_gpu_blocks),
        ("--max-model-len", spec.max_model_len),
    ):
        if value is not None:
            argv += [option, str(value)]
    if spec.random_weights:
        argv += ["--load-format", "dummy"]
    if spec.eager:
        argv += ["--enforce-eager"]
    if spec.tool_call_parser is not None:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", spec.tool_call_parser]
    if spec.kv_events is not None:
        argv += ["--kv-events-config", json.dumps(_kv_events(spec.kv_events), separators=(",", ":"))]
    if spec.transfer is not None:
        argv += ["--kv-transfer-config", json.dumps(spec.transfer.config, separators=(",", ":"))]
    return (*argv, *spec.extra_args)


def vllm_environment(spec: VllmSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The engine's whole environment, based on `environ`."""
    env = {name: value for name, value in environ.items() if name != NOT_INHERITED}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if spec.store_responses:
        env["VLLM_ENABLE_RESPONSES_API_STORE"] = "1"
    if spec.offline:
        env["HF_HUB_OFFLINE"] = "1"
    if spec.development_mode:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    match spec.placement:
        case CpuPlacement(cores=cores, kv_cache_gib=gib):
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
            if gib is not None:
                env[KV_CACHE_SPACE] = str(gib)
        case GpuPlacement(devices=devices):
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if spec.transfer is not None:
        env |= spec.transfer.environment
    return env | dict(spec.extra_env or {})


def _kv_events(endpoint: KvEventsEndpoint) -> dict[str, object]:
    config: dict[str, object] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.publish,
        "topic": endpoint.topic,
    }
    if endpoint.replay is not None:
        config["replay_endpoint"] = endpoint.replay
    return config


def assign_gpus(
    gpus: tuple[str, ...], *, workers: int | None, tensor_parallel_size: int
) -> tuple[tuple[str, ...], ...]:
    """Assign `tensor_parallel_size` neighbouring GPUs to each worker.

    If `workers` is None, there are as many workers as fit. Raises `ConfigError` when the host has too few
    GPUs.
    """
    wanted = workers if workers is not None else max(1, len(gpus) // tensor_parallel_size)
    needed = wanted * tensor_parallel_size
    if needed > len(gpus):
        raise ConfigError(
            "workers" if workers is not None else "tensor-parallel-size",
            f"{wanted} worker(s) with {tensor_parallel_size} GPU(s) each need {needed} GPUs, "
            f"and {len(gpus)} are visible",
        )
    return tuple(gpus[i : i + tensor_parallel_size] for i in range(0, needed, tensor_parallel_size))


def assign_cores(cores: tuple[int, ...], *, workers: int) -> tuple[tuple[int, ...], ...]:
    """Assign an equal share of neighbouring cores to each worker; with too few cores, workers share cores."""
    share = len(cores) // workers
    if share == 0:
        return tuple((cores[i % len(cores)],) for i in range(workers))
    return tuple(cores[i * share : (i + 1) * share] for i in range(workers))
