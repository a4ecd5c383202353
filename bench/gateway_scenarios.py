"""The scenarios of the gateway benchmark: their requests, routers and figures."""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gateway_goals import (
    COMPLETE,
    DIRECT,
    KV_AWARE,
    KV_PREFIX,
    OURS,
    ROLES,
    SESSION,
    THEIRS,
    Measurement,
)
from gateway_machine import CpuSpent, busy_s, cpu_sample, memory_mib, process_tree, spent
from gateway_requests import conversation, text
from gateway_running import Bed, Started, ask

OTHERS = ("nginx", "vllm-router")
LOAD_TIMEOUT_S = 180
BUSY_CORES = 0.35
TOKENIZING = 'kvroute_tokenizing_cpu_seconds_total{thread="loop"}'
HANDOVERS = "kvroute_handovers_total{"
LEAST_HANDED_OVER = 0.8
"""A run through two legs counts only if this share of its requests took both."""
TURNS = 8
TURN_TOKENS = 64_000
WARMING_CONVERSATIONS = 2


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario. `most` limits the requests per run. If `file` is empty, `kind` determines the requests.

    `pause_s`: the gateway is idle for this time before each run, so that its connections to workers expire.
    """

    name: str
    title: str
    kind: str
    file: str = ""
    connections: int = 1
    most: int = 0
    routers: tuple[str, ...] = ()
    pause_s: float = 0.0


PLAIN = (*OTHERS, THEIRS, OURS, COMPLETE)
SCENARIOS = {
    each.name: each
    for each in (
        Scenario("a", "200 B prompts, 16 connections", "closed", "a", 16, 40_000, (*PLAIN, SESSION, ROLES)),
        Scenario("b", "32 KB bodies, 16 connections", "closed", "b", 16, 8_000, (*PLAIN, SESSION)),
        Scenario("c", "256 KB bodies, 8 turns, 8 connections", "closed", "c", 8, 1_536, (*PLAIN, ROLES)),
        Scenario("d", "32 streams", "streams", "d", 32, 64, (*OTHERS, THEIRS, OURS)),
        Scenario("e", "192 streams", "streams", "d", 192, 192, (*OTHERS, THEIRS, OURS)),
        Scenario("f", "640 streams", "streams", "d", 640, 640, (*OTHERS, THEIRS, OURS)),
        Scenario("l", "one connection; 16 streams", "latency", routers=(DIRECT, *OTHERS, THEIRS, OURS)),
        # These two are for compare.py only: no router is measured with them.
        Scenario("n", "200 B prompts, a new connection for each", "closed", "a", 1000, 1000),
        Scenario("p", "16 streams after a pause of 6 s", "streams", "d", 16, 16, pause_s=6.0),
        Scenario("ka", "a over event workers", "closed", "a", 16, 40_000, (KV_PREFIX, KV_AWARE)),
        Scenario("kb", "b over event workers", "closed", "b", 16, 8_000, (KV_PREFIX, KV_AWARE)),
        Scenario("t", "64K-token turns, exact tokens", "tokens", routers=(KV_AWARE,)),
    )
}


class Runner:
    """Makes single runs. Mutable: the number of requests per run, by router and scenario, measured at first.

    `run_again`: repeat a run once if other processes used more than `BUSY_CORES` during it. `totals`:
    requests of a run by scenario, the same for every router; the first router that is warmed up sets missing
    entries.
    """

    def __init__(
        self,
        bed: Bed,
        files: dict[str, Path],
        seconds: float,
        *,
        run_again: bool,
        totals: dict[str, int] | None = None,
    ) -> None:
        self._bed = bed
        self._files = files
        self._seconds = seconds
        self._run_again = run_again
        self._totals: dict[tuple[str, str], int] = {}
        self._common_totals = totals

    def run(self, scenario: Scenario, started: Started, repeat: int) -> Measurement:
        """One run; if other processes used the machine, the better one of two."""
        kinds = {
            "closed": self._closed,
            "streams": self._streams,
            "latency": self._latency,
            "tokens": self._tokens,
        }
        work = partial(kinds[scenario.kind], scenario, started, repeat)
        first = self._watched(scenario, started, repeat, work)
        if first.foreign_cores <= BUSY_CORES or not self._run_again:
            return first
        second = self._watched(scenario, started, repeat, work)
        return min(first, second, key=lambda one: (one.errors, one.foreign_cores))

    def warm_up(self, scenario: Scenario, started: Started) -> None:
        """Fill caches and pools, and measure how many requests a run needs."""
        if scenario.kind == "closed":
            self._load(started, scenario.file, scenario.connections, 64)
            rate = self._load(started, scenario.file, scenario.connections, 256)
            more = max(64, int(rate["requests"] / rate["seconds"] * 0.25))
            rate = self._load(started, scenario.file, scenario.connections, min(more, scenario.most))
            total = min(max(int(rate["requests"] / rate["seconds"] * self._seconds), 128), scenario.most)
            if self._common_totals is not None:
                total = self._common_totals.setdefault(scenario.name, total)
            self._totals[started.router.name, scenario.name] = total
        elif scenario.kind in ("streams", "latency"):
            self._load(started, "d", 8, 8)
            self._load(started, "a", 1, 64)
        else:
            for number in range(WARMING_CONVERSATIONS):
                self._converse(started, token_turns(random.Random(f"warm {number}"), self._bed.model_folder))

    def _watched(
        self,
        scenario: Scenario,
        started: Started,
        repeat: int,
        work: Callable[[], tuple[dict[str, float], int]],
    ) -> Measurement:
        time.sleep(scenario.pause_s)
        own_before, busy_before, began = self._own_s(), busy_s(), time.monotonic()
        figures, errors = work()
        foreign = (busy_s() - busy_before) - (self._own_s() - own_before)
        cores = max(0.0, foreign / (time.monotonic() - began))
        figures |= memory_mib(started.tree())
        return Measurement(started.router.name, scenario.name, repeat, figures, errors, round(cores, 3))

    def _own_s(self) -> float:
        """CPU seconds of all processes of the benchmark, including children that have ended."""
        times = os.times()
        mine = times.user + times.system + times.children_user + times.children_system
        pids = [pid for root in self._bed.own_pids for pid in process_tree(root)]
        return mine + sum(cpu_sample(pids).processes.values()) / 1e9

    def _load(self, started: Started, file: str, connections: int, total: int) -> dict[str, Any]:
        return self.load(str(started.port), file, connections, total)

    def load(self, ports: str, file: str, connections: int, total: int) -> dict[str, Any]:
        """Send requests to the ports, separated by commas. Raises RuntimeError."""
        command = [str(self._bed.tools["load"]), ports, str(self._files[file])]
        done = subprocess.run(
            [*command, str(connections), str(total)],
            capture_output=True,
            text=True,
            timeout=LOAD_TIMEOUT_S,
            check=False,
            preexec_fn=partial(os.sched_setaffinity, 0, self._bed.cores.rest),
        )
        if done.returncode:
            raise RuntimeError(f"load to {ports}: {done.stderr.strip()}")
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def _timed_load(
        self, started: Started, file: str, connections: int, total: int
    ) -> tuple[dict[str, Any], CpuSpent]:
        before = cpu_sample(started.tree())
        result = self._load(started, file, connections, total)
        return result, spent(before, cpu_sample(started.tree()))

    def _over(self, started: Started, work: Callable[[], None]) -> tuple[CpuSpent, float]:
        """The CPU that the router used during `work`, and the seconds."""
        before, began = cpu_sample(started.tree()), time.monotonic()
        work()
        return spent(before, cpu_sample(started.tree())), time.monotonic() - began

    def _closed(self, scenario: Scenario, started: Started, repeat: int) -> tuple[dict[str, float], int]:
        total = self._totals[started.router.name, scenario.name]
        tokenized_s, handed_over = self._tokenizing_s(started), self._handovers(started)
        result, cpu = self._timed_load(started, scenario.file, scenario.connections, total)
        tokenized_us = (self._tokenizing_s(started) - tokenized_s) * 1e6 / result["requests"]
        main_us = cpu.main_ns / 1000 / result["requests"]
        figures = {
            "cpu_us_request": cpu.all_ns / 1000 / result["requests"],
            "main_us_request": main_us,
            "untokenized_us_request": main_us - tokenized_us,
            "requests_s": result["requests"] / result["seconds"],
            "utilisation": cpu.all_ns / 1e9 / result["seconds"],
            "p50_us": result["latency"]["p50"],
            "p99_us": result["latency"]["p99"],
            "sticky": result["sticky"],
        }
        errors: int = result["errors"]
        if started.router.name == ROLES:
            figures["handed_over"] = (self._handovers(started) - handed_over) / result["requests"]
            errors += figures["handed_over"] < LEAST_HANDED_OVER
        return figures, errors

    def _tokenizing_s(self, started: Started) -> float:
        """CPU seconds of the main thread for exact tokens; 0 without a strategy that needs them."""
        return _metric(started, TOKENIZING) if started.router.workers == "events" else 0.0

    def _handovers(self, started: Started) -> float:
        return _metric(started, HANDOVERS) if started.router.name == ROLES else 0.0

    def _streams(self, scenario: Scenario, started: Started, repeat: int) -> tuple[dict[str, float], int]:
        result, cpu = self._timed_load(started, scenario.file, scenario.connections, scenario.most)
        chunks = max(1, result["events"])
        figures = {
            "cpu_us_chunk": cpu.all_ns / 1000 / chunks,
            "chunks_s": chunks / result["seconds"],
            "chunks_a_read": chunks / result["reads"],
            "utilisation": cpu.all_ns / 1e9 / result["seconds"],
            **_tail("first_byte", result),
            **_tail("transit", result),
        }
        return figures, result["errors"]

    def _latency(self, scenario: Scenario, started: Started, repeat: int) -> tuple[dict[str, float], int]:
        short, medium = self._load(started, "a", 1, 600), self._load(started, "b", 1, 300)
        streams = self._load(started, "d", 16, 32)
        figures = {
            "a_p50_us": short["latency"]["p50"],
            "a_p99_us": short["latency"]["p99"],
            "b_p50_us": medium["latency"]["p50"],
            "b_p99_us": medium["latency"]["p99"],
            **_tail("first_byte", streams),
            **_tail("transit", streams),
        }
        return figures, short["errors"] + medium["errors"] + streams["errors"]

    def _tokens(self, scenario: Scenario, started: Started, repeat: int) -> tuple[dict[str, float], int]:
        """Several turns of a conversation of 64K tokens whose first turn is known. CPU is that of all threads
        from the second turn on, including cache events, minus the CPU of an idle gateway."""
        turns = token_turns(random.Random(repeat), self._bed.model_folder)
        self._converse(started, turns[:1])
        time.sleep(0.5)  # wait for its cache events
        idle, idle_s = self._over(started, lambda: time.sleep(1.0))
        answers: list[TurnAnswer] = []
        cpu, window_s = self._over(started, lambda: answers.extend(self._converse(started, turns[1:])))
        figures = {
            "cpu_us_request": (cpu.all_ns - idle.all_ns * window_s / idle_s) / 1000 / len(answers),
            "main_us_request": (cpu.main_ns - idle.main_ns * window_s / idle_s) / 1000 / len(answers),
            "idle_us_s": idle.all_ns / 1000 / idle_s,
            "prompt_tokens": statistics.median(answer.prompt_tokens for answer in answers),
            "p50_us": statistics.median(answer.took_us for answer in answers),
        }
        return figures, sum(not answer.is_known for answer in answers)

    def _converse(self, started: Started, turns: Sequence[bytes]) -> list[TurnAnswer]:
        """Send the turns one after another on one connection."""
        connection = http.client.HTTPConnection("127.0.0.1", started.port, timeout=60)
        answers = []
        try:
            for turn in turns:
                answers.append(_ask_turn(connection, turn))
                time.sleep(0.05)
        finally:
            connection.close()
        return answers


def _metric(started: Started, beginning: str) -> float:
    """The sum of the gateway's series whose names begin like this."""
    _, _, page = ask(started.port, "/metrics")
    rows = (line.rpartition(" ") for line in page.decode().splitlines())
    return sum(float(value) for name, _, value in rows if name.startswith(beginning))


def _tail(what: str, result: dict[str, Any]) -> dict[str, float]:
    return {f"{what}_{share}_us": result[what][share] for share in ("p50", "p99")}


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    prompt_tokens: int
    predicted_tokens: int
    reason: str
    took_us: float

    @property
    def is_known(self) -> bool:
        """Whether all exact tokens were cached, except the new turn and the answer before it."""
        return self.reason == "kv_hit" and self.predicted_tokens >= 0.95 * self.prompt_tokens


def _ask_turn(connection: http.client.HTTPConnection, body: bytes) -> TurnAnswer:
    began = time.perf_counter_ns()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    took_us = (time.perf_counter_ns() - began) / 1000
    if answer.status != http.client.OK:
        raise RuntimeError(f"a turn of 64K tokens was answered {answer.status}: {content[:300]!r}")
    usage = json.loads(content)["usage"]
    return TurnAnswer(
        usage["prompt_tokens"],
        int(answer.headers.get("x-kvroute-hit-tokens", 0)),
        answer.headers.get("x-kvroute-reason", ""),
        took_us,
    )


def token_turns(rng: random.Random, model_folder: Path) -> list[bytes]:
    """The bodies of the turns; the middle one has about `TURN_TOKENS` tokens."""
    from tokenizers import Tokenizer

    sample = text(rng, 50_000)
    encoding = Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(sample)
    chars = round(TURN_TOKENS * len(sample) / len(encoding.ids))
    history = (chars - 32_000) // 4_100 - TURNS // 2
    turns = conversation(rng, text(rng, 32_000), history, 1 + TURNS)
    return [json.dumps(body | {"max_tokens": 16}).encode() for body in turns]
