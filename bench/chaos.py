"""Break one part of a gateway's surroundings every five seconds; check answers, gauges and the cache map.

    python bench/chaos.py [--seconds 600] [--seed 1] [--load 0.7] [--strategy kvaware] [--no-baseline]
                          [--faults poison asleep ...]

Seven simulated workers (processes that publish KV events), a gateway of three processes, another gateway of
the same fleet, and a Redis, all on 127.0.0.1. Each fault ends within some four seconds. Requests that kill
their workers take two workers, back-pressure comes from all, all other faults affect one worker at most
(`chaos_faults.py`). The same traffic first goes through the same fleet without faults; `--no-baseline` leaves
this run out. The exit code is 1 if a bound is missed:

- A request that has not begun its answer ends in success or in 429, 503 or 504 within 30 s, apart from those
  inside a killed gateway process, and 502 for those that were at both workers that another request killed.
- Each answer has the bytes that the simulator must give, or breaks off after a part of them with a stated
  error.
- No more than two workers begin to compute one request, its client's repetitions included.
- No process of the gateway has more than `MOST_MB` of memory.
- Afterwards all gauges are zero, no worker has a request, and one second after the last fault the map of
  every gateway process is equal to the workers' own caches.
- Goodput in completed tokens is at least 95% of the run without faults.

`--load` is the share of the workers' capacity: `--sequences` requests at a time each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from chaos_faults import FAULTS, LASTS_S, PERIOD_S, break_things
from chaos_setting import KEYS, PROCESSES, WORKERS, Setting, setting, until
from chaos_traffic import FAILURES, MODEL, UNTIMED, End, Limits, Outcome, Planned, Traffic, send
from kvroute.blocks.keys import CacheSpace, block_keys
from kvroute.sim.prompts import chat_tokens, encode

MEAN_REQUEST_S = 0.5
"""About 27 tokens of 14 ms, and the prefill."""
LEAST_GOODPUT = 0.95
MOST_BEGUN = 2
MOST_MB = 400
"""About 120 without faults."""
SETTLED_S = 240.0
"""The longest wait for gauges and map; the report has the time that they took."""
PROBED = 60
"""Prompts whose place in the map is compared with the workers' caches."""


@dataclass(slots=True)
class Report:
    """What one run found. `problems` are missed bounds in words."""

    ends: dict[str, int]
    tokens: int
    faults: dict[str, int]
    gauges_zero_after_s: float | None
    map_equal_after_s: float | None
    """From the last fault's end to the begin of the first comparison without a difference."""
    map_comparisons: int
    """Until one found no difference; the first one begins a second after the last fault's end."""
    map_blocks: int
    killed_within_s: float
    """Longest time from the signal to the end of a killed gateway process."""
    most_begun: int
    """Workers that began to compute one request."""
    begun_twice: int
    """Requests that two workers began to compute."""
    peak_mb: int
    problems: list[str]


async def run(
    options: argparse.Namespace, planned: Sequence[Planned], seconds: float, limits: Limits
) -> Report:
    """Send the traffic, with faults for `seconds` (0: none), and check everything."""
    strategy, seed = options.strategy, options.seed
    kinds = {name: FAULTS[name] for name in options.faults or FAULTS}
    loop = asyncio.get_running_loop()
    async with setting(strategy, options.sequences) as made:
        began = loop.time()

        async def one(each: Planned) -> Outcome:
            await asyncio.sleep(max(0.0, began + each.at_s - loop.time()))
            return await send(made.port, each, made.kills, made.lethal, limits)

        breaking = asyncio.create_task(break_things(made, seed, seconds, kinds))
        outcomes = await asyncio.gather(*(one(each) for each in planned))
        await breaking
        made.ended_s = made.ended_s or loop.time()
        problems = [
            f"{outcome.end.value}: {each.path} at {each.at_s:.1f} s, "
            f"ended at {outcome.ended_s - began:.1f} s: {outcome.detail}"
            for each, outcome in zip(planned, outcomes, strict=True)
            if outcome.end in FAILURES
        ]
        async with AsyncExitStack() as stack:
            clients = await connect(made, stack)
            last: list[str] = []
            equal_s, blocks, comparisons = None, 0, 0
            if strategy == "kvaware":
                await asyncio.sleep(max(0.0, made.ended_s + 1.0 - loop.time()))
                bodies = Random(seed).sample([each.body for each in planned], min(PROBED, len(planned)))

                async def is_equal() -> bool:
                    nonlocal equal_s, blocks, comparisons
                    comparisons += 1
                    compared_s = loop.time()
                    blocks, last[:] = await compare(made, clients, bodies)
                    equal_s = None if last else compared_s - made.ended_s
                    return not last

                if await until(is_equal, SETTLED_S) is None:
                    problems += last[:10]

            async def is_idle() -> bool:
                last[:] = await busy(made, clients)
                return not last

            zero_s = await until(is_idle, SETTLED_S)
            if zero_s is None:
                problems += last
        problems += made.problems
        begun, peak_mb = made.begun(), made.peak_mb()
        most = max(begun.values(), default=0)
        problems += [
            f"{times} workers began to compute {name}" for name, times in begun.items() if times > MOST_BEGUN
        ]
        if peak_mb > MOST_MB:
            problems.append(f"a process of the gateway has had {peak_mb} MB of memory")
        if problems:
            made.keep_log()
        counts = Counter(outcome.end.value for outcome in outcomes)
        tokens = sum(outcome.tokens for outcome in outcomes)
        return Report(
            dict(counts),
            tokens,
            dict(Counter(made.faults)),
            zero_s,
            equal_s,
            comparisons,
            blocks,
            max((killed.gone_s - killed.at_s for killed in made.kills), default=0.0),
            most,
            sum(times == 2 for times in begun.values()),
            peak_mb,
            problems,
        )


async def connect(made: Setting, stack: AsyncExitStack) -> list[httpx.AsyncClient]:
    """One client for each gateway process: ids of requests begin alike within a process."""
    met: dict[str, httpx.AsyncClient] = {}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for _ in range(2_000):
        client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{made.port}",
            limits=httpx.Limits(max_connections=1, keepalive_expiry=600),
            headers={"authorization": f"Bearer {KEYS[0]}"},
            timeout=30,
            trust_env=False,
        )
        try:
            answer = await client.post("/v1/chat/completions", json=body)
        except httpx.TransportError:  # the process that was killed last is not back yet
            answer = None
        process = "" if answer is None or answer.status_code != 200 else answer.headers["x-request-id"][:16]
        if process and process not in met:
            met[process] = client
            stack.push_async_callback(client.aclose)
        else:
            await client.aclose()
            await asyncio.sleep(0.05)
        if len(met) == PROCESSES:
            return list(met.values())
    raise RuntimeError(f"{len(met)} of {PROCESSES} gateway processes answer")


async def busy(made: Setting, clients: Sequence[httpx.AsyncClient]) -> list[str]:
    """What is not zero: requests in flight, reservations of each process, requests at the workers. Also
    workers that are not healthy, and a configuration that is not the last one."""
    found = []
    for number, client in enumerate(clients):
        page = (await client.get("/metrics")).text
        for name in (
            "kvroute_requests_in_flight",
            "kvroute_queue_waiting",
            "kvroute_worker_requests_in_flight",
        ):
            for line in page.splitlines():
                if re.match(name + r"[ {]", line) and float(line.rsplit(" ", 1)[1]):
                    found.append(f"process {number}: {line}")
        workers = (await client.get("/admin/workers", headers=made.admin)).json()["workers"]
        found += [
            f"process {number}: {worker['id']} has {name} {worker[name]}"
            for worker in workers
            for name in ("running_requests", "active_tokens", "queued_requests", "active_blocks")
            if worker[name]
        ]
        found += [
            f"process {number}: {worker['id']} is {worker['state']}"
            for worker in workers
            if worker["state"] != "healthy"
        ]
        if len(workers) != WORKERS:
            found.append(f"process {number} has {len(workers)} workers")
        config = (await client.get("/admin/config", headers=made.admin)).json()
        if config["retries"]["budget_percent"] != made.budget_percent:
            found.append(f"process {number} has another configuration: {config['in_force']}")
    for number in range(WORKERS):
        state = (await made.control.get(f"{made.url(number)}/sim/requests")).json()
        found += [
            f"w{number} has {state[name]} {name} requests" for name in ("running", "waiting") if state[name]
        ]
    return found


async def compare(
    made: Setting, clients: Sequence[httpx.AsyncClient], bodies: Sequence[dict[str, Any]]
) -> tuple[int, list[str]]:
    """The number of cached blocks, and differences between the workers' caches and each process's map."""
    caches: dict[str, set[int]] = {}
    size = 16
    for number in range(WORKERS):
        state = (await made.control.get(f"{made.url(number)}/sim/cache")).json()
        caches[f"w{number}"], size = set(state["keys"]), state["block_size"]
    found, held = [], sum(map(len, caches.values()))
    for number, client in enumerate(clients):
        described = (await client.get("/admin/index", headers=made.admin)).json()["caches"]
        if described.get("held_blocks") != held:
            found.append(f"process {number}: {described.get('held_blocks')} blocks in the map, {held} cached")
        for body in bodies:
            tokens = chat_tokens(body["messages"]) if "messages" in body else encode(body["prompt"])
            keys = block_keys(tokens.tobytes(), block_bytes=4 * size, seed=CacheSpace("", "").seed)
            explained = (await client.post("/v1/route/explain", json=body)).json()
            for candidate in explained["ranking"]:
                worker = candidate["worker"]
                cached = next((i for i, key in enumerate(keys) if key not in caches[worker]), len(keys))
                cached = min(cached, (len(tokens) - 1) // size)  # vLLM always computes the last token
                mapped = candidate["matched_tokens"]
                if candidate.get("map") != "whole" or mapped != size * cached:
                    found.append(
                        f"process {number}: {worker} holds {size * cached} of {len(tokens)} tokens, the map "
                        f"({candidate.get('map')}) has {mapped}"
                    )
    return held, found


async def measure(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Returns the missed bounds, and all figures."""
    rate = options.load * WORKERS * options.sequences / MEAN_REQUEST_S
    planned = Traffic(options.seed, KEYS).plan(rate, options.seconds - PERIOD_S + LASTS_S)
    runs = [] if options.no_baseline else [("fault-free", 0.0)]
    found: dict[str, Any] = {"rate": rate, "requests": len(planned), "strategy": options.strategy}
    problems: list[str] = []
    limits = UNTIMED if options.untimed else Limits()
    for name, seconds in [*runs, ("faults", options.seconds)]:
        report = await run(options, planned, seconds, limits)
        found[name] = {
            each: getattr(report, each) for each in Report.__dataclass_fields__ if each != "problems"
        }
        problems += [f"{name}: {problem}" for problem in report.problems]
        if name == "faults" and report.map_comparisons > 1 and not options.untimed:
            after_s = report.map_equal_after_s
            problems.append(
                f"the map differed from the caches a second after the last fault; until {after_s} s"
            )
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    found["wrong answers"] = found["faults"]["ends"].get(End.WRONG.value, 0)
    found["most workers that began one request"] = found["faults"]["most_begun"]
    if runs:
        found["goodput"] = found["faults"]["tokens"] / found["fault-free"]["tokens"]
        if found["goodput"] < LEAST_GOODPUT:
            problems.append(f"goodput is {found['goodput']:.3f} of the run without faults")
    return problems, found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.7, help="share of the workers' capacity")
    parser.add_argument("--sequences", type=int, default=3, help="requests at a time of one worker")
    parser.add_argument("--strategy", choices=("kvaware", "prefixaware"), default="kvaware")
    parser.add_argument("--no-baseline", action="store_true", help="no run without faults: no goodput")
    parser.add_argument(
        "--untimed", action="store_true", help="judge no times: of requests, and when the map is equal"
    )
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), help="only these")
    parser.add_argument("--json", action="store_true")
    return parser


def main() -> None:
    options = arguments().parse_args()
    problems, found = asyncio.run(measure(options))
    if options.json:
        print(json.dumps({**found, "problems": problems}, indent=1))
    else:
        for name, value in found.items():
            print(f"{name}: {value}")
        for problem in problems:
            print(f"missed: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
