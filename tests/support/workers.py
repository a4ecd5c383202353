"""A worker that sends the bytes that a test sets."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.sockets import tcp_server

CARD = {"id": "m", "object": "model"}


class ScriptedWorker:
    """A healthy worker that lists the models `cards` and answers every other request under /v1 with `answer`.

    Mutable: tests set the attributes; `requests` collects the requests that `answer` answers, head and body.
    """

    def __init__(self, *cards: dict[str, Any]) -> None:
        self.cards = [*cards] or [CARD]
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
        self.requests: list[bytes] = []
        self.lists = 0
        """Requests for the list of models."""
        self.url = ""
        self.version = ""
        """The release of vLLM that `/version` names; empty: none."""
        self.may_answer = asyncio.Event()
        """The worker answers when it is set, as it is at first."""
        self.may_answer.set()
        self.may_pass_probes = asyncio.Event()
        """GET requests outside /v1 are answered when it is set, as it is at first."""
        self.may_pass_probes.set()
        self.rest = b""
        """The end of each answer, which is sent when `may_finish` is set."""
        self.may_finish = asyncio.Event()
        self.closes_after_answer = False
        self._writers: set[asyncio.StreamWriter] = set()
        self.refuses_posts = False
        """Whether the worker closes the connection when a POST comes."""

    @property
    def targets(self) -> list[bytes]:
        return [request.split(b" ", 2)[1] for request in self.requests]

    @property
    def bodies(self) -> list[bytes]:
        return [request.split(b"\r\n\r\n", 1)[1] for request in self.requests]

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the gateway's side has not accepted yet."""
        return sum(writer.transport.get_write_buffer_size() for writer in self._writers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._answer_requests(reader, writer)
        finally:
            self._writers.discard(writer)

    async def _answer_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
            body = await reader.readexactly(int(length[1])) if length else b""
            if b" /v1/models " in head:
                self.lists += 1
                models = json.dumps({"object": "list", "data": self.cards}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(models), models))
            elif self.version and head.startswith(b"GET /version "):
                version = json.dumps({"version": self.version}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(version), version))
            elif head.startswith(b"GET /") and not head.startswith(b"GET /v1/"):
                await self.may_pass_probes.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            elif self.refuses_posts and head.startswith(b"POST"):
                return
            else:
                self.requests.append(head + body)
                await self.may_answer.wait()
                writer.write(self.answer)
                await writer.drain()
                if self.rest:
                    await self.may_finish.wait()
                    writer.write(self.rest)
                    await writer.drain()
                if self.closes_after_answer:
                    return
            await writer.drain()


@asynccontextmanager
async def scripted_worker(
    *cards: dict[str, Any], tls: ssl.SSLContext | None = None
) -> AsyncIterator[ScriptedWorker]:
    """A worker that serves while the block runs, with `tls` over https."""
    worker = ScriptedWorker(*cards)
    async with tcp_server(worker.serve, tls=tls) as port:
        worker.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        yield worker
