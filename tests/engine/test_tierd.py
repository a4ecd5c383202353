"""`kvroute tierd` behind LMCache's own `sagemaker-hyperpod` adapter."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import EngineVenv, separate_environment
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

READY_S = 60.0
ANSWER_S = 120.0
START_S = 300.0  # a busy machine imports LMCache for minutes
KEYS = 8
LEASE_TTL_MS = 9_000
ENVIRONMENT = {"LMCACHE_DISABLE_BANNER": "1", "DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass
class Daemon:
    """A `kvroute tierd` process. Started again, it has the same port and shared memory."""

    port: int
    memory: str
    process: ChildProcess
    flags: tuple[str, ...]
    folder: Path

    @property
    def adapter(self) -> dict[str, object]:
        """LMCache's settings for it."""
        return {
            "type": "sagemaker-hyperpod",
            "url": f"sagemaker-hyperpod://127.0.0.1:{self.port}",
            "shared_memory_name": self.memory,
            "lease_ttl_ms": LEASE_TTL_MS,
        }

    @classmethod
    def of(cls, folder: Path, *flags: str) -> Daemon:
        """Not started yet."""
        (port,) = free_ports(1)
        memory = f"kvroute_test_{os.getpid()}_{port}"
        daemon = cls(port, memory, None, flags, folder)  # type: ignore[arg-type]
        daemon.configure(0.5)
        return daemon

    def configure(self, size_gb: float) -> None:
        executable = os.environ.get("KVROUTE_EXECUTABLE")
        argv = [executable] if executable else [sys.executable, "-m", "kvroute"]
        argv += ["tierd", "--port", str(self.port), "--size-gb", str(size_gb)]
        argv += ["--shared-memory-name", self.memory, *self.flags]
        name = f"tierd-{self.port}"
        spec = ChildSpec(name, tuple(argv), dict(os.environ), self.folder / f"{name}.log")
        self.process = ChildProcess(spec, SystemClock())

    async def start(self) -> None:
        await self.process.start()
        await self.process.wait_ready(f"http://127.0.0.1:{self.port}/health", timeout_s=READY_S)

    async def end(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        await self.process.wait()

    async def kill(self) -> None:
        await self.end(signal.SIGKILL)


StartDaemon = Callable[..., Awaitable[Daemon]]


@pytest_asyncio.fixture(loop_scope="session")
async def start_daemon(tmp_path: Path) -> AsyncIterator[StartDaemon]:
    """`(*flags)` -> a daemon with half a GB; ended with the test."""
    async with AsyncExitStack() as stack:

        async def start(*flags: str) -> Daemon:
            daemon = Daemon.of(tmp_path, *flags)
            for name in (daemon.memory, f".{daemon.memory}.kept", f".{daemon.memory}.guard"):
                stack.callback((Path("/dev/shm") / name).unlink, missing_ok=True)

            async def end() -> None:
                if daemon.process.running:
                    await daemon.process.stop()

            stack.push_async_callback(end)
            await daemon.start()
            return daemon

        yield start


@pytest.fixture
def bench(forged_venv: EngineVenv, tmp_path: Path) -> Callable[..., Awaitable[dict[str, Any]]]:
    """`(daemon, *flags)` -> `lmcache bench l2` against it: operation -> what LMCache reports of it."""

    async def run(daemon: Daemon, *flags: str) -> dict[str, Any]:
        output = tmp_path / "result.json"
        argv = [str(forged_venv.script("lmcache")), "bench", "l2", "--l2-adapter", json.dumps(daemon.adapter)]
        argv += ["--num-keys", "16", "--data-size-kb", "256", "--rounds", "3"]
        argv += ["--lookup-max-hit-rate", "0.5", "--format", "json", "--output", str(output), *flags]
        env = separate_environment(os.environ) | ENVIRONMENT
        spec = ChildSpec("bench", tuple(argv), env, tmp_path / "bench.log", cwd=tmp_path)
        async with ChildProcess(spec, SystemClock()) as process, asyncio.timeout(ANSWER_S):
            code = await process.wait()
        assert code == 0, process.last_log_lines(40)
        return {found["operation"].lower(): found for found in operations(json.loads(output.read_text()))}

    return run


def operations(document: Any) -> list[dict[str, Any]]:
    """The objects in LMCache's report that have an `operation`, at any depth."""
    if isinstance(document, dict):
        inner = [found for value in document.values() for found in operations(value)]
        return [document, *inner] if "operation" in document else inner
    return [found for value in document for found in operations(value)] if isinstance(document, list) else []


class Commanded:
    """A script in the engine's environment that answers commands, line by line."""

    def __init__(self, *argv: str) -> None:
        self._argv = argv
        self.printed: list[str] = []

    async def __aenter__(self) -> Commanded:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            env=separate_environment(os.environ) | ENVIRONMENT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert await self._answer(START_S) == "ready"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()

    async def end(self) -> None:
        """Let it end by itself, so that Python's resource tracker cleans up after it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.communicate()

    async def ask(self, do: str, fill: int = 0, **more: int) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "fill": fill, **more}).encode() + b"\n")
        return await self._answer()

    async def _answer(self, within_s: float = ANSWER_S) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            while line := (await self._process.stdout.readline()).decode():
                if line.startswith("answer "):
                    return json.loads(line.removeprefix("answer "))
                self.printed.append(line)
        raise AssertionError("".join(self.printed[-40:]))


@pytest.fixture
def lmcache(forged_venv: EngineVenv) -> Callable[[dict[str, object]], Commanded]:
    """`(settings)` -> an async context manager: a process with the MP server's adapter."""
    script = Path(__file__).with_name("tierd_adapter.py")
    return lambda adapter: Commanded(str(forged_venv.python), str(script), json.dumps(adapter), str(KEYS))


@pytest.fixture
def classic(forged_venv: EngineVenv) -> Callable[[Daemon], Commanded]:
    """`(daemon)` -> an async context manager: a process with the in-process connector."""
    script = Path(__file__).with_name("tierd_classic.py")
    return lambda daemon: Commanded(
        str(forged_venv.python), str(script), f"http://127.0.0.1:{daemon.port}", daemon.memory
    )


async def test_lmcache_verifies_every_byte(start_daemon: StartDaemon, bench: Any) -> None:
    """LMCache's benchmark compares the loaded bytes with the stored ones."""
    found = await bench(await start_daemon(), "--no-skip-verify")

    assert found["store"]["total_success"] == found["store"]["total_keys"] == 48
    assert found["load"]["total_success"] == found["load"]["total_keys"] == 48
    assert found["lookup"]["actual_hit_rate"] == 0.5


async def test_lmcache_loads_objects_that_another_daemon_stored(
    start_daemon: StartDaemon, bench: Any
) -> None:
    first = await start_daemon()
    second = await start_daemon("--peer", f"http://127.0.0.1:{first.port}", "--peer-timeout", "10")
    await bench(first, "--only", "store")

    found = await bench(second, "--only", "load")

    assert found["load"]["total_success"] == found["load"]["total_keys"] == 48


async def test_lmcache_survives_the_end_of_the_daemon_and_its_return(
    start_daemon: StartDaemon, lmcache: Any
) -> None:
    """Other bytes are stored under the same keys after the restart, so that an old offset would be seen."""
    everything = list(range(KEYS))
    daemon = await start_daemon()
    async with lmcache(daemon.adapter) as adapter:
        assert await adapter.ask("store", fill=1)
        assert await adapter.ask("lookup") == everything
        assert await adapter.ask("load", fill=1) == {"loaded": everything, "right": everything}
        assert await adapter.ask("lookup") == everything

        await daemon.kill()
        held = await adapter.ask("load", fill=1)
        assert held["right"] == held["loaded"]
        assert await adapter.ask("lookup") == []
        assert not await adapter.ask("store", fill=2)

        await daemon.start()
        async with asyncio.timeout(ANSWER_S):
            while not await adapter.ask("store", fill=2):  # its circuit breaker tries every 5 s
                await asyncio.sleep(0.2)
        # What is still leased in the old segment must not be read in the new one.
        after = await adapter.ask("load", fill=2)
        assert after["right"] == after["loaded"]
        assert await adapter.ask("lookup") == everything
        assert await adapter.ask("load", fill=2) == {"loaded": everything, "right": everything}
        assert (await adapter.ask("status"))["is_healthy"]


RESTARTS = [
    (signal.SIGKILL, 0.6),
    (signal.SIGKILL, 0.1),
    (signal.SIGTERM, 0.5),
    (signal.SIGTERM, 0.1),
]
"""How a daemon ends, and how large the next one is."""


@pytest.mark.full
async def test_the_in_process_connector_reads_its_own_bytes_over_restarts(
    start_daemon: StartDaemon, classic: Callable[[Daemon], Commanded]
) -> None:
    """It maps the shared memory once. New keys after each restart, at offsets that others had."""
    daemon, everything = await start_daemon(), list(range(32))
    async with classic(daemon) as connector:
        for fill, restart in enumerate([None, *RESTARTS], 1):
            if restart is not None:
                number, size_gb = restart
                await daemon.end(number)
                daemon.configure(size_gb)
                await daemon.start()
                assert (await connector.ask("get", fill - 1, keys=32))["found"] == []
            assert await connector.ask("put", fill, keys=32) == 0
            assert await connector.ask("get", fill, keys=32) == {"found": everything, "right": everything}
        await connector.end()

    # Python's resource tracker has removed the name of what it attached; a second engine finds it again.
    await until((Path("/dev/shm") / daemon.memory).exists, within_s=ANSWER_S)
    async with classic(daemon) as connector:
        assert await connector.ask("get", 5, keys=32) == {"found": everything, "right": everything}


@pytest.mark.full
async def test_the_adapter_reads_its_own_bytes_over_restarts(
    start_daemon: StartDaemon, lmcache: Callable[[dict[str, object]], Commanded]
) -> None:
    daemon, everything = await start_daemon(), list(range(KEYS))
    async with lmcache(daemon.adapter) as adapter:
        for fill, restart in enumerate([None, *RESTARTS], 1):
            if restart is not None:
                number, size_gb = restart
                await daemon.end(number)
                daemon.configure(size_gb)
                await daemon.start()
            async with asyncio.timeout(ANSWER_S):
                while not await adapter.ask("store", fill=fill):  # its circuit breaker tries every 5 s
                    await asyncio.sleep(0.2)
            assert await adapter.ask("lookup") == everything
            assert await adapter.ask("load", fill=fill) == {"loaded": everything, "right": everything}
            if restart is None:
                assert await adapter.ask("lookup") == everything  # leased when the daemon ends
