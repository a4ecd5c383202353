"""Count the modules that one request and one KV event batch pass: the files that a reader has to open.

    python scripts/count_modules.py [--python PATH/.venv/bin/python]

The script runs a gateway and a simulated worker and records which functions of kvroute run on the gateway's
event loop: while the gateway answers a warm streamed chat (`prefixaware`, fast lane), and while it applies a
batch with one `BlockStored` event of one block to the map (`kvaware`). For comparison it records an idle
gateway, too. `--python` selects the interpreter of another checkout. The output includes the figures of
commit 1fd48c2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import httpx

BASE = {"warm streamed chat": (36, 139), "single-block event batch": (16, 34)}
"""Modules and calls on commit 1fd48c2."""

WINDOW_S = 1.0

CHATS = 3
"""Chats that are recorded. The one that passes the fewest modules counts: timers of the gateway expire during
the others."""

LAUNCHER = """
import json, os, signal, sys
import kvroute, kvroute.cli
root = os.path.dirname(kvroute.__file__) + os.sep
calls = []
def record(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        calls.append(frame.f_code.co_filename[len(root):] + ":" + frame.f_code.co_qualname)
def begin(*_):
    calls.clear()
    sys.setprofile(record)
def end(*_):
    sys.setprofile(None)
    with open(os.environ["CALLS"] + ".new", "w") as file:
        json.dump(calls, file)
    os.replace(os.environ["CALLS"] + ".new", os.environ["CALLS"])
signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
sys.argv = ["kvroute", *sys.argv[1:]]
kvroute.cli.main()
"""


class Gateway:
    """A running gateway whose calls can be recorded."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, calls: Path) -> None:
        self.url = url
        self._process = process
        self._calls = calls

    @asynccontextmanager
    async def recorded(self) -> AsyncIterator[list[str]]:
        """Record the calls during the `with` block and `WINDOW_S` after it; the list is filled at its end."""
        calls: list[str] = []
        self._calls.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(WINDOW_S / 10)
        yield calls
        await asyncio.sleep(WINDOW_S)
        self._process.send_signal(signal.SIGUSR2)
        while not self._calls.exists():  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.01)
        calls += json.loads(self._calls.read_text())


@asynccontextmanager
async def started(
    *command: str, until: str, **environment: str
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Start a process; yields the first line of its output that contains `until`, and the process."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    try:
        lines = []
        while True:
            line = (await process.stdout.readline()).decode()
            lines.append(line)
            if not line:
                raise RuntimeError("".join(lines))
            if until in line:
                break
        drain = asyncio.create_task(process.stdout.read())
        yield line, process
    finally:
        process.kill()
        await process.wait()
    await drain


@asynccontextmanager
async def fleet(python: str, folder: Path, *flags: str) -> AsyncIterator[tuple[Gateway, str]]:
    """Start one simulated worker and a gateway; yields the gateway and the worker's URL."""
    worker_command = (python, "-m", "kvroute", "sim", "--port", "0", "--time-scale", "0")
    ports = ("--event-endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0")
    async with started(*worker_command, *ports, until="ready at") as (line, _):
        worker = line.split("ready at ")[1].split()[0]
        calls = folder / "calls.json"
        gateway_command = (
            python, "-c", LAUNCHER, "serve", "--port", "0", "--worker", worker,
            "--set", "fleet.health.interval_s=3000", *flags,
        )  # fmt: skip
        async with started(
            *gateway_command, until="listens on", CALLS=str(calls), XDG_STATE_HOME=str(folder)
        ) as (line, process):
            gateway = Gateway(process, line.split(" listens on ")[1].split()[0].strip('",}'), calls)
            async with httpx.AsyncClient(trust_env=False) as client:
                while (await client.get(f"{gateway.url}/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield gateway, worker


async def warm_chat(python: str, folder: Path) -> tuple[list[str], list[str]]:
    """Calls of an idle gateway, and of a streamed chat after 40 equal chats."""
    body = {
        "model": "sim-model",
        "messages": [{"role": "user", "content": "What is a prefix cache? " * 40}],
        "stream": True,
        "max_tokens": 8,
    }
    async with fleet(python, folder) as (gateway, _), httpx.AsyncClient(trust_env=False) as client:
        for _ in range(40):
            await client.post(f"{gateway.url}/v1/chat/completions", json=body)
        await asyncio.sleep(WINDOW_S)
        async with gateway.recorded() as idle:
            pass
        chats = []
        for _ in range(CHATS):
            async with gateway.recorded() as calls:
                await client.post(f"{gateway.url}/v1/chat/completions", json=body)
            chats.append(calls)
        return idle, min(chats, key=lambda calls: len(modules(calls)))


async def event_batch(python: str, folder: Path) -> tuple[list[str], list[str]]:
    """Calls of an idle gateway, and of one batch with one block whose parent is known."""
    flags = ("--strategy", "kvaware")
    async with (
        fleet(python, folder, *flags) as (gateway, worker),
        httpx.AsyncClient(trust_env=False) as client,
    ):

        async def compute(blocks: int) -> None:
            prompt = [place % 900 for place in range(16 * blocks + 1)]
            body = {"model": "sim-model", "prompt": prompt, "max_tokens": 1}
            (await client.post(f"{worker}/v1/completions", json=body)).raise_for_status()

        for blocks in range(1, 6):
            await compute(blocks)
            await asyncio.sleep(WINDOW_S)
        async with gateway.recorded() as idle:
            pass
        async with gateway.recorded() as calls:
            await compute(6)
        return idle, calls


def modules(calls: list[str]) -> list[str]:
    return list(dict.fromkeys(call.partition(":")[0] for call in calls))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter of the checkout to measure")
    parser.add_argument("--json", action="store_true", help="also print the calls")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "warm streamed chat": asyncio.run(warm_chat(options.python, Path(folder))),
            "single-block event batch": asyncio.run(event_batch(options.python, Path(folder))),
        }
    for name, (idle, calls) in runs.items():
        passed = modules(calls)
        rooms = len({path.split("/")[0] for path in passed})
        changes = sum(a.partition(":")[0] != b.partition(":")[0] for a, b in pairwise(calls))
        print(
            f"{name}: {len(passed)} modules in {rooms} rooms, {len(calls)} calls, {changes} module changes"
            f" (1fd48c2: {BASE[name][0]} modules, {BASE[name][1]} calls); idle: {len(modules(idle))}"
        )
        for path in passed:
            print(f"    {path}")
        if options.json:
            print(json.dumps({"idle": idle, "calls": calls}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
