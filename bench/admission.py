"""Fairness, weights, overload and priority of the gateway's queue: in virtual and in real time.

    python bench/admission.py [--virtual] [--seconds 60] [--only TEXT] [--output FILE]

Each case is run with simulated workers. In real time the gateway, the workers and the load are processes that
speak over sockets; in virtual time the gateway's router, permits and queue place the requests of simulated
engines. Every prompt is new, and answers are streamed.

In real time the load is one busy process on a shared core, and its own delays are part of the times that it
measures. The time to a refusal is therefore also measured by a process that does nothing else
(`admission_probe.py`); the goal is judged by that.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from admission_virtual import Outcomes, Sent, Traffic, outcomes, percentile
from admission_virtual import run as run_virtual
from comparison import CpuWatch, running_router, write_json
from gateway_machine import describe
from kvroute.admission.fair_queue import AdmissionOptions, Outcome
from kvroute.clock import SystemClock
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.sim.fleet import FleetRequest
from realtime import MODEL, WORDS

MOST_REFUSAL_S = 0.05
ALONE = "light alone"
OVERLOAD = "three times the capacity"
CONNECTIONS = ("new", "open")
_CODES = {"queue_full": Outcome.FULL, "queue_timeout": Outcome.DEADLINE}


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet, its limits, and the rate at which short requests use it fully."""

    workers: int
    admission: AdmissionOptions
    capacity: float
    """Requests of `short` per second."""
    seconds: float
    """Length of a run. Runs without the light key, whose requests are rare, take a third of it."""
    warm_up: float
    output_tokens: int
    """Mean length of the answers to short requests."""

    def short(self, key: str, share: float, **fields: Any) -> Traffic:
        """Short requests of one key that use `share` of the capacity."""
        return Traffic(key, share * self.capacity, 256, self.output_tokens, **fields)

    def long(self, key: str, tokens: float, **fields: Any) -> Traffic:
        """Requests with long prompts that have `tokens` tokens per second."""
        return Traffic(key, tokens / (16_384 + 64), 16_384, 64, **fields)

    @property
    def capacity_tokens(self) -> float:
        """Tokens per second at capacity."""
        return self.capacity * (256 + self.output_tokens)


VIRTUAL = Setting(4, AdmissionOptions(max_concurrent=64, max_wait_s=10.0), 70.0, 400.0, 30.0, 256)
REAL = Setting(4, AdmissionOptions(max_concurrent=24, max_wait_s=5.0), 90.0, 130.0, 15.0, 64)


def cases(setting: Setting) -> dict[str, list[Traffic]]:
    """The traffics of each run, by the name of the run."""
    flood = setting.short("flood", 1.5)
    long = setting.long("light", 1.5 * setting.capacity_tokens / 20)
    high = replace(long, priority=-1)
    return {
        ALONE: [long],
        "light with a key that sends 20 times its tokens": [long, flood],
        "weights 1 and 3": [setting.short("one", 2.0), setting.short("three", 2.0, weight=3.0)],
        "capacity": [setting.short("load", 1.0)],
        OVERLOAD: [setting.short("load", 3.0)],
        "light in a high class, with a low one at three times the capacity": [
            high,
            setting.short("low", 3.0),
        ],
    }


@dataclass(frozen=True, slots=True)
class AdmissionGoal:
    """A figure and its largest allowed value."""

    name: str
    figure: float
    bound: float

    @property
    def is_met(self) -> bool:
        return self.figure <= self.bound

    def __str__(self) -> str:
        word = "met" if self.is_met else "MISSED"
        return f"{self.name:62} {self.figure:7.3f}, at most {self.bound:6.3f}  {word}"


Refusals = dict[str, list[float]]
"""Seconds to a refusal that the probe measured, by kind of connection."""


def judge(
    setting: Setting, runs: dict[str, dict[str, Outcomes]], probed: dict[str, Refusals]
) -> list[AdmissionGoal]:
    """The goals of the queue."""

    def slower(together: str) -> float:
        return runs[together]["light"].p90_ttft_s / (runs[ALONE]["light"].p90_ttft_s or float("nan"))

    fair = slower("light with a key that sends 20 times its tokens")
    by_weight = runs["weights 1 and 3"]
    ratio = by_weight["three"].tokens_per_s / by_weight["one"].tokens_per_s / 3.0
    full, over = runs["capacity"]["load"], runs[OVERLOAD]["load"]
    preferred = slower("light in a high class, with a low one at three times the capacity")
    kept = full.tokens_per_s / over.tokens_per_s
    refusals = [each for kind in CONNECTIONS for each in probed.get(OVERLOAD, {}).get(kind, ())]
    refused_s = percentile(sorted(refusals), 0.99) if refusals else over.p99_refusal_s
    late = over.refused.get(Outcome.DEADLINE, 0) + over.refused.get(Outcome.DISPLACED, 0)
    return [
        AdmissionGoal("p90 TTFT of the light key / alone", fair, 1.2),
        AdmissionGoal("tokens of weight 3 / 3 x tokens of weight 1, distance from 1", abs(ratio - 1.0), 0.1),
        AdmissionGoal("tokens at capacity / at three times the capacity", kept, 1 / 0.97),
        AdmissionGoal("longest wait in s", over.longest_wait_s, setting.admission.max_wait_s),
        AdmissionGoal("requests refused after they had waited", late, 0),
        AdmissionGoal("p99 of the time to a refusal in s", refused_s, MOST_REFUSAL_S),
        AdmissionGoal("p90 TTFT of the high class / alone", preferred, 1.3),
    ]  # fmt: skip


# Real time.


@asynccontextmanager
async def running_workers(count: int, folder: Path) -> Any:
    """Run simulated workers in one process; yields their URLs and the process's id."""
    ports = free_ports(count)
    argv = (sys.executable, str(Path(__file__).parent / "realtime_workers.py"), MODEL, *map(str, ports))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    spec = ChildSpec("workers", argv, dict(os.environ), folder / "workers.log")
    async with ChildProcess(spec, SystemClock()) as process:
        await process.wait_ready(f"{urls[-1]}/health", timeout_s=30.0)
        yield urls, process.pid


def key_file(traffics: Sequence[Traffic], folder: Path) -> Path:
    """A file of keys: each traffic's key is its name."""
    keys = [
        {
            "name": traffic.key,
            "hash": "sha256:" + hashlib.sha256(traffic.key.encode()).hexdigest(),
            "weight": traffic.weight,
            "priority": traffic.priority,
        }
        for traffic in traffics
    ]
    file = folder / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    return file


def request_bytes(sent: Sent, random: Random) -> bytes:
    """A request on a connection of its own, with a prompt that no other request has."""
    request = sent.request
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": "".join(random.choices(WORDS, k=request.prompt_tokens)),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n"
        f"content-type: application/json\r\nauthorization: Bearer {sent.traffic.key}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def send(port: int, sent: Sent, data: bytes, began: float) -> None:
    """Send one request and record its result. Times count from `began`."""
    # Streams of asyncio instead of httpx, whose pool slows down with many connections (encode/httpx #3215).
    request = sent.request
    request.arrival_s = time.perf_counter() - began
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status == 200:
            await reader.readuntil(b"data: ")
            request.first_token_s = time.perf_counter() - began
        rest = await reader.read(-1)
    finally:
        writer.close()
    now = time.perf_counter() - began
    if status != 200:
        code = json.loads(rest)["error"]["code"]
        sent.outcome = _CODES[code]  # another error ends the run
        sent.waited_s = now - request.arrival_s  # of a served request the client cannot see it
        return
    if b"data: [DONE]" not in rest:
        raise RuntimeError("an answer is not complete")
    request.finished_s = now
    sent.outcome = Outcome.START


async def probe(port: int, key: str, setting: Setting) -> Refusals:
    """The times that a client of its own process measures after the warm-up."""
    await asyncio.sleep(setting.warm_up)
    seconds = max(0.0, setting.seconds - setting.warm_up - 1.0)
    script = Path(__file__).parent / "admission_probe.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(port), key, str(seconds), stdout=asyncio.subprocess.PIPE
    )
    written, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError("the probe failed")
    found: Refusals = json.loads(written)
    return found


async def refusals_inside(url: str, http: httpx.AsyncClient) -> str:
    """From the gateway's metrics: how long requests without a worker took from their arrival on."""
    page = (await http.get(f"{url}/metrics")).text
    within: dict[str, float] = {}
    for labels, count in re.findall(r"kvroute_request_duration_seconds_bucket\{(.*)\} (\S+)", page):
        bound = re.search('le="([^"]+)"', labels)
        if 'worker="-"' in labels and bound is not None:
            within[bound[1]] = within.get(bound[1], 0.0) + float(count)
    return ", ".join(f"{count:.0f} within {bound} s" for bound, count in within.items())


async def run_real(
    traffics: Sequence[Traffic], setting: Setting, seed: int, *, probes: bool
) -> tuple[dict[str, Outcomes], float, Refusals]:
    """The figures by key, the largest delay of a sending in seconds, and the times of the probe."""
    random = Random(seed)
    planned = sorted(
        (
            (at, Sent(traffic, FleetRequest((), traffic.prompt_tokens, traffic.output(random))))
            for traffic in traffics
            for at in traffic.arrivals(setting.seconds, random)
        ),
        key=lambda one: one[0],
    )
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    late, probing = 0.0, None
    with TemporaryDirectory() as name:
        folder = Path(name)
        settings = (
            f"server.client_keys.file={key_file(traffics, folder)}",
            f"admission.max_concurrent={setting.admission.max_concurrent}",
            f"admission.max_wait_s={setting.admission.max_wait_s}",
        )
        async with (
            httpx.AsyncClient(limits=limits, timeout=120.0, trust_env=False) as http,
            running_workers(setting.workers, folder) as (urls, workers_pid),
            running_router(
                "prefixaware", urls, http, model=MODEL, folder=folder, peers=folder, settings=settings
            ) as started,
        ):
            requests = [request_bytes(sent, random) for _, sent in planned]
            port = int(started.url.rsplit(":", 1)[1])
            watch = CpuWatch({"router": started.pid, "workers": workers_pid})
            began = time.perf_counter() + 0.2
            async with asyncio.TaskGroup() as group:
                if probes:
                    probing = group.create_task(probe(port, traffics[0].key, setting))
                for (at, sent), data in zip(planned, requests, strict=True):
                    await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
                    late = max(late, time.perf_counter() - began - at)
                    group.create_task(send(port, sent, data, began))
            if probes:
                print("   refusals inside the gateway:", await refusals_inside(started.url, http))
            print("   cores:", {part: round(cores, 2) for part, cores in watch.cores().items()})
    return (
        {
            traffic.key: outcomes(
                [sent for _, sent in planned if sent.traffic is traffic], setting.warm_up, setting.seconds
            )
            for traffic in traffics
        },
        late,
        {} if probing is None else probing.result(),
    )


def summary(times: Sequence[float]) -> str:
    """Percentiles in ms."""
    ordered = sorted(times)
    if not ordered:
        return "none"
    figures = {f"p{100 * share:g}": percentile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0)}
    listed = ", ".join(f"{name} {1000 * each:.1f}" for name, each in figures.items())
    return f"{len(ordered)} times, {listed} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--virtual", action="store_true", help="in virtual time")
    parser.add_argument("--seconds", type=float, help="length of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only runs whose names begin with TEXT; no goals"
    )
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()

    setting = VIRTUAL if options.virtual else REAL
    if options.seconds:
        setting = replace(setting, seconds=options.seconds)
    runs: dict[str, dict[str, Outcomes]] = {}
    delays: dict[str, float] = {}
    probed: dict[str, Refusals] = {}
    whole = setting
    for name, traffics in cases(setting).items():
        if not name.startswith(options.only):
            continue
        print(name, flush=True)
        is_rare = any(traffic.key == "light" for traffic in traffics)
        setting = whole if is_rare else replace(whole, seconds=whole.seconds / 3)
        if options.virtual:
            runs[name] = run_virtual(
                traffics,
                setting.admission,
                workers=setting.workers,
                seconds=setting.seconds,
                warm_up=setting.warm_up,
                seed=options.seed,
            )
        else:
            runs[name], delays[name], refusals = asyncio.run(
                run_real(traffics, setting, options.seed, probes=name == OVERLOAD)
            )
            print(f"   sent at most {1000 * delays[name]:.0f} ms late")
            for kind, times in refusals.items():
                print(f"   probe, {kind} connection: {summary(times)}", flush=True)
                probed.setdefault(name, {})[kind] = times
        for key, found in runs[name].items():
            print(
                f"   {key:6} sent {found.sent:6} done {found.done:6} tokens/s {found.tokens_per_s:8.0f}  "
                f"TTFT p50 {found.p50_ttft_s:6.3f} p90 {found.p90_ttft_s:6.3f} s  "
                f"longest wait {found.longest_wait_s:6.3f} s  p99 of refusals {found.p99_refusal_s:5.3f} s  "
                f"refused {found.refused}",
                flush=True,
            )
    verdicts = [] if options.only else judge(whole, runs, probed)
    print("", *map(str, verdicts), sep="\n")
    if options.output:
        document = {
            "time": "virtual" if options.virtual else "real",
            "setting": {
                **{name: getattr(whole, name) for name in Setting.__slots__},
                "admission": whole.admission.model_dump(),
            },
            "machine": describe(),
            "runs": runs,
            "sent_late_s": delays,
            "probed_refusals_s": probed,
            "verdicts": [{**asdict(one), "met": one.is_met} for one in verdicts],
        }
        write_json(options.output, document)


if __name__ == "__main__":
    main()
