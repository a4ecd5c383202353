"""What several gateway processes cost in time to first token, beside one.

    python bench/processes.py [--processes 2] [--repeats 3] [--seconds 14] [--seeds 2] [--load 0.7] [--blind]
                              [--json]

Twice the same question, with conversations that share a system prompt and grow by the turn, at `--load` of
what one gateway reaches when driven as hard as it goes:

- in virtual time (`processes_virtual.py`): routers that hear of each other 0, 6 (a gathering of 5 ms and the
  way) or 50 ms late, or never. Exact for its seeds.
- in real time: real gateways in front of simulated workers. The same arrivals are sent through one process
  and through several, in turn, each time with fresh caches, over a connection each, so that the kernel deals
  them out. `--blind` adds as many gateways that do not know of each other, sent to in turn. Workers and load
  share the processors with the gateways: whatever else runs there shows, in both.

About three minutes; more with `--blind`.
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
from random import Random
from statistics import fmean, median
from urllib.parse import urlsplit

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
"""Share of the arrivals, the first ones, that no figure counts."""
SATURATING = 64
"""Requests at once that no gateway in this test can serve without queues."""
MOST_LAG_MS = 5.0
"""On a quiet machine it is 1 to 3."""
SPARE_REPEATS = 2
"""In place of those that were disturbed."""


@dataclass(frozen=True)
class Arrival:
    at_s: float
    body: bytes


@dataclass
class Outcome:
    """Of one run: seconds, and the share of prompt tokens that were cached. `lag_ms` is how late this
    script's own timers were on average: above a few milliseconds the machine was too busy for the run to
    say much."""

    mean_ttft_s: float
    p50_s: float
    p90_s: float
    hit: float
    requests: int
    lag_ms: float


def words(random: Random, count: int) -> str:
    return " ".join(f"{random.getrandbits(24):x}" for _ in range(count))


class Conversations:
    """Bodies of turns of random conversations. Mutable: which turn each of them is at. What was answered is
    made up, so that every run sends the same."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._system = words(Random(0), SYSTEM_WORDS)
        self._live = [self._begun() for _ in range(CONVERSATIONS)]

    def next_body(self) -> bytes:
        place = self._random.randrange(CONVERSATIONS)
        messages = self._live[place]
        if len(messages) > 12:
            messages = self._live[place] = self._begun()
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

    def _begun(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}]


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    random, conversations = Random(seed), Conversations(seed)
    at_s, made = 0.0, []
    while at_s < seconds:
        at_s += random.expovariate(rate)
        made.append(Arrival(at_s, conversations.next_body()))
    return made


async def send(url: str, body: bytes) -> float:
    """One request on a connection of its own; seconds to its first token. Raises OSError if it fails."""
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
    """Send each at its time, to the gateways in turn; times to first token in the order of arrival."""
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def one(number: int, arrival: Arrival) -> float:
        await asyncio.sleep(max(0.0, start + arrival.at_s - loop.time()))
        return await send(urls[number % len(urls)], arrival.body)

    return await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(sent)))


async def capacity(urls: Sequence[str], seconds: float) -> float:
    """Requests per second with `SATURATING` of them at once, the first quarter of the time not counted."""
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
    """A `kvroute serve` of its own; its URL."""
    named = [f for number, sim in enumerate(sims) for f in ("--worker", f"w{number}={sim.url}")]
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvroute", "serve", "--port", "0", "--processes", str(processes), *named),
        *("--set", "logging.requests=false"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert parent.stderr is not None
    url, healthy = "", 0
    while not url or healthy < processes * len(sims):
        line = (await parent.stderr.readline()).decode()
        if not line:
            raise RuntimeError("the gateway did not come up")
        healthy += "is healthy" in line
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
    """Fresh workers, and gateways in front of them."""
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


def compared(alone: Sequence[Outcome], there: Sequence[Outcome]) -> dict[str, object]:
    """Ratios of mean TTFT, pair by pair. `median` is that of the pairs during which the machine was quiet,
    None if it never was."""
    pairs = [
        {"ratio": b.mean_ttft_s / a.mean_ttft_s, "quiet": max(a.lag_ms, b.lag_ms) <= MOST_LAG_MS}
        for a, b in zip(alone, there, strict=True)
    ]
    ratios = [pair["ratio"] for pair in pairs if pair["quiet"]]
    return {"median": median(ratios) if ratios else None, "pairs": pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=14.0)
    parser.add_argument("--seeds", type=int, default=2, help="of virtual time; 0 leaves it out")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--rate", type=float, help="requests per second, instead of measuring the capacity")
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, ratio in found["virtual_mean_ttft_ratio"].items():  # type: ignore[attr-defined]
        print(f"virtual time, heard {name} late: mean TTFT {ratio['mean']:.3f} x one")
    for name, ratio in found["mean_ttft_ratio"].items():  # type: ignore[attr-defined]
        quiet = "the machine was never quiet" if ratio["median"] is None else f"{ratio['median']:.3f} x one"
        print(f"real time, {name}: mean TTFT {quiet} (pairs: {ratio['pairs']})")


if __name__ == "__main__":
    main()
