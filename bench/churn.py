"""Let workers, sessions and keys come and go for half an hour; measure what stays in the gateway.

    python bench/churn.py [--seconds 1800] [--from 300] [--processes 1] [--output FILE]

Simulated workers with small caches publish KV events to a gateway with exact tokens, named keys and a queue.
Every few seconds one worker process is killed and started again under another id and port, a worker moves to
another address, a tenth of the keys gets new names, and every half a minute the configuration is loaded again
with other connection pools. Clients send what they may send: streams that they leave, new sessions, unknown
models, wrong keys, bodies that are no JSON. The index, the map and the sessions reach their limits in the
first minutes, the queue's accounts of keys before. Everything is on 127.0.0.0/8.

The exit code is 1 if a bound is missed:

- Memory: the slope of a line through the resident memory from `--from` seconds on is below 1 MB per 10
  minutes. All gateway processes count.
- Tasks, sockets and descriptors of the idle gateway are not more than after a first minute of the same
  traffic.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml

from chaos_setting import (
    LOADED,
    START_S,
    Child,
    free_ports,
    key_hash,
    replace_file,
    until,
    until_ready,
)
from chaos_traffic import MODEL, words

LIVE = 4
"""Workers at a time."""
CLIENTS = 12
NAMES = 500
"""Keys at a time; `_NEW` of them get another name at each change."""
NEW = 50
FIRST_NAMES = 4_200
"""Keys that send one request each before anything is measured: the accounts of the queue (4,096) are full."""
SAMPLE_S = 10.0
WARM_S = 60.0
IDLE_S = 120.0
"""The longest wait for the idle gateway: it keeps connections to workers for some seconds."""
IDLE_SAMPLES = 15
SETTLE_S = 15.0
LEAST_POINTS = 3
BOUND_MB = 1.0
"""Per ten minutes."""


@dataclass(slots=True)
class Held:
    """What the gateway holds at one moment."""

    tasks: int
    sockets: int
    descriptors: int
    memory_mb: float


@dataclass(slots=True)
class Setting:
    """What runs. Mutable: workers, keys and the configuration change all the time."""

    folder: Path
    port: int
    gateway: Child
    ports: list[int]
    random: Random
    http: httpx.AsyncClient
    workers: list[tuple[Child, int, int]] = field(default_factory=list)
    """Process, port, and the number in its id; both are new after each start."""
    names: list[str] = field(default_factory=list)
    made: int = 0
    version: int = 0
    """Of the configuration."""
    changes: Counter[str] = field(default_factory=Counter)

    async def start_worker(self) -> None:
        port, events, replay = (self.ports.pop() for _ in range(3))
        self.ports[:0] = [port, events, replay]  # used again when all others were
        child = Child(
            [
                *(sys.executable, "-m", "kvroute", "sim", "--port", str(port), "--time-scale", "0.05"),
                *("--capacity-tokens", "48000", "--event-endpoint", f"tcp://127.0.0.1:{events}"),
                *("--replay-endpoint", f"tcp://127.0.0.1:{replay}", "--record-requests", "0"),
            ],
            self.folder / "workers.log",
        )
        await child.start()
        self.made += 1
        self.workers.append((child, port, self.made))

    def write_workers(self) -> None:
        listed = [{"id": f"w{number}", "url": f"http://127.0.0.1:{port}"} for _, port, number in self.workers]
        replace_file(self.folder / "workers.yaml", yaml.safe_dump({"workers": listed}))

    async def replace_worker(self) -> None:
        """Half of the time the worker dies before the gateway learns that it leaves."""
        child, _, _ = self.workers.pop(0)
        await self.start_worker()
        if self.random.random() < 0.5:
            await child.kill()
            self.write_workers()
        else:
            self.write_workers()
            await asyncio.sleep(2.0)
            await child.kill()
        self.changes["workers"] += 1

    async def rename_worker(self) -> None:
        """A worker gets another id; its engine stays."""
        place = self.random.randrange(len(self.workers))  # one may be starting
        child, port, _ = self.workers[place]
        self.made += 1
        self.workers[place] = child, port, self.made
        self.write_workers()
        self.changes["ids"] += 1

    async def change_keys(self) -> None:
        self.made += 1
        del self.names[:NEW]
        self.names += [f"key-{self.made}-{number}" for number in range(NAMES - len(self.names))]
        await self.write_keys()
        self.changes["keys"] += 1

    async def fill(self) -> None:
        """Send a request with each of `FIRST_NAMES` keys."""
        names = [f"key-0-{number}" for number in range(FIRST_NAMES)]
        others, self.names = self.names, names
        await self.write_keys()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        body = {"model": MODEL, "max_tokens": 1, "prompt": "one"}
        places = iter(names)

        async def is_known() -> bool:
            answer = await self.http.post(url, json=body, headers={"authorization": f"Bearer {names[-1]}"})
            return answer.status_code == 200

        async def send() -> None:
            for name in places:
                await self.http.post(url, json=body, headers={"authorization": f"Bearer {name}"})

        if await until(is_known, START_S) is None:
            raise RuntimeError("the first keys are not loaded")
        await asyncio.gather(*(send() for _ in range(CLIENTS)))
        self.names = others
        await self.write_keys()

    async def write_keys(self) -> None:
        limits = {"requests_per_minute": 100_000, "tokens_per_minute": 100_000_000}
        entries = [{"name": name, "hash": key_hash(name), "limits": limits} for name in self.names]
        await asyncio.to_thread(replace_file, self.folder / "keys.yaml", json.dumps({"keys": entries}))

    async def change_config(self) -> None:
        self.version += 1
        replace_file(self.folder / "config.yaml", yaml.safe_dump(self.config()))
        log = self.folder / "gateway.log"
        size = log.stat().st_size
        self.gateway.send_signal(signal.SIGHUP)

        async def is_loaded() -> bool:
            return LOADED in (await asyncio.to_thread(log.read_bytes))[size:].decode(errors="replace")

        if await until(is_loaded, 60.0) is None:
            raise RuntimeError("a changed configuration is not loaded")
        self.changes["configurations"] += 1

    def config(self) -> dict[str, Any]:
        count = self.version
        return {
            "server": {
                "port": self.port,
                "processes": self.processes,
                "allow_strategy_header": True,
                "client_keys": {"file": str(self.folder / "keys.yaml"), "reload_interval_s": 0.5},
                "decisions_kept": 200,
            },
            "fleet": {
                "file": str(self.folder / "workers.yaml"),
                "file_poll_s": 0.3,
                "health": {"metrics_interval_s": 2.0, "burst_failures": 50},
                "aliases": {f"alias-{count}": MODEL},
            },
            "routing": {"strategy": "kvaware", "session": {"remembered": 1000}},
            "admission": {"max_concurrent": 64 + count % 2},
            "kv_events": {"max_index_blocks": 6000, "probe": {"interval_s": 1.0}},
            "upstream": {"keepalive_s": 3.0 + count % 2},
            "logging": {"requests": False},
        }

    processes: int = 1

    def pids(self) -> list[int]:
        assert self.gateway.process is not None
        pid = self.gateway.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def memory_mb(self) -> float:
        return sum(_status_kb(pid, "VmRSS") for pid in self.pids()) * 1024 / 1e6

    async def held(self) -> Held:
        page = (await self.http.get(f"http://127.0.0.1:{self.port}/metrics")).text
        tasks = sum(float(line.split()[1]) for line in page.splitlines() if line.startswith("kvroute_tasks "))
        links = [link for pid in self.pids() for link in _links(pid)]
        sockets = sum(link.startswith("socket:") for link in links)
        return Held(int(tasks), sockets, len(links), round(self.memory_mb(), 2))

    async def idle(self, like: Held | None = None) -> Held:
        """The most that the gateway holds without requests, half a minute after all workers are healthy; or
        what it holds as soon as that is not more than `like`."""
        # Its connections for probes come and go also while it is idle.
        if await until(self.are_healthy, START_S) is None:
            raise RuntimeError(f"not all workers are healthy after {START_S:g} s")
        await asyncio.sleep(2 * SETTLE_S)
        loop = asyncio.get_running_loop()
        found = await self.held()
        if like is None:
            for _ in range(IDLE_SAMPLES):
                await asyncio.sleep(1.0)
                found = most(found, await self.held())
            return found
        end = loop.time() + IDLE_S
        while exceeding(like, found) and loop.time() < end:
            await asyncio.sleep(1.0)
            found = await self.held()
        return found

    async def are_healthy(self) -> bool:
        page = (await self.http.get(f"http://127.0.0.1:{self.port}/metrics")).text
        rows = [line for line in page.splitlines() if line.startswith("kvroute_worker_state{")]
        healthy = [line for line in rows if 'state="healthy"' in line]
        return len(healthy) == LIVE and all(line.endswith(" 1.0") for line in healthy)


def most(one: Held, other: Held) -> Held:
    return Held(*(max(pair) for pair in zip(astuple(one), astuple(other), strict=True)))


def exceeding(before: Held, after: Held) -> list[str]:
    names = ("tasks", "sockets", "descriptors")
    return [
        f"{getattr(after, name)} {name} after the churn, {getattr(before, name)} before"
        for name in names
        if getattr(after, name) > getattr(before, name)
    ]


def _links(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def _status_kb(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise LookupError(name)


def slope_mb(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the least-squares line through (seconds, MB), in MB per ten minutes."""
    mean_s = sum(at for at, _ in points) / len(points)
    mean_mb = sum(mb for _, mb in points) / len(points)
    spread = sum((at - mean_s) ** 2 for at, _ in points)
    return 600 * sum((at - mean_s) * (mb - mean_mb) for at, mb in points) / spread


# --- traffic ----------------------------------------------------------------------------------------------


async def client(made: Setting, random: Random, ends: Counter[str]) -> None:
    """Send requests one after another, a few on each connection, until cancelled."""
    while True:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{made.port}", timeout=60, trust_env=False
        ) as http:
            for _ in range(random.randrange(1, 12)):
                try:
                    ends[await request(made, http, random)] += 1
                except httpx.HTTPError as error:
                    ends[type(error).__name__] += 1
                await asyncio.sleep(random.expovariate(5.0))


async def request(made: Setting, http: httpx.AsyncClient, random: Random) -> str:
    kind = random.random()
    key = random.choice(made.names) if kind > 0.03 else words(random, 2)
    headers = {"authorization": f"Bearer {key}", "x-session-id": words(random, 1)}
    headers["x-kvroute-strategy"] = random.choice(("kvaware", "kvaware", "prefixaware", "session"))
    if random.random() < 0.1:
        headers[f"x-other-{words(random, 1)}"] = "1"
    streamed = random.random() < 0.5
    model = MODEL if kind < 0.95 else words(random, 1)
    body: dict[str, Any] = {"model": model, "max_tokens": random.choice((2, 8, 30)), "stream": streamed}
    path, text = "/v1/chat/completions", words(random, random.choice((20, 150, 500)))
    if kind < 0.2:
        path, body["prompt"] = "/v1/completions", text
    elif kind < 0.3:
        path, body["input"] = "/v1/responses", text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    if random.random() < 0.1:
        body["cache_salt"] = words(random, 1)
    content = json.dumps(body)[: None if kind < 0.98 else -10].encode()
    headers["content-type"] = "application/json"
    leaves = streamed and random.random() < 0.1
    async with http.stream("POST", path, content=content, headers=headers) as answer:
        async for _ in answer.aiter_raw():
            if leaves:
                return "left"
    return str(answer.status_code)


async def every(seconds: float, change: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
    """Make changes until `stop`. A change that has begun ends: half of one could leave a worker unlisted."""
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await stop.wait()
                return
        await change()


@asynccontextmanager
async def churning(
    made: Setting, seed: int, ends: Counter[str], rates: float
) -> AsyncIterator[asyncio.Task[None]]:
    stop = asyncio.Event()
    clients = [asyncio.create_task(client(made, Random(seed + n), ends)) for n in range(CLIENTS)]
    changes = [
        asyncio.create_task(every(seconds / rates, change, stop))
        for seconds, change in (
            (20.0, made.replace_worker),
            (7.0, made.rename_worker),
            (10.0, made.change_keys),
            (30.0, made.change_config),
        )
    ]
    failed = asyncio.create_task(_first_failure(changes))
    try:
        yield failed
    finally:
        stop.set()
        for task in (*clients, failed):
            task.cancel()
        await asyncio.gather(*clients, *changes, failed, return_exceptions=True)


async def _first_failure(tasks: Sequence[asyncio.Task[None]]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


@asynccontextmanager
async def setting(seed: int, processes: int) -> AsyncIterator[Setting]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        port, *ports = free_ports(1 + 3 * 40)
        gateway = Child(
            [sys.executable, "-m", "kvroute", "serve", "--config", str(folder / "config.yaml")],
            folder / "gateway.log",
        )
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        made = Setting(folder, port, gateway, ports, Random(seed), http, processes=processes)
        stack.push_async_callback(_kill_all, made)
        for _ in range(LIVE):
            await made.start_worker()
        made.write_workers()
        await made.change_keys()
        replace_file(folder / "config.yaml", yaml.safe_dump(made.config()))
        await gateway.start()
        stack.push_async_callback(gateway.kill, signal.SIGTERM)
        await until_ready(gateway, processes, LIVE)
        yield made


async def _kill_all(made: Setting) -> None:
    for child, _, _ in made.workers:
        await child.kill()


# --- measurement ------------------------------------------------------------------------------------------


async def measure(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Returns the missed bounds, and all figures."""
    ends: Counter[str] = Counter()
    points: list[tuple[float, float]] = []
    async with setting(options.seed, options.processes) as made:
        await made.fill()
        async with churning(made, options.seed + 1000, ends, 2.0):
            await asyncio.sleep(min(WARM_S, options.seconds / 4))
        before = await made.idle()
        print(f"before: {before}", file=sys.stderr, flush=True)
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with churning(made, options.seed, ends, options.rate) as failed:
            while loop.time() - began < options.seconds:
                await asyncio.wait([failed], timeout=SAMPLE_S)
                if failed.done():  # a part of the churn has failed: raises
                    failed.result()
                points.append((loop.time() - began, made.memory_mb()))
                if len(points) % 6 == 0:
                    print(
                        f"{points[-1][0]:7.0f} s  {points[-1][1]:.2f} MB  {sum(ends.values())} requests",
                        file=sys.stderr,
                        flush=True,
                    )
        after = await made.idle(before)
        changes, log = dict(made.changes), (made.folder / "gateway.log").read_text(errors="replace")
    judged = [point for point in points if point[0] >= options.start]
    found = {
        "seconds": options.seconds,
        "processes": options.processes,
        "requests": dict(ends),
        "changes": changes,
        "before": asdict(before),
        "after": asdict(after),
        "mb_per_10_minutes": None if len(judged) < LEAST_POINTS else round(slope_mb(judged), 3),
        "memory_mb": [(round(at, 1), round(mb, 2)) for at, mb in points],
        "tracebacks": log.count("Traceback"),
    }
    problems = exceeding(before, after)
    if ends["200"] < sum(ends.values()) / 2:
        problems.append(f"less than half of the requests succeeded: {dict(ends)}")
    if found["mb_per_10_minutes"] is None:
        print("the memory is not judged: the run is shorter than --from", file=sys.stderr)
    slope = found["mb_per_10_minutes"]
    if slope is not None and slope >= BOUND_MB:
        problems.append(f"memory grows by {slope} MB per 10 minutes")
    if found["tracebacks"]:
        problems.append(f"{found['tracebacks']} tracebacks in the gateway's log")
    return problems, found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--from", dest="start", type=float, default=300.0, help="the slope begins here")
    parser.add_argument("--rate", type=float, default=1.0, help="changes happen this many times as often")
    parser.add_argument("--processes", type=int, default=1, help="gateway processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write all figures to this JSON file")
    return parser


def main() -> None:
    options = arguments().parse_args()
    problems, found = asyncio.run(measure(options))
    if options.output is not None:
        options.output.write_text(json.dumps({**found, "problems": problems}, indent=1) + "\n")
    for name, value in found.items():
        if name != "memory_mb":
            print(f"{name}: {value}")
    for problem in problems:
        print(f"missed: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
