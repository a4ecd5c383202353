"""Measure a hot prompt that no worker can reuse: `python bench/hot_prompt.py [KVROUTE] [--rate 5.5]`.

All requests begin with the same 6,000 tokens, and differ in the 700 after them. The four simulated workers
serve a Mamba hybrid in blocks of 528 tokens that keeps states only where prompts end. The blocks with full
attention say that the beginning is held, and no request hits anything. A router that believes them sends
everything to the workers that "hold" the prompt. The goal is a mean latency of at most 1.1 of round robin's
with each strategy, every request being a session of its own.

With `--drafter` the workers have full attention and an EAGLE-style drafter, and drop the last block of each
hit. The goal is that the map is in use at least 99% of the time.

The gateway is a process of KVROUTE (this environment's by default), so that another release can be measured.
The workers run in real time: on a machine with other load compare the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import httpx

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

STRATEGIES = ("roundrobin", "prefixaware", "kvaware", "session")
HOT_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 6000, 700, 8
BYTES_PER_TOKEN = 3
MOST_OF_ROUND_ROBIN = 1.1
IN_USE = 0.99
WATCH_S = 0.1
SLOWER = 2.0
"""Factor of all times of the workers, so that this machine's own work counts for less."""
QUIET = 4
"""Requests one after another before the others: few workers hold the prompt when the traffic begins."""
WARM_UP = 0.2
"""Share of the first requests that no figure counts: the gateway learns from them."""


@dataclass(frozen=True)
class Figures:
    """Mean latency; the share of looks in which all maps were in use; requests of each worker; tokens that
    the gateway promised and that the engines found."""

    latency_s: float
    used: float
    workers: dict[str, int]
    promised: int
    cached: int


def worker_options(drafter: bool) -> SimOptions:
    common = {"capacity_tokens": 400_000, "answer_tokens": ANSWER_TOKENS, "time_scale": SLOWER}
    if drafter:
        return SimOptions.model_validate({**common, "drafted_tokens": 3})
    return SimOptions.model_validate(
        {
            **common,
            "kv_groups": ("mamba:528", "mamba:528", "mamba:528", "full_attention:528"),
            "keeps_junctions": False,
        }
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def gateway(executable: str, strategy: str, workers: list[str]) -> AsyncIterator[str]:
    """The address of a gateway that has settled: all workers healthy, nothing more to say of them."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    argv = [executable, "serve", "--host", "127.0.0.1", "--port", str(port), "--strategy", strategy]
    for number, worker in enumerate(workers):
        argv += ["--worker", f"w{number}={worker}"]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
        try:
            async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(60):
                while not await settled(http, url, len(workers)):  # noqa: ASYNC110  # another process
                    await asyncio.sleep(0.05)
            yield url
        finally:
            process.terminate()
            await process.wait()


async def settled(http: httpx.AsyncClient, url: str, workers: int) -> bool:
    try:
        ready = (await http.get(f"{url}/ready")).json()
    except httpx.TransportError:
        return False
    return [*ready["workers"].values()].count("healthy") == workers and not ready["notes"]


async def measure(executable: str, strategy: str, *, drafter: bool, rate: float, requests: int) -> Figures:
    chooser = random.Random(f"arrivals {rate}")
    hot = text(random.Random("hot"), HOT_TOKENS)
    log: list[tuple[float, str, int, int]] = []
    looks: list[bool] = []
    limits = httpx.Limits(max_connections=None)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=300, limits=limits))
        workers = [(await stack.enter_async_context(run_sim(worker_options(drafter)))).url for _ in range(4)]
        url = await stack.enter_async_context(gateway(executable, strategy, workers))

        async def ask(prompt: str) -> None:
            start = time.perf_counter()
            answer = await http.post(
                f"{url}/v1/completions",
                json={"model": "sim-model", "prompt": prompt, "max_tokens": ANSWER_TOKENS},
                headers={"x-session-id": str(uuid.UUID(int=chooser.getrandbits(128)))},
            )
            answer.raise_for_status()
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
            took = time.perf_counter() - start
            promised = int(answer.headers.get("x-kvroute-hit-tokens", 0))
            log.append((took, answer.headers["x-kvroute-worker"], promised, cached))

        for _ in range(QUIET):
            await ask(hot + text(chooser, OWN_TOKENS))
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(watch(http, url, looks))
            due = time.perf_counter()
            asked = []
            for _ in range(requests):
                due += chooser.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                asked.append(group.create_task(ask(hot + text(chooser, OWN_TOKENS))))
            await asyncio.gather(*asked)
            watcher.cancel()
    counted = log[int(WARM_UP * len(log)) :]
    return Figures(
        fmean(took for took, *_ in counted),
        sum(looks) / len(looks) if looks else 1.0,
        {name: sum(worker == name for _, worker, *_ in log) for name in sorted({each[1] for each in log})},
        sum(promised for *_, promised, _ in counted),
        sum(cached for *_, cached in counted),
    )


def text(chooser: random.Random, tokens: int) -> str:
    """A text of so many of the simulated worker's tokens."""
    return "".join(chooser.choices("abcdefghijklmnop ", k=BYTES_PER_TOKEN * tokens))


async def watch(http: httpx.AsyncClient, url: str, looks: list[bool]) -> None:
    """Note again and again whether the maps of all workers are in use (`kvroute_map_trust`)."""
    while True:
        shown = (await http.get(f"{url}/metrics")).text
        trusts = re.findall(r'^kvroute_map_trust\{[^}]*trust="([^"]*)"[^}]*\} 1', shown, re.MULTILINE)
        if trusts:
            looks.append(all(trust == "whole" for trust in trusts))
        await asyncio.sleep(WATCH_S)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kvroute", nargs="?", default=str(Path(sys.executable).with_name("kvroute")))
    parser.add_argument("--drafter", action="store_true")
    parser.add_argument("--rate", type=float, default=5.5, help="requests per second")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--strategy", action="append", choices=STRATEGIES)
    options = parser.parse_args()
    strategies = options.strategy or (("kvaware",) if options.drafter else STRATEGIES)
    baseline: float | None = None
    is_met = True
    for strategy in strategies:
        found = asyncio.run(
            measure(
                options.kvroute,
                strategy,
                drafter=options.drafter,
                rate=options.rate,
                requests=options.requests,
            )
        )
        line = (
            f"{strategy:12} mean {found.latency_s:6.2f} s, promised {found.promised}, cached {found.cached}, "
            f"requests {found.workers}"
        )
        if options.drafter:
            is_met &= found.used >= IN_USE
            line += f", map in use {found.used:.4f} (at least {IN_USE})"
        elif baseline is None:
            baseline = found.latency_s
        else:
            ratio = found.latency_s / baseline
            is_met &= ratio <= MOST_OF_ROUND_ROBIN
            line += f", {ratio:.2f} of {strategies[0]} (at most {MOST_OF_ROUND_ROBIN})"
        print(line, flush=True)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
