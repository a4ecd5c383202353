"""Prepares this host before anything starts: ports, GPUs, programs, the engine, the model, certificates."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvroute.clock import Clock
from kvroute.deploy.endpoint import EndpointHost, LocalEndpoint, plan_local_endpoint
from kvroute.deploy.engine_install import EngineVenv, install_engine, install_nixl, separate_environment
from kvroute.deploy.plan import (
    AdminKeyLocation,
    Engine,
    HostFacts,
    ProcessPlan,
    UpSpec,
    plan_up,
    port_count,
    uses_gpus,
)
from kvroute.deploy.render.config import config_text
from kvroute.deploy.render.plan import EndpointPlan
from kvroute.deploy.tiny_model import write_tiny_model
from kvroute.errors import ConfigError

if TYPE_CHECKING:  # an optional dependency
    from cryptography.x509 import GeneralName

ATTEMPTS = 100
# Below the ports that Linux uses for outgoing connections, so that the port of a restarted server is still
# free.
SERVER_PORTS = range(20_000, 32_768)
_SELF_SIGNED_FOR = timedelta(days=30)
NVIDIA_SMI_TIMEOUT_S = 20.0
# "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-...)" (nvidia-smi -L; MIG slices are indented and not used)
_GPU_LINE = re.compile(r"^GPU (\d+): ", re.MULTILINE)


def require_free_port(host: str, port: int, *, path: str = "port") -> None:
    """Raise `ConfigError` for the option `path` when no server could listen at `host`:`port` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigError(path, f"cannot listen on {host}:{port}: {exc.strerror}") from exc


def free_ports(count: int) -> tuple[int, ...]:
    """Find `count` different free ports of the loopback interface. Raises `ConfigError` if there are none."""
    finder = FreePorts()
    return tuple(finder.run() for _ in range(count))


class FreePorts:
    """Finds runs of neighbouring free ports. Mutable: the ports that it has returned, each only once."""

    def __init__(self) -> None:
        self._used: set[int] = set()

    def run(self, length: int = 1) -> int:
        """Find `length` neighbouring free ports and return the first. Raises `ConfigError` if there are
        none."""
        for _ in range(ATTEMPTS):
            start = random.choice(SERVER_PORTS)
            ports = range(start, start + length)
            if self._are_free(ports):
                self._used.update(ports)
                return start
        raise ConfigError("", f"found no {length} neighbouring free ports on this host")

    def _are_free(self, ports: range) -> bool:
        if ports[-1] not in SERVER_PORTS or not self._used.isdisjoint(ports):
            return False
        with ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                return False
        return True


COMPATIBLE_PROGRAMS = {"redis-server": "valkey-server", "valkey-server": "redis-server"}


async def prepare(spec: UpSpec, *, console: Console, clock: Clock) -> ProcessPlan:
    """Make the plan for `spec`: find GPUs and ports, install the engine if it is needed, write the model."""
    require_free_port(spec.host, spec.port)
    if spec.tls:
        write_self_signed(*spec.tls_files, spec.host)
    environ = dict(os.environ)
    gpus = await find_gpus(environ) if spec.engine is Engine.VLLM else ()
    ports = free_ports(port_count(spec, gpus))
    vllm: tuple[str, ...] = ("vllm",)
    engine_environ = environ
    if uses_gpus(spec, gpus):
        vllm = (_installed("vllm", environ),)
    elif spec.engine is Engine.VLLM:
        console.print("No GPU is visible: vLLM runs on the CPU.")
        venv = await _engine(spec.engine_venv, console, clock)
        if spec.roles is not None:
            await install_nixl(venv, report=lambda line: console.print(line, markup=False), clock=clock)
        vllm, engine_environ = (str(venv.script("vllm")),), separate_environment(environ)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    plan = plan_up(spec, HostFacts(environ, engine_environ, cores, gpus, ports, vllm))
    if plan.tiny_model is not None:
        write_tiny_model(plan.tiny_model, plan.model_folder)
    return plan


def write_self_signed(cert_file: Path, key_file: Path, host: str) -> None:
    """Write a certificate for localhost and `host` that is its own authority, and its key (mode 0600).

    Raises `ConfigError` if `cryptography` is not installed or the folder cannot be written.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError("tls", "needs cryptography: pip install 'kvroute[tls]'") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvroute up")])
    names = {"localhost", "127.0.0.1", "::1"} | ({host} if host not in ("", "0.0.0.0", "::") else set())
    now = datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # a client's clock may be slow
        .not_valid_after(now + _SELF_SIGNED_FOR)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(host_name) for host_name in sorted(names)]), False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        cert_file.parent.mkdir(parents=True, exist_ok=True)
        key_file.unlink(missing_ok=True)
        key_file.touch(mode=0o600)
        key_file.write_bytes(private)
        cert_file.write_bytes(cert.public_bytes(pem))
    except OSError as exc:
        raise ConfigError("tls", f"cannot write {exc.filename}: {exc.strerror}") from exc


def _general_name(name: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """An endpoint to run on this host. `host` and `port` override the gateway's address in the spec."""

    endpoint: EndpointPlan
    host: str | None = None
    port: int | None = None
    state_dir: Path = Path(".kvroute")
    engine_venv: Path = Path(".venv-engine")
    admin_key: AdminKeyLocation = field(default_factory=AdminKeyLocation)


async def prepare_endpoint(request: EndpointRequest, *, console: Console, clock: Clock) -> ProcessPlan:
    """Make the plan for an endpoint, and write the model and the gateway's configuration.

    Installs the engine if it is needed. Raises `ConfigError`, `EngineInstallError`.
    """
    environ = dict(os.environ)
    endpoint = _with_model_folder(request.state_dir, request.endpoint)
    gpus = await find_gpus(environ) if endpoint.gpus else ()
    host = EndpointHost(
        environ=environ,
        engine_environ=environ if endpoint.gpus else separate_environment(environ),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=gpus,
        programs={},
        state_dir=request.state_dir,
        admin_key=request.admin_key,
    )
    # The installation of the engine takes minutes, so errors of the plan are found before it.
    draft = plan_local_endpoint(endpoint, host, FreePorts().run, bind=request.host, port=request.port)
    server = draft.config["server"]
    require_free_port(server["host"], server["port"], path="x-kvroute.gateway.port")
    _require_model(endpoint)
    _make_folders(draft)
    programs = {"kvroute": (sys.executable, "-m", "kvroute"), **_service_programs(draft, environ, console)}
    if not endpoint.is_simulated:
        programs |= await _engine_programs(endpoint, request.engine_venv, environ, console, clock)
    host = replace(host, programs=programs)
    local = plan_local_endpoint(endpoint, host, FreePorts().run, bind=request.host, port=request.port)
    if local.plan.tiny_model is not None:
        write_tiny_model(local.plan.tiny_model, local.plan.model_folder)
    local.config_path.parent.mkdir(parents=True, exist_ok=True)
    # The settings may contain keys.
    local.config_path.unlink(missing_ok=True)
    local.config_path.touch(mode=0o600)
    local.config_path.write_text(config_text(local.config))
    return local.plan


def _with_model_folder(state_dir: Path, endpoint: EndpointPlan) -> EndpointPlan:
    """`endpoint` with the folder of its random-weight model, if it has one, below the state folder."""
    model = endpoint.model
    if model.tiny is None:
        return endpoint
    folder = state_dir / "models" / model.tiny
    location = str(folder) if folder.is_absolute() else f"./{folder}"
    return replace(endpoint, model=replace(model, location=location))


def _require_model(endpoint: EndpointPlan) -> None:
    model = endpoint.model
    if endpoint.is_simulated or model.is_downloaded or model.tiny is not None:
        return
    if not Path(model.local_source).is_dir():
        hint = " (nothing is copied here)" if model.store or model.is_own_volume else ""
        path = "spec.model" if model.location == model.local_source else "spec.modelSourceConfig"
        raise ConfigError(path, f"the model's files are expected in {model.local_source}{hint}")


def _make_folders(local: LocalEndpoint) -> None:
    """Make the second tier's folders on this host."""
    for path in local.folders:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError("x-kvroute.l2.fs.path", f"cannot make {path}: {exc.strerror}") from exc


def _service_programs(
    local: LocalEndpoint, environ: dict[str, str], console: Console
) -> dict[str, tuple[str, ...]]:
    """Find the programs of the second tier's services: command name -> path on this host."""
    programs: dict[str, tuple[str, ...]] = {}
    services, _ = local.plan.caches
    for service in services:
        name = service.child.argv[0]
        if name == "kvroute":
            continue
        path = environ.get("PATH")
        program, substitute = shutil.which(name, path=path), COMPATIBLE_PROGRAMS.get(name, name)
        if program is None:
            program = shutil.which(substitute, path=path)
            if program is None:
                raise ConfigError(
                    "spec.kvCacheSpec.l2CacheSpec",
                    f"{name} is not installed here (Debian: apt install {name}); "
                    "l2CacheLocalUrl can name a running one",
                )
            console.print(f"{name} is not installed; the compatible {substitute} runs instead.")
        programs[name] = (program,)
    return programs


async def _engine_programs(
    endpoint: EndpointPlan, venv: Path, environ: dict[str, str], console: Console, clock: Clock
) -> dict[str, tuple[str, ...]]:
    """Find or install the engine's programs: `vllm`, `lmcache` and Python -> paths on this host."""
    has_servers = endpoint.cache is not None and endpoint.cache.has_servers
    if endpoint.gpus:
        # The user's own command brings its own vLLM.
        names = [*(["vllm"] if endpoint.command is None else []), *(["lmcache"] if has_servers else [])]
        return {name: (_installed(name, environ),) for name in names}
    engine = await _engine(venv, console, clock)
    if endpoint.groups:
        await install_nixl(engine, report=lambda line: console.print(line, markup=False), clock=clock)
    return {name: (str(engine.script(name)),) for name in ("vllm", "lmcache", "python", "python3")}


async def _engine(venv: Path, console: Console, clock: Clock) -> EngineVenv:
    return await install_engine(venv, report=lambda line: console.print(line, markup=False), clock=clock)


def _installed(name: str, environ: dict[str, str]) -> str:
    """The path of an engine's command, next to this Python or on PATH. Raises `ConfigError`."""
    folder = os.path.dirname(sys.executable)
    program = shutil.which(name, path=os.pathsep.join((folder, environ.get("PATH", ""))))
    if program is None:
        raise ConfigError("engine", f"{name} is not installed here: pip install 'kvroute[engine]'")
    return program


async def find_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The usable GPUs, as names for CUDA_VISIBLE_DEVICES, in order.

    These are the GPUs that CUDA_VISIBLE_DEVICES already allows, else all that `nvidia-smi -L` lists. Empty
    without a driver, or when the driver does not answer in time.
    """
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return parse_visible_devices(allowed)
    try:
        process = await asyncio.create_subprocess_exec(
            "nvidia-smi",
            "-L",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(environ),
        )
    except OSError:
        return ()
    try:
        async with asyncio.timeout(NVIDIA_SMI_TIMEOUT_S):
            listing, _ = await process.communicate()
    except TimeoutError:
        return ()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return parse_gpu_listing(listing.decode(errors="replace"))


def parse_visible_devices(value: str) -> tuple[str, ...]:
    """Parse CUDA_VISIBLE_DEVICES as CUDA does: the list ends before the first invalid entry (-1)."""
    devices: list[str] = []
    for entry in value.split(","):
        name = entry.strip()
        if not name or name.startswith("-"):
            break
        devices.append(name)
    return tuple(devices)


def parse_gpu_listing(listing: str) -> tuple[str, ...]:
    """The GPU indexes in the output of `nvidia-smi -L`."""
    return tuple(_GPU_LINE.findall(listing))
