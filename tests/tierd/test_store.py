"""The disk level under a small memory, and everything at once over real sockets."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from tests.tierd.conftest import Client, Node, StartNode

from kvroute.tierd.pool import PAGE_BYTES


def content(number: int, pages: int = 1) -> bytes:
    return bytes([number % 256]) * (pages * PAGE_BYTES)


async def test_entries_evicted_from_memory_come_back_from_the_disk(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = await start_node(pages=4, disk_dir=tmp_path, disk_gb=0.01)
    for number in range(20):
        assert await node.client.put(str(number), content(number)) == 200

    found = [await node.client.get(str(number), wait_ms=10_000) for number in range(20)]

    assert found == [content(number) for number in range(20)]
    assert node.running.store.pool.lost_entries == 0
    assert await node.client.metric('kvroute_tierd_disk_files_total{event="read"}') >= 16


async def test_an_entry_on_the_disk_exists(start_node: StartNode, tmp_path: Path) -> None:
    """It may be stored again all the same: in memory it is faster."""
    node = await start_node(pages=2, disk_dir=tmp_path, disk_gb=0.01)
    for number in range(4):
        await node.client.put(str(number), content(number))

    assert await node.client.put("0", content(0)) == 200
    assert await node.client.get("0", wait_ms=10_000) == content(0)


async def test_the_disk_survives_the_daemon(start_node: StartNode, tmp_path: Path) -> None:
    first = await start_node(pages=4, disk_dir=tmp_path, disk_gb=0.01)
    for number in range(12):
        await first.client.put(str(number), content(number))

    second = await start_node(pages=4, disk_dir=tmp_path, disk_gb=0.01)

    assert await second.client.get("0", wait_ms=10_000) == content(0)


async def test_a_disk_that_fails_loses_entries_and_no_request(start_node: StartNode, tmp_path: Path) -> None:
    folder = tmp_path / "l3"
    node = await start_node(pages=4, disk_dir=folder, disk_gb=0.01)
    folder.rmdir()

    for number in range(12):
        assert await node.client.put(str(number), content(number)) == 200

    assert await node.client.get("11") == content(11)
    assert await node.client.get("0", wait_ms=10_000) is None
    assert node.running.store.counts.disk["write_failed"] > 0
    assert await node.client.metric("kvroute_tierd_lost_total") == 8


async def test_a_disk_that_is_slow_loses_entries_after_a_while(start_node: StartNode, tmp_path: Path) -> None:
    node = await start_node(pages=4, disk_dir=tmp_path, disk_gb=0.01, room_timeout_s=0)
    store = node.running.store
    assert store.disk is not None
    blocked = asyncio.Event()

    async def never(*_: object) -> bool:
        await blocked.wait()
        return False

    store.disk.write = never  # type: ignore[method-assign]

    for number in range(12):
        assert await node.client.put(str(number), content(number)) == 200

    assert store.pool.lost_entries > 0
    blocked.set()


async def test_memory_full_of_leases_is_refused_without_waiting_for_the_disk(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = await start_node(pages=2, disk_dir=tmp_path, disk_gb=0.01, room_timeout_s=1000)
    for number in range(2):
        await node.client.put(str(number), content(number))
        await node.client.lease(str(number))

    assert await node.client.put("2", content(2)) == 507


class Reader:
    """Stores and reads entries at random and checks every byte. Mutable: `leased` lists its leases."""

    def __init__(self, client: Client, seed: int, entries: int) -> None:
        self._client = client
        self._random = random.Random(seed)
        self._entries = entries
        self.hits = 0

    async def work(self, steps: int) -> None:
        leased: list[tuple[object, bytes]] = []
        for _ in range(steps):
            number = self._random.randrange(self._entries)
            data = content(number, 1 + number % 5)[: -1 - number]
            if self._random.random() < 0.5:
                assert await self._client.put(str(number), data) in (200, 409, 507)
            else:
                lease = await self._client.lease(str(number), wait_ms=self._random.choice([0, 200]))
                if lease is not None:
                    self.hits += 1
                    leased.append((lease, data))
            for lease, expected in leased:
                assert self._client.read(lease) == expected
            while len(leased) > self._random.randrange(4):
                await self._client.release(leased.pop(self._random.randrange(len(leased)))[0])
        for lease, _ in leased:
            await self._client.release(lease)


async def hammer(*nodes: Node, steps: int = 60) -> int:
    """Hits of several clients at once; at the end nothing may be held."""
    readers = [Reader(node.client, seed, 40) for seed, node in enumerate(nodes * 4)]
    await asyncio.gather(*(reader.work(steps) for reader in readers))
    for node in nodes:
        pool = node.running.store.pool
        assert pool.leases == {}
        assert node.running.store.incoming_count == 0
        assert pool.space.free_bytes + pool.evictable_bytes == pool.space.size_bytes
    return sum(reader.hits for reader in readers)


async def test_no_byte_is_wrong_under_many_clients(start_node: StartNode) -> None:
    assert await hammer(await start_node(pages=24)) > 0


async def test_no_byte_is_wrong_with_a_disk_and_a_peer(start_node: StartNode, tmp_path: Path) -> None:
    far = await start_node(pages=24, disk_dir=tmp_path, disk_gb=0.0005)
    near = await start_node(pages=24, peers={"urls": [far.url], "answer_timeout_s": 10})

    assert await hammer(far, near, steps=25) > 0
    assert near.running.store.counts.peer_fetches["fetched"] > 0
