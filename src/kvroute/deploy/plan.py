"""What `kvroute up` runs: every command, environment and URL, decided before anything starts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kvroute.deploy.placement import assign_cores, assign_gpus
from kvroute.deploy.processes import ChildSpec
from kvroute.deploy.render.reach import CONFIG, LMCACHE, WORKER_ARGS, findings_for
from kvroute.deploy.spec.endpoint import Document
from kvroute.deploy.spec.loading import Finding
from kvroute.deploy.spec.source import FieldVerdict, dotted
from kvroute.deploy.state import LOGS
from kvroute.deploy.tiny_model import TINY_MODELS
from kvroute.deploy.vllm_command import (
    KV_CACHE_SPACE,
    CpuPlacement,
    GpuPlacement,
    KvEventsEndpoint,
    VllmSpec,
    vllm_argv,
    vllm_environment,
)
from kvroute.errors import ConfigError
from kvroute.gateway.admin_guard import key_path, user_state_folder
from kvroute.routing.registry import needs_of
from kvroute.routing.strategy import Needs

DEFAULT_WORKERS = 2
DEFAULT_TINY_MODEL = "small"
SIMULATED_MODEL = "simulated"
GATEWAY = "gateway"
SIM_READY_S = 60.0
GATEWAY_READY_S = 60.0
CPU_ENGINE_READY_S = 600.0
# Downloading and loading a large model takes this long on an ordinary link.
GPU_ENGINE_READY_S = 3600.0
# Longer than the gateway's own limit for letting streams finish.
GATEWAY_STOP_S = 45.0
ENGINE_STOP_S = 15.0
# 65,536 tokens of KV, 0.5 GB with the model `small`.
TINY_KV_CACHE_GIB = 1
# vLLM's own default claims nearly all memory of the host, for each engine.
CPU_KV_CACHE_GIB = 4
TINY_BLOCK_SIZE, TINY_BLOCKS, TINY_MAX_MODEL_LEN = 32, 2049, 16_384


class Engine(Enum):
    """What answers behind the gateway."""

    SIM = "sim"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class AdminKeyPlace:
    """Where the user wants the gateway's admin key to be: in `file`, or in one that is made in `folder`.
    Without both: configured, or in the user's state folder."""

    file: Path | None = None
    folder: Path | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """What says so to `kvroute serve`."""
        of_file = ("--admin-key-file", str(self.file.absolute())) if self.file is not None else ()
        of_folder = ("--state-dir", str(self.folder.absolute())) if self.folder is not None else ()
        return (*of_file, *of_folder)

    def made_file(self, environ: Mapping[str, str], settings: Mapping[str, object], port: int) -> Path | None:
        """The file with the key that the gateway makes; None where a key is configured: in `file`, in the
        environment or in `settings`, the `admin` section of its configuration."""
        names = ("api_key", "api_key_file")
        configured = [settings.get(name) or environ.get(f"KVROUTE__ADMIN__{name.upper()}") for name in names]
        if self.file is not None or any(configured):
            return None
        try:
            return key_path(self.folder.absolute() if self.folder else user_state_folder(environ), port)
        except ConfigError:
            return None  # the gateway itself says what is wrong


@dataclass(frozen=True, slots=True)
class UpSpec:
    """What the user asked for. None means: decide by what the host offers."""

    engine: Engine = Engine.SIM
    model: str | None = None
    workers: int | None = None
    tensor_parallel_size: int = 1
    host: str = "127.0.0.1"
    port: int = 8080
    strategy: str | None = None
    state_dir: Path = Path(".kvroute")
    """Logs and made-up models go here."""
    engine_venv: Path = Path(".venv-engine")
    """Where vLLM for CPUs is installed, or will be."""
    engine_args: tuple[str, ...] = ()
    """Appended to every worker's command line."""
    admin_key: AdminKeyPlace = AdminKeyPlace()


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the host offers to a plan."""

    environ: Mapping[str, str]
    engine_environ: Mapping[str, str]
    """The same for the engines, which may live in an environment of their own."""
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    free_ports: tuple[int, ...]
    """At least `port_count`."""
    vllm: tuple[str, ...] = ("vllm",)
    """What stands for the command `vllm`."""


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """A command, the URL that it serves and the one that says when it is ready."""

    child: ChildSpec
    url: str
    ready_url: str
    ready_timeout_s: float
    renewed_with: tuple[str, ...] = ()
    """Processes that it does not find again: when one of them has been restarted, so is this one."""
    rest_s: float = 0.0
    """For how long it stays away once it has ended, so that nobody misses that it did."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """What to start: caches, workers, then the gateway in front of them."""

    workers: tuple[PlannedProcess, ...]
    gateway: PlannedProcess
    model: str
    """The name to ask for."""
    simulated: bool
    tiny_model: str | None
    """A model of `TINY_MODELS` to write to `model_folder` before the workers start."""
    model_folder: Path
    caches: tuple[tuple[PlannedProcess, ...], ...] = ()
    """What the workers need, in stages: each needs the one before."""
    name: str = "kvroute"
    admin_key_file: Path | None = None
    """Where the gateway keeps the admin key that it makes; None: one is configured."""

    @property
    def stages(self) -> tuple[tuple[PlannedProcess, ...], ...]:
        """Every process; those of a stage start together, once those of the stage before are ready."""
        return (*(stage for stage in self.caches if stage), self.workers, (self.gateway,))


def port_count(spec: UpSpec, gpus: tuple[str, ...]) -> int:
    """How many free ports the plan needs: one for each worker, and two for its events where they are read."""
    return worker_count(spec, gpus) * (3 if _publishes(spec) else 1)


def _publishes(spec: UpSpec) -> bool:
    """Whether engines are told to publish their cache events; simulated ones do anyway."""
    return spec.engine is Engine.VLLM and needs_of(spec.strategy) is Needs.TOKENS


def worker_count(spec: UpSpec, gpus: tuple[str, ...]) -> int:
    """How many workers the plan has."""
    if uses_gpus(spec, gpus):
        placed = assign_gpus(gpus, workers=spec.workers, tensor_parallel_size=spec.tensor_parallel_size)
        return len(placed)
    return spec.workers if spec.workers is not None else DEFAULT_WORKERS


def uses_gpus(spec: UpSpec, gpus: tuple[str, ...]) -> bool:
    """True when the workers are to run on GPUs: real ones, of a real model, on a host that has some."""
    return spec.engine is Engine.VLLM and bool(gpus)


def plan_up(spec: UpSpec, host: HostFacts) -> ProcessPlan:
    """The plan for `spec` on `host`. Raises `ConfigError` for what cannot be had."""
    if spec.tensor_parallel_size > 1 and not uses_gpus(spec, host.gpus):
        raise ConfigError("tensor-parallel-size", "needs --engine vllm and GPUs, and none is visible")
    tiny = _tiny_model(spec)
    folder = (spec.state_dir / "models" / tiny).absolute() if tiny else spec.state_dir
    if spec.engine is Engine.SIM:
        model = spec.model or SIMULATED_MODEL
        workers = _simulated(spec, host, model)
    else:
        model = tiny or spec.model or DEFAULT_TINY_MODEL
        workers = _vllm(spec, host, model, str(folder) if tiny else model, tiny=tiny is not None)
    return ProcessPlan(
        workers=workers,
        gateway=_gateway(spec, host, workers),
        model=model,
        simulated=spec.engine is Engine.SIM,
        tiny_model=tiny,
        model_folder=folder,
        admin_key_file=spec.admin_key.made_file(host.environ, {}, spec.port),
    )


def _tiny_model(spec: UpSpec) -> str | None:
    if spec.engine is Engine.SIM:
        return None
    name = spec.model or DEFAULT_TINY_MODEL
    return name if name in TINY_MODELS else None


def _simulated(spec: UpSpec, host: HostFacts, model: str) -> tuple[PlannedProcess, ...]:
    count = worker_count(spec, host.gpus)
    workers = []
    for number, port in enumerate(host.free_ports[:count]):
        argv = (sys.executable, "-m", "kvroute", "sim", "--host", "127.0.0.1", "--port", str(port))
        child = ChildSpec(
            name=f"worker-{number}",
            argv=(*argv, "--model", model, *spec.engine_args),
            env=dict(host.environ),
            log_path=_log(spec, f"worker-{number}"),
        )
        workers.append(_serving(child, f"http://127.0.0.1:{port}", "/health", SIM_READY_S))
    return tuple(workers)


def _vllm(
    spec: UpSpec, host: HostFacts, model: str, source: str, *, tiny: bool
) -> tuple[PlannedProcess, ...]:
    count = worker_count(spec, host.gpus)
    on_gpus = uses_gpus(spec, host.gpus)
    placements: tuple[CpuPlacement | GpuPlacement, ...]
    if on_gpus:
        shares = assign_gpus(host.gpus, workers=count, tensor_parallel_size=spec.tensor_parallel_size)
        placements = tuple(GpuPlacement(share) for share in shares)
    else:
        gib = TINY_KV_CACHE_GIB if tiny else cpu_kv_cache_gib(host.engine_environ)
        placements = tuple(CpuPlacement(share, gib) for share in assign_cores(host.cores, workers=count))
    workers = []
    for number, (placement, port) in enumerate(zip(placements, host.free_ports, strict=False)):
        engine = VllmSpec(
            model=source,
            served_name=model,
            host="127.0.0.1",
            port=port,
            placement=placement,
            block_size=TINY_BLOCK_SIZE if tiny else None,
            num_gpu_blocks=TINY_BLOCKS if tiny else None,
            max_model_len=TINY_MAX_MODEL_LEN if tiny else None,
            random_weights=tiny,
            offline=tiny,
            eager=tiny,
            tool_call_parser="hermes" if tiny else None,
            store_responses=tiny,
            kv_events=_events(host.free_ports[count + 2 * number :]) if _publishes(spec) else None,
            extra_args=spec.engine_args,
        )
        child = ChildSpec(
            name=f"worker-{number}",
            argv=vllm_argv(engine, host.vllm),
            env=vllm_environment(engine, host.engine_environ),
            log_path=_log(spec, f"worker-{number}"),
            stop_grace_s=ENGINE_STOP_S,
        )
        ready_s = GPU_ENGINE_READY_S if on_gpus or not tiny else CPU_ENGINE_READY_S
        workers.append(_serving(child, engine.url, "/health", ready_s))
    return tuple(workers)


def _events(ports: tuple[int, ...]) -> KvEventsEndpoint:
    return KvEventsEndpoint(f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}")


def cpu_kv_cache_gib(environ: Mapping[str, str]) -> int | None:
    """KV memory of an engine on cores; None where the environment says it."""
    return None if KV_CACHE_SPACE in environ else CPU_KV_CACHE_GIB


def _gateway(spec: UpSpec, host: HostFacts, workers: tuple[PlannedProcess, ...]) -> PlannedProcess:
    argv = [sys.executable, "-m", "kvroute", "serve", "--host", spec.host, "--port", str(spec.port)]
    for worker in workers:
        argv += ["--worker", f"{worker.child.name}={worker.url}"]
    if spec.strategy is not None:
        argv += ["--strategy", spec.strategy]
    argv += spec.admin_key.arguments
    return gateway_process(
        tuple(argv), host.environ, host=spec.host, port=spec.port, log_path=_log(spec, GATEWAY)
    )


def gateway_process(
    argv: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    host: str,
    port: int,
    log_path: Path,
    stop_s: float = GATEWAY_STOP_S,
) -> PlannedProcess:
    """`kvroute serve` on that address. `stop_s`: from SIGTERM to SIGKILL."""
    child = ChildSpec(name=GATEWAY, argv=argv, env=dict(environ), log_path=log_path, stop_grace_s=stop_s)
    # A gateway on every interface is asked on the loopback one.
    visible = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    visible = f"[{visible}]" if ":" in visible else visible
    return _serving(child, f"http://{visible}:{port}", "/ready", GATEWAY_READY_S)


def _serving(child: ChildSpec, url: str, ready_path: str, ready_timeout_s: float) -> PlannedProcess:
    return PlannedProcess(child, url, url + ready_path, ready_timeout_s)


def _log(spec: UpSpec, name: str) -> Path:
    return (spec.state_dir / LOGS / f"{name}.log").absolute()


MADE_OF: Final = (WORKER_ARGS, LMCACHE, CONFIG)
ALSO: Final = {"x-kvroute.l2.sizeGb", "spec.maxDeployTimeInSeconds"}
"""Fields that only starting something gives an effect."""
SAYS = "has no effect in up because it is a setting of containers or of Kubernetes"


def local_findings(document: Document, findings: Iterable[Finding]) -> Iterator[Finding]:
    """`findings`, where what is applied in general and has no effect here is noted with the reason."""
    findings = list(findings)
    rendered = [list(findings_for(target, document, findings)) for target in MADE_OF]
    for finding, *outcomes in zip(findings, *rendered, strict=True):
        if finding in outcomes or dotted(finding.path) in ALSO:
            yield finding
            continue
        # "applied, but ...": what is said of a field that does have an effect.
        but = [outcome for outcome in outcomes if outcome.text.startswith("applied")]
        yield but[0] if but else dataclasses.replace(finding, verdict=FieldVerdict.NOTED, text=SAYS)
