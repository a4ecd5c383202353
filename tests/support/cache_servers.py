"""LMCache as the gateway and the doctor see it: servers that report to the coordinator, and an instance in
an engine that reports to the controller."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import zmq
import zmq.asyncio
from tests.support.sockets import tcp_server

from kvroute.blocks.chunks import ChunkScheme, chunk_keys
from kvroute.wire import lmcache_controller as wire


class CacheServers:
    """One server for each id; `chunks` are their chunk sizes. `degraded`: /healthcheck fails."""

    def __init__(self, *ids: str, chunks: Sequence[int] = (), degraded: bool = False) -> None:
        self.degraded = degraded
        self._ids = ids
        self._chunks = chunks or [256] * len(ids)
        self._ports: list[int] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for chunk in self._chunks:
                self._ports.append(await stack.enter_async_context(tcp_server(self._serve(chunk))))
            yield

    def _serve(self, chunk: int):
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            status, body = 200, b"{}"
            if head.startswith(b"GET /status "):
                manager = {"total_object_count": 0, "staging_object_count": 0}
                body = json.dumps(
                    {"chunk_size": chunk, "storage_manager": {"l1_managers": {"_default": manager}}}
                ).encode()
            elif head.startswith(b"GET /healthcheck ") and self.degraded:
                status = 503
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body))
                + body
            )

        return serve

    async def join(self, coordinator: str) -> None:
        """Register each server, and report the capacity of its empty L1 as LMCache does first."""
        async with httpx.AsyncClient(base_url=f"http://{coordinator}", trust_env=False) as client:
            for name, port in zip(self._ids, self._ports, strict=True):
                instance = {"instance_id": name, "ip": "127.0.0.1", "http_port": port}
                assert (await client.post("/instances", json=instance)).status_code == 200
                batch = {
                    "instance_id": name,
                    "incarnation": 1000,
                    "seq": 1,
                    "event_type": "config",
                    "tier": "l1",
                    "backend": "dram",
                    "entries": [],
                    "capacity_bytes": 1,
                    "capacity_revision": 1,
                }
                assert (await client.post("/events", json={"batches": [batch]})).json()["applied"] == 1


class CacheInstance:
    """An in-process LMCache that reports chunks under the hashes of `scheme` to a controller's sockets."""

    def __init__(self, name: str, scheme: ChunkScheme) -> None:
        self._sender = {"instance_id": name, "worker_id": 0}
        self._scheme = scheme
        self._sent = 0

    @asynccontextmanager
    async def reporting_to(self, pull: str, reply: str) -> AsyncIterator[None]:
        context = zmq.asyncio.Context()
        self._push, requests = context.socket(zmq.PUSH), context.socket(zmq.DEALER)
        try:
            self._push.connect(f"tcp://{pull}")
            requests.connect(f"tcp://{reply}")
            await requests.send_multipart([b"", wire.encode(wire.Register(**self._sender))])
            await requests.recv_multipart()
            yield
        finally:
            context.destroy(linger=0)

    async def store(self, tokens: Sequence[int]) -> None:
        """Report the chunks of a computed prompt."""
        operations = [
            wire.Operation("admit", key, self._sent + place)
            for place, key in enumerate(chunk_keys(tokens, self._scheme))
        ]
        self._sent += len(operations)
        message = wire.KvOperations(**self._sender, location="LocalCPUBackend", operations=operations)
        await self._push.send_multipart([wire.encode(message)])
