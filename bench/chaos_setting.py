"""The processes of the chaos run: simulated workers, Redis and gateways, with the files that they read."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from redis.asyncio import Redis

START_S = 240.0
"""The longest wait for a start and for a reload: a machine may be very busy."""
WORKERS = 7
PROCESSES = 3
KEYS = ["sk-chaos-a", "sk-chaos-b", "sk-chaos-c"]
ADMIN_KEY = "admin-key-of-chaos"
SHARING_KEY = "chaos-sharing-key-of-all-members"


LOADED = "the configuration is loaded again; changed"
REFUSED = "the configuration is refused"
"""Begins of the gateway's log lines."""
INVALID = (
    "retries:\n  budget_procent: 1\n",  # no such option
    "upstream: {keepalive_s: -1}\n",
    "server: {port: 1}\n",  # needs a restart
    "fleet: [\n",
    "",  # no workers
)


def free_ports(count: int) -> list[int]:
    """Free ports that the kernel does not give to clients, so that none is taken while a child is dead."""
    found: list[int] = []
    for port in random.sample(range(10_000, 32_000), 2_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")


@dataclass(slots=True)
class Child:
    """A process that this script starts again on the same ports. Mutable: the process."""

    command: Sequence[str]
    log: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as output:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", "KVROUTE__ADMIN__API_KEY": ADMIN_KEY}
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdout=output, stderr=output, env=environment
            )

    def send_signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self, number: int = signal.SIGKILL) -> None:
        self.send_signal(number)
        if self.process is not None:
            try:
                async with asyncio.timeout(20):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()


@dataclass(slots=True)
class Killed:
    """A gateway process that was killed; times of the event loop. Mutable: `gone_s`, infinite at first."""

    at_s: float
    gone_s: float = math.inf
    """When its sockets were closed."""

    def ended(self, sent_s: float, now: float, notice_s: float) -> bool:
        """Whether a request that was sent and has failed at these times may have been inside the process."""
        return sent_s <= self.gone_s and self.at_s <= now <= self.gone_s + notice_s


def has_sockets(pid: int) -> bool:
    """Whether a thread of a process still runs: the last one that ends closes the sockets."""
    try:
        states = [
            file.read_text().rpartition(")")[2].split()[0]
            for file in Path(f"/proc/{pid}/task").glob("*/stat")
        ]
    except (FileNotFoundError, ProcessLookupError):  # a thread, or all of them, ended meanwhile
        return Path(f"/proc/{pid}/task").exists()
    return any(state not in ("Z", "X") for state in states)


@dataclass(slots=True)
class Setting:
    """Everything that runs. Mutable: children restart, `kills` and `problems` grow, the files change."""

    folder: Path
    ports: list[int]
    workers: list[Child]
    redis: Child
    gateway: Child
    port: int
    control: httpx.AsyncClient
    """A client of the workers' control APIs."""
    config: dict[str, dict[str, Any]]
    """The gateway's configuration, without later changes."""
    sequences: int
    """Requests at a time of one worker."""
    redis_port: int
    neighbour: Child
    """Another gateway of the fleet, of one process, to which no traffic goes."""
    neighbour_url: str
    problems: list[str] = field(default_factory=list)
    kills: list[Killed] = field(default_factory=list)
    lethal: list[Killed] = field(default_factory=list)
    """From the first try of a request that kills workers until they are started again."""
    faults: list[str] = field(default_factory=list)
    ended_s: float = 0.0
    """When the last fault ended, or the traffic without faults."""
    generation: int = 0
    budget_percent: float = 0.0
    """`retries.budget_percent` of the last valid configuration: another one each time."""

    def url(self, worker: int) -> str:
        return f"http://127.0.0.1:{self.ports[worker]}"

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> dict[str, str]:
        return {"authorization": f"Bearer {ADMIN_KEY}"}

    def redis_client(self) -> Redis:
        return Redis(port=self.redis_port)

    async def ask(self, body: dict[str, Any]) -> httpx.Response:
        """Send a completion of the first client on a connection of its own."""
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            headers = {"authorization": f"Bearer {KEYS[0]}"}
            return await client.post(f"{self.gateway_url}/v1/completions", json=body, headers=headers)

    def begun(self) -> Counter[str]:
        """How often a worker has begun to compute each request, by the request's id."""
        found = Counter[str]()
        for worker in self.workers:
            found.update(re.findall(r"begins request '(.*)'", worker.log.read_text(errors="replace")))
        return found

    def peak_mb(self) -> int:
        """The most memory that a living process of the gateway has had."""
        peaks = [0]
        for pid in self.process_ids():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                peaks += [int(found) // 1024 for found in re.findall(r"VmHWM:\s+(\d+) kB", status)]
        return max(peaks)

    def write_workers(self, without: int | None = None) -> None:
        listed = [{"id": f"w{n}", "url": self.url(n)} for n in range(WORKERS) if n != without]
        replace_file(self.folder / "workers.yaml", yaml.safe_dump({"workers": listed}))

    def write_keys(self) -> None:
        """All keys, each with one more hash, which is another one each time."""
        self.generation += 1
        entries = [
            {"name": key[3:], "hash": [key_hash(key), key_hash(f"{key}-{self.generation}")]} for key in KEYS
        ]
        replace_file(self.folder / "keys.yaml", yaml.safe_dump({"keys": entries}))

    def write_config(self, strategy: str | None = None) -> None:
        """A configuration that differs from the one before; `strategy` in the place of the configured one."""
        self.generation += 1
        self.budget_percent = 20.0 + self.generation / 100
        config = {section: dict(options) for section, options in self.config.items()}
        config["retries"]["budget_percent"] = self.budget_percent
        config["upstream"]["keepalive_s"] = 3.0 + self.generation % 2
        config["admission"]["max_waiting"] = 512 + self.generation % 2
        if strategy is not None:
            config["routing"]["strategy"] = strategy
        replace_file(self.folder / "config.yaml", yaml.safe_dump(config))

    def write_invalid_config(self) -> None:
        """One of `INVALID`, another one each time."""
        replace_file(self.folder / "config.yaml", INVALID[self.generation % len(INVALID)])

    async def reload(self, outcome: str) -> None:
        """Send SIGHUP and wait for the line `outcome` in the gateway's log. Without it there is a problem."""
        log = self.folder / "gateway.log"
        before = log.read_text(errors="replace").count(outcome)
        self.gateway.send_signal(signal.SIGHUP)

        async def is_logged() -> bool:
            return log.read_text(errors="replace").count(outcome) > before

        if await until(is_logged, START_S) is None:
            self.problems.append(f"after SIGHUP there is no line {outcome!r} in the log")

    async def start_worker(self, worker: int) -> None:
        """Start a worker that was killed, and wait until it answers."""
        await self.workers[worker].start()

        async def answers() -> bool:
            return (await self.control.get(f"{self.url(worker)}/health")).is_success

        await until(answers, START_S)

    async def fault(self, worker: int, **fields: Any) -> None:
        await self.control.post(f"{self.url(worker)}/sim/faults", json=fields)

    async def no_fault(self, worker: int) -> None:
        await self.control.delete(f"{self.url(worker)}/sim/faults")

    def keep_log(self) -> None:
        """Copy the gateway's log to the file that CHAOS_LOG names, if it is set."""
        if kept := os.environ.get("CHAOS_LOG"):
            shutil.copy(self.folder / "gateway.log", kept)

    def process_ids(self) -> list[int]:
        """The present gateway processes, without their parent."""
        text = (self.folder / "gateway.log").read_text(errors="replace")
        newest = dict(re.findall(r"process (\d) of \d has pid (\d+)", text))
        return [int(newest[number]) for number in sorted(newest)]


def error_code(answer: httpx.Response) -> str | None:
    """The code of an error object; None if there is none."""
    try:
        code: str = answer.json()["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None
    return code


def replace_file(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def key_hash(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@asynccontextmanager
async def setting(strategy: str, sequences: int) -> AsyncIterator[Setting]:
    """Start workers, Redis and the gateway; the context begins when all workers are healthy."""
    redis_server = shutil.which("redis-server")
    if redis_server is None:
        raise SystemExit("the chaos run needs redis-server (Debian: apt install redis-server)")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        port, redis_port, neighbour_port, *ports = free_ports(3 + 3 * WORKERS)
        ports, event_ports, replay_ports = (ports[start::3] for start in range(3))
        kvroute = [sys.executable, "-m", "kvroute"]
        workers = [
            Child(
                [
                    *(*kvroute, "sim", "--port", str(each), "--max-sequences", str(sequences)),
                    *("--event-endpoint", f"tcp://127.0.0.1:{events}"),
                    *("--replay-endpoint", f"tcp://127.0.0.1:{replay}"),
                    "--log-requests",
                ],
                folder / f"worker-{each}.log",
            )
            for each, events, replay in zip(ports, event_ports, replay_ports, strict=True)
        ]
        redis = Child(
            [
                redis_server,
                "--port",
                str(redis_port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--dir",
                str(folder),
            ],
            folder / "redis.log",
        )
        config: dict[str, dict[str, Any]] = {
            "server": {
                "port": port,
                "processes": PROCESSES,
                "client_keys": {"file": str(folder / "keys.yaml"), "reload_interval_s": 0.5},
            },
            "fleet": {
                "file": str(folder / "workers.yaml"),
                "file_poll_s": 0.3,
                "health": {"metrics_interval_s": 1.0},
            },
            "routing": {"strategy": strategy},
            # A bound in each process: a worker's requests may wait in the gateway, too.
            "admission": {"max_concurrent": 2 * sequences, "max_wait_s": 15.0},
            "tokens": {"timeout_ms": 1000.0},
            "kv_events": {"idle_check_s": 0.5, "probe": {"interval_s": 0.5}},
            "sharing": {"url": f"redis://127.0.0.1:{redis_port}/0", "key": SHARING_KEY, "fleet": "chaos"},
            "lmcache": {"l2": {"redis_url": f"redis://127.0.0.1:{redis_port}/0"}},
            "upstream": {"first_byte_timeout_s": 20.0, "idle_timeout_s": 20.0},
            "retries": {"statuses": [500, 503]},
        }
        gateway = Child([*kvroute, "serve", "--config", str(folder / "config.yaml")], folder / "gateway.log")
        neighbour = Child(
            [
                *(*kvroute, "serve", "--config", str(folder / "config.yaml")),
                *("--port", str(neighbour_port), "--processes", "1"),
            ],
            folder / "neighbour.log",
        )
        control = await stack.enter_async_context(httpx.AsyncClient(timeout=10, trust_env=False))
        made = Setting(
            folder,
            ports,
            workers,
            redis,
            gateway,
            port,
            control,
            config,
            sequences,
            redis_port,
            neighbour,
            f"http://127.0.0.1:{neighbour_port}",
        )
        made.write_config()
        made.write_workers()
        made.write_keys()
        for child in (*workers, redis):
            stack.push_async_callback(child.kill)
            await child.start()
        for child, processes in ((gateway, PROCESSES), (neighbour, 1)):
            await child.start()
            stack.push_async_callback(child.kill, signal.SIGTERM)
            await until_ready(child, processes, WORKERS)
        yield made


async def until(condition: Callable[[], Awaitable[bool]], within_s: float) -> float | None:
    """Poll four times a second; returns the seconds until the condition was true, None if it was not."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() - began < within_s:
        with contextlib.suppress(httpx.HTTPError):
            if await condition():
                return loop.time() - began
        await asyncio.sleep(0.25)
    return None


async def until_ready(gateway: Child, processes: int, workers: int) -> None:
    """Wait until each of the gateway's processes logs that it accepts connections and that all workers are
    healthy. Raises RuntimeError."""
    opened = "accepts connections" if processes > 1 else "listens on"

    async def is_ready() -> bool:
        text = gateway.log.read_text(errors="replace")
        if gateway.process is None or gateway.process.returncode is not None:
            raise RuntimeError(f"the gateway did not start:\n{text[-2000:]}")
        return text.count(opened) >= processes and text.count("is healthy") >= processes * workers

    if await until(is_ready, START_S) is None:
        raise RuntimeError(f"not all workers are healthy after {START_S:g} s")
