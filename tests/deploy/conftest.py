"""Fake commands: small Python programs replace engines, LMCache and gateways. docker-compose is the real
one."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import STAMP, Recipe
from kvroute.deploy.processes import ChildProcess, ChildSpec

DEADLINE_S = 30.0

# Answers 200 on every path until SIGTERM, which it ignores when "stubborn" is among its arguments.
SERVER = """
import http.server, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else lambda *_: sys.exit(0))
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving", *sys.argv[2:], flush=True)
server.serve_forever()
"""

# `vllm serve ...` as a simulated worker on the same address.
VLLM = """
import os, sys

def value(option):
    return sys.argv[sys.argv.index(option) + 1]

argv = [KVROUTE_PYTHON, "-m", "kvroute", "sim", "--model", value("--served-model-name")]
for option in ("--host", "--port"):
    argv += [option, value(option)]
os.execv(argv[0], argv)
"""

# `lmcache server ...` as far as its supervisor sees it.
LMCACHE = SERVER.replace("sys.argv[1]", 'sys.argv[sys.argv.index("--http-port") + 1]')


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def server_argv() -> Callable[..., tuple[str, ...]]:
    """`(port, *words)` -> the command line of a stand-in server."""
    return lambda port, *words: (sys.executable, "-c", SERVER, str(port), *words)


@pytest.fixture
def child(tmp_path: Path, clock: SystemClock) -> Callable[..., ChildProcess]:
    """`(source, *argv)` -> a child process that runs this Python source."""

    def make(source: str, *argv: str, grace_s: float = 10.0) -> ChildProcess:
        command = (sys.executable, "-c", source, *argv)
        spec = ChildSpec("stand-in", command, dict(os.environ), tmp_path / "log" / "child.log", None, grace_s)
        return ChildProcess(spec, clock)

    return make


@pytest.fixture
def ended() -> Callable[[int], bool]:
    """`(pid)` -> waits until that process, not a child of ours, has ended; False after a deadline."""

    def wait(pid: int) -> bool:
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([watch], [], [], DEADLINE_S)[0])
        finally:
            os.close(watch)

    return wait


@pytest.fixture
def engine_venv(tmp_path: Path) -> Path:
    """What the engine's installation leaves behind, with stand-ins for `vllm` and `lmcache`."""
    path = tmp_path / "engine"
    (path / "bin").mkdir(parents=True)
    (path / STAMP).write_text(json.dumps({"recipe": Recipe.bundled().digest}))
    (path / "bin" / "python").symlink_to(sys.executable)
    for name, source in (
        ("vllm", VLLM.replace("KVROUTE_PYTHON", repr(sys.executable))),
        ("lmcache", LMCACHE),
    ):
        (path / "bin" / name).write_text(f"#!{sys.executable}\n{source}")
        (path / "bin" / name).chmod(0o755)
    return path


@pytest.fixture
def redis_server() -> str:
    """The program; a test without it is skipped, and fails where everything must be there."""
    program = shutil.which("redis-server")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("redis-server is not installed")
        pytest.skip("redis-server is not installed")
    return program


@pytest.fixture
def docker_compose() -> Callable[..., str]:
    """What docker-compose prints in a folder when asked so, with no variable set."""
    program = shutil.which("docker-compose")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("docker-compose is not installed")
        pytest.skip("docker-compose is not installed")

    def ask(folder: Path, *arguments: str) -> str:
        done = subprocess.run(
            [program, *arguments],
            cwd=folder,
            env={"PATH": os.defpath},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "variable is not set" not in done.stderr
        return done.stdout

    return ask
