"""LMCache servers as the coordinator and the doctor see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
from tests.support.sockets import tcp_server


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
