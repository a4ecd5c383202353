"""A small engine with data-parallel ranks and prefix caches, behind vLLM's HTTP interface."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from tests.support.sockets import tcp_server

MODEL = "m"
BLOCK_CHARACTERS = 64
"""Text in a block, and 16 tokens: a token is 4 characters."""
_TOKENS = BLOCK_CHARACTERS // 4
_COMPUTED = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/pooling")


@dataclass
class Received:
    """One request for the engine, and what it did with it."""

    path: str
    rank: int
    given_rank: str | None
    """The header `X-data-parallel-rank`."""
    cached_tokens: int


@dataclass
class FakeEngine:
    """An engine that remembers per rank which beginnings of prompts it has computed. Tests set the
    attributes.

    `seconds` is how long a request takes. A request without a rank goes to the rank with the fewest requests.
    """

    ranks: int = 1
    first_rank: int = 0
    """The label of the first rank: the server of one node counts its ranks from 0 in the header all the
    same."""
    caches: bool = True
    shows_caching: bool = True
    """Whether the metrics have the label `enable_prefix_caching`."""
    blocks: int = 4096
    seconds: float = 0.0
    has_dev_mode: bool = True
    url: str = ""
    start_time: float = 1_000_000.0
    sleeps: int = 0
    asleep: bool = False
    paused: bool = False
    """Requests hang while the engine is asleep or paused."""
    figures: str = ""
    """Further lines of the metrics."""
    received: list[Received] = field(default_factory=list)
    posts: list[str] = field(default_factory=list)
    """Targets of requests that change the engine's state."""
    _held: dict[int, set[str]] = field(default_factory=dict)
    _running: dict[int, int] = field(default_factory=dict)
    _turn: int = 0

    def clear(self) -> None:
        self._held.clear()

    def page(self) -> str:
        lines = [f"process_start_time_seconds {self.start_time}"]
        for rank in range(self.ranks):
            labels = f'block_size="16",engine="{self.first_rank + rank}",num_gpu_blocks="{self.blocks}"'
            if self.shows_caching:
                labels += f',enable_prefix_caching="{self.caches}"'
            lines.append(f"vllm:cache_config_info{{{labels}}} 1.0")
            awake = f'engine="{rank}",model_name="{MODEL}",sleep_state="awake"'
            lines.append(f"vllm:engine_sleep_state{{{awake}}} {float(not self.asleep)}")
        if self.sleeps:
            lines.append(
                f'vllm:sleep_mode_operation_duration_seconds_count{{operation="sleep"}} {float(self.sleeps)}'
            )
        return "\n".join(lines) + "\n" + self.figures

    async def compute(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
        given = headers.get("x-data-parallel-rank")
        generates = path in ("/v1/chat/completions", "/v1/completions")
        if given is not None and given.isdigit() and generates:
            rank = int(given)
        else:
            order = [(self._turn + number) % self.ranks for number in range(self.ranks)]
            self._turn += 1
            rank = min(order, key=lambda each: self._running.get(each, 0))
        text = (
            json.dumps(body["messages"]) if "messages" in body else str(body.get("prompt", body.get("input")))
        )
        blocks = [text[: end + BLOCK_CHARACTERS] for end in range(0, len(text), BLOCK_CHARACTERS)]
        held = self._held.setdefault(rank, set())
        found = 0
        skips = body.get("prompt_logprobs") is not None or bool(body.get("use_beam_search"))
        skips = skips or (bool(body.get("echo")) and body.get("logprobs") is not None)
        if self.caches and not skips:
            while found < len(blocks) - 1 and blocks[found] in held:
                found += 1
        held.update(blocks[:-1])
        self.received.append(Received(path, rank, given, found * _TOKENS))
        self._running[rank] = self._running.get(rank, 0) + 1
        try:
            await asyncio.sleep(self.seconds)
            while self.asleep or self.paused:
                await asyncio.sleep(0.02)
        finally:
            self._running[rank] -= 1
        tokens = len(text) // 4
        usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens + 1, "completion_tokens": 1}
        if generates:
            usage["prompt_tokens_details"] = {"cached_tokens": found * _TOKENS}
        return {"id": "x", "object": "list", "model": MODEL, "data": [], "choices": [], "usage": usage}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                (method, target, _), lines = head.split("\r\n", 1)[0].split(" "), head.split("\r\n")[1:-2]
                headers = {
                    name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                status, answer = await self._answer(method, target, headers, body)
                writer.write(
                    b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (status, len(answer), answer)
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        path, _, query = target.partition("?")
        if method == "GET" and path == "/v1/models":
            cards = [{"id": MODEL, "object": "model", "root": MODEL, "parent": None}]
            return 200, json.dumps({"object": "list", "data": cards}).encode()
        if method == "GET" and path == "/metrics":
            return 200, self.page().encode()
        if method == "GET" and self.has_dev_mode and path in ("/is_paused", "/is_sleeping"):
            value = self.paused or self.asleep if path == "/is_sleeping" else self.paused
            return 200, json.dumps({path[1:]: value}).encode()
        if method == "GET":
            return (200, b"") if path == "/health" else (404, b"{}")
        if self.has_dev_mode and re.fullmatch(r"/(reset_prefix_cache|sleep|wake_up|pause|resume)", path):
            self.posts.append(target)
            keeps = parse_qs(query).get("clear_cache") == ["false"] or parse_qs(query).get("level") == ["0"]
            if path != "/wake_up" and path != "/resume" and not keeps:
                self.clear()
            if path in ("/pause", "/resume"):
                self.paused = path == "/pause"
            if path in ("/sleep", "/wake_up"):
                self.asleep = path == "/sleep"
                self.sleeps += self.asleep
            return 200, b'{"success": true}'
        if path not in _COMPUTED:
            return 404, b"{}"
        if b"return_token_ids" in body:  # a sample of the gateway's, which has no tokenizer to compare here
            return 400, b'{"error": {"message": "return_token_ids is not known"}}'
        given = headers.get("x-data-parallel-rank", "")
        if given.isdigit() and int(given) >= self.ranks:
            return 400, b'{"error": {"message": "data_parallel_rank is out of range"}}'
        return 200, json.dumps(await self.compute(path, headers, json.loads(body))).encode()


@asynccontextmanager
async def fake_engine(**settings: Any) -> AsyncIterator[FakeEngine]:
    """An engine that serves while the block runs."""
    engine = FakeEngine(**settings)
    async with tcp_server(engine.serve) as port:
        engine.url = f"http://127.0.0.1:{port}"
        yield engine
