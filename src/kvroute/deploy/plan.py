"""Plans what `kvroute up` runs: every command, environment and URL, before anything starts. Pure."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kvroute.access.admin_key import key_path, user_state_folder
from kvroute.deploy.processes import ChildSpec
from kvroute.deploy.render.reach import CONFIG, LMCACHE, WORKER_ARGS, findings_for
from kvroute.deploy.spec.endpoint import Document
from kvroute.deploy.spec.loading import Finding
from kvroute.deploy.spec.source import FieldVerdict, dotted
from kvroute.deploy.tiny_model import TINY_MODELS
from kvroute.deploy.up_state import LOGS
from kvroute.deploy.vllm_command import (
    KV_CACHE_SPACE,
    CpuPlacement,
    GpuPlacement,
    KvEventsEndpoint,
    KvTransfer,
    VllmSpec,
    assign_cores,
    assign_gpus,
    vllm_argv,
    vllm_environment,
)
from kvroute.errors import ConfigError
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
    """The kind of workers."""

    SIM = "sim"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class AdminKeyLocation:
    """Where the user wants the gateway's admin key: in `file`, or in a file that the gateway makes in
    `folder`.

    Without both, the key is configured or the gateway makes it in the user's state folder.
    """

    file: Path | None = None
    folder: Path | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of `kvroute serve` for this location."""
        of_file = ("--admin-key-file", str(self.file.absolute())) if self.file is not None else ()
        of_folder = ("--state-dir", str(self.folder.absolute())) if self.folder is not None else ()
        return (*of_file, *of_folder)

    def generated_file(
        self, environ: Mapping[str, str], settings: Mapping[str, object], port: int
    ) -> Path | None:
        """The file into which the gateway writes the key that it makes; None when a key is configured.

        A key is configured by `file`, by the environment or by `settings`, the configuration's `admin`
        section.
        """
        names = ("api_key", "api_key_file")
        configured = [settings.get(name) or environ.get(f"KVROUTE__ADMIN__{name.upper()}") for name in names]
        if self.file is not None or any(configured):
            return None
        try:
            return key_path(self.folder.absolute() if self.folder else user_state_folder(environ), port)
        except ConfigError:
            return None  # the gateway itself reports the error


@dataclass(frozen=True, slots=True)
class UpSpec:
    """The user's options of `kvroute up`. None means that the host decides."""

    engine: Engine = Engine.SIM
    model: str | None = None
    workers: int | None = None
    prefill_workers: int = 0
    """Workers that compute long prompts for decode workers; `decode_workers` likewise."""
    decode_workers: int = 0
    tensor_parallel_size: int = 1
    host: str = "127.0.0.1"
    port: int = 8080
    strategy: str | None = None
    state_dir: Path = Path(".kvroute")
    """The folder for logs and for models with random weights."""
    engine_venv: Path = Path(".venv-engine")
    """The virtual environment of vLLM for CPUs; it may not exist yet."""
    engine_args: tuple[str, ...] = ()
    """Appended to every worker's command line."""
    admin_key: AdminKeyLocation = AdminKeyLocation()
    tls: bool = False
    """The gateway has a self-signed certificate, in `tls_files`."""

    @property
    def roles(self) -> tuple[str, ...] | None:
        """The role of each worker; None if each one does both."""
        if not self.prefill_workers and not self.decode_workers:
            return None
        counts = {
            "prefill": self.prefill_workers,
            "decode": self.decode_workers,
            "both": self.workers or 0,
        }
        return tuple(role for role, count in counts.items() for _ in range(count))

    @property
    def tls_files(self) -> tuple[Path, Path]:
        """The files of the self-signed certificate and its key."""
        folder = self.state_dir / "tls"
        return folder / "gateway.crt", folder / "gateway.key"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """This host's resources, as input of a plan."""

    environ: Mapping[str, str]
    engine_environ: Mapping[str, str]
    """The environment of the engines, which may run in another virtual environment."""
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    free_ports: tuple[int, ...]
    """At least `port_count` ports."""
    vllm: tuple[str, ...] = ("vllm",)
    """The first words of the command line, which replace `vllm`."""


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """A command, the URL that it serves, and how to know that it is ready."""

    child: ChildSpec
    url: str
    ready_url: str
    ready_timeout_s: float
    restart_with: tuple[str, ...] = ()
    """Names of processes to which it cannot reconnect. Their restart restarts it, too."""
    restart_delay_s: float = 0.0
    """Least time between its end and its restart, so that its clients notice the end."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """All processes to start: caches first, then workers, then the gateway."""

    workers: tuple[PlannedProcess, ...]
    gateway: PlannedProcess
    model: str
    """The model's name in requests."""
    simulated: bool
    tiny_model: str | None
    """A model of `TINY_MODELS` to write to `model_folder` before the workers start."""
    model_folder: Path
    caches: tuple[tuple[PlannedProcess, ...], ...] = ()
    """The processes that workers need, in stages: each stage needs the stage before."""
    name: str = "kvroute"
    admin_key_file: Path | None = None
    """The file of the admin key that the gateway makes; None when a key is configured."""
    ca_file: Path | None = None
    """The self-signed certificate that clients of the gateway must trust; None without one."""

    @property
    def stages(self) -> tuple[tuple[PlannedProcess, ...], ...]:
        """All processes in stages. A stage starts when every process of the stage before is ready."""
        return (*(stage for stage in self.caches if stage), self.workers, (self.gateway,))


def port_count(spec: UpSpec, gpus: tuple[str, ...]) -> int:
    """How many free ports the plan needs.

    One per worker, two more for KV events if they are read, and one for transfers if workers have roles.
    """
    return worker_count(spec, gpus) * (1 + 2 * _publishes(spec) + (spec.roles is not None))


def _publishes(spec: UpSpec) -> bool:
    """Whether engines must be configured to publish KV events. Simulated workers always publish them."""
    return spec.engine is Engine.VLLM and needs_of(spec.strategy) is Needs.TOKENS


def worker_count(spec: UpSpec, gpus: tuple[str, ...]) -> int:
    """The number of workers in the plan. Raises `ConfigError` when there are too few GPUs."""
    wanted = spec.workers if spec.roles is None else len(spec.roles)
    if uses_gpus(spec, gpus):
        placed = assign_gpus(gpus, workers=wanted, tensor_parallel_size=spec.tensor_parallel_size)
        return len(placed)
    return wanted if wanted is not None else DEFAULT_WORKERS


def uses_gpus(spec: UpSpec, gpus: tuple[str, ...]) -> bool:
    """Whether the workers run on GPUs: they are vLLM engines, and the host has GPUs."""
    return spec.engine is Engine.VLLM and bool(gpus)


def plan_up(spec: UpSpec, host: HostFacts) -> ProcessPlan:
    """Plan the processes for `spec` on `host`. Raises `ConfigError` when `host` cannot run them."""
    if spec.tensor_parallel_size > 1 and not uses_gpus(spec, host.gpus):
        raise ConfigError("tensor-parallel-size", "needs --engine vllm and GPUs, and none is visible")
    if bool(spec.prefill_workers) != bool(spec.decode_workers) and not spec.workers:
        raise ConfigError(
            "decode-workers" if spec.prefill_workers else "prefill-workers",
            "prefill and decode apart need workers of both kinds",
        )
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
        admin_key_file=spec.admin_key.generated_file(host.environ, {}, spec.port),
        ca_file=spec.tls_files[0] if spec.tls else None,
    )


def _tiny_model(spec: UpSpec) -> str | None:
    if spec.engine is Engine.SIM:
        return None
    name = spec.model or DEFAULT_TINY_MODEL
    return name if name in TINY_MODELS else None


def _simulated(spec: UpSpec, host: HostFacts, model: str) -> tuple[PlannedProcess, ...]:
    count = worker_count(spec, host.gpus)
    workers = []
    names = _names(spec, count)
    for name, port in zip(names, host.free_ports, strict=False):
        argv = [sys.executable, "-m", "kvroute", "sim", "--host", "127.0.0.1", "--port", str(port)]
        if spec.roles is not None:
            argv += ["--nixl"]
        child = ChildSpec(
            name=name,
            argv=(*argv, "--model", model, *spec.engine_args),
            env=dict(host.environ),
            log_path=_log(spec, name),
        )
        workers.append(_planned(child, f"http://127.0.0.1:{port}", "/health", SIM_READY_S))
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
    names, roles = _names(spec, count), spec.roles or (None,) * count
    own_ports = host.free_ports[:count]
    transfer_ports = host.free_ports[count : 2 * count] if spec.roles is not None else (0,) * count
    event_ports = host.free_ports[count * (1 if spec.roles is None else 2) :]
    for number, (name, placement, port, role, side_port) in enumerate(
        zip(names, placements, own_ports, roles, transfer_ports, strict=True)
    ):
        transfer = None
        if role is not None:
            transfer = KvTransfer(role, "127.0.0.1", side_port, None if on_gpus else "cpu")
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
            kv_events=_events(event_ports[2 * number :]) if _publishes(spec) else None,
            transfer=transfer,
            extra_args=spec.engine_args,
        )
        child = ChildSpec(
            name=name,
            argv=vllm_argv(engine, host.vllm),
            env=vllm_environment(engine, host.engine_environ),
            log_path=_log(spec, name),
            stop_grace_s=ENGINE_STOP_S,
        )
        ready_s = GPU_ENGINE_READY_S if on_gpus or not tiny else CPU_ENGINE_READY_S
        workers.append(_planned(child, engine.url, "/health", ready_s))
    return tuple(workers)


def _names(spec: UpSpec, count: int) -> tuple[str, ...]:
    """The workers' names: `worker-0`, ..., or `prefill-0`, ..., `decode-0`, ..., with roles."""
    if spec.roles is None:
        return tuple(f"worker-{number}" for number in range(count))
    prefixes = {"prefill": "prefill", "decode": "decode", "both": "worker"}
    seen: dict[str, int] = {}
    names = []
    for role in spec.roles:
        names.append(f"{prefixes[role]}-{seen.setdefault(role, 0)}")
        seen[role] += 1
    return tuple(names)


def _events(ports: tuple[int, ...]) -> KvEventsEndpoint:
    return KvEventsEndpoint(f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}")


def cpu_kv_cache_gib(environ: Mapping[str, str]) -> int | None:
    """KV memory of a CPU engine in GiB; None if the environment sets it already."""
    return None if KV_CACHE_SPACE in environ else CPU_KV_CACHE_GIB


def _gateway(spec: UpSpec, host: HostFacts, workers: tuple[PlannedProcess, ...]) -> PlannedProcess:
    argv = [sys.executable, "-m", "kvroute", "serve", "--host", spec.host, "--port", str(spec.port)]
    roles = spec.roles or ("both",) * len(workers)
    for worker, role in zip(workers, roles, strict=True):
        flag = "--worker" if role == "both" else f"--{role}"
        argv += [flag, f"{worker.child.name}={worker.url}"]
    if spec.strategy is not None:
        argv += ["--strategy", spec.strategy]
    argv += spec.admin_key.arguments
    tls: dict[str, str] = {}
    if spec.tls:
        tls = dict(zip(("cert_file", "key_file"), map(str, spec.tls_files), strict=True))
        argv += [word for name, file in tls.items() for word in ("--set", f"server.tls.{name}={file}")]
    return gateway_process(
        tuple(argv), host.environ, host=spec.host, port=spec.port, log_path=_log(spec, GATEWAY), tls=tls
    )


def gateway_process(
    argv: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    host: str,
    port: int,
    log_path: Path,
    stop_s: float = GATEWAY_STOP_S,
    tls: Mapping[str, object] | None = None,
) -> PlannedProcess:
    """Plan `kvroute serve` at `host`:`port`.

    `stop_s` is the time from SIGTERM to SIGKILL, `tls` the gateway's section `server.tls`.
    """
    child = ChildSpec(name=GATEWAY, argv=argv, env=dict(environ), log_path=log_path, stop_grace_s=stop_s)
    # A gateway that listens on every interface is reached on the loopback interface.
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    reachable = f"[{reachable}]" if ":" in reachable else reachable
    if not tls or not tls.get("cert_file"):
        return _planned(child, f"http://{reachable}:{port}", "/ready", GATEWAY_READY_S)
    url = f"https://{reachable}:{port}"
    # The probe has no client certificate.
    ready_url = f"tcp://{reachable}:{port}" if tls.get("client_ca_file") else f"{url}/ready"
    return PlannedProcess(child, url, ready_url, GATEWAY_READY_S)


def _planned(child: ChildSpec, url: str, ready_path: str, ready_timeout_s: float) -> PlannedProcess:
    return PlannedProcess(child, url, url + ready_path, ready_timeout_s)


def _log(spec: UpSpec, name: str) -> Path:
    return (spec.state_dir / LOGS / f"{name}.log").absolute()


LOCAL_TARGETS: Final = (WORKER_ARGS, LMCACHE, CONFIG)
ALSO_APPLIED: Final = {"x-kvroute.l2.sizeGb", "spec.maxDeployTimeInSeconds"}
"""Fields that no rendered file has, but that `kvroute up` applies."""
NO_EFFECT_TEXT = "has no effect in up because it is a setting of containers or of Kubernetes"


def local_findings(document: Document, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield `findings` for `kvroute up`: applied fields that have no effect here become noted ones."""
    findings = list(findings)
    rendered = [list(findings_for(target, document, findings)) for target in LOCAL_TARGETS]
    for finding, *outcomes in zip(findings, *rendered, strict=True):
        if finding in outcomes or dotted(finding.path) in ALSO_APPLIED:
            yield finding
            continue
        # A field has an effect, too, if its text is "applied, but ...", or is another one in a target.
        applied = [
            outcome
            for outcome in outcomes
            if outcome.verdict is FieldVerdict.APPLIED or outcome.text.startswith("applied")
        ]
        no_effect = dataclasses.replace(finding, verdict=FieldVerdict.NOTED, text=NO_EFFECT_TEXT)
        yield applied[0] if applied else no_effect
