"""A worker with `/invocations` as in vLLM 0.32: the header names the adapter, sessions are its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.sockets import tcp_server

ADAPTER = "x-amzn-sagemaker-adapter-identifier"
SESSION = "x-amzn-sagemaker-session-id"


@dataclass
class Computed:
    """A request that was computed: for which model, and what came in."""

    path: str
    model: str
    headers: list[tuple[str, str]]
    body: dict[str, Any]


@dataclass
class SageMakerWorker:
    """Mutable: `computed` and `sessions` change with the requests."""

    name: str
    base: str = "tiny"
    adapters: tuple[str, ...] = ()
    url: str = ""
    computed: list[Computed] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")[:-2]
                method, target, _ = first.split(" ")
                headers = [
                    (name.lower(), value.strip()) for name, _, value in (one.partition(":") for one in lines)
                ]
                known = dict(reversed(headers))  # of equal names the first one counts
                body = await reader.readexactly(int(known.get("content-length", "0")))
                status, more, answer = self._answer(method, target, headers, known, body)
                extra = "".join(f"{name}: {value}\r\n" for name, value in more.items()).encode()
                writer.write(
                    b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
                    % (status, extra, len(answer), answer)
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(
        self, method: str, target: str, headers: list[tuple[str, str]], known: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if method == "GET" and target == "/v1/models":
            cards = [{"id": self.base, "object": "model", "root": "/m/base", "parent": None}]
            cards += [
                {"id": name, "object": "model", "root": f"/m/{name}", "parent": self.base}
                for name in self.adapters
            ]
            return 200, {}, json.dumps({"object": "list", "data": cards}).encode()
        if method == "GET":
            return (200, {}, b"") if target in ("/health", "/metrics") else (404, {}, b"{}")
        fields = json.loads(body)
        if target == "/invocations":
            session = known.get(SESSION)
            if fields.get("requestType") == "NEW_SESSION":
                session = f"{self.name}-{len(self.sessions)}"
                self.sessions.add(session)
                ends = "2030-01-01T00:00:00Z"
                return 200, {"x-amzn-sagemaker-new-session-id": f"{session}; Expires={ends}"}, b"created"
            if session is not None and session not in self.sessions:
                return 400, {}, b'{"error": {"message": "Bad request: session not found"}}'
            if fields.get("requestType") == "CLOSE":
                self.sessions.discard(session or "")
                return 200, {"x-amzn-sagemaker-closed-session-id": session or ""}, b"closed"
            fields["model"] = known.get(ADAPTER)
        model = fields.get("model") or self.base
        if model != self.base and model not in self.adapters:
            return 404, {}, b'{"error": {"message": "The model does not exist."}}'
        self.computed.append(Computed(target, model, headers, json.loads(body)))
        tokens = len(body) // 4
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        return 200, {}, json.dumps({"id": "x", "model": model, "choices": [], "usage": usage}).encode()


@asynccontextmanager
async def sagemaker_worker(
    name: str, base: str = "tiny", adapters: tuple[str, ...] = ()
) -> AsyncIterator[SageMakerWorker]:
    """A worker that serves while the block runs."""
    worker = SageMakerWorker(name, base, adapters)
    async with tcp_server(worker.serve) as port:
        worker.url = f"http://127.0.0.1:{port}"
        yield worker
