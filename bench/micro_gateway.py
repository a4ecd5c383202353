"""Measure the gateway's own Python per request and per streamed chunk, in CPU microseconds.

    python bench/micro_gateway.py [--json] [--profile CASE] [--set PATH=VALUE]

Everything between the two sockets is real: uvicorn's protocol, fast lane and ASGI path, planning, routing,
the exchange, the connection to the worker, metrics, request lines. The sockets are not real: when a request
is written, the connection gets the worker's answer directly. The figure is the least of several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import uvicorn
import uvloop

from kvroute.app.runtime import Runtime
from kvroute.app.server import uvicorn_config
from kvroute.config.config import Config
from kvroute.config.loading import load
from kvroute.fleet.worker import WorkerFacts, WorkerId, WorkerSpec
from kvroute.logs import configure
from kvroute.upstream.connection import UpstreamConnection

ANSWER = (
    b'{"id":"x","choices":[{"message":{"role":"assistant","content":"%b"}}],"usage":{"prompt_tokens":%d,'
    b'"completion_tokens":9,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}'
)
BLOCK_TOKENS = 16
LEG_ANSWER = (
    b'{"id":"x","choices":[{"message":{"role":"assistant","content":"a"}}],"usage":{"prompt_tokens":60},'
    b'"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e",'
    b'"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"remote_block_ids":[[%b1]]}}'
)
EVENT = (
    b'data: {"id":"chatcmpl-1","choices":[{"delta":{"content":"word "},"index":0}],"padding":"%b"}\n\n'
    % (b"x" * 140)
)
HEAD = b"HTTP/1.1 200 OK\r\ndate: today\r\nserver: uvicorn\r\n"
CHUNKS = 200


class Socket(asyncio.Transport):
    """Passes written bytes to `receive`."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self._receive = receive
        self._is_closing = False

    def write(self, data: Any) -> None:
        self._receive(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            # Of a large body, which is not copied, only the end matters.
            self._receive(bytes(data[-64:]) if isinstance(data, memoryview) else data)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close


class Bench:
    """A gateway with one client connection and one kept connection to each of two workers."""

    def __init__(self, runtime: Runtime, settings: uvicorn.Config) -> None:
        self.loop = asyncio.get_running_loop()
        self.answer: list[bytes] = []
        self.leg_answer: list[bytes] = []
        """That of a prefill worker."""
        self.answered = asyncio.Event()
        self.head = b""
        """The start of the last answer."""
        settings.load()
        state = uvicorn.server.ServerState()
        self.client: Any = settings.http_protocol_class(
            config=settings, server_state=state, app_state={}, _loop=self.loop
        )  # type: ignore[call-arg]
        self.client.connection_made(Socket(self._to_client))
        for worker in runtime.fleet.workers():
            pool: Any = runtime._transports.of(worker)._pool
            connection = UpstreamConnection(
                pool, self.loop, origin="bench", read_buffer_bytes=262144, outbox=runtime.plane.outbox
            )
            connection.connection_made(Socket(partial(self._to_worker, connection)))
            pool._idle[connection] = None

    def _to_client(self, data: bytes) -> None:
        if data.startswith(b"HTTP/"):
            self.head = data[:12]
        if data.endswith((b"}", b"0\r\n\r\n")):
            self.answered.set()

    def _to_worker(self, connection: UpstreamConnection, data: bytes) -> None:
        if data.endswith(b"}"):
            is_leg = bool(self.leg_answer) and data.find(b'"do_remote_decode":true') >= 0
            self.loop.call_soon(self._feed, connection, self.leg_answer if is_leg else self.answer)

    def _feed(self, connection: UpstreamConnection, answer: list[bytes]) -> None:
        for part in answer:
            connection.data_received(part)

    async def ask(self, parts: list[bytes]) -> None:
        self.answered.clear()
        for part in parts:
            self.client.data_received(part)
        await self.answered.wait()
        if self.head != b"HTTP/1.1 200":
            raise SystemExit(f"the gateway answered {self.head.decode()}")


def request(size: int, seed: int, *, stream: bool = False) -> list[bytes]:
    """The segments of a chat of `size` bytes, turns of 2 KB: a known conversation with a new last turn."""
    rng = random.Random(1)
    messages = [
        {"role": "user", "content": f"{rng.random()} " * (min(size, 2000) // 20)}
        for _ in range(max(1, size // 2000))
    ]
    messages[-1]["content"] += str(seed)
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 64, "stream": stream}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json\r\n"
        b"content-type: application/json\r\nauthorization: Bearer sk-1234\r\nuser-agent: bench/1\r\n"
        b"x-session-id: s%d\r\n"
        b"content-length: %d\r\n\r\n" % (seed, len(body))
    )
    whole = head + body
    return [whole[start : start + 262_144] for start in range(0, len(whole), 262_144)]


CASES = {
    "a: 200 B": (200, False, False),
    "b: 32 KB": (32_000, False, False),
    "c: 256 KB": (256_000, False, False),
    "d: chunk": (200, True, False),
    "two legs, 200 B": (200, False, True),
    "two legs, 32 KB": (32_000, False, True),
    "two legs, 256 KB": (256_000, False, True),
}
"""Size of the body in bytes, whether the answer is streamed, whether another worker computes the prompt."""
TWO_LEGS = "routing.prefill_decode.threshold_tokens=0"


def _whole(body: bytes) -> bytes:
    return HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def measure(lane: bool, case: str, profile: bool, settings: Sequence[str]) -> float:
    size, stream, has_roles = CASES[case]
    own = (
        "fleet.workers=[http://127.0.0.1:1, http://127.0.0.1:2]",
        "server.port=0",
        f"server.fast_lane={lane}",
        *((TWO_LEGS,) if has_roles else ()),
    )
    config = load(environ={}, assignments=(*own, *settings)).config
    runtime = Runtime(config)
    roles = ("prefill", "decode") if has_roles else (None, None)
    specs = [
        WorkerSpec(WorkerId(f"w{n}"), f"http://127.0.0.1:{n}", role=role) for n, role in enumerate(roles, 1)
    ]
    runtime.fleet.apply("bench", specs)
    for worker in runtime.fleet.workers():
        runtime.fleet.update_facts(
            worker, WorkerFacts(models=frozenset({"m"}), capacity_tokens=10_000_000, block_size=BLOCK_TOKENS)
        )
        runtime.fleet.mark_healthy(worker, time.monotonic())
    bench = Bench(runtime, uvicorn_config(config, runtime))
    if stream:
        chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
        bench.answer = [
            HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + chunk,
            *[chunk] * (CHUNKS - 1),
            b"0\r\n\r\n",
        ]
    else:
        # As an engine that has computed the same prompt before: all whole blocks are cached, without the last
        # token.
        tokens = size // 4
        cached = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        body = ANSWER % (b"x" * 200, tokens, tokens + 9, cached)
        bench.answer = [_whole(body)]
        if has_roles:
            bench.leg_answer = [_whole(LEG_ANSWER % (b"1000," * (size // 64)))]
    rounds = {200: 500, 32_000: 200, 256_000: 40}[size] // (10 if stream else 1)
    segments = [request(size, seed, stream=stream) for seed in range(rounds)]
    best = float("inf")
    profiler = cProfile.Profile() if profile else None
    for _ in range(8):
        if profiler:
            profiler.enable()
        start = time.process_time()
        for parts in segments:
            await bench.ask(parts)
        took = (time.process_time() - start) / rounds * 1e6
        if profiler:
            profiler.disable()
        best = min(best, took / CHUNKS if stream else took)
    if profiler:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(32)
    runtime.plane.journal.flush()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--profile", metavar="CASE", help="profile the case whose name starts with CASE; fast lane only"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="an option of the gateway; the requests' API key is sk-1234",
    )
    options = parser.parse_args()
    with open("/dev/null", "w") as nowhere:
        configure(Config().logging, nowhere)

        def run(lane: bool, case: str, profile: bool = False) -> float:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(measure(lane, case, profile, options.set))

        if options.profile:
            run(True, next(case for case in CASES if case.startswith(options.profile)), True)
            return
        results = {
            f"{'fast lane' if lane else 'complete path'}, {case}": run(lane, case)
            for case in CASES
            for lane in (True, False)
        }
    if options.json:
        json.dump(results, sys.stdout, indent=2)
        return
    for name, microseconds in results.items():
        print(f"{name:32}{microseconds:8.1f} us")


if __name__ == "__main__":
    main()
