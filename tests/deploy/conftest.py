"""Stand-in commands: small Python programs in the place of engines and gateways."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvroute.clock import SystemClock
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
