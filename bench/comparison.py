"""Shared parts of the comparisons of routers: start routers with their defaults, send streamed requests,
compute figures.

Time to first token is the time from sending a request to its first server-sent event, in seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx

from gateway_machine import busy_s, cpu_sample, process_tree, spent
from gateway_routers import Command, Launch, kvroute, sglang_router, vllm_router
from kvroute.clock import SystemClock
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec

PEERS_FOLDER = Path(__file__).parent / ".venv-peers"
READY_S = 60.0
REQUEST_S = 600.0
OURS = ("prefixaware", "kvaware")
PEERS = ("sglang-router", "vllm-router")
"""Both run with their policy `cache_aware`, which is also their default."""
EVENTS_PEER = "vllm-router kv_aware"
"""Runs only if `--routers` names it, and is not judged: 0.1.17 reads events from the configured sources, but
found no prefix with the simulated workers (its `kv_placement_lookups_total` counts misses only)."""


def vllm_router_kv_aware(sources: Mapping[str, Mapping[str, Any]], model: str, block_size: int) -> Command:
    """vllm-router's policy on KV events. `sources`: each worker's answer of `/kv_event_sources`, by URL."""

    def command(launch: Launch) -> list[str]:
        line = vllm_router(launch)
        line[line.index("cache_aware")] = "kv_aware"
        line += ["--kv-event-block-size", str(block_size), "--kv-event-model", model]
        for worker in launch.workers:
            source = sources[worker]["0"]
            line += ["--kv-event-source", f"{worker}={reachable(source['endpoint'])}"]
            line += ["--kv-event-replay-source", f"{worker}={reachable(source['replay_endpoint'])}"]
        return line

    return command


def reachable(endpoint: str) -> str:
    """The address, on this host, of a ZMQ endpoint that is bound to every interface."""
    return endpoint.replace("*", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")


async def commands(
    http: httpx.AsyncClient, workers: Sequence[str], model: str, settings: Sequence[str] = ()
) -> dict[str, Command]:
    """The command of each router in front of `workers`, which already run. Routers run with their defaults;
    only kvroute gets `settings` (`PATH=VALUE`)."""
    sources: dict[str, dict[str, Any]] = {}
    for worker in workers:
        sources[worker] = (await http.get(f"{worker}/kv_event_sources")).json()
    text = (await http.get(f"{workers[0]}/metrics")).text
    block_size = int(text.split('block_size="')[1].split('"')[0])
    return {
        **{strategy: kvroute(strategy, *settings) for strategy in (*OURS, "roundrobin")},
        "sglang-router": sglang_router,
        "vllm-router": vllm_router,
        EVENTS_PEER: vllm_router_kv_aware(sources, model, block_size),
    }


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router that is ready and uses all its workers."""

    url: str
    pid: int


@asynccontextmanager
async def running_router(
    name: str,
    workers: Sequence[str],
    http: httpx.AsyncClient,
    *,
    model: str,
    folder: Path,
    peers: Path,
    model_folder: Path | None = None,
    settings: Sequence[str] = (),
) -> AsyncIterator[RunningRouter]:
    """Run the router `name` in front of `workers` until the block ends. Raises `ProcessFailed` or
    TimeoutError with the end of the router's log if the router does not become ready."""
    command = (await commands(http, workers, model, settings))[name]
    port, side_port = free_ports(2)
    argv = command(Launch(folder, peers, workers, port, side_port, model_folder or folder))
    log = folder / f"{name.replace(' ', '-')}.log"
    process = ChildProcess(ChildSpec(name, tuple(argv), dict(os.environ), log), SystemClock())
    url = f"http://127.0.0.1:{port}"
    async with process:
        path = "readiness" if name.split()[0] in PEERS else "ready"
        await process.wait_ready(f"{url}/{path}", timeout_s=READY_S)
        try:
            async with asyncio.timeout(READY_S):
                while not serves_all((await http.get(f"{url}/{path}")).json(), len(workers)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise process.failure("did not find all workers") from None
        yield RunningRouter(url, process.pid)


def serves_all(ready: Mapping[str, Any], workers: int) -> bool:
    """Whether a router's readiness answer says that it uses every worker, without a note."""
    if "healthy_workers" in ready:
        return int(ready["healthy_workers"]) >= workers
    return [*ready["workers"].values()].count("healthy") >= workers and not ready["notes"]


@dataclass(frozen=True, slots=True)
class Answered:
    """A request with its times. If `error` is not empty the request failed, and only `sent_s` is set."""

    sent_s: float
    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str = ""


async def request_streamed(http: httpx.AsyncClient, url: str, body: bytes) -> Answered:
    """POST a streamed request and read its whole answer. A failure is in the result; nothing is raised."""
    sent = time.perf_counter()
    first, events = 0.0, []
    try:
        headers = {"content-type": "application/json"}
        async with http.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code != 200:
                detail = (await response.aread())[:200]
                return Answered(sent, error=f"status {response.status_code}: {detail!r}")
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    first = first or time.perf_counter()
                    events.append(line[5:].strip())
    except httpx.HTTPError as error:
        return Answered(sent, error=f"{type(error).__name__}: {error}")
    total = time.perf_counter() - sent
    if not events or events[-1] != "[DONE]":
        return Answered(sent, error="the stream did not end with [DONE]")
    text, prompt, cached = read_events(events[:-1])
    return Answered(sent, first - sent, total, prompt, cached, text)


def read_events(events: Iterable[str]) -> tuple[str, int, int]:
    """The text of a streamed answer, its prompt tokens, and its cached prompt tokens."""
    parts: list[str] = []
    prompt = cached = 0
    for event in map(json.loads, events):
        for choice in event["choices"]:
            parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        if usage := event.get("usage"):
            prompt = usage["prompt_tokens"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return "".join(parts), prompt, cached


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run, or medians of several runs. Seconds; `hit` is the share of prompt tokens found in
    caches."""

    requests: float
    failed: float
    mean: float
    p50: float
    p90: float
    p99: float
    hit: float
    cached_tokens: float
    prompt_tokens: float


def figures(answers: Sequence[Answered]) -> Figures:
    """Compute the figures of one run. Raises ValueError if no request was answered."""
    good = [answer for answer in answers if not answer.error]
    if not good:
        raise ValueError(f"no request was answered: {answers[0].error if answers else 'none was sent'}")
    ttft = sorted(answer.ttft_s for answer in good)
    prompt = sum(answer.prompt_tokens for answer in good)
    cached = sum(answer.cached_tokens for answer in good)
    return Figures(
        requests=len(answers),
        failed=len(answers) - len(good),
        mean=fmean(ttft),
        p50=quantile(ttft, 0.5),
        p90=quantile(ttft, 0.9),
        p99=quantile(ttft, 0.99),
        hit=cached / prompt if prompt else 0.0,
        cached_tokens=cached,
        prompt_tokens=prompt,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def medians(runs: Sequence[Figures]) -> Figures:
    """The median of each figure."""
    return Figures(*(median(getattr(run, field.name) for run in runs) for field in fields(Figures)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure of kvroute and of another router. The goal is that kvroute's is less."""

    subject: str
    peer: str
    figure: str
    ours: float
    theirs: float

    @property
    def is_met(self) -> bool:
        return self.ours < self.theirs

    def __str__(self) -> str:
        word = "met" if self.is_met else "MISSED"
        ratio = self.ours / self.theirs if self.theirs else float("inf")
        return (
            f"{self.subject:12} {self.figure:5} {self.ours:8.3f} against {self.peer:21} {self.theirs:8.3f}"
            f"  x{ratio:.2f}  {word}"
        )


def verdicts(of: Mapping[str, Figures], peers: Sequence[str] = PEERS) -> list[Verdict]:
    """Compare mean and p90 of kvroute with those of each other router that ran. If kvroute failed requests,
    its goals are missed; a router that failed requests is skipped."""
    found = []
    for subject in OURS:
        for peer in peers:
            if subject in of and peer in of and not of[peer].failed:
                for name in ("mean", "p90"):
                    ours = getattr(of[subject], name) if not of[subject].failed else float("inf")
                    found.append(Verdict(subject, peer, name, ours, getattr(of[peer], name)))
    return found


def table(rows: Iterable[tuple[str, Figures]]) -> list[str]:
    """Lines of the table to print; times in milliseconds."""
    lines = [f"{'router':22}{'mean':>8}{'p50':>8}{'p90':>8}{'p99':>8}{'hit':>7}{'cached':>11}{'failed':>8}"]
    for name, one in rows:
        times = "".join(f"{1000 * value:8.0f}" for value in (one.mean, one.p50, one.p90, one.p99))
        lines.append(f"{name:22}{times}{one.hit:7.3f}{one.cached_tokens:11.0f}{one.failed:8.0f}")
    return lines


class CpuWatch:
    """CPU of process trees since the object was created. `trees`: process ids by name."""

    def __init__(self, trees: Mapping[str, int]) -> None:
        self._trees = trees
        self._began = time.monotonic()
        self._busy = busy_s()
        self._own = time.process_time()
        self._before = {name: cpu_sample(process_tree(pid)) for name, pid in trees.items()}

    def cores(self) -> dict[str, float]:
        """Mean cores used by each tree, by this process (`load`) and by the whole `machine`."""
        passed = time.monotonic() - self._began
        used = {
            name: spent(self._before[name], cpu_sample(process_tree(pid))).all_ns / 1e9
            for name, pid in self._trees.items()
        }
        used |= {"load": time.process_time() - self._own, "machine": busy_s() - self._busy}
        return {name: round(value / passed, 3) for name, value in used.items()}


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, default=asdict) + "\n")
