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

from kvroute.blocks.chunks import ChunkScheme, chunk_keys, chunk_names
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


class ReportingServer:
    """A server that reports as LMCache 0.5.6 does (v1/mp_coordinator/registrar.py, cache_events.py).

    It registers with the first `beat`, and with the next one after a 404; each registration is followed by
    its capacity. A batch that is not accepted is lost. Mutable: `coordinator` is where its URL leads now.
    """

    def __init__(self, name: str, coordinator: str, chunk_tokens: int) -> None:
        self.coordinator = coordinator
        self.lost = 0
        self._name, self._scheme = name, ChunkScheme(chunk_tokens=chunk_tokens)
        self._seq = 0
        self._is_registered = False

    async def beat(self) -> None:
        """One interval of its heartbeats."""
        async with self._client() as client:
            if self._is_registered:
                answer = await client.put(f"/instances/{self._name}/heartbeat")
                self._is_registered = answer.status_code != 404
                return
            # Nothing listens at the port: `/status` is not needed.
            instance = {"instance_id": self._name, "ip": "127.0.0.1", "http_port": 9}
            assert (await client.post("/instances", json=instance)).status_code == 200
        self._is_registered = True
        await self._report("config", ())

    async def store(self, tokens: Sequence[int]) -> None:
        await self._report("store", tokens)

    async def delete(self, tokens: Sequence[int]) -> None:
        await self._report("delete", tokens)

    async def _report(self, kind: str, tokens: Sequence[int]) -> None:
        self._seq += 1
        size = self._scheme.chunk_tokens
        entries = [
            {
                "key": {"chunk_hash_hex": name.hex(), "model_name": "/models/m", "kv_rank": 0x01000100},
                "token_ids": list(tokens[place * size : (place + 1) * size]),
            }
            for place, name in enumerate(chunk_names(tokens, self._scheme))
        ]
        batch = {
            "instance_id": self._name,
            "incarnation": 1000,
            "seq": self._seq,
            "event_type": kind,
            "tier": "l1",
            "backend": "dram",
            "entries": entries,
        }
        try:
            async with self._client() as client:
                answer = await client.post("/events", json={"batches": [batch]})
            self.lost += answer.status_code != 200
        except httpx.TransportError:
            self.lost += 1

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://{self.coordinator}", trust_env=False)


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
