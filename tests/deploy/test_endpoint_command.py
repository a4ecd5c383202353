"""`kvroute up -f` as a user meets it: Redis is real, engines are simulated, LMCache is a stand-in."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tests.support.sockets import free_ports, listening

from kvroute.cli import main
from kvroute.cli.deployments import logs
from kvroute.cli.deployments import up as up_command
from kvroute.deploy.up_state import StateFolder, supervisor

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
EVERYTHING = ["redis", "lmcache-a", "lmcache-b", "redis-l2-a", "redis-l2-b", "gateway"]
KVROUTE = [sys.executable, "-m", "kvroute"]


@dataclass
class Up:
    """A running `kvroute up`. Its output is read as it comes, so that it never waits for a reader."""

    process: subprocess.Popen[str]
    folder: Path
    url: str
    printed: str = ""
    _lines: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def until(self, *words: str) -> None:
        """Wait until all words have been printed since the last wait."""
        since = len(self.printed)
        while not all(each in self.printed[since:] for each in words):
            line = self._lines.get(timeout=DEADLINE_S)
            assert line is not None, f"it ended:\n{self.printed}"
            self.printed += line

    def to_the_end(self) -> int:
        while (line := self._lines.get(timeout=DEADLINE_S)) is not None:
            self.printed += line
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        """Wait for the end of the process, after a signal."""
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def run(self, *arguments: str) -> str:
        """What another command prints in the same folder."""
        done = subprocess.run(
            [*KVROUTE, *arguments], cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def entries(self, about: str) -> dict[str, Any]:
        """The entry of each process in the state file, by name."""
        state = StateFolder(self.folder / ".kvroute").read()
        assert state is not None
        return {each.name: getattr(each, about) for each in state.processes}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """`(spec, *options)` -> `kvroute up -f` of one of our specs, when it is ready."""
    started: list[Up] = []

    def make(spec: str, *options: str) -> Up:
        (port,) = free_ports(1)
        command = [*KVROUTE, "up", "-f", str(ROOT / "configs" / spec), "--port", str(port), *options]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        up = Up(process, tmp_path, f"http://127.0.0.1:{port}")
        started.append(up)
        up.until("Ctrl-C ends everything")
        return up

    yield make
    for up in started:
        up.process.kill()
        up.close()


@pytest.fixture
def running(start: Callable[..., Up], engine_venv: Path, redis_server: str) -> Up:
    """configs/redis-l2.yaml."""
    return start("redis-l2.yaml", "--engine-venv", str(engine_venv))


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (comm) state ppid ...
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def family(up: Up) -> list[int]:
    """Every guard, and every process under one."""
    guards = list(up.entries("pid").values())
    return guards + [pid for guard in guards for pid in children(guard)]


def answer(up: Up, model: str = "small") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    return httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=DEADLINE_S, trust_env=False)


def test_ctrl_c_ends_every_process_of_an_endpoint(running: Up, ended: Callable[[int], bool]) -> None:
    processes = family(running)
    names = list(running.entries("pid"))

    running.process.send_signal(signal.SIGINT)

    assert running.to_the_end() == 0
    assert names == EVERYTHING
    assert len(processes) == 2 * len(names)
    assert all(ended(pid) for pid in processes)
    assert running.run("ps") == "nothing runs in .kvroute\n"
    assert running.run("down") == "nothing runs in .kvroute\n"
    assert "Ready to accept connections" in running.run("logs", "redis")


def test_a_supervisor_that_is_killed_leaves_no_process_behind(
    running: Up, ended: Callable[[int], bool]
) -> None:
    processes = family(running)

    running.process.kill()

    assert all(ended(pid) for pid in processes)
    assert running.run("ps") == "nothing runs in .kvroute\n"


@pytest.mark.timeout(240)
def test_any_process_may_be_killed_and_comes_back(running: Up) -> None:
    for name in EVERYTHING:
        (command,) = children(running.entries("pid")[name])
        os.kill(command, signal.SIGKILL)
        # LMCache's client does not find a restarted Redis: its servers start again as well.
        others = ["lmcache-a", "lmcache-b"] if name == "redis" else []
        back = [f"{each} is ready again" for each in (name, *others)]
        running.until(f"{name} ended with SIGKILL", *back)

        assert answer(running).status_code == 200

    assert running.entries("restarts") == dict.fromkeys(EVERYTHING, 1) | {"lmcache-a": 2, "lmcache-b": 2}
    assert running.run("down") == "redis-l2 has ended\n"
    assert running.to_the_end() == 0


def test_processes_can_be_listed_and_read_from_another_shell(start: Callable[..., Up]) -> None:
    up = start("session.yaml")
    listed = up.run("ps")

    for name in ("session-a", "session-b", "session-c", "gateway"):
        (line,) = [line for line in listed.splitlines() if line.split()[0] == name]
        assert " ready " in line
    # The screen shows each line after the process's name; the log has the line alone.
    assert "session-a | Simulated worker ready" in up.printed
    assert up.run("logs", "session-a").startswith("Simulated worker ready")
    assert "session-b | Simulated worker ready" in up.run("logs", "session-a", "session-b")
    assert len(up.run("logs", "-n", "1").splitlines()) == 4

    entries = json.loads(up.run("ps", "--json"))
    assert [each["phase"] for each in entries["processes"]] == ["ready"] * 4

    command = [*KVROUTE, "logs", "-f", "-n", "0", "gateway"]
    with subprocess.Popen(command, cwd=up.folder, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        # Repeat the request until its log line comes: `logs -f` may not have started yet.
        asked = threading.Event()

        def ask() -> None:
            while not asked.wait(0.1):
                answer(up, model="simulated")

        asking = threading.Thread(target=ask)
        asking.start()
        line = following.stdout.readline()
        asked.set()
        asking.join(DEADLINE_S)
        following.send_signal(signal.SIGINT)
        try:
            following.communicate(timeout=DEADLINE_S)
        finally:
            following.kill()

    assert line.startswith("gateway | ")
    assert following.returncode == 0


def test_an_endpoint_of_hyperpod_can_be_tried_with_simulated_workers(start: Callable[..., Up]) -> None:
    up = start("hyperpod.yaml", "--engine", "sim")
    models = httpx.get(f"{up.url}/v1/models", trust_env=False).json()

    assert list(up.entries("pid"))[-1] == "gateway"
    assert "Llama-3.1-8B-Instruct" in {model["id"] for model in models["data"]}
    assert "SIMULATED" in up.printed
    # Fields that only clusters use are reported.
    assert "has no effect in up" in up.printed


def test_the_doctor_examines_the_endpoint_that_runs_from_a_spec(start: Callable[..., Up]) -> None:
    up = start("hyperpod.yaml", "--engine", "sim", "--strategy", "kvaware")
    spec = str(ROOT / "configs" / "hyperpod.yaml")

    healthy = up.run("doctor", "-f", spec)
    up.run("down")
    up.to_the_end()
    ended = CliRunner().invoke(main, ["doctor", "-f", spec, "--state-dir", str(up.folder / ".kvroute")])
    other = CliRunner().invoke(main, ["doctor", "-f", str(up.folder / "none.yaml")])

    assert "2 workers examined: 0 errors, 0 warnings" in healthy
    # Its gateway and its admin key were found.
    assert not {"[gateway]", "[admin-key]", "[prediction-missed]"} & set(healthy.split())
    assert (ended.exit_code, other.exit_code) == (2, 2)
    assert f"start it with `kvroute up -f {spec}`" in ended.stderr
    assert "none.yaml" in other.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "3"), "--workers cannot be used with -f: set spec.replicas"),
        (("--engine", "vllm"), "x-kvroute.engine: sim"),
        (("--", "--seed", "1"), "ENGINE_ARGS cannot be used with -f"),
    ],
)
def test_a_flag_that_repeats_the_spec_is_refused(options: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(up_command, ["-f", str(ROOT / "configs" / "session.yaml"), *options])

    assert result.exit_code == 2
    assert message in result.stderr


def test_a_wrong_spec_starts_nothing(tmp_path: Path) -> None:
    spec, state = tmp_path / "spec.yaml", tmp_path / "state"
    spec.write_text("apiVersion: kvroute.dev/v1\nkind: Endpoint\nspec: {modl: x}\n")

    result = CliRunner().invoke(up_command, ["-f", str(spec), "--state-dir", str(state)])

    assert result.exit_code == 1
    assert "spec.modl" in result.stderr
    assert not state.exists()


def test_an_endpoint_has_its_state_folder_alone(tmp_path: Path) -> None:
    with StateFolder(tmp_path).hold(supervisor("first", "")):
        result = CliRunner().invoke(
            up_command, ["-f", str(ROOT / "configs" / "session.yaml"), "--state-dir", str(tmp_path)]
        )

    assert result.exit_code == 1
    assert "another `kvroute up` runs in" in result.stderr


def test_the_error_for_an_unknown_log_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gateway.log").touch()

    result = CliRunner().invoke(logs, ["--state-dir", str(tmp_path), "redis"])

    assert result.exit_code == 1
    assert "there is no log of redis; logs: gateway" in result.stderr


def test_a_port_in_use_is_reported_without_a_traceback(tmp_path: Path) -> None:
    with listening() as port:
        result = CliRunner().invoke(up_command, ["--state-dir", str(tmp_path), "--port", str(port)])

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: port: cannot listen on")
