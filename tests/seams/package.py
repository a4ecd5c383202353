"""A copy of the package in a folder of its own, changed by the steps of docs/architecture.md."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
TOYS = Path(__file__).parent / "toys"
START_S = 60.0


class ProcessEnded(AssertionError):
    """A process ended before it was ready. The message is its output."""


@dataclass(frozen=True)
class NewFile:
    """A step: create `path` (below `src/kvroute`) with the content of `toys/<toy>`."""

    path: str
    toy: str

    def apply(self, package: Path) -> None:
        target = package / self.path
        assert not target.exists()
        shutil.copyfile(TOYS / self.toy, target)

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class NewLine:
    """A step: add `line` to `path` directly after the first line that contains `after`."""

    path: str
    after: str
    line: str

    def apply(self, package: Path) -> None:
        target = package / self.path
        lines = target.read_text().splitlines(keepends=True)
        place = next(number for number, line in enumerate(lines) if self.after in line)
        lines.insert(place + 1, self.line + "\n")
        target.write_text("".join(lines))

    def __str__(self) -> str:
        return f"{self.path}: {self.line.strip()}"


Step = NewFile | NewLine


@dataclass
class Package:
    """A changed copy of the package. `run` starts its commands; they end with the test."""

    source: Path
    stack: AsyncExitStack
    python: str = sys.executable
    output: list[str] = field(default_factory=list)
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)
    """In the order of their start."""

    async def run(self, *arguments: str, until: str) -> str:
        """Start `kvroute ARGUMENTS`; returns the first line of output that contains `until`."""
        process = await asyncio.create_subprocess_exec(
            self.python, "-m", "kvroute", *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self.source.parent,
            env={**os.environ, "PYTHONPATH": str(self.source), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        self.processes.append(process)
        output: list[str] = []

        async def stop() -> None:
            if process.returncode is None:
                process.kill()
            await process.wait()

        self.stack.push_async_callback(stop)
        async with asyncio.timeout(START_S):
            while until not in (line := (await process.stdout.readline()).decode()):
                output.append(line)
                if not line:
                    raise ProcessEnded("".join(output))
        reader = asyncio.create_task(process.stdout.read())
        self.stack.callback(reader.cancel)
        return line

    async def sim(self, *flags: str) -> str:
        """Start a simulated worker that computes in no time; returns its URL."""
        line = await self.run("sim", "--port", "0", "--time-scale", "0", *flags, until="ready at")
        return line.split("ready at ")[1].split()[0]

    async def serve(self, *flags: str) -> Gateway:
        """Start a gateway and wait until it is ready."""
        line = await self.run(
            "serve",
            "--port",
            "0",
            "--set",
            "admin.api_key=admin-key-of-the-tests",
            *flags,
            until=" listens on ",
        )
        url = line.split(" listens on ")[1].split()[0].strip('",}')
        client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=30)
        await self.stack.enter_async_context(client)
        async with asyncio.timeout(START_S):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.02)
        return Gateway(client)


@dataclass(frozen=True)
class Gateway:
    """A running gateway of the copy."""

    client: httpx.AsyncClient

    async def chat(self, content: str, path: str = "/v1/chat/completions") -> httpx.Response:
        """Send one chat. Fails unless a worker answered it."""
        body = {"model": "sim-model", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        answer = await self.client.post(path, json=body)
        assert "x-kvroute-worker" in answer.headers, (answer.status_code, answer.text)
        return answer

    async def until_held(self, content: str) -> httpx.Response:
        """Repeat a chat until its worker's cache events have reached the map."""
        async with asyncio.timeout(START_S):
            while (answer := await self.chat(content)).headers["x-kvroute-reason"] != "kv_hit":
                await asyncio.sleep(0.02)
        return answer


@asynccontextmanager
async def changed_package(folder: Path, steps: Sequence[Step]) -> AsyncIterator[Package]:
    """Copy the package into `folder` and apply `steps` to the copy."""
    source = folder / "src"
    shutil.copytree(
        ROOT / "src" / "kvroute", source / "kvroute", ignore=shutil.ignore_patterns("__pycache__")
    )
    for step in steps:
        step.apply(source / "kvroute")
    async with AsyncExitStack() as stack:
        yield Package(source, stack)
