"""Time to first token in real time through kvroute and other routers, with alternating runs.

    python bench/realtime.py [--routers prefixaware,sglang-router] [--requests 1200] [--runs 3] [--rate 10.5]

One process has seven simulated workers (GPU cache only) with the times of a 70B model. The load is the first
requests of the shared conversation trace, scaled in time, with streamed answers of at most 16 tokens. Each
block of the trace becomes 512 words of two letters and a blank, one token each for the simulated workers, so
requests that share blocks also share a text prefix. The routers are processes with their own defaults. Each
run starts new workers and a new router. The first 15% of the requests are sent but not counted. Router,
workers and load use about one core together. The rest of the machine should be idle; the printed CPU shows
whether it was.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from random import Random
from string import ascii_lowercase
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from comparison import (
    OURS,
    PEERS,
    PEERS_FOLDER,
    Answered,
    CpuWatch,
    Figures,
    figures,
    medians,
    request_streamed,
    running_router,
    table,
    verdicts,
    write_json,
)
from gateway_machine import describe
from gateway_routers import install_peers
from kvroute.clock import SystemClock
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from routing_workloads import BLOCK, TRACE

MODEL = "sim-model"
WORKERS = 7
ANSWER_TOKENS = 16
WARM_UP = 0.15
QUANTUM_S = 3.0
MOST_LATE_S = 0.25
"""Largest delay of a sound run. With a larger delay the machine was too busy."""
WORDS = tuple(f"{first}{second} " for first, second in product(ascii_lowercase, repeat=2))
"""Words of one token: the simulated tokenizer makes one token of three bytes."""
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Planned:
    """One request and its time of sending, in seconds from the start."""

    at_s: float
    body: bytes


def block_text(block: int) -> str:
    """512 words that depend only on the block's number in the trace."""
    return "".join(Random(block).choices(WORDS, k=BLOCK))


def prompt_text(blocks: Sequence[int], tokens: int) -> str:
    """A prompt of `tokens` words: the texts of its blocks; the last block is cut."""
    return "".join(map(block_text, blocks))[: 3 * tokens]


def request_body(prompt: str, endpoint: str) -> bytes:
    question = (
        {"prompt": prompt}
        if endpoint == "completions"
        else {"messages": [{"role": "user", "content": prompt}]}
    )
    settings = {"max_tokens": ANSWER_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({"model": MODEL, **question, **settings}).encode()


def trace_rows(count: int) -> Iterator[dict[str, Any]]:
    with gzip.open(TRACE, "rt") as lines:
        yield from map(json.loads, islice(lines, count))


def plan(rows: Sequence[dict[str, Any]], rate: float, seed: int, endpoint: str) -> list[Planned]:
    """The requests in order of time, `rate` per second on average; quanta of 3 s are spread evenly."""
    random = Random(seed)
    scale = len(rows) / (rows[-1]["timestamp"] / 1000 + QUANTUM_S) / rate
    planned = [
        Planned(
            (row["timestamp"] / 1000 + random.uniform(0.0, QUANTUM_S)) * scale,
            request_body(prompt_text(row["hash_ids"], row["input_length"]), endpoint),
        )
        for row in rows
    ]
    return sorted(planned, key=lambda one: one.at_s)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Answers in the order of sending; `late_s` is the largest delay of a request."""

    answers: list[Answered]
    late_s: float


async def replay(http: httpx.AsyncClient, url: str, planned: Sequence[Planned]) -> Replayed:
    began = time.perf_counter() + 0.2
    async with asyncio.TaskGroup() as group:
        tasks = []
        for one in planned:
            await asyncio.sleep(max(0.0, began + one.at_s - time.perf_counter()))
            tasks.append(group.create_task(request_streamed(http, url, one.body)))
    answers = [task.result() for task in tasks]
    late = max(answer.sent_s - began - one.at_s for answer, one in zip(answers, planned, strict=True))
    return Replayed(answers, late)


@asynccontextmanager
async def running_workers(folder: Path) -> Any:
    """Run the simulated workers; yields their URLs and their common process."""
    ports = free_ports(WORKERS)
    script = str(Path(__file__).parent / "realtime_workers.py")
    argv = (sys.executable, script, MODEL, *map(str, ports))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    spec = ChildSpec("workers", argv, dict(os.environ), folder / "workers.log")
    async with ChildProcess(spec, SystemClock()) as process:
        await process.wait_ready(f"{urls[-1]}/health", timeout_s=30.0)
        yield urls, process.pid


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one router. `imbalance` is the most prompt tokens that a worker computed, divided by the
    mean."""

    run: int
    router: str
    figures: Figures
    imbalance: float
    late_s: float
    cores: dict[str, float]
    errors: list[str]
    all_requests: Figures

    @property
    def is_sound(self) -> bool:
        return self.late_s <= MOST_LATE_S


async def measure(number: int, router: str, planned: Sequence[Planned], options: Any) -> Run:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            httpx.AsyncClient(limits=limits, timeout=600.0, trust_env=False) as http,
            running_workers(folder) as (urls, workers_pid),
            running_router(router, urls, http, model=MODEL, folder=folder, peers=options.peers) as started,
        ):
            watch = CpuWatch({"router": started.pid, "workers": workers_pid})
            done = await replay(http, started.url + PATHS[options.endpoint], planned)
            cores = watch.cores()
            computed = [(await http.get(f"{url}/sim/requests")).json()["computed_tokens"] for url in urls]
    counted = done.answers[int(WARM_UP * len(done.answers)) :]
    return Run(
        number,
        router,
        figures(counted),
        max(computed) * len(computed) / max(1, sum(computed)),
        done.late_s,
        cores,
        sorted({answer.error for answer in done.answers if answer.error})[:5],
        figures(done.answers),
    )


def line(run: Run) -> str:
    """The line to print after a run."""
    one, cores = run.figures, run.cores
    return (
        f"run {run.run + 1} {run.router:22} mean {one.mean:6.3f}  p50 {one.p50:6.3f}  p90 {one.p90:6.3f}  "
        f"p99 {one.p99:6.3f}  hit {one.hit:.3f}  imbalance {run.imbalance:.2f}  failed {one.failed:.0f}  "
        f"cores: router {cores['router']:.2f}, workers {cores['workers']:.2f}, load {cores['load']:.2f}, "
        f"machine {cores['machine']:.2f}  sent at most {1000 * run.late_s:.0f} ms late"
        f"{'' if run.is_sound else ' TOO LATE'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--routers", default=",".join((*OURS, *PEERS)), help="some of %(default)s, roundrobin"
    )
    parser.add_argument("--requests", type=int, default=1200, help="number of requests of the trace")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=10.5, help="requests per second")
    parser.add_argument("--endpoint", choices=PATHS, default="completions")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    parser.add_argument("--peers", type=Path, default=PEERS_FOLDER, help="folder of the other routers")
    parser.add_argument("--no-install", action="store_true", help="use only installed peers")
    options = parser.parse_args()

    versions, missing = install_peers(options.peers, allow_install=not options.no_install)
    routers = [name for name in options.routers.split(",") if name.split()[0] not in missing]
    for name in sorted(set(options.routers.split(",")) - set(routers)):
        print(f"{name} is skipped: {missing[name.split()[0]]}", file=sys.stderr)

    rows = list(trace_rows(options.requests))
    runs = []
    for number in range(options.runs):
        planned = plan(rows, options.rate, number, options.endpoint)
        for router in routers[number % len(routers) :] + routers[: number % len(routers)]:
            runs.append(asyncio.run(measure(number, router, planned, options)))
            print(line(runs[-1]), flush=True)
    of = {name: medians([run.figures for run in runs if run.router == name]) for name in routers}
    judged = verdicts(of)
    print("\nMedians of the runs, milliseconds", *table(of.items()), "", *map(str, judged), sep="\n")
    if unsound := sum(not run.is_sound for run in runs):
        print(f"{unsound} of {len(runs)} runs are not sound: the machine was too busy for the load")
    if options.output:
        settings = {name: getattr(options, name) for name in ("requests", "runs", "rate", "endpoint")} | {
            "workers": WORKERS,
            "answer_tokens": ANSWER_TOKENS,
            "warm_up": WARM_UP,
        }
        document = {
            "settings": settings,
            "machine": describe(),
            "versions": versions,
            "runs": [{**asdict(run), "sound": run.is_sound} for run in runs],
            "medians": of,
            "verdicts": [{**asdict(one), "met": one.is_met} for one in judged],
        }
        write_json(options.output, document)


if __name__ == "__main__":
    main()
