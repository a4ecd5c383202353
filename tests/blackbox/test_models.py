"""Predicted hits against what real engines of today's models found, replayed from recordings."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.blackbox.conftest import spawn
from tests.recordings import Asked, Recording, Step, read
from tests.support.sockets import tcp_server
from tests.support.waiting import until

MODEL = "recorded"
END = b"\xff" * 8


class RecordedWorker:
    """An engine that answers and publishes as a recording says; without one it finds nothing in its cache.

    Mutable: `step` is what the next requests are a part of, `served` counts the requests.
    """

    def __init__(self, block_tokens: int) -> None:
        self.step: Step | None = None
        self.served = 0
        self.published = 0
        self.url = ""
        self._block_tokens = block_tokens
        self._buffer: list[Sequence[bytes]] = []
        self._context = zmq.asyncio.Context()
        self._live, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (self._live, self._replay)]
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, stack: AsyncExitStack) -> None:
        port = await stack.enter_async_context(tcp_server(self._serve))
        self.url = f"http://127.0.0.1:{port}"
        task = asyncio.create_task(self._replays())
        stack.callback(lambda: self._context.destroy(linger=0))
        stack.callback(task.cancel)

    async def publish(self, frames: Sequence[bytes]) -> None:
        self._buffer.append(frames)
        self.published += 1
        await self._live.send_multipart(list(frames))

    async def _replays(self) -> None:
        while True:
            peer, _, start = await self._replay.recv_multipart()
            for frames in self._buffer[int.from_bytes(start) :]:
                await self._replay.send_multipart([peer, b"", *frames])
            await self._replay.send_multipart([peer, b"", b"", END, b""])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                lines = head.lower().split("\r\n")
                length = next((int(each[15:]) for each in lines if each.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                kind, text = await self._answer(head.split(" ", 2)[1].split("?")[0], body)
                data = text.encode()
                writer.write(
                    b"HTTP/1.1 %d OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
                    % (404 if kind == "none" else 200, kind.encode(), len(data))
                    + data
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes) -> tuple[str, str]:
        live, replay = (f"tcp://127.0.0.1:{port}" for port in self._ports)
        source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": live, "topic": "kv"}
        pages = {
            "/health": "{}",
            "/version": '{"version": "0.32.0"}',
            "/v1/models": json.dumps(
                {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]}
            ),
            "/kv_event_sources": json.dumps({"0": {**source, "replay_endpoint": replay}}),
        }
        if path == "/metrics":
            labels = (
                f'block_size="{self._block_tokens}",num_gpu_blocks="4096",enable_prefix_caching="True",'
                f'kv_cache_size_tokens="{4096 * self._block_tokens}",engine="0"'
            )
            return "text/plain", f"vllm:cache_config_info{{{labels}}} 1.0\n"
        if path == "/v1/completions":
            return "application/json", await self._complete(json.loads(body))
        if path == "/tokenize":  # the gateway compares samples, and then reads the ids of prompts itself
            tokens = [100 + byte for byte in body]
            answer = {"count": len(tokens), "max_model_len": 32768, "tokens": tokens}
            return "application/json", json.dumps(answer)
        return ("application/json", pages[path]) if path in pages else ("none", "{}")

    async def _complete(self, body: dict[str, object]) -> str:
        self.served += 1
        ids, asked = body["prompt"], Asked((), (0,), 0)
        assert isinstance(ids, list)
        if self.step is not None:
            asked = next(each for each in self.step.requests if list(each.prompt) == ids)
            messages, self.step = self.step.messages, Step(self.step.requests, ())
            for frames in messages:
                await self.publish(frames)
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(asked.answer),
            "total_tokens": len(ids) + len(asked.answer),
            "prompt_tokens_details": {"cached_tokens": asked.cached_tokens},
        }
        choice = {"index": 0, "text": "x", "finish_reason": "stop"}
        return json.dumps({"id": "c", "object": "text_completion", "choices": [choice], "usage": usage})


Start = Callable[[int], Awaitable[RecordedWorker]]


@pytest.fixture
def worker(processes: AsyncExitStack) -> Start:
    """`await worker(32)` starts a worker with blocks of 32 tokens."""

    async def start(block_tokens: int) -> RecordedWorker:
        engine = RecordedWorker(block_tokens)
        await engine.open(processes)
        return engine

    return start


def metric(page: str, name: str) -> float:
    """The sum of a family's samples."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{name}{{"))


async def is_ready(client: httpx.AsyncClient) -> bool:
    """Whether the gateway follows all workers and has exact tokens."""
    return not (await client.get("/ready")).json()["notes"]


async def replayed(
    recording: Recording, engine: RecordedWorker, url: str
) -> tuple[list[tuple[int, int]], str, list[str]]:
    """(predicted, found) of every request that was alone, the metrics at the end, and the notes of /ready."""
    results: list[tuple[int, int]] = []
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:

        async def has_applied() -> bool:
            page = (await client.get("/metrics")).text
            return metric(page, "kvroute_kv_events_messages_total") >= engine.published

        async def ask(asked: Asked) -> httpx.Response:
            body = {"model": MODEL, "prompt": list(asked.prompt), "max_tokens": 8}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer

        await until(lambda: is_ready(client), within_s=60)
        for step in recording.steps:
            engine.step = step
            answers = await asyncio.gather(*map(ask, step.requests))
            await until(has_applied, within_s=60)
            if len(answers) == 1:
                hit = int(answers[0].headers["x-kvroute-hit-tokens"])
                results.append((hit, step.requests[0].cached_tokens))
        return results, (await client.get("/metrics")).text, (await client.get("/ready")).json()["notes"]


@pytest.mark.parametrize(
    ("name", "number"), [("gpt_oss_eviction", 1), ("gemma3", 1), ("qwen3_next", 1), ("granite4", 2)]
)
async def test_hybrid_models_hits_are_predicted_as_their_engines_find_them(
    serve, worker, name: str, number: int
) -> None:
    recording = read(name)
    engine = await worker(recording.engine["block_size"])
    running = await serve("--worker", engine.url, "--strategy", "kvaware", "--processes", str(number))
    results, page, notes = await replayed(recording, engine, running.url)
    wrong = [each for each in results if each[0] != each[1]]
    # Another process gets its changes by a message, perhaps after the next request.
    assert len(wrong) <= (0 if number == 1 else len(results) // 50), wrong
    assert sum(found > 0 for _, found in results) >= 20
    assert notes == []
    assert 'trust="none"' not in page


@pytest.mark.parametrize(("name", "number"), [("llama_eagle", 1), ("gpt_oss_eagle", 1), ("llama_eagle", 2)])
async def test_an_eagle_drafters_drop_is_learned_and_the_map_stays_in_use(
    serve, worker, name: str, number: int
) -> None:
    """Each process learns from the answers that it has passed on itself."""
    recording = read(name)
    engine = await worker(recording.engine["block_size"])
    running = await serve("--worker", engine.url, "--strategy", "kvaware", "--processes", str(number))
    results, page, notes = await replayed(recording, engine, running.url)
    wrong = [each for each in results if each[0] != each[1]]
    # Another process gets its changes by a message, perhaps after the next request.
    assert 3 <= len(wrong) <= 3 * number + (0 if number == 1 else len(results) // 50), wrong
    assert notes == []
    assert metric(page, "kvroute_map_demotions_total") == 0


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("mistral_window", "window"), ("mamba", "state"), ("qwen3_next_unit", "within blocks")],
)
async def test_a_map_that_shows_no_hits_is_not_used_and_its_note_names_the_kinds(
    serve, worker, name: str, kinds: str
) -> None:
    recording = read(name)
    engine = await worker(recording.engine["block_size"])
    running = await serve("--worker", engine.url, "--strategy", "kvaware")
    results, _, notes = await replayed(recording, engine, running.url)
    assert [note for note in notes if "kinds" in note and kinds in note], notes
    found = sum(found for _, found in results)
    shown = sum(min(predicted, found) for predicted, found in results)
    assert shown >= 0.7 * found


def with_kind(recording: Recording, kind: bytes, other: bytes) -> tuple[Recording, int]:
    """The recording with another name of a kind, and how many blocks its groups stored and removed."""
    assert len(kind) == len(other)
    groups, blocks, steps = set[int](), 0, list[Step]()
    for step in recording.steps:
        for frames in step.messages:
            for event in msgspec.msgpack.decode(frames[2])[1]:
                if event.get("kv_cache_spec_kind") == kind.decode():
                    groups.add(event["group_idx"])
                blocks += len(event["block_hashes"]) if event["group_idx"] in groups else 0
        messages = tuple((*frames[:2], frames[2].replace(kind, other)) for frames in step.messages)
        steps.append(replace(step, messages=messages))
    return replace(recording, steps=tuple(steps)), blocks


async def test_blocks_of_a_kind_that_nobody_knows_are_counted(serve, worker) -> None:
    recording, blocks = with_kind(read("qwen3_next"), b"mamba", b"novel")
    engine = await worker(recording.engine["block_size"])
    running = await serve("--worker", engine.url, "--strategy", "kvaware")
    _, page, _ = await replayed(recording, engine, running.url)
    assert metric(page, "kvroute_map_passed_over_blocks_total") == blocks > 0


async def test_the_map_of_a_worker_that_finds_nothing_of_it_counts_less_and_a_metric_shows_it(
    serve, worker
) -> None:
    """By the groups whose kinds are known the prompt is there."""
    recording, _ = with_kind(read("qwen3_next"), b"mamba", b"novel")
    engine = await worker(recording.engine["block_size"])
    running = await serve("--worker", engine.url, "--strategy", "kvaware")
    (asked,) = recording.steps[0].requests
    body = {"model": MODEL, "prompt": list(asked.prompt), "max_tokens": 1}
    await replayed(replace(recording, steps=recording.steps[:1]), engine, running.url)
    engine.step = None
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:
        for _ in range(6):
            await client.post("/v1/completions", json=body)
        page = (await client.get("/metrics")).text
        explained = (await client.post("/v1/route/explain", json={**body, "path": "/v1/completions"})).json()
    shares = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("kvroute_match_share{")]
    assert [(value, 'source="map"' in name) for name, value in shares] == [("0.0", True)]
    (candidate,) = explained["ranking"]
    assert candidate["matched_tokens"] > 0
    assert candidate["counted_tokens"] == 0


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
async def test_a_hot_prompt_that_no_worker_can_use_spreads_over_all(serve, worker, strategy: str) -> None:
    engines = [await worker(544) for _ in range(4)]
    urls = [argument for engine in engines for argument in ("--worker", engine.url)]
    running = await serve(*urls, "--strategy", strategy)
    body = {"model": MODEL, "prompt": [number % 997 for number in range(6000)], "max_tokens": 1}
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:
        await until(lambda: is_ready(client), within_s=60)
        for _ in range(30):  # until workers have shown that they find nothing
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        before = Counter({engine.url: engine.served for engine in engines})
        for _ in range(10):
            await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
        page = (await client.get("/metrics")).text
    counts = [engine.served - before[engine.url] for engine in engines]
    assert min(counts) >= 10, counts
    shares = [line for line in page.splitlines() if line.startswith("kvroute_match_share{")]
    assert {float(line.rsplit(" ", 1)[1]) for line in shares} == {0.0}, shares


async def test_a_chats_answer_counts_as_held_when_the_next_turn_shows_it(serve, worker) -> None:
    engine = await worker(16)
    running = await serve("--worker", engine.url, "--strategy", "prefixaware")
    first = list(range(100, 100 + 160))
    answer = tuple(range(5000, 5040))
    engine.step = Step((Asked(tuple(first), answer, 0),), ())
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:
        await client.post("/v1/completions", json={"model": MODEL, "prompt": first, "max_tokens": 40})
        engine.step = None
        turn = {"model": MODEL, "prompt": [*first, *answer, *range(60)], "max_tokens": 1}
        reply = await client.post("/v1/completions", json=turn)
    # Of the 200 tokens of prompt and answer the engine has all but the last one: 12 blocks of 16.
    assert int(reply.headers["x-kvroute-hit-tokens"]) == 192


@pytest.mark.parametrize(("tokens", "is_silent"), [(500, False), (700, True)])
async def test_a_worker_is_silent_only_if_a_whole_block_of_its_own_size_was_computed(
    serve, worker, processes, tokens: int, is_silent: bool
) -> None:
    """The note, the log line and the doctor say what to do."""
    engine, key = await worker(544), ("--set", "admin.api_key=the-key-of-the-tests")
    running = await serve(
        *("--worker", engine.url, "--strategy", "kvaware", "--set", "kv_events.silent_s=0.01"), *key
    )
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:
        await until(lambda: is_ready(client), within_s=60)
        for number in range(12):
            prompt = [number, *range(tokens - 1)]
            await client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
        notes = (await client.get("/ready")).json()["notes"]
    if not is_silent:
        assert notes == []
        return
    assert [each for each in notes if ": silent (" in each and "enable_kv_cache_events" in each], notes
    assert "enable_kv_cache_events" in await running.logged("its map is not used: silent")
    doctor = await spawn(processes, "doctor", "--url", running.url, "--no-probe", *key, stdout=True)
    assert doctor.process.stdout is not None
    printed = (await doctor.process.stdout.read()).decode()
    assert await doctor.ended() == 0, doctor.log
    assert "enable_kv_cache_events" in printed, printed
