"""The processes of the gateway benchmark: build, pin, start, check readiness, and end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gateway_machine import process_tree
from gateway_requests import MODEL, chat, said
from gateway_routers import Launch, Router

READY_S = 30.0
STOP_S = 10.0
NATIVE = Path(__file__).parent / "native"
EVENT_BYTES = 320
"""Size of a streamed chunk as vLLM writes it."""


@dataclass(frozen=True, slots=True)
class Cores:
    """CPU numbers: one for the router, one or more for load and workers."""

    router: int
    rest: frozenset[int]


def choose_cores() -> Cores:
    """The first core is for the router. Raises SystemExit if the machine has only one."""
    first, *rest = sorted(os.sched_getaffinity(0))
    if not rest:
        raise SystemExit(
            "the gateway benchmark needs two cores: one for the router, one for load and workers"
        )
    return Cores(first, frozenset(rest[:1]))


def build(folder: Path) -> dict[str, Path]:
    """Compile the worker and the load generator into `folder`. Raises SystemExit without a compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit(
            "the gateway benchmark needs a C compiler: set CC, or (Debian) apt install gcc libc6-dev"
        )
    built = {}
    for name in ("worker", "load"):
        built[name] = folder / name
        command = [compiler, "-O2", "-std=gnu11", "-o", str(built[name]), str(NATIVE / f"{name}.c")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return built


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], cores: frozenset[int], log: Path) -> Iterator[int]:
    """Run a child, pinned to `cores` with all its children, until the block ends. Yields its process id."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(os.sched_setaffinity, 0, cores),
        )
    try:
        yield child.pid
    finally:
        tree = process_tree(child.pid)
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pid in tree[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, str], bytes]:
    """Send one request; returns status, headers in lower case, and body. Raises OSError or HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        headers = {"content-type": "application/json", "authorization": "Bearer sk-1234"}
        payload = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, payload, headers)
        answer = connection.getresponse()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def wait_ready(port: int, name: str, log: Path, *, until_exact: bool) -> None:
    """Wait until the router answers a request. With `until_exact`, wait until kvroute reports no problem."""
    give_up, last = time.monotonic() + READY_S, "nothing tried"
    while time.monotonic() < give_up:
        try:
            status, _, body = ask(port, "/v1/chat/completions", chat([said("user", "hello")]))
            last = f"status {status}: {body[:200]!r}"
            if status == 200 and not until_exact:
                return
            if status == 200:
                _, _, body = ask(port, "/ready")
                last = f"/ready: {body[:500]!r}"
                if not json.loads(body)["notes"]:
                    return
        except (OSError, http.client.HTTPException) as error:
            last = repr(error)
        time.sleep(0.2)
    tail = log.read_text(errors="replace")[-500:]
    raise RuntimeError(f"{name} was not ready within {READY_S:.0f} s ({last})\n{tail}")


@dataclass(frozen=True, slots=True)
class Started:
    """A running router. With `pid` None requests go directly to a worker."""

    router: Router
    port: int
    pid: int | None

    def tree(self) -> list[int]:
        return [] if self.pid is None else process_tree(self.pid)


@dataclass(slots=True)
class Bed:
    """All processes of the benchmark. Mutable: `own_pids` grows with each started process."""

    stack: ExitStack
    folder: Path
    cores: Cores
    tools: dict[str, Path]
    peers: Path
    model_folder: Path
    own_pids: list[int]

    def start_workers(self, kind: str) -> list[str]:
        """Start two workers of this kind; returns their URLs."""
        urls = []
        for number in range(2):
            port = free_port()
            if kind == "plain":
                command = [str(self.tools["worker"]), "-t", "-e", str(EVENT_BYTES), "-m", MODEL, str(port)]
            else:
                script = str(Path(__file__).parent / "gateway_event_worker.py")
                command = [sys.executable, script, str(port), str(self.model_folder), MODEL]
            log = self.folder / f"{kind}-worker-{number}.log"
            self.own_pids.append(self.stack.enter_context(running(command, self.cores.rest, log)))
            wait_ready(port, f"{kind} worker", log, until_exact=False)
            urls.append(f"http://127.0.0.1:{port}")
        return urls

    def start(self, router: Router, workers: Sequence[str]) -> Started:
        """Start a router. Raises RuntimeError if it does not become ready."""
        if router.command is None:
            return Started(router, int(workers[0].rpartition(":")[2]), None)
        launch = Launch(self.folder, self.peers, workers, free_port(), free_port(), self.model_folder)
        log = self.folder / f"{router.name.replace(' ', '-').replace(',', '')}.log"
        command = router.command(launch)
        pid = self.stack.enter_context(running(command, frozenset({self.cores.router}), log))
        self.own_pids.append(pid)
        wait_ready(launch.port, router.name, log, until_exact="kvaware" in router.name)
        return Started(router, launch.port, pid)
