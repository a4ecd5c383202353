"""Measure the cost of several gateway processes, compared with one: in time to first token, or in CPU.

    python bench/processes.py [--processes 2] [--repeats 3] [--seconds 14] [--seeds 2] [--load 0.7] [--blind]
                              [--json]
    python bench/processes.py --cpu [--processes 4] [--rounds 3] [--repeats 36] [--scenarios a,b,c]
                              [--output FILE]

The script answers the question in two ways, with conversations that share a system prompt and grow with each
turn, at `--load` of the capacity of one gateway:

- In virtual time (`processes_virtual.py`): routers receive the messages of the others after 0, 6 (5 ms of
  gathering and the transfer) or 50 ms, or never. Exact for its seeds.
- In real time: gateways in front of simulated workers. The same arrivals go through one process and through
  several, alternating, each time with fresh caches. Each request has its own connection, so that the kernel
  distributes the requests. `--blind` adds the same number of gateways that do not know each other and get
  the requests one after another. Workers and load share the processors with the gateways, so other work on
  the machine affects both sides.

A run takes about three minutes, with `--blind` more. `--cpu` (`processes_cpu.py`) prints CPU per request of
four processes, relative to one and to four independent gateways; it takes eight minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from urllib.parse import urlsplit

import processes_cpu
import processes_virtual
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions

WORKERS = 4
CAPACITY_TOKENS = 150_000
CONVERSATIONS = 48
SYSTEM_WORDS, OWN_WORDS, TURN_WORDS = 600, 2600, 60
OUTPUT_TOKENS = 16
TOKEN_S = 80e-6
"""Workers twice as slow as the simulator's own, so that they need little of a processor."""
WARM_UP = 0.15
"""Share of the first arrivals that no figure counts."""
SATURATING = 64
"""Simultaneous requests that every gateway of this test has to queue."""
MOST_LAG_MS = 5.0
"""Runs whose timers are later than this on average are repeated; a quiet machine has 1 to 3."""
SPARE_REPEATS = 2
"""Additional runs that replace disturbed ones."""


@dataclass(frozen=True)
class Arrival:
    at_s: float
    body: bytes


@dataclass
class Outcome:
    """The figures of one run: seconds, and the share of cached prompt tokens. `lag_ms` is the mean delay of
    this script's own timers: above a few milliseconds the machine was too busy for a useful run."""

    mean_ttft_s: float
    p50_s: float
    p90_s: float
    hit: float
    requests: int
    lag_ms: float


def words(random: Random, count: int) -> str:
    return " ".join(f"{random.getrandbits(24):x}" for _ in range(count))


class Conversations:
    """Creates the bodies of turns of random conversations. Mutable: the current turn of each conversation.
    The answers are invented, so that every run sends the same bodies."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._system = words(Random(0), SYSTEM_WORDS)
        self._live = [self._new_conversation() for _ in range(CONVERSATIONS)]

    def next_body(self) -> bytes:
        place = self._random.randrange(CONVERSATIONS)
        messages = self._live[place]
        if len(messages) > 12:
            messages = self._live[place] = self._new_conversation()
        if messages[-1]["role"] == "user":
            messages += [
                {"role": "assistant", "content": words(self._random, OUTPUT_TOKENS // 4)},
                {"role": "user", "content": words(self._random, TURN_WORDS)},
            ]
        else:
            own = int(OWN_WORDS * self._random.uniform(0.4, 1.6))
            messages.append({"role": "user", "content": words(self._random, own)})
        return json.dumps(
            {
                "model": "sim-model",
                "messages": messages,
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    def _new_conversation(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}]


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    random, conversations = Random(seed), Conversations(seed)
    at_s, made = 0.0, []
    while at_s < seconds:
        at_s += random.expovariate(rate)
        made.append(Arrival(at_s, conversations.next_body()))
    return made


async def send(url: str, body: bytes) -> float:
    """Send one request on its own connection; returns the seconds to its first token. Raises OSError on
    failure."""
    target = urlsplit(url)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(head.split(b"\r\n", 1)[0].decode())
        await reader.readuntil(b"data:")
        first_s = loop.time() - begun
        rest = b""
        while chunk := await reader.read(65536):
            rest = rest[-64:] + chunk
        if b"[DONE]" not in rest:
            raise ConnectionError("an answer was cut")
        return first_s
    finally:
        writer.close()


async def drive(urls: Sequence[str], sent: Sequence[Arrival]) -> list[float]:
    """Send each request at its time, to one gateway after another; returns times to first token in order of
    arrival."""
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def one(number: int, arrival: Arrival) -> float:
        await asyncio.sleep(max(0.0, start + arrival.at_s - loop.time()))
        return await send(urls[number % len(urls)], arrival.body)

    return await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(sent)))


async def capacity(urls: Sequence[str], seconds: float) -> float:
    """Requests per second with `SATURATING` requests at a time, without the first quarter of the time."""
    loop = asyncio.get_running_loop()
    conversations, done = Conversations(1), list[float]()
    until = loop.time() + seconds

    async def client() -> None:
        while loop.time() < until:
            await send(urls[0], conversations.next_body())
            done.append(loop.time())

    await asyncio.gather(*(client() for _ in range(SATURATING)))
    since = until - 0.75 * seconds
    return sum(since <= at < until for at in done) / (0.75 * seconds)


@asynccontextmanager
async def gateway(sims: Sequence[RunningSim], processes: int) -> AsyncIterator[str]:
    """Start a `kvroute serve`; yields its URL."""
    named = [f for number, sim in enumerate(sims) for f in ("--worker", f"w{number}={sim.url}")]
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvroute", "serve", "--port", "0", "--processes", str(processes), *named),
        *("--set", "logging.requests=false"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert parent.stderr is not None
    url, healthy, accepting = "", 0, 0 if processes > 1 else 1  # one process alone logs only where it listens
    while not url or healthy < processes * len(sims) or accepting < processes:
        line = (await parent.stderr.readline()).decode()
        if not line:
            raise RuntimeError("the gateway did not become ready")
        healthy += "is healthy" in line
        accepting += "accepts connections" in line
        found = re.search(r"listens on (\S+)", line)
        url = found[1] if found else url
    rest = asyncio.create_task(parent.stderr.read())
    try:
        yield url
    finally:
        parent.terminate()
        await parent.wait()
        await rest


@asynccontextmanager
async def setting(gateways: int, processes: int) -> AsyncIterator[tuple[list[RunningSim], list[str]]]:
    """Start fresh workers, and gateways in front of them."""
    async with AsyncExitStack() as stack:
        options = SimOptions(
            capacity_tokens=CAPACITY_TOKENS, token_s=TOKEN_S, recorded_requests=0, kv_events=False
        )
        sims = [await stack.enter_async_context(run_sim(options)) for _ in range(WORKERS)]
        urls = [await stack.enter_async_context(gateway(sims, processes)) for _ in range(gateways)]
        await asyncio.sleep(0.5)
        yield sims, urls


async def run(gateways: int, processes: int, sent: Sequence[Arrival]) -> Outcome:
    async with setting(gateways, processes) as (sims, urls):
        late_s: list[float] = []
        watching = asyncio.create_task(watch_timers(late_s))
        all_s = await drive(urls, sent)
        watching.cancel()
        computed = sum(sim.engine.counters.computed_tokens for sim in sims)
        prompts = sum(sim.engine.counters.prompt_tokens for sim in sims)
    counted = sorted(all_s[int(WARM_UP * len(all_s)) :])
    return Outcome(
        fmean(counted),
        counted[len(counted) // 2],
        counted[int(0.9 * len(counted))],
        1 - computed / prompts,
        len(all_s),
        1000 * fmean(late_s),
    )


async def watch_timers(late_s: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + 0.01
        await asyncio.sleep(0.01)
        late_s.append(loop.time() - due)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    late = processes_virtual.ratios(options.processes, options.load, options.seeds) if options.seeds else {}
    virtual = {name: {"mean": fmean(found), "seeds": found} for name, found in late.items()}
    print(f"virtual  {virtual}", file=sys.stderr, flush=True)
    rate = options.rate
    if rate is None:
        async with setting(1, 1) as (_, urls):
            rate = options.load * await capacity(urls, 12)
    variants = {"one": (1, 1), "several": (1, options.processes)}
    if options.blind:
        variants["blind"] = (options.processes, 1)
    runs: dict[str, list[Outcome]] = {name: [] for name in variants}
    quiet = 0
    for repeat in range(options.repeats + SPARE_REPEATS):
        sent = arrivals(rate, options.seconds, seed=100 + repeat)
        order = list(variants) if repeat % 2 else list(variants)[::-1]
        for name in order:
            runs[name].append(await run(*variants[name], sent))
            print(f"{name:8} {asdict(runs[name][-1])}", file=sys.stderr, flush=True)
        quiet += max(of_one[-1].lag_ms for of_one in runs.values()) <= MOST_LAG_MS
        if quiet == options.repeats:
            break
    return {
        "virtual_mean_ttft_ratio": virtual,
        "processes": options.processes,
        "workers": WORKERS,
        "rate": rate,
        "load": options.load,
        "runs": {name: [asdict(each) for each in outcomes] for name, outcomes in runs.items()},
        "mean_ttft_ratio": {name: compared(runs["one"], runs[name]) for name in variants if name != "one"},
    }


def compared(single: Sequence[Outcome], several: Sequence[Outcome]) -> dict[str, object]:
    """Ratios of mean TTFT by pair. `median` is that of the pairs on a quiet machine, None without such a
    pair."""
    pairs = [
        {"ratio": b.mean_ttft_s / a.mean_ttft_s, "quiet": max(a.lag_ms, b.lag_ms) <= MOST_LAG_MS}
        for a, b in zip(single, several, strict=True)
    ]
    ratios = [pair["ratio"] for pair in pairs if pair["quiet"]]
    return {"median": median(ratios) if ratios else None, "pairs": pairs}


def measure_cpu(options: argparse.Namespace) -> None:
    found = processes_cpu.measure(
        processes_cpu.Options(
            options.processes or 4,
            options.rounds,
            options.repeats or 36,
            options.seconds or 0.3,
            tuple(options.scenarios.split(",")),
        )
    )
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1) if options.json else "\n".join(processes_cpu.lines(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="CPU per request; nothing else")
    parser.add_argument("--processes", type=int, help="2; with --cpu 4")
    parser.add_argument("--repeats", type=int, help="3; with --cpu 36")
    parser.add_argument("--rounds", type=int, default=3, help="with --cpu: times that all processes are new")
    parser.add_argument("--scenarios", default="a,b,c", help="with --cpu")
    parser.add_argument("--seconds", type=float, help="of a run: 14; with --cpu 0.3")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of virtual time; 0 skips it")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--rate", type=float, help="requests per second, instead of measuring the capacity")
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="with --cpu: write the figures to this JSON file")
    options = parser.parse_args()
    if options.cpu:
        measure_cpu(options)
        return
    options.processes, options.seconds = options.processes or 2, options.seconds or 14.0
    options.repeats = options.repeats or 3
    found = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, ratio in found["virtual_mean_ttft_ratio"].items():  # type: ignore[attr-defined]
        print(f"virtual time, messages {name} late: mean TTFT {ratio['mean']:.3f} x one")
    for name, ratio in found["mean_ttft_ratio"].items():  # type: ignore[attr-defined]
        quiet = "the machine was never quiet" if ratio["median"] is None else f"{ratio['median']:.3f} x one"
        print(f"real time, {name}: mean TTFT {quiet} (pairs: {ratio['pairs']})")


if __name__ == "__main__":
    main()
