"""The routers that the gateway benchmark compares: their source and their command lines."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from gateway_goals import COMPLETE, DIRECT, KV_AWARE, KV_PREFIX, OURS, ROLES, SESSION, THEIRS

PEERS = {"sglang-router": "0.3.2", "vllm-router": "0.1.17"}
"""Packages from PyPI, in the versions that the goals refer to."""

NGINX_CONFIGURATION = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  keepalive_requests 10000000;
  client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  upstream workers {{
    {servers}
    keepalive 64;
    keepalive_requests 10000000;
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://workers;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """The inputs of a router's command line. `side_port` is a free port for a router's own metrics."""

    folder: Path
    peers: Path
    workers: Sequence[str]
    port: int
    side_port: int
    model_folder: Path


Command = Callable[[Launch], list[str]]


def nginx(launch: Launch) -> list[str]:
    servers = " ".join(f"server {worker.removeprefix('http://')};" for worker in launch.workers)
    path = launch.folder / "nginx.conf"
    path.write_text(NGINX_CONFIGURATION.format(folder=launch.folder, servers=servers, port=launch.port))
    return [nginx_binary() or "nginx", "-e", f"{launch.folder}/nginx.log", "-c", str(path)]


def sglang_router(launch: Launch) -> list[str]:
    command = [str(launch.peers / "bin" / "sglang-router"), "launch", "--host", "127.0.0.1"]
    command += ["--port", str(launch.port), "--worker-urls", *launch.workers, "--policy", "cache_aware"]
    return [
        *command,
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(launch.side_port),
        "--log-level",
        "warn",
    ]


def vllm_router(launch: Launch) -> list[str]:
    command = [str(launch.peers / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(launch.port)]
    command += ["--worker-urls", *launch.workers, "--policy", "cache_aware", "--log-level", "warning"]
    return [
        *command,
        "--prometheus-port",
        str(launch.side_port),
        "--max-concurrent-requests",
        "4096",
    ]


def kvroute(
    strategy: str, *settings: str, python: str = sys.executable, flags: Sequence[str] = ("--worker",)
) -> Command:
    """kvroute with its defaults: metrics, request lines and retries. `python` has kvroute installed. The
    workers get the `flags` one after another."""

    def command(launch: Launch) -> list[str]:
        line = [python, "-m", "kvroute", "serve", "--host", "127.0.0.1", "--port", str(launch.port)]
        for worker, flag in zip(launch.workers, cycle(flags), strict=False):
            line += [flag, worker]
        line += ["--strategy", strategy]
        for setting in settings:
            line += ["--set", setting.format(folder=launch.model_folder)]
        return line

    return command


@dataclass(frozen=True, slots=True)
class Router:
    """A router. With `command` None requests go directly to a worker. `workers` is "plain" or "events"."""

    name: str
    command: Command | None
    workers: str = "plain"
    peer: str | None = None
    """The package that must be installed for the router."""


ROUTERS = (
    Router(DIRECT, None),
    Router("nginx", nginx, peer="nginx"),
    Router(THEIRS, sglang_router, peer="sglang-router"),
    Router("vllm-router", vllm_router, peer="vllm-router"),
    Router(OURS, kvroute("prefixaware")),
    Router(COMPLETE, kvroute("prefixaware", "server.fast_lane=off")),
    Router(SESSION, kvroute("session")),
    Router(
        ROLES,
        kvroute("prefixaware", "routing.prefill_decode.threshold_tokens=0", flags=("--prefill", "--decode")),
    ),
    Router(KV_PREFIX, kvroute("prefixaware"), workers="events"),
    Router(KV_AWARE, kvroute("kvaware", "tokens.timeout_ms=2000", "tokens.models.bench={folder}"), "events"),
)


def nginx_binary() -> str | None:
    """The path of nginx. Debian installs it in a folder that may not be on PATH."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def install_peers(folder: Path, *, allow_install: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Install missing peers from PyPI into a virtual environment at `folder`. Returns the versions of the
    installed peers, and for each other peer the reason. Packages are installed one by one, so that a failure
    affects one package only."""
    versions, missing = {}, {}
    if binary := nginx_binary():
        versions["nginx"] = _run(binary, "-v").stderr.strip().rpartition("/")[2]
    else:
        missing["nginx"] = "not installed (Debian: apt install nginx-light)"
    for name, wanted in PEERS.items():
        why = None
        if allow_install:
            why = install_package(folder, name, wanted)
        found = package_version(str(folder / "bin" / "python"), name)
        if found is not None:
            versions[name] = found
        else:
            missing[name] = why or f"not installed in {folder}"
    return versions, missing


def install_package(folder: Path, name: str, version: str) -> str | None:
    """Install this version of a package from PyPI into the virtual environment at `folder`. Creates the
    environment; does nothing if the version is installed. Returns the reason of a failure, or None."""
    python = str(folder / "bin" / "python")
    if package_version(python, name) == version:
        return None
    if not Path(python).exists():
        made = _run(sys.executable, "-m", "venv", str(folder))
        if made.returncode:
            return f"no virtual environment: {_last(made)}"
    print(f"installing {name} {version} into {folder}", file=sys.stderr)
    pip = _run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", f"{name}=={version}")
    return f"pip could not install it: {_last(pip)}" if pip.returncode else None


def package_version(python: str, package: str) -> str | None:
    """The installed version; None without the package or without this Python."""
    if not Path(python).exists():
        return None
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    result = _run(python, "-c", code, package)
    return result.stdout.strip() if result.returncode == 0 else None


def _last(process: subprocess.CompletedProcess[str]) -> str:
    lines = (process.stderr or process.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {process.returncode}"
