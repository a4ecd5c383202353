"""Black-box tests: a `kvroute` executable, its command line and its sockets, and nothing else of it.

Nothing in this folder imports kvroute, so the same tests run against any installation:
`scripts/blackbox.py /path/to/kvroute` sets the executable; the default is `python -m kvroute` of this Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

EXECUTABLE = "KVROUTE_EXECUTABLE"
"""Environment variable: the `kvroute` to test."""

START_S = 60.0


def command() -> list[str]:
    """The command line that `kvroute` begins with."""
    executable = os.environ.get(EXECUTABLE)
    return [executable] if executable else [sys.executable, "-m", "kvroute"]


@dataclass
class Process:
    """A running `kvroute`. `lines` are those of its standard error so far; `url` is where it listens."""

    process: asyncio.subprocess.Process
    url: str = ""
    lines: list[str] = field(default_factory=list)
    reader: asyncio.Task[None] | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> tuple[str, int]:
        parsed = httpx.URL(self.url)
        return parsed.host, parsed.port or 80

    @property
    def rss_mb(self) -> float:
        """Resident memory now, in MB of 10^6 bytes."""
        return self._status_kb("VmRSS") * 1024 / 1e6

    @property
    def peak_rss_mb(self) -> float:
        """The most resident memory so far."""
        return self._status_kb("VmHWM") * 1024 / 1e6

    @property
    def cpu_s(self) -> float:
        """CPU time so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _status_kb(self, name: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1])
        raise LookupError(name)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    async def logged(self, text: str, times: int = 1) -> str:
        """The line that contains `text` for the `times`-th time, empty for 0. Waits for it, fails when
        the process ends without it."""
        async with asyncio.timeout(START_S):
            while times:
                found = [line for line in self.lines if text in line]
                if len(found) >= times:
                    return found[times - 1]
                if self.reader is not None and self.reader.done():
                    raise AssertionError(f"ended without {text!r}:\n{self.log}")
                self._news.clear()
                await self._news.wait()
        return ""

    async def read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self.lines.append(line.decode("utf-8", "replace"))
            self._news.set()
        self._news.set()

    async def stop(self, number: int = signal.SIGTERM, *, within_s: float = 60.0) -> int:
        """Send a signal, wait for the end, return the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.ended(within_s=within_s)

    async def ended(self, *, within_s: float = 60.0) -> int:
        async with asyncio.timeout(within_s):
            code = await self.process.wait()
            if self.reader is not None:
                await self.reader
        return code


StartServe = Callable[..., Awaitable[Process]]
StartSim = Callable[..., Awaitable[str]]


@pytest.fixture
async def processes() -> AsyncIterator[AsyncExitStack]:
    """Ends what a test started, last first."""
    async with AsyncExitStack() as stack:
        yield stack


async def spawn(
    stack: AsyncExitStack,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    stdout: bool = False,
    program: Sequence[str] = (),
) -> Process:
    """Start `kvroute ARGUMENTS`, or `program` with them; it is killed at the test's end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(program or command()),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE if stdout else asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        limit=1 << 24,
    )
    running = Process(process)
    assert process.stderr is not None
    running.reader = asyncio.create_task(running.read(process.stderr))

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()
        assert running.reader is not None
        await running.reader

    stack.push_async_callback(end)
    return running


@pytest.fixture
def serve(processes: AsyncExitStack, tmp_path: Path) -> StartServe:
    """`await serve("--worker", URL, ...)` runs `kvroute serve` on a free port of 127.0.0.1 and waits until it
    listens and, unless `workers=0`, until that many workers are healthy (default: one per `--worker`). With
    `--processes N` it waits until each process accepts connections.

    The process keeps what it writes for its user below the test's own folder.
    """

    async def start(
        *arguments: str, workers: int | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        expected = arguments.count("--worker") if workers is None else workers
        state = tmp_path / "state"
        running = await spawn(
            processes, "serve", "--port", "0", "--set", "logging.format=json", *arguments,
            env={"XDG_STATE_HOME": str(state), **(env or {})},
        )  # fmt: skip
        line = await running.logged("listens on")
        running.url = json.loads(line)["message"].rsplit(" ", 1)[1]
        await running.logged("is healthy", expected)
        if "--processes" in arguments:
            count = int(arguments[arguments.index("--processes") + 1])
            await running.logged("accepts connections", count if count > 1 else 0)
        return running

    return start


@pytest.fixture
def sim(processes: AsyncExitStack) -> StartSim:
    """`await sim("--time-scale", "0", ...)` runs `kvroute sim` on a free port and returns its URL.

    With `own` it is the one of this Python, for models that the simulated worker of an older release lacks.
    """

    async def start(*arguments: str, own: bool = False) -> str:
        events = () if any("event" in argument for argument in arguments) else ("--no-events",)
        program = (sys.executable, "-m", "kvroute") if own else ()
        running = await spawn(
            processes, "sim", "--port", "0", *events, *arguments, stdout=True, program=program
        )
        assert running.process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await running.process.stdout.readline()).decode()
        assert "ready at" in line, running.log
        return line.split("ready at ")[1].split()[0]

    return start


@pytest.fixture
def run(processes: AsyncExitStack) -> StartServe:
    """`await run("serve", ..., env={...})` starts any command and waits for nothing."""

    async def start(*arguments: str, env: Mapping[str, str] | None = None) -> Process:
        return await spawn(processes, *arguments, env=env)

    return start
