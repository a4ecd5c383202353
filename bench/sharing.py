"""Measure what sharing between gateways costs, and what it saves.

    python bench/sharing.py [--gateways 2 4] [--requests 3000] [--seeds 3] [--load 0.7]

Three parts:

- In virtual time (`processes_virtual.py`): the mean time to first token of 1, 2, 4 and 8 gateways at `--load`
  of the fleet's capacity, divided by that of one. The messages of the others arrive after `GATHER_S` (5 ms)
  and a lag of 1, 5 or 50 ms through Redis, or never (blind). Exact for its seeds.
- The messages alone, in this process: CPU of a request's messages in its own gateway (`publish`) and in each
  other one (`apply`), beside the CPU of routing it.
- In real processes: `kvroute serve` gateways in front of simulated workers that answer at once, with prompts
  of 8K tokens, unique or as turns of conversations. The requests go to one gateway after another. For each
  number of gateways, once with `--share` and once without: CPU per request of all gateways together, and with
  `--share` the bytes of a request through Redis, its envelopes, and the CPU of Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean

import httpx
import redis.asyncio

import processes_virtual
from kvroute.blocks.keys import PromptKeys, block_keys
from kvroute.replicas.envelope import (
    TO_ALL,
    Envelope,
    Kind,
    decode_payload,
    encode_payloads,
    pack,
    unpack,
)
from kvroute.replicas.mesh import GATHER_S
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Dispatch, Router
from kvroute.routing.strategy import RouteQuery
from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

WORKERS = 4
CLIENTS = 16
PROMPT_BYTES = 32 * 1024
"""8K tokens of English text."""
TURN_BYTES = 1024
CONVERSATIONS = 64
LAGS_MS = (1, 5, 50)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Figures:
    """Of one run; per request."""

    gateway_us: float
    redis_us: float = 0.0
    redis_in_bytes: float = 0.0
    redis_out_bytes: float = 0.0
    envelopes: float = 0.0
    per_s: float = 0.0


def cpu_s(pid: int) -> float:
    """CPU seconds of a process until now (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@asynccontextmanager
async def redis_server() -> AsyncIterator[tuple[int, int]]:
    """Yields port and pid."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield port, process.pid
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def gateway(workers: Sequence[str], redis_port: int | None) -> AsyncIterator[tuple[str, int]]:
    """Yields URL and pid of a gateway that is ready."""
    port = free_port()
    named = [flag for number, url in enumerate(workers) for flag in ("--worker", f"w{number}={url}")]
    share = () if redis_port is None else ("--share", f"redis://127.0.0.1:{redis_port}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvroute", "serve", "--port", str(port), *named, *share),
        *("--set", "logging.requests=false"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(600):
                try:
                    if (await client.get(f"{url}/ready")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)
            else:
                raise RuntimeError("the gateway did not become ready")
        yield url, process.pid
    finally:
        process.terminate()
        await process.wait()


class Bodies:
    """Prompts of 8K tokens. Mutable: the turns of the conversations."""

    def __init__(self, seed: int, *, unique: bool) -> None:
        self._random = Random(seed)
        self._unique = unique
        self._live = [self._text(PROMPT_BYTES - 4 * TURN_BYTES) for _ in range(CONVERSATIONS)]

    def next(self) -> bytes:
        if self._unique:
            return self._body(self._text(PROMPT_BYTES))
        place = self._random.randrange(CONVERSATIONS)
        text = self._live[place] + self._text(TURN_BYTES)
        self._live[place] = text if len(text) < PROMPT_BYTES + 4 * TURN_BYTES else text[:PROMPT_BYTES]
        return self._body(text)

    def _text(self, size: int) -> str:
        return f"{self._random.getrandbits(4 * size):0{size}x}"

    @staticmethod
    def _body(text: str) -> bytes:
        messages = [{"role": "user", "content": text}]
        return json.dumps({"model": "sim-model", "messages": messages, "max_tokens": 1}).encode()


async def drive(urls: Sequence[str], bodies: Bodies, requests: int) -> None:
    """Send the requests, `CLIENTS` at a time, to one gateway after another."""
    numbers = iter(range(requests))
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:

        async def work() -> None:
            for number in numbers:
                url = f"{urls[number % len(urls)]}/v1/chat/completions"
                answer = await client.post(
                    url, content=bodies.next(), headers={"content-type": "application/json"}
                )
                answer.raise_for_status()

        await asyncio.gather(*(work() for _ in range(CLIENTS)))


async def run(gateways: int, requests: int, *, unique: bool, shared: bool) -> Figures:
    async with AsyncExitStack() as stack:
        options = SimOptions(time_scale=0, recorded_requests=0, kv_events=False)
        sims = [(await stack.enter_async_context(run_sim(options))).url for _ in range(WORKERS)]
        port, redis_pid = await stack.enter_async_context(redis_server())
        running = [
            await stack.enter_async_context(gateway(sims, port if shared else None)) for _ in range(gateways)
        ]
        urls, pids = [url for url, _ in running], [pid for _, pid in running]
        await drive(urls, Bodies(1, unique=unique), requests // 5)  # heads, connections and histories
        await asyncio.sleep(0.1)
        store = redis.asyncio.Redis(port=port)

        async def totals() -> tuple[float, float, int, int, int]:
            stats, commands = await store.info("stats"), await store.info("commandstats")
            calls = commands.get("cmdstat_publish", {}).get("calls", 0)
            sizes = stats["total_net_input_bytes"], stats["total_net_output_bytes"]
            return sum(map(cpu_s, pids)), cpu_s(redis_pid), *sizes, calls

        before, start = await totals(), asyncio.get_running_loop().time()
        await drive(urls, Bodies(2, unique=unique), requests)
        took_s = asyncio.get_running_loop().time() - start
        await asyncio.sleep(0.05)  # the last batch
        after = await totals()
        await store.aclose()
    gateway_s, redis_s, in_bytes, out_bytes, calls = (b - a for a, b in zip(before, after, strict=True))
    figures = Figures(1e6 * gateway_s / requests, per_s=requests / took_s)
    if not shared:
        return figures
    return Figures(
        figures.gateway_us,
        1e6 * redis_s / requests,
        in_bytes / requests,
        out_bytes / requests,
        calls / requests,
        figures.per_s,
    )


def virtual(load: float, seeds: int) -> dict[str, dict[int, float]]:
    """Mean TTFT divided by that of one gateway, by lag and number of gateways."""
    rate = load * processes_virtual.capacity()
    alone = [processes_virtual.mean_ttft_s(1, None, rate, seed) for seed in range(seeds)]
    delays: dict[str, float | None] = {f"{lag} ms": GATHER_S + lag / 1000 for lag in LAGS_MS}
    delays["blind"] = None
    return {
        name: {
            count: fmean(
                processes_virtual.mean_ttft_s(count, delay_s, rate, seed) / alone[seed]
                for seed in range(seeds)
            )
            for count in (2, 4, 8)
        }
        for name, delay_s in delays.items()
    }


def messages(batch: int, repeats: int = 5) -> dict[str, dict[str, float]]:
    """CPU in us of a request's messages, without Redis: `batch` requests travel in one envelope.

    `route`: to decide, dispatch and finish the request without sharing; `publish`: what its own gateway adds;
    `apply`: what each other gateway does. `short` requests end before their envelope is sent; of others
    dispatch, first token and end are in three envelopes. Least of the repeats.
    """
    found: dict[str, dict[str, float]] = {}
    for kind in ("unique", "conversations"):
        for lasts in (True, False):
            best: dict[str, float] = {}
            for repeat in range(repeats):
                for name, figure in _messages_once(kind == "unique", batch, repeat, lasts=lasts).items():
                    best[name] = min(best.get(name, figure), figure)
            best["publish"] = best.pop("shared") - best["route"]
            found[kind if lasts else f"{kind}, short"] = best
    return found


def _messages_once(unique: bool, batch: int, seed: int, *, lasts: bool) -> dict[str, float]:
    texts = _prompts(unique, 400, seed)
    clock = processes_virtual.VirtualClock()
    alone, sender, receiver = (processes_virtual.Gateway(number, clock) for number in range(3))
    figures = {"route": _routed(alone, texts, batch, None, lasts=lasts)[0]}
    sent: list[bytes] = []
    figures["shared"], size = _routed(sender, texts, batch, sent, lasts=lasts)
    start = time.process_time_ns()
    for data in sent:
        received, _ = decode_payload(unpack(data, None).payload)
        receiver.receive(0, received)
    figures["apply"] = (time.process_time_ns() - start) / 1e3 / len(texts)
    return figures | {"bytes": size}


def _prompts(unique: bool, number: int, seed: int) -> list[bytes]:
    random, found = Random(seed), list[bytes]()
    live = [random.randbytes(PROMPT_BYTES) for _ in range(CONVERSATIONS)]
    for _ in range(number):
        if unique:
            found.append(random.randbytes(PROMPT_BYTES))
        else:
            place = random.randrange(CONVERSATIONS)
            live[place] += random.randbytes(TURN_BYTES)
            found.append(live[place])
    return found


def _routed(
    gateway: processes_virtual.Gateway,
    texts: Sequence[bytes],
    batch: int,
    sent: list[bytes] | None,
    *,
    lasts: bool,
) -> tuple[float, float]:
    """CPU in us of a request, and bytes of its messages; with `sent` its messages become envelopes there."""
    view, is_shared = gateway.workers.view(processes_virtual.MODEL), sent is not None
    router = gateway.router if is_shared else Router(RoutingOptions())
    if not is_shared:
        for worker in gateway.workers.workers():
            router.worker_joined(worker)
    waiting, answering = deque[Dispatch](), deque[Dispatch]()
    start, now = time.process_time_ns(), 0.0
    for number, text in enumerate(texts, 1):
        now += 0.01
        keys = block_keys(text)
        tokens = len(text) // 4
        query = RouteQuery(view.model, now, (PromptKeys(keys, tokens, 16.0),), tokens, streamed=True)
        decision = router.decide(query, view)
        dispatch = router.dispatch(query, decision, decision.ranking[0], now)
        waiting.append(dispatch)
        if not lasts or len(waiting) > batch:
            answering.append(waiting.popleft())
            answering[-1].first_token(now)
        if not lasts or len(answering) > batch:
            answering.popleft().finish(now)
        if sent is not None and number % batch == 0:
            for payload in encode_payloads(gateway.own.take(now, everything=True)):
                sent.append(pack(Envelope(Kind.BATCH, TO_ALL, TO_ALL, TO_ALL, number, now, payload), None))
    return (time.process_time_ns() - start) / 1e3 / len(texts), sum(map(len, sent or ())) / len(texts)


async def real(counts: Sequence[int], requests: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for kind in ("unique", "conversations"):
        unique = kind == "unique"
        alone = await run(1, requests, unique=unique, shared=False)
        rows: dict[str, object] = {"1": asdict(alone)}
        shared: dict[int, Figures] = {}
        for count in counts:
            apart = await run(count, requests, unique=unique, shared=False)
            shared[count] = await run(count, requests, unique=unique, shared=True)
            rows[f"{count} apart"], rows[f"{count} shared"] = asdict(apart), asdict(shared[count])
            print(kind, count, apart, shared[count], file=sys.stderr, flush=True)
        if len(counts) > 1:
            few, many = counts[0], counts[-1]
            apply_us = (shared[many].gateway_us - shared[few].gateway_us) / (many - few)
            publish_us = shared[few].gateway_us - alone.gateway_us - (few - 1) * apply_us
            rows["prices"] = {"route_us": alone.gateway_us, "publish_us": publish_us, "apply_us": apply_us}
        found[kind] = rows
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gateways", type=int, nargs="*", default=[2, 4], help="numbers; none skips this part"
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of virtual time; 0 skips it")
    parser.add_argument("--load", type=float, default=0.7)
    options = parser.parse_args()
    found: dict[str, object] = {}
    if options.seeds:
        found["virtual"] = virtual(options.load, options.seeds)
    found["messages"] = {f"{batch} in an envelope": messages(batch) for batch in (1, 10)}
    if options.gateways:
        found["real"] = asyncio.run(real(options.gateways, options.requests))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
