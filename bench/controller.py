"""Run LMCache's own `controller_benchmark` against kvroute's controller and against LMCache's, alternating.

    python bench/controller.py [--engine .venv-engine] [--runs 5] [--seconds 8] [--output FILE]

For each operation mix the output has the median of requests per second for both controllers, and the ratio
(the sender's figure, as in the benchmark). CPU is the controller's CPU per request. `behind` is the time
between the end of the benchmark and the moment when kvroute's controller has applied all messages. `missing`
messages never arrived: at its end the client drops the messages that its socket still holds, which are none
while the controller keeps up.

Both controllers run during the whole benchmark, each in its own process; one is idle while the other is
measured. The client uses up to one core, and so does the measured controller: two free cores are needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import DEFAULT_PATH, EngineVenv, separate_environment
from kvroute.deploy.prepare import free_ports
from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.listeners import ControllerSockets
from kvroute.lmcache.options import ControllerOptions

MIXES = (
    "admit:100",
    "p2p_lookup:100",
    "admit:35,evict:29,heartbeat:1,p2p_lookup:35",
    "admit:70,evict:25,heartbeat:5",
)
KINDS = ("lmcache", "kvroute")
SOCKETS = ("pull", "reply", "heartbeat")
KEYS = 100_000
INSTANCES = 10
READY_S = 120.0


@contextmanager
def process(argv: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the block ends."""
    child = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.terminate()
        child.wait()


async def serve(addresses: dict[str, str], report: Path) -> None:
    """Run kvroute's controller; write the number of applied messages to a file ten times a second."""
    index, clock = ChunkIndex(), SystemClock()
    options = ControllerOptions.model_validate(addresses)
    controller = Controller(index, clock, options)
    for slot in range(INSTANCES):
        controller.add_slot(slot, f"instance_p0_{slot}")
    sockets = ControllerSockets(controller, clock, options)
    serving = asyncio.create_task(sockets.run())
    await sockets.wait_until_serving()
    counts, written, draft = controller.counts, -1, report.with_suffix(".new")
    while not serving.done():
        if counts.messages != written:
            written = counts.messages
            errors = counts.unreadable + counts.failed + counts.gaps + counts.unplaced + counts.duplicates
            draft.write_text(json.dumps({"at": clock.wall(), "messages": written, "errors": errors}))
            draft.rename(report)
        await asyncio.sleep(0.1)


def ours(ports: dict[str, int], report: Path) -> list[str]:
    addresses = {name: f"127.0.0.1:{ports[name]}" for name in SOCKETS}
    return [sys.executable, __file__, "--serve", json.dumps(addresses), "--report", str(report)]


def lmcaches(ports: dict[str, int], engine: EngineVenv) -> list[str]:
    monitored = json.dumps({name: ports[name] for name in SOCKETS})
    argv = [str(engine.python), "-m", "lmcache.v1.api_server", "--host", "127.0.0.1"]
    argv += ["--port", str(ports["http"]), "--monitor-ports", monitored]
    return [*argv, "--lmcache-worker-timeout", "100", "--health-check-interval", "10"]


def listening(port: int) -> bool:
    """Whether a process of this machine listens on a TCP port (Linux)."""
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    return re.search(f":{port:04X} [0-9A-F]+:0000 0A ", tables) is not None


def cpu_s(pid: int) -> float:
    """CPU time that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Running:
    """A controller that listens."""

    kind: str
    pid: int
    ports: dict[str, int]


@contextmanager
def running(kind: str, engine: EngineVenv, report: Path) -> Iterator[Running]:
    ports = dict(zip((*SOCKETS, "http"), free_ports(4), strict=True))
    own = kind == "kvroute"
    argv = ours(ports, report) if own else lmcaches(ports, engine)
    with process(argv, dict(os.environ) if own else separate_environment(os.environ)) as child:
        # LMCache's controller binds long before it listens; its HTTP server starts last.
        awaited = [ports[name] for name in (SOCKETS if own else ports)]
        deadline = time.monotonic() + READY_S
        while not all(map(listening, awaited)):
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{kind} does not start: {' '.join(argv)}")
            time.sleep(0.1)
        yield Running(kind, child.pid, ports)


def run(at: Running, mix: str, seconds: int, engine: EngineVenv, report: Path) -> dict[str, Any]:
    """Run the benchmark once."""
    own = at.kind == "kvroute"
    before = json.loads(report.read_text()) if own else {}
    idle_s = cpu_s(at.pid)
    monitored = json.dumps({name: at.ports[name] for name in ("pull", "reply")})
    command = [str(engine.python), "-m", "lmcache.tools.controller_benchmark"]
    command += ["--controller-host", "127.0.0.1", "--monitor-ports", monitored]
    command += ["--num-instances", str(INSTANCES), "--num-workers", "1", "--num-keys", str(KEYS)]
    command += ["--batch-size", "100", "--duration", str(seconds), "--operations", mix]
    env = separate_environment(os.environ)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds + READY_S)
    ended = time.time()
    time.sleep(2.5)
    found = read_report(done.stdout)
    if done.returncode or not found["requests_per_s"]:
        raise SystemExit(f"controller_benchmark against {at.kind} failed: {done.stderr[-2000:]}")
    found["cpu_us"] = round((cpu_s(at.pid) - idle_s) / max(1, found["requests"]) * 1e6, 1)
    if own:
        after = json.loads(report.read_text())
        # The benchmark does not count registrations and deregistrations as requests.
        missing = found["requests"] + 2 * INSTANCES - (after["messages"] - before["messages"])
        found |= {"behind_s": max(0.0, after["at"] - ended), "missing": missing}
        found["errors"] += after["errors"] - before["errors"]
    return found


def read_report(text: str) -> dict[str, Any]:
    def number(pattern: str) -> float:
        found = re.search(pattern, text)
        return float(found[1]) if found else 0.0

    return {
        "requests": int(number(r"Total Requests: (\d+)")),
        "requests_per_s": number(r"Overall RPS \(Requests/sec\): ([\d.]+)"),
        "errors": sum(map(int, re.findall(r"Errors: (\d+)", text))),
    }


def compare(mix: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Print and return medians and their ratio."""
    speed, cpu = (
        {kind: statistics.median(each[figure] for each in runs[kind]) for kind in runs}
        for figure in ("requests_per_s", "cpu_us")
    )
    result = {
        "requests_per_s": speed,
        "cpu_us_per_request": cpu,
        "ratio": round(speed["kvroute"] / speed["lmcache"], 3),
        "errors": sum(each["errors"] for each in runs["kvroute"]),
        "missing": sum(each["missing"] for each in runs["kvroute"]),
        "behind_s": round(max(each["behind_s"] for each in runs["kvroute"]), 2),
        "runs": runs,
    }
    print(f"{mix}: {result['ratio']:.3f} of LMCache's requests/s")
    for kind in runs:
        print(f"    {kind:8} {speed[kind]:7.0f} requests/s, {cpu[kind]:4.0f} us CPU of the controller each")
    print(
        f"    errors {result['errors']}, missing {result['missing']}, behind by {result['behind_s']:.2f} s",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--mix", action="append", help="only this mix; repeatable")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve, arguments.report))
        return
    engine = EngineVenv.at(arguments.engine)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        report = Path(stack.enter_context(TemporaryDirectory())) / "counts.json"
        controllers = [stack.enter_context(running(kind, engine, report)) for kind in KINDS]
        for mix in arguments.mix or MIXES:
            runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
            for turn in range(arguments.runs):
                # The order alternates as well.
                for each in controllers if turn % 2 else reversed(controllers):
                    runs[each.kind].append(run(each, mix, arguments.seconds, engine, report))
            results[mix] = compare(mix, runs)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
