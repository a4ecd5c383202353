"""Daemons in this process, with real sockets and real shared memory of their own."""

from __future__ import annotations

import asyncio
import itertools
import json
import mmap
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.clock import Clock, SystemClock
from kvroute.tierd.daemon import RunningTierd, run_tierd
from kvroute.tierd.options import GB, TierdOptions
from kvroute.tierd.pool import PAGE_BYTES
from kvroute.tierd.segment import GuardFile, SharedSegment

_NUMBERS = itertools.count()


def unused_name() -> str:
    """Of a shared memory segment."""
    return f"kvroute_test_{os.getpid()}_{next(_NUMBERS)}"


def remove_files(memory: str) -> None:
    """What a daemon leaves that was killed, or that ended before its leases did."""
    for path in (memory, f".{memory}.kept", f".{memory}.guard"):
        (Path("/dev/shm") / path).unlink(missing_ok=True)


def crash(segment: SharedSegment, guard: GuardFile) -> None:
    """Do what the kernel does with a segment and its guard when the daemon is killed."""
    # Private members: no method leaves the files as a killed process leaves them.
    segment.memory.release()
    segment._mapped.close()
    os.close(segment._file)
    guard._mapped.close()
    os.close(guard._file)


class Client:
    """Speaks to a daemon as LMCache does: HTTP, and the segment mapped read-only."""

    def __init__(self, url: str, memory: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=20, trust_env=False)
        self._path = Path("/dev/shm") / memory

    async def put(self, key: str, data: bytes, bucket: str = "b") -> int:
        """The status."""
        return (await self.http.put(f"/v1/kv/{bucket}/{key}", content=data)).status_code

    async def lease(self, key: str, *, wait_ms: float = 0, ttl_s: float = 30, bucket: str = "b") -> Any:
        """The lease, or None."""
        params = {"timeout_ms": wait_ms, "ttl_s": ttl_s}
        answer = await self.http.post(f"/v1/kv/{bucket}/{key}/leases", params=params)
        if answer.status_code != 200:
            assert answer.status_code == 504
            return None
        assert answer.headers["content-type"] == "application/json"
        return answer.json()

    async def release(self, lease: Any) -> bool:
        answer = await self.http.post(f"/v1/leases/{lease['id']}/release")
        assert answer.status_code == 200
        released: bool = answer.json()["released"]
        return released

    def read(self, lease: Any) -> bytes:
        """The leased bytes."""
        with open(self._path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            return b"".join(
                mapped[each["offset"] : each["offset"] + each["len"]] for each in lease["offsets"]
            )

    async def get(self, key: str, **options: Any) -> bytes | None:
        """Lease, read, release."""
        lease = await self.lease(key, **options)
        if lease is None:
            return None
        data = self.read(lease)
        assert await self.release(lease)
        return data

    async def health(self) -> Any:
        return json.loads((await self.http.get("/health")).text)

    async def metric(self, name: str) -> float:
        """The sample that is called so, labels included; 0 when there is none."""
        for line in (await self.http.get("/metrics")).text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


class Node:
    """A running daemon and a client of it."""

    def __init__(self, running: RunningTierd, memory: str) -> None:
        self.running = running
        self.memory = memory
        self.url = running.url
        self.client = Client(running.url, memory)


StartNode = Callable[..., Awaitable[Node]]


@pytest.fixture
async def start_node() -> AsyncIterator[StartNode]:
    """`(pages=..., **options)` -> a daemon whose memory holds that many pages; ended with the test."""
    async with asyncio.timeout(60), AsyncExitStack() as stack:

        async def start(*, pages: int = 16, clock: Clock | None = None, **values: Any) -> Node:
            memory = values.pop("shared_memory_name", None) or unused_name()
            options = TierdOptions.model_validate(
                {"port": 0, "shared_memory_name": memory, "size_gb": pages * PAGE_BYTES / GB, **values}
            )
            stack.callback(remove_files, memory)
            running = await stack.enter_async_context(run_tierd(options, clock or SystemClock()))
            node = Node(running, memory)
            stack.push_async_callback(node.client.http.aclose)
            return node

        yield start


@pytest.fixture
async def node(start_node: StartNode) -> Node:
    """A daemon of 16 pages."""
    return await start_node()


@pytest.fixture
async def client(node: Node) -> Client:
    return node.client


@pytest.fixture
def memory_name() -> Iterator[str]:
    """A name whose files are removed after the test."""
    name = unused_name()
    yield name
    remove_files(name)
