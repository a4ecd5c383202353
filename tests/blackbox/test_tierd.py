"""`kvroute tierd` and a client that maps its shared memory once, as LMCache's in-process connector does."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.blackbox.conftest import START_S, Process, spawn
from tests.support.waiting import until

SHARED = Path("/dev/shm")
MB = 1 << 20
ENTRIES = 32
ENTRY_BYTES = 64 << 10


class Daemon:
    """A daemon that is ready, and HTTP to it."""

    def __init__(self, process: Process, memory: str) -> None:
        self.process = process
        self.memory = memory
        self.http = httpx.AsyncClient(base_url=process.url, timeout=30, trust_env=False)

    async def put(self, key: str, data: bytes) -> int:
        return (await self.http.put(f"/v1/kv/lmcache/{key}", content=data)).status_code

    async def lease(self, key: str, ttl_s: float = 30) -> Any:
        params = {"timeout_ms": 1000, "ttl_s": ttl_s}
        answer = await self.http.post(f"/v1/kv/lmcache/{key}/leases", params=params)
        return answer.json() if answer.status_code == 200 else None

    async def read(self, key: str, mapping: mmap.mmap) -> bytes | None:
        """Through a mapping: None for a miss, which an offset outside of the mapping is for LMCache."""
        lease = await self.lease(key)
        if lease is None:
            return None
        pieces = [(each["offset"], each["len"]) for each in lease["offsets"]]
        data = None
        if all(offset + length <= len(mapping) for offset, length in pieces):
            data = b"".join(mapping[offset : offset + length] for offset, length in pieces)
        await self.http.post(f"/v1/leases/{lease['id']}/release")
        return data

    async def metric(self, name: str) -> float:
        page = (await self.http.get("/metrics")).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    async def stop(self, number: int) -> None:
        await self.http.aclose()
        await self.process.stop(number)


Start = Callable[..., Awaitable[Daemon]]


@pytest.fixture
def memory() -> Iterator[str]:
    """The name of a segment whose files are removed after the test."""
    name = f"kvroute_blackbox_{os.getpid()}_{os.urandom(4).hex()}"
    yield name
    for path in files(name):
        path.unlink(missing_ok=True)


@pytest.fixture
async def start(processes: AsyncExitStack, memory: str) -> AsyncIterator[Start]:
    """`(size_mb)` -> a daemon on a free port, with the test's segment."""
    started: list[Daemon] = []

    async def run(size_mb: float, *flags: str) -> Daemon:
        argv = ["tierd", "--port", "0", "--size-gb", str(size_mb / 1024), "--shared-memory-name", memory]
        process = await spawn(processes, *argv, *flags, stdout=True)
        assert process.process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await process.process.stdout.readline()).decode()
        assert "ready at" in line, process.log
        process.url = line.split("ready at ")[1].split()[0]
        started.append(Daemon(process, memory))
        return started[-1]

    yield run
    for daemon in started:
        await daemon.http.aclose()


def files(memory: str) -> list[Path]:
    return [path for path in SHARED.iterdir() if memory in path.name]


def map_once(memory: str) -> mmap.mmap:
    with open(SHARED / memory, "r+b") as file:
        return mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)


async def fill(daemon: Daemon, generation: str) -> dict[str, bytes]:
    """Store entries whose bytes are of no other entry; key -> bytes."""
    stored = {}
    for number in range(ENTRIES):
        key = f"{generation}-{number}"
        stored[key] = (f"{key}|".encode() * ENTRY_BYTES)[:ENTRY_BYTES]
        assert await daemon.put(key, stored[key]) == 200
    return stored


async def reads(daemon: Daemon, stored: dict[str, bytes], mapping: mmap.mmap) -> dict[str, int]:
    """How many entries a mapping gives right, wrong, or not at all."""
    found = {"right": 0, "missed": 0, "wrong": 0}
    for key, data in stored.items():
        seen = await daemon.read(key, mapping)
        found["missed" if seen is None else "right" if seen == data else "wrong"] += 1
    return found


ALL_RIGHT = {"right": ENTRIES, "missed": 0, "wrong": 0}


@pytest.mark.parametrize("size_mb", [3, 8])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_an_old_mapping_reads_the_entries_of_a_restarted_daemon(
    start: Start, memory: str, number: int, size_mb: int
) -> None:
    daemon = await start(4)
    stored = await fill(daemon, "first")
    mapping = map_once(memory)
    assert await reads(daemon, stored, mapping) == ALL_RIGHT
    await daemon.stop(number)

    again = await start(size_mb)

    assert await reads(again, await fill(again, "second"), mapping) == ALL_RIGHT
    mapping.close()


async def test_a_name_that_python_has_removed_is_found_again(start: Start, memory: str) -> None:
    """Its resource tracker unlinks what a process of Python before 3.13 has attached."""
    daemon = await start(4)
    await fill(daemon, "first")
    mapping = map_once(memory)
    await daemon.stop(signal.SIGKILL)
    (SHARED / memory).unlink()

    again = await start(4)

    assert await reads(again, await fill(again, "second"), mapping) == ALL_RIGHT
    mapping.close()


async def test_an_old_mapping_of_a_lost_inode_reads_nothing_wrong(start: Start, memory: str) -> None:
    """A user has emptied /dev/shm. New mappings are right; old ones miss.

    Half a minute: the daemon waits for leases that it cannot know.
    """
    daemon = await start(4)
    await fill(daemon, "first")
    mapping = map_once(memory)
    await daemon.stop(signal.SIGKILL)
    for path in files(memory):
        path.unlink()

    again = await start(4)

    second = await fill(again, "second")
    assert (await reads(again, second, mapping))["wrong"] == 0
    new = map_once(memory)
    assert await reads(again, second, new) == ALL_RIGHT
    new.close()
    mapping.close()


async def test_a_daemon_that_has_ended_holds_no_memory(start: Start, memory: str) -> None:
    daemon = await start(4)
    await fill(daemon, "first")

    await daemon.stop(signal.SIGTERM)

    assert sum(path.stat().st_blocks for path in files(memory) if path.stat().st_size > MB) == 0


async def test_refused_entries_count_as_lost(start: Start) -> None:
    daemon = await start(1)
    for number in range(4):
        assert await daemon.put(str(number), bytes(256 << 10)) == 200
        assert await daemon.lease(str(number)) is not None

    assert await daemon.put("no room", bytes(256 << 10)) == 507
    assert await daemon.put("too large", bytes(2 * MB)) == 413

    assert await daemon.metric("kvroute_tierd_lost_total") == 2


async def test_a_stalled_put_releases_its_memory(start: Start) -> None:
    daemon = await start(8)
    await daemon.put("kept", bytes(MB))
    host, port = daemon.process.address
    _, stopped = await asyncio.open_connection(host, port)
    stopped.write(b"PUT /v1/kv/lmcache/stopped HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\nx" % (7 * MB))
    await stopped.drain()
    await until(lambda: daemon.metric("kvroute_tierd_arriving"), within_s=START_S)

    assert await daemon.put("other", bytes(5 * MB)) == 200

    assert await daemon.lease("kept") is not None
    stopped.close()


async def test_senders_that_trickle_are_cut(start: Start) -> None:
    """A byte now and then must not hold memory for ever."""
    daemon = await start(8)
    host, port = daemon.process.address
    reader, slow = await asyncio.open_connection(host, port)
    slow.write(b"PUT /v1/kv/lmcache/slow HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (7 * MB))

    async def trickle() -> None:
        while True:
            slow.write(b"x")
            await slow.drain()
            await asyncio.sleep(0.2)

    sending = asyncio.create_task(trickle())
    try:
        async with asyncio.timeout(START_S):
            assert await reader.read() == b""
    except ConnectionError:
        pass  # a reset, because bytes were in flight
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    async def nothing_arrives() -> bool:
        return await daemon.metric("kvroute_tierd_arriving") == 0

    await until(nothing_arrives, within_s=START_S)
    slow.close()
